"""The tables of a run, as they are read: cells are texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives.metrics import METRICS
from optimizer.outcome import Outcome
from optimizer.pages import measured
from optimizer.pages.parameters import Neighbour, label
from optimizer.report import words
from optimizer.store.finished import FinishedRun
from optimizer.trial import Point, Trial

MOST_TRIALS = 200  # rows of a page; the rest is in the CSV
MOST_FRONT = 100
SAME = 0.005  # of the throughput: less is no difference


@dataclass(frozen=True)
class Table:
    """Headers that begin with ``>`` are of columns of numbers. ``best``: the row that is recommended."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""
    best: int | None = None


def front(outcome: Outcome) -> Table:
    front = outcome.front
    kept = front
    if len(front) > MOST_FRONT:
        kept = tuple(front[round(i * (len(front) - 1) / (MOST_FRONT - 1))] for i in range(MOST_FRONT))
    rows = [
        (
            words.number(point.measurement.throughput_infer_per_sec),
            words.number(point.measurement.latency_p95_ms),
            words.load(point.load),
            str(point.trial),
            words.configuration(point.candidate),
        )
        for point in kept
    ]
    headers = (">infer/s", ">p95 ms", ">load", ">trial", "configuration (batch: max_batch_size)")
    caption = "No other measured point has more throughput at less latency"
    if len(kept) < len(front):
        caption += f"; {len(kept)} of {len(front):,}"
    best = next((i for i, point in enumerate(kept) if point is outcome.recommended), None)
    return Table(headers, rows, caption, best)


def stages(run: FinishedRun) -> Table:
    rows = []
    for role, candidate in measured.compared(run).items():
        for point in measured.at_loads(run, candidate):
            values = measured.stages_ms(point)
            if values is not None:
                told = [f"{value:,.2f}" for value in values]
                rows.append((role, words.load(point.load), words.of(point, "throughput"), *told))
    headers = ("configuration", ">load", ">throughput", *(f">{name}" for name in measured.STAGES.values()))
    return Table(headers, rows, "Mean milliseconds of a request in each stage")


def sensitivity(neighbours: Sequence[Neighbour]) -> Table:
    rows = [
        (label(one.parameter), f"{one.chosen} to {one.other}", _change(one.measured), _change(one.expected))
        for one in sorted(neighbours, key=lambda one: -(one.cost or 0.0))
    ]
    headers = ("parameter", "one step", ">measured", ">expected")
    return Table(headers, rows, "Throughput within the bounds, one parameter changed by one step")


def sensitivity_sentence(neighbours: Sequence[Neighbour]) -> str:
    known = [one for one in neighbours if one.cost is not None]
    if not known:
        return ""
    worst = max(known, key=lambda one: one.cost or 0.0)
    if (worst.cost or 0.0) <= SAME:
        return "One step off costs nothing, whichever parameter it is."
    how = "measured" if worst.measured is not None else "expected"
    return (
        f"One step off costs up to {100 * (worst.cost or 0.0):.0f} % ({how}): "
        f"{label(worst.parameter)} {worst.other} instead of {worst.chosen}."
    )


def _change(cost: float | None) -> str:
    if cost is None:
        return "–"
    return "no difference" if abs(cost) <= SAME else f"{-100 * cost:+.1f} %".replace("-", "−")


def confirmations(run: FinishedRun, outcome: Outcome) -> Table:
    roles = {candidate: role for role, candidate in measured.compared(run).items()}
    rows = []
    for one in outcome.again:
        unknown = one.latency_ms.is_unknown
        latency = words.UNKNOWN if unknown else words.interval(METRICS[one.latency], one.latency_ms)
        rows.append(
            (
                roles.get(one.point.candidate, f"trial {one.point.trial}"),
                words.load(one.point.load),
                one.judged.verdict.value,
                words.interval(METRICS["throughput"], one.throughput),
                f"{words.short(one.latency)} {latency}",
                f"{one.windows} on {words.count(one.servers, 'server')}",
                f"{one.judged.effective_requests:,.0f}",
            )
        )
    headers = ("configuration", ">load", "verdict", "throughput", "latency", ">windows", ">effective requests")
    return Table(headers, rows, f"Intervals at {100 * run.problem.confidence:g} % confidence")


def trials(run: FinishedRun, outcome: Outcome, best_loads: Sequence[tuple[Trial, Point | None, bool]]) -> Table:
    """The best, by their best loads within the bounds, then those that miss them, then those without figures."""
    latency, goal = measured.latency(run), words.bounds(run.problem.constraints)
    ranked = sorted(
        best_loads, key=lambda one: (one[1] is None, not one[2], -(one[1].throughput_infer_per_sec if one[1] else 0))
    )
    kept = ranked[:MOST_TRIALS]
    best = outcome.recommended.trial if outcome.recommended else None
    rows = [
        _trial_row(trial, point, latency, _trial_remark(trial, point, met, outcome)) for trial, point, met in kept
    ]
    headers = (
        ">trial",
        "configuration (batch: max_batch_size)",
        ">infer/s",
        f">{words.short(latency)} ms",
        ">load",
        ">loads",
    )
    caption = f"{words.count(outcome.trials, 'configuration')}, {words.count(outcome.measurements, 'measurement')}; "
    if len(kept) < len(ranked):
        caption += f"the best {len(kept)}, all are in trials.csv; "
    caption += f"each by its best load{f' within {goal}' if goal else ''} in the search"
    return Table(
        (*headers, "remark"), rows, caption, next((i for i, row in enumerate(rows) if row[0] == str(best)), None)
    )


def _trial_row(trial: Trial, point: Point | None, latency: str, remark: str) -> tuple[str, ...]:
    loads = str(len({load for load, _ in trial.measurements}))
    configuration = words.configuration(trial.candidate)
    if point is None:
        return str(trial.number), configuration, "–", "–", "–", loads, remark
    throughput = words.number(point.measurement.throughput_infer_per_sec)
    value = words.number(METRICS[latency].value(point.measurement))
    return str(trial.number), configuration, throughput, value, words.load(point.load), loads, remark


def _trial_remark(trial: Trial, point: Point | None, met: bool, outcome: Outcome) -> str:
    reasons = [trial.reason, *(measurement.reason for _, measurement in trial.measurements)]
    if trial.status == "failed" or point is None:
        return next(filter(None, reasons), "nothing stable was measured")
    return "" if met or outcome.recommended is None else "no load meets the bounds; the closest is shown"
