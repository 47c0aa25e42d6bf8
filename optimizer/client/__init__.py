"""What is asked of a server, over gRPC or HTTP, with TLS or headers."""
