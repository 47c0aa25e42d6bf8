"""The jobs of benchmarks in processes of their own (``benchmarks/lib/process_pool.py``)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from lib.process_pool import run_in_own_process, run_missing_jobs


def test_a_job_whose_result_is_in_the_file_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text('[["root", 4.0], 77.0]\n')
    results = run_missing_jobs(math.sqrt, [4.0, 9.0], 1, file, float, lambda number: ["root", number])
    assert results == {4.0: 77.0, 9.0: 3.0}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        [["root", 4.0], 77.0],
        [["root", 9.0], 3.0],
    ]


def test_results_are_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("[9.0, 3.0]\n[1.0, 1.0]\n")
    results = run_missing_jobs(math.sqrt, [1.0, 4.0, 9.0], 1, file, float, lambda number: number)
    assert list(results.items()) == [(1.0, 1.0), (4.0, 2.0), (9.0, 3.0)]


def test_a_call_in_its_own_process_returns_its_result() -> None:
    assert run_in_own_process(os.getpid) != os.getpid()
    assert run_in_own_process(math.pow, 2.0, 3.0) == 8.0
