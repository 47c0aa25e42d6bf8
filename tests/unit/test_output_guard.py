"""What counts as another answer, and what the guard makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.answers.comparison import DEFAULT_RELATIVE, Answer, Tensor, Tolerance, difference, magnitudes
from optimizer.answers.guard import LEAST_IN_FLIGHT, REFERENCE_ATTEMPTS, REQUESTS, OutputGuard
from optimizer.errors import BadInputError, DeploymentError, EnvironmentFault
from optimizer.interfaces import Endpoint
from tests.answering_server import AnsweringServer

Array = npt.NDArray[Any]
EXACT = ["INT8", "INT64", "UINT8", "BOOL", "BYTES"]


def answer(values: Any, datatype: str = "FP32", dtype: Any = np.float32) -> Answer:
    return {"y": Tensor(datatype, np.array(values, dtype=dtype))}


def told(expected: Answer, got: Answer, tolerance: Tolerance | None = None) -> str:
    """The difference in words, with its place; empty without one."""
    found = difference(expected, got, tolerance or Tolerance(), magnitudes([expected]))
    return f"{found.text} {found.place}".rstrip() if found else ""


class TestDifferences:
    def test_the_largest_is_told_with_both_values_and_its_place(self) -> None:
        expected, got = answer([[1, 0.39], [2, 3]]), answer([[1, 0.52], [2.004, 3]])
        tolerance = Tolerance(relative=0, absolute=0.001)
        assert told(expected, got, tolerance) == ("y by 0.13 (0.52 instead of 0.39), more than 0.001 allowed [0, 1]")

    @pytest.mark.parametrize(("datatype", "relative"), DEFAULT_RELATIVE.items())
    def test_a_share_of_the_value_and_of_the_mean_magnitude_is_allowed(self, datatype: str, relative: float) -> None:
        expected = answer([1000, 0, -2000], datatype)  # mean magnitude 1000
        for i, allowed in enumerate((2000, 1000, 3000)):
            for share, differs in ((0.98, False), (1.02, True)):
                got = answer([1000, 0, -2000], datatype)
                got["y"].values[i] += share * allowed * relative
                assert bool(told(expected, got)) is differs

    def test_what_the_user_allows_is_allowed(self) -> None:
        assert not told(answer([10.0]), answer([11.0]), Tolerance(relative=0.1, absolute=0.01))
        assert told(answer([10.0]), answer([11.02]), Tolerance(relative=0.1, absolute=0.01))
        assert told(answer([10.0]), answer([10.1]), Tolerance(relative=0, absolute=0))

    @pytest.mark.parametrize("datatype", EXACT)
    def test_all_but_floats_are_exact(self, datatype: str) -> None:
        dtype = {"BOOL": bool, "BYTES": object}.get(datatype, datatype.lower())
        expected = answer([b"a", b"b"] if datatype == "BYTES" else [1, 0], datatype, dtype)
        got = answer([b"a", b"c"] if datatype == "BYTES" else [1, 1], datatype, dtype)
        generous = Tolerance(relative=1, absolute=10)
        assert not told(expected, expected, generous)
        assert " instead of " in told(expected, got, generous)

    def test_integers_beyond_what_floats_hold_differ(self) -> None:
        assert "(9007199254740993 instead of 9007199254740992)" in told(
            answer([2**53], "INT64", np.int64), answer([2**53 + 1], "INT64", np.int64)
        )

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_equals_its_like_alone(self, value: float) -> None:
        assert not told(answer([1, value]), answer([1, value]))
        assert told(answer([1, 2]), answer([1, value])) == f"y is {value:g} instead of 2 [1]"
        assert told(answer([1, value]), answer([1, 2])) == f"y is 2 instead of {value:g} [1]"
        assert told(answer([1, value]), answer([1, -value])) == ("" if math.isnan(value) else told_signs(value))

    def test_another_form_is_a_difference(self) -> None:
        assert told(answer([1]), {}) == "y is missing"
        assert told(answer([1]), answer([1], "FP16", np.float16)) == "y is FP16 instead of FP32"
        assert told(answer([[1, 2]]), answer([[1], [2]])) == "y has the shape [2, 1] instead of [1, 2]"
        assert not told(answer(np.zeros((0, 4))), answer(np.zeros((0, 4))))

    @given(st.lists(st.floats(width=32), min_size=1, max_size=20))
    def test_an_answer_equals_itself(self, values: list[float]) -> None:
        assert not told(answer(values), answer(values), Tolerance(0, 0))


def told_signs(value: float) -> str:
    return f"y is {-value:g} instead of {value:g} [1]"


# -- the guard ----------------------------------------------------------------------------------------------------


def double(feeds: dict[str, Array]) -> dict[str, Array]:
    return {"y": 2 * feeds["x"]}


class Served:
    """A server whose model can be exchanged between two questions."""

    def __init__(self, server: AnsweringServer, endpoint: Endpoint, file: Path) -> None:
        self.server = server
        self.endpoint = endpoint
        self.file = file

    def guard(
        self, input_data: str = "random", shapes: tuple[str, ...] = (), tolerance: Tolerance | None = None
    ) -> OutputGuard:
        return OutputGuard(self.file, input_data=input_data, shapes=shapes, request_batch_size=1, tolerance=tolerance)

    def referred(self) -> OutputGuard:
        guard = self.guard()
        guard.reference(self.endpoint)
        return guard


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = AnsweringServer(double)
    with ExitStack() as stack:
        yield Served(server, stack.enter_context(server.serving()), tmp_path / "reference.npz")


def test_the_baseline_is_asked_one_request_at_a_time_and_each_twice(served: Served) -> None:
    guard = served.referred()
    assert served.server.asked == [(1, 2)] * (2 * REQUESTS)
    assert (guard.needs_reference, guard.note) == (False, "")


def test_twice_what_fills_a_batch_is_sent(served: Served) -> None:
    guard = served.referred()
    served.server.asked.clear()
    guard.check(served.endpoint)
    assert len(served.server.asked) == max(REQUESTS, LEAST_IN_FLIGHT, 2 * 8)


def test_other_answers_are_rejected(served: Served) -> None:
    guard = served.referred()
    served.server.model = lambda feeds: {"y": 2 * feeds["x"] + np.float32(0.5)}
    with pytest.raises(DeploymentError, match=rf"y by 0\.5 .* allowed, at \[0, [01]\] of request .*; {REQUESTS} of"):
        guard.check(served.endpoint)
    served.server.model = lambda feeds: {"z": feeds["x"]}
    with pytest.raises(DeploymentError, match=rf"baseline's: y is missing, at request \d+; {REQUESTS} of {REQUESTS}"):
        guard.check(served.endpoint)


def test_a_tolerance_of_the_user_is_used(served: Served) -> None:
    served.referred()
    served.server.model = lambda feeds: {"y": 2 * feeds["x"] + np.float32(0.5)}
    served.guard(tolerance=Tolerance(absolute=1.0)).check(served.endpoint)


def test_a_resumed_run_compares_with_the_same_answers(served: Served) -> None:
    served.referred()
    served.server.asked.clear()
    resumed = served.guard(input_data="zero")  # what was asked is in the file, too
    assert not resumed.needs_reference
    resumed.check(served.endpoint)
    served.server.model = lambda feeds: {"y": 3 * feeds["x"]}
    with pytest.raises(DeploymentError, match="answers differ"):
        resumed.check(served.endpoint)


def test_a_baseline_that_answers_at_random_is_noted_also_after_a_resume(served: Served) -> None:
    rng = np.random.default_rng(0)
    served.server.model = lambda feeds: {"y": rng.random(feeds["x"].shape, dtype=np.float32)}
    for guard in (served.referred(), served.guard()):
        assert not guard.needs_reference
        assert "baseline's: it does not repeat its own (y by 0." in guard.note
        guard.check(served.endpoint)


def fails(feeds: dict[str, Array]) -> dict[str, Array]:
    raise RuntimeError("index 12345\nout of range")


def test_a_baseline_that_fails_requests_is_asked_again_and_then_noted(served: Served) -> None:
    served.server.model = fails
    guard = served.guard()
    assert guard.note == "answers were not compared with the baseline's: it was not asked"
    for _ in range(REFERENCE_ATTEMPTS):
        assert guard.needs_reference
        guard.reference(served.endpoint)
    assert not guard.needs_reference
    assert guard.note.endswith("the server failed a request: index 12345 out of range")
    guard.check(served.endpoint)
    assert not served.file.exists()


def test_requests_that_cannot_be_made_are_noted(served: Served) -> None:
    guard = served.guard(shapes=("z:3",))
    guard.reference(served.endpoint)
    assert not guard.needs_reference
    assert "shape z:3: the model's inputs are x" in guard.note


def test_a_server_that_fails_a_request_of_a_check_is_rejected_with_its_words(served: Served) -> None:
    guard = served.referred()
    served.server.model = fails
    with pytest.raises(DeploymentError, match=r"^the server failed a request: index 12345 out of range$"):
        guard.check(served.endpoint)


def test_outputs_that_do_not_fill_their_shape_are_told(served: Served) -> None:
    """As those of a Python backend that has another numpy than it was built for."""
    guard = served.referred()
    served.server.spoil = lambda _: b""
    told = r"an output does not fill its own shape \(.*\); of a model in Python: has the server another numpy"
    with pytest.raises(DeploymentError, match=told):
        guard.check(served.endpoint)
    served.file.unlink()
    assert "an output does not fill its own shape" in served.referred().note


def test_a_server_that_is_gone_is_one_line(served: Served) -> None:
    guard = served.referred()
    with pytest.raises(DeploymentError, match="the server died over a request: ") as error:
        guard.check(Endpoint("m", served.endpoint.candidate, grpc="127.0.0.1:9"))
    assert "\n" not in str(error.value)


def test_answers_that_cannot_be_kept_are_a_fault_of_the_machine(served: Served, tmp_path: Path) -> None:
    served.file = tmp_path / "no such" / "folder" / "reference.npz"
    with pytest.raises(EnvironmentFault, match="cannot write"):
        served.referred()


@given(place=st.integers(0, 2**20), byte=st.integers(0, 255), cut=st.integers(0, 64))
def test_a_damaged_file_is_one_clear_line(damaged: tuple[Path, bytes], place: int, byte: int, cut: int) -> None:
    """Or is read all the same: nothing but a clean error, ever."""
    path, whole = damaged
    spoilt = bytearray(whole)
    spoilt[place % len(whole)] = byte
    path.write_bytes(spoilt[: len(whole) - cut])
    fault = ""
    try:
        OutputGuard(path, input_data="random", shapes=(), request_batch_size=1)
    except BadInputError as error:
        fault = str(error)
    assert "\n" not in fault
    assert not fault or path.name in fault


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("damaged") / "reference.npz"
    server = AnsweringServer(double)
    with server.serving() as endpoint:
        Served(server, endpoint, path).referred()
    return path, path.read_bytes()
