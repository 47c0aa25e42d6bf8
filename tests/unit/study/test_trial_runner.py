"""Tests for the tuning loop on a recorded table: trials, recommendation, resume and faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import pytest

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, MeasurementError, ModelRefused, ServerCrashed
from optimizer.core.interfaces import LoadGenerator, Target
from optimizer.core.notes import ServedOnCpu
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Point, Trial, TrialRole
from optimizer.measure.load_search import FIRST_FACTOR, FIRST_RATE
from optimizer.measure.measurer import Measurer
from optimizer.results.recommendation import Outcome, assess
from optimizer.search import make_searcher
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.simulator.speed_correction import at_other_speed
from optimizer.store.recording import RecordedServer
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

BASELINE = Candidate(max_batch_size=1)
PLAIN = Candidate(max_batch_size=64, dynamic_batching=True)
COMPARISONS: list[tuple[TrialRole, Candidate]] = [("baseline", BASELINE), ("dynamic_batching", PLAIN)]


class RecordingObserver:
    """An observer that records roles and loads."""

    def __init__(self) -> None:
        self.roles: list[str] = []
        self.loads: list[tuple[int, LoadPoint]] = []
        self.finished: list[int] = []
        self.best_points: list[Point | None] = []

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self.roles.append(role)

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        self.loads.append((number, load))

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self.finished.append(trial.number)
        self.best_points.append(best)


@dataclass
class Search:
    scheduler: Scheduler
    target: Target
    measurer: Measurer

    def run(self) -> list[Trial]:
        return run_trials(self.scheduler, self.target, self.measurer)


class Session:
    """A run in a folder; each call of ``run`` begins a new search, as a resumed session does."""

    def __init__(self, folder: Path, problem: Problem, table: RecordedServer, search: str = "grid") -> None:
        self.folder, self.problem, self.search = folder, problem, search
        self.target: Target = table
        self.load_generator: LoadGenerator = table
        self.telemetry = table
        self.log = RecordingObserver()

    def new_search(self, **budget: float) -> Search:
        searcher = make_searcher(self.search, self.problem, 0, str(self.folder / "study.journal"), "known")
        limits = Budget(**({"seconds": 600} | budget))  # type: ignore[arg-type]
        table = TrialsTable(self.folder / "trials.csv", "known", {})
        return Search(
            Scheduler(self.problem, searcher, limits, Stopwatch(), COMPARISONS),
            self.target,
            Measurer(self.load_generator, self.telemetry, table, self.log),
        )

    def run(self, **budget: float) -> Outcome:
        trials = self.new_search(**budget).run()
        return assess(trials, self.problem, BASELINE, PLAIN)


@pytest.fixture
def study(tmp_path: Path, problem: Problem, known_table: list[Trial]) -> Session:
    return Session(tmp_path, problem, RecordedServer(known_table))


def best_in_table(trials: list[Trial]) -> float:
    return max(
        m.throughput_infer_per_sec or 0
        for trial in trials
        for _, m in trial.measurements
        if (m.latency_p95_ms or 99) <= 20
    )


@pytest.mark.parametrize("search", ["simulated", "grid"])
def test_every_search_ends_near_the_best_of_the_table(study: Session, known_table: list[Trial], search: str) -> None:
    study.search = search
    outcome = study.run()
    assert outcome.recommended is not None
    assert outcome.recommended.measurement.throughput_infer_per_sec >= 0.93 * best_in_table(known_table)  # type: ignore[operator]
    assert outcome.recommended.measurement.latency_p95_ms <= 20  # type: ignore[operator]
    tried = [trial.candidate for trial in TrialsTable(study.folder / "trials.csv", "known", {}).read()]
    assert len(set(tried)) == len(tried) == outcome.trials, "each candidate once"
    if search == "simulated":
        assert 2 < outcome.trials < len(study.problem.space), "it stops when no trial is worth its time"
    else:
        assert outcome.trials == len(study.problem.space)


def test_each_measurement_is_stored_with_the_forecast_from_the_trials_before(study: Session) -> None:
    study.search = "simulated"
    trials = study.new_search(max_trials=4).run()
    assert TrialsTable(study.folder / "trials.csv", "known", {}).read() == trials
    assert all(measurement.forecast is None for _, measurement in trials[0].measurements), "nothing was known"
    assert len(trials) > 2
    for place, trial in enumerate(trials[1:], start=1):
        surrogate = fit_surrogate(study.problem, trials[:place])
        for load, measurement in trial.measurements:
            cell = study.problem.space.canonical(trial.candidate), load.concurrency
            throughputs, latencies_s = surrogate.measurement_quantiles([cell], (0.5, 0.025, 0.975))
            assert measurement.forecast is not None
            made = astuple(measurement.forecast)
            assert made[:3] == pytest.approx(throughputs[:, 0], rel=1e-5)
            assert made[3:6] == pytest.approx(1e3 * latencies_s[:, 0], rel=1e-5)


class ServerOnCpu(RecordedServer):
    """A server that puts the instances of PLAIN on the CPU although there is a GPU."""

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with super().deploy(candidate) as endpoint:
            yield replace(endpoint, fell_back_to_cpu=candidate == PLAIN)


def test_a_note_says_that_a_deployment_of_the_search_fell_back_to_the_cpu(
    study: Session, known_table: list[Trial]
) -> None:
    study.target = ServerOnCpu(known_table)
    search = study.new_search(max_trials=2)
    search.run()
    assert search.measurer.notes == (ServedOnCpu("server_sees_no_gpu"),)


def test_the_comparisons_come_first(study: Session) -> None:
    outcome = study.run()
    assert study.log.roles[:3] == ["baseline", "dynamic_batching", "search"]
    assert outcome.baseline.point is not None
    assert outcome.baseline.point.candidate == BASELINE
    assert outcome.dynamic_batching is not None
    assert outcome.dynamic_batching.point is not None
    assert outcome.speedup is None, "only fresh servers show a gain"


def test_max_trials_counts_every_configuration(study: Session) -> None:
    assert study.run(max_trials=4).trials == 4


def test_a_spent_budget_still_measures_the_baseline_once(study: Session) -> None:
    outcome = study.run(seconds=1e-9)
    assert (outcome.trials, outcome.measurements) == (1, 1)
    assert outcome.dynamic_batching is not None
    assert (outcome.baseline.is_tried, outcome.dynamic_batching.is_tried) == (True, False)


def test_nothing_meets_the_sla(study: Session) -> None:
    study.problem = replace(study.problem, sla=Sla.from_bounds({"p95": 1.0}))
    outcome = study.run()
    assert outcome.recommended is None
    assert outcome.closest is not None
    assert outcome.no_recommendation_reason == "a single inference takes 1.47 ms"
    assert outcome.speedup is None


def test_a_bounded_latency_that_was_never_measured_is_named(problem: Problem) -> None:
    bounded = replace(problem, sla=Sla.from_bounds({"p99": 20.0}))
    trials = [Trial(0, BASELINE, ((LoadPoint(1, 4), Measurement(100.0, latency_p95_ms=5.0, stable=True)),))]
    outcome = assess(trials, bounded, BASELINE, PLAIN)
    assert outcome.recommended is None
    assert outcome.no_recommendation_reason == "latency-p99 could not be measured"


def test_an_interrupted_run_continues_with_at_most_the_measurement_in_flight_lost(
    study: Session, tmp_path: Path, known_table: list[Trial]
) -> None:
    whole = study.run()
    assert whole.measurements > 3
    (tmp_path / "cut").mkdir()
    for after in range(1, whole.measurements, 7):
        folder = tmp_path / "cut" / str(after)
        folder.mkdir()
        cut = Session(folder, study.problem, _Interrupting(known_table, after))
        with pytest.raises(KeyboardInterrupt):
            cut.run()
        assert len(cut.log.loads) == after
        resumed = Session(folder, study.problem, RecordedServer(known_table))
        outcome = resumed.run()
        assert outcome.recommended == whole.recommended
        assert len(resumed.log.loads) <= whole.measurements - after + 1


@pytest.mark.parametrize("seconds", [600, 1e-9])  # its load search is complete, or the time is over
def test_a_resumed_run_does_not_show_the_last_trial_again(
    study: Session, known_table: list[Trial], seconds: float
) -> None:
    study.run(max_trials=4, seconds=seconds)
    assert study.log.finished == list(range(len(study.log.finished)))
    resumed = Session(study.folder, study.problem, RecordedServer(known_table))
    resumed.run(max_trials=4, seconds=seconds)
    assert (resumed.log.roles, resumed.log.finished) == ([], [])


class _Interrupting(RecordedServer):
    def __init__(self, trials: list[Trial], after: int) -> None:
        super().__init__(trials)
        self.left = after

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().measure(endpoint, load, seconds)


def test_a_failed_deployment_is_recorded_and_the_search_continues(study: Session, known_table: list[Trial]) -> None:
    broken = replace(known_table[5], status="failed", reason="out of memory", measurements=())
    table = RecordedServer([*known_table[:5], broken, *known_table[6:]])
    study.target = study.load_generator = study.telemetry = table
    search = study.new_search()
    trials = search.run()
    failed = [trial for trial in trials if trial.status == "failed"]
    assert [trial.reason for trial in failed] == ["out of memory"]
    assert len(trials) == len(study.problem.space)
    assert TrialsTable(study.folder / "trials.csv", "known", {}).read() == trials


@pytest.mark.parametrize("has_advice", [False, True])
def test_a_baseline_that_the_server_refuses_is_bad_input(
    study: Session, known_table: list[Trial], *, has_advice: bool
) -> None:
    class Refusing(RecordedServer):
        refused = BASELINE

        @contextlib.contextmanager
        def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
            if candidate == self.refused:
                raise ModelRefused("load failed for model 'known': no such weights", has_advice=has_advice)
            with super().deploy(candidate) as endpoint:
                yield endpoint

    study.target = study.load_generator = study.telemetry = table = Refusing(known_table)
    advice = "" if has_advice else "; correct its config.pbtxt or its files"
    refusal = "the server refuses the model as it is configured: load failed for model 'known': no such weights"
    with pytest.raises(BadInputError, match=f"^{refusal}{advice}$"):
        study.run()
    assert [trial.status for trial in TrialsTable(study.folder / "trials.csv", "known", {}).read()] == ["failed"]
    assert study.log.roles == ["baseline"]
    table.refused = PLAIN
    (study.folder / "trials.csv").unlink()
    assert study.run().recommended is not None, "the search continues if it refuses another configuration"


def test_a_failed_measurement_is_recorded_and_the_search_continues(study: Session, known_table: list[Trial]) -> None:
    class Failing(RecordedServer):
        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            if endpoint.candidate.instance_count == 2:
                raise MeasurementError("perf_analyzer ended with exit code 99")
            return super().measure(endpoint, load, seconds)

    study.target = study.load_generator = study.telemetry = Failing(known_table)
    outcome = study.run()
    assert outcome.recommended is not None
    assert outcome.recommended.candidate.instance_count == 1
    assert "exit code 99" in (study.folder / "trials.csv").read_text()


@pytest.mark.parametrize("refusal", ["Exceeds maximum queue size", "Request timeout expired"])
def test_a_queue_that_refuses_the_first_load_is_measured_at_a_lower_one(
    study: Session, known_table: list[Trial], refusal: str
) -> None:
    class Refusing(RecordedServer):
        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            if load.concurrency > 2:
                raise MeasurementError(f"perf_analyzer ended with exit code 3: {refusal}")
            return super().measure(endpoint, load, seconds)

    study.search = "random"
    study.target = study.load_generator = study.telemetry = Refusing(known_table)
    outcome = study.run(max_trials=2)
    assert outcome.recommended is not None
    assert outcome.recommended.load.concurrency <= 2


def test_three_crashes_make_a_candidate_infeasible_despite_its_measurements(
    study: Session, known_table: list[Trial]
) -> None:
    class Crashing(RecordedServer):
        crashes = 0

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            if endpoint.candidate.instance_count == 2 and load.concurrency > 8:
                self.crashes += 1
                raise ServerCrashed("tritonserver died (SIGSEGV) while measuring")
            return super().measure(endpoint, load, seconds)

    study.target = study.load_generator = study.telemetry = table = Crashing(known_table)
    search = study.new_search()
    trials = search.run()
    failed = [trial for trial in trials if trial.status == "failed"]
    assert failed
    assert table.crashes == 3 * len(failed)
    for trial in failed:
        assert trial.reason == "crashed 3 times: tritonserver died (SIGSEGV) while measuring"
        assert trial.measurements == ()
    best = search.scheduler.best()
    assert best is not None
    assert best.candidate.instance_count == 1
    assert TrialsTable(study.folder / "trials.csv", "known", {}).read() == trials


def test_the_best_so_far_met_the_sla_as_measured(study: Session, known_table: list[Trial]) -> None:
    """A point that was measured while the machine was slow may miss the bound and meet it at the usual speed."""

    class Slowing(RecordedServer):
        slowness = 1.0

        @contextlib.contextmanager
        def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
            self.slowness = 1.4 if candidate.max_batch_size == 64 else 1.0
            with super().deploy(candidate, fresh=fresh) as endpoint:
                yield endpoint

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            return at_other_speed(super().measure(endpoint, load, seconds), 1 / self.slowness)

    points = [measurement for trial in known_table for _, measurement in trial.measurements]
    best = max(points, key=lambda measurement: measurement.throughput_infer_per_sec or 0.0)
    bound_ms = 1.35 * (best.latency_p95_ms or 0.0)
    study.problem = replace(study.problem, cpu_count=2, sla=Sla.from_bounds({"p95": bound_ms}))
    study.target = study.load_generator = study.telemetry = table = Slowing(known_table)
    search = study.new_search()
    search.measurer.speed_probe = lambda: 0.001 * table.slowness
    search.run()
    fastest = search.scheduler.best()
    assert fastest is not None
    assert not study.problem.sla.is_met(fastest.measurement)
    shown = [point for point in study.log.best_points if point is not None]
    assert len(shown) > 3
    assert all(study.problem.sla.is_met(point.measurement) for point in shown)


def test_a_crash_at_the_end_of_the_budget_keeps_the_measurements(study: Session, known_table: list[Trial]) -> None:
    class Crashing(RecordedServer):
        measured = 0

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            self.measured += 1
            if endpoint.candidate == PLAIN and self.measured > 3:
                search.scheduler.budget.seconds = 0
                raise ServerCrashed("tritonserver died (SIGSEGV) while measuring")
            return super().measure(endpoint, load, seconds)

    study.target = study.load_generator = study.telemetry = Crashing(known_table)
    study.search = "random"
    search = study.new_search()
    trials = search.run()
    assert [trial.status for trial in trials] == ["ok", "ok"]
    assert trials[1].measurements


def test_the_baseline_is_measured_after_a_crash_even_if_the_time_is_over(
    study: Session, known_table: list[Trial]
) -> None:
    class Crashing(RecordedServer):
        has_crashed = False

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            if not self.has_crashed:
                self.has_crashed, search.scheduler.budget.seconds = True, 0
                raise ServerCrashed("tritonserver died (SIGSEGV) while measuring")
            return super().measure(endpoint, load, seconds)

    study.target = study.load_generator = study.telemetry = Crashing(known_table)
    search = study.new_search()
    (baseline,) = search.run()
    assert (baseline.candidate, baseline.status, len(baseline.crashes)) == (BASELINE, "ok", 1)
    assert baseline.measurements, "all others are compared with it"


def test_telemetry_is_part_of_the_measurement(study: Session, known_table: list[Trial]) -> None:
    class Metered(RecordedServer):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
            yield ResourceUsage(server_memory_bytes=5e8)

    study.telemetry = Metered(known_table)
    outcome = study.run(max_trials=2)
    assert outcome.recommended is not None
    assert outcome.recommended.measurement.server_memory_bytes == 5e8


@pytest.mark.parametrize(("search", "objectives"), [("simulated", ("throughput", "energy")), ("tpe", ("energy",))])
def test_energy_is_an_objective(
    study: Session, known_table: list[Trial], search: str, objectives: tuple[str, ...]
) -> None:
    """Power grows with the instances only, so one instance needs the least energy for 1,000 inferences."""

    class Metered(RecordedServer):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
            yield ResourceUsage(gpu_power_watts=100.0 * endpoint.candidate.instance_count)

    study.telemetry, study.search = Metered(known_table), search
    study.problem = replace(study.problem, objectives=tuple(METRICS[name] for name in objectives))
    best = study.run().recommended
    assert best is not None
    throughput = best.measurement.throughput_infer_per_sec or 0
    energy = METRICS["energy"].value(best.measurement)
    assert energy == pytest.approx(1e5 * best.candidate.instance_count / throughput)
    assert best.candidate.instance_count == (2 if objectives[0] == "throughput" else 1)


def test_a_hopeless_deployment_ends_after_its_warm_up_window(study: Session, known_table: list[Trial]) -> None:
    class HopelessWarmUp(RecordedServer):
        def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement:  # type: ignore[override]
            bad = endpoint.candidate not in (BASELINE, PLAIN)
            return Measurement(1.0 if bad else 1e6, latency_p95_ms=900.0 if bad else 1.0, requests=9)

    study.load_generator, study.search = HopelessWarmUp(known_table), "random"
    trials = study.new_search(max_trials=6).run()
    for trial in trials[2:]:
        ((load, measurement),) = trial.measurements
        assert not measurement.stable
        assert measurement.reason == "given up after a first short window"
        assert (trial.number, load) in study.log.loads
    assert all(m.stable for trial in trials[:2] for _, m in trial.measurements)
    stored = TrialsTable(study.folder / "trials.csv", "known", {}).read()
    assert [t.measurements for t in stored] == [t.measurements for t in trials]


@pytest.mark.parametrize("alone", [None, Measurement(4.0)])
def test_the_first_rate_of_a_run_follows_from_one_request_at_a_time(
    study: Session, known_table: list[Trial], alone: Measurement | None
) -> None:
    """A recorded table has no such warm-up. Later configurations begin at the best rate."""

    class RateServer(RecordedServer):
        def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:  # type: ignore[override]
            return alone if load.concurrency == 1 else None

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            p95_ms = 1.0 if load.request_rate <= 200 else 900.0
            return Measurement(load.request_rate, latency_p95_ms=p95_ms, requests=900, stable=True)

    study.load_generator, study.search = RateServer(known_table), "random"
    study.problem = replace(study.problem, open_loop=True)
    first, second = study.new_search(max_trials=2).run()
    assert first.measurements[0][0].request_rate == (FIRST_FACTOR * 4 if alone else FIRST_RATE)
    assert second.measurements[0][0].request_rate > 100


def test_the_time_of_the_search_is_recorded(study: Session) -> None:
    search = study.new_search(max_trials=8)
    search.run()
    times = search.scheduler.stopwatch.report()
    assert (times["search_seconds"] or 0) > 0
