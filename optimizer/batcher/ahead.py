"""Compiling the simulator before it is needed."""

from __future__ import annotations

from collections.abc import Callable

from optimizer.batcher.simulator import ClosedLoop, ServiceTimes, simulate
from optimizer.trial import Candidate


def compile_ahead(say: Callable[[str], None] = lambda _: None) -> None:
    """Simulate something small: compiles the simulator where that was not done yet (10 s), else loads it."""
    say("compiling the simulator (once)")
    simulate(Candidate(1), ClosedLoop(1), ServiceTimes.linear(1e-3, 0.0, 1))
