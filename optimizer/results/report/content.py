"""The text of a report: configuration changes, metrics, environment and notes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objectives.verdict import is_disturbed
from optimizer.config.model_config import MAX_BYTES
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import check_file_name, is_folder, one_line, read_bytes, resolve_inside
from optimizer.measure.load_client.open_loop import lateness_note
from optimizer.options.command_line import command_with_larger_budget
from optimizer.options.run_options import PROGRAM_TARGETS
from optimizer.results import configuration_text, formatting, outcome_values, summary
from optimizer.results.finished_run import FinishedRun, remark, resume_command
from optimizer.results.forecast_accuracy import ForecastChecks, check_forecasts
from optimizer.results.recommendation import Outcome
from optimizer.results.report import tables
from optimizer.results.report.parameter_effects import ParameterSample, importance, one_step_off, parameter_samples
from optimizer.results.report.tables import ReportTable
from optimizer.results.shared_memory_effect import effect_of_trial
from optimizer.results.summary import NextStep
from optimizer.store.run_folder import ENDED

CONFIG = "config.pbtxt"
MAX_MODELS = 64  # models of an ensemble whose files are read


def recommended_configs(run: FinishedRun) -> dict[str, str]:
    """Return the files in best/ by path; empty without a recommendation or if they were deleted."""
    return stored_configs(run, run.folder.best) if run.recommended else {}


def config_diff(run: FinishedRun) -> str:
    """Return a unified diff from the baseline's configuration to the recommended one; empty if nothing changes.

    If the files of either are missing, it has the lines of the tuned settings that change.
    """
    best = run.recommended
    if best is None:
        return ""
    before, after = stored_configs(run, run.folder.baseline), recommended_configs(run)
    if not before or not after:
        return "".join(f"{line}\n" for line in configuration_text.change_lines(run.baseline, best.candidate))
    names = dict.fromkeys([*before, *after])
    patches: list[str] = []
    for name in names:
        old, new = before.get(name, "").splitlines(), after.get(name, "").splitlines()
        patches += difflib.unified_diff(old, new, f"baseline/{name}", f"best/{name}", lineterm="")
    return "".join(f"{line}\n" for line in patches)


def stored_configs(run: FinishedRun, folder: Path) -> dict[str, str]:
    """Return config.pbtxt of ``folder``, or of each of its models. Links out of the run folder are not followed."""
    names = [CONFIG]
    if is_folder(folder):
        names += [f"{model.name}/{CONFIG}" for model in sorted(folder.iterdir())[:MAX_MODELS] if _is_model(model)]
    texts: Mapping[str, str | None] = {name: _text(run.folder.path, f"{folder.name}/{name}") for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _is_model(folder: Path) -> bool:
    try:
        return bool(check_file_name(folder.name)) and is_folder(folder)
    except ValueError:
        return False


def _text(run: Path, name: str) -> str | None:
    """Return the text of a file in the folder ``run``; None if it cannot be read or leads out of the folder."""
    try:
        content = read_bytes(resolve_inside(run, name), MAX_BYTES, "is this a config.pbtxt?")
    except (BadInputError, ValueError):
        return None
    return "".join(f"{one_line(line)}\n" for line in content.decode(errors="replace").split("\n")).removesuffix("\n")


MAX_FACT_LENGTH, MAX_COMMAND_LENGTH = 300, 10_000


@dataclass(frozen=True)
class ReportSection:
    """The content of one run in a report, as texts. A text without a value is empty.

    Attributes:
        name: ``<model>/<run>``.
        answer: The result in one line, with the model, the verdict and the recommended values.
        cause: Why the verdict is UNDECIDED or FAIL.
        headline: ``answer`` with its ``cause``.
        recommends: False if no measurement meets the SLA; the closest one is shown then.
        remark: Why the run is incomplete; empty for one that ended normally.
        gain: The gain over the baseline.
        verdict: PASS, UNDECIDED or FAIL.
        next_step: None if nothing is left to do.
        configuration: The settings of the recommended or closest configuration, as lines of config.pbtxt.
        lines: (label, text) of each value of that configuration and of its verdict.
        comparisons: The recommendation next to the baselines.
        diff: The change from the baseline's files to the recommended ones.
        no_change: The sentence in place of an empty ``diff``.
        configs: The files in best/ by path.
        front: The Pareto front.
        front_remark: Why the recommendation is not on the front.
        front_title: The axes of the front.
        streaming: The times of a model that streams, by load.
        stages: The mean time of a request in each stage.
        steps: The mean time of a request in each model that serves a part of it.
        forecasts: The search's forecasts, compared with the measurements.
        sensitivity: The configurations one step from the best one.
        sensitivity_sentence: The largest effect among these.
        is_simulated: Whether the simulator of the dynamic batcher forecasts these effects.
        importance: Share of the variation that each parameter explains, 0 to 1.
        samples: A point for each configuration, for the plots of the parameters.
        confirmations: The measurements on fresh servers.
        measurement_quality: (label, text) of the unstable, disturbed and late measurements.
        trials: The trials with their best loads.
        environment: (label, text) of the machine, the versions, the model and the search.
        notes: Notes for the user.
        command: The command that reproduces the run.
    """

    name: str
    answer: str
    cause: str
    headline: str
    recommends: bool
    remark: str
    gain: str
    verdict: str
    next_step: NextStep | None
    configuration: str
    lines: Sequence[tuple[str, str]]
    comparisons: ReportTable
    diff: str
    no_change: str
    configs: Mapping[str, str]
    front: ReportTable
    front_remark: str
    front_title: str
    streaming: ReportTable
    stages: ReportTable
    steps: ReportTable
    forecasts: ForecastChecks
    sensitivity: ReportTable
    sensitivity_sentence: str
    is_simulated: bool
    importance: Mapping[str, float]
    samples: Sequence[ParameterSample]
    confirmations: ReportTable
    measurement_quality: Sequence[tuple[str, str]]
    trials: ReportTable
    environment: Sequence[tuple[str, str]]
    notes: Sequence[str]
    command: str


def report_section(run: FinishedRun) -> ReportSection:
    """Return the content of ``run``, which must have measurements."""
    outcome, problem, shown = run.measured, run.problem, run.shown
    recommends = outcome.recommended is not None
    samples = parameter_samples(run)
    neighbours = one_step_off(run, samples)
    lines = outcome_values.point_lines(outcome, shown, problem) if shown else []
    return ReportSection(
        name=run.name,
        answer=summary.answer(outcome, problem),
        cause=summary.cause(outcome),
        headline=summary.headline(outcome, problem),
        recommends=recommends,
        remark=remark(run),
        gain=outcome_values.gain_over(outcome, outcome.baseline) if outcome.baseline.point and recommends else "",
        verdict=outcome.verdict.value,
        next_step=_next_step(run, outcome),
        configuration="\n".join(configuration_text.triton_lines(shown.candidate)) if shown else "",
        lines=[*lines, *summary.verdict_lines(outcome)],
        comparisons=ReportTable(
            outcome_values.comparison_headers(outcome, problem),
            outcome_values.comparisons(outcome, problem) if recommends else [],
            f"{outcome_values.compared_loads(problem)} {summary.evidence(outcome)}",
            best=0,
        ),
        diff=config_diff(run),
        no_change=summary.no_change(outcome),
        configs=recommended_configs(run),
        front=tables.front(outcome),
        front_remark=outcome_values.front_remark(outcome),
        front_title=outcome_values.front_title(outcome),
        streaming=tables.streaming(run),
        stages=tables.stages(run),
        steps=tables.steps(run),
        forecasts=check_forecasts(run.trials),
        sensitivity=tables.sensitivity(run, neighbours),
        sensitivity_sentence=tables.sensitivity_sentence(run, neighbours),
        is_simulated=any(step.expected is not None for step in neighbours),
        importance=importance(problem, samples),
        samples=samples,
        confirmations=tables.confirmations(run, outcome),
        measurement_quality=_measurement_quality(run),
        trials=tables.trials(run, outcome),
        environment=_environment(run),
        notes=[_line(note) for note in _list(run.info.get("notes"))],
        command=_command(run),
    )


def _next_step(run: FinishedRun, outcome: Outcome) -> NextStep | None:
    """Return what to do next; None if other workers continue the study of the run."""
    if run.status in ENDED:
        can_serve = run.options.target in PROGRAM_TARGETS
        longer = one_line(command_with_larger_budget(run.options), MAX_COMMAND_LENGTH)
        return summary.next_step(
            outcome, run.folder.path, _command(run), longer, tests=run.remaining_tests, can_serve=can_serve
        )
    command = resume_command(run)
    return NextStep("continue the run", command) if command else None


def _command(run: FinishedRun) -> str:
    """Return the command that reproduces ``run``; empty if run.json has none."""
    return one_line(str(run.info.get("command", "")), MAX_COMMAND_LENGTH)


def _measurement_quality(run: FinishedRun) -> list[tuple[str, str]]:
    """Return (label, text) of the unstable, overloaded, disturbed and late measurements."""
    searched = [m for trial in run.trials for _, m in trial.measurements if m.has_values]
    windows = [window.measurement for trial in run.trials for window in trial.confirmations if not window.is_lost]
    measured = [*searched, *windows]
    unstable = sum(not (m.stable or m.overloaded) for m in searched)
    search_total = f"{formatting.count(len(searched), 'measurement')} of the search"
    lines = [("unstable", f"{unstable:,} of {search_total}, because their windows disagreed")]
    if overloaded := sum(bool(m.overloaded) for m in searched):
        lines.append(("overloaded", f"{overloaded:,} of {search_total}, because the server fell behind the rate"))
    if windows:
        disturbed, window_total = sum(map(is_disturbed, windows)), formatting.count(len(windows), "window")
        lines.append(
            ("disturbed", f"{disturbed:,} of {window_total} on fresh servers, by other processes or machines")
        )
    shares = [m.other_cpu_share for m in measured if m.other_cpu_share is not None]
    if shares:
        lines.append(
            ("other processes", f"used up to {formatting.percent(max(shares), 1)} of the CPUs during a measurement")
        )
    if late := lateness_note(measured):
        lines.append(("late requests", str(late)))
    return lines


def _environment(run: FinishedRun) -> list[tuple[str, str]]:
    """Return (label, text) of the machine, the versions, the model, the requests and the search in run.json."""
    info = run.info
    hardware, times, problem = (_mapping(info.get(name)) for name in ("hardware", "times", "problem"))
    versions = _mapping(info.get("versions")).items()
    memory = hardware.get("memory_bytes")
    lines = [
        ("run", run.name),
        ("written", _line(info.get("written", formatting.UNKNOWN))),
        ("hardware", ", ".join([*map(_line, _list(hardware.get("gpus"))), _line(hardware.get("cpu", ""))])),
        ("CPUs", _line(hardware.get("cpu_count", formatting.UNKNOWN))),
        *([("memory", formatting.size(memory))] if isinstance(memory, (int, float)) else []),
        ("system", _line(hardware.get("system", formatting.UNKNOWN))),
        ("versions", " · ".join(f"{_line(name)} {_line(version)}" for name, version in versions)),
    ]
    lines += [(_line(k), _line(v)) for k, v in formatting.labelled_facts(_mapping(problem.get("facts"))).items()]
    requests = f"{formatting.request_size(run.problem.request_batch_size)}, {_line(problem.get('input_data', ''))}"
    if run.options.shared_memory != "none":
        requests += f", in {_line(run.options.shared_memory)} shared memory"
    lines.append(("requests", requests))
    if run.shown and (effect := effect_of_trial(run.folder.path, run.shown.trial)) is not None:
        lines.append(("shared memory", str(effect)))
    lines.append(("space", f"{len(run.problem.space):,} configurations"))
    lines.append(("search", f"{_line(run.options.search)}, seed {run.options.seed}"))
    if isinstance(wall := times.get("wall_seconds"), (int, float)):
        lines.append(("time", formatting.duration(wall)))
    return lines


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _line(value: object) -> str:
    """Return a value of run.json on one line of limited length, because the file may come from anywhere."""
    return one_line(str(value), MAX_FACT_LENGTH)
