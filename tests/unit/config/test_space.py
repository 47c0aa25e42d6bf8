"""Tests of the search space: choices, valid combinations and canonical candidates."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.config.model_config import ENVIRONMENT
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate, FieldValue
from tests.conftest import not_none

THREADS = "parameters.intra_op_thread_count.string_value"
ORDERING = "dynamic_batching.preserve_ordering"


def candidate_with(space: SearchSpace, **values: FieldValue) -> Candidate | None:
    """Return the candidate with ``values`` and the first choice of each other parameter."""
    first_choices = {name: choices[0] for name, choices in space.parameters().items()}
    return space.candidate(first_choices | values)


def test_the_preferred_sizes_of_another_model_fit_its_batches_and_its_delay() -> None:
    size, delay, preferred = (
        f"first/{key}" for key in ("max_batch_size", "max_queue_delay_microseconds", "preferred_batch_size")
    )
    space = SearchSpace((1,), fields={size: (4, 8), delay: ("off", 0), preferred: ("none", "8")})
    fields = [dict(candidate.fields) for candidate in space.candidates()]
    combinations = [(settings[size], settings[delay], settings[preferred]) for settings in fields]
    assert combinations == [(4, "off", "none"), (4, 0, "none"), (8, "off", "none"), (8, 0, "none"), (8, 0, "8")]
    assert len(space) == 5
    values: dict[str, str | int | float] = {**dict.fromkeys(space.parameters(), 1)}
    values |= {"max_queue_delay_us": "off", "preferred_batch_sizes": "none"}
    assert space.candidate({**values, size: 4, delay: 0, preferred: "8"}) is None
    off = space.candidate({**values, size: 4, delay: "off", preferred: "8"})
    assert off == space.candidate({**values, size: 4, delay: "off", preferred: "none"})
    with pytest.raises(ValueError, match=r"first/preferred_batch_size: 8: no choice divides or fits .* 4; give"):
        SearchSpace((1,), fields={size: (4,), preferred: ("8",)})


def test_a_resource_of_the_rate_limiter_may_have_choices() -> None:
    path = "instance_group.0.rate_limiter.resources.0.count"
    assert SearchSpace((1,), fields={path: (1, 2)}).fields == {path: (1, 2)}


def test_parameters_are_the_choices_by_name() -> None:
    space = SearchSpace((4, 8, 4), ("off", 0), ([4],), (2,), {THREADS: (1, 2)})
    assert space.parameters() == {
        "max_batch_size": (4, 8),
        "max_queue_delay_us": ("off", 0),
        "preferred_batch_sizes": ("4",),
        "instance_count": (2,),
        THREADS: (1, 2),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": ()}, "max_batch_size: give at least one value"),
        ({"max_batch_size": (-1,)}, "max_batch_size: -1 is not a whole number"),
        ({"max_batch_size": (True,)}, "max_batch_size: True is not a whole number"),
        ({"max_batch_size": (0, 8)}, "max_batch_size: 0 .* cannot be mixed"),
        ({"max_queue_delay_us": (False,)}, 'max_queue_delay_us: False is neither .* "off"'),
        ({"max_queue_delay_us": (2**31,)}, "max_queue_delay_us: 2147483648 is not"),
        ({"max_queue_delay_us": ("on",)}, "max_queue_delay_us: 'on' is neither"),
        ({"preferred_batch_sizes": ("half",)}, "preferred_batch_sizes: 'half' are not batch sizes"),
        ({"instance_count": (0,)}, "instance_count: 0 is not a whole number from 1"),
        ({"fields": {"max_batch_size": (1,)}}, "max_batch_size: write space.max_batch_size in a profile"),
        (
            {"fields": {"instance_group.0.count": (1,)}},
            "instance_group.0.count: write space.instance_group_count",
        ),
        ({"fields": {"default_model_filename": ("m", "$(x)")}}, "default_model_filename: .*shell"),
        ({"fields": {"m/default_model_filename": ("a b",)}}, "m/default_model_filename: .*shell"),
        ({"fields": {ENVIRONMENT: ("/x/$(y)",)}}, f"{ENVIRONMENT}: .*shell"),
        ({"fields": {THREADS: ()}}, f"{THREADS}: give at least one value"),
        ({"fields": {THREADS: (float("nan"),)}}, f"{THREADS}: nan is not"),
        ({"fields": {THREADS: (None,)}}, f"{THREADS}: None is not"),
        ({"request_batch_size": 0}, "request_batch_size: 0 is not"),
        ({"request_batch_size": 16}, "no valid configuration: max_batch_size 8, .* request batch size 16"),
    ],
)
def test_choices_without_a_valid_candidate_are_reported_on_one_line(
    arguments: dict[str, object], message: str
) -> None:
    everything: dict[str, object] = {"max_batch_size": (8,), **arguments}
    with pytest.raises(ValueError, match=f"^{message}") as error:
        SearchSpace(**everything)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("size", "delay", "policy"),
    [(8, "off", "none"), (8, 0, "none"), (24, 100, "max/4"), (24, 100, "max/16"), (48, 100, "64")],
    ids=["below the request", "same, batching", "size below the request", "a fraction", "size above the limit"],
)
def test_invalid_combinations_are_no_candidates(size: int, delay: int | str, policy: str) -> None:
    space = SearchSpace((8, 24, 48), ("off", 0, 100), ("none", "max/4", "max/16", "64"), request_batch_size=16)
    assert candidate_with(space, max_batch_size=size, max_queue_delay_us=delay, preferred_batch_sizes=policy) is None


def test_a_policy_that_cannot_be_met_does_not_matter_without_batching() -> None:
    space = SearchSpace((6,), ("off", 0), ("max/4", "none"))
    assert candidate_with(space, max_queue_delay_us="off", preferred_batch_sizes="max/4") == Candidate(6)


def test_without_batching_the_smallest_size_that_admits_the_request_is_the_candidate() -> None:
    space = SearchSpace((4, 16, 8, 32), ("off", 100), ("none", "max/2"), (1, 2), request_batch_size=8)
    for size, policy in product((8, 16, 32), ("none", "max/2")):
        assert candidate_with(
            space, max_batch_size=size, max_queue_delay_us="off", preferred_batch_sizes=policy
        ) == Candidate(8)
    # two requests never fit, so nothing waits
    assert candidate_with(space, max_batch_size=8, max_queue_delay_us=100) == Candidate(8)
    # also for a candidate outside the space
    assert space.canonical(Candidate(64, instance_count=5)) == Candidate(8, instance_count=5)


@pytest.mark.parametrize("order", [1, -1])
def test_of_equivalent_batchers_the_one_with_the_smallest_limit_is_the_candidate(order: int) -> None:
    space = SearchSpace((8, 16, 18)[::order], (0, 100), ("max/2", "none")[::order], request_batch_size=4)
    assert candidate_with(space, max_batch_size=18, max_queue_delay_us=0, preferred_batch_sizes="none") == Candidate(
        16, True
    )
    assert candidate_with(space, max_batch_size=16, max_queue_delay_us=0, preferred_batch_sizes="max/2") == Candidate(
        8, True
    )
    waiting = candidate_with(space, max_batch_size=18, max_queue_delay_us=100, preferred_batch_sizes="none")
    assert waiting == Candidate(18, True, 100)


def test_lone_requests_that_wait_are_a_candidate_of_their_own() -> None:
    space = SearchSpace((24,), ("off", 0, 100), request_batch_size=16)
    assert set(space.candidates()) == {Candidate(24), Candidate(24, True, 100)}


def test_a_configuration_outside_the_space_keeps_its_numbers_in_plain_form() -> None:
    space = SearchSpace((8,), (0, 100))
    outside = Candidate(16, True, 300, (16,), 3, ((THREADS, "2"),))
    assert space.canonical(outside) == replace(outside, preferred_batch_sizes=())
    assert space.parameter_values(outside) is None
    assert space.canonical(Candidate(0)) == Candidate(0)


def test_a_candidate_outside_the_space_has_no_parameter_values() -> None:
    space = SearchSpace((8,), ("off", 0, 100), ("none", "max/2"), (1, 2), {THREADS: (1, 2)})
    inside = Candidate(8, True, 100, (4,), 2, ((THREADS, 2),))
    assert space.parameter_values(inside) == {
        "max_batch_size": 8,
        "max_queue_delay_us": 100,
        "preferred_batch_sizes": "max/2",
        "instance_count": 2,
        THREADS: 2,
    }
    for change in (
        {"max_batch_size": 16},
        {"max_queue_delay_us": 7},
        {"preferred_batch_sizes": (2,)},
        {"instance_count": 3},
        {"fields": ()},
        {"fields": ((THREADS, 3),)},
        {"fields": (("backend", "python"), (THREADS, 2))},
    ):
        assert space.parameter_values(replace(inside, **change)) is None


@pytest.mark.parametrize(("choice", "read"), [(4, "4"), (True, "true"), (0.5, "0.5"), (2, 2.0), ("4", 4)])
def test_a_value_read_from_a_config_is_the_choice_it_says(choice: FieldValue, read: FieldValue) -> None:
    space = SearchSpace((8,), fields={THREADS: (choice, "other")})
    canonical = space.canonical(Candidate(8, fields=((THREADS, read),)))
    assert canonical in space.candidates()
    assert type(canonical.fields[0][1]) is type(choice)


def test_fields_of_the_batcher_are_choices_only_with_dynamic_batching() -> None:
    space = SearchSpace((8,), ("off", 0), fields={ORDERING: (False, True), THREADS: (1, 2)}, request_batch_size=8)
    off = [candidate for candidate in space.candidates() if not candidate.dynamic_batching]
    assert [candidate.fields for candidate in off] == [((THREADS, 1),), ((THREADS, 2),)]
    assert len(space) == len(space.candidates()) == 2 + 4
    assert all(space.candidate(space.parameter_values(c) or {}) == c for c in space.candidates())


def test_a_model_without_batch_dimension_has_its_counts_to_tune() -> None:
    space = SearchSpace((0,), ("off",), instance_count=(1, 2))
    assert space.candidates() == (Candidate(0), Candidate(0, instance_count=2))


def test_the_order_of_candidates_does_not_depend_on_that_of_sizes_and_delays() -> None:
    descending = SearchSpace((8, 4), (100, "off"), ("max/2", "none"), (1, 2))
    ascending = SearchSpace((4, 8), ("off", 100), ("none", "max/2"), (1, 2))
    assert descending.candidates() == ascending.candidates()


def test_a_space_travels_between_processes() -> None:
    space = SearchSpace((8,), ("off", 0), fields={THREADS: (1, 2)})
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    assert hash(copy) == hash(space)
    assert copy.candidates() == space.candidates()


sizes = st.integers(1, 40)
policies = st.one_of(
    st.just("none"),
    st.lists(st.sampled_from(["max", "max/2", "max/3", "max/4"]), min_size=1, max_size=3).map(",".join),
    st.lists(sizes, min_size=1, max_size=3),
)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    batch_sizes = draw(st.lists(sizes, min_size=1, max_size=4))
    return SearchSpace(
        max_batch_size=tuple(batch_sizes),
        max_queue_delay_us=("off", *draw(st.lists(st.sampled_from([0, 50, 100]), max_size=3))),
        preferred_batch_sizes=tuple(draw(st.lists(policies, min_size=1, max_size=3))),
        instance_count=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))),
        fields=draw(st.dictionaries(st.sampled_from([THREADS, ORDERING]), st.just((1, 2)), max_size=2)),
        request_batch_size=draw(st.integers(1, max(batch_sizes))),
        is_streaming=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(spaces())
def test_candidates_are_distinct_valid_and_canonical(space: SearchSpace) -> None:
    candidates = space.candidates()
    assert len(set(candidates)) == len(candidates) == len(space) > 0
    for candidate in candidates:
        assert space.canonical(candidate) == candidate
        assert candidate.max_batch_size >= space.request_batch_size
        assert all(size <= candidate.max_batch_size for size in candidate.preferred_batch_sizes)
        values = not_none(space.parameter_values(candidate))
        assert space.candidate(values) == candidate


@settings(max_examples=50, deadline=None)
@given(spaces())
def test_every_combination_is_one_of_the_candidates_or_none(space: SearchSpace) -> None:
    candidates = set(space.candidates())
    names = list(space.parameters())
    combined = {space.candidate(dict(zip(names, v, strict=True))) for v in product(*space.parameters().values())}
    assert combined - {None} == candidates


@given(spaces(), sizes, st.booleans(), st.integers(0, 99), st.frozensets(sizes, max_size=3), st.integers(1, 4))
def test_canonical_is_idempotent_anywhere(
    space: SearchSpace, size: int, on: bool, delay: int, preferred: frozenset[int], count: int
) -> None:
    candidate = Candidate(size, on, delay, tuple(preferred), count, ((THREADS, 1),))
    once = space.canonical(candidate)
    assert space.canonical(once) == once


@pytest.mark.parametrize(("is_streaming", "sizes_without_batcher"), [(True, {1, 4, 16}), (False, {1})])
def test_each_largest_batch_of_a_model_that_streams_is_a_configuration_of_its_own(
    is_streaming: bool, sizes_without_batcher: set[int]
) -> None:
    """Such a model may compute requests together that no batch joined."""
    space = SearchSpace((1, 4, 16), ("off", 0, 5000), ("none", "max/2"), (1, 2), is_streaming=is_streaming)
    unbatched = [candidate for candidate in space.candidates() if not candidate.dynamic_batching]
    assert {candidate.max_batch_size for candidate in unbatched} == sizes_without_batcher
