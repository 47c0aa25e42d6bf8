"""Stack tests run on the real server."""

from tests.command_fixtures import called_tune, sandbox, tune
from tests.podman import engine
from tests.stack_fixtures import embedded, mlp, perf_analyzer, sleeper

__all__ = ["called_tune", "embedded", "engine", "mlp", "perf_analyzer", "sandbox", "sleeper", "tune"]
