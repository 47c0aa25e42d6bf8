"""Measurements that a plan is based on: the deployments of one configuration, and the configurations of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from objectives import batch_stats
from objectives.intervals import ConfidenceInterval
from objectives.metrics import Measurement
from objectives.pooled_windows import pool_measurements
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.server_plan import START_SECONDS, estimate_start_seconds
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import file_fault, show_path
from optimizer.core.trial import LoadPoint, Point, Trial, all_points, trial_of
from optimizer.measure.load_client.arrivals import Arrivals, parse_arrivals
from optimizer.options.run_options import is_distribution
from optimizer.results import summary
from optimizer.results.comparison import compare_conditions
from optimizer.results.finished_run import FinishedRun, resume_command, why_unfinished
from optimizer.results.recommendation import Outcome, assess
from optimizer.simulator.fitted_parameters import execution_settings
from optimizer.store.run_folder import WRITTEN_FORMAT

SAME_ASPECTS = ("machine", "server", "model", "requests")  # aspects of compare_conditions that must not differ
MeasuredServer: TypeAlias = tuple[Point, ...]  # the measurements of one started server, at each load


@dataclass(frozen=True)
class Evidence:
    """Measurements that show how fast the machine computes ``candidate``.

    ``deployments`` have the same instances and fields. They differ only in batching, which the simulation models.
    ``arrivals`` is the arrival process of measurements at a rate.
    """

    candidate: Candidate
    problem: Problem
    deployments: tuple[MeasuredServer, ...]
    arrivals: Arrivals

    @property
    def points(self) -> list[Point]:
        return [point for server in self.deployments for point in server]


def collect_evidence(
    candidate: Candidate, problem: Problem, runs: Sequence[Sequence[Trial]], arrivals: Arrivals
) -> Evidence:
    """Return the evidence from several runs of one model on one hardware, without lost or overloaded measurements."""
    group = execution_settings(problem.space.canonical(candidate))
    trials_of_group = [
        trial
        for trials in runs
        for trial in trials
        if execution_settings(problem.space.canonical(trial.candidate)) == group
    ]
    servers = (server for trial in trials_of_group for server in _deployments(trial))
    return Evidence(candidate, problem, tuple(filter(None, servers)), arrivals)


def _deployments(trial: Trial) -> Iterator[MeasuredServer]:
    """Yield the usable measurements of the server of the search, and of each fresh server of the confirmation."""
    yield tuple(filter(_is_usable, all_points([trial])))
    for server in dict.fromkeys(window.server for window in trial.confirmations):
        windows = [window for window in trial.confirmations if window.server == server]
        loads = dict.fromkeys(window.load for window in windows)
        points = (_pool_windows(trial, load, [w.measurement for w in windows if w.load == load]) for load in loads)
        yield tuple(filter(_is_usable, points))


def _pool_windows(trial: Trial, load: LoadPoint, windows: Sequence[Measurement]) -> Point:
    """Return the windows of one server as one measurement."""
    counted = batch_stats.sum_by_size(batch_stats.from_text(window.batch_stats) for window in windows)
    measured = replace(pool_measurements(windows), batch_stats=batch_stats.to_text(counted))
    return trial.point(load, measured)


def _is_usable(point: Point) -> bool:
    measured = point.measurement
    return bool(measured.throughput_infer_per_sec and measured.latency_avg_ms and not measured.overloaded)


@dataclass(frozen=True)
class PlannedConfiguration:
    """A configuration on one kind of hardware that can be planned with.

    ``run`` is the newest run on the hardware, and ``outcome`` its outcome; ``runs`` are the names of all runs.
    ``point`` is the measurement of the configuration in the newest run. ``gpus`` counts those of a replica.
    """

    run: FinishedRun
    outcome: Outcome
    hardware: str
    gpus: int
    runs: tuple[str, ...]
    point: Point
    evidence: Evidence
    sla: Sla

    @property
    def model(self) -> str:
        return self.run.problem.model

    @property
    def builder(self) -> str:
        """Return the kind of a built-in model."""
        return str(self.run.facts.get("builder", "")).partition(" ")[0]

    @property
    def candidate(self) -> Candidate:
        return self.point.candidate

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the newest run."""
        return self.outcome.verdict

    @property
    def undecided_cause(self) -> str:
        """Return why the verdict is UNDECIDED; empty if it is not."""
        cause = summary.undecided_cause(self.outcome)
        return (why_unfinished(self.run) or cause) if cause else ""

    @property
    def next_command(self) -> str:
        """Return the command that continues the test of the newest run or repeats the run; empty without one."""
        return resume_command(self.run) if why_unfinished(self.run) else self.run.next_command

    @property
    def measured(self) -> Point | None:
        """Return the best measurement within ``sla``, the one that ``tune explain`` shows; None without one."""
        return self.outcome.best_within(self.sla, [self.candidate])

    @property
    def throughput(self) -> ConfidenceInterval | None:
        """Return the interval of the throughput of ``measured``; None if fresh servers gave none."""
        confirmed = self.outcome.confirmation_of(self.measured)
        return confirmed.throughput if confirmed else None

    @property
    def deploy_seconds(self) -> float:
        """Return the time until a started server was ready."""
        return trial_of(self.point, self.run.trials).deploy_seconds or START_SECONDS

    @property
    def server_seconds(self) -> float:
        """Return the time to start and measure one more fresh server."""
        trial = trial_of(self.point, self.run.trials)
        servers = len({window.server for window in trial.confirmations})
        measurements = [window.measurement for window in trial.confirmations] or [m for _, m in trial.measurements]
        seconds = sum(m.measure_seconds or 0.0 for m in measurements) / max(1, servers)
        return estimate_start_seconds([trial]) + seconds

    @property
    def request_batch_size(self) -> float:
        """Return the average number of samples of a request."""
        return self.evidence.problem.request_batch_size

    @property
    def devices(self) -> int:
        """Return the number of GPUs of a replica, or 1 for a machine without GPUs."""
        return max(1, self.gpus)

    @property
    def device(self) -> str:
        return "GPU" if self.gpus else "machine"

    @property
    def watts(self) -> float | None:
        """Return the power of the GPUs; None if it is unknown."""
        return self.point.measurement.gpu_power_watts


def choose_configurations(runs: Sequence[FinishedRun], latencies: Sla) -> list[list[PlannedConfiguration]]:
    """Return the configurations to plan with, for each hardware in the order of ``runs``.

    Each hardware has the configuration that its newest run recommends and, if it is another one, the best within
    the SLA. ``latencies`` replace the latency bounds of the runs.

    Raises BadInputError if the runs are of several models, or one recommends nothing.
    """
    models = dict.fromkeys(run.problem.model for run in runs)
    if len(models) > 1:
        raise BadInputError(f"the runs are of different models ({', '.join(models)}); give runs of one model")
    by_hardware: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_hardware.setdefault(hardware_of(run), []).append(run)
    return [_configurations(hardware, same, latencies) for hardware, same in by_hardware.items()]


def hardware_of(run: FinishedRun) -> str:
    """Return the GPUs that the server of a run used with their number, or its CPU."""
    hardware, gpus = run.info["hardware"], run.gpus
    names = [f"{gpus.count(name)}x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)]
    return ", ".join(names) or f"{hardware['cpu']}, {hardware['cpu_count']} CPUs"


def _written_seconds(run: FinishedRun) -> float:
    """Return the time at which the record was written, in seconds since the epoch; 0 if it is unknown."""
    try:
        return datetime.strptime(str(run.info.get("written")), WRITTEN_FORMAT).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _configurations(hardware: str, runs: Sequence[FinishedRun], latencies: Sla) -> list[PlannedConfiguration]:
    """Return the configurations of the newest of ``runs``, which are all of one hardware. Raises BadInputError."""
    outcomes = [_outcome_of(run) for run in runs]
    newest, outcome = max(zip(runs, outcomes, strict=True), key=lambda pair: _written_seconds(pair[0]))
    latencies = latencies or newest.problem.sla.latencies
    if not latencies:
        raise BadInputError(f"{newest.folder.path}: has no latency bound; give one, such as --sla-p95 20ms")
    for run in runs:
        _check_same_conditions(run, newest)
    request_times, trials, names = _arrivals_of(newest), [run.trials for run in runs], tuple(run.name for run in runs)
    return [
        PlannedConfiguration(
            newest,
            outcome,
            hardware,
            len(newest.gpus),
            names,
            point,
            collect_evidence(point.candidate, newest.problem, trials, request_times),
            latencies,
        )
        for point in _points(newest, latencies)
    ]


def _arrivals_of(run: FinishedRun) -> Arrivals:
    """Return the arrival process of the measurements of ``run``. Raises BadInputError if its recording is missing."""
    text = run.options.request_times
    if not is_distribution(text) and (fault := file_fault(Path(text))):
        folder = show_path(run.folder.path)
        raise BadInputError(f"{show_path(text)}: {fault}; put back the recording that {folder} was measured with")
    return parse_arrivals(text)


def _outcome_of(run: FinishedRun) -> Outcome:
    """Return the outcome of ``run``. Raises BadInputError if it recommends nothing."""
    if run.outcome is None or run.outcome.recommended is None:
        raise BadInputError(
            f"{run.folder.path}: recommends no configuration; run `tune` again, with a looser bound or a longer "
            "--budget, or give another run"
        )
    return run.outcome


def _check_same_conditions(run: FinishedRun, newest: FinishedRun) -> None:
    """Raise BadInputError if ``run`` measured another server, another model or other requests than ``newest``."""
    for aspect in compare_conditions(run, newest):
        if aspect.name in SAME_ASPECTS and aspect.differences:
            name, (value, other) = next(iter(aspect.differences.items()))
            raise BadInputError(
                f"{run.folder.path} and {newest.folder.path}: have the same hardware, but differ in the "
                f"{aspect.name} ({name}: {value or 'none'}, {other or 'none'}); give only one of them"
            )


def _points(run: FinishedRun, latencies: Sla) -> list[Point]:
    """Return the recommended point of the run, then the best or closest one within ``latencies``, if it is another.

    Under open-loop traffic either may be the better one.
    """
    other_bounds = run.problem.sla.without(*(bound.metric for bound in run.problem.sla.latencies))
    problem = replace(run.problem, sla=Sla((*latencies, *other_bounds)))
    outcome: Outcome = assess(run.trials, problem, run.baseline, run.dynamic_batching)
    points = [point for point in (run.recommended, outcome.shown) if point is not None]
    return list({point.candidate: point for point in reversed(points)}.values())[::-1]
