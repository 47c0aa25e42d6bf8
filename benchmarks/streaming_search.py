"""Compare search methods on a model with continuous batching: the recorded tinygpt.

    python benchmarks/streaming_search.py > benchmarks/streaming_search.md

``simulated`` is the search with the simulator of continuous batching, ``network`` the same with the closed network in
its place. The search has bounds on the time to the first response and on the inter-token latency. Measurements
have noise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lib.measurement_noise import TYPICAL_NOISE, NoisyServer
from lib.output import measured_on, print_head, print_title, row
from lib.process_pool import run_jobs
from lib.recordings import STREAMING_TABLE, STREAMING_TOKENS
from lib.search_report import MAX_TRIALS, as_count, as_percent
from objectives.metrics import METRICS
from optimizer.config.problem import ModelKind
from optimizer.replay.replay import TOLERANCES, ReplayResult, Spread, recorded_problem, replay
from optimizer.store.recording import Recording, read_recording

# deployments at most
METHODS = {"simulated": MAX_TRIALS, "network": MAX_TRIALS, "tpe": MAX_TRIALS, "random": MAX_TRIALS, "grid": 10_000}
# share of the measurements that meets the bound on the time to first response, and on the inter-token latency
BOUNDS = {"both": (0.5, 0.5), "first response": (0.35, 0.9), "inter-token": (0.9, 0.35)}


@lru_cache
def recorded() -> Recording:
    """Return the table of tinygpt, which each process reads once."""
    return read_recording(STREAMING_TABLE)


def bounds_ms(recording: Recording, kind: str) -> dict[str, float]:
    """Return the bounds of a kind of BOUNDS. Each is met by its share of the measurements."""
    bounds = {}
    for metric, share in zip(("ttft-p95", "itl-p95"), BOUNDS[kind], strict=True):
        values = [METRICS[metric].value(one.measurement) or 0.0 for one in recording.rows]
        bounds[metric] = float(f"{np.quantile(values, share):.2g}")
    return bounds


@dataclass(frozen=True)
class SearchJob:
    """One search of the table under a kind of bounds."""

    kind: str
    method: str
    seed: int


def run_search(job: SearchJob) -> ReplayResult:
    """Return the result of the search."""
    recording = recorded()
    problem = replace(
        recorded_problem(recording, bounds_ms(recording, job.kind)),
        kind=ModelKind.STREAMING,
        tokens=None if job.method == "network" else STREAMING_TOKENS,
    )
    method = "simulated" if job.method == "network" else job.method
    noisy = NoisyServer(recording.trials(), TYPICAL_NOISE, job.seed)
    result = replay(recording, problem, method, job.seed, METHODS[job.method], server=noisy)
    return replace(result, recommended=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds of each search (10)")
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    jobs = [SearchJob(*job) for job in itertools.product(BOUNDS, arguments.methods, range(arguments.seeds))]
    runs = dict(zip(jobs, run_jobs(run_search, jobs, arguments.processes, _describe), strict=True))
    print_title("Search of models with continuous batching: latest measurement")
    print(_introduction(arguments.seeds))
    _print_table(arguments.methods, runs)
    print(f"\n{measured_on()}")


def _describe(job: SearchJob, result: ReplayResult) -> str:
    return f"{job.kind}, {job.method}, {job.seed}: regret {result.regret:.1%}"


def _introduction(seeds: int) -> str:
    return f"""\
`simulated` is the search with the simulator of continuous batching (`optimizer/simulator/continuous_batching.py`).
`network` is the same with the closed network (`optimizer/simulator/closed_network.py`) in its place. Gaussian
processes correct both. Each cell has median / p90 over {seeds} seeds. **Mean** is the mean regret at the
end of the search. **Until within 5 %** is the mean number of deployments; a search that did not reach it counts as
{MAX_TRIALS}.
The bounds are on `ttft-p95` and `itl-p95`; the shares of the measurements that meet each of them are
{"; ".join(f"{kind}: {first:.0%} and {token:.0%}" for kind, (first, token) in BOUNDS.items())}.
"""


def _print_table(methods: Sequence[str], runs: dict[SearchJob, ReplayResult]) -> None:
    columns = ("regret", "mean", "after 4", "after 6", "deployed until it stopped", "until within 5 %")
    print_head("bounds", "search", *columns, text=2)
    for kind in (*BOUNDS, "all"):
        for method in methods:
            own = [run for job, run in runs.items() if job.method == method and kind in (job.kind, "all")]
            until = statistics.mean(min(run.until[TOLERANCES[0]].deployments, MAX_TRIALS) for run in own)
            shares = ([run.regret for run in own], *([run.regret_after(count) for run in own] for count in (4, 6)))
            deployed = Spread.of([run.effort.deployments for run in own])
            regret, *after = [f"{as_percent(own.median)} / {as_percent(own.p90)}" for own in map(Spread.of, shares)]
            mean = as_percent(statistics.mean(shares[0]))
            stopped = f"{as_count(deployed.median)} / {as_count(deployed.p90)}"
            print(row(kind, method, regret, mean, *after, stopped, f"{until:.1f}"))


if __name__ == "__main__":
    main()
