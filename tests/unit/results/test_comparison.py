"""Tests of ``tune compare``: the ratio of two runs, what differs between them, and runs that cannot be compared."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.metrics import Measurement
from optimizer.cli.compare import main
from optimizer.confirmation.choice import RATIO_TO_ITSELF
from optimizer.core.errors import BadInputError
from optimizer.core.trial import FreshServer, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results import formatting
from optimizer.results.comparison import (
    Comparison,
    answer,
    compare_runs,
    conditions,
    difference_warning,
    document,
    regression_sentence,
)
from optimizer.results.finished_run import read_run
from optimizer.results.terminal_comparison import print_comparison
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from tests.conftest import measurement
from tests.run_folders import CANDIDATE, CLOSED, HARDWARE, MEASURED, OPEN, WINDOWS, change_info, write_run

SAMPLE = Path("tests/data/dlrm/sample")
FINGERPRINT = {
    "cpu": "some CPU",
    "cpu_count": 8,
    "gpus": [],
    "target": "embedded",
    "server": "2.51.0",
    "backends": ["onnxruntime 1.32.0"],
    "at": "",
}


def run_at(folder: Path, throughput: float, **more: Any) -> Path:
    """Return the folder of a run with this throughput in every window."""
    return write_run(folder, measured=replace(MEASURED, throughput_infer_per_sec=throughput), **more)


def with_servers(run: Path, servers: Iterable[tuple[float, float]]) -> Path:
    """Add a confirmation on servers with these throughputs and times of the speed probe in ms."""
    table = TrialsTable(RunFolder(run).trials, "doubler", {})
    for server, (throughput, probe_ms) in enumerate(servers, 1):
        window = replace(MEASURED, throughput_infer_per_sec=throughput, speed_probe_ms=probe_ms)
        for _ in range(WINDOWS):
            table.append(Trial(0, CANDIDATE), CLOSED, window, FreshServer(server, 0.01))
    return run


def compared(a: Path, b: Path) -> Comparison:
    return compare_runs(read_run(a), read_run(b))


def text_of(comparison: Comparison, limit: float | None = None, width: int = 80) -> str:
    text = io.StringIO()
    print_comparison(Console(file=text, width=width), comparison, limit)
    return text.getvalue()


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return run_at(tmp_path / "a", 1000.0)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


# -- the answer -----------------------------------------------------------------------------------------------------


def test_a_faster_run_is_reported_with_its_interval(a: Path, tmp_path: Path) -> None:
    comparison = compared(a, run_at(tmp_path / "b", 1200.0))
    assert comparison.ratio is not None
    assert comparison.ratio.estimate == pytest.approx(1.2)
    assert 1 < comparison.ratio.interval.low < 1.2 < comparison.ratio.interval.high < 1.3
    low, high = comparison.ratio.bounds
    expected = f"The recommendation of B serves 1.20x ({low:.2f} to {high:.2f}) the throughput of A"
    assert answer(comparison) == expected
    assert text_of(comparison).splitlines()[0] == expected
    assert (difference_warning(comparison), comparison.confidence) == ("", 0.99)


def test_the_ratio_of_the_exchanged_runs_is_the_inverse(a: Path, tmp_path: Path) -> None:
    b = run_at(tmp_path / "b", 1200.0)
    there, back = compared(a, b).ratio, compared(b, a).ratio
    assert there is not None
    assert back is not None
    assert back.estimate == pytest.approx(1 / there.estimate)
    assert back.interval.low == pytest.approx(1 / there.interval.high)


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        ("latency-p95", "The recommendation of B compared with that of A: p95 2.00x lower (1.89 to 2.12)"),
        ("score", "The recommendation of B compared with that of A: score 0.930 instead of 0.900"),
    ],
)
def test_runs_are_compared_in_their_objective(objective: str, sentence: str, tmp_path: Path) -> None:
    a, b = (
        change_info(
            write_run(tmp_path / name, measured=replace(measurement(1000, p95_ms), score=score)),
            "problem",
            objectives=[objective],
        )
        for name, p95_ms, score in (("a", 10.0, 0.9), ("b", 5.0, 0.93))
    )
    comparison = compared(a, b)
    assert answer(comparison).startswith(sentence)
    assert ("objective" in text_of(comparison).split("machine ")[0]) == (objective == "score"), "p95 is bounded"
    printed = document(comparison, 0.05)
    assert printed["objective"]["metric"] == objective
    assert printed["is_regression"] is (False if objective == "latency-p95" else None)
    if objective == "latency-p95":
        worse = "p95 2.00x higher (1.89 to 2.12) with B than with A (limit: 5 %)"
        assert regression_sentence(compared(b, a), 0.05) == worse
        assert printed["ratio_text"].startswith("p95 2.00x lower")


def test_runs_with_other_objectives_are_compared_in_throughput(a: Path, tmp_path: Path) -> None:
    b = change_info(run_at(tmp_path / "b", 1200.0), "problem", objectives=["latency-p95"])
    assert compared(a, b).metric == "throughput"
    comparison = compared(a, change_info(b, "problem", objectives=["memory"]))
    assert comparison.metric == "throughput"
    assert re.search(r"^objective +see above +memory 1.00 GB$", text_of(comparison), re.M)


def test_a_difference_within_the_interval_is_not_measurable(a: Path, tmp_path: Path) -> None:
    comparison = compared(a, run_at(tmp_path / "b", 1010.0))
    assert comparison.ratio is not None
    assert not comparison.ratio.is_measurable
    assert answer(comparison).startswith("no measurable difference: 1.01x (0.9")


def test_a_copy_of_a_recorded_run_does_not_differ(sample: Path, tmp_path: Path) -> None:
    comparison = compared(sample, Path(shutil.copytree(sample, tmp_path / "dlrm" / "copy")))
    assert comparison.ratio is not None
    assert comparison.ratio.estimate == pytest.approx(RATIO_TO_ITSELF.estimate)
    assert not comparison.ratio.is_measurable
    assert [aspect.is_same for aspect in comparison.aspects] == [True] * 6


@pytest.mark.parametrize(
    ("constraints", "difference"),
    [(["p95 <= 10 ms"], "p95 <= 20 ms, p95 <= 10 ms"), ([], "p95 <= 20 ms, none")],
)
def test_other_bounds_are_not_comparable(a: Path, tmp_path: Path, constraints: list[str], difference: str) -> None:
    b = change_info(write_run(tmp_path / "b", measured=measurement(1000, 5)), "problem", constraints=constraints)
    comparison = compared(a, b)
    assert comparison.ratio is None
    assert answer(comparison) == f"not comparable: the bounds differ ({difference})"
    assert comparison.has_regressed(0.05) is None
    assert "no ratio" not in text_of(comparison), "the first line says it"


def test_another_kind_of_load_is_not_comparable(a: Path, tmp_path: Path) -> None:
    comparison = compared(a, write_run(tmp_path / "b", load=OPEN))
    assert answer(comparison) == "not comparable: the kinds of load differ (concurrency, rate)"
    assert "150.5 req/s" in text_of(comparison)


def test_a_run_that_was_not_confirmed_is_undecided(a: Path, tmp_path: Path) -> None:
    b = run_at(tmp_path / "b", 500.0, is_confirmed=False)
    comparison = compared(a, b)
    assert answer(comparison) == "B ended UNDECIDED, so its throughput is not confirmed"
    shown = text_of(comparison)
    assert "no ratio of the throughputs: B was not measured on fresh servers" in " ".join(shown.split())
    assert f"tune verify {b} --budget 3m" in shown
    assert comparison.has_regressed(0.05) is None
    both = compared(run_at(tmp_path / "c", 500.0, is_confirmed=False), b)
    assert answer(both) == "A and B ended UNDECIDED, so their throughputs are not confirmed"


def test_an_undecided_run_with_fresh_servers_has_a_ratio(a: Path, tmp_path: Path) -> None:
    b = with_servers(run_at(tmp_path / "b", 1300.0, is_confirmed=False), [(1300.0, 20.0)] * 2)
    comparison = compared(a, b)
    assert answer(comparison) == "B ended UNDECIDED, so its throughput is not confirmed"
    assert "ratio         The recommendation of B serves 1.30x" in text_of(comparison)


def test_a_disturbed_confirmation_gives_no_ratio(a: Path, tmp_path: Path) -> None:
    disturbed = replace(MEASURED, stable=False, reason="others took 40 % of the CPUs")
    b = write_run(tmp_path / "b", is_confirmed=False)
    table = TrialsTable(RunFolder(b).trials, "doubler", {})
    for server in range(1, 5):
        table.append(Trial(0, CANDIDATE), CLOSED, disturbed, FreshServer(server, 0.01))
    comparison = compared(a, b)
    assert comparison.ratio is None
    assert comparison.no_gain == "the confirmation of B was disturbed (100 % of its windows were disturbed)"


def test_without_bounds_a_run_that_was_not_confirmed_has_no_ratio(tmp_path: Path) -> None:
    runs = [run_at(tmp_path / name, 1000.0, is_confirmed=name == "b") for name in ("a", "b")]
    for run in runs:
        change_info(run, "problem", constraints=[])
    assert answer(compared(*runs)) == "no ratio of the throughputs: A was not measured on fresh servers"


# -- the machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cpu", "ratio"), [(HARDWARE["cpu"], 1.0), ("another CPU", 0.8)])
def test_the_speed_of_the_same_machine_is_left_out(tmp_path: Path, cpu: str, ratio: float) -> None:
    """The throughput follows the speed probe within each run, and B was measured while the probe took 25 % longer."""
    factors = (0.95, 0.98, 1.02, 1.05)
    a, b = (write_run(tmp_path / name, is_confirmed=False) for name in ("a", "b"))
    with_servers(a, [(1000.0 / factor, 20.0 * factor) for factor in factors])
    with_servers(b, [(800.0 / factor, 25.0 * factor) for factor in factors])
    change_info(b, "hardware", cpu=cpu)
    comparison = compared(a, b)
    assert comparison.ratio is not None
    assert comparison.ratio.estimate == pytest.approx(ratio, abs=0.01)
    assert comparison.ratio.is_measurable == (ratio < 1)
    assert "speed probe      20.0 ms" in text_of(comparison)


def test_a_run_that_served_no_request_has_no_throughput(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, measured=measured)
        for name, measured in (("a", MEASURED), ("b", Measurement(0.0, requests=0, stable=True)))
    ]
    for run in runs:
        info = json.loads((run / "run.json").read_text())
        change_info(change_info(run, "problem", constraints=[]), "options", **info["options"] | {"sla_ms": {}})
    comparison = compared(*runs)
    assert comparison.no_gain == "B served no request on fresh servers"
    text = text_of(comparison)
    for name in ("throughput", "baseline"):
        assert re.search(rf"^{name} +1,000 ± 60 infer/s +no request was served$", text, re.MULTILINE)
    assert "0.00" not in text


def test_probes_that_hardly_vary_within_the_runs_cannot_correct_a_large_difference(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, is_confirmed=False) for name in ("a", "b"))
    with_servers(a, [(1000.0, 20.0), (1100.0, 20.0001), (1000.0, 20.0), (1100.0, 20.0001)])
    with_servers(b, [(1000.0, 60.0)] * 4)
    comparison = compared(a, b)
    assert comparison.no_gain == "the speed of the machine differed too much between A and B"
    json.dumps(document(comparison), allow_nan=False)


def test_other_machines_give_a_warning(a: Path, tmp_path: Path) -> None:
    b = run_at(tmp_path / "b", 1200.0, hardware={**HARDWARE, "cpu_count": 16})
    comparison = compared(a, b)
    assert (
        difference_warning(comparison)
        == "The machines differ, so the ratio compares these as well as the configurations."
    )
    assert document(comparison)["same_machine"] is False
    shown = " ".join(text_of(comparison).split())
    assert "hardware Some(R) CPU @ 2.50GHz, 8 CPUs (A), Some(R) CPU @ 2.50GHz, 16 CPUs (B)" in shown


def test_each_aspect_that_differs_is_named(tmp_path: Path) -> None:
    a = change_info(run_at(tmp_path / "a", 1000.0), fingerprint=FINGERPRINT)
    options = RunOptions("tripler", protocol="http", request_batch_size=4)
    b = run_at(tmp_path / "b", 1000.0, model="tripler", options=options, server_cpus=4, server_uses_gpus=False)
    change_info(b, fingerprint={**FINGERPRINT, "server": "2.52.0"}, versions={"tritonserver": "2.52.0"})
    for run, digit in ((a, "a"), (b, "b")):
        change_info(run, "problem", facts={"sha256": digit * 64, "model_bytes": 1000})
    comparison = compared(a, b)
    different = {aspect.name: aspect.differences for aspect in comparison.aspects if aspect.is_same is False}
    assert different == {
        "server": {"version": ("2.51.0", "2.52.0"), "CPUs": ("8", "4"), "device": ("GPU", "CPU")},
        "versions": {"tritonserver": ("2.51.0", "2.52.0")},
        "model": {"name": ("doubler", "tripler"), "SHA-256": ("a" * 12, "b" * 12)},
        "requests": {"protocol": ("grpc", "http"), "options": ("", "request_batch_size 4")},
    }
    expected = "The servers, models and requests differ, so the ratio compares these as well as the configurations."
    assert difference_warning(comparison) == expected
    shown = " ".join(text_of(comparison).split())
    assert "server differs: version 2.51.0 (A), 2.52.0 (B); CPUs 8 (A), 4 (B); device GPU (A), CPU (B)" in shown
    assert "options none (A), request_batch_size 4 (B)" in shown


def test_a_model_without_a_checksum_may_differ(a: Path, tmp_path: Path) -> None:
    comparison = compared(a, run_at(tmp_path / "b", 1000.0))
    assert document(comparison)["same"]["model"] is None
    shown = " ".join(text_of(comparison).split())
    assert "model unknown, because the SHA-256 is not recorded in both runs: name doubler" in shown
    assert difference_warning(comparison) == ""


# -- output ---------------------------------------------------------------------------------------------------------


def test_the_table_has_the_fields_that_differ(tmp_path: Path) -> None:
    threads, graph = "parameters.intra_op_thread_count.string_value", "optimization.graph.level"
    a = run_at(tmp_path / "a", 1000.0, fields={threads: ["1"], graph: [1]})
    b = run_at(tmp_path / "b", 1000.0, fields={threads: ["2"], graph: [1]})
    comparison = compared(a, b)
    assert document(comparison)["differences"]["configuration"] == {threads: ["1", "2"]}
    lines = text_of(comparison).splitlines()
    assert ["intra_op_thread_count", "1", "2"] in [line.split() for line in lines]
    assert not any("level" in line for line in lines)
    (baseline,) = (line for line in lines if line.startswith("baseline "))
    assert re.fullmatch(r"baseline( +1,000 ± \d+ infer/s){2}", baseline)


def test_the_output_fits_80_columns(sample: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(sample, tmp_path / "dlrm" / "other"))
    change_info(other, "hardware", cpu="a processor with a long name " * 5)
    shown = text_of(compared(sample, other), 0.05)
    lines = [line for line in shown.splitlines() if not line.startswith(("A  ", "B  "))]
    assert max(map(len, lines)) <= 80
    assert shown.startswith("no measurable difference: 1.00x (")
    assert "warning       The machines differ" in shown
    assert "p95 <= 20 ms" in shown


@pytest.mark.parametrize("width", [80, 100, 140])
def test_bounds_and_values_are_not_broken(sample: Path, tmp_path: Path, width: int) -> None:
    other = Path(shutil.copytree(sample, tmp_path / "dlrm" / "other"))
    bounds = ["p95 <= 20 ms", "p99 <= 60 ms", "p50 <= 15 ms", "throughput >= 4000 infer/s"]
    for run in (sample, other):
        change_info(run, "problem", constraints=bounds)
    comparison = compared(sample, other)
    lines = [line for line in text_of(comparison, width=width).splitlines() if not line.startswith(("A  ", "B  "))]
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("verdict")) :]
    assert max(map(len, lines)) <= width
    for piece in map(formatting.bound, comparison.a.outcome.sla):
        assert sum(line.count(piece) for line in table) == 2, piece


def test_a_long_name_is_not_broken(sample: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(sample, tmp_path / "dlrm" / "other"))
    comparison = compared(sample, other)
    long = "a_model_whose_name_is_longer_than_half_of_the_terminal"
    second = comparison.b
    renamed = replace(second, run=replace(second.run, problem=replace(second.run.problem, model=long)))
    lines = text_of(replace(comparison, b=renamed)).splitlines()
    assert [line.split() for line in lines if line.startswith("model:")] == [
        ["model:", "A", comparison.a.run.problem.model],
        ["model:", "B", long],
    ]


def test_texts_of_the_folders_do_not_control_the_terminal(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b[31mx\r\n\x07"
    b = run_at(tmp_path / "b", 1200.0)
    change_info(b, "hardware", cpu=hostile, gpus=[hostile])
    change_info(b, "problem", facts={"sha256": hostile}, input_data=hostile)
    change_info(b, versions={f"v{hostile}": hostile}, written=hostile)
    change_info(b, "options", string_data=hostile)
    assert main([str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert printed
    assert not {"\x1b", "\r", "\x07"} & set(printed)


@pytest.mark.parametrize("number", [10**400, "many", None, float("nan")])
def test_a_number_that_no_run_has_is_unknown(a: Path, tmp_path: Path, number: object) -> None:
    b = change_info(run_at(tmp_path / "b", 1000.0), server_cpus=number, fingerprint=number, versions=number)
    change_info(b, "problem", facts={"model_bytes": number, "sha256": number})
    same = document(compared(a, b))["same"]
    assert (same["server"], same["versions"], same["model"]) == (None, None, None)


def test_the_document_has_the_same_facts(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = run_at(tmp_path / "b", 900.0)
    assert main([str(a), str(b), "--json", "--fail-on-regression", "5%"]) == 1
    printed = json.loads(capsys.readouterr().out)
    low, high = printed["ratio_interval"]
    assert printed["ratio"] == pytest.approx(0.9)
    assert low < printed["ratio"] < high < 1
    assert printed["answer"].startswith("The recommendation of B serves 0.90x (")
    assert (printed["is_measurable"], printed["is_regression"], printed["no_ratio"]) == (True, True, None)
    assert (printed["same_machine"], printed["same"]["requests"], printed["warning"]) == (True, True, None)
    assert printed["differences"] == {"configuration": {}}
    assert [printed[side]["run"] for side in ("a", "b")] == [str(a), str(b)]
    assert printed["b"]["recommended"]["throughput_infer_per_sec"] == 900.0
    assert printed["b"]["confirmation"]["verdict"] == printed["b"]["verdict"] == "PASS"
    assert printed["b"]["sla"] == ["p95 <= 20 ms"]


# -- regressions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("throughput", "limit", "code", "line"),
    [
        (900.0, "5%", 1, "regression    B serves 10 % less than A (limit: 5 %)"),
        (900.0, "0.2", 0, "regression    none: B shows no measurable loss of 20 % or more"),
        (980.0, "1%", 0, "regression    none: B shows no measurable loss of 1 % or more"),  # within the interval
        (1100.0, "5%", 0, "regression    none: B shows no measurable loss of 5 % or more"),
    ],
)
def test_a_regression_is_the_exit_code(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], throughput: float, limit: str, code: int, line: str
) -> None:
    b = run_at(tmp_path / "b", throughput)
    assert main([str(a), str(b), "--fail-on-regression", limit]) == code
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main([str(a), str(b)]) == 0


def test_without_a_ratio_no_regression_is_judged(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = run_at(tmp_path / "b", 100.0, is_confirmed=False)
    assert main([str(a), str(b), "--fail-on-regression", "5%"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "regression    not judged, because there is no ratio of the throughputs"


@pytest.mark.parametrize("limit", ["0", "100%", "five", "nan"])
def test_a_limit_that_is_no_share_is_refused(a: Path, limit: str) -> None:
    with pytest.raises(BadInputError, match=f"--fail-on-regression {limit}: write a share such as 5%"):
        main([str(a), str(a), "--fail-on-regression", limit])


# -- runs that cannot be compared -----------------------------------------------------------------------------------


def refused(*words: str | Path) -> str:
    """Return the message, which has one line, of a command with exit code 2."""
    with pytest.raises(BadInputError) as caught:
        main([str(word) for word in words])
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    return message


def test_a_missing_run_is_refused(a: Path) -> None:
    assert "nowhere: no run.json there" in refused(a, "nowhere")
    assert "nowhere: no run.json there" in refused("nowhere", a)


def test_one_run_or_three_are_refused(a: Path) -> None:
    assert "required: B" in refused(a)
    assert "unrecognized arguments" in refused(a, a, a)


def test_a_run_given_twice_is_refused(a: Path) -> None:
    assert refused(a, a / ".." / "run") == f"{a}: A and B are the same run; give two different runs"


@pytest.mark.parametrize("status", ["interrupted", "running", "failed"])
def test_an_unfinished_run_is_refused_with_the_command_that_continues_it(
    a: Path, tmp_path: Path, status: str
) -> None:
    b = run_at(tmp_path / "b", 1000.0, status=status)
    assert refused(a, b).endswith(f"only finished runs are compared: continue it with `tune --resume {b}`")
    assert refused(b, a).startswith(f"{b}: the run ")


def test_a_run_that_is_still_running_is_refused_with_the_advice_to_wait(a: Path, tmp_path: Path) -> None:
    b = run_at(tmp_path / "b", 1000.0, status="running")
    with RunFolder(b).locked():
        assert refused(a, b).endswith("the run is still running; only finished runs are compared: wait until it ends")


def test_a_run_that_left_its_study_is_refused(a: Path, tmp_path: Path) -> None:
    b = run_at(tmp_path / "b", 1000.0, status="left")
    assert refused(a, b).endswith("give the run of the worker that ended the study")


def test_a_run_that_found_nothing_is_refused_with_the_reason(a: Path, tmp_path: Path) -> None:
    b = change_info(run_at(tmp_path / "b", 1000.0, status="none"), "problem", constraints=["p95 <= 2 ms"])
    message = refused(a, b)
    assert message.startswith(f"{b}: doubler: FAIL, no configuration meets p95 <= 2 ms: ")
    assert f"`tune explain {b}` says what would help" in message
    (b / "trials.csv").unlink()
    assert "nothing was measured" in refused(a, b)


def test_another_version_of_the_record_is_refused(a: Path, tmp_path: Path) -> None:
    b = change_info(run_at(tmp_path / "b", 1000.0), schema_version=99)
    assert "schema_version 99" in refused(a, b)
    assert "use the version that wrote it" in refused(b, a)


def test_generated_requests_of_two_seeds_are_no_difference(tmp_path: Path) -> None:
    """The name of the file is a hash of its values. With the same seed it differs only if the requests do."""
    names = ("random-0123456789abcdef.json", "random-fedcba9876543210.json", "zero-0123456789abcdef.json")
    runs = [
        change_info(
            run_at(tmp_path / name, 1000.0, options=RunOptions("doubler", seed=seed)), "problem", input_data=name
        )
        for seed, name in enumerate(names)
    ]
    assert difference_warning(compared(runs[0], runs[1])) == ""
    assert "requests differ" in difference_warning(compared(runs[1], runs[2]))
    change_info(runs[1], "options", seed=0)
    assert "requests differ" in difference_warning(compared(runs[0], runs[1]))


def test_the_shares_of_the_load_are_a_condition(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, 1000.0) for name in "ab")
    change_info(b, "problem", concurrent_models="second=3")
    assert conditions(read_run(b))["requests"] == "concurrent_models second=3"
    assert "options none (A), concurrent_models second=3 (B)" in " ".join(text_of(compared(a, b)).split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"input_data": "samples.npz"}, {"input_data": "0123456789abcdef.json"}),
        ({"prompt_tokens": "prompts.txt"}, {}),
        ({"request_times": "trace.csv"}, {"request_times": {"distribution": "trace.csv", "recorded_requests": 100}}),
    ],
)
def test_the_folder_of_a_file_is_no_condition(
    tmp_path: Path, options: dict[str, str], problem: dict[str, object]
) -> None:
    """The runs of a suite in another folder have other relative paths of the same files."""
    ((name, file),) = options.items()
    found = []
    for place, path in enumerate((file, f"ci/{file}", f"ci/other-{file}")):
        run = run_at(tmp_path / str(place), 1000.0, load=OPEN)
        change_info(change_info(run, "options", **{name: path}), "problem", **problem)
        found.append(conditions(read_run(run)))
    assert found[0] == found[1]
    is_hashed = "input_data" in problem
    assert (found[0] == found[2]) is is_hashed
    change_info(run, "problem", **({"input_data": "another.json"} if is_hashed else {}))
    assert conditions(read_run(run)) != found[0]
