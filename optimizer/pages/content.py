"""What a page says of a run, in words and tables, however it is laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from objectives.metrics import METRICS
from optimizer.outcome import Outcome
from optimizer.pages import measured
from optimizer.pages.config_diff import config_diff, recommended_configs
from optimizer.pages.parameters import Neighbour, Sample, importance, label, one_step_off, samples
from optimizer.report import summary, words
from optimizer.store.finished import FinishedRun
from optimizer.trial import Point, Trial
from optimizer.untrusted import one_line

MOST_TRIALS = 200  # rows of a page; the rest is in the CSV
MOST_FRONT = 100
LONGEST_FACT = 300
SAME = 0.005  # of the throughput: less is no difference
ENDED = ("found", "none")


@dataclass(frozen=True)
class Table:
    """Headers that begin with ``>`` are of columns of numbers. ``best``: the row that is recommended."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""
    best: int | None = None


@dataclass(frozen=True)
class Section:
    """``remark`` says why there is less to see than usual. ``gain`` is over the baseline, empty where unknown."""

    name: str
    headline: str
    found: bool
    remark: str
    throughput: str
    gain: str
    verdict: str
    configuration: str
    figures: Sequence[tuple[str, str]]
    comparisons: Table
    diff: str
    configs: Mapping[str, str]
    front: Table
    stages: Table
    sensitivity: Table
    sensitivity_sentence: str
    importance: Mapping[str, float]
    samples: Sequence[Sample]
    confirmations: Table
    confidence: Sequence[tuple[str, str]]
    trials: Table
    environment: Sequence[tuple[str, str]]
    notes: Sequence[str]
    command: str


def section(run: FinishedRun) -> Section:
    """Of a run that measured something."""
    outcome, problem = run.outcome, run.problem
    assert outcome is not None, "something was measured"
    shown = outcome.recommended or outcome.closest
    found = outcome.recommended is not None
    judged = samples(run)
    neighbours = one_step_off(run, judged)
    figures = list(summary.figures(shown, problem)) if shown else []
    verdict = summary.verdict(outcome) if found else ""
    return Section(
        name=measured.name(run),
        headline=summary.headline(outcome, problem),
        found=found,
        remark=remark(run),
        throughput=words.of(shown, "throughput") if shown and found else "none meets the bounds",
        gain=f"{outcome.speedup:.2f}x" if outcome.speedup else "",
        verdict=outcome.confirmed.judged.verdict.value if outcome.confirmed else "UNDECIDED" if found else "",
        configuration="\n".join(words.triton_lines(shown.candidate)) if shown else "",
        figures=[*figures, *([("verdict", verdict)] if verdict else [])],
        comparisons=Table(
            ("configuration", "performance", ">gain"),
            summary.comparisons(outcome, problem) if found else [],
            "Each at its best load",
        ),
        diff=config_diff(run),
        configs=recommended_configs(run),
        front=_front(outcome),
        stages=_stages(run),
        sensitivity=_sensitivity(neighbours),
        sensitivity_sentence=_sensitivity_sentence(neighbours),
        importance=importance(problem, judged),
        samples=judged,
        confirmations=_confirmations(run, outcome),
        confidence=_confidence(run),
        trials=_trials(run, outcome),
        environment=_environment(run),
        notes=[_fact(note) for note in _list(run.info.get("notes"))],
        command=_fact(run.info.get("command", "")),
    )


def remark(run: FinishedRun) -> str:
    """What is to be known of a run that did not come to its end; empty of one that did."""
    if run.status in ENDED:
        return ""
    reason = _fact(run.info.get("reason", ""))
    told = "has not ended, or was killed" if run.status == "running" else f"was {one_line(run.status, LONGEST_FACT)}"
    told = told.replace("was failed", "failed")
    return f"the run {told}{f' ({reason})' if reason else ''}: shown is what it had measured"


def _front(outcome: Outcome) -> Table:
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


def _stages(run: FinishedRun) -> Table:
    rows = []
    for role, candidate in measured.compared(run).items():
        for point in measured.at_loads(run, candidate):
            values = measured.stages_ms(point)
            if values is not None:
                told = [f"{value:,.2f}" for value in values]
                rows.append((role, words.load(point.load), words.of(point, "throughput"), *told))
    headers = ("configuration", ">load", ">throughput", *(f">{name}" for name in measured.STAGES.values()))
    return Table(headers, rows, "Mean milliseconds of a request in each stage")


def _sensitivity(neighbours: Sequence[Neighbour]) -> Table:
    rows = [
        (label(one.parameter), f"{one.chosen} to {one.other}", _change(one.measured), _change(one.expected))
        for one in sorted(neighbours, key=lambda one: -(one.cost or 0.0))
    ]
    headers = ("parameter", "one step", ">measured", ">expected")
    return Table(headers, rows, "Throughput within the bounds, one parameter changed by one step")


def _sensitivity_sentence(neighbours: Sequence[Neighbour]) -> str:
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


def _confirmations(run: FinishedRun, outcome: Outcome) -> Table:
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


def _confidence(run: FinishedRun) -> list[tuple[str, str]]:
    every = [m for trial in run.trials for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
    every += [one.measurement for trial in run.trials for one in trial.confirmations if not one.is_lost]
    unstable = sum(not m.stable for m in every)
    told = [("unstable", f"{unstable:,} of {len(every):,} measurements, whose windows disagreed")]
    shares = [m.other_cpu_share for m in every if m.other_cpu_share is not None]
    if shares:
        told.append(("other processes", f"took up to {100 * max(shares):.1f} % of the CPUs during a measurement"))
    return told


def _trials(run: FinishedRun, outcome: Outcome) -> Table:
    """The best, by their best loads within the bounds, then those that miss them, then those without figures."""
    latency, goal = measured.latency(run), words.bounds(run.problem.constraints)
    ranked = []
    for trial in run.trials:
        point, met = summary.best_load(trial, run.problem)
        ranked.append(
            ((point is None, not met, -(point.throughput_infer_per_sec if point else 0)), trial, point, met)
        )
    ranked.sort(key=lambda one: one[0])
    kept = ranked[:MOST_TRIALS]
    best = outcome.recommended.trial if outcome.recommended else None
    rows = [
        _trial_row(trial, point, latency, _trial_remark(trial, point, met, outcome)) for _, trial, point, met in kept
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
    return Table((*headers, ""), rows, caption, next((i for i, row in enumerate(rows) if row[0] == str(best)), None))


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


def _environment(run: FinishedRun) -> list[tuple[str, str]]:
    info = run.info
    hardware, times, problem = (
        _mapping(info.get("hardware")),
        _mapping(info.get("times")),
        _mapping(info.get("problem")),
    )
    told = [("run", f"{measured.name(run)}, {run.status}"), ("written", _fact(info.get("written", words.UNKNOWN)))]
    told.append(("hardware", ", ".join([*map(_fact, _list(hardware.get("gpus"))), _fact(hardware.get("cpu", ""))])))
    told.append(("CPUs", _fact(hardware.get("cpu_count", words.UNKNOWN))))
    if isinstance(memory := hardware.get("memory_bytes"), (int, float)):
        told.append(("memory", words.size(memory)))
    told.append(("system", _fact(hardware.get("system", words.UNKNOWN))))
    told.append(("versions", " · ".join(f"{_fact(k)} {_fact(v)}" for k, v in _mapping(info.get("versions")).items())))
    told += [(_fact(k), _fact(v)) for k, v in words.facts_words(_mapping(problem.get("facts"))).items()]
    told.append(
        ("requests", f"{run.problem.request_batch_size:,} samples each, {_fact(problem.get('input_data', ''))}")
    )
    told.append(("space", f"{len(run.problem.space):,} configurations"))
    told.append(("search", f"{run.options.search}, seed {run.options.seed}"))
    if isinstance(wall := times.get("wall_seconds"), (int, float)):
        told.append(("time", f"{words.clock(wall)} (minutes, seconds)"))
    return told


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _fact(value: object) -> str:
    return one_line(str(value), LONGEST_FACT)
