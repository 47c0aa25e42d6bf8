"""What a page says of a run, in words and tables, however it is laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.pages import measured, tables
from optimizer.pages.config_diff import config_diff, recommended_configs
from optimizer.pages.parameters import Sample, importance, one_step_off, samples
from optimizer.pages.tables import Table
from optimizer.report import summary, words
from optimizer.store.finished import FinishedRun
from optimizer.untrusted import one_line

LONGEST_FACT, LONGEST_COMMAND = 300, 10_000
ENDED = ("found", "none")


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
    best_loads = measured.best_loads(run)
    judged = samples(run, best_loads)
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
        front=tables.front(outcome),
        stages=tables.stages(run),
        sensitivity=tables.sensitivity(neighbours),
        sensitivity_sentence=tables.sensitivity_sentence(neighbours),
        importance=importance(problem, judged),
        samples=judged,
        confirmations=tables.confirmations(run, outcome),
        confidence=_confidence(run),
        trials=tables.trials(run, outcome, best_loads),
        environment=_environment(run),
        notes=[_fact(note) for note in _list(run.info.get("notes"))],
        command=one_line(str(run.info.get("command", "")), LONGEST_COMMAND),
    )


def remark(run: FinishedRun) -> str:
    """What is to be known of a run that did not come to its end; empty of one that did."""
    if run.status in ENDED:
        return ""
    reason = _fact(run.info.get("reason", ""))
    told = "has not ended, or was killed" if run.status == "running" else f"was {one_line(run.status, LONGEST_FACT)}"
    told = told.replace("was failed", "failed").replace("was left", "left its study to other workers")
    return f"the run {told}{f' ({reason})' if reason else ''}: shown is what it had measured"


def _confidence(run: FinishedRun) -> list[tuple[str, str]]:
    every = [m for trial in run.trials for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
    every += [one.measurement for trial in run.trials for one in trial.confirmations if not one.is_lost]
    unstable = sum(not m.stable for m in every)
    told = [("unstable", f"{unstable:,} of {len(every):,} measurements, whose windows disagreed")]
    shares = [m.other_cpu_share for m in every if m.other_cpu_share is not None]
    if shares:
        told.append(("other processes", f"took up to {100 * max(shares):.1f} % of the CPUs during a measurement"))
    return told


def _environment(run: FinishedRun) -> list[tuple[str, str]]:
    info = run.info
    hardware, times, problem = (_mapping(info.get(name)) for name in ("hardware", "times", "problem"))
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
