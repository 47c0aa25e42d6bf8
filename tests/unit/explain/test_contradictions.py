"""Explanations do not contradict the measurements of their run: recorded runs, and runs replayed from tables.

The replayed runs come from several search methods and search spaces, some without a recommendation.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import METRICS
from optimizer.confirmation.confirmer import Confirmer
from optimizer.core.budget import Budget
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Point
from optimizer.explain.explanation import Explanation, explain
from optimizer.explain.explanation_document import document
from optimizer.explain.forecaster import OtherSla, Remedy
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import DiscardingRecord, recorded_problem
from optimizer.results import outcome_values
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.search import make_searcher
from optimizer.store.recording import baselines, read_recording
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials
from tests.conftest import not_none
from tests.explanation_text import explanation_text
from tests.run_folders import change_info

SAMPLES = (Path("tests/data/dlrm/sample"), Path("results/dlrm/sample"))
TABLES = Path("benchmarks/tables")
TRIALS = 8


def recorded_run(sample: Path, folder: Path, bound: str) -> FinishedRun:
    """Return a copy of a recorded run with another bound."""
    copy = Path(shutil.copytree(sample, folder))
    change_info(copy, "problem", constraints=[bound])
    return read_run(copy)


def replayed_run(table: str, search: str, bound_ms: float) -> FinishedRun:
    """Return a run that replays a recorded table, with the confirmation of its best configurations."""
    recording = read_recording(TABLES / f"{table}.csv")
    problem = recorded_problem(recording, {"p95": bound_ms})
    measurer = Measurer(recording.server, recording.server, DiscardingRecord(), QuietObserver())
    compared = baselines(problem.space)
    (_, baseline), (_, plain) = compared
    searcher = make_searcher(search, problem, 0)
    scheduler = Scheduler(problem, searcher, Budget(math.inf, TRIALS), Stopwatch(), compared)
    trials = run_trials(scheduler, recording.server, measurer)
    if assess(trials, problem, baseline, plain).recommended is not None:
        trials = Confirmer(problem, recording.server, measurer, Budget(math.inf), trials).run([baseline, plain])
    return replace(
        read_run(SAMPLES[0]),
        problem=problem,
        baseline=baseline,
        dynamic_batching=plain,
        trials=tuple(trials),
        outcome=assess(trials, problem, baseline, plain),
    )


@pytest.mark.parametrize(
    ("sample", "bound_ms"),
    [*((SAMPLES[0], bound_ms) for bound_ms in (2, 15, 20)), *((SAMPLES[1], bound_ms) for bound_ms in (9, 20, 40))],
    ids=str,
)
def test_a_recorded_run_is_not_contradicted(tmp_path: Path, sample: Path, bound_ms: int) -> None:
    check_explanation(explain(recorded_run(sample, tmp_path / "run", f"p95 <= {bound_ms} ms")))


@pytest.mark.parametrize(
    ("table", "bound_ms", "search"),
    [
        ("mlp", 5.0, "grid"),
        ("dlrm-1", 10.0, "nsga2"),
        ("wide", 20.0, "simulated"),
        ("sleep-2", 50.0, "random"),
        ("bert-mini", 1.0, "tpe"),
    ],
)
def test_a_replayed_run_is_not_contradicted(table: str, bound_ms: float, search: str) -> None:
    check_explanation(explain(replayed_run(table, search, bound_ms)))


def check_explanation(explanation: Explanation) -> None:
    """Assert that text and document show a measurement wherever there is one, and no forecast that it refutes."""
    changes = not_none(explanation.changes)
    text = explanation_text(explanation)
    assert deepest_parentheses(text) <= 1
    shown = " ".join(text.split())
    for latency in changes.latencies:
        values = [METRICS[latency.metric].value(point.measurement) for point in explanation.outcome.points]
        assert latency.lowest_ms <= min(value for value in values if value is not None)
    check_bottleneck(explanation)
    written = document(explanation)["predicted_changes"]
    for remedy, entry in zip(changes.remedies, written["remedies"], strict=True):
        subject = explanation.subject.point.candidate
        changed = remedy.forecast.candidate if remedy.forecast else subject
        measured_changes = [point for point in reliable_points(explanation) if subject != changed == point.candidate]
        bounds = explanation.run.problem.sla
        check_effect(
            remedy,
            [point for point in measured_changes if bounds.is_met(point.measurement)],
            entry,
            explanation,
            shown,
        )
    for other, entry in zip(changes.other_slas, written["other_slas"], strict=True):
        met_points = [point for point in reliable_points(explanation) if other.sla.is_met(point.measurement)]
        check_effect(other, met_points, entry, explanation, shown)


def check_bottleneck(explanation: Explanation) -> None:
    """Assert that the stage that limits the throughput is none whose removal is expected to gain nothing."""
    removal = {"client": "faster_network", "copying": "no_copying"}.get(explanation.bottleneck.kind)
    gains = [remedy.gain for remedy in not_none(explanation.changes).remedies if remedy.kind == removal]
    assert all(gain is None or gain.is_possible for gain in gains)


def reliable_points(explanation: Explanation) -> list[Point]:
    """Return the points with a stable measurement or a confirmation."""
    outcome = explanation.outcome
    return [point for point in outcome.points if point.measurement.stable or outcome.confirmation_of(point)]


def check_effect(
    effect: Remedy | OtherSla, met_points: list[Point], entry: dict[str, object], explanation: Explanation, shown: str
) -> None:
    """Check a change or another bound, whose measurements within the bounds are ``met_points``."""
    outcome, subject = explanation.outcome, explanation.subject.point
    assert (effect.measured is not None) == bool(met_points), "a measurement within the bound replaces the forecast"
    if effect.measured is not None:
        assert outcome_values.measured_performance(outcome, effect.measured, "latency-p95") in shown
        gain = effect.measured.throughput_infer_per_sec / subject.throughput_infer_per_sec - 1
        has_gain = explanation.has_recommendation or isinstance(effect, Remedy)
        assert entry["gain"] == (pytest.approx(gain) if has_gain else None), "not that of the forecast"
        assert entry["gain_interval"] is None
    forecast = effect.forecast
    if forecast is None or (isinstance(effect, Remedy) and forecast.candidate == subject.candidate):
        return
    sla = effect.sla if isinstance(effect, OtherSla) else explanation.run.problem.sla
    for point in outcome.points:
        if (point.candidate, point.load.concurrency) != (forecast.candidate, forecast.concurrency):
            continue
        assert (effect.refuted_by == point) == (not sla.is_met(point.measurement))
        if effect.refuted_by is not None and effect.measured is None:
            assert "but the measurement at this load misses the bounds" in shown


def deepest_parentheses(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
