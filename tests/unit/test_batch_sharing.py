"""The budget of a batch: no more is handed out than there is, nobody starves, who is at the end gets none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.batches.sharing import (
    SLICE_SECONDS,
    Slice,
    Standing,
    confirm_seconds,
    minimum_seconds,
    next_slice,
    search_seconds,
)

standings = st.lists(
    st.builds(
        Standing,
        spent_seconds=st.floats(0, 600),
        usual_seconds=st.floats(0.5, 90),
        promise=st.floats(0, 1),
        is_over=st.booleans(),
    ),
    max_size=8,
)
LEFT = 10 * SLICE_SECONDS


@given(standings, st.floats(-10, 3600))
def test_a_slice_fits_and_is_for_one_that_goes_on(entries: list[Standing], left_seconds: float) -> None:
    found = next_slice(entries, left_seconds)
    going_on = [one for one in entries if not one.is_over and one.usual_seconds <= left_seconds and left_seconds > 0]
    assert (found is None) == (not going_on)
    if found is not None:
        chosen = entries[found.index]
        assert not chosen.is_over
        assert chosen.usual_seconds <= found.seconds <= left_seconds
        assert all(chosen.promise_per_second >= one.promise_per_second for one in going_on)


@given(standings, st.floats(0, 3600), st.data())
def test_all_slices_together_are_no_more_than_there_is(
    entries: list[Standing], left_seconds: float, data: st.DataObject
) -> None:
    """Whatever the slices change in what the entries promise; and they come to an end."""
    handed_out, rounds = 0.0, 0
    while (found := next_slice(entries, left_seconds - handed_out)) is not None:
        handed_out += found.seconds
        rounds += 1
        one = entries[found.index]
        promise, over = data.draw(st.floats(0, 1)), data.draw(st.booleans())
        entries[found.index] = replace(
            one, spent_seconds=one.spent_seconds + found.seconds, promise=promise, is_over=over
        )
    assert handed_out <= left_seconds * (1 + 1e-9)
    assert rounds <= left_seconds / SLICE_SECONDS + 1


@given(st.integers(2, 8), st.integers(1, 40))
def test_equal_promises_take_turns(entries: int, rounds: int) -> None:
    every = [Standing(60.0, 5.0, 0.1)] * entries
    got = [0] * entries
    for _ in range(rounds):
        found = next_slice(every, 1e9)
        assert found is not None
        got[found.index] += 1
        one = every[found.index]
        every[found.index] = replace(one, spent_seconds=one.spent_seconds + found.seconds)
    assert max(got) - min(got) <= 1


@given(st.floats(1, 1e5), st.integers(1, 100))
def test_the_minimums_and_the_confirmations_make_up_the_budget(budget_seconds: float, entries: int) -> None:
    minimum = minimum_seconds(budget_seconds, entries)
    assert minimum > 0
    left_seconds = budget_seconds - entries * minimum
    for left in range(entries, 0, -1):
        left_seconds -= confirm_seconds(left_seconds, left)
    assert left_seconds == pytest.approx(0, abs=1e-6 * budget_seconds)
    assert entries * minimum == pytest.approx(search_seconds(budget_seconds))


def test_a_small_gain_that_comes_quickly_is_worth_more() -> None:
    slow, quick = Standing(0, 60.0, 0.10), Standing(0, 4.0, 0.02)
    assert next_slice([slow, quick], LEFT) == Slice(1, SLICE_SECONDS)


def test_slow_deployments_get_two_of_them() -> None:
    assert next_slice([Standing(0, 40.0, 0.5), Standing(0, 40.0, 0.1)], LEFT) == Slice(0, 80.0)


def test_no_rest_is_left_that_is_too_short_for_a_slice() -> None:
    left = 1.4 * SLICE_SECONDS
    assert next_slice([Standing(0, 5.0, 0.5), Standing(0, 5.0, 0.1)], left) == Slice(0, left)


def test_the_last_one_gets_all_there_is() -> None:
    assert next_slice([Standing(0, 5.0, 0.01), Standing(0, 5.0, 0.5, is_over=True)], LEFT) == Slice(0, LEFT)
