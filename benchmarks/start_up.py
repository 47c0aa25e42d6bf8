"""Time the commands that people wait for: the help, the version, a wrong flag, and those that read a finished run.

    python benchmarks/start_up.py [--rounds 10] [--run results/dlrm/sample] > benchmarks/start_up.md

Each round starts every command once; every second round in reverse order, so that a drift of the machine affects all
alike. A round that is not counted comes first. It writes bytecode and compiles the simulator. The targets are for
medians on an idle machine; the last line says how busy it was.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.idle_machine import CpuUsage
from lib.output import judged, measured_on, print_title, row
from lib.process_pool import children_cpu_seconds

ROUNDS = 10
SAMPLE = Path(__file__).parents[1] / "results" / "dlrm" / "sample"
TUNE = Path(sys.executable).with_name("tune")
COLUMNS = ("command", "median s", "shortest s", "longest s", "CPU s, median", "target s", "")


@dataclass(frozen=True)
class TimedCommand:
    """A command of tune, its exit code, and the largest median time in seconds."""

    words: tuple[str, ...]
    target_seconds: float
    exit_code: int = 0

    def __str__(self) -> str:
        return shlex.join(["tune", *self.words])


@dataclass(frozen=True)
class Start:
    """One start of a command. ``cpu_seconds`` is the CPU time of all its threads and child processes."""

    wall_seconds: float
    cpu_seconds: float


def commands(run: Path, output: Path) -> list[TimedCommand]:
    """Return the commands. ``output`` is a folder for their output."""
    return [
        TimedCommand(("--help",), 0.2),
        TimedCommand(("--version",), 0.2),
        TimedCommand(("--slap95", "20ms", "dlrm"), 0.2, exit_code=2),
        TimedCommand(("emit", str(run)), 1.0),
        TimedCommand(("explain", str(run)), 1.0),
        TimedCommand(("plan", str(run), "--rate", "40000/s"), 2.0),
        TimedCommand(("report", str(run), "--out", str(output)), 2.0),
    ]


def measure(command: TimedCommand) -> Start:
    """Run a command to its end. Exits with a message if its exit code is another one."""
    used, began = children_cpu_seconds(), time.perf_counter()
    done = subprocess.run([TUNE, *command.words], capture_output=True, text=True, check=False)
    wall_seconds = time.perf_counter() - began
    if done.returncode != command.exit_code:
        sys.exit(f"{command} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return Start(wall_seconds, children_cpu_seconds() - used)


def table(starts: Mapping[TimedCommand, Sequence[Start]]) -> list[str]:
    """Return the Markdown table."""
    lines = [row(*COLUMNS), "| :-- |" + " --: |" * (len(COLUMNS) - 2) + " :-- |"]
    for command, own in starts.items():
        walls = [start.wall_seconds for start in own]
        median = statistics.median(walls)
        figures = (median, min(walls), max(walls), statistics.median(start.cpu_seconds for start in own))
        is_met = judged(median <= command.target_seconds)
        lines.append(row(f"`{command}`", *map("{:.2f}".format, figures), f"{command.target_seconds:g}", is_met))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"starts of each command ({ROUNDS})")
    parser.add_argument("--run", type=Path, default=SAMPLE, help="folder of a finished run (the sample of dlrm)")
    arguments = parser.parse_args()
    run = Path(os.path.relpath(arguments.run))
    with tempfile.TemporaryDirectory() as output:
        starts: dict[TimedCommand, list[Start]] = {command: [] for command in commands(run, Path(output))}
        for command in starts:
            measure(command)
        before = CpuUsage.now()
        for number in range(arguments.rounds):
            for command in reversed(starts) if number % 2 else starts:
                starts[command].append(measure(command))
        others_share = CpuUsage.now().others_since(before)
    lines = [line.replace(output, "FOLDER") for line in table(starts)]
    print_title("Start-up: latest measurement")
    print("\n".join(lines))
    version = ".".join(map(str, sys.version_info[:2]))
    print("\n" + measured_on(f"Python {version}"))
    print(f"Other processes used {others_share:.0%} of the CPUs' time.")


if __name__ == "__main__":
    main()
