"""The part of the budget that each entry of a batch gets next."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from optimizer.study.batch.batch_runner import (
    SLICE_SECONDS,
    Allocation,
    EntryState,
    next_allocation,
)

entry_states = st.lists(
    st.builds(
        EntryState,
        spent_seconds=st.floats(0, 600),
        trial_seconds=st.floats(0.5, 90),
        expected_improvement=st.floats(0, 1),
        is_over=st.booleans(),
    ),
    max_size=8,
)
LEFT = 10 * SLICE_SECONDS


@given(entry_states, st.floats(-10, 3600))
def test_an_allocation_fits_and_is_for_an_open_search(entries: list[EntryState], left_seconds: float) -> None:
    allocation = next_allocation(entries, left_seconds)
    open_states = [
        state for state in entries if not state.is_over and state.trial_seconds <= left_seconds and left_seconds > 0
    ]
    assert (allocation is None) == (not open_states)
    if allocation is not None:
        chosen = entries[allocation.index]
        assert not chosen.is_over
        assert chosen.trial_seconds <= allocation.seconds <= left_seconds
        assert all(chosen.improvement_per_second >= state.improvement_per_second for state in open_states)


@given(entry_states, st.floats(0, 3600), st.data())
def test_all_allocations_together_fit_the_budget(
    entries: list[EntryState], left_seconds: float, data: st.DataObject
) -> None:
    """The allocations end, whatever improvement the entries report after each."""
    allocated, rounds = 0.0, 0
    while (allocation := next_allocation(entries, left_seconds - allocated)) is not None:
        allocated += allocation.seconds
        rounds += 1
        state = entries[allocation.index]
        expected_improvement, over = data.draw(st.floats(0, 1)), data.draw(st.booleans())
        entries[allocation.index] = replace(
            state,
            spent_seconds=state.spent_seconds + allocation.seconds,
            expected_improvement=expected_improvement,
            is_over=over,
        )
    assert allocated <= left_seconds * (1 + 1e-9)
    assert rounds <= left_seconds / SLICE_SECONDS + 1


@given(st.integers(2, 8), st.integers(1, 40))
def test_equal_entries_take_turns(entries: int, rounds: int) -> None:
    every = [EntryState(60.0, 5.0, 0.1)] * entries
    got = [0] * entries
    for _ in range(rounds):
        allocation = next_allocation(every, 1e9)
        assert allocation is not None
        got[allocation.index] += 1
        state = every[allocation.index]
        every[allocation.index] = replace(state, spent_seconds=state.spent_seconds + allocation.seconds)
    assert max(got) - min(got) <= 1


def test_a_small_gain_that_is_quick_comes_first() -> None:
    slow, quick = EntryState(0, 60.0, 0.10), EntryState(0, 4.0, 0.02)
    assert next_allocation([slow, quick], LEFT) == Allocation(1, SLICE_SECONDS)


def test_slow_entries_get_time_for_two_deployments() -> None:
    assert next_allocation([EntryState(0, 40.0, 0.5), EntryState(0, 40.0, 0.1)], LEFT) == Allocation(0, 80.0)


def test_a_rest_that_is_too_short_is_allocated_at_once() -> None:
    left = 1.4 * SLICE_SECONDS
    assert next_allocation([EntryState(0, 5.0, 0.5), EntryState(0, 5.0, 0.1)], left) == Allocation(0, left)


def test_the_last_one_gets_all_there_is() -> None:
    assert next_allocation([EntryState(0, 5.0, 0.01), EntryState(0, 5.0, 0.5, is_over=True)], LEFT) == Allocation(
        0, LEFT
    )
