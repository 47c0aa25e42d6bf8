"""Tests of ``tune report`` on complete, incomplete and damaged runs, and on runs of different models."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.artist import kwdoc

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.cli import explain, plan
from optimizer.cli.report import main
from optimizer.core.candidate import FieldValue
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.results import outcome_values
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.results.report import parameter_effects, plots, tables
from optimizer.results.report.content import config_diff, report_section
from optimizer.results.report.figure_style import PALETTE, make_narrow, new_figure, report_style
from optimizer.results.report.writer import drawings, markdown, write_page
from tests.run_folders import change_info, copy_run

SAMPLE = Path("tests/data/dlrm/sample")
TEXTS = ("ink", "quiet", "good", "bad", "undecided", "front")  # colours of text: contrast 4.5 to 1 on page and panel
MARKS = ("dot", *(name for name in PALETTE if name.startswith("stage-")))  # colours of marks: contrast 3 to 1
PLOTS = {"pareto", "load", "stages", "batches", "progress", "importance", "slices", "noise"}
BASELINE_CONFIG = 'name: "dlrm"\nmax_batch_size: 256\ninstance_group [ { count: 1 } ]\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the sample's report in all formats."""
    out = tmp_path_factory.mktemp("report")
    formats = ["--format", "html,markdown,csv,parquet", "--format", "svg,png"]
    assert main([str(SAMPLE), *formats, "--out", str(out)]) == 0
    return out


def test_texts_of_the_record_control_neither_terminal_nor_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a run may come from anywhere."""
    hostile = "\x1b[31m<script>alert(1)</script>\r\n"
    info = json.loads((run / "run.json").read_text())
    for part, names in (
        (info, ("command", "written", "reason", "status")),
        (info["hardware"], ("cpu", "system")),
        (info["problem"], ("model", "input_data")),
        (info["options"], ("search", "model")),
    ):
        for name in names:
            part[name] = f"{part.get(name)}{hostile}"
    info["notes"] = [hostile]
    info["versions"] = {f"triton{hostile}": hostile}
    info["problem"]["facts"] = {f"layers{hostile}": hostile}
    (run / "run.json").write_text(json.dumps(info))
    (run / "best" / "config.pbtxt").write_text(f'name: "{hostile}"\n')
    assert main([str(run), "--format", "html,markdown"]) == 0
    assert explain.main([str(run)]) == 0
    assert plan.main([str(run), "--rate", "1000/s"]) in (0, 1, 4)
    printed = capsys.readouterr()
    page, text = ((run / name).read_text() for name in ("report.html", "report.md"))
    for output in (printed.out, printed.err, page, text):
        assert "\x1b" not in output
        assert "\r" not in output
    assert "<script" not in page
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "script" in without_code
    assert re.search(r"(?<!\\)<script", without_code) is None


def test_a_report_that_cannot_be_written_names_the_place_and_the_flag(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output, reason in ((tmp_path / "file" / "r", "Not a directory"), (Path("/proc/tritune"), "No such file")):
        with pytest.raises(BadInputError, match=reason) as caught:
            main([str(run), "--format", "markdown", "--out", str(output)])
        assert str(caught.value).startswith(f"cannot write {output}/report.md: ")
        assert str(caught.value).endswith("; give another place with --out")


def test_matplotlib_lists_the_properties_of_artists_after_a_plot() -> None:
    axes = new_figure().subplots()
    assert "linewidth" in kwdoc(axes.plot([1], [1]))


@pytest.mark.parametrize(("backend", "used"), [("nonsense", "agg"), ("svg", "svg")])
def test_the_backend_of_a_notebook_is_kept_and_an_unknown_one_ignored(backend: str, used: str) -> None:
    program = (
        "import os; from optimizer.results.report.figure_style import new_figure; new_figure(); import matplotlib;"
        "print(os.environ['MPLBACKEND'], matplotlib.get_backend())"
    )
    environment = {**os.environ, "MPLBACKEND": backend}
    environment.pop("DISPLAY", None)
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert shown.stdout.split() == [backend, used]


class TestFormats:
    def test_every_format_of_one_run(self, written: Path) -> None:
        plots = {f"{plot}.{kind}" for plot in PLOTS for kind in ("svg", "png")}
        files = {"report.html", "report.md", "measurements.csv", "measurements.parquet"} | plots
        assert {path.name for path in written.iterdir()} == files
        for plot in PLOTS:
            assert ElementTree.fromstring((written / f"{plot}.svg").read_bytes()).tag.endswith("svg")
            png = (written / f"{plot}.png").read_bytes()
            assert png.startswith(b"\x89PNG")
            assert int.from_bytes(png[16:20], "big") == 1440, "the layout is that of a wide screen"

    def test_each_plot_of_the_page_has_a_layout_for_narrow_screens(self, written: Path) -> None:
        """Panels of a wide plot are side by side; text of a narrow one is about as large as that of a telephone."""
        page = (written / "report.html").read_text()
        plots = {
            kind: {
                name.removesuffix("-narrow"): (float(width), float(height))
                for width, height, name in re.findall(
                    rf'<svg viewBox="0 0 (\S+) (\S+)" class="plot {kind}" [^>]*labelledby="run-1-(\S+)-title"', page
                )
            }
            for kind in ("wide", "narrow")
        }
        assert plots["wide"].keys() == plots["narrow"].keys() == set(PLOTS)
        assert {width for width, _ in plots["wide"].values()} == {720.0}
        assert {round(width) for width, _ in plots["narrow"].values()} == {389}
        for name in ("load", "stages", "noise"):
            assert plots["narrow"][name][1] > 1.2 * plots["wide"][name][1], "the panels are below each other"
        ids = re.findall(r' id="([^"]+)"', page)
        assert len(ids) == len(set(ids))
        assert "@media screen and (max-width: 40rem) {\n  .plot.wide { display: none; }" in page

    def test_tables_have_all_measurements(self, written: Path) -> None:
        rows, trials = pd.read_csv(written / "measurements.csv"), pd.read_csv(SAMPLE / "trials.csv")
        assert len(rows) == len(trials)
        assert set(trials.columns) <= set(rows.columns)
        columns = ["trial", "throughput_infer_per_sec", "latency_p95_ms", "queue_ms", "concurrency"]
        written_rows, recorded_rows = (
            frame.sort_values(columns, ignore_index=True)[columns] for frame in (rows, trials)
        )
        pd.testing.assert_frame_equal(written_rows, recorded_rows)
        assert rows[rows.meets & rows.confirmation.isna()].trial.nunique() == 8
        packed = pd.read_parquet(written / "measurements.parquet")
        assert list(packed.columns) == list(rows.columns)
        assert packed.throughput_infer_per_sec.tolist() == rows.throughput_infer_per_sec.tolist()

    def test_the_report_of_one_run_is_in_its_folder(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["dlrm/sample", "--results", str(run.parent.parent), "--format", "csv"]) == 0
        assert capsys.readouterr() == (f"{run / 'measurements.csv'}\n", "")

    def test_a_report_is_written_to_the_given_file(self, run: Path) -> None:
        assert main([str(run), "--format", "markdown", "--out", str(run / "one.md")]) == 0
        assert (run / "one.md").read_text().startswith(r"# dlrm: PASS at 13,400 ± 500 infer/s, p95 18.5")

    @pytest.mark.parametrize(
        "words",
        [
            ["--format", "docx"],
            ["--format", ""],
            ["--format", "html,csv", "--out", "a.html"],
            ["--format", "png", "--out", "a.png"],
            ["--format", "csv", "--out", "a.html"],
        ],
    )
    def test_an_output_that_cannot_be_written_is_refused(self, run: Path, words: list[str]) -> None:
        with pytest.raises(BadInputError, match=r"^--(format|out) "):
            main([str(run), *words])


class TestRuns:
    def test_several_runs_share_a_page_with_an_index(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = copy_run(run, "1", status="interrupted")
        page = run.parent / "all.html"
        again = [str(run), str(other), f"{run}/", "--out", str(page)]
        assert main(again) == 0
        text = page.read_text()
        assert "<h1>2 runs</h1>" in text
        index = text.partition("</nav>")[0].partition("<nav")[2]
        assert "PASS at 13,400 ±\N{NO-BREAK SPACE}500 infer/s" in index
        assert "± " not in index
        assert index.count("PASS") == index.count("13,400") == 2, "each run has its verdict and throughput once"
        for number in (1, 2):
            assert f'<a href="#run-{number}">' in text
            assert text.count(f'id="run-{number}"') == 1
        ids = re.findall(r' id="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        assert "interrupted; this shows what it measured so far" in capsys.readouterr().err

    def test_different_models_missing_and_damaged_runs_get_a_line_each(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bert = copy_run(run, "bert", problem={"model": "bert"})
        text = (bert / "trials.csv").read_text()
        (bert / "trials.csv").write_text(text.replace("\ndlrm,", "\nbert,"))
        damaged, empty = copy_run(run, "damaged"), copy_run(run, "empty", status="failed", reason="no\nserver")
        (damaged / "trials.csv").write_text(text + "dlrm,1\n")
        (empty / "trials.csv").unlink()
        page = run.parent / "all.md"
        names = [str(path) for path in (run, bert, damaged, empty, run / "gone")]
        assert main([*names, "--format", "markdown", "--out", str(page)]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 4
        for line, message in zip(
            lines, ("cells where the header has", "nothing was measured", "no run.json", "bert, dlrm"), strict=True
        ):
            assert message in line
        assert page.read_text().startswith("# 2 runs")

    def test_no_readable_run_is_exit_code_2(self, run: Path) -> None:
        assert main([str(run / "gone")]) == 2

    def test_a_killed_run_is_shown_with_its_measurements(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        killed = change_info(copy_run(run, "killed"), status="running", result={})
        rows = (killed / "trials.csv").read_text().splitlines(keepends=True)
        (killed / "trials.csv").write_text("".join(rows[:9]) + rows[9][:40])
        assert main([str(killed), "--format", "markdown"]) == 0
        assert "the run was killed; this shows what it measured so far" in capsys.readouterr().err
        assert "3 configurations, 8 measurements" in (killed / "report.md").read_text()

    @pytest.mark.parametrize(
        ("status", "cause"),
        [("failed", ": the run failed (no server)"), ("running", ": the run was killed"), ("none", "")],
    )
    def test_a_run_without_measurements_has_a_line_with_the_cause(
        self, run: Path, capsys: pytest.CaptureFixture[str], status: str, cause: str
    ) -> None:
        empty = copy_run(run, "empty", status=status, reason="no server")
        change_info(empty, result={})
        (empty / "trials.csv").unlink()
        assert main([str(empty)]) == 2
        assert f"{empty}: nothing was measured{cause}\n" in capsys.readouterr().err

    def test_unknown_stages_are_left_out(self, run: Path) -> None:
        table = pd.read_csv(run / "trials.csv", dtype=str)
        lacking = ["latency_p50_ms", "latency_p95_ms", "batch_stats", "measure_seconds", "deploy_seconds"]
        lacking += [column for column in table if column in outcome_values.STAGES]
        table[lacking] = None
        bare = copy_run(run, "bare")
        table.to_csv(bare / "trials.csv", index=False)
        assert main([str(bare), "--format", "svg,markdown", "--out", str(bare / "out")]) == 0
        # the windows of the confirmation keep their throughput
        assert {path.stem for path in (bare / "out").iterdir()} == {"report", "noise"}
        assert "no configuration meets p95" in (bare / "out" / "report.md").read_text()


class TestDiff:
    def test_the_files_are_compared_if_both_were_kept(self, run: Path) -> None:
        (run / "baseline").mkdir()
        (run / "baseline" / "config.pbtxt").write_text(BASELINE_CONFIG)
        (run / "best" / "config.pbtxt").write_text(BASELINE_CONFIG.replace("256", "64"))
        assert config_diff(read_run(run)).splitlines() == [
            "--- baseline/config.pbtxt",
            "+++ best/config.pbtxt",
            "@@ -1,3 +1,3 @@",
            ' name: "dlrm"',
            "-max_batch_size: 256",
            "+max_batch_size: 64",
            " instance_group [ { count: 1 } ]",
        ]

    def test_settings_are_compared_without_the_baseline_file(self, run: Path) -> None:
        assert "- max_batch_size: 256\n" in config_diff(read_run(run))

    def test_each_model_of_an_ensemble_is_compared(self, run: Path) -> None:
        shutil.rmtree(run / "best")
        for role, size in (("baseline", "1"), ("best", "8")):
            for name in ("first", "second"):
                (run / role / name).mkdir(parents=True)
                (run / role / name / "config.pbtxt").write_text(f"max_batch_size: {size}\n")
        patch = config_diff(read_run(run))
        assert patch.count("+max_batch_size: 8") == 2
        assert "+++ best/second/config.pbtxt" in patch

    def test_a_link_out_of_the_run_is_not_followed(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("password\n")
        (run / "baseline").mkdir()
        (run / "baseline" / "config.pbtxt").symlink_to(tmp_path / "secret")
        assert "password" not in config_diff(read_run(run))


class TestFigures:
    def test_stages_add_up_to_the_latency(self, run: Path) -> None:
        finished = read_run(run)
        candidates = tables.compared_candidates(finished)
        points = [point for candidate in candidates for point in tables.at_loads(finished, candidate)]
        assert {point.candidate for point in points} == set(candidates)
        for point in points:
            stages_ms = tables.stages_ms(finished, point) or {}
            assert sum(stages_ms.values()) == pytest.approx(point.measurement.latency_avg_ms, rel=0.1)
            of_own_client = replace(point.measurement, client_send_ms=None, network_ms=None, client_recv_ms=None)
            stages_ms = tables.stages_ms(finished, replace(point, measurement=of_own_client)) or {}
            assert sum(stages_ms.values()) == pytest.approx(point.measurement.latency_avg_ms)

    def test_batch_sizes_come_from_the_server_statistics(self, run: Path) -> None:
        finished = read_run(run)
        assert finished.outcome is not None
        assert finished.outcome.recommended is not None
        counted = tables.executions(finished, finished.outcome.recommended)
        mean = sum(size * count for size, count in counted.items()) / sum(counted.values())
        assert mean == pytest.approx(finished.outcome.recommended.measurement.mean_batch_size, rel=0.05)

    def test_progress_rises_to_the_best_of_the_search(self, run: Path) -> None:
        progress = tables.progress(read_run(run))
        values = [value for _, value in progress.best()]
        assert values == sorted(values)
        assert values[-1] == max(throughput for _, _, throughput in progress.met)
        assert progress.unit.startswith("seconds")

    @pytest.mark.parametrize(("objective", "column"), [("latency-p95", ">p95 ms"), ("memory", ">memory")])
    def test_the_first_objective_ranks_trials_and_progress(self, objective: str, column: str, run: Path) -> None:
        change_info(run, "problem", objectives=[objective])
        finished = read_run(run)
        assert finished.outcome is not None
        table = tables.trials(finished, finished.outcome)
        shown = [float(row[table.headers.index(column)].split()[0]) for row in table.rows if "no load" not in row[-1]]
        assert len(shown) > 3
        assert shown == sorted(shown)
        progress = tables.progress(finished)
        values = [value for _, value in progress.best()]
        assert values == sorted(values, reverse=True)
        assert values[-1] == min(value for *_, value in progress.met)
        drawing = plots.progress(finished)
        assert drawing is not None
        label = {"latency-p95": "latency p95", "memory": "memory"}[objective]
        assert drawing.description.startswith(f"The search found its best {label}, ")

    @pytest.mark.parametrize(("objective", "lowest"), [("error-rate", 0.0), ("score", -2.2)])
    def test_the_progress_of_values_that_are_0_or_less_is_drawn(
        self, objective: str, lowest: float, run: Path
    ) -> None:
        finished = read_run(run)
        trials = tuple(
            replace(
                trial,
                measurements=tuple(
                    (load, replace(measured, failed_requests=0, score=-1.0 - trial.number % 2))
                    for load, measured in trial.measurements
                ),
            )
            for trial in finished.trials
        )
        problem = replace(finished.problem, objectives=(METRICS[objective],))
        drawing = plots.progress(replace(finished, trials=trials, problem=problem))
        assert drawing is not None
        (axes,) = drawing.figure.axes
        assert axes.get_ylim()[0] == pytest.approx(lowest)
        assert axes.get_ylim()[1] == (1.0 if lowest == 0 else 0.0)
        (line,) = axes.get_lines()
        assert np.asarray(line.get_xdata(), np.float64).min() > 0, "no value is known before the first measurement"

    def test_importance_ranks_the_parameters(self, run: Path) -> None:
        finished = read_run(run)
        samples = parameter_effects.parameter_samples(finished)
        shares = parameter_effects.importance(finished.problem, samples)
        assert sum(shares.values()) == pytest.approx(1)
        assert shares.keys() == parameter_effects.varied(finished.problem).keys()
        assert parameter_effects.importance(finished.problem, samples[:3]) == {}

    def test_the_effects_of_parameters_are_those_on_the_objective(self, run: Path) -> None:
        finished = read_run(run)
        space, samples = finished.problem.space, parameter_effects.parameter_samples(finished)
        first = {name: choices[0] for name, choices in space.parameters().items()}
        for objective, expected in (("throughput", "instance_count"), ("memory", "max_batch_size")):
            made = []
            for size, instances in itertools.product((4, 8, 16, 32, 64, 128, 256), (1, 2)):
                values: dict[str, FieldValue] = {**first, "max_batch_size": size, "instance_count": instances}
                measured = replace(
                    samples[0].point.measurement,
                    throughput_infer_per_sec=1000.0 * instances,
                    server_memory_bytes=1e9 * size,
                )
                candidate = space.candidate(values)
                assert candidate is not None
                point = replace(samples[0].point, candidate=candidate, measurement=measured)
                made.append(parameter_effects.ParameterSample(point, METRICS[objective], meets=True, values=values))
            shares = parameter_effects.importance(finished.problem, made)
            assert max(("max_batch_size", "instance_count"), key=lambda name: shares[name]) == expected

        problem = replace(finished.problem, objectives=(METRICS["latency-p95"],))
        by_latency = replace(finished, problem=problem)
        samples = parameter_effects.parameter_samples(by_latency)
        steps = _steps(by_latency)
        assert all(step.expected is None for step in steps), "the simulation seeks the most throughput"
        best = finished.recommended
        assert best is not None
        chosen = problem.space.canonical(best.candidate)
        (recommended,) = (sample for sample in samples if sample.point.candidate == chosen)
        measured = recommended.point.measurement
        slower = replace(measured, latency_p95_ms=1.25 * (measured.latency_p95_ms or 0.0))
        point = replace(recommended.point, candidate=steps[0].candidate, measurement=slower)
        steps = parameter_effects.one_step_off(by_latency, [*samples, replace(recommended, point=point)])
        assert steps[0].measured == pytest.approx(0.25)
        drawing = plots.slices(by_latency, samples)
        assert drawing is not None
        assert drawing.title == "Latency p95 at each value of each parameter"
        caption = "Latency p95 within the SLA after changing one parameter by one step"
        table = tables.sensitivity(by_latency, steps)
        assert (table.caption, table.rows[0][2]) == (caption, "+25.0 %")
        assert "raises the p95 by up to 25 % (measured)" in tables.sensitivity_sentence(by_latency, steps)
        unchanged = replace(steps[0], measured=0.0)
        assert tables.sensitivity_sentence(by_latency, [unchanged]).startswith("The p95 is no worse after changing")

    def test_texts_end_within_each_plot(self, run: Path) -> None:
        finished = read_run(run)
        names = set()
        for drawn in drawings(finished, report_section(finished)):
            names.add(drawn.name)
            for arrange in (lambda _: None, make_narrow):
                with report_style():
                    arrange(drawn.figure)
                    drawn.figure.draw_without_rendering()
                    extent, size = drawn.figure.get_tightbbox(), drawn.figure.get_size_inches()
                assert extent.x0 >= 0, drawn.name
                assert extent.x1 <= size[0], drawn.name
        assert {"importance", "load", "slices"} <= names

    def test_each_parameter_that_varies_has_the_cost_of_a_step(self, run: Path) -> None:
        finished = read_run(run)
        steps = _steps(finished)
        assert {step.parameter for step in steps} == parameter_effects.varied(finished.problem).keys()
        assert all(step.expected is not None and step.expected < 1 for step in steps)
        # half the instances on a machine of two cores
        assert next(s.cost or 0 for s in steps if (s.parameter, s.other) == ("instance_count", 1)) > 0.1

    def test_a_bound_that_is_not_binding_does_not_change_the_steps(self, run: Path) -> None:
        finished = read_run(run)
        p95, both = (
            replace(finished, problem=replace(finished.problem, sla=Sla.from_bounds(bounds)))
            for bounds in ({"p95": 20.0}, {"p50": 14.0, "p95": 20.0})
        )
        assert _steps(both) == _steps(p95)


def _steps(finished: FinishedRun) -> list[parameter_effects.Neighbour]:
    samples = parameter_effects.parameter_samples(finished)
    return parameter_effects.one_step_off(finished, samples)


def test_a_page_of_a_run_without_bounds_has_no_sla(run: Path, written: Path) -> None:
    unbounded = copy_run(run, "unbounded", problem={"constraints": []})
    assert main([str(unbounded), "--format", "html,markdown"]) == 0
    page, text = ((unbounded / name).read_text() for name in ("report.html", "report.md"))
    for shown in (page, text):
        assert "Throughput after changing one parameter by one step" in shown
        assert "Each at its best load." in shown
        assert not re.search(r"within the SLA|met? the SLA|meets? the SLA", shown)
    assert re.search(r"\d+ configurations\. Best values: ", page)
    bounded = (written / "report.html").read_text()
    assert "Throughput within the SLA after changing one parameter by one step" in bounded
    assert re.search(r"\d+ configurations that meet the SLA\. Best values: ", bounded)


def test_the_index_shows_no_gain_over_the_recommendation_itself(run: Path) -> None:
    finished = read_run(run)
    outcome = finished.outcome
    assert outcome is not None
    baseline = replace(outcome.baseline, point=outcome.recommended)
    assert report_section(replace(finished, outcome=replace(outcome, baseline=baseline))).gain == "same"


def test_matplotlib_is_imported_only_to_draw() -> None:
    modules = "sys, optimizer.study.tuning_run, optimizer.results.report.writer"
    check = f"import {modules}; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_captions_of_markdown_end_with_one_sign(run: Path) -> None:
    text = markdown([report_section(read_run(run))])
    assert ".:" not in text
    assert re.search(r"fresh servers\.\n\n\| configuration", text)
    assert "measured on fresh servers, or in the search only:\n\n| infer/s" in text


def test_unstable_overloaded_and_disturbed_measurements_are_counted_apart(run: Path) -> None:
    finished = read_run(run)
    place, confirmed_trial = next(
        (i, confirmed_trial) for i, confirmed_trial in enumerate(finished.trials) if confirmed_trial.confirmations
    )
    (load, first), *rest = confirmed_trial.measurements
    unstable, overloaded = replace(first, stable=False), replace(first, stable=False, overloaded=True)
    window, other_window, *windows = confirmed_trial.confirmations
    disturbed = replace(window, measurement=replace(window.measurement, stable=False))
    fallen_behind = replace(
        other_window, measurement=replace(other_window.measurement, stable=False, overloaded=True)
    )
    worse = replace(
        confirmed_trial,
        measurements=((load, unstable), (load, unstable), (load, overloaded), *rest),
        confirmations=(disturbed, fallen_behind, *windows),
    )
    quiet = [
        replace(trial, measurements=tuple((load, replace(m, stable=True)) for load, m in trial.measurements))
        for trial in finished.trials
    ]
    trials = (*quiet[:place], worse, *quiet[place + 1 :])
    shown = markdown([report_section(replace(finished, trials=trials))])
    measured = sum(len(trial.measurements) for trial in trials)
    assert f"2 of {measured} measurements of the search, because their windows disagreed" in shown
    assert f"1 of {measured} measurements of the search, because the server fell behind the rate" in shown
    assert re.search(r"\b1 of [\d,]+ windows on fresh servers, by other processes or machines", shown)


def test_names_are_escaped_in_markdown(run: Path) -> None:
    hostile = "a|b`c`<b>[x](http://y)*z*"
    text = markdown([report_section(read_run(copy_run(run, "x", command="tune ```\nx", notes=[hostile])))])
    assert r"a\|b\`c\`\<b\>\[x\](http\://y)\*z\*" in text
    assert "````sh\ntune ```" in text


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, other_color: str) -> float:
    low, high = sorted((luminance(color), luminance(other_color)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_meets_wcag_aa(scheme: int) -> None:
    for ground in ("page", "panel"):
        for name in TEXTS:
            assert contrast(PALETTE[name][scheme], PALETTE[ground][scheme]) >= 4.5, name
    for name in MARKS:
        assert contrast(PALETTE[name][scheme], PALETTE["page"][scheme]) >= 3, name
    assert len({colours[scheme] for colours in PALETTE.values()}) == len(PALETTE)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


OWN = r"https?://[^/]*\.(?:google\.com|googleapis\.com|gvt1\.com)[/:]"  # requests of Chromium itself


def opened(page: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """Return the page in Chromium, and its console messages and requested addresses."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    log = folder / "net.json"
    watched = ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--log-net-log={log}"]
    done = subprocess.run(
        [*command, *watched, *flags, page.resolve().as_uri()], capture_output=True, text=True, check=True
    )
    requested = [url for url in re.findall(r'"url":"(https?:[^"]*)', log.read_text()) if not re.match(OWN, url)]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line] + requested


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
class TestBrowser:
    def test_it_has_no_console_messages_and_no_requests(self, written: Path, tmp_path: Path) -> None:
        page, said = opened(written / "report.html", tmp_path, "--dump-dom")
        assert said == []
        assert page.count("<svg") == 2 * len(PLOTS), "for wide and for narrow screens"
        assert "13,400 ± 500 infer/s" in page
        _, said = opened(written / "report.html", tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}")
        assert said == []
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")

    def test_reasons_on_a_telephone_have_readable_lines_in_a_box_that_scrolls(
        self, written: Path, tmp_path: Path
    ) -> None:
        page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", (written / "report.html").read_text())
        assert page.count('class="wide reasons"') == 1
        measure = """<script>addEventListener("load", () => {
            const table = document.querySelector(".reasons"), reason = table.querySelector("td:last-child");
            document.title = [reason.offsetWidth, table.parentElement.scrollWidth > table.parentElement.clientWidth,
                document.documentElement.scrollWidth <= innerWidth].join(" ");
        })</script>"""
        (tmp_path / "page.html").write_text(page.replace("</body>", f"{measure}</body>"))
        shown, said = opened(tmp_path / "page.html", tmp_path, "--window-size=500,4000", "--dump-dom")
        assert said == []
        title = re.search(r"<title>(\d+) true true</title>", shown)
        assert title, "the table scrolls in its box, and the page does not"
        assert int(title[1]) >= 250

    def test_console_messages_and_requests_would_be_seen(self, tmp_path: Path) -> None:
        bad = '<!doctype html><img src="http://nowhere.invalid/x.png"><script>console.log("said")</script>'
        (tmp_path / "bad.html").write_text(bad)
        console = opened(tmp_path / "bad.html", tmp_path, "--dump-dom")[1]
        assert "said" in console[0]
        assert "http://nowhere.invalid/x.png" in console


def test_a_page_of_a_run_that_cannot_be_written_does_not_ask_for_another_run(run: Path) -> None:
    """The measurements are on disk, so only the page is missing."""
    finished = read_run(run)
    shutil.rmtree(run)
    message = rf"^cannot write {run}/report\.html: No such file or directory; move its folder back, "
    with pytest.raises(EnvironmentFault, match=message) as caught:
        write_page(finished)
    assert str(caught.value).endswith(f", then write it with `tune report {run}`")
