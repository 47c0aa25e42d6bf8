"""Inputs of requests, generated or read from perf_analyzer's JSON, and gRPC messages."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from optimizer.core.errors import BadInputError
from optimizer.model.builders.request_data import write_input_data
from optimizer.model.inference_requests import decode_outputs, read_request_inputs, to_message
from optimizer.model.input_data import InputSample
from tests.generated_requests import model_with, write_requests

NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "BF16", "FP32", "FP64")


def metadata(**inputs: tuple[str, Sequence[int]]) -> Any:
    """Return a server's metadata with these datatypes and shapes, including the batch dimension."""
    tensors = [{"name": name, "datatype": kind, "shape": list(shape)} for name, (kind, shape) in inputs.items()]
    return service_pb2.ModelMetadataResponse(name="m", inputs=tensors)


def requests(
    model: Any,
    data: Path,
    *,
    batch: int = 1,
    count: int = 1,
    max_batch_size: int = 8,
    shapes: tuple[str, ...] = (),
) -> Any:
    requests = read_request_inputs(
        model, max_batch_size, input_data=data, shapes=shapes, request_batch_sizes=[batch] * count
    )
    return list(requests)


@pytest.fixture
def generated(tmp_path: Path) -> Callable[..., Any]:
    """Return a function as ``requests`` that generates the data: ``random`` or ``zero``."""

    def generate(model: Any, data: str, *, shapes: tuple[str, ...] = (), seed: int = 0, **sizes: int) -> Any:
        inputs = [(tensor.name, tensor.datatype, tensor.shape) for tensor in model.inputs]
        config = model_with(inputs, sizes.get("max_batch_size", 8))
        return requests(
            model, write_requests(config, tmp_path, *shapes, data=data, seed=seed), shapes=shapes, **sizes
        )

    return generate


def data_file(folder: Path, document: object) -> Path:
    path = folder / "data.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def b64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


# -- generated --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", [*NUMBERS, "BOOL"])
def test_random_values_are_of_the_type_and_differ(datatype: str, generated: Callable[..., Any]) -> None:
    first, second = generated(metadata(x=(datatype, [-1, 500])), "random", batch=3, count=2)
    assert first["x"].shape == (3, 500)
    assert np_to_triton_dtype(first["x"].dtype) == datatype
    assert not np.array_equal(first["x"], second["x"])
    assert np.isfinite(first["x"].astype(np.float64)).all()


def test_random_integers_reach_all_of_their_type(generated: Callable[..., Any]) -> None:
    (values,) = generated(metadata(x=("INT64", [-1, 2000])), "random")
    assert values["x"].min() < -(2**62)
    assert values["x"].max() > 2**62


def test_random_strings_are_as_long_as_perf_analyzers(generated: Callable[..., Any]) -> None:
    (values,) = generated(metadata(x=("BYTES", [-1, 3, 2])), "random", batch=2)
    assert values["x"].shape == (2, 3, 2)
    assert all(len(text) == 128 and text.isalnum() for text in values["x"].ravel())
    assert len(set(values["x"].ravel())) == 12


def test_seed_determines_all_values(generated: Callable[..., Any]) -> None:
    model = metadata(x=("FP32", [-1, 4]), s=("BYTES", [-1, 1]))
    first_values, repeated_values, other_values = (
        generated(model, "random", seed=seed, count=2)[1] for seed in (5, 5, 6)
    )
    assert all(
        np.array_equal(first_values[name], repeated_values[name])
        and not np.array_equal(first_values[name], other_values[name])
        for name in first_values
    )


def test_zero_data_are_zeros_and_empty_strings(generated: Callable[..., Any]) -> None:
    (values,) = generated(metadata(x=("INT32", [-1, 2]), s=("BYTES", [-1, 1])), "zero", batch=2)
    assert values["x"].tolist() == [[0, 0], [0, 0]]
    assert values["s"].tolist() == [[b""], [b""]]


def test_shapes_fill_open_dimensions(generated: Callable[..., Any]) -> None:
    model = metadata(**{"a:b": ("FP32", [-1, -1, 3]), "y": ("INT8", [-1, 2])})
    (values,) = generated(model, "random", shapes=("a:b:7,3",), batch=2)
    assert values["a:b"].shape == (2, 7, 3)
    assert values["y"].shape == (2, 2)


def test_a_model_without_batches_has_no_batch_dimension(generated: Callable[..., Any]) -> None:
    (values,) = generated(metadata(x=("FP32", [5])), "random", max_batch_size=0)
    assert values["x"].shape == (5,)


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ((), {}, "the model's shape is [-1, 3]"),
        (("x:4",), {}, "does not fit the model's dims [-1, 3]"),
        (("x:4,4",), {}, "does not fit the model's dims [-1, 3]"),
        (("y:4,3",), {}, "the model's inputs are x"),
        (("x",), {}, "write NAME:SIZES"),
        (("x:-1,3",), {}, "write sizes such as"),
        (("x:4,\x1b3",), {}, "write sizes such as"),
        (("x:100000,3",), {"batch": 2000}, "a gRPC message holds 2 GiB"),
        (("x:300000",), {"batch": 2, "max_batch_size": 0}, "takes no batches"),
    ],
)
def test_requests_that_cannot_be_made_are_refused(
    shapes: tuple[str, ...], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = metadata(x=("FP32", [-1, -1, 3] if more.get("max_batch_size", 8) else [-1]))
    values = np.zeros(300_000, "<f4")
    path = data_file(tmp_path, {"data": [{"x": {"b64": b64(values)}}]})
    with pytest.raises(BadInputError) as caught:
        requests(model, path, shapes=shapes, **more)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


# -- read -------------------------------------------------------------------------------------------------------


def test_builders_data_is_read_in_successive_batches(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns: InputSample = {"x": rng.standard_normal((3, 2, 2)).astype(np.float16), "i": rng.integers(-9, 9, (3, 1))}
    write_input_data(tmp_path / "data.json", columns)
    model = metadata(x=("FP16", [-1, 2, 2]), i=("INT64", [-1, 1]))
    result = requests(model, tmp_path / "data.json", batch=2, count=3)
    for request, entries in zip(result, ([0, 1], [2, 0], [1, 2]), strict=True):
        assert np.array_equal(request["x"], columns["x"][entries])
        assert np.array_equal(request["i"], columns["i"][entries])


@pytest.mark.parametrize(
    "tensor",
    [
        [1, 2, 3, 4, 5, 6],
        {"content": [1, 2, 3, 4, 5, 6]},
        {"content": [1, 2, 3, 4, 5, 6], "shape": [2, 3]},
        {"b64": b64(np.arange(1, 7, dtype="<i4"))},
        {"b64": b64(np.arange(1, 7, dtype="<i4")), "shape": [2, 3]},
        {"content": {"b64": b64(np.arange(1, 7, dtype="<i4"))}, "shape": [2, 3]},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_every_form_of_a_tensor_is_read(tmp_path: Path, tensor: object, nested: bool) -> None:
    entry = {"x": tensor}
    path = data_file(tmp_path, {"data": [[entry], [entry]] if nested else [entry, entry]})
    (result,) = requests(metadata(x=("INT32", [-1, 2, 3])), path, batch=2)
    assert result["x"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2


def test_strings_are_read_plain_and_in_base64(tmp_path: Path) -> None:
    packed = serialize_byte_tensor(np.array([b"\xff\x00", b""], object)).item()
    coded = {"b64": base64.b64encode(packed).decode()}
    path = data_file(tmp_path, {"data": [{"s": ["añ", "b"]}, {"s": coded}]})
    (result,) = requests(metadata(s=("BYTES", [-1, 2])), path, batch=2)
    assert result["s"].tolist() == [["añ".encode(), b"b"], [b"\xff\x00", b""]]


def test_entries_bring_their_own_shapes(tmp_path: Path) -> None:
    shaped = [{"content": [1.5, 2], "shape": [2]}, {"content": [3, 4, 5], "shape": [3]}]
    path = data_file(tmp_path, {"data": [{"x": tensor} for tensor in shaped]})
    model = metadata(x=("FP32", [-1, -1]))
    first, second = requests(model, path, count=2)
    assert first["x"].tolist() == [[1.5, 2]]
    assert second["x"].shape == (1, 3)
    with pytest.raises(BadInputError, match=r"shapes \[2\] and \[3\] cannot be in one request"):
        requests(model, path, batch=2)


def test_an_input_that_all_entries_lack_is_left_to_the_server(tmp_path: Path) -> None:
    path = data_file(tmp_path, {"data": [{"x": [1]}, {"x": [2]}]})
    (result,) = requests(metadata(x=("INT8", [-1, 1]), mask=("INT8", [-1, 1])), path)
    assert list(result) == ["x"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "data.json:1: not JSON"),
        ("[" * 100_000, "not JSON; write the format of perf_analyzer"),
        ("[1]", "input data; write the format of perf_analyzer, which begins"),
        ({"dat": []}, "input data; write the format of perf_analyzer, which begins"),
        ({"data": []}, "has no entries; write at least one"),
        ({"data": [3]}, "entry 1: not an object"),
        ({"data": [{"x": [1, 2]}, {"y\x1b": [1]}]}, 'entry 2: has "y\\u001b", but the model\'s inputs are x, s'),
        ({"data": [{"x": [1, 2]}, {}]}, "entry 2: lacks input x"),
        ({"data": [{"x": [1, 2]}, {"x": [1, 2], "s": ["a"]}]}, "entry 2: has input s"),
        ({"data": [{"x": [1]}]}, "entry 1, input x: has 1 values, but the shape [2] has 2"),
        ({"data": [{"x": [1, 2.5]}]}, "2.5 is not UINT8"),
        ({"data": [{"x": [1, True]}]}, "true is not UINT8"),
        ({"data": [{"x": [1, "2"]}]}, '"2" is not UINT8'),
        ({"data": [{"x": [1, 256]}]}, "256 is not UINT8"),
        ({"data": [{"x": [1, [2]]}]}, "has lists in a list; write all values in one list"),
        ('\ufeff{"data": [{"x": [1, 2]}]}', "begins with a byte order mark"),
        ({"data": [{"x": 1}]}, "write a list of values"),
        ({"data": [{"x": {"b64": 1}}]}, "write a list of values"),
        ({"data": [{"x": {"b64": "A"}}]}, "input x: "),
        ({"data": [{"x": {"content": [1, 2], "shape": [1, 2]}}]}, "does not fit the model's [2]"),
        ({"data": [{"x": {"content": [1, 2], "shape": [True]}}]}, "does not fit the model's [2]"),
        ({"data": [{"x": {"content": [1, 2], "shape": "2"}}]}, "does not fit the model's [2]"),
        ({"data": [{"s": [1]}]}, "strings are needed"),
        ({"data": [{"s": {"b64": "/////w=="}}]}, "input s: each string needs its length before it"),
    ],
)
def test_bad_data_is_one_line(tmp_path: Path, document: object, message: str) -> None:
    path = data_file(tmp_path, document)
    with pytest.raises(BadInputError) as caught:
        requests(metadata(x=("UINT8", [-1, 2]), s=("BYTES", [-1, 1])), path, count=2)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_missing_data_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"missing\.json: no such file; check the path$"):
        requests(metadata(x=("UINT8", [-1, 2])), tmp_path / "missing.json")


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
documents = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "x", "s", "b64", "content", "shape", ""]), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(st.dictionaries(st.sampled_from(["x", "s", "f"]), documents, max_size=3), max_size=3))
def test_any_file_content_raises_only_bad_input(tmp_path: Path, entries: list[object]) -> None:
    path = data_file(tmp_path, {"data": entries})
    with contextlib.suppress(BadInputError):
        model = metadata(x=("INT8", [-1, -1]), s=("BYTES", [-1, 1]), f=("FP16", [-1, 1]))
        for result in requests(model, path, count=3):
            to_message("m", result)


# -- messages ---------------------------------------------------------------------------------------------------


def test_a_message_equals_that_of_tritonclient() -> None:
    inputs: InputSample = {
        "f": np.array([[1.5, -2]], np.float32),
        "i": np.array([[2**40]], np.int64),
        "s": np.array([["añ".encode(), b""]], object),
        "none": np.empty((1, 0), object),
        "b": np.array([[True, False]]),
    }
    message = service_pb2.ModelInferRequest.FromString(to_message("m", inputs))
    assert message.model_name == "m"
    for (name, array), tensor, raw in zip(inputs.items(), message.inputs, message.raw_input_contents, strict=True):
        expected = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        assert tensor == expected._get_tensor()
        assert raw == (expected._get_content() or b"")


def test_the_outputs_of_a_response_are_decoded() -> None:
    arrays: InputSample = {
        "f": np.array([[1.5, -2], [0, 3]], np.float16),
        "u": np.array([7], np.uint64),
        "s": np.array([b"ab", b"\xff"], object),
    }
    contents = {name: array.tobytes() for name, array in arrays.items()}
    contents["s"] = serialize_byte_tensor(arrays["s"]).item()
    response = service_pb2.ModelInferResponse(raw_output_contents=[*contents.values(), b"\x80\x3f\x40\xc0"])
    for name, array in arrays.items():
        response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
    response.outputs.add(name="bf", datatype="BF16", shape=[2])
    result = decode_outputs(response)
    for name, array in arrays.items():
        assert result[name].dtype == array.dtype
        assert np.array_equal(result[name], array)
    assert result["bf"].tolist() == [1.0, -3.0]


def test_an_output_without_its_contents_is_refused() -> None:
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="f", datatype="FP32", shape=[1])
    with pytest.raises(ValueError, match="shorter"):
        decode_outputs(response)
