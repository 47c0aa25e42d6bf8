"""The measured effect of shared memory is stored, read, explained and reported."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.cli.explain import main
from optimizer.core.errors import BadInputError
from optimizer.explain.explanation import explain
from optimizer.explain.explanation_document import document
from optimizer.results.finished_run import read_run
from optimizer.results.report.content import report_section
from optimizer.results.shared_memory_effect import FILE, SharedMemoryEffect, paired_ratio, read_effect, write_effect
from tests.run_folders import OPEN, change_info, write_run

SAMPLE = Path("tests/data/dlrm/sample")
BETTER = SharedMemoryEffect(
    trial=10,
    concurrency=16,
    pairs=((1000.0, 1500.0), (1010.0, 1490.0), (990.0, 1510.0)),
    confidence=0.99,
    hardware="Some CPU",
    same_machine=True,
    measured="2026-11-25T03:00:00+0000",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


def test_the_file_reads_as_it_was_written(folder: Path) -> None:
    assert read_effect(folder) is None
    write_effect(folder, BETTER)
    assert read_effect(folder) == BETTER


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("throughputs_infer_per_sec", [[1.0, 2.0]]),
        ("throughputs_infer_per_sec", [[1.0, 2.0], [0.0, 1.0]]),
        ("throughputs_infer_per_sec", [[1.0], [2.0]]),
        ("throughputs_infer_per_sec", 3),
        ("confidence", 1),
        ("trial", None),
        ("trial", math.inf),
        ("concurrency", math.inf),
        ("throughputs_infer_per_sec", [[1e-300, 1e300], [1e-300, 1e300]]),
    ],
)
def test_a_damaged_file_is_bad_input(key: str, value: Any, folder: Path) -> None:
    (folder / FILE).write_text(json.dumps({**BETTER.document(), key: value}))
    with pytest.raises(BadInputError, match="not a measurement of shared memory") as caught:
        read_effect(folder)
    assert "\n" not in str(caught.value)


def test_the_measured_effect_replaces_the_simulated_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_effect(folder, BETTER)
    assert main([str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no copying" not in text
    assert "x (1.4" in text
    assert "1,500 infer/s instead of 1,000 infer/s with 16 requests in flight, measured in 3 rounds" in text
    assert "Use it in a client on the machine of the server" in text
    shown = document(explain(read_run(folder)))["shared_memory"]
    assert shown["is_recommended"]
    assert shown["ratio"] == pytest.approx(1.5, rel=0.01)


def test_a_difference_by_chance_is_not_recommended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = ((1000.0, 1100.0), (1100.0, 1000.0), (1000.0, 1010.0))
    write_effect(folder, SharedMemoryEffect(10, 16, pairs, 0.99, "Some other CPU", False, ""))
    main([str(folder)])
    text = " ".join(capsys.readouterr().out.split())
    assert "makes no measurable difference" in text
    assert "on one server, on Some other CPU." in text
    assert "Use it in a client" not in text


def test_the_report_shows_the_effect(folder: Path) -> None:
    write_effect(folder, BETTER)
    assert dict(report_section(read_run(folder)).environment)["shared memory"] == str(BETTER)


def test_the_effect_of_another_trial_is_not_shown(folder: Path) -> None:
    write_effect(folder, replace(BETTER, trial=3))
    run = read_run(folder)
    assert explain(run).shared_memory is None
    assert "shared memory" not in dict(report_section(run).environment)


def test_runs_that_cannot_be_measured_here_are_refused(tmp_path: Path, folder: Path) -> None:
    at_a_rate = write_run(tmp_path / "rate", load=OPEN)
    with pytest.raises(BadInputError, match="--measure: requests are sent at a rate"):
        main(["--measure", str(at_a_rate)])
    several = change_info(write_run(tmp_path / "several"), "problem", concurrent_models="other=3")
    with pytest.raises(BadInputError, match="--measure: several models got load at the same time"):
        main(["--measure", str(several)])
    change_info(folder, "options", target="remote", url="triton.example:8001")
    with pytest.raises(BadInputError, match=r"--measure: the server at triton\.example:8001 is on another machine"):
        main(["--measure", str(folder)])


def test_the_ratio_is_that_of_the_pairs() -> None:
    ratio = paired_ratio([(100.0, 200.0), (50.0, 100.0), (10.0, 20.0)], 0.99)
    assert ratio.estimate == pytest.approx(2)
    assert ratio.bounds == pytest.approx((2, 2))


def test_each_end_holds_at_its_confidence() -> None:
    """The speed of the machine drifts by a factor of ten, which affects both of a pair."""
    rng = np.random.default_rng(1)
    above = below = 0
    runs = 4000
    for _ in range(runs):
        speed = np.exp(np.linspace(0, np.log(10), 8))
        first = speed * np.exp(0.1 * rng.standard_normal(8))
        second = 1.3 * speed * np.exp(0.1 * rng.standard_normal(8))
        ratio = paired_ratio(list(zip(first.tolist(), second.tolist(), strict=True)), 0.95)
        above += ratio.interval.low > 1.3
        below += ratio.interval.high < 1.3
    for misses in (above, below):
        assert misses / runs == pytest.approx(0.05, abs=0.012)
