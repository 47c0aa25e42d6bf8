"""The rows and tables of ``benchmarks/real_verdicts.py``."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lib.intervals import Interval
from lib.records import Records
from lib.verdict_runs import PASS, Remeasured, VerdictRun, read_runs
from objectives.metrics import Measurement
from perf_analyzer_versions import agreement
from real_verdicts import report, share_over

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MACHINE = "a CPU, 2 cores; tritonserver 2.51"
SERVER = Remeasured(0.03, 9000, 8000.0, 18.0, 24.0, (50.0, 60.0), 0.01)


def verdict_run(number: int, verdict: str = "PASS") -> VerdictRun:
    return VerdictRun(
        model="dlrm",
        condition="quiet",
        number=number,
        machine=MACHINE,
        bound_ms=20.0,
        started="2026-11-22T10:00:00+0000",
        verdict=verdict,
        exit_code=0 if verdict == "PASS" else 4,
        wall_seconds=100.0,
        others_share=0.01,
        times={},
        recommended={"throughput_infer_per_sec": 8000.0, "concurrency": 26, "request_batch_size": 1},
        dynamic_batching=None,
        confirmation=None,
        config="name: 'dlrm'",
        remeasured=(SERVER,) * 3 if verdict == "PASS" else (),
    )


def test_the_share_over_the_bound_follows_from_the_quantiles_of_perf_analyzer() -> None:
    random = np.random.default_rng(3)
    latencies_ms = random.lognormal(2.0, 0.4, 40_000)
    p50, p90, p95, p99 = np.quantile(latencies_ms, [0.5, 0.9, 0.95, 0.99])
    measured = Measurement(
        100.0, latency_p50_ms=p50, latency_p90_ms=p90, latency_p95_ms=p95, latency_p99_ms=p99, requests=40_000
    )
    assert share_over(measured, p95) == pytest.approx(0.05)
    assert share_over(measured, p99) == pytest.approx(0.01)
    for bound_ms in np.linspace(p90, p99, 7):
        assert share_over(measured, bound_ms) == pytest.approx(np.mean(latencies_ms > bound_ms), rel=0.07)
    assert 0 < share_over(measured, 1.3 * p99) < 0.01


def test_rows_are_read_again_as_they_were_written(tmp_path: Path) -> None:
    rows = [verdict_run(0), verdict_run(1, "UNDECIDED")]
    for run in rows:
        read_runs(tmp_path).append(run)
    assert read_runs(tmp_path).read(MACHINE) == rows


def test_a_row_that_a_killed_run_left_incomplete_is_ignored(tmp_path: Path) -> None:
    records = read_runs(tmp_path)
    records.append(verdict_run(0))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"model": "dlrm", "num')
    assert [run.number for run in records.read(MACHINE)] == [0]
    records.append(verdict_run(1))
    assert [run.number for run in records.read(MACHINE)] == [0, 1]


def test_rows_of_another_machine_or_another_version_are_refused(tmp_path: Path) -> None:
    records = read_runs(tmp_path)
    records.append(verdict_run(0))
    with pytest.raises(SystemExit, match=r"another machine \(a CPU, 2 cores.*--work"):
        records.read("another CPU, 4 cores")
    (tmp_path / "runs.jsonl").write_text('{"model": "dlrm"}\n')
    with pytest.raises(SystemExit, match="another version of this benchmark"):
        records.read(MACHINE)


# -- perf_analyzer and the own client -----------------------------------------------------------------------------


def test_agreement_needs_a_narrow_interval() -> None:
    assert agreement(Interval(1.01, 0.98, 1.04)) == "agrees within 5%"
    assert agreement(Interval(1.01, 0.8, 1.3)) == "no measurable difference"
    assert agreement(Interval(1.2, 1.1, 1.3)) == "**differs by +20.0%**"
    assert agreement(Interval(1.0, math.nan, math.nan)) == "measured once"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("real_verdicts*.runs")), ids=lambda path: path.stem)
def test_the_kept_tables_are_those_of_the_kept_rows(path: Path) -> None:
    runs = Records(path, VerdictRun).read()
    passed = sum(run.verdict == PASS for run in runs)
    lines = report(runs, runs[0].machine)
    assert any(line.startswith(f"- PASS: {passed} of {len(runs)} ") for line in lines)
    assert set(lines) <= set((BENCHMARKS / "real_verdicts.md").read_text().splitlines())
