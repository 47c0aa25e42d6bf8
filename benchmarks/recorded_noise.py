"""The noise of the recordings in tables/: how much servers, epochs and windows differ.

python benchmarks/recorded_noise.py [dlrm mlp ...]
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lib.measurement_noise import Effects, Noise
from lib.output import print_head, row
from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.store.trials_reader import COLUMNS
from optimizer.store.trials_table import TrialsTable
from record_tables import PLANS, TABLES

TrialPair: TypeAlias = tuple[Trial, Trial]  # two recordings of one configuration

HEAD = ("table", *(f"{part}: {of}" for part in ("server", "epoch", "window") for of in ("infer/s", "tail")))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = [name for name in PLANS if (TABLES / f"{name}.csv").exists()]
    parser.add_argument("names", nargs="*", metavar="NAME", default=recorded)
    arguments = parser.parse_args()
    print_head(*HEAD)
    for name in arguments.names:
        noise = recorded_noise(name)
        print(row(name, *(f"{value:.1%}" for part in (noise.server, noise.epoch, noise.window) for value in part)))


if __name__ == "__main__":
    main()
