"""Stack tests run on the real server."""

from tests.command_fixtures import called_tune, sandbox, tune
from tests.podman import engine
from tests.stack_fixtures import embedded, mlp, mlp_requests, perf_analyzer, random_requests, sleeper

__all__ = [
    "called_tune",
    "embedded",
    "engine",
    "mlp",
    "mlp_requests",
    "perf_analyzer",
    "random_requests",
    "sandbox",
    "sleeper",
    "tune",
]
