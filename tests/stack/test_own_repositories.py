"""A user's own Triton repository and model folder, from the command to a configuration, on the real server."""

from __future__ import annotations

from pathlib import Path

from optimizer.machine import hardware
from tests.command_fixtures import Playground, Run, run_tune
from tests.repositories import doubler, write_model

SLA_MS = 500.0


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_measured(run: Run) -> None:
    """Every load gave figures; whether any was steady enough to recommend is this machine's affair."""
    status = run.info()["status"]
    assert (run.ended.code, run.ended.stderr) == ({"found": 0, "none": 1}[status], "")
    rows = run.rows()
    assert rows
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["throughput_infer_per_sec"]) > 0
        assert 0 < float(row["latency_p95_ms"]) < SLA_MS
    assert (status == "found") is any(row["stable"] == "true" for row in rows)


BARE = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
UNBATCHED = """\
name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [16, 4] }
output { name: "y" data_type: TYPE_FP32 dims: [16, 4] }
"""


def test_a_bare_repository_is_tuned_and_left_as_it_is(playground: Playground) -> None:
    """Its config.pbtxt names no inputs, outputs or instances; the study goes to a database."""
    write_model(playground.here / "models", "m", BARE, doubler())
    before = bytes_of(playground.here / "models")
    arguments = ["--sla-p95", "500ms", "--budget", "5s", "--max-trials", "1", "--storage", "sqlite:///study.db"]
    run = Run(playground, run_tune(playground, *arguments, "--json", "--model-repository", "models", "m"))
    assert_measured(run)
    assert bytes_of(playground.here / "models") == before
    # what Triton makes of it on a CPU: two instances
    settings = {(row["max_batch_size"], row["dynamic_batching"], row["instance_count"]) for row in run.rows()}
    assert settings == {("8", "false", "1" if hardware.gpu_names() else "2")}
    assert run.document["trials"] == 1
    assert (playground.here / "study.db").stat().st_size > 0
    assert not (run.folder / "study.journal").exists()


def test_a_model_folder_without_batches_is_tuned_and_left_as_it_is(playground: Playground) -> None:
    folder = write_model(playground.here / "models", "m", UNBATCHED, doubler(dims=(16, 4)))
    before = bytes_of(playground.here / "models")
    arguments = ["--sla-p95", "500ms", "--budget", "5s", "--max-trials", "1"]
    run = Run(playground, run_tune(playground, *arguments, folder.relative_to(playground.here)))
    assert_measured(run)
    assert bytes_of(playground.here / "models") == before
    assert {(row["max_batch_size"], row["dynamic_batching"]) for row in run.rows()} == {("0", "false")}
    assert run.info()["problem"]["space"]["max_batch_size"] == [0]
    assert "tune --sla-p95 500ms --budget 5s --max-trials 1 --seed 0 models/m" in run.ended.stdout
