"""What each parameter does to the throughput within the bounds: importance, slices, and one step off the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.metrics import METRICS
from optimizer.problem import Problem
from optimizer.report import summary
from optimizer.space import Value
from optimizer.store.finished import FinishedRun
from optimizer.trial import Candidate, Point, short_path

FEWEST_TRIALS = 8  # for an importance: of fewer, chance decides
TOP_TRIALS, TOP_SHARE = 5, 0.1  # whose parameters are compared with those of all
SIMULATED_LOADS = 16  # around the best one's own
MOST_POINTS = 60  # that the simulation is fitted to: the best ones tell most about what is near them


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
    simulated: float | None

    @property
    def cost(self) -> float | None:
        return self.simulated if self.measured is None else self.measured


def label(parameter: str) -> str:
    """As Triton writes it."""
    own = {
        "max_queue_delay_us": "max_queue_delay_microseconds",
        "preferred_batch_sizes": "preferred_batch_size",
        "instance_count": "instance_group count",
    }
    return own.get(parameter) or (parameter if parameter == "max_batch_size" else short_path(parameter))


def samples(run: FinishedRun) -> list[Sample]:
    """Of every trial in the space that was measured."""
    found = []
    for trial in run.trials:
        point, met = summary.best_load(trial, run.problem)
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
    if len(found) < FEWEST_TRIALS or len({sample.throughput for sample in found}) == 1:
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
            for sample in found
        ]
    )
    top = min(0.5, max(TOP_SHARE, TOP_TRIALS / len(found)))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=top, evaluate_on_local=True)
    told = get_param_importances(study, evaluator=evaluator)
    shares = {name.removesuffix(RANK): share for name, share in told.items()}
    return {name: share for name, share in shares.items() if name in varied(problem)}


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
    simulated = _simulated_costs(run, best, [candidate for *_, candidate in steps], found)
    return [
        Neighbour(
            *step,
            measured=1 - searched[step[3]] / own if own and step[3] in searched else None,
            simulated=simulated.get(step[3]),
        )
        for step in steps
    ]


def _simulated_costs(
    run: FinishedRun, best: Point, others: Sequence[Candidate], found: Sequence[Sample]
) -> dict[Candidate, float]:
    """By the simulation of the batcher, fitted to the best trials and set right at the recommendation, each at its
    best load within the latency bound."""
    from optimizer.search.figures import is_known, judged_latency, log_simulated
    from optimizer.search.in_flight import in_flight
    from optimizer.search.server_model import fit

    ranked = sorted(found, key=lambda sample: -sample.throughput)
    points = [sample.point for sample in ranked[:MOST_POINTS]]
    if run.problem.open_loop:  # the simulation's loop is closed
        (best, *points) = in_flight([best, *points], run.problem)
    metric = judged_latency(run.problem, points)
    points = [point for point in points if is_known(point, metric)]
    if not points or not others or not is_known(best, metric):
        return {}
    model = fit(points, run.problem, metric)
    steps = np.geomspace(0.4, 1.6, SIMULATED_LOADS) * best.load.concurrency
    loads = sorted({max(1, round(step)) for step in steps.tolist()} | {best.load.concurrency})
    cells = [(candidate, load) for candidate in (best.candidate, *others) for load in loads]
    figures = np.exp([log_simulated(one, metric) for one in model.simulate(cells)]).reshape(-1, len(loads), 2)
    measured_s = (METRICS[metric].value(best.measurement) or 0.0) / 1e3
    bound_s = min((c.bound / 1e3 for c in run.problem.constraints if c.metric == metric), default=measured_s)
    # where the recommendation was measured the simulation is right by definition
    within = figures[:, :, 1] * measured_s / figures[0, loads.index(best.load.concurrency), 1] <= max(
        bound_s, measured_s
    )
    throughput = np.where(within, figures[:, :, 0], 0.0).max(axis=1)
    return {one: float(1 - value / throughput[0]) for one, value in zip(others, throughput[1:], strict=True)}
