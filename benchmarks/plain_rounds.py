"""Measure the compared configurations of a run again, by perf_analyzer on plain servers, in rounds.

    python benchmarks/plain_rounds.py RUN [--rounds 3] [--seconds 5] [--json]

RUN is the folder of a run with the embedded server, of one model that answers each request once. In each round the
baseline, `dynamic_batching {}` and the recommendation take turns, each on a new tritonserver that loads its
config.pbtxt at the start, without tune's deployment. perf_analyzer sends the load at which the run shows the
configuration, for --seconds.

A server that does not start, or a measurement that fails, has its reason in place of figures. An interrupted command
prints the measurements that are complete. Prints Markdown, or with --json the medians (``cells``) and each
measurement (``rounds``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.output import head, print_progress, row
from lib.plain_server import NotReadyError, perf_analyzer_for, plain_server, recorded_cpus
from optimizer.config import model_config
from optimizer.config.model_source import served_models
from optimizer.config.problem import ModelKind
from optimizer.core.errors import MeasurementError, TuneError
from optimizer.core.trial import Point
from optimizer.deploy import runtime
from optimizer.deploy.server_process import remove_leftovers
from optimizer.machine import hardware
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.study.task import Task, prepare_task

ROUNDS, SECONDS = 3, 5.0
ROLES = ("baseline", "dynamic_batching", "recommended")
FIGURES = ("throughput_infer_per_sec", "latency_avg_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")
COLUMNS = (
    *("configuration", "max_batch_size", "delay µs", "instances", "in flight", "rounds"),
    *("infer/s of the run", "infer/s again, median (least to most)", "p95 ms of the run", "p95 ms again"),
    "throughput over the baseline of the round",
)


@dataclass(frozen=True)
class RoundResult:
    """The figures of perf_analyzer for one role in one round. ``reason`` says why there are none."""

    role: str
    round: int
    throughput_infer_per_sec: float | None = None
    latency_avg_ms: float | None = None
    latency_p90_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    reason: str = ""


@dataclass
class PlainRounds:
    """The measurements so far of ``points``, which has the run's own point of each role."""

    points: Mapping[str, Point]
    results: list[RoundResult] = field(default_factory=list)
    is_interrupted: bool = False

    def of(self, role: str) -> list[RoundResult]:
        """Return the results of a role that have figures."""
        return [one for one in self.results if one.role == role and one.throughput_infer_per_sec]

    def median(self, role: str, figure: str) -> float | None:
        """Return the median of a figure over the rounds; None if there is none."""
        values = [value for one in self.of(role) if (value := getattr(one, figure)) is not None]
        return statistics.median(values) if values else None

    def gains(self, role: str) -> list[float]:
        """Return the throughput over that of the baseline, for each round with both."""
        baseline = {one.round: one.throughput_infer_per_sec or 0.0 for one in self.of("baseline")}
        own = [one for one in self.of(role) if one.round in baseline]
        return [(one.throughput_infer_per_sec or 0.0) / baseline[one.round] for one in own]


def main() -> None:
    arguments = _arguments()
    try:
        run = read_run(arguments.run)
        if refusal := why_not(run):
            sys.exit(f"{arguments.run}: {refusal}")
        points = compared_points(run)
        task = prepare_task(run.options, hardware.detect(), print_progress)
        if len(task.source.models) > 1:
            sys.exit(f"{arguments.run}: it has several models; plain servers serve one")
        rounds = PlainRounds(points)
        try:
            for result in measure(run, task, points, arguments.rounds, arguments.seconds):
                rounds.results.append(result)
        except KeyboardInterrupt:
            rounds.is_interrupted = True
    except TuneError as error:
        sys.exit(str(error))
    finally:
        remove_leftovers()
    print(json.dumps(document(rounds)) if arguments.json else "\n".join(report(rounds)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds ({ROUNDS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time of a measurement ({SECONDS:g})")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    return parser.parse_args()


def why_not(run: FinishedRun) -> str:
    """Return why plain servers and perf_analyzer cannot repeat a run; empty if they can."""
    if run.options.target != "embedded":
        return f"its servers are those of the target {run.options.target}; only the embedded one can be repeated"
    if run.problem.kind is not ModelKind.BATCHED:
        return f"its model is {run.problem.kind.value}, which perf_analyzer does not measure as tune does"
    if any(point.candidate.server_processes > 1 for point in compared_points(run).values()):
        return "it compares several server processes; plain servers are single"
    if not compared_points(run):
        return "it has measured nothing"
    return ""


def compared_points(run: FinishedRun) -> dict[str, Point]:
    """Return the points of a run by role; without the roles that it has no measurement of."""
    if run.outcome is None:
        return {}
    dynamic = run.outcome.dynamic_batching
    points = (run.outcome.baseline.point, dynamic.point if dynamic else None, run.outcome.recommended)
    return {role: point for role, point in zip(ROLES, points, strict=True) if point is not None}


def measure(
    run: FinishedRun, task: Task, points: Mapping[str, Point], rounds: int, seconds: float
) -> Iterator[RoundResult]:
    """Yield the result of each role in each round."""
    installed = runtime.ensure(print_progress)
    server_cpus, client_cpus = (recorded_cpus(run.info[f"{name}_cpu_list"]) for name in ("server", "client"))
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "server.log")
        perf_analyzer = perf_analyzer_for(
            task, installed, Path(scratch, "perf_analyzer.log"), client_cpus, run.options.requested_shared_memory()
        )
        for number in range(1, rounds + 1):
            for role, point in points.items():
                config = served_models(task.source, point.candidate).configs[task.source.tuned_model]
                try:
                    with plain_server(task, model_config.to_text(config), installed, log, server_cpus) as endpoint:
                        perf_analyzer.warm_up(endpoint, point.load)
                        measured = perf_analyzer.measure(endpoint, point.load, seconds)
                except (NotReadyError, MeasurementError) as error:
                    yield RoundResult(role, number, reason=str(error))
                    continue
                result = RoundResult(role, number, **{name: getattr(measured, name) for name in FIGURES})
                print_progress(f"round {number}, {role}: {result.throughput_infer_per_sec or 0:,.0f} infer/s")
                yield result


def document(rounds: PlainRounds) -> dict[str, Any]:
    """Return the JSON document. A cell has the settings, the load and the medians of a role."""
    cells = []
    for role, point in rounds.points.items():
        settings = point.candidate
        cells.append(
            {
                "role": role,
                "max_batch_size": settings.max_batch_size,
                "dynamic_batching": settings.dynamic_batching,
                "max_queue_delay_us": settings.max_queue_delay_us,
                "instance_count": settings.instance_count,
                "request_batch_size": int(point.load.request_batch_size),
                "concurrency": point.load.concurrency,
                **{name: rounds.median(role, name) for name in FIGURES},
                "reason": next((one.reason for one in rounds.results if one.role == role and one.reason), ""),
            }
        )
    return {
        "status": "interrupted" if rounds.is_interrupted else "found",
        "hardware": str(hardware.detect()),
        "notes": [],
        "cells": cells,
        "rounds": [asdict(one) for one in rounds.results],
    }


def report(rounds: PlainRounds) -> list[str]:
    """Return the table in Markdown."""
    lines = head(*COLUMNS)
    for role, point in rounds.points.items():
        settings, throughputs = point.candidate, [one.throughput_infer_per_sec or 0.0 for one in rounds.of(role)]
        gains, p95_ms = rounds.gains(role), rounds.median(role, "latency_p95_ms")
        lines.append(
            row(
                role,
                f"{settings.max_batch_size}",
                f"{settings.max_queue_delay_us}" if settings.dynamic_batching else "off",
                f"{settings.instance_count}",
                f"{point.load.concurrency or ''}",
                f"{len(throughputs)}",
                f"{point.throughput_infer_per_sec:,.0f}",
                _spread(throughputs, "{:,.0f}"),
                f"{point.measurement.latency_p95_ms:.4g}" if point.measurement.latency_p95_ms else "",
                f"{p95_ms:.4g}" if p95_ms else "",
                _spread(gains, "{:.2f}"),
            )
        )
    lines += [f"\nround {one.round}, {one.role}: {one.reason}" for one in rounds.results if one.reason]
    return lines


def _spread(values: Sequence[float], shown: str) -> str:
    if not values:
        return "not measured"
    return f"{shown} ({shown} to {shown})".format(statistics.median(values), min(values), max(values))


if __name__ == "__main__":
    main()
