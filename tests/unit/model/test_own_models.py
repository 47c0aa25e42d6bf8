"""The user's own models: configurations derived from ONNX graphs, and errors in files and repositories."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from optimizer.config.backends import backend_of
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.deploy.backends.pytorch.conventions import Parameters, cause, in_order, positions, read_parameters
from optimizer.machine.hardware import Hardware
from optimizer.model.onnx_file import (
    batch_obstacle,
    check_versions,
    derive,
    external_files,
    index_ranges,
    model_name,
    read_bare_onnx,
)
from optimizer.model.repository import (
    MAX_HASHED_BYTES,
    list_models,
    read_repository_model,
    read_source,
)
from optimizer.model.torch_file import check_torch, check_torch_file
from optimizer.options.option_reader import move_options
from optimizer.options.run_options import RunOptions, TargetName
from optimizer.study.model_finder import find_model
from tests.repositories import (
    SLEEPER_CONFIG,
    Dims,
    doubler,
    onnx_model,
    serialized,
    write_model,
    write_python_model,
)

FILE = Path("net.onnx")


def graph(inputs: dict[str, Dims], outputs: dict[str, Dims], kind: int = TensorProto.FLOAT) -> ModelProto:
    nodes = [helper.make_node("Identity", [next(iter(inputs))], [name]) for name in outputs]
    return onnx_model(
        nodes, {name: (kind, dims) for name, dims in inputs.items()}, {name: (kind, d) for name, d in outputs.items()}
    )


def tensors(config: ModelConfig) -> dict[str, list[int]]:
    return {tensor.name: list(tensor.dims) for tensor in (*config.input, *config.output)}


# -- ONNX graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "dims"),
    [
        ({"x": ("batch", 4)}, {"y": ("batch", 4)}, 64, {"x": [4], "y": [4]}),
        ({"x": ("", 4)}, {"y": ("batch", 4)}, 64, {"x": [4], "y": [4]}),
        ({"x": (0, 4)}, {"y": (0, 4)}, 64, {"x": [4], "y": [4]}),
        ({"x": ("unk__6", 4), "z": ("unk__7", 4)}, {"y": ("unk__8", 4)}, 64, {"x": [4], "z": [4], "y": [4]}),
        ({"x": ("n", 4)}, {"y": ("Gemmy_dim_0", 4)}, 64, {"x": [4], "y": [4]}),
        ({"x": ("n", "words")}, {"y": ("n",)}, 64, {"x": [-1], "y": [1]}),
        ({"x": ("n", 4), "z": ("m", 4)}, {"y": ("n", 4)}, 0, {"x": [-1, 4], "z": [-1, 4], "y": [-1, 4]}),
        ({"x": ("n", 4)}, {"y": ("found", 4)}, 0, {"x": [-1, 4], "y": [-1, 4]}),
        ({"x": (1, 4)}, {"y": (1, 4)}, 0, {"x": [1, 4], "y": [1, 4]}),
        ({"x": ("n", 4)}, {"y": (1, 4)}, 0, {"x": [-1, 4], "y": [1, 4]}),
    ],
)
def test_batch_and_dims_follow_the_graph(
    inputs: dict[str, Dims], outputs: dict[str, Dims], size: int, dims: dict[str, list[int]]
) -> None:
    config = derive(graph(inputs, outputs), FILE, "net", 64)
    assert config.max_batch_size == size
    assert tensors(config) == dims
    assert (config.name, config.platform, backend_of(config)) == ("net", "onnxruntime_onnx", "onnxruntime")
    for tensor in (*config.input, *config.output):
        assert DataType.Name(tensor.data_type) == "TYPE_FP32"
        assert tensor.HasField("reshape") == (dims[tensor.name] == [1])


@pytest.mark.parametrize(
    ("x", "y", "obstacle"),
    [
        (("n", 4), ("n", 4), ""),
        (("n", 4), (1, 4), "the first dimension of 'y' is fixed"),
        (("n", 4), (), "the first dimension of 'y' is missing"),
        (("n", 4), ("m", 4), "the first dimensions have the names m, n"),
    ],
)
def test_the_reason_why_a_graph_has_no_batch_dimension(x: Dims, y: Dims, obstacle: str) -> None:
    assert batch_obstacle(graph({"x": x}, {"y": y})) == obstacle


def test_weights_listed_as_inputs_are_ignored() -> None:
    model = graph({"x": ("n", 4), "w": (4, 4)}, {"y": ("n", 4)})
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, (4, 4), np.zeros(16)))
    assert tensors(derive(model, FILE, "net", 8)) == {"x": [4], "y": [4]}


def test_types_that_triton_cannot_pass_are_named() -> None:
    model = doubler()
    model.graph.output[0].type.Clear()
    model.graph.output[0].type.sequence_type.elem_type.map_type.key_type = TensorProto.INT64
    with pytest.raises(BadInputError, match=r"output 'y' of net.onnx has the type sequence, .*'zipmap': False"):
        derive(model, FILE, "net", 8)
    model = doubler()
    model.graph.input[0].type.Clear()
    model.graph.input[0].type.optional_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(BadInputError, match=r"input 'x' of net.onnx has the type optional, .* in its place$"):
        derive(model, FILE, "net", 8)
    with pytest.raises(BadInputError, match=r"input 'x' of net.onnx has the type COMPLEX64, .*; convert it .*Cast"):
        derive(doubler(TensorProto.COMPLEX64), FILE, "net", 8)
    model = doubler()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(BadInputError, match=r"output 'y' of net.onnx has no shape in the graph; write it"):
        derive(model, FILE, "net", 8)
    model = doubler()
    del model.graph.input[:]
    with pytest.raises(BadInputError, match=r"net.onnx: its graph has no input"):
        derive(model, FILE, "net", 8)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("resnet50.onnx", "resnet50"),
        ("Tiny Model (v2).onnx", "Tiny_Model_v2"),
        ("mnist..v1.onnx", "mnist.v1"),
        ("bert/model.onnx", "bert"),
        ("repository/bert/1/model.onnx", "bert"),
        ("all-MiniLM-L6-v2/onnx/model.onnx", "all-MiniLM-L6-v2"),
        ("größe.onnx", "gr_e"),
        (".hidden/…/model.onnx", "model"),
    ],
)
def test_a_model_is_named_after_its_file_or_folder(file: str, name: str) -> None:
    assert model_name(Path("/") / file) == name


# -- a bare file --------------------------------------------------------------------------------------------------


def with_weights_beside(folder: Path, location: str = "weights/net.bin", size: int = 4) -> Path:
    """Write a model that multiplies by weights in an external file."""
    model = onnx_model(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        {"x": (TensorProto.FLOAT, ("n", 4))},
        {"y": (TensorProto.FLOAT, ("n", 4))},
    )
    factor = model.graph.initializer.add(name="factor", data_type=TensorProto.FLOAT, dims=[1])
    factor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        factor.external_data.add(key=key, value=value)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "net.bin").write_bytes(np.array([3], np.float32).tobytes())
    (folder / "net.onnx").write_bytes(serialized(model))
    return folder / "net.onnx"


def read_bare(file: Path, cache: Path) -> ModelSource:
    return read_bare_onnx(file, gpu=False, largest_batch=64, cache=cache)


def test_the_error_about_a_missing_file_has_one_piece_of_advice(tmp_path: Path) -> None:
    missing, cache = tmp_path / "net.onx", tmp_path / "cache"
    with pytest.raises(BadInputError, match=r"/net\.pt: no such file; check the path$"):
        read_bare(tmp_path / "net.pt", cache)
    with pytest.raises(BadInputError, match=rf"^{missing}: no such file; check the path$"):
        read_bare(missing, cache)
    (tmp_path / "net.onnx").touch()
    with pytest.raises(BadInputError, match=rf"^{missing}: no such file; did you mean {tmp_path}/net\.onnx\?$"):
        read_bare(missing, cache)


def test_a_bare_file_is_linked_with_its_weights_and_left_as_it_is(tmp_path: Path) -> None:
    file = with_weights_beside(tmp_path / "mine")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")}
    source = read_bare(file, tmp_path / "cache")
    assert read_bare(file, tmp_path / "cache") == source
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")} == before
    version = source.repository / "net" / "1"
    assert (version / "model.onnx").samefile(file)
    assert (version / "weights" / "net.bin").samefile(file.parent / "weights" / "net.bin")
    assert source.config.max_batch_size == 64
    assert [group.count for group in source.config.instance_group] == [2]  # Triton's own, on a CPU
    assert source.facts["model_bytes"] == file.stat().st_size + 4
    assert len(str(source.facts["sha256"])) == 64


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    file = with_weights_beside(tmp_path / "mine")
    before = read_bare(file, tmp_path / "cache").facts["sha256"]
    (file.parent / "weights" / "net.bin").write_bytes(b"\0\0\0\1")
    assert read_bare(file, tmp_path / "cache").facts["sha256"] != before


def test_unwritable_cache_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    (tmp_path / "net.onnx").write_bytes(serialized(doubler()))
    with pytest.raises(EnvironmentFault, match=r"cannot write into .*cache: .*set TRITUNE_CACHE"):
        read_bare(tmp_path / "net.onnx", tmp_path / "cache")


def test_weights_missing_truncated_or_outside_are_named(tmp_path: Path) -> None:
    file = with_weights_beside(tmp_path / "cut", size=400)
    with pytest.raises(BadInputError, match=r"'weights/net.bin', which is truncated \(4 bytes of at least 400\)"):
        read_bare(file, tmp_path / "cache")
    (tmp_path / "cut" / "weights" / "net.bin").unlink()
    with pytest.raises(BadInputError, match=r"in 'weights/net.bin', which is missing; put that file into .*cut"):
        read_bare(file, tmp_path / "cache")
    for i, location in enumerate(("../net.bin", "/etc/passwd", "", "a\nb")):
        file = with_weights_beside(tmp_path / f"elsewhere{i}", location)
        with pytest.raises(BadInputError, match="outside the folder of the model") as error:
            read_bare(file, tmp_path / "cache")
        assert str(error.value).isprintable()
    assert not (tmp_path / "cache").exists()


def test_weights_within_a_nodes_graph_are_found(tmp_path: Path) -> None:
    inner = helper.make_graph([], "inner", [], [])
    tensor = inner.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="inner.bin")
    model = doubler()
    model.graph.node[0].attribute.append(helper.make_attribute("then_branch", inner))
    (tmp_path / "inner.bin").write_bytes(b"0000")
    assert [str(file) for file in external_files(model, tmp_path / "net.onnx")] == ["inner.bin"]


def test_unknown_opset_is_reported_with_the_fix() -> None:
    check_versions(doubler(), FILE)
    newer = doubler()
    newer.opset_import[0].version = 999
    with pytest.raises(BadInputError, match=r"net.onnx: has IR version 8 and opset ai.onnx 999, .*pip install -U"):
        check_versions(newer, FILE)
    newer = doubler()
    newer.ir_version = 999
    with pytest.raises(BadInputError, match=r"net.onnx: has IR version 999 .*older opset"):
        check_versions(newer, FILE)


def lookup() -> ModelProto:
    """Return a model with inputs that select rows, in another shape and type, and one that selects none."""
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["a"]),
        helper.make_node("Gather", ["ends", "ids"], ["b"], axis=1),
        helper.make_node("Cast", ["user"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Squeeze", ["whole"], ["flat"]),
        helper.make_node("Gather", ["users", "flat"], ["c"]),
        helper.make_node("Split", ["pair"], ["left", "right"], axis=1),
        helper.make_node("Gather", ["words", "left"], ["e"]),
        helper.make_node("Gather", ["users", "right"], ["f"]),
        helper.make_node("Gather", ["a", "kinds"], ["y"]),
        helper.make_node("EmbedLayerNormalization", ["q", "s", "words", "ends", "parts"], ["d"]),
    ]
    whole = (TensorProto.INT64, ("batch", 4))
    inputs = {
        "ids": whole,
        "user": (TensorProto.FLOAT, ("batch", 1)),
        "kinds": whole,
        "q": whole,
        "s": whole,
        "pair": whole,
    }
    model = onnx_model(nodes, inputs, {"y": (TensorProto.FLOAT, ("batch", 4))})
    for name, dims in (("words", (30522, 2)), ("ends", (1, 512)), ("users", (1000, 3)), ("parts", (2, 2))):
        model.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=dims)
    return model


def test_inputs_that_select_rows_of_a_table_have_its_range() -> None:
    """The smaller of two tables counts, and rows of a computed table are unknown."""
    expected = {"ids": (0, 511), "user": (0, 999), "q": (0, 30521), "s": (0, 1), "pair": (0, 999)}
    assert index_ranges(lookup()) == expected
    assert index_ranges(doubler()) == {}
    damaged = lookup()
    for node in damaged.graph.node:
        node.attribute.append(helper.make_attribute("axis", 7))
        del node.input[1:]
    assert index_ranges(damaged) == {}


# -- a repository -------------------------------------------------------------------------------------------------


def test_an_onnx_model_needs_no_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", "", doubler())
    (folder / "config.pbtxt").unlink()
    source = read_repository_model(tmp_path, "m", gpu=False, largest_batch=128)
    assert source.config.max_batch_size == 128
    assert tensors(source.config) == {"x": [4], "y": [4]}
    assert [path.name for path in folder.iterdir()] == ["1"]


def test_a_python_model_needs_no_config(tmp_path: Path) -> None:
    """Triton's Python backend takes inputs, outputs and max_batch_size from the model's auto_complete_config."""
    (write_python_model(tmp_path, "m", "") / "config.pbtxt").unlink()
    config = read_repository_model(tmp_path, "m", gpu=False).config
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 0)
    assert (len(config.input), len(config.output)) == (0, 0)
    assert list_models(tmp_path) == "m"


def test_missing_backend_is_derived_from_the_file(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "max_batch_size: 8\n", doubler())
    assert read_repository_model(tmp_path, "m", gpu=False).config.backend == "onnxruntime"


@pytest.mark.parametrize("folder", ["$$TRITON_MODEL_DIRECTORY", "/nowhere"])
def test_a_missing_environment_is_named_before_a_server_starts(folder: str, tmp_path: Path) -> None:
    value = f"{folder}/env.tar.gz"
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}\n'
    path = write_python_model(tmp_path, "m", "", SLEEPER_CONFIG + parameter)
    with pytest.raises(BadInputError, match=rf"EXECUTION_ENV_PATH.*: '{re.escape(value)}' does not exist"):
        read_repository_model(tmp_path, "m", gpu=False)
    (path / "env.tar.gz").write_bytes(b"")
    if folder.startswith("$$"):
        assert read_repository_model(tmp_path, "m", gpu=False).config.parameters
    assert read_repository_model(tmp_path, "m", gpu=False, is_embedded=False).config.parameters


def test_a_config_without_tensors_gets_the_batches_of_the_graph(tmp_path: Path) -> None:
    """Triton's own backend does that too; a model with inputs and outputs keeps its max_batch_size of 0."""
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }'
    tensors += 'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 4 ] }'
    write_model(tmp_path, "bare", 'backend: "onnxruntime"', doubler())
    write_model(tmp_path, "full", f'backend: "onnxruntime" {tensors}', doubler())
    write_model(tmp_path, "single", 'backend: "onnxruntime"', doubler(dims=(1, 4)))
    for is_embedded in (True, False):
        read = partial(read_repository_model, tmp_path, gpu=False, largest_batch=32, is_embedded=is_embedded)
        assert [read(name).config.max_batch_size for name in ("bare", "full", "single")] == [32, 0, 0]
        assert read("single").batch_obstacle == "the first dimension of 'x' is fixed"
        assert (read("bare").batch_obstacle, read("full").batch_obstacle) == (None, "")


TABLE_CONFIG = """backend: "onnxruntime" max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: 1 reshape { } } output { name: "y" data_type: TYPE_FP32 dims: 2 }"""


def table(rows: int) -> ModelProto:
    """Return a model whose input ``x`` selects one of ``rows`` of a table."""
    graph = onnx_model(
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        {"x": (TensorProto.INT64, ("n",))},
        {"y": (TensorProto.FLOAT, ("n", 2))},
    )
    graph.graph.initializer.append(helper.make_tensor("table", TensorProto.FLOAT, (rows, 2), [0.0] * 2 * rows))
    return graph


def test_requests_are_valid_for_the_smallest_table_of_all_variants(tmp_path: Path) -> None:
    for name, rows in (("m", 5), ("small", 3), ("large", 9)):
        write_model(tmp_path, name, TABLE_CONFIG, table(rows))
    read = partial(read_repository_model, tmp_path, gpu=False)
    for variants, last in (([], 4), (["large"], 4), (["large", "small"], 2)):
        assert read_source(read, "m", variants=variants).index_ranges_of("m") == {"x": (0, last)}


def test_the_rows_of_a_table_are_read_for_every_server(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", TABLE_CONFIG, table(5))
    step = 'model_name: "m" input_map { key: "x" value: "id" } output_map { key: "y" value: "row" }'
    write_model(
        tmp_path,
        "all",
        f"""platform: "ensemble" max_batch_size: 4 ensemble_scheduling {{ step {{ {step} }} }}
        input {{ name: "id" data_type: TYPE_INT64 dims: 1 }} output {{ name: "row" data_type: TYPE_FP32 dims: 2 }}""",
        None,
    )
    for is_embedded in (True, False):
        read = partial(read_repository_model, tmp_path, gpu=False, is_embedded=is_embedded)
        source = read_source(read, "all")
        assert (source.index_ranges_of("m"), source.index_ranges_of("all")) == ({"x": (0, 4)}, {"id": (0, 4)})
    (folder / "1" / "model.onnx").write_text("a file that only the server can read")
    assert read_repository_model(tmp_path, "m", gpu=False, is_embedded=False).index_ranges == {}


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("latest { num_versions: 2 }", ["9", "10"]),
        ("specific { versions: [ 9, 2 ] }", ["2", "9"]),
        ("all { }", ["2", "9", "10"]),
    ],
)
def test_the_size_is_that_of_the_versions_that_are_served(policy: str, served: list[str], tmp_path: Path) -> None:
    config = f"platform: 'onnxruntime_onnx'\nmax_batch_size: 8\nversion_policy {{ {policy} }}"
    folder = write_model(tmp_path, "m", config if policy else "max_batch_size: 8", None)
    names = ("2", "9", "10")
    for name, dims in zip(names, (2, 3, 4), strict=True):
        (folder / name).mkdir()
        (folder / name / "model.onnx").write_bytes(serialized(doubler(dims=("batch", dims))))
        (folder / name / "notes").write_bytes(bytes(10 ** int(dims)))
    source = read_repository_model(tmp_path, "m", gpu=False)
    sizes = {name: sum(file.stat().st_size for file in (folder / name).iterdir()) for name in names}
    assert source.facts["model_bytes"] == sum(sizes[name] for name in served)
    newest = max(map(int, served))
    assert tensors(source.config)["x"] == [{2: 2, 9: 3, 10: 4}[newest]]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('platform: "tensorrt_plan"', ", or export the model to ONNX"),
        ('platform: "tensorflow_savedmodel"', ", or export the model to ONNX"),
        ('backend: "fil"', ", or export the model to ONNX"),
        ('backend: "openvino"', ", or export the model to ONNX"),
        ('backend: "dali"', ""),
        ('backend: "vllm"', ""),
        ('platform: "torch_aoti"', ', or in a copy write backend: "pytorch" instead of the platform'),
    ],
)
def test_a_backend_that_is_not_in_the_server_is_refused(line: str, fix: str, tmp_path: Path) -> None:
    write_model(tmp_path, "m", line, doubler())
    has = "not in the embedded server, which has onnxruntime, python, pytorch"
    advice = "use --target local, docker or remote with a server that has it"
    with pytest.raises(BadInputError, match=f"{re.escape(f'{has}; {advice}{fix}')}$"):
        read_repository_model(tmp_path, "m", gpu=False)


PYTORCH = """\
backend: "pytorch"
max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 4 }
"""


def write_archive(path: Path, *members: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, "")


def test_pytorch_file_type_is_derived_from_its_archive(tmp_path: Path) -> None:
    write_archive(tmp_path / "script.pt", "net/data.pkl", "net/code/__torch__.py", "net/constants.pkl")
    write_archive(tmp_path / "weights.pt", "net/data.pkl", "net/data/0")
    write_archive(tmp_path / "export.pt2", "net/models/model.json")
    write_archive(tmp_path / "compiled.pt2", "net/data/aotinductor/model/w.so")
    (tmp_path / "noise.pt2").write_bytes(b"PK\3\4 and no more")
    for good in ("script.pt", "export.pt2", "compiled.pt2"):
        check_torch_file(tmp_path / good)
    with pytest.raises(BadInputError, match=r"weights.pt: not TorchScript; write it with torch.jit.save"):
        check_torch_file(tmp_path / "weights.pt")
    with pytest.raises(BadInputError, match=r"noise.pt2: neither a torch.export archive .*torch.export.save"):
        check_torch_file(tmp_path / "noise.pt2")


def test_pytorch_strings_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", PYTORCH.replace("TYPE_FP32", "TYPE_STRING"), None)
    write_archive(folder / "1" / "model.pt", "net/code/a.py")
    with pytest.raises(BadInputError, match="'INPUT__0' is TYPE_STRING, which tune's PyTorch backend does not pass"):
        read_repository_model(tmp_path, "m", gpu=False)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_missing_torch_is_reported_with_the_fix(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", PYTORCH, None)
    write_archive(folder / "1" / "model.pt2", "net/models/model.json")
    with pytest.raises(EnvironmentFault, match=r"torch, which is not installed here: pip install torch==\d"):
        read_repository_model(tmp_path, "m", gpu=False)


def test_required_torch_is_that_of_the_extra() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    try:
        check_torch()
    except EnvironmentFault as error:
        pin = re.search(r"torch==[\d.]+\d", str(error))
        assert pin is not None
        assert f'pytorch = ["{pin[0]}"]' in project
    else:
        assert re.search(r'pytorch = \["torch==[\d.]+"\]', project)


# -- the conventions of Triton's PyTorch backend --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "arguments", "result"),
    [
        (["mask", "ids"], ["ids", "mask"], [1, 0]),
        (["INPUT__1", "INPUT__0"], ["ids", "mask"], [1, 0]),
        (["b", "a"], ["ids", "mask"], [0, 1]),
        (["b__1", "a"], [], [0, 1]),
        (["OUTPUT__2"], [], [2]),
        (["ids", "INPUT__1"], ["ids", "mask"], [0, 1]),
    ],
)
def test_tensors_are_matched_like_in_the_native_backend(
    names: list[str], arguments: list[str], result: list[int]
) -> None:
    assert positions(names, arguments) == result


def test_inputs_follow_the_forward_functions_arguments() -> None:
    assert in_order(["mask", "ids"], ["ids", "mask"]) == ["ids", "mask"]
    for names in (["INPUT__0", "INPUT__2"], ["INPUT__0", "X__0"], ["mask"]):
        with pytest.raises(ValueError, match=r"do not match the arguments .*INPUT__0, INPUT__1 .*it takes ids, mask"):
            in_order(names, ["ids", "mask"])


def test_parameters_have_the_native_backends_names_and_defaults() -> None:
    assert read_parameters({"ENABLE_WEIGHT_SHARING": "true", "own": "x"}) == Parameters()
    values = {
        "INFERENCE_MODE": "false",
        "DISABLE_OPTIMIZED_EXECUTION": "1",
        "ENABLE_JIT_EXECUTOR": "no",
        "INTRA_OP_THREAD_COUNT": " 4 ",
    }
    expected = Parameters(
        inference_mode=False,
        disable_optimized_execution=True,
        enable_jit_executor=False,
        intra_op_thread_count=4,
    )
    assert read_parameters(values) == expected
    for key, value in (("INFERENCE_MODE", "maybe"), ("INTER_OP_THREAD_COUNT", "-1")):
        with pytest.raises(ValueError, match=f"parameter {key} is '{value}'; write "):
            read_parameters({key: value})


# -- resuming from another folder -----------------------------------------------------------------------------------


def test_bare_file_is_resumed_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert move_options(tmp_path, RunOptions("net.onnx")).model == str(tmp_path / "net.onnx")
    assert move_options(tmp_path / "here", RunOptions("net.onnx")).model == "net.onnx"


TORCHSCRIPT = """\
The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__/models.py", line 20, in forward
    return torch.embedding(weight, input)
           ~~~~~~~~~~~~~~~ <--- HERE
RuntimeError: """
NO_MEMORY = "CUDA out of memory. Tried to allocate 8.39 GiB. GPU 0 has a total capacity of 79.11 GiB."
ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("expected a tensor\nof 3 rows", "expected a tensor\nof 3 rows"),
        (f"{TORCHSCRIPT}index out of range in self\n", "index out of range in self"),
        (
            f"{NO_MEMORY} Of the allocated memory 8.00 GiB is allocated by PyTorch, and 0 bytes is reserved by "
            "PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF.",
            NO_MEMORY,
        ),
        (
            f"{TORCHSCRIPT}{ASSERT}\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda for more "
            "information.\nCUDA kernel errors might be asynchronously reported at some other API call.\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
            ASSERT,
        ),
    ],
)
def test_the_cause_is_read_from_a_message_of_pytorch(message: str, text: str) -> None:
    assert cause(message) == text


def test_a_config_above_a_file_that_is_tuned_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "repo", "mine", 'platform: "onnxruntime_onnx"', doubler())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    messages = list[str]()
    find_model(RunOptions("repo/mine/1/model.onnx"), Hardware((), "a CPU", 2, 1 << 33), messages.append)
    assert messages == [
        "repo/mine/config.pbtxt is ignored, because model.onnx is tuned as a file of its own; to use it: "
        "tune repo/mine"
    ]
    (tmp_path / "repo" / "mine" / "config.pbtxt").unlink()
    find_model(RunOptions("repo/mine/1/model.onnx"), Hardware((), "a CPU", 2, 1 << 33), messages.append)
    assert len(messages) == 1


def test_a_change_of_a_stored_models_files_is_noticed_by_their_hash(tmp_path: Path) -> None:
    folder = write_python_model(tmp_path, "mine", "# one\n")

    def sha256(target: TargetName = "embedded") -> object:
        options = RunOptions("mine", model_repository=str(tmp_path), target=target)
        return find_model(options, Hardware((), "a CPU", 2, 1 << 33), print).source.facts.get("sha256")

    first = sha256()
    assert len(str(first)) == 64
    assert sha256("remote") is None  # the server has files of its own
    (folder / "config.pbtxt").write_text(SLEEPER_CONFIG.replace("max_batch_size: 8", "max_batch_size: 4"))
    (folder / "1" / "__pycache__").mkdir()
    for name in ("model.json", "__pycache__/model.pyc"):
        (folder / "1" / name).write_text("{}")
    assert sha256() == first
    (folder / "1" / "model.py").write_text("# two\n")
    assert sha256() not in (first, None)
    with (folder / "1" / "weights").open("wb") as weights:
        weights.truncate(MAX_HASHED_BYTES)  # a sparse file
    assert sha256() is None
    (folder / "1" / "weights").unlink()
    (folder / "1" / "weights").symlink_to("/proc/self/mem")  # its first page cannot be read, as a faulty disk
    targets: tuple[TargetName, ...] = ("embedded", "docker")
    for target in targets:
        with pytest.raises(BadInputError, match=r"mine: cannot be read: Input/output error$"):
            sha256(target)


def test_weights_that_only_the_user_of_a_container_may_read_have_no_hash() -> None:
    """A server in a container runs as root by default, but one on this machine as this user."""

    def sha256(target: TargetName) -> object:
        options = RunOptions("mine", model_repository=folder, target=target)
        return find_model(options, Hardware((), "a CPU", 2, 1 << 33), print).source.facts.get("sha256")

    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter ``tmp_path``
        Path(folder).chmod(0o755)
        weights = write_python_model(Path(folder), "mine", "# one\n") / "1" / "weights"
        weights.touch()
        assert sha256("docker") == sha256("local")
        weights.chmod(0)
        with as_ordinary_user():
            assert sha256("docker") is None
            with pytest.raises(BadInputError, match=r"mine/1/weights: cannot be read: Permission denied$"):
                sha256("local")


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Give up the rights of root within the context, if this user is root."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
