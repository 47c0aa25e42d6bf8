"""Trials on a Ray cluster: the driver asks, workers on its nodes deploy and measure, each on a share of its own."""
