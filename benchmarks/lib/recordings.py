"""The recorded tables: the plan of each, the median of the recordings of a cell, and the noise of the recordings."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lib.measurement_noise import Effects, Noise
from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import TokenRequests, parse_token_lengths
from optimizer.core.trial import LoadPoint, Trial
from optimizer.store.trials_reader import COLUMNS
from optimizer.store.trials_table import TrialsTable

TABLES = Path(__file__).parents[1] / "tables"
STREAMING_TABLE = TABLES / "streaming" / "tinygpt.csv"
# the lengths that the table was recorded with
STREAMING_TOKENS = TokenRequests(
    parse_token_lengths("16..64"), parse_token_lengths("8..24"), "INPUT_IDS", "MAX_TOKENS", 512
)


@dataclass(frozen=True)
class RecordingPlan:
    """How a table is recorded: all its cells ``passes`` times, then a share of its configurations ``repeats`` times.

    perf_analyzer takes three windows of ``window_ms`` for a recording, each a fifth longer than requested. ``gated``:
    only recordings at moments when the machine is fast count.
    """

    passes: int
    window_ms: int
    gated: bool
    repeats: int = 0
    repeated_share: float = 0.2

    @property
    def parts(self) -> int:
        """The passes, and one more part for the repeats."""
        return self.passes + bool(self.repeats)

    def trials(self, name: str, part: int, candidates: Sequence[Candidate]) -> list[Trial]:
        """Return the trials of a part in their order. The trial's number identifies candidate and recording."""
        rng = random.Random(f"{name} {part}")
        order = rng.sample(range(len(candidates)), len(candidates))
        recordings = range(part, part + 1)
        if part == self.passes:
            order = order[: round(self.repeated_share * len(order))]
            recordings = range(self.passes, self.passes + self.repeats)
        return [
            Trial(number * len(candidates) + place, candidates[place]) for place in order for number in recordings
        ]


QUIET = RecordingPlan(passes=3, window_ms=280, gated=True)
UNGATED = RecordingPlan(passes=1, window_ms=560, gated=False, repeats=2)
PLANS: Mapping[str, RecordingPlan] = {
    **dict.fromkeys(("dlrm", "mlp", "wide"), QUIET),
    **dict.fromkeys(("bert-mini", "resnext-64", "dlrm-1", "sleep-1", "sleep-3"), UNGATED),
    **dict.fromkeys(("minilm-16", "text_recognition-small", "dlrm-16", "sleep-2"), UNGATED),
}


def median(result: list[Measurement]) -> Measurement:
    """Return the median of each metric; batch statistics are summed if all recordings have them."""
    values: dict[str, object] = {}
    if all(one.batch_stats for one in result):
        counted = batch_stats.sum_by_size(batch_stats.from_text(one.batch_stats) for one in result)
        values["batch_stats"] = batch_stats.to_text(counted)
    for field in fields(Measurement):
        measured = [getattr(one, field.name) for one in result]
        known = [value for value in measured if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if known:
            middle = statistics.median(known)
            values[field.name] = int(middle) if field.name == "requests" else round(middle, 4)
    return Measurement(**values, stable=True)  # type: ignore[arg-type]


TrialPair: TypeAlias = tuple[Trial, Trial]  # two recordings of one configuration


def recorded_noise(name: str) -> Noise:
    """Return the noise of table ``name``. Recordings of a quiet table have no adjacent pairs.

    Raises ValueError if no configuration was recorded twice.
    """
    distant: list[TrialPair] = []
    adjacent: list[TrialPair] = []
    for trials in _by_candidate(TABLES / "recordings" / f"{name}.csv").values():
        for place, pair in enumerate(pairwise(sorted(trials, key=lambda trial: trial.number))):
            (adjacent if place and PLANS[name].repeats else distant).append(pair)
    return estimate_noise(distant, adjacent)


def estimate_noise(distant: Sequence[TrialPair], adjacent: Sequence[TrialPair] = ()) -> Noise:
    """Return the noise of repeated recordings, by the method of moments on the differences of pairs.

    Args:
        distant: Recordings in different epochs.
        adjacent: Recordings on two servers, one after the other. Without these, epochs count as servers.

    Raises:
        ValueError: No pair has two loads in common.
    """
    shared, windows = _variances(distant)
    of_servers, others = _variances(adjacent)
    windows, of_servers = [*windows, *others], of_servers or shared
    if not windows:
        raise ValueError("no configuration was recorded twice at two loads")
    server = np.mean(of_servers, axis=0)
    epoch = np.mean(shared, axis=0) - server if shared else np.zeros(2)
    return Noise(*(_deviations(variance) for variance in (server, epoch, np.mean(windows, axis=0))))


def _variances(pairs: Sequence[TrialPair]) -> tuple[list[FloatArray], list[FloatArray]]:
    """Return estimates [2] of the variance that the loads of a recording share, and of that of each window."""
    shared: list[FloatArray] = []
    windows: list[FloatArray] = []
    for one, other in pairs:
        differences = _differences(dict(one.measurements), dict(other.measurements))
        if len(differences) > 1:
            own = differences.var(axis=0, ddof=1)
            shared.append((differences.mean(axis=0) ** 2 - own / len(differences)) / 2)
            windows.append(own / 2)
    return shared, windows


def _differences(one: Mapping[LoadPoint, Measurement], other: Mapping[LoadPoint, Measurement]) -> FloatArray:
    """Return the differences [loads, 2] in log throughput and log tail ratio at the loads that both have."""
    rows = []
    for load, measurement in one.items():
        figures = _log_figures(measurement), _log_figures(other.get(load, Measurement()))
        if figures[0] and figures[1]:
            rows.append(np.subtract(figures[1], figures[0]))
    return np.array(rows).reshape(-1, 2)


def _log_figures(measurement: Measurement) -> Effects | None:
    """Return log throughput and the log tail ratio up to a constant (Little's law); None if one is missing."""
    throughput, latency_ms = measurement.throughput_infer_per_sec, measurement.latency_p95_ms
    if not throughput or not latency_ms:
        return None
    return math.log(throughput), math.log(latency_ms) + math.log(throughput)


def _deviations(variance: FloatArray) -> Effects:
    throughput, tail = np.sqrt(np.maximum(variance, 0.0)).tolist()
    return throughput, tail


def _by_candidate(path: Path) -> dict[Candidate, list[Trial]]:
    with path.open() as file:
        first = next(csv.DictReader(file))
        file.seek(0)
        lines = list(csv.DictReader(file))
    parameters = {name: tuple({line[name] for line in lines}) for name in first if name not in COLUMNS}
    trials: dict[Candidate, list[Trial]] = {}
    for trial in TrialsTable(path, first["model"], parameters).read():
        trials.setdefault(trial.candidate, []).append(trial)
    return trials
