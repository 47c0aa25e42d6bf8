"""Compiling the simulator before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable

from optimizer.runtime import cache_folder
from optimizer.trial import Candidate


def compile_ahead(say: Callable[[str], None]) -> None:
    """Load the simulator, compiled; where it has not been compiled yet, ``say`` so: it takes 10 s."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    if not any(cache_folder().joinpath("compiled").glob(f"*/kernel.*.{python}.nbi")):
        say("compiling the simulator (once)")
    from optimizer.batcher.simulator import ClosedLoop, ServiceTimes, simulate

    simulate(Candidate(1), ClosedLoop(1), ServiceTimes.linear(1e-3, 0.0, 1))
