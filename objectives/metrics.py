"""The values of one measurement, and the metrics that objectives and constraints refer to by name.

To add a metric, add an entry to ``METRICS``: objectives, constraints, console and reports read it there. Any
percentile of a time of the requests is a metric without an entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Literal, Protocol, TypeVar

from objectives.quantiles import parse_percentile


@dataclass(frozen=True, slots=True)
class Forecast:
    """The search's forecast of one measurement, made from trials that ended before.

    The intervals include the variation between deployments and between measurements.

    Attributes:
        throughput_infer_per_sec: Throughput that the search expected, the median of its forecast.
        throughput_infer_per_sec_low: Lower end of the 95 % prediction interval of the throughput.
        throughput_infer_per_sec_high: Upper end of the 95 % prediction interval of the throughput.
        latency_ms: Latency that the search expected, the median of its forecast.
        latency_ms_low: Lower end of the 95 % prediction interval of the latency.
        latency_ms_high: Upper end of the 95 % prediction interval of the latency.
        latency: Metric of the forecast latency, such as ``latency-p95``.
    """

    throughput_infer_per_sec: float
    throughput_infer_per_sec_low: float
    throughput_infer_per_sec_high: float
    latency_ms: float
    latency_ms_low: float
    latency_ms_high: float
    latency: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """The values that were measured for one deployed configuration at one load.

    None means unknown. It is never read as zero and never as success. Latencies are per request.

    Attributes:
        throughput_infer_per_sec: Inferences (samples) per second: requests times request batch size. None if the
            measurement failed.
        latency_avg_ms: Mean latency: until the last response of a request.
        latency_p50_ms: Median of the latency.
        latency_p90_ms: 90th percentile of the latency.
        latency_p95_ms: 95th percentile of the latency.
        latency_p99_ms: 99th percentile of the latency.
        ttft_avg_ms: Mean time to first response of a request. Models that do not stream have no values in this field
            and the following ones.
        ttft_p50_ms: Median of the time to first response.
        ttft_p90_ms: 90th percentile of the time to first response.
        ttft_p95_ms: 95th percentile of the time to first response.
        ttft_p99_ms: 99th percentile of the time to first response.
        itl_avg_ms: Mean inter-token latency. That of a request is the mean time between its responses. A request with
            a single response has none.
        itl_p50_ms: Median of the inter-token latency over requests.
        itl_p90_ms: 90th percentile of the inter-token latency.
        itl_p95_ms: 95th percentile of the inter-token latency.
        itl_p99_ms: 99th percentile of the inter-token latency.
        responses_per_sec: Responses per second of a model that streams.
        output_tokens_per_sec: Tokens per second in these responses.
        client_send_ms: Mean time in which the client sends a request.
        network_ms: Mean time of a request in the network, and in the server's sending and receiving.
        queue_ms: Mean time of a request in the server's queue.
        compute_input_ms: Mean time in which the backend prepares the inputs of a request.
        compute_infer_ms: Mean time of the inference that a request is part of.
        compute_output_ms: Mean time in which the backend prepares the outputs of a request.
        client_recv_ms: Mean time in which the client receives a response.
        mean_batch_size: Samples per execution of the model.
        batch_stats: Executions by batch size, such as ``4:100:52000000`` (samples, executions, total compute time in
            ns), separated by spaces; see ``objectives.batch_stats``.
        step_stats: Statistics of each model that serves a part of a request, such as the steps of an ensemble, or of
            each model that gets load, see ``objectives.step_stats``; empty for a single model.
        requests: Number of measured requests that were served.
        rejected_requests: Requests that the server rejected because its queue was full; empty if failed requests were
            not counted, as without a bound on the error rate. Failed requests are in no time, rate or ``requests``.
        timed_out_requests: Requests that expired in the server's queue, or whose answer the client gave up.
        failed_requests: Requests that failed for another reason.
        goodput_infer_per_sec: Inferences per second of the requests that were served within all latency bounds. Only
            tune's own client measures it.
        by_priority: Requests, throughput and latencies of each priority, see ``objectives.priority_stats``; empty for
            a load without priorities.
        by_model: Requests, throughput, latencies, times on the server and batches of each model, see
            ``objectives.model_stats``; empty unless several models get load at the same time.
        requests_over_ms: Exact numbers of requests above the latency bounds of the SLA, such as ``20:13 10:155``
            (bound in ms, count); empty if they were not counted, as by perf_analyzer.
        requests_over_ttft_ms: The same for the bounds of the time to first response.
        requests_over_itl_ms: The same for the bounds of the inter-token latency.
        latency_sketch: Mergeable sketch of all latencies, see ``objectives.latency_sketch``; empty if there is none.
        ttft_sketch: The same for the times to first response.
        itl_sketch: The same for the inter-token latencies.
        response_times_ms: Times of the responses of the request with the median latency, in ms after it was sent,
            separated by spaces, at most 256 (see ``objectives.response_times``); empty unless the model streams.
        stable: Whether the windows of the measurement agree. ``reason`` says why not.
        gpu_utilization: Share of the time in which a kernel ran, 0 to 1: mean over the server's GPUs.
        gpu_memory_bytes: Largest memory in use: sum over the server's GPUs.
        gpu_power_watts: Mean power: sum over the server's GPUs.
        gpu_sm_clock_mhz: Mean clock of the multiprocessors.
        gpu_memory_clock_mhz: Mean clock of the GPUs' memory.
        gpu_throttling: Why the GPUs lowered their clocks; empty if they did not or it is unknown.
        server_memory_bytes: Memory of the server's processes.
        other_cpu_share: Share of the CPU time that other processes or machines took, 0 to 1.
        kv_cache_utilization: Largest used share of the KV cache, 0 to 1, that the engine of a language model exports.
        engine_tokens_per_sec: Tokens per second that this engine counted itself.
        engine_preemptions: Requests that lost their place in the KV cache during the measurement.
        speed_probe_ms: Time of the speed probe while the server is idle, which rises as the machine slows: in the
            search before the first load, on a fresh server the geometric mean of before and after the load.
        measure_seconds: Wall time of the measurement, with the start of the load generator.
        begin_unix_seconds: Unix time at which the measured part of the load began; with perf_analyzer, its start.
        end_unix_seconds: Unix time at which the measured part of the load ended; with perf_analyzer, its end.
        score: Score of the answers to labelled samples by the user's metric. It does not depend on the load.
        output_deviation: Largest difference of an output from the baseline's as a share of the allowed one, 0 to 1.
            It belongs to the deployment. None if the outputs were not compared.
        late_request_share: Share of the requests that the open loop sent more than 1 ms late, 0 to 1. None in a
            closed loop.
        send_lateness_p99_ms: 99th percentile of the send lateness. None in a closed loop.
        overloaded: Whether the open loop's request rate exceeded the server's capacity, so that its queue only grew.
        disturbed: Whether other processes or machines took more of the CPUs than a window on a fresh server permits;
            false in the search.
        server_crashed: Whether the server or its model died or hung, so that nothing was measured.
        node: Host name of the node of a cluster that measured it; empty outside of a cluster.
        reason: Why the measurement failed or is not stable; empty otherwise.
        forecast: Forecast of this measurement by the search; None if the search made none.
    """

    throughput_infer_per_sec: float | None = None
    latency_avg_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p90_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    ttft_avg_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_avg_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p90_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    responses_per_sec: float | None = None
    output_tokens_per_sec: float | None = None
    client_send_ms: float | None = None
    network_ms: float | None = None
    queue_ms: float | None = None
    compute_input_ms: float | None = None
    compute_infer_ms: float | None = None
    compute_output_ms: float | None = None
    client_recv_ms: float | None = None
    mean_batch_size: float | None = None
    batch_stats: str = ""
    step_stats: str = ""
    requests: int | None = None
    rejected_requests: int | None = None
    timed_out_requests: int | None = None
    failed_requests: int | None = None
    goodput_infer_per_sec: float | None = None
    by_priority: str = ""
    by_model: str = ""
    requests_over_ms: str = ""
    requests_over_ttft_ms: str = ""
    requests_over_itl_ms: str = ""
    latency_sketch: str = ""
    ttft_sketch: str = ""
    itl_sketch: str = ""
    response_times_ms: str = ""
    stable: bool = False
    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_power_watts: float | None = None
    gpu_sm_clock_mhz: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_throttling: str = ""
    server_memory_bytes: float | None = None
    other_cpu_share: float | None = None
    kv_cache_utilization: float | None = None
    engine_tokens_per_sec: float | None = None
    engine_preemptions: float | None = None
    speed_probe_ms: float | None = None
    measure_seconds: float | None = None
    begin_unix_seconds: float | None = None
    end_unix_seconds: float | None = None
    score: float | None = None
    output_deviation: float | None = None
    late_request_share: float | None = None
    send_lateness_p99_ms: float | None = None
    overloaded: bool = False
    disturbed: bool = False
    server_crashed: bool = False
    node: str = ""
    reason: str = ""
    forecast: Forecast | None = None

    @property
    def has_values(self) -> bool:
        """Whether the measurement succeeded. ``reason`` says why it failed, and its values are unknown."""
        return self.throughput_infer_per_sec is not None

    @property
    def is_streamed(self) -> bool:
        """Whether the model streams its responses, so that the time to first response was measured."""
        return self.ttft_p50_ms is not None or self.output_tokens_per_sec is not None

    @property
    def errors(self) -> int | None:
        """The requests that failed for any reason; None if they were not counted."""
        counts = (self.rejected_requests, self.timed_out_requests, self.failed_requests)
        known = [count for count in counts if count is not None]
        return sum(known) if known else None


class Measured(Protocol):
    """An object with a measurement."""

    @property
    def measurement(self) -> Measurement:
        """The measurement that the object is ranked by."""


PointT = TypeVar("PointT", bound=Measured)


@dataclass(frozen=True, slots=True)
class Timing:
    """A time that every request has, and where a ``Measurement`` keeps its distribution over the requests.

    Attributes:
        name: Prefix of the metrics (``ttft-p95``) and of the fields with statistics (``ttft_p95_ms``).
        subject: Name of the time of one request in a sentence.
        over_field: Field with the exact numbers of requests above the bounds.
        sketch_field: Field with the sketch.
        needs_streaming: Whether only a model that streams its responses has this time.
    """

    name: str
    subject: str
    over_field: str
    sketch_field: str
    needs_streaming: bool = False

    def metric(self, statistic: str) -> str:
        """Return the name of the metric with ``statistic``, one of STATISTICS."""
        return f"{self.name}-{statistic}"

    def field_of(self, statistic: str) -> str:
        """Return the field of Measurement with ``statistic``, one of STATISTICS, in ms."""
        return f"{self.name}_{statistic}_ms"

    def requests_over(self, measurement: Measurement) -> str:
        """Return the exact numbers of requests above the bounds, as ``Measurement.requests_over_ms``."""
        return str(getattr(measurement, self.over_field))

    def sketch(self, measurement: Measurement) -> str:
        """Return the sketch of all requests' times; empty if there is none."""
        return str(getattr(measurement, self.sketch_field))


LATENCY = Timing("latency", "latency", "requests_over_ms", "latency_sketch")
TTFT = Timing("ttft", "time to first response", "requests_over_ttft_ms", "ttft_sketch", needs_streaming=True)
ITL = Timing("itl", "mean inter-token latency", "requests_over_itl_ms", "itl_sketch", needs_streaming=True)
TIMINGS = (LATENCY, TTFT, ITL)
# they fall if the server slows
RATES = ("throughput_infer_per_sec", "goodput_infer_per_sec", "responses_per_sec", "output_tokens_per_sec")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}  # statistic -> level
STATISTICS = ("avg", *QUANTILES)


@dataclass(frozen=True, slots=True)
class Metric:
    """A value to optimize or constrain.

    Attributes:
        name: The name on the command line.
        unit: The unit of the value.
        better: Which direction is better.
        value: Returns the value of a measurement; None if it is unknown.
        timing: The time of a request that the metric describes; None for other metrics.
        statistic: Which statistic of this time it is, such as ``p95``; empty for other metrics.
        needs_own_client: Whether perf_analyzer does not report it, so that only tune's own client measures it.
        counted_requests: Returns the requests of which the metric is the percentage; None for other metrics.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    value: Callable[[Measurement], float | None]
    timing: Timing | None = None
    statistic: str = ""
    needs_own_client: bool = False
    counted_requests: Callable[[Measurement], int | None] | None = None

    @property
    def quantile(self) -> float | None:
        """The level of the quantile; None for an average and for metrics that are not times of a request."""
        return parse_percentile(self.statistic)[1] if self.statistic not in ("", "avg") else None

    @property
    def is_of_requests(self) -> bool:
        """Whether it is a time of the requests or a share of them, so that a lower load can meet a bound on it."""
        return self.timing is not None or self.counted_requests is not None

    @property
    def has_ratio(self) -> bool:
        """Whether the ratio of two values has a meaning: an error rate may be 0, and a score has any scale."""
        return bool(self.unit) and self.counted_requests is None

    @property
    def nearest_reported(self) -> str:
        """The metric that perf_analyzer reports and that is nearest to this one, such as p99 for p99.9."""
        level = self.quantile
        if level is None or self.timing is None or not self.needs_own_client:
            return self.name
        return self.timing.metric(min(QUANTILES, key=lambda name: abs(QUANTILES[name] - level)))

    @property
    def short_name(self) -> str:
        """The name in options and bounds: ``p95`` for ``latency-p95``, otherwise the name."""
        return self.statistic if self.timing is LATENCY else self.name

    def bounded_value(self, measurement: Measurement) -> float | None:
        """Return the value that a bound applies to.

        A failed request is later than any bound. So a quantile is that of all requests: if a share of them failed, it
        is a higher quantile of the others.
        """
        failed, level = measurement.errors, self.quantile
        if not failed or level is None or self.timing is None:
            return self.value(measurement)
        served, sketch = measurement.requests or 0, self.timing.sketch(measurement)
        if self.timing is not LATENCY and sketch:  # a request with a single response has no inter-token latency
            served = _sketched_requests(sketch)
        if level * (served + failed) > served:
            return math.inf
        return _sketched_quantile_ms(sketch, level * (served + failed) / served)

    def cost(self, measurement: Measurement) -> float | None:
        """Return the value, negated if higher is better; None if it is unknown. Lower costs are better."""
        value = self.value(measurement)
        if value is None or math.isnan(value):
            return None
        return -value if self.better == "higher" else value

    def is_better(self, measurement: Measurement, other: Measurement) -> bool:
        """Return whether the value of ``measurement`` is known and better than that of ``other``."""
        cost, other_cost = self.cost(measurement), self.cost(other)
        return cost is not None and (other_cost is None or cost < other_cost)

    def worth(self, measurement: Measurement) -> float | None:
        """Return the value, or its inverse if lower is better, so that twice the worth is twice as good.

        None if ratios of the metric have no meaning, or if the value is unknown or not positive.
        """
        value = self.value(measurement)
        if not self.has_ratio or value is None or not value > 0:
            return None
        return value if self.better == "higher" else 1 / value


def _sketched_quantile_ms(sketch: str, level: float) -> float | None:
    """Return the quantile of a sketch; None without one."""
    if not sketch:
        return None
    from objectives import latency_sketch  # its packages take too long to import for the help of the command

    return latency_sketch.pooled_quantile_ms([sketch], level)


def _sketched_requests(sketch: str) -> int:
    """Return the number of requests in a sketch."""
    from objectives import latency_sketch

    return latency_sketch.count(sketch)


def _memory_bytes(m: Measurement) -> float | None:
    return m.gpu_memory_bytes if m.gpu_memory_bytes is not None else m.server_memory_bytes


def _joules_per_1000_inferences(m: Measurement) -> float | None:
    if m.gpu_power_watts is None or not m.throughput_infer_per_sec:
        return None
    return 1000 * m.gpu_power_watts / m.throughput_infer_per_sec


def four_digits(value: float) -> str:
    """Return ``value`` with four significant digits and without an exponent: ``11,890``, ``21.4``, ``0.002``."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = 3 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if decimals > 0 else text


def plain_number(value: float, decimals: int) -> str:
    """Return ``value`` rounded to ``decimals`` (at least 1), without exponent and trailing zeros: ``20``, ``0.5``."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")


class MetricTable(dict[str, Metric]):
    """The metrics by name.

    Any percentile of a time of the requests, such as ``latency-p99.9``, is found by its name but is not listed.
    """

    def __missing__(self, name: str) -> Metric:
        statistic, timing = _parse_percentile_metric(name)
        if statistic in QUANTILES:  # another spelling, such as p99.0
            return self[timing.metric(statistic)]
        return _percentile_metric(statistic, timing)


def _parse_percentile_metric(name: str) -> tuple[str, Timing]:
    """Return statistic and timing of a metric such as ``latency-p99.9``. Raises KeyError for any other text."""
    prefix, _, percentile = name.rpartition("-")
    timing = next((timing for timing in TIMINGS if timing.name == prefix), None)
    try:
        if timing is None:
            raise KeyError(name)
        return parse_percentile(percentile)[0], timing
    except ValueError:
        raise KeyError(name) from None


@lru_cache(maxsize=256)
def _percentile_metric(statistic: str, timing: Timing) -> Metric:
    """Return the metric of a percentile that has no field in Measurement, so it is read from the sketch."""
    level = parse_percentile(statistic)[1]

    def value(measurement: Measurement) -> float | None:
        return _sketched_quantile_ms(timing.sketch(measurement), level)

    return Metric(timing.metric(statistic), "ms", "lower", value, timing, statistic, needs_own_client=True)


def _error_percent(m: Measurement) -> float | None:
    errors = m.errors
    if errors is None or not (total := (m.requests or 0) + errors):
        return None
    return 100 * errors / total


METRICS = MetricTable(
    (metric.name, metric)
    for metric in (
        Metric("throughput", "infer/s", "higher", lambda m: m.throughput_infer_per_sec),
        # inferences of the requests within all latency bounds
        Metric("goodput", "infer/s", "higher", lambda m: m.goodput_infer_per_sec, needs_own_client=True),
        # tokens of a model that streams its responses
        Metric("output-throughput", "tokens/s", "higher", lambda m: m.output_tokens_per_sec),
        *(
            Metric(timing.metric(statistic), "ms", "lower", attrgetter(timing.field_of(statistic)), timing, statistic)
            for timing in TIMINGS
            for statistic in STATISTICS
        ),
        Metric(
            "error-rate", "%", "lower", _error_percent, needs_own_client=True, counted_requests=lambda m: m.errors
        ),
        # the memory of the GPUs if the model is served on GPUs, otherwise that of the server's processes
        Metric("memory", "bytes", "lower", _memory_bytes),
        # unknown if no GPU serves the model or the driver does not report it
        Metric("gpu-memory", "bytes", "lower", lambda m: m.gpu_memory_bytes),
        Metric("energy", "J/1000 infer", "lower", _joules_per_1000_inferences),
        Metric("score", "", "higher", lambda m: m.score),
    )
)
