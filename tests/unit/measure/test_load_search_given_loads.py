"""Test the load search when only some loads can be measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_search import CLOSE, REPEATS, LoadSearchRules, next_concurrency

P95_20MS = Sla.from_bounds({"p95": 20.0})
LOADS = st.sets(st.integers(1, 300), min_size=1, max_size=12).map(lambda loads: tuple(sorted(loads)))


def sweep(server: Callable[[int], Measurement], rules: LoadSearchRules) -> list[int]:
    """Return the measured concurrencies."""
    measured: list[tuple[LoadPoint, Measurement]] = []
    while (load := next_concurrency(measured, rules)) is not None:
        measured.append((load, server(load.concurrency)))
        assert len(measured) <= rules.max_loads + REPEATS
    return [load.concurrency for load, _ in measured]


def saturating(service_ms: float, floor_ms: float) -> Callable[[int], Measurement]:
    """Simulate a server whose latency is constant until it is busy, then proportional to the load."""

    def at(concurrency: int) -> Measurement:
        latency = max(floor_ms, service_ms * concurrency)
        return Measurement(1000 * concurrency / latency, latency_p95_ms=latency, stable=True)

    return at


@given(
    loads=LOADS,
    latencies=st.lists(st.one_of(st.none(), st.floats(0.1, 90)), min_size=12, max_size=12),
    start=st.integers(1, 400),
    lowest=st.booleans(),
    stable=st.booleans(),
    to_beat=st.one_of(st.none(), st.floats(1, 1e5)),
)
def test_only_the_given_loads_are_measured(
    loads: tuple[int, ...],
    latencies: list[float | None],
    start: int,
    lowest: bool,
    stable: bool,
    to_beat: float | None,
) -> None:
    def server(concurrency: int) -> Measurement:
        latency = latencies[loads.index(concurrency)]
        if latency is None:
            return Measurement(reason="failed")
        return Measurement(1000 * concurrency / latency, latency_p95_ms=latency, stable=stable)

    rules = LoadSearchRules(
        1, 256, P95_20MS, start=start, lowest=lowest, to_beat=to_beat, throughput_floor=500, loads=loads
    )
    measured = sweep(server, rules)
    assert set(measured) <= set(loads)
    assert all(concurrency <= 256 for concurrency in measured)
    assert bool(measured) == (loads[0] <= 256)
    if stable:
        assert len(set(measured)) == len(measured)


# a latency that close to the bound ends the search, although that of an idle server would stay the same at more load
IDLE_MS = st.floats(0.1, CLOSE * 20) | st.floats(20, 25, exclude_min=True)


@given(loads=LOADS, service_ms=st.floats(0.05, 30), floor_ms=IDLE_MS, start=st.integers(1, 256))
def test_finds_nearly_the_best_of_the_given_loads(
    loads: tuple[int, ...], service_ms: float, floor_ms: float, start: int
) -> None:
    server = saturating(service_ms, floor_ms)
    measured = sweep(server, LoadSearchRules(1, 300, P95_20MS, start=start, max_loads=12, loads=loads))

    def best(concurrencies: object) -> float:
        result = [server(c) for c in concurrencies]  # type: ignore[attr-defined]
        return max((m.throughput_infer_per_sec or 0 for m in result if (m.latency_p95_ms or 99) <= 20), default=0)

    assert best(measured) >= 0.9 * best(loads)


@pytest.mark.parametrize(
    ("start", "loads", "measured"),
    [
        (3, (1, 4, 18, 64), [4, 18]),  # then it is saturated
        (3, (1, 4, 50, 64), [4, 50]),  # 32 would be next: the load above it may be nearer
        (40, (1, 4, 16, 64), [64, 16]),
        (5, (8, 16, 32, 64), [8, 32]),
        (40, (100, 200), [100]),  # the lowest is too much
        (40, (), []),
    ],
)
def test_the_nearest_load_on_the_wanted_side_is_taken(
    start: int, loads: tuple[int, ...], measured: list[int]
) -> None:
    assert sweep(saturating(0.5, 1.0), LoadSearchRules(1, 256, P95_20MS, start=start, loads=loads)) == measured
