"""Time how long it takes until a fresh embedded server serves a configuration, as in each test of a recommendation.

    python benchmarks/server_start.py [MODEL ...] [--instances 1 2] [--rounds 10] > benchmarks/server_start.md

A start includes the end of the previous server, the start of tritonserver, and the load of the model with its check.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lib.output import measured_on, print_head, print_title, row
from optimizer.core.candidate import Candidate
from optimizer.core.errors import TuneError
from optimizer.machine.cpu_usage import CpuUsage
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import RunFolder
from optimizer.study.environment import Environment

COLUMNS = ("model", "instances", "starts", "median s", "shortest s", "longest s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["mlp", "dlrm"])
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    print_title("Start of a server: latest measurement")
    print_head(*COLUMNS)
    before = CpuUsage.now()
    try:
        for model in arguments.models:
            for instances in arguments.instances:
                seconds = start_seconds(model, Candidate(8, instance_count=instances), arguments.rounds)
                cells = (f"{value:.2f}" for value in (statistics.median(seconds), min(seconds), max(seconds)))
                print(row(model, str(instances), str(len(seconds)), *cells), flush=True)
    except TuneError as error:
        print(f"server_start.py: {error}", file=sys.stderr)
        return error.exit_code
    others = CpuUsage.now().others_since(before)
    print(f"\n{measured_on()}")
    print(f"Other processes used {others:.0%} of the CPUs' time.")
    return 0


def start_seconds(model: str, candidate: Candidate, rounds: int) -> list[float]:
    """Return the seconds of ``rounds`` starts of fresh servers. Raises TuneError."""
    environment = Environment.detect(RunOptions(model=model), lambda _: None)
    task = environment.make_task()
    seconds = []
    with tempfile.TemporaryDirectory() as parent:
        folder = RunFolder.create(str(Path(parent)), "starts")
        with environment.open_target(task, folder) as target:
            for _ in range(1 + rounds):
                started = time.perf_counter()
                with target.deploy(candidate, fresh=True):
                    seconds.append(time.perf_counter() - started)
    return seconds[1:]  # no server runs before the first start


if __name__ == "__main__":
    sys.exit(main())
