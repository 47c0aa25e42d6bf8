"""The reference models: their outputs, request data and cache."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.model.builders import BUILDERS, build, load_builder
from optimizer.model.builders.builder import Draft, ModelFacts, ReferenceModel
from optimizer.model.builders.dense import (
    CARDINALITIES,
    MLP_BUILDER,
    SAMPLES,
    DlrmSettings,
    MlpSettings,
    table_indices,
    table_rows,
)
from tests.built_models import Array, model_file, obtain, run, weights_of

SMALL_DLRM: dict[str, Any] = {"max_rows_per_table": 100, "samples": 64}
SMALL: dict[str, dict[str, Any]] = {
    "dlrm": SMALL_DLRM,
    "bert": {"size": "tiny", "sequence": 16},
    "resnext": {"depth": "50", "image": 32},
    "text_recognition": {"width": 32},
}
IN_PYTHON = {"accumulator", "gru", "minilm", "tinygpt"}  # the ONNX part of minilm is minilm_model


def requests_of(source: ModelSource) -> list[dict[str, bytes]]:
    assert source.input_data is not None
    entries = json.loads(source.input_data.read_text(encoding="utf-8"))["data"]
    return [{name: base64.b64decode(value["b64"]) for name, value in entry.items()} for entry in entries]


def reference_dlrm(weights: dict[str, Array], dense: Array, indices: Array, rows: list[int]) -> Array:
    """Compute DLRM sample by sample in double precision, sharing only the weights with the graph."""
    w = {name: values.astype(np.float64) for name, values in weights.items() if values.dtype.kind == "f"}

    def layer(x: Array, name: str) -> Array:
        out: Array = x @ w[f"{name}.weight"] + w[f"{name}.bias"]
        return out

    logits = []
    for features, ids in zip(dense.astype(np.float64), indices, strict=True):
        x = features
        for i in range(3):
            x = np.maximum(layer(x, f"bottom.{i}"), 0)
        vectors = [x]
        start = 0
        for size, index in zip(rows, ids, strict=True):
            vectors.append(w["embedding"][start + int(index) % size])
            start += size
        pairs = [float(vectors[i] @ vectors[j]) for i in range(27) for j in range(i)]
        x = np.array([*x, *pairs, 0.0])
        assert x.shape == (480,)
        for i in range(4):
            x = np.maximum(layer(x, f"top.{i}"), 0)
        logits.append(layer(x, "top.4"))
    return np.array(logits)


# --- outputs ---


def test_the_uncapped_tables_are_the_published_ones() -> None:
    assert sum(table_rows(None)) == 32_709_138
    assert sum(table_rows(None)) * 128 * 4 == pytest.approx(16.7e9, rel=0.01)
    assert sum(table_rows(100_000)) == 913_033
    assert max(table_rows(100)) == 100
    assert min(table_rows(100)) == 4


def test_dlrm_has_the_published_parameters(tmp_path: Path) -> None:
    facts = obtain(tmp_path, "dlrm", **SMALL_DLRM).facts
    rows = sum(min(n, 100) for n in CARDINALITIES)
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    top = 480 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert bottom + top == 2_369_921
    assert facts["rows"] == rows
    assert facts["parameters"] == rows * 128 + bottom + top
    assert facts["embedding_bytes"] == rows * 128 * 4


def test_dlrm_computes_the_published_formulas(tmp_path: Path) -> None:
    source = obtain(tmp_path, "dlrm", **SMALL_DLRM)
    rng = np.random.default_rng(1)
    dense = rng.uniform(0, 5, (6, 13)).astype(np.float32)
    indices = rng.integers(0, CARDINALITIES, (6, 26))
    expected = reference_dlrm(weights_of(source), dense, indices, [min(n, 100) for n in CARDINALITIES])
    actual = run(source, input__0=dense, input__1=indices)[0]
    assert actual.shape == (6, 1)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert np.std(expected) > 0.1, "outputs that do not vary would hide a wrong graph"


def test_dlrm_in_half_precision_computes_the_published_formulas(tmp_path: Path) -> None:
    source = obtain(tmp_path, "dlrm", **SMALL_DLRM, precision="fp16")
    rng = np.random.default_rng(2)
    dense = rng.uniform(0, 5, (6, 13)).astype(np.float16)
    indices = rng.integers(0, CARDINALITIES, (6, 26))
    weights = weights_of(source)
    assert weights["embedding"].dtype == np.float16
    expected = reference_dlrm(weights, dense, indices, [min(n, 100) for n in CARDINALITIES])
    actual = run(source, input__0=dense, input__1=indices)[0]
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, expected, rtol=0.05, atol=0.05)


def test_any_int64_is_a_valid_index(tmp_path: Path) -> None:
    source = obtain(tmp_path, "dlrm", **SMALL_DLRM)
    bounds = np.iinfo(np.int64)
    indices = np.array([[bounds.min] * 26, [-1] * 26, [bounds.max] * 26], np.int64)
    dense = np.ones((3, 13), np.float32)
    expected = reference_dlrm(weights_of(source), dense, indices, [min(n, 100) for n in CARDINALITIES])
    np.testing.assert_allclose(run(source, input__0=dense, input__1=indices)[0], expected, rtol=1e-4, atol=1e-4)


def test_the_embedding_table_lies_in_its_own_file(tmp_path: Path) -> None:
    source = obtain(tmp_path, "dlrm", **SMALL_DLRM)
    table = model_file(source).with_name("embedding.bin")
    assert table.stat().st_size == source.facts["embedding_bytes"]
    assert source.facts["model_bytes"] == table.stat().st_size + model_file(source).stat().st_size


def test_mlp_computes_dense_layers_with_relu(tmp_path: Path) -> None:
    source = obtain(tmp_path, layers=2, hidden_width=32)
    w = weights_of(source)
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    expected = x.astype(np.float64)
    for i in range(3):
        expected = expected @ w[f"layer.{i}.weight"] + w[f"layer.{i}.bias"]
        expected = np.maximum(expected, 0) if i < 2 else expected
    np.testing.assert_allclose(run(source, input=x)[0], expected, rtol=1e-4, atol=1e-5)
    assert source.facts["parameters"] == 64 * 32 + 32 + 32 * 32 + 32 + 32 * 8 + 8


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - IN_PYTHON))
def test_models_pass_the_checker_and_match_their_description(builder: str, tmp_path: Path) -> None:
    source = obtain(tmp_path, builder, **SMALL.get(builder, {}))
    onnx.checker.check_model(str(model_file(source)), full_check=True)
    model = onnx.load(str(model_file(source)), load_external_data=False)
    assert model.ir_version <= 10, "old runtimes"
    assert model.opset_import[0].version <= 21
    chosen = load_builder(builder)
    interface = chosen.interface(chosen.parse(SMALL.get(builder, {})))
    assert chosen.source
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [tensor for tensor in model.graph.input if tensor.name not in weights]
    for described, tensors in ((interface.inputs, inputs), (interface.outputs, model.graph.output)):
        assert [(item.name, *of_onnx(item)) for item in tensors] == [
            (item.name, item.datatype, item.dims) for item in described
        ]


def of_onnx(tensor: onnx.ValueInfoProto) -> tuple[str, tuple[int, ...]]:
    """Return Triton's type and dims without the batch dimension."""
    kind = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.INT32: "INT32", onnx.TensorProto.INT64: "INT64"}
    dims = tuple(dim.dim_value or -1 for dim in tensor.type.tensor_type.shape.dim)
    return kind[tensor.type.tensor_type.elem_type], dims[1:]


# --- configurations ---


def test_the_baseline_has_one_instance_and_no_dynamic_batching(tmp_path: Path) -> None:
    source = obtain(tmp_path, "dlrm", **SMALL_DLRM, precision="fp16")
    config = source.config
    assert (source.name, config.name, config.platform) == ("dlrm", "dlrm", "onnxruntime_onnx")
    assert config.max_batch_size == 64
    assert not config.HasField("dynamic_batching")
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 2)]  # 2 is KIND_CPU
    interface = {t.name: (t.data_type, list(t.dims)) for t in [*config.input, *config.output]}
    assert interface == {"input__0": (10, [13]), "input__1": (9, [26]), "output__0": (10, [1])}
    text = (source.repository / "dlrm" / "config.pbtxt").read_text(encoding="utf-8")
    assert text_format.Parse(text, ModelConfig()) == config


def test_another_max_batch_size_shares_the_weights(tmp_path: Path) -> None:
    messages: list[str] = []
    first = obtain(tmp_path)
    second = build("mlp", {}, cache=tmp_path, max_batch_size=8, kind="KIND_GPU", on_progress=messages.append)
    assert messages == []
    assert model_file(first).samefile(model_file(second))
    assert (second.config.max_batch_size, second.config.instance_group[0].kind) == (8, 1)  # 1 is KIND_GPU
    assert obtain(tmp_path).config.max_batch_size == 64
    assert first.facts == second.facts
    assert first.repository != second.repository


# --- request data ---


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("fp16", 2)])
def test_dlrm_requests_have_the_right_shapes_and_valid_indices(precision: str, width: int, tmp_path: Path) -> None:
    requests = requests_of(obtain(tmp_path, "dlrm", **SMALL_DLRM, precision=precision))
    assert len(requests) == 64
    assert {(len(r["input__0"]), len(r["input__1"])) for r in requests} == {(13 * width, 26 * 8)}
    dense = np.array([np.frombuffer(r["input__0"], f"<f{width}") for r in requests])
    assert np.isfinite(dense).all()
    assert dense.std() > 0.5
    indices = np.array([np.frombuffer(r["input__1"], "<i8") for r in requests])
    assert (indices >= 0).all()
    assert (indices < np.array(CARDINALITIES)).all()


def test_dlrm_indices_are_skewed_scattered_and_many() -> None:
    indices = table_indices(SAMPLES, CARDINALITIES, np.random.default_rng(0))
    rows, counts = np.unique(indices[:, 0], return_counts=True)
    hottest = rows[np.argsort(counts)[-8:]]
    assert counts.max() > 100 * np.median(counts)
    assert np.diff(np.sort(hottest)).min() > 1000
    capped = np.minimum(CARDINALITIES, 100_000)
    distinct = sum(len(np.unique(column)) for column in (indices % capped).T)
    assert distinct * 512 > 36e6


def test_mlp_requests_have_the_right_shape(tmp_path: Path) -> None:
    requests = requests_of(obtain(tmp_path, samples=3))
    assert [len(r["input"]) for r in requests] == [64 * 4] * 3


# --- the cache ---


def fingerprint(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def test_a_second_build_writes_nothing(tmp_path: Path) -> None:
    messages: list[str] = []
    first = build("mlp", {}, cache=tmp_path, max_batch_size=64, kind="KIND_CPU", on_progress=messages.append)
    assert messages == ["building mlp: 2 hidden layers of 256"]
    before = fingerprint(tmp_path)
    second = build("mlp", {}, cache=tmp_path, max_batch_size=64, kind="KIND_CPU", on_progress=messages.append)
    assert len(messages) == 1
    assert second == first
    assert fingerprint(tmp_path) == before


def test_only_settings_determine_the_content(tmp_path: Path) -> None:
    same = [obtain(tmp_path / place, "dlrm", **SMALL_DLRM).facts["sha256"] for place in ("a", "b")]
    assert same[0] == same[1]
    assert obtain(tmp_path / "a", "dlrm", **SMALL_DLRM, seed=1).facts["sha256"] != same[0]


def test_defaults_and_the_same_values_written_out_are_one_model(tmp_path: Path) -> None:
    assert obtain(tmp_path).repository == obtain(tmp_path, **MlpSettings().model_dump()).repository


@pytest.mark.parametrize("damage", ["truncate", "delete", "no built.json", "bad built.json"])
def test_a_damaged_model_is_rebuilt(damage: str, tmp_path: Path) -> None:
    source = obtain(tmp_path)
    built = source.repository / "built.json"
    content = model_file(source).read_bytes()
    match damage:
        case "truncate":
            model_file(source).write_bytes(content[:-1])
        case "delete":
            model_file(source).unlink()
        case "no built.json":
            built.unlink()
        case "bad built.json":
            built.write_text("[]", encoding="utf-8")
    messages: list[str] = []
    rebuilt = build("mlp", {}, cache=tmp_path, max_batch_size=64, kind="KIND_CPU", on_progress=messages.append)
    assert len(messages) == 1
    assert rebuilt == source
    assert model_file(rebuilt).read_bytes() == content
    assert not list((tmp_path / "models").glob(".*.old"))


def test_a_killed_build_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    """A process dies with half of the model written; the next build removes it and starts over."""
    script = textwrap.dedent(f"""
        import os, signal
        from dataclasses import replace
        from pathlib import Path
        from optimizer.model.builders.builder import ReferenceModel
        from optimizer.model.builders.dense import MLP_BUILDER, MlpSettings
        def write(settings, draft):
            (draft.version / "model.onnx").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        model = ReferenceModel(replace(MLP_BUILDER, write=write), MlpSettings(), 64, "KIND_CPU")
        model.find_or_build(Path({str(tmp_path)!r}), print)
    """)
    killed = subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    models = tmp_path / "models"
    assert [p.name for p in models.iterdir() if not p.name.startswith(".")] == []
    assert list(models.glob(".*.partial"))
    source = obtain(tmp_path)
    assert run(source, input=np.zeros((1, 64), np.float32))[0].shape == (1, 8)
    assert not list(models.glob(".*.partial"))


def test_builds_at_the_same_time_build_once(tmp_path: Path) -> None:
    messages: list[str] = []
    sources: list[ModelSource] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        sources.append(
            build("mlp", {}, cache=tmp_path, max_batch_size=64, kind="KIND_CPU", on_progress=messages.append)
        )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources) == 4
    assert all(source == sources[0] for source in sources)
    assert sum(line.startswith("building") for line in messages) == 1


def test_a_failing_build_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    def write(_settings: MlpSettings, draft: Draft) -> ModelFacts:
        (draft.version / "model.onnx").write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    model = ReferenceModel(replace(MLP_BUILDER, write=write), MlpSettings(), 64, "KIND_CPU")
    with pytest.raises(EnvironmentFault, match=r"cannot build mlp in .*: No space left on device") as caught:
        model.find_or_build(tmp_path, lambda _: None)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; free space there, or set TRITUNE_CACHE to another folder")
    assert list((tmp_path / "models").iterdir()) == []


# --- settings ---


def test_bad_requests_build_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="max_batch_size of mlp"):
        build("mlp", {}, cache=tmp_path, max_batch_size=0, kind="KIND_CPU", on_progress=lambda _: None)
    with pytest.raises(ValidationError, match="nosuch"):
        obtain(tmp_path, nosuch=1)
    assert list(tmp_path.iterdir()) == []


def test_tables_can_be_uncapped() -> None:
    settings = load_builder("dlrm").parse({"max_rows_per_table": None})
    assert isinstance(settings, DlrmSettings)
    assert settings.max_rows_per_table is None


def test_importing_the_registry_loads_no_onnx() -> None:
    script = (
        "import sys, optimizer.model.builders; print([m for m in ('onnx', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
