"""Measure how far apart the configurations are that repeated runs of tune recommend for one model.

    python benchmarks/repeatability.py [--work FOLDER] [--rounds 20] [--smoke]

Takes the recommendations of the quiet runs of real_verdicts.py in FOLDER that ended with PASS, each at the load
that its run confirmed, and `dynamic_batching {}` at the median of the loads that the runs confirmed for it. Each
round deploys each of them once on a fresh server, in random order, and takes tune's own confirmation measurement:
one uninterrupted load of the own client, cut into windows.

The throughputs are compared as logarithms. The mean of each round is subtracted from its values, because the
machine's speed differs between rounds. The variance of the recommendations' means is that of their true throughputs
plus that of the re-measurement, which follows from the differences within a recommendation (two-way analysis of
variance without interaction, Fisher 1925). After it is subtracted, the means are drawn together until they have the
variance that is left. The spread is the ratio of their 90th and 10th percentile minus 1. A configuration and load
that several runs recommend is measured once in a round, and counts for each of these runs.

Each measurement is one line of FOLDER/repeatability_MODEL.jsonl. A repeated command continues with the rounds that
are not complete. Targets: a spread of at most 5 % after 20 rounds or more; no recommendation is below
`dynamic_batching {}` by more than its interval.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.intervals import Interval, mean_interval, ratio_interval
from lib.output import judged, measured_on, print_progress, row
from lib.plain_server import candidate_of
from lib.records import Records, this_machine
from lib.verdict_runs import LEVEL, WORK, VerdictRun, bounded_task, read_runs
from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, Measurement
from objectives.pooled_windows import pool_measurements
from objectives.verdict import count_misses
from optimizer.confirmation.server_plan import plan_server
from optimizer.core.candidate import Candidate
from optimizer.core.errors import TuneError
from optimizer.core.trial import LoadPoint, Point
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.server_process import remove_leftovers
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.speed_probe import SpeedProbe, probe_speed
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.results import configuration_text
from optimizer.study.task import Task

MODEL, ROUNDS, MOST_SPREAD = "dlrm", 20, 0.05
SMOKE_MODEL, SMOKE_ROUNDS = "mlp", 2
DYNAMIC_BATCHING = "dynamic_batching {}"
COLUMNS = (
    "configuration",
    "in flight",
    "runs",
    "infer/s",
    "p95 ms, median",
    "over the bound",
    f"over {DYNAMIC_BATCHING}",
)


@dataclass(frozen=True)
class Entrant:
    """A configuration at one load that ``runs`` runs recommend, 0 for the comparison. ``name`` identifies it."""

    name: str
    candidate: Candidate
    load: LoadPoint
    throughput_infer_per_sec: float
    runs: int


@dataclass(frozen=True)
class Remeasurement:
    """The pooled windows of one entrant on one fresh server; ``probe_ms`` is the speed probe before the load."""

    machine: str
    model: str
    round: int
    entrant: str
    throughput_infer_per_sec: float
    latency_p95_ms: float
    share_over: float
    probe_ms: float


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work, model = arguments.work.absolute(), SMOKE_MODEL if arguments.smoke else MODEL
    machine = this_machine()
    runs = [run for run in read_runs(work).read(machine) if run.model == model and run.condition == "quiet"]
    passed = [run for run in runs if run.has_passed or (arguments.smoke and run.recommended)]
    if not passed:
        sys.exit(f"{work}: no quiet run of {model} ended with PASS there; run benchmarks/real_verdicts.py first")
    records = Records(work / f"repeatability_{model}.jsonl", Remeasurement)
    own_task = bounded_task(model, passed[0].bound_ms)
    entrants = choose(passed, own_task)
    try:
        measure(own_task, entrants, arguments.rounds, records, machine)
    except TuneError as error:
        sys.exit(f"{error}\nRepeat the command to continue; what is done is in {work}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; repeat the command to continue; what is done is in {work}")
    finally:
        remove_leftovers()
    print(f"{len(passed)} recommendations of {len(runs)} quiet runs of {model}\n")
    print("\n".join([*report(entrants, records.read(machine)), "", measured_on(machine=machine)]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help=f"folder of real_verdicts.py ({WORK})")
    parser.add_argument("--rounds", type=int, help=f"rounds in which all are measured ({ROUNDS})")
    parser.add_argument("--smoke", action="store_true", help="two rounds for the runs of real_verdicts.py --smoke")
    arguments = parser.parse_args()
    arguments.work = arguments.work or (WORK.with_name(f"{WORK.name}_smoke") if arguments.smoke else WORK)
    arguments.rounds = arguments.rounds or (SMOKE_ROUNDS if arguments.smoke else ROUNDS)
    return arguments


def choose(runs: Sequence[VerdictRun], own_task: Task) -> list[Entrant]:
    """Return the recommendations of ``runs``, each distinct one once, and ``dynamic_batching {}``."""
    batch = own_task.problem.request_batch_size
    recommended = [run.recommended for run in runs if run.recommended is not None]
    keys = [
        (candidate_of(own_task, run.config), int(best["concurrency"]))
        for run, best in zip(runs, recommended, strict=True)
    ]
    throughputs: dict[tuple[Candidate, int], list[float]] = {}
    for key, best in zip(keys, recommended, strict=True):
        throughputs.setdefault(key, []).append(best["throughput_infer_per_sec"])
    entrants = [
        Entrant(
            f"{configuration_text.configuration(candidate)} at {in_flight}",
            candidate,
            LoadPoint(batch, concurrency=in_flight),
            statistics.median(throughputs[candidate, in_flight]),
            count,
        )
        for (candidate, in_flight), count in Counter(keys).most_common()
    ]
    compared = [entry for run in runs if (entry := run.dynamic_batching) and entry["throughput_infer_per_sec"]]
    if not compared:
        return entrants
    in_flight = round(statistics.median(entry["concurrency"] for entry in compared))
    throughput = statistics.median(entry["throughput_infer_per_sec"] for entry in compared)
    load = LoadPoint(batch, concurrency=in_flight)
    plain = Entrant(f"{DYNAMIC_BATCHING} at {in_flight}", own_task.dynamic_batching, load, throughput, 0)
    return [*entrants, plain]


def measure(
    own_task: Task, entrants: Sequence[Entrant], rounds: int, records: Records[Remeasurement], machine: str
) -> None:
    """Measure all entrants in each round that is not complete yet. Raises TuneError."""
    done = complete_rounds(entrants, records.read(machine))
    speed = SpeedProbe()
    with tempfile.TemporaryDirectory() as scratch:
        generator = ClosedLoopGenerator(
            log=Path(scratch, "closed_loop.log"),
            input_data=own_task.input_data,
            shapes=own_task.shapes,
            sla=own_task.problem.sla.latencies,
        )
        target = EmbeddedTarget(
            own_task.source, TargetSettings(Path(scratch, "server.log"), on_progress=print_progress)
        )
        with contextlib.closing(target):
            for number in sorted(set(range(rounds)) - done.keys()):
                for entrant in random.Random(number).sample(list(entrants), len(entrants)):
                    print_progress(f"round {number + 1} of {rounds}: {entrant.name}")
                    windows, probe_ms = _measure(target, generator, entrant, speed)
                    records.append(_remeasurement(machine, own_task, number, entrant, windows, probe_ms))


def complete_rounds(
    entrants: Sequence[Entrant], measured: Sequence[Remeasurement]
) -> dict[int, dict[str, Remeasurement]]:
    """Return the rounds in which all entrants were measured: number -> entrant -> its last measurement."""
    rounds: dict[int, dict[str, Remeasurement]] = {}
    for one in measured:
        rounds.setdefault(one.round, {})[one.entrant] = one
    return {number: known for number, known in rounds.items() if all(entrant.name in known for entrant in entrants)}


def _measure(
    target: EmbeddedTarget, generator: ClosedLoopGenerator, entrant: Entrant, speed: SpeedProbe
) -> tuple[list[Measurement], float]:
    """Return the windows on a fresh server, as the confirmation takes them, and the speed probe in ms."""
    known = Measurement(entrant.throughput_infer_per_sec)
    planned = plan_server(Point(0, entrant.candidate, entrant.load, known), entrant.load, None)
    with target.deploy(entrant.candidate, fresh=True) as endpoint:
        probe_ms = 1000 * probe_speed(speed.seconds)
        generator.warm_up(endpoint, entrant.load)
        return generator.measure_windows(endpoint, entrant.load, planned.window_seconds, planned.windows), probe_ms


def _remeasurement(
    machine: str, own_task: Task, number: int, entrant: Entrant, windows: list[Measurement], probe_ms: float
) -> Remeasurement:
    bound_ms, measured = min(own_task.problem.sla.bounds_ms(LATENCY)), pool_measurements(windows)
    return Remeasurement(
        machine,
        own_task.problem.model,
        number,
        entrant.name,
        measured.throughput_infer_per_sec or 0.0,
        measured.latency_p95_ms or 0.0,
        count_misses([windows], bound_ms, LEVEL).share,
        round(probe_ms, 3),
    )


# -- report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """The spread of throughputs, as the ratio of two percentiles minus 1, and the deviation of one re-measurement.

    ``measured`` includes the variance of re-measurement, ``true`` does not. ``deviation`` is relative.
    """

    measured: float
    true: float
    deviation: float


def true_spread(throughputs: FloatArray, runs: Sequence[int]) -> Spread:
    """Return the spread from the 10th to the 90th percentile over runs.

    Args:
        throughputs: Of each configuration in each round, shape [rounds, configurations], at least two of each.
        runs: How many runs recommend each configuration.
    """
    logs = np.log(throughputs)
    rounds, configurations = logs.shape
    logs = logs - logs.mean(axis=1, keepdims=True)
    means = logs.mean(axis=0)
    variance = float(np.square(logs - means).sum()) / ((rounds - 1) * (configurations - 1))
    of_runs = np.repeat(means, runs)
    measured = float(of_runs.var(ddof=1))
    left = math.sqrt(max(0.0, measured - variance / rounds) / measured) if measured else 0.0
    low, high = np.quantile(of_runs, [0.1, 0.9])
    return Spread(math.expm1(high - low), math.expm1(left * (high - low)), math.sqrt(variance))


def report(entrants: Sequence[Entrant], measured: Sequence[Remeasurement]) -> list[str]:
    """Return the table in Markdown, from the rounds in which all entrants were measured."""
    complete = list(complete_rounds(entrants, measured).values())
    if len(complete) < 2:
        return ["fewer than two complete rounds"]
    recommended = [entrant for entrant in entrants if entrant.runs]
    plain = next((entrant for entrant in entrants if not entrant.runs), None)
    lines = [row(*COLUMNS), "| :-- |" + " --: |" * (len(COLUMNS) - 1)]
    ratios: list[Interval] = []
    for entrant in entrants:
        ratio = None if plain is None or entrant is plain else _ratio(complete, entrant, plain)
        ratios += [] if ratio is None else [ratio]
        lines.append(row(*_cells(entrant, [known[entrant.name] for known in complete], ratio)))
    lines += ["", f"{len(complete)} rounds; intervals at 95 %.", ""]
    if len(recommended) > 1:
        values = np.array([[known[one.name].throughput_infer_per_sec for one in recommended] for known in complete])
        spread = true_spread(values, [entrant.runs for entrant in recommended])
        lines.append(
            f"- Spread of the true throughput, 10th to 90th percentile of the runs: {spread.true:.1%} (at most "
            f"{MOST_SPREAD:.0%}: {judged(spread.true <= MOST_SPREAD)}); {spread.measured:.1%} with the variance of "
            f"re-measurement, whose deviation is {spread.deviation:.1%} on one server"
        )
    else:
        lines.append("- All runs recommend the same configuration at the same load.")
    if ratios:
        below = sum(ratio.high < 1 for ratio in ratios)
        lines.append(f"- Below `{DYNAMIC_BATCHING}` by more than the interval: {below} ({judged(below == 0)})")
    return lines


def _ratio(complete: Sequence[Mapping[str, Remeasurement]], entrant: Entrant, other: Entrant) -> Interval:
    pairs = [[known[one.name].throughput_infer_per_sec for known in complete] for one in (entrant, other)]
    return ratio_interval(*pairs)


def _cells(entrant: Entrant, measured: Sequence[Remeasurement], ratio: Interval | None) -> list[str]:
    return [
        entrant.name.rpartition(" at ")[0],
        f"{entrant.load.concurrency}",
        f"{entrant.runs}" if entrant.runs else "comparison",
        mean_interval([one.throughput_infer_per_sec for one in measured]).text(",.0f"),
        f"{statistics.median(one.latency_p95_ms for one in measured):.1f}",
        f"{statistics.fmean(one.share_over for one in measured):.2%}",
        "–" if ratio is None else ratio.text(".3f"),
    ]


if __name__ == "__main__":
    main()
