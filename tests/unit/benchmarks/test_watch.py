"""The pure parts of ``benchmarks/watch.py``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from watch import cases, table

from optimizer.results.finished_run import read_run
from optimizer.watch.expectation import Expectation, expectation
from optimizer.watch.fit_check import Check, Judgement, judge
from optimizer.watch.server_metrics import ServedLoad

SERVED = ServedLoad(5.0, 100, {}, 400, 50, 300, 100, 100)


@pytest.fixture(scope="module")
def expected() -> Expectation:
    """Fit the server model in a test, because each process of pytest collects all tests."""
    return expectation(read_run(Path(__file__).parents[2] / "data" / "dlrm" / "sample"))


def judgement(expected: Expectation, *differing: str, near: bool = False) -> Judgement:
    checks = [Check(name, "differs") for name in differing] + [Check("rate", "near" if near else "fits")]
    return replace(judge(expected, [SERVED] * 2, 1), checks=tuple(checks))


def test_the_cases_that_fit_have_the_load_and_the_server_of_the_run(expected: Expectation) -> None:
    own = expected.point.candidate
    for case in cases(expected):
        if case.fits:
            assert (case.candidate, case.settings) == (own, {})
            assert case.load.request_batch_size == expected.request_samples
            assert case.load.request_rate < (expected.safe_rate or 0)
    assert {case.fits for case in cases(expected)} == {True, False}


def test_a_server_that_may_not_reach_a_rate_gets_a_closed_loop(expected: Expectation) -> None:
    """The client would give the rate up."""
    slower = [case for case in cases(expected) if case.candidate != expected.point.candidate or case.settings]
    assert len(slower) == 3
    for case in slower:
        assert case.load.concurrency or case.load.request_rate < 0.1 * (expected.safe_rate or 0)


def test_the_table_counts_judgements_and_names_the_checks(expected: Expectation) -> None:
    first, *_, last = cases(expected)
    written = table(
        [
            (first, [judgement(expected), judgement(expected, near=True), None]),
            (
                last,
                [
                    judgement(expected, "queue time"),
                    judgement(expected, "queue time", "execution time"),
                    judgement(expected),
                ],
            ),
        ]
    )
    rows = written.splitlines()[2:]
    assert rows[0].endswith("| fit | 1 | 1 | 0 | 0 | 1 | – |")
    assert rows[1].endswith("| differ | 1 | 0 | 2 | 0 | 0 | queue time (2), execution time (1) |")
