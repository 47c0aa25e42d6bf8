"""The jobs of benchmarks in processes of their own (``benchmarks/lib/process_pool.py``)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from lib.process_pool import run_in_own_process, run_missing_jobs
from optimizer.core.stopwatch import peak_memory_bytes
from tests.conftest import not_none


def test_a_job_whose_result_is_in_the_file_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text('[["root", 4.0], 77.0]\n')
    results = run_missing_jobs(math.sqrt, [4.0, 9.0], 1, file, float, lambda number: ["root", number])
    assert results == {4.0: 77.0, 9.0: 3.0}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        [["root", 4.0], 77.0],
        [["root", 9.0], 3.0],
    ]


def test_an_incomplete_line_of_a_killed_run_is_ignored_and_a_row_of_another_form_refused(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results"
    assert run_missing_jobs(math.sqrt, [4.0], 1, file, float, lambda number: number) == {4.0: 2.0}
    file.write_text(f"{file.read_text()}[9.0, 3")
    results = run_missing_jobs(math.sqrt, [4.0, 9.0], 1, file, float, lambda number: number)
    assert results == {4.0: 2.0, 9.0: 3.0}
    assert file.read_text().splitlines() == ["[4.0, 2.0]", "[9.0, 3", "[9.0, 3.0]"]
    file.write_text('{"job": 4.0, "outcome": 2.0}\n')
    with pytest.raises(SystemExit, match=r"results: a row of another version of this benchmark; give another file"):
        run_missing_jobs(math.sqrt, [4.0], 1, file, float, lambda number: number)


def test_results_are_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("[9.0, 3.0]\n[1.0, 1.0]\n")
    results = run_missing_jobs(math.sqrt, [1.0, 4.0, 9.0], 1, file, float, lambda number: number)
    assert list(results.items()) == [(1.0, 1.0), (4.0, 2.0), (9.0, 3.0)]


def test_a_call_in_its_own_process_returns_its_result() -> None:
    assert run_in_own_process(os.getpid) != os.getpid()
    assert run_in_own_process(math.pow, 2.0, 3.0) == 8.0


def test_the_peak_memory_of_a_call_in_its_own_process_does_not_include_that_of_its_caller() -> None:
    large = b"x" * (200 << 20)
    assert not_none(run_in_own_process(peak_memory_bytes)) < len(large) < not_none(peak_memory_bytes())
