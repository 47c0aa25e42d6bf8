"""The results of a sweep: ``sweep.json`` (also ``--json``), ``--csv``, and tables on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from objectives.metrics import ITL, METRICS, TTFT, Measurement
from optimizer.core import files
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.notes import DisturbedCells, Note, UnstableCells, present
from optimizer.core.safe_text import one_line, show_path
from optimizer.core.trial import LoadPoint, Point, Trial, TrialRole
from optimizer.machine.cpu_usage import lost_cpu_to_others
from optimizer.measure.load_client.open_loop import lateness_note
from optimizer.results import configuration_text, formatting, result_document
from optimizer.results.outcome_values import STAGES
from optimizer.results.terminal_output import plain_table, print_line, print_table, print_unbroken
from optimizer.store.run_folder import (
    SWEEP_FILE,
    RunFolder,
    damaged_record,
    describe_model_change,
    read_sweep_record,
)
from optimizer.store.trials_reader import FAILED
from optimizer.study.sweep_plan import GivenOptions, SweepCell, SweepPlan


def entry(cell: SweepCell) -> dict[str, Any]:
    """Return the entry of one cell, with the names of trials.csv; unknown values are None."""
    point = Point(cell.number, cell.candidate, cell.load, cell.measurement)
    return {
        **result_document.entry(point),
        **{stage: getattr(cell.measurement, stage) for stage in STAGES},
        "measurements": cell.measured,
        "reason": cell.measurement.reason,
    }


def sweep_document(
    status: str,
    facts: Mapping[str, object],
    cells: Sequence[SweepCell],
    notes: Sequence[Note],
    times: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the document of sweep.json.

    ``facts`` are known before the first measurement. ``times`` are in seconds, of all sessions together.
    """
    return {
        "status": status,
        **facts,
        "notes": [str(note) for note in notes],
        **times,
        "cells": [entry(cell) for cell in cells],
    }


def notes_on_cells(cells: Sequence[SweepCell]) -> tuple[Note, ...]:
    """Return notes for the user on the measurements."""
    measured = [cell for cell in cells if cell.measurement.has_values]
    unstable = [cell for cell in measured if not cell.measurement.stable]
    disturbed = [cell.measurement.other_cpu_share or 0.0 for cell in measured if lost_cpu_to_others(cell.measurement)]
    return present(
        [
            UnstableCells(len(unstable), len(measured)) if unstable else None,
            DisturbedCells(len(disturbed), len(measured), max(disturbed)) if disturbed else None,
            lateness_note([cell.measurement for cell in measured]),
        ]
    )


def read_document(folder: Path) -> dict[str, Any]:
    """Return sweep.json in ``folder``. Its ``options`` are GivenOptions, other keys are not checked.

    Raises BadInputError if it is not the record of a sweep.
    """
    from pydantic import TypeAdapter  # imported late, so that a wrong flag is reported at once

    record = read_sweep_record(folder)
    try:
        TypeAdapter(GivenOptions).validate_python(record["options"], strict=True)
    except ValueError:
        raise damaged_record(folder / SWEEP_FILE, "sweep", "wrong options") from None
    return record


def refuse_other_model(folder: RunFolder, earlier: Mapping[str, Any], facts: Mapping[str, object]) -> None:
    """Raise BadInputError if the sweep with the document ``earlier`` measured other files than those of ``facts``."""
    if change := describe_model_change(earlier.get("model"), facts):
        raise BadInputError(
            f"{show_path(folder.path)}: the files of the model have changed since the sweep began ({change}); "
            "restore the files, or begin a new sweep"
        )


def write_csv(path: Path, cells: Sequence[SweepCell]) -> None:
    """Write one row for each cell, with the columns of trials.csv. Raises EnvironmentFault if the disk refuses it."""
    rows = [
        {**entry(cell), **cell.load.cells(), "status": "ok" if cell.measurement.has_values else FAILED}
        for cell in cells
    ]
    for row, cell in zip(rows, cells, strict=True):
        for name, column in (("models", "by_model"), ("priorities", "by_priority")):
            if row.pop(name, None) is not None:  # a list for JSON
                row[column] = getattr(cell.measurement, column)
    files.write_csv(path, list(dict.fromkeys(name for row in rows for name in row)), rows)


STAGE_NAMES = (
    "Client\nSend",
    "Network+\nServer\nSend/Recv",
    "Server\nQueue",
    "Compute\nInput",
    "Compute\nInfer",
    "Compute\nOutput",
    "Client\nRecv",
)
LATENCIES = ("latency_avg_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")
STREAMED = {  # header: metric of a model that streams
    "Output\ntokens/s": "output-throughput",
    **{
        f"{formatting.TIMING_NAMES[timing.name]}\n{statistic} ms".replace("-", "-\n"): timing.metric(statistic)
        for timing in (TTFT, ITL)
        for statistic in ("p50", "p95", "p99")
    },
}
NO_VALUE = "–"


class LoadColumn(NamedTuple):
    """The first column of a table: its header, and the function that returns the text of a cell."""

    header: str
    text: Callable[[SweepCell], str]


class SweepProgress:
    """A ProgressObserver that prints one line for each measurement."""

    def __init__(self, on_progress: Callable[[str], None], plan: SweepPlan) -> None:
        self._on_progress, self._plan, self._done = on_progress, plan, 0

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None:
        self._on_progress(
            f"{number + 1}/{len(self._plan.configurations)}  {configuration_text.configuration(candidate)}"
        )

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        self._done += 1
        text = measurement.reason
        if measurement.has_values:
            candidate = self._plan.configurations[number]
            latency = "ttft-p95" if measurement.is_streamed else "latency-p95"
            text = formatting.performance(Point(number, candidate, load, measurement), latency)
        self._on_progress(f"  {self._done} of {len(self._plan)}: {text}")

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self._on_progress(f"  failed: {trial.reason}")


def print_sweep(console: Console, cells: Sequence[SweepCell], document: Mapping[str, Any]) -> None:
    """Print all results of a sweep; ``document`` is its sweep.json."""
    print_line(console, f"{document['model']['name']} on {document['hardware']}")
    has_several_sizes = len({cell.load.request_batch_size for cell in cells}) > 1
    has_one_load = len({(cell.load.concurrency, cell.load.request_rate) for cell in cells}) == 1
    is_by_request = has_several_sizes and has_one_load  # the rows are request batch sizes
    groups = [  # the cells of one configuration, and of one request batch size unless the rows are these sizes
        list(group)
        for _, group in groupby(
            cells, key=lambda cell: (cell.number, None if is_by_request else cell.load.request_batch_size)
        )
    ]
    for group in groups:
        _print_group(console, group, is_by_request)
    if len(groups) > 1:
        _print_comparison(console, groups, with_batch_size=not is_by_request and has_several_sizes)
    for note in document["notes"]:
        print_line(console, f"note: {note}", "yellow")
    if document["status"] == "interrupted":
        print_line(console, "interrupted before all was measured", "bold")
        print_unbroken(console, one_line(f"resume   tune sweep --resume {shlex.quote(document['results_dir'])}"))
    print_unbroken(console, one_line(f"results  {document['results_dir']}"))


def _print_group(console: Console, cells: Sequence[SweepCell], is_by_request: bool) -> None:
    """Print the cells of one configuration, and of one request batch size unless the rows are these sizes."""
    load = cells[0].load
    print_line(console)
    print_line(console, configuration_text.configuration(cells[0].candidate), "bold")
    about = f"requests of {formatting.count(load.request_batch_size, 'sample')}"
    if is_by_request:
        about = f"{formatting.named_load(load)}, rows by request batch size"
    print_line(console, about, "dim")
    column = _load_column(cells[0], is_by_request)
    failed = [cell for cell in cells if not cell.measurement.has_values]
    if len(failed) < len(cells):
        _print_cells(console, cells, column)
    for reason, alike in groupby(failed, key=lambda cell: cell.measurement.reason):
        loads = ", ".join(map(column.text, alike))
        name = column.header.lower().replace("\n", " ")
        print_line(console, f"{name} {loads}: {reason}", "red")


def _print_cells(console: Console, cells: Sequence[SweepCell], load: LoadColumn) -> None:
    """Print a table of throughput and latencies, and tables of the other values that were measured."""
    table = plain_table(f">{load.header}", ">Throughput\ninfer/s ", ">Avg\nms", ">p90\nms", ">p95\nms", ">p99\nms")
    for cell in cells:
        mark = " " if cell.measurement.stable or not cell.measurement.has_values else "*"
        throughput = _number(cell.measurement.throughput_infer_per_sec) + mark
        table.add_row(load.text(cell), throughput, *(_number(getattr(cell.measurement, name)) for name in LATENCIES))
    print_table(console, table)
    is_streamed = any(cell.measurement.is_streamed for cell in cells)
    if is_streamed:
        print_line(console)
        streamed = plain_table(f">{load.header}", *(f">{name}" for name in STREAMED))
        for cell in cells:
            values = (METRICS[metric].value(cell.measurement) for metric in STREAMED.values())
            streamed.add_row(load.text(cell), *map(_number, values))
        print_table(console, streamed)
    has_stages = any(getattr(cell.measurement, stage) is not None for cell in cells for stage in STAGES)
    if has_stages and not is_streamed:  # Triton's stages end when the execution returns, maybe before the responses
        print_line(console)
        stages = plain_table(f">{load.header}", *(f">{name}" for name in STAGE_NAMES))
        for cell in cells:
            stages.add_row(load.text(cell), *(_stage_text(cell, stage) for stage in STAGES))
        print_table(console, stages)
    if any(formatting.gpu(cell.measurement) for cell in cells):
        print_line(console)
        gpus = plain_table(f">{load.header}", ">GPU\nmemory", ">J/1000\ninfer", "GPU")
        for cell in cells:
            memory = formatting.quantity(METRICS["gpu-memory"], cell.measurement.gpu_memory_bytes)
            energy = formatting.number(METRICS["energy"].value(cell.measurement))
            gpus.add_row(load.text(cell), memory, energy, formatting.gpu(cell.measurement))
        print_table(console, gpus)


def _print_comparison(console: Console, groups: Sequence[Sequence[SweepCell]], *, with_batch_size: bool) -> None:
    """Print the cell with the highest throughput of each of ``groups``, the cells that are compared.

    ``with_batch_size`` adds a column for the request batch size, of which each group has one.
    """
    print_line(console)
    print_line(console, "comparison: each at its highest throughput, with the gain over the first", "bold")
    streamed = {"tokens/s": "output-throughput", "TTFT\np95 ms": "ttft-p95"}
    if not any(cell.measurement.is_streamed for cells in groups for cell in cells):
        streamed = {}
    table = plain_table(
        ">infer/s",
        "gain",
        *(f">{name}" for name in streamed),
        ">avg ms",
        ">p95 ms",
        ">lowest\np95 ms",
        ">load",
        *([">batch"] if with_batch_size else []),
        "configuration",
    )
    first_throughput: float | None = None
    for cells in groups:
        measured = [cell for cell in cells if cell.measurement.has_values]
        best = max(measured, key=lambda cell: cell.measurement.throughput_infer_per_sec or 0.0, default=cells[0])
        throughput = best.measurement.throughput_infer_per_sec
        first_throughput = first_throughput or throughput
        p95_ms = [cell.measurement.latency_p95_ms for cell in measured if cell.measurement.latency_p95_ms]
        table.add_row(
            _number(throughput),
            f"{throughput / first_throughput:.2f}x" if throughput and first_throughput else NO_VALUE,
            *(_number(METRICS[metric].value(best.measurement)) for metric in streamed.values()),
            _number(best.measurement.latency_avg_ms),
            _number(best.measurement.latency_p95_ms),
            _number(min(p95_ms, default=None)),
            formatting.load(best.load) if measured else NO_VALUE,
            *([f"{best.load.request_batch_size:,}"] if with_batch_size else []),
            Text(configuration_text.configuration(best.candidate), overflow="fold"),
        )
    print_table(console, table)
    print_line(console)


def _load_column(cell: SweepCell, is_by_request: bool) -> LoadColumn:
    if is_by_request:
        return LoadColumn("Batch\nSize", lambda cell: f"{cell.load.request_batch_size:,}")
    if cell.load.request_rate:
        return LoadColumn("Requests/s", lambda cell: formatting.exact(cell.load.request_rate))
    return LoadColumn("Concurrency", lambda cell: f"{cell.load.concurrency:,}")


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else formatting.number(value)


def _stage_text(cell: SweepCell, name: str) -> str:
    """Return the time with a fixed number of digits, so that µs and ms can be compared in one column."""
    value = getattr(cell.measurement, name)
    return NO_VALUE if value is None else f"{value:,.3f}"
