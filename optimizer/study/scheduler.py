"""Decide which trial of a study runs next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from objectives.metrics import METRICS, Measurement
from optimizer.config.problem import Problem
from optimizer.confirmation.choice import best_so_far
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.errors import ServerFault
from optimizer.core.interfaces import Searcher, TrialStore
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Point, Trial, TrialRole, latest_points
from optimizer.measure.load_search import LoadSearchRules, doubling_loads, first_rate
from optimizer.simulator.speed_correction import SpeedCorrection, fit_speed_correction


class OtherWorkers:
    """The other workers of a shared study, each of which numbers its own trials.

    This base class stands for a study without other workers.
    """

    def claim(self, candidate: Candidate) -> bool:
        """Claim ``candidate`` for this worker. Return False if another worker has it.

        The other workers see it as a trial whose load search begins at FIRST_CONCURRENCY.
        """
        return True

    def abandoned(self) -> list[Candidate]:
        """Return candidates whose worker has died and that no other worker has claimed since."""
        return []

    def trials(self) -> list[Trial]:
        """Return the finished trials of all workers, including this one."""
        return []

    def are_running(self) -> bool:
        """Return whether another worker has a running trial."""
        return False

    def wait(self, seconds: float) -> None:
        """Wait until a trial has changed since ``abandoned`` was called, at most ``seconds``."""

    def leave_search(self) -> str:
        """End the search of this worker.

        Return a text about the worker that confirms instead; empty if this worker confirms.
        """
        return ""

    def collect_trials(self, own_trials: list[Trial], table: TrialStore) -> list[Trial]:
        """Return ``own_trials`` and those of all other workers, which are appended to ``table``.

        The others' times are left out: they are not part of this run's budget.
        """
        return own_trials


SearchEnd = Literal["converged", "budget", "exhausted", "interrupted"]
FIRST_CONCURRENCY = 4  # of a trial while none has been measured
MAX_LOADS, MAX_COMPARED_LOADS = 3, 5  # loads of a searched deployment, and of a baseline
MAX_REFINED_SHARE = 0.1  # of the budget: ``LoadSearchRules.max_seconds``
MAX_RATES, MAX_COMPARED_RATES = 5, 9  # the same at request rates: an overload says less about the best load
HOPELESS_DEPLOYMENTS = 3  # if as many first trials all fail, no configuration is the cause
MAX_CONTROLS = 3  # control measurements of a search
CONTROL_CHANGE = 1.2  # factor on the speed of the machine after which the best configuration is measured again


class ScheduledTrial(NamedTuple):
    """A trial to run, and why it is run."""

    role: TrialRole
    trial: Trial


@dataclass
class Scheduler:
    """Decides which candidate is tried next: first the comparisons, then those that the searcher suggests.

    When the speed of the machine has changed, the best candidate is measured again at its best load, as a control: a
    second trial of this candidate, which shows by how much the speed changes the results. The searcher may suggest a
    candidate again as well, because deployments of one candidate differ.

    Attributes:
        problem: The problem to solve.
        searcher: It suggests candidates.
        budget: The time and the number of trials.
        stopwatch: It counts the time of the searcher.
        comparisons: Roles and candidates that are tried first; the first one is the baseline.
        other_workers: The other workers of a shared study, to whom the candidates that they try are left.
        trials: The finished trials.
        converged: Whether the searcher, not the budget, ended the search.
        max_controls: Largest number of controls.
    """

    problem: Problem
    searcher: Searcher
    budget: Budget
    stopwatch: Stopwatch
    comparisons: Sequence[tuple[TrialRole, Candidate]]
    other_workers: OtherWorkers = field(default_factory=OtherWorkers)
    trials: list[Trial] = field(default_factory=list)
    converged: bool = False
    max_controls: int = MAX_CONTROLS
    _failure_log: Path | None = field(default=None, init=False)
    _controls: set[int] = field(default_factory=set, init=False)  # numbers of their trials

    @property
    def baseline(self) -> Candidate | None:
        """Return the baseline configuration; None if a recorded table has none."""
        return self.comparisons[0][1] if self.comparisons else None

    @property
    def search_ended(self) -> SearchEnd:
        """Return why the search is over: it converged, tried every candidate of the space, or used up its budget."""
        space = self.problem.space
        tried = self._canonical([*self.trials, *self.other_workers.trials()])
        if sum(space.parameter_values(candidate) is not None for candidate in tried) >= len(space):
            return "exhausted"
        return "converged" if self.converged else "budget"

    def best(self) -> Point | None:
        """Return the best point among all workers' trials, as measured.

        Points are compared at one speed of the machine; see ``SpeedCorrection``.
        """
        trials = self._all_trials()
        speed = fit_speed_correction(trials, self.problem)
        return speed.best_point(latest_points(trials), self.problem)

    def best_so_far(self) -> Point | None:
        """Return ``choice.best_so_far`` of all workers' trials."""
        return best_so_far(self._all_trials(), self.problem, self.baseline)

    def _all_trials(self) -> list[Trial]:
        """Return the own trials and, with new numbers, those of the other workers with other candidates."""
        own_candidates = {trial.candidate for trial in self.trials}
        other_trials = [trial for trial in self.other_workers.trials() if trial.candidate not in own_candidates]
        numbered = (replace(trial, number=n) for n, trial in enumerate(other_trials, start=self._free_number(())))
        return [*self.trials, *numbered]

    def next(self, running: Sequence[Trial] = ()) -> ScheduledTrial | None:
        """Return the trial to run next; None if the search is over or has to wait for ``running`` trials.

        Raises ServerFault if the search is over and nothing could be deployed.
        """
        scheduled = self._choose(running)
        if scheduled is None and not running and not self._has_to_wait() and not self.other_workers.are_running():
            self._refuse_if_all_failed(self._all_trials())
        return scheduled

    def _choose(self, running: Sequence[Trial]) -> ScheduledTrial | None:
        """Return a comparison, a trial of a dead worker, a control or a suggestion; None if there is none now."""
        if self._is_over(running):
            return None
        tried = {trial.candidate for trial in (*self.trials, *running)}
        required = [*self.comparisons]
        required += [("abandoned", candidate) for candidate in self.other_workers.abandoned()]
        for role, candidate in required:
            if candidate not in tried and self.other_workers.claim(candidate):
                return ScheduledTrial(role, self._new_trial(candidate, running))
        if (control := self._control(running)) is not None:
            trial = self._new_trial(control, running)
            self._controls.add(trial.number)
            return ScheduledTrial("control", trial)
        # read first: a trial that ends meanwhile may change the suggestion
        others_run = self.other_workers.are_running()
        with self.stopwatch.count("search"):
            suggestion = self.searcher.suggest()
            # the searcher suggested neither the comparisons nor a trial of an earlier session: both may be running
            busy = self._canonical(running)
            while suggestion in busy:
                suggestion = self.searcher.suggest()
        if suggestion is None:
            self.converged = not running and not others_run
            return None
        is_repeat = suggestion in self._canonical(self.trials)
        return ScheduledTrial("repeat" if is_repeat else "search", self._new_trial(suggestion, running))

    def _canonical(self, trials: Sequence[Trial]) -> set[Candidate]:
        return {self.problem.space.canonical(trial.candidate) for trial in trials}

    def next_or_wait(self) -> ScheduledTrial | None:
        """Return what ``next`` returns, after waiting for other workers whose trials may change its answer."""
        while (scheduled := self.next()) is None and self._has_to_wait():
            self.other_workers.wait(self.budget.search_seconds_left())
        return scheduled

    def resume_unfinished(self, unfinished: Trial) -> ScheduledTrial | None:
        """Return the trial that an earlier session began, unless another worker has it; then as ``next_or_wait``."""
        if self.other_workers.claim(unfinished.candidate):
            return ScheduledTrial("resumed", unfinished)
        self.trials.append(unfinished)
        return self.next_or_wait()

    def resume(self, trials: Sequence[Trial]) -> None:
        """Add the trials of an earlier session. Failures of that session do not count as a fault of the server."""
        self.trials.extend(trials)
        for trial in trials:
            self.searcher.observe(trial)

    def record_finished(self, trial: Trial, log: Path | None = None) -> None:
        """Add a finished trial. ``log`` is the log of its failure. Raises ServerFault if nothing can be deployed."""
        self.trials.append(trial)
        self.searcher.observe(trial)
        self._failure_log = log or self._failure_log
        if len(self.trials) >= HOPELESS_DEPLOYMENTS:
            self._refuse_if_all_failed(self.trials)

    def _refuse_if_all_failed(self, trials: Sequence[Trial]) -> None:
        if trials and all(trial.status == "failed" for trial in trials):
            advice = ""
            if len(trials) < HOPELESS_DEPLOYMENTS and self.search_ended == "budget":
                tried = "one was" if len(trials) == 1 else f"{len(trials)} were"
                advice = f"; only {tried} tried, and a larger --budget or --max-trials tries others"
            raise ServerFault(f"no configuration can be deployed: {trials[-1].reason}{advice}", log=self._failure_log)

    def with_forecast(self, candidate: Candidate, load: LoadPoint, measurement: Measurement) -> Measurement:
        """Return a new ``measurement`` with the searcher's forecast of it. One that failed gets none."""
        if not measurement.has_values:
            return measurement
        with self.stopwatch.count("search"):
            forecast = self.searcher.forecast(candidate, load, measurement.speed_probe_ms)
        return replace(measurement, forecast=forecast)

    def rules(self, candidate: Candidate) -> LoadSearchRules:
        """Return the rules of the load search of the next trial, which is one of ``candidate``.

        It starts at the load that the searcher expects to be best, else at the load of the best trial so far.
        Comparisons are measured up to their own best load; the search of another candidate stops once it is clearly
        worse.
        """
        problem, trials = self.problem, self._all_trials()
        speed = fit_speed_correction(trials, problem)
        best = speed.best_point(latest_points(trials), problem)
        goal = METRICS["goodput"] if METRICS["goodput"] in problem.objectives else None
        is_exhaustive = self.searcher.is_exhaustive and not problem.open_loop
        by_throughput = problem.maximizes_throughput and len(problem.objectives) == 1
        is_comparison = any(candidate == compared for _, compared in self.comparisons)
        stops_if_worse = by_throughput and not is_comparison and not is_exhaustive
        allowed = problem.space.allowed_concurrencies(candidate)
        expected = self.searcher.expected_load(candidate)
        only_concurrencies: tuple[int, ...] = ()
        if is_exhaustive:
            only_concurrencies = allowed or doubling_loads(problem.max_concurrency)
        elif expected is None:  # the searcher did not suggest this trial
            only_concurrencies = self._control_loads(candidate, speed)
        if problem.open_loop:
            first_load = first_rate(best.load.request_rate if best else 0.0)
            max_loads = MAX_RATES if stops_if_worse else MAX_COMPARED_RATES
        else:
            first_load = expected or (best.load.concurrency if best else FIRST_CONCURRENCY)
            max_loads = MAX_LOADS if stops_if_worse else MAX_COMPARED_LOADS
        to_beat = None
        if best and stops_if_worse:
            to_beat = (goal or METRICS["throughput"]).value(speed.correct(best.measurement))
        return LoadSearchRules(
            problem.request_batch_size,
            problem.max_concurrency,
            problem.sla.of_requests,
            first_load=first_load,
            open_loop=problem.open_loop,
            finds_lowest_load=not problem.maximizes_throughput,
            throughput_floor=problem.sla.throughput_floor,
            to_beat=to_beat,
            goal=goal,
            max_seconds=MAX_REFINED_SHARE * self.budget.seconds,
            allowed_concurrencies=allowed,
            max_loads=max_loads,
            only_concurrencies=only_concurrencies,
            speed=speed,
            other_shares={other.name: other.share for other in problem.concurrent},
        )

    def _control(self, running: Sequence[Trial]) -> Candidate | None:
        """Return the best candidate if it was never measured at about the current speed of the machine, else None."""
        best = self.best()
        if best is None or not best.load.concurrency:
            return None
        if self.searcher.is_exhaustive or self.budget.max_trials is not None:
            return None  # the number of trials is given
        is_own = any(trial.candidate == best.candidate for trial in self.trials)  # not of another worker
        is_running = any(trial.candidate == best.candidate for trial in running)
        if not is_own or is_running or len(self._controls) >= self.max_controls:
            return None
        latest_probes_ms = [m.speed_probe_ms for _, m in self.trials[-1].measurements if m.speed_probe_ms]
        probes_ms = [
            point.measurement.speed_probe_ms
            for point in latest_points(self.trials)
            if (point.candidate, point.load) == (best.candidate, best.load) and point.measurement.speed_probe_ms
        ]
        changes = [abs(math.log(latest_probes_ms[-1] / probe_ms)) for probe_ms in probes_ms if latest_probes_ms]
        return best.candidate if changes and min(changes) > math.log(CONTROL_CHANGE) else None

    def _control_loads(self, candidate: Candidate, speed: SpeedCorrection) -> tuple[int, ...]:
        """Return the only load of a control: the best load of an earlier trial of ``candidate``; else nothing."""
        points = [point for point in latest_points(self.trials) if point.candidate == candidate]
        best = speed.best_point(points, self.problem)
        return (best.load.concurrency,) if best and best.load.concurrency else ()

    def _new_trial(self, candidate: Candidate, running: Sequence[Trial]) -> Trial:
        return Trial(self._free_number(running), candidate)

    def _free_number(self, running: Sequence[Trial]) -> int:
        return max((trial.number for trial in (*self.trials, *running)), default=-1) + 1

    def _has_to_wait(self) -> bool:
        """Return whether trials that end later may lead to another trial of this worker."""
        return not self.converged and not self._is_over(()) and self.budget.search_seconds_left() > 0

    def _is_over(self, running: Sequence[Trial]) -> bool:
        begun = len(self.trials) + len(running)
        if self.budget.max_trials is not None and begun >= self.budget.max_trials:
            return True
        return begun > 0 and self.budget.search_seconds_left() < self._minimum_seconds()

    def _minimum_seconds(self) -> float:
        """Return the median time of a deployment and its first measurement, the least that a new trial needs."""
        seconds = sorted(
            (trial.deploy_seconds or 0) + (trial.measurements[0][1].measure_seconds or 0)
            for trial in self.trials
            if trial.measurements
        )
        return seconds[len(seconds) // 2] if seconds else 0.0
