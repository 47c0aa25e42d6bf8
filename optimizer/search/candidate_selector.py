"""Selection of the next candidate to deploy by the expected improvement of the surrogate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Forecast
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.search.acquisition import TrialCosts
from optimizer.search.gaussian_process import single_threaded
from optimizer.search.simulated_posterior import SurrogateInputs, is_feasible
from optimizer.search.simulation_error import distances, setting_features
from optimizer.search.surrogate import Surrogate
from optimizer.search.transfer import SourceMachine, TransferredStudy
from optimizer.simulator.fitted_parameters import ExecutionSettings, execution_settings
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    ShareWithinBounds,
    as_closed_loop,
    is_complete,
    predicted_latencies,
    six_digits,
)
from optimizer.simulator.speed_correction import SpeedCorrection, fit_speed_correction
from optimizer.store.trials_reader import MAX_MS

LOADS = 9  # concurrencies at which each candidate is predicted
FINE_LOADS, FINALISTS = 12, 4  # concurrencies around the best one, for the most promising candidates
# The most promising candidates are predicted with all samples of the server model. They are selected with the first
# of these samples, at every second load.
POOL, SCREENING_SAMPLES = 24, 3
SHORTLIST = 160  # candidates that are tried first after the whole space has been ranked
RANKING_DEPLOYMENTS = 2  # the ranking uses the first ones only: more of them hardly change the order within a group
MAX_TRANSFERRED = 40  # candidates of the shortlist that come from another study
STALE_SHARE = 1 / 8  # share of the running trials that may have ended since the surrogate was fitted
FORECAST_LEVELS = (0.5, 0.025, 0.975)  # the median and the ends of the 95 % prediction interval
UNLIKELY = 0.005  # probability below which nothing that is left is expected to meet the bound


@dataclass(frozen=True, slots=True)
class Decision:
    """The selected ``candidate``, with the concurrency ``load`` at which it is predicted to be best.

    ``gain`` is the expected improvement of the best feasible throughput, as a share of it, in the time of an average
    trial. While nothing is feasible it is infinite, or 0 if no remaining candidate is likely to be feasible.
    ``noise`` is that of the measurements, relative to the prior.
    """

    candidate: Candidate
    load: int
    gain: float
    noise: float = 1.0


class CandidateSelector:
    """Selects candidates of a space.

    Trials are passed to each call. The shortlist is kept between calls, and so is the surrogate while there are few
    new trials, because several workers may call in the meantime.
    """

    def __init__(self, problem: Problem, seed: int = 0, transferred: TransferredStudy | None = None) -> None:
        self._problem = problem
        self._seed = seed
        self._transferred = transferred
        self._candidates = problem.space.candidates()
        self._shortlist: list[Candidate] = []
        self._surrogate: Surrogate | None = None
        # the loads that were screened with this surrogate: predictions for the same list are cached
        self._screened_loads: list[ConfigurationLoad] = []
        self._sources: dict[str, SourceMachine | None] = {}  # keys are the binding latency metrics

    @single_threaded
    def decide(
        self,
        trials: Sequence[Trial],
        tried: Set[Candidate],
        running: Sequence[ConfigurationLoad] = (),
        repeatable: Set[Candidate] = frozenset(),
    ) -> Decision | None:
        """Return the most promising candidate that is not in ``tried``, or None if there is none.

        Once a measurement meets the bounds it may be one of ``repeatable``, because deployments differ: another one
        may show that a candidate does meet the bound at a measured load. Loads below the measured ones are not
        considered for it, because the load search of its trial did not find them worth a measurement.

        The loads of ``running`` are being measured and count as measured with their predictions. Before the first
        measurement the best candidate of a transferred study is selected, or else the first one of the space, or the
        one that differs most from those running.
        """
        remaining = [candidate for candidate in self._candidates if candidate not in tried]
        inputs, measured = self._inputs(trials)
        if any(is_feasible(point, self._problem) for point in measured):
            remaining += [candidate for candidate in self._candidates if candidate in repeatable]
        if not remaining:
            return None
        if not measured:
            return self._first_decision(remaining, tried, running)
        fitted = self._fit(inputs, measured, len(running))
        surrogate = fitted.with_running([*running, *fitted.missing_loads(measured)])
        lowest = self._lowest_concurrencies(measured)
        loads = _at_least(self._promising_loads(fitted, surrogate, remaining), lowest)
        if not loads:
            return None
        gains = surrogate.improvements(loads)
        finer = _at_least(self._finer_loads(loads, gains), lowest)
        gains, loads = np.concatenate([gains, surrogate.improvements(finer)]), loads + finer
        costs = TrialCosts(trials)
        gains /= np.array([costs.relative(candidate) for candidate, _ in loads])
        best = int(np.argmax(gains))
        candidate, concurrency = loads[best]
        if surrogate.has_feasible:
            return Decision(candidate, concurrency, float(gains[best]), surrogate.noise_scale)
        is_likely = surrogate.probability_within_bounds(loads).max() > UNLIKELY
        return Decision(candidate, concurrency, math.inf if is_likely else 0.0)

    def _first_decision(
        self, remaining: Sequence[Candidate], tried: Set[Candidate], running: Sequence[ConfigurationLoad]
    ) -> Decision:
        """Return the decision before the first measurement."""
        transferred = self._transferred.best(self._problem) if self._transferred else []
        default = self._most_different(running, remaining) if running else remaining[0]
        candidate = next((candidate for candidate in transferred if candidate not in tried), default)
        return Decision(candidate, self._concurrencies(candidate)[0], math.inf)

    def _promising_loads(
        self, fitted: Surrogate, surrogate: Surrogate, remaining: Sequence[Candidate]
    ) -> list[ConfigurationLoad]:
        """Return the remaining candidates at their loads; only the POOL most promising ones if there are many."""
        loads = self._at_loads(self._shortlisted(fitted, remaining))
        if len(loads) <= POOL * LOADS:
            return loads
        best = _best_concurrencies(*self._screen(fitted, surrogate, remaining))
        return self._at_loads(list(best)[:POOL])

    def _finer_loads(self, loads: Sequence[ConfigurationLoad], gains: FloatArray) -> list[ConfigurationLoad]:
        """Return further loads around the best one of each of the FINALISTS most promising candidates."""
        finalists = list(_best_concurrencies(loads, gains).items())[:FINALISTS]
        return [(candidate, n) for candidate, best in finalists for n in self._concurrencies_around(candidate, best)]

    @property
    def is_fitted(self) -> bool:
        """Whether there is a surrogate."""
        return self._surrogate is not None

    @single_threaded
    def fit(self, trials: Sequence[Trial]) -> None:
        """Fit the surrogate to ``trials`` if something was measured."""
        inputs, measured = self._inputs(trials)
        if measured:
            self._fit(inputs, measured, 0)

    @single_threaded
    def forecast(self, candidate: Candidate, concurrency: int, speed_probe_ms: float | None) -> Forecast | None:
        """Return the forecast of the surrogate as it was last fitted; None without one.

        ``speed_probe_ms`` is the speed probe of the deployment, None if unknown.
        """
        if self._surrogate is None:
            return None
        load = self._problem.space.canonical(candidate), concurrency
        throughputs, latencies_s = self._surrogate.measurement_quantiles([load], FORECAST_LEVELS, speed_probe_ms)
        throughput, throughput_low, throughput_high = map(six_digits, throughputs[:, 0].tolist())
        latency_ms, low_ms, high_ms = map(six_digits, (1e3 * latencies_s[:, 0]).tolist())
        if not high_ms <= MAX_MS:
            return None  # a trials table takes no larger latency
        latency = self._surrogate.latency
        return Forecast(throughput, throughput_low, throughput_high, latency_ms, low_ms, high_ms, latency)

    def _inputs(self, trials: Sequence[Trial]) -> tuple[SurrogateInputs, list[Point]]:
        """Return the inputs of a surrogate after ``trials``, and the points that it can learn from."""
        speed = fit_speed_correction(trials, self._problem)
        latencies, measured = _complete_points(self._problem, trials, speed)
        source = self._source(latencies) if measured and self._problem.is_simulated else None
        return SurrogateInputs(self._problem, tuple(trials), latencies, self._seed, source, speed), measured

    def _fit(self, inputs: SurrogateInputs, measured: Sequence[Point], running: int) -> Surrogate:
        """Return the surrogate, fitted again if many trials have ended since."""
        if self._surrogate is None or self._surrogate.missing_trials(inputs) > (running - 1) * STALE_SHARE:
            self._surrogate, self._screened_loads = Surrogate(inputs, measured), []
        return self._surrogate

    def _screen(
        self, fitted: Surrogate, surrogate: Surrogate, remaining: Sequence[Candidate]
    ) -> tuple[list[ConfigurationLoad], FloatArray]:
        """Return the candidates of ``_shortlisted`` at every second load, and their improvements.

        While others run, the same list is evaluated again and again, because its predictions are cached.
        """
        shortlisted = self._shortlisted(fitted, remaining)
        if surrogate is fitted:
            loads = self._at_loads(shortlisted, every=2)
            return loads, fitted.improvements(loads, SCREENING_SAMPLES)
        untried = set(remaining)
        if not any(candidate in untried for candidate, _ in self._screened_loads):
            self._screened_loads = self._at_loads(shortlisted, every=2)
        gains = surrogate.improvements(self._screened_loads, SCREENING_SAMPLES)
        indices = [i for i, (candidate, _) in enumerate(self._screened_loads) if candidate in untried]
        return [self._screened_loads[i] for i in indices], gains[indices]

    def _at_loads(self, candidates: Sequence[Candidate], every: int = 1) -> list[ConfigurationLoad]:
        """Return the candidates at their loads, or at ``every`` second, third, ... of them."""
        return [(candidate, n) for candidate in candidates for n in self._concurrencies(candidate)[::every]]

    def _most_different(self, running: Sequence[ConfigurationLoad], remaining: Sequence[Candidate]) -> Candidate:
        """Return the candidate of ``remaining`` with the largest distance from all ``running`` ones.

        This is a maximin design (Johnson, Moore and Ylvisaker 1990).
        """
        space = self._problem.space
        occupied = [setting_features(space, *load) for load in running]
        possible = [setting_features(space, candidate, self._concurrencies(candidate)[0]) for candidate in remaining]
        return remaining[int(np.argmax(distances(np.array(possible), np.array(occupied)).min(axis=1)))]

    def _source(self, latencies: tuple[str, ...]) -> SourceMachine | None:
        if self._transferred is None:
            return None
        latency = latencies[0]
        if latency not in self._sources:
            self._sources[latency] = self._transferred.machine(self._problem, latencies, self._seed)
        return self._sources[latency]

    def _shortlisted(self, surrogate: Surrogate, remaining: Sequence[Candidate]) -> list[Candidate]:
        """Return the remaining candidates of the shortlist, or all remaining ones when it is used up."""
        if not self._shortlist:
            self._shortlist = self._rank(surrogate.after_first(RANKING_DEPLOYMENTS))
        untried = set(remaining)
        return [candidate for candidate in self._shortlist if candidate in untried] or list(remaining)

    def _rank(self, surrogate: Surrogate) -> list[Candidate]:
        """Return the shortlist: the best candidates of each execution setting in the simulation.

        Execution settings take turns, because the simulation may be wrong about one of them as a whole.
        """
        if len(self._candidates) <= SHORTLIST:
            return list(self._candidates)
        scores = self._scores(surrogate)
        best_first = sorted(scores, key=lambda candidate: -scores[candidate])
        counts = Counter[ExecutionSettings]()
        ranks: dict[Candidate, int] = {}  # within the candidates of the same execution settings
        for candidate in best_first:
            settings = execution_settings(candidate)
            ranks[candidate] = counts[settings]
            counts[settings] += 1
        in_turns = sorted(best_first, key=lambda candidate: ranks[candidate])
        transferred = self._transferred.best(self._problem)[:MAX_TRANSFERRED] if self._transferred else []
        return list(dict.fromkeys([*transferred, *in_turns]))[:SHORTLIST]

    def _scores(self, surrogate: Surrogate) -> dict[Candidate, float]:
        """Return the highest simulated throughput, or goodput, of each candidate at any load.

        Beyond a latency bound it is reduced by the cube of bound / latency: the simulation may be wrong about a
        candidate that misses the bound by little.
        """
        loads = self._at_loads(self._candidates)
        simulated = surrogate.simulated(loads)
        log_values = simulated[:, 0]
        if share_within_bounds := ShareWithinBounds.from_problem(self._problem, surrogate.latencies):
            log_values = log_values + share_within_bounds.logarithm(simulated[:, 1:])
        shares = np.exp((np.log(surrogate.bounds_s) - simulated[:, 1:]).min(axis=1))
        scores: dict[Candidate, float] = {}
        for (candidate, _), value, share in zip(loads, np.exp(log_values).tolist(), shares.tolist(), strict=True):
            score = value * min(1.0, share) ** 3
            scores[candidate] = max(score, scores.get(candidate, 0.0))
        return scores

    def _concurrencies(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the concurrencies at which ``candidate`` is predicted."""
        possible = self._problem.space.allowed_concurrencies(candidate)
        if possible is not None:
            return possible or (1,)  # a recorded candidate without loads: its deployment failed
        steps = np.geomspace(1, self._problem.max_concurrency, LOADS)
        return tuple(dict.fromkeys(round(step) for step in steps.tolist()))

    def _lowest_concurrencies(self, measured: Sequence[Point]) -> dict[Candidate, int]:
        """Return the lowest measured concurrency of each candidate."""
        lowest: dict[Candidate, int] = {}
        for point in measured:
            candidate, concurrency = self._problem.space.canonical(point.candidate), point.load.concurrency
            lowest[candidate] = min(concurrency, lowest.get(candidate, concurrency))
        return lowest

    def _concurrencies_around(self, candidate: Candidate, concurrency: int) -> list[int]:
        """Return other concurrencies around ``concurrency`` on a finer grid; none if only some can be measured."""
        if self._problem.space.allowed_concurrencies(candidate) is not None:
            return []
        grid = self._concurrencies(candidate)
        index = grid.index(concurrency)
        low, high = grid[max(index - 1, 0)], grid[min(index + 1, len(grid) - 1)]
        return sorted({round(fine) for fine in np.linspace(low, high, FINE_LOADS).tolist()} - {concurrency})


def _at_least(loads: Sequence[ConfigurationLoad], lowest: Mapping[Candidate, int]) -> list[ConfigurationLoad]:
    """Return the loads with at least the ``lowest`` concurrency of their candidate, if it has one."""
    return [(candidate, concurrency) for candidate, concurrency in loads if concurrency >= lowest.get(candidate, 1)]


def _best_concurrencies(loads: Sequence[ConfigurationLoad], gains: FloatArray) -> dict[Candidate, int]:
    """Return the concurrency with the largest gain of each candidate, the most promising candidate first."""
    best: dict[Candidate, int] = {}
    for index in np.argsort(-gains):
        best.setdefault(*loads[index])
    return best


@single_threaded
def fit_surrogate(problem: Problem, trials: Sequence[Trial], seed: int = 0) -> Surrogate:
    """Return the surrogate after ``trials``, without a warm start, at the median speed of the machine during them.

    Raises:
        ValueError: No measurement has both throughput and latency.
    """
    speed = fit_speed_correction(trials, problem)
    latencies, measured = _complete_points(problem, trials, speed)
    if not measured:
        raise ValueError("nothing was measured")
    return Surrogate(SurrogateInputs(problem, trials, latencies, seed, None, speed), measured)


def _complete_points(
    problem: Problem, trials: Sequence[Trial], speed: SpeedCorrection
) -> tuple[tuple[str, ...], list[Point]]:
    """Return the predicted latency metrics and the points that can be learned from, as closed loops at one speed."""
    points = as_closed_loop(speed.correct_points(latest_points(trials)), problem)
    latencies = predicted_latencies(problem, points)
    return latencies, [point for point in points if is_complete(point, *latencies)]
