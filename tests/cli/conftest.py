"""Command-line tests run ``tune`` as a process of its own."""

from tests.command_fixtures import called_tune, playground, tune

__all__ = ["called_tune", "playground", "tune"]
