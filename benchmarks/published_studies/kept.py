"""The measurements that the repository keeps, from which tables and plots are written: STUDY.jsonl by each table.

A line is a cell of a step, the rest of a step's results, or the reason why a step has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from published import Row
from side_by_side import FIGURES, KEY, STAGES

FOLDER = Path(__file__).parent
COLUMNS = (*KEY, *FIGURES, *STAGES, "reason")


@dataclass(frozen=True)
class StepResults:
    """The results of a step. ``cells`` are named as in trials.csv, with a ``label``; ``notes`` explain them."""

    command: str
    hardware: str
    began: str
    load_average: float | None
    cells: list[Row]
    notes: list[str]


StepRecord: TypeAlias = StepResults | str
"""The results of a step, or the reason why it has none."""


def read_kept(study: str, folder: Path = FOLDER) -> dict[int, StepRecord]:
    """Return the records of a study's steps by the number of the step; none if the study has no file yet."""
    path = folder / f"{study}.jsonl"
    records: dict[int, StepRecord] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        number = entry.pop("step")
        if "missing" in entry:
            records[number] = entry["missing"]
        elif "command" in entry:
            records[number] = StepResults(**entry, cells=[])
        else:
            record = records[number]
            assert isinstance(record, StepResults), f"{path}: a cell of step {number} before its command"
            record.cells.append(dict.fromkeys(COLUMNS) | entry)
    return records


def write_kept(study: str, records: Mapping[int, StepRecord], folder: Path = FOLDER) -> None:
    """Write the records, of each cell only the values that the tables and plots show."""
    entries: list[Row] = []
    for number, record in sorted(records.items()):
        if isinstance(record, str):
            entries.append({"step": number, "missing": record})
            continue
        facts = asdict(record)
        cells = facts.pop("cells")
        entries.append({"step": number, **facts})
        for cell in cells:
            known = {name: value for name in COLUMNS if (value := cell.get(name)) not in (None, "")}
            entries.append({"step": number, **known})
    lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
    (folder / f"{study}.jsonl").write_text("".join(lines), encoding="utf-8")


def all_cells(records: Iterable[StepRecord]) -> list[Row]:
    """Return the cells of all steps."""
    return [cell for record in records if isinstance(record, StepResults) for cell in record.cells]
