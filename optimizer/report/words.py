"""Figures and configurations in words: sensible digits, thousands separators, a unit with every number."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from objectives.metrics import METRICS, Measurement, Metric
from objectives.sla import Constraint
from objectives.verdict import Interval, Judged
from optimizer import server_options
from optimizer.trial import INSTANCE_GPUS, VARIANT, Candidate, LoadPoint, Point, model_of, short_path
from optimizer.untrusted import one_line

UNKNOWN = "unknown"
_SHA_DIGITS = 12
_FOR_THE_RECORD = {"builder", "seed", "sha256"}


def number(value: float | None, digits: int = 3) -> str:
    """At least ``digits`` significant digits, whole numbers in full: 12,345 · 771 · 18.2 · 0.523."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(0, digits - 1 - magnitude), 6)}f}"


def exact(value: float) -> str:
    """A number that somebody wrote: 20 · 0.5 · 4,000."""
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def size(count: float | None) -> str:
    """Bytes, in powers of 1000: 8.38 GB."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{number(count) if unit != 'bytes' else exact(count)} {unit}"
        count /= 1000
    return f"{number(count)} TB"


def clock(seconds: float) -> str:
    """4:05 (minutes and seconds), 1:02:03 from an hour on."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(amount: int, noun: str) -> str:
    """1 instance · 2,000 instances."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def verdict(judged: Judged) -> str:
    """PASS at 99% confidence."""
    return f"{judged.verdict.value} at {100 * judged.confidence:g}% confidence"


def quantity(metric: Metric, value: float | None) -> str:
    """A metric's value with its unit; ``unknown`` without one."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return size(value) if metric.unit == "bytes" else f"{number(value)} {metric.unit}".rstrip()


def interval(metric: Metric, bounds: Interval) -> str:
    """``7,105 to 7,311 infer/s``; what has no bound is left out."""
    if math.isinf(bounds.high):
        return f"at least {quantity(metric, max(bounds.low, 0.0))}"
    return f"{number(max(bounds.low, 0.0))} to {quantity(metric, bounds.high)}"


def of(point: Point, metric: str) -> str:
    """``of(point, "latency-p95")`` -> ``18.2 ms``."""
    return quantity(METRICS[metric], METRICS[metric].value(point.measurement))


def short(metric: str) -> str:
    """``latency-p95`` -> ``p95``."""
    return metric.removeprefix("latency-")


def spoken(metric: str) -> str:
    """``gpu-memory`` -> ``GPU memory``."""
    return metric.replace("latency-", "latency ").replace("gpu-", "GPU ")


def gpu(measurement: Measurement) -> str:
    """``74 % busy · 312 W · SM 1,755 MHz · memory 2,619 MHz``; empty where nothing is known."""
    known: list[tuple[float | None, Callable[[float], str]]] = [
        (measurement.gpu_utilization, lambda share: f"{100 * share:.0f} % busy"),
        (measurement.gpu_power_watts, lambda watts: f"{number(watts)} W"),
        (measurement.gpu_sm_clock_mhz, lambda mhz: f"SM {number(mhz)} MHz"),
        (measurement.gpu_memory_clock_mhz, lambda mhz: f"memory {number(mhz)} MHz"),
    ]
    told = [say(value) for value, say in known if value is not None]
    if measurement.gpu_throttling:
        told.append(f"clocks lowered: {measurement.gpu_throttling}")
    return " · ".join(told)


def bound(constraint: Constraint) -> str:
    metric = METRICS[constraint.metric]
    relation = ">=" if metric.better == "higher" else "<="
    value = size(constraint.bound) if metric.unit == "bytes" else f"{exact(constraint.bound)} {metric.unit}"
    return f"{spoken(short(metric.name))} {relation} {value.rstrip()}"


def bounds(constraints: Iterable[Constraint]) -> str:
    """``p95 <= 20 ms and throughput >= 4,000 infer/s``; empty without constraints."""
    return " and ".join(map(bound, constraints))


def judged_latency(constraints: Iterable[Constraint]) -> str:
    """The latency that the first bound on one is about; p95 where none is bounded."""
    return next((c.metric for c in constraints if c.metric.startswith("latency-")), "latency-p95")


def performance(point: Point, latency: str) -> str:
    """``12,345 infer/s, p95 18.2 ms, concurrency 24`` (or ``at 3,000 req/s``)."""
    figures = f"{of(point, 'throughput')}, {short(latency)} {of(point, latency)}"
    if point.load.request_rate:
        return f"{figures}, at {load(point.load)}"
    return f"{figures}, concurrency {load(point.load)}"


def load(point: LoadPoint) -> str:
    """``24`` requests in flight, or ``3,000 req/s``."""
    return f"{exact(point.request_rate)} req/s" if point.request_rate else f"{point.concurrency:,}"


def configuration(candidate: Candidate) -> str:
    """One line: ``batch 128 · 2 instances · delay 500 µs · preferred 64``. Batch is max_batch_size."""
    parts = [f"batch {candidate.max_batch_size:,}", count(candidate.instance_count, "instance")]
    if candidate.instance_gpus is not None:
        parts[-1] += f" on GPU {candidate.instance_gpus.replace(',', ', ')}"
    if candidate.dynamic_batching:
        parts.append(f"delay {candidate.max_queue_delay_us:,} µs")
    else:
        parts.append("no dynamic batching")
    if candidate.preferred_batch_sizes:
        parts.append(f"preferred {', '.join(map(str, candidate.preferred_batch_sizes))}")
    fields = [(path, value) for path, value in candidate.fields if path != INSTANCE_GPUS]
    parts += [f"{short_path(path)}={_literal(value)}" for path, value in fields]
    return " · ".join(parts)


def triton_lines(candidate: Candidate) -> list[str]:
    """The tuned settings as config.pbtxt words them; fields that are no parameters by their path."""
    lines = [f"max_batch_size: {candidate.max_batch_size}"]
    if candidate.dynamic_batching:
        lines += _batching_lines(candidate)
    else:
        lines.append("# no dynamic_batching")
    group = f"count: {candidate.instance_count}"
    if candidate.instance_gpus is not None:
        group += f" kind: KIND_GPU gpus: [ {candidate.instance_gpus.replace(',', ', ')} ]"
    lines.append(f"instance_group [ {{ {group} }} ]")
    for path, value in candidate.proto_fields:
        parts = path.split(".")
        if parts[0] == "parameters" and len(parts) == 3:
            text = json.dumps(str(value), ensure_ascii=False)
            lines.append(f'parameters {{ key: "{parts[1]}" value {{ {parts[2]}: {text} }} }}')
        else:
            lines.append(f"{path}: {_literal(value)}")
    for path, value in candidate.fields:
        if path == VARIANT or model_of(path):
            lines.append(f"# {path.replace('/', ': ')} {_literal(value)}")
    if options := server_options.words(candidate.fields):
        lines.append(f"# server_options: {' '.join(options)}")
    if candidate.server_cpus:
        lines.append(f"# the server on CPUs {candidate.server_cpus} (taskset -c, docker run --cpuset-cpus)")
    return lines


def _batching_lines(candidate: Candidate) -> list[str]:
    inside = []
    if candidate.max_queue_delay_us:
        inside.append(f"max_queue_delay_microseconds: {candidate.max_queue_delay_us}")
    if candidate.preferred_batch_sizes:
        inside.append(f"preferred_batch_size: [ {', '.join(map(str, candidate.preferred_batch_sizes))} ]")
    if len(inside) < 2:
        return [f"dynamic_batching {{ {''.join(f'{setting} ' for setting in inside)}}}"]
    return ["dynamic_batching {", *(f"  {setting}" for setting in inside), "}"]


def facts_line(facts: Mapping[str, object]) -> str:
    """``precision fp32 · rows 2,101,239 · embedding size 1.08 GB`` and the like."""
    told = {name: value for name, value in facts.items() if name not in _FOR_THE_RECORD}
    return " · ".join(f"{name} {value}" for name, value in facts_words(told).items())


def facts_words(facts: Mapping[str, object]) -> dict[str, str]:
    """In words: ``max_rows`` -> ``max rows``, ``model_bytes: 640098304`` -> ``model size: 640 MB``."""
    return {name.replace("_bytes", "_size").replace("_", " "): _fact(name, value) for name, value in facts.items()}


def _fact(name: str, value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith("bytes"):
            return size(value)
        return f"{value:,}" if isinstance(value, int) else number(value)
    return str(value)[:_SHA_DIGITS] if name == "sha256" else str(value)


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else one_line(str(value))
