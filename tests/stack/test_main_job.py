"""Tests for the whole ``tune`` command with a real tritonserver and perf_analyzer.

Bounds are wide and loads few, so that a busy machine makes these runs slower but does not change their result.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.agreement import MIN_PAIRS
from objectives.sequential import LOOKS
from optimizer.config import model_config
from optimizer.core.files import cache_folder
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine import hardware
from optimizer.model.builders import build
from optimizer.model.profile import load_profile
from optimizer.model.profile_lookup import find_profile
from optimizer.model.profile_schema import BuiltModel
from optimizer.model.repository import read_repository_model
from optimizer.options.values import parse_cpus
from optimizer.results import formatting
from tests.command_fixtures import FOUND, HANG_SECONDS, REPORT, Run, Sandbox, open_sandbox, run_tune
from tests.csv_tables import read_rows
from tests.documents import undocumented_keys
from tests.repositories import write_steady

ATTEMPTS = 3
INTERRUPTED_BEFORE_THE_PAGE = """\
import signal, sys
from optimizer.cli.start import main

def interrupt_once(frame, *_):
    if frame.f_code.co_name == "write_page":
        sys.settrace(None)
        signal.raise_signal(signal.SIGINT)

del sys.argv[0]
sys.settrace(interrupt_once)
main()
"""
ENTRY = {
    "max_batch_size": int,
    "dynamic_batching": bool,
    "max_queue_delay_us": int,
    "preferred_batch_sizes": list,
    "instance_count": int,
    "trial": int,
    "request_batch_size": int,
    "concurrency": int,
    "throughput_infer_per_sec": float,
    "latency_avg_ms": float,
    "latency_p50_ms": float,
    "latency_p90_ms": float,
    "latency_p95_ms": float,
    "latency_p99_ms": float,
    "mean_batch_size": float,
    "stable": bool,
    "server_memory_bytes": float,
}
PARAMETERS = list(ENTRY)[:5]
SLA_MS = 500.0


# -- a recommendation -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steady_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run three configurations of the steady model."""
    with open_sandbox(tmp_path_factory.mktemp("found")) as sandbox:
        write_steady(sandbox.working_folder)
        arguments = ["--sla-p95", "500ms", "--budget", "45s", "--max-trials", "3", "--json", "steady.yaml"]
        yield Run(sandbox, run_tune(sandbox, *arguments, REPORT))


def test_a_run_recommends_a_configuration_as_one_document(steady_run: Run) -> None:
    steady_run.assert_found()
    document = steady_run.document
    for name in ("recommended", "baseline", "dynamic_batching"):
        assert_entry(document[name])
    for entry in document["pareto"]:
        assert_entry(entry)
    assert document["status"] == "found"
    assert document["sla"] == ["p95 <= 500 ms"]
    assert document["closest"] is None
    assert document["no_recommendation_reason"] is None
    assert steady_run.sandbox.working_folder / document["results_dir"] == steady_run.folder
    assert document["model"]["name"] == "sleeper"
    assert document["model"]["model_bytes"] > 0


def assert_entry(entry: dict[str, Any]) -> None:
    for name, kind in ENTRY.items():
        assert type(entry[name]) is kind, name
    assert entry["stable"] or entry["verdict"] != "PASS"
    assert entry["throughput_infer_per_sec"] > 0
    percentiles = [entry[f"latency_p{p}_ms"] for p in (50, 90, 95, 99)]
    assert percentiles == sorted(percentiles)
    assert 1 <= entry["concurrency"] <= 4
    assert entry["request_batch_size"] == 1
    assert 1 <= entry["mean_batch_size"] <= entry["concurrency"]
    if not entry["dynamic_batching"]:
        assert (entry["max_queue_delay_us"], entry["preferred_batch_sizes"]) == (0, [])


def test_the_recommendation_is_the_best_that_meets_the_sla(steady_run: Run) -> None:
    """Only entries that passed compete: another value may come from a quick moment of the machine."""
    document = steady_run.document
    recommended = document["recommended"]
    rivals = [document["baseline"], document["dynamic_batching"], *document["pareto"]]
    assert all(entry["latency_p95_ms"] <= SLA_MS for entry in [recommended, *rivals])
    for entry in rivals:
        if entry["verdict"] == recommended["verdict"] == "PASS":
            assert entry["throughput_infer_per_sec"] <= recommended["throughput_infer_per_sec"]


def has_undisturbed_window(run: Run, entry: dict[str, Any]) -> bool:
    place = (str(entry["trial"]), str(entry["concurrency"]))
    windows = [row for row in run.rows() if row["confirmation"] and not row["load_generator"]]
    return any((row["trial"], row["concurrency"]) == place and row["stable"] == "true" for row in windows)


@pytest.mark.parametrize(
    ("role", "name"), [("baseline", "speedup"), ("dynamic_batching", "speedup_over_dynamic_batching")]
)
def test_the_gains_have_intervals(role: str, name: str, steady_run: Run) -> None:
    """A gain is unknown if other processes disturbed all windows of one of the two on fresh servers."""
    document = steady_run.document
    ours, theirs, gain = document["recommended"], document[role], document[name]
    if gain is None:
        assert document[f"{name}_interval"] is None
        assert not (has_undisturbed_window(steady_run, ours) and has_undisturbed_window(steady_run, theirs))
        return
    low, high = document[f"{name}_interval"]
    assert low <= gain <= high
    if role == "baseline":
        assert high > 1.3  # a batch of two takes as long as one request


def test_the_comparisons_have_their_settings(steady_run: Run) -> None:
    baseline, dynamic = steady_run.document["baseline"], steady_run.document["dynamic_batching"]
    assert (baseline["instance_count"], baseline["dynamic_batching"]) == (1, False)
    assert (dynamic["instance_count"], dynamic["dynamic_batching"], dynamic["max_queue_delay_us"]) == (1, True, 0)
    assert baseline["max_batch_size"] == dynamic["max_batch_size"] == 8
    assert baseline["mean_batch_size"] == 1
    assert dynamic["mean_batch_size"] > 1.3


def test_no_point_of_the_front_is_dominated(steady_run: Run) -> None:
    """The front is empty only if other processes disturbed every load."""
    disturbed = {(row["trial"], row["concurrency"]) for row in steady_run.rows() if row["stable"] != "true"}
    front = [(entry["throughput_infer_per_sec"], entry["latency_p95_ms"]) for entry in steady_run.document["pareto"]]
    assert front or disturbed == {(row["trial"], row["concurrency"]) for row in steady_run.rows()}
    for throughput, latency in front:
        assert not any(t >= throughput and p <= latency and (t, p) != (throughput, latency) for t, p in front)


def test_counts_equal_those_of_the_table(steady_run: Run) -> None:
    rows = steady_run.rows()
    document = steady_run.document
    searched = [row for row in rows if not row["confirmation"]]
    assert document["measurements"] == len(searched)
    assert document["confirmations"] == len(rows) - len(searched) > 0
    assert document["trials"] == len({row["trial"] for row in rows}) == 3
    measured = {(row["trial"], row["concurrency"]) for row in rows}
    for entry in (document["recommended"], document["baseline"], *document["pareto"]):
        assert (str(entry["trial"]), str(entry["concurrency"])) in measured
    for row in rows:
        assert row["model"] == "sleeper"
        assert row["status"] == "ok"
    assert all(float(row["measure_seconds"]) > 1 for row in searched), "three windows"


def test_perf_analyzer_measures_once_on_each_server_of_the_recommendation(steady_run: Run) -> None:
    confirmation = steady_run.document["confirmation"]
    assert confirmation["perf_analyzer"]["servers"] == confirmation["servers"] > 0
    load = steady_run.document["recommended"]
    checks = [row for row in steady_run.rows() if row["load_generator"]]
    checks_of_recommendation = [
        row for row in checks if (row["trial"], row["concurrency"]) == (str(load["trial"]), str(load["concurrency"]))
    ]
    assert {row["load_generator"] for row in checks} == {"perf_analyzer"}
    assert (
        len({row["confirmation"] for row in checks_of_recommendation})
        == len(checks_of_recommendation)
        == confirmation["servers"]
    )
    assert all(float(row["confirmation_error"]) > 0 for row in checks)
    ratios = confirmation["perf_analyzer"]["ratios"]
    assert all(ratio["ratio"] > 0 for ratio in ratios.values())
    if confirmation["perf_analyzer"]["pairs"] >= MIN_PAIRS:  # disturbed measurements have no pair
        assert set(ratios) == {"throughput", "latency-p95"}
    assert steady_run.info()["confirmed_by_perf_analyzer"] is None


def test_the_results_folder_is_complete(steady_run: Run) -> None:
    folder = steady_run.folder
    assert {path.name for path in folder.iterdir()} == {
        "run.json",
        "trials.csv",
        "pareto.csv",
        "best",
        "baseline",
        "report.html",
        "study.journal",
        "reference.npz",
        "logs",
    }
    logs = {path.name for path in (folder / "logs").glob("*.log")}
    assert logs == {"tritonserver.log", "perf_analyzer.log", "closed_loop.log", "commands.log"}
    commands = (folder / "logs" / "commands.log").read_text()
    assert "--model-control-mode=explicit" in commands
    assert "--concurrency-range" in commands
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    front = read_rows(folder / "pareto.csv")
    expected = [str(entry["throughput_infer_per_sec"]) for entry in steady_run.document["pareto"]]
    assert [row["throughput_infer_per_sec"] for row in front] == expected


def test_run_json_has_the_options_and_the_times(steady_run: Run) -> None:
    info = steady_run.info()
    assert info["status"] == "found"
    assert info["result"] == steady_run.document
    assert undocumented_keys(info) == []
    assert info["options"]["sla_ms"] == {"p95": SLA_MS}
    assert info["versions"]["tritonserver"] == runtime.TRITON_VERSION
    version = runtime.ensure(print).perf_analyzer_version
    assert info["versions"]["perf_analyzer"] == info["fingerprint"]["perf_analyzer"] == version
    times = info["times"]
    waited = sum(times[f"{kind}_seconds"] for kind in ("server", "load_generator", "set_up", "search"))
    assert times["own_seconds"] + waited == pytest.approx(times["wall_seconds"], abs=0.01)
    assert 0 < times["own_seconds"] < times["wall_seconds"]
    page_seconds = times["wall_seconds"] - steady_run.document["wall_seconds"]
    assert page_seconds >= 0
    assert sum(float(row["measure_seconds"]) for row in steady_run.rows()) < times["load_generator_seconds"]


def test_run_json_has_the_command_that_reproduces_the_run(steady_run: Run) -> None:
    command = "tune --sla-p95 500ms --budget 45s --max-trials 3 --seed 0 steady.yaml"
    assert steady_run.info()["command"] == command


# -- a built model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run the small model by its name, with more trials if a busy machine leaves no load steady."""
    with open_sandbox(tmp_path_factory.mktemp("built")) as sandbox:
        arguments = ["--sla-p95", "500ms", "--budget", "3m", "--max-trials", "2", "--no-confirmation"]
        arguments += ["--measurement-interval", "100ms", "--json", "mlp"]
        run = Run(sandbox, run_tune(sandbox, *arguments))
        for more in (1, 2, 3):
            if run.ended.code in FOUND:
                break
            arguments = ["--max-trials", f"{2 + more}", "--json"]
            run = Run(sandbox, run_tune(sandbox, "--resume", run.folder, *arguments))
        yield run


def test_a_built_model_is_found_by_name_from_any_folder(built: Run) -> None:
    built.assert_found()
    document = built.document
    assert document["recommended"]["latency_p95_ms"] <= SLA_MS
    assert document["model"]["name"] == "mlp"
    assert document["model"]["precision"] == "fp32"
    assert len(document["model"]["sha256"]) == 64
    assert "input_data.json" in built.info()["problem"]["input_data"]
    cpu_count = len(parse_cpus(built.info()["server_cpu_list"]))
    assert {row["cpu_count"] for row in built.rows()} == {str(cpu_count)}


def test_the_memory_is_bounded_once_the_simulator_is_compiled(steady_run: Run, built: Run) -> None:
    """The compiler of the simulator needs more; the second run reads the compiled code from the cache."""
    assert {steady_run.ended.code, built.ended.code} <= FOUND
    assert 50e6 < built.info()["times"]["peak_memory_bytes"] < 350e6


def test_notes_name_the_backend_and_the_cpus(built: Run) -> None:
    notes = " ".join(built.document["notes"])
    assert "own Python-based onnxruntime backend" in notes
    if not hardware.gpu_names():
        assert "server and load generator share" in notes or "the load generator on CPU" in notes


def test_the_best_configuration_loads_unchanged(built: Run, tmp_path: Path) -> None:
    text = (built.folder / "best" / "config.pbtxt").read_text()
    config = text_format.Parse(text, ModelConfig())
    recommended = built.document["recommended"]
    candidate = model_config.candidate_of(config)
    assert [getattr(candidate, name) for name in PARAMETERS if name != "preferred_batch_sizes"] == [
        recommended[name] for name in PARAMETERS if name != "preferred_batch_sizes"
    ]
    profile = load_profile(find_profile("mlp"))
    assert isinstance(profile.model, BuiltModel)
    mlp = build(
        "mlp", profile.model.settings, cache=cache_folder(), max_batch_size=32, kind="KIND_CPU", on_progress=print
    )
    shutil.copytree(mlp.repository / "mlp" / "1", tmp_path / "repository" / "mlp" / "1")
    shutil.copy(built.folder / "best" / "config.pbtxt", tmp_path / "repository" / "mlp")
    source = read_repository_model(tmp_path / "repository", "mlp", gpu=False)
    assert model_config.to_text(source.config) == text  # so that the server reads these very bytes
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with (
        contextlib.closing(target),
        target.deploy(candidate, fresh=True) as endpoint,
        InferenceServerClient(endpoint.grpc) as client,
    ):
        assert client.is_model_ready("mlp")


def test_the_recommendation_is_tested_separately(sandbox: Sandbox) -> None:
    """The model sleeps, because one that computes would take both cores during all windows."""
    write_steady(sandbox.working_folder)
    arguments = ["--sla-p95", "500ms", "--max-trials", "2", "--no-confirmation", "--json", "steady.yaml"]
    run = Run(sandbox, run_tune(sandbox, *arguments))
    run.assert_found()
    before = (run.folder / "trials.csv").read_bytes()
    ended = run_tune(sandbox, "verify", "--fresh", run.folder.relative_to(sandbox.working_folder), "--json")
    assert (run.folder / "trials.csv").read_bytes() == before
    assert ended.errors == []
    document = json.loads(ended.stdout)
    assert ended.code == (0 if document["holds"] else 1)
    assert document["holds"] == (document["verdict_holds"] and document["ranking_holds"])
    assert document["failed"] == []
    winner = document["measured"][0]
    assert winner["confirmation"]["servers"] >= (LOOKS[0] if document["verdict_holds"] else 1)
    assert (winner["confirmation"]["verdict"] == "PASS") == document["verdict_holds"]
    for name in PARAMETERS:
        assert winner[name] == run.document["recommended"][name]
    folder = sandbox.working_folder / document["results_dir"]
    assert folder.parent == run.folder / "verify"
    assert (folder / "reference.npz").read_bytes() == (run.folder / "reference.npz").read_bytes()
    assert json.loads((folder / "verify.json").read_text()) == document
    assert (folder / "trials.csv").read_text().count("\n") > 24


def test_the_test_of_a_run_continues_where_it_ended(steady_run: Run) -> None:
    """The plan is not made again, no row is lost, and the result is that of the run with all its windows."""
    before, info = steady_run.rows(), steady_run.info()
    drawn_ns = (steady_run.folder / "report.html").stat().st_mtime_ns
    plan = info["confirmation_plan"]
    tested = {row["trial"] for row in before if row["confirmation_error"]}
    assert tested <= {str(number) for number in plan["finalists"]}
    folder = steady_run.folder.relative_to(steady_run.sandbox.working_folder)
    for budget in ("1s", "10s"):  # the first one is too short for any server
        ended = run_tune(steady_run.sandbox, "verify", "--budget", budget, folder, "--json")
        assert ended.errors == []
        document = json.loads(ended.stdout)
        rows, after = steady_run.rows(), steady_run.info()
        assert rows[: len(before)] == before
        assert (len(rows) == len(before)) or budget == "10s"
        continued = after["confirmation_plan"]
        assert continued | {"predictions": {}} == plan | {"predictions": {}}
        assert continued["predictions"].keys() == plan["predictions"].keys()
        for number in tested:  # those of another candidate may be corrected before its first test
            assert continued["predictions"][number] == plan["predictions"][number]
        assert after["result"] == document
        assert ended.code == {"PASS": 0, "UNDECIDED": 4}[document["verdict"]]
        assert document["status"] == "found"
        for name in ("command", "options", "search_ended", "fingerprint"):
            assert after[name] == info[name]
        assert not any(row["confirmation"] == "" for row in rows[len(before) :]), "nothing is searched"
        errors = {(row["trial"], row["confirmation_error"]) for row in rows if row["confirmation_error"]}
        assert sum(float(error) for _, error in errors) <= plan["error"] * (1 + 1e-9)
        left = ("the tests are not complete: ", "the time ended before the tests were complete: ")
        state = ("the tests on fresh servers are complete", *left)
        assert sum(note.startswith(state) for note in document["notes"]) == 1
        before = rows
    assert (steady_run.folder / "report.html").stat().st_mtime_ns > drawn_ns


# -- none -------------------------------------------------------------------------------------------------------


@pytest.mark.alone  # next to other tests, one request at a time may take longer than four
def test_a_missed_sla_shows_the_closest_configuration_and_the_reason(sandbox: Sandbox) -> None:
    """The load goes over HTTP and the result is text."""
    arguments = ["-v", "--sla-p95", "5us", "--max-trials", "1", "--budget", "120s", "--protocol", "http"]
    arguments += ["--measurement-interval", "500ms", "steady.yaml"]
    write_steady(sandbox.working_folder)
    for _ in range(ATTEMPTS):  # an unstable measurement, on a disturbed machine, is not the closest
        shutil.rmtree(sandbox.working_folder / "results", ignore_errors=True)
        run = Run(sandbox, run_tune(sandbox, *arguments))
        if all(row["stable"] == "true" for row in run.rows()):
            break
    assert (run.ended.code, run.ended.stderr) == (1, "")
    assert "a single inference takes" in run.ended.stdout
    info = run.info()
    assert (info["status"], info["verdict"]) == ("none", "FAIL")
    result = info["result"]
    assert result["recommended"] is None
    assert result["speedup"] is None
    assert result["closest"]["concurrency"] == 1
    milliseconds = result["closest"]["latency_p95_ms"]
    assert result["no_recommendation_reason"].startswith(
        f"a single inference takes {formatting.number(milliseconds)} ms"
    )  # may name disturbances
    assert milliseconds > 8
    assert f"{formatting.number(milliseconds)} ms" in run.ended.stdout
    assert "http" in info["command"]
    assert info["confirmed_by_perf_analyzer"] == "http"
    (note,) = (note for note in info["notes"] if note.startswith("perf_analyzer measures the confirmation"))
    assert note.endswith("because the load is sent over HTTP, and that client speaks gRPC only")
    assert "HTTP" in (run.folder / "logs" / "perf_analyzer.log").read_text()
    assert not (run.folder / "best").exists()
    (shown,) = (line for line in run.ended.stdout.splitlines() if line.startswith("results "))
    assert sandbox.working_folder / shown.removeprefix("results ").strip() == run.folder


def test_the_result_is_shown_before_the_page_is_drawn_and_an_interrupt_waits_for_the_page(
    sandbox: Sandbox,
) -> None:
    write_steady(sandbox.working_folder)
    arguments = ["--sla-p95", "500ms", "--max-trials", "1", "--no-confirmation", "steady.yaml"]
    process = sandbox.fork(*arguments, REPORT)
    assert process.stdout is not None
    shown = next(line for line in iter(process.stdout.readline, "") if line.startswith("report "))
    page = sandbox.working_folder / shown.removeprefix("report ").strip()
    assert not page.exists()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, stderr) == (130, "tune: interrupted\n")
    assert page.read_text().rstrip().endswith("</html>")
    info = json.loads((page.parent / "run.json").read_text())
    assert info["status"] == "found"
    assert (page.parent / "best").is_dir()


def test_an_interrupt_just_before_the_page_is_drawn_waits_for_it(sandbox: Sandbox) -> None:
    script = sandbox.working_folder / "interrupted.py"
    script.write_text(INTERRUPTED_BEFORE_THE_PAGE)
    write_steady(sandbox.working_folder)
    arguments = ["--sla-p95", "500ms", "--max-trials", "1", "--no-confirmation", "steady.yaml"]
    process = sandbox.start(*arguments, REPORT, under=(sys.executable, str(script)))
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, stderr.splitlines()[-1]) == (130, "tune: interrupted")
    shown = next(line for line in stdout.splitlines() if line.startswith("report "))
    page = sandbox.working_folder / shown.removeprefix("report ").strip()
    assert page.read_text().rstrip().endswith("</html>")
