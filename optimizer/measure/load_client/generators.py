"""The load generators of the open loop, the closed loop and sequences, which start tune's own load client."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError, ServerCrashed
from optimizer.core.measurement_windows import (
    FEWEST_REQUESTS_PER_WINDOW,
    FIRST_WINDOW_MS,
    LONG_RATE_WINDOW_MS,
    MAX_WINDOW_MS,
    MIN_WINDOWS,
    RATE_WINDOW_MS,
    REQUESTS_PER_WINDOW,
    WINDOW_STRETCH,
)
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.arrivals import Arrivals, PoissonArrivals, RecordedArrivals, RecordedClasses
from optimizer.measure.load_client.base_generator import (
    IN_TURN,
    WARM_UP_SECONDS,
    LoadClientGenerator,
    RequestClasses,
    Schedule,
)
from optimizer.measure.load_client.client_files import MAX_LEAD_IN_SECONDS
from optimizer.measure.load_client.closed_loop import (
    CLOSED_LOOP_LEAD_IN_SECONDS,
    NoAnswersError,
    summarize_answers,
    summarize_closed_loop,
)
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS
from optimizer.measure.load_client.open_loop import summarize_open_loop

MAX_PLANNED = 2_000_000  # requests of one measurement
DRAWN_LENGTHS = 1024  # the lengths of later sequences repeat these


@dataclass(frozen=True, kw_only=True)
class OpenLoopGenerator(LoadClientGenerator):
    """Sends ``request_rate`` requests a second; latency counts from the planned send time, also if one is late.

    ``arrivals`` is the arrival process. Each measurement has its own arrivals, which depend on ``seed`` and its
    number. If their times repeat, each window has whole periods. ``lowest_share`` is the lowest rate of all models
    under load at the same time, as a share of the rate of this one.
    """

    arrivals: Arrivals = field(default_factory=PoissonArrivals)
    lowest_share: float = 1.0
    window_ms: int = RATE_WINDOW_MS

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Return a short measurement; None if it would show a part of a period, whose lead-in warms the server up.

        A load without a rate is a closed loop with its concurrency.
        """
        if load.request_rate and self.arrivals.times.period_at(load.request_rate) > WARM_UP_SECONDS:
            return None
        return super().warm_up(endpoint, load)

    def default_seconds(self, load: LoadPoint) -> float:
        """Return the duration of a measurement with REQUESTS_PER_WINDOW requests per window and model, or more.

        At a low rate there are fewer, because the search needs time for other configurations too.
        """
        lowest_rate = self.lowest_share * load.request_rate
        enough_ms, least_ms = (
            1000 * requests / lowest_rate for requests in (REQUESTS_PER_WINDOW, FEWEST_REQUESTS_PER_WINDOW)
        )
        window_ms = max(WINDOW_STRETCH * self.window_ms, min(enough_ms, LONG_RATE_WINDOW_MS), least_ms)
        seconds = min(window_ms, MAX_WINDOW_MS) / 1000
        return MIN_WINDOWS * self.arrivals.times.whole_periods(seconds, load.request_rate)

    def _measure(
        self, endpoint: Endpoint, load: LoadPoint, seconds: float, spread_limit: float, parts: int = 1
    ) -> list[Measurement]:
        """Measure whole periods of the arrivals, at most MAX_PLANNED requests in all."""
        if not load.request_rate:
            schedule = Schedule(seconds=seconds, concurrency=round(load.concurrency), parts=parts)
            return self._launch(endpoint, load, schedule, summarize_answers, spread_limit)
        period_seconds = self.arrivals.times.period_at(load.request_rate)
        window_seconds = self.arrivals.times.whole_periods(seconds / parts, load.request_rate)
        lead_in_seconds = max(LEAD_IN_SECONDS, self.arrivals.times.lead_in_at(load.request_rate))
        if self.is_streaming:
            lead_in_seconds = MAX_LEAD_IN_SECONDS
        parts = min(parts, int((MAX_PLANNED / load.request_rate - lead_in_seconds) // window_seconds))
        if parts < 1:
            raise MeasurementError(
                f"{load} for {window_seconds:.3g} s, and {lead_in_seconds:g} s before, "
                f"are more than {MAX_PLANNED:,} requests, the limit of a measurement; shorten the period or window"
            )
        seconds = parts * window_seconds
        seeds = np.random.SeedSequence([self.seed, next(self._launches)]).generate_state(2)
        lead_in_ns = list[int]()
        if self.is_streaming:  # the client decides how many of these it sends, so the others are planned on their own
            lead_in_ns = self._plan(load, lead_in_seconds, int(seeds[1]))
        else:
            seconds += lead_in_seconds

        planned_ns = self._plan(load, seconds, int(seeds[0]))
        classes = IN_TURN
        if isinstance(self.arrivals, RecordedArrivals):
            classes = self.arrivals.classes_of(len(planned_ns), int(seeds[0]))
        schedule = Schedule(
            seconds=seconds,
            lead_in_seconds=lead_in_seconds,
            planned_ns=lead_in_ns + planned_ns,
            lead_in_requests=len(lead_in_ns),
            parts=parts,
            period_seconds=period_seconds,
            classes=classes,
        )
        return self._launch(endpoint, load, schedule, summarize_open_loop, spread_limit)

    @property
    def _recorded_classes(self) -> RecordedClasses | None:
        return self.arrivals.classes if isinstance(self.arrivals, RecordedArrivals) else None

    @property
    def _mixes_sizes(self) -> bool:
        return super()._mixes_sizes or self._recorded_classes is not None

    def _request_classes(self, load: LoadPoint, count: int) -> RequestClasses:
        """Return requests of each recorded class, ordered by class, and more of the frequent classes."""
        recorded = self._recorded_classes
        if recorded is None:
            return super()._request_classes(load, count)
        counts = np.maximum(1, np.round(count * recorded.counts / recorded.counts.sum())).astype(np.int64)
        sizes, priorities = np.repeat(np.array(recorded.classes), counts, axis=0).T
        sizes = np.where(sizes == 0, round(load.request_batch_size), sizes)
        numbers = np.repeat(np.arange(len(counts)), counts)
        entry_order = np.random.default_rng(self.seed).permutation(len(numbers))  # a file may be sorted
        return RequestClasses(sizes, priorities, numbers, entry_order)

    def _plan(self, load: LoadPoint, seconds: float, seed: int) -> list[int]:
        """Return the planned times in nanoseconds."""
        times_ns: list[int] = (1e9 * self.arrivals.plan(load.request_rate, seconds, seed)).astype(np.int64).tolist()
        return times_ns


@dataclass(frozen=True, kw_only=True)
class ClosedLoopGenerator(LoadClientGenerator):
    """Keeps ``concurrency`` requests in flight; latency counts from the actual send.

    The load on a model that streams continues until MIN_STREAMED_REQUESTS requests have ended in each window, see
    ``streaming_client``. ``closed_loop.AnsweredRequests`` says which of its requests count.
    Unlike perf_analyzer it sends over gRPC only.
    """

    window_ms: int = FIRST_WINDOW_MS

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Do nothing, because the lead-in of each load warms the server up without another start of the client."""
        return None

    def default_seconds(self, load: LoadPoint) -> float:
        return MIN_WINDOWS * WINDOW_STRETCH * self.window_ms / 1000

    def _measure(
        self, endpoint: Endpoint, load: LoadPoint, seconds: float, spread_limit: float, parts: int = 1
    ) -> list[Measurement]:
        """Measure once, and repeat it with more time if no request was answered."""
        while True:
            schedule = Schedule(
                seconds=seconds,
                warm_up_seconds=0.0 if self.is_streaming else CLOSED_LOOP_LEAD_IN_SECONDS,
                concurrency=round(load.concurrency),
                parts=parts,
            )
            try:
                return self._launch(endpoint, load, schedule, summarize_closed_loop, spread_limit)
            except NoAnswersError as error:
                if self.is_streaming:  # it has waited as long as it may, and a server that sends no responses hangs
                    raise MeasurementError(
                        f"{error}; shorten the outputs (--output-tokens), or set a longer --measurement-interval, "
                        f"of which a measurement has {MIN_WINDOWS}"
                    ) from error
                longest_seconds = self._longest_seconds
                if seconds >= longest_seconds:  # it hangs, or has more work than it can ever finish
                    raise ServerCrashed(str(error), log=self.log) from error
                seconds = min(5 * seconds, longest_seconds)


@dataclass(frozen=True, kw_only=True)
class SequenceGenerator(ClosedLoopGenerator):
    """Keeps ``concurrency`` sequences in flight, each with one request at a time, for stateful models.

    The latency is that of a request, and the throughput counts requests. The sequences have ``sequence_length``
    requests; their inputs are consecutive entries of the data file.
    """

    sequence_length: SizeDistribution

    def _sequence_lengths(self) -> tuple[int, ...]:
        fixed = self.sequence_length.fixed
        if fixed is not None:
            return (fixed,)
        return tuple(self.sequence_length.draw(DRAWN_LENGTHS, np.random.default_rng(self.seed)).tolist())
