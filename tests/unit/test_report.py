"""What a run says of itself: JSON, CSV, text, HTML, and the display while it runs."""

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
from objectives.sla import Constraint
from optimizer.budget import Budget
from optimizer.errors import EnvironmentFault
from optimizer.measuring import Watcher
from optimizer.options import RunOptions
from optimizer.outcome import Outcome, assess
from optimizer.pages.write import write
from optimizer.problem import Problem
from optimizer.report import export, words
from optimizer.report.console import print_best_so_far, print_outcome
from optimizer.report.live import LiveWatcher, QuietWatcher
from optimizer.space import Space
from optimizer.store.finished import FinishedRun
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, Confirmation, LoadPoint, Point, Trial

THREADS = "parameters.intra_op_thread_count.string_value"
BASELINE = Candidate(64, fields=((THREADS, "2"),))
PLAIN = Candidate(64, True, fields=((THREADS, "2"),))
GOOD = Candidate(128, True, 500, (64, 128), 2, ((THREADS, "1"),))
LONG = Candidate(
    65536,
    True,
    123456,
    tuple(range(1000, 30000, 1000)),
    12,
    ((f"parameters.{'a_rather_long_name_' * 6}.string_value", "x" * 90), (THREADS, "1")),
)
NOTE = "the load generator shared the CPU cores with the server"
FACTS = {"precision": "fp32", "rows": 1234567, "embedding_bytes": 632098304, "sha256": "ab" * 32}


def problem(sla_ms: float = 20.0, model: str = "dlrm", *more: Constraint) -> Problem:
    constraints = (Constraint("latency-p95", sla_ms), *more)
    return Problem(model, Space((64, 128)), 16, 64, (METRICS["throughput"],), constraints)


def measured(throughput: float, p95_ms: float, **more: Any) -> Measurement:
    return Measurement(
        throughput,
        latency_p50_ms=0.5 * p95_ms,
        latency_p90_ms=0.9 * p95_ms,
        latency_p95_ms=p95_ms,
        latency_p99_ms=1.5 * p95_ms,
        mean_batch_size=48.0,
        stable=True,
        **more,
    )


def trial(number: int, candidate: Candidate, *points: tuple[int, Measurement], **more: Any) -> Trial:
    return Trial(number, candidate, tuple((LoadPoint(16, load), m) for load, m in points), **more)


def study() -> list[Trial]:
    return [
        trial(0, BASELINE, (2, measured(2000, 10.0)), (4, measured(3000, 19.0)), (8, measured(3100, 45.0))),
        trial(1, PLAIN, (4, measured(6000, 18.0)), (8, measured(6500, 35.0))),
        trial(2, GOOD, (8, measured(11000, 15.0)), (12, measured(12345, 18.2, server_memory_bytes=1.31e9))),
        trial(3, replace(GOOD, instance_count=4), status="failed", reason="out of [memory]"),
        trial(4, replace(GOOD, instance_count=3), (8, Measurement(reason="perf_analyzer timed out"))),
        trial(5, LONG, (8, measured(13000, 90.0))),
    ]


def outcome(trials: Sequence[Trial] | None = None, sla_ms: float = 20.0) -> Outcome:
    return assess(study() if trials is None else trials, problem(sla_ms), BASELINE, PLAIN)


def told(result: Outcome, asked: Problem | None = None, *, width: int = 80, **more: Any) -> str:
    text = io.StringIO()
    arguments: dict[str, Any] = {
        "hardware": "some CPU, 2 cores",
        "notes": [NOTE],
        "facts": FACTS,
        "results_dir": Path("results/dlrm/1"),
        "command": "tune --sla-p95 20ms --seed 0 dlrm",
        "config_path": Path("results/dlrm/1/best/config.pbtxt"),
    }
    print_outcome(Console(file=text, width=width), result, asked or problem(), **{**arguments, **more})
    return text.getvalue()


class TestEntry:
    def test_it_holds_settings_load_and_figures(self) -> None:
        best = outcome().recommended
        assert best is not None
        entry = export.entry(best)
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

    def test_the_point_can_be_rebuilt_from_it(self) -> None:
        best = outcome().recommended
        assert best is not None
        entry: dict[str, Any] = json.loads(json.dumps(export.entry(best)))
        own = ("max_batch_size", "dynamic_batching", "max_queue_delay_us", "instance_count")
        candidate = Candidate(
            **{name: entry[name] for name in own},
            preferred_batch_sizes=tuple(entry["preferred_batch_sizes"]),
            fields=((THREADS, entry[THREADS]),),
        )
        assert candidate == best.candidate
        assert LoadPoint(entry["request_batch_size"], entry["concurrency"]) == best.load
        assert entry["trial"] == best.trial

    def test_the_unknown_is_null(self) -> None:
        point = Point(0, BASELINE, LoadPoint(16, 1), Measurement(float("nan"), float("inf")))
        entry = export.entry(point)
        json.dumps(entry, allow_nan=False)
        unknown = {name for name, value in entry.items() if value is None}
        assert {"throughput_infer_per_sec", "latency_avg_ms", "gpu_memory_bytes"} <= unknown


class TestDocument:
    def test_keys_and_counts(self) -> None:
        document = export.document(outcome(), wall_seconds=12.34567, results_dir="r", extra={"seed": 0})
        assert list(document) == [
            "recommended",
            "confirmation",
            "baseline",
            "dynamic_batching",
            "speedup",
            "speedup_over_dynamic_batching",
            "pareto",
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
        assert document["speedup"] == pytest.approx(12345 / 3000)
        assert document["speedup_over_dynamic_batching"] == pytest.approx(12345 / 6000)
        assert document["closest"] is None
        assert document["holds_back"] is None
        json.dumps(document, allow_nan=False)

    def test_nothing_found(self) -> None:
        document = export.document(outcome(sla_ms=1.0), wall_seconds=1, results_dir="r")
        for name in ("recommended", "baseline", "dynamic_batching", "speedup"):
            assert document[name] is None
        assert isinstance(document["closest"], dict)
        assert "10" in str(document["holds_back"])

    def test_a_baseline_without_a_load_that_meets_the_bound(self) -> None:
        slow = [trial(0, BASELINE, (1, measured(10, 400.0))), *study()[1:]]
        document = export.document(outcome(slow), wall_seconds=1, results_dir="r")
        assert document["baseline"] is None
        assert document["speedup"] is None
        assert document["speedup_over_dynamic_batching"] is not None


class TestFiles:
    def test_pareto_csv_has_the_columns_of_trials_csv(self, tmp_path: Path) -> None:
        path = tmp_path / "pareto.csv"
        export.write_pareto_csv(path, outcome(study()[:3]))
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        known = TrialsTable(tmp_path / "trials.csv", "dlrm", {THREADS: ("1", "2")}).columns
        assert set(rows[0]) - {export.ENERGY} <= set(known)
        assert {"instance_count", "concurrency", "throughput_infer_per_sec"} <= set(rows[0])
        assert [row["trial"] for row in rows] == ["2", "2", "0"]
        assert rows[0]["preferred_batch_sizes"] == "64 128"
        assert rows[0]["dynamic_batching"] == "true"
        assert rows[-1]["dynamic_batching"] == "false"
        assert rows[0]["gpu_memory_bytes"] == ""
        assert rows[0][THREADS] == "1"

    def test_an_empty_front_has_a_header(self, tmp_path: Path) -> None:
        export.write_pareto_csv(tmp_path / "pareto.csv", outcome([]))
        assert (tmp_path / "pareto.csv").read_text().startswith("trial,max_batch_size,")

    def test_a_file_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        export.write_json(path, {"a": 1})
        with pytest.raises(ValueError, match="JSON"):
            export.write_json(path, {"a": float("nan")})
        assert json.loads(path.read_text()) == {"a": 1}
        export.write_json(path, {"b": "µ"})
        assert json.loads(path.read_text()) == {"b": "µ"}
        assert [each.name for each in tmp_path.iterdir()] == ["run.json"]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFault, match=r"cannot write .*gone"):
            export.write_json(tmp_path / "gone" / "too" / "run.json", {})


class TestText:
    def test_the_answer_comes_first(self) -> None:
        text = told(outcome())
        assert text.startswith("dlrm: 12,345 infer/s within p95 <= 20 ms\n")
        assert "preferred_batch_size: [ 64, 128 ]" in text
        assert "instance_group [ { count: 2 } ]" in text
        assert 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }' in text
        assert "772 req/s of 16 samples each" in text
        assert "p50 9.10 ms · p90 16.4 ms · p95 18.2 ms · p99 27.3 ms" in text
        assert "concurrency 12" in text
        assert "memory        1.31 GB" in text

    def test_what_is_known_of_the_gpu_is_told(self) -> None:
        gpu = {"gpu_utilization": 0.74, "gpu_power_watts": 312.0, "gpu_sm_clock_mhz": 1755.0}
        memory = {"gpu_memory_bytes": 9.1e9, "server_memory_bytes": 1.31e9}
        best = measured(12345, 18.2, **gpu, **memory, gpu_throttling="power limit")
        trials = [trial(0, BASELINE, (4, measured(3000, 19.0))), trial(1, GOOD, (12, best))]
        asked = problem(20.0, "dlrm", Constraint("gpu-memory", 10e9))
        text = told(assess(trials, asked, BASELINE, PLAIN), asked)
        assert "within p95 <= 20 ms and GPU memory <= 10.0 GB" in " ".join(text.split())
        assert re.search(r"^GPU memory +9.10 GB$", text, re.MULTILINE)
        assert re.search(r"^energy +25.3 J/1000 infer$", text, re.MULTILINE)
        assert re.search(r"^GPU +74 % busy · 312 W · SM 1,755 MHz · clocks lowered: power limit$", text, re.MULTILINE)
        entry = export.entry(Point(1, GOOD, LoadPoint(16, 12), best))
        assert entry[export.ENERGY] == pytest.approx(25.27, abs=0.01)
        assert (entry["gpu_sm_clock_mhz"], entry["gpu_throttling"]) == (1755.0, "power limit")

    def test_gains_are_told_with_both_figures(self) -> None:
        lines = told(outcome()).splitlines()
        baseline = next(line for line in lines if line.startswith("baseline"))
        assert "3,000 infer/s" in baseline
        assert baseline.endswith("4.12x")
        plain = next(line for line in lines if line.startswith("dynamic_batching {}"))
        assert "6,000 infer/s" in plain
        assert plain.endswith("2.06x")

    def test_the_rest_is_there(self) -> None:
        text = told(outcome())
        assert "rows 1,234,567" in text
        assert "embedding size 632 MB" in text
        assert NOTE in text
        assert "6 configurations, 9 measurements" in text
        assert "results/dlrm/1/best/config.pbtxt" in text
        assert text.rstrip().endswith("tune --sla-p95 20ms --seed 0 dlrm")

    def test_no_baseline(self) -> None:
        text = told(replace(outcome(), baseline=None))
        assert "no measured load meets p95 <= 20 ms" in text

    def test_nothing_meets_the_bound(self) -> None:
        text = told(outcome(sla_ms=1.0), problem(1.0), config_path=None)
        assert text.startswith("dlrm: no configuration meets p95 <= 1 ms: ")
        assert "The closest one measured:" in text
        assert "2,000 infer/s" in text
        assert "baseline" not in text
        assert "config.pbtxt" not in text

    def test_nothing_was_measured(self) -> None:
        text = told(outcome([trial(0, BASELINE, status="failed", reason="no [/memory] left.")]))
        assert text.startswith("dlrm: no configuration meets p95 <= 20 ms: nothing could be measured: no")
        assert "[/memory] left\n" in text
        assert "Pareto" not in text

    def test_unknown_metrics_are_told_as_unknown(self) -> None:
        asked = replace(problem(), objectives=(METRICS["throughput"], METRICS["energy"]))
        result = outcome([trial(0, BASELINE, (1, Measurement(100.0, latency_p95_ms=5.0, stable=True)))])
        text = told(result, asked)
        assert "p50 unknown" in text
        assert re.search(r"^energy +unknown$", text, re.M)

    def test_a_long_front_is_cut_short(self) -> None:
        rising = [(load, measured(1000.0 * load, 1.0 * load)) for load in range(1, 31)]
        text = told(outcome([trial(0, BASELINE, *rising)]))
        assert "20 more in pareto.csv" in text
        assert "30,000" in text
        assert len([line for line in text.splitlines() if re.match(r" *[\d,]+ +\d+\.\d+ ", line)]) == 10

    @pytest.mark.parametrize("width", [80, 60])
    def test_it_fits_the_width(self, width: int) -> None:
        long = replace(outcome(), recommended=Point(5, LONG, LoadPoint(16, 123456), measured(1.3e7, 19.9)))
        asked = replace(problem(), model="m" * 30)
        text = told(long, asked, width=width, hardware="h " * 100, notes=["n " * 100])
        whole = ("results ", "config ", "reproduce ")
        assert [x for x in text.splitlines() if len(x) > width and not x.startswith(whole)] == []

    def test_commands_and_paths_are_not_broken(self) -> None:
        command = "tune " + "--flag value " * 20 + "dlrm"
        assert f" {command}\n" in told(outcome(), command=command)

    def test_piped_it_is_plain(self) -> None:
        text = told(outcome())
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())

    def test_a_model_name_is_no_markup(self) -> None:
        assert told(outcome(), replace(problem(), model="[bold]m[/]")).startswith("[bold]m[/]: ")

    def test_interrupted(self) -> None:
        text = io.StringIO()
        for result in (outcome(), outcome(sla_ms=1.0), outcome([])):
            print_best_so_far(Console(file=text, width=80), result, problem(), results_dir=Path("a b/1"))
        assert "12,345 infer/s, p95 18.2 ms" in text.getvalue()
        assert text.getvalue().count("tune --resume 'a b/1'\n") == 3
        assert text.getvalue().count("nothing measured meets p95 <= 20 ms") == 2


class TestWords:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(12345.6, "12,346"), (771.4, "771"), (18.24, "18.2"), (0.5234, "0.523"), (None, "unknown")],
    )
    def test_number(self, value: float | None, text: str) -> None:
        assert words.number(value) == text

    def test_size_clock_and_exact(self) -> None:
        assert [words.size(value) for value in (999, 1500, 8.38e9, None)] == [
            "999 bytes",
            "1.50 kB",
            "8.38 GB",
            "unknown",
        ]
        assert [words.clock(value) for value in (-1, 65.4, 3723)] == ["0:00", "1:05", "1:02:03"]
        assert [words.exact(value) for value in (20.0, 0.5, 4e6)] == ["20", "0.5", "4,000,000"]

    def test_bounds(self) -> None:
        bounds = (Constraint("throughput", 4000), Constraint("memory", 2e9), Constraint("latency-p99", 0.5))
        assert words.bounds(bounds) == "throughput >= 4,000 infer/s and memory <= 2.00 GB and p99 <= 0.5 ms"
        assert words.judged_latency(bounds) == "latency-p99"

    def test_settings_of_the_batcher_only_where_it_is_on(self) -> None:
        assert words.triton_lines(Candidate(8)) == [
            "max_batch_size: 8",
            "# no dynamic_batching",
            "instance_group [ { count: 1 } ]",
        ]
        eager = Candidate(8, True, fields=(("optimization.eager_batching", True),))
        assert words.triton_lines(eager) == [
            "max_batch_size: 8",
            "dynamic_batching { }",
            "instance_group [ { count: 1 } ]",
            "optimization.eager_batching: true",
        ]


class TestHtml:
    def page(
        self, tmp_path: Path, result: Outcome, trials: Sequence[Trial], asked: Problem | None = None, **info: Any
    ) -> str:
        """``info``: what run.json holds besides."""
        told: dict[str, Any] = {
            "status": "found",
            "notes": [NOTE],
            "command": "tune --sla-p95 20ms dlrm",
            "hardware": {"cpu": "some CPU", "cpu_count": 2},
            "problem": {"facts": FACTS},
        }
        folder, options = RunFolder(tmp_path / "dlrm" / "1"), RunOptions("dlrm")
        run = FinishedRun(
            folder, options, {**told, **info}, asked or problem(), BASELINE, PLAIN, tuple(trials), result
        )
        (path,) = write([run], ["html"], tmp_path / "report.html")
        return path.read_text(encoding="utf-8")

    def test_it_tells_what_the_text_tells(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, outcome(), study())
        assert '<h1 class="answer">dlrm: 12,345 infer/s within p95 &lt;= 20 ms</h1>' in page
        for text in ("4.12x", "out of [memory]", "perf_analyzer timed out", "1,234,567", NOTE, "--sla-p95"):
            assert text in page
        assert len(re.findall("<use[^>]*><title>trial", page)) == 8 + 5  # points; those within the bounds
        assert page.count('role="img"') == page.count("<desc id=") == page.count("<figure>") == 3

    def test_it_carries_the_verdict(self, tmp_path: Path) -> None:
        trials = confirmed(15.0)
        assert "<dt>verdict</dt><dd>PASS at 99% confidence" in self.page(tmp_path, outcome(trials), trials)

    def test_it_loads_nothing(self, tmp_path: Path) -> None:
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
        assert "The closest one measured:" in page
        assert "<figure>" not in self.page(tmp_path, outcome([]), [])

    @pytest.mark.parametrize("spread", [1.0, 1000.0])
    def test_every_point_lies_inside_the_plot(self, tmp_path: Path, spread: float) -> None:
        points = [(1, measured(100.0, 1.0)), (2, measured(200.0, spread)), (3, measured(0.003, 3.0))]
        points.append((4, measured(float("nan"), float("inf"))))
        trials = [trial(0, BASELINE, *points)]
        asked = problem(20, "m", Constraint("throughput", 150.0))
        page = self.page(tmp_path, assess(trials, asked, BASELINE, PLAIN), trials, asked)
        plot = page[page.index("<svg") : page.index("</svg>")]
        dots = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*><title>', plot)
        assert len(dots) == 3
        assert all(60 <= float(x) <= 715 and 0 <= float(y) <= 350 for x, y in dots)


def confirmed(p95_ms: float, servers: int = 3, windows: int = 8) -> list[Trial]:
    """The study, its best configuration measured again on fresh servers."""
    trials = study()
    best = outcome(trials).recommended
    assert best is not None
    found = [
        Confirmation(server, best.load, measured(12000.0 + 10 * n, p95_ms + 0.05 * (n % 3), requests=4000))
        for server in range(1, servers + 1)
        for n in range(windows)
    ]
    return [replace(t, confirmations=tuple(found)) if t.number == best.trial else t for t in trials]


class TestVerdict:
    def test_a_pass_carries_the_intervals(self) -> None:
        result = outcome(confirmed(15.0))
        text = " ".join(told(result).split())
        assert "verdict PASS at 99% confidence (12,0" in text
        assert "; 24 measurements on 3 fresh servers)" in text
        document = export.document(result, wall_seconds=1, results_dir="r")["confirmation"]
        assert isinstance(document, dict)
        assert document["verdict"] == "PASS"
        low, high = document["latency_ms"]
        assert low <= 15.1 <= high <= 20

    def test_too_few_servers_leave_it_undecided(self) -> None:
        text = " ".join(told(outcome(confirmed(15.0, servers=2))).split())
        assert "verdict UNDECIDED at 99% confidence: only 2 of 3 fresh servers" in text

    def test_without_a_confirmation_there_is_no_verdict(self) -> None:
        result = outcome()
        assert "UNDECIDED: not measured again on fresh servers" in " ".join(told(result).split())
        assert export.document(result, wall_seconds=1, results_dir="r")["confirmation"] is None

    def test_what_failed_is_not_recommended(self) -> None:
        trials = confirmed(30.0)
        failed = next(t for t in trials if t.confirmations)
        result = outcome(trials)
        assert result.recommended is not None
        assert result.confirmed is None
        lower = result.recommended.load < failed.confirmations[0].load
        assert lower or result.recommended.candidate != failed.candidate


def replay(watcher: Watcher, trials: Sequence[Trial]) -> None:
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
    def test_quiet_says_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
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

    def test_what_is_shown(self) -> None:
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
        assert re.search(r"4:00 left · 0:0\d elapsed · 6 trials of at most 30", shown)

    def test_trials_side_by_side(self) -> None:
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
