"""The noise of the recordings in tables/: how much servers, epochs and windows differ.

python benchmarks/recorded_noise.py [dlrm mlp ...]
"""

from __future__ import annotations

import argparse
import csv
from itertools import pairwise
from pathlib import Path

from record_tables import PLANS, TABLES
from tune_runs import row

from optimizer.core.trial import Candidate, Trial
from optimizer.replay.noise import Noise, TrialPair, estimate_noise
from optimizer.store.trials_reader import COLUMNS
from optimizer.store.trials_table import TrialsTable

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
    print(row(*HEAD))
    print(row("---", *["--:"] * (len(HEAD) - 1)))
    for name in arguments.names:
        noise = recorded_noise(name)
        print(row(name, *(f"{value:.1%}" for part in (noise.server, noise.epoch, noise.window) for value in part)))


if __name__ == "__main__":
    main()
