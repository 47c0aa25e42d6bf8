"""A bare ONNX file and the folder of a model, from their paths to a configuration, on the real server."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config import model_config
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.server_calls import open_client
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import Run, Sandbox, assert_search_ended, run_tune
from tests.repositories import (
    doubler,
    onnx_model,
    serialized,
    skip_without_python_models,
    sleeper_program,
    write_model,
    write_python_model,
    write_sleeper,
)

SLA_MS = 500.0
UNBATCHED = """\
name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [16, 4] }
output { name: "y" data_type: TYPE_FP32 dims: [16, 4] }
"""


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


def test_bare_file_with_external_weights_is_tuned_and_unchanged(sandbox: Sandbox) -> None:
    """The file is in its own folder and its name is not one of Triton's."""
    model = onnx_model(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        {"x": (TensorProto.FLOAT, ("n", 4))},
        {"y": (TensorProto.FLOAT, ("n", 4))},
    )
    factor = model.graph.initializer.add(name="factor", data_type=TensorProto.FLOAT, dims=[1])
    factor.data_location = TensorProto.EXTERNAL
    factor.external_data.add(key="location", value="factor.bin")
    folder = sandbox.working_folder / "my export"
    folder.mkdir()
    (folder / "net v2.onnx").write_bytes(serialized(model))
    (folder / "factor.bin").write_bytes(np.array([3], np.float32).tobytes())
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}

    arguments = [
        "--sla-p95",
        "500ms",
        "--budget",
        "3m",
        "--max-trials",
        "1",
        "--no-confirmation",
        "--measurement-interval",
        "100ms",
        "--json",
        "my export/net v2.onnx",
    ]
    run = Run(sandbox, run_tune(sandbox, *arguments))
    assert_measured(run)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert run.folder.parent.name == "net_v2"
    assert run.document["model"]["model_bytes"] == sum(len(data) for data, _ in before.values())
    if run.info()["status"] == "none":
        return  # there is no best configuration
    config = text_format.Parse((run.folder / "best" / "config.pbtxt").read_text(), ModelConfig())
    assert (config.name, config.platform, config.max_batch_size) == ("net_v2", "onnxruntime_onnx", 64)
    assert [(tensor.name, list(tensor.dims)) for tensor in (*config.input, *config.output)] == [
        ("x", [4]),
        ("y", [4]),
    ]


def test_model_folder_without_batches_is_tuned_and_unchanged(sandbox: Sandbox) -> None:
    folder = write_model(sandbox.working_folder / "models", "m", UNBATCHED, doubler(dims=(16, 4)))
    before = bytes_of(sandbox.working_folder / "models")
    arguments = ["-v", "--sla-p95", "500ms", "--measurement-interval", "100ms", "--budget", "90s"]
    arguments += ["--max-trials", "1", "--no-confirmation"]
    run = Run(sandbox, run_tune(sandbox, *arguments, folder.relative_to(sandbox.working_folder)))
    assert_measured(run)
    assert bytes_of(sandbox.working_folder / "models") == before
    assert {(row["max_batch_size"], row["dynamic_batching"]) for row in run.rows()} == {("0", "false")}
    assert run.info()["problem"]["space"]["max_batch_size"] == [0]
    assert f"tune {' '.join(arguments[1:])} --seed 0 models/m" in run.ended.stdout


def test_a_python_model_imports_from_the_folders_of_the_users_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_python_models()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helpers.py").write_text("")
    unreadable = tmp_path / (300 * "a")  # as a folder without permission, it cannot even be looked up
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}:{tmp_path / 'gone'}:{unreadable}")
    write_python_model(tmp_path / "models", "sleeper", f"import helpers\n{sleeper_program(0)}")
    source = read_repository_model(tmp_path / "models", "sleeper", gpu=False)
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with contextlib.closing(target), target.deploy(model_config.candidate_of(source.config)) as endpoint:
        assert endpoint.model == "sleeper"


def test_the_server_can_list_its_models_although_a_file_next_to_them_vanished(tmp_path: Path) -> None:
    """It lists them to see whether an unload has ended."""
    skip_without_python_models()
    models = tmp_path / "models"
    write_sleeper(models, milliseconds=0)
    (models / "gone").symlink_to("nowhere")
    (models / "draft.txt").write_text("")
    source = read_repository_model(models, "sleeper", gpu=False)
    candidate = model_config.candidate_of(source.config)
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))) as target:
        for _ in range(2):
            with target.deploy(candidate) as endpoint, contextlib.closing(open_client(endpoint.connection)) as client:
                assert client.index()["sleeper"]
            (models / "draft.txt").unlink(missing_ok=True)
