"""Searches on a machine whose speed changes, and on one that other processes disturb."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import Measurement
from optimizer.config.problem import Problem
from optimizer.confirmation.plan import finalists
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial, TrialRole, latest_points
from optimizer.measure.measurer import Measurer
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.search import make_searcher
from optimizer.simulator.speed_correction import fit_speed_correction
from optimizer.store.recording import RecordedServer
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import MAX_CONTROLS, Scheduler
from optimizer.study.trial_runner import run_trials

BASELINE = Candidate(max_batch_size=1)
PLAIN = Candidate(max_batch_size=64, dynamic_batching=True)
COMPARISONS: list[tuple[TrialRole, Candidate]] = [("baseline", BASELINE), ("dynamic_batching", PLAIN)]
SLOWER = 1.6


class DriftingServer(RecordedServer):
    """A recorded server on a machine that is slower in every second pair of deployments."""

    def __init__(self, trials: Sequence[Trial], slower: float = SLOWER) -> None:
        super().__init__(trials)
        self.slower, self.deployments, self.attempts = slower, -1, 0

    @property
    def slowness(self) -> float:
        return self.slower if self.deployments // 2 % 2 else 1.0

    def probe(self) -> float:
        return 0.04 * self.slowness

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with super().deploy(candidate) as endpoint:
            self.deployments += 1
            yield endpoint

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        self.attempts += 1
        recorded, factor = super().measure(endpoint, load, seconds), self.slowness
        return replace(
            recorded,
            throughput_infer_per_sec=(recorded.throughput_infer_per_sec or 0) / factor,
            latency_avg_ms=(recorded.latency_avg_ms or 0) * factor,
            latency_p95_ms=(recorded.latency_p95_ms or 0) * factor,
        )


class UnstableServer(DriftingServer):
    """A recorded server whose windows disagree in every attempt but those in ``stable``; others take ``share``."""

    def __init__(self, trials: Sequence[Trial], share: float, stable: Sequence[int] = ()) -> None:
        super().__init__(trials, slower=1.0)
        self.share, self.stable = share, stable

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        measurement = super().measure(endpoint, load, seconds)
        return replace(measurement, stable=self.attempts in self.stable, reason="unstable")

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        yield ResourceUsage(other_cpu_share=self.share)


class Roles(QuietObserver):
    def __init__(self) -> None:
        super().__init__()
        self.roles: list[str] = []

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self.roles.append(role)


def search(
    server: DriftingServer,
    problem: Problem,
    path: Path,
    method: str = "random",
    *,
    probed: bool = True,
    **budget: float,
) -> tuple[list[Trial], list[str]]:
    """Return the trials and their roles."""
    observer = Roles()
    measurer = Measurer(
        server,
        server,
        TrialsTable(path / "trials.csv", "known", {}),
        observer,
        speed_probe=server.probe if probed else None,
    )
    searcher = make_searcher(method, problem, 0, str(path / "study.journal"), "known")
    limits = Budget(**({"seconds": 600} | budget))  # type: ignore[arg-type]
    scheduler = Scheduler(problem, searcher, limits, Stopwatch(), COMPARISONS)
    return run_trials(scheduler, server, measurer), observer.roles


def chosen_throughput(trials: list[Trial], problem: Problem, table: list[Trial]) -> float:
    """Return the highest throughput on the fast machine of the candidate that would be confirmed first."""
    points = fit_speed_correction(trials, problem).correct_points(latest_points(trials))
    (best,) = finalists(points, problem, 1)
    return highest_throughput(table, problem, best.candidate)


def highest_throughput(table: list[Trial], problem: Problem, *candidates: Candidate) -> float:
    points = [point for point in latest_points(table) if not candidates or point.candidate in candidates]
    return max(p.throughput_infer_per_sec for p in points if problem.sla.is_met(p.measurement))


@pytest.fixture
def served(problem: Problem) -> Problem:
    """The problem of a server on CPUs."""
    return replace(problem, cpu_count=2)


def test_a_search_across_speed_changes_chooses_as_on_a_steady_machine(
    served: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    trials, _ = search(DriftingServer(known_table), served, tmp_path, "simulated")
    assert chosen_throughput(trials, served, known_table) >= 0.97 * highest_throughput(known_table, served)


def test_the_best_configuration_is_measured_again_when_the_speed_has_changed(
    served: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    trials, roles = search(DriftingServer(known_table), served, tmp_path)
    first: dict[Candidate, Trial] = {}
    controls = [trial for trial in trials if first.setdefault(trial.candidate, trial) is not trial]
    assert roles.count("control") == len(controls)
    assert 1 <= len(controls) <= MAX_CONTROLS
    for control in controls:
        ((load, measurement),) = control.measurements
        earlier_measurements = [m for at, m in first[control.candidate].measurements if at == load]
        assert earlier_measurements, "it is measured at a load that is known"
        assert abs((measurement.speed_probe_ms or 0) - (earlier_measurements[0].speed_probe_ms or 0)) > 1
    assert TrialsTable(tmp_path / "trials.csv", "known", {}).read() == trials


def test_rows_are_stored_as_measured(served: Problem, known_table: list[Trial], tmp_path: Path) -> None:
    trials, _ = search(DriftingServer(known_table), served, tmp_path)
    recorded = {trial.candidate: dict(trial.measurements) for trial in known_table}
    assert any(trial.measurements for trial in trials)
    for trial in trials:
        for load, measurement in trial.measurements:
            factor = (measurement.speed_probe_ms or 0) / 40
            recorded_throughput = recorded[trial.candidate][load].throughput_infer_per_sec or 0
            assert measurement.throughput_infer_per_sec == pytest.approx(recorded_throughput / factor)


@pytest.mark.parametrize(("slower", "probed"), [(SLOWER, False), (1.05, True)])
def test_without_a_known_change_of_speed_nothing_is_measured_again(
    slower: float, probed: bool, served: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    trials, roles = search(DriftingServer(known_table, slower), served, tmp_path, probed=probed)
    assert "control" not in roles
    assert len({trial.candidate for trial in trials}) == len(trials)


def test_with_a_limit_on_trials_there_is_no_control(
    served: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    trials, roles = search(DriftingServer(known_table), served, tmp_path, max_trials=8)
    assert len({trial.candidate for trial in trials}) == len(trials) == 8
    assert "control" not in roles


def test_an_interrupted_control_is_measured_at_its_one_load(
    served: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    server = DriftingServer(known_table)
    trials, roles = search(server, served, tmp_path)
    number = roles.index("control")
    rows = (tmp_path / "trials.csv").read_text().splitlines(keepends=True)
    place = next(i for i, row in enumerate(rows) if row.startswith(f"known,{number},"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "trials.csv").write_text("".join(rows[: place + 1]))
    again, _ = search(DriftingServer(known_table), served, tmp_path / "cut")
    assert again[: number + 1] == trials[: number + 1]


def test_the_study_knows_the_controls(served: Problem, known_table: list[Trial], tmp_path: Path) -> None:
    trials, roles = search(DriftingServer(known_table), served, tmp_path)
    again, _ = search(DriftingServer(known_table), served, tmp_path)
    assert "control" in roles
    assert [trial.number for trial in again] == [trial.number for trial in trials]


def test_an_unstable_measurement_is_repeated_once_if_nothing_disturbed_it(
    problem: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    server = UnstableServer(known_table, share=0.0, stable=[2])
    trials, _ = search(server, problem, tmp_path, max_trials=1)
    assert trials[0].measurements[0][1].stable
    rows = [m for trial in trials for _, m in trial.measurements]
    assert server.attempts == 2 * len(rows)


def test_a_disturbed_machine_tries_as_many_configurations_with_one_attempt_at_each_load(
    problem: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    disturbed = UnstableServer(known_table, share=0.46)
    quiet = UnstableServer(known_table, share=0.0, stable=range(10_000))
    counts = []
    for name, server in (("quiet", quiet), ("disturbed", disturbed)):
        (tmp_path / name).mkdir()
        trials, _ = search(server, problem, tmp_path / name, max_trials=6)
        counts.append((server.attempts, len(trials)))
        loads = [load for trial in trials for load, _ in itertools.groupby(trial.measurements, key=lambda p: p[0])]
        assert server.attempts == len(loads), "no load is measured twice"
    assert counts[1][1] == counts[0][1] == 6
    assert counts[1][0] <= 1.5 * counts[0][0]


def test_disturbed_measurements_may_be_recommended(
    problem: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    trials, _ = search(UnstableServer(known_table, share=0.46), problem, tmp_path, "simulated")
    best = highest_throughput(known_table, problem)
    assert chosen_throughput(trials, problem, known_table) >= 0.9 * best
    outcome = assess(trials, problem, BASELINE, PLAIN)
    assert outcome.recommended is not None
    assert (outcome.recommended.measurement.throughput_infer_per_sec or 0) >= 0.9 * best
