"""The main job, end to end: ``tune`` on a real tritonserver with a real perf_analyzer, from a folder of its own.

Bounds are wide and loads few, so that a busy machine makes these runs slower, not their outcome another one.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.machine import hardware
from optimizer.models import build
from optimizer.profile.find import find_profile
from optimizer.profile.reader import load_profile
from optimizer.profile.schema import BuiltModel
from optimizer.sources.repository import read_repository_model
from tests.command_fixtures import REPORT, Playground, Run, playing_in, run_tune
from tests.repositories import write_sleeper

pytestmark = pytest.mark.alone

SLEEPER = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 4}
space:
  max_queue_delay_microseconds: [off, 0, 1000]
  instance_group_count: [1]
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


def write_steady(folder: Path) -> None:
    """The profile ``steady.yaml`` of a model whose batches all take 8 ms."""
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    write_sleeper(folder / "models", milliseconds=8)
    (folder / "steady.yaml").write_text(SLEEPER)


# -- a recommendation -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Three configurations of the steady model."""
    with playing_in(tmp_path_factory.mktemp("found")) as playground:
        write_steady(playground.here)
        arguments = ["--sla-p95", "500ms", "--budget", "30s", "--max-trials", "3", "--json", "steady.yaml"]
        yield Run(playground, run_tune(playground, *arguments, REPORT))


def test_it_finds_one_and_prints_one_document(found: Run) -> None:
    assert found.ended.stderr == ""
    assert found.ended.code == 0
    document = found.document
    for name in ("recommended", "baseline", "dynamic_batching"):
        assert_entry(document[name])
    for entry in document["pareto"]:
        assert_entry(entry)
    assert document["status"] == "found"
    assert document["sla"] == ["p95 <= 500 ms"]
    assert document["closest"] is None
    assert document["holds_back"] is None
    assert found.playground.here / document["results_dir"] == found.folder
    assert document["model"]["name"] == "sleeper"
    assert document["model"]["model_bytes"] > 0


def assert_entry(entry: dict[str, Any]) -> None:
    for name, kind in ENTRY.items():
        assert type(entry[name]) is kind, name
    assert entry["stable"] or entry["verdict"] == "UNDECIDED", "on a machine that was disturbed"
    assert entry["throughput_infer_per_sec"] > 0
    percentiles = [entry[f"latency_p{p}_ms"] for p in (50, 90, 95, 99)]
    assert percentiles == sorted(percentiles)
    assert 1 <= entry["concurrency"] <= 4
    assert entry["request_batch_size"] == 1
    assert 1 <= entry["mean_batch_size"] <= entry["concurrency"]
    if not entry["dynamic_batching"]:
        assert (entry["max_queue_delay_us"], entry["preferred_batch_sizes"]) == (0, [])


def test_the_recommendation_is_the_best_that_meets_the_sla(found: Run) -> None:
    """Of those known as well as it is: what the search alone saw in a quick moment of the machine is no rival."""
    document = found.document
    recommended = document["recommended"]
    rivals = [document["baseline"], document["dynamic_batching"], *document["pareto"]]
    assert all(entry["latency_p95_ms"] <= SLA_MS for entry in [recommended, *rivals])
    for entry in rivals:
        if entry["verdict"] == recommended["verdict"] and (entry["dynamic_batching"] or entry["verdict"] == "PASS"):
            assert entry["throughput_infer_per_sec"] <= recommended["throughput_infer_per_sec"]


def test_the_gains_are_the_ratios_of_the_throughputs(found: Run) -> None:
    document = found.document
    best = document["recommended"]["throughput_infer_per_sec"]
    assert document["speedup"] == pytest.approx(best / document["baseline"]["throughput_infer_per_sec"])
    plain = document["dynamic_batching"]["throughput_infer_per_sec"]
    assert document["speedup_over_dynamic_batching"] == pytest.approx(best / plain)
    assert document["speedup"] > 1.3  # two requests in the time of one, or nearly


def test_the_comparisons_are_what_they_say(found: Run) -> None:
    baseline, plain = found.document["baseline"], found.document["dynamic_batching"]
    assert (baseline["instance_count"], baseline["dynamic_batching"]) == (1, False)
    assert (plain["instance_count"], plain["dynamic_batching"], plain["max_queue_delay_us"]) == (1, True, 0)
    assert baseline["max_batch_size"] == plain["max_batch_size"] == 8
    assert baseline["mean_batch_size"] == 1
    assert plain["mean_batch_size"] > 1.3


def test_no_point_of_the_front_is_dominated(found: Run) -> None:
    front = [(entry["throughput_infer_per_sec"], entry["latency_p95_ms"]) for entry in found.document["pareto"]]
    assert front
    for throughput, latency in front:
        assert not any(t >= throughput and p <= latency and (t, p) != (throughput, latency) for t, p in front)


def test_the_counts_are_those_of_the_table(found: Run) -> None:
    rows = found.rows()
    document = found.document
    searched = [row for row in rows if not row["confirmation"]]
    assert document["measurements"] == len(searched)
    assert document["confirmations"] == len(rows) - len(searched) > 0
    assert document["trials"] == len({row["trial"] for row in rows}) == 3
    measured = {(row["trial"], row["concurrency"]) for row in rows}
    for entry in (document["recommended"], document["baseline"], *document["pareto"]):
        figures = entry["trial"], entry["concurrency"]
        assert tuple(map(str, figures)) in measured
    for row in rows:
        assert row["model"] == "sleeper"
        assert row["status"] == "ok"
    assert all(float(row["measure_seconds"]) > 1 for row in searched), "three windows"


def test_the_results_folder_is_complete(found: Run) -> None:
    folder = found.folder
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
    assert logs == {"tritonserver.log", "perf_analyzer.log", "commands.log"}
    commands = (folder / "logs" / "commands.log").read_text()
    assert "--model-control-mode=explicit" in commands
    assert "--concurrency-range" in commands
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    with (folder / "pareto.csv").open(newline="") as file:
        front = list(csv.DictReader(file))
    expected = [str(entry["throughput_infer_per_sec"]) for entry in found.document["pareto"]]
    assert [row["throughput_infer_per_sec"] for row in front] == expected


def test_the_record_says_what_was_run_and_where_the_time_went(found: Run) -> None:
    info = found.info()
    assert info["status"] == "found"
    assert info["result"] == found.document
    assert info["options"]["sla_ms"] == {"p95": SLA_MS}
    assert info["versions"]["tritonserver"] == runtime.TRITON_VERSION
    times = info["times"]
    waited = sum(times[f"{kind}_seconds"] for kind in ("server", "load_generator", "set_up", "search"))
    assert times["own_seconds"] + waited == pytest.approx(times["wall_seconds"], abs=0.01)
    assert 0 < times["own_seconds"] < times["wall_seconds"]
    drawn_seconds = times["wall_seconds"] - found.document["wall_seconds"]  # what the page took
    assert 0 <= drawn_seconds < 30
    assert sum(float(row["measure_seconds"]) for row in found.rows()) < times["load_generator_seconds"]
    assert times["peak_memory_bytes"] < 300e6


def test_the_command_that_reproduces_it_is_the_one_that_was_given(found: Run) -> None:
    command = "tune --sla-p95 500ms --budget 30s --max-trials 3 --seed 0 steady.yaml"
    assert found.info()["command"] == command


# -- a built model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The small model by its name. Where a busy machine leaves no load steady, the run is given more time."""
    with playing_in(tmp_path_factory.mktemp("built")) as playground:
        arguments = ["--sla-p95", "500ms", "--budget", "20s", "--max-trials", "2", "--measurement-interval", "100ms"]
        arguments += ["--json", "mlp"]
        run = Run(playground, run_tune(playground, *arguments))
        for more in (1, 2, 3):
            if run.ended.code != 1:
                break
            arguments = ["--budget", f"{20 + 30 * more}s", "--max-trials", f"{2 + more}", "--json"]
            run = Run(playground, run_tune(playground, "--resume", run.folder, *arguments))
        yield run


def test_a_built_model_is_found_by_name_from_any_folder(built: Run) -> None:
    assert (built.ended.code, built.ended.stderr) == (0, "")
    document = built.document
    assert document["recommended"]["latency_p95_ms"] <= SLA_MS
    assert document["model"]["name"] == "mlp"
    assert document["model"]["precision"] == "fp32"
    assert len(document["model"]["sha256"]) == 64
    assert "input_data.json" in built.info()["problem"]["input_data"]


def test_the_result_says_what_served_and_what_shared_the_cores(built: Run) -> None:
    notes = " ".join(built.document["notes"])
    assert "own Python-based onnxruntime backend" in notes
    if not hardware.gpu_names():
        assert "server and load generator share" in notes or "the load generator on CPU" in notes


def test_the_best_configuration_loads_as_it_is(built: Run, tmp_path: Path) -> None:
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
        "mlp", profile.model.settings, cache=runtime.cache_folder(), max_batch_size=32, kind="KIND_CPU", say=print
    )
    shutil.copytree(mlp.repository / "mlp" / "1", tmp_path / "repository" / "mlp" / "1")
    shutil.copy(built.folder / "best" / "config.pbtxt", tmp_path / "repository" / "mlp")
    source = read_repository_model(tmp_path / "repository", "mlp", gpu=False)
    assert model_config.to_text(source.config) == text  # so that the server reads these very bytes
    target = EmbeddedTarget(source, log=tmp_path / "tritonserver.log", say=print)
    with (
        contextlib.closing(target),
        target.deploy_as_written(candidate) as endpoint,
        InferenceServerClient(endpoint.grpc) as client,
    ):
        assert client.is_model_ready("mlp")


def test_what_was_recommended_is_verified(built: Run) -> None:
    ended = run_tune(built.playground, "verify", built.folder.relative_to(built.playground.here), "--json")
    assert ended.stderr == ""
    document = json.loads(ended.stdout)
    assert ended.code == (0 if document["holds"] else 1)
    assert document["holds"] == (document["verdict_holds"] and document["ranking_holds"])
    assert document["failed"] == []
    winner = document["found"][0]
    assert winner["confirmation"]["servers"] == 3
    assert (winner["confirmation"]["verdict"] == "PASS") == document["verdict_holds"]
    for name in PARAMETERS:
        assert winner[name] == built.document["recommended"][name]
    kept = built.playground.here / document["results_dir"]
    assert kept.parent == built.folder / "verify"
    assert (kept / "reference.npz").read_bytes() == (built.folder / "reference.npz").read_bytes()
    assert json.loads((kept / "verify.json").read_text()) == document
    assert (kept / "trials.csv").read_text().count("\n") > 24


# -- none -------------------------------------------------------------------------------------------------------


def test_where_none_meets_the_sla_the_closest_is_shown_with_what_holds_it_back(playground: Playground) -> None:
    """Over HTTP, and as text."""
    arguments = ["--sla-p95", "5us", "--max-trials", "1", "--budget", "120s", "--protocol", "http", "steady.yaml"]
    write_steady(playground.here)
    run = Run(playground, run_tune(playground, *arguments))
    assert (run.ended.code, run.ended.stderr) == (1, "")
    assert "one inference alone takes" in run.ended.stdout
    info = run.info()
    assert info["status"] == "none"
    result = info["result"]
    assert result["recommended"] is None
    assert result["speedup"] is None
    assert result["closest"]["concurrency"] == 1
    milliseconds = result["closest"]["latency_p95_ms"]
    assert result["holds_back"] == f"one inference alone takes {milliseconds:.3g} ms"
    assert milliseconds > 8
    assert f"{milliseconds:.3g} ms" in run.ended.stdout
    assert "http" in info["command"]
    assert "HTTP" in (run.folder / "logs" / "perf_analyzer.log").read_text()
    assert not (run.folder / "best").exists()
    (shown,) = (line for line in run.ended.stdout.splitlines() if line.startswith("results "))
    assert playground.here / shown.removeprefix("results ").strip() == run.folder
