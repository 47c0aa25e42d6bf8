"""Test the comparison of outputs and the output check against the baseline."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import (
    BadInputError,
    DeploymentError,
    EnvironmentFault,
    ModelRefused,
    RequestOverdue,
    ServerCrashed,
)
from optimizer.core.notes import NanOutputs
from optimizer.measure import server_calls
from optimizer.measure.output_check import (
    REFERENCE_ATTEMPTS,
    REFERENCE_SECONDS,
    REQUESTS,
    USUAL_IN_FLIGHT,
    BaselineOutputCheck,
)
from optimizer.measure.output_comparison import (
    DEFAULT_RELATIVE,
    ModelOutputs,
    OutputTensor,
    ReferenceOutputs,
    Tolerance,
    find_difference,
    mean_magnitudes,
    with_precision,
)
from tests.inference_server import FakeInferenceServer, Model

Array = npt.NDArray[Any]
EXACT = ["INT8", "INT64", "UINT8", "BOOL", "BYTES"]


def answer(values: Any, datatype: str = "FP32", dtype: Any = np.float32) -> ModelOutputs:
    return {"y": OutputTensor(datatype, np.array(values, dtype=dtype))}


def difference_text(expected: ModelOutputs, got: ModelOutputs, tolerance: Tolerance | None = None) -> str:
    """Return the text and the place of the difference; an empty string without one."""
    result = find_difference(expected, got, tolerance or Tolerance(), mean_magnitudes([expected]))
    return f"{result.text} {result.place}".rstrip() if result and not result.is_allowed else ""


class TestDifferences:
    def test_the_largest_difference_is_described_with_values_and_place(self) -> None:
        expected, got = answer([[1, 0.39], [2, 3]]), answer([[1, 0.52], [2.004, 3]])
        tolerance = Tolerance(relative=0, absolute=0.001)
        assert difference_text(expected, got, tolerance) == (
            "y by 0.13 (0.52 instead of 0.39), more than 0.001 allowed [0, 1]"
        )

    def test_of_equal_shares_the_larger_distance_is_described(self) -> None:
        expected, got = answer([0, 0, 0]), answer([0.5, -2, 1])
        assert "y by 2 (-2 instead of 0)" in difference_text(expected, got, Tolerance(0, 0))
        allowed = find_difference(expected, got, Tolerance(0, 2), {})
        assert allowed is not None
        assert (allowed.share_of_tolerance, allowed.distance, allowed.text) == (1, 2, "")

    @pytest.mark.parametrize(("datatype", "relative"), DEFAULT_RELATIVE.items())
    def test_a_share_of_the_value_and_of_the_mean_magnitude_is_allowed(self, datatype: str, relative: float) -> None:
        expected = answer([1000, 0, -2000], datatype)  # mean magnitude 1000
        for i, allowed in enumerate((2000, 1000, 3000)):
            for share, differs in ((0.98, False), (1.02, True)):
                got = answer([1000, 0, -2000], datatype)
                got["y"].values[i] += share * allowed * relative
                assert bool(difference_text(expected, got)) is differs

    def test_the_users_tolerance_is_applied(self) -> None:
        assert not difference_text(answer([10.0]), answer([11.0]), Tolerance(relative=0.1, absolute=0.01))
        assert difference_text(answer([10.0]), answer([11.02]), Tolerance(relative=0.1, absolute=0.01))
        assert difference_text(answer([10.0]), answer([10.1]), Tolerance(relative=0, absolute=0))

    @pytest.mark.parametrize("datatype", EXACT)
    def test_types_other_than_floats_must_be_equal(self, datatype: str) -> None:
        dtype = {"BOOL": bool, "BYTES": object}.get(datatype, datatype.lower())
        expected = answer([b"a", b"b"] if datatype == "BYTES" else [1, 0], datatype, dtype)
        got = answer([b"a", b"c"] if datatype == "BYTES" else [1, 1], datatype, dtype)
        generous = Tolerance(relative=1, absolute=10)
        assert not difference_text(expected, expected, generous)
        assert " instead of " in difference_text(expected, got, generous)

    def test_integers_beyond_the_precision_of_floats_differ(self) -> None:
        assert "(9007199254740993 instead of 9007199254740992)" in difference_text(
            answer([2**53], "INT64", np.int64), answer([2**53 + 1], "INT64", np.int64)
        )

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_value_that_is_not_finite_equals_only_itself(self, value: float) -> None:
        assert not difference_text(answer([1, value]), answer([1, value]))
        assert difference_text(answer([1, 2]), answer([1, value])) == f"y is {value:g} instead of 2 [1]"
        assert difference_text(answer([1, value]), answer([1, 2])) == f"y is 2 instead of {value:g} [1]"
        expected_text = "" if math.isnan(value) else f"y is {-value:g} instead of {value:g} [1]"
        assert difference_text(answer([1, value]), answer([1, -value])) == expected_text

    def test_another_type_or_shape_is_a_difference(self) -> None:
        assert difference_text(answer([1]), {}) == "y is missing"
        assert difference_text(answer([1]), answer([1], "FP16", np.float16)) == "y is FP16 instead of FP32"
        assert difference_text(answer([[1, 2]]), answer([[1], [2]])) == "y has the shape [2, 1] instead of [1, 2]"
        assert not difference_text(answer(np.zeros((0, 4))), answer(np.zeros((0, 4))))

    @pytest.mark.parametrize("datatype", ["FP32", "FP64"])
    @pytest.mark.parametrize(
        ("values", "precision"),
        [
            ([0.1, -2.7, 1e-6], ""),
            (np.array([0.1, -2.7, 1e-6], np.float16), "FP16"),
            ([np.float16(0.1)], ""),
            ([0.010009765625, -3.140625, math.inf, math.nan], "BF16"),
            ([1 / 256, 0.5, 255 / 256], ""),
            ([1 / 2048, 1023 / 2048], ""),
            ([0.1], ""),
            ([1e30, 0.5], ""),
            ([1, 0, 300], ""),
            ([], ""),
        ],
    )
    def test_the_precision_of_values_may_be_that_of_a_narrower_type(
        self, values: Any, precision: str, datatype: str
    ) -> None:
        dtype = {"FP32": np.float32, "FP64": np.float64}[datatype]
        alone = [answer([value], datatype, dtype) for value in np.array(values, dtype=dtype)]
        assert [outputs["y"].precision for outputs in with_precision(alone)] == [precision] * len(alone)

    def test_the_default_tolerance_follows_from_the_precision(self) -> None:
        (half,) = with_precision([answer(np.array([0.1, 0.2, 0.3], np.float16))])
        assert not difference_text(half, answer([0.1, 0.2, 0.304]))
        assert difference_text(half, answer([0.1, 0.2, 0.306]))
        assert difference_text(half, answer([0.1, 0.2, 0.304]), Tolerance(relative=0.001))

    @given(st.lists(st.floats(width=32), min_size=1, max_size=20))
    def test_outputs_equal_themselves(self, values: list[float]) -> None:
        assert not difference_text(answer(values), answer(values), Tolerance(0, 0))


# -- the output check ---------------------------------------------------------------------------------------------


def double(feeds: dict[str, Array]) -> dict[str, Array]:
    return {"y": 2 * feeds["x"]}


def slowed(model: Model) -> Model:
    """Return ``model`` with a time for each request, so that requests overlap."""

    def take_time(feeds: dict[str, Array]) -> Mapping[str, Array]:
        time.sleep(0.005)
        return model(feeds)

    return take_time


def scaled_by(factor: float) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return lambda feeds: {"y": (factor * feeds["x"]).astype(np.float32)}


class CheckSetup:
    """A server in this process, whose model a test may replace, and the file of the reference outputs."""

    def __init__(self, server: FakeInferenceServer, endpoint: Endpoint, file: Path) -> None:
        self.server = server
        self.endpoint = endpoint
        self.file = file
        self.folder = file.parent

    def requests(self, data: str) -> Path:
        return self.server.write_requests(self.folder, data)

    def new_check(self, **options: Any) -> BaselineOutputCheck:
        return BaselineOutputCheck(
            self.file, **{"input_data": self.requests("random"), "shapes": (), "request_batch_size": 1, **options}
        )

    def check_with_reference(self) -> BaselineOutputCheck:
        output_check = self.new_check()
        output_check.record_reference(self.endpoint)
        return output_check


@pytest.fixture
def check_setup(tmp_path: Path) -> Iterator[CheckSetup]:
    server = FakeInferenceServer(double)
    with ExitStack() as stack:
        yield CheckSetup(server, stack.enter_context(server.serving()), tmp_path / "reference.npz")


def test_each_request_is_sent_to_the_baseline_twice_and_alone(check_setup: CheckSetup) -> None:
    output_check = check_setup.check_with_reference()
    assert check_setup.server.request_shapes == [(1, 2)] * (2 * REQUESTS)
    assert (output_check.needs_reference, output_check.note) == (False, None)


def test_twice_the_requests_of_a_full_batch_are_sent(check_setup: CheckSetup) -> None:
    output_check = check_setup.check_with_reference()
    check_setup.server.request_shapes.clear()
    output_check.check(check_setup.endpoint)
    assert len(check_setup.server.request_shapes) == max(REQUESTS, USUAL_IN_FLIGHT, 2 * 8)


def test_a_slow_baseline_answers_two_requests_twice(check_setup: CheckSetup) -> None:
    def slow(feeds: dict[str, Array]) -> dict[str, Array]:
        time.sleep(REFERENCE_SECONDS / 2)
        return double(feeds)

    check_setup.server.model = slow
    check_setup.check_with_reference()
    assert check_setup.server.request_shapes == [(1, 2)] * 4


@pytest.mark.parametrize(
    ("seconds_alone", "batched", "unbatched"),
    [(0.01, 64, 16), (0.2, 25, 16), (0.5, 16, 10), (30.0, 16, 4)],
)
def test_fewer_requests_are_sent_to_a_slow_model(
    check_setup: CheckSetup, seconds_alone: float, batched: int, unbatched: int
) -> None:
    check_setup.check_with_reference()
    reference = ReferenceOutputs.read(check_setup.file)
    two = replace(reference, requests=reference.requests[:2], responses=reference.responses[:2])
    replace(two, seconds_alone=seconds_alone).write(check_setup.file)
    for candidate, requests in ((Candidate(32, dynamic_batching=True), batched), (Candidate(32), unbatched)):
        check_setup.server.request_shapes.clear()
        check_setup.new_check().check(replace(check_setup.endpoint, candidate=candidate))
        assert len(check_setup.server.request_shapes) == requests


def test_different_outputs_are_rejected(check_setup: CheckSetup) -> None:
    output_check = check_setup.check_with_reference()
    check_setup.server.model = lambda feeds: {"y": 2 * feeds["x"] + np.float32(0.5)}
    with pytest.raises(DeploymentError, match=rf"y by 0\.5 .* allowed, at \[0, [01]\] of request .*; {REQUESTS} of"):
        output_check.check(check_setup.endpoint)
    check_setup.server.model = lambda feeds: {"z": feeds["x"]}
    with pytest.raises(DeploymentError, match=rf"baseline: y is missing, at request \d+; {REQUESTS} of {REQUESTS}"):
        output_check.check(check_setup.endpoint)


def test_outputs_of_a_model_in_fp16_have_its_tolerance(check_setup: CheckSetup) -> None:
    check_setup.server.model = lambda feeds: {"y": feeds["x"].astype(np.float16).astype(np.float32)}
    output_check = check_setup.check_with_reference()
    check_setup.server.model = lambda feeds: {"y": (feeds["x"] * 1.003).astype(np.float16).astype(np.float32)}
    assert 0 < (output_check.check(check_setup.endpoint) or 0.0) <= 1


def test_a_small_difference_may_be_rounding(check_setup: CheckSetup) -> None:
    hint = "; if that is rounding, allow it with tolerance: in a profile"
    output_check = check_setup.check_with_reference()
    for factor, hints in ((1.01, True), (1.5, False)):
        check_setup.server.model = scaled_by(2 * factor)
        with pytest.raises(DeploymentError, match="outputs differ") as caught:
            output_check.check(check_setup.endpoint)
        assert str(caught.value).endswith(hint) is hints


def test_a_tolerance_of_the_user_is_used(check_setup: CheckSetup) -> None:
    check_setup.check_with_reference()
    check_setup.server.model = lambda feeds: {"y": 2 * feeds["x"] + np.float32(0.5)}
    check_setup.new_check(tolerance=Tolerance(absolute=1.0)).check(check_setup.endpoint)


def test_a_resumed_run_compares_with_the_same_outputs(check_setup: CheckSetup) -> None:
    check_setup.check_with_reference()
    check_setup.server.request_shapes.clear()
    resumed = check_setup.new_check(input_data=check_setup.requests("zero"))  # the file has the requests too
    assert not resumed.needs_reference
    resumed.check(check_setup.endpoint)
    check_setup.server.model = lambda feeds: {"y": 3 * feeds["x"]}
    with pytest.raises(DeploymentError, match="outputs differ"):
        resumed.check(check_setup.endpoint)


@pytest.mark.parametrize(("first", "note"), [(math.nan, NanOutputs("y", 0.5)), (math.inf, None)])
def test_a_baseline_that_answers_nan_is_noted_also_after_a_resume(
    check_setup: CheckSetup, first: float, note: NanOutputs | None
) -> None:
    check_setup.server.model = lambda feeds: {
        "y": feeds["x"] * [[np.float32(first), np.float32(1)]],
        "n": np.array([1]),
    }
    for output_check in (check_setup.check_with_reference(), check_setup.new_check()):
        assert output_check.note == note
        output_check.check(check_setup.endpoint)


def test_a_baseline_with_random_outputs_is_noted_also_after_a_resume(check_setup: CheckSetup) -> None:
    rng = np.random.default_rng(0)
    check_setup.server.model = lambda feeds: {"y": rng.random(feeds["x"].shape, dtype=np.float32)}
    for output_check in (check_setup.check_with_reference(), check_setup.new_check()):
        assert not output_check.needs_reference
        assert "baseline's: the baseline does not repeat its outputs (y by 0." in str(output_check.note)
        output_check.check(check_setup.endpoint)


def fail_request(feeds: dict[str, Array]) -> dict[str, Array]:
    raise RuntimeError("index 12345\nout of range")


def test_a_baseline_that_fails_some_requests_is_tried_again_and_then_noted(check_setup: CheckSetup) -> None:
    answers = itertools.cycle([double, double, fail_request])
    check_setup.server.model = lambda feeds: next(answers)(feeds)
    output_check = check_setup.new_check()
    assert str(output_check.note) == "outputs were not compared with the baseline's: the baseline was not measured"
    for _ in range(REFERENCE_ATTEMPTS):
        assert output_check.needs_reference
        output_check.record_reference(check_setup.endpoint)
    assert not output_check.needs_reference
    assert str(output_check.note).endswith("the server failed a request: index 12345 out of range")
    output_check.check(check_setup.endpoint)
    assert not check_setup.file.exists()


def test_a_baseline_that_fails_every_request_is_refused(check_setup: CheckSetup) -> None:
    check_setup.server.model = fail_request
    with pytest.raises(ModelRefused, match=r"every request fails \(.*index 12345 out of range\); .* --input-data"):
        check_setup.new_check().record_reference(check_setup.endpoint)


def test_another_model_that_fails_every_request_can_get_other_ranges_only(check_setup: CheckSetup) -> None:
    check_setup.server.model = fail_request
    with pytest.raises(ModelRefused, match=r"; correct .* requests with --input-range bert/INPUT:LOW\.\.HIGH$"):
        check_setup.new_check(other_model="bert").record_reference(check_setup.endpoint)


def test_a_baseline_that_fails_every_random_index_is_refused_with_a_hint(check_setup: CheckSetup) -> None:
    check_setup.server.model = fail_request
    with pytest.raises(BadInputError, match=r"12345 out of range; the random data of x, .*--input-range x:0\.\."):
        check_setup.new_check(unbounded=("x",)).record_reference(check_setup.endpoint)


def test_a_baseline_that_takes_too_long_for_a_random_number_is_refused_with_a_hint(check_setup: CheckSetup) -> None:
    """A model may send as many responses as its input says, such as python_backend's example square_int32."""

    def wait_in_vain(*_: object, **__: object) -> list[bytes]:
        raise RequestOverdue("the server did not answer a request in time")

    with pytest.raises(BadInputError, match=r"in time; the random data of x, which .*--input-range x:1\.\.10, or"):
        check_setup.new_check(unbounded=("x",), infer=wait_in_vain).record_reference(check_setup.endpoint)
    bounded = check_setup.new_check(infer=wait_in_vain)
    bounded.record_reference(check_setup.endpoint)
    assert bounded.needs_reference


def test_a_first_request_may_take_longer_than_the_others(check_setup: CheckSetup) -> None:
    """A model may compile kernels during its first request."""
    limits: list[float] = []

    def infer(
        endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
    ) -> list[bytes]:
        limits.append(timeout_seconds)
        if len(limits) == 1:
            raise RequestOverdue("the server did not answer a request in time")
        return server_calls.infer(endpoint, messages, in_flight=in_flight, timeout_seconds=timeout_seconds)

    output_check = check_setup.new_check(unbounded=("x",), infer=infer)
    output_check.record_reference(check_setup.endpoint)
    assert not output_check.needs_reference
    assert output_check.note is None


def test_other_deployments_may_take_four_times_as_long_for_their_first_request(check_setup: CheckSetup) -> None:
    check_setup.check_with_reference()
    reference = ReferenceOutputs.read(check_setup.file)
    replace(reference, first_seconds=40.0, seconds_alone=0.5).write(check_setup.file)
    limits: list[float] = []

    def infer(
        endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
    ) -> list[bytes]:
        limits.append(timeout_seconds)
        return server_calls.infer(endpoint, messages, in_flight=in_flight, timeout_seconds=timeout_seconds)

    check_setup.new_check(infer=infer).check(check_setup.endpoint)
    assert limits == [4 * (40.0 + len(reference.requests) * 0.5)]


def test_a_server_that_hangs_before_the_first_request_has_no_hint_on_random_numbers(check_setup: CheckSetup) -> None:
    check_setup.server.hides_metadata = True
    output_check = check_setup.new_check(unbounded=("x",))
    output_check.record_reference(check_setup.endpoint)
    assert output_check.needs_reference
    assert str(output_check.note).endswith("did not answer a request in time")


def test_requests_that_cannot_be_generated_are_noted(check_setup: CheckSetup) -> None:
    output_check = check_setup.new_check(shapes=("z:3",))
    output_check.record_reference(check_setup.endpoint)
    assert not output_check.needs_reference
    assert "shape z:3: the model's inputs are x" in str(output_check.note)


def test_a_failed_request_of_a_check_is_reported_with_the_servers_message(check_setup: CheckSetup) -> None:
    output_check = check_setup.check_with_reference()
    check_setup.server.model = fail_request
    with pytest.raises(DeploymentError, match=r"^the server failed a request: index 12345 out of range$"):
        output_check.check(check_setup.endpoint)


@pytest.mark.parametrize("refusal", ["Exceeds maximum queue size", "Request timeout expired"])
def test_a_queue_that_refuses_requests_is_checked_with_fewer_at_once(check_setup: CheckSetup, refusal: str) -> None:
    output_check = check_setup.check_with_reference()
    check_setup.server.request_shapes.clear()
    check_setup.server.refusal, check_setup.server.model = refusal, slowed(double)
    assert output_check.check(check_setup.endpoint) == 0
    assert len(check_setup.server.request_shapes) > REQUESTS, "the first attempt was refused"


def test_a_failed_request_is_reported_when_the_others_have_ended(check_setup: CheckSetup) -> None:
    """Closing the connection would cancel them."""
    output_check = check_setup.check_with_reference()
    calls, ended = itertools.count(), list[int]()

    def fails_first(feeds: dict[str, Array]) -> Mapping[str, Array]:
        if not (number := next(calls)):
            raise RuntimeError("no such row")
        time.sleep(0.02)
        ended.append(number)
        return double(feeds)

    check_setup.server.model = fails_first
    with pytest.raises(DeploymentError, match="no such row"):
        output_check.check(check_setup.endpoint)
    assert sorted(ended) == list(range(1, REQUESTS))


def test_a_queue_that_refuses_a_single_request_is_no_dead_server(check_setup: CheckSetup) -> None:
    output_check = check_setup.check_with_reference()

    def expires(feeds: dict[str, Array]) -> dict[str, Array]:
        raise RuntimeError("Request timeout expired")

    check_setup.server.model = expires
    with pytest.raises(DeploymentError, match=r"^the server failed a request: .*Request timeout expired$") as caught:
        output_check.check(check_setup.endpoint)
    assert not isinstance(caught.value, ServerCrashed)


def test_outputs_that_do_not_match_their_shape_are_reported(check_setup: CheckSetup) -> None:
    """A Python backend with another numpy than it was built for sends such outputs."""
    output_check = check_setup.check_with_reference()
    check_setup.server.spoil = lambda _: b""
    message = r"an output does not match its own shape \(.*\); a Python model may have another numpy than"
    with pytest.raises(DeploymentError, match=message):
        output_check.check(check_setup.endpoint)
    check_setup.file.unlink()
    assert "an output does not match its own shape" in str(check_setup.check_with_reference().note)


def test_a_dead_server_is_reported_on_one_line(check_setup: CheckSetup) -> None:
    output_check = check_setup.check_with_reference()
    with pytest.raises(DeploymentError, match="the server died during a request: ") as error:
        output_check.check(Endpoint("m", check_setup.endpoint.candidate, grpc="127.0.0.1:9"))
    assert "\n" not in str(error.value)


def test_an_unwritable_file_is_an_environment_fault(check_setup: CheckSetup, tmp_path: Path) -> None:
    check_setup.file = tmp_path / "no such" / "folder" / "reference.npz"
    with pytest.raises(EnvironmentFault, match="cannot write"):
        check_setup.check_with_reference()


@given(place=st.integers(0, 2**20), byte=st.integers(0, 255), cut=st.integers(0, 64))
def test_a_damaged_file_is_refused_on_one_line(
    damaged_reference: tuple[Path, bytes], place: int, byte: int, cut: int
) -> None:
    """It is either read or refused with a BadInputError."""
    path, whole = damaged_reference
    spoilt = bytearray(whole)
    spoilt[place % len(whole)] = byte
    path.write_bytes(spoilt[: len(whole) - cut])
    fault = ""
    try:
        BaselineOutputCheck(path, input_data=path, shapes=(), request_batch_size=1)
    except BadInputError as error:
        fault = str(error)
    assert "\n" not in fault
    assert not fault or path.name in fault


@pytest.fixture(scope="module")
def damaged_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("damaged") / "reference.npz"
    server = FakeInferenceServer(double)
    with server.serving() as endpoint:
        CheckSetup(server, endpoint, path).check_with_reference()
    return path, path.read_bytes()
