"""How long each fresh server of a candidate is measured, and what that takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectives.model_stats import from_text
from objectives.sequential import LOOKS
from objectives.sla import DEFAULT_CONFIDENCE, Sla
from objectives.verdict import needed_requests
from optimizer.core.candidate import Candidate
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.measure.load_client.client_files import MAX_LEAD_IN_SECONDS

WINDOWS, FEWER_WINDOWS = 8, 3  # per server; fewer if time is short
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 0.5, 10.0  # length of a window
WINDOW_REQUESTS = 40  # requests in a window of a slow model
START_SECONDS = 1.5  # least estimate: start of a server and of the load generator, and its lead-in
STREAM_GENERATIONS = 2  # generations of requests of a model that streams: before the first window and after the last
CROSS_CHECK_WINDOWS = 2  # length of perf_analyzer's measurement on each server of a test, in windows
CROSS_CHECK_START_SECONDS = 0.5  # estimated: start and end of perf_analyzer
COMPARED_SERVERS = 2  # fresh servers at each load of a candidate that is measured for comparison only


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How each fresh server of a candidate is measured at one load.

    Attributes:
        trial: The number of the candidate's trial.
        candidate: The configuration.
        load: The load.
        window_seconds: The length of a window.
        error: The error probability of the test; 0 if the candidate is measured for comparison only.
        windows: The number of windows.
        is_cross_checked: Whether perf_analyzer measures once after the windows.
        start_seconds: The estimated time of the start.
        lead_in_seconds: The estimated time of requests before and after the windows, beyond the usual one.
    """

    trial: int
    candidate: Candidate
    load: LoadPoint
    window_seconds: float
    error: float = 0.0
    windows: int = WINDOWS
    is_cross_checked: bool = False
    start_seconds: float = START_SECONDS
    lead_in_seconds: float = 0.0

    @property
    def server_seconds(self) -> float:
        """The estimated duration on one server, including its start."""
        cross_check = CROSS_CHECK_START_SECONDS + self.cross_check_seconds if self.is_cross_checked else 0.0
        return self.start_seconds + self.lead_in_seconds + self.windows * self.window_seconds + cross_check

    @property
    def cross_check_seconds(self) -> float:
        """The duration of perf_analyzer's load, if it measures."""
        return CROSS_CHECK_WINDOWS * self.window_seconds

    def fitting(self, servers: int, seconds: float) -> ServerPlan:
        """Return the plan with WINDOWS on each server, or fewer if ``servers`` need more than ``seconds``.

        These are FEWER_WINDOWS. At a request rate they are all that the time allows, at least as many: the memory of
        the queue makes a short test worth less.
        """
        empty_seconds = replace(self, windows=0).server_seconds
        affordable = int(min((seconds / servers - empty_seconds) / self.window_seconds, WINDOWS))
        if affordable < WINDOWS and not self.load.request_rate:
            affordable = FEWER_WINDOWS
        return replace(self, windows=max(affordable, FEWER_WINDOWS))

    def reserved_seconds(self, missing: int) -> float:
        """Return the time that comparisons leave to the test of the recommendation.

        It is that of its ``missing`` servers, and of a lower load, because the first one may not pass.
        """
        return missing * self.server_seconds + LOOKS[0] * replace(self, windows=FEWER_WINDOWS).server_seconds


def estimate_start_seconds(trials: Sequence[Trial]) -> float:
    """Return the estimated time of the start of a fresh server, from the deployments of the search.

    A model that takes long to load takes as long on a fresh server.
    """
    known = [trial.deploy_seconds for trial in trials if trial.deploy_seconds is not None]
    return max(START_SECONDS, statistics.median(known)) if known else START_SECONDS


def plan_server(
    point: Point,
    load: LoadPoint,
    times: RequestTimes | None,
    error: float = 0.0,
    sla: Sla | None = None,
    start_seconds: float = START_SECONDS,
    *,
    is_cross_checked: bool = False,
) -> ServerPlan:
    """Return the plan for the candidate of ``point`` at ``load``, sent at ``times`` in an open loop.

    Slow models get longer windows; the slowest decides if several get load. So do tests of the bounds in ``sla`` that
    permit few requests to be slow: the windows are long enough for the default confidence, whatever that of the run
    is. Shorter ones need more servers (benchmarks/verdict_procedure.md). If the times of the requests repeat, a
    window has whole periods. So all windows have the same load, and their differences are those of the server.
    """
    by_model = [model.throughput_infer_per_sec or 0.0 for model in from_text(point.measurement.by_model).values()]
    served = min(by_model, default=point.throughput_infer_per_sec) / load.request_batch_size
    needed = (needed_requests(bound, 1 - DEFAULT_CONFIDENCE) for bound in sla or ())
    requests = max(WINDOW_REQUESTS, max(needed, default=0) / (WINDOWS * LOOKS[0]))
    seconds = requests / served if served > 0 else MAX_WINDOW_SECONDS
    lead_in_seconds = 0.0
    if point.measurement.responses_per_sec is not None:
        latency_s = (point.measurement.latency_avg_ms or 0.0) / 1e3
        lead_in_seconds += STREAM_GENERATIONS * min(latency_s, MAX_LEAD_IN_SECONDS)
    seconds = min(max(seconds, MIN_WINDOW_SECONDS), MAX_WINDOW_SECONDS)
    if times is not None:
        lead_in_seconds += times.lead_in_at(load.request_rate)
        seconds = times.whole_periods(seconds, load.request_rate)
    return ServerPlan(
        point.trial,
        point.candidate,
        load,
        seconds,
        error,
        is_cross_checked=is_cross_checked,
        start_seconds=start_seconds,
        lead_in_seconds=lead_in_seconds,
    )
