"""Simulation of Triton's dynamic batcher: predicts the performance of a configuration in milliseconds."""
