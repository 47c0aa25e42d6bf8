"""Search methods side by side on one table, over seeds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.problem import Problem
from optimizer.replay.engine import Replayed, replay
from optimizer.replay.recording import Recording
from optimizer.replay.rows import Row
from optimizer.report import export
from optimizer.search.elsewhere import Elsewhere

WARM = "warm"


@dataclass(frozen=True)
class Spread:
    """Over seeds: the median (of an even number the mean of the middle two), and what 90 % do not exceed."""

    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), sorted(values)[-(-9 * len(values) // 10) - 1])


@dataclass(frozen=True)
class Comparison:
    """``runs``: of each method, one for each seed; of one that began with another study, after WARM."""

    recording: Recording
    problem: Problem
    best: Row
    runs: dict[str, list[Replayed]]


def compare(
    recording: Recording,
    problem: Problem,
    best: Row,
    methods: Sequence[str],
    *,
    seeds: Sequence[int],
    max_trials: int,
    elsewhere: Elsewhere | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Replay each method with each seed, and again where it can begin with what ``elsewhere`` showed. ``say`` is
    told what runs. Raises BadInputError as ``replay`` does."""
    runs: dict[str, list[Replayed]] = {}
    for method in methods:
        for begun in (None, elsewhere) if elsewhere else (None,):
            name = f"{method} {WARM}" if begun else method
            for i, seed in enumerate(seeds, 1):
                say(f"{name}, {i} of {len(seeds)}")
                found = replay(recording, problem, best, method, seed, max_trials, begun)
                runs.setdefault(name, []).append(found)
    return Comparison(recording, problem, best, runs)


def document(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """What ``--json`` prints. Over several seeds the recommended configuration is the one most often so."""
    return {
        method: {
            "regret": _number([run.regret for run in runs]),
            "deployments": _number([run.effort.deployments for run in runs]),
            "measurements": _number([run.effort.measurements for run in runs]),
            "recommended": _entry(Counter(run.recommended for run in runs).most_common(1)[0][0]),
            "best_in_table": _entry(comparison.best),
        }
        for method, runs in comparison.runs.items()
    }


def _number(values: Sequence[float]) -> float | dict[str, float]:
    if len(values) == 1:
        return values[0]
    spread = Spread.of(values)
    return {"median": spread.median, "p90": spread.p90}


def _entry(row: Row | None) -> dict[str, object] | None:
    """As in the document of a run, with the line of the table in place of a trial's number."""
    if row is None:
        return None
    return {name: value for name, value in export.entry(row.point).items() if name != "trial"} | {"line": row.line}
