"""A wrong flag, command or run is answered by one line that proposes the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectives.quantiles import PERCENTILE_RULE
from optimizer.cli import report
from optimizer.cli.commands import refuse_misspelt_command, refuse_options_before_command
from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.core.errors import BadInputError

ALL_OPTIONS = "`tune run --help-all` shows the options"
TIME_RULE = "write a positive time such as 20ms, 0.02s or 500us"
FLAGS = [
    ("--slap95 20ms dlrm", f"--slap95 is not an option of `tune run`; did you mean --sla-p95? {ALL_OPTIONS}"),
    ("--SLA_P95=20ms dlrm", f"--SLA_P95 is not an option of `tune run`; did you mean --sla-p95? {ALL_OPTIONS}"),
    ("-sla-p95 20ms dlrm", f"-sla-p95 is not an option of `tune run`; did you mean --sla-p95? {ALL_OPTIONS}"),
    (
        "--sla-p95 20ms dlrm --bugdet 5m",
        f"--bugdet is not an option of `tune run`; did you mean --budget? {ALL_OPTIONS}",
    ),
    (
        "--server_cpu=0 dlrm",
        f"--server_cpu is not an option of `tune run`; did you mean --server-cpus? {ALL_OPTIONS}",
    ),
    (
        "--sla 20ms dlrm",
        "--sla 20ms: write METRIC<=TIME, such as p99.9<=30ms or ttft-p99.5<=200ms",
    ),
    (
        "--max-instances=2 dlrm",
        f"--max-instances is not an option of `tune run`; did you mean --max-instance-count? {ALL_OPTIONS}",
    ),
    ("-budget 5m dlrm", f"-budget is not an option of `tune run`; did you mean --budget? {ALL_OPTIONS}"),
    (
        "--concurrency 4 dlrm",
        "--concurrency is not an option of `tune run`; the concurrency is searched; limit it in a profile, or "
        f"measure given values with `tune sweep --concurrency`; {ALL_OPTIONS}",
    ),
    (
        "--latency-threshold 20 dlrm",
        "--latency-threshold is not an option of `tune run`; a bound on the latency is written --sla-p95 20ms; "
        f"{ALL_OPTIONS}",
    ),
    ("-m dlrm", f"-m is not an option of `tune run`; write the model without an option; {ALL_OPTIONS}"),
    ("--sla-p95 20ms --sla-p95 30ms dlrm", "--sla-p95 30ms: it was given before as 20ms; leave one out"),
    ("--max-memory=5GiB --max-memory 3GiB dlrm", "--max-memory 3GiB: it was given before as 5GiB; leave one out"),
    ("--frob dlrm", f"--frob is not an option of `tune run`; {ALL_OPTIONS}"),
    ("--budget --max-trials 3 dlrm", f"argument --budget: expected one argument; {ALL_OPTIONS}"),
    ("--budget -- dlrm", f"--budget --: -- only marks the end of the options; write a value; {ALL_OPTIONS}"),
    ("--out=-- dlrm", f"--out --: -- only marks the end of the options; write a value; {ALL_OPTIONS}"),
    ("dlrm mlp", f"unrecognized arguments: mlp; {ALL_OPTIONS}"),
    ("--sla-p95 20 dlrm", "--sla-p95 20: a unit is missing: 20ms?"),
    ("--sla-p101 20ms dlrm", f"--sla-p101 20ms: {PERCENTILE_RULE}"),
    ("--sla-p-5 20ms dlrm", f"--sla-p-5 20ms: {PERCENTILE_RULE}"),
    ("--sla-p-5", f"--sla-p-5 '': {PERCENTILE_RULE}"),
    ("--sla-p 20ms dlrm", "--sla-p 20ms: the percentile is missing; write it behind the p, such as --sla-p95 20ms"),
    (
        "--sla-ttft-p=20ms dlrm",
        "--sla-ttft-p 20ms: the percentile is missing; write it behind the p, such as --sla-ttft-p95 20ms",
    ),
    ("--sla-p95= dlrm", f"--sla-p95 '': the time is missing; {TIME_RULE}"),
    ("--sla-p99.9", f"--sla-p99.9: expected one argument, as in --sla-p99.9 20ms; {ALL_OPTIONS}"),
    ("--sla-p95 abc dlrm", f"--sla-p95 abc: this is not a number with a unit of time; {TIME_RULE}"),
    ("--sla-p95 20MS dlrm", f"--sla-p95 20MS: the unit is none of us, ms, s, m, min, h; {TIME_RULE}"),
    ("--sla-p95 -1ms dlrm", f"--sla-p95 -1ms: a time is never negative; {TIME_RULE}"),
    ("--sla-p95 0 dlrm", "--sla-p95 0: the time must be greater than zero, such as 20ms"),
    ("--sla-p95 20 ms dlrm", "--sla-p95 20 ms: write the number and its unit without a blank: 20ms"),
    ("--max-memory 4 GiB dlrm", "--max-memory 4 GiB: write the number and its unit without a blank: 4GiB"),
    ("--sla-ttft-p100 20ms dlrm", f"--sla-ttft-p100 20ms: {PERCENTILE_RULE}"),
    ("--sla-p99.9 20 dlrm", "--sla-p99.9 20: a unit is missing: 20ms?"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "message"), FLAGS)
def test_a_wrong_flag_proposes_the_one_that_is_spelled_alike(words: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_run_arguments(words.split())
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_a_long_or_unprintable_flag_is_quoted_on_one_line() -> None:
    for flag in ("--" + "x" * 5000, "--sla\n-p95", "--\x1b[31m"):
        with pytest.raises(BadInputError) as caught:
            read_run_arguments([flag, "dlrm"])
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def test_words_after_two_dashes_and_values_are_no_flags() -> None:
    assert read_run_arguments(["--string-data=--slap95", "--", "--odd"]).options.model == "--odd"


def test_a_model_may_have_the_name_of_a_unit() -> None:
    assert read_run_arguments(["--max-trials", "20", "m"]).options.model == "m"
    assert read_run_arguments(["--sla-p95", "20ms", "s"]).options.model == "s"


def test_another_command_proposes_its_own_options() -> None:
    with pytest.raises(BadInputError) as caught:
        read_sweep_arguments(["--repeats", "3", "mlp"])
    assert str(caught.value) == (
        "--repeats is not an option of `tune sweep`; did you mean --repeat? `tune sweep --help` shows the options"
    )


def test_a_sweep_that_was_begun_with_an_earlier_name_of_an_option_is_refused(folder: Path) -> None:
    (folder / "sweep.json").write_text('{"options": {"model": "mlp", "instances": "1"}}')
    with pytest.raises(BadInputError, match="--instances: unknown option"):
        read_sweep_arguments(["--resume", str(folder)])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["reprot", "RUN"], "`tune report`"),
        (["doctr"], "`tune doctor`"),
        (["verif", "RUN", "--fresh"], "`tune verify`"),
    ],
)
def test_a_misspelt_command_is_proposed(words: list[str], command: str) -> None:
    with pytest.raises(BadInputError) as caught:
        refuse_misspelt_command(words)
    assert str(caught.value) == (
        f"no command or model '{words[0]}'; did you mean {command}? `tune --help` lists the commands, `tune models` "
        "the models"
    )


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--json", "runs"], "tune runs --json"),
        (["--json", "-v", "run", "dlrm"], "tune run dlrm --json -v"),
        (["--no-color", "-v", "verify", "my run"], "tune verify 'my run' --no-color -v"),
    ],
)
def test_a_command_behind_options_is_not_a_model(words: list[str], command: str) -> None:
    with pytest.raises(BadInputError, match=f"options follow the command; write `{command}`$"):
        refuse_options_before_command(words)


def test_the_corrected_line_has_only_options_that_the_command_takes() -> None:
    message = "-v doctor: options follow the command, and `tune doctor` has no -v; write `tune doctor --no-color`"
    with pytest.raises(BadInputError, match=f"^{message}$"):
        refuse_options_before_command(["-v", "--no-color", "doctor"])


@pytest.mark.parametrize(
    "words", [[], ["runs", "--json"], ["--json"], ["--json", "dlrm"], ["--out", "runs", "dlrm"], ["-v", "--json"]]
)
def test_options_of_a_run_may_come_first(words: list[str]) -> None:
    refuse_options_before_command(words)


def test_a_model_may_have_a_name_like_a_command(folder: Path) -> None:
    (folder / "reports").mkdir()
    (folder / "configs").mkdir()
    (folder / "configs" / "plans.yaml").write_text("model: {builder: mlp}\n")
    for words in (
        *([], ["dlrm"], ["--plan"], ["reports"], ["plans"]),
        ["verifier", "--model-repository", "models"],
        ["verifier", "--model-repository=models"],
    ):
        refuse_misspelt_command(words)


def test_a_folder_without_a_run_is_reported_with_the_command_that_lists_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    assert report.main(["empty"]) == 2
    assert capsys.readouterr() == (
        "",
        "tune: run empty: no run.json there nor in results/empty, and results has no run of a model with that name; "
        "give a run's folder, a model, latest or <suite>/<batch> (`tune runs` lists runs and batches)\n",
    )
    assert report.main(["results/empty"]) == 2
    assert "run results/empty: no run.json there, and results has no run" in capsys.readouterr().err
