"""The benchmark of ``tune plan``: the cases of a server, the trade-off curve, and the continuation of a call."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import planning_errors
from planning_errors import QUANTILES, SINGLE, PlanningCase, ServerCases, too_few_bound
from records import Records

from objectives import batch_stats
from optimizer.plan.evidence import SAFE


def case(true: int, safe: int, quantiles: tuple[int, ...]) -> PlanningCase:
    return PlanningCase("one run", "random", 0.05, true, safe - 2, safe - 1, safe, quantiles)


def test_a_server_has_one_case_whose_numbers_rise_with_the_quantile() -> None:
    (own,) = planning_errors.cases(0, 7, SINGLE)
    assert 1 <= own.low <= own.likely <= own.safe
    assert list(own.at_quantiles) == sorted(own.at_quantiles)
    assert own.at_quantiles[QUANTILES.index(SAFE)] == own.safe
    assert 0.7 * own.true <= own.likely <= 1.4 * own.true
    assert planning_errors.cases(0, 7, SINGLE) == (own,)


def test_a_slower_window_takes_longer_for_everything() -> None:
    hidden = planning_errors.drawn(np.random.default_rng(3))
    (measured,) = hidden.server.measure([(hidden.candidate, hidden.concurrency)])
    window = planning_errors._window(measured, np.random.default_rng(1))
    assert measured.throughput_infer_per_sec is not None
    assert window.throughput_infer_per_sec is not None
    factor = measured.throughput_infer_per_sec / window.throughput_infer_per_sec
    assert factor != pytest.approx(1.0, abs=1e-3)
    for name in planning_errors.SLOWER:
        assert getattr(window, name) == pytest.approx(factor * getattr(measured, name))
    before, after = (batch_stats.from_text(one.batch_stats) for one in (measured, window))
    assert [one.executions for one in after] == [one.executions for one in before]
    assert after[-1].compute_ns == pytest.approx(factor * before[-1].compute_ns, rel=1e-6)


def test_the_upper_bound_is_that_of_clopper_and_pearson() -> None:
    assert too_few_bound(0, 1000) == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert 0.0104 < too_few_bound(5, 1000) < 0.0106


def test_the_curve_counts_each_quantile(capsys: pytest.CaptureFixture[str]) -> None:
    planning_errors._print_curve(
        [case(10, 12, (9, 10, 10, 11, 12, 12, 13)), case(10, 10, (10, 10, 10, 10, 10, 10, 11))]
    )
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0].startswith("| 0.9 | 50.00% | ")
    assert rows[0].endswith("| 0.950 |")
    assert [row.split(" | ")[1] for row in rows[1:]] == ["0.00%"] * 6
    assert rows[-1].endswith("| 1.200 |")


def test_the_targets_are_judged() -> None:
    good, bad = case(10, 11, ()), case(10, 9, ())
    assert "missed" not in planning_errors._targets([good] * 200)
    judged = planning_errors._targets([good] * 100 + [bad] * 20).splitlines()
    assert ["missed" in line for line in judged] == [True, False, True]


def test_finished_servers_are_not_planned_again(tmp_path: Path) -> None:
    kept = [ServerCases(planning_errors._machine(), 5, number, (case(3 + number, 9, ()),)) for number in range(3)]
    records = Records(tmp_path / "single.jsonl", ServerCases)
    for row in (*kept, ServerCases(planning_errors._machine(), 6, 0, ())):
        records.append(row)
    arguments = Namespace(work=tmp_path, processes=1)
    again = planning_errors._all_cases(arguments, 3, 5, "single", SINGLE)
    assert again == [one for row in kept for one in row.cases]
