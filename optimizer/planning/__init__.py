"""How many replicas a rate takes, from what runs measured and the simulated batcher."""
