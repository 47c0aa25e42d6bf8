"""Command-line tests run ``tune`` as a process of its own, and start the installed program."""

import functools

import pytest

from tests.command_fixtures import Playground, Tune, called_tune, playground, run_tune

__all__ = ["called_tune", "playground"]


@pytest.fixture
def tune(playground: Playground) -> Tune:
    return functools.partial(run_tune, playground, forks=False)
