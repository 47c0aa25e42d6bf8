"""Modules that the benchmarks import; the commands are in the folder above."""
