"""The project's own gRPC load client: an open loop with planned send times, and a closed loop."""
