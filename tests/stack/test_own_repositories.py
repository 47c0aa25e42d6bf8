"""A user's own Triton repository and model folder, from the command to a configuration, on the real server."""

from __future__ import annotations

from pathlib import Path

from optimizer.machine import hardware
from tests.command_fixtures import Playground, Run, assert_search_ended, run_tune
from tests.repositories import doubler, write_model

SLA_MS = 500.0


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_measured(run: Run) -> None:
    """Assert that every load was measured; whether one was stable enough to recommend depends on the machine."""
    assert_search_ended(run.ended, run.folder)
    rows = run.rows()
    assert rows
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["throughput_infer_per_sec"]) > 0
        assert 0 < float(row["latency_p95_ms"]) < SLA_MS


BARE = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
UNBATCHED = """\
name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [16, 4] }
output { name: "y" data_type: TYPE_FP32 dims: [16, 4] }
"""


def test_bare_repository_is_tuned_and_unchanged(playground: Playground) -> None:
    """config.pbtxt has no inputs, outputs or instances; the study is stored in a database."""
    write_model(playground.working_folder / "models", "m", BARE, doubler())
    before = bytes_of(playground.working_folder / "models")
    arguments = [
        "--sla-p95",
        "500ms",
        "--budget",
        "90s",
        "--max-trials",
        "1",
        "--no-confirmation",
        "--measurement-interval",
        "100ms",
        "--storage",
        "sqlite:///study.db",
    ]
    run = Run(playground, run_tune(playground, *arguments, "--json", "--model-repository", "models", "m"))
    assert_measured(run)
    assert bytes_of(playground.working_folder / "models") == before
    # Triton's default on a CPU: two instances
    settings = {(row["max_batch_size"], row["dynamic_batching"], row["instance_count"]) for row in run.rows()}
    assert settings == {("8", "false", "1" if hardware.gpu_names() else "2")}
    assert run.document["trials"] == 1
    assert (playground.working_folder / "study.db").stat().st_size > 0
    assert not (run.folder / "study.journal").exists()


def test_model_folder_without_batches_is_tuned_and_unchanged(playground: Playground) -> None:
    folder = write_model(playground.working_folder / "models", "m", UNBATCHED, doubler(dims=(16, 4)))
    before = bytes_of(playground.working_folder / "models")
    arguments = ["-v", "--sla-p95", "500ms", "--measurement-interval", "100ms", "--budget", "90s"]
    arguments += ["--max-trials", "1", "--no-confirmation"]
    run = Run(playground, run_tune(playground, *arguments, folder.relative_to(playground.working_folder)))
    assert_measured(run)
    assert bytes_of(playground.working_folder / "models") == before
    assert {(row["max_batch_size"], row["dynamic_batching"]) for row in run.rows()} == {("0", "false")}
    assert run.info()["problem"]["space"]["max_batch_size"] == [0]
    assert f"tune {' '.join(arguments[1:])} --seed 0 models/m" in run.ended.stdout
