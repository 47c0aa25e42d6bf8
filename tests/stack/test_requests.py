"""An embedding fails with random integers: the error names the fix, and recorded requests work."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc.service_pb2 import ModelInferRequest

from optimizer.measure.output_comparison import ReferenceOutputs
from tests.command_fixtures import Run, Sandbox, run_tune
from tests.repositories import onnx_model, write_model

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
    """Write a model ``ids`` -> ``y``, the sum of rows of a table."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
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
    with (folder / "trials.csv").open(newline="") as file:
        assert all(float(row["throughput_infer_per_sec"]) > 0 for row in csv.DictReader(file))
    assert "1 stream/streams with 12 step/steps" in (folder / "logs" / "perf_analyzer.log").read_text()
    sent = [ModelInferRequest.FromString(item) for item in ReferenceOutputs.read(folder / "reference.npz").requests]
    assert [list(item.inputs[0].shape) for item in sent[:4]] == [[1, 2], [1, 3], [1, 4], [1, 2]]
