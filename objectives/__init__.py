"""What is good: metrics, SLAs and the Pareto front. Pure; no I/O, no other package of the project."""
