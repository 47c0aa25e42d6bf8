"""The rows of real_verdicts.py, which repeatability.py reads too: runs of tune, and their checks on plain servers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.measured_model import prepare_model
from lib.records import Records
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task

LEVEL = 0.95  # of the bounded quantile: a share of 5 % over the bound is allowed
WORK = Path(tempfile.gettempdir(), "tritune_real_verdicts")
PASS = "PASS"


@dataclass(frozen=True)
class RunKind:
    """One kind of runs: a model, and one of CONDITIONS of the machine."""

    model: str
    condition: str

    def __str__(self) -> str:
        return f"{self.model} {self.condition}"


@dataclass(frozen=True)
class Remeasured:
    """One plain server that perf_analyzer measured.

    Attributes:
        share: Share of the requests over the bound, 0 to 1.
        probes_ms: Time of the speed probe next to the idle server, before and after the load.
        others_share: Share of the CPU time that others took, without the benchmark's own disturbance, 0 to 1.
    """

    share: float
    requests: int
    throughput_infer_per_sec: float
    latency_p95_ms: float
    latency_p99_ms: float
    probes_ms: tuple[float, float]
    others_share: float


@dataclass(frozen=True)
class VerdictRun:
    """One run of tune and its check. ``config`` is the recommended config.pbtxt, empty if there is none.

    ``recommended`` and ``dynamic_batching`` are entries of tune's document; None if it has none.
    """

    model: str
    condition: str
    number: int
    machine: str
    bound_ms: float
    started: str
    verdict: str
    exit_code: int
    wall_seconds: float
    others_share: float
    times: dict[str, Any]
    recommended: dict[str, Any] | None
    dynamic_batching: dict[str, Any] | None
    confirmation: dict[str, Any] | None
    config: str
    remeasured: tuple[Remeasured, ...]

    @property
    def kind(self) -> RunKind:
        return RunKind(self.model, self.condition)

    @property
    def has_passed(self) -> bool:
        return self.verdict == PASS

    @property
    def shares(self) -> list[float]:
        return [server.share for server in self.remeasured]


def read_runs(work: Path) -> Records[VerdictRun]:
    """Return the runs that are stored in the folder ``work``."""
    return Records(work / "runs.jsonl", VerdictRun)


def bounded_task(model: str, bound_ms: float) -> Task:
    """Return the model and its requests, served on CPUs, under a bound on p95."""
    return prepare_model(RunOptions(model, {"p95": bound_ms}))
