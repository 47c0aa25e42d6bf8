"""The pure parts of the benchmarks that check verdicts on a real machine: statistics, stored rows and tables."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from closed_loop_client import OWN, Round, agreement, information, table
from disturbance import REGULAR, disturbed
from intervals import Interval, mean_interval, pooled_share, ratio_interval, run_shares
from real_verdicts import CONDITIONS, PASS, Cell, Remeasured, VerdictRun, order, read_runs, report, share_over
from records import Records
from repeatability import Entrant, Remeasurement, complete_rounds, true_spread
from repeatability import report as repeatability_report
from tune_runs import OwnTime, own_time_table

from objectives.metrics import Measurement
from optimizer.core.trial import Candidate, LoadPoint

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MACHINE = "a CPU, 2 cores; tritonserver 2.51"
TIMES = {
    "wall_seconds": 98.0,
    "search_seconds": 3.0,
    "own_seconds": 1.5,
    "own_probes_seconds": 0.5,
    "own_rows_seconds": 0.25,
    "own_display_seconds": 0.125,
    "own_cpu_seconds": 4.0,
    "peak_memory_bytes": 290_000_000,
}
SERVER = Remeasured(0.03, 9000, 8000.0, 18.0, 24.0, (50.0, 60.0), 0.01)


def verdict_run(number: int, verdict: str = "PASS", model: str = "dlrm", throughput: float = 8000.0) -> VerdictRun:
    return VerdictRun(
        model=model,
        condition="quiet",
        number=number,
        machine=MACHINE,
        bound_ms=20.0,
        started="2026-11-22T10:00:00+0000",
        verdict=verdict,
        exit_code=0 if verdict == "PASS" else 4,
        wall_seconds=100.0,
        others_share=0.01,
        times=dict(TIMES),
        recommended={"throughput_infer_per_sec": throughput, "concurrency": 26, "request_batch_size": 1},
        dynamic_batching=None,
        confirmation=None,
        config="name: 'dlrm'",
        remeasured=(SERVER,) * 3 if verdict == "PASS" else (),
    )


# -- the runs and their order ---------------------------------------------------------------------------------------


def test_each_round_has_one_run_of_each_kind_in_an_order_that_the_seed_fixes() -> None:
    runs = list(order(6, seed=1))
    kinds = {Cell(model, condition) for model in ("dlrm", "mlp") for condition in CONDITIONS}
    for number in range(6):
        assert {cell for other, cell in runs if other == number} == kinds
    assert runs == list(order(8, seed=1))[: len(runs)], "more runs continue the same order"
    assert runs != list(order(6, seed=2))
    rounds = [[cell for other, cell in runs if other == number] for number in range(6)]
    assert any(other != rounds[0] for other in rounds)


def test_a_disturbance_takes_at_most_a_third_of_one_core(tmp_path: Path) -> None:
    own = psutil.Process()
    with disturbed(tmp_path / "log", REGULAR):
        (program,) = _below(own)
        while _cpu_seconds(program) < 0.2:  # the start of the interpreter takes CPU time too
            time.sleep(0.05)
        # the interval by the clock contains that of the CPU time, however late this process is in between
        started, used, seconds = time.monotonic(), 0.0, 0.0
        before = _cpu_seconds(program)
        while seconds < 1.5 or not used:
            time.sleep(0.1)
            used = _cpu_seconds(program) - before
            seconds = time.monotonic() - started
    assert used / seconds < 0.5, "less on a busy machine"
    assert not program.is_running()
    with disturbed(tmp_path / "log", None):
        assert not _below(own, seconds=1.0)


def _cpu_seconds(program: psutil.Process) -> float:
    return float(sum(program.cpu_times()[:2]))


def _below(own: psutil.Process, seconds: float = 60.0) -> list[psutil.Process]:
    """Return the disturbances that run below this process, once there are any or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = []
        for child in own.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # another child has ended
                if "busy_share" in " ".join(child.cmdline()[1:3]):
                    found.append(child)
        if found:
            return found
        time.sleep(0.05)
    return []


# -- shares and intervals -----------------------------------------------------------------------------------------


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


def test_intervals_of_means_and_ratios() -> None:
    interval = mean_interval([9.0, 10.0, 11.0])
    assert interval.estimate == pytest.approx(10.0)
    assert interval.high - interval.estimate == pytest.approx(4.3027 / math.sqrt(3), abs=1e-3)
    assert interval.text(".1f") == "10.0 (7.5 to 12.5)"
    ratio = ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert mean_interval([3.0]).text(".1f") == "3.0 (one value)"


def test_the_pooled_share_covers_the_truth_as_often_as_stated() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        truths = random.gamma(9.0, 0.03 / 9, 10)  # of each run; the mean is 3 %
        runs = [random.binomial(9000, truth, 3) / 9000 for truth in truths]
        interval = pooled_share([list(run) for run in runs])
        covered += interval.low <= 0.03 <= interval.high
    assert 0.90 <= covered / 400 <= 0.98


def test_the_interval_of_one_run_uses_the_differences_of_all_runs() -> None:
    alike, wild = [0.03, 0.03, 0.03], [0.005, 0.02, 0.08]
    (alone,) = run_shares([alike])
    pooled, _ = run_shares([alike, wild])
    assert alone.low == pytest.approx(0.03) == alone.high
    assert pooled.low < 0.02 < 0.04 < pooled.high
    assert pooled.estimate == pytest.approx(0.03)
    (none,) = run_shares([[0.0, 0.0, 0.0]])
    assert (none.low, none.high) == (0.0, 0.0)


# -- stored rows --------------------------------------------------------------------------------------------------


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


# -- tables -------------------------------------------------------------------------------------------------------


def test_the_table_of_verdicts_counts_and_judges() -> None:
    bad = replace(SERVER, share=0.08)
    runs = [verdict_run(number, throughput=8000.0 + 100 * number) for number in range(9)]
    lines = report([*runs, replace(verdict_run(9), remeasured=(bad,) * 3)], MACHINE)
    (row,) = (line for line in lines if line.startswith("| dlrm quiet | 10 | 10 |"))
    assert "| 100 (100) | 8,350 | " in row
    assert "8.00% (8.00% to 8.00%) | 1, 1 beyond their intervals | 1.20 |" in row
    assert "- PASS: 10 of 10 (at least 9: met)" in lines
    assert "- quiet dlrm: 100 s in the median (at most 180 s: met)" in lines
    assert lines[-1].endswith(f"{MACHINE}; 2026-11-22")


def test_other_ends_than_pass_miss_the_target() -> None:
    lines = report([verdict_run(0), verdict_run(1, "UNDECIDED"), verdict_run(2, "FAIL")], MACHINE)
    assert "- PASS: 1 of 3 (at least 3: **missed**)" in lines
    each = [line for line in lines if line.startswith("| dlrm quiet | ") and "| – | – | – | 26 |" in line]
    assert [line.split(" | ")[1:3] for line in each] == [["0", "PASS"], ["1", "UNDECIDED"], ["2", "FAIL"]]
    assert each[0].endswith("| 26 | 8,000 | 3.00% (3.00% to 3.00%) | 18.0, 18.0, 18.0 |")
    assert each[1].endswith("| 26 | 8,000 | – | – |")
    assert any(line.startswith("| dlrm quiet | 3 | 1 | 1 FAIL, 1 UNDECIDED |") for line in lines)
    (none,) = (line for line in report([verdict_run(0, "FAIL")], MACHINE) if line.startswith("| dlrm quiet | 1 | 0"))
    assert none.endswith("| 100 (100) | – | – | – | – | – | – | – |")


def test_own_time_is_divided_into_its_parts() -> None:
    own = OwnTime.of(100.0, TIMES)
    assert own.start_seconds == pytest.approx(2.0)
    assert own.other_seconds == pytest.approx(0.75)
    assert own.own_seconds == pytest.approx(3.5), "the run's own time and the time outside its clock"
    assert own.ranking_share == pytest.approx(0.03)
    lines = own_time_table({"dlrm quiet": [own, replace(own, start_seconds=0.0)]})
    assert lines[2].startswith("| dlrm quiet | 2 | 100 | 2.00 | 0.50 | 0.25 | 0.75 |")
    assert lines[-1] == (
        "- dlrm quiet: own 2.5% (at most 2%: **missed**), ranking 3.0% (at most 4%: met), "
        "memory 290 MB (at most 300 MB: met)"
    )
    unknown = OwnTime.of(100.0, TIMES | {"peak_memory_bytes": None})
    assert "memory nan MB (at most 300 MB: **missed**)" in own_time_table({"a": [unknown]})[-1]


# -- repeatability ------------------------------------------------------------------------------------------------


def test_the_spread_is_that_of_the_true_throughputs() -> None:
    random = np.random.default_rng(11)
    truths = np.exp(random.normal(0.0, 0.02, 20))
    drift = np.exp(random.normal(0.0, 0.2, (25, 1)))
    noise = np.exp(random.normal(0.0, 0.08, (25, 20)))
    spread = true_spread(8000 * truths * drift * noise, [1] * 20)
    low, high = np.quantile(truths, [0.1, 0.9])
    assert spread.true == pytest.approx(high / low - 1, abs=0.02)
    assert spread.true < spread.measured
    assert spread.deviation == pytest.approx(0.08, rel=0.1)


def test_equal_configurations_have_no_spread_but_that_of_the_remeasurement() -> None:
    random = np.random.default_rng(12)
    spreads = [true_spread(np.exp(random.normal(0.0, 0.05, (20, 10))), [1] * 10) for _ in range(50)]
    assert np.median([spread.measured for spread in spreads]) > 0.02
    assert np.median([spread.true for spread in spreads]) < 0.01


def test_a_configuration_counts_for_each_run_that_recommends_it() -> None:
    values = np.array([[100.0, 110.0], [200.0, 220.0], [150.0, 165.0]])
    assert true_spread(values, [1, 1]).true == pytest.approx(1.1**0.8 - 1)
    assert true_spread(values, [19, 1]).true == pytest.approx(0.0), "one of 20 is outside of the percentiles"


def remeasurement(number: int, name: str, throughput: float) -> Remeasurement:
    return Remeasurement(MACHINE, "dlrm", number, name, throughput, 18.0, 0.03, 50.0)


def test_only_complete_rounds_count_and_the_last_measurement_of_each() -> None:
    entrants = [
        Entrant(name, Candidate(8, True), LoadPoint(1, concurrency=26), 8000.0, runs)
        for name, runs in (("a at 26", 2), ("b at 26", 1), ("dynamic_batching {} at 26", 0))
    ]
    rows = [
        remeasurement(number, entrant.name, throughput * (1 + 0.01 * number))
        for number in (0, 1, 2)
        for entrant, throughput in zip(entrants, (9000.0, 7000.0, 8000.0), strict=True)
    ]
    rows = [remeasurement(0, "a at 26", 1.0), *rows, remeasurement(3, "a at 26", 1.0)]
    assert list(complete_rounds(entrants, rows)) == [0, 1, 2]
    lines = repeatability_report(entrants, rows)
    (first,) = (line for line in lines if line.startswith("| a |"))
    assert first.endswith("| 18.0 | 3.00% | 1.125 (1.125 to 1.125) |")
    assert "- Below `dynamic_batching {}` by more than the interval: 1 (**missed**)" in lines
    assert repeatability_report(entrants, rows[:2]) == ["fewer than two complete rounds"]


# -- the closed loop of the own client ----------------------------------------------------------------------------


def rounds_of(p95_ms: list[float], wall_seconds: float, windows: int = 1) -> list[Round]:
    """Return rounds of ``windows`` each; the p95 of a round is that of its first window."""
    return [
        Round(
            Measurement(1000.0, latency_p95_ms=p95_ms[first]),
            tuple(p95_ms[first : first + windows]),
            math.nan,
            50.0,
            0.1,
            wall_seconds,
            5.0 / wall_seconds,
        )
        for first in range(0, len(p95_ms), windows)
    ]


def test_information_a_second_grows_with_precision_and_speed() -> None:
    random = np.random.default_rng(7)
    own = rounds_of(list(np.exp(random.normal(0.0, 0.02, 400))), 6.0, 10)
    other = rounds_of(list(np.exp(random.normal(0.0, 0.04, 400))), 12.0, 10)
    ratio = information(other, own)
    assert ratio.low < 1 / 8 < ratio.high < 0.25
    assert ratio.estimate == pytest.approx(1 / 8, rel=0.3)
    drifting = rounds_of(list(np.exp(np.linspace(0.0, 1.0, 400) + random.normal(0.0, 0.02, 400))), 6.0, 10)
    assert information(drifting, own).estimate == pytest.approx(1.0, abs=0.25), "slow changes count little"


def test_the_interval_of_the_information_covers_the_truth_as_often_as_stated() -> None:
    random = np.random.default_rng(8)
    covered = 0
    for _ in range(300):
        own, other = (rounds_of(list(np.exp(random.normal(0.0, 0.05, 100))), 6.0, 10) for _ in range(2))
        interval = information(other, own)
        covered += interval.low <= 1.0 <= interval.high
    assert 0.91 <= covered / 300 <= 0.99


def test_agreement_needs_a_narrow_interval() -> None:
    assert agreement(Interval(1.01, 0.98, 1.04)) == "agrees within 5%"
    assert agreement(Interval(1.01, 0.8, 1.3)) == "no measurable difference"
    assert agreement(Interval(1.2, 1.1, 1.3)) == "**differs by +20.0%**"
    assert agreement(Interval(1.0, math.nan, math.nan)) == "measured once"


def test_the_table_of_the_closed_loop_compares_with_the_own_client() -> None:
    own, other = (
        [replace(one, windows_p95_ms=(one.p95_ms, 11.0)) for one in rounds_of(values, seconds)]
        for values, seconds in (([10.0, 10.2, 9.8], 6.0), ([10.1, 10.3, 9.9], 12.0))
    )
    lines = table("mlp", {"one launch": other, OWN: own})
    (compared,) = (line for line in lines if line.startswith("| one launch |"))
    assert "| 1,000 | – | 10.1 | – | – | 50 | 10.0% | 41.7% |" in compared
    assert "1.000 (1.000 to 1.000) | 1.010" in compared
    assert lines[-1] == "- one launch: throughput agrees within 5%, p95 agrees within 5%"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("real_verdicts*.runs")), ids=lambda path: path.stem)
def test_the_kept_tables_are_those_of_the_kept_rows(path: Path) -> None:
    runs = Records(path, VerdictRun).read()
    passed = sum(run.verdict == PASS for run in runs)
    lines = report(runs, runs[0].machine)
    assert any(line.startswith(f"- PASS: {passed} of {len(runs)} ") for line in lines)
    assert set(lines) <= set((BENCHMARKS / "real_verdicts.md").read_text().splitlines())
