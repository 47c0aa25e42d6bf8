"""Triton model configurations: search space, problem, candidates, field paths, GPU placement."""
