"""Replay of searches on a recorded table, and the comparison of search methods over seeds."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from objectives.metrics import METRICS, Measurement
from objectives.sla import Constraint, Sla
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, ServerFault
from optimizer.core.interfaces import Searcher
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import FreshServer, LoadPoint, Point, Trial, TrialRole, latest_points
from optimizer.measure.measurer import Measurer
from optimizer.results import configuration_text, formatting, result_document
from optimizer.results.terminal_output import print_indented, print_line, print_table, wrap
from optimizer.search import make_searcher
from optimizer.search.transfer import TransferredStudy
from optimizer.store.recorded_rows import RecordedRow
from optimizer.store.recording import DEPLOY_SECONDS, RecordedServer, Recording, baselines
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

TOLERANCES = (0.05, 0.01)  # shares of the table's best by which a search may fall short of it
WINDOW_SECONDS = 0.55  # if a table has no times: the median of results/dlrm/sample

SearcherFactory = Callable[[Problem, int], Searcher]  # makes a searcher from the problem and a seed


def recorded_problem(recording: Recording, bounds: Mapping[str, float]) -> Problem:
    """Return the problem of the highest throughput within ``bounds`` by metric, such as ``{"p95": 20.0}``.

    Raises BadInputError if one of the metrics was not recorded.
    """
    sla = Sla.from_bounds(bounds)
    for constraint in sla:
        if not recording.has(constraint.metric):
            raise _not_recorded(recording, constraint)
    return Problem(
        model="recorded",
        space=recording.space,
        request_batch_size=recording.request_batch_size,
        max_concurrency=max((row.load.concurrency for row in recording.rows if row.load), default=1),
        sla=sla,
        cpu_count=recording.cpu_count,
    )


def _not_recorded(recording: Recording, constraint: Constraint) -> BadInputError:
    """Return the error about a bound on a time that no row of the table has."""
    metric = METRICS[constraint.metric]
    name, column = metric.short_name, f"{metric.name.replace('-', '_')}_ms"
    if metric.timing and metric.needs_own_client:
        column = metric.timing.sketch_field
    recorded = [other.short_name for other in METRICS.values() if other.timing and recording.has(other.name)]
    return BadInputError(
        f"{recording.name}: --sla-{name}: the table has no {name} (the column {column} is missing or empty); bound "
        f"{' or '.join(recorded)}, which it has, or measure a table with this bound: "
        f"`tune --search grid --sla-{name} {constraint.bound:g}ms MODEL`"
    )


@dataclass(frozen=True)
class Effort:
    """The cost of a search: loads of a configuration, and measurements of a configuration at one load."""

    deployments: float
    measurements: float


NEVER = Effort(math.inf, math.inf)


@dataclass(frozen=True)
class ReplayResult:
    """The cost of one search, without confirmation, and its recommendation.

    Attributes:
        effort: The cost until the search ended.
        until: For each tolerance, the cost until a value of the objective within it was measured, or ``NEVER``.
        recommended: The recommended row.
        regret: The shortfall of the recommendation from the table's best value of the objective, as a share of that
            value; 1 without a recommendation.
        regrets: The regret if the search had ended after each deployment.
        seconds: The time until the end of each deployment: of all deployments and measurements so far, without the
            search method's own.
    """

    effort: Effort
    until: Mapping[float, Effort]
    recommended: RecordedRow | None
    regret: float
    regrets: tuple[float, ...]
    seconds: tuple[float, ...]

    def regret_after(self, deployments: int) -> float:
        """Return the regret after at most ``deployments``."""
        return self.regrets[min(deployments, len(self.regrets)) - 1]


def replay(
    recording: Recording,
    problem: Problem,
    method: str | SearcherFactory,
    seed: int,
    max_trials: int,
    *,
    transferred: TransferredStudy | None = None,
    server: RecordedServer | None = None,
) -> ReplayResult:
    """Search ``recording`` until the method ends or ``max_trials`` configurations have been tried.

    As in a real run the recorded baselines are measured first and count as deployments. The same arguments give the
    same result. The measurements of ``server`` may differ from the recorded ones; costs and regrets are those of the
    recorded ones.

    Args:
        recording: The recorded table.
        problem: The space, constraints and objective, which is the throughput or the goodput.
        method: The search method: one of SEARCHERS, or a function that makes the searcher.
        seed: Seed of the search.
        max_trials: The maximum number of configurations.
        transferred: The study of another machine to begin with; only for a method of SEARCHERS.
        server: The server that is measured; None for the recorded measurements.

    Raises:
        BadInputError: The method lacks a package.
        ValueError: No row meets the constraints.
    """
    best_value = _value(_best_row(recording, problem).measurement, problem)
    meter = _Meter(recording, problem, best_value)
    server = server or recording.server
    if isinstance(method, str):
        searcher = make_searcher(method, problem, seed, transferred=transferred)
    else:
        searcher = method(problem, seed)
    scheduler = Scheduler(problem, searcher, Budget(math.inf, max_trials), Stopwatch(), baselines(problem.space))
    with contextlib.suppress(ServerFault):  # no deployment succeeded
        run_trials(scheduler, server, Measurer(server, server, DiscardingRecord(), meter))
    row = _confirmed_row(recording, problem, scheduler.trials)
    return ReplayResult(
        effort=Effort(len(meter.best_by_deployment), meter.measurements),
        until={tolerance: meter.until.get(tolerance, NEVER) for tolerance in TOLERANCES},
        recommended=row,
        regret=_regret(_value(row.measurement, problem) if row else None, best_value),
        regrets=tuple(_regret(reached, best_value) for reached in meter.best_by_deployment),
        seconds=tuple(meter.seconds_by_deployment),
    )


def _best_row(recording: Recording, problem: Problem) -> RecordedRow:
    best = recording.best(problem)
    if best is None:
        raise ValueError(f"no row of {recording.name} meets the constraints")
    return best


def _confirmed_row(recording: Recording, problem: Problem, trials: Sequence[Trial]) -> RecordedRow | None:
    """Return the recorded row that a confirmation of ``trials`` would end with.

    It tries the measured points that met the bounds, the best one first. With noise the recorded
    measurement of such a point may violate them. If each does, it tries lower loads. None if no row meets the bounds.
    """
    points = [point for point in latest_points(trials) if problem.best_point([point])]
    points.sort(key=lambda point: -_value(point.measurement, problem))
    lower = [(point.candidate, load) for point in points for load in _lower_loads(recording, point)]
    for candidate, load in [*((point.candidate, point.load) for point in points), *lower]:
        row = recording.answers[recording.space.canonical(candidate), load]
        if problem.best_point([row]):
            return row
    return None


def _lower_loads(recording: Recording, point: Point) -> list[LoadPoint]:
    candidate = recording.space.canonical(point.candidate)
    loads = [load for other, load in recording.answers if other == candidate and load]
    lower = [load for load in loads if load.concurrency < point.load.concurrency]
    return sorted(lower, key=lambda load: -load.concurrency)


@dataclass
class _Meter:
    """A progress observer that counts the cost of a search until ``best`` is reached and until it ends.

    ``best`` is the objective's best value in infer/s. ``best_by_deployment`` is the recommendation's value if the
    search had ended after each deployment. It is that of the recorded measurement, whatever noise was added to it.
    ``seconds_by_deployment`` is the time until then.
    """

    recording: Recording
    problem: Problem
    best: float
    candidate: Candidate | None = None
    trials: list[Trial] = field(default_factory=list)
    best_by_deployment: list[float | None] = field(default_factory=list)
    seconds_by_deployment: list[float] = field(default_factory=list)
    measurements: int = 0
    until: dict[float, Effort] = field(default_factory=dict)

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None:
        self.candidate = self.recording.space.canonical(candidate)
        self.best_by_deployment.append(self.best_by_deployment[-1] if self.best_by_deployment else None)
        before = self.seconds_by_deployment[-1] if self.seconds_by_deployment else 0.0
        deploy_seconds = self.recording.deploy_seconds.get(self.candidate, DEPLOY_SECONDS)
        self.seconds_by_deployment.append(before + deploy_seconds)

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        self.measurements += 1
        self.seconds_by_deployment[-1] += measurement.measure_seconds or WINDOW_SECONDS
        assert self.candidate is not None
        recorded = self.recording.answers[self.candidate, load].measurement
        if not recorded.stable or not self.problem.sla.is_met(recorded):
            return
        value = _value(recorded, self.problem)
        for tolerance in TOLERANCES:
            if value >= (1 - tolerance) * self.best:
                self.until.setdefault(tolerance, Effort(len(self.best_by_deployment), self.measurements))

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self.trials.append(trial)
        row = _confirmed_row(self.recording, self.problem, self.trials)
        self.best_by_deployment[-1] = _value(row.measurement, self.problem) if row else None


class DiscardingRecord:
    """A record that stores nothing, because a replay takes seconds and is never resumed."""

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, fresh: FreshServer | None = None
    ) -> None: ...

    def append_failure(self, trial: Trial) -> None: ...

    def read(self) -> list[Trial]:
        return []


def _regret(reached: float | None, best: float) -> float:
    if reached is None:
        return 1.0
    return 1 - reached / best if best else 0.0


def _value(measurement: Measurement, problem: Problem) -> float:
    return problem.objectives[0].value(measurement) or 0.0


WARM = "warm"


@dataclass(frozen=True)
class Spread:
    """The median over seeds, and the 90th percentile (the smallest value that at least 90 % do not exceed)."""

    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), sorted(values)[-(-9 * len(values) // 10) - 1])


@dataclass(frozen=True)
class MethodComparison:
    """The results of all replays of one table.

    ``runs`` has a list of results by seed for each method. The name of a method with a warm start ends with WARM.
    """

    recording: Recording
    problem: Problem
    best: RecordedRow
    runs: dict[str, list[ReplayResult]]


def compare(
    recording: Recording,
    problem: Problem,
    methods: Sequence[str],
    *,
    seeds: Sequence[int],
    max_trials: int,
    transferred: TransferredStudy | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> MethodComparison:
    """Replay each method with each seed, without and, if given, with the warm start ``transferred``.

    ``on_progress`` receives a line of progress before each replay.

    Raises:
        BadInputError: A method lacks a package.
        ValueError: No row meets the constraints.
    """
    runs: dict[str, list[ReplayResult]] = {}
    for method in methods:
        for start in (None, transferred) if transferred else (None,):
            name = f"{method} {WARM}" if start else method
            for i, seed in enumerate(seeds, 1):
                on_progress(f"{name}, {i} of {len(seeds)}")
                result = replay(recording, problem, method, seed, max_trials, transferred=start)
                runs.setdefault(name, []).append(result)
    return MethodComparison(recording, problem, _best_row(recording, problem), runs)


def document(comparison: MethodComparison) -> dict[str, dict[str, Any]]:
    """Return the document of ``--json``. Over several seeds it has the configuration recommended most often."""
    return {
        method: {
            "regret": _number_or_spread([run.regret for run in runs]),
            "deployments": _number_or_spread([run.effort.deployments for run in runs]),
            "measurements": _number_or_spread([run.effort.measurements for run in runs]),
            "recommended": _entry(Counter(run.recommended for run in runs).most_common(1)[0][0]),
            "best_in_table": _entry(comparison.best),
        }
        for method, runs in comparison.runs.items()
    }


def _number_or_spread(values: Sequence[float]) -> float | dict[str, float]:
    """Return a single value, or the median and the 90th percentile of several ones."""
    if len(values) == 1:
        return values[0]
    spread = Spread.of(values)
    return {"median": spread.median, "p90": spread.p90}


def _entry(row: RecordedRow | None) -> dict[str, object] | None:
    """Return a row as the document of a run shows it, with the line of the table instead of the trial's number."""
    if row is None:
        return None
    values = result_document.entry(row.point)
    return {name: value for name, value in values.items() if name != "trial"} | {"line": row.line}


def print_comparison(console: Console, comparison: MethodComparison) -> None:
    """Print the table's size, one row for each method (over seeds two: median and p90), and the table's best row."""
    several = any(len(runs) > 1 for runs in comparison.runs.values())
    for line in wrap(_headline(comparison), console.width):
        print_line(console, line, "bold")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("\nsearch")
    if several:
        table.add_column()
    for tolerance in TOLERANCES:
        table.add_column(f"within {tolerance * 100:g} %\ndeployed", justify="right")
        table.add_column("\nmeasured", justify="right")
    table.add_column("stopped\ndeployed", justify="right")
    table.add_column("\nregret", justify="right")
    for method, runs in comparison.runs.items():
        if several:
            table.add_row(method, "median", *_cells(runs, lambda spread: spread.median))
            table.add_row("", "p90", *_cells(runs, lambda spread: spread.p90))
        else:
            table.add_row(method, *_cells(runs, lambda spread: spread.median))
    print_table(console, table)
    print_line(console)
    print_line(console, "best in the table", "bold")
    for text in (
        describe_row(comparison.best, comparison.problem),
        configuration_text.configuration(comparison.best.candidate),
    ):
        print_indented(console, text, first_indent="  ", indent="    ")


def describe_closest_row(recording: Recording, problem: Problem) -> str:
    """Return a line saying that no row meets the constraints and which row is closest to them."""
    goal = formatting.bounds(problem.sla)
    row = recording.closest(problem)
    kind = "stable row" if row and problem.sla.is_met(row.measurement) else "row"
    lacking = f"{recording.name}: no {kind} meets {goal}" if goal else f"{recording.name}: no row is stable"
    if row is None:
        return f"{lacking}, and no measurement is stable"
    return f"{lacking}; the closest: {configuration_text.configuration(row.candidate)}: {describe_row(row, problem)}"


def describe_unstable_rows(recording: Recording, problem: Problem) -> str:
    """Return a line if most rows within the bounds are not stable; otherwise an empty text."""
    met = [row for row in recording.rows if row.load and problem.sla.is_met(row.measurement)]
    unstable = sum(not row.measurement.stable for row in met)
    if 2 * unstable <= len(met):
        return ""
    goal = formatting.bounds(problem.sla)
    rows = f"rows that meet {goal}" if goal else "rows"
    return (
        f"{recording.name}: {unstable:,} of {len(met):,} {rows} are not stable, and only the others count: a search "
        "that recommends none of these has a regret of 100 %"
    )


def describe_row(row: RecordedRow, problem: Problem) -> str:
    """Return a line such as ``12,345 infer/s, p95 18.2 ms, concurrency 24 (line 17)``."""
    return f"{formatting.performance(row.point, problem.sla.judged_latency)} (line {row.line})"


def _headline(comparison: MethodComparison) -> str:
    recording = comparison.recording
    loads = {row.load.concurrency for row in recording.rows if row.load}
    seeds = max(len(runs) for runs in comparison.runs.values())
    return (
        f"{recording.name}: {formatting.count(len(recording.space), 'configuration')}, "
        f"{formatting.count(len(loads), 'load')}; "
        f"{formatting.bounds(comparison.problem.sla) or 'no bound'}; {formatting.count(seeds, 'seed')}"
    )


def _cells(runs: Sequence[ReplayResult], pick: Callable[[Spread], float]) -> list[str]:
    """Return the cells of a row after its name: the statistic that ``pick`` returns for each number of ``runs``."""
    counts: list[list[float]] = []
    for tolerance in TOLERANCES:
        counts.append([run.until[tolerance].deployments for run in runs])
        counts.append([run.until[tolerance].measurements for run in runs])
    counts.append([run.effort.deployments for run in runs])
    regret = pick(Spread.of([run.regret for run in runs]))
    return [*(_count(pick(Spread.of(column))) for column in counts), formatting.percent(regret, 1)]


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:,.1f}".removesuffix(".0")
