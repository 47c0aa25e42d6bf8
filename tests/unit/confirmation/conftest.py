"""The problem of the drawn server, which the tests of the confirmation share."""

from __future__ import annotations

import pytest

from optimizer.config.problem import Problem
from tests.random_server import drawn_problem


@pytest.fixture
def problem() -> Problem:
    return drawn_problem()
