"""How large and of which values made-up inputs are, as a user writes it: ``ids:16..128``, ``ids:0..30521``.

shape    NAMES:DIM,DIM,...            as perf_analyzer's --shape, without the batch dimension
NAMES    NAME or NAME,NAME,...        these get the same sizes in each request
DIM      CHOICE or CHOICE|CHOICE|...
CHOICE   SIZE or LOW..HIGH, then *WEIGHT or nothing (1)
range    NAMES:LOW..HIGH              both included

How many samples a request has is a DIM too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MIX_MARKS = ("*", "|", "..")  # of several sizes in a DIM
LARGEST_SIZE = 2**31 - 1
MOST_CHOICES = 64
Bounds: TypeAlias = "tuple[int, int] | tuple[float, float]"
_CHOICE = re.compile(r"([0-9]{1,10})(?:\.\.([0-9]{1,10}))?(?:\*([0-9]{1,9}(?:\.[0-9]{1,9})?))?")


@dataclass(frozen=True, slots=True)
class Dim:
    """The sizes of one dimension: ``(low, high, weight)``, each interval uniform."""

    choices: tuple[tuple[int, int, float], ...]

    @property
    def fixed(self) -> int | None:
        """The size where there is but one."""
        low = min(low for low, _, _ in self.choices)
        return low if low == self.largest else None

    @property
    def largest(self) -> int:
        return max(high for _, high, _ in self.choices)

    @property
    def mean(self) -> float:
        """The size itself where there is but one."""
        weights = sum(weight for _, _, weight in self.choices)
        return self.fixed or sum(weight * (low + high) / 2 for low, high, weight in self.choices) / weights

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """``count`` sizes in random order, one from each of as many equally likely parts of the distribution: the
        mix is what was asked for, whatever the seed."""
        lows, highs, weights = (np.array(column) for column in zip(*self.choices, strict=True))
        edges = np.cumsum(weights) / weights.sum()
        places = (rng.permutation(count) + rng.random(count)) / count
        chosen = np.minimum(np.searchsorted(edges, places, side="right"), len(edges) - 1)
        shares = (places - (edges - weights / weights.sum())[chosen]) / (weights / weights.sum())[chosen]
        spans = (highs - lows + 1)[chosen]
        sizes: npt.NDArray[np.int64] = lows[chosen] + np.clip((shares * spans).astype(np.int64), 0, spans - 1)
        return sizes


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the inputs ``names``, in the words of the user."""

    names: str
    dims: tuple[Dim, ...]

    @property
    def fixed(self) -> tuple[int, ...] | None:
        """Where every request has the same."""
        sizes = tuple(size for dim in self.dims if (size := dim.fixed) is not None)
        return sizes if len(sizes) == len(self.dims) else None

    @property
    def largest(self) -> tuple[int, ...]:
        return tuple(dim.largest for dim in self.dims)

    def could_be(self, model_dims: Collection[int]) -> bool:
        """Whether a model takes all of these sizes; -1 in the model's is any."""
        if len(model_dims) != len(self.dims):
            return False
        return all(own in (-1, dim.fixed) for own, dim in zip(model_dims, self.dims, strict=True))

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
        columns = [dim.draw(count, rng).tolist() for dim in self.dims]
        return list(zip(*columns, strict=True))


def parse_shape(text: str) -> Shape:
    """Raises ValueError saying what would be right."""
    names, _, dims = text.rpartition(":")
    if not names.strip():
        raise ValueError("write NAME:SIZES, such as input_ids:128 or input_ids:16..128")
    return Shape(names, parse_dims(dims))


def parse_dims(text: str) -> tuple[Dim, ...]:
    """What follows the name. Raises ValueError."""
    return tuple(parse_dim(part.strip()) for part in text.split(","))


def parse_range(text: str) -> tuple[str, Bounds]:
    """Names and bounds. Raises ValueError."""
    names, _, bounds = text.rpartition(":")
    if not names.strip():
        raise ValueError("write NAME:LOW..HIGH, such as input_ids:0..30521")
    return names, parse_bounds(bounds)


def parse_bounds(text: str) -> Bounds:
    """Whole numbers stay whole. Raises ValueError."""
    low, dots, high = (part.strip() for part in text.partition(".."))
    if dots and all(re.fullmatch("[+-]?[0-9]{1,20}", one) for one in (low, high)):
        bounds: Bounds = (int(low), int(high))
    else:
        bounds = (_number(low), _number(high))
    if not dots or not bounds[0] <= bounds[1] or not all(map(math.isfinite, bounds)):
        raise ValueError("write LOW..HIGH, such as 0..30521")
    return bounds


def meant_by(names: str, inputs: Collection[str]) -> tuple[str, ...]:
    """The inputs that ``names`` are, a name with a comma in it too. Raises ValueError for one that is none."""
    if names in inputs:
        return (names,)
    found = tuple(name.strip() for name in names.split(","))
    if any(name not in inputs for name in found):
        raise ValueError(f"the model's inputs are {', '.join(inputs)}")
    return found


def parse_dim(text: str) -> Dim:
    """Raises ValueError."""
    choices = []
    for part in text.split("|"):
        found = _CHOICE.fullmatch(part.strip())
        if found is None:
            raise ValueError("write sizes such as 128, 16..128 or 16*3|128*1")
        low, high = int(found[1]), int(found[2] or found[1])
        weight = float(found[3] or 1)
        if not 1 <= low <= high <= LARGEST_SIZE or weight <= 0:
            raise ValueError(f"sizes go from 1 to {LARGEST_SIZE}, the lower one first, and weights are above 0")
        choices.append((low, high, weight))
    if len(choices) > MOST_CHOICES:
        raise ValueError(f"give at most {MOST_CHOICES} choices")
    return Dim(tuple(choices))


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9.eE+-]{1,40}", text) else math.nan
