"""Load shapes: how the request rate of an open loop changes within a period that repeats, as users write them.

    spike[:FACTORx][:SHARE%][:DURATION]    a burst of FACTOR times the other rate, for this SHARE of the time
    ramp[:FROM..TO][:DURATION]             a rate that rises (or falls) linearly, in proportion FROM to TO
    diurnal[:PEAKx][:DURATION]             a sine wave whose peak is PEAK times the mean

DURATION is the length of the period. The mean rate over a period is the rate of the load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from objectives.units import parse_duration_ms

DEFAULTS = {"spike": "spike:4x:10%:1s", "ramp": "ramp:0.5..1.5:1s", "diurnal": "diurnal:1.5x:1s"}
SHAPES = tuple(DEFAULTS)
STEADY_DISTRIBUTIONS = ("poisson", "constant")  # distributions of requests over time without a shape
STEPS = 200  # the rate of a ramp, a wave or a recording is taken as constant for this part of the period
MIN_PERIOD_SECONDS, MAX_PERIOD_SECONDS = 0.1, 60.0
MAX_FACTOR = 100.0
MAX_PERIOD_LEAD_IN_SECONDS = 2.0
MAX_RECORDING_SECONDS = 10.0  # a longer recording is measured in parts
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"
_PARTS = {  # values of a shape; a part of another form is the duration
    "factor": re.compile(rf"({_NUMBER})x"),
    "share": re.compile(rf"({_NUMBER})%"),
    "range": re.compile(rf"({_NUMBER})\.\.({_NUMBER})"),
}


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A rate that changes within a period.

    Attributes:
        seconds: Length of the period.
        edges: Points of time as shares of the period, ascending from 0 to 1. The rate is constant between two.
        shares: The share of the requests of a period that is due before each of ``edges``.
    """

    seconds: float
    edges: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The highest rate as a multiple of the mean."""
        steps = range(1, len(self.edges))
        return max((self.shares[i] - self.shares[i - 1]) / (self.edges[i] - self.edges[i - 1]) for i in steps)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Describes the times at which an open loop sends.

    Attributes:
        distribution: ``poisson``, ``constant``, a load shape as it was given, or the name of a recording.
        period_seconds: Length of the period of a load shape; 0 for others.
        recorded_requests: Number of requests of a recording, which is scaled to each rate; 0 for others.
        recorded_shares: The share of them in each of STEPS equal parts of its time; empty for others.
    """

    distribution: str = "poisson"
    period_seconds: float = 0.0
    recorded_requests: int = 0
    recorded_shares: tuple[float, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Whether the rate is constant over time: neither a load shape nor a recording."""
        return self.distribution in STEADY_DISTRIBUTIONS

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the requests in each of STEPS equal parts of a period; empty if the rate is constant."""
        if not is_load_shape(self.distribution):
            return self.recorded_shares
        import numpy as np  # takes too long to import for the help of the command

        shape = parse_load_shape(self.distribution)
        return tuple(np.diff(np.interp(np.linspace(0, 1, STEPS + 1), shape.edges, shape.shares)).tolist())

    def period_at(self, rate: float) -> float:
        """Return the seconds after which the times repeat at ``rate`` requests per second.

        It is 0 if they do not, or only after MAX_RECORDING_SECONDS.
        """
        if self.recorded_requests and self.recorded_requests <= MAX_RECORDING_SECONDS * rate:
            return self.recorded_requests / rate
        return self.period_seconds

    def lead_in_at(self, rate: float) -> float:
        """Return the length of the lead-in in seconds; 0 without a period.

        In the lead-in, the last part of a period is sent and not measured.
        """
        return min(self.period_at(rate), MAX_PERIOD_LEAD_IN_SECONDS)

    def whole_periods(self, seconds: float, rate: float) -> float:
        """Return the shortest time of at least ``seconds`` that consists of whole periods."""
        period = self.period_at(rate)
        return period * max(1, math.ceil(seconds / period - 1e-6)) if period else seconds


def is_load_shape(text: str) -> bool:
    """Return whether ``text`` names a load shape, whatever follows its name."""
    return text.partition(":")[0] in SHAPES


def parse_load_shape(text: str) -> LoadShape:
    """Return the load shape in ``text``, such as ``spike:4x:10%:1s``. Raises ValueError with an example."""
    name, *parts = text.split(":")
    values = _values(name, DEFAULTS[name].split(":")[1:]) | _values(name, parts)
    (seconds,) = values["duration"]
    if not MIN_PERIOD_SECONDS <= seconds <= MAX_PERIOD_SECONDS:
        raise ValueError(f"a period takes {MIN_PERIOD_SECONDS:g} to {MAX_PERIOD_SECONDS:g} s")
    return LoadShape(seconds, *_FORMS[name].edges_and_shares(values))


def complete_load_shape(text: str) -> str:
    """Return a valid load shape with all its values, such as ``spike:4x:10%:9s`` for ``spike:9s``."""
    name, *parts = text.split(":")
    user_parts = {_kind(part): part for part in parts}
    return ":".join([name, *(user_parts.get(_kind(part), part) for part in DEFAULTS[name].split(":")[1:])])


def _kind(part: str) -> str:
    """Return the key of ``_PARTS`` that the form of ``part`` belongs to, or ``duration``."""
    return next((kind for kind, pattern in _PARTS.items() if pattern.fullmatch(part)), "duration")


def _values(name: str, parts: list[str]) -> _PartValues:
    """Return the values in ``parts`` of the shape ``name``. Raises ValueError with its syntax and an example."""
    values: _PartValues = {}
    for part in parts:
        kind = _kind(part)
        try:
            if kind in values or kind not in (*_FORMS[name].parts, "duration"):
                raise ValueError
            values[kind] = _part_values(kind, part)
        except ValueError:
            raise ValueError(f"write {_FORMS[name].syntax}, such as {DEFAULTS[name]}") from None
    return values


def _part_values(kind: str, part: str) -> tuple[float, ...]:
    """Return the numbers in a part, a duration in seconds. Raises ValueError for a wrong duration."""
    if kind == "duration":
        return (parse_duration_ms(part, "1s") / 1000,)
    match = _PARTS[kind].fullmatch(part)
    assert match is not None
    return tuple(map(float, match.groups()))


_PartValues: TypeAlias = dict[str, tuple[float, ...]]  # the numbers in each part, by its kind
_EdgesAndShares: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]  # the fields of a LoadShape


def _spike(values: _PartValues) -> _EdgesAndShares:
    (factor,), (percent,) = values["factor"], values["share"]
    if not 1 < factor <= MAX_FACTOR or not 0.1 <= percent <= 90:
        raise ValueError(f"a spike has 1 to {MAX_FACTOR:g} times the other rate, for 0.1 to 90 % of the time")
    share = percent / 100
    begin = (1 - share) / 2
    before = begin / (1 + (factor - 1) * share)
    return (0.0, begin, begin + share, 1.0), (0.0, before, 1 - before, 1.0)


def _ramp(values: _PartValues) -> _EdgesAndShares:
    first, last = values["range"]
    if max(first, last) > MAX_FACTOR or first == last:
        raise ValueError(f"a ramp begins and ends with different rates, from 0 to {MAX_FACTOR:g}")
    return _in_steps(lambda x: (first * x + (last - first) * x * x / 2) / ((first + last) / 2))


def _diurnal(values: _PartValues) -> _EdgesAndShares:
    (peak,) = values["factor"]
    if not 1 < peak <= 2:
        raise ValueError("the peak of a day is more than 1 and at most 2 times the mean")
    return _in_steps(lambda x: x - (peak - 1) * math.sin(2 * math.pi * x) / (2 * math.pi))


def _in_steps(share_before: Callable[[float], float]) -> _EdgesAndShares:
    edges = tuple(step / STEPS for step in range(STEPS + 1))
    return edges, (*map(share_before, edges[:-1]), 1.0)


@dataclass(frozen=True, slots=True)
class _ShapeForm:
    """How a shape is written.

    Attributes:
        syntax: The parts of the shape, for messages.
        parts: The kinds of its parts without the duration.
        edges_and_shares: Returns the fields of the LoadShape. Raises ValueError with the values that are allowed.
    """

    syntax: str
    parts: tuple[str, ...]
    edges_and_shares: Callable[[_PartValues], _EdgesAndShares]


_FORMS = {
    "spike": _ShapeForm("spike:FACTORx:SHARE%:DURATION", ("factor", "share"), _spike),
    "ramp": _ShapeForm("ramp:FROM..TO:DURATION", ("range",), _ramp),
    "diurnal": _ShapeForm("diurnal:PEAKx:DURATION", ("factor",), _diurnal),
}
