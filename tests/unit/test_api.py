"""``from optimizer import load_run, tune``: the command and its runs from Python."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import optimizer
from optimizer import interrupts, load_run, tune
from optimizer.analysis.flags import Flags, command_words
from optimizer.arguments.run import read_run_arguments
from optimizer.errors import BadInputError

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "results/dlrm/sample"
NO_FLAGS = {"json", "print-profile", "help", "no-color"}  # a result is an object here, and never coloured

USERS = """\
import pandas as pd

from optimizer import Run, TuneError, load_run, tune


def best(path: str) -> float:
    run: Run = load_run(path)
    trials: pd.DataFrame = run.trials
    point = run.recommended
    return point.throughput_infer_per_sec + len(trials) if point else 0.0


def again() -> Run:
    try:
        return tune("mlp", sla_p95="20ms", budget="30s", log="plain", shape=["x:4"])
    except TuneError as error:
        print(error.exit_code)
        raise
"""


def test_importing_is_cheap_and_changes_nothing() -> None:
    script = (
        "import signal, sys; before = [signal.getsignal(s) for s in (2, 15)]; hook = sys.unraisablehook\n"
        "import optimizer\n"
        "assert not {'pandas', 'numpy', 'optuna', 'rich', 'matplotlib'} & sys.modules.keys(), sorted(sys.modules)\n"
        "optimizer.load_run, optimizer.tune\n"
        "assert [signal.getsignal(s) for s in (2, 15)] == before and sys.unraisablehook is hook"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert {"tune", "load_run", "Run", "TuneError"} <= set(dir(optimizer))
    with pytest.raises(AttributeError, match="no attribute 'tuna'"):
        optimizer.tuna  # noqa: B018


def test_an_interrupt_leaves_the_signals_of_a_program_that_is_not_ours() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts.acknowledge()
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(target=interrupts.acknowledge)  # where signals cannot be set at all
    thread.start()
    thread.join()


def test_every_flag_of_the_command_is_a_keyword(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        read_run_arguments(["--help"])
    flags = set(re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?--([a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    assert {flag.replace("-", "_") for flag in flags - NO_FLAGS} == set(Flags.__annotations__)


def test_keywords_become_the_flags_of_the_command() -> None:
    flags = {"sla_p95": "20ms", "seed": 7, "no_output_check": True, "shape": ["a:1", "b:2"], "out": Path("o")}
    words = command_words("-odd", {**flags, "storage": None, "model_warmup": False})
    assert words == [
        *("--sla-p95=20ms", "--seed=7", "--no-output-check", "--shape=a:1", "--shape=b:2", "--out=o", "--", "-odd")
    ]
    options = read_run_arguments(words).options
    assert (options.model, options.seed, options.output_check, options.shapes) == ("-odd", 7, False, ("a:1", "b:2"))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"sla_p95": "20"}, "--sla-p95 20: "),
        ({"sla_p59": "20ms"}, "--sla-p59"),
        ({"seed": 1.5}, "--seed 1.5: write a whole number"),
        ({"search": "guess"}, "--search"),
        ({"shape": {"x": 4}}, "--shape: dict is not"),
        ({"resume": "nowhere"}, "no run.json there"),
    ],
)
def test_what_the_command_refuses_is_an_exception(flags: dict[str, Any], told: str) -> None:
    model = None if "resume" in flags else "mlp"
    with pytest.raises(BadInputError) as caught:
        tune(model, **flags)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_have_types_and_every_measurement() -> None:
    run = load_run(SAMPLE)
    raw = pd.read_csv(SAMPLE / "trials.csv")
    assert len(run.trials) == len(raw)
    assert run.trials.throughput_infer_per_sec.sum() == pytest.approx(raw.throughput_infer_per_sec.sum())
    assert run.trials.confirmation.notna().sum() == raw.confirmation.notna().sum()
    types = run.trials.dtypes.astype(str)
    assert (types.trial, types.stable, types.latency_p95_ms, types.reason) == (
        "Int64",
        "boolean",
        "Float64",
        "string",
    )
    assert run.recommended is not None
    best = run.confirmations[run.confirmations.verdict == "PASS"].iloc[0]
    assert best.trial == run.recommended.trial
    assert best.throughput_infer_per_sec_low < best.throughput_infer_per_sec < best.throughput_infer_per_sec_high
    assert run.pareto.throughput_infer_per_sec.is_monotonic_decreasing
    assert run.config_pbtxt == (SAMPLE / "best/config.pbtxt").read_text()
    assert run.verdict == "PASS"


def test_a_run_that_measured_nothing_has_empty_tables(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    (folder / "trials.csv").unlink()
    run = load_run(folder)
    assert (run.recommended, run.verdict, run.config_pbtxt) == (None, None, None)
    for table in (run.trials, run.pareto, run.confirmations):
        assert table.empty
        assert "throughput_infer_per_sec" in table.columns
    assert "nothing was measured" in str(run)
    assert run._repr_html_()


def test_a_notebook_shows_the_answer_and_no_markup_of_a_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    info = folder / "run.json"
    info.write_text(info.read_text().replace('"model": "dlrm",\n    "facts"', '"model": "<b>x</b>",\n    "facts"'))
    table = folder / "trials.csv"
    table.write_text(table.read_text().replace("\ndlrm,", "\n<b>x</b>,"))
    shown = load_run(folder)._repr_html_()
    assert "<b>" not in shown
    assert "13,315 infer/s within p95 &lt;= 20 ms" in shown
    assert "PASS at 99% confidence" in shown


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shutil.copytree(SAMPLE, tmp_path / "results/dlrm/sample")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    told = capsys.readouterr().out
    assert "13,315 infer/s" in told
    assert "--sla-p95 20 parsecs: " in told
    assert (tmp_path / "pareto.png").read_bytes()[1:4] == b"PNG"
    assert names["run"].plots["load"]._repr_png_()[1:4] == b"PNG"


def test_a_users_file_passes_mypy_strict(tmp_path: Path) -> None:
    good, bad = tmp_path / "users.py", tmp_path / "misspelt.py"
    good.write_text(USERS)
    bad.write_text(USERS.replace("sla_p95=", "sla_p59="))
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", good, bad],
        cwd=ROOT,  # where mypy's cache is
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    (error,) = re.findall(r"(users|misspelt)\.py:\d+: error: (.*)", ended.stdout)
    assert error[0] == "misspelt"
    assert "sla_p59" in error[1]
