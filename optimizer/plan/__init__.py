"""Plans the number of replicas for a request rate, from measured runs and the simulated server."""
