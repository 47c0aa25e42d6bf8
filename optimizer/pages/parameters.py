"""What each parameter does to the throughput within the bounds: importance, slices, and one step off the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.problem import Problem
from optimizer.space import Value
from optimizer.store.finished import FinishedRun
from optimizer.trial import Candidate, Point, Trial, short_path

Array = npt.NDArray[np.float64]

FEWEST_TRIALS = 8  # for an importance: of fewer, chance decides
ENOUGH_TRIALS = 1000  # more change nothing, and take seconds
TOP_TRIALS, TOP_SHARE = 5, 0.1  # whose parameters are compared with those of all
LOADS, BETWEEN = 12, 400  # that a neighbour is simulated at; and looked at
MOST_TRIALS = 8  # that expectations rest on: the best ones tell most about what is near them


@dataclass(frozen=True, slots=True)
class Sample:
    """A trial of the space: its best load, whether that ``meets`` the bounds, and a choice for each parameter."""

    point: Point
    meets: bool
    values: Mapping[str, Value]

    @property
    def throughput(self) -> float:
        """Within the bounds: 0 where no load meets them."""
        return self.point.throughput_infer_per_sec if self.meets else 0.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One step off the recommendation. Shares are of its throughput lost: 0.04 is 4 % less. None is unknown."""

    parameter: str
    chosen: Value
    other: Value
    candidate: Candidate
    measured: float | None
    expected: float | None

    @property
    def cost(self) -> float | None:
        return self.expected if self.measured is None else self.measured


def label(parameter: str) -> str:
    """As Triton writes it."""
    own = {
        "max_queue_delay_us": "max_queue_delay_microseconds",
        "preferred_batch_sizes": "preferred_batch_size",
        "instance_count": "instance_group count",
    }
    return own.get(parameter) or (parameter if parameter == "max_batch_size" else short_path(parameter))


def samples(run: FinishedRun, best_loads: Sequence[tuple[Trial, Point | None, bool]]) -> list[Sample]:
    """Of every trial in the space that was measured. ``best_loads``: as ``measured.best_loads`` gives them."""
    found = []
    for trial, point, met in best_loads:
        values = run.problem.space.values_of(run.problem.space.canonical(trial.candidate))
        if point is not None and values is not None:
            found.append(Sample(point, met, values))
    return found


def varied(problem: Problem) -> dict[str, tuple[Value, ...]]:
    """The parameters that have a choice."""
    return {name: choices for name, choices in problem.space.parameters().items() if len(choices) > 1}


def importance(problem: Problem, found: Sequence[Sample]) -> dict[str, float]:
    """By parameter, largest first, together 1; empty where there are too few trials, or all are alike.

    PED-ANOVA of Optuna: how much the choices of the best tenth, five at least, differ from those of all that were
    tried. It goes by ranks, so that configurations that miss the bounds are simply not among the best.
    """
    if len(found) < FEWEST_TRIALS or len({sample.throughput for sample in found}) < 2:
        return {}
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from optimizer.search.encoding import RANK, Encoding

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    encoding = Encoding(problem.space)
    study = optuna.create_study(direction="maximize")
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=encoding.encode(sample.point.candidate) or {},
                distributions=encoding.distributions,
                value=sample.throughput,
            )
            for sample in found[:: math.ceil(len(found) / ENOUGH_TRIALS)]
        ]
    )
    meeting = sum(sample.meets for sample in found) / len(found)
    top = min(0.5, meeting, max(TOP_SHARE, TOP_TRIALS / len(found)))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=top, evaluate_on_local=True)
    told = get_param_importances(study, evaluator=evaluator)
    shares = {name.removesuffix(RANK): share for name, share in told.items()}
    return {name: share for name, share in shares.items() if name in varied(problem) and math.isfinite(share)}


def one_step_off(run: FinishedRun, found: Sequence[Sample]) -> list[Neighbour]:
    """The recommendation with one parameter at the next choice, in the order of the space; behaviour that is the same
    is left out. Empty where nothing is recommended or it lies outside the space."""
    best = run.outcome.recommended if run.outcome else None
    space = run.problem.space
    values = space.values_of(space.canonical(best.candidate)) if best else None
    if best is None or values is None:
        return []
    steps = []
    for name, choices in varied(run.problem).items():
        place = choices.index(values[name])
        for other in choices[max(place - 1, 0) : place] + choices[place + 1 : place + 2]:
            candidate = space.candidate({**values, name: other})
            if candidate is not None and candidate != space.canonical(best.candidate):
                steps.append((name, values[name], other, candidate))
    searched = {space.canonical(sample.point.candidate): sample.throughput for sample in found if sample.meets}
    # what the search measured of both: its flattery is the same
    own = searched.get(space.canonical(best.candidate))
    expected = _expected_costs(run, [candidate for *_, candidate in steps], found)
    return [
        Neighbour(
            *step,
            measured=1 - searched[step[3]] / own if own and step[3] in searched else None,
            expected=expected.get(step[3]),
        )
        for step in steps
    ]


def _expected_costs(run: FinishedRun, others: Sequence[Candidate], found: Sequence[Sample]) -> dict[Candidate, float]:
    """As the simulation-guided search expects it after the best trials, each candidate at its best load within the
    latency bound; empty where no load of the recommendation's is expected to meet that."""
    from optimizer.search.guide import forecast

    best = run.outcome.recommended if run.outcome else None
    if best is None or not others:
        return {}
    ranked = {sample.point.trial for sample in best_first(found)[:MOST_TRIALS]} | {best.trial}
    problem, trials = run.problem, [trial for trial in run.trials if trial.number in ranked]
    in_flight = (
        best.throughput_infer_per_sec / best.load.request_batch_size * (best.measurement.latency_avg_ms or 0) / 1e3
    )
    most = 2 * max(best.load.concurrency, round(in_flight), 1)
    loads = sorted({round(load) for load in np.geomspace(1, most, LOADS).tolist()})
    candidates = [problem.space.canonical(best.candidate), *others]
    try:
        figures = np.log(forecast(problem, trials, [(one, load) for one in candidates for load in loads]))
    except ValueError:  # the latency that is bounded was not measured
        return {}
    bound_s = min((c.bound / 1e3 for c in problem.constraints if c.metric.startswith("latency-")), default=math.inf)
    curves = zip(*figures.reshape(2, -1, len(loads)), strict=True)
    within = [_best_within(np.log(loads), throughput, latency, bound_s) for throughput, latency in curves]
    return {one: 1 - value / within[0] for one, value in zip(others, within[1:], strict=True)} if within[0] else {}


def _best_within(loads: Array, throughput: Array, latency: Array, bound_s: float) -> float:
    """The largest throughput at a latency within the bound, between the loads too; all are logarithms."""
    between = np.linspace(loads[0], loads[-1], BETWEEN)
    meets = np.interp(between, loads, latency) <= math.log(bound_s)
    return float(np.exp(np.interp(between, loads, throughput)[meets]).max(initial=0.0))


def best_first(found: Sequence[Sample]) -> list[Sample]:
    return sorted(found, key=lambda sample: sample.throughput, reverse=True)
