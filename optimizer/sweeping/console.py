"""A sweep as text: for each configuration the documents' two tables, then all configurations side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from objectives.metrics import METRICS, Measurement
from optimizer.report import words
from optimizer.report.plain_tables import plain_table, print_table
from optimizer.sweeping.document import STAGES
from optimizer.sweeping.plan import Cell, Plan
from optimizer.trial import Candidate, LoadPoint, Point, Trial
from optimizer.untrusted import one_line

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
NONE = "–"
Column = tuple[str, Callable[[Cell], str]]


class Progress:
    """Says each measurement in a line."""

    def __init__(self, say: Callable[[str], None], plan: Plan) -> None:
        self._say, self._plan, self._done = say, plan, 0

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self._say(f"{number + 1}/{len(self._plan.configurations)}  {words.configuration(candidate)}")

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        self._done += 1
        figures = measurement.reason
        if measurement.throughput_infer_per_sec is not None:
            candidate = self._plan.configurations[number]
            figures = words.performance(Point(number, candidate, load, measurement), "latency-p95")
        self._say(f"  {self._done} of {len(self._plan)}: {figures}")

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self._say(f"  failed: {trial.reason}")


def print_sweep(console: Console, found: Sequence[Cell], told: Mapping[str, Any]) -> None:
    """Everything that a sweep has to say; ``told`` is its document."""
    _say(console, f"{told['model']['name']} on {told['hardware']}")
    rows = _by_request(found)
    for _, group in groupby(found, key=lambda cell: cell.number):
        _print_configuration(console, list(group), rows)
    if len({(cell.number, *([] if rows else [cell.load.request_batch_size])) for cell in found}) > 1:
        _print_comparison(console, found, split=not rows)
    for note in told["notes"]:
        _say(console, f"note: {note}", "yellow")
    if told["status"] == "interrupted":
        _say(console, "interrupted before all was measured", "bold")
        _say_whole(console, f"go on    tune sweep --resume {shlex.quote(told['results_dir'])}")
    _say_whole(console, f"results  {told['results_dir']}")


def _by_request(found: Sequence[Cell]) -> bool:
    """Whether the rows are sizes of requests, at one load each."""
    loads = {(cell.load.concurrency, cell.load.request_rate) for cell in found}
    return len(loads) == 1 and len({cell.load.request_batch_size for cell in found}) > 1


def _print_configuration(console: Console, own: Sequence[Cell], by_request: bool) -> None:
    for size, group in groupby(own, key=lambda cell: None if by_request else cell.load.request_batch_size):
        cells = list(group)
        _say(console)
        _say(console, words.configuration(cells[0].candidate), "bold")
        load = cells[0].load
        about = f"concurrency {words.load(load)}" if load.concurrency else words.load(load)
        _say(
            console,
            f"{about}, rows by request batch size" if size is None else f"requests of {words.count(size, 'sample')}",
            "dim",
        )
        if any(cell.has_figures for cell in cells):
            _print_cells(console, cells, _load_column(cells[0], by_request))
        for reason, failed in groupby((c for c in cells if not c.has_figures), key=lambda c: c.measurement.reason):
            which = ", ".join(_load_column(cell, by_request)[1](cell) for cell in failed)
            name = _load_column(cells[0], by_request)[0].lower()
            _say(console, f"{name.replace(chr(10), ' ')} {which}: {reason}", "red")


def _print_cells(console: Console, cells: Sequence[Cell], load: Column) -> None:
    table = plain_table(f">{load[0]}", ">Throughput\ninfer/s ", ">Avg\nms", ">p90\nms", ">p95\nms", ">p99\nms")
    for cell in cells:
        mark = " " if cell.measurement.stable or not cell.has_figures else "*"
        table.add_row(load[1](cell), _known(cell, "throughput_infer_per_sec") + mark, *_all(cell, LATENCIES))
    print_table(console, table)
    if any(getattr(cell.measurement, stage) is not None for cell in cells for stage in STAGES):
        _say(console)
        stages = plain_table(f">{load[0]}", *(f">{name}" for name in STAGE_NAMES))
        for cell in cells:
            stages.add_row(load[1](cell), *(_stage(cell, stage) for stage in STAGES))
        print_table(console, stages)
    if any(words.gpu(cell.measurement) for cell in cells):
        _say(console)
        gpus = plain_table(f">{load[0]}", ">GPU\nmemory", ">J/1000\ninfer", "GPU")
        for cell in cells:
            figures = (words.quantity(METRICS["gpu-memory"], cell.measurement.gpu_memory_bytes), _energy(cell))
            gpus.add_row(load[1](cell), *figures, words.gpu(cell.measurement))
        print_table(console, gpus)


def _energy(cell: Cell) -> str:
    return words.number(METRICS["energy"].value(cell.measurement))


def _print_comparison(console: Console, found: Sequence[Cell], *, split: bool) -> None:
    """Each at the load of its highest throughput. ``split``: by the size of the requests too."""
    _say(console)
    _say(console, "side by side: each at its highest throughput, over the first", "bold")
    sizes = split and len({cell.load.request_batch_size for cell in found}) > 1
    columns = [">infer/s", "gain", ">avg ms", ">p95 ms", ">lowest\np95 ms", ">load", *([">batch"] if sizes else [])]
    table = plain_table(*columns, "configuration")
    first: float | None = None
    for _, group in groupby(found, key=lambda cell: (cell.number, cell.load.request_batch_size if split else 0)):
        cells = list(group)
        known = [cell for cell in cells if cell.has_figures]
        best = max(known, key=lambda cell: cell.measurement.throughput_infer_per_sec or 0.0, default=cells[0])
        throughput = best.measurement.throughput_infer_per_sec
        first = first or throughput
        lowest = min((c.measurement.latency_p95_ms for c in known if c.measurement.latency_p95_ms), default=None)
        table.add_row(
            _known(best, "throughput_infer_per_sec"),
            f"{throughput / first:.2f}x" if throughput and first else NONE,
            *_all(best, ("latency_avg_ms", "latency_p95_ms")),
            NONE if lowest is None else words.number(lowest),
            words.load(best.load) if known else NONE,
            *([f"{best.load.request_batch_size:,}"] if sizes else []),
            Text(words.configuration(best.candidate), overflow="fold"),
        )
    print_table(console, table)
    _say(console)


def _load_column(cell: Cell, by_request: bool) -> Column:
    if by_request:
        return "Batch\nSize", lambda cell: f"{cell.load.request_batch_size:,}"
    if cell.load.request_rate:
        return "Requests/s", lambda cell: words.exact(cell.load.request_rate)
    return "Concurrency", lambda cell: f"{cell.load.concurrency:,}"


def _all(cell: Cell, names: Sequence[str]) -> list[str]:
    return [_known(cell, name) for name in names]


def _known(cell: Cell, name: str) -> str:
    value = getattr(cell.measurement, name)
    return NONE if value is None else words.number(value)


def _stage(cell: Cell, name: str) -> str:
    """Times of a few µs stand beside others of many ms: one number of digits for all."""
    value = getattr(cell.measurement, name)
    return NONE if value is None else f"{value:,.3f}"


def _say(console: Console, text: str = "", style: str = "") -> None:
    """As it is: names of models and of files are no markup."""
    console.print(Text(text, style))


def _say_whole(console: Console, text: str) -> None:
    """Without line breaks of ours: a path or a command is to be copied."""
    console.print(Text(one_line(text)), soft_wrap=True)
