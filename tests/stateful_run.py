"""Writes the folder of a finished run of a stateful model, from synthetic steps, without a server.

Each measurement draws its steps with a seed of its own, so two calls write the same files.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import QUANTILES, Measurement
from objectives.sequential import LOOKS
from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.trial import FreshServer, LoadPoint, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import candidate_document
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable

MODEL = "accumulator"
BOUND_MS = 20.0
SEQUENCES = "sequence_batching.oldest.max_candidate_sequences"
BASELINE, BEST = (Candidate(8, fields=((SEQUENCES, count),)) for count in (8, 32))
LOADS = (1, 4, 8, 16, 24)
CONFIRMED = 24
STEPS = 2000


def measurement(concurrency: int, window: int = 0) -> Measurement:
    """Return the measurement of STEPS steps of ``concurrency`` sequences; other values of ``window`` draw others."""
    draw = np.random.default_rng(zlib.crc32(f"{concurrency} {window}".encode()))
    steps_ms = (4 + 0.3 * concurrency) * draw.gamma(16, 1 / 16, STEPS)
    quantiles_ms: dict[str, Any] = {
        f"latency_{name}_ms": float(np.quantile(steps_ms, level)) for name, level in QUANTILES.items()
    }
    return Measurement(
        throughput_infer_per_sec=1e3 * concurrency / float(steps_ms.mean()),
        latency_avg_ms=float(steps_ms.mean()),
        **quantiles_ms,
        latency_sketch=sketch_latencies(steps_ms),
        requests_over_ms=count_over(steps_ms, [BOUND_MS]),
        requests=STEPS,
        stable=True,
        measure_seconds=2.0,
    )


def write_run(folder: Path) -> Path:
    """Write the run below ``folder`` and return its folder."""
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True)
    table = TrialsTable(run.trials, MODEL, {SEQUENCES: (8, 32)})
    for load in LOADS:
        table.append(Trial(0, BASELINE, deploy_seconds=2.0), LoadPoint(1, load), measurement(min(load, 8)))
        table.append(Trial(1, BEST, deploy_seconds=2.0), LoadPoint(1, load), measurement(load))
    for server in range(1, LOOKS[0] + 1):
        for window in range(8):
            again = measurement(CONFIRMED, 10 * server + window)
            table.append(Trial(1, BEST), LoadPoint(1, CONFIRMED), again, FreshServer(server, 0.01))
    run.write_info(
        RunOptions(MODEL, sla_ms={"p95": BOUND_MS}),
        {
            "status": "found",
            "written": "2026-11-24T10:00:00+0000",
            "problem": {
                "model": MODEL,
                "constraints": [str(bound) for bound in Sla.from_bounds({"p95": BOUND_MS})],
                "objectives": ["throughput"],
                "request_batch_size": 1,
                "sequence_length": "10..30",
                "kind": "stateful",
                "max_concurrency": 256,
                "space": {
                    "max_batch_size": [8],
                    "max_queue_delay_us": ["off"],
                    "preferred_batch_sizes": ["none"],
                    "instance_count": [1],
                    SEQUENCES: [8, 32],
                },
                "baseline": candidate_document(BASELINE),
                "dynamic_batching": candidate_document(BASELINE),
            },
            "hardware": {"gpus": [], "cpu": "Some(R) CPU", "cpu_count": 8, "memory_bytes": 1 << 34},
            "notes": [],
        },
    )
    return run.path
