"""Tests of the output of a run: JSON, CSV, terminal text and HTML."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives import model_stats
from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import write_json
from optimizer.core.notes import OutputsNotCompared
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Point, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results import outcome_values, result_document, summary
from optimizer.results.finished_run import FinishedRun
from optimizer.results.recommendation import Outcome, assess
from optimizer.results.report.writer import write
from optimizer.results.terminal_summary import print_best_so_far
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_reader import ENERGY
from optimizer.store.trials_table import TrialsTable
from tests.csv_tables import read_rows
from tests.example_outcomes import (
    BASELINE,
    FACTS,
    GOOD,
    LONG,
    NOTE,
    PLAIN,
    THREADS,
    example_trials,
    measured,
    outcome,
    printed_outcome,
    problem,
    trial,
    trials_with_comparisons,
    trials_with_confirmation,
)


class TestEntry:
    def test_it_has_settings_load_and_measured_values(self) -> None:
        best = outcome().recommended
        assert best is not None
        entry = result_document.entry(best)
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
        entry: dict[str, Any] = json.loads(json.dumps(result_document.entry(best)))
        setting_names = ("max_batch_size", "dynamic_batching", "max_queue_delay_us", "instance_count")
        candidate = Candidate(
            **{name: entry[name] for name in setting_names},
            preferred_batch_sizes=tuple(entry["preferred_batch_sizes"]),
            fields=((THREADS, entry[THREADS]),),
        )
        assert candidate == best.candidate
        assert LoadPoint(entry["request_batch_size"], entry["concurrency"]) == best.load
        assert entry["trial"] == best.trial

    def test_each_model_under_load_has_its_values(self) -> None:
        found = outcome()
        assert found.recommended is not None
        by_model = {"dlrm": Measurement(30.5, latency_p95_ms=2.0, requests=300), "other": Measurement(10.0)}
        values = replace(found.recommended.measurement, by_model=model_stats.to_text(by_model))
        point = replace(found.recommended, measurement=values)
        models = result_document.entry(point)["models"]
        assert isinstance(models, list)
        assert [(m["model"], m["throughput_infer_per_sec"], m["latency_p95_ms"]) for m in models] == [
            ("dlrm", 30.5, 2.0),
            ("other", 10.0, None),
        ]
        lines = dict(outcome_values.point_lines(found, point, problem()))
        assert lines["dlrm"] == "30.5 infer/s · p50 unknown · p90 unknown · p95 2.00 ms · p99 unknown"

    def test_unknown_values_are_null(self) -> None:
        point = Point(0, BASELINE, LoadPoint(16, 1), Measurement(float("nan"), float("inf")))
        entry = result_document.entry(point)
        json.dumps(entry, allow_nan=False)
        unknown = {name for name, value in entry.items() if value is None}
        assert {"throughput_infer_per_sec", "latency_avg_ms", "gpu_memory_bytes"} <= unknown


class TestDocument:
    def test_the_document_has_all_keys_and_counts(self) -> None:
        document = result_document.document(outcome(), wall_seconds=12.34567, results_dir="r")
        assert list(document) == [
            "verdict",
            "undecided_cause",
            "recommended",
            "confirmation",
            "baseline",
            "dynamic_batching",
            "objective",
            *(
                f"{name}{suffix}"
                for name in ("speedup", "speedup_over_dynamic_batching")
                for suffix in ("", "_interval", "_values", "_text")
            ),
            "pareto",
            "dominated_by",
            "closest",
            "no_recommendation_reason",
            "inconclusive",
            "trials",
            "measurements",
            "confirmations",
            "wall_seconds",
            "results_dir",
        ]
        assert document["trials"] == 6
        assert document["measurements"] == 9
        assert document["speedup"] is None, "the search's measurements are no evidence of a gain"
        assert document["speedup_interval"] is None
        assert document["closest"] is None
        assert document["no_recommendation_reason"] is None
        json.dumps(document, allow_nan=False)

    def test_gains_have_intervals(self) -> None:
        document = result_document.document(outcome(trials_with_comparisons()), wall_seconds=1, results_dir="r")
        assert document["speedup"] == pytest.approx(4, rel=0.02)
        for name, truth in {"speedup": 4.0, "speedup_over_dynamic_batching": 1.0}.items():
            interval = document[f"{name}_interval"]
            assert isinstance(interval, list)
            assert 0.8 * truth < interval[0] < truth < interval[1] < 1.25 * truth

    def test_without_a_recommendation_the_document_has_the_closest_configuration(self) -> None:
        document = result_document.document(outcome(sla_ms=1.0), wall_seconds=1, results_dir="r")
        for name in ("recommended", "baseline", "dynamic_batching", "speedup"):
            assert document[name] is None
        assert isinstance(document["closest"], dict)
        assert "10" in str(document["no_recommendation_reason"])

    def test_a_baseline_that_misses_the_bound_has_no_speedup(self) -> None:
        slow = [trial(0, BASELINE, (1, measured(10, 400.0))), *example_trials()[1:]]
        document = result_document.document(outcome(slow), wall_seconds=1, results_dir="r")
        assert document["baseline"] is None
        assert document["speedup"] is None


class TestFiles:
    def test_pareto_csv_has_the_columns_of_trials_csv(self, tmp_path: Path) -> None:
        path = tmp_path / "pareto.csv"
        result_document.write_pareto_csv(path, outcome(example_trials()[:3]))
        rows = read_rows(path)
        trials_columns = TrialsTable(tmp_path / "trials.csv", "dlrm", {THREADS: ("1", "2")}).columns
        assert set(rows[0]) - {ENERGY, "confirmed"} <= set(trials_columns)
        assert {row["confirmed"] for row in rows} == {"false"}
        assert {"instance_count", "concurrency", "throughput_infer_per_sec"} <= set(rows[0])
        assert [row["trial"] for row in rows] == ["2", "2", "0"]
        assert rows[0]["preferred_batch_sizes"] == "64 128"
        assert rows[0]["dynamic_batching"] == "true"
        assert rows[-1]["dynamic_batching"] == "false"
        assert rows[0]["gpu_memory_bytes"] == ""
        assert rows[0][THREADS] == "1"

    def test_pareto_csv_marks_what_fresh_servers_measured(self, tmp_path: Path) -> None:
        path, result = tmp_path / "pareto.csv", outcome(trials_with_comparisons())
        result_document.write_pareto_csv(path, result)
        rows = read_rows(path)
        fresh = [point for point in result.front.points if result.confirmation_of(point)]
        assert len(rows) > [row["confirmed"] for row in rows].count("true") == len(fresh) > 0

    def test_an_empty_front_has_a_header(self, tmp_path: Path) -> None:
        result_document.write_pareto_csv(tmp_path / "pareto.csv", outcome([]))
        assert (tmp_path / "pareto.csv").read_text().startswith("trial,max_batch_size,")

    def test_a_file_is_replaced_atomically(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        write_json(path, {"a": 1})
        with pytest.raises(ValueError, match="JSON"):
            write_json(path, {"a": float("nan")})
        assert json.loads(path.read_text()) == {"a": 1}
        write_json(path, {"b": "µ"})
        assert json.loads(path.read_text()) == {"b": "µ"}
        assert [each.name for each in tmp_path.iterdir()] == ["run.json"]

    def test_a_missing_folder_is_an_environment_fault(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFault, match=r"cannot write .*gone"):
            write_json(tmp_path / "gone" / "too" / "run.json", {})


class TestText:
    def test_the_answer_comes_in_the_order_of_its_use(self) -> None:
        result = outcome(trials_with_comparisons())
        lines = printed_outcome(result).splitlines()
        assert re.fullmatch(
            r"dlrm: PASS at 12,\d+ ± [\d,]+ infer/s, p95 15(\.\d+)? ± [\d.]+ ms \(SLA: p95 <= 20 ms\)", lines[0]
        )
        assert lines[1:3] == ["", "Change in config.pbtxt:"]
        firsts = [line.split()[0] for line in lines if line and not line.startswith("  ")]
        rows = ["configuration", "recommended", "current", "dynamic_batching"]
        assert firsts[2:] == [*rows, "Intervals:", "note", "config", "report", "next"]
        assert lines[-1].strip() == "tune emit results/dlrm/1"

    def test_the_change_of_a_step_names_its_file(self) -> None:
        lines = printed_outcome(outcome(trials_with_comparisons()), tuned_part="encoder").splitlines()
        assert lines[2] == "Change in encoder/config.pbtxt:"

    def test_the_change_has_only_the_lines_that_differ(self) -> None:
        lines = printed_outcome(outcome(trials_with_comparisons())).splitlines()
        first = lines.index("Change in config.pbtxt:") + 1
        assert lines[first : lines.index("", first)] == [
            "  - max_batch_size: 64",
            "  + max_batch_size: 128",
            "  + dynamic_batching {",
            "  +   max_queue_delay_microseconds: 500",
            "  +   preferred_batch_size: [ 64, 128 ]",
            "  + }",
            "  - instance_group [ { count: 1 } ]",
            "  + instance_group [ { count: 2 } ]",
            '  - parameters { key: "intra_op_thread_count" value { string_value: "2" } }',
            '  + parameters { key: "intra_op_thread_count" value { string_value: "1" } }',
        ]

    def test_a_long_line_of_the_change_breaks_between_words_and_keeps_its_sign(self) -> None:
        lines = printed_outcome(outcome(trials_with_comparisons()), width=60).splitlines()
        first = lines.index('  - parameters { key: "intra_op_thread_count" value {')
        assert lines[first : first + 4] == [
            '  - parameters { key: "intra_op_thread_count" value {',
            '  -     string_value: "2" } }',
            '  + parameters { key: "intra_op_thread_count" value {',
            '  +     string_value: "1" } }',
        ]

    def test_a_comparison_that_is_too_wide_has_a_row_for_each_metric(self) -> None:
        result = outcome(trials_with_comparisons())
        (narrow, wide) = (printed_outcome(result, width=width) for width in (60, 80))
        assert "\ngain " in narrow
        assert "…" not in narrow
        for row in outcome_values.comparisons(result, problem()):
            assert row[-1] in wide
            assert set(row[-1].split()) <= set(narrow.split())

    def test_a_current_configuration_that_is_the_best_changes_nothing(self) -> None:
        result = replace(outcome(example_trials()[:1]), trials=2)
        assert result.recommended is result.baseline.point
        text = printed_outcome(result)
        assert "No change: the current configuration is recommended." in text
        assert "+ " not in text
        step = summary.next_step(replace(result, sla=Sla()), "r", "tune dlrm")
        assert (step.advice.split(",")[0], step.command) == ("keep the current configuration", "tune explain r")

    def test_a_configuration_that_was_measured_alone_is_not_called_the_best_one(self) -> None:
        text = printed_outcome(outcome(example_trials()[:1]))
        assert "No change: no other configuration was measured." in text
        assert "the best one" not in text

    def test_an_undecided_answer_has_its_cause_and_the_next_command(self) -> None:
        lines = printed_outcome(outcome()).splitlines()
        assert lines[0] == "dlrm: UNDECIDED at 12,300 infer/s, p95 18.2 ms (SLA: p95 <= 20 ms)"
        assert lines[1] == "cause         it was not tested on fresh servers"
        command = "tune verify results/dlrm/1 --budget 3m"
        assert lines[-2:] == ["next          test it on fresh servers:", " " * 14 + command]

    def test_a_test_that_is_complete_is_made_again(self) -> None:
        complete = summary.RemainingTests(is_complete=True)
        printed = printed_outcome(outcome(), remaining_tests=complete)
        assert printed.endswith(" tune verify --fresh results/dlrm/1\n")

    def test_details_are_shown_on_request(self) -> None:
        short, text = printed_outcome(outcome()), printed_outcome(outcome(), verbose=True)
        details = (
            "772 req/s of 16 samples each",
            "p50 9.10 ms · p90 16.4 ms · p95 18.2 ms · p99 27.3 ms",
            "load          concurrency 12",
            "memory        1.31 GB",
            "Pareto front",
            "rows 1,234,567",
            "embedding size 632 MB",
            "hardware      some CPU, 2 CPUs",
            "6 configurations, 9 measurements",
            "note          search converged",
            "results       results/dlrm/1\n",
            "reproduce     tune --sla-p95 20ms --seed 0 dlrm\n",
        )
        for detail in details:
            assert detail in text
            assert detail not in short
        for shown in (short, text):
            assert NOTE in re.sub(r"\s+", " ", shown)
            assert "config        results/dlrm/1/best/config.pbtxt\n" in shown
            assert "report        results/dlrm/1/report.html\n" in shown

    def test_values_of_the_gpu_are_shown(self) -> None:
        gpu = {"gpu_utilization": 0.74, "gpu_power_watts": 312.0, "gpu_sm_clock_mhz": 1755.0}
        memory = {"gpu_memory_bytes": 9.1e9, "server_memory_bytes": 1.31e9}
        best = measured(12345, 18.2, **gpu, **memory, gpu_throttling="power limit")
        trials = [trial(0, BASELINE, (4, measured(3000, 19.0))), trial(1, GOOD, (12, best))]
        searched = problem(20.0, "dlrm", **{"gpu-memory": 10e9})
        text = printed_outcome(assess(trials, searched, BASELINE, PLAIN), searched, verbose=True)
        assert "(SLA: p95 <= 20 ms and GPU memory <= 10.0 GB)" in " ".join(text.split())
        assert re.search(r"^GPU memory +9.10 GB$", text, re.MULTILINE)
        assert re.search(r"^energy +25.3 J/1000 infer$", text, re.MULTILINE)
        assert re.search(r"^GPU +74 % busy · 312 W · SM 1,755 MHz · clocks lowered: power limit$", text, re.MULTILINE)
        entry = result_document.entry(Point(1, GOOD, LoadPoint(16, 12), best))
        assert entry[ENERGY] == pytest.approx(25.27, abs=0.01)
        assert (entry["gpu_sm_clock_mhz"], entry["gpu_throttling"]) == (1755.0, "power limit")

    def test_comparisons_have_intervals(self) -> None:
        result = outcome(trials_with_comparisons())
        rows = {line[:20].strip(): line[20:].strip() for line in printed_outcome(result).splitlines()}
        value = r"[\d,.]+ ± [\d,.]+"
        assert re.fullmatch(rf"{value} +{value} +12", rows["recommended"])
        assert re.fullmatch(
            rf"3,0\d\d ± [\d,]+ +{value} +4 +4\.\d+x \([34]\.\d+ to 4\.\d+\)", rows["current (baseline)"]
        )
        assert re.fullmatch(rf"{value} +{value} +8 +none \(0\.\d+ to 1\.\d+\)", rows["dynamic_batching {}"])
        assert "Intervals: 99 % confidence. Recommended: 32 measurements on 4 fresh servers." in printed_outcome(
            result
        )

    def test_without_fresh_servers_there_is_neither_gain_nor_interval(self) -> None:
        lines = printed_outcome(outcome()).splitlines()
        shown = [line for line in lines if line.startswith(("current", "dynamic_batching {}"))]
        assert len(shown) == 2
        assert all(line.endswith("not confirmed") and "±" not in line for line in shown)
        assert "Measured in the search only, which overestimates its best configurations." in lines

    def test_the_front_says_what_was_measured_where(self) -> None:
        result = outcome(trials_with_comparisons())
        assert result.recommended in result.front.points
        text = printed_outcome(result, verbose=True)
        assert re.search(r"^ 12,0\d\d +15\.\d +12  fresh +2  batch 128", text, re.M)
        assert re.search(r"^ 13,000 +90\.0 +8  search +5  ", text, re.M)

    def test_a_recommendation_off_the_front_has_a_reason(self) -> None:
        trials = [*trials_with_comparisons(), trial(6, replace(GOOD, instance_count=5), (9, measured(12500, 14.0)))]
        result = outcome(trials)
        assert result.recommended not in result.front.points
        text = " ".join(printed_outcome(result, verbose=True).split())
        assert (
            "The recommendation is not on the front: trial 6 had 12,500 infer/s, p95 14.0 ms, concurrency 9, but "
            "it was measured in the search only" in text
        )
        assert outcome_values.front_remark(outcome(trials_with_comparisons())) == ""
        document = result_document.document(result, wall_seconds=1, results_dir="r")
        assert document["dominated_by"]["trial"] == 6  # type: ignore[index]

    def test_a_baseline_without_a_point_is_said_to_miss_the_bound(self) -> None:
        result = outcome()
        text = printed_outcome(replace(result, baseline=replace(result.baseline, point=None)))
        assert "no measured load meets p95 <= 20 ms" in " ".join(text.split())

    def test_a_baseline_that_crashed_is_not_said_to_miss_the_bound(self) -> None:
        crashed = trial(1, PLAIN, status="failed", reason="crashed 3 times: the server died")
        trials = [
            crashed if trial_of_run.candidate == PLAIN else trial_of_run for trial_of_run in trials_with_comparisons()
        ]
        text = " ".join(printed_outcome(outcome(trials)).split())
        assert "dynamic_batching {} – – – failed: crashed 3 times: the server died" in text
        assert "no measured load meets" not in text

    def test_a_fail_shows_the_closest_configuration(self) -> None:
        text = printed_outcome(outcome(sla_ms=1.0), problem(1.0), config_path=None)
        first, second, *_ = text.splitlines()
        assert first == "dlrm: FAIL, no configuration meets p95 <= 1 ms"
        assert second == "cause         the lowest p95 measured is 10.0 ms"
        assert "closest       2,000 infer/s, p95 10.0 ms, concurrency 2 (trial 0)\n" in text
        assert "baseline" not in text
        assert "config.pbtxt" not in text
        assert text.endswith("or relax the bound:\n              tune explain results/dlrm/1\n")

    def test_a_run_without_measurements_shows_the_cause_and_the_command(self) -> None:
        text = printed_outcome(outcome([trial(0, BASELINE, status="failed", reason="no [/memory] left.")]))
        first, second, *_ = text.splitlines()
        assert first == "dlrm: FAIL, no configuration meets p95 <= 20 ms"
        assert second == "cause         every configuration failed: no [/memory] left"
        assert "Pareto" not in text
        assert "remove the cause (see results/dlrm/1/logs), then run again:" in text
        assert text.endswith(" tune --sla-p95 20ms --seed 0 dlrm\n")

    def test_a_cause_cannot_control_the_terminal(self) -> None:
        text = printed_outcome(outcome([trial(0, BASELINE, status="failed", reason="\x1b[31m\r\nred")]))
        assert "\x1b" not in text
        assert "\r" not in text

    def test_unknown_metrics_are_shown_as_unknown(self) -> None:
        searched = replace(problem(), objectives=(METRICS["throughput"], METRICS["energy"]))
        result = outcome([trial(0, BASELINE, (1, Measurement(100.0, latency_p95_ms=5.0, stable=True)))])
        text = printed_outcome(result, searched, verbose=True)
        assert "p50 unknown" in text
        assert re.search(r"^energy +unknown$", text, re.M)

    def test_a_long_front_is_cut_short(self) -> None:
        rising = [(load, measured(1000.0 * load, 1.0 * load)) for load in range(1, 31)]
        text = printed_outcome(outcome([trial(0, BASELINE, *rising)]), verbose=True)
        assert "20 more in pareto.csv" in text
        assert "30,000" in text
        assert len([line for line in text.splitlines() if re.match(r" *[\d,]+ +\d+\.\d+ +\d+  search", line)]) == 10

    @pytest.mark.parametrize("width", [80, 60])
    def test_the_output_fits_the_width(self, width: int) -> None:
        long = replace(outcome(), recommended=Point(5, LONG, LoadPoint(16, 123456), measured(1.3e7, 19.9)))
        searched = replace(problem(), model="m" * 30)
        notes = [OutputsNotCompared("n " * 100)]
        text = printed_outcome(long, searched, width=width, hardware="h " * 100, notes=notes, verbose=True)
        whole = ("results ", "config ", "report ", "reproduce ")
        assert [x for x in text.splitlines() if len(x) > width and not x.startswith(whole)] == []

    def test_commands_and_paths_are_not_broken(self) -> None:
        command = "tune " + "--flag value " * 20 + "dlrm"
        assert f" {command}\n" in printed_outcome(outcome(), command=command, verbose=True)

    def test_no_line_ends_with_blanks(self) -> None:
        assert all(line == line.rstrip() for line in printed_outcome(outcome()).splitlines())

    def test_markup_in_a_model_name_is_not_interpreted(self) -> None:
        assert printed_outcome(outcome(), replace(problem(), model="[bold]m[/]")).startswith("[bold]m[/]: ")

    def test_an_interrupted_run_shows_the_best_so_far(self) -> None:
        text = io.StringIO()
        for result in (outcome(), outcome(sla_ms=1.0), outcome([])):
            console, command = Console(file=text, width=80), "tune --resume 'a b/1'"
            print_best_so_far(console, result, problem(), results_dir=Path("a b/1"), command=command)
        assert "12,345 infer/s, p95 18.2 ms" in text.getvalue()
        assert text.getvalue().count("tune --resume 'a b/1'\n") == 3
        assert "configurations.\nbest so far   no measurement meets p95 <= 20 ms\n" in text.getvalue()
        assert (
            "Interrupted after 0 measurements of 0 configurations.\nbest so far   nothing was measured\n"
            in text.getvalue()
        )


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
        page = self.page(tmp_path, outcome(), example_trials())
        answer = "dlrm: UNDECIDED at 12,300 infer/s, p95 18.2 ms (SLA: p95 &lt;= 20 ms)"
        assert f'<header class="banner undecided">\n<h1 class="answer undecided">{answer}</h1>' in page
        assert "<p>Cause: it was not tested on fresh servers.</p>\n<p>Next: test it on fresh servers:</p>" in page
        assert f"tune verify {tmp_path}/dlrm/1 --budget 3m" in page
        for text in ("not confirmed", "out of [memory]", "perf_analyzer timed out", "1,234,567", NOTE, "--sla-p95"):
            assert text in page
        assert page.count('role="img"') == page.count("<desc id=") == 2 * page.count("<figure>") == 6

    def test_it_shows_the_verdict(self, tmp_path: Path) -> None:
        trials = trials_with_confirmation(15.0)
        page = self.page(tmp_path, outcome(trials), trials)
        assert re.search(r'<header class="banner">\n<h1 class="answer">dlrm: PASS at 12,0\d\d ±\xa0', page)
        assert re.search(r"<dt>throughput</dt><dd>12,0\d\d ±\xa0", page)
        assert "<dt>verdict</dt><dd>PASS: the SLA is met at 99 % confidence" in page
        assert "tune verify" not in page
        assert f'<pre class="copy">tune emit {tmp_path}/dlrm/1</pre>' in page

    def test_an_interrupted_run_is_continued(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, outcome(), example_trials(), status="interrupted")
        assert f'<p>Next: continue the run:</p>\n<pre class="copy">tune --resume {tmp_path}/dlrm/1</pre>' in page
        assert "Next:" not in self.page(tmp_path, outcome(), example_trials(), status="left")

    def test_the_contents_lead_to_each_part_and_the_recommended_rows_are_marked(self, tmp_path: Path) -> None:
        trials = trials_with_comparisons()
        page = self.page(tmp_path, outcome(trials), trials)
        listed = re.findall(r'<li><a href="#(run-1-part-[a-z0-9-]+)">', page)
        assert listed == re.findall(r'<h2 class="part" id="([^"]+)"', page)
        parts = [name.removeprefix("run-1-part-") for name in listed]
        assert parts[:4] == ["change", "comparison", "configuration", "pareto"]
        assert parts[-2:] == ["environment", "reproduce"]
        best = re.findall(r'<tr class="best">(.*?)</tr>', page)
        assert len(best) == 3  # comparison, front and trials
        row = r'<td>recommended</td><td class="n">12,\d+ ±\xa0[\d,]+</td><td class="n">15\.\d ±\xa0[\d.]+</td>'
        assert re.search(row, best[0]), "an interval breaks before ± only"
        assert all('<span class="mark">recommended</span>' in row for row in best[1:])
        assert re.search(r"<td>current \(baseline\)</td>.*?<td>4\.\d+x \([\d.]+ to [\d.]+\)</td>", page)

    def test_a_trial_with_more_throughput_has_the_reason_why_it_lost(self, tmp_path: Path) -> None:
        other = trial(6, replace(GOOD, instance_count=5), (9, measured(12500, 14.0)))
        trials = [*trials_with_comparisons(), other]
        page = self.page(tmp_path, outcome(trials), trials)
        assert "12,500 infer/s in the search, but it was not tested on fresh servers" in page
        assert "<td>it was measured in the search only, which overestimates its best configurations</td>" in page
        less = tuple(
            ConfirmationWindow(1, LoadPoint(16, 9), measured(11000 + n, 15.0, requests=4000)) for n in range(8)
        )
        trials = [*trials_with_comparisons(), replace(other, confirmations=less)]
        page = self.page(tmp_path, outcome(trials), trials)
        assert "on fresh servers; 12,500 infer/s in the search, but less on fresh servers" in page
        again = trial(7, other.candidate, (10, measured(12500, 14.0)))
        page = self.page(tmp_path, outcome([*trials, again]), [*trials, again])
        assert "<td>12,500 infer/s in the search, but less on fresh servers</td>" in page, "as for trial 6"

    def test_a_further_trial_of_the_recommended_configuration_refers_to_its_test(self, tmp_path: Path) -> None:
        trials = trials_with_comparisons()
        result = outcome(trials)
        assert result.recommended is not None
        remark = f"the recommended configuration, see trial {result.recommended.trial}</td>"
        for latency_ms in (14.0, 30.0):  # within the bound, and beyond it
            control = trial(6, result.recommended.candidate, (9, measured(12500, latency_ms)))
            page = self.page(tmp_path, outcome([*trials, control]), [*trials, control])
            assert page.count(remark) == 1

    def test_trials_have_a_column_of_the_goodput_only_if_it_is_a_goal(self, tmp_path: Path) -> None:
        trials = [trial(0, BASELINE, (2, measured(2000, 10.0, goodput_infer_per_sec=1990.0)))]
        header = '<th scope="col" class="n">goodput infer/s</th>'
        assert header not in self.page(tmp_path, outcome(trials), trials)
        maximized = replace(problem(), objectives=(METRICS["goodput"],))
        assert header in self.page(tmp_path, outcome(trials), trials, maximized)

    def test_the_table_of_the_stages_is_collapsed(self, tmp_path: Path) -> None:
        stages = dict.fromkeys(outcome_values.STAGES, 1.0)
        trials = [trial(0, BASELINE, (2, measured(2000, 10.0, **stages)), (4, measured(3000, 19.0, **stages)))]
        page = self.page(tmp_path, outcome(trials), trials)
        collapsed = page[page.index("<details>") : page.index("</details>")]
        assert "<summary>Table of the stages</summary>" in collapsed
        assert "Mean milliseconds of a request in each stage" in collapsed
        assert page.count("<details>") == 1

    def test_a_single_point_is_described_and_has_whole_numbers_as_loads(self, tmp_path: Path) -> None:
        trials = [trial(0, BASELINE, (2, measured(2000, 10.0)))]
        page = self.page(tmp_path, outcome(trials), trials)
        assert "1 measured point, 1 on the Pareto front: no other has more throughput at less latency. " in page
        load = page.split('id="run-1-part-load"')[1].partition("</svg>")[0]
        assert ">1</text>" in load
        assert ">1.5</text>" not in load
        trials = [trial(0, BASELINE, (4, measured(2000, 10.0)), (49, measured(9000, 19.0)))]
        load = self.page(tmp_path, outcome(trials), trials).split('id="run-1-part-load"')[1].partition("</svg>")[0]
        for number in range(10, 50, 10):
            assert f">{number}</text>" in load

    def test_batches_at_a_rate_are_described_with_the_rate(self, tmp_path: Path) -> None:
        points = ((LoadPoint(16, request_rate=400.0), measured(6400, 10.0, batch_stats="16:30:1000")),)
        trials, searched = [Trial(0, BASELINE, points)], replace(problem(), open_loop=True)
        page = self.page(tmp_path, assess(trials, searched, BASELINE, PLAIN), trials, searched)
        assert "recommended, at 400 req/s: mean 16.0 samples, most often 16" in page

    def test_the_plots_show_values_on_hover(self, tmp_path: Path) -> None:
        def titles(trials: Sequence[Trial]) -> dict[str, list[str]]:
            page = self.page(tmp_path, outcome(trials), trials)
            wide, narrow = (
                {
                    re.findall('id="run-1-([a-z]+)', svg)[0]: re.findall("<title>([^<]+)</title>", svg)
                    for svg in re.findall(f'<svg [^>]*class="plot {kind}".*?</svg>', page, re.S)
                }
                for kind in ("wide", "narrow")
            )
            assert wide == narrow
            return wide

        more = {**dict.fromkeys(outcome_values.STAGES, 1.0), "batch_stats": "16:30:1000 32:10:1000"}
        points = (2, measured(2000, 10.0, **more)), (4, measured(3000, 19.0, **more))
        shown = titles([trial(0, BASELINE, *points), trial(1, PLAIN, (4, measured(2500, 18.0, **more)))])
        figures = "3,000 infer/s, p95 19.0 ms, concurrency 4"
        assert len(shown["pareto"]) == len(set(shown["pareto"])) == len(shown["progress"]) == 3
        assert any(text.startswith(f"trial 0: {figures} · batch 64 ·") for text in shown["pareto"])
        assert shown["load"].count(f"recommended: {figures}") == 2  # latency and throughput
        assert len(shown["stages"]) == 3 * len(outcome_values.STAGES)
        assert "server queue at 4: 1.00 ms" in shown["stages"]
        assert shown["batches"][:2] == [
            "16 samples: 75.0 % of the executions",
            "32 samples: 25.0 % of the executions",
        ]
        windows = titles(trials_with_comparisons())["noise"]
        assert len(windows) == 2 * sum(len(each.confirmations) for each in trials_with_comparisons())
        assert "recommended at 12, server 1: 12,000 infer/s" in windows

    def test_loads_tell_repeated_labels_apart(self, tmp_path: Path) -> None:
        trials = trials_with_comparisons()
        lower = tuple(
            ConfirmationWindow(1, LoadPoint(16, 10), measured(10000.0 + n, 12.0, requests=4000)) for n in range(8)
        )
        trials[2] = replace(trials[2], confirmations=(*trials[2].confirmations, *lower))
        page = self.page(tmp_path, outcome(trials), trials)
        caption = page[page.index("run-1-noise-desc") :].partition("</desc>")[0]
        assert "recommended at 12: " in caption
        assert "recommended at 10: " in caption

    def test_it_is_legible_in_the_dark_and_on_paper_and_loads_no_other_resources(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, outcome(), example_trials())
        assert "@media screen and (prefers-color-scheme: dark)" in page
        assert "@media print" in page
        assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
        assert not re.search(r"""https?:|<script|<link|<img|<iframe|@import|url\((?!#)|src=|href="(?!#)""", page)

    def test_names_and_reasons_are_escaped(self, tmp_path: Path) -> None:
        hostile = "<script>alert('x')</script>\"&"
        trials = [*example_trials()[:3], trial(3, LONG, status="failed", reason=hostile)]
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

    def test_a_page_without_a_recommendation_has_the_cause_and_one_without_measurements_no_plot(
        self, tmp_path: Path
    ) -> None:
        page = self.page(tmp_path, outcome(sla_ms=1.0), example_trials(), problem(1.0))
        assert '<h1 class="answer none">dlrm: FAIL, no configuration meets p95 &lt;= 1 ms</h1>' in page
        assert "<p>Cause: the lowest p95 measured is 10.0 ms.</p>" in page
        assert f"tune explain {tmp_path}/dlrm/1" in page
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
        result = outcome(trials_with_confirmation(15.0))
        text = " ".join(printed_outcome(result, verbose=True).split())
        assert "verdict PASS: the SLA is met at 99 % confidence (1" in text
        assert "; 32 measurements on 4 fresh servers) estimand expected share of requests over the bound" in text
        document = result_document.document(result, wall_seconds=1, results_dir="r")["confirmation"]
        assert isinstance(document, dict)
        assert document["verdict"] == "PASS"
        low, high = document["latency_ms"]
        assert low <= 15.1 <= high <= 20

    def test_the_comparison_with_perf_analyzer_is_shown(self) -> None:
        def with_ratio(latency_ratio: float) -> Outcome:
            perf_analyzer_measurement = measured(12000.0, 12.0 * latency_ratio, requests=900)
            trials = []
            for searched_trial in trials_with_confirmation(12.0):
                checks = {
                    window.server: replace(window, measurement=perf_analyzer_measurement)
                    for window in searched_trial.confirmations
                }
                trials.append(replace(searched_trial, cross_checks=tuple(checks.values())))
            return outcome(trials)

        text = " ".join(printed_outcome(with_ratio(1.01), width=200, verbose=True).split())
        assert "cross-check perf_analyzer against tune's own client on the same 4 servers: throughput 1.0" in text
        assert "perf_analyzer measured" not in text
        document: Any = result_document.document(with_ratio(0.6), wall_seconds=1, results_dir="r")["confirmation"]
        assert document["verdict"] == "UNDECIDED"
        agreement = document["perf_analyzer"]
        assert (agreement["servers"], agreement["pairs"]) == (4, 4)
        assert agreement["ratios"]["latency-p95"]["ratio"] == pytest.approx(0.6, rel=0.01)
        assert "% less p95 latency than tune's own client: 7.2 ms" in agreement["disagreement"]
        assert agreement["contradicts_pass"] is True
        assert document["reason"] == agreement["disagreement"]
        document = result_document.document(with_ratio(1.8), wall_seconds=1, results_dir="r")["confirmation"]
        assert document["verdict"] == "UNDECIDED"
        assert document["reason"] == f"{document['perf_analyzer']['disagreement']} (allowed: 20)"
        assert document["perf_analyzer"]["contradicts_pass"] is True
        assert summary.undecided_cause(with_ratio(1.8)) == document["reason"]
        document = result_document.document(outcome(trials_with_confirmation(12.0)), wall_seconds=1, results_dir="r")[
            "confirmation"
        ]
        assert document["perf_analyzer"] is None
        assert "cross-check" not in printed_outcome(outcome(trials_with_confirmation(12.0)), verbose=True)

    def test_too_few_servers_give_an_undecided_verdict(self) -> None:
        text = " ".join(printed_outcome(outcome(trials_with_confirmation(15.0, servers=2)), verbose=True).split())
        assert "verdict UNDECIDED at 99 % confidence: p95 <= 20 ms: 2 of 4 fresh servers were measured" in text

    def test_without_a_confirmation_there_is_no_verdict(self) -> None:
        result = outcome()
        text = " ".join(printed_outcome(result, verbose=True).split())
        assert "verdict UNDECIDED: it was not tested on fresh servers" in text
        assert "estimand" not in text
        assert result_document.document(result, wall_seconds=1, results_dir="r")["confirmation"] is None
