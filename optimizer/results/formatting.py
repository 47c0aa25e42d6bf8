"""Formats numbers, bounds and loads as text: significant digits, thousands separators, units."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from objectives.intervals import ConfidenceInterval, GainRatio, ObjectiveGain
from objectives.metrics import LATENCY, METRICS, Measurement, Metric
from objectives.sla import Constraint, Sla, Verdict
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core.load_shapes import RequestTimes, is_load_shape, parse_load_shape
from optimizer.core.safe_text import one_line
from optimizer.core.trial import LoadPoint, Point
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH

ComparedSide = Literal["recommendation", "compared"]  # one side of the comparison with another configuration

UNKNOWN = "unknown"
OUTPUT_THROUGHPUT = "output-throughput"
TIMING_NAMES = {"latency": "latency", "ttft": "TTFT", "itl": "inter-token"}  # names for people
NO_SLA = "PASS: no SLA was given"
VERDICT_STYLES = {Verdict.PASS: "bold green", Verdict.UNDECIDED: "bold yellow", Verdict.FAIL: "bold red"}
MAX_DECIMALS, RATIO_DECIMALS = 6, 2
COARSEST = 0.05  # share by which rounding may change the lower end of a wide interval
ONE_DIGIT_FROM = 3.55  # first digits of an uncertainty that is written with one digit; smaller ones have two
NEGLIGIBLE = 1e-5  # a narrower relative width of an interval comes from rounding errors
MAX_SKEW = 4.0  # largest ratio of the distances to the ends of an interval that ± stands for
_HIDDEN_FACTS = {"builder", "seed", MODEL_HASH}


def number(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with at least ``digits`` significant digits: 12,345, 771, 18.2 or 0.523."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(0, digits - 1 - magnitude), MAX_DECIMALS)}f}"


def approximate(value: float | None) -> str:
    """Return ``value`` rounded to three significant digits: 12,300, 771, 18.2 or 0.523."""
    if not value or not math.isfinite(value):
        return number(value)
    return _rounded(value, min(2 - math.floor(math.log10(abs(value))), MAX_DECIMALS))


def estimate(value: float | None, bounds: ConfidenceInterval | None, unit: str = "") -> str:
    """Return a value with the digits that its interval allows: ``13,800 ± 400``; ``13,800`` without an interval.

    ``±`` is the distance to the farther end of the interval, rounded by the rule of the Particle Data Group. If the
    ends are at very different distances, or ``±`` would reach 0, both are shown: ``5.0 (4.1 to 13)``.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    text = approximate(value)
    if bounds is not None and not bounds.is_unknown:
        text = _with_interval(value, max(bounds.low, 0.0), bounds.high)
    return f"{text} {unit}".rstrip()


def _with_interval(value: float, low: float, high: float) -> str:
    """Return the text of ``estimate`` for a value with a known interval."""
    nearer, farther = sorted((value - low, high - value))
    if math.isinf(farther):
        return f"{approximate(value)} (at least {approximate(low)})"
    if farther <= NEGLIGIBLE * abs(value):
        return approximate(value)
    decimals = _decimals(farther)
    reaches_zero = round(farther, decimals) >= round(abs(value), decimals)
    if nearer > 0 and (farther > MAX_SKEW * nearer or reaches_zero):
        below, above = _decimals(value - low), _decimals(high - value)
        return f"{_rounded(value, max(below, above))} ({_rounded(low, below)} to {_rounded(high, above)})"
    return f"{_rounded(value, decimals)} ± {_rounded(farther, decimals)}"


def _decimals(uncertainty: float) -> int:
    """Return the decimals of a number with this uncertainty; negative ones are zeros before the point."""
    magnitude = math.floor(math.log10(uncertainty))
    digits = 2 if uncertainty < ONE_DIGIT_FROM * 10.0**magnitude else 1
    return min(digits - 1 - magnitude, MAX_DECIMALS)


def _rounded(value: float, decimals: int) -> str:
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def exact(value: float) -> str:
    """Return ``value`` without rounding to significant digits, for numbers that a user gave: 20, 0.5 or 4,000."""
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def size(count: float | None) -> str:
    """Return a number of bytes in decimal units: 8.38 GB."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{number(count) if unit != 'bytes' else exact(count)} {unit}"
        count /= 1000
    return f"{number(count)} TB"


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, 4:05, or with hours, 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Return a duration, rounded to seconds, in the units that it needs: 25 s, 3 min, 1 min 40 s, 2 h 5 min."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{amount} {unit}" for amount, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if amount]
    return " ".join(parts) or "0 s"


def percent(share: float, decimals: int = 0) -> str:
    """Return a share as a percentage, such as ``85 %``."""
    return f"{100 * share:.{decimals}f} %"


def signed_percent(change: float, decimals: int = 0) -> str:
    """Return a relative change as a percentage with its sign, such as ``+18 %``; zero is ``+0 %``."""
    return f"{100 * change:+z.{decimals}f} %"


def count(amount: float, noun: str) -> str:
    """Return the amount with its noun: 1 instance, or 2,000 instances."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def request_load(load: float, *, is_rate: bool) -> str:
    """Return a load in words: 14 requests in flight, or 0.35 requests per second."""
    return f"{exact(load)} request{'' if load == 1 else 's'} {'per second' if is_rate else 'in flight'}"


def request_size(samples: float, *, is_mix: bool = False) -> str:
    """Return the samples of a request: 1 sample each, 4 samples each, or 3.333 samples on average for a mix."""
    if is_mix or samples != int(samples):
        return f"{samples:,.4g} samples on average"
    return f"{count(int(samples), 'sample')} each"


def verdict(confirmed: ConfirmedLoad) -> str:
    """Return the verdict as text without a full stop: ``PASS: the SLA is met at 99 % confidence``."""
    judged = confirmed.judged
    if judged.verdict is Verdict.PASS and not confirmed.sla:
        return NO_SLA
    meaning = {Verdict.PASS: ": the SLA is met", Verdict.FAIL: ": the SLA is missed"}.get(judged.verdict, "")
    return f"{judged.verdict.value}{meaning} at {confidence(judged.confidence)}"


def confidence(share: float) -> str:
    """Return a level of confidence in words: ``99 % confidence``."""
    return f"{100 * share:g} % confidence"


def quantity(metric: Metric, value: float | None) -> str:
    """Return the value of ``metric`` with its unit, or ``unknown``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return size(value) if metric.unit == "bytes" else f"{number(value)} {metric.unit}".rstrip()


def interval(metric: Metric, bounds: ConfidenceInterval) -> str:
    """Return an interval such as ``7,110 to 7,310 infer/s``, or ``at least …`` if it has no upper end."""
    low = max(bounds.low, 0.0)
    if math.isinf(bounds.high):
        return f"at least {approximate(low)} {metric.unit}"
    return f"{_ends(low, bounds.high)} {metric.unit}"


def _ends(low: float, high: float, max_decimals: int = MAX_DECIMALS) -> str:
    """Return ``7,110 to 7,310``, with the digits that half of the width allows.

    The lower end has more digits if these would change it much: ``2.7 to 15`` instead of ``3 to 15``.
    """
    if not NEGLIGIBLE * high < high - low < math.inf:
        return f"{number(low)} to {number(high)}"
    decimals = min(_decimals((high - low) / 2), max_decimals)
    below = decimals
    while below < max_decimals and abs(round(low, below) - low) > COARSEST * low:
        below += 1
    return f"{_rounded(low, below)} to {_rounded(high, decimals)}"


def factor(ratio: GainRatio, direction: str = "") -> str:
    """Return a ratio with its interval, such as ``1.62x (1.49 to 1.77)``, or ``1.62x lower (1.49 to 1.77)``."""
    low, high = ratio.bounds
    width = (high - low) / 2
    decimals = min(_decimals(width), RATIO_DECIMALS) if 0 < width < math.inf else RATIO_DECIMALS
    return f"{_rounded(ratio.estimate, decimals)}x{direction and ' '}{direction} ({_ends(low, high, RATIO_DECIMALS)})"


def gain(gain: ObjectiveGain | None, missed: ComparedSide | None = None, compared: str = "it") -> str:
    """Return a gain with its interval, such as ``1.62x (1.49 to 1.77)`` or ``none (0.96 to 1.12)`` of the throughput.

    Another objective is named: ``p95 4.3x lower (3.8 to 4.9)``, or ``score 0.93 instead of 0.9`` if ratios of it have
    no meaning. ``missed`` is the result of ``Outcome.missed_in_usual_states``, and ``compared`` the other
    configuration's name.
    """
    if gain is None:
        subject = compared if missed == "compared" else "the recommendation"
        return "not confirmed" + (
            f": {subject} misses the bound in the usual states of the machine" if missed else ""
        )
    metric, ratio = METRICS[gain.metric], gain.ratio
    name = "" if metric.name == "throughput" else f"{goal_label(metric.name)} "
    if ratio is None:
        return f"{name}{quantity(metric, gain.value)} instead of {quantity(metric, gain.compared_value)}"
    if not ratio.is_measurable:
        return f"{name and f'{name}gain '}none ({_ends(*ratio.bounds, RATIO_DECIMALS)})"
    if not name:
        return factor(ratio)
    is_lower = metric.better == "lower"
    if ratio.estimate < 1:  # it is worse
        low, high = ratio.bounds
        is_lower, ratio = not is_lower, GainRatio(1 / ratio.estimate, ConfidenceInterval(1 / high, 1 / low))
    return name + factor(ratio, "lower" if is_lower else "higher")


def value_of(point: Point, metric: str) -> str:
    """Return the value of the metric named ``metric`` at ``point``: 18.2 ms."""
    return quantity(METRICS[metric], METRICS[metric].value(point.measurement))


def short_metric(metric: str) -> str:
    """Return ``p95`` for ``latency-p95``, ``TTFT p95`` for ``ttft-p95``; names of other metrics are unchanged."""
    definition = METRICS[metric]
    if definition.timing is None:
        return metric
    return (
        f"{TIMING_NAMES[definition.timing.name]} {definition.statistic}"
        if definition.timing.needs_streaming
        else definition.statistic
    )


def latency_label(metric: str) -> str:
    """Return ``p95 latency`` for ``latency-p95``, and the short name of a time of a model that streams."""
    return f"{short_metric(metric)} latency" if METRICS[metric].timing is LATENCY else short_metric(metric)


def metric_label(metric: str) -> str:
    """Return a label for a metric: ``GPU memory`` for ``gpu-memory``."""
    definition = METRICS[metric]
    if definition.timing is not None:
        return (
            short_metric(metric)
            if definition.timing.needs_streaming
            else f"{definition.timing.name} {definition.statistic}"
        )
    if metric == OUTPUT_THROUGHPUT:
        return "output tokens"
    return metric.replace("gpu-", "GPU ")


def gpu(measurement: Measurement) -> str:
    """Return ``74 % busy · 312 W · SM 1,755 MHz · memory 2,619 MHz``, or an empty text if nothing was measured."""
    values: list[tuple[float | None, Callable[[float], str]]] = [
        (measurement.gpu_utilization, lambda share: f"{percent(share)} busy"),
        (measurement.gpu_power_watts, lambda watts: f"{number(watts)} W"),
        (measurement.gpu_sm_clock_mhz, lambda mhz: f"SM {number(mhz)} MHz"),
        (measurement.gpu_memory_clock_mhz, lambda mhz: f"memory {number(mhz)} MHz"),
    ]
    parts = [text_of(value) for value, text_of in values if value is not None]
    if measurement.gpu_throttling:
        parts.append(f"clocks lowered: {measurement.gpu_throttling}")
    return " · ".join(parts)


def goal_label(metric: str) -> str:
    """Return the name of an objective or bound in a sentence: ``p95``, ``TTFT p95`` or ``GPU memory``."""
    return short_metric(metric) if METRICS[metric].timing else metric_label(metric)


def advantage(metric: Metric) -> str:
    """Return the advantage of a better configuration in words: ``more throughput`` or ``a lower p95``."""
    if metric.name == "throughput":
        return "more throughput"
    return f"a {metric.better} {goal_label(metric.name)}"


def bound(constraint: Constraint) -> str:
    """Return a constraint with its unit: ``p95 <= 20 ms``."""
    metric = METRICS[constraint.metric]
    relation = ">=" if metric.better == "higher" else "<="
    value = size(constraint.bound) if metric.unit == "bytes" else f"{exact(constraint.bound)} {metric.unit}"
    return f"{goal_label(metric.name)} {relation} {value.rstrip()}"


def bounds(sla: Sla) -> str:
    """Return ``p95 <= 20 ms and throughput >= 4,000 infer/s``, or an empty text for an empty SLA."""
    return " and ".join(map(bound, sla))


def performance(point: Point, *metrics: str) -> str:
    """Return ``12,345 infer/s, p95 18.2 ms, concurrency 24``, or ``at 3,000 req/s`` in an open loop.

    ``metrics`` are the names of those that follow the throughput. For a model that streams, the output tokens per
    second come before them.
    """
    has_tokens = point.measurement.output_tokens_per_sec is not None
    output = f", {value_of(point, OUTPUT_THROUGHPUT)}" if has_tokens else ""
    values = "".join(f", {goal_label(metric)} {value_of(point, metric)}" for metric in metrics)
    return f"{value_of(point, 'throughput')}{output}{values}, {at_load(point.load)}"


def load(point: LoadPoint) -> str:
    """Return a load: ``24`` requests in flight, or ``3,000 req/s``."""
    return f"{exact(point.request_rate)} req/s" if point.request_rate else f"{point.concurrency:,}"


def named_load(point: LoadPoint) -> str:
    """Return a load in words: ``concurrency 24``, or ``3,000 req/s``."""
    return load(point) if point.request_rate else f"concurrency {load(point)}"


def at_load(point: LoadPoint) -> str:
    """Return a load as the end of a list of values: ``concurrency 24``, or ``at 3,000 req/s``."""
    return f"at {load(point)}" if point.request_rate else named_load(point)


def sending(rate: float, times: RequestTimes | None) -> str:
    """Return how an open loop sends at a mean of ``rate`` requests per second."""
    text = "open loop: sent independently of responses"
    if times is None:
        return text
    if is_load_shape(times.distribution):
        highest = approximate(rate * parse_load_shape(times.distribution).peak)
        return f"{text}; mean of {times.distribution}, at most {highest} req/s"
    return f"{text}; as in {one_line(times.distribution, 60)}" if times.recorded_requests else text


def facts_line(facts: Mapping[str, object]) -> str:
    """Return facts about a model in one line: ``precision fp32 · rows 2,101,239 · embedding size 1.08 GB``."""
    shown = {name: value for name, value in facts.items() if name not in _HIDDEN_FACTS}
    return " · ".join(f"{name} {value}" for name, value in labelled_facts(shown).items())


def labelled_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """Return facts with readable names and values: ``model_bytes: 640098304`` becomes ``model size: 640 MB``."""
    return {name.replace("_bytes", "_size").replace("_", " "): _fact(name, value) for name, value in facts.items()}


def _fact(name: str, value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith("bytes"):
            return size(value)
        return f"{value:,}" if isinstance(value, int) else number(value)
    return str(value)[:HASH_DIGITS] if name == MODEL_HASH else str(value)
