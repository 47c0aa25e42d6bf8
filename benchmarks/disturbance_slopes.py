"""Print how much other programs slowed the measurements of finished runs.

    python benchmarks/disturbance_slopes.py RUN ...

A slope is the rise of the log of p95, or the fall of the log of throughput, over the fall of the log of the CPU share
that other programs left. For the search it is the slope that the confirmation fits. For windows on fresh servers it
is that between the windows of the same configuration at the same load. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from objectives.server_spread import deviations
from optimizer.confirmation.confirmer import model_fitter
from optimizer.confirmation.disturbances import fit_disturbance_correction, log_share_lost
from optimizer.confirmation.windows import confirmed_loads, server_windows
from optimizer.core.trial import Trial, latest_points
from optimizer.results.finished_run import FinishedRun, read_run

COLUMNS = (
    "run",
    "usual CPU share of others",
    "slope of p95, search",
    "of throughput",
    "slope of p95, windows",
    "of throughput",
    "expected rise of log p95",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    print("| " + " | ".join(COLUMNS) + " |\n| --- |" + " --: |" * (len(COLUMNS) - 1))
    rows = [_row(read_run(run)) for run in parser.parse_args().runs]
    for number, row in enumerate(rows):
        print(f"| {number} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    print("| median | " + " | ".join(f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True)) + " |")


def _row(run: FinishedRun) -> list[float]:
    trials, problem = run.trials, run.problem
    fit = model_fitter(problem, run.options)
    fitted = fit_disturbance_correction(latest_points(trials), trials, problem, fit)
    on_servers = [_slope(trials, lambda window: window.latency_p95_ms)]
    on_servers.append(-_slope(trials, lambda window: window.throughput_infer_per_sec))
    slopes = [fitted.latency_slope, fitted.throughput_slope, *on_servers]
    return [fitted.usual_share, *slopes, fitted.expected_slowdown]


def _slope(trials: Sequence[Trial], value_of: Callable[[Measurement], float | None]) -> float:
    """Return the slope of the log of a value within the windows of each configuration and load; nan if unknown."""
    falls, rises = list[FloatArray](), list[FloatArray]()
    for trial, load in confirmed_loads(trials):
        windows = [window for own in server_windows(trial, load) for window in own]
        known = [own for own in windows if own.other_cpu_share is not None and value_of(own)]
        falls.append(log_share_lost(known, 0.0))
        rises.append(np.array([math.log(value_of(own) or math.nan) for own in known]))
    all_falls, all_rises = deviations(falls), deviations(rises)
    square = float(all_falls @ all_falls)
    return float(all_falls @ all_rises) / square if square else math.nan


if __name__ == "__main__":
    main()
