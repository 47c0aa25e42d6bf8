"""Trials of a search with given figures, their outcome, and its text in a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.notes import RemoteServerUsed, SearchConverged
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from optimizer.results.recommendation import Outcome, assess
from optimizer.results.terminal_summary import RunDetails, print_outcome

THREADS = "parameters.intra_op_thread_count.string_value"
BASELINE = Candidate(64, fields=((THREADS, "2"),))
PLAIN = Candidate(64, True, fields=((THREADS, "2"),))
GOOD = Candidate(128, True, 500, (64, 128), 2, ((THREADS, "1"),))
LONG = Candidate(
    65536,
    True,
    123456,
    tuple(range(1000, 30000, 1000)),
    12,
    ((f"parameters.{'a_rather_long_name_' * 6}.string_value", "x" * 90), (THREADS, "1")),
)
NOTES = RemoteServerUsed("triton:8001"), SearchConverged(0.02)  # the second one is a detail
NOTE = str(NOTES[0])
FACTS = {"precision": "fp32", "rows": 1234567, "embedding_bytes": 632098304, "sha256": "ab" * 32}


def problem(p95_ms: float = 20.0, model: str = "dlrm", **more: float) -> Problem:
    sla = Sla.from_bounds({"p95": p95_ms, **more})
    return Problem(model, SearchSpace((64, 128)), 16, 64, (METRICS["throughput"],), sla)


def measured(throughput: float, p95_ms: float, **more: Any) -> Measurement:
    return Measurement(
        throughput,
        latency_p50_ms=0.5 * p95_ms,
        latency_p90_ms=0.9 * p95_ms,
        latency_p95_ms=p95_ms,
        latency_p99_ms=1.5 * p95_ms,
        mean_batch_size=48.0,
        stable=True,
        **more,
    )


def trial(number: int, candidate: Candidate, *points: tuple[int, Measurement], **more: Any) -> Trial:
    return Trial(number, candidate, tuple((LoadPoint(16, load), m) for load, m in points), **more)


def example_trials() -> list[Trial]:
    return [
        trial(0, BASELINE, (2, measured(2000, 10.0)), (4, measured(3000, 19.0)), (8, measured(3100, 45.0))),
        trial(1, PLAIN, (4, measured(6000, 18.0)), (8, measured(6500, 35.0))),
        trial(2, GOOD, (8, measured(11000, 15.0)), (12, measured(12345, 18.2, server_memory_bytes=1.31e9))),
        trial(3, replace(GOOD, instance_count=4), status="failed", reason="out of [memory]"),
        trial(4, replace(GOOD, instance_count=3), (8, Measurement(reason="perf_analyzer timed out"))),
        trial(5, LONG, (8, measured(13000, 90.0))),
    ]


def outcome(trials: Sequence[Trial] | None = None, sla_ms: float = 20.0) -> Outcome:
    return assess(example_trials() if trials is None else trials, problem(sla_ms), BASELINE, PLAIN)


def printed_outcome(
    result: Outcome, searched: Problem | None = None, *, width: int = 80, verbose: bool = False, **more: Any
) -> str:
    text = io.StringIO()
    arguments: dict[str, Any] = {
        "baseline": BASELINE,
        "hardware": "some CPU, 2 CPUs",
        "notes": NOTES,
        "facts": FACTS,
        "results_dir": Path("results/dlrm/1"),
        "command": "tune --sla-p95 20ms --seed 0 dlrm",
        "config_path": Path("results/dlrm/1/best/config.pbtxt"),
        "report_path": Path("results/dlrm/1/report.html"),
    }
    details = RunDetails(**{**arguments, **more})
    print_outcome(Console(file=text, width=width), result, searched or problem(), details, verbose=verbose)
    return text.getvalue()


def trials_with_confirmation(p95_ms: float, servers: int = 4, windows: int = 8) -> list[Trial]:
    """Return the trials, with a confirmation of the best one."""
    trials = example_trials()
    best = outcome(trials).recommended
    assert best is not None
    confirmations = [
        ConfirmationWindow(
            server, best.load, measured(12000.0 + 10 * n, p95_ms + 0.05 * (n % 3), requests=4000), 0.01
        )
        for server in range(1, servers + 1)
        for n in range(windows)
    ]
    return [replace(t, confirmations=tuple(confirmations)) if t.number == best.trial else t for t in trials]


def trials_with_comparisons() -> list[Trial]:
    """Return the trials with confirmations of the best one, the baseline and plain dynamic batching."""
    served = {0: (LoadPoint(16, 4), 3000.0), 1: (LoadPoint(16, 8), 11900.0)}
    trials = trials_with_confirmation(15.0)
    for number, (load, throughput) in served.items():
        confirmations = tuple(
            ConfirmationWindow(server, load, measured(throughput + n, 18.0, requests=4000))
            for server in (1, 2)
            for n in range(8)
        )
        trials[number] = replace(trials[number], confirmations=confirmations)
    return trials
