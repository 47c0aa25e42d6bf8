"""A bare ONNX file, from its path to a configuration, on the real server."""

from __future__ import annotations

import numpy as np
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.command_fixtures import Playground, Run, run_tune
from tests.repositories import onnx_model, serialized
from tests.stack.test_own_repositories import assert_measured


def test_bare_file_with_external_weights_is_tuned_and_unchanged(playground: Playground) -> None:
    """The file is in its own folder and its name is not one of Triton's."""
    model = onnx_model(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        {"x": (TensorProto.FLOAT, ("n", 4))},
        {"y": (TensorProto.FLOAT, ("n", 4))},
    )
    factor = model.graph.initializer.add(name="factor", data_type=TensorProto.FLOAT, dims=[1])
    factor.data_location = TensorProto.EXTERNAL
    factor.external_data.add(key="location", value="factor.bin")
    folder = playground.working_folder / "my export"
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
    run = Run(playground, run_tune(playground, *arguments))
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
