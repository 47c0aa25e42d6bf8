"""Explains a run: what limits the throughput, what would help, and why the runner-up was not recommended."""
