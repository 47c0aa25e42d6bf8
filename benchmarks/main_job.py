"""The main job as a user runs it: wall time, what of it is tune's own, memory, and what was found.

    python benchmarks/main_job.py [--runs 3] [-- OPTIONS OF TUNE]

The environment is installed and the model built before the clock starts. Prints a Markdown table; the one last
measured is kept in main_job.md. The targets: a recommendation in 5 minutes or less, own time (without
the search's) at most 2 % of it, tune's own memory below 300 MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COLUMNS = (
    "wall s",
    "server s",
    "load generator s",
    "own s (share)",
    "peak MB",
    "configurations",
    "measurements",
    "infer/s",
    "p95 ms",
    "over baseline",
    "over dynamic_batching {}",
)
DEFAULT = ["--sla-p95", "20ms", "dlrm"]


def run(arguments: list[str], out: Path) -> dict[str, Any]:
    """One run of ``tune``, what it prints kept beside its results: its run.json and the wall time of the process."""
    tune = Path(sys.executable).with_name("tune")
    started = time.monotonic()
    done = subprocess.run([tune, "--out", out, *arguments], capture_output=True, text=True, check=False)
    wall_seconds = time.monotonic() - started
    if done.returncode:
        sys.exit(f"tune ended with exit code {done.returncode}: {done.stderr.strip()}")
    record = max(out.glob("*/*/run.json"), key=lambda path: path.stat().st_mtime)
    record.with_name("transcript.txt").write_text(done.stdout)
    info: dict[str, Any] = json.loads(record.read_text())
    return info | {"process_seconds": wall_seconds}


def row(info: dict[str, Any]) -> list[str]:
    times, result = info["times"], info["result"]
    best, plain = result["recommended"], result["dynamic_batching"]
    others = sum(times[f"{name}_seconds"] for name in ("server", "load_generator", "set_up", "search"))
    own_seconds = info["process_seconds"] - others
    return [
        f"{info['process_seconds']:.0f}",
        f"{times['server_seconds']:.1f}",
        f"{times['load_generator_seconds']:.1f}",
        f"{own_seconds:.1f} ({own_seconds / info['process_seconds']:.1%})",
        f"{times['peak_memory_bytes'] / 1e6:.0f}",
        f"{result['trials']}",
        f"{result['measurements']}",
        f"{best['throughput_infer_per_sec']:,.0f}",
        f"{best['latency_p95_ms']:.1f}",
        f"{result['speedup']:.2f}x" if result["speedup"] else "no baseline",
        f"{best['throughput_infer_per_sec'] / plain['throughput_infer_per_sec']:.2f}x" if plain else "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the runs there")
    parser.add_argument("arguments", nargs="*", default=DEFAULT, help="of tune; default: --sla-p95 20ms dlrm")
    given = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --: |" * len(COLUMNS))
    infos = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(given.runs):
            infos.append(run(["--seed", str(seed), *given.arguments], given.out or Path(scratch)))
            print("| " + " | ".join(row(infos[-1])) + " |", flush=True)
    walls = [info["process_seconds"] for info in infos]
    print(f"\nmedian wall {statistics.median(walls):.0f} s; {infos[0]['hardware']['cpu']}, ", end="")
    print(f"{infos[0]['hardware']['cpu_count']} cores; {time.strftime('%Y-%m-%d')}; ", end="")
    print(f"tune {' '.join(given.arguments)}")


if __name__ == "__main__":
    main()
