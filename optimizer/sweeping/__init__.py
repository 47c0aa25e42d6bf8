"""``tune sweep``: a given list of configurations, each measured at a given list of loads. Nothing is searched."""
