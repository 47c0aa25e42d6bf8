"""Observers of the progress of a run: none, one line per trial, or a live display with a scatter plot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from objectives import pareto
from objectives.metrics import METRICS, Measurement
from objectives.pooled_windows import pool_measurements
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.interfaces import ProgressObserver
from optimizer.core.safe_text import one_line
from optimizer.core.trial import LoadPoint, Point, Trial, TrialRole, latest_points
from optimizer.machine.hardware import Hardware
from optimizer.results import configuration_text, formatting
from optimizer.results.outcome_values import shown_metrics
from optimizer.results.recommendation import best_load, front_metrics
from optimizer.results.terminal_output import wrap
from optimizer.results.terminal_plot import XY, scatter

NOTHING_MEASURED = "nothing was measured"


class QuietObserver:
    """Prints nothing."""

    def __enter__(self) -> QuietObserver:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None:
        pass

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        pass

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        pass


class PlainObserver(QuietObserver):
    """Prints one unwrapped line per finished trial: elapsed time, configuration, metrics and time left.

    After a confirmation the metrics are those of all windows on that fresh server.
    """

    def __init__(self, console: Console, problem: Problem, budget: Budget) -> None:
        self._console, self._problem, self._budget = console, problem, budget
        self._started = time.monotonic()
        self._roles: dict[int, str] = {}  # roles of running trials, by number
        self._servers: dict[int, int] = {}  # newest fresh server that was shown, by trial

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None:
        self._roles[number] = role

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        name = self._roles.get(trial.number, "")
        role = "" if name in ("", "search") else f" ({name.replace('_', ' ')})"
        time_left = formatting.clock(self._budget.seconds_left())
        best_so_far = ""
        if best is not None:
            goal = self._problem.objectives[0]
            label = (
                ""
                if goal.name in ("throughput", formatting.OUTPUT_THROUGHPUT)
                else f"{formatting.goal_label(goal.name)} "
            )
            best_so_far = f"; best so far: trial {best.trial}, {label}{formatting.value_of(best, goal.name)}"
        self._print_line(
            f"trial {trial.number}{role}: {configuration_text.configuration(trial.candidate)}: "
            f"{self._describe_trial(trial)}{best_so_far}; {time_left} left"
        )

    def _describe_trial(self, trial: Trial) -> str:
        """Return the metrics of the trial, or of its newest fresh server, or why there are none."""
        if trial.status == "failed":
            return f"failed: {trial.reason}"
        if self._roles.get(trial.number) == "confirm":
            server = trial.confirmations[-1].server if trial.confirmations else None
            if server is None or server == self._servers.get(trial.number):  # the newest server was lost
                return NOTHING_MEASURED
            self._servers[trial.number] = server
            return self._describe_point(_newest_confirmation(trial))
        best = best_load(trial, self._problem)
        if best.point is None:
            return f"failed: {_last_reason(trial)}"
        performance = self._describe_point(best.point)
        if best.meets_sla:  # a disturbed measurement has less weight, so another trial may be the best one
            return performance if best.point.measurement.stable else f"{performance}, disturbed"
        return f"{performance}, {self._missed(best.point)}"

    def _missed(self, point: Point) -> str:
        """Return why the search cannot recommend ``point``, with the missed bounds if the SLA has several."""
        missed = self._problem.sla.missed(point.measurement)
        if not missed:
            return "its windows disagree"
        return "misses the bound" if len(self._problem.sla) == 1 else f"misses {formatting.bounds(missed)}"

    def _describe_point(self, point: Point) -> str:
        if not point.measurement.has_values:
            return point.measurement.reason or NOTHING_MEASURED
        return formatting.performance(point, *shown_metrics(self._problem))

    def _print_line(self, line: str) -> None:
        elapsed = formatting.clock(time.monotonic() - self._started)
        self._console.print(Text(one_line(f"{elapsed}  {line}")), soft_wrap=True)


class DisplayedTrial(NamedTuple):
    """A running or finished trial in the live display; the role is empty if it is not known."""

    role: str
    trial: Trial


MIN_COLUMNS_FOR_LOADS = 70
MAX_ROWS = 12
OTHER_LINES = 11  # lines of the display without finished trials and plot
ECHO_COLUMNS = 4  # at the end of the last line: if "^C^C" wrapped there, the display could not be erased as a whole
MIN_ROWS, MAX_PLOT_HEIGHT = 4, 16  # minimum of finished trials next to a plot; maximum of lines of the plot


class LiveObserver:
    """A display that disappears when it ends.

    A thread redraws it only once a second, because drawing takes CPU time from the measurements.
    """

    def __init__(self, console: Console, problem: Problem, budget: Budget, hardware: str = "") -> None:
        self._console, self._problem, self._budget = console, problem, budget
        self._started = time.monotonic()
        self._hardware = hardware
        self._latency = problem.sla.judged_latency
        self._throughput = front_metrics(problem).throughput
        self._shown_metrics = shown_metrics(problem)
        self._finished: tuple[DisplayedTrial, ...] = ()
        self._running: tuple[DisplayedTrial, ...] = ()  # several on a cluster; the last one changed last
        self._best: Point | None = None
        self._plotted: tuple[list[Point], list[Point]] = ([], [])  # points of the finished trials, and their front
        # stdout may be a pipe for the result, so it is not redirected
        self._live = Live(
            console=console,
            get_renderable=self._view,
            refresh_per_second=1,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> LiveObserver:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None:
        self._running = (*_without(self._running, number), DisplayedTrial(role, Trial(number, candidate)))
        self._live.refresh()

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        for role, trial in self._running:
            if trial.number == number:
                measured_trial = Trial(number, trial.candidate, (*trial.measurements, (load, measurement)))
                self._running = (*_without(self._running, number), DisplayedTrial(role, measured_trial))
                break
        self._live.refresh()

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        role = next((role for role, running in self._running if running.number == trial.number), "")
        self._finished = (*_without(self._finished, trial.number), DisplayedTrial(role, trial))
        points = self._plottable([finished.trial for finished in self._finished])
        self._plotted = points, self._front(points)
        self._running, self._best = _without(self._running, trial.number), best
        self._live.refresh()

    # -- drawing: runs in the redrawing thread, so each attribute above is replaced as a whole ----------------

    def _view(self) -> RenderableType:
        """Return the whole display."""
        goal = formatting.bounds(self._problem.sla) or "no bound"
        header = Text.assemble((self._problem.model, "bold"), f"  {goal}")
        lines: list[RenderableType] = [header]
        if self._hardware:
            lines.append(Text(self._hardware, "dim"))
        plot = self._plot()
        lines += [Text(""), self._table(len(plot)), Text(""), *plot, self._running_line(), *self._best_lines()]
        lines += [Text(""), self._time_left()]
        for line in lines:
            if isinstance(line, Text):
                line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _plot(self) -> list[Text]:
        """Return the plot of all points measured so far; empty if there is no room, or no encoding for its dots."""
        if self._console.options.ascii_only:
            return []
        (finished, front), current = self._plotted, self._plottable([running.trial for running in self._running])
        bound_ms = self._problem.sla.latency_bound_ms(self._latency)
        return scatter(
            self._places([*finished, *current]),
            self._places(self._front([*front, *current])),
            bound_ms,
            formatting.short_metric(self._latency),
            self._console.width,
            min(MAX_PLOT_HEIGHT, self._console.height - OTHER_LINES - MIN_ROWS),
            self._throughput.unit,
        )

    def _plottable(self, trials: Sequence[Trial]) -> list[Point]:
        """Return the points of ``trials`` whose latency and throughput are known and positive."""
        latency = METRICS[self._latency]
        measured = latest_points(trials)
        return [p for p in measured if self._throughput.value(p.measurement) and latency.value(p.measurement)]

    def _front(self, points: Sequence[Point]) -> list[Point]:
        return pareto.pareto_front(points, (self._throughput, METRICS[self._latency]))

    def _places(self, points: Sequence[Point]) -> list[XY]:
        """Return (latency in ms, throughput) of each point."""
        latency = METRICS[self._latency]
        return [
            (latency.value(point.measurement) or 0.0, self._throughput.value(point.measurement) or 0.0)
            for point in points
        ]

    def _table(self, plot_lines: int) -> Table:
        """Return the newest finished trials and the running ones, as many as fit above ``plot_lines``."""
        roomy = self._console.width >= MIN_COLUMNS_FOR_LOADS
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
        table.add_column("trial", justify="right", no_wrap=True)
        table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=1)
        heading = next(iter(_goodput(self._problem)), self._throughput.unit)
        table.add_column(heading, justify="right", no_wrap=True, min_width=7)
        table.add_column(f"{formatting.short_metric(self._latency)} ms", justify="right", no_wrap=True, min_width=6)
        if roomy:
            table.add_column("loads", justify="right", no_wrap=True)
        room = max(1, min(MAX_ROWS, self._console.height - OTHER_LINES - plot_lines))
        finished = self._finished[-max(1, room - len(self._running[1:])) :]
        for trials, style in ((finished, None), (self._running[-room:], "cyan")):
            for role, trial in trials:
                cells = self._row(role, trial)
                table.add_row(*cells if roomy else cells[:4], style=style)
        return table

    def _row(self, role: str, trial: Trial) -> tuple[RenderableType, ...]:
        """Return the cells of a trial: number, configuration, throughput, latency and number of loads."""
        name = Text(configuration_text.configuration(trial.candidate))
        if role not in ("", "search"):
            name = Text.assemble((f"{role.replace('_', ' ')}: ", "bold"), name)
        loads = str(len({load for load, _ in trial.measurements}))
        if trial.status == "failed":
            name = Text.assemble(("failed: ", "red"), " ".join(trial.reason.split()))
            return str(trial.number), name, "–", "–", loads
        best = best_load(trial, self._problem)
        point, meets_sla = best.point, best.meets_sla
        if role == "confirm" and trial.confirmations:
            point = _newest_confirmation(trial)
            meets_sla = self._problem.sla.is_met(point.measurement)
        if point is None:
            if trial.measurements:
                name = Text.assemble(("failed: ", "red"), _last_reason(trial))
            return str(trial.number), name, "–", "–", loads
        values = [metric.value(point.measurement) for metric in (self._throughput, METRICS[self._latency])]
        style = "" if meets_sla else "red"
        return str(trial.number), name, *(Text(formatting.number(value), style) for value in values), loads

    def _running_line(self) -> RenderableType:
        """Return the line on the trial that changed last, with its newest measurement."""
        if not self._running:
            return Text("")
        trial = self._running[-1].trial
        state = "deploying and warming up"
        if trial.measurements:
            point = trial.point(*trial.measurements[-1])
            state = point.measurement.reason or formatting.performance(point, *self._shown_metrics)
        return Text.assemble(("now          ", "bold"), f"trial {trial.number}: {state}")

    def _best_lines(self) -> list[RenderableType]:
        """Return two lines: the best performance so far and its configuration."""
        if self._best is None:
            within = formatting.bounds(self._problem.sla)
            nothing = f"nothing within {within} yet" if within else "nothing measured yet"
            if not self._finished:  # an earlier session or the trial in progress may have measurements
                nothing = "shown after the first trial"
            return [Text.assemble(("best so far  ", "bold"), nothing), Text("")]
        performance = formatting.performance(self._best, *self._shown_metrics)
        configuration = configuration_text.configuration(self._best.candidate)
        return [
            Text.assemble(("best so far  ", "bold"), (performance, "bold green")),
            Text(f"trial {self._best.trial}: {configuration}"),
        ]

    def _time_left(self) -> RenderableType:
        """Return the progress bar of the budget, with the elapsed time and the number of trials."""
        total = max(self._budget.seconds, 1e-9)
        left_seconds = min(max(0.0, self._budget.seconds_left()), total)
        elapsed = formatting.clock(time.monotonic() - self._started)
        most = f" of at most {self._budget.max_trials}" if self._budget.max_trials else ""
        trials = max((finished.trial.number + 1 for finished in self._finished), default=0)
        done = formatting.count(trials, "trial") + most
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.width = max(1, self._console.width - ECHO_COLUMNS)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=total, completed=total - left_seconds)
        row.add_row(bar, f"{formatting.clock(left_seconds)} left · {elapsed} elapsed · {done}")
        return row


def _without(displayed: Sequence[DisplayedTrial], number: int) -> tuple[DisplayedTrial, ...]:
    return tuple(entry for entry in displayed if entry.trial.number != number)


def _goodput(problem: Problem) -> list[str]:
    """Return the name of the goodput if it is maximized; empty otherwise."""
    goal = front_metrics(problem).throughput
    return [goal.name] if goal is METRICS["goodput"] else []


def _last_reason(trial: Trial) -> str:
    """Return why the last measurement of the search has no values."""
    reason = trial.measurements[-1][1].reason if trial.measurements else ""
    return one_line(reason) or NOTHING_MEASURED


def _newest_confirmation(trial: Trial) -> Point:
    """Return all windows of the newest fresh server of ``trial``, which has confirmations, as one point."""
    last = trial.confirmations[-1]
    windows = [window.measurement for window in trial.confirmations if window.server == last.server]
    return trial.point(last.load, pool_measurements(windows))


AnyObserver: TypeAlias = LiveObserver | QuietObserver


class Progress(NamedTuple):
    """How a run shows its progress.

    Attributes:
        on_progress: Shows one line, such as that of a slow preparation.
        open_observer: Opens the display of a run on the hardware of its server.
    """

    on_progress: Callable[[str], None]
    open_observer: Callable[[Problem, Budget, Hardware], AbstractContextManager[ProgressObserver]]


def make_progress(console: Console, log: str | None = None, *, with_time: bool = False) -> Progress:
    """Return the functions that show progress on ``console``.

    ``log`` is one of ``LOGS``; None selects the live display on a terminal, and a line for each trial otherwise.
    ``with_time`` adds the time to each line, except above the live display.
    """
    kind = log or ("live" if console.is_terminal else "plain")

    def on_progress(line: str) -> None:
        text = one_line(line)
        if kind == "live":
            text = "\n".join(wrap(text, console.width))
        elif with_time:
            text = f"{time.strftime('%H:%M:%S')} {text}"
        if kind != "none":
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    def open_observer(problem: Problem, budget: Budget, hardware: Hardware) -> AnyObserver:
        if kind == "plain":
            return PlainObserver(console, problem, budget)
        return LiveObserver(console, problem, budget, str(hardware)) if kind == "live" else QuietObserver()

    return Progress(on_progress, open_observer)
