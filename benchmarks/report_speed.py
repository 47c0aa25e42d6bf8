"""Measure the time of `tune report` and the size of its page for runs of 10 to 5,000 trials.

    python benchmarks/report_speed.py [--keep FOLDER] [10 500 5000]

Each run folder has trials of a server of simulated_tables.py at four loads each, with noise. Its two last
parameters have no effect, as is common. Times are those of the whole command in its own process; "end of a run" is
the time of the page at the end of a run, where Optuna and the simulator are loaded already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from lib.output import measured_on, print_head, row
from lib.process_pool import children_cpu_seconds
from lib.simulated_tables import REQUEST_BATCH_SIZE, THREADS, hidden_server
from objectives.metrics import Measurement
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import candidate_document
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable

LOADS = (4, 16, 32, 64)
COLUMNS = (
    *("trials", "measurements", "`tune report` (s)", "its CPU time (s)", "page (MB)"),
    *("end of a run (s)", "its CPU time (s)"),
)
NOISE = 0.03
SLA_MS = 20.0
IDLE: dict[str, tuple[FieldValue, ...]] = {
    "parameters.inter_op_thread_count.string_value": ("1", "2", "4", "8"),
    "optimization.graph.level": (0, 1, 2, -1),
}
SPACE = SearchSpace(
    (8, 16, 32, 64, 128),
    ("off", 0, 100, 500, 1000, 2000, 5000),
    ("none", "max/2"),
    (1, 2, 3),
    {THREADS: ("1", "2"), **IDLE},
    REQUEST_BATCH_SIZE,
)
# imports that the process has done already at the end of a run
LOADED = "import optuna, optimizer.search.simulated, optimizer.study.tuning_run, optimizer.config.model_config"
AT_END = f"""{LOADED}
import sys, time
from pathlib import Path
from optimizer.results.finished_run import read_run
from optimizer.search.candidate_selector import fit_surrogate
run = read_run(sys.argv[1])
fit_surrogate(run.problem, run.trials[:4]).forecast([(run.baseline, 4)])
began, used = time.perf_counter(), time.process_time()
from optimizer.results.report.writer import write
write([run], ["html"], Path(sys.argv[2]))
print(time.perf_counter() - began, time.process_time() - used)
"""


def write_run(folder: Path, trials: int) -> None:
    """Write a run with the given number of trials, the baseline first, to ``folder``."""
    folder.mkdir(parents=True)
    measure, rng = _server(), np.random.default_rng(0)
    candidates = list(SPACE.candidates())
    baseline = next(c for c in candidates if c == Candidate(8, fields=c.fields))
    order = rng.permutation(len(candidates))[: trials - 1]
    chosen = [baseline, *(candidates[i] for i in order if candidates[i] != baseline)]
    table = TrialsTable(folder / "trials.csv", "made_up", SPACE.fields)
    for number, candidate in enumerate(chosen):
        for load in LOADS:
            measured = measure[_effective(candidate), load]
            noisy = rng.lognormal(0, NOISE)
            table.append(Trial(number, candidate, deploy_seconds=0.2), LoadPoint(4, load), _noisy(measured, noisy))
    RunFolder(folder).write_info(
        RunOptions(model="made_up", sla_ms={"p95": SLA_MS}),
        {
            "status": "found",
            "command": f"tune --sla-p95 {SLA_MS:g}ms made_up",
            "problem": {
                "model": "made_up",
                "facts": {},
                "constraints": [f"p95 <= {SLA_MS:g} ms"],
                "objectives": ["throughput"],
                "request_batch_size": REQUEST_BATCH_SIZE,
                "max_concurrency": LOADS[-1],
                "space": {name: list(values) for name, values in SPACE.parameters().items()},
                "kind": "batched",
                "baseline": candidate_document(baseline),
                "dynamic_batching": candidate_document(replace(baseline, dynamic_batching=True)),
            },
            "hardware": {"gpus": [], "cpu": "made up", "cpu_count": 4, "memory_bytes": 0},
        },
    )


def _server() -> dict[tuple[Candidate, int], Measurement]:
    server = hidden_server("threads")
    cells = list(dict.fromkeys(product(map(_effective, SPACE.candidates()), LOADS)))
    return dict(zip(cells, server.measure(cells, threads=2), strict=True))


def _effective(candidate: Candidate) -> Candidate:
    return replace(candidate, fields=tuple(field for field in candidate.fields if field[0] == THREADS))


def _noisy(measured: Measurement, factor: float) -> Measurement:
    slower = {
        name: getattr(measured, name) * factor
        for name in ("latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")
    }
    throughput = (measured.throughput_infer_per_sec or 0.0) / factor
    return replace(measured, throughput_infer_per_sec=throughput, measure_seconds=2.4, **slower)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder in which runs and pages are kept")
    parser.add_argument("trials", nargs="*", type=int, default=[10, 500, 5000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        print_head(*COLUMNS, text=0)
        for trials in arguments.trials:
            run = folder / "made_up" / str(trials)
            if not run.exists():
                write_run(run, trials)
            page = run / "report.html"
            began, used = time.perf_counter(), children_cpu_seconds()
            subprocess.run(
                [sys.executable, "-c", "from optimizer.cli.main import main; main()", "report", str(run)],
                check=True,
                stdout=sys.stderr,
            )
            took, cpu = time.perf_counter() - began, children_cpu_seconds() - used
            at_end = subprocess.run(
                [sys.executable, "-c", AT_END, str(run), str(page)], check=True, capture_output=True, text=True
            )
            size, (end, end_cpu) = page.stat().st_size / 1e6, map(float, at_end.stdout.split())
            figures = (f"{took:.1f}", f"{cpu:.1f}", f"{size:.2f}", f"{end:.2f}", f"{end_cpu:.2f}")
            print(row(f"{trials:,}", f"{trials * len(LOADS):,}", *figures), flush=True)
    print(f"\n{measured_on()}")


if __name__ == "__main__":
    main()
