"""The study of a run, which its workers share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.config.problem import Problem
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import RunFolder
from optimizer.study.run_record import RunRecord
from optimizer.study.study import check_stored_study, open_searcher

FINGERPRINT = Fingerprint("a CPU", 8, (), "embedded", "2.51.0", (), "")


def task_of(problem: Problem, sha256: str = "", input_data: str = "random") -> Any:
    facts = {"sha256": sha256} if sha256 else {}
    return SimpleNamespace(
        problem=problem, source=SimpleNamespace(facts=facts, concurrent={}), input_data=Path(input_data)
    )


def test_workers_with_another_model_or_other_requests_are_refused(problem: Problem, tmp_path: Path) -> None:
    def open_study(number: int, options: dict[str, Any], task: Any) -> None:
        folder = RunFolder(tmp_path / f"worker{number}")
        folder.path.mkdir(exist_ok=True)
        values = RunOptions("m", search="random", storage=f"sqlite:///{tmp_path}/s.db", study_name="s", **options)
        environment: Any = SimpleNamespace(options=values, on_progress=print)
        with open_searcher(RunRecord(folder, environment, task, FINGERPRINT, ()), None):
            check_stored_study(values, task, folder, FINGERPRINT)

    task_fields = {"sha256": 64 * "a"}
    open_study(0, {}, task_of(problem, **task_fields))
    open_study(1, {}, task_of(problem, **task_fields))
    open_study(2, {}, task_of(problem))  # a worker that does not know the SHA-256
    others: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({}, {"sha256": 64 * "b"}, r"sha256 \(aaaaaaaaaaaa there, bbbbbbbbbbbb here\)"),
        ({"protocol": "http"}, {}, r"protocol \(grpc there, http here\)"),
        ({"shared_memory": "system"}, {}, r"shared memory \(none there, system here\)"),
        ({"sequence_length": "5"}, {}, r"requests \(none there, sequence_length 5 here\)"),
        (
            {"input_data": "x/s.npz"},
            {"input_data": "/c/12.json"},
            r"requests \(none there, input_data 12\.json here\)",
        ),
    ]
    for number, (options, fields, difference) in enumerate(others, start=3):
        with pytest.raises(BadInputError, match=f"study 's' differs in {difference};"):
            open_study(number, options, task_of(problem, **(task_fields | fields)))
