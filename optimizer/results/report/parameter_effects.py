"""Effects of each parameter on the objective within the SLA: importance, and one step off the recommendation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from objectives.metrics import Metric
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate, FieldValue, short_path
from optimizer.core.trial import Point
from optimizer.options.run_options import SIMULATED_OBJECTIVES
from optimizer.results.finished_run import FinishedRun
from optimizer.results.recommendation import best_load

Array = npt.NDArray[np.float64]

MIN_TRIALS = 8  # with fewer, an importance is mostly chance
ENOUGH_TRIALS = 1000  # more do not change the importance, but take seconds
TOP_TRIALS, TOP_SHARE = 5, 0.1  # best trials whose parameter values are compared with those of all
LOADS, BETWEEN = 12, 400  # loads at which a neighbour is simulated, and to which the result is interpolated
MAX_TRIALS = 8  # best trials used for forecasts of their neighbours


@dataclass(frozen=True, slots=True)
class ParameterSample:
    """A measured trial: its best point, whether that ``meets`` the SLA, and the value of each parameter.

    ``objective`` is the first objective of the run.
    """

    point: Point
    objective: Metric
    meets: bool
    values: Mapping[str, FieldValue]

    @property
    def value(self) -> float | None:
        """Return the objective within the SLA; None if no load meets it, or if it is unknown."""
        return self.objective.value(self.point.measurement) if self.meets else None

    @property
    def cost(self) -> float:
        """Return the objective as a cost, of which less is better; infinite if ``value`` is None."""
        cost = self.objective.cost(self.point.measurement) if self.meets else None
        return math.inf if cost is None else cost


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The recommendation with one parameter changed by one step.

    ``measured`` and ``expected`` say by which share the objective is worse: 0.04 is 4 % less throughput, or a latency
    that is 4 % higher. None is unknown.
    """

    parameter: str
    chosen: FieldValue
    other: FieldValue
    candidate: Candidate
    measured: float | None
    expected: float | None

    @property
    def cost(self) -> float | None:
        """Return the measured share if there is one, otherwise the expected share."""
        return self.expected if self.measured is None else self.measured


def label(parameter: str) -> str:
    """Return the name of ``parameter`` in config.pbtxt."""
    names = {
        "max_queue_delay_us": "max_queue_delay_microseconds",
        "preferred_batch_sizes": "preferred_batch_size",
        "instance_count": "instance_group count",
    }
    return names.get(parameter) or (parameter if parameter == "max_batch_size" else short_path(parameter))


def parameter_samples(run: FinishedRun) -> list[ParameterSample]:
    """Return the samples of all measured trials of the space, each at its best load."""
    samples, space, objective = list[ParameterSample](), run.problem.space, run.problem.objectives[0]
    for trial in run.trials:
        best, values = best_load(trial, run.problem), space.parameter_values(space.canonical(trial.candidate))
        if best.point is not None and values is not None:
            samples.append(ParameterSample(best.point, objective, best.meets_sla, values))
    return samples


def varied(problem: Problem) -> dict[str, tuple[FieldValue, ...]]:
    """Return the parameters with more than one choice."""
    return {name: choices for name, choices in problem.space.parameters().items() if len(choices) > 1}


def importance(problem: Problem, samples: Sequence[ParameterSample]) -> dict[str, float]:
    """Return the importance of each parameter, largest first, with sum 1; empty if trials are too few or equal.

    This is Optuna's PED-ANOVA: how much the values in the best tenth, at least five trials, differ from those of all
    trials. It depends on ranks only, so configurations that miss the SLA only count as not being among the best.
    """
    if len(samples) < MIN_TRIALS or len({sample.cost for sample in samples}) < 2:
        return {}
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from optimizer.search.optuna_encoding import RANK, Encoding

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    encoding = Encoding(problem.space)
    known = [sample.cost for sample in samples if sample.cost < math.inf]
    worst = max(known) + 1
    study = optuna.create_study(direction="minimize")
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=encoding.encode(sample.point.candidate) or {},
                distributions=encoding.distributions,
                value=min(sample.cost, worst),
            )
            for sample in samples[:: math.ceil(len(samples) / ENOUGH_TRIALS)]
        ]
    )
    top = min(0.5, len(known) / len(samples), max(TOP_SHARE, TOP_TRIALS / len(samples)))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=top, evaluate_on_local=True)
    importances = get_param_importances(study, evaluator=evaluator)
    shares = {name.removesuffix(RANK): share for name, share in importances.items()}
    return {name: share for name, share in shares.items() if name in varied(problem) and math.isfinite(share)}


def one_step_off(run: FinishedRun, samples: Sequence[ParameterSample]) -> list[Neighbour]:
    """Return the recommendation with one parameter at the next lower or higher choice, in the order of the space.

    Candidates that behave like the recommendation are left out. The result is empty without a recommendation, or if
    it lies outside of the space.
    """
    best, space = run.recommended, run.problem.space
    values = space.parameter_values(space.canonical(best.candidate)) if best else None
    if best is None or values is None:
        return []
    steps: list[Neighbour] = []
    for name, choices in varied(run.problem).items():
        index = choices.index(values[name])
        for other in choices[max(index - 1, 0) : index] + choices[index + 1 : index + 2]:
            candidate = space.candidate({**values, name: other})
            if candidate is not None and candidate != space.canonical(best.candidate):
                steps.append(Neighbour(name, values[name], other, candidate, measured=None, expected=None))
    objective = run.problem.objectives[0]
    searched = {
        space.canonical(sample.point.candidate): sample.value for sample in samples if sample.value is not None
    }
    # both values are from the search, so that its bias cancels
    recommended_value = searched.get(space.canonical(best.candidate))
    expected = _expected_costs(run, [step.candidate for step in steps], samples)
    measured: dict[Candidate, float] = {}
    if recommended_value and objective.has_ratio:
        sign = 1 if objective.better == "higher" else -1
        measured = {candidate: sign * (1 - value / recommended_value) for candidate, value in searched.items()}
    return [
        replace(step, measured=measured.get(step.candidate), expected=expected.get(step.candidate)) for step in steps
    ]


def _expected_costs(
    run: FinishedRun, neighbours: Sequence[Candidate], samples: Sequence[ParameterSample]
) -> dict[Candidate, float]:
    """Return the expected cost of each candidate at its best load within the binding latency bound.

    The forecast is that of the simulation-guided search after the best trials. The result is empty if no load of the
    recommendation is expected to meet the bound, or the simulator does not apply to the model or the objective.
    """
    from optimizer.search.candidate_selector import fit_surrogate

    best = run.recommended
    is_simulated = run.problem.is_simulated and run.problem.objectives[0].name in SIMULATED_OBJECTIVES
    if best is None or not neighbours or not is_simulated:
        return {}
    best_samples = sorted(samples, key=lambda sample: sample.cost)[:MAX_TRIALS]
    ranked = {sample.point.trial for sample in best_samples} | {best.trial}
    problem, trials = run.problem, [trial for trial in run.trials if trial.number in ranked]
    in_flight = (
        best.throughput_infer_per_sec / best.load.request_batch_size * (best.measurement.latency_avg_ms or 0) / 1e3
    )
    max_load = 2 * max(best.load.concurrency, round(in_flight), 1)
    loads = sorted({round(load) for load in np.geomspace(1, max_load, LOADS).tolist()})
    candidates = [problem.space.canonical(best.candidate), *neighbours]
    try:
        configuration_loads = [(candidate, load) for candidate in candidates for load in loads]
        surrogate = fit_surrogate(problem, trials)
        log_forecasts = np.log(surrogate.forecast(configuration_loads))
    except ValueError:  # the bounded latency was not measured
        return {}
    bound_s = float(surrogate.bounds_s[0])  # the binding latency was forecast
    curves = zip(*log_forecasts.reshape(2, -1, len(loads)), strict=True)
    within = [_best_within(np.log(loads), throughput, latency, bound_s) for throughput, latency in curves]
    if not within[0]:
        return {}
    return {neighbour: 1 - value / within[0] for neighbour, value in zip(neighbours, within[1:], strict=True)}


def _best_within(loads: Array, throughput: Array, latency: Array, bound_s: float) -> float:
    """Return the largest throughput within the bound, interpolated between the loads; all arrays are logarithms."""
    between = np.linspace(loads[0], loads[-1], BETWEEN)
    meets = np.interp(between, loads, latency) <= math.log(bound_s)
    return float(np.exp(np.interp(between, loads, throughput)[meets]).max(initial=0.0))
