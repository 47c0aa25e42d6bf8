"""Command-line tests run ``tune`` as a process of its own."""

from tests.command_fixtures import forked_tune, playground, tune

__all__ = ["forked_tune", "playground", "tune"]
