"""A model of a server with continuous batching: the simulator with parameters that are fitted to a few measurements.

Its prior covers models on CPUs and GPUs. Busy instances and threads slow each other down as in
``fitted_parameters.Contention``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import METRICS
from optimizer.config.problem import ModelKind, Problem
from optimizer.core.candidate import MODEL_JSON_PREFIX, Candidate, FieldValue
from optimizer.core.trial import Point
from optimizer.simulator.compilation import SIMULATION_THREADS
from optimizer.simulator.continuous_batching import (
    LATENCY_COLUMNS,
    TOKENS_PER_S,
    ContinuousBatchingPerformance,
    ContinuousBatchingScenario,
    PassTimes,
    RequestLengths,
    estimated_latency,
    simulate_continuous_batching,
    simulated_rows,
)
from optimizer.simulator.fitted_parameters import (
    INTRA_OP_THREAD_COUNT,
    Contention,
    execution_settings,
    relative_duration,
)
from optimizer.simulator.normal_prior import fit_vector, point_weights, sample_vectors
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    ModelErrors,
    as_tail_ratios,
    configuration_loads,
    log_measurements,
)
from optimizer.simulator.scenario import concurrency_of_process

ERRORS = ModelErrors(throughput=0.15, tail=0.2)  # errors of forecasts of tinygpt, without the largest ones
# Medians and standard deviations of the prior: the log of the time of a pass of one sequence, relative to a guess;
# the log-odds of the share of it that is fixed; the exponent of the running sequences; the log of the time of a token
# of a prompt, relative to that of a sequence; the log of the time outside of the instance, relative to a pass; the
# log of the slowdown by each further instance; the exponents of oversubscription and of threads in ``Contention``.
MEDIANS = np.array([-0.3, 0.0, 0.85, -1.7, 0.0, math.log(0.07), 1.5, 0.5])
DEVIATIONS = np.array([0.5, 0.7, 0.12, 0.6, 0.7, 0.8, 0.3, 0.2])
FIELD_DEVIATION = 0.3  # the same of the log of the speed with another choice of any other field
# log of the ratio of a measured latency to that of the simulation, whose passes all take their mean time
TAILS: Mapping[str, float] = {"avg": 0.0, "p50": 0.0, "p90": 0.05, "p95": 0.1, "p99": 0.15}
TAIL_DEVIATION = 0.1
MAX_DISTANCE = 4.0  # standard deviations of the prior from its median
DIFFERENCE = 0.4  # standard deviations of the prior, larger in effect than the random error of a simulation
MAX_EVALUATIONS = 20  # steps of the fit
SEQUENCES = "max_num_seqs"  # key of vLLM's model.json: the most running sequences
DEFAULT_SEQUENCES = 256  # vLLM's default of it
SEVERAL_TOKENS = 0.05  # share of the outputs that need more than one token


@dataclass(frozen=True, eq=False)
class ContinuousBatchingModel:
    """The simulator with the parameters ``standardized``, in standard deviations of the prior from its medians.

    Attributes:
        problem: The search problem.
        latencies: The metrics that the model is fitted to.
        lengths: Lengths of the simulated requests.
        pass_s: Scale of the time of a pass.
        standardized: The parameters.
        covariance_root: A square root of the posterior covariance of ``standardized``.
    """

    name: ClassVar[str] = "simulator of continuous batching"
    errors: ClassVar[ModelErrors] = ERRORS

    problem: Problem
    latencies: tuple[str, ...]
    lengths: RequestLengths
    pass_s: float
    standardized: FloatArray
    covariance_root: FloatArray
    seed: int = 0

    def simulate(self, loads: Sequence[ConfigurationLoad], threads: int = 1) -> list[ContinuousBatchingPerformance]:
        """Return the performance of each (candidate, concurrency).

        Of several server processes one is simulated, with its share of the load.
        """
        results = simulate_continuous_batching(self._scenarios(loads, self.standardized), self.lengths, threads)
        tails = dict(zip(self.latencies, np.exp(self._log_tails(self.standardized)).tolist(), strict=True))
        return [
            replace(
                result,
                throughput_infer_per_sec=servers * result.throughput_infer_per_sec,
                tokens_per_s=servers * result.tokens_per_s,
                factors=tails,
            )
            for result, servers in zip(results, _busy_processes(loads), strict=True)
        ]

    def fitted(self, points: Sequence[Point]) -> ContinuousBatchingModel:
        """Return the model that is closest to ``points`` and the prior, by a robust loss."""
        loads = configuration_loads(points)
        measured = as_tail_ratios(log_measurements(points, self.latencies), loads, 1)
        weights = point_weights(loads)

        def residuals(vectors: FloatArray) -> FloatArray:
            """Return the residuals [vectors, residuals]."""
            errors = [(as_tail_ratios(logs, loads, 1) - measured) * weights for logs in self._logs(loads, vectors)]
            return np.concatenate([np.reshape(errors, (len(vectors), -1)), vectors], axis=1)

        def jacobian(vector: FloatArray) -> FloatArray:
            steps = DIFFERENCE * np.eye(len(vector))
            before, after = np.split(residuals(np.concatenate([vector - steps, vector + steps])), 2)
            return np.asarray((after - before).T / (2 * DIFFERENCE))

        standardized, covariance_root = fit_vector(
            lambda vector: residuals(vector[None])[0],
            len(self.standardized),
            jac=jacobian,
            bounds=(-MAX_DISTANCE, MAX_DISTANCE),
            ftol=1e-3,
            xtol=1e-2,
            max_nfev=MAX_EVALUATIONS,
        )
        return replace(self, standardized=standardized, covariance_root=covariance_root)

    def samples(self, count: int) -> list[ContinuousBatchingModel]:
        """Return ``count`` samples of the posterior (Laplace's approximation)."""
        vectors = sample_vectors(self.standardized, self.covariance_root, count, self.seed)
        return [replace(self, standardized=np.clip(vector, -MAX_DISTANCE, MAX_DISTANCE)) for vector in vectors]

    def _logs(self, loads: Sequence[ConfigurationLoad], vectors: FloatArray) -> FloatArray:
        """Return log requests/s and log latencies [vectors, loads, 1 + latencies]."""
        scenarios = [scenario for vector in vectors for scenario in self._scenarios(loads, vector)]
        rows = simulated_rows(scenarios, self.lengths, SIMULATION_THREADS)
        latencies = [
            [estimated_latency(row, metric) for metric in self.latencies] for row in rows[:, LATENCY_COLUMNS]
        ]
        logs = np.log(np.column_stack([rows[:, TOKENS_PER_S], latencies]))
        logs[:, 0] -= math.log(self.lengths.outputs.mean())
        logs = logs.reshape(len(vectors), len(loads), -1)
        logs[:, :, 0] += np.log(_busy_processes(loads))
        logs[:, :, 1:] += np.array([self._log_tails(vector) for vector in vectors])[:, None]
        return np.asarray(logs)

    def _log_tails(self, vector: FloatArray) -> FloatArray:
        """Return the log factors on the simulated ``latencies``."""
        reported = [METRICS[METRICS[metric].nearest_reported] for metric in self.latencies]
        medians = np.array([TAILS[definition.statistic] for definition in reported])
        return np.asarray(medians + TAIL_DEVIATION * vector[len(vector) - len(self.latencies) :])

    def _scenarios(self, loads: Sequence[ConfigurationLoad], vector: FloatArray) -> list[ContinuousBatchingScenario]:
        values = MEDIANS + DEVIATIONS * vector[: len(MEDIANS)]
        scale, odds, power, prompt, outside, slowdown, oversubscription, speedup = values.tolist()
        pass_s, fixed = self.pass_s * math.exp(scale), 1 / (1 + math.exp(-odds))
        sequence_s = pass_s * (1 - fixed)
        times = PassTimes(
            fixed_s=pass_s * fixed,
            sequence_s=sequence_s,
            prompt_s=sequence_s * math.exp(prompt),
            round_trip_s=pass_s * math.exp(outside),
            power=max(power, 0.0),
        )
        contention = Contention(
            math.exp(slowdown), oversubscription, speedup, slowdown_if_cores_unknown=math.exp(slowdown)
        )
        choices = _further_choices(self.problem)
        effects = FIELD_DEVIATION * vector[len(MEDIANS) : len(MEDIANS) + len(choices)]
        speeds = dict(zip(choices, effects.tolist(), strict=True))

        @functools.cache
        def factors(candidate: Candidate) -> tuple[float, ...]:
            settings = execution_settings(candidate)
            slowness = math.exp(-sum(speeds.get(field, 0.0) for field in candidate.fields))
            busy = range(1, candidate.instances + 1)
            return tuple(slowness * relative_duration(settings, k, self.problem, contention) for k in busy)

        return [
            ContinuousBatchingScenario(
                slots(candidate),
                concurrency_of_process(candidate, concurrency),
                times,
                factors(candidate),
                candidate.max_queue_delay_us / 1e6,
                min(candidate.preferred_batch_sizes, default=max(1, candidate.max_batch_size)),
            )
            for candidate, concurrency in loads
        ]


def _busy_processes(loads: Sequence[ConfigurationLoad]) -> list[float]:
    """Return how many processes with the load of the fullest one serve each of ``loads``."""
    return [n / concurrency_of_process(candidate, n) for candidate, n in loads]


def applies(problem: Problem) -> bool:
    """Return whether the simulator describes the model of ``problem``.

    It streams the tokens of one prompt a request, and the lengths and the slots of an instance are known. The slots
    are ``max_batch_size``, or vLLM's ``max_num_seqs`` if the search varies it. At least SEVERAL_TOKENS of the outputs
    have more than one token.
    """
    if problem.kind is not ModelKind.STREAMING or problem.tokens is None or problem.request_batch_size != 1:
        return False
    sequences = problem.space.fields.get(MODEL_JSON_PREFIX + SEQUENCES, ())
    has_slots = all(map(_is_count, sequences)) if sequences else min(problem.space.max_batch_size) > 0
    return has_slots and problem.tokens.output.share_above(1) >= SEVERAL_TOKENS


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def slots(candidate: Candidate) -> int:
    """Return the most running sequences of an instance."""
    sequences = candidate.model_json.get(SEQUENCES)
    if _is_count(sequences):
        return sequences
    return candidate.max_batch_size or DEFAULT_SEQUENCES


def fit(
    points: Sequence[Point], problem: Problem, latencies: Sequence[str], seed: int = 0
) -> ContinuousBatchingModel:
    """Return the model that is closest to ``points``, which are complete for the metrics ``latencies``.

    It has to apply to ``problem``.

    Raises:
        ValueError: ``points`` is empty.
    """
    if not points:
        raise ValueError("no measured points to fit the model to")
    assert problem.tokens is not None, "the model applies"
    lengths = RequestLengths.from_tokens(problem.tokens, seed)
    requests_s = [
        point.load.concurrency / (point.measurement.throughput_infer_per_sec or math.inf) for point in points
    ]
    pass_s = min(requests_s) / float(lengths.outputs.mean())
    size = len(MEDIANS) + len(_further_choices(problem)) + len(latencies)
    unfitted = ContinuousBatchingModel(problem, tuple(latencies), lengths, pass_s, np.zeros(size), np.eye(size), seed)
    return unfitted.fitted(points)


def _further_choices(problem: Problem) -> list[tuple[str, FieldValue]]:
    """Return all choices but the first one of each field whose effect on the speed is unknown."""
    known = (INTRA_OP_THREAD_COUNT, SEQUENCES)
    fields = [(path, values) for path, values in problem.space.fields.items() if not any(n in path for n in known)]
    return [(path, value) for path, values in fields for value in values[1:]]
