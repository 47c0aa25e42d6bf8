"""A run as a notebook shows it: tables, plots, the answer."""
