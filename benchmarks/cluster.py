"""Measure trials per hour on a Ray cluster of one and of several workers, with a model that sleeps.

    python benchmarks/cluster.py [--workers 1 4] [--trials 16]

The cluster is local: its nodes are raylets of this machine, each with room for one trial. The model takes
LOADING_SECONDS to load and MILLISECONDS for each batch without computing, so parallel trials hardly compete for
CPUs. The difference is the cost of the driver, Ray and the workers. The search is random, without confirmation or
comparison of outputs. Prints a Markdown table; the latest one is in cluster.md. Target: four workers complete at
least 3.5 times as many trials per hour.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from lib.output import measured_on, print_head, print_progress, row
from optimizer.core.budget import RunMode
from optimizer.core.errors import TuneError
from optimizer.core.trial import Point, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.progress_observers import Progress, QuietObserver
from optimizer.study.tuning_run import tune
from tests.local_cluster import local_cluster
from tests.repositories import write_sleeper

LOADING_SECONDS, MILLISECONDS = 12.0, 8.0
PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 1}
space:
  max_batch_size: [1, 2, 4, 8]
  max_queue_delay_microseconds: [off, 0, 500, 1000, 2000, 5000]
  instance_group_count: [1]
"""


class Clock(QuietObserver):
    """The time from the readiness of the first worker to the end of the last trial."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.failed = 0

    def __enter__(self) -> Clock:
        self.began = time.monotonic()
        return self

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self.ended.append(time.monotonic())
        self.failed += trial.status == "failed"

    @property
    def seconds(self) -> float:
        return self.ended[-1] - self.began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--trials", type=int, default=16)
    arguments = parser.parse_args()
    print_head("workers", "trials", "failed", "seconds", "trials per hour", "ratio to one worker", text=0)
    alone = 0.0
    for workers in arguments.workers:
        clock = measure(workers, arguments.trials)
        rate = 3600 * len(clock.ended) / clock.seconds
        alone = alone or rate
        counts = (str(workers), str(len(clock.ended)), str(clock.failed), f"{clock.seconds:.0f}")
        print(row(*counts, f"{rate:,.0f}", f"{rate / alone:.2f}x"), flush=True)
    print(f"\n{measured_on()}")


def measure(workers: int, trials: int) -> Clock:
    """Run one study on a new cluster."""
    with tempfile.TemporaryDirectory() as root, local_cluster(nodes=workers) as cluster:
        write_sleeper(Path(root, "models"), MILLISECONDS, LOADING_SECONDS)
        profile = Path(root, "steady.yaml")
        profile.write_text(PROFILE)
        os.environ["RAY_ADDRESS"] = cluster.address
        options = RunOptions(
            str(profile),
            {"p95": 500.0},
            search="random",
            output_check=False,
            max_trials=trials,
            budget_seconds=600.0,
            cluster="auto",
            out=str(Path(root, "results")),
        )
        clock = Clock()
        with tune(options, None, Progress(print_progress, lambda *_: clock), RunMode.SEARCH, report=False) as result:
            if result.status == "interrupted":
                raise KeyboardInterrupt
        return clock


if __name__ == "__main__":
    try:
        main()
    except TuneError as error:
        sys.exit(str(error))
