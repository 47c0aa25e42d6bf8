"""Times of the responses of one request as text."""

from __future__ import annotations

import numpy as np
import pytest

from objectives import response_times


def test_a_text_has_the_times_of_the_first_responses_only() -> None:
    assert response_times.to_text([41.2, 52.75, 64.0, 80.12345]) == "41.2 52.75 64 80.123"
    assert response_times.from_text("41.2 52.75 64") == (41.2, 52.75, 64.0)
    assert response_times.from_text("") == ()
    text = response_times.to_text(float(ms) for ms in range(1000))
    assert response_times.from_text(text) == tuple(map(float, range(response_times.MAX_RESPONSES)))


@pytest.mark.parametrize("text", ["-1", "x", "nan", "1 20000000", "1 " * 257, "1" * 10_000])
def test_a_text_that_is_no_list_of_times_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of at most 256 times from 0 to 10000000 ms"):
        response_times.from_text(text)


def test_times_must_be_in_their_order() -> None:
    with pytest.raises(ValueError, match="not a list of times in their order"):
        response_times.from_text("5 4")


def test_the_request_with_the_median_latency_is_chosen() -> None:
    requests = [np.array([1.0, 90.0]), np.array([2.0, 30.0]), np.array([]), np.array([3.0, 60.0, 70.0])]
    assert response_times.median_request(requests) == "3 60 70"
    assert response_times.median_request(requests[:2]) == "2 30"
    assert response_times.median_request([np.array([])]) == ""
