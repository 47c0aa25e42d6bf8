"""Writes the folder of a finished run of a model that streams, from synthetic requests, without a server.

    python -m tests.streaming_run FOLDER

The server batches continuously: a step of decoding takes a time that grows with the requests in it, and a new request
waits for the current step before its prompt is processed. Each measurement draws requests with a seed of its own, so
two calls write the same files.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from objectives import response_times
from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import METRICS, QUANTILES, TIMINGS, Measurement
from objectives.sequential import LOOKS
from objectives.sla import Sla
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.search_space import OFF, SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import ConfirmationWindow, FreshServer, LoadPoint, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import candidate_document
from optimizer.results.recommendation import Outcome, assess
from optimizer.store.run_folder import RunFolder, write_configs
from optimizer.store.trials_table import TrialsTable

MODEL = "tinygpt"
BOUNDS_MS = {"ttft-p95": 200.0, "itl-p95": 30.0}
BATCH = "parameters.max_batch.string_value"  # requests in a step of decoding
SIZES = ("4", "16", "32")
BASELINE = Candidate(0, fields=((BATCH, "4"),))
PLAIN = Candidate(0, True, fields=((BATCH, "16"),))
BEST = Candidate(0, fields=((BATCH, "32"),))
LOADS = (1, 4, 8, 16, 24, 32)
REQUESTS, WINDOWS, WINDOW_SECONDS = 400, 8, 10.0
PROMPT_MS, STEP_MS, STEP_MS_OF_REQUEST = 35.0, 6.0, 0.8
SPACE = {
    "max_batch_size": [0],
    "max_queue_delay_us": ["off"],
    "preferred_batch_sizes": ["none"],
    "instance_count": [1],
}
CONFIG = """\
name: "tinygpt"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "prompt" data_type: TYPE_INT32 dims: -1 }
output { name: "token" data_type: TYPE_INT32 dims: 1 }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "max_batch" value { string_value: "%s" } }
"""


@functools.cache
def measurement(candidate: Candidate, concurrency: int, window: int = 0) -> Measurement:
    """Return the measurement of REQUESTS synthetic requests; other values of ``window`` draw other requests."""
    max_running = int(dict(candidate.fields)[BATCH])
    draw = np.random.default_rng(zlib.crc32(f"{max_running} {concurrency} {window}".encode()))
    active = min(concurrency, max_running)
    step_ms = STEP_MS + STEP_MS_OF_REQUEST * active
    tokens = draw.integers(16, 64, REQUESTS)
    waits_ms = PROMPT_MS + step_ms * draw.uniform(0.5, 1.5, REQUESTS)
    waits_ms += max(0, concurrency - max_running) / max_running * step_ms * 40 * draw.uniform(0.8, 1.2, REQUESTS)
    arrivals = [
        first + np.concatenate([[0.0], np.cumsum(step_ms * draw.uniform(0.8, 1.25, count - 1))])
        for first, count in zip(waits_ms, tokens.tolist(), strict=True)
    ]
    times_ms = {
        "latency": np.array([times[-1] for times in arrivals]),
        "ttft": np.array([times[0] for times in arrivals]),
        "itl": np.array([(times[-1] - times[0]) / (len(times) - 1) for times in arrivals]),
    }
    values: dict[str, Any] = {}
    for timing in TIMINGS:
        values_ms = times_ms[timing.name]
        values[timing.field_of("avg")] = float(values_ms.mean())
        values |= {timing.field_of(name): float(np.quantile(values_ms, level)) for name, level in QUANTILES.items()}
        values[timing.sketch_field] = sketch_latencies(values_ms)
        bounds_ms = [bound for metric, bound in BOUNDS_MS.items() if metric.startswith(timing.name)]
        values[timing.over_field] = count_over(values_ms, bounds_ms)
    rate = 1e3 * concurrency / float(times_ms["latency"].mean())
    return Measurement(
        throughput_infer_per_sec=rate,
        responses_per_sec=rate * float(tokens.mean()),
        output_tokens_per_sec=rate * float(tokens.mean()),
        response_times_ms=response_times.median_request(arrivals),
        requests=REQUESTS,
        stable=True,
        measure_seconds=WINDOW_SECONDS,
        server_memory_bytes=1.2e9,
        **values,
    )


def problem(objective: str = "throughput", bounds_ms: Mapping[str, float] = BOUNDS_MS) -> Problem:
    """Return the problem of the run."""
    space = SearchSpace((0,), (OFF,), ("none",), (1,), fields={BATCH: SIZES})
    sla = Sla.from_bounds(bounds_ms)
    return Problem(MODEL, space, 1, 64, (METRICS[objective],), sla, kind=ModelKind.STREAMING)


def trials(*, is_confirmed: bool = True) -> list[Trial]:
    """Return the trials of the run, with confirmations of the best configuration and of both comparisons."""
    every = [
        Trial(number, candidate, tuple((LoadPoint(1, load), measurement(candidate, load)) for load in LOADS))
        for number, candidate in enumerate((BASELINE, PLAIN, BEST))
    ]
    if not is_confirmed:
        return every
    tests = zip(every, (4, 16, 24), (2, 2, LOOKS[0]), (0.0, 0.0, 0.01), strict=True)
    return [
        replace(trial, confirmations=_windows(trial, load, servers, error)) for trial, load, servers, error in tests
    ]


def _windows(trial: Trial, load: int, servers: int, error: float) -> tuple[ConfirmationWindow, ...]:
    return tuple(
        ConfirmationWindow(
            server, LoadPoint(1, load), measurement(trial.candidate, load, 10 * server + window), error
        )
        for server in range(1, servers + 1)
        for window in range(WINDOWS)
    )


def outcome(*, is_confirmed: bool = True, objective: str = "throughput") -> Outcome:
    """Return the outcome of ``trials``."""
    return assess(trials(is_confirmed=is_confirmed), problem(objective), BASELINE, PLAIN)


def write_run(folder: Path, objective: str = "throughput") -> Path:
    """Write the run below ``folder`` and return its folder."""
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True)
    table = TrialsTable(run.trials, MODEL, {BATCH: SIZES})
    for trial in trials():
        for load, measured in trial.measurements:
            table.append(Trial(trial.number, trial.candidate, deploy_seconds=4.0), load, measured)
        for window in trial.confirmations:
            table.append(
                Trial(trial.number, trial.candidate),
                window.load,
                window.measurement,
                FreshServer(window.server, window.error_probability),
            )
    run.write_info(
        RunOptions(MODEL, sla_ms=dict(BOUNDS_MS), objectives=(objective,)),
        {
            "status": "found",
            "command": f"tune --sla-ttft-p95 200ms --sla-itl-p95 30ms {MODEL}",
            "written": "2026-11-24T10:00:00+0000",
            "problem": {
                "model": MODEL,
                "constraints": [str(bound) for bound in Sla.from_bounds(BOUNDS_MS)],
                "objectives": [objective],
                "request_batch_size": 1,
                "kind": "streaming",
                "max_concurrency": 256,
                "tokens": {
                    "prompt": {"smallest": 64, "mean": 64.0, "largest": 64, "quantiles": [64, 64]},
                    "output": {"smallest": 16, "mean": 39.5, "largest": 63, "quantiles": [16, 63]},
                },
                "space": SPACE | {BATCH: list(SIZES)},
                "baseline": candidate_document(BASELINE),
                "dynamic_batching": candidate_document(PLAIN),
            },
            "hardware": {
                "gpus": [],
                "cpu": "Some(R) CPU",
                "cpu_count": 8,
                "memory_bytes": 1 << 34,
                "system": "Linux",
            },
            "versions": {"tritonserver": "2.51.0"},
            "notes": [],
            "server_cpus": 8,
            "server_uses_gpus": False,
        },
    )
    write_configs(run.best, {MODEL: CONFIG % dict(BEST.fields)[BATCH]}, (), {})
    return run.path


def main(words: Sequence[str]) -> None:
    print(write_run(Path(words[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
