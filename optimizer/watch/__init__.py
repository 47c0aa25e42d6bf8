"""Compares the metrics of servers in production with a finished run."""
