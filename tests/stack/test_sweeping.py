"""Tests for ``tune sweep`` on the real server, with a model whose batches all take the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_fixtures import Run, open_sandbox, run_tune
from tests.csv_tables import read_rows
from tests.repositories import skip_without_python_models, write_sleeper

BATCH_MS = 10
CONCURRENCY = 4
LISTS = (
    "--max-batch-size",
    "8,1",
    "--max-queue-delay",
    "off,0",
    "-b",
    "1,2",
    "--concurrency-range",
    f"{CONCURRENCY}",
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    skip_without_python_models()
    with open_sandbox(tmp_path_factory.mktemp("sweep")) as sandbox:
        write_sleeper(sandbox.working_folder / "models", milliseconds=BATCH_MS)
        words = (*LISTS, "--csv", "cells.csv", "--json", "models/sleeper")
        yield Run(sandbox, run_tune(sandbox, "sweep", *words))


def settings(cell: dict[str, Any]) -> tuple[object, ...]:
    return tuple(cell[name] for name in ("max_batch_size", "dynamic_batching", "request_batch_size"))


def test_dynamic_batching_beats_static(swept: Run) -> None:
    assert any(line.startswith("1/") for line in swept.ended.stderr_lines), "progress"
    assert swept.ended.errors == []
    assert swept.ended.code == 0
    served = {settings(cell): cell["throughput_infer_per_sec"] for cell in swept.document["cells"]}
    alone = 1000 / BATCH_MS
    assert 0 < served[8, False, 1] < 1.1 * alone, "batches of one request"
    assert served[8, True, 1] > served[8, False, 1], f"{CONCURRENCY} requests in flight make batches"
    assert 0 < served[1, True, 1] < 1.1 * alone


def test_json_and_csv_hold_every_cell(swept: Run) -> None:
    cells = swept.document["cells"]
    assert len({settings(cell) for cell in cells}) == len(cells) == 2 * 2 * 2
    refused = [cell for cell in cells if cell["throughput_infer_per_sec"] is None]
    assert [(cell["max_batch_size"], cell["request_batch_size"]) for cell in refused] == [(1, 2), (1, 2)]
    assert all("admits no requests of 2 samples" in cell["reason"] for cell in refused)
    for cell in cells:
        if cell not in refused:
            assert cell["compute_infer_ms"] > BATCH_MS
            assert cell["latency_p99_ms"] > BATCH_MS
    rows = read_rows(swept.sandbox.working_folder / "cells.csv")
    assert [row["throughput_infer_per_sec"] for row in rows] == [
        "" if cell in refused else str(cell["throughput_infer_per_sec"]) for cell in cells
    ]


def test_a_resumed_sweep_measures_what_is_missing(swept: Run) -> None:
    table = swept.sandbox.working_folder / swept.document["results_dir"] / "trials-b2.csv"
    *kept, lost = table.read_text().splitlines(keepends=True)
    table.write_text("".join(kept))
    ended = run_tune(swept.sandbox, "sweep", "--json", "--resume", Path(swept.document["results_dir"]))
    assert (ended.code, ended.errors) == (0, [])
    resumed = json.loads(ended.stdout)
    assert list(map(settings, resumed["cells"])) == list(map(settings, swept.document["cells"]))
    assert resumed["began"] == swept.document["began"]
    assert resumed["wall_seconds"] > swept.document["wall_seconds"], "of both sessions"
    *again, measured = table.read_text().splitlines(keepends=True)
    assert again == kept
    assert measured.split(",")[:6] == lost.split(",")[:6]
