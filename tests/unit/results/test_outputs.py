"""Tests of the output of a run: JSON, CSV, terminal text, HTML and the live display."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.metrics import METRICS, Measurement
from optimizer.config.search_space import Problem
from optimizer.core.errors import EnvironmentFault
from optimizer.core.timing import Budget
from optimizer.core.trial import Candidate, LoadPoint, Point, Trial
from optimizer.measure.measurer import ProgressObserver
from optimizer.options.run_options import RunOptions
from optimizer.results import summary
from optimizer.results.finished_run import FinishedRun
from optimizer.results.live_display import LiveWatcher
from optimizer.results.recommendation import Outcome, assess
from optimizer.results.report.write import write
from optimizer.results.terminal_summary import print_best_so_far
from optimizer.results.watchers import QuietWatcher
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from tests.shown_outcomes import (
    BASELINE,
    FACTS,
    GOOD,
    LONG,
    NOTE,
    PLAIN,
    THREADS,
    compared,
    confirmed,
    measured,
    outcome,
    printed,
    problem,
    study,
    trial,
)


class TestEntry:
    def test_it_has_settings_load_and_figures(self) -> None:
        best = outcome().recommended
        assert best is not None
        entry = summary.entry(best)
        assert list(entry)[:7] == [
            "max_batch_size",
            "dynamic_batching",
            "max_queue_delay_us",
            "preferred_batch_sizes",
            "instance_count",
            THREADS,
            "trial",
        ]
        assert entry["preferred_batch_sizes"] == [64, 128]
        assert entry["concurrency"] == 12
        assert entry["request_batch_size"] == 16
        assert entry["throughput_infer_per_sec"] == 12345
        assert entry["latency_p95_ms"] == 18.2
        assert entry["server_memory_bytes"] == 1.31e9
        assert entry["stable"] is True

    def test_the_point_can_be_rebuilt(self) -> None:
        best = outcome().recommended
        assert best is not None
        entry: dict[str, Any] = json.loads(json.dumps(summary.entry(best)))
        own = ("max_batch_size", "dynamic_batching", "max_queue_delay_us", "instance_count")
        candidate = Candidate(
            **{name: entry[name] for name in own},
            preferred_batch_sizes=tuple(entry["preferred_batch_sizes"]),
            fields=((THREADS, entry[THREADS]),),
        )
        assert candidate == best.candidate
        assert LoadPoint(entry["request_batch_size"], entry["concurrency"]) == best.load
        assert entry["trial"] == best.trial

    def test_unknown_values_are_null(self) -> None:
        point = Point(0, BASELINE, LoadPoint(16, 1), Measurement(float("nan"), float("inf")))
        entry = summary.entry(point)
        json.dumps(entry, allow_nan=False)
        unknown = {name for name, value in entry.items() if value is None}
        assert {"throughput_infer_per_sec", "latency_avg_ms", "gpu_memory_bytes"} <= unknown


class TestDocument:
    def test_keys_and_counts(self) -> None:
        document = summary.document(outcome(), wall_seconds=12.34567, results_dir="r", extra={"seed": 0})
        assert list(document) == [
            "verdict",
            "undecided_cause",
            "recommended",
            "confirmation",
            "baseline",
            "dynamic_batching",
            "speedup",
            "speedup_interval",
            "speedup_over_dynamic_batching",
            "speedup_over_dynamic_batching_interval",
            "pareto",
            "dominated_by",
            "closest",
            "holds_back",
            "trials",
            "measurements",
            "confirmations",
            "wall_seconds",
            "results_dir",
            "seed",
        ]
        assert document["trials"] == 6
        assert document["measurements"] == 9
        assert document["speedup"] is None, "the search's measurements are no evidence of a gain"
        assert document["speedup_interval"] is None
        assert document["closest"] is None
        assert document["holds_back"] is None
        json.dumps(document, allow_nan=False)

    def test_gains_have_intervals(self) -> None:
        document = summary.document(outcome(compared()), wall_seconds=1, results_dir="r")
        assert document["speedup"] == pytest.approx(4, rel=0.02)
        for name, truth in {"speedup": 4.0, "speedup_over_dynamic_batching": 1.0}.items():
            interval = document[f"{name}_interval"]
            assert isinstance(interval, list)
            assert 0.8 * truth < interval[0] < truth < interval[1] < 1.25 * truth

    def test_nothing_found(self) -> None:
        document = summary.document(outcome(sla_ms=1.0), wall_seconds=1, results_dir="r")
        for name in ("recommended", "baseline", "dynamic_batching", "speedup"):
            assert document[name] is None
        assert isinstance(document["closest"], dict)
        assert "10" in str(document["holds_back"])

    def test_a_baseline_without_a_load_that_meets_the_bound(self) -> None:
        slow = [trial(0, BASELINE, (1, measured(10, 400.0))), *study()[1:]]
        document = summary.document(outcome(slow), wall_seconds=1, results_dir="r")
        assert document["baseline"] is None
        assert document["speedup"] is None


class TestFiles:
    def test_pareto_csv_has_the_columns_of_trials_csv(self, tmp_path: Path) -> None:
        path = tmp_path / "pareto.csv"
        summary.write_pareto_csv(path, outcome(study()[:3]))
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        known = TrialsTable(tmp_path / "trials.csv", "dlrm", {THREADS: ("1", "2")}).columns
        assert set(rows[0]) - {summary.ENERGY, "confirmed"} <= set(known)
        assert {row["confirmed"] for row in rows} == {"false"}
        assert {"instance_count", "concurrency", "throughput_infer_per_sec"} <= set(rows[0])
        assert [row["trial"] for row in rows] == ["2", "2", "0"]
        assert rows[0]["preferred_batch_sizes"] == "64 128"
        assert rows[0]["dynamic_batching"] == "true"
        assert rows[-1]["dynamic_batching"] == "false"
        assert rows[0]["gpu_memory_bytes"] == ""
        assert rows[0][THREADS] == "1"

    def test_pareto_csv_marks_what_fresh_servers_measured(self, tmp_path: Path) -> None:
        path, result = tmp_path / "pareto.csv", outcome(compared())
        summary.write_pareto_csv(path, result)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        fresh = [point for point in result.front if result.confirmation_of(point)]
        assert len(rows) > [row["confirmed"] for row in rows].count("true") == len(fresh) > 0

    def test_an_empty_front_has_a_header(self, tmp_path: Path) -> None:
        summary.write_pareto_csv(tmp_path / "pareto.csv", outcome([]))
        assert (tmp_path / "pareto.csv").read_text().startswith("trial,max_batch_size,")

    def test_a_file_is_replaced_atomically(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        summary.write_json(path, {"a": 1})
        with pytest.raises(ValueError, match="JSON"):
            summary.write_json(path, {"a": float("nan")})
        assert json.loads(path.read_text()) == {"a": 1}
        summary.write_json(path, {"b": "µ"})
        assert json.loads(path.read_text()) == {"b": "µ"}
        assert [each.name for each in tmp_path.iterdir()] == ["run.json"]

    def test_a_missing_folder_is_an_environment_fault(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFault, match=r"cannot write .*gone"):
            summary.write_json(tmp_path / "gone" / "too" / "run.json", {})


class TestText:
    def test_the_result_comes_first(self) -> None:
        text = printed(outcome())
        cause = "it was not tested on fresh servers"
        headline, rest = " ".join(text.split()), "next tune verify results/dlrm/1 --budget 3m max_batch_size"
        assert headline.startswith(f"dlrm: UNDECIDED at 12,345 infer/s within p95 <= 20 ms: {cause} {rest}")
        assert "preferred_batch_size: [ 64, 128 ]" in text
        assert "instance_group [ { count: 2 } ]" in text
        assert 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }' in text
        assert "772 req/s of 16 samples each" in text
        assert "p50 9.10 ms · p90 16.4 ms · p95 18.2 ms · p99 27.3 ms" in text
        assert "concurrency 12" in text
        assert "memory        1.31 GB" in text

    def test_gpu_figures_are_shown(self) -> None:
        gpu = {"gpu_utilization": 0.74, "gpu_power_watts": 312.0, "gpu_sm_clock_mhz": 1755.0}
        memory = {"gpu_memory_bytes": 9.1e9, "server_memory_bytes": 1.31e9}
        best = measured(12345, 18.2, **gpu, **memory, gpu_throttling="power limit")
        trials = [trial(0, BASELINE, (4, measured(3000, 19.0))), trial(1, GOOD, (12, best))]
        searched = problem(20.0, "dlrm", **{"gpu-memory": 10e9})
        text = printed(assess(trials, searched, BASELINE, PLAIN), searched)
        assert "within p95 <= 20 ms and GPU memory <= 10.0 GB" in " ".join(text.split())
        assert re.search(r"^GPU memory +9.10 GB$", text, re.MULTILINE)
        assert re.search(r"^energy +25.3 J/1000 infer$", text, re.MULTILINE)
        assert re.search(r"^GPU +74 % busy · 312 W · SM 1,755 MHz · clocks lowered: power limit$", text, re.MULTILINE)
        entry = summary.entry(Point(1, GOOD, LoadPoint(16, 12), best))
        assert entry[summary.ENERGY] == pytest.approx(25.27, abs=0.01)
        assert (entry["gpu_sm_clock_mhz"], entry["gpu_throttling"]) == (1755.0, "power limit")

    def test_gains_are_shown_with_both_figures(self) -> None:
        lines = printed(outcome(compared())).splitlines()
        row = next(place for place, line in enumerate(lines) if line.startswith("baseline"))
        assert "3,004 infer/s" in lines[row]
        assert lines[row].endswith("4.01x")
        assert re.search(r" \(3\.\d\d to 4\.\d\d\)$", lines[row + 1])
        row = next(place for place, line in enumerate(lines) if line.startswith("dynamic_batching {}"))
        assert "11,904 infer/s" in lines[row]
        assert re.sub(" +", " ", " ".join(lines[row : row + 2])).endswith("no measurable gain")

    def test_without_fresh_servers_there_is_no_gain(self) -> None:
        lines = printed(outcome()).splitlines()
        shown = [line for line in lines if line.startswith(("baseline", "dynamic_batching {}  "))]
        assert len(shown) == 2
        assert all(line.endswith("not confirmed") for line in shown)

    def test_the_front_says_what_was_measured_where(self) -> None:
        result = outcome(compared())
        assert result.recommended in result.front
        text = printed(result)
        assert re.search(r"^ 12,0\d\d +15\.\d +12  fresh +2  batch 128", text, re.M)
        assert re.search(r"^ 13,000 +90\.0 +8  search +5  ", text, re.M)

    def test_a_recommendation_off_the_front_has_a_reason(self) -> None:
        trials = [*compared(), trial(6, replace(GOOD, instance_count=5), (9, measured(12500, 14.0)))]
        result = outcome(trials)
        assert result.recommended not in result.front
        text = " ".join(printed(result).split())
        assert (
            "The recommendation is not on the front: trial 6 had 12,500 infer/s, p95 14.0 ms, concurrency 9, but"
            in text
        )
        assert summary.front_remark(outcome(compared())) == ""
        document = summary.document(result, wall_seconds=1, results_dir="r")
        assert document["dominated_by"]["trial"] == 6  # type: ignore[index]

    def test_front_model_and_paths_are_shown(self) -> None:
        text = printed(outcome())
        assert "rows 1,234,567" in text
        assert "embedding size 632 MB" in text
        assert NOTE in text
        assert "6 configurations, 9 measurements" in text
        assert "results/dlrm/1/best/config.pbtxt" in text
        assert text.rstrip().endswith("tune --sla-p95 20ms --seed 0 dlrm")

    def test_no_baseline(self) -> None:
        text = printed(replace(outcome(), baseline=None))
        assert "no measured load meets p95 <= 20 ms" in text

    def test_nothing_meets_the_bound(self) -> None:
        text = printed(outcome(sla_ms=1.0), problem(1.0), config_path=None)
        assert text.startswith("dlrm: no configuration meets p95 <= 1 ms: ")
        assert "The measured configuration that comes closest:" in text
        assert "2,000 infer/s" in text
        assert "baseline" not in text
        assert "config.pbtxt" not in text

    def test_nothing_was_measured(self) -> None:
        text = printed(outcome([trial(0, BASELINE, status="failed", reason="no [/memory] left.")]))
        assert text.startswith("dlrm: no configuration meets p95 <= 20 ms: nothing could be measured: no")
        assert "[/memory] left\n" in text
        assert "Pareto" not in text

    def test_unknown_metrics_are_shown_as_unknown(self) -> None:
        searched = replace(problem(), objectives=(METRICS["throughput"], METRICS["energy"]))
        result = outcome([trial(0, BASELINE, (1, Measurement(100.0, latency_p95_ms=5.0, stable=True)))])
        text = printed(result, searched)
        assert "p50 unknown" in text
        assert re.search(r"^energy +unknown$", text, re.M)

    def test_a_long_front_is_cut_short(self) -> None:
        rising = [(load, measured(1000.0 * load, 1.0 * load)) for load in range(1, 31)]
        text = printed(outcome([trial(0, BASELINE, *rising)]))
        assert "20 more in pareto.csv" in text
        assert "30,000" in text
        assert len([line for line in text.splitlines() if re.match(r" *[\d,]+ +\d+\.\d+ ", line)]) == 10

    @pytest.mark.parametrize("width", [80, 60])
    def test_it_fits_the_width(self, width: int) -> None:
        long = replace(outcome(), recommended=Point(5, LONG, LoadPoint(16, 123456), measured(1.3e7, 19.9)))
        searched = replace(problem(), model="m" * 30)
        text = printed(long, searched, width=width, hardware="h " * 100, notes=["n " * 100])
        whole = ("results ", "config ", "reproduce ")
        assert [x for x in text.splitlines() if len(x) > width and not x.startswith(whole)] == []

    def test_commands_and_paths_are_not_broken(self) -> None:
        command = "tune " + "--flag value " * 20 + "dlrm"
        assert f" {command}\n" in printed(outcome(), command=command)

    def test_output_to_a_pipe_has_no_colors(self) -> None:
        text = printed(outcome())
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())

    def test_markup_in_a_model_name_is_not_interpreted(self) -> None:
        assert printed(outcome(), replace(problem(), model="[bold]m[/]")).startswith("[bold]m[/]: ")

    def test_interrupted(self) -> None:
        text = io.StringIO()
        for result in (outcome(), outcome(sla_ms=1.0), outcome([])):
            print_best_so_far(Console(file=text, width=80), result, problem(), results_dir=Path("a b/1"))
        assert "12,345 infer/s, p95 18.2 ms" in text.getvalue()
        assert text.getvalue().count("tune --resume 'a b/1'\n") == 3
        assert text.getvalue().count("no measurement meets p95 <= 20 ms") == 2


class TestHtml:
    def page(
        self, tmp_path: Path, result: Outcome, trials: Sequence[Trial], searched: Problem | None = None, **info: Any
    ) -> str:
        """Return the HTML page of a run; ``info`` is added to its run.json."""
        defaults: dict[str, Any] = {
            "status": "found",
            "notes": [NOTE],
            "command": "tune --sla-p95 20ms dlrm",
            "hardware": {"cpu": "some CPU", "cpu_count": 2},
            "problem": {"facts": FACTS},
        }
        folder, options = RunFolder(tmp_path / "dlrm" / "1"), RunOptions("dlrm")
        run = FinishedRun(
            folder, options, {**defaults, **info}, searched or problem(), BASELINE, PLAIN, tuple(trials), result
        )
        (path,) = write([run], ["html"], tmp_path / "report.html")
        return path.read_text(encoding="utf-8")

    def test_it_has_the_content_of_the_text(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, outcome(), study())
        headline = "dlrm: UNDECIDED at 12,345 infer/s within p95 &lt;= 20 ms: it was not tested"
        assert f'<h1 class="answer undecided">{headline}' in page
        assert f"tune verify {tmp_path}/dlrm/1 --budget 3m" in page
        for text in ("not confirmed", "out of [memory]", "perf_analyzer timed out", "1,234,567", NOTE, "--sla-p95"):
            assert text in page
        assert len(re.findall("<use[^>]*><title>trial", page)) == 8 + 5  # points; those within the bounds
        assert page.count('role="img"') == page.count("<desc id=") == page.count("<figure>") == 3

    def test_it_shows_the_verdict(self, tmp_path: Path) -> None:
        trials = confirmed(15.0)
        page = self.page(tmp_path, outcome(trials), trials)
        assert '<h1 class="answer">dlrm: PASS at 12,0' in page
        assert "<dt>verdict</dt><dd>PASS: the SLA is met at 99 % confidence" in page
        assert "tune verify" not in page

    def test_it_loads_no_other_resources(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, outcome(), study())
        assert not re.search(r"""https?:|<script|<link|<img|<iframe|@import|url\((?!#)|src=|href="(?!#)""", page)

    def test_names_and_reasons_are_escaped(self, tmp_path: Path) -> None:
        hostile = "<script>alert('x')</script>\"&"
        trials = [*study()[:3], trial(3, LONG, status="failed", reason=hostile)]
        page = self.page(
            tmp_path,
            outcome(trials),
            trials,
            problem(20, hostile),
            problem={"facts": {hostile: hostile}},
            hardware={"cpu": hostile, "gpus": [hostile]},
            versions={hostile: hostile},
            notes=[hostile],
            command=hostile,
            reason=hostile,
            status=hostile,
        )
        assert "<script" not in page
        assert page.count("&lt;script&gt;") >= 7

    def test_nothing_found_and_nothing_measured(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, outcome(sla_ms=1.0), study(), problem(1.0))
        assert '<h1 class="answer none">dlrm: no configuration meets p95 &lt;= 1 ms' in page
        assert "The measured configuration that comes closest:" in page
        assert "<figure>" not in self.page(tmp_path, outcome([]), [])

    @pytest.mark.parametrize("spread", [1.0, 1000.0])
    def test_all_points_are_inside_the_plot(self, tmp_path: Path, spread: float) -> None:
        points = [(1, measured(100.0, 1.0)), (2, measured(200.0, spread)), (3, measured(0.003, 3.0))]
        points.append((4, measured(float("nan"), float("inf"))))
        trials = [trial(0, BASELINE, *points)]
        searched = problem(20, "m", throughput=150.0)
        page = self.page(tmp_path, assess(trials, searched, BASELINE, PLAIN), trials, searched)
        plot = page[page.index("<svg") : page.index("</svg>")]
        dots = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*><title>', plot)
        assert len(dots) == 3
        assert all(60 <= float(x) <= 715 and 0 <= float(y) <= 350 for x, y in dots)


class TestVerdict:
    def test_a_pass_has_intervals(self) -> None:
        result = outcome(confirmed(15.0))
        text = " ".join(printed(result).split())
        assert "verdict PASS: the SLA is met at 99 % confidence (1" in text
        assert "; 32 measurements on 4 fresh servers) estimand expected share of requests over the bound" in text
        document = summary.document(result, wall_seconds=1, results_dir="r")["confirmation"]
        assert isinstance(document, dict)
        assert document["verdict"] == "PASS"
        low, high = document["latency_ms"]
        assert low <= 15.1 <= high <= 20

    def test_the_comparison_with_perf_analyzer_is_shown(self) -> None:
        def with_ratio(latency_ratio: float) -> Outcome:
            theirs = measured(12000.0, 12.0 * latency_ratio, requests=900)
            trials = []
            for each in confirmed(12.0):
                checks = {own.server: replace(own, measurement=theirs) for own in each.confirmations}
                trials.append(replace(each, cross_checks=tuple(checks.values())))
            return outcome(trials)

        text = " ".join(printed(with_ratio(1.01), width=200).split())
        assert "cross-check perf_analyzer against tune's own client on the same 4 servers: throughput 1.0" in text
        assert "perf_analyzer measured" not in text
        document: Any = summary.document(with_ratio(0.6), wall_seconds=1, results_dir="r")["confirmation"]
        assert document["verdict"] == "UNDECIDED"
        compared = document["perf_analyzer"]
        assert (compared["servers"], compared["pairs"]) == (4, 4)
        assert compared["ratios"]["latency-p95"]["ratio"] == pytest.approx(0.6, rel=0.01)
        assert "% less p95 latency than tune's own client: 7.2 ms" in compared["disagreement"]
        assert compared["contradicts_pass"] is True
        assert document["reason"] == compared["disagreement"]
        document = summary.document(with_ratio(1.8), wall_seconds=1, results_dir="r")["confirmation"]
        assert document["verdict"] == "UNDECIDED"
        assert document["reason"] == f"{document['perf_analyzer']['disagreement']} (allowed: 20)"
        assert document["perf_analyzer"]["contradicts_pass"] is True
        assert summary.undecided_cause(with_ratio(1.8)) == document["reason"]
        document = summary.document(outcome(confirmed(12.0)), wall_seconds=1, results_dir="r")["confirmation"]
        assert document["perf_analyzer"] is None
        assert "cross-check" not in printed(outcome(confirmed(12.0)))

    def test_too_few_servers_give_an_undecided_verdict(self) -> None:
        text = " ".join(printed(outcome(confirmed(15.0, servers=2))).split())
        assert "verdict UNDECIDED at 99 % confidence: p95 <= 20 ms: 2 of 4 fresh servers were measured" in text

    def test_without_a_confirmation_there_is_no_verdict(self) -> None:
        result = outcome()
        text = " ".join(printed(result).split())
        assert "verdict UNDECIDED: it was not tested on fresh servers" in text
        assert "estimand" not in text
        assert summary.document(result, wall_seconds=1, results_dir="r")["confirmation"] is None

    def test_a_failed_candidate_is_not_recommended(self) -> None:
        trials = confirmed(30.0)
        failed = next(t for t in trials if t.confirmations)
        result = outcome(trials)
        assert result.recommended is not None
        assert result.confirmed is None
        lower = result.recommended.load < failed.confirmations[0].load
        assert lower or result.recommended.candidate != failed.candidate


def replay(watcher: ProgressObserver, trials: Sequence[Trial]) -> None:
    done: list[Trial] = []
    for each in trials:
        watcher.trial_started(each.number, each.candidate, "baseline" if each.number == 0 else "search")
        for load, measurement in each.measurements:
            watcher.measured(each.number, load, measurement)
        done.append(each)
        watcher.trial_finished(each, outcome(done).recommended)
    again = replace(trials[2], measurements=trials[2].measurements[-1:])
    watcher.trial_started(2, again.candidate, "confirm")
    watcher.measured(2, *again.measurements[0])
    watcher.trial_finished(again, outcome(done).recommended)


class TestWatchers:
    def test_quiet_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with QuietWatcher() as watcher:
            replay(watcher, study())
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (20, 5), (1, 1)])
    def test_a_whole_study(self, width: int, height: int) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=width, height=height)
        with LiveWatcher(
            console, problem(), Budget(240.0, 30, clock=lambda: 0.0), time.monotonic(), "some CPU"
        ) as watcher:
            replay(watcher, study())
        assert text.getvalue().rstrip("\n").count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1

    def test_the_current_trial_is_shown(self) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=80, height=24, color_system=None)
        with LiveWatcher(
            console, problem(), Budget(240.0, 30, clock=lambda: 0.0), time.monotonic(), "some CPU"
        ) as watcher:
            replay(watcher, study())
        last = text.getvalue().rpartition("dlrm  p95 <= 20 ms")[2]
        lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", last).splitlines()
        assert max(map(len, lines)) <= 80
        shown = "\n".join(lines)
        assert re.search(r"2  confirm: batch 128 · 2 instances · delay 500 .* 12,345 +18\.2 +1$", shown, re.M)
        assert "failed: out of [memory]" in shown
        assert re.search(r"best so far  12,345 infer/s, p95 18.2 ms, concurrency 12", shown)
        assert re.search(r"4:00 left · \d:\d\d elapsed · 6 trials of at most 30", shown)

    def test_parallel_trials_are_shown(self) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=80, height=24, color_system=None)
        first, second, third, *_ = study()
        with LiveWatcher(console, problem(), Budget(240.0), time.monotonic()) as watcher:
            watcher.trial_started(0, first.candidate, "baseline")
            watcher.trial_started(1, second.candidate, "dynamic_batching")
            watcher.trial_started(2, third.candidate, "search")
            watcher.measured(0, *first.measurements[0])
            watcher.trial_finished(second, None)
            watcher.measured(0, *first.measurements[1])
        last = text.getvalue().rpartition("dlrm  p95 <= 20 ms")[2]
        lines = [line for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", last).splitlines() if "batch 128 ·" in line]
        assert len(lines) == 1
        assert re.search(r"^ *1 +dynamic batching: batch 64 .* 6,000 +18\.0 +2 *$", last, re.M)
        assert re.search(r"^ *0 +baseline: batch 64 .* 3,000 +19\.0 +2 *$", last, re.M)
        assert "trial 0: 3,000 infer/s" in last

    def test_an_interruption_restores_the_cursor(self) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=80, height=24)
        watcher = LiveWatcher(console, problem(), Budget(240.0), time.monotonic())
        with pytest.raises(KeyboardInterrupt), watcher:
            raise KeyboardInterrupt
        assert text.getvalue().rfind("\x1b[?25h") > text.getvalue().rfind("\x1b[?25l")
