"""The comparison of two finished runs: the gain of one over the other, other differences, sentences and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from objectives.intervals import GainRatio, ObjectiveGain, gain_ratio
from objectives.metrics import METRICS
from objectives.server_spread import server_spreads
from objectives.sla import Verdict
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.confirmation.windows import undisturbed_windows, windows_of
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, show_path
from optimizer.core.trial import Point
from optimizer.machine.hardware import Fingerprint, Hardware, parse_fingerprint
from optimizer.model.requests import generated_kind
from optimizer.options.run_options import RunOptions
from optimizer.options.values import write_load_shares
from optimizer.results import formatting, result_document, summary
from optimizer.results.finished_run import FinishedRun, how_to_finish, why_unfinished
from optimizer.results.recommendation import Outcome
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH

REQUEST_OPTIONS = (
    "request_batch_size",
    "priorities",
    "sequence_length",
    "input_data",
    "shapes",
    "input_ranges",
    "string_data",
    "string_length",
    "prompt_tokens",
    "output_tokens",
)
COMPARED_VERSIONS = ("tritonserver", "tritune", "onnxruntime", "perf_analyzer")
MAX_VALUE_LENGTH, MAX_NUMBER = 200, 1e18  # limits of values in run.json, which may come from anywhere
MAX_INTERVAL_RATIO = 100.0  # the upper end of an interval over its lower end; a wider one says nothing
MAX_RATIO = 1e6  # one value over another


def is_regression(share: float, high: float, limit: float) -> bool:
    """Return whether a relative improvement is a loss of ``limit`` or more that its interval does not explain.

    ``share`` is negative for a loss, and ``high`` is the upper end of its confidence interval.
    """
    return high < 0 and -share >= limit


def conditions(run: FinishedRun) -> dict[str, str]:
    """Return the conditions under which ``run`` was measured."""
    info, options = run.info["hardware"], run.options
    cpu, memory = str(info.get("cpu", formatting.UNKNOWN)), info.get("memory_bytes", 0)
    hardware = Hardware(tuple(info["gpus"]), cpu, info["cpu_count"], memory)
    times = run.problem.request_times
    recording = f"{Path(options.request_times).name} of {times.recorded_requests:,} requests" if times else ""
    rate = f"rate, {recording if times and times.recorded_requests else options.request_times}"
    return {
        "hardware": str(hardware),
        "CPUs": options.server_cpus or "",
        "bounds": formatting.bounds(run.problem.sla),
        "objective": ",".join(metric.name for metric in run.problem.objectives),
        "load": rate if run.problem.open_loop else options.load,
        "samples in a request": str(run.problem.request_batch_size),
        **request_conditions(options, str(run.info["problem"].get("input_data")), run.concurrent_models),
    }


def request_conditions(options: RunOptions, input_data: str, concurrent: Mapping[str, float]) -> dict[str, str]:
    """Return the conditions that ``options`` set for the requests, without the folders of files.

    ``input_data`` is the name of the file of requests, which is a hash of the content if it was converted.
    ``concurrent`` are the shares of the load of other models.
    """
    values = {name: getattr(options, name) for name in REQUEST_OPTIONS}
    if values["input_data"] not in (None, "zero", "random"):
        values["input_data"] = input_data
    for name in ("prompt_tokens", "output_tokens"):
        values[name] = values[name] and Path(values[name]).name
    values["concurrent_models"] = write_load_shares(concurrent) or None
    requests = [f"{name} {value}" for name, value in values.items() if value not in (None, ())]
    return {
        "protocol": options.protocol,
        "shared memory": options.shared_memory,
        "requests": ", ".join(requests),
    }


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of two compared runs. ``label`` is A or B."""

    label: str
    run: FinishedRun
    outcome: Outcome
    recommended: Point

    @property
    def confirmed(self) -> ConfirmedLoad | None:
        """The confirmation of the recommendation; None if only the search measured it."""
        return self.outcome.confirmed


@dataclass(frozen=True, slots=True)
class Aspect:
    """A part of the conditions of two runs, such as the machine, with its values in both by name.

    A value of None is unknown and differs from nothing. ``required`` names a value without which it is not known
    whether the aspect is the same.
    """

    name: str
    a: Mapping[str, str | None]
    b: Mapping[str, str | None]
    required: str

    @property
    def differences(self) -> dict[str, tuple[str, str]]:
        """The values that differ, as (A, B) by name."""
        pairs = ((name, self.a[name], self.b.get(name)) for name in self.a)
        return {name: (a, b) for name, a, b in pairs if a is not None and b is not None and a != b}

    @property
    def is_same(self) -> bool | None:
        """Whether all known values are the same; None if the required one is unknown."""
        if self.differences:
            return False
        return None if None in (self.a.get(self.required), self.b.get(self.required)) else True


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of the run ``b`` with the run ``a``.

    Attributes:
        a: The run that the other one is compared with.
        b: The run whose gain is shown.
        mismatch: Why the runs are not comparable at all; empty if they are.
        metric: Name of the compared metric: the first objective of both runs, or the throughput if these differ.
        gain: By how much the recommendation of B is better than that of A on fresh servers; None if it is unknown.
        no_gain: Why it is unknown, also because of a mismatch; empty if it is known.
        confidence: One-sided confidence of each end of the ratio's interval.
        aspects: Machine, server, versions, model, requests and objective.
    """

    a: ComparedRun
    b: ComparedRun
    mismatch: str
    metric: str
    gain: ObjectiveGain | None
    no_gain: str
    confidence: float
    aspects: tuple[Aspect, ...]

    @property
    def runs(self) -> tuple[ComparedRun, ComparedRun]:
        """Both runs, A first."""
        return self.a, self.b

    @property
    def ratio(self) -> GainRatio | None:
        """How many times better B is; None without a gain, or if ratios of the metric have no meaning."""
        return self.gain.ratio if self.gain else None

    def has_regressed(self, limit: float) -> bool | None:
        """Return whether B lost the share ``limit`` or more, see ``is_regression``; None without a ratio."""
        if self.ratio is None:
            return None
        return is_regression(self.ratio.estimate - 1, self.ratio.interval.high - 1, limit)


def compare_runs(first: FinishedRun, second: FinishedRun) -> Comparison:
    """Return the comparison of ``second``, which is B, with ``first``, which is A.

    Raises BadInputError, in one line, if both are the same run, or if one is unfinished or recommends nothing.
    """
    if first.folder.path.resolve() == second.folder.path.resolve():
        raise BadInputError(f"{run_path(first)}: A and B are the same run; give two different runs")
    a, b = _compared("A", first), _compared("B", second)
    aspects = compare_conditions(first, second)
    mismatch = _mismatch(first, second)
    confidence = max(first.problem.confidence, second.problem.confidence)
    is_same_machine = next(aspect for aspect in aspects if aspect.name == "machine").is_same is not False
    objectives = {run.problem.objectives[0].name for run in (first, second)}
    metric = objectives.pop() if len(objectives) == 1 else "throughput"
    gain, no_gain = None, mismatch or _why_no_gain(a) or _why_no_gain(b)
    if not no_gain:
        ratio = _ratio(a, b, metric, confidence, is_same_machine=is_same_machine)
        value, compared_value = (METRICS[metric].value(side.recommended.measurement) or 0.0 for side in (b, a))
        gain = ObjectiveGain(metric, value, compared_value, ratio)
        if ratio is None and METRICS[metric].has_ratio:
            gain, no_gain = None, "the speed of the machine differed too much between A and B"
    return Comparison(a, b, mismatch, metric, gain, no_gain, confidence, aspects)


def _compared(label: str, run: FinishedRun) -> ComparedRun:
    """Return ``run`` as A or B. Raises BadInputError if it is unfinished or recommends nothing."""
    path = run_path(run)
    if reason := why_unfinished(run):
        raise BadInputError(f"{path}: {reason}; only finished runs are compared: {how_to_finish(run)}")
    outcome = run.outcome
    if outcome is None or outcome.recommended is None:
        reason = summary.headline(outcome, run.problem) if outcome else "nothing was measured"
        raise BadInputError(
            f"{path}: {one_line(reason, MAX_VALUE_LENGTH)}; give a run that recommends a configuration "
            f"(`tune explain {shlex.quote(path)}` says what would help this one)"
        )
    return ComparedRun(label, run, outcome, outcome.recommended)


def run_path(run: FinishedRun) -> str:
    """Return the folder of ``run`` for people."""
    return show_path(run.folder.path)


def _mismatch(first: FinishedRun, second: FinishedRun) -> str:
    """Return why two runs are not comparable; empty if they are."""
    bounds = [formatting.bounds(run.problem.sla) or "none" for run in (first, second)]
    if bounds[0] != bounds[1]:
        return f"the bounds differ ({bounds[0]}, {bounds[1]})"
    loads = [run.options.load for run in (first, second)]
    return f"the kinds of load differ ({loads[0]}, {loads[1]})" if loads[0] != loads[1] else ""


def _why_no_gain(side: ComparedRun) -> str:
    """Return why a run has no usable confirmation; empty if it has one."""
    if side.confirmed is None:
        return f"{side.label} was not measured on fresh servers"
    if not side.confirmed.point.throughput_infer_per_sec:
        return f"{side.label} served no request on fresh servers"
    disturbance = side.confirmed.disturbance
    return f"the confirmation of {side.label} was disturbed ({disturbance})" if disturbance else ""


def _ratio(
    a: ComparedRun, b: ComparedRun, metric: str, confidence: float, *, is_same_machine: bool
) -> GainRatio | None:
    """Return how many times better ``metric`` is at ``b`` than at ``a``.

    It is None if the interval says nothing, or if ratios of the metric have no meaning.

    On one machine it is the ratio at the same speed of the machine. If the speed hardly varied within the runs, but
    differed between them, its effect is not known, and the interval is extremely wide. The speeds of two machines are
    part of the ratio, so the speed probe is no covariate there.
    """
    if not METRICS[metric].has_ratio:
        return None
    groups = [*undisturbed_windows(a.run.trials), *undisturbed_windows(b.run.trials)]
    spread = server_spreads(groups, [metric])[metric]
    if not is_same_machine:
        spread = replace(spread, slope=0.0, slope_variance=0.0)
    windows_b, windows_a = (windows_of(side.confirmed.point, side.run.trials) for side in (b, a) if side.confirmed)
    ratio = gain_ratio(windows_b, windows_a, metric, spread, confidence)
    if ratio is None or not 1 / MAX_RATIO < ratio.estimate < MAX_RATIO:
        return None
    return ratio if ratio.interval.high <= MAX_INTERVAL_RATIO * ratio.interval.low else None


# -- what differs ---------------------------------------------------------------------------------------------------


def compare_conditions(first: FinishedRun, second: FinishedRun) -> tuple[Aspect, ...]:
    """Return the aspects of the conditions of two runs. Two seeds make no difference."""
    prints = [parse_fingerprint(run.info.get("fingerprint")) for run in (first, second)]
    if None in prints:  # a value of a fingerprint is compared with one of another fingerprint only
        prints = [None, None]
    values = [_values_by_aspect(run, fingerprint) for run, fingerprint in zip((first, second), prints, strict=True)]
    if first.options.seed != second.options.seed:  # it only changes the values of generated requests
        for of_run in values:
            data = of_run["requests"]["data"]
            of_run["requests"]["data"] = generated_kind(data or "") or data
    required = {
        "machine": "hardware",
        "server": "version",
        "versions": "tritonserver",
        "model": "SHA-256",
        "requests": "protocol",
        "objective": "metrics",
    }
    return tuple(Aspect(name, values[0][name], values[1][name], key) for name, key in required.items())


def _values_by_aspect(run: FinishedRun, fingerprint: Fingerprint | None) -> dict[str, dict[str, str | None]]:
    """Return the values of each aspect of ``run`` by their names."""
    run_conditions, facts = conditions(run), run.facts
    sha256, size, uses_gpus = facts.get(MODEL_HASH), facts.get("model_bytes"), run.info.get("server_uses_gpus")
    server = fingerprint.server if fingerprint else run.versions.get("tritonserver")
    values: dict[str, dict[str, str | None]] = {
        "machine": {"hardware": run_conditions["hardware"], "address": fingerprint.at if fingerprint else None},
        "server": {
            "target": run.options.target,
            "version": server,
            "backends": ", ".join(fingerprint.backends) if fingerprint else None,
            "CPUs": _number(run.info.get("server_cpus"), "{:g}".format),
            "device": ("CPU", "GPU")[uses_gpus] if isinstance(uses_gpus, bool) else None,
        },
        "versions": dict(run.versions),
        "model": {
            "name": run.problem.model,
            "SHA-256": str(sha256)[:HASH_DIGITS] if sha256 else None,
            "size": _number(size, formatting.size),
        },
        "requests": {
            "protocol": run_conditions["protocol"],
            "shared memory": run_conditions["shared memory"],
            "load": run_conditions["load"],
            "samples each": run_conditions["samples in a request"],
            "options": run_conditions["requests"],
            "data": recorded_text(run.info["problem"].get("input_data")),
        },
        "objective": {"metrics": run_conditions["objective"]},
    }
    return {aspect: {name: recorded_text(value) for name, value in named.items()} for aspect, named in values.items()}


def _number(value: Any, text_of: Callable[[float], str]) -> str | None:
    """Return a number of run.json as text; None if it is none, or no run can have it."""
    return text_of(value) if isinstance(value, (int, float)) and abs(value) < MAX_NUMBER else None


def recorded_text(value: object) -> str | None:
    """Return a value of run.json as text on one line; None if it is null."""
    return None if value is None else one_line(str(value), MAX_VALUE_LENGTH)


def different_settings(comparison: Comparison) -> dict[str, tuple[object, object]]:
    """Return the settings of the recommendations that differ, as (A, B) by name; None for a field that is not set."""
    a, b = (side.recommended.candidate.settings for side in comparison.runs)
    pairs = {name: (a.get(name), b.get(name)) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# -- sentences, and the document of tune compare --json -----------------------------------------------------------

ASPECT_PLURALS = {
    "machine": "machines",
    "server": "servers",
    "model": "models",
    "requests": "requests",
    "objective": "objectives",
}


def answer(comparison: Comparison) -> str:
    """Return whether the runs differ, in one sentence without a full stop."""
    if comparison.mismatch:
        return f"not comparable: {comparison.mismatch}"
    if undecided := [side.label for side in comparison.runs if side.outcome.verdict is Verdict.UNDECIDED]:
        whose = f"its {_name(comparison)} is" if len(undecided) == 1 else f"their {_plural(comparison)} are"
        return f"{' and '.join(undecided)} ended UNDECIDED, so {whose} not confirmed"
    return gain_sentence(comparison)


def _name(comparison: Comparison) -> str:
    return formatting.goal_label(comparison.metric)


def _plural(comparison: Comparison) -> str:
    return "throughputs" if comparison.metric == "throughput" else f"values of {_name(comparison)}"


def gain_sentence(comparison: Comparison) -> str:
    """Return the gain in one sentence, or why it is unknown."""
    if comparison.gain is None:
        return f"no ratio of the {_plural(comparison)}: {comparison.no_gain}"
    ratio = comparison.ratio
    if ratio and not ratio.is_measurable:
        of_what = "" if comparison.metric == "throughput" else f" of {_name(comparison)}"
        return f"no measurable difference{of_what}: {formatting.factor(ratio)}"
    if ratio and comparison.metric == "throughput":
        return f"The recommendation of B serves {formatting.factor(ratio)} the throughput of A"
    return f"The recommendation of B compared with that of A: {formatting.gain(comparison.gain)}"


def difference_warning(comparison: Comparison) -> str:
    """Return a sentence about other differences than the configurations; empty if there are none."""
    different = [
        ASPECT_PLURALS[aspect.name]
        for aspect in comparison.aspects
        if aspect.name in ASPECT_PLURALS and aspect.is_same is False
    ]
    if not different:
        return ""
    compares = "the ratio compares" if comparison.ratio else f"the {_plural(comparison)} compare"
    return f"The {_listed(different)} differ, so {compares} these as well as the configurations."


def _listed(nouns: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(nouns[:-1]), nouns[-1])))


def regression_sentence(comparison: Comparison, limit: float) -> str:
    """Return whether B lost ``limit`` or more, in one sentence without a full stop."""
    percent = f"{100 * limit:.3g} %"
    if comparison.ratio is None:
        return f"not judged, because there is no ratio of the {_plural(comparison)}"
    if comparison.has_regressed(limit):
        if comparison.metric == "throughput":
            return f"B serves {100 * (1 - comparison.ratio.estimate):.3g} % less than A (limit: {percent})"
        return f"{formatting.gain(comparison.gain)} with B than with A (limit: {percent})"
    return f"none: B shows no measurable loss of {percent} or more"


def document(comparison: Comparison, limit: float | None = None) -> dict[str, Any]:
    """Return the document of ``--json``. Each pair is [A, B]; ``limit`` is that of ``--fail-on-regression``."""
    ratio, is_same = comparison.ratio, {aspect.name: aspect.is_same for aspect in comparison.aspects}
    pairs = {
        aspect.name: {name: list(pair) for name, pair in aspect.differences.items()} for aspect in comparison.aspects
    }
    return {
        "answer": answer(comparison),
        "objective": {"metric": comparison.metric, "better": METRICS[comparison.metric].better},
        **result_document.gain_entry("ratio", comparison.gain),
        "confidence": comparison.confidence,
        "is_measurable": ratio.is_measurable if ratio else None,
        "no_ratio": comparison.no_gain or None,
        "is_regression": None if limit is None else comparison.has_regressed(limit),
        "same_machine": is_same["machine"],
        "same": is_same,
        "warning": difference_warning(comparison) or None,
        "differences": {
            "configuration": {name: list(pair) for name, pair in different_settings(comparison).items()},
            **{name: different for name, different in pairs.items() if different},
        },
        "a": _run_document(comparison.a),
        "b": _run_document(comparison.b),
    }


def _run_document(side: ComparedRun) -> dict[str, Any]:
    """Return the part of the document on one of the two runs."""
    outcome, baseline = side.outcome, side.outcome.baseline
    return {
        "run": run_path(side.run),
        "written": recorded_text(side.run.info.get("written")),
        "verdict": outcome.verdict.value,
        "undecided_cause": summary.undecided_cause(outcome) or None,
        "next_command": side.run.next_command or None,
        "model": side.run.problem.model,
        "sla": list(map(str, outcome.sla)),
        "recommended": result_document.judged_entry(outcome, side.recommended),
        "confirmation": result_document.confirmation(side.confirmed) if side.confirmed else None,
        "baseline": result_document.judged_entry(outcome, baseline.point),
        **result_document.gain_entry("speedup", baseline.gain),
    }
