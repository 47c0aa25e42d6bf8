"""Which workers count: those whose measurements can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from optimizer.cluster.worker import About
from optimizer.machine.fingerprint import Fingerprint

Kind = tuple[str, int, tuple[str, ...]]  # CPU, number of CPUs, GPUs


def kind(about: About) -> Kind:
    seen = about.hardware
    return seen.cpu, seen.cpu_count, seen.gpus


def usual(started: Sequence[About], wanted: Fingerprint | None) -> About:
    """One of the kind that ``wanted`` is of, where there is any, else of that which most are of."""
    kinds = [kind(about) for about in started]
    if wanted is not None and (like := (wanted.cpu, wanted.cpu_count, wanted.gpus)) in kinds:
        return started[kinds.index(like)]
    return max(started, key=lambda about: kinds.count(kind(about)))
