"""Imports and compilation that all runs share; the fork server loads this module first."""

from optimizer.cli import run
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.results import terminal_summary
from optimizer.search import make_searcher
from optimizer.study import tuning_run
from tests import recorded_process
from tests.conftest import known_problem, measure_known_server

__all__ = ["recorded_process", "run", "terminal_summary", "tuning_run"]

_searcher = make_searcher("simulated", known_problem())
for _number, _candidate in enumerate((Candidate(1), Candidate(64, True))):
    _seen = tuple((LoadPoint(1, c), measure_known_server(_candidate, c, 1)) for c in (1, 8))
    _searcher.observe(Trial(_number, _candidate, _seen))
    _searcher.suggest()
