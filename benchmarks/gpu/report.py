"""The results of a study on a GPU: its tables in Markdown, its cells, and the folders of its runs."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu.steps import OnGpu
from optimizer.results.forecast_accuracy import CheckedForecast
from published import Row
from side_by_side import tables

THROUGHPUT = "throughput_infer_per_sec"  # a cell without it was not measured
GPU_COLUMNS = {  # a cell's column -> the table's column and the factor between their units
    "gpu_utilization": ("GPU busy, %", 0.01),
    "gpu_memory_bytes": ("GPU memory, GB", 1e9),
    "gpu_power_watts": ("GPU power, W", 1.0),
    "energy_joules_per_1000_infer": ("J/1000 infer", 1.0),
    "gpu_sm_clock_mhz": ("SM clock, MHz", 1.0),
}


@dataclass
class StudyResults:
    """The results of a study's steps.

    ``rounds`` are the single measurements of perf_analyzer on plain servers. ``forecasts`` are those of throughput
    and latency that the searches made of their measurements. ``last_run`` is the folder of the last `tune`.
    ``failures`` are the steps without figures, with their reasons.
    """

    cells: list[Row] = field(default_factory=list)
    rounds: list[Row] = field(default_factory=list)
    forecasts: list[tuple[CheckedForecast, CheckedForecast]] = field(default_factory=list)
    last_run: Path | None = None
    hardware: str = ""
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def markdown(study: OnGpu, results: StudyResults) -> str:
    """Return the tables of a study."""
    about = study.study
    lines = [
        f"# {about.title}",
        "",
        "Written by `python benchmarks/gpu/run.py`.",
        "",
        *([f"- Published study: {about.there}.", f"- Published result: {about.point}."] if about.there else []),
        f"- This study: {about.setup}.",
        f"- Machine: {results.hardware or 'not known'}; {time.strftime('%Y-%m-%d')}.",
        *(f"- Note: {note}." for note in dict.fromkeys(results.notes)),
        *(f"- Not measured: {failure}." for failure in results.failures),
        "",
        tables(results.cells, study.printed(), about.ratios),
        "",
        *_gpu_table(results.cells),
        *_rounds_table(results.rounds),
        *_forecast_table(results.forecasts),
        "## Commands",
        "",
        "```sh",
        *results.commands,
        "```",
        "",
    ]
    return "\n".join(lines)


def _gpu_table(cells: Sequence[Row]) -> list[str]:
    """Return the table of GPU metrics, or nothing if no GPU was read."""
    known = [cell for cell in cells if any(cell.get(name) is not None for name in GPU_COLUMNS)]
    if not known:
        return []
    names = [name for name, _ in GPU_COLUMNS.values()]
    lines = ["## GPU metrics", "", f"|  | batch | concurrency | {' | '.join(names)} |"]
    lines.append("| --- |" + " --: |" * (2 + len(names)))
    for cell in known:
        figures = [
            "" if cell.get(name) is None else f"{cell[name] / unit:,.4g}" for name, (_, unit) in GPU_COLUMNS.items()
        ]
        at = (cell["label"], f"{cell['request_batch_size']}", f"{cell['concurrency']}")
        lines.append(f"| {' | '.join([*at, *figures])} |")
    return [*lines, ""]


def _rounds_table(rounds: Sequence[Row]) -> list[str]:
    """Return the table of perf_analyzer's measurements on plain servers, a column for each configuration."""
    if not rounds:
        return []
    roles = list(dict.fromkeys(one["role"] for one in rounds))
    lines = ["## Rounds of perf_analyzer on plain servers", "", "infer/s (p95 in ms) of a new server each", ""]
    lines += [f"| round | {' | '.join(roles)} |", "| --: |" + " --: |" * len(roles)]
    for number in dict.fromkeys(one["round"] for one in rounds):
        own = {one["role"]: one for one in rounds if one["round"] == number}
        figures = [_round_cell(own.get(role)) for role in roles]
        lines.append(f"| {number} | {' | '.join(figures)} |")
    return [*lines, ""]


def _round_cell(one: Row | None) -> str:
    if one is None or one[THROUGHPUT] is None:
        return one["reason"] if one else ""
    return f"{one[THROUGHPUT]:,.0f} ({one['latency_p95_ms']:.4g})"


def _forecast_table(forecasts: Sequence[tuple[CheckedForecast, CheckedForecast]]) -> list[str]:
    """Return the table of the forecasts and the measurements, or nothing if the search forecast nothing."""
    if not forecasts:
        return []
    lines = ["## Forecasts of the search", "", "The median and the 95 % interval, from the measurements before", ""]
    lines += [
        "| configuration | concurrency | forecast infer/s | infer/s | forecast ms | ms |",
        "| --- |" + " --: |" * 5,
    ]
    for throughput, latency in forecasts:
        settings = throughput.point.candidate
        delay = f"delay {settings.max_queue_delay_us} µs" if settings.dynamic_batching else "no dynamic batching"
        cells = [f"max_batch_size {settings.max_batch_size}, {delay}, {settings.instance_count} instances"]
        cells.append(f"{throughput.point.load.concurrency}")
        for one in (throughput, latency):
            cells += [f"{one.expected:,.4g} ({one.low:,.4g} to {one.high:,.4g})", f"{one.measured:,.4g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


REFERENCE = "reference.npz"  # the outputs that a run compares; only --resume reads them


def write_files(study: OnGpu, results: StudyResults, out: Path, runs: Path) -> None:
    """Write the files of a study to ``out``, but its log; ``runs`` has the folders of its runs.

    The archive of the runs has no reference outputs, because 32 random requests of 4,096 samples have 34 MB.
    """
    lines = [json.dumps(cell) + "\n" for cell in [*results.cells, *results.rounds]]
    (out / f"{study.name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (out / f"{study.name}.md").write_text(markdown(study, results), encoding="utf-8")
    if runs.exists():
        with tarfile.open(out / f"{study.name}-runs.tar.xz", "w:xz", preset=1) as archive:
            archive.add(runs, study.name, filter=lambda member: None if member.name.endswith(REFERENCE) else member)
