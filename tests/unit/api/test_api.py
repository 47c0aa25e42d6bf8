"""``from optimizer import load_run, tune``: the command and its runs from Python."""

from __future__ import annotations

import json
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
from optimizer import Run, TuneError, load_run, tune
from optimizer.cli import reference
from optimizer.core import interrupts
from optimizer.core.errors import BadInputError
from tests.conftest import not_none
from tests.documents import undocumented_keys
from tests.run_folders import change_info

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests/data/dlrm/sample"


def best_throughput(path: str) -> float:
    """Use the types as a program of a user does. Only mypy checks this function."""
    run: Run = load_run(path)
    trials: pd.DataFrame = run.trials
    point = run.recommended
    return point.throughput_infer_per_sec + len(trials) if point else 0.0


def tune_again() -> Run:
    """Use the keywords as a program of a user does. Only mypy checks this function."""
    try:
        return tune("mlp", sla_p95="20ms", budget="30s", log="plain", shape=["x:4"])
    except TuneError as error:
        print(error.exit_code)
        return tune("mlp", sla_p59="20ms")  # type: ignore[call-arg]


def test_importing_is_cheap_and_changes_nothing() -> None:
    script = (
        "import signal, sys; before = [signal.getsignal(s) for s in (2, 15)]; hook = sys.unraisablehook\n"
        "import optimizer\n"
        "assert not {'pandas', 'numpy', 'optuna', 'rich', 'matplotlib'} & sys.modules.keys(), sorted(sys.modules)\n"
        "optimizer.load_run, optimizer.tune\n"
        "assert [signal.getsignal(s) for s in (2, 15)] == before and sys.unraisablehook is hook"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert {"tune", "load_run", "Run", "TuneError"} <= set(dir(optimizer))
    with pytest.raises(AttributeError, match="no attribute 'tuna'"):
        optimizer.tuna  # noqa: B018


def test_an_interrupt_leaves_the_signal_handlers_of_the_calling_program() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts.acknowledge()
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(target=interrupts.acknowledge)  # where signals cannot be set at all
    thread.start()
    thread.join()


@pytest.mark.parametrize("path", reference.FILES, ids=str)
def test_a_generated_file_is_current(path: Path) -> None:
    """``python -m optimizer.cli.reference`` writes them."""
    assert (ROOT / path).read_text(encoding="utf-8") == reference.FILES[path]()


def test_each_guide_belongs_to_a_key_of_a_profile() -> None:
    page = reference.profile_page()
    for key in reference.GUIDES:
        assert f"`{key}`" in page or f"\n## {key}\n" in page


def test_the_reference_has_each_key_of_a_run() -> None:
    """``tests/stack/test_main_job.py`` checks this with the file of a new run."""
    assert undocumented_keys(json.loads((SAMPLE / "run.json").read_text())) == []


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sla_p95": "20"}, "--sla-p95 20: "),
        ({"sla_p59": "20ms"}, "--sla-p59"),
        ({"seed": 1.5}, "--seed 1.5: write a whole number"),
        ({"search": "guess"}, "--search"),
        ({"shape": {"x": 4}}, "--shape: dict is not"),
        ({"json": True}, "--json: unknown option"),
        ({"no_report": "x"}, "--no-report: x is neither true nor false"),
        ({"seed": True}, "--seed: bool is not text, a number"),
        ({"resume": "nowhere"}, "no run.json there"),
    ],
)
def test_refused_values_are_exceptions(keywords: dict[str, Any], message: str) -> None:
    model = None if "resume" in keywords else "mlp"
    with pytest.raises(BadInputError) as caught:
        tune(model, **keywords)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tables_of_a_run_have_types_and_every_measurement() -> None:
    run = load_run(SAMPLE)
    raw_table = pd.read_csv(SAMPLE / "trials.csv")
    assert len(run.trials) == len(raw_table)
    assert run.trials.throughput_infer_per_sec.sum() == pytest.approx(raw_table.throughput_infer_per_sec.sum())
    assert run.trials.confirmation.notna().sum() == raw_table.confirmation.notna().sum()
    types = run.trials.dtypes.astype(str)
    assert (types.trial, types.stable, types.latency_p95_ms, types.reason) == (
        "Int64",
        "boolean",
        "Float64",
        "string",
    )
    passed = run.confirmations[run.confirmations.verdict == "PASS"].iloc[0]
    assert passed.trial == not_none(run.recommended).trial
    assert (
        passed.throughput_infer_per_sec_low < passed.throughput_infer_per_sec < passed.throughput_infer_per_sec_high
    )
    assert run.pareto.throughput_infer_per_sec.is_monotonic_decreasing
    assert run.configs == {"dlrm": (SAMPLE / "best/config.pbtxt").read_text()}
    assert (run.verdict, run.undecided_cause) == ("PASS", None)
    confirmation = not_none(run.confirmation)
    assert "expected share of requests over the bound" in str(confirmation["estimand"])
    assert confirmation["throughput_infer_per_sec"] == [
        passed.throughput_infer_per_sec_low,
        passed.throughput_infer_per_sec_high,
    ]


def test_an_ensemble_has_a_configuration_for_each_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    (folder / "best" / "config.pbtxt").unlink()
    for name in ("chain", "first"):
        (folder / "best" / name).mkdir()
        (folder / "best" / name / "config.pbtxt").write_text(f'name: "{name}"')
    assert load_run(folder).configs == {"chain": 'name: "chain"', "first": 'name: "first"'}


def test_a_run_that_measured_nothing_has_empty_tables(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    (folder / "trials.csv").unlink()
    change_info(folder, status="failed")
    run = load_run(folder)
    assert (run.recommended, run.verdict, run.confirmation, run.configs) == (None, None, None, {})
    for table in (run.trials, run.pareto, run.confirmations):
        assert table.empty
        assert "throughput_infer_per_sec" in table.columns
    assert "nothing was measured" in str(run)
    assert run._repr_html_()


def test_a_notebook_shows_the_result_and_escapes_the_markup_in_names(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    info_path = folder / "run.json"
    info_path.write_text(
        info_path.read_text().replace('"model": "dlrm",\n    "facts"', '"model": "<b>x</b>",\n    "facts"')
    )
    table_path = folder / "trials.csv"
    table_path.write_text(table_path.read_text().replace("\ndlrm,", "\n<b>x</b>,"))
    page = load_run(folder)._repr_html_()
    assert "<b>" not in page
    assert "PASS at 13,400 ± 500 infer/s, p95 18.5" in page
    assert "PASS: the SLA is met at 99 % confidence" in page


def test_the_examples_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shutil.copytree(SAMPLE, tmp_path / "results/dlrm/sample")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    output = capsys.readouterr().out
    assert "13,400 ± 500 infer/s" in output
    assert "--sla-p95 20 parsecs: " in output
    assert (tmp_path / "pareto.png").read_bytes()[1:4] == b"PNG"
    assert names["run"].plots["load"]._repr_png_()[1:4] == b"PNG"
