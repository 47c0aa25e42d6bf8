"""The tables of the benchmarks that compare searches, their split into training and test, and their bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib.simulated_tables import EXECUTION_SPEEDS, SimulatedServer, drawn_server, execution_server, write
from objectives.metrics import METRICS
from optimizer.core.candidate import Candidate
from optimizer.store.recording import Recording, read_recording

SIMULATED_SEEDS = range(300, 312)  # of simulated servers; no constant of the search may be chosen on these either
# No constant of the search may be chosen on these. A table that the folder lacks is left out.
TEST_TABLES = ("minilm-16", "text_recognition-small", "dlrm-16", "sleep-2")
FEASIBLE_SHARES: Mapping[str, float] = {"tight": 0.15, "middle": 0.40, "loose": 0.70}
# tables whose published results use another loose bound
EARLIER_TABLES, EARLIER_LOOSE_SHARE = ("dlrm", "mlp", "wide"), 0.75
FEASIBLE_CONFIGURATIONS = 3
EXECUTION_SEEDS = range(400, 404)  # of the servers with settings of ONNX Runtime

Kind = Literal["training", "test", "simulated", "goodput", "execution"]
KINDS: Mapping[Kind, str] = {
    "test": "Test tables",
    "training": "Training tables",
    "simulated": "Simulated servers",
    "goodput": "Goodput on simulated servers, without noise",
    "execution": "Settings of ONNX Runtime on simulated servers, without noise",
}


@dataclass(frozen=True)
class BoundedTable:
    """One table under one bound."""

    kind: Kind
    table: Path
    sla: str
    bound_ms: float

    @property
    def statistic(self) -> str:
        """The bounded latency. That of the goodput is the median, so that a load with late requests may be best."""
        return "p50" if self.kind == "goodput" else "p95"


def bounded_tables(folder: Path, scratch: Path, kinds: frozenset[Kind]) -> Iterator[BoundedTable]:
    """Yield the tables of ``kinds`` under each of their bounds: the recorded ones of ``folder``, then the others.

    ``scratch`` is the folder that the tables of simulated servers are written to.
    """
    missing = [name for name in TEST_TABLES if not (folder / f"{name}.csv").exists()]
    if "test" in kinds and missing:
        print(f"no test tables {', '.join(missing)} in {folder}: left out", file=sys.stderr)
    for path in sorted(folder.glob("*.csv")):
        yield from _bounded("test" if path.stem in TEST_TABLES else "training", path, kinds)
    for seed in SIMULATED_SEEDS if "simulated" in kinds else ():
        server = drawn_server(seed)
        path = scratch / f"{server.name}.csv"
        write(server, path)
        yield from _bounded("simulated", path, kinds)
    for seed in SIMULATED_SEEDS if "goodput" in kinds else ():
        yield from _with_goodput(drawn_server(seed), scratch)
    for seed in EXECUTION_SEEDS if "execution" in kinds else ():
        yield from _with_settings(seed, scratch)


def _bounded(kind: Kind, path: Path, kinds: frozenset[Kind]) -> Iterator[BoundedTable]:
    if kind not in kinds:
        return
    recording = read_recording(path)
    for sla, share in feasible_shares(path.stem).items():
        yield BoundedTable(kind, path, sla, bound_ms(recording, share))


def _with_goodput(server: SimulatedServer, scratch: Path) -> Iterator[BoundedTable]:
    """Yield a table for each bound, which is the deadline that its goodput is counted with."""
    plain = scratch / f"{server.name}.csv"
    write(server, plain)
    recording = read_recording(plain)
    for sla, share in FEASIBLE_SHARES.items():
        bound, path = bound_ms(recording, share, "latency-p50"), scratch / f"{server.name}-{sla}.csv"
        write(server, path, deadline_ms=bound)
        yield BoundedTable("goodput", path, sla, bound)


def _with_settings(seed: int, scratch: Path) -> Iterator[BoundedTable]:
    """Yield a table for each set of settings, with the bound of the one that has threads only."""
    bound: float | None = None
    for count in range(len(EXECUTION_SPEEDS) + 1):
        server = execution_server(seed, tuple(EXECUTION_SPEEDS)[:count])
        path = scratch / f"{server.name}.csv"
        write(server, path)
        bound = bound or bound_ms(read_recording(path), FEASIBLE_SHARES["middle"])
        yield BoundedTable("execution", path, "middle", bound)


def feasible_shares(table: str) -> Mapping[str, float]:
    """Return the share of the rows that meets each bound of a table, by the name of the bound."""
    return {**FEASIBLE_SHARES, "loose": EARLIER_LOOSE_SHARE} if table in EARLIER_TABLES else FEASIBLE_SHARES


def bound_ms(recording: Recording, share: float, metric: str = "latency-p95") -> float:
    """Return the bound that ``share`` of the rows and at least FEASIBLE_CONFIGURATIONS candidates meet."""
    quickest: dict[Candidate, float] = {}
    latencies = []
    for row in recording.rows:
        latency = METRICS[metric].value(row.measurement)
        if row.load is None or latency is None or not row.measurement.stable:
            continue
        latencies.append(latency)
        candidate = recording.space.canonical(row.candidate)
        quickest[candidate] = min(latency, quickest.get(candidate, math.inf))
    of_rows = sorted(latencies)[math.ceil(share * len(latencies)) - 1]
    of_candidates = sorted(quickest.values())[:FEASIBLE_CONFIGURATIONS][-1]
    return _rounded_up(max(of_rows, of_candidates))


def _rounded_up(value: float) -> float:
    """Return ``value`` rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.2g}")
