"""What a sweep measured as data: ``sweep.json`` (also ``--json``) and ``--csv``, every cell in both."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimizer.errors import BadInputError
from optimizer.machine.notes import Note
from optimizer.machine.telemetry import disturbance
from optimizer.report import export
from optimizer.store.disk import write_whole
from optimizer.store.run_folder import RunFolder
from optimizer.sweeping.plan import Cell
from optimizer.trial import Point
from optimizer.untrusted import one_line, read_bytes

FILE = "sweep.json"
MAX_BYTES = 64 << 20
STAGES = (
    "client_send_ms",
    "network_ms",
    "queue_ms",
    "compute_input_ms",
    "compute_infer_ms",
    "compute_output_ms",
    "client_recv_ms",
)


@dataclass(frozen=True)
class Facts:
    """What is known of a sweep before anything is measured. ``machine``: as ``machine_notes``, when it ``began``."""

    command: str
    words: list[str]
    model: Mapping[str, object]
    hardware: str
    fingerprint: Mapping[str, object]
    machine: Mapping[str, Note]
    began: str
    results_dir: str


def command(words: Sequence[str]) -> str:
    return shlex.join(["tune", "sweep", *words])


def entry(cell: Cell) -> dict[str, Any]:
    """One cell, named as in trials.csv; figures that are not known are None."""
    point = Point(cell.number, cell.candidate, cell.load, cell.measurement)
    return {
        **export.entry(point),
        **{stage: getattr(cell.measurement, stage) for stage in STAGES},
        "measurements": cell.measured,
        "reason": cell.measurement.reason,
    }


def of(status: str, facts: Facts, found: Sequence[Cell], notes: Sequence[str], wall_seconds: float) -> dict[str, Any]:
    return {
        "status": status,
        **asdict(facts),
        "notes": list(notes),
        "wall_seconds": round(wall_seconds, 3),
        "cells": [entry(cell) for cell in found],
    }


def notes(found: Sequence[Cell]) -> list[str]:
    """What whoever reads the figures should know of how they came about."""
    known = [cell for cell in found if cell.has_figures]
    unstable = [cell for cell in known if not cell.measurement.stable]
    disturbed = [cell.measurement.other_cpu_share or 0.0 for cell in known if disturbance(cell.measurement)]
    told = []
    if unstable:
        told.append(f"unstable, marked *: {len(unstable)} of {len(known)} cells, whose windows disagreed")
    if disturbed:
        told.append(
            f"disturbed: {len(disturbed)} of {len(known)} cells, while other processes or machines took up to "
            f"{max(disturbed):.0%} of the CPUs"
        )
    return told


def write(folder: RunFolder, told: Mapping[str, object]) -> None:
    export.write_json(folder.path / FILE, told)


def read_words(path: Path) -> list[str]:
    """The words of the command in a sweep's folder. Raises BadInputError where that is none."""
    data = read_bytes(path / FILE, MAX_BYTES, "give the folder of a sweep")
    try:
        words = json.loads(data)["words"]
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInputError(f"{one_line(str(path / FILE))}: not the record of a sweep") from None
    return words


def write_csv(path: Path, found: Sequence[Cell]) -> None:
    """One row a cell. Raises EnvironmentFault where the disk refuses it."""
    rows = [entry(cell) for cell in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        sizes = " ".join(map(str, row["preferred_batch_sizes"]))
        truths = {name: str(value).lower() for name, value in row.items() if isinstance(value, bool)}
        writer.writerow(row | truths | {"preferred_batch_sizes": sizes})
    write_whole(path, text.getvalue())
