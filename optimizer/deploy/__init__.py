"""Targets: where candidates are served. Embedded, local, docker and remote tritonservers."""
