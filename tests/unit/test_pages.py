"""``tune report``: what it writes of runs that are whole, half-written or of different models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from optimizer.commands.report import main
from optimizer.errors import BadInputError
from optimizer.pages import measured, parameters
from optimizer.pages.config_diff import config_diff
from optimizer.pages.content import section
from optimizer.pages.markdown import markdown
from optimizer.pages.style import MARKS, PALETTE, TEXTS
from optimizer.store.finished import read_run

SAMPLE = Path("results/dlrm/sample")
PLOTS = {"pareto", "load", "stages", "batches", "progress", "importance", "slices", "noise"}
BASELINE_CONFIG = 'name: "dlrm"\nmax_batch_size: 256\ninstance_group [ { count: 1 } ]\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


def changed(run: Path, name: str, **values: object) -> Path:
    """Another run beside ``run``, with other values in its run.json."""
    other = Path(shutil.copytree(run, run.parent.parent / "other" / name))
    info = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**info, **values}))
    return other


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample in every format."""
    out = tmp_path_factory.mktemp("report")
    formats = ["--format", "html,markdown,csv,parquet", "--format", "svg,png"]
    assert main([str(SAMPLE), *formats, "--output", str(out)]) == 0
    return out


class TestFormats:
    def test_every_format_of_one_run(self, written: Path) -> None:
        plots = {f"{plot}.{kind}" for plot in PLOTS for kind in ("svg", "png")}
        files = {"report.html", "report.md", "measurements.csv", "measurements.parquet"} | plots
        assert {path.name for path in written.iterdir()} == files
        for plot in PLOTS:
            assert ElementTree.fromstring((written / f"{plot}.svg").read_bytes()).tag.endswith("svg")
            assert (written / f"{plot}.png").read_bytes().startswith(b"\x89PNG")

    def test_the_tables_hold_every_measurement(self, written: Path) -> None:
        rows, own = pd.read_csv(written / "measurements.csv"), pd.read_csv(SAMPLE / "trials.csv")
        assert len(rows) == len(own)
        assert set(own.columns) <= set(rows.columns)
        figures = ["trial", "throughput_infer_per_sec", "latency_p95_ms", "queue_ms", "concurrency"]
        ours, theirs = (frame.sort_values(figures, ignore_index=True)[figures] for frame in (rows, own))
        pd.testing.assert_frame_equal(ours, theirs)
        assert rows[rows.meets & rows.confirmation.isna()].trial.nunique() == 8
        packed = pd.read_parquet(written / "measurements.parquet")
        assert list(packed.columns) == list(rows.columns)
        assert packed.throughput_infer_per_sec.tolist() == rows.throughput_infer_per_sec.tolist()

    def test_one_run_is_told_in_its_folder(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["dlrm/sample", "--out", str(run.parent.parent), "--format", "csv"]) == 0
        assert capsys.readouterr() == (f"{run / 'measurements.csv'}\n", "")

    def test_a_file(self, run: Path) -> None:
        assert main([str(run), "--format", "markdown", "--output", str(run / "told.md")]) == 0
        assert (run / "told.md").read_text().startswith("# dlrm: 13,315 infer/s within p95")

    @pytest.mark.parametrize(
        "words",
        [
            ["--format", "docx"],
            ["--format", ""],
            ["--format", "html,csv", "--output", "a.html"],
            ["--format", "png", "--output", "a.png"],
            ["--format", "csv", "--output", "a.html"],
        ],
    )
    def test_what_cannot_be_written_is_told(self, run: Path, words: list[str]) -> None:
        with pytest.raises(BadInputError, match=r"^--(format|output) "):
            main([str(run), *words])


class TestRuns:
    def test_several_stand_on_one_page_with_an_index(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = changed(run, "1", status="interrupted")
        page = run.parent / "all.html"
        again = [str(run), str(other), f"{run}/", "--output", str(page)]
        assert main(again) == 0
        text = page.read_text()
        assert "<h1>2 runs</h1>" in text
        for number in (1, 2):
            assert f'<a href="#run-{number}">' in text
            assert text.count(f'id="run-{number}"') == 1
        ids = re.findall(r' id="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        assert "interrupted: shown is what it had measured" in capsys.readouterr().err

    def test_different_models_missing_and_damaged_runs_are_told_in_a_line_each(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        info = json.loads((run / "run.json").read_text())
        bert = changed(run, "bert", problem={**info["problem"], "model": "bert"})
        text = (bert / "trials.csv").read_text()
        (bert / "trials.csv").write_text(text.replace("\ndlrm,", "\nbert,"))
        damaged, empty = changed(run, "damaged"), changed(run, "empty", reason="no\nserver")
        (damaged / "trials.csv").write_text(text + "dlrm,1\n")
        (empty / "trials.csv").unlink()
        page = run.parent / "all.md"
        given = [str(one) for one in (run, bert, damaged, empty, run / "gone")]
        assert main([*given, "--format", "markdown", "--output", str(page)]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 4
        for line, told in zip(
            lines, ("not a row of a trials table", "nothing was measured", "no run.json", "bert, dlrm"), strict=True
        ):
            assert told in line
        assert page.read_text().startswith("# 2 runs")

    def test_nothing_to_show_is_exit_code_2(self, run: Path) -> None:
        assert main([str(run / "gone")]) == 2

    def test_a_run_that_was_killed_is_shown_as_far_as_it_came(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        killed = changed(run, "killed", status="running", result={})
        rows = (killed / "trials.csv").read_text().splitlines(keepends=True)
        (killed / "trials.csv").write_text("".join(rows[:9]) + rows[9][:40])
        assert main([str(killed), "--format", "markdown"]) == 0
        assert "has not ended, or was killed: shown is what it had measured" in capsys.readouterr().err
        assert "3 configurations, 8 measurements" in (killed / "report.md").read_text()

    def test_what_a_table_does_not_tell_is_left_out(self, run: Path) -> None:
        table = pd.read_csv(run / "trials.csv", dtype=str)
        lacking = ["latency_p50_ms", "latency_p95_ms", "batch_stats", "measure_seconds", "deploy_seconds"]
        lacking += [column for column in table if column in measured.STAGES]
        table[lacking] = None
        bare = changed(run, "bare")
        table.to_csv(bare / "trials.csv", index=False)
        assert main([str(bare), "--format", "svg,markdown", "--output", str(bare / "out")]) == 0
        # the windows on fresh servers have their throughput
        assert {path.stem for path in (bare / "out").iterdir()} == {"report", "noise"}
        assert "no configuration meets p95" in (bare / "out" / "report.md").read_text()


class TestDiff:
    def test_it_is_of_the_files_where_both_were_kept(self, run: Path) -> None:
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

    def test_earlier_runs_have_the_settings(self, run: Path) -> None:
        assert "-max_batch_size: 256\n" in config_diff(read_run(run))

    def test_each_model_of_several(self, run: Path) -> None:
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
        found = read_run(run)
        for candidate in measured.compared(found).values():
            for point in measured.at_loads(found, candidate):
                assert sum(measured.stages_ms(point) or []) == pytest.approx(
                    point.measurement.latency_avg_ms, rel=0.1
                )

    def test_batches_are_those_of_the_server(self, run: Path) -> None:
        found = read_run(run)
        assert found.outcome is not None
        assert found.outcome.recommended is not None
        counted = measured.executions(found, found.outcome.recommended)
        mean = sum(size * count for size, count in counted.items()) / sum(counted.values())
        assert mean == pytest.approx(found.outcome.recommended.measurement.mean_batch_size, rel=0.05)

    def test_progress_rises_to_the_best_of_the_search(self, run: Path) -> None:
        found = measured.progress(read_run(run))
        values = [value for _, value in found.best()]
        assert values == sorted(values)
        assert values[-1] == max(step.value for step in found.steps if step.value is not None)
        assert found.unit.startswith("seconds")

    def test_importance_finds_what_matters(self, run: Path) -> None:
        found = read_run(run)
        samples = parameters.samples(found, measured.best_loads(found))
        shares = parameters.importance(found.problem, samples)
        assert sum(shares.values()) == pytest.approx(1)
        assert shares.keys() == parameters.varied(found.problem).keys()
        assert parameters.importance(found.problem, samples[:3]) == {}

    def test_one_step_off(self, run: Path) -> None:
        found = read_run(run)
        steps = parameters.one_step_off(found, parameters.samples(found, measured.best_loads(found)))
        assert {step.parameter for step in steps} == parameters.varied(found.problem).keys()
        assert all(step.expected is not None and step.expected < 1 for step in steps)
        # half the instances on a machine of two cores
        assert next(s.cost or 0 for s in steps if (s.parameter, s.other) == ("instance_count", 1)) > 0.1


def test_what_draws_is_loaded_when_something_is_drawn() -> None:
    check = "import sys, optimizer.session, optimizer.pages.write; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_markdown_reads_names_as_text(run: Path) -> None:
    hostile = "a|b`c`<b>[x](http://y)*z*"
    told = markdown([section(read_run(changed(run, "x", command="tune ```\nx", notes=[hostile])))])
    assert r"a\|b\`c\`\<b\>\[x\](http\://y)\*z\*" in told
    assert "````sh\ntune ```" in told


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_is_that_of_wcag_aa(scheme: int) -> None:
    for ground in ("page", "panel"):
        for name in TEXTS:
            assert contrast(PALETTE[name][scheme], PALETTE[ground][scheme]) >= 4.5, name
    for name in MARKS:
        assert contrast(PALETTE[name][scheme], PALETTE["page"][scheme]) >= 3, name
    assert len({colours[scheme] for colours in PALETTE.values()}) == len(PALETTE)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


OWN = r"https?://[^/]*\.(?:google\.com|googleapis\.com|gvt1\.com)[/:]"  # what Chromium asks for by itself


def opened(page: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """The page as a browser has it; what its console says, and each address that is asked for over the network."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    log = folder / "net.json"
    watched = ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--log-net-log={log}"]
    done = subprocess.run(
        [*command, *watched, *flags, page.resolve().as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    asked = [url for url in re.findall(r'"url":"(https?:[^"]*)', log.read_text()) if not re.match(OWN, url)]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line] + asked


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
class TestBrowser:
    def test_it_says_nothing_and_asks_for_nothing(self, written: Path, tmp_path: Path) -> None:
        page, said = opened(written / "report.html", tmp_path, "--dump-dom")
        assert said == []
        assert page.count("<svg") == len(PLOTS)
        assert "13,315 infer/s" in page
        _, said = opened(written / "report.html", tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}")
        assert said == []
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")

    def test_what_a_page_says_and_asks_for_would_be_seen(self, tmp_path: Path) -> None:
        bad = '<!doctype html><img src="http://nowhere.invalid/x.png"><script>console.log("said")</script>'
        (tmp_path / "bad.html").write_text(bad)
        told = opened(tmp_path / "bad.html", tmp_path, "--dump-dom")[1]
        assert "said" in told[0]
        assert "http://nowhere.invalid/x.png" in told
