"""Command-line tests run ``tune`` as a process of its own, and start the installed program."""

import functools

import pytest

from tests.command_fixtures import Sandbox, Tune, called_tune, run_tune, sandbox

__all__ = ["called_tune", "sandbox"]


@pytest.fixture
def tune(sandbox: Sandbox) -> Tune:
    return functools.partial(run_tune, sandbox, forks=False)
