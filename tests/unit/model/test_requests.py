"""The user's request options, fitted to a model and stored as files that all load generators read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, MeasurementError, ParameterError, RequestFailed, ServerCrashed
from optimizer.core.notes import OpenLoopSampleLimit
from optimizer.core.request_sizes import TokenRequests, parse_token_lengths
from optimizer.core.trial import LoadPoint
from optimizer.measure.explained_failures import REFUSED_CONFIGURATIONS, RefusedRequestsLoadGenerator, index_hint
from optimizer.measure.load_client.open_loop import LateError
from optimizer.model import input_data
from optimizer.model.input_data import InputTensor
from optimizer.model.requests import (
    GENERATED_BYTES,
    MAX_GENERATED_SAMPLES,
    RequestBatching,
    RequestOptions,
    Requests,
    generated_kind,
    prepare_requests,
)

MODEL = """\
name: "m"
max_batch_size: 8
input { name: "ids" data_type: TYPE_INT64 dims: -1 }
input { name: "mask" data_type: TYPE_INT32 dims: -1 }
input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] }
"""
TEXTS = 'name: "m" input { name: "s" data_type: TYPE_STRING dims: 3 }'
ONE = RequestBatching()
LENGTHS = ("ids,mask:4..7",)
TENSORS = [
    InputTensor("ids", "INT64", (-1,), True),
    InputTensor("mask", "INT32", (-1,), True),
    InputTensor("x", "FP32", (2, 2), True),
]


def config(text: str = MODEL) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def samples(
    options: RequestOptions,
    cache: Path,
    sent: RequestBatching = ONE,
    tensors: Any = TENSORS,
    model: str = MODEL,
    shapes: tuple[str, ...] = (),
) -> Any:
    result = prepare_requests(options, config(model), sent, cache)
    assert result.shapes == shapes
    assert result.input_data.parent == cache / "requests"
    return list(input_data.parse_entries(result.input_data, tensors))


# -- generated --------------------------------------------------------------------------------------------------


def test_all_load_generators_read_the_same_random_requests(tmp_path: Path) -> None:
    """perf_analyzer would send one request of any bits, such as NaN, and tune's own client other numbers."""
    shapes = ("ids:16", "mask:16", "mask:8")
    result = prepare_requests(RequestOptions("random", shapes), config(), ONE, tmp_path)
    assert result.input_data.name.startswith("random-")
    assert (result.shapes, result.unbounded, result.has_unbounded_numbers) == (
        ("ids:16", "mask:8"),
        ("ids", "mask"),
        True,
    )
    assert result.largest == {"ids": (16,), "mask": (8,)}
    sent = list(input_data.parse_entries(result.input_data, TENSORS))
    assert len({item["ids"].tobytes() for item in sent}) == len(sent) == MAX_GENERATED_SAMPLES
    floats = np.array([item["x"] for item in sent])
    assert np.isfinite(floats).all()
    assert abs(float(floats.std()) - 1) < 0.2
    assert max(abs(int(item["ids"].max())) for item in sent) > 2**62


def test_zero_requests_are_a_file_too(tmp_path: Path) -> None:
    result = prepare_requests(RequestOptions("zero", ("ids,mask:8",)), config(), ONE, tmp_path)
    assert result.input_data.name.startswith("zero-")
    assert (result.unbounded, result.has_unbounded_numbers) == ((), False)
    assert not any(
        array.any() for item in input_data.parse_entries(result.input_data, TENSORS) for array in item.values()
    )


def test_large_random_samples_are_few_whatever_the_size_of_a_request(tmp_path: Path) -> None:
    """perf_analyzer reads the file at each of its starts, and fills a request with the same samples again."""
    image = MODEL.replace("dims: [ 2, 2 ]", "dims: [ 3, 224, 224 ]")
    for batch in (1, 8):
        result = prepare_requests(
            RequestOptions(shapes=("ids,mask:1",)), config(image), RequestBatching(batch), tmp_path
        )
        assert len(input_data.read_entries(result.input_data)) == 3
        assert result.input_data.stat().st_size < 1.5 * GENERATED_BYTES


@pytest.mark.parametrize(("open_loop", "count"), [(False, 1), (True, 3)])
def test_large_requests_of_large_random_samples_fit_into_shared_memory(
    open_loop: bool, count: int, tmp_path: Path
) -> None:
    """perf_analyzer copies a whole request there for each sample: 462 MB for three images in requests of 256."""
    image = config(MODEL.replace("dims: [ 2, 2 ]", "dims: [ 3, 224, 224 ]"))
    options = RequestOptions(shapes=("ids,mask:1",))
    result = prepare_requests(options, image, RequestBatching(256, open_loop), tmp_path)
    assert len(input_data.read_entries(result.input_data)) == count


@pytest.mark.parametrize(("open_loop", "count"), [(False, 64), (True, MAX_GENERATED_SAMPLES)])
def test_random_samples_are_as_few_as_perf_analyzer_prepares(open_loop: bool, count: int, tmp_path: Path) -> None:
    """None of them is left out, so no note advises another load."""
    options = RequestOptions(shapes=("ids,mask:1",))
    result = prepare_requests(options, config(), RequestBatching(8192, open_loop), tmp_path)
    assert len(input_data.read_entries(result.input_data)) == count
    assert result.input_data.name.startswith("random-")
    assert result.note is None


def test_a_mix_of_shapes_has_the_same_length_in_inputs_named_together(tmp_path: Path) -> None:
    result = samples(RequestOptions(shapes=LENGTHS), tmp_path)
    assert all(item["ids"].shape == item["mask"].shape for item in result)
    assert Counter(item["ids"].shape for item in result) == {(n,): 64 for n in (4, 5, 6, 7)}
    assert len({item["x"].tobytes() for item in result}) == 256
    assert prepare_requests(RequestOptions(shapes=LENGTHS), config(), ONE, tmp_path).largest == {
        "ids": (7,),
        "mask": (7,),
    }


def test_inputs_named_separately_have_independent_lengths(tmp_path: Path) -> None:
    result = samples(RequestOptions(shapes=("ids:4..7", "mask:4..7")), tmp_path)
    assert any(item["ids"].shape != item["mask"].shape for item in result)


def test_a_request_of_several_samples_has_one_shape(tmp_path: Path) -> None:
    result = samples(RequestOptions(shapes=LENGTHS), tmp_path, RequestBatching(3, open_loop=True))
    lengths = [item["ids"].size for item in result]
    assert len(result) == 3 * 256
    assert all(len(set(lengths[i : i + 3])) == 1 for i in range(0, len(lengths), 3))
    with pytest.raises(BadInputError, match=r"shapes ids,mask:4\.\.7: perf_analyzer sends .* or send at a rate "):
        prepare_requests(RequestOptions(shapes=LENGTHS), config(), RequestBatching(3), tmp_path)


def test_samples_of_a_mix_of_requests_have_one_shape(tmp_path: Path) -> None:
    mixed = RequestBatching(2, open_loop=True, mixed=True)
    with pytest.raises(BadInputError, match="samples of different shapes cannot be in one request of 2"):
        prepare_requests(RequestOptions(shapes=LENGTHS), config(), mixed, tmp_path)
    assert prepare_requests(RequestOptions(shapes=("ids,mask:8",)), config(), mixed, tmp_path).shapes == (
        "ids:8",
        "mask:8",
    )


def test_many_samples_in_large_requests_are_limited(tmp_path: Path) -> None:
    entries = [{"ids": [i, i], "mask": [0, 1], "x": [0] * 4} for i in range(1000)]
    (tmp_path / "many.json").write_text(json.dumps({"data": entries}))
    options = RequestOptions(str(tmp_path / "many.json"), ("ids,mask:2",))
    result = prepare_requests(options, config(), RequestBatching(4096), tmp_path)
    sent_entries = json.loads(result.input_data.read_text())["data"]
    assert len(sent_entries) == 128
    assert [sent_entries[0], sent_entries[-1]] == [entries[0], entries[992]]
    assert str(result.note).startswith("128 of the 1,000 samples are sent: ")
    for batching in (RequestBatching(4096, open_loop=True), RequestBatching(512), RequestBatching(1)):
        whole = prepare_requests(options, config(), batching, tmp_path)
        assert (whole.input_data, whole.note) == (tmp_path / "many.json", None)


@pytest.mark.parametrize("kind", ["random", "zero"])
def test_fewer_generated_samples_have_no_note(kind: str, tmp_path: Path) -> None:
    options = RequestOptions(kind, ("ids,mask:2",))
    generated = prepare_requests(options, config(), RequestBatching(1), tmp_path)
    limited = generated.limited(RequestBatching(1 << 16), tmp_path)  # those of a sweep
    assert (input_data.count_entries(generated.input_data), input_data.count_entries(limited.input_data)) == (128, 8)
    assert limited.note is None
    assert generated_kind(limited.input_data.name) == generated_kind(generated.input_data.name) == kind


def test_an_open_loop_takes_samples_of_all_parts_of_a_large_file(tmp_path: Path) -> None:
    entries = [{"ids": [i]} for i in range(input_data.MAX_SENT_ENTRIES + 1000)]
    (tmp_path / "many.json").write_text(json.dumps({"data": entries}))
    model = 'name: "m" max_batch_size: 8 input { name: "ids" data_type: TYPE_INT64 dims: 1 }'
    options = RequestOptions(str(tmp_path / "many.json"))
    result = prepare_requests(options, config(model), RequestBatching(4, open_loop=True), tmp_path)
    sent_ids = [entry["ids"][0] for entry in json.loads(result.input_data.read_text())["data"]]
    assert input_data.MAX_SENT_ENTRIES - 8 < len(sent_ids) <= input_data.MAX_SENT_ENTRIES
    assert (sent_ids[:4], sent_ids[-1]) == ([0, 1, 2, 3], len(entries) - 5), (
        "the last but one of 16,634 requests is chosen"
    )
    assert all(first_id % 4 == 0 for first_id in sent_ids[::4]), "samples of a request stay together"
    assert str(result.note).startswith("65,536 of the 66,536 samples are sent, chosen evenly: ")


def test_an_open_loop_takes_a_part_of_large_samples(tmp_path: Path) -> None:
    ids = np.arange(40 * 2**17).reshape(40, 2**17)  # 1 MiB each
    np.savez(tmp_path / "large.npz", ids=ids, mask=np.zeros((40, 1), np.int32), x=np.zeros((40, 2, 2), np.float32))
    options = RequestOptions(str(tmp_path / "large.npz"))
    result = prepare_requests(options, config(), RequestBatching(1, open_loop=True), tmp_path)
    assert 0 < result.input_data.stat().st_size <= 1.1 * input_data.MAX_SENT_BYTES
    assert isinstance(result.note, OpenLoopSampleLimit)
    assert result.note.recorded == 40


def test_bounds_are_reached_and_kept(tmp_path: Path) -> None:
    options = RequestOptions(shapes=("ids,mask:50",), ranges=("ids:0..9", "x:-1..1"))
    result = samples(options, tmp_path, shapes=("ids:50", "mask:50"))
    assert {value for item in result for value in item["ids"].tolist()} == set(range(10))
    assert all(np.abs(item["x"]).max() <= 1 for item in result)
    assert prepare_requests(options, config(), RequestBatching(), tmp_path).unbounded == ("mask",)


def test_row_numbers_are_valid_unless_the_user_gives_a_range(tmp_path: Path) -> None:
    ranges = {"ids": (0, 4), "mask": (0, 2**40), "other": (0, 1)}
    options = RequestOptions(shapes=("ids,mask:50",))
    result = prepare_requests(options, config(), ONE, tmp_path, index_ranges=ranges)
    assert (result.unbounded, result.has_unbounded_numbers) == ((), True)  # x has random floats
    drawn = list(input_data.parse_entries(result.input_data, TENSORS))
    assert {value for item in drawn for value in item["ids"].tolist()} == set(range(5))
    assert all(item["mask"].min() >= 0 for item in drawn)
    options = RequestOptions(shapes=("ids,mask:50",), ranges=("ids:7..8",))
    result = prepare_requests(options, config(), ONE, tmp_path, index_ranges=ranges)
    assert {int(value) for item in input_data.parse_entries(result.input_data, TENSORS) for value in item["ids"]} == {
        7,
        8,
    }


@pytest.mark.parametrize(("datatype", "mean"), [("BOOL", 0.5), ("FP16", 32752)])
def test_row_numbers_of_a_long_table_are_values_of_the_type(datatype: str, mean: float, tmp_path: Path) -> None:
    """The graph converts them to row numbers."""
    tensor = InputTensor("x", datatype, (1000,), has_batch=False)
    text = f'name: "m" input {{ name: "x" data_type: TYPE_{datatype} dims: 1000 }}'
    result = prepare_requests(RequestOptions(), config(text), ONE, tmp_path, index_ranges={"x": (0, 99_999)})
    drawn = np.concatenate([sample["x"] for sample in input_data.parse_entries(result.input_data, [tensor])])
    assert drawn.astype(float).mean() == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (RequestOptions(string_data="añ"), {3}),
        (RequestOptions(string_length=7), {7}),
        (RequestOptions("zero", string_length=7), {7}),
    ],
)
def test_strings_have_the_text_of_the_options_or_their_length(
    options: RequestOptions, lengths: set[int], tmp_path: Path
) -> None:
    result = samples(options, tmp_path, tensors=[InputTensor("s", "BYTES", (3,), False)], model=TEXTS)
    assert {len(text) for item in result for text in item["s"]} == lengths
    assert ({text for item in result for text in item["s"]} == {"añ".encode()}) == (options.string_data is not None)


def test_large_requests_are_fewer(tmp_path: Path) -> None:
    result = samples(RequestOptions(shapes=("ids,mask:100000..300000",)), tmp_path)
    assert len(result) == 8
    assert max(item["ids"].size for item in result) > 2 * min(item["ids"].size for item in result)
    with pytest.raises(BadInputError, match="MiB; give smaller shapes"):
        prepare_requests(RequestOptions(shapes=("ids,mask:1..100000000",)), config(), RequestBatching(), tmp_path)


def test_equal_options_share_a_file(tmp_path: Path) -> None:
    def file(seed: int) -> Path:
        return prepare_requests(
            RequestOptions(shapes=LENGTHS), config(), RequestBatching(seed=seed), tmp_path
        ).input_data

    assert file(0) == file(0) != file(1)
    assert len(list((tmp_path / "requests").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            RequestOptions(),
            "input 'ids' of m has dims [-1], which random requests cannot fill: give --shape ids,mask:128, a mix "
            "such as --shape ids,mask:16..128, or --input-data FILE (in a profile request.shapes, such as "
            "{ids: [128]}, or",
        ),
        (RequestOptions("zero", ("ids:3",)), "input 'mask' of m has dims [-1]"),
        (RequestOptions(shapes=("x:2,3",)), "shape x:2,3: x has dims [2, 2]; write sizes that fit, such as 2,2"),
        (RequestOptions(shapes=("ids,y:3",)), "shape ids,y:3: the model's inputs are ids, mask, x"),
        (RequestOptions(ranges=("ids:0.5..9",)), "range ids:0.5..9: ids is INT64: write whole numbers from -922"),
        (RequestOptions(ranges=("mask:0..2147483648",)), "to 2147483647"),
        (
            RequestOptions("zero", ranges=("ids:0..9",)),
            "range ids:0..9: input data zero has no range of values; leave the range out",
        ),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options: RequestOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        prepare_requests(options, config(), RequestBatching(), tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("datatype", "message"),
    [("BOOL", "x is BOOL: write 0..0, 1..1 or 0..1"), ("STRING", "x is BYTES, but a range needs numbers")],
)
def test_a_range_fits_the_type_of_its_input(datatype: str, message: str, tmp_path: Path) -> None:
    text = f'name: "m" input {{ name: "x" data_type: TYPE_{datatype} dims: 1 }}'
    with pytest.raises(BadInputError, match=f"^range x:0..2: {message}"):
        prepare_requests(RequestOptions(ranges=("x:0..2",)), config(text), RequestBatching(), tmp_path)


def test_the_proposed_sizes_fit_the_model(tmp_path: Path) -> None:
    text = MODEL.replace("dims: [ 2, 2 ]", "dims: [ 3, -1, -1 ]")
    assert text != MODEL
    with pytest.raises(BadInputError) as caught:
        prepare_requests(RequestOptions(), config(text), RequestBatching(), tmp_path)
    assert "give --shape ids,mask:128 --shape x:3,128,128, a mix such as" in str(caught.value)
    for shapes in (("ids,mask:128", "x:3,128,128"), ("ids,mask:16..128", "x:3,16..128,16..128")):
        assert " ".join(f"--shape {shape}" for shape in shapes) in str(caught.value)
        prepare_requests(RequestOptions(shapes=shapes), config(text), RequestBatching(), tmp_path)
    with pytest.raises(BadInputError, match=r"^shape x:128: x has dims \[3, -1, -1\]; .*, such as 3,128,128$"):
        prepare_requests(RequestOptions(shapes=("x:128",)), config(text), RequestBatching(), tmp_path)


# -- recorded ---------------------------------------------------------------------------------------------------


def test_arrays_become_perf_analyzers_json(tmp_path: Path) -> None:
    arrays = {"ids": np.arange(8).reshape(2, 4), "mask": np.ones((2, 4)), "x": np.zeros((2, 2, 2))}
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    result = samples(RequestOptions(str(tmp_path / "d.npz")), tmp_path)
    assert [item["ids"].tolist() for item in result] == arrays["ids"].tolist()
    entry = json.loads(
        Path(
            prepare_requests(
                RequestOptions(str(tmp_path / "d.npz")), config(), RequestBatching(), tmp_path
            ).input_data
        ).read_text()
    )
    assert entry["data"][0]["ids"]["shape"] == [4]


def test_perf_analyzer_json_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"ids": [1, 2], "mask": [1, 1], "x": [0, 0, 0, 0]}
    (tmp_path / "d.json").write_text(json.dumps({"data": [entry]}))
    monkeypatch.chdir(tmp_path)
    result = prepare_requests(
        RequestOptions("d.json", ("ids,mask:2",)), config(), RequestBatching(8), tmp_path / "cache"
    )
    assert result == Requests(tmp_path / "d.json", ("ids:2", "mask:2"), largest={"ids": (2,), "mask": (2,)})
    with pytest.raises(BadInputError, match=r"shape ids,mask:2\.\.3: a mix applies to random requests"):
        prepare_requests(RequestOptions("d.json", ("ids,mask:2..3",)), config(), RequestBatching(), tmp_path)


def test_samples_of_different_lengths_need_requests_of_one_sample(tmp_path: Path) -> None:
    text = 'ids,mask,x\n"[1,2]","[1,1]","[0,0,0,0]"\n"[1,2,3]","[1,1,1]","[0,0,0,0]"\n'
    (tmp_path / "d.csv").write_text(text)
    options = RequestOptions(str(tmp_path / "d.csv"))
    assert [item["ids"].size for item in samples(options, tmp_path)] == [2, 3]
    assert prepare_requests(options, config(), ONE, tmp_path).largest == {"ids": (3,), "mask": (3,)}
    for sent, message in (
        (RequestBatching(2), "or send at a rate"),
        (RequestBatching(2, open_loop=True), "put samples of one shape together"),
    ):
        with pytest.raises(BadInputError, match=message):
            prepare_requests(options, config(), sent, tmp_path)


# -- the command line over the profile --------------------------------------------------------------------------


def test_command_line_overrides_the_profile(tmp_path: Path) -> None:
    profile = RequestOptions("zero", ("ids,mask:16",), ("x:0..1",), "a", 5)
    assert RequestOptions().over(profile) == profile
    assert RequestOptions("random", ("ids:8",), string_length=6).over(profile) == RequestOptions(
        "random", ("ids,mask:16", "ids:8"), ("x:0..1",), "a", 6
    )
    assert RequestOptions("d.npz").over(profile) == RequestOptions("d.npz")
    random = RequestOptions("random", ("ids,mask:16",), ("x:0..1",))
    assert RequestOptions("zero").over(random) == RequestOptions("zero", ("ids,mask:16",))
    with pytest.raises(BadInputError, match=r"range x:0\.\.2: input data zero has no range of values"):
        prepare_requests(RequestOptions("zero", ranges=("x:0..2",)).over(random), config(), ONE, tmp_path)
    result = prepare_requests(
        RequestOptions("", ("ids:8",)).over(RequestOptions("", ("ids,mask:16",))),
        config(),
        RequestBatching(),
        tmp_path,
    )
    assert result.shapes == ("ids:8", "mask:16")


def test_an_input_that_no_entry_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('{"data": [{"ids": {"content": [1], "shape": [1]}, "x": [1, 2, 3, 4]}]}')
    with pytest.raises(BadInputError, match=r"data\.json: lacks input mask; it has ids, x$"):
        prepare_requests(RequestOptions(str(path)), config(), ONE, tmp_path)
    optional = MODEL.replace("TYPE_INT32 dims: -1", "TYPE_INT32 dims: -1 optional: true")
    assert prepare_requests(RequestOptions(str(path)), config(optional), ONE, tmp_path).input_data == path


# -- random integers that break a model -------------------------------------------------------------------------

ORT = "Status Message: indices element out of data bounds, idx=-14 must be within the inclusive range [-10,9]"


@pytest.mark.parametrize(
    ("message", "highest"),
    [
        (ORT, "9"),
        ("IndexError: index out of range in self", "30521"),
        ("indices[0,0] = 5 is not in [0, 10)", "30521"),
        ("IndexError: index 7 is out of bounds for axis 0 with size 5", "30521"),
        ("CUDA error: device-side assert triggered", "30521"),
    ],
)
def test_index_out_of_bounds_gets_a_hint(message: str, highest: str) -> None:
    assert f"--input-range ids,mask:0..{highest}," in index_hint(message, ("ids", "mask"))
    assert "data of ids, mask," in index_hint(message, ("ids", "mask"))
    assert index_hint(message, ()) == ""


OTHER_CUDA = "CUDA error: misaligned address. Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.mark.parametrize(
    "message", ["no such weights", "unexpected shape for input 'ids'", "out of memory", OTHER_CUDA]
)
def test_other_failures_get_no_hint(message: str) -> None:
    assert index_hint(message, ("ids",)) == ""


def test_only_the_tuned_model_can_get_real_requests() -> None:
    hint = index_hint(ORT, ("bert/ids",), "bert")
    assert hint.endswith("tune bert instead, because only the tuned model gets real requests (--input-data FILE)")
    load = RefusedRequestsLoadGenerator(Failing(MeasurementError(ORT)), ("ids",), other_models=("bert", "mlp"))
    with pytest.raises(
        BadInputError, match=r"; bert, mlp can get bounds only, with --input-range MODEL/INPUT:LOW\.\.HIGH$"
    ):
        load.measure(ENDPOINT, LOAD)


class Failing:
    """A load generator that fails with a chosen error."""

    def __init__(self, *outcomes: Exception | Measurement) -> None:
        self.outcomes = list(outcomes)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return None


ENDPOINT, LOAD = Endpoint("m", Candidate(8)), LoadPoint(1, 1)


def test_a_model_that_never_answered_ends_the_run() -> None:
    with pytest.raises(BadInputError, match=r"out of data bounds.*--input-range ids:0\.\.9"):
        RefusedRequestsLoadGenerator(Failing(MeasurementError(ORT)), ("ids",)).measure(ENDPOINT, LOAD)


def test_requests_that_perf_analyzer_cannot_read_end_the_run() -> None:
    unread = "error: Failed to init manager inputs: The 'validation_data' field doesn't align with 'data' field"
    with pytest.raises(BadInputError, match=r"doesn't align .*: correct the file of --input-data"):
        RefusedRequestsLoadGenerator(Failing(MeasurementError(unread)), ()).measure(ENDPOINT, LOAD)


def test_model_that_answered_before_only_fails_the_measurement() -> None:
    load = RefusedRequestsLoadGenerator(Failing(Measurement(5.0), MeasurementError(ORT)), ("ids",))
    assert load.measure(ENDPOINT, LOAD) == Measurement(5.0)
    with pytest.raises(MeasurementError, match="--input-range ids"):
        load.measure_windows(ENDPOINT, LOAD, 1.0, 1)


RAISED = "Failed to process the request(s) for model 'm_0_0', message: ValueError: value 1.85e+31 is out of range"


def test_a_model_in_python_that_takes_no_random_number_ends_the_run() -> None:
    """A check of the model's own may refuse negative numbers, which half of the random floats are."""
    load = RefusedRequestsLoadGenerator(Failing(MeasurementError(RAISED)), (), True, ENDPOINT.candidate)
    with pytest.raises(BadInputError, match=r"value 1\.85e\+31 is out of range; .*--input-range NAME:LOW\.\.HIGH"):
        load.measure(ENDPOINT, LOAD)


def test_an_exception_for_another_candidate_than_the_baseline_only_fails_its_measurement() -> None:
    """A resumed run or a worker of a cluster may measure it first."""
    load = RefusedRequestsLoadGenerator(Failing(MeasurementError(RAISED)), (), True, Candidate(1))
    with pytest.raises(MeasurementError, match=r"; .*--input-range NAME:LOW\.\.HIGH"):
        load.measure(ENDPOINT, LOAD)


@pytest.mark.parametrize(
    "cause",
    ["CUDA out of memory. Tried to allocate 2.00 GiB", "Failed to allocate memory for requested buffer of size 8"],
)
def test_a_lack_of_memory_gets_no_hint_on_random_numbers(cause: str) -> None:
    """Another configuration may need less memory, so the run continues."""
    error = MeasurementError(f"Failed to process the request(s) for model 'm_0_0', message: RuntimeError: {cause}")
    load = RefusedRequestsLoadGenerator(Failing(error), (), True, ENDPOINT.candidate)
    with pytest.raises(MeasurementError) as caught:
        load.measure(ENDPOINT, LOAD)
    assert caught.value is error


def refused(number: int, message: str = RAISED) -> RequestFailed:
    return RequestFailed(f"a request failed at concurrency {number}: {message.replace('m_0_0', f'm_0_{number}')}")


@pytest.mark.parametrize(("has_unbounded_numbers", "is_stateful"), [(False, False), (True, False), (False, True)])
def test_requests_that_no_configuration_answers_end_the_run(
    *, has_unbounded_numbers: bool, is_stateful: bool
) -> None:
    """The rule that three failed deployments end a run does not apply, because the deployments succeed."""
    outcomes = [refused(number, "'m_0_0' has no such weights") for number in (4, 2, 4, 8)]
    load = RefusedRequestsLoadGenerator(Failing(*outcomes), (), has_unbounded_numbers, Candidate(1), is_stateful)
    for size in (1, 1, 2):  # the baseline is measured at two loads
        with pytest.raises(RequestFailed):
            load.measure(Endpoint("m", Candidate(size)), LOAD)
    with pytest.raises(BadInputError) as caught:
        load.measure(Endpoint("m", Candidate(4)), LOAD)
    assert str(caught.value) == (
        f"{outcomes[-1]}; no measurement succeeded in the first {REFUSED_CONFIGURATIONS} configurations, so they are "
        "not the cause: give requests that the model takes with --input-data FILE, or correct the model"
        + ("" if is_stateful else ", or permit some failures with --max-error-rate")  # refused for a stateful model
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("outcomes", "first"),
    [
        ([Measurement(5.0), refused(1), refused(2), refused(3)], 1),
        ([refused(1), refused(2), refused(3, "another error"), refused(4, "no such weights")], 1),
        ([refused(number, "inference request rejected: Exceeds maximum queue size") for number in (1, 2, 3, 4)], 1),
        ([refused(number, "CUDA out of memory. Tried to allocate 2.00 GiB") for number in (1, 2, 3, 4)], 1),
        ([refused(number) for number in (1, 2, 3, 4)], 8),
        ([MeasurementError("perf_analyzer ended with exit code 1: it broke")] * 4, 1),
        ([LateError("the load generator was late")] * 4, 1),
    ],
    ids=[
        *("one succeeded", "different errors", "the queue was full", "no memory", "baseline not measured"),
        *("perf_analyzer failed", "sent late"),
    ],
)
def test_other_repeated_failures_do_not_end_the_run(outcomes: list[Exception | Measurement], first: int) -> None:
    """The baseline has the ``max_batch_size`` of ``first``."""
    load = RefusedRequestsLoadGenerator(Failing(*outcomes), (), baseline=Candidate(first))
    for size, expected in enumerate(outcomes, start=1):
        endpoint = Endpoint("m", Candidate(size))
        if isinstance(expected, Measurement):
            assert load.measure(endpoint, LOAD) == expected
            continue
        with pytest.raises(MeasurementError) as caught:
            load.measure(endpoint, LOAD)
        assert caught.value is expected


def test_requests_of_the_user_get_no_hint_on_random_numbers() -> None:
    load = RefusedRequestsLoadGenerator(Failing(error := MeasurementError(RAISED)), ())
    with pytest.raises(MeasurementError) as caught:
        load.measure(ENDPOINT, LOAD)
    assert caught.value is error


@pytest.mark.parametrize(
    "error", [ServerCrashed(ORT), MeasurementError("perf_analyzer did not end in time and was killed")]
)
def test_other_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        RefusedRequestsLoadGenerator(Failing(error), ("ids",)).measure(ENDPOINT, LOAD)
    assert caught.value is error


# -- prompts and numbers of tokens, in inputs as the backends declare them -------------------------------------------

VLLM = """\
name: "vllm"
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 }
"""
TENSORRT_LLM = """\
name: "tensorrt_llm"
max_batch_size: 64
input { name: "input_ids" data_type: TYPE_INT32 dims: -1 allow_ragged_batch: true }
input { name: "input_lengths" data_type: TYPE_INT32 dims: 1 reshape { } }
input { name: "request_output_len" data_type: TYPE_INT32 dims: 1 }
input { name: "streaming" data_type: TYPE_BOOL dims: 1 }
"""
TEXT = '{"max_tokens": {tokens}, "ignore_eos": true}'


def tokens(prompt_input: str, output_input: str, **more: Any) -> TokenRequests:
    return TokenRequests(parse_token_lengths("3..6"), parse_token_lengths("8..9"), prompt_input, output_input, **more)


def token_samples(model: str, requests: TokenRequests, cache: Path, *ranges: str) -> list[input_data.InputSample]:
    config = text_format.Parse(model, ModelConfig())
    result = prepare_requests(RequestOptions(ranges=ranges), config, RequestBatching(), cache, requests)
    types = {"TYPE_STRING": "BYTES"}
    tensors = []
    for tensor in config.input:
        name = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
        datatype = types.get(name, name.removeprefix("TYPE_"))
        tensors.append(InputTensor(tensor.name, datatype, tuple(tensor.dims), config.max_batch_size > 0))
    return list(input_data.parse_entries(result.input_data, tensors))


def test_requests_for_vllm_have_a_text_and_parameters_as_json(tmp_path: Path) -> None:
    sent = token_samples(VLLM, tokens("text_input", "sampling_parameters", output_text=TEXT), tmp_path, "stream:1..1")
    words = [sample["text_input"][0].decode().split() for sample in sent]
    assert {len(row) for row in words} == {3, 4, 5, 6}
    assert len({" ".join(row) for row in words}) > 200
    parameters = [json.loads(sample["sampling_parameters"][0]) for sample in sent]
    assert {row["max_tokens"] for row in parameters} == {8, 9}
    assert all(row["ignore_eos"] is True for row in parameters)
    assert all(sample["stream"].tolist() == [True] for sample in sent)


def test_requests_for_tensorrt_llm_have_the_number_of_tokens(tmp_path: Path) -> None:
    requests = tokens("input_ids", "request_output_len", length_input="input_lengths")
    sent = token_samples(TENSORRT_LLM, requests, tmp_path, "input_ids:0..31999", "streaming:1..1")
    assert all(sample["input_lengths"].tolist() == [sample["input_ids"].size] for sample in sent)
    assert {int(sample["request_output_len"][0]) for sample in sent} == {8, 9}
    assert max(np.max(sample["input_ids"]) for sample in sent) < 32000


@pytest.mark.parametrize(
    ("model", "requests", "ranges", "words"),
    [
        (VLLM, tokens("text_input", "sampling_parameters"), (), "a string needs tokens.output_text, such as '{"),
        (VLLM, tokens("stream", "sampling_parameters", output_text=TEXT), (), "it is BOOL [1], but a prompt needs"),
        (TENSORRT_LLM, tokens("input_ids", "request_output_len", output_text=TEXT), (), "only a string has tokens"),
        (
            TENSORRT_LLM,
            tokens("input_ids", "request_output_len", length_input="streaming"),
            (),
            "length_input: streaming: it is BOOL [1]",
        ),
        (TENSORRT_LLM, tokens("input_ids", "streaming"), (), "output_input: streaming: it is BOOL [1]"),
        (TENSORRT_LLM, tokens("input_ids", "request_output_len"), ("streaming:0..2",), "streaming is BOOL: write"),
        (
            TENSORRT_LLM,
            tokens("input_ids", "request_output_len", length_input="input_lengths"),
            ("input_lengths:0..2",),
            "input input_lengths: the tokens: section gives its values",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, model: str, requests: TokenRequests, ranges: tuple[str, ...], words: str
) -> None:
    with pytest.raises((BadInputError, ParameterError)) as caught:
        token_samples(model, requests, tmp_path, *ranges)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
