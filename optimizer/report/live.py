"""What is seen while a study runs: nothing (QuietWatcher), or a display that redraws itself (LiveWatcher)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from objectives import pareto
from objectives.metrics import METRICS, Measurement
from optimizer.problem import Problem
from optimizer.report import summary, words
from optimizer.report.scatter import scatter
from optimizer.trial import Candidate, LoadPoint, Point, Trial, latest_points

if TYPE_CHECKING:
    from optimizer.budget import Budget

LEAST_COLUMNS_FOR_LOADS = 70
MOST_ROWS = 12
OTHER_LINES = 11  # of the display, besides the finished trials and the plot
LEAST_ROWS, MOST_PLOT = 4, 16  # finished trials that are shown beside a plot; lines of the plot


class QuietWatcher:
    """Watches without a word: for pipes and files."""

    def __enter__(self) -> QuietWatcher:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        pass

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        pass

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        pass


class LiveWatcher:
    """A display on a terminal, gone when it ends. ``started``: of the command, by ``time.monotonic()``.

    A thread redraws it once a second for the clock; the machine's cores belong to what is measured.
    """

    def __init__(
        self,
        console: Console,
        problem: Problem,
        budget: Budget,
        started: float | None = None,
        hardware: str = "",
    ) -> None:
        self._console, self._problem, self._budget = console, problem, budget
        self._started = time.monotonic() if started is None else started
        self._hardware = hardware
        self._latency = words.judged_latency(problem.constraints)
        self._finished: tuple[tuple[str, Trial], ...] = ()
        self._running: tuple[tuple[str, Trial], ...] = ()  # several on a cluster; the last has news
        self._best: Point | None = None
        self._drawn: tuple[list[Point], list[Point]] = ([], [])  # of the finished trials: points, and their front
        # stdout may be a pipe that takes the result: it is left alone
        self._live = Live(
            console=console,
            get_renderable=self._view,
            refresh_per_second=1,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> LiveWatcher:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self._running = (*_others(self._running, number), (role, Trial(number, candidate)))
        self._live.refresh()

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        for role, trial in self._running:
            if trial.number == number:
                known = Trial(number, trial.candidate, (*trial.measurements, (load, measurement)))
                self._running = (*_others(self._running, number), (role, known))
                break
        self._live.refresh()

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        role = next((role for role, one in self._running if one.number == trial.number), "")
        self._finished = (*_others(self._finished, trial.number), (role, trial))
        known = self._known([one for _, one in self._finished])
        self._drawn = known, self._front(known)
        self._running, self._best = _others(self._running, trial.number), best
        self._live.refresh()

    # -- the picture: read by the redrawing thread, so each attribute is replaced as a whole ----------------

    def _view(self) -> RenderableType:
        goal = words.bounds(self._problem.constraints) or "no bound"
        header = Text.assemble((self._problem.model, "bold"), f"  {goal}")
        lines: list[RenderableType] = [header]
        if self._hardware:
            lines.append(Text(self._hardware, "dim"))
        plot = self._plot()
        lines += [Text(""), self._table(len(plot)), Text(""), *plot, self._now(), *self._best_lines()]
        lines += [Text(""), self._time_left()]
        for line in lines:
            if isinstance(line, Text):
                line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _plot(self) -> list[Text]:
        """The front as it grows, of all that was measured so far; empty where there is no room."""
        (finished, front), current = self._drawn, self._known([trial for _, trial in self._running])
        bound = min((c.bound for c in self._problem.constraints if c.metric == self._latency), default=None)
        return scatter(
            self._places([*finished, *current]),
            self._places(self._front([*front, *current])),
            bound,
            words.short(self._latency),
            self._console.width,
            min(MOST_PLOT, self._console.height - OTHER_LINES - LEAST_ROWS),
        )

    def _known(self, trials: Sequence[Trial]) -> list[Point]:
        latency = METRICS[self._latency]
        measured = latest_points(trials)
        return [point for point in measured if point.throughput_infer_per_sec and latency.value(point.measurement)]

    def _front(self, known: Sequence[Point]) -> list[Point]:
        return pareto.front(known, (METRICS["throughput"], METRICS[self._latency]))

    def _places(self, known: Sequence[Point]) -> list[tuple[float, float]]:
        latency = METRICS[self._latency]
        return [(latency.value(one.measurement) or 0.0, one.throughput_infer_per_sec) for one in known]

    def _table(self, plot_lines: int) -> Table:
        roomy = self._console.width >= LEAST_COLUMNS_FOR_LOADS
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
        table.add_column("trial", justify="right", no_wrap=True)
        table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("infer/s", justify="right", no_wrap=True, min_width=7)
        table.add_column(f"{words.short(self._latency)} ms", justify="right", no_wrap=True, min_width=6)
        if roomy:
            table.add_column("loads", justify="right", no_wrap=True)
        room = max(1, min(MOST_ROWS, self._console.height - OTHER_LINES - plot_lines))
        for role, trial in self._finished[-max(1, room - len(self._running[1:])) :]:
            cells = self._row(role, trial)
            table.add_row(*cells if roomy else cells[:4])
        for role, trial in self._running[-room:]:
            cells = self._row(role, trial)
            table.add_row(*cells if roomy else cells[:4], style="cyan")
        return table

    def _row(self, role: str, trial: Trial) -> tuple[RenderableType, ...]:
        name = Text(words.configuration(trial.candidate))
        if role not in ("", "search"):
            name = Text.assemble((f"{role.replace('_', ' ')}: ", "bold"), name)
        loads = str(len({load for load, _ in trial.measurements}))
        if trial.status == "failed":
            name = Text.assemble(("failed: ", "red"), " ".join(trial.reason.split()))
            return str(trial.number), name, "–", "–", loads
        shown, met = summary.best_load(trial, self._problem)
        if shown is None:
            return str(trial.number), name, "–", "–", loads
        style = "" if met else "red"
        return str(trial.number), name, *(Text(figure, style) for figure in self._figures(shown)), loads

    def _figures(self, point: Point) -> tuple[str, str]:
        measurement = point.measurement
        latency = METRICS[self._latency].value(measurement)
        return words.number(measurement.throughput_infer_per_sec), words.number(latency)

    def _now(self) -> RenderableType:
        if not self._running:
            return Text("")
        trial = self._running[-1][1]
        gave = "deploying and warming up"
        if trial.measurements:
            load, measurement = trial.measurements[-1]
            point = Point(trial.number, trial.candidate, load, measurement)
            gave = measurement.reason or words.performance(point, self._latency)
        return Text.assemble(("now          ", "bold"), f"trial {trial.number}: {gave}")

    def _best_lines(self) -> list[RenderableType]:
        if self._best is None:
            within = words.bounds(self._problem.constraints)
            nothing = f"nothing within {within} yet" if self._finished and within else "nothing measured yet"
            return [Text.assemble(("best so far  ", "bold"), nothing), Text("")]
        figures = words.performance(self._best, self._latency)
        configuration = words.configuration(self._best.candidate)
        return [
            Text.assemble(("best so far  ", "bold"), (figures, "bold green")),
            Text(f"trial {self._best.trial}: {configuration}"),
        ]

    def _time_left(self) -> RenderableType:
        total = max(self._budget.seconds, 1e-9)
        left = min(max(0.0, self._budget.left_seconds()), total)
        elapsed = words.clock(time.monotonic() - self._started)
        most = f" of at most {self._budget.max_trials}" if self._budget.max_trials else ""
        done = words.count(max((trial.number + 1 for _, trial in self._finished), default=0), "trial") + most
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=total, completed=total - left)
        row.add_row(bar, f"{words.clock(left)} left · {elapsed} elapsed · {done}")
        return row


def _others(pairs: tuple[tuple[str, Trial], ...], number: int) -> tuple[tuple[str, Trial], ...]:
    """Without the trial ``number``."""
    return tuple(pair for pair in pairs if pair[1].number != number)
