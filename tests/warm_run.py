"""Imports and compilation that runs on recorded tables share; the fork server loads this module first."""

from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.search import make_searcher
from tests import recorded_run
from tests.conftest import known_problem, known_server

__all__ = ["recorded_run"]

_searcher = make_searcher("simulated", known_problem())
for _number, _candidate in enumerate((Candidate(1), Candidate(64, True))):
    _seen = tuple((LoadPoint(1, c), known_server(_candidate, c, 1)) for c in (1, 8))
    _searcher.observe(Trial(_number, _candidate, _seen))
    _searcher.suggest()
