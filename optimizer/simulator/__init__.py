"""Models of a server's performance: simulators of dynamic and continuous batching, and a closed queueing network."""
