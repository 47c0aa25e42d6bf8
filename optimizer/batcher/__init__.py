"""The dynamic batcher without a server: what a configuration would do under a load, computed in milliseconds."""
