"""How often the verdicts on "p95 <= bound" are wrong, and how many requests they take.

    python benchmarks/verdict_errors.py [--runs 10000] [--only TEXT] > benchmarks/verdict_errors.md

Simulated runs of known miss rate: independent latencies; latencies with a memory (a Gaussian AR(1) process, of which
only the ranks matter here) and those of a queue (M/M/1, 70 % load); latencies that drift. A run is planned by
``requests_needed`` and judged at its end, as the tuner does. Prints a Markdown table.

A PASS is false where the mean of the true miss rates over the *whole run* is above 5 %; else a FAIL is. Effective
requests are requests over the true autocorrelation time (of the requests over the latencies' own p95, in the column);
runs that stay undecided count as infinitely many.
Ends with 1 where more than 1 % of the PASSes or FAILs of a scenario are false, or the median exceeds 2,000.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray
from scipy import special

from objectives.confidence import OF_ERROR, Verdict, miss_rate_bounds, requests_needed
from objectives.correlation import Floats, drift_probability, effective_requests
from objectives.metrics import Measurement
from objectives.sla import CONFIDENCE, Constraint
from objectives.verdict import judge_one
from optimizer.confirm.plan import EXPECTED_SHARE, SERVERS, WINDOWS
from optimizer.machine import hardware

Counts: TypeAlias = NDArray[np.int32]  # runs x windows x RATES: requests over the threshold of each rate

QUANTILE = 0.95
ALLOWED = 1 - QUANTILE
RATES = np.array([.2, .15, .12, .1, .09, .08, .07, .0625, .055, .05, .045, .04, .035, .03, .02, .01])  # fmt: skip
SHOWN = (0.01, 0.03, 0.045, 0.05, 0.055, 0.08, 0.12)
CLOSE_RATES = (0.03, 0.045, 0.05, 0.055)
LOAD = 0.7  # of the simulated queue
MOST_EFFECTIVE = 2000
RUN_WINDOWS = SERVERS * WINDOWS
FAR_BELOW, FAR_ABOVE = 0.03, 0.08  # miss rates that must be decided within MOST_EFFECTIVE
PILOT_RUNS = 1000
PASS, FAIL, DRIFT, CLOSE = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Scenario:
    """``simulate(runs, windows, requests per window, seed)`` gives counts; ``rates`` are the true ones, as RATES."""

    name: str
    simulate: Callable[[int, int, int, int], Counts]
    shown: tuple[float, ...] = SHOWN
    time_requests: float | None = None  # assumed by the plan; None: as the pilot measures it
    expected_miss_rate: float | None = None
    must_decide: bool = True
    pilot: Callable[[int, int, int, int], Counts] | None = None  # without the drift


def scenarios() -> Iterator[Scenario]:
    still = np.zeros(1)
    yield Scenario("independent", gaussian(0.0, still), time_requests=1)
    yield Scenario("independent, planned for 1 %", gaussian(0.0, still), (0.01, 0.05, 0.055), 1, 0.01)
    for rho in (0.8, 0.97):
        yield Scenario(f"memory, AR(1) {rho:g}", gaussian(rho, still))
    yield Scenario("queue, M/M/1 at 70 %", queue)
    yield Scenario("queue, planned for 1 %", queue, (0.01, 0.05, 0.055), expected_miss_rate=0.01, must_decide=False)
    near = (0.045, 0.05, 0.055)
    for share in (10, 50):  # of the true autocorrelation time
        yield Scenario(f"queue, time taken {share} times too short", queue, near, -float(share), must_decide=False)
    at = (np.arange(RUN_WINDOWS) + 0.5) / RUN_WINDOWS
    shifts = {
        "slow rise": 0.5 * at,
        "fast rise": 1.5 * at,
        "small step at 1/2": 0.4 * (at > 0.5),
        "step at 1/2": 1.2 * (at > 0.5),
        "step at 3/4": 1.5 * (at > 0.75),
        "late rise": 2 * np.maximum(at - 0.6, 0),
        "step down at 1/4": 1.2 * (at < 0.25),
    }
    for rho, kind in ((0.0, "independent"), (0.8, "AR(1) 0.8")):
        for name, shift in shifts.items():
            if rho and name in ("fast rise", "step at 1/2", "step down at 1/4"):
                continue  # as without memory, and slow to simulate
            drifting = gaussian(rho, shift)
            yield Scenario(
                f"drift, {kind}, {name}", drifting, (0.045, 0.055, 0.08),
                must_decide=False, pilot=gaussian(rho, still),
            )  # fmt: skip


def gaussian(rho: float, shift: Floats) -> Callable[[int, int, int, int], Counts]:
    """Latencies that grow by ``shift`` (of one standard deviation) from window to window, with memory ``rho``."""
    grid = np.linspace(-2, 8, 20_001)
    over = special.ndtr(-(grid[:, None] - shift[None, :])).mean(1)
    edges = np.interp(-RATES, -over, grid)  # thresholds whose mean miss rates over the run are RATES

    def simulate(runs: int, windows: int, requests: int, seed: int) -> Counts:
        shifts = np.resize(shift, windows)
        return np.asarray(_gaussian(runs, windows, requests, rho, shifts, edges, seed))

    return simulate


def queue(runs: int, windows: int, requests: int, seed: int) -> Counts:
    """Sojourn times of an M/M/1 queue: exponential with the rate 1 - load, in service times."""
    return np.asarray(_queue(runs, windows, requests, LOAD, -np.log(RATES) / (1 - LOAD), seed))


@numba.njit
def _gaussian(
    runs: int, windows: int, requests: int, rho: float, shifts: Any, edges: Any, seed: int
) -> Any:  # pragma: no cover
    np.random.seed(seed)
    counts = np.zeros((runs, windows, len(edges)), dtype=np.int32)
    fresh = math.sqrt(1 - rho * rho)
    for run in range(runs):
        state = np.random.normal()
        for window in range(windows):
            for _ in range(requests):
                state = rho * state + fresh * np.random.normal()
                value = state + shifts[window]
                edge = 0
                while edge < len(edges) and value > edges[edge]:
                    counts[run, window, edge] += 1
                    edge += 1
    return counts


@numba.njit
def _queue(runs: int, windows: int, requests: int, load: float, edges: Any, seed: int) -> Any:  # pragma: no cover
    np.random.seed(seed)
    counts = np.zeros((runs, windows, len(edges)), dtype=np.int32)
    for run in range(runs):
        latency = np.random.exponential() / (1 - load)  # stationary from the start
        for window in range(windows):
            for _ in range(requests):
                latency = max(0.0, latency - np.random.exponential() / load) + np.random.exponential()
                edge = 0
                while edge < len(edges) and latency > edges[edge]:
                    counts[run, window, edge] += 1
                    edge += 1
    return counts


def times_of(simulate: Callable[[int, int, int, int], Counts], requests: int = 10_000) -> Floats:
    """The autocorrelation time of the misses at each of RATES, in requests: variance of counts over the binomial."""
    counts = simulate(PILOT_RUNS, 1, requests, 7)[:, 0]
    variance = np.mean((counts - RATES * requests) ** 2, axis=0)
    return np.asarray(np.maximum(1.0, variance / (requests * RATES * (1 - RATES))))


def judged(counts: Counts, rate: int, requests: int) -> NDArray[np.int8]:
    """What ``confidence.judge`` says of each run, whose own p95 is taken to be the nearest threshold."""
    runs, windows, _ = counts.shape
    own = np.abs(counts.sum(1) - ALLOWED * windows * requests).argmin(-1)
    tail = np.take_along_axis(counts, own[:, None, None], axis=2)[..., 0].astype(float)
    misses, size = counts[..., rate].astype(float), np.full(windows, float(requests))
    effective = effective_requests(size, misses, tail)
    low, high = miss_rate_bounds(
        misses.sum(-1) / size.sum(), effective, windows, OF_ERROR * (1 - CONFIDENCE), ALLOWED
    )
    said = np.full(runs, CLOSE, dtype=np.int8)
    said[high <= ALLOWED] = PASS
    said[low > ALLOWED] = FAIL
    said[drift_probability(size, misses) < 1 - CONFIDENCE] = DRIFT
    return said


def nearest(rate: float) -> int:
    return int(np.argmin(np.abs(RATES - rate)))


# -- as tune confirms: from the quantiles that perf_analyzer prints for each of a few windows --------------------


@numba.njit
def _latencies(runs: int, requests: int, load: float, seed: int) -> Any:  # pragma: no cover
    """Sojourn times of an M/M/1 queue; of independent requests where ``load`` is 0."""
    np.random.seed(seed)
    found = np.empty((runs, requests))
    for run in range(runs):
        latency = np.random.exponential() / (1 - load)
        for request in range(requests):
            waited = max(0.0, latency - np.random.exponential() / load) if load > 0 else 0.0
            latency = waited + np.random.exponential()
            found[run, request] = latency
    return found


def print_from_columns(runs: int, only: str) -> list[str]:
    """The verdicts of the whole product path on simulated measurements; the scenarios that miss the target."""
    print("\nFrom p50, p90, p95 and p99 of each of 24 windows, as `tune` confirms:\n")
    print("| latencies | true miss rate | PASS % | FAIL % | undecided % | false % | effective requests |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")  # fmt: skip
    wrong = []
    for name, load in (("independent", 0.0), ("queue, M/M/1 at 70 %", LOAD)):
        if only not in name:
            continue
        time_requests = 1.0 if load == 0 else float(times_of(queue)[nearest(ALLOWED)])
        expected = EXPECTED_SHARE * ALLOWED
        size = math.ceil(requests_needed(QUANTILE, RUN_WINDOWS, expected, CONFIDENCE, time_requests) / RUN_WINDOWS)
        for rate in (0.01, 0.02, 0.03, 0.045, 0.055, 0.08):
            bound = Constraint("latency-p95", -math.log(rate) / (1 - load))
            said: list[Verdict] = []
            for seed in range(math.ceil(runs / 50)):
                latencies = _latencies(50, RUN_WINDOWS * size, load, seed + 1).reshape(50, RUN_WINDOWS, size)
                said += [judge_one(measured(run), bound).verdict for run in latencies]
            share = {verdict: 100 * said.count(verdict) / len(said) for verdict in Verdict}
            false = share[Verdict.PASS if rate > ALLOWED else Verdict.FAIL]
            if false > 100 * (1 - CONFIDENCE):
                wrong.append(f"{name} from columns at {rate:.2%}")
            print(f"| {name} | {rate:.2%} | {share[Verdict.PASS]:.2f} | {share[Verdict.FAIL]:.2f} | "
                  f"{share[Verdict.UNDECIDED]:.2f} | {false:.2f} | {RUN_WINDOWS * size / time_requests:,.0f} |",
                  flush=True)  # fmt: skip
    return wrong


def measured(run: Floats) -> list[Measurement]:
    """What perf_analyzer would say of a run, a row for each window."""
    columns = np.quantile(run, (0.5, 0.9, 0.95, 0.99), axis=1)
    return [
        Measurement(1.0, None, p50, p90, p95, p99, requests=run.shape[1], stable=True)
        for p50, p90, p95, p99 in columns.T
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains TEXT")
    options = parser.parse_args()
    print("| latencies | autocorr. time | true miss rate | PASS % | FAIL % | undecided % (drift) | false % "
          "| median effective requests |\n| --- | --- | --- | --- | --- | --- | --- | --- |")  # fmt: skip
    wrong, began = [], time.process_time()
    for number, scenario in enumerate(scenarios()):
        if options.only not in scenario.name:
            continue
        base = scenario.pilot or scenario.simulate
        true_time = float(times_of(base)[nearest(ALLOWED)])
        assumed = scenario.time_requests or true_time
        assumed = max(1.0, -true_time / assumed) if assumed < 0 else assumed
        needed = requests_needed(QUANTILE, RUN_WINDOWS, scenario.expected_miss_rate, CONFIDENCE, assumed)
        size = math.ceil(needed / RUN_WINDOWS)
        counts = scenario.simulate(options.runs, RUN_WINDOWS, size, 1000 + number)
        for shown in scenario.shown:
            verdicts = judged(counts, nearest(shown), size)
            spent = np.where(verdicts > FAIL, np.inf, RUN_WINDOWS * size / true_time)
            share = [100 * float(np.mean(verdicts == v)) for v in (PASS, FAIL, DRIFT, CLOSE)]
            false = share[0] if shown > ALLOWED + 1e-9 else share[1]
            median = float(np.median(spent))
            far = scenario.must_decide and not FAR_BELOW < shown < FAR_ABOVE
            if false > 100 * (1 - CONFIDENCE) or (far and median > MOST_EFFECTIVE):
                wrong.append(f"{scenario.name} at {shown:.2%}")
            print(f"| {scenario.name} | {true_time:.1f} | {shown:.2%} | {share[0]:.2f} | {share[1]:.2f} | "
                  f"{share[2] + share[3]:.2f} ({share[2]:.2f}) | {false:.2f} | "
                  f"{f'{median:,.0f}' if median < math.inf else '–'} |", flush=True)  # fmt: skip
    wrong += print_from_columns(options.runs, options.only)
    print(f"\n{options.runs:,} runs a row, {time.process_time() - began:.0f} s of CPU time. "
          f"Beyond the targets: {', '.join(wrong) or 'none'}.")  # fmt: skip
    print(f"\n{hardware.detect().cpu}; {time.strftime('%Y-%m-%d')}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
