"""The rows of a benchmark that can be continued: one JSON line each, all from one machine."""

from __future__ import annotations

import sys
from dataclasses import Field, asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import TypeAdapter

from lib.json_lines import append_row, read_rows
from optimizer.deploy import runtime
from optimizer.machine import hardware


class MachineRow(Protocol):
    """A dataclass that names the machine that it was measured on, as ``this_machine`` returns it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def machine(self) -> str: ...


RowT = TypeVar("RowT", bound=MachineRow)


def this_machine() -> str:
    """Return the CPUs and versions of the programs: rows with other ones do not belong into one table."""
    return f"{hardware.detect()}; {programs()}"


def programs() -> str:
    """Return the versions of the server and of perf_analyzer as text."""
    server, perf_analyzer = runtime.TRITON_VERSION, runtime.ensure(print).perf_analyzer_version
    if server == perf_analyzer:
        return f"tritonserver and perf_analyzer {server}"
    return f"tritonserver {server}, perf_analyzer {perf_analyzer}"


class Records(Generic[RowT]):
    """The rows in the file ``path``. An incomplete line, which a killed run leaves, is ignored."""

    def __init__(self, path: Path, kind: type[RowT]) -> None:
        self._path = path
        self._form = TypeAdapter(kind)

    def read(self, machine: str = "") -> list[RowT]:
        """Return the rows. Exits with a message if one is not from ``machine``, by default that of the first."""
        rows = read_rows(self._path, self._form)
        machine = machine or (rows[0].machine if rows else "")
        for row in rows:
            if row.machine != machine:
                sys.exit(
                    f"{self._path}: its rows were measured on another machine ({row.machine}) than "
                    f"{machine}; give another folder (--work)"
                )
        return rows

    def append(self, row: RowT) -> None:
        """Add a row at the end of the file; it is on disk when this returns."""
        append_row(self._path, asdict(row))
