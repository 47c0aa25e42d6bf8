"""Requests that tune records or generates reach the model, and an embedding fails with random integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc.service_pb2 import ModelInferRequest

from optimizer.measure.output_comparison import ReferenceOutputs
from optimizer.model.requests import MAX_GENERATED_SAMPLES
from tests.command_fixtures import Run, Sandbox, run_tune
from tests.csv_tables import read_rows
from tests.repositories import onnx_model, skip_without_python_models, write_model, write_python_model

ROWS = 10
CONFIG = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
CSV = "label,ids\n" + "".join(f'0,"{[i % ROWS] * (2 + i % 3)}"\n' for i in range(12))
ONE = (
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
)


def write_embedding(repository: Path) -> None:
    """Write a model ``ids`` -> ``y``, the sum of rows of a table. Its graph shows the rows only if it is computed."""
    nodes = [
        helper.make_node("Abs", ["ids"], ["positive"]),
        helper.make_node("Gather", ["table", "positive"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "words"], ["y"], keepdims=0),
    ]
    model = onnx_model(nodes, {"ids": (TensorProto.INT64, ("b", "n"))}, {"y": (TensorProto.FLOAT, ("b", 4))})
    table = np.arange(4 * ROWS, dtype=np.float32).reshape(ROWS, 4)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "words"))
    write_model(repository, "embedding", CONFIG, model)


def test_an_embedding_is_tuned_with_recorded_requests_and_refuses_random_ones(sandbox: Sandbox) -> None:
    write_embedding(sandbox.working_folder / "models")
    (sandbox.working_folder / "d.csv").write_text(CSV)

    random = run_tune(sandbox, "--shape", "ids:16", "models/embedding")
    assert random.code == 2
    assert "out of data bounds" in random.stderr_lines[0]
    assert (
        "the random data of ids, which may be an index, includes all integers of its type" in random.stderr_lines[0]
    )
    assert f"--input-range ids:0..{ROWS - 1}, or real requests with --input-data FILE" in random.stderr_lines[0]

    ended = run_tune(sandbox, *ONE, "--input-data", "d.csv", "--out", "given", "models/embedding")
    document = Run(sandbox, ended).document  # the verdict may vary on a busy machine
    assert not any("not compared" in note for note in document["notes"])
    (folder,) = (sandbox.working_folder / "given").glob("*/*")
    assert all(float(row["throughput_infer_per_sec"]) > 0 for row in read_rows(folder / "trials.csv"))
    assert "1 stream/streams with 12 step/steps" in (folder / "logs" / "perf_analyzer.log").read_text()
    sent = [ModelInferRequest.FromString(item) for item in ReferenceOutputs.read(folder / "reference.npz").requests]
    assert [list(item.inputs[0].shape) for item in sent[:4]] == [[1, 2], [1, 3], [1, 4], [1, 2]]


STRICT_CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 64 }
input { name: "ids" data_type: TYPE_INT64 dims: -1 }
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 1 kind: KIND_CPU }
"""
STRICT_PROGRAM = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x, ids, text = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("x", "ids", "text")
        )
        if not np.abs(x).max() < 10:
            raise ValueError("x is out of range")
        are_different = len(set(ids[:, 0])) == len(x)
        if ids.shape != (len(x), 5) or not are_different or any(len(item) != 128 for item in text.ravel()):
            raise ValueError("not the samples of tune")
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x[:, :1])])
"""


@pytest.mark.parametrize("shared_memory", ["none", "system"])
def test_perf_analyzer_sends_the_random_requests_of_tune(sandbox: Sandbox, shared_memory: str) -> None:
    """perf_analyzer's own random floats are any bits, and a request of two samples has the same one twice."""
    skip_without_python_models()
    write_python_model(sandbox.working_folder / "models", "strict", STRICT_PROGRAM, STRICT_CONFIG)
    options = ("--shape", "ids:5", "--request-batch-size", "2", "--shared-memory", shared_memory, "--out", "out")
    ended = run_tune(sandbox, *ONE, *options, "models/strict")
    document = Run(sandbox, ended).document  # the verdict may vary on a busy machine
    assert not any("not compared" in note for note in document["notes"])
    (folder,) = (sandbox.working_folder / "out").glob("*/*")
    assert all(float(row["throughput_infer_per_sec"]) > 0 for row in read_rows(folder / "trials.csv"))
    assert f"1 stream/streams with {MAX_GENERATED_SAMPLES} step/steps" in (
        (folder / "logs" / "perf_analyzer.log").read_text()
    )
