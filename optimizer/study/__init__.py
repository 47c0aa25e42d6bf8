"""One tuning run: environment, task, search, confirmation; sweeps, batches and clusters."""
