"""``tune --dry-run`` shows the steps of a run without a server, a download or a folder of results."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from pathlib import Path

import pytest

from optimizer.core.candidate import Candidate
from optimizer.deploy import runtime
from optimizer.search import make_searcher
from optimizer.study.run_preview import PROPOSALS, first_proposals
from tests.command_fixtures import Sandbox, Tune
from tests.contract.test_searchers import WIDE, problem_of, trial
from tests.repositories import (
    doubler,
    serialized,
    skip_without_python_models,
    write_model,
    write_python_model,
    write_sums,
)

SAMPLE = Path(__file__).parents[2] / "results/dlrm/sample"
UNDECLARED = 'backend: "python"\ninstance_group { kind: KIND_CPU }\n'
COMPLETING = textwrap.dedent("""\
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
            config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [4]})
            config.set_max_batch_size(8)
            return config

        def execute(self, requests):
            return []
    """)


@pytest.fixture
def dry_run(called_tune: Tune, sandbox: Sandbox) -> Tune:
    """Return ``tune --dry-run`` in a folder with an ONNX file; no server is installed."""
    (sandbox.working_folder / "net.onnx").write_bytes(serialized(doubler()))
    return functools.partial(called_tune, "--dry-run", env={"TRITUNE_CACHE": sandbox.root / "cache"})


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_undeclared(folder: Path) -> None:
    write_python_model(folder / "models", "auto", COMPLETING).joinpath("config.pbtxt").write_text(UNDECLARED)


def test_a_remark_on_the_model_is_shown_once(dry_run: Tune, sandbox: Sandbox) -> None:
    """The preview reads the model twice, because a server starts for one that declares no inputs."""
    write_model(sandbox.working_folder / "models", "mine", 'platform: "onnxruntime_onnx"', doubler())
    shown = dry_run("--sla-p95", "50ms", "models/mine/1/model.onnx")
    assert shown.code == 0
    assert ["models/mine/config.pbtxt is ignored" in line for line in shown.stderr_lines] == [True]


def test_space_first_trials_and_time_are_shown_and_nothing_is_written(dry_run: Tune, sandbox: Sandbox) -> None:
    shown = dry_run("--sla-p95", "50ms", "--budget", "100s", "net.onnx")
    assert (shown.code, shown.stderr_lines) == (0, [])
    for text in (
        "highest throughput within p95 <= 50 ms",
        "embedded, on ",
        "perf_analyzer over grpc, and tune's own client on fresh servers",
        "at most 1 min 40 s: 1 min of search, 40 s of tests on fresh servers",
        "the download of the server",
        "max_batch_size ",
        "the configuration as given",
        "plain dynamic_batching {}",
        "then: simulated, until the expected gain",
        "No server was started, and nothing was measured.",
    ):
        assert text in " ".join(shown.stdout.split()), text
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert re.search(r"\nnote: [^\n]*production\n {6}build's", shown.stdout)
    assert files(sandbox.working_folder) == [sandbox.working_folder / "net.onnx"]
    assert not any(path.name.startswith("runtime") for path in (sandbox.root / "cache").iterdir())


def test_the_document_has_the_names_of_run_json(dry_run: Tune) -> None:
    words = ("--search", "random", "--seed", "3", "--max-trials", "3", "--no-confirmation", "--json")
    shown = dry_run("--sla-p95", "50ms", *words, "net.onnx")
    assert (shown.code, shown.stderr_lines) == (0, [])
    document = json.loads(shown.stdout)
    problem = document["problem"]
    assert (problem["model"], problem["batcher"], problem["constraints"]) == ("net", "net", ["p95 <= 50 ms"])
    assert problem["candidates"] > 1
    assert {"max_batch_size", "max_queue_delay_us", "instance_count"} < set(problem["space"])
    assert [trial["role"] for trial in document["first"]] == ["baseline", "dynamic_batching", "search"]
    assert document["first"][0]["configuration"] == problem["baseline"]
    assert document["load"]["generator"] == "perf_analyzer"
    assert (document["search_seconds"], document["confirmation_seconds"], document["max_trials"]) == (180, 0, 3)
    assert (document["server_is_installed"], document["server_was_started"]) == (False, False)
    assert "tune --sla-p95 50ms" in document["command"]


@pytest.mark.parametrize("method", ["tpe", "random", "nsga2", "grid"])
def test_the_first_proposals_are_those_of_a_run(method: str) -> None:
    problem, compared = problem_of(WIDE), [Candidate(16), Candidate(16, dynamic_batching=True)]
    searcher, proposals = make_searcher(method, problem, 7), list[Candidate | None]()
    for number, candidate in enumerate(compared):
        searcher.observe(trial(number, candidate))
    for number in range(len(compared), len(compared) + PROPOSALS):
        proposals.append(suggested := searcher.suggest())
        assert suggested is not None
        searcher.observe(trial(number, suggested))
    assert first_proposals(method, problem, 7, compared) == proposals


def test_the_proposals_of_simulated_depend_on_measurements() -> None:
    assert first_proposals("simulated", problem_of(WIDE), 0, []) == []


def test_a_request_rate_is_shown(dry_run: Tune) -> None:
    shown = dry_run("--load", "rate", "--request-distribution", "constant", "--sla-p99", "50ms", "net.onnx")
    assert "tune's own client, at constant request rates" in " ".join(shown.stdout.split())


def test_a_model_that_needs_the_server_does_not_download_it(dry_run: Tune, sandbox: Sandbox) -> None:
    write_undeclared(sandbox.working_folder)
    ended = dry_run("--sla-p95", "50ms", "models/auto")
    assert (ended.code, ended.stdout) == (3, "")
    assert ended.stderr_lines[-1].startswith(
        "tune: --dry-run: no config.pbtxt declares the inputs and outputs of auto, "
    )
    assert ended.stderr_lines[-1].endswith("install it (`tune setup`), or declare them")


@pytest.mark.parametrize("has_config", [True, False])
def test_a_server_that_reads_the_inputs_is_mentioned(
    called_tune: Tune, sandbox: Sandbox, *, has_config: bool
) -> None:
    skip_without_python_models()
    runtime.ensure(print)
    write_undeclared(sandbox.working_folder)
    if not has_config:
        (sandbox.working_folder / "models" / "auto" / "config.pbtxt").unlink()
    shown = called_tune("--dry-run", "--sla-p95", "50ms", "models/auto")
    assert (shown.code, len(shown.stderr_lines)) == (0, 1)
    assert shown.stderr_lines[0].startswith("no config.pbtxt declares the inputs and outputs of ")
    assert "models/auto: starting a server" in shown.stderr_lines[0]
    assert shown.stdout.endswith("A server was started to read the inputs, and nothing was measured.\n")
    assert not (sandbox.working_folder / "results").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--resume", str(SAMPLE)), "--dry-run: it describes a new run, but --resume continues one; leave one"),
        (("--cluster", "auto", "net.onnx"), "--dry-run: it describes a run on this machine, but --cluster measures"),
        (("--out", "net.onnx", "net.onnx"), "results folder net.onnx: cannot write there (Not a directory)"),
    ],
)
def test_bad_input_is_one_line(dry_run: Tune, words: tuple[str, ...], message: str) -> None:
    ended = dry_run(*words)
    assert (ended.code, ended.stdout) == (2, "")
    (line,) = ended.stderr_lines
    assert line.startswith(f"tune: {message}")


def test_the_sequences_of_a_stateful_model_are_shown(dry_run: Tune, sandbox: Sandbox) -> None:
    write_sums(sandbox.working_folder / "models", sandbox.working_folder / "log")
    shown = dry_run("--sla-p95", "50ms", "--sequence-length", "5..9", "--model-repository", "models", "sums")
    assert (shown.code, shown.stderr_lines) == (0, [])
    assert "sequences of 5..9 requests of 1 sample" in shown.stdout
    assert "tune's own client over grpc" in shown.stdout
    assert "sequence_batching.oldest.max_candidate_sequences" in shown.stdout
    words = " ".join(shown.stdout.split())
    assert "then: simulated with a closed queueing network that is fitted to the measurements" in words
    assert "max_queue_delay_us " not in shown.stdout
    assert "dynamic_batching {}" not in shown.stdout
    shown = dry_run("--sla-p95", "50ms", "--json", "--model-repository", "models", "sums")
    load = json.loads(shown.stdout)["load"]
    assert (load["generator"], load["confirmation_generator"]) == ("tune", "tune")


def test_long_names_of_parameters_stay_on_one_line_and_no_choice_is_lost(dry_run: Tune) -> None:
    shown = dry_run("--sla-p95", "50ms", "net.onnx")
    names = [line.split()[0] for line in shown.stdout.splitlines() if line.startswith("parameters.")]
    assert "parameters.intra_op_thread_count.string_value" in names
    assert "off, 0, 100, 500, 1000, 2000, 5000" in " ".join(shown.stdout.split())
