"""Measure how often the whole confirmation ends with a false PASS, and which throughput it gives up.

    python benchmarks/verdict_procedure.py [--runs 500] [--only TEXT] [--seconds 110] [--processes 2]

Simulates runs from the end of the search to the verdict, with the functions that decide in a real run. The search
has measured five configurations with noise (3 %, in the last row 20 %) and recommends one; the confirmation deploys
fresh servers of it and, as the time allows, of three others until the time is over. Servers differ in speed,
windows of one server differ in speed, and the machine may change its speed by a factor of 1.5 every 20 to 60 s. The
speed probe before and after each load sees these steps, with noise, but not the differences between windows. Other
programs may disturb a share of the time, in bursts of 1 to 8 s or of 10 to 40 s. A window is up to 1.5 times slower
then, and it is marked as disturbed if they took more than the usual share of the CPUs. Their share in each window
is known. The search has seen the disturbed share. Latencies are lognormal and come in bursts: as many requests
as are in flight have one latency. In the rows with a gap, no latency is near the bound: that of a request is 0.7 or
1.4 times the bound, as if it waited for one batch more. In the rows with failed requests, those over the bound fail.
In both, the predictions are too low by the margin, so that the first tested load is at the bound. In the rows with
400 infer/s, few requests have a latency of their own.
perf_analyzer's measurement on each tested server takes time, but never contradicts.

The bound is one on p95. Bounds on averages, on throughput, on the error rate and on other percentiles are not
simulated here; tests/unit/objectives has short simulations of them.

A PASS is false if the expected share of requests over the bound on a fresh server, under the machine states of the
windows of this configuration at this load that count, is above 5 %. The best safe throughput is the highest of all
configurations and loads whose share is at most 5 % under the states of the whole confirmation. The exit code is 1 if
a row has more than 1 % false PASSes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lib.disturbance import BURST_FACTOR, BURST_SECONDS
from lib.output import measured_on, print_head, print_title, row
from objectives.arrays import FloatArray
from objectives.confidence import MissCounts, SequentialTest, judge_share
from objectives.load_sequence import (
    ERROR_SHARES,
    MARGIN,
    OTHER_ERROR_SHARES,
    OTHER_MARGIN,
    CandidateState,
    LoadSequence,
    choose_candidate,
)
from objectives.sequential import LOOKS
from objectives.server_spread import pool_server_spread
from objectives.sla import DEFAULT_CONFIDENCE
from objectives.verdict import MAX_EXCLUDED_SHARE, MAX_SLOPE, SLOPE_LEVELS, SlaVerdict, counted_windows
from optimizer.confirmation.load_predictions import LOAD_STEP, MAX_LOAD_FACTOR, MAX_RIVAL_LOAD_FACTOR, MIN_LOAD_FACTOR
from optimizer.confirmation.server_plan import (
    COMPARED_SERVERS,
    MIN_WINDOW_SECONDS,
    START_SECONDS,
    WINDOWS,
    ServerPlan,
)
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint

ALLOWED = 0.05  # p95
CAPACITY, SLOW_CAPACITY = 4000.0, 400.0  # infer/s of the best configuration, in the median
CONFIRMATION_SECONDS = 110.0  # of the default budget of 180 s
AUTOCORRELATION = 0.6  # of the speed of neighboring windows
EPOCH_SECONDS, EPOCH_FACTOR = (20.0, 60.0), 1.5
LONG_BURST_SECONDS = (10.0, 40.0)  # of other programs
BURST_LIMIT = 0.3  # a window counts as disturbed if other programs fill more than this share of it
COMPARED = ServerPlan(0, Candidate(1), LoadPoint(1, 1), MIN_WINDOW_SECONDS)
TESTED = replace(COMPARED, is_cross_checked=True)
CROSS_CHECK_SECONDS = TESTED.server_seconds - COMPARED.server_seconds  # of perf_analyzer
PROBE_NOISE = 0.03  # of the speed probe
SEARCH_NOISE, PREDICTION_NOISE = 0.03, 0.05  # of a throughput in the search, of a predicted latency quantile
GAP = math.log(1.4)  # between the bound and the latencies in the rows with a gap
GAP_NOISE = 0.05  # of the log of latency on each side of the gap
SPEEDS = (1.0, 0.98, 0.95, 0.9, 0.8)  # of the configurations, relative to the best
COLUMNS = (
    *("machine", "PASS %", "false PASS %", "throughput given up, median %", "90th percentile %"),
    *("seconds", "servers"),
)


@dataclass(frozen=True)
class Scenario:
    """How much servers and windows differ (coefficients of variation), and whether the machine's speed steps.

    ``search_cv`` is the noise of the search's throughputs, and of its predicted latencies for each configuration.
    ``disturbed`` is the share of the time in which other programs run, in bursts of ``burst_seconds``.
    ``search_bias`` is the systematic error of the predicted log latencies. ``late`` says what happens to requests
    over the bound: with "gap" no latency is near it, with "failed" they fail. ``capacity`` is the largest
    throughput of the best configuration in infer/s, in the median of the runs.
    """

    server_cv: float
    window_cv: float
    epochs: bool = False
    search_cv: float = SEARCH_NOISE
    disturbed: float = 0.0
    burst_seconds: tuple[float, float] = BURST_SECONDS
    search_bias: float = 0.0
    late: str = ""
    capacity: float = CAPACITY

    def __str__(self) -> str:
        steps = ", steps" if self.epochs else ""
        search = f", search {self.search_cv:.0%}" if self.search_cv != SEARCH_NOISE else ""
        long = " by long bursts" if self.burst_seconds == LONG_BURST_SECONDS else ""
        others = f", disturbed {self.disturbed:.0%}{long}" if self.disturbed else ""
        late = {"gap": ", gap at the bound", "failed": ", late requests fail"}.get(self.late, "")
        slow = f", {self.capacity:g} infer/s" if self.capacity != CAPACITY else ""
        return f"servers {self.server_cv:.0%}, windows {self.window_cv:.0%}{steps}{search}{others}{late}{slow}"


@dataclass(frozen=True)
class Configuration:
    """A closed loop with throughput ``capacity * n / (n + half)`` at n requests in flight, and lognormal latency."""

    capacity: float
    half: float
    sigma: float

    def throughput(self, in_flight: float) -> float:
        return self.capacity * in_flight / (in_flight + self.half)

    def log_median(self, in_flight: float) -> float:
        return math.log((in_flight + self.half) / self.capacity)

    def log_p95(self, in_flight: float) -> float:
        return self.log_median(in_flight) - float(special.ndtri(ALLOWED)) * self.sigma

    def share(self, in_flight: float, log_bound: float, log_slowness: FloatArray, server_sigma: float) -> float:
        """Return the expected share over the bound on a fresh server under these machine states."""
        sigma = math.hypot(self.sigma, server_sigma)
        return float(special.ndtr((self.log_median(in_flight) + log_slowness - log_bound) / sigma).mean())


@dataclass
class Server:
    """The measurement of one server.

    Attributes:
        latencies: Logs of latencies, shape [windows, effective requests]; inf if a request failed.
        log_quantiles: Log of the bounded quantile of the served requests of each window; nan if it served none.
        log_slowness: The machine's states, shape [windows].
        is_disturbed: Whether other programs took much CPU time, shape [windows].
        log_probe: Log of the time of the speed probe.
        log_speed: Log of the throughput over that of an average server at the usual speed.
        other_shares: CPU share of other programs, shape [windows].
    """

    latencies: FloatArray
    log_quantiles: FloatArray
    log_slowness: FloatArray
    is_disturbed: NDArray[np.bool_]
    log_probe: float
    log_speed: float
    other_shares: FloatArray

    def only(self, windows: list[int]) -> Server:
        """Return the server with these windows."""
        return replace(
            self,
            latencies=self.latencies[windows],
            log_quantiles=self.log_quantiles[windows],
            log_slowness=self.log_slowness[windows],
            is_disturbed=self.is_disturbed[windows],
            other_shares=self.other_shares[windows],
        )


@dataclass
class Machine:
    """A machine whose speed varies; ``seconds`` is its clock."""

    scenario: Scenario
    random: np.random.Generator
    log_bound: float
    seconds: float = 0.0
    steps: FloatArray = field(init=False)
    bursts: FloatArray = field(init=False)  # [bursts, 2]: when each begins and ends

    def __post_init__(self) -> None:
        lengths = self.random.uniform(*self.scenario.burst_seconds, 400 if self.scenario.disturbed else 0)
        pauses = lengths * (1 / max(self.scenario.disturbed, 1e-9) - 1)
        self.random.shuffle(pauses)
        ends = np.cumsum(lengths + pauses)
        ends -= 0.5 * ends[:1].sum()  # the confirmation begins in the middle of a cycle of pause and burst
        self.bursts = np.stack([ends - lengths, ends], axis=1)
        self.steps = np.cumsum(self.random.uniform(*EPOCH_SECONDS, 40)) - self.random.uniform(0, EPOCH_SECONDS[1])
        self.server_sigma = math.sqrt(math.log1p(self.scenario.server_cv**2))
        self.window_sigma = math.sqrt(math.log1p(self.scenario.window_cv**2))

    def epoch(self, seconds: FloatArray) -> FloatArray:
        """Return the log of the slowness of the machine's state at these times."""
        slow = np.searchsorted(self.steps, seconds) % 2
        return np.asarray(math.log(EPOCH_FACTOR) * self.scenario.epochs * slow, dtype=np.float64)

    def disturbance(self, seconds: FloatArray) -> FloatArray:
        """Return the share of each window that begins at ``seconds`` in which other programs run."""
        begins, ends = self.bursts.T
        overlap = np.minimum(seconds[:, None] + MIN_WINDOW_SECONDS, ends) - np.maximum(seconds[:, None], begins)
        return np.asarray(np.maximum(overlap, 0.0).sum(axis=1) / MIN_WINDOW_SECONDS, dtype=np.float64)

    def measure(self, configuration: Configuration, in_flight: int, windows: int = WINDOWS) -> Server:
        """Return the measurement of a fresh server."""
        self.seconds += START_SECONDS
        at = np.arange(windows, dtype=np.float64) * MIN_WINDOW_SECONDS + self.seconds
        self.seconds += windows * MIN_WINDOW_SECONDS
        shocks = self.random.normal(0, self.window_sigma, windows)
        states = np.empty(windows)
        states[0] = shocks[0]
        for window in range(1, windows):
            states[window] = AUTOCORRELATION * states[window - 1]
            states[window] += math.sqrt(1 - AUTOCORRELATION**2) * shocks[window]
        states += self.epoch(at)
        filled = self.disturbance(at)
        states += math.log(BURST_FACTOR) * filled
        server = self.random.normal(0, self.server_sigma)
        requests = configuration.throughput(in_flight) * MIN_WINDOW_SECONDS
        effective = max(5, round(requests / in_flight))
        latencies = self.random.normal(0, configuration.sigma, (windows, effective))
        latencies += configuration.log_median(in_flight) + server + states[:, None]
        if self.scenario.late == "gap":
            side = np.where(latencies > self.log_bound, GAP, -GAP) + self.random.normal(0, GAP_NOISE, latencies.shape)
            latencies = self.log_bound + side + server + states[:, None]
        elif self.scenario.late == "failed":
            latencies[latencies > self.log_bound] = math.inf
        around = self.epoch(np.array([at[0] - MIN_WINDOW_SECONDS, self.seconds]))
        probe = float(around.mean()) + self.random.normal(0, PROBE_NOISE)
        speed = -server - float(states.mean())
        return Server(latencies, _log_quantiles(latencies), states, filled > BURST_LIMIT, probe, speed, filled)


def _log_quantiles(latencies: FloatArray) -> FloatArray:
    """Return the quantile of the served requests of each window; nan if it served none."""
    if np.isfinite(latencies).all():
        return np.asarray(np.quantile(latencies, 1 - ALLOWED, axis=1), dtype=np.float64)
    served = [window[window < math.inf] for window in latencies]
    return np.array([np.quantile(window, 1 - ALLOWED) if len(window) else math.nan for window in served])


@dataclass(frozen=True)
class Ended:
    """How a run ended; ``given_up`` is the share of the best safe throughput, nan without a PASS."""

    passed: bool
    is_false: bool
    given_up: float
    seconds: float
    servers: int


def counts(servers: list[Server], in_flight: int, log_bound: float) -> MissCounts:
    """Return the counts of the servers. Each latency stands for ``in_flight`` requests."""
    latencies = np.concatenate([server.latencies for server in servers])
    quantile = np.quantile(latencies, 1 - ALLOWED, method="inverted_cdf")
    shares = ALLOWED * SLOPE_LEVELS, ALLOWED / SLOPE_LEVELS
    low, high = np.quantile(latencies[latencies < math.inf], [1 - share for share in shares])
    slope = min(float(np.subtract(*special.ndtri(shares))) / max(high - low, 1e-6), MAX_SLOPE)
    requests = [np.full(len(server.latencies), float(in_flight * server.latencies.shape[1])) for server in servers]
    misses, tail = (
        [in_flight * (server.latencies > bound).sum(-1, dtype=np.float64) for server in servers]
        for bound in (log_bound, quantile)
    )
    other_shares = [server.other_shares for server in servers]
    return MissCounts(requests, misses, tail, slope, float(log_bound - quantile), other_shares)


def counted(servers: list[Server]) -> list[Server]:
    """Return the servers with the windows that count, as ``counted_windows`` of a real run chooses them."""
    windows = [[(server, window) for window in range(len(server.latencies))] for server in servers]
    kept = counted_windows(windows, lambda own: bool(own[0].is_disturbed[own[1]]))
    return [own[0][0].only([window for _, window in own]) for own in kept]


def undisturbed(servers: list[Server]) -> list[Server]:
    """Return the servers with their undisturbed windows, without servers that have none."""
    kept = [server.only(np.flatnonzero(~server.is_disturbed).tolist()) for server in servers]
    return [server for server in kept if len(server.latencies)]


@dataclass
class SimulatedConfirmation:
    """The confirmation of one run: the recommendation is tested, and a rival of it; all others are compared."""

    machine: Machine
    in_flight: list[int]  # of each load
    log_bound: float
    budget_seconds: float
    groups: list[list[Server]] = field(default_factory=list)  # the servers of each configuration and load
    competing: list[SimulatedTests] = field(default_factory=list)  # the recommendation and its rival

    def group(self) -> list[Server]:
        """Return a new group of servers, which counts for the variance between servers."""
        self.groups.append([])
        return self.groups[-1]

    def run(self, tests: SimulatedTests, others: list[SimulatedTests]) -> None:
        """Measure two interleaved servers of each configuration, then test the recommendation and a rival.

        If time is short, the last of ``others`` are left out. The rival is the one of ``others`` that is expected to
        serve the most, and the first of them if none was measured. ``choose_candidate`` says which of the two is
        tested next.
        """
        first = tests.sequence.current
        assert first is not None
        left = self.seconds_left() - TESTED.fitting(LOOKS[0], self.seconds_left()).reserved_seconds(LOOKS[0])
        affordable = max(0, int(left / (COMPARED_SERVERS * COMPARED.server_seconds)))
        compared = others[:affordable]
        groups = [self.group() for _ in compared]
        for _ in range(COMPARED_SERVERS if compared else 0):
            tests.deploy()
            for own, other in zip(groups, compared, strict=True):
                own.append(self.machine.measure(other.configuration, self.in_flight[first]))
        expected = [other.correct(first, own) for other, own in zip(compared, groups, strict=True)]
        self.competing = [tests, compared[int(np.argmax(expected))] if expected else others[0]]
        while (chosen := self.chosen()) is not None:
            chosen.deploy()

    def seconds_left(self) -> float:
        """Return the time until the confirmation has to end."""
        return self.budget_seconds - self.machine.seconds

    def chosen(self) -> SimulatedTests | None:
        """Return the tests that are next; None if none can improve the result."""
        place = choose_candidate([tests.state() for tests in self.competing])
        return None if place is None else self.competing[place]


@dataclass
class SimulatedTests:
    """The tests of one configuration, see ``LoadResults``. ``speed`` is the measured one over the average one."""

    confirmation: SimulatedConfirmation
    configuration: Configuration
    predicted: list[float]
    shares: tuple[float, ...]
    margin: float
    measured: dict[int, list[Server]] = field(default_factory=dict)
    speed: float = 1.0
    sequence: LoadSequence = field(init=False)

    def __post_init__(self) -> None:
        throughput = [self.configuration.throughput(n) for n in self.confirmation.in_flight]
        self.sequence = LoadSequence(self.predicted, throughput, 1 - DEFAULT_CONFIDENCE, self.shares, self.margin)

    def correct(self, load: int, servers: list[Server]) -> float:
        """Shift the predictions by the measured difference at ``load``. Return the expected throughput."""
        latencies = np.concatenate([server.latencies for server in counted(servers)])
        quantile = np.quantile(latencies[latencies < math.inf], 1 - ALLOWED)
        shift = float(quantile) - self.confirmation.log_bound - self.predicted[load]
        farthest = MAX_RIVAL_LOAD_FACTOR * self.confirmation.in_flight[load]
        shifted = [predicted + shift for predicted in self.predicted]
        highest = sum(n <= farthest for n in self.confirmation.in_flight) - 1
        before = self.sequence
        self.sequence = LoadSequence(shifted, before.throughput, before.error, self.shares, self.margin, highest)
        self.speed = _speed(servers)
        first = self.sequence.current
        assert first is not None
        return self.throughput(first)

    def throughput(self, load: int) -> float:
        """Return the throughput at ``load``, as measured there or at the load that passed, else at the last one."""
        reference = next((own for own in (load, self.sequence.passed) if own in self.measured), None)
        if reference is None and self.measured:
            reference = list(self.measured)[-1]
        speed = self.speed if reference is None else _speed(self.measured[reference])
        return float(self.sequence.throughput[load]) * speed

    def served(self) -> float:
        """Return the measured throughput of the load that passed; 0 if none did."""
        return 0.0 if self.sequence.passed is None else self.throughput(self.sequence.passed)

    def state(self) -> CandidateState:
        """Return how far the tests are."""
        load = self.sequence.next_load(self)
        if load is None:
            return CandidateState(self.served(), None)
        return CandidateState(self.served(), self.throughput(load), is_begun=load in self.measured)

    def deploy(self) -> None:
        """Measure one more fresh server at the current load."""
        load = self.sequence.current
        assert load is not None
        if load not in self.measured:
            self.measured[load] = self.confirmation.group()
        machine, servers = self.confirmation.machine, self.servers(load)
        missing = next((look - servers for look in LOOKS if look > servers), 1)
        windows = TESTED.fitting(missing, self.confirmation.seconds_left()).windows
        self.measured[load].append(machine.measure(self.configuration, self.confirmation.in_flight[load], windows))
        machine.seconds += CROSS_CHECK_SECONDS

    def servers(self, load: int) -> int:
        return len(self.measured.get(load, ()))

    def possible_servers(self) -> int:
        seconds_left = self.confirmation.seconds_left()
        return int(seconds_left / TESTED.fitting(LOOKS[0], seconds_left).server_seconds)

    def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
        log_bound = self.confirmation.log_bound
        own = counted(self.measured[load])
        has_disturbed = any(server.is_disturbed.any() for server in own)
        groups = [(counted if has_disturbed else undisturbed)(group) for group in self.confirmation.groups]
        spread = pool_server_spread(
            [[server.log_quantiles[~np.isnan(server.log_quantiles)] for server in group] for group in groups],
            [[server.log_probe for server in group] for group in groups],
            [[float(server.other_shares.mean()) for server in group] for group in groups],
        )
        misses = counts(own, self.confirmation.in_flight[load], log_bound)
        judged = judge_share(misses, ALLOWED, spread, SequentialTest(error, max_servers))
        return SlaVerdict(judged.verdict, judged.reason, is_promising=judged.is_promising, excess=judged.excess)


def _speed(servers: list[Server]) -> float:
    """Return the mean measured throughput of ``servers`` over that of an average server at the usual speed."""
    return math.exp(float(np.mean([server.log_speed for server in servers])))


def simulate(scenario: Scenario, budget_seconds: float, seed: int) -> Ended:
    """Return how one run ended."""
    random = np.random.default_rng(seed)
    half, sigma = random.uniform(3, 12), random.uniform(0.2, 0.4)
    capacity = scenario.capacity * math.exp(random.normal(0, 0.1))
    configurations = [Configuration(capacity * speed, half, sigma) for speed in SPEEDS]
    measured = [c.capacity * math.exp(random.normal(0, scenario.search_cv)) for c in configurations]
    order = np.argsort(measured)[::-1]
    recommended, others = configurations[order[0]], [configurations[place] for place in order[1:4]]
    at_bound = int(random.integers(8, 60))  # in flight, where the best configuration just meets the bound
    log_bound = configurations[0].log_p95(at_bound) + math.log(EPOCH_FACTOR) / 2 * scenario.epochs
    steps = range(
        math.ceil(math.log(MIN_LOAD_FACTOR, LOAD_STEP)), math.floor(math.log(MAX_LOAD_FACTOR, LOAD_STEP)) + 1
    )
    in_flight = sorted({max(1, round(at_bound * LOAD_STEP**step)) for step in steps})
    machine = Machine(scenario, random, log_bound)
    bias = scenario.search_bias + random.normal(0, PREDICTION_NOISE)
    bias += math.log(EPOCH_FACTOR) / 2 * scenario.epochs
    confirmation = SimulatedConfirmation(machine, in_flight, log_bound, budget_seconds)
    is_single = budget_seconds < TESTED.reserved_seconds(LOOKS[0]) and scenario.disturbed <= MAX_EXCLUDED_SHARE
    first_margin = OTHER_MARGIN if is_single else MARGIN
    rules = [
        (recommended, ERROR_SHARES, first_margin),
        *((other, OTHER_ERROR_SHARES, OTHER_MARGIN) for other in others),
    ]
    tests = []
    for own, shares, margin in rules:
        if scenario.search_cv != SEARCH_NOISE:
            bias = random.normal(0, scenario.search_cv)
        predicted = [own.log_p95(n) - log_bound + bias for n in in_flight]
        tests.append(SimulatedTests(confirmation, own, predicted, shares, margin))
    confirmation.run(tests[0], tests[1:])
    best = max(tests, key=SimulatedTests.served)
    passed = best.sequence.passed
    states = np.concatenate([server.log_slowness for group in confirmation.groups for server in group])
    safe = [
        configuration.throughput(n)
        for configuration in configurations
        for n in range(1, 2 * at_bound + 1)
        if configuration.share(n, log_bound, states, machine.server_sigma) <= ALLOWED
    ]
    if passed is None:
        return Ended(False, False, math.nan, machine.seconds, 0)
    own = counted(best.measured[passed])
    share = best.configuration.share(
        in_flight[passed], log_bound, np.concatenate([server.log_slowness for server in own]), machine.server_sigma
    )
    given_up = 1 - best.configuration.throughput(in_flight[passed]) / max(safe, default=math.nan)
    return Ended(True, share > ALLOWED, given_up, machine.seconds, len(own))


def scenarios() -> Iterator[Scenario]:
    for server_cv in (0.0, 0.03, 0.05, 0.1):
        for window_cv in (0.0, 0.05, 0.12):
            yield Scenario(server_cv, window_cv)
    for server_cv, window_cv in ((0.0, 0.05), (0.05, 0.05), (0.1, 0.12)):
        yield Scenario(server_cv, window_cv, epochs=True)
    yield Scenario(0.05, 0.05, search_cv=0.2)
    for late in ("gap", "failed"):
        for server_cv in (0.0, 0.05):
            yield Scenario(server_cv, 0.0, search_bias=-MARGIN, late=late)
    yield Scenario(0.05, 0.05, capacity=SLOW_CAPACITY)
    yield Scenario(0.0, 0.0, search_bias=-MARGIN, late="gap", capacity=SLOW_CAPACITY)
    yield Scenario(0.05, 0.05, disturbed=0.25, burst_seconds=LONG_BURST_SECONDS, capacity=SLOW_CAPACITY)
    for seconds in (BURST_SECONDS, LONG_BURST_SECONDS):
        for disturbed in (0.1, 0.25, 0.5):
            yield Scenario(0.05, 0.05, disturbed=disturbed, burst_seconds=seconds)
    yield Scenario(0.1, 0.12, disturbed=0.5)


def main() -> int:
    """Print the table, and return the exit code: 1 if a row has too many false PASSes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, metavar="N", help="runs of each row (500)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    parser.add_argument(
        "--seconds",
        type=float,
        default=CONFIRMATION_SECONDS,
        metavar="S",
        help=f"time of the confirmation ({CONFIRMATION_SECONDS:g})",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    print_title("How often the whole confirmation is wrong: latest measurement")
    print_head(*COLUMNS)
    is_wrong = False
    with ProcessPoolExecutor(arguments.processes) as pool:
        for scenario in scenarios():
            if arguments.only in str(scenario):
                run = partial(simulate, scenario, arguments.seconds)
                ended = list(pool.map(run, range(arguments.runs), chunksize=50))
                print(row(str(scenario).replace("%", ""), *_cells(ended)), flush=True)
                is_wrong |= _false_share(ended) > 1 - DEFAULT_CONFIDENCE
    print(f"\n{measured_on(f'{arguments.runs:,} runs a row')}")
    return int(is_wrong)


def _cells(ended: Sequence[Ended]) -> list[str]:
    passed = [run for run in ended if run.passed]
    given_up = [100 * run.given_up for run in passed] or [math.nan]
    return [
        f"{100 * len(passed) / len(ended):.1f}",
        f"{100 * _false_share(ended):.2f}",
        f"{np.nanmedian(given_up):.1f}",
        f"{np.nanquantile(given_up, 0.9):.1f}",
        f"{np.median([run.seconds for run in ended]):.0f}",
        f"{np.median([run.servers for run in passed] or [0]):.0f}",
    ]


def _false_share(ended: Sequence[Ended]) -> float:
    return sum(run.is_false for run in ended) / len(ended)


if __name__ == "__main__":
    sys.exit(main())
