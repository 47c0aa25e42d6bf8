"""The simulated queue: mixed sizes, equal shapes, rejects and timeouts. Other tests compare it with Triton's loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.arrays import IntArray
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import SizeDistribution, parse_priorities, parse_size_distribution
from optimizer.simulator.dynamic_batcher.records import REJECTED, TIMED_OUT
from optimizer.simulator.scenario import (
    RING_LENGTH,
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationTrace,
)
from optimizer.simulator.simulate import lognormal_jitter, simulate_many, trace
from tests.simulation import (
    ALL_REQUESTS,
    MS,
    TYPICAL_OVERHEADS,
    TYPICAL_TIMES,
    US,
    batcher,
    constant,
    leveled,
    linear_times,
    poisson_load,
    with_policy,
)

WAKE = Overheads(wake_s=50 * US)


def run(
    candidate: Candidate,
    arrivals_ms: Sequence[float],
    *,
    sizes: Sequence[int] = (1,),
    shapes: Sequence[int] = (0,),
    fixed_shapes: bool = True,
    overheads: Overheads = Overheads(),  # noqa: B008
    missed_share: float = 0.0,
    priorities: Sequence[int] = (),
) -> SimulationTrace:
    """Return the trace of an open loop with the given sizes, shapes and priorities; a batch takes 10 ms."""

    class Given(Scenario):
        __slots__ = ()

        def mix(self) -> tuple[IntArray, IntArray]:
            return np.resize(np.array(sizes), RING_LENGTH), np.resize(np.array(shapes), RING_LENGTH)

        def priority_mix(self) -> IntArray:
            return np.resize(np.array(priorities or (0,)), RING_LENGTH)

    mix = SizeDistribution(((1, max(sizes), 1.0),))
    load, shares = OpenLoopLoad(np.array(arrivals_ms) * MS), (1.0,) * (1 + max(shapes))
    job = Given(
        candidate,
        load,
        constant(10 * MS),
        overheads,
        fixed_shapes=fixed_shapes,
        request_mix=mix,
        shape_shares=shares,
        missed_share=missed_share,
        priorities=SizeDistribution(((1, 1, 1.0),)) if priorities else None,
    )
    return trace(job, interval=ALL_REQUESTS)


def schedule(log: SimulationTrace) -> list[tuple[float, list[int]]]:
    """Return (start in ms, requests) of each execution."""
    return [
        (round(start / MS, 6), np.flatnonzero(log.execution == e).tolist()) for e, start in enumerate(log.start_s)
    ]


# --- by hand: the model takes 10 ms for any batch ---


def test_a_request_that_does_not_fit_starts_the_next_batch() -> None:
    log = run(batcher(4), [0, 1, 2, 3], sizes=[1, 3, 2, 2])
    assert schedule(log) == [(0, [0]), (10, [1]), (20, [2, 3])]
    assert log.samples.tolist() == [1, 3, 4]


def test_the_service_time_is_that_of_the_samples() -> None:
    job = Scenario(
        batcher(8, 1000),
        OpenLoopLoad(np.zeros(2)),
        linear_times(0, 1 * MS, 8),
        request_mix=parse_size_distribution("3"),
    )
    log = trace(job, interval=ALL_REQUESTS)
    assert log.end_s - log.start_s == pytest.approx([6 * MS])
    (result,) = simulate_many([job], interval=ALL_REQUESTS)
    assert result.mean_batch_size == 6
    assert result.throughput_infer_per_sec == pytest.approx(6 / (7 * MS))


def test_requests_of_other_shapes_share_no_batch() -> None:
    shapes = [0, 0, 1, 0, 0]
    assert schedule(run(batcher(4), range(5), shapes=shapes)) == [(0, [0]), (10, [1, 2, 3, 4])]
    # the batcher looks no further than the request of another shape, also for the requests behind it
    log = run(batcher(4), range(5), shapes=shapes, fixed_shapes=False)
    assert schedule(log) == [(0, [0]), (10, [1]), (20, [2]), (30, [3, 4])]


def test_late_batches_of_other_shapes_are_not_merged() -> None:
    arrivals = [0, 2, 4, 6]
    together = [(1, [0]), (11, [1, 2, 3])]
    assert schedule(run(batcher(8, 1000, 2), arrivals, fixed_shapes=False)) == together
    log = run(batcher(8, 1000, 2), arrivals, shapes=[0, 0, 1, 1], fixed_shapes=False)
    assert schedule(log) == [(1, [0]), (11, [1]), (21, [2, 3])]


def test_a_batch_that_another_shape_ended_is_not_merged_even_with_its_own_shape() -> None:
    arrivals = [0, 2, 2, 4, 5, 6]
    log = run(batcher(8, 1000, 2), arrivals, shapes=[0, 0, 0, 0, 0, 1], fixed_shapes=False)
    assert schedule(log) == [(1, [0]), (11, [1, 2, 3]), (21, [4]), (31, [5])]


def test_a_full_queue_rejects_arrivals() -> None:
    log = run(with_policy(batcher(4), max_queue_size=2), [0, 1, 2, 3, 4, 11])
    assert schedule(log) == [(0, [0]), (10, [1, 2]), (20, [5])]
    assert log.execution.tolist() == [0, 1, 1, REJECTED, REJECTED, 2]


def test_a_batcher_that_misses_the_end_of_an_execution_waits_for_the_next_request() -> None:
    full, roomy = (with_policy(batcher(4), max_queue_size=size) for size in (2, 3))
    arrivals = [0, 1, 2, 3, 14, 15]
    assert schedule(run(roomy, [0, 1, 2, 14], missed_share=1.0)) == [(0, [0]), (14, [1, 2, 3])]
    # a full queue accepts none, so the batcher sleeps for half a second after it looked for an idle instance at 10 ms
    log = run(full, arrivals, missed_share=1.0)
    assert schedule(log) == [(0, [0]), (510, [1, 2])]
    assert log.execution.tolist() == [0, 1, 1, REJECTED, REJECTED, REJECTED]
    # of several instances the next one that ends notifies the batcher again, which finds the first one idle
    two = replace(full, instance_count=2)
    assert schedule(run(two, [0, 5, 6, 7], missed_share=1.0)) == [(0, [0]), (5, [1]), (15, [2, 3])]
    # of two that end at the same time, the batcher can take the CPU of one
    single = replace(two, max_batch_size=1)
    assert schedule(run(single, [0, 0, 1, 2], missed_share=1.0)) == [(0, [0]), (0, [1]), (10, [2]), (20, [3])]


@pytest.mark.parametrize(("missed_share", "overloaded"), [(0.0, False), (0.3, False), (0.7, True), (1.0, True)])
def test_missed_notifications_lower_the_capacity_of_single_requests(missed_share: float, overloaded: bool) -> None:
    """Load and share must not exceed 1: after each missed end the next execution waits for an arrival."""
    load = poisson_load(50, 1000)
    job = Scenario(leveled(batcher(1, 0)), load, constant(10 * MS), missed_share=missed_share)
    (result,) = simulate_many([job], interval=ALL_REQUESTS)
    assert result.overloaded == overloaded


def test_expired_requests_are_rejected_as_the_next_batch_is_formed() -> None:
    log = run(with_policy(batcher(4), timeout_us=5000), [0, 1, 7])
    assert schedule(log) == [(0, [0]), (10, [2])]
    assert log.execution.tolist() == [0, TIMED_OUT, 1]


def test_delayed_requests_come_after_those_that_have_not_expired() -> None:
    log = run(with_policy(batcher(1), timeout_us=5000, action="DELAY"), [0, 1, 7, 16])
    assert schedule(log) == [(0, [0]), (10, [2]), (20, [3]), (30, [1])]


def test_a_request_expires_while_the_batcher_waits_for_more() -> None:
    log = run(with_policy(batcher(4, 8000), timeout_us=4000), [0, 20, 21], overheads=WAKE)
    assert log.execution.tolist() == [TIMED_OUT, TIMED_OUT, TIMED_OUT]
    log = run(with_policy(batcher(4, 8000, 2), timeout_us=4000), [0, 20, 21], overheads=WAKE)
    assert log.execution.tolist() == [TIMED_OUT, 0, 0]


def test_a_batcher_without_an_idle_instance_answers_expired_requests_after_half_a_second() -> None:
    busy = Scenario(with_policy(batcher(1), timeout_us=5000), ClosedLoopLoad(2), constant(2.0), TYPICAL_OVERHEADS)
    log = trace(busy, interval=MeasurementInterval(0, 2))
    assert log.execution[1] == TIMED_OUT
    assert log.sent_s[2] == pytest.approx(0.5, abs=0.01)


def test_a_higher_priority_is_executed_first() -> None:
    """Request 0 is being executed when the others arrive. Equal priorities keep their order; 0 is the default."""
    log = run(leveled(batcher(1, 0)), [0, 1, 2, 3, 4], priorities=[2, 2, 0, 1, 1])
    assert schedule(log) == [(0, [0]), (10, [3]), (20, [4]), (30, [1]), (40, [2])]
    single = run(batcher(1, 0), [0, 1, 2, 3, 4], priorities=[2, 2, 0, 1, 1])
    assert schedule(single) == [(10.0 * i, [i]) for i in range(5)]


def test_each_level_has_its_own_limit() -> None:
    limited = leveled(batcher(1, 0), max_queue_size_2=1)
    log = run(limited, [0, 1, 2, 3, 4, 5], priorities=[1, 1, 2, 2, 1, 1])
    assert schedule(log) == [(0, [0]), (10, [1]), (20, [4]), (30, [5]), (40, [2])]
    assert log.execution[3] == REJECTED


def test_each_level_has_its_own_timeout() -> None:
    """Requests of the second level expire after 15 ms, and those of the first one do not."""
    expiring = leveled(batcher(1, 0), default_timeout_microseconds_2=15_000)
    log = run(expiring, [0, 1, 2, 3, 4], priorities=[1, 1, 1, 2, 1])
    assert schedule(log) == [(0, [0]), (10, [1]), (20, [2]), (30, [4])]
    assert log.execution[3] == TIMED_OUT


def test_a_request_does_not_expire_while_higher_levels_fill_the_batch() -> None:
    """Request 1 has waited too long at 10 ms, but keeps its place in the queue until the batch at 20 ms is formed."""
    limited = leveled(batcher(1, 0), default_timeout_microseconds_2=5000, max_queue_size_2=1)
    log = run(limited, [0, 1, 2, 3, 15, 25], priorities=[1, 2, 1, 1, 2, 2])
    assert schedule(log) == [(0, [0]), (10, [2]), (20, [3]), (30, [5])]
    assert log.execution[[1, 4]].tolist() == [TIMED_OUT, REJECTED]


def test_delayed_requests_of_a_high_level_come_before_a_low_level() -> None:
    """Request 2 has expired at 20 ms; request 4 of its level has not, so it is first."""
    delaying = leveled(batcher(1, 0), default_timeout_microseconds_1=15_000, timeout_action_1="DELAY")
    log = run(delaying, [0, 1, 2, 3, 15], priorities=[1, 1, 1, 2, 1])
    assert schedule(log) == [(0, [0]), (10, [1]), (20, [4]), (30, [2]), (40, [3])]


def test_figures_are_of_the_requests_that_complete() -> None:
    load = OpenLoopLoad(np.array([0, 1, 7]) * MS)
    job = Scenario(with_policy(batcher(4), timeout_us=5000), load, constant(10 * MS))
    (result,) = simulate_many([job], interval=ALL_REQUESTS)
    assert (result.requests, result.rejected, result.timed_out) == (2, 0, 1)
    assert result.timed_out_share == pytest.approx(1 / 3)
    assert result.rejected_share == 0
    assert result.latency_avg_s == pytest.approx(11.5 * MS)
    assert result.throughput_infer_per_sec == pytest.approx(2 / (20 * MS))


def test_without_refusals_the_policy_only_turns_prefetching_off() -> None:
    limited = Scenario(
        with_policy(batcher(4), 1, 1000), poisson_load(1000, 400), TYPICAL_TIMES, TYPICAL_OVERHEADS, refuses=False
    )
    plain = replace(limited, candidate=batcher(4), prefetch=False)
    assert simulate_many([limited]) == simulate_many([plain]) != simulate_many([replace(limited, refuses=True)])


def test_a_closed_loop_that_completes_nothing_ends() -> None:
    hopeless = with_policy(batcher(4, 8000), timeout_us=4000)
    (result,) = simulate_many([Scenario(hopeless, ClosedLoopLoad(1), TYPICAL_TIMES, TYPICAL_OVERHEADS)])
    assert result.requests == 0
    assert result.timed_out_share == 1
    assert math.isnan(result.throughput_infer_per_sec)


def test_clients_that_are_refused_at_once_do_not_stop_the_clock() -> None:
    crowded = with_policy(batcher(4), max_queue_size=2)
    (result,) = simulate_many(
        [Scenario(crowded, ClosedLoopLoad(20), TYPICAL_TIMES)], interval=MeasurementInterval(0, 200)
    )
    assert result.requests > 0
    assert result.rejected_share > 0.5


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            Scenario(batcher(4), ClosedLoopLoad(1), TYPICAL_TIMES, request_mix=parse_size_distribution("1|5")),
            "requests of 5 samples are refused",
        ),
        (
            Scenario(
                batcher(16),
                ClosedLoopLoad(1),
                ServiceTimes(TYPICAL_TIMES.seconds, 4),
                request_mix=parse_size_distribution("4..8"),
            ),
            "in steps of 4 samples",
        ),
        (
            Scenario(batcher(4), ClosedLoopLoad(1), TYPICAL_TIMES, fixed_shapes=False, shape_shares=(1.0, 0.0)),
            "all must be positive",
        ),
    ],
)
def test_a_mix_that_cannot_be_simulated_is_refused(job: Scenario, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_many([job])


# --- properties ---


def draw_scenario(seed: int, load: SimulatedLoad | None = None, overheads: Overheads = TYPICAL_OVERHEADS) -> Scenario:
    """Return a scenario in which requests differ or the queue has a policy."""
    chance = np.random.default_rng(seed)
    limit = int(chance.choice([4, 8, 16]))
    sizes = tuple(sorted({int(size) for size in chance.integers(1, limit + 1, chance.integers(0, 3))}))
    candidate = Candidate(limit, True, int(chance.choice([0, 500, 3000])), sizes, int(chance.integers(1, 5)))
    queue, timeout_us = int(chance.choice([0, 1, 4, 16])), int(chance.choice([0, 1000, 6000, 30_000]))
    rate = float(chance.choice([200, 1000, 4000]))
    action = str(chance.choice(["REJECT", "DELAY"]))
    limited, has_levels = with_policy(candidate, queue, timeout_us, action), bool(seed % 2)
    return Scenario(
        leveled(limited) if has_levels else limited,
        load or poisson_load(rate, 400, seed),
        TYPICAL_TIMES,
        overheads,
        fixed_shapes=bool(chance.random() < 0.5),
        request_mix=parse_size_distribution(str(chance.choice(["1", "1*3|4", "1..3"]))),
        shape_shares=(1.0, 2.0, 1.0),
        mix_seed=seed,
        priorities=parse_priorities("1*1|2*3") if has_levels else None,
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_no_more_requests_wait_than_the_queue_holds(seed: int, most: int) -> None:
    """Check the queue at each arrival, and the counts. Without overheads a batch starts as it is formed."""
    drawn = draw_scenario(seed, overheads=Overheads())
    (result,), log = simulate_many([drawn], interval=ALL_REQUESTS), trace(drawn, interval=ALL_REQUESTS)
    assert (log.execution == REJECTED).sum() == result.rejected
    assert (log.execution == TIMED_OUT).sum() == result.timed_out
    assert result.requests + result.rejected + result.timed_out == len(log.execution)
    log = trace(replace(drawn, candidate=with_policy(drawn.candidate, max_queue_size=most)), interval=ALL_REQUESTS)
    executed = log.execution >= 0
    arrived, start = log.arrived_s[executed], log.start_s[log.execution[executed]]
    for moment in arrived:
        assert ((arrived <= moment) & (start > moment)).sum() <= most


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_equal_input_gives_equal_output(seed: int, concurrency: int) -> None:
    jobs = [draw_scenario(seed), draw_scenario(seed, ClosedLoopLoad(concurrency)), draw_scenario(seed + 1)]
    interval = MeasurementInterval(0, 200)
    results = [simulate_many([job], jitter=lognormal_jitter(0.1, 7), interval=interval)[0] for job in jobs]
    assert repr(simulate_many(jobs, jitter=lognormal_jitter(0.1, 7), interval=interval)) == repr(results)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_what_never_applies_changes_nothing(seed: int, fixed_shapes: bool) -> None:
    """Sizes of 1, a queue that is never full and a timeout that never ends are as nothing, with the same batches."""
    candidate = replace(draw_scenario(seed).candidate, fields=())
    load = poisson_load(1000, 400, seed)
    plain = Scenario(candidate, load, TYPICAL_TIMES, TYPICAL_OVERHEADS, fixed_shapes=fixed_shapes, prefetch=False)
    size_one = replace(plain, request_mix=parse_size_distribution("1"))
    roomy = replace(plain, candidate=with_policy(candidate, max_queue_size=10**6))
    assert simulate_many([size_one, roomy]) == [simulate_many([plain])[0]] * 2
    # a timeout makes the batcher wait for whole microseconds until it, which no request reaches here
    patient = replace(plain, candidate=with_policy(candidate, timeout_us=10**9))
    assert simulate_many([patient]) == simulate_many([plain])


def test_order_of_sizes_and_shapes_depends_on_the_seed() -> None:
    job = draw_scenario(3)
    assert [ring.tolist() for ring in job.mix()] == [ring.tolist() for ring in job.mix()]
    assert job.mix()[1].tolist() != replace(job, mix_seed=job.mix_seed + 1).mix()[1].tolist()
    assert np.bincount(job.mix()[1]) / RING_LENGTH == pytest.approx([0.25, 0.5, 0.25], abs=0.001)
