"""One measurement for all windows of a load: pooled latency quantiles, and the requests above a bound."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from objectives import latency_sketch, model_stats, priority_stats, step_stats
from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, METRICS, QUANTILES, RATES, STATISTICS, TIMINGS, Measurement, Timing

MAX_LEVEL = max(QUANTILES.values())  # nothing is known about the latencies above this quantile
EDGES = 200  # latencies at which the tails of windows without sketches are added up
_SUMMED = ("requests", "rejected_requests", "timed_out_requests", "failed_requests")
_EXTREMES = {"begin_unix_seconds": min, "end_unix_seconds": max}


def pool_measurements(windows: Sequence[Measurement]) -> Measurement:
    """Return one measurement for all windows.

    Latency quantiles and averages are those of all served requests, sketches are merged, and requests are summed,
    also by priority and by model. With several models each latency is that of the slowest one over all windows.
    Counters of steps are summed too. Rates, such as the throughput, are means over windows, which have equal lengths:
    if a window holds only one or two large batches, the median is far from the mean. A lost window has none of
    these. The time is that from the start of the first window to the end of the last one. Other values are medians
    over the windows in which they are known. The result is stable if all windows are, and overloaded, disturbed or
    crashed if one of them is.
    """
    values: dict[str, object] = {}
    for name in (field.name for field in fields(Measurement)):
        numbers = [value for window in windows if _is_number(value := getattr(window, name))]
        if name in _SUMMED:
            # no failed request is a count of 0, but no served request leaves ``requests`` unknown
            if any(numbers) or (numbers and name != "requests"):
                values[name] = sum(numbers)
        elif numbers and name in _EXTREMES:
            values[name] = _EXTREMES[name](numbers)
        elif numbers:
            average = statistics.fmean if name in RATES else statistics.median
            values[name] = round(average(numbers), 4)
    served = [window for window in windows if window.requests != 0 and window.has_values]
    for timing in TIMINGS if served else ():
        values |= _pool_timing(served, timing)
    values["by_priority"] = priority_stats.pool([window.by_priority for window in windows])
    if by_model := _pool_models([window.by_model for window in windows]):
        values["by_model"] = model_stats.to_text(by_model)
        for name in map(LATENCY.field_of, STATISTICS):
            latencies_ms = [getattr(model, name) for model in by_model.values()]
            values[name] = None if None in latencies_ms else max(latencies_ms)
    values["step_stats"] = step_stats.pool(window.step_stats for window in windows)
    values["stable"] = all(window.stable and window.has_values for window in windows)
    for name in ("overloaded", "disturbed", "server_crashed"):
        values[name] = any(getattr(window, name) for window in windows)
    values["reason"] = next((window.reason for window in windows if window.reason), "")
    return Measurement(**values)  # type: ignore[arg-type]


def _pool_models(texts: Sequence[str]) -> dict[str, Measurement]:
    """Return the values of each model over all windows; empty unless every window has values of the same models."""
    windows = [model_stats.from_text(text) for text in texts]
    if not all(window.keys() == windows[0].keys() for window in windows):
        return {}
    return {name: pool_measurements([window[name] for window in windows]) for name in (windows[0] if windows else ())}


def _pool_timing(windows: Sequence[Measurement], timing: Timing) -> dict[str, object]:
    """Return the fields of Measurement for ``timing`` over all requests, without those that a window lacks."""
    values: dict[str, object] = {}
    if not math.isnan(average_ms := pooled_average_ms(windows, timing)):
        values[timing.field_of("avg")] = round(average_ms, 4)
    for name, level in QUANTILES.items():
        if all(level in latency_quantiles(window, timing) for window in windows):
            values[timing.field_of(name)] = round(pooled_quantile_ms(windows, level, timing), 4)
    sketches = [timing.sketch(window) for window in windows]
    if all(sketches):
        values[timing.sketch_field] = latency_sketch.merge(sketches)
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def latency_quantiles(measurement: Measurement, timing: Timing = LATENCY) -> dict[float, float]:
    """Return the known quantiles of ``timing`` in ms, by level."""
    quantiles_ms = {level: METRICS[timing.metric(name)].value(measurement) for name, level in QUANTILES.items()}
    return {level: ms for level, ms in quantiles_ms.items() if ms is not None and math.isfinite(ms)}


def pooled_quantile_ms(windows: Sequence[Measurement], level: float, timing: Timing = LATENCY) -> float:
    """Return the quantile of ``timing`` over all requests of ``windows`` in ms; nan if no quantile is known.

    If all windows have sketches, these are merged, so the error is at most ``latency_sketch.RELATIVE_ACCURACY``.
    Otherwise the tail of a window is taken as exponential between its quantiles and beyond the highest one, as in
    ``_tail_shares``, and the result is inf above ``MAX_LEVEL``. It is inf above the level 1 in any case: the largest
    latency is no bound of such a quantile.
    """
    if level > 1:
        return math.inf
    known = [(window, quantiles) for window in windows if (quantiles := latency_quantiles(window, timing))]
    if known and all(timing.sketch(window) for window, _ in known):
        return latency_sketch.pooled_quantile_ms([timing.sketch(window) for window, _ in known], level)
    if level > MAX_LEVEL:
        return math.inf
    if not known:
        return math.nan
    ends_ms = [ms for _, quantiles in known for ms in (*quantiles.values(), _tail_quantile_ms(quantiles, level))]
    edges_ms = np.unique([*ends_ms, *np.linspace(min(ends_ms), max(ends_ms), EDGES)])
    requests = [requests_with(window, timing) for window, _ in known]
    shares = np.average([_tail_shares(quantiles, edges_ms) for _, quantiles in known], axis=0, weights=requests)
    return float(np.interp(-math.log(1 - level), -np.log(shares), edges_ms))  # shares fall as the edges rise


def pooled_average_ms(windows: Sequence[Measurement], timing: Timing = LATENCY) -> float:
    """Return the mean of ``timing`` over all requests of ``windows`` in ms; nan if no average is known."""
    averages_ms, requests = averages_and_requests(windows, timing)
    return float(np.average(averages_ms, weights=requests)) if requests.any() else math.nan


def averages_and_requests(windows: Sequence[Measurement], timing: Timing = LATENCY) -> tuple[FloatArray, FloatArray]:
    """Return the average of ``timing`` in ms and the number of requests, of each window with a known average."""
    average = METRICS[timing.metric("avg")].value
    averages = [
        (average_ms, requests_with(window, timing))
        for window in windows
        if (average_ms := average(window)) is not None and math.isfinite(average_ms)
    ]
    requests = [float(count) for _, count in averages]
    return np.array([average_ms for average_ms, _ in averages]), np.array(requests)


def requests_with(window: Measurement, timing: Timing) -> int:
    """Return the number of requests that have ``timing``: those in its sketch, or all of them if there is none.

    It is 1 if the number is unknown, so that windows have equal weights. A request with a single response has no
    inter-token latency. ``requests`` of an overloaded server are the answered ones, but each request that it got has
    a latency.
    """
    sketch = "" if timing is LATENCY and not window.overloaded else timing.sketch(window)
    if sketch:
        return latency_sketch.count(sketch)
    return window.requests or (0 if served_nothing(window) else 1)


def misses_over(window: Measurement, bound_ms: float, timing: Timing) -> float:
    """Return the requests above ``bound_ms`` or failed: counted where possible, else estimated.

    It is all of them if nothing is known.
    """
    counted = _counted_misses(window, bound_ms, timing)
    if counted is None:
        quantiles_ms, requests = latency_quantiles(window, timing), requests_with(window, timing)
        counted = requests * float(_tail_shares(quantiles_ms, bound_ms)) if quantiles_ms else float(requests)
    return counted + (window.errors or 0)


def _counted_misses(window: Measurement, bound_ms: float, timing: Timing) -> float | None:
    """Return the requests above ``bound_ms``: exact, or by the sketch; None if the window has only quantiles."""
    exact, sketch = latency_sketch.requests_over(timing.requests_over(window), bound_ms), timing.sketch(window)
    if exact is not None or not sketch:
        return exact
    return requests_with(window, timing) * latency_sketch.share_over(sketch, bound_ms)


def served_nothing(window: Measurement) -> bool:
    """Return whether no request of a window was served."""
    return window.requests == 0


def _exponential_tail(quantiles_ms: Mapping[float, float]) -> tuple[float, float, float]:
    """Return the highest level, its latency in ms, and the decay per ms between the two highest quantiles."""
    (before, before_ms), (last, last_ms) = sorted([(0.0, 0.0), *quantiles_ms.items()])[-2:]
    return last, last_ms, math.log((1 - before) / (1 - last)) / max(last_ms - before_ms, 1e-9)


def _tail_quantile_ms(quantiles_ms: Mapping[float, float], level: float) -> float:
    """Return the latency at ``level`` if the exponential between the two highest quantiles continues."""
    last, last_ms, decay_per_ms = _exponential_tail(quantiles_ms)
    return last_ms + max(0.0, math.log((1 - last) / (1 - level))) / decay_per_ms


def _tail_shares(quantiles_ms: Mapping[float, float], bounds_ms: FloatArray | float) -> FloatArray:
    """Return the share of requests above each bound, with the exponential tail beyond the highest quantile."""
    _, last_ms, decay_per_ms = _exponential_tail(quantiles_ms)
    beyond_ms = np.maximum(0.0, np.asarray(bounds_ms, dtype=np.float64) - last_ms)
    return np.asarray(_miss_shares(quantiles_ms, bounds_ms) * np.exp(-decay_per_ms * beyond_ms), dtype=np.float64)


def _miss_shares(quantiles_ms: Mapping[float, float], bounds_ms: FloatArray | float) -> FloatArray:
    """Return the share of requests above each bound; at least the share above the highest quantile."""
    levels, values = [0.0, *sorted(quantiles_ms)], [0.0, *sorted(quantiles_ms.values())]
    return np.asarray(np.exp(np.interp(bounds_ms, values, np.log1p(-np.array(levels)))), dtype=np.float64)
