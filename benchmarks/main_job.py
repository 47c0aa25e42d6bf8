"""Measure the main job as a user runs it: verdict, wall time, tune's own share of it, memory, and the recommendation.

    python benchmarks/main_job.py [--runs 3] [--out FOLDER] [-- OPTIONS OF TUNE]

The environment is installed and the model is built before the clock starts. Prints Markdown tables; the latest ones
are in main_job.md. Targets: PASS within 3 minutes in the median, own time (without ranking and waiting) of at most
2 % of it, ranking of at most 4 %, and less than 300 MB of memory for tune itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.output import judged, measured_on, print_head, row
from lib.tune_runs import MOST_WALL_SECONDS, OwnTime, TuneFailedError, TuneRun, own_time_table, run_tune

COLUMNS = (
    "verdict",
    "wall s",
    "server s",
    "load generator s",
    "own s (share)",
    "ranking s (share)",
    "peak MB",
    "configurations",
    "measurements",
    "infer/s",
    "p95 ms",
    "over baseline",
    "over dynamic_batching {}",
)
DEFAULT = ["--sla-p95", "20ms", "dlrm"]


def gain(result: dict[str, Any], name: str) -> str:
    """Return a gain with its interval."""
    if result[name] is None:
        return "not confirmed"
    low, high = result[f"{name}_interval"]
    return f"{result[name]:.2f}x ({low:.2f} to {high:.2f})"


def cells(run: TuneRun) -> list[str]:
    """Return the cells below COLUMNS."""
    times, result, own = run.info["times"], run.result, OwnTime.of(run.wall_seconds, run.info["times"])
    best = result["recommended"]
    return [
        run.verdict,
        f"{run.wall_seconds:.0f}",
        f"{times['server_seconds']:.1f}",
        f"{times['load_generator_seconds']:.1f}",
        f"{own.own_seconds:.1f} ({own.own_share:.1%})",
        f"{own.ranking_seconds:.1f} ({own.ranking_share:.1%})",
        f"{own.peak_megabytes:.0f}",
        f"{result['trials']}",
        f"{result['measurements']}",
        f"{best['throughput_infer_per_sec']:,.0f}" if best else "-",
        f"{best['latency_p95_ms']:.1f}" if best else "-",
        gain(result, "speedup"),
        gain(result, "speedup_over_dynamic_batching"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder in which the runs are kept")
    parser.add_argument("arguments", nargs="*", default=DEFAULT, help="arguments of tune (--sla-p95 20ms dlrm)")
    options = parser.parse_args()
    print_head(*COLUMNS)
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.runs):
            try:
                out = (options.out or Path(scratch)) / str(seed)
                runs.append(run_tune(["--seed", str(seed), *options.arguments], out))
            except TuneFailedError as error:
                sys.exit(str(error))
            print(row(*cells(runs[-1])), flush=True)
    wall_seconds = statistics.median(run.wall_seconds for run in runs)
    own_times = [OwnTime.of(run.wall_seconds, run.info["times"]) for run in runs]
    print("\n**tune's own time**\n")
    print("\n".join(own_time_table({" ".join(options.arguments): own_times})))
    print(f"- median wall {wall_seconds:.0f} s ({judged(wall_seconds <= MOST_WALL_SECONDS)})")
    print(f"\n{measured_on()}")


if __name__ == "__main__":
    main()
