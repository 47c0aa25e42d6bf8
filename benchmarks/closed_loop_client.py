"""Compare three ways to measure one closed loop in many windows on a fresh server.

    python benchmarks/closed_loop_client.py [--rounds 10] [--windows 10] [--seconds 0.5] [--models mlp:16 …] [--smoke]

Each model is served with ``dynamic_batching {}`` by one embedded tritonserver. The ways alternate within each
round:

- ``one launch``: one run of perf_analyzer with all windows. Its verbose output has each window's throughput and one
  percentile (p95), so p50, p99 and the share over a bound are unknown.
- ``a launch per window``: perf_analyzer is started for each window.
- ``own client``: ``ClosedLoopGenerator.measure_windows``, as in the confirmation.

``over the bound`` is the share of requests over one bound, the p95 of a first measurement: the own client counts
them, and for a launch per window the share is interpolated between four quantiles. ``CPU µs a request`` is the CPU
time of all client processes, including their start, over the requests that the server answered; ``CPU of all
cores`` is that time as a share of all CPUs over the wall time: the server does not get it. ``load`` is the time of
the windows over the wall time of the way. ``information a second`` is the precision of the mean log p95 of
the windows, their number over their variance, per second of wall time, as a multiple of the own client's; the power
of the verdict grows with it. The variance is that of the differences of successive windows, which slow changes of the
machine hardly affect (von Neumann 1941). The columns ``of own`` are ratios to the own client's result of the same
round, with intervals at 95 %.

Prints a Markdown table for each model, and whether the own client agrees with perf_analyzer: whether the interval
of each ratio is within 5 % of 1, contains 1, or neither.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from intervals import CONFIDENCE, Interval, ratio_interval
from measured_model import make_own_client, make_perf_analyzer, prepare_model, say
from records import this_machine
from scipy import special
from tune_runs import row

from objectives.metrics import Measurement
from objectives.pooled_windows import latency_quantiles, pool_measurements
from objectives.sla import Sla
from objectives.verdict import count_misses
from optimizer.core.endpoint import Endpoint
from optimizer.core.measurement_windows import WINDOW_STRETCH
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.perf_analyzer import NEVER_UNSTABLE, LocalRunner, PerfAnalyzer, PerfAnalyzerCommand
from optimizer.measure.perf_output import read_windows
from optimizer.measure.server_calls import read_statistics
from optimizer.options.run_options import RunOptions

MODELS = ("mlp:16", "dlrm:26", "text_recognition-small:4")  # name:concurrency
SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_WINDOWS = ("mlp:16",), 2, 3
NEVER_STABLE = "0.000001"  # percent: perf_analyzer measures all windows
CLIENT_SECONDS = 60.0
LEVEL = 0.95
AGREEMENT = 0.05  # of throughput or p95: a smaller difference changes no decision
OWN = "own client"
COLUMNS = (
    *("infer/s", "p50 ms", "p95 ms", "p99 ms", "over the bound", "CPU µs a request", "CPU of all cores", "load"),
    *("information a second", "infer/s, of own", "p95, of own"),
)


@dataclass(frozen=True)
class Round:
    """The result and the cost of one way in one round.

    Attributes:
        pooled: The measurement of all windows together.
        windows_p95_ms: The p95 of each window in ms.
        share_over: Share of the requests over the bound, 0 to 1; nan if the way does not tell it.
        cpu_us: CPU time of the client processes per request.
        cpu_share: The same as a share of the time of all CPUs.
        wall_seconds: Wall time of the whole round of this way.
        load_share: The time of the windows over ``wall_seconds``.
    """

    pooled: Measurement
    windows_p95_ms: tuple[float, ...]
    share_over: float
    cpu_us: float
    cpu_share: float
    wall_seconds: float
    load_share: float

    @property
    def throughput(self) -> float:
        """Inferences per second; nan if it is unknown."""
        return _known(self.pooled.throughput_infer_per_sec)

    @property
    def p95_ms(self) -> float:
        return _known(self.pooled.latency_p95_ms)

    @property
    def figures(self) -> list[float]:
        """The figures of the columns up to ``load``."""
        pooled = self.pooled
        quantiles_ms = (
            _known(value) for value in (pooled.latency_p50_ms, pooled.latency_p95_ms, pooled.latency_p99_ms)
        )
        return [self.throughput, *quantiles_ms, self.share_over, self.cpu_us, self.cpu_share, self.load_share]


Way = Callable[[], list[Measurement]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a window (0.5)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME:CONCURRENCY")
    parser.add_argument("--smoke", action="store_true", help="check that everything works: two short rounds of mlp")
    given = parser.parse_args()
    if given.smoke:
        given.models, given.rounds, given.windows = SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_WINDOWS
    for model in given.models:
        name, _, concurrency = model.partition(":")
        load = LoadPoint(1, concurrency=int(concurrency or 16))
        bound_ms, rounds = compare(name, load, given.rounds, given.windows, given.seconds)
        title = f"{name}, {load.concurrency} in flight, {given.windows} windows of {given.seconds:g} s"
        print("\n".join(table(f"{title}, bound {bound_ms:.3g} ms", rounds)), flush=True)
    print(f"\nmedians of {given.rounds} rounds; {this_machine()}; {time.strftime('%Y-%m-%d')}")


def compare(
    name: str, load: LoadPoint, rounds: int, windows: int, seconds: float
) -> tuple[float, dict[str, list[Round]]]:
    """Return the bound in ms, and the rounds of each way."""
    prepared = prepare_model(RunOptions(name))
    load = replace(load, request_batch_size=prepared.problem.request_batch_size)
    results: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        perf_analyzer = make_perf_analyzer(prepared, folder)
        target = EmbeddedTarget(prepared.source, TargetSettings(folder / "server.log", say=say))
        with contextlib.closing(target), target.deploy(prepared.dynamic_batching) as endpoint:
            first = make_own_client(prepared, folder).measure(endpoint, load)  # the server is warm for each way
            bound_ms = first.latency_p95_ms or math.inf
            own = make_own_client(prepared, folder, Sla.from_bounds({"p95": bound_ms}))
            ways: dict[str, Way] = {
                "one launch": lambda: one_launch(perf_analyzer, endpoint, load, seconds, windows),
                "a launch per window": lambda: [
                    perf_analyzer.measure(endpoint, load, seconds) for _ in range(windows)
                ],
                OWN: lambda: own.measure_windows(endpoint, load, seconds, windows),
            }
            for number in range(rounds):
                order = list(ways)
                for way in order[number % len(order) :] + order[: number % len(order)]:
                    done = measure(endpoint, ways[way], windows * seconds, bound_ms)
                    results.setdefault(way, []).append(done)
    return bound_ms, {way: results[way] for way in ways}


def one_launch(
    perf_analyzer: PerfAnalyzer, endpoint: Endpoint, load: LoadPoint, seconds: float, windows: int
) -> list[Measurement]:
    """Return one measurement per window of a single run, with throughput and p95 only."""
    command = perf_analyzer.command(endpoint, load, round(1000 * seconds / WINDOW_STRETCH), windows)
    command[command.index(str(NEVER_UNSTABLE))] = NEVER_STABLE
    run = PerfAnalyzerCommand(command, CLIENT_SECONDS + windows * seconds, perf_analyzer.log)
    passes = read_windows(LocalRunner(perf_analyzer.libraries)(run).output)
    return [Measurement(one.throughput_infer_per_sec, latency_p95_ms=one.latency_ms, stable=True) for one in passes]


def measure(endpoint: Endpoint, way: Way, load_seconds: float, bound_ms: float) -> Round:
    before, cpu_seconds, started = answered(endpoint), children_cpu_seconds(), time.monotonic()
    measurements = way()
    wall_seconds, cpu_seconds = time.monotonic() - started, children_cpu_seconds() - cpu_seconds
    requests = max(1, answered(endpoint) - before)
    tells_share = all(len(latency_quantiles(measurement)) > 1 for measurement in measurements)
    return Round(
        pool_measurements(measurements),
        tuple(_known(measurement.latency_p95_ms) for measurement in measurements),
        count_misses([measurements], bound_ms, LEVEL).share if tells_share else math.nan,
        1e6 * cpu_seconds / requests,
        cpu_seconds / wall_seconds / len(os.sched_getaffinity(0)),
        wall_seconds,
        load_seconds / wall_seconds,
    )


def answered(endpoint: Endpoint) -> int:
    read = read_statistics(endpoint)
    return int(read.inference_stats.success.count) if read else 0


def children_cpu_seconds() -> float:
    """Return the CPU time of the processes that have ended; the server still runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# -- report -------------------------------------------------------------------------------------------------------


def table(title: str, results: Mapping[str, Sequence[Round]]) -> list[str]:
    """Return the Markdown table of one model, and the agreement of each way with the own client."""
    own = results[OWN]
    lines = ["", f"**{title}**", "", row("way", *COLUMNS), "| --- |" + " --: |" * len(COLUMNS)]
    notes = []
    for way, rounds in results.items():
        medians = [statistics.median(column) for column in zip(*(one.figures for one in rounds), strict=True)]
        cells = [f"{medians[0]:,.0f}", *map(_shown, medians[1:4]), _share(medians[4]), _shown(medians[5])]
        cells += [*map(_share, medians[6:8])]
        if way == OWN:
            lines.append(row(way, *cells, "1", "1", "1"))
            continue
        ratios = [
            ratio_interval([one.throughput for one in rounds], [one.throughput for one in own]),
            ratio_interval([one.p95_ms for one in rounds], [one.p95_ms for one in own]),
        ]
        lines.append(row(way, *cells, information(rounds, own).text(".2f"), *(one.text(".3f") for one in ratios)))
        notes.append(f"- {way}: throughput {agreement(ratios[0])}, p95 {agreement(ratios[1])}")
    return [*lines, "", *notes]


def agreement(ratio: Interval) -> str:
    """Return whether two ways agree, from the interval of the ratio of their results."""
    if math.isnan(ratio.low):
        return "measured once"
    if ratio.low >= 1 - AGREEMENT and ratio.high <= 1 + AGREEMENT:
        return f"agrees within {AGREEMENT:.0%}"
    return "no measurable difference" if ratio.low <= 1 <= ratio.high else f"**differs by {ratio.estimate - 1:+.1%}**"


def information(rounds: Sequence[Round], own: Sequence[Round]) -> Interval:
    """Return the information about log p95 per second of wall time as a multiple of ``own``.

    The interval is that of the ratio of two variances (F distribution). Differences of successive windows share
    values, so they count as two thirds of as many independent ones.
    """
    precisions, freedoms = [], []
    for way in (rounds, own):
        steps = np.concatenate([np.diff(np.log(one.windows_p95_ms)) for one in way])
        windows = statistics.fmean(len(one.windows_p95_ms) for one in way)
        seconds = statistics.fmean(one.wall_seconds for one in way)
        precisions.append(windows / seconds / (float(np.square(steps).mean()) / 2))
        freedoms.append(2 / 3 * len(steps))
    ratio = precisions[0] / precisions[1]
    low, high = special.fdtri(*freedoms, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(ratio, ratio * float(low), ratio * float(high))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


if __name__ == "__main__":
    main()
