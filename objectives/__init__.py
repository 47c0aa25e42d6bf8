"""Metrics, constraints (SLA), verdict statistics and the Pareto front. Pure functions without I/O."""
