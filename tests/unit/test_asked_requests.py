"""What a user asks to be sent, fitted to a model: to files that every part which sends requests reads alike."""

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
from optimizer.errors import BadInputError, MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.requests import data
from optimizer.requests.asked import Asked
from optimizer.requests.data import Tensor
from optimizer.requests.fitted import Requests, fitted
from optimizer.requests.hostile import HintingLoad, hint
from optimizer.requests.sent import Sent
from optimizer.trial import Candidate, LoadPoint

MODEL = """\
name: "m"
max_batch_size: 8
input { name: "ids" data_type: TYPE_INT64 dims: -1 }
input { name: "mask" data_type: TYPE_INT32 dims: -1 }
input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] }
"""
TEXTS = 'name: "m" input { name: "s" data_type: TYPE_STRING dims: 3 }'
ONE = Sent()
LENGTHS = ("ids,mask:4..7",)
TENSORS = [
    Tensor("ids", "INT64", (-1,), True),
    Tensor("mask", "INT32", (-1,), True),
    Tensor("x", "FP32", (2, 2), True),
]


def config(text: str = MODEL) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def samples(asked: Asked, cache: Path, sent: Sent = ONE, tensors: Any = TENSORS, model: str = MODEL) -> Any:
    found = fitted(asked, config(model), sent, cache)
    assert found.shapes == ()
    assert Path(found.input_data).parent == cache / "requests"
    return data.read(Path(found.input_data), tensors)


# -- made up ----------------------------------------------------------------------------------------------------


def test_what_perf_analyzer_makes_itself_is_left_to_it(tmp_path: Path) -> None:
    shapes = ("ids:16", "mask:16", "mask:8")
    found = fitted(Asked("zero", shapes), config(), Sent(), tmp_path)
    assert found == Requests("zero", ("ids:16", "mask:8"), largest={"ids": (16,), "mask": (8,)})
    assert fitted(Asked("", shapes), config(), Sent(), tmp_path).unbounded == ("ids", "mask")
    assert list(tmp_path.iterdir()) == []


def test_a_mix_of_shapes_has_the_same_length_in_inputs_named_together(tmp_path: Path) -> None:
    found = samples(Asked(shapes=LENGTHS), tmp_path)
    assert all(one["ids"].shape == one["mask"].shape for one in found)
    assert Counter(one["ids"].shape for one in found) == {(n,): 64 for n in (4, 5, 6, 7)}
    assert len({one["x"].tobytes() for one in found}) == 256
    assert fitted(Asked(shapes=LENGTHS), config(), ONE, tmp_path).largest == {"ids": (7,), "mask": (7,)}


def test_inputs_named_apart_have_lengths_of_their_own(tmp_path: Path) -> None:
    found = samples(Asked(shapes=("ids:4..7", "mask:4..7")), tmp_path)
    assert any(one["ids"].shape != one["mask"].shape for one in found)


def test_a_request_of_several_samples_has_one_shape(tmp_path: Path) -> None:
    found = samples(Asked(shapes=LENGTHS), tmp_path, Sent(3, open_loop=True))
    lengths = [one["ids"].size for one in found]
    assert len(found) == 3 * 256
    assert all(len(set(lengths[i : i + 3])) == 1 for i in range(0, len(lengths), 3))
    with pytest.raises(BadInputError, match=r"shapes ids,mask:4\.\.7: perf_analyzer sends .* take --load rate"):
        fitted(Asked(shapes=LENGTHS), config(), Sent(3), tmp_path)


def test_samples_of_a_mix_of_requests_have_one_shape(tmp_path: Path) -> None:
    mixed = Sent(2, open_loop=True, mixed=True)
    with pytest.raises(BadInputError, match="samples of different shapes cannot be in one request of 2"):
        fitted(Asked(shapes=LENGTHS), config(), mixed, tmp_path)
    assert fitted(Asked(shapes=("ids,mask:8",)), config(), mixed, tmp_path).shapes == ("ids:8", "mask:8")


def test_what_perf_analyzer_would_prepare_for_long_is_thinned(tmp_path: Path) -> None:
    entries = [{"ids": [i, i], "mask": [0, 1]} for i in range(1000)]
    (tmp_path / "many.json").write_text(json.dumps({"data": entries}))
    asked = Asked(str(tmp_path / "many.json"), ("ids,mask:2",))
    found = fitted(asked, config(), Sent(4096), tmp_path)
    kept = json.loads(Path(found.input_data).read_text())["data"]
    assert len(kept) == 128
    assert [kept[0], kept[-1]] == [entries[0], entries[992]]
    assert found.note.startswith("128 of the 1,000 samples given are sent: ")
    for sent in (Sent(4096, open_loop=True), Sent(512), Sent(1)):
        whole = fitted(asked, config(), sent, tmp_path)
        assert (whole.input_data, whole.note) == (str(tmp_path / "many.json"), "")


def test_bounds_are_reached_and_kept(tmp_path: Path) -> None:
    asked = Asked(shapes=("ids,mask:50",), ranges=("ids:0..9", "x:-1..1"))
    found = samples(asked, tmp_path)
    assert {value for one in found for value in one["ids"].tolist()} == set(range(10))
    assert all(np.abs(one["x"]).max() <= 1 for one in found)
    assert fitted(asked, config(), Sent(), tmp_path).unbounded == ("mask",)


@pytest.mark.parametrize(
    ("asked", "lengths"),
    [
        (Asked(string_data="añ"), {3}),
        (Asked(string_length=7), {7}),
        (Asked("zero", string_length=7), {7}),
    ],
)
def test_strings(asked: Asked, lengths: set[int], tmp_path: Path) -> None:
    found = samples(asked, tmp_path, tensors=[Tensor("s", "BYTES", (3,), False)], model=TEXTS)
    assert {len(text) for one in found for text in one["s"]} == lengths
    assert ({text for one in found for text in one["s"]} == {"añ".encode()}) == (asked.string_data is not None)


def test_large_requests_are_fewer(tmp_path: Path) -> None:
    found = samples(Asked(shapes=("ids,mask:100000..300000",)), tmp_path)
    assert len(found) == 8
    assert max(one["ids"].size for one in found) > 2 * min(one["ids"].size for one in found)
    with pytest.raises(BadInputError, match="MiB; ask for smaller shapes"):
        fitted(Asked(shapes=("ids,mask:1..100000000",)), config(), Sent(), tmp_path)


def test_the_same_is_the_same_file(tmp_path: Path) -> None:
    def file(seed: int) -> str:
        return fitted(Asked(shapes=LENGTHS), config(), Sent(seed=seed), tmp_path).input_data

    assert file(0) == file(0) != file(1)
    assert len(list((tmp_path / "requests").iterdir())) == 2


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (Asked(), "input 'ids' of m has dims [-1], which random requests cannot fill: give --shape ids:128"),
        (Asked("zero", ("ids:3",)), "input 'mask' of m has dims [-1]"),
        (Asked(shapes=("x:2,3",)), "shape x:2,3: x is [2, 2]"),
        (Asked(shapes=("ids,y:3",)), "shape ids,y:3: the model's inputs are ids, mask, x"),
        (Asked(ranges=("ids:0.5..9",)), "range ids:0.5..9: ids is INT64: write whole numbers from -922"),
        (Asked(ranges=("mask:0..2147483648",)), "to 2147483647"),
        (Asked("zero", ranges=("ids:0..9",)), "range ids:0..9: the values are to be zero"),
    ],
)
def test_what_does_not_fit_the_model(asked: Asked, what: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        fitted(asked, config(), Sent(), tmp_path)
    assert what in str(caught.value)


# -- given ------------------------------------------------------------------------------------------------------


def test_arrays_become_perf_analyzers_json(tmp_path: Path) -> None:
    arrays = {"ids": np.arange(8).reshape(2, 4), "mask": np.ones((2, 4)), "x": np.zeros((2, 2, 2))}
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    found = samples(Asked(str(tmp_path / "d.npz")), tmp_path)
    assert [one["ids"].tolist() for one in found] == arrays["ids"].tolist()
    entry = json.loads(
        Path(fitted(Asked(str(tmp_path / "d.npz")), config(), Sent(), tmp_path).input_data).read_text()
    )
    assert entry["data"][0]["ids"]["shape"] == [4]


def test_perf_analyzers_json_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"ids": [1, 2], "mask": [1, 1], "x": [0, 0, 0, 0]}
    (tmp_path / "d.json").write_text(json.dumps({"data": [entry]}))
    monkeypatch.chdir(tmp_path)
    found = fitted(Asked("d.json", ("ids,mask:2",)), config(), Sent(8), tmp_path / "cache")
    assert found == Requests(str(tmp_path / "d.json"), ("ids:2", "mask:2"), largest={"ids": (2,), "mask": (2,)})
    with pytest.raises(BadInputError, match=r"shape ids,mask:2\.\.3: a mix is of random requests"):
        fitted(Asked("d.json", ("ids,mask:2..3",)), config(), Sent(), tmp_path)


def test_samples_of_different_lengths(tmp_path: Path) -> None:
    text = 'ids,mask,x\n"[1,2]","[1,1]","[0,0,0,0]"\n"[1,2,3]","[1,1,1]","[0,0,0,0]"\n'
    (tmp_path / "d.csv").write_text(text)
    asked = Asked(str(tmp_path / "d.csv"))
    assert [one["ids"].size for one in samples(asked, tmp_path)] == [2, 3]
    assert fitted(asked, config(), ONE, tmp_path).largest == {"ids": (3,), "mask": (3,)}
    for sent, what in ((Sent(2), "take --load rate"), (Sent(2, open_loop=True), "put samples of one shape together")):
        with pytest.raises(BadInputError, match=what):
            fitted(asked, config(), sent, tmp_path)


# -- the command line over the profile --------------------------------------------------------------------------


def test_of_two_the_command_line_counts(tmp_path: Path) -> None:
    profile = Asked("zero", ("ids,mask:16",), ("x:0..1",), "a", 5)
    assert Asked().over(profile) == profile
    assert Asked("random", ("ids:8",), string_length=6).over(profile) == Asked(
        "random", ("ids,mask:16", "ids:8"), ("x:0..1",), "a", 6
    )
    assert Asked("d.npz").over(profile) == Asked("d.npz")
    found = fitted(Asked("", ("ids:8",)).over(Asked("", ("ids,mask:16",))), config(), Sent(), tmp_path)
    assert found.shapes == ("ids:8", "mask:16")


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
def test_an_index_out_of_bounds_is_known(message: str, highest: str) -> None:
    assert f"--input-range ids:0..{highest}," in hint(message, ("ids", "mask"))
    assert "in ids, mask," in hint(message, ("ids", "mask"))
    assert hint(message, ()) == ""


@pytest.mark.parametrize("message", ["no such weights", "unexpected shape for input 'ids'", "out of memory"])
def test_other_failures_get_no_hint(message: str) -> None:
    assert hint(message, ("ids",)) == ""


class Failing:
    """A load generator that fails as it is told."""

    def __init__(self, *outcomes: Exception | Measurement) -> None:
        self.outcomes = list(outcomes)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return None


ENDPOINT, LOAD = Endpoint("m", Candidate(8)), LoadPoint(1, 1)


def test_a_model_that_never_answered_ends_the_run() -> None:
    with pytest.raises(BadInputError, match=r"out of data bounds.*--input-range ids:0\.\.9"):
        HintingLoad(Failing(MeasurementError(ORT)), ("ids",)).measure(ENDPOINT, LOAD)


def test_one_that_answered_before_only_fails_the_measurement() -> None:
    load = HintingLoad(Failing(Measurement(5.0), MeasurementError(ORT)), ("ids",))
    assert load.measure(ENDPOINT, LOAD) == Measurement(5.0)
    with pytest.raises(MeasurementError, match="--input-range ids"):
        load.windows(ENDPOINT, LOAD, 1.0, 1)


@pytest.mark.parametrize("error", [ServerCrashed(ORT), MeasurementError("perf_analyzer had to be killed")])
def test_other_errors_are_as_they_were(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        HintingLoad(Failing(error), ("ids",)).measure(ENDPOINT, LOAD)
    assert caught.value is error
