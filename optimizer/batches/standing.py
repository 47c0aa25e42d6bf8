"""A run of a batch, read from its folder: where its search stands, and what it has come to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from objectives.metrics import Metric
from optimizer.batches.record import EntryRecord, Figure
from optimizer.batches.sharing import Standing
from optimizer.confirm.plan import Confirmed
from optimizer.machine.hardware import Hardware
from optimizer.report import summary, words
from optimizer.session import SATISFIED
from optimizer.store.finished import FinishedRun
from optimizer.trial import Point

REQUESTS = ("request_batch_size", "input_data", "shapes", "ranges", "string_data", "string_length")
MADE_WITH = ("tritonserver", "tritune", "onnxruntime")


def standing(entry: EntryRecord, run: FinishedRun, promise: Callable[[FinishedRun], float]) -> Standing:
    """``promise`` is asked only where the search may go on."""
    over = entry.is_done or entry.search_is_over
    return Standing(entry.seconds, usual_seconds(run), 0.0 if over else promise(run), over)


def usual_seconds(run: FinishedRun) -> float:
    """What a deployment and all that was measured on it usually take; 0 before the first."""
    took = [
        (trial.deploy_seconds or 0) + sum(measurement.measure_seconds or 0 for _, measurement in trial.measurements)
        for trial in run.trials
    ]
    return median(took) if took else 0.0


def search_is_over(run: FinishedRun, most: int | None) -> bool:
    """Whether the method has ended the search, or there is nothing left to try, or it has tried the ``most``."""
    tried = len(run.trials)
    return (
        SATISFIED in run.info.get("notes", ())
        or tried >= int(run.info["problem"]["candidates"])
        or (most is not None and tried >= most)
    )


def described(entry: EntryRecord, run: FinishedRun) -> EntryRecord:
    """``entry`` with all that its run tells."""
    outcome, problem = run.outcome, run.problem
    if outcome is None:
        return entry
    metric, best = problem.objectives[0], outcome.recommended
    return replace(
        entry,
        trials=outcome.trials,
        figure=_figure(metric, best, outcome.confirmed),
        baseline=_figure(metric, outcome.baseline, outcome.confirmation_of(outcome.baseline)),
        headline=summary.headline(outcome, problem).removeprefix(f"{problem.model}: "),
        verdict=outcome.confirmed.judged.verdict.value if outcome.confirmed else "UNDECIDED" if best else "",
        speedup=outcome.speedup,
        configuration=words.configuration(best.candidate) if best else "",
        conditions=_conditions(run),
        circumstances=_circumstances(run),
    )


def _figure(metric: Metric, point: Point | None, confirmed: Confirmed | None) -> Figure | None:
    value = metric.value(point.measurement) if point else None
    if value is None or not math.isfinite(value):
        return None
    if confirmed is None:
        return Figure(metric.name, value, unsure="not measured again on fresh servers")
    if not confirmed.point.measurement.stable:  # the machine was busy with others, say: windows then agree on nothing
        return Figure(metric.name, value, unsure=confirmed.judged.reason or confirmed.point.measurement.reason)
    interval = {"throughput": confirmed.throughput, confirmed.latency: confirmed.latency_ms}.get(metric.name)
    if interval is None or interval.is_unknown or not math.isfinite(interval.high):
        return Figure(metric.name, value, unsure=f"the interval of {metric.name} is not known")
    return Figure(metric.name, value, interval.low, interval.high)


def _conditions(run: FinishedRun) -> dict[str, str]:
    told, options = run.info["hardware"], run.options
    hardware = Hardware(tuple(told["gpus"]), told["cpu"], told["cpu_count"], told["memory_bytes"])
    rate = f"rate, {options.arrivals}"
    requests = [f"{name} {value}" for name in REQUESTS if (value := getattr(options, name)) not in (None, ())]
    return {
        "hardware": str(hardware),
        "CPUs": options.server_cpus or "",
        "bounds": words.bounds(run.problem.constraints),
        "objective": ",".join(metric.name for metric in run.problem.objectives),
        "load": rate if run.problem.open_loop else options.load,
        "protocol": options.protocol,
        "samples in a request": str(run.problem.request_batch_size),
        "requests": ", ".join(requests),
    }


def _circumstances(run: FinishedRun) -> dict[str, str]:
    versions = run.info.get("versions", {})
    found = {name: str(versions[name]) for name in MADE_WITH if name in versions}
    model = run.info["problem"].get("facts", {}).get("sha256")
    return {**found, **({"model": str(model)[:12]} if model else {})}
