"""The recorded tables that benchmarks search."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.store.trials_table import read_run_table

TABLES = Path(__file__).parents[3] / "benchmarks/tables"


@pytest.mark.parametrize(
    "path",
    sorted([*TABLES.glob("*.csv"), *TABLES.glob("recordings/*.csv")]),
    ids=lambda path: str(path.relative_to(TABLES)),
)
def test_a_table_is_that_of_a_run(path: Path) -> None:
    assert read_run_table(path) is not None
