"""Run the installed ``tune`` as a user does, and read its verdict, its times and its memory from the run's folder."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.idle_machine import CpuUsage
from lib.output import head, judged, row
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.core.process import SupervisedProcess, describe_exit_code

MOST_WALL_SECONDS = 180.0  # of the main job, in the median
MOST_OWN_SHARE, MOST_RANKING_SHARE, MOST_MEGABYTES = 0.02, 0.04, 300.0
OWN_COLUMNS = (
    *("wall s", "start and imports s", "probes s", "rows s", "other s", "own share"),
    *("ranking s", "ranking share", "CPU s", "peak MB"),
)


class TuneFailedError(RuntimeError):
    """Raised if ``tune`` ended without a result; the message has its last words."""


@dataclass(frozen=True)
class TuneRun:
    """A finished run of ``tune``.

    Attributes:
        exit_code: One of EXIT_CODES.
        wall_seconds: Wall time of the process, with the start of Python.
        others_share: Share of the CPU time that neither this program nor its child processes used, 0 to 1.
        folder: The run's folder.
        info: The document in run.json.
    """

    exit_code: int
    wall_seconds: float
    others_share: float
    folder: Path
    info: dict[str, Any]

    @property
    def result(self) -> dict[str, Any]:
        """The document of ``--json``."""
        result: dict[str, Any] = self.info["result"]
        return result

    @property
    def verdict(self) -> str:
        """PASS, FAIL (also if no configuration meets the SLA) or UNDECIDED."""
        return str(self.result["verdict"])


def run_tune(arguments: Sequence[str | Path], out: Path) -> TuneRun:
    """Run ``tune`` with ``--out out`` and these arguments; ``out/tune.log`` gets its output.

    Raises TuneFailedError if it ends without a result.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / "tune.log"
    log.unlink(missing_ok=True)
    command = [Path(sys.executable).with_name("tune"), "--out", out, *arguments]
    before, started = CpuUsage.now(), time.monotonic()
    with SupervisedProcess(command, log=log) as process:
        while (exit_code := process.wait(0.5)) is None:
            pass
        wall_seconds = time.monotonic() - started
    others_share = CpuUsage.now().others_since(before)
    records = sorted(out.glob("*/*/run.json"), key=lambda path: path.stat().st_mtime)
    if exit_code not in EXIT_CODES.values() or not records:
        last_words = log.read_text(errors="replace").strip()[-500:]
        raise TuneFailedError(f"tune ended with {describe_exit_code(exit_code)}: {last_words}")
    record = records[-1]
    return TuneRun(exit_code, wall_seconds, others_share, record.parent, json.loads(record.read_text()))


# -- tune's own share of the time ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnTime:
    """The wall time of one run that was spent in tune's own process.

    Waiting for the server, the load generator and the set-up of the machine is left out. ``start_seconds`` is the
    time before and after the run's own clock: the start and the end of Python, and imports. ``other_seconds`` is the
    rest of the own time. ``cpu_seconds`` is the CPU time of the process with ranking; ``peak_megabytes`` is its peak
    resident memory, nan if it is unknown.
    """

    wall_seconds: float
    start_seconds: float
    probes_seconds: float
    rows_seconds: float
    other_seconds: float
    ranking_seconds: float
    cpu_seconds: float
    peak_megabytes: float

    @classmethod
    def of(cls, wall_seconds: float, times: Mapping[str, Any]) -> OwnTime:
        """Return the own time of a process of ``wall_seconds`` whose run.json has these ``times``."""
        probes, rows = (times[f"own_{name}_seconds"] for name in ("probes", "rows"))
        return cls(
            wall_seconds=wall_seconds,
            start_seconds=wall_seconds - times["wall_seconds"],
            probes_seconds=probes,
            rows_seconds=rows,
            other_seconds=times["own_seconds"] - probes - rows,
            ranking_seconds=times["search_seconds"],
            cpu_seconds=times["own_cpu_seconds"],
            peak_megabytes=math.nan if times["peak_memory_bytes"] is None else times["peak_memory_bytes"] / 1e6,
        )

    @property
    def own_seconds(self) -> float:
        """All of it without ranking."""
        return self.start_seconds + self.probes_seconds + self.rows_seconds + self.other_seconds

    @property
    def own_share(self) -> float:
        return self.own_seconds / self.wall_seconds

    @property
    def ranking_share(self) -> float:
        return self.ranking_seconds / self.wall_seconds

    @property
    def cells(self) -> list[str]:
        """The cells below OWN_COLUMNS."""
        return [
            f"{self.wall_seconds:.0f}",
            f"{self.start_seconds:.2f}",
            f"{self.probes_seconds:.2f}",
            f"{self.rows_seconds:.2f}",
            f"{self.other_seconds:.2f}",
            f"{self.own_share:.1%}",
            f"{self.ranking_seconds:.2f}",
            f"{self.ranking_share:.1%}",
            f"{self.cpu_seconds:.1f}",
            f"{self.peak_megabytes:.0f}",
        ]


def own_time_table(groups: Mapping[str, Sequence[OwnTime]]) -> list[str]:
    """Return a Markdown table with the run of median own share of each group, and whether the targets are met."""
    known = {name: sorted(runs, key=lambda run: run.own_share) for name, runs in groups.items()}
    lines = head("runs", "number", *OWN_COLUMNS)
    lines += [row(name, str(len(runs)), *runs[len(runs) // 2].cells) for name, runs in known.items()]
    lines += [
        "",
        "Each row is the run with the median own share. Targets for the medians, and for the largest memory:",
        "",
    ]
    for name, runs in known.items():
        own = statistics.median(run.own_share for run in runs)
        ranking = statistics.median(run.ranking_share for run in runs)
        megabytes = max(run.peak_megabytes for run in runs)
        lines.append(
            f"- {name}: own {own:.1%} (at most {MOST_OWN_SHARE:.0%}: {judged(own <= MOST_OWN_SHARE)}), "
            f"ranking {ranking:.1%} (at most {MOST_RANKING_SHARE:.0%}: {judged(ranking <= MOST_RANKING_SHARE)}), "
            f"memory {megabytes:.0f} MB (at most {MOST_MEGABYTES:.0f} MB: {judged(megabytes <= MOST_MEGABYTES)})"
        )
    return lines
