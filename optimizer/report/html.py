"""The result as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from objectives.metrics import METRICS
from optimizer.report import summary, words
from optimizer.report.plot import plot
from optimizer.store.disk import write_whole

if TYPE_CHECKING:
    from optimizer.outcome import Outcome
    from optimizer.problem import Problem
    from optimizer.trial import Point, Trial

TEMPLATE = "report.html.j2"


def write_report(
    path: Path,
    *,
    outcome: Outcome,
    trials: Sequence[Trial],
    problem: Problem,
    facts: Mapping[str, object],
    hardware: str,
    notes: Sequence[str],
    command: str,
) -> None:
    """Write the page. Raises EnvironmentFault where the disk refuses it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    latency = words.judged_latency(problem.constraints)
    found = outcome.recommended is not None
    shown = outcome.recommended or outcome.closest
    figures = summary.figures(shown, problem) if shown else []
    if found:
        figures.append(("verdict", summary.verdict(outcome)))
    page = environment.get_template(TEMPLATE).render(
        headline=summary.headline(outcome, problem),
        found=found,
        configuration=words.triton_lines(shown.candidate) if shown else [],
        figures=figures,
        comparisons=summary.comparisons(outcome, problem) if found else [],
        plot=plot(trials, outcome, problem.constraints),
        front=[_row(point, "latency-p95") for point in outcome.front],
        latency=words.short(latency),
        goal=words.bounds(problem.constraints),
        trials=[_trial_row(trial, problem, latency, found) for trial in trials],
        best_trial=outcome.recommended.trial if outcome.recommended else None,
        measurements=outcome.measurements,
        facts=words.facts_words(facts),
        hardware=hardware,
        notes=notes,
        command=command,
    )
    write_whole(path, page)


def _row(point: Point, latency: str) -> dict[str, object]:
    return {
        "throughput": words.number(point.measurement.throughput_infer_per_sec),
        "latency": words.number(METRICS[latency].value(point.measurement)),
        "load": words.load(point.load),
        "trial": point.trial,
        "configuration": words.configuration(point.candidate),
    }


def _trial_row(trial: Trial, problem: Problem, latency: str, found: bool) -> dict[str, object]:
    """A trial by its best load, or by the closest one; that it misses is remarked where others do not."""
    point, met = summary.best_load(trial, problem)
    unknown = {"throughput": "–", "latency": "–", "load": "–", "trial": trial.number}
    figures = _row(point, latency) if point else unknown
    reasons = [trial.reason, *(measurement.reason for _, measurement in trial.measurements)]
    remark = ""
    if trial.status == "failed" or point is None:
        remark = next(filter(None, reasons), "nothing stable was measured")
    elif found and not met:
        remark = "no load meets the bounds; the closest is shown"
    configuration = words.configuration(trial.candidate)
    loads = len({load for load, _ in trial.measurements})
    return {**figures, "configuration": configuration, "loads": loads, "remark": remark}
