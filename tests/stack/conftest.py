"""Stack tests run on the real server."""

from tests.command_fixtures import playground, tune
from tests.podman import engine
from tests.stack_fixtures import embedded, mlp, perf_analyzer

__all__ = ["embedded", "engine", "mlp", "perf_analyzer", "playground", "tune"]
