"""Stack tests run on the real server."""

from tests.command_fixtures import playground, tune
from tests.stack_fixtures import embedded, mlp, perf_analyzer

__all__ = ["embedded", "mlp", "perf_analyzer", "playground", "tune"]
