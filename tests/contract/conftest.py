"""Contracts hold for the real server too."""

from tests.stack_fixtures import embedded, mlp, perf_analyzer

__all__ = ["embedded", "mlp", "perf_analyzer"]
