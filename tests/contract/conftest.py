"""Contracts hold for the real server too."""

from tests.podman import engine
from tests.stack_fixtures import embedded, mlp, mlp_requests, perf_analyzer

__all__ = ["embedded", "engine", "mlp", "mlp_requests", "perf_analyzer"]
