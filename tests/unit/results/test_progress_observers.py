"""Tests of the progress observers of a run: text plot, live display, log lines and colors."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.cli.run import read_run_arguments
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.interfaces import ProgressObserver
from optimizer.core.trial import ConfirmationWindow, Point, Trial, latest_points
from optimizer.machine import hardware
from optimizer.options.command_line import Parser
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.results.progress_observers import (
    LiveObserver,
    PlainObserver,
    QuietObserver,
    make_progress,
)
from optimizer.results.recommendation import assess
from optimizer.results.terminal_plot import BLANK, BOUND_MARK, FRONT_MARK, scatter
from optimizer.results.terminal_summary import RunDetails, print_outcome
from optimizer.simulator.speed_correction import SpeedCorrection
from tests.example_outcomes import example_trials, outcome, problem

SAMPLE = Path("tests/data/dlrm/sample")


@pytest.fixture(scope="module")
def run() -> FinishedRun:
    return read_run(SAMPLE)


def plain_observer(text: io.StringIO, problem: Problem) -> PlainObserver:
    """Return an observer that writes to ``text``, of a run with four minutes left."""
    return PlainObserver(Console(file=text, width=80), problem, Budget(240.0, clock=lambda: 0.0))


def terminal(text: io.StringIO, width: int = 80, height: int = 24) -> Console:
    return Console(file=text, force_terminal=True, width=width, height=height, color_system=None)


def last_display(text: io.StringIO) -> str:
    """Return the last content of a live display below its first line, without control characters."""
    last = text.getvalue().rpartition("dlrm  p95 <= 20 ms")[2]
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", last)


def observe_trials(
    observer: ProgressObserver, trials: Sequence[Trial], recommended: Callable[[list[Trial]], Point | None]
) -> None:
    done: list[Trial] = []
    for trial in trials:
        observer.trial_started(trial.number, trial.candidate, "baseline" if trial.number == 0 else "search")
        for load, measurement in trial.measurements:
            observer.measured(trial.number, load, measurement)
        done.append(trial)
        observer.trial_finished(trial, recommended(done))


def observe_run(watching: LiveObserver | PlainObserver | QuietObserver, run: FinishedRun) -> None:
    def recommended(done: list[Trial]) -> Point | None:
        return assess(done, run.problem, run.baseline, run.dynamic_batching).recommended

    with watching:
        observe_trials(watching, run.trials, recommended)


class TestScatter:
    def test_points_are_drawn_at_their_place(self) -> None:
        lines = [line.plain for line in scatter([(30.0, 500.0)], [(10.0, 1000.0)], 20.0, "p95", 60, 10)]
        assert len(lines) == 10
        assert max(map(len, lines)) <= 60
        canvas = lines[:8]
        ((front_row, front_column),) = places(canvas, FRONT_MARK)
        assert front_row == 0
        bounds = {column for _, column in places(canvas, BOUND_MARK)}
        (dot,) = [
            (y, x)
            for y, row in enumerate(canvas)
            for x, character in enumerate(row)
            if BLANK < ord(character) <= BLANK + 255
        ]
        assert len(bounds) == 1
        assert front_column < min(bounds) < dot[1]
        assert dot[0] > front_row
        assert "20 ms" in lines[-1]
        assert "p95" in lines[-1]

    @pytest.mark.parametrize(
        ("points", "width", "height"),
        [([], 80, 10), ([(1.0, 2.0)], 10, 10), ([(1.0, 2.0)], 80, 3), ([(float("inf"), 2.0)], 80, 10)],
    )
    def test_there_is_no_plot_without_points_or_room(
        self, points: list[tuple[float, float]], width: int, height: int
    ) -> None:
        assert scatter(points, points, 20.0, "p95", width, height) == []

    @pytest.mark.parametrize("bound", [None, 0.001, 1e9])
    def test_every_line_fits_with_any_bound(self, bound: float | None) -> None:
        points = [(0.5 * i, 1e6 * i) for i in range(1, 200)]
        lines = scatter(points, points[:3], bound, "p99", 47, 9)
        assert len(lines) == 9
        assert max(line.cell_len for line in lines) <= 47


class TestLive:
    @pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
    def test_the_front_is_drawn_and_nothing_overflows(self, run: FinishedRun, width: int, height: int) -> None:
        text = io.StringIO()
        console = terminal(text, width, height)
        observe_run(LiveObserver(console, run.problem, Budget(240.0, clock=lambda: 0.0), "some CPU"), run)
        lines = last_display(text).splitlines()
        assert len([line for line in lines if line.strip()]) < len(lines) <= height
        assert max(map(len, lines)) <= width
        assert sum(line.count(FRONT_MARK) for line in lines) >= 4
        assert any(BOUND_MARK in line for line in lines)
        assert any(re.search(r"4:00 left · \d:\d\d elapsed · 11 trials", line) for line in lines)

    def test_the_best_so_far_has_the_value_of_the_first_objective(self, run: FinishedRun) -> None:
        text, trial = io.StringIO(), run.trials[0]
        console = terminal(text)
        (load, measured), *_ = trial.measurements
        measured = replace(measured, throughput_infer_per_sec=900.0, latency_p95_ms=9.0, server_memory_bytes=5e8)
        problem = replace(run.problem, objectives=(METRICS["memory"], METRICS["latency-p95"]))
        with LiveObserver(console, problem, Budget(240.0)) as observer:
            observer.trial_finished(trial, Point(0, trial.candidate, load, measured))
        assert "best so far  900 infer/s, p95 9.00 ms, memory 500 MB, concurrency" in text.getvalue()

    def test_a_low_terminal_shows_the_table_without_the_plot(self, run: FinishedRun) -> None:
        text = io.StringIO()
        console = terminal(text, height=12)
        observe_run(LiveObserver(console, run.problem, Budget(240.0, clock=lambda: 0.0)), run)
        assert FRONT_MARK not in text.getvalue()
        assert "delay 5,000" in text.getvalue()

    @pytest.mark.parametrize(("encoding", "is_plotted"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
    def test_the_plot_is_left_out_where_its_dots_cannot_be_written(
        self, encoding: str, is_plotted: bool, run: FinishedRun
    ) -> None:
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding, errors="replace")
        console = Console(file=stream, force_terminal=True, width=80, height=24, color_system=None)
        observe_run(LiveObserver(console, run.problem, Budget(240.0, clock=lambda: 0.0)), run)
        stream.flush()
        shown = written.getvalue().decode(encoding)
        assert (FRONT_MARK in shown) is is_plotted
        assert "????" not in shown
        assert "delay 5,000" in shown


def observe_example(observer: ProgressObserver) -> None:
    """Show trials of each kind: measured, failed, without a result, and one that is measured again."""
    trials = example_trials()
    observe_trials(observer, trials, lambda done: outcome(done).recommended)
    again = replace(trials[2], measurements=trials[2].measurements[-1:])
    observer.trial_started(2, again.candidate, "confirm")
    observer.measured(2, *again.measurements[0])
    observer.trial_finished(again, outcome(trials).recommended)


class TestTrialsOfEachKind:
    def test_quiet_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with QuietObserver() as observer:
            observe_example(observer)
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (20, 5), (1, 1)])
    def test_the_cursor_is_hidden_and_shown_once(self, width: int, height: int) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=width, height=height)
        with LiveObserver(console, problem(), Budget(240.0, 30, clock=lambda: 0.0), "some CPU") as observer:
            observe_example(observer)
        assert text.getvalue().rstrip("\n").count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1

    def test_the_current_trial_is_shown(self) -> None:
        text = io.StringIO()
        console = terminal(text)
        with LiveObserver(console, problem(), Budget(240.0, 30, clock=lambda: 0.0), "some CPU") as observer:
            observe_example(observer)
        lines = last_display(text).splitlines()
        assert max(map(len, lines)) <= 80
        shown = "\n".join(lines)
        assert re.search(r"2  confirm: batch 128 · 2 instances · delay 500 .* 12,345 +18\.2 +1$", shown, re.M)
        assert "failed: out of [memory]" in shown
        assert re.search(r"best so far  12,345 infer/s, p95 18.2 ms, concurrency 12", shown)
        assert re.search(r"4:00 left · \d:\d\d elapsed · 6 trials of at most 30", shown)

    def test_the_echo_of_ctrl_c_does_not_wrap(self) -> None:
        text = io.StringIO()
        console = terminal(text)
        with LiveObserver(console, problem(), Budget(240.0)):
            pass
        *_, last = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", text.getvalue()).strip().splitlines()
        assert "elapsed" in last
        assert len(f"{last}^C^C") <= 80

    def test_parallel_trials_are_shown(self) -> None:
        text = io.StringIO()
        console = terminal(text)
        first, second, third, *_ = example_trials()
        with LiveObserver(console, problem(), Budget(240.0)) as observer:
            observer.trial_started(0, first.candidate, "baseline")
            observer.trial_started(1, second.candidate, "dynamic_batching")
            observer.trial_started(2, third.candidate, "search")
            observer.measured(0, *first.measurements[0])
            observer.trial_finished(second, None)
            observer.measured(0, *first.measurements[1])
        last = last_display(text)
        assert len([line for line in last.splitlines() if "batch 128 ·" in line]) == 1
        assert re.search(r"^ *1 +dynamic batching: batch 64 .* 6,000 +18\.0 +2 *$", last, re.M)
        assert re.search(r"^ *0 +baseline: batch 64 .* 3,000 +19\.0 +2 *$", last, re.M)
        assert "trial 0: 3,000 infer/s" in last

    def test_an_interruption_restores_the_cursor(self) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=80, height=24)
        observer = LiveObserver(console, problem(), Budget(240.0))
        with pytest.raises(KeyboardInterrupt), observer:
            raise KeyboardInterrupt
        assert text.getvalue().rfind("\x1b[?25h") > text.getvalue().rfind("\x1b[?25l")


class TestPlain:
    def test_a_line_for_each_trial(self, run: FinishedRun) -> None:
        text = io.StringIO()
        observe_run(plain_observer(text, run.problem), run)
        lines = text.getvalue().splitlines()
        assert len(lines) == len(run.trials)
        assert "trial 0 (baseline): batch 256 · 1 instance · no dynamic batching: 4,994 infer/s" in lines[0]
        assert "misses the bound" in lines[8]
        assert re.search(r"; best so far: trial \d+, [\d,]+ infer/s; 4:00 left$", lines[-1])
        assert "\x1b" not in text.getvalue()

    @pytest.mark.parametrize(
        ("objective", "value"), [("goodput", "700 infer/s"), ("latency-p95", "9.00 ms"), ("memory", "500 MB")]
    )
    def test_another_objective_than_the_throughput_is_named(
        self, objective: str, value: str, run: FinishedRun
    ) -> None:
        text, trial = io.StringIO(), run.trials[0]
        (load, measured), *_ = trial.measurements
        measured = replace(measured, throughput_infer_per_sec=900.0, goodput_infer_per_sec=700.0, latency_p95_ms=9.0)
        measured = replace(measured, server_memory_bytes=5e8)
        problem = replace(run.problem, objectives=(METRICS[objective],))
        with plain_observer(text, problem) as observer:
            best = Point(0, trial.candidate, load, measured)
            observer.trial_finished(replace(trial, measurements=((load, measured),)), best)
        name = objective.removeprefix("latency-")
        other = "" if name == "p95" else f", {name} {value}"
        assert f"900 infer/s, p95 9.00 ms{other}, concurrency {load.concurrency}" in text.getvalue()
        assert f"; best so far: trial 0, {name} {value}; 4:00 left" in text.getvalue()

    def test_a_measurement_within_the_bound_that_is_not_stable_is_not_said_to_miss_it(self, run: FinishedRun) -> None:
        text, trial = io.StringIO(), run.trials[0]
        (load, measured), *_ = trial.measurements
        unstable = replace(measured, latency_p95_ms=1.0, stable=False)
        with plain_observer(text, run.problem) as observer:
            observer.trial_finished(replace(trial, measurements=((load, unstable),)), None)
        assert "its windows disagree" in text.getvalue()
        assert "misses the bound" not in text.getvalue()

    @pytest.mark.parametrize("log", ["plain", "live"])
    def test_a_trial_whose_measurement_failed_shows_the_reason(self, run: FinishedRun, log: str) -> None:
        text, trial = io.StringIO(), run.trials[0]
        (load, _), *_ = trial.measurements
        refused = Measurement(reason="Exceeds maximum queue size")
        console = Console(file=text, width=120, height=40, force_terminal=log == "live", color_system=None)
        _, open_observer = make_progress(console, log)
        with open_observer(run.problem, Budget(240.0, clock=lambda: 0.0), hardware.detect()) as observer:
            observer.trial_started(0, trial.candidate, "search")
            observer.trial_finished(replace(trial, measurements=((load, refused),)), None)
        assert "failed: Exceeds maximum queue size" in text.getvalue()

    def test_with_several_bounds_the_missed_one_is_named(self, run: FinishedRun) -> None:
        text, trial = io.StringIO(), run.trials[0]
        (load, measured), *_ = trial.measurements
        slow = replace(measured, latency_p95_ms=15.0, latency_p99_ms=50.0)
        problem = replace(run.problem, sla=Sla.from_bounds({"p95": 20.0, "p99": 40.0}))
        with plain_observer(text, problem) as observer:
            observer.trial_finished(replace(trial, measurements=((load, slow),)), None)
        assert "p95 15.0 ms, p99 50.0 ms, concurrency 4, misses p99 <= 40 ms; " in text.getvalue().replace(
            f"concurrency {load.concurrency},", "concurrency 4,"
        )

    def test_a_trial_shows_the_disturbed_measurement_that_makes_it_the_best_one(self, run: FinishedRun) -> None:
        text, trial = io.StringIO(), run.trials[0]
        (load, measured), *_ = trial.measurements
        quiet = replace(measured, latency_p95_ms=1.0, throughput_infer_per_sec=2000.0)
        disturbed = replace(quiet, throughput_infer_per_sec=4000.0, stable=False, other_cpu_share=0.4)
        higher = replace(load, concurrency=load.concurrency + 1)
        trial = replace(trial, measurements=((load, quiet), (higher, disturbed)))
        best = SpeedCorrection().best_point(latest_points([trial]), run.problem)
        with plain_observer(text, run.problem) as observer:
            observer.trial_finished(trial, best)
        assert "no dynamic batching: 4,000 infer/s" in text.getvalue()
        assert ", disturbed; best so far: trial 0, 4,000 infer/s" in text.getvalue()
        assert "misses the bound" not in text.getvalue()

    def test_each_line_has_the_figures_of_its_trial(self, run: FinishedRun) -> None:
        text, (first, second, *_) = io.StringIO(), run.trials
        with plain_observer(text, run.problem) as observer:
            observer.trial_started(0, first.candidate, "baseline")
            observer.trial_started(1, second.candidate, "dynamic_batching")
            observer.trial_finished(first, None)
            observer.trial_finished(second, None)
        lines = [line.partition("  ")[2] for line in text.getvalue().splitlines()]
        assert [line.partition(":")[0] for line in lines] == ["trial 0 (baseline)", "trial 1 (dynamic batching)"]

    def test_a_confirmation_shows_the_windows_of_its_server_and_no_cross_check(self, run: FinishedRun) -> None:
        text, trial = io.StringIO(), run.trials[0]
        (load, measured), *_ = trial.measurements

        def window(server: int, throughput: float) -> ConfirmationWindow:
            return ConfirmationWindow(server, load, replace(measured, throughput_infer_per_sec=throughput))

        windows = tuple(window(server, 1000.0 * server + 100.0 * i) for server in (1, 2) for i in range(3))
        confirmed = replace(trial, confirmations=windows, cross_checks=(window(2, 1500.0),))
        with plain_observer(text, run.problem) as observer:
            observer.trial_started(0, trial.candidate, "confirm")
            for again in (*windows, *confirmed.cross_checks):
                observer.measured(0, load, again.measurement)
            observer.trial_finished(confirmed, None)
        assert "trial 0 (confirm): batch 256 · 1 instance · no dynamic batching: 2,100 infer/s" in text.getvalue()

        display = io.StringIO()
        console = terminal(display)
        with LiveObserver(console, run.problem, Budget(240.0, clock=lambda: 0.0)) as live:
            live.trial_started(0, trial.candidate, "confirm")
            live.measured(0, load, measured)
            assert "shown after the first trial" in display.getvalue()
            assert "nothing measured" not in display.getvalue(), "the search has measured in an earlier session"
            live.trial_finished(confirmed, None)
        assert re.search(r"confirm: batch 256 .* 2,100 ", display.getvalue())

    def test_the_observer_depends_on_flag_and_terminal(self, run: FinishedRun) -> None:
        def chosen(log: str | None, *, on_terminal: bool) -> type:
            console = Console(file=io.StringIO(), force_terminal=on_terminal)
            _, open_observer = make_progress(console, log)
            return type(open_observer(run.problem, Budget(1.0), hardware.detect()))

        assert chosen(None, on_terminal=True) is LiveObserver
        assert chosen(None, on_terminal=False) is PlainObserver
        assert chosen("plain", on_terminal=True) is chosen("plain", on_terminal=False) is PlainObserver
        assert chosen("none", on_terminal=True) is QuietObserver
        assert read_run_arguments(["--log", "plain", "mlp"]).parsed["log"] == "plain"

    @pytest.mark.parametrize(("log", "printed"), [(None, True), ("plain", True), ("none", False)])
    def test_a_preparation_is_one_line_without_a_terminal(self, log: str | None, printed: bool) -> None:
        text, line = io.StringIO(), "word " * 40
        on_progress, _ = make_progress(Console(file=text, width=80), log)
        on_progress(line)
        assert text.getvalue() == (f"{line}\n" if printed else "")

    def test_a_preparation_breaks_between_words_on_a_terminal(self) -> None:
        text = io.StringIO()
        on_progress, _ = make_progress(Console(file=text, width=20, force_terminal=True, color_system=None))
        on_progress("tuning dlrm within p95 <= 20 ms")
        assert text.getvalue().splitlines() == ["tuning dlrm within", "p95 <= 20 ms"]


class TestColors:
    @pytest.mark.parametrize(
        ("words", "no_color", "colored"), [((), "", True), ((), "1", False), (("--no-color",), "", False)]
    )
    def test_colors_can_be_disabled(
        self,
        run: FinishedRun,
        words: tuple[str, ...],
        no_color: str,
        colored: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        Parser("tune", "[options]", "").parse_args(words)
        print_answer(Console(), run)
        assert ("\x1b[1;32m" in capsys.readouterr().out) is colored

    def test_a_pipe_has_no_colors(
        self, run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        print_answer(Console(), run)
        output = capsys.readouterr().out
        assert "\x1b" not in output
        assert max(map(len, output.splitlines())) <= 80


def print_answer(console: Console, run: FinishedRun) -> None:
    assert run.outcome is not None
    details = RunDetails(baseline=run.baseline, results_dir=run.folder.path)
    print_outcome(console, run.outcome, run.problem, details)


def places(canvas: list[str], mark: str) -> list[tuple[int, int]]:
    return [(y, x) for y, row in enumerate(canvas) for x, character in enumerate(row) if character == mark]
