"""Tests of load shapes: the rates of a text, refused texts, and whole periods."""

from __future__ import annotations

from itertools import pairwise

import pytest

from optimizer.core.load_shapes import (
    DEFAULTS,
    LoadShape,
    RequestTimes,
    complete_load_shape,
    is_load_shape,
    parse_load_shape,
)


def rate_at(shape: LoadShape, place: float) -> float:
    """Return the rate at a share of the period, as a multiple of the mean."""
    step = next(i for i, edge in enumerate(shape.edges) if edge > place)
    (before, after), (begin, end) = shape.shares[step - 1 : step + 1], shape.edges[step - 1 : step + 1]
    return (after - before) / (end - begin)


@pytest.mark.parametrize("text", [*DEFAULTS, *DEFAULTS.values(), "ramp:1..0:0.5m", "ramp:3..1", "diurnal:2x:30s"])
def test_the_shares_of_a_period_ascend_to_one(text: str) -> None:
    shape = parse_load_shape(text)
    for places in (shape.edges, shape.shares):
        assert places[0] == 0
        assert places[-1] == 1
        assert all(before < after for before, after in pairwise(places))
    assert len(shape.edges) == len(shape.shares)
    assert shape.peak > 1


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_name_alone_has_the_documented_values(name: str) -> None:
    assert parse_load_shape(name) == parse_load_shape(DEFAULTS[name])
    assert parse_load_shape(f"{name}:10s").shares == parse_load_shape(name).shares
    assert parse_load_shape(f"{name}:10s").seconds == 10


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("spike", "spike:4x:10%:1s"),
        ("spike:20%:2x", "spike:2x:20%:1s"),
        ("ramp:2s", "ramp:0.5..1.5:2s"),
        ("diurnal:500ms:2x", "diurnal:2x:500ms"),
    ],
)
def test_a_shape_is_shown_with_all_its_values(text: str, complete: str) -> None:
    assert complete_load_shape(text) == complete
    assert parse_load_shape(complete) == parse_load_shape(text)


def test_a_spike_is_a_multiple_of_the_other_rate() -> None:
    shape = parse_load_shape("spike:5x:20%:2s")
    assert shape.seconds == 2
    assert rate_at(shape, 0.5) == pytest.approx(5 * rate_at(shape, 0.1))
    assert rate_at(shape, 0.9) == pytest.approx(rate_at(shape, 0.1))
    assert 0.2 * rate_at(shape, 0.5) + 0.8 * rate_at(shape, 0.1) == pytest.approx(1)
    assert shape.peak == pytest.approx(rate_at(shape, 0.5))
    begin, end = shape.edges[1:3]
    assert end - begin == pytest.approx(0.2)


def test_a_ramp_is_scaled_to_the_mean() -> None:
    shape = parse_load_shape("ramp:1..3")
    assert rate_at(shape, 0.0) == pytest.approx(0.5, abs=0.01)
    assert rate_at(shape, 0.5) == pytest.approx(1.0, abs=0.01)
    assert rate_at(shape, 0.999) == pytest.approx(1.5, abs=0.01)


def test_a_day_has_its_peak_in_the_middle() -> None:
    shape = parse_load_shape("diurnal:1.8x")
    assert rate_at(shape, 0.0) == pytest.approx(0.2, abs=0.01)
    assert rate_at(shape, 0.25) == pytest.approx(1.0, abs=0.02)
    assert rate_at(shape, 0.5) == pytest.approx(1.8, abs=0.01)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("spike:", "spike:4x:10%:1s"),
        ("spike:4", "spike:4x:10%:1s"),
        ("spike:4x:5x", "spike:4x:10%:1s"),
        ("spike:0.5..1.5", "spike:4x:10%:1s"),
        ("spike:1s:2s", "spike:4x:10%:1s"),
        ("spike:1x", "1 to 100 times"),
        ("spike:101x", "1 to 100 times"),
        ("spike:100%", "0.1 to 90 %"),
        ("spike:0.01%", "0.1 to 90 %"),
        ("spike:50ms", "0.1 to 60 s"),
        ("spike:2m", "0.1 to 60 s"),
        ("ramp:2x", "ramp:0.5..1.5:1s"),
        ("ramp:1..1", "different rates"),
        ("ramp:0..1000", "from 0 to 100"),
        ("ramp:-1..1", "ramp:0.5..1.5:1s"),
        ("diurnal:10%", "diurnal:1.5x:1s"),
        ("diurnal:2.5x", "at most 2 times"),
        ("diurnal:1x", "at most 2 times"),
    ],
)
def test_a_wrong_shape_is_refused_with_advice(text: str, advice: str) -> None:
    assert is_load_shape(text)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        parse_load_shape(text)
    assert advice in str(caught.value)


def test_only_the_names_of_shapes_are_shapes() -> None:
    assert not any(map(is_load_shape, ("poisson", "constant", "./spike", "spikes", "", "/ramp:1..2")))


def test_a_time_is_rounded_up_to_whole_periods() -> None:
    shaped = RequestTimes("spike", period_seconds=2.0)
    assert [shaped.whole_periods(seconds, 100) for seconds in (0.5, 2.0, 2.1, 6.0, 3 * (2.0 / 3))] == [2, 2, 4, 6, 2]
    assert RequestTimes().whole_periods(0.72, 100) == 0.72


def test_the_shares_of_a_period_are_those_of_its_parts() -> None:
    assert RequestTimes().shares == ()
    assert RequestTimes("trace.csv", recorded_requests=8, recorded_shares=(0.25, 0.75)).shares == (0.25, 0.75)
    shares = RequestTimes("spike:4x:10%:1s", period_seconds=1.0).shares
    assert sum(shares) == pytest.approx(1)
    assert max(shares) == pytest.approx(4 * min(shares))


def test_a_recording_repeats_if_it_is_short_at_the_rate() -> None:
    recorded = RequestTimes("trace.csv", recorded_requests=1000)
    assert recorded.period_at(500) == 2
    assert recorded.whole_periods(0.5, 500) == 2
    assert recorded.whole_periods(4.1, 500) == 6
    assert recorded.period_at(100) == 10
    assert recorded.period_at(99) == 0
    assert recorded.whole_periods(0.5, 99) == 0.5
