"""Measure the cost of a shared study in each storage: claims, records and reads by 1, 8, 32 and 100 parallel workers.

    python benchmarks/storage_speed.py study.journal sqlite:///study.db postgresql://user@host/name > storage_speed.md

Each worker has its own session of one study that already holds TRIALS trials. It repeats turns as fast as possible:
it reads which candidates have been tried, claims one, and records three measurements of it. The workers are threads
of a few processes, because a hundred processes do not fit on a small machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

from lib.output import measured_on, print_head, print_title, row
from lib.virtual_workers import DEPLOY_SECONDS, MEASURE_SECONDS, WORKERS, problem_of
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.addresses import redact
from optimizer.search.candidate_tracker import CandidateTracker
from optimizer.search.optuna_encoding import finished_trials
from optimizer.search.optuna_samplers import sampler_for
from optimizer.store.optuna_study import open_study

TRIALS = 300
LOADS = (8, 16, 32)  # concurrencies of each trial's measurements
PROCESSES = 4
COLUMNS = ("storage", "workers", "read ms", "claim ms", "record ms", "p95 of a turn ms", "turns / s")
MEASURED = Measurement(
    10_000.0,
    latency_avg_ms=10.0,
    latency_p50_ms=10.0,
    latency_p90_ms=15.0,
    latency_p95_ms=18.0,
    latency_p99_ms=20.0,
    queue_ms=4.0,
    compute_infer_ms=5.0,
    mean_batch_size=16.0,
    batch_stats="4:40:20000000 8:50:30000000 16:400:400000000",
    requests=500,
    stable=True,
)


@dataclass(frozen=True)
class Turn:
    """The wall times of one turn of a worker, in seconds."""

    read_s: float
    claim_s: float
    record_s: float

    @property
    def all_s(self) -> float:
        return self.read_s + self.claim_s + self.record_s


def main() -> None:
    arguments = _arguments()
    print_title("The cost of a shared study: latest measurement", list(map(redact, arguments.storages)))
    print(
        f"The study holds {TRIALS} trials. In a turn a worker does a **read** of the finished trials, a **claim** of"
    )
    print("a candidate and a **record** of three measurements. Times are medians. **Turns / s** counts the turns of")
    trial_s = DEPLOY_SECONDS + len(LOADS) * MEASURE_SECONDS
    needed = ", ".join(f"{workers / trial_s:.1f} at {workers}" for workers in WORKERS)
    print(f"all workers, each as fast as it can. Trials of {trial_s:.1f} s need this rate: {needed} workers.\n")
    print_head(*COLUMNS)
    for storage in arguments.storages:
        name = uuid.uuid4().hex
        known = filled(storage, name, TRIALS)
        for workers in arguments.workers:
            turns = measured(storage, name, known, workers, arguments.seconds)
            print(row(*_cells(storage, workers, turns, arguments.seconds)), flush=True)
            known += 2 * (len(turns) + workers)  # hardly any candidate is claimed twice
    load = os.getloadavg()[2]
    print(f"\nThe load average over 15 minutes was {load:.1f}, including this benchmark.")
    print(f"\n{measured_on()}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storages", nargs="+", metavar="STORAGE", help="a value of tune's --storage")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=8.0, metavar="S", help="duration for each number of workers (8)"
    )
    return parser.parse_args()


def _cells(storage: str, workers: int, turns: Sequence[Turn], seconds: float) -> list[str]:
    each = [statistics.median(getattr(turn, part) for turn in turns) for part in ("read_s", "claim_s", "record_s")]
    slow_s = statistics.quantiles([turn.all_s for turn in turns], n=20)[-1]
    figures = [f"{1e3 * one:.0f}" for one in (*each, slow_s)]
    kind = storage.partition(":")[0] if "://" in storage else "journal file"
    return [kind, str(workers), *figures, f"{len(turns) / seconds:.1f}"]


def filled(storage: str, name: str, trials: int) -> int:
    """Create a study with the given number of ``trials``."""
    problem = problem_of("large")
    study = open_study(storage, name, problem, sampler_for("random", 0))
    tracker, candidates = CandidateTracker(problem, study), problem.space.candidates()
    for number in range(trials):
        tracker.record(_trial(number, candidates[number]))
    return trials


def measured(storage: str, name: str, trials: int, workers: int, seconds: float) -> list[Turn]:
    """Return the turns that ended within ``seconds``, in a study that holds at most ``trials``."""
    context = multiprocessing.get_context("spawn")
    processes = min(PROCESSES, workers)
    together: Any = context.Barrier(workers)
    queue: Any = context.Queue()
    started = [
        context.Process(
            target=_work, args=(storage, name, trials, workers, first, processes, seconds, together, queue)
        )
        for first in range(processes)
    ]
    for process in started:
        process.start()
    turns = [Turn(*one) for _ in started for one in json.loads(queue.get())]
    for process in started:
        process.join()
    return turns


def _work(
    storage: str,
    name: str,
    trials: int,
    workers: int,
    first: int,
    processes: int,
    seconds: float,
    together: Barrier,
    queue: Any,
) -> None:
    """Run one process with its share of the workers, each a thread."""
    own = range(first, workers, processes)
    opening = threading.Lock()

    def turns(worker: int) -> list[tuple[float, float, float]]:
        problem = problem_of("large")
        with opening:
            study = open_study(storage, name, problem, sampler_for("random", worker))
            tracker, candidates = CandidateTracker(problem, study), problem.space.candidates()
            tracker.tried(), finished_trials(study)  # the first read fetches all trials
        result, number = [], trials + worker
        together.wait()
        ends = time.perf_counter() + seconds
        while number < len(candidates):
            at = [time.perf_counter()]
            tracker.tried(), finished_trials(study)
            at.append(time.perf_counter())
            tracker.start(candidates[number], LOADS[0])
            at.append(time.perf_counter())
            tracker.record(_trial(number, candidates[number]))
            at.append(time.perf_counter())
            if at[-1] > ends:
                break
            result.append((at[1] - at[0], at[2] - at[1], at[3] - at[2]))
            number += workers
        return result

    with ThreadPoolExecutor(len(own)) as pool:
        queue.put(json.dumps([turn for result in pool.map(turns, own) for turn in result]))


def _trial(number: int, candidate: Candidate) -> Trial:
    return Trial(number, candidate, tuple((LoadPoint(4, load), MEASURED) for load in LOADS))


if __name__ == "__main__":
    main()
