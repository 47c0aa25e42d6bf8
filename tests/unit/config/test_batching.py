"""Tests of which batcher settings behave the same, also by a literal copy of Triton's batch-forming loop."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

from optimizer.config.batching import ONE_BY_ONE, behaviour, normalize, parse_preferred_sizes, resolve_preferred_sizes
from optimizer.core.candidate import Candidate
from tests.simulation import batcher


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ("none", "none"),
        (None, "none"),
        ([], "none"),
        (" max/2 , max ", "max/2,max"),
        ("max,max", "max"),
        ([4, 8], "4,8"),
        (["max/2", 8], "max/2,8"),
        (8, "8"),
    ],
)
def test_policies_are_read(value: object, plain: str) -> None:
    assert parse_preferred_sizes(value) == plain


@pytest.mark.parametrize("value", ["", "half", "max/0", "max/", "-4", "0", "2.5", True, [0], "none,max", {"a": 1}])
def test_an_invalid_policy_is_reported_on_one_line(value: object) -> None:
    with pytest.raises(ValueError, match=r'^preferred_batch_sizes: .* are not batch sizes; write "none"') as error:
        parse_preferred_sizes(value)
    assert "\n" not in str(error.value)


def test_policies_are_resolved_relative_to_the_largest_batch() -> None:
    assert resolve_preferred_sizes("max/4,max/2", 16) == (4, 8)
    assert resolve_preferred_sizes("max,8", 8) == (8,)
    assert resolve_preferred_sizes("max/4", 6) is None
    assert resolve_preferred_sizes("none", 6) == ()


@pytest.mark.parametrize(
    ("first", "second", "request_size"),
    [
        pytest.param(batcher(8, 100, 8), batcher(8, 100), 1, id="{max} is the default"),
        pytest.param(batcher(8, 100, 8, 4, 4), batcher(8, 100, 4, 8), 1, id="order and repeats"),
        pytest.param(Candidate(8), Candidate(4), 4, id="off: any max_batch_size that admits the request"),
        pytest.param(batcher(4, 500), Candidate(4), 4, id="no two fit, and the request is the largest batch"),
        pytest.param(batcher(7, 0), Candidate(4), 4, id="no two fit, nothing waits"),
        pytest.param(batcher(7, 500, 4), Candidate(4), 4, id="no two fit, one is preferred"),
        pytest.param(batcher(7, 500, 4, 6), Candidate(4), 4, id="no two fit, one is preferred among others"),
        pytest.param(batcher(11, 0, 4, 6), Candidate(4), 4, id="without delay, one is preferred, no more is hit"),
        pytest.param(batcher(8, 0, 1), Candidate(1), 1, id="without delay a batch of one is sent as soon as hit"),
        pytest.param(batcher(24, 500), batcher(31, 500), 16, id="limits that admit as many requests"),
        pytest.param(batcher(24, 500), batcher(24, 500, 20), 16, id="sizes that no requests reach"),
        pytest.param(batcher(9, 0), batcher(8, 0), 4, id="without delay, a limit between two sums"),
        pytest.param(batcher(16, 0, 8), batcher(8, 0), 1, id="without delay, a batch is closed at the largest size"),
        pytest.param(batcher(16, 0, 6, 8), batcher(16, 0, 8), 4, id="without delay, a size that is never hit"),
        pytest.param(batcher(16, 100, 6, 8), batcher(16, 100, 8), 4, id="waiting for 6 is waiting for 8"),
        pytest.param(batcher(17, 100, 16, 17), batcher(16, 100), 4, id="above what fits"),
        pytest.param(batcher(16, 100, 2, 8), batcher(16, 100, 8), 4, id="smaller than a request"),
    ],
)
def test_settings_with_the_same_effect_have_the_same_behaviour(
    first: Candidate, second: Candidate, request_size: int
) -> None:
    assert behaviour(first, request_size) == behaviour(second, request_size) is not None


@pytest.mark.parametrize(
    ("first", "second", "request_size"),
    [
        pytest.param(batcher(24, 500), Candidate(24), 16, id="a lone request that waits for the delay"),
        pytest.param(batcher(24, 500), batcher(24, 900), 16, id="the delay of a lone request"),
        pytest.param(batcher(8, 0), Candidate(8), 1, id="with and without dynamic batching"),
        pytest.param(batcher(8, 100), batcher(16, 100), 1, id="max_batch_size"),
        pytest.param(batcher(8, 100, 4), batcher(8, 100), 1, id="the preferred sizes"),
        pytest.param(
            batcher(8, 100, 4), batcher(4, 100), 1, id="with delay a late batch grows beyond the largest size"
        ),
        pytest.param(batcher(9, 100), batcher(8, 100), 4, id="with delay, a limit that is never reached"),
        pytest.param(
            batcher(16, 0, 4, 16), batcher(16, 0), 1, id="without delay a batch is closed at any size it hits"
        ),
        pytest.param(Candidate(0), Candidate(1), 1, id="no batch dimension"),
    ],
)
def test_settings_with_another_effect_have_another_behaviour(
    first: Candidate, second: Candidate, request_size: int
) -> None:
    assert behaviour(first, request_size) != behaviour(second, request_size)


def test_a_request_that_is_refused_has_no_behaviour() -> None:
    assert behaviour(Candidate(4), 8) is None
    assert behaviour(Candidate(0), 2) is None
    assert behaviour(batcher(0), 1) is None


def test_with_fields_of_the_queue_the_batcher_counts_even_for_lone_requests() -> None:
    assert behaviour(batcher(4), 4, queued=True) != behaviour(Candidate(4), 4, queued=True)


def test_a_normalized_candidate_has_no_redundant_settings() -> None:
    field = ("dynamic_batching.preserve_ordering", True)
    assert normalize(batcher(8, 5, 8)) == batcher(8, 5)
    assert normalize(batcher(8, 5, 8, 4, 8)) == batcher(8, 5, 4, 8)
    assert normalize(Candidate(8, False, 7, (4,), 2, (field, ("a.b", 1)))) == Candidate(
        8, instance_count=2, fields=(("a.b", 1),)
    )


class Payload:
    def __init__(self) -> None:
        self.size, self.late, self.executing = 0, False, False


class Batcher:
    """The loop of dynamic_batch_scheduler.cc with one instance and requests of ``request_size`` samples."""

    def __init__(self, candidate: Candidate, request_size: int, *, fixed: bool) -> None:
        self.limit, self.delay = candidate.max_batch_size, candidate.max_queue_delay_us
        self.request_size, self.fixed = request_size, fixed
        self.sizes = set(candidate.preferred_batch_sizes or (self.limit,))
        self.queue: list[bool] = []  # for each request: whether it has waited for the delay
        self.payloads: list[Payload] = []
        self.current: Payload | None = None
        self.saturated, self.next_preferred = False, 0

    def arrive(self) -> None:
        self.queue.append(False)
        busy = self.current is None or self.current.executing
        enough = len(self.queue) * self.request_size >= self.next_preferred
        if len(self.payloads) < 2 and (not self.fixed or self.saturated or busy or enough):
            self.wake()

    def age(self) -> None:
        self.queue = [True] * len(self.queue)
        for payload in self.payloads:
            payload.late = True
        self.wake()

    def take(self) -> int:
        if not self.payloads:
            return 0
        taken = self.payloads.pop(0)
        taken.executing = True
        while self.delay and self.limit > 1 and self.payloads and self.payloads[0].late:
            self.payloads[0].executing = True
            if taken.size + self.payloads[0].size > self.limit:
                break
            taken.size += self.payloads.pop(0).size
        self.wake()
        return taken.size

    def wake(self) -> None:
        while True:
            if self.saturated or self.current is None or self.current.executing:
                self.current, self.saturated, self.next_preferred = Payload(), False, 0
            if not self.queue or len(self.payloads) >= 2:
                return
            waits, pending = self.form(self.current)
            if not waits and pending:
                for _ in range(pending // self.request_size):
                    self.current.late |= self.queue.pop(0)
                if self.current.size == 0:
                    self.payloads.append(self.current)
                self.current.size += pending
            elif waits or not self.saturated:
                return

    def form(self, current: Payload) -> tuple[bool, int]:
        pending = best = 0
        send = False
        for _ in self.queue:
            total = current.size + pending
            if total > 0:
                if total + self.request_size > max(self.sizes) and best == 0:
                    best, self.saturated = pending, True
                if total + self.request_size > self.limit:
                    send = True
                    break
            pending += self.request_size
            if current.size + pending in self.sizes:
                best = pending
        total = current.size + pending
        late = self.delay > 0 and pending > 0 and self.queue[0]
        if best and not late:
            self.saturated |= self.delay == 0
            return False, best
        if pending == 0:
            return False, 0
        if send or total >= max(self.sizes):
            self.saturated = True
            return False, pending
        if late or self.delay == 0:
            return False, pending
        self.next_preferred = min([p for p in self.sizes if p > total] or self.sizes) - current.size
        return not (current.size > 0 and current.size not in self.sizes), pending


def batches(candidate: Candidate, request_size: int, events: Sequence[str], *, fixed: bool) -> list[int]:
    """Return the size of each batch that the instance receives; 0 if none is ready."""
    if not candidate.dynamic_batching:
        waiting, sent = 0, []
        for event in events:
            waiting += event == "arrive"
            if event == "take":
                sent.append(request_size if waiting else 0)
                waiting -= bool(waiting)
        return sent
    model, sent = Batcher(candidate, request_size, fixed=fixed), []
    for event in events:
        if event == "take":
            sent.append(model.take())
        else:
            getattr(model, event)()
    return sent


@pytest.mark.parametrize("request_size", [1, 2, 3])
def test_candidates_of_one_behaviour_form_the_same_batches(request_size: int) -> None:
    random_source = random.Random(request_size)
    groups: dict[Hashable, list[Candidate]] = defaultdict(list)
    groups[ONE_BY_ONE].append(Candidate(request_size))
    for limit in range(request_size, 4 * request_size + 2):
        for sizes in (combination for count in (0, 1, 2) for combination in combinations(range(1, limit + 1), count)):
            for delay in (0, 5):
                groups[behaviour(batcher(limit, delay, *sizes), request_size)].append(batcher(limit, delay, *sizes))
    assert len(groups) < sum(map(len, groups.values())), "some candidates behave the same"
    weights = [(3, 2, 1), (5, 3, 0), (6, 2, 1), (1, 1, 1), (12, 3, 1), (8, 4, 2)]
    histories = [random_source.choices(["arrive", "take", "age"], event_weights, k=70) for event_weights in weights]
    for equivalent in groups.values():
        reference, *sample = equivalent[:1] + random_source.sample(equivalent[1:], min(3, len(equivalent) - 1))
        for events, fixed in ((events, fixed) for events in histories for fixed in (False, True)):
            expected = batches(reference, request_size, events, fixed=fixed)
            for candidate in sample:
                assert batches(candidate, request_size, events, fixed=fixed) == expected, f"{reference} / {candidate}"
