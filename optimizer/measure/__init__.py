"""Measurement of a deployed candidate: Triton clients, load generators, load search and output checks."""
