"""Reads the folder of a run for reports, plans, explanations and emitted files. The model is not needed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.field_path import normalize_value
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.problem import ConcurrentModel, ModelKind, Problem
from optimizer.config.queue_policy import Fields, is_queue_field
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SETTING_COLUMNS, Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import MAX_PERIOD_SECONDS, RequestTimes, is_load_shape, parse_load_shape
from optimizer.core.request_sizes import MAX_TOKENS, SizeDistribution, TokenRequests, parse_priorities
from optimizer.core.safe_text import one_line, show_path
from optimizer.core.trial import Point, Trial
from optimizer.options.command_line import command_line, command_with_larger_budget
from optimizer.options.run_options import RunOptions
from optimizer.options.values import MAX_CPU_COUNT, load_shares
from optimizer.results import formatting, summary
from optimizer.results.recommendation import Outcome, assess, count_confirmations, count_measurements
from optimizer.store.run_folder import ENDED, STAMP, RunFolder
from optimizer.store.run_lookup import find_run
from optimizer.store.trials_reader import INTEGER_RANGES, LOAD_COLUMNS, NUMBER_RANGES
from optimizer.store.trials_table import TrialsTable

MAX_REASON_LENGTH = 300


@dataclass(frozen=True)
class FinishedRun:
    """A run as its folder describes it.

    Attributes:
        folder: Its folder.
        options: Its options.
        info: The content of run.json.
        problem: Its bounds, objectives, space and request size, but no mix of request sizes, which run.json does not
            hold. The lengths of prompts and outputs are approximate.
        baseline: The model's own configuration.
        dynamic_batching: The same with plain dynamic batching.
        trials: Its trials.
        outcome: Its outcome; None if nothing was measured.
    """

    folder: RunFolder
    options: RunOptions
    info: Mapping[str, Any]
    problem: Problem
    baseline: Candidate
    dynamic_batching: Candidate
    trials: tuple[Trial, ...]
    outcome: Outcome | None

    @property
    def measured(self) -> Outcome:
        """Return the outcome of a run that has measurements."""
        assert self.outcome is not None, "the run has measurements"
        return self.outcome

    @property
    def recommended(self) -> Point | None:
        """Return the recommendation; None if there is none."""
        return self.outcome.recommended if self.outcome else None

    @property
    def shown(self) -> Point | None:
        """Return the recommendation or, without one, the closest point; None if nothing was measured."""
        return self.outcome.shown if self.outcome else None

    @property
    def status(self) -> str:
        """Return ``found``, ``none``, ``interrupted``, ``failed``, ``left`` or ``running`` (also if killed)."""
        return str(self.info.get("status", "running"))

    @property
    def name(self) -> str:
        """Return ``<model>/<run>``, or ``<batch>/<run>`` of a run in a batch; ``run`` is the name of the folder."""
        folder = self.folder.path.resolve()
        batch = folder.parent.name if STAMP.fullmatch(folder.parent.name) else None
        return f"{batch or self.problem.model}/{folder.name}"  # a batch names its runs by model and SLA only

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return facts about the model, such as its SHA-256; empty if run.json has none."""
        facts: Mapping[str, Any] = self.info["problem"].get("facts", {})
        return facts

    @property
    def has_other_models(self) -> bool:
        """Return whether the server's times are those of a model that the tuned one calls, such as a step."""
        return self.tuned_model != self.problem.model

    @property
    def tuned_model(self) -> str:
        """Return the model whose batches are tuned and counted: the one of the requests, or one that it calls."""
        return str(self.info["problem"].get("batcher", self.problem.model))

    @property
    def has_simulated_replica(self) -> bool:
        """Whether a replica can be simulated at any request rate: that of one model with one batcher."""
        return self.problem.is_simulated and not self.concurrent_models

    @property
    def concurrent_models(self) -> dict[str, float]:
        """Return the shares of the load of the models that got load at the same time, by model."""
        return read_shares(self.info["problem"])

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the names of the GPUs of the machine; empty if the server used none of them."""
        return () if self.info.get("server_uses_gpus") is False else tuple(self.info["hardware"]["gpus"])

    @property
    def remaining_tests(self) -> summary.RemainingTests:
        """The tests on fresh servers that ``tune verify`` can continue."""
        return summary.RemainingTests.read(self.info)

    @property
    def step_if_undecided(self) -> summary.NextStep:
        """The step that tests the recommendation of an UNDECIDED run further, or repeats the run."""
        longer = command_with_larger_budget(self.options)
        return summary.step_if_undecided(self.measured, self.folder.path, longer, self.remaining_tests)

    @property
    def next_command(self) -> str:
        """The command that continues the test of an UNDECIDED run, or repeats the run; empty for another verdict."""
        longer = command_with_larger_budget(self.options)
        return summary.next_command(self.measured, self.folder.path, longer, self.remaining_tests)

    @property
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the server and of packages, by name; empty if run.json has none."""
        versions = self.info.get("versions")
        return {name: str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}


def read_run(run: str | Path, out: str = "results") -> FinishedRun:
    """Return the run that ``run`` stands for in ``find_run``; a table row cut by a crash is skipped.

    Raises BadInputError, in one line, if there is no such run or it is damaged.
    """
    folder = find_run(str(run), out, "run")
    options, info = folder.read_options(), folder.read_info()
    try:
        problem = _read_problem(info, options)
        trials = tuple(TrialsTable(folder.trials, problem.model, problem.space.fields).read(cut_torn_line=False))
        baseline = _read_candidate(info["problem"]["baseline"])
        dynamic_batching = _read_candidate(info["problem"]["dynamic_batching"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise folder.no_record(error) from None
    refuse_missing_rows(folder, info, trials)
    outcome = assess(trials, problem, baseline, dynamic_batching) if trials else None
    return FinishedRun(folder, options, info, problem, baseline, dynamic_batching, trials, outcome)


def refuse_missing_rows(folder: RunFolder, info: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Raise BadInputError if trials.csv lacks measurements that the result in run.json counts.

    Without them, another configuration would be recommended. Only a run that ended is checked: one that was killed
    has no result, and may leave an incomplete last row.

    Args:
        folder: The folder of the run.
        info: Its run.json.
        trials: The trials in its trials.csv.
    """
    if info.get("status") not in ENDED:
        return
    table = show_path(folder.trials)
    if not trials and info["status"] == "found":
        raise BadInputError(f"{table}: missing or empty, but run.json has a recommendation; restore the file")
    if missing := _missing_rows(info.get("result"), trials):
        raise BadInputError(
            f"{table}: lacks measurements that the result in run.json has ({', '.join(missing)}); restore the file, "
            f"or begin a new run (`tune --warm-start {show_path(folder.path)}` learns from this one)"
        )


def _missing_rows(result: object, trials: Sequence[Trial]) -> list[str]:
    """Return what ``trials`` lack of ``result`` in run.json, in words."""
    if not isinstance(result, dict):
        return []
    missing = []
    counted = (
        ("measurements", count_measurements(trials), "of the search"),
        ("confirmations", count_confirmations(trials), "on fresh servers"),
    )
    for key, count, source in counted:
        recorded = result.get(key)
        if type(recorded) is int and count < recorded:
            missing.append(f"{recorded - count:,} of {recorded:,} {source}")
    recommended = result.get("recommended")
    if isinstance(recommended, dict) and not any(_has_point(trial, recommended) for trial in trials):
        missing.append(f"the recommended load of trial {recommended.get('trial')}")
    return missing


def _has_point(trial: Trial, recommended: Mapping[str, Any]) -> bool:
    """Return whether ``trial`` was measured at the load of the point ``recommended`` in run.json."""
    loads = [load for load, _ in trial.measurements] + [window.load for window in trial.confirmations]
    return trial.number == recommended.get("trial") and any(
        all(getattr(load, name) == recommended.get(name) for name in LOAD_COLUMNS) for load in loads
    )


_UNFINISHED_STATES = {
    "interrupted": "was interrupted",
    "failed": "failed",
    "left": "left its study to other workers",
}


def why_unfinished(run: FinishedRun) -> str:
    """Return why ``run`` is incomplete, such as ``the run was interrupted``; empty for one that ended normally."""
    if run.status in ENDED:
        return ""
    if run.status == "running":
        return "the run is still running" if run.folder.writer() else "the run was killed"
    reason = one_line(str(run.info.get("reason", "")), MAX_REASON_LENGTH)
    state = _UNFINISHED_STATES.get(run.status, f"has the status {one_line(run.status, MAX_REASON_LENGTH)}")
    return f"the run {state}{f' ({reason})' if reason else ''}"


def resume_command(run: FinishedRun) -> str:
    """Return the command that continues a run that was cut off; empty if it ended, or if a process will end it."""
    is_cut_off = why_unfinished(run) and run.status != "left" and not run.folder.writer()
    return f"tune --resume {shlex.quote(show_path(run.folder.path))}" if is_cut_off else ""


def how_to_finish(run: FinishedRun) -> str:
    """Return the advice for a run that has not ended.

    It is to continue the run, to wait for the process that measures it, or to give the run of another worker.
    """
    if run.status == "left":
        return "give the run of the worker that ended the study"
    command = resume_command(run)
    return f"continue it with `{command}`" if command else "wait until it ends"


def nothing_recommended(run: FinishedRun, action: str) -> BadInputError:
    """Return the error for ``action``, which needs a recommendation, on a run that has ended without one."""
    path, outcome = show_path(run.folder.path), run.outcome
    if outcome is not None and outcome.inconclusive is not None:
        step = summary.next_step(outcome, run.folder.path, command_line(run.options), tests=run.remaining_tests)
        return BadInputError(
            f"{path}: the run is UNDECIDED and recommends nothing to {action}: "
            f"{one_line(summary.undecided_cause(outcome))}; {step.advice}: `{one_line(step.command)}`"
        )
    goal = formatting.bounds(run.problem.sla) or "the SLA"
    return BadInputError(
        f"{path}: no configuration met {goal}, so there is nothing to {action}; "
        "tune again with a wider bound, smaller requests or more hardware"
    )


def remark(run: FinishedRun) -> str:
    """Return why ``run`` is incomplete, in one sentence for a report; empty for a run that ended normally."""
    reason = why_unfinished(run)
    return f"{reason}; this shows what it measured so far" if reason else ""


def _read_problem(record: Mapping[str, Any], options: RunOptions) -> Problem:
    """Return the problem in run.json. Raises ValueError or TypeError for values that no run can have."""
    info, hardware = record["problem"], record["hardware"]
    _check_problem(info, hardware)
    kind, size = ModelKind(info["kind"]), info["request_batch_size"]
    choices = {name: tuple(values) for name, values in info["space"].items()}
    settings = {name: choices.pop(name) for name in SETTING_COLUMNS if name in choices}
    for name in ("max_batch_size", "instance_count"):
        for value in settings.get(name, ()):
            _check_whole(name, value)
    return Problem(
        model=str(info["model"]),
        space=SearchSpace(
            **settings,
            fields=choices,
            request_batch_size=size if isinstance(size, int) else 1,
            is_streaming=kind is ModelKind.STREAMING,
        ),
        request_batch_size=size,
        max_concurrency=info["max_concurrency"],
        objectives=tuple(METRICS[name] for name in info["objectives"]),
        sla=Sla.parse(info["constraints"]),
        open_loop=options.load == "rate",
        cpu_count=_read_cpu_count(info, hardware),
        confidence=options.confidence,
        client_shares_cpus=bool(record.get("client_shares_cpus")),
        kind=kind,
        request_times=_read_request_times(info) if options.load == "rate" else None,
        tokens=_read_token_requests(info.get("tokens")),
        priorities=parse_priorities(str(info["priorities"])) if info.get("priorities") else None,
        queue=_read_queue(info.get("queue", {})),
        concurrent=tuple(
            ConcurrentModel(name, share, _read_candidate(info["concurrent_candidates"][name]))
            for name, share in read_shares(info).items()
            if name in info.get("concurrent_candidates", {})
        ),
    )


def read_shares(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of the load of the other models, by model: in the problem of run.json, or in sweep.json."""
    text = info.get("concurrent_models")
    return load_shares(text.split(",")) if isinstance(text, str) else {}


def _check_problem(info: Mapping[str, Any], hardware: Mapping[str, Any]) -> None:
    """Raise ValueError if the problem or the hardware in run.json has a value that no run can have."""
    size, (minimum, maximum) = info["request_batch_size"], NUMBER_RANGES["request_batch_size"]
    if type(size) not in (int, float) or not minimum <= size <= maximum:
        raise ValueError(f"request_batch_size {size!r} is not a number from {minimum} to {maximum}")
    if type(hardware["cpu_count"]) is not int or not 1 <= hardware["cpu_count"] <= MAX_CPU_COUNT:
        raise ValueError(f"hardware.cpu_count {hardware['cpu_count']!r} is not a number of CPUs")
    if not isinstance(hardware["cpu"], str):
        raise ValueError("hardware.cpu is not a name")
    if not isinstance(hardware["gpus"], list) or not all(isinstance(name, str) for name in hardware["gpus"]):
        raise ValueError("hardware.gpus is not a list of names")
    if not isinstance(info.get("facts", {}), dict):
        raise ValueError("facts is not an object")
    kinds = [kind.value for kind in ModelKind]
    if info["kind"] not in kinds:
        raise ValueError(f"kind {info['kind']!r} is not one of {', '.join(kinds)}")
    _check_whole("concurrency", info["max_concurrency"])


def _read_cpu_count(info: Mapping[str, Any], hardware: Mapping[str, Any]) -> int | None:
    """Return the CPUs of the server in the problem of run.json; those of the machine for a run that lacks them."""
    count = info.get("cpu_count", None if hardware["gpus"] else hardware["cpu_count"])
    if count is not None and (type(count) is not int or not 1 <= count <= MAX_CPU_COUNT):
        raise ValueError(f"problem.cpu_count {count!r} is not a number of CPUs")
    return count


def _read_queue(recorded: Mapping[str, Any]) -> Fields:
    """Return the settings of the queue in run.json. Raises ValueError for those that config.pbtxt cannot have."""
    if not isinstance(recorded, dict) or not all(map(is_queue_field, recorded)):
        raise ValueError("problem.queue has other settings than those of a queue")
    return tuple((path, normalize_value(ModelConfig.DESCRIPTOR, path, recorded[path])) for path in sorted(recorded))


def _read_token_requests(recorded: Mapping[str, Any] | None) -> TokenRequests | None:
    """Return the lengths in run.json, approximately. Raises ValueError for values that no run can have."""
    if not recorded:
        return None
    try:
        prompt, output = (_approximate_lengths(recorded[name]["quantiles"]) for name in ("prompt", "output"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"problem.tokens: {error}") from None
    return TokenRequests(prompt, output, prompt_input="", output_input="")


def _approximate_lengths(quantiles: Sequence[int]) -> SizeDistribution:
    """Return a distribution that is uniform between neighbors of ``quantiles``, which have equal distances."""
    if len(quantiles) < 2 or any(type(length) is not int for length in quantiles):
        raise ValueError(f"{quantiles!r} are not two or more lengths")
    if sorted(quantiles) != list(quantiles) or not 1 <= quantiles[0] <= quantiles[-1] <= MAX_TOKENS:
        raise ValueError(f"{quantiles!r} are not ascending lengths from 1 to {MAX_TOKENS}")
    return SizeDistribution(tuple((low, high, 1.0) for low, high in pairwise(quantiles)))


def _read_request_times(info: Mapping[str, Any]) -> RequestTimes:
    """Return the times of the requests in the problem of run.json. Raises ValueError or TypeError."""
    stored = info.get("request_times", {})
    times = RequestTimes(**{**stored, "recorded_shares": tuple(stored.get("recorded_shares", ()))})
    _check_whole("requests", times.recorded_requests)
    if any(type(share) not in (int, float) or not 0 <= share <= 1 for share in times.recorded_shares):
        raise ValueError("request_times.recorded_shares are not from 0 to 1")
    if times.recorded_shares and not math.isclose(math.fsum(times.recorded_shares), 1.0, abs_tol=1e-6):
        raise ValueError("request_times.recorded_shares do not add up to 1")
    if not isinstance(times.distribution, str):
        raise ValueError("request_times.distribution is not a name")
    if is_load_shape(times.distribution):
        parse_load_shape(times.distribution)
    if type(times.period_seconds) not in (int, float) or not 0 <= times.period_seconds <= MAX_PERIOD_SECONDS:
        raise ValueError(
            f"request_times.period_seconds {times.period_seconds!r} is not from 0 to {MAX_PERIOD_SECONDS:g}"
        )
    return times


def _read_candidate(values: Mapping[str, Any]) -> Candidate:
    """Return the candidate that ``candidate_document`` wrote."""
    settings = {name: values[name] for name in SETTING_COLUMNS}
    if type(settings["dynamic_batching"]) is not bool:
        raise ValueError(f"dynamic_batching {settings['dynamic_batching']!r} is neither true nor false")
    for name in ("max_batch_size", "max_queue_delay_us", "instance_count"):
        _check_whole(name, settings[name])
    settings["preferred_batch_sizes"] = tuple(settings["preferred_batch_sizes"])
    for size in settings["preferred_batch_sizes"]:
        _check_whole("max_batch_size", size)
    return Candidate(**settings, fields=tuple(sorted((k, v) for k, v in values.items() if k not in SETTING_COLUMNS)))


def _check_whole(name: str, value: object) -> None:
    """Raise ValueError if ``value`` is outside the range of the column ``name`` of a trials table."""
    minimum, maximum = INTEGER_RANGES[name]
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{name} {value!r} is not a whole number from {minimum} to {maximum}")


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    """Return ``candidate`` for run.json: settings by name, other fields by their path."""
    return {**candidate.settings, "preferred_batch_sizes": list(candidate.preferred_batch_sizes)}
