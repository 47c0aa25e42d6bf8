"""Compare the simulation of each of several models under load with that of all models as one server.

    python benchmarks/concurrent_models.py [--seconds 1] [--seeds 6] [--smoke]

Pairs of models get load at the same time on an embedded server: two that sleep for the time of a batch, two built-in
ones, and a built-in one next to an ensemble. Each configuration is measured once at each load. Both simulations are
then fitted to the measurements of a few configurations, which each seed draws, and forecast those of the others. The
search is repeated on the measurements in closed loops, with each simulation.

The error of a simulation is that before the search corrects it. The forecast is that of the search, for the
throughput and the p95 of all models together. Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from lib.measured_model import prepare_model
from lib.output import measured_on, print_head, print_progress, print_title, row
from objectives import model_stats
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.errors import MeasurementError
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial, all_points
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.replay.replay import DiscardingRecord
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.simulator.concurrent_models import CombinedPerformance
from optimizer.simulator.performance_model import fit_simulator
from optimizer.simulator.predicted_metrics import Performance, as_closed_loop, configuration_loads, is_complete
from optimizer.store.recording import RecordedServer, baselines, recorded_space
from optimizer.study.load_generators import make_concurrent
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials
from tests.repositories import sleeper_program, write_python_model

BUILT_IN = ("text_recognition-small", "mlp", "minilm")
SLEEPERS = {"sleeper": 8, "other_sleeper": 16}  # ms of a batch
BATCH = 8  # max_batch_size of the tuned model
CONFIGURATIONS = 10  # of each pair
CONCURRENCIES = (1, 4, 16)  # requests in flight to the tuned model
RATE_SHARES = (0.4, 0.7, 0.9)  # of the rate at which the closed loops serve the models in their proportion
FITTED = (2, 4)  # configurations that a simulation is fitted to
SEARCHED = (3, 5)  # configurations that a search tries
P95 = "latency-p95"
ONE, EACH = "one server", "each model"
FORECAST_COLUMNS = (
    *("models", "load", "fitted to", "simulated as", "value of"),
    *("throughput: median error", "p95: median error"),
)
Errors = tuple[float, float]  # relative errors of throughput and p95


@dataclass(frozen=True)
class Pair:
    """Two models that get load at the same time.

    Attributes:
        tuned: The first one.
        other: The second one with its share of the load.
        fields: The choices of its settings, or of those of its steps.
        bound_ms: Bound on the p95 in the search.
        has_rates: Whether it is also measured at request rates.
    """

    tuned: str
    other: str
    fields: Mapping[str, tuple[FieldValue, ...]]
    bound_ms: float
    has_rates: bool = True


@dataclass(frozen=True)
class MeasuredPair:
    """A trial of each configuration of a pair under one kind of load, and the search problem."""

    models: str
    load: str
    problem: Problem
    trials: Sequence[Trial]


def count_and_delay(model: str) -> dict[str, tuple[FieldValue, ...]]:
    return {f"{model}/instance_group_count": (1, 2), f"{model}/max_queue_delay_microseconds": ("off", 0)}


STEPS: Mapping[str, tuple[FieldValue, ...]] = {
    "minilm_model/instance_group_count": (1, 2),
    "minilm_tokenize/instance_group_count": (1, 2),
}
PAIRS = (
    Pair("sleeper", "other_sleeper=3", count_and_delay("other_sleeper"), bound_ms=300),
    Pair("text_recognition", "mlp=3", count_and_delay("mlp"), bound_ms=150),
    Pair("text_recognition", "minilm", STEPS, bound_ms=250, has_rates=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a measurement (1)")
    parser.add_argument("--seeds", type=int, default=6, help="draws of configurations, and searches (6)")
    parser.add_argument("--smoke", action="store_true", help="a few short measurements of the first pair")
    arguments = parser.parse_args()
    seconds, seeds = arguments.seconds, arguments.seeds
    pairs: Sequence[Pair] = PAIRS
    if arguments.smoke:
        seconds, seeds, pairs = 0.3, 1, PAIRS[:1]
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch, "models"))
        measured = [one for pair in pairs for one in measure(pair, Path(scratch), seconds)]
        print_title("Several models under load: latest measurement")
        print_head(*FORECAST_COLUMNS, text=5)
        for one in measured:
            print_forecasts(one, seeds)
        print("")
        print_head("models", "bound on p95", "configurations tried", "simulated as", "throughput of the best", text=4)
        for one in measured:
            if not one.problem.open_loop:  # a search at rates needs loads that were not measured
                print_recommendations(one, seeds)
        print(f"\n{measured_on(f'{CONFIGURATIONS} configurations of each pair', f'{seeds} seeds', f'{seconds:g} s')}")


# -- measurements --------------------------------------------------------------------------------------------------


def write_models(repository: Path) -> None:
    """Write all models into one repository."""
    for name in BUILT_IN:
        source = prepare_model(RunOptions(name)).source
        for model in source.models:
            shutil.copytree(source.folder(model), repository / model)
    for name, milliseconds in SLEEPERS.items():
        write_python_model(repository, name, sleeper_program(milliseconds))


def measure(pair: Pair, folder: Path, seconds: float) -> Iterator[MeasuredPair]:
    """Yield the measurements of ``pair`` in closed loops, and those at request rates if it has some."""
    task = prepare_model(
        RunOptions(pair.tuned, model_repository=str(folder / "models"), concurrent_models=(pair.other,))
    )
    closed, opened = (
        make_concurrent(make(log=folder / "client.log", input_data=task.input_data, shapes=task.shapes), task)
        for make in (ClosedLoopGenerator, OpenLoopGenerator)
    )
    loads = [LoadPoint(1, concurrency) for concurrency in CONCURRENCIES]
    trials, at_rates = list[Trial](), list[Trial]()
    target = EmbeddedTarget(task.source, TargetSettings(folder / "server.log", on_progress=print_progress))
    with contextlib.closing(target):
        for number, candidate in enumerate(candidates(pair)):
            print_progress(f"{pair.tuned} and {pair.other}, configuration {number + 1} of {CONFIGURATIONS}")
            with target.deploy(candidate) as endpoint:
                closed.measure(endpoint, loads[0], seconds)  # warm up
                measurements = [closed.measure(endpoint, load, seconds) for load in loads]
                trials.append(Trial(number, candidate, tuple(zip(loads, measurements, strict=True))))
                if pair.has_rates:
                    capacity = served_rate(measurements[-1], {pair.tuned: 1.0, **task.source.concurrent})
                    rates = [LoadPoint(1, request_rate=float(f"{share * capacity:.3g}")) for share in RATE_SHARES]
                    answers = list[tuple[LoadPoint, Measurement]]()
                    for rate in rates:
                        with contextlib.suppress(MeasurementError):  # no request was due, or others were late
                            answers.append((rate, opened.measure(endpoint, rate, seconds)))
                    at_rates.append(Trial(number, candidate, tuple(answers)))
    space = recorded_space({trial.candidate: set(CONCURRENCIES) for trial in trials}, 1)
    problem = replace(task.problem, space=space, sla=Sla.from_bounds({"p95": pair.bound_ms}))
    models = f"{pair.tuned}, {pair.other}"
    yield MeasuredPair(models, "concurrency", problem, trials)
    if at_rates:
        yield MeasuredPair(models, "request rate", replace(problem, open_loop=True), at_rates)


def candidates(pair: Pair) -> list[Candidate]:
    """Return the two baselines, and others with and without dynamic batching and with one or two instances."""
    every = [
        Candidate(BATCH, batches, instance_count=count, fields=tuple(sorted(zip(pair.fields, values, strict=True))))
        for batches in (False, True)
        for count in (1, 2)
        for values in product(*pair.fields.values())
    ]
    first = tuple(choices[0] for choices in pair.fields.values())
    compared = [one for one in every if one.instances == 1 and tuple(value for _, value in one.fields) == first]
    others = [one for one in every if one not in compared]
    return compared + random.Random(0).sample(others, CONFIGURATIONS - len(compared))


def served_rate(measurement: Measurement, shares: Mapping[str, float]) -> float:
    """Return the rate of all models at which the slowest one gets as many requests as in ``measurement``."""
    by_model = model_stats.from_text(measurement.by_model)
    slowest = min((by_model[name].throughput_infer_per_sec or 0.0) / share for name, share in shares.items())
    return sum(shares.values()) * slowest


# -- forecasts -----------------------------------------------------------------------------------------------------


def simulations(problem: Problem) -> dict[str, Problem]:
    """Return the problem for each simulation; one with an ensemble is simulated as one server only."""
    one = {ONE: replace(problem, concurrent=())}
    return {**one, EACH: problem} if problem.concurrent else one


def print_forecasts(measured: MeasuredPair, seeds: int) -> None:
    """Print the errors after each number of configurations, by simulation and model."""
    for count in FITTED:
        errors: dict[tuple[str, str], list[Errors]] = defaultdict(list)
        for seed in range(seeds):
            fitted = random.Random(seed).sample(range(len(measured.trials)), count)
            for name, problem in simulations(measured.problem).items():
                for value, error in forecast_errors(problem, measured.trials, fitted, seed):
                    errors[name, value].append(error)
        for (name, value), pairs in errors.items():
            cells = [f"{statistics.median(values):.0%}" for values in zip(*pairs, strict=True)]
            print(row(measured.models, measured.load, f"{count} configurations", name, value, *cells), flush=True)


def forecast_errors(
    problem: Problem, trials: Sequence[Trial], fitted: Sequence[int], seed: int
) -> Iterator[tuple[str, Errors]]:
    """Yield the errors at the other trials than ``fitted``: of the search, of all models together, and of each.

    Measurements of an overloaded server do not count.
    """
    points = [point for point in all_points(trials) if is_complete(point, P95) and not point.measurement.overloaded]
    points = as_closed_loop(points, problem)
    known = [point for point in points if point.trial in fitted]
    others = [point for point in points if point.trial not in fitted]
    loads = configuration_loads(others)
    surrogate = fit_surrogate(problem, [trial for trial in trials if trial.number in fitted], seed)
    forecasts = np.stack(surrogate.forecast(loads), axis=1).tolist()
    results: Sequence[Performance] = fit_simulator(known, problem, P95, seed).simulate(loads)
    for point, result, (throughput, p95_s) in zip(others, results, forecasts, strict=True):
        measurement = point.measurement
        yield "all models, forecast of the search", relative_errors(throughput, p95_s, measurement)
        yield "all models", relative_errors(result.throughput_infer_per_sec, result.latency_s(P95), measurement)
        if isinstance(result, CombinedPerformance):
            by_model = model_stats.from_text(measurement.by_model)
            for own, (name, values) in zip(result.by_model, by_model.items(), strict=True):
                yield name, relative_errors(own.throughput_infer_per_sec, own.latency_s(P95), values)


def relative_errors(throughput: float, p95_s: float, measured: Measurement) -> Errors:
    return (
        abs(throughput / (measured.throughput_infer_per_sec or math.nan) - 1),
        abs(1e3 * p95_s / (measured.latency_p95_ms or math.nan) - 1),
    )


# -- recommendations -----------------------------------------------------------------------------------------------


def print_recommendations(measured: MeasuredPair, seeds: int) -> None:
    """Print the mean throughput of the best configuration that a search has tried, and its share of the best one."""
    best = best_throughput(measured.problem, measured.trials)
    bound = str(measured.problem.sla)
    if not best:
        print(row(measured.models, bound, *["–"] * 2, "no configuration meets the bound"))
        return
    for count in SEARCHED:
        for name, problem in simulations(measured.problem).items():
            found = [best_throughput(problem, search(problem, measured.trials, seed, count)) for seed in range(seeds)]
            mean = statistics.fmean(found)
            cells = (f"{count} of {len(measured.trials)}", name, f"{mean:,.0f} infer/s ({mean / best:.1%})")
            print(row(measured.models, bound, *cells), flush=True)


def search(problem: Problem, trials: Sequence[Trial], seed: int, max_trials: int) -> list[Trial]:
    """Return the trials of a search on the measurements."""
    server, searcher = RecordedServer(trials), make_searcher("simulated", problem, seed)
    budget = Budget(math.inf, max_trials)
    scheduler = Scheduler(problem, searcher, budget, Stopwatch(), baselines(problem.space))
    return run_trials(scheduler, server, Measurer(server, server, DiscardingRecord(), QuietObserver()))


def best_throughput(problem: Problem, trials: Sequence[Trial]) -> float:
    """Return the inferences per second of the best measurement within the bound; 0 if there is none."""
    best = problem.best_point(all_points(trials), unstable=True)
    return best.throughput_infer_per_sec if best else 0.0


if __name__ == "__main__":
    main()
