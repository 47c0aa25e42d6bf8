"""Tables of own and published results in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from published import Row
from studies import Ratio

KEY = ("label", "request_batch_size", "concurrency")
FIGURES = ("throughput_infer_per_sec", "latency_avg_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")
NAMES = ("infer/s", "avg ms", "p90 ms", "p95 ms", "p99 ms")
STAGES = {
    "client_send_ms": "client send",
    "network_ms": "network + server send/recv",
    "queue_ms": "server queue",
    "compute_input_ms": "compute input",
    "compute_infer_ms": "compute infer",
    "compute_output_ms": "compute output",
    "client_recv_ms": "client receive",
}
NONE = ""
HIGHER_IS_BETTER = "throughput_infer_per_sec"


def tables(cells: Sequence[Row], printed: Sequence[Row], ratios: Iterable[Ratio]) -> str:
    """Return all own and published cells; those with the same label, request size and concurrency share a line."""
    title = "## Measured and published results" if printed else "## Measured results"
    parts = [title, "", *_figures(cells, printed)]
    ratio_rows = [_ratio_row(ratio, cells, printed) for ratio in ratios]
    if ratio_rows:
        parts += ["", "## Ratios", "", *_markdown(("", "measured", "published"), ratio_rows, left=1)]
    stages = [cell for cell in cells if cell.get("compute_infer_ms") is not None]
    if stages:
        parts += ["", "## Parts of the measured latency of a request, in ms", "", *_stages(stages)]
    return "\n".join(parts)


def ratio(one: Ratio, rows: Sequence[Row]) -> float | None:
    """Return the ratio within one set of rows, or None if one of the two is missing."""
    over, under = (_figure(one, rows, *which) for which in ((one.over, one.over_at), (one.under, one.under_at)))
    return over / under if over and under else None


def _figure(one: Ratio, rows: Sequence[Row], label: str, at: tuple[int, int] | None) -> float | None:
    own = [row for row in rows if row["label"] == label and at in (None, (row[KEY[1]], row[KEY[2]]))]
    known = [value for row in own if (value := row.get(one.figure)) is not None]
    return (max if one.figure == HIGHER_IS_BETTER else min)(known, default=None)


def _figures(cells: Sequence[Row], printed: Sequence[Row]) -> list[str]:
    measured, published = ({_key(row): row for row in rows} for rows in (cells, printed))
    header = ("", "batch", "concurrency", *NAMES, *(f"published {name}" for name in NAMES))
    shown = [
        (*map(str, key), *_numbers(measured.get(key)), *_numbers(published.get(key)))
        for key in dict.fromkeys([*measured, *published])
    ]
    used = [i for i in range(len(header)) if i < len(KEY) or any(row[i] != NONE for row in shown)]
    lines = _markdown([header[i] for i in used], [[row[i] for i in used] for row in shown], left=1)
    reasons = dict.fromkeys(f"{row['label']}: {row['reason']}" for row in cells if row.get("reason"))
    return [*lines, *(["", *(f"- {reason}" for reason in reasons)] if reasons else [])]


def _stages(cells: Sequence[Row]) -> list[str]:
    rows = [
        (*map(str, _key(cell)), *("" if cell[stage] is None else f"{cell[stage]:,.3f}" for stage in STAGES))
        for cell in cells
    ]
    return _markdown(("", "batch", "concurrency", *STAGES.values()), rows, left=1)


def _ratio_row(one: Ratio, cells: Sequence[Row], printed: Sequence[Row]) -> tuple[str, str, str]:
    measured, published = ratio(one, cells), ratio(one, printed)
    measured_text = "not measured" if measured is None else f"{measured:.2f}x"
    return one.name, measured_text, f"{published:.2f}x" if published else one.said


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in KEY)


def _numbers(row: Row | None) -> list[str]:
    return [NONE if row is None or row.get(name) is None else number(row[name]) for name in FIGURES]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    rule = ["---"] * left + ["--:"] * (len(header) - left)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
