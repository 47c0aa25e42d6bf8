"""The onnxruntime backend of this project on a real server returns what ONNX Runtime returns."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from optimizer.config import model_config
from optimizer.core.candidate import CPU_ACCELERATOR, Candidate
from optimizer.core.errors import DeploymentError, EnvironmentFault
from optimizer.core.files import cache_folder
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine import hardware
from optimizer.measure.output_check import BaselineOutputCheck
from optimizer.measure.output_comparison import Tolerance
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import eventually
from tests.generated_requests import write_requests
from tests.repositories import doubler, onnx_model, write_model

Array: TypeAlias = npt.NDArray[Any]

NUMBERS = {
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "INT64": (TensorProto.INT64, np.int64),
    "INT32": (TensorProto.INT32, np.int32),
    "INT16": (TensorProto.INT16, np.int16),
    "INT8": (TensorProto.INT8, np.int8),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "BOOL": (TensorProto.BOOL, np.bool_),
}
PLAIN = 'platform: "onnxruntime_onnx"\ninstance_group { count: 1 kind: KIND_CPU }\n'
STRINGS = runtime.running_python() in runtime.NUMPY_WHEELS


@dataclass(frozen=True)
class Served:
    """A model on a server, and the same model in ONNX Runtime."""

    name: str
    client: Any
    reference: Any

    def infer(self, feeds: Mapping[str, Array], outputs: tuple[str, ...] = ()) -> dict[str, Array]:
        """Return the outputs that the server sends; ``outputs`` selects some."""
        result = self.client.infer(
            self.name, tensors(feeds), outputs=[InferRequestedOutput(name) for name in outputs] or None
        )
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    def expected(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        names = [output.name for output in self.reference.get_outputs()]
        return dict(zip(names, self.reference.run(names, dict(feeds)), strict=True))

    def assert_answers(self, feeds: Mapping[str, Array]) -> None:
        assert_same(self.infer(feeds), self.expected(feeds))


def tensors(feeds: Mapping[str, Array]) -> list[Any]:
    made = []
    for name, array in feeds.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def assert_same(outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert set(outputs) == set(expected)
    for name, array in expected.items():
        assert outputs[name].dtype == array.dtype, name
        np.testing.assert_array_equal(outputs[name], array, err_msg=name)


@contextlib.contextmanager
def serving(folder: Path, model: ModelProto, config: str) -> Iterator[Served]:
    """Yield the model as ``tune`` serves it, loaded with ``config``."""
    write_model(folder / "repository", "m", config, model)
    source = read_repository_model(folder / "repository", "m", gpu=False)
    target = EmbeddedTarget(source, TargetSettings(folder / "tritonserver.log"))
    candidate = model_config.candidate_of(source.config)
    with (
        contextlib.closing(target),
        target.deploy(candidate) as endpoint,
        InferenceServerClient(endpoint.grpc) as client,
    ):
        yield Served("m", client, onnxruntime.InferenceSession(model.SerializeToString()))


def refusal(folder: Path, config: str, model: ModelProto | None = None) -> str:
    """Return the reason for which the server does not load a model."""
    with pytest.raises(DeploymentError) as caught, serving(folder, model or doubler(), config):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- values -----------------------------------------------------------------------------------------------------


def sample(kind: str, rows: int, seed: int = 0) -> Array:
    """Return an array without equal rows or elements."""
    numbers = np.random.default_rng(seed).permutation(np.arange(1, 4 * rows + 1)).reshape(rows, 4)
    values: Array = numbers % 2 == 0 if kind == "BOOL" else numbers.astype(NUMBERS[kind][1])
    return values


@pytest.fixture(scope="module")
def of_every_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a model with an input and an output of each type: numbers are doubled, booleans negated."""
    nodes = [
        helper.make_node("Not", [f"x_{kind}"], [f"y_{kind}"])
        if kind == "BOOL"
        else helper.make_node("Add", [f"x_{kind}", f"x_{kind}"], [f"y_{kind}"])
        for kind in NUMBERS
    ]
    nodes.append(helper.make_node("MatMul", ["x_FP32", "weights"], ["product"]))
    inputs = {f"x_{kind}": (number, ("batch", 4)) for kind, (number, _) in NUMBERS.items()}
    outputs = {f"y_{kind}": (number, ("batch", 4)) for kind, (number, _) in NUMBERS.items()}
    model = onnx_model(nodes, inputs, {**outputs, "product": (TensorProto.FLOAT, ("batch", 3))})
    weights = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(helper.make_tensor("weights", TensorProto.FLOAT, (4, 3), weights.flatten()))
    folder = tmp_path_factory.mktemp("kinds")
    with serving(folder, model, f"{PLAIN}max_batch_size: 8\n") as served:
        yield served


def feeds_of_every_kind(rows: int, seed: int = 0) -> dict[str, Array]:
    return {f"x_{kind}": sample(kind, rows, seed) for kind in NUMBERS}


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_type_answers_as_onnxruntime_does(of_every_kind: Served, rows: int) -> None:
    of_every_kind.assert_answers(feeds_of_every_kind(rows))


def test_inputs_and_outputs_that_config_leaves_out_are_the_graphs(of_every_kind: Served) -> None:
    served = of_every_kind.client.get_model_config("m").config
    assert {tensor.name for tensor in served.input} == {f"x_{kind}" for kind in NUMBERS}
    for tensor in (*served.input, *served.output):
        assert list(tensor.dims) == ([3] if tensor.name == "product" else [4])
    for tensor in served.input:
        assert DataType.Name(tensor.data_type) == f"TYPE_{tensor.name.removeprefix('x_')}"
    assert not served.HasField("dynamic_batching")


@pytest.mark.parametrize("output_names", [("y_FP16",), ("product", "y_BOOL"), ("y_INT64", "y_FP32")])
def test_only_the_outputs_asked_for_come_back(of_every_kind: Served, output_names: tuple[str, ...]) -> None:
    feeds = feeds_of_every_kind(2, seed=3)
    expected = of_every_kind.expected(feeds)
    assert_same(of_every_kind.infer(feeds, output_names), {name: expected[name] for name in output_names})


def test_answers_stay_correct_while_triton_reuses_the_memory(of_every_kind: Served) -> None:
    """The memory of a tensor belongs to Triton, which reuses it for later requests."""
    for seed in range(50):
        of_every_kind.assert_answers(feeds_of_every_kind(1 + seed % 8, seed))


def test_wrong_input_is_named_and_the_server_lives(of_every_kind: Served) -> None:
    good = feeds_of_every_kind(2)
    missing = {name: array for name, array in good.items() if name != "x_INT8"}
    for feeds, words in (
        (missing, ("x_INT8",)),
        ({**good, "x_FP32": good["x_FP64"]}, ("x_FP32", "FP64", "FP32")),
        ({**good, "x_FP32": np.ones((2, 5), np.float32)}, ("x_FP32", "[2,5]", "[-1,4]")),
        (feeds_of_every_kind(9), ("batch-size", "<= 8")),
        ({**good, "unknown": good["x_FP32"]}, ("unknown",)),
    ):
        with pytest.raises(InferenceServerException) as caught:
            of_every_kind.infer(feeds)
        for word in words:
            assert word in caught.value.message()
    with pytest.raises(InferenceServerException, match="nothing"):
        of_every_kind.infer(good, ("nothing",))
    of_every_kind.assert_answers(good)


# -- batches ----------------------------------------------------------------------------------------------------

BATCHED = (
    f"{PLAIN}max_batch_size: 16\ndynamic_batching {{ max_queue_delay_microseconds: %d preferred_batch_size: 16 }}\n"
)


def test_requests_that_are_batched_together_get_their_own_answers(tmp_path: Path) -> None:
    """16 samples are one execution, because the preferred size makes the batcher wait for them."""
    with serving(tmp_path, doubler(), BATCHED % 60_000_000) as served:
        rows = [1, 3, 2, 1, 4, 1, 2, 1, 1]
        assert sum(rows) == 16
        feeds = [{"x": np.random.default_rng(i).standard_normal((n, 4), np.float32)} for i, n in enumerate(rows)]
        answers: dict[int, Array] = {}
        done = threading.Semaphore(0)

        def answered(index: int, result: Any, error: Any) -> None:
            if error is None:
                answers[index] = result.as_numpy("y")
            done.release()

        for index, feed in enumerate(feeds):
            served.client.async_infer(
                "m", tensors(feed), callback=lambda result, error, index=index: answered(index, result, error)
            )
        for _ in rows:
            assert done.acquire(timeout=50)  # less than the delay
        for index, feed in enumerate(feeds):
            np.testing.assert_array_equal(answers[index], 2 * feed["x"])

        def counted() -> tuple[int, int]:
            (statistics,) = served.client.get_inference_statistics("m").model_stats
            return statistics.inference_count, statistics.execution_count

        assert eventually(lambda: counted() == (16, 1), 60), counted()  # responses are sent before they are counted


def table_model() -> ModelProto:
    """Return a model whose input selects rows of a table with 3 rows."""
    table = helper.make_tensor("table", TensorProto.FLOAT, (3, 1), [10.0, 20.0, 30.0])
    model = onnx_model(
        [helper.make_node("Gather", ["table", "x"], ["y"], axis=0)],
        {"x": (TensorProto.INT64, ("batch",))},
        {"y": (TensorProto.FLOAT, ("batch", 1))},
    )
    model.graph.initializer.append(table)
    return model


def test_a_request_that_fails_fails_its_batch_alone(tmp_path: Path) -> None:
    """Only ONNX Runtime detects an index out of range."""
    with serving(tmp_path, table_model(), f"{PLAIN}max_batch_size: 4\n") as served:
        with pytest.raises(InferenceServerException, match=r"onnxruntime: .*(out of|bounds)"):
            served.infer({"x": np.array([[7]])})
        answer = served.infer({"x": np.array([[2], [0], [1]])})  # Triton has shape [batch, 1] for one scalar a sample
        np.testing.assert_array_equal(answer["y"], [[30.0], [10.0], [20.0]])


def test_each_request_of_a_failed_batch_gets_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path, table_model(), BATCHED % 60_000_000) as served:
        errors = Queue[str]()
        for _ in range(16):
            served.client.async_infer(
                "m", tensors({"x": np.array([[7]])}), callback=lambda result, error: errors.put(str(error))
            )
        for _ in range(16):
            assert re.search("onnxruntime: .*(out of|bounds)", errors.get(timeout=50))


def test_a_model_without_batch_dimension_is_served_and_refuses_a_batch(tmp_path: Path) -> None:
    config = f"""{PLAIN}
        input {{ name: "x" data_type: TYPE_FP32 dims: [2, 3] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: [2, 3] }}
    """
    with serving(tmp_path, doubler(dims=(2, 3)), config) as served:
        served.assert_answers({"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
        with pytest.raises(InferenceServerException, match="shape"):
            served.infer({"x": np.zeros((4, 2, 3), np.float32)})


# -- strings ----------------------------------------------------------------------------------------------------


def text_model() -> ModelProto:
    nodes = [helper.make_node("Identity", ["s"], ["same"])]
    nodes.append(helper.make_node("Cast", ["x"], ["written"], to=TensorProto.STRING))
    return onnx_model(
        nodes,
        {"s": (TensorProto.STRING, ("batch", 2)), "x": (TensorProto.FLOAT, ("batch", 2))},
        {"same": (TensorProto.STRING, ("batch", 2)), "written": (TensorProto.STRING, ("batch", 2))},
    )


@pytest.mark.skipif(not STRINGS, reason="the stub of this Python passes no strings")
def test_strings_are_passed_and_invalid_ones_refused(tmp_path: Path) -> None:
    texts = [["one", ""], ["grüße", "日本\n"]]
    octets = np.array([[text.encode() for text in row] for row in texts], np.object_)
    numbers = np.array([[1.5, 2], [-1, 0]], np.float32)
    with serving(tmp_path, text_model(), f"{PLAIN}max_batch_size: 4\n") as served:
        answer = served.infer({"s": octets, "x": numbers})
        assert [[text.decode() for text in row] for row in answer["same"]] == texts
        assert answer["written"].tolist() == [[b"1.5", b"2"], [b"-1", b"0"]]
        with pytest.raises(InferenceServerException, match="utf-8"):
            served.infer({"s": np.array([[b"\xff", b""]], np.object_), "x": np.zeros((1, 2), np.float32)})
        assert served.infer({"s": np.array([[b"a", b"b"]], np.object_), "x": np.zeros((1, 2), np.float32)})


@pytest.mark.skipif(STRINGS, reason="the stub of this Python passes strings")
def test_strings_are_refused_where_they_cannot_pass(tmp_path: Path) -> None:
    assert "TYPE_STRING tensors need numpy 1" in refusal(tmp_path, f"{PLAIN}max_batch_size: 4\n", text_model())


def test_bf16_is_refused_because_numpy_has_no_such_type(tmp_path: Path) -> None:
    tensor = (TensorProto.BFLOAT16, ("batch", 4))
    model = onnx_model([helper.make_node("Identity", ["x"], ["y"])], {"x": tensor}, {"y": tensor})
    assert "TYPE_BF16 tensors need Triton's own onnxruntime backend" in refusal(tmp_path, PLAIN, model)


def test_an_output_that_the_configuration_leaves_out_may_have_any_type(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("Cast", ["x"], ["z"], to=TensorProto.BFLOAT16),
    ]
    dims = ("batch", 4)
    outputs = {"y": (TensorProto.FLOAT, dims), "z": (TensorProto.BFLOAT16, dims)}
    model = onnx_model(nodes, {"x": (TensorProto.FLOAT, dims)}, outputs)
    config = (
        f'{PLAIN}max_batch_size: 8\ninput {{ name: "x" data_type: TYPE_FP32 dims: 4 }}\n'
        'output { name: "y" data_type: TYPE_FP32 dims: 4 }\n'
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with serving(tmp_path, model, config) as served:
        assert_same(served.infer({"x": x}), {"y": x + x})


# -- parameters and hardware ------------------------------------------------------------------------------------


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def test_the_native_backends_parameters_are_taken(tmp_path: Path) -> None:
    config = f"{PLAIN}max_batch_size: 4\noptimization {{ graph {{ level: 1 }} }}\n"
    for key, value in {
        "intra_op_thread_count": "1",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "0",
        "session.intra_op.allow_spinning": "0",
        "of_some_other_backend": "x",
    }.items():
        config += parameter(key, value)
    with serving(tmp_path, doubler(), config) as served:
        served.assert_answers({"x": sample("FP32", 3)})


@pytest.fixture(scope="module")
def openvino() -> None:
    try:
        runtime.ensure_openvino(print)
    except EnvironmentFault as fault:
        pytest.skip(str(fault))


def with_openvino(**parameters: str) -> str:
    pairs = "".join(f'parameters {{ key: "{key}" value: {json.dumps(value)} }} ' for key, value in parameters.items())
    accelerators = f'cpu_execution_accelerator: [ {{ name: "openvino" {pairs}}} ]'
    return f"{PLAIN}max_batch_size: 8\noptimization {{ execution_accelerators {{ {accelerators} }} }}\n"


def product_model() -> ModelProto:
    """Return a model whose output is a product with random weights, so that its precision shows."""
    model = onnx_model(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        {"x": (TensorProto.FLOAT, ("batch", 64))},
        {"y": (TensorProto.FLOAT, ("batch", 64))},
    )
    weights = np.random.default_rng(0).random((64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    return model


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("parameters", [{}, {"num_of_threads": "1", "num_streams": "1"}])
def test_openvino_computes_the_same(parameters: dict[str, str], tmp_path: Path) -> None:
    feeds = {"x": np.random.default_rng(1).random((5, 64)).astype(np.float32)}
    config = with_openvino(**parameters) + parameter("intra_op_thread_count", "1")
    with serving(tmp_path, product_model(), config) as served:
        for name, expected in served.expected(feeds).items():
            np.testing.assert_allclose(served.infer(feeds)[name], expected, rtol=1e-4)


@pytest.mark.usefixtures("openvino")
def test_bad_parameters_of_openvino_are_named(tmp_path: Path) -> None:
    assert "'threads' is not a parameter of the accelerator openvino" in refusal(
        tmp_path / "unknown", with_openvino(threads="2")
    )
    assert "OpenVINOExecutionProvider did not start" in refusal(tmp_path / "bad", with_openvino(precision="FP16"))


def test_openvino_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for path in cache_folder().iterdir():
        if not path.name.startswith("openvino-"):
            cache.joinpath(path.name).symlink_to(path)
    monkeypatch.setenv("TRITUNE_CACHE", str(cache))
    assert "openvino is not installed; tune setup --openvino" in refusal(tmp_path, with_openvino())


@pytest.mark.usefixtures("openvino")
@pytest.mark.skipif("avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="this CPU computes no BF16")
def test_the_output_check_guards_a_lower_precision(tmp_path: Path) -> None:
    """The configuration is rejected with its deviation unless the tolerance allows it."""
    write_model(tmp_path / "repository", "m", f"{PLAIN}max_batch_size: 8\n", product_model())
    source = read_repository_model(tmp_path / "repository", "m", gpu=False)
    name = f"{CPU_ACCELERATOR}.name"
    plain = Candidate(8, fields=((name, "none"),))
    faster = Candidate(8, dynamic_batching=True, fields=((name, "openvino"),))
    lower = json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}})
    rounded = replace(faster, fields=(*faster.fields, (f"{CPU_ACCELERATOR}.parameters.load_config", lower)))
    strict, tolerant = (
        BaselineOutputCheck(
            tmp_path / "reference.npz",
            input_data=write_requests(source.config, tmp_path),
            shapes=(),
            request_batch_size=1,
            tolerance=tolerance,
        )
        for tolerance in (Tolerance(), Tolerance(relative=0.05))
    )
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with contextlib.closing(target):
        with target.deploy(plain) as endpoint:
            strict.record_reference(endpoint)
            tolerant.record_reference(endpoint)
        with target.deploy(faster) as endpoint:
            share = strict.check(endpoint)
            assert share is not None
            assert 0 <= share < 0.1
        with target.deploy(rounded) as endpoint:
            with pytest.raises(DeploymentError, match=r"outputs differ .*: y by [0-9.]+ \("):
                strict.check(endpoint)
            share = tolerant.check(endpoint)
            assert share is not None
            assert 0.01 < share <= 1


@pytest.mark.parametrize("key", ["intra_op_thread_count", "execution_mode"])
def test_a_bad_parameter_is_named(key: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, f"{PLAIN}max_batch_size: 4\n{parameter(key, 'many')}")
    assert f"parameter {key} is 'many'; write a whole number" in message


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
def test_a_gpu_instance_without_a_gpu_is_refused(tmp_path: Path) -> None:
    config = PLAIN.replace("KIND_CPU", "KIND_GPU")
    message = refusal(tmp_path, f"{config}max_batch_size: 4\n")
    assert "KIND_GPU" in message
    assert "no GPUs are available" in message


def test_a_graph_that_onnxruntime_does_not_load_is_named(tmp_path: Path) -> None:
    model = doubler()
    model.graph.node[0].input[1] = "frobnicated"
    assert "frobnicated" in refusal(tmp_path, f"{PLAIN}max_batch_size: 4\n", model)


# -- files ------------------------------------------------------------------------------------------------------


def test_the_newest_version_and_the_named_file_are_served(tmp_path: Path) -> None:
    """The newest version is served; the configuration names its file, and weights may be next to it."""
    config = f'{PLAIN}max_batch_size: 4\ndefault_model_filename: "net.onnx"\n'
    folder = write_model(tmp_path / "repository", "m", config, None)
    for version in (3, 20):
        model = onnx_model(
            [helper.make_node("Mul", ["x", "factor"], ["y"])],
            {"x": (TensorProto.FLOAT, ("batch", 4))},
            {"y": (TensorProto.FLOAT, ("batch", 4))},
        )
        factor = model.graph.initializer.add(name="factor", data_type=TensorProto.FLOAT, dims=[1])
        factor.data_location = TensorProto.EXTERNAL
        factor.external_data.add(key="location", value="factor.bin")
        (folder / str(version)).mkdir()
        (folder / str(version) / "net.onnx").write_bytes(model.SerializeToString())
        (folder / str(version) / "factor.bin").write_bytes(np.array([version], np.float32).tobytes())
    source = read_repository_model(tmp_path / "repository", "m", gpu=False)
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    candidate = model_config.candidate_of(source.config)
    with (
        contextlib.closing(target),
        target.deploy(candidate) as endpoint,
        InferenceServerClient(endpoint.grpc) as client,
    ):
        x = sample("FP32", 2)
        np.testing.assert_array_equal(client.infer("m", tensors({"x": x})).as_numpy("y"), 20 * x)
    assert text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig()).max_batch_size == 4
