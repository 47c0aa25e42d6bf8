"""Lists of values of one flag: ``1,2,4``, perf_analyzer's ``start:end:step``, and doubling ``1..256``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from decimal import Decimal

from optimizer.arguments.values import LARGEST_INT32, shown
from optimizer.errors import BadInputError

MOST_VALUES = 1000
LARGEST_RATE = 1e6  # requests per second
_NUMBER = r"([0-9]{1,10}(?:\.[0-9]{1,9})?)"


def whole_numbers(flag: str, text: str, least: int, most: int = LARGEST_INT32) -> tuple[int, ...]:
    """Each number once, in the order given. Raises BadInputError naming the flag and what would be right."""
    return tuple(int(number) for number in _numbers(flag, text, least, most, "whole number"))


def rates(flag: str, text: str) -> tuple[float, ...]:
    """Requests per second; as ``whole_numbers``, fractions allowed."""
    return tuple(float(number) for number in _numbers(flag, text, 1, LARGEST_RATE, "rate"))


def words(flag: str, text: str) -> tuple[str, ...]:
    """``a,b`` -> each once. Raises BadInputError where one is empty."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(found) or len(found) > MOST_VALUES:
        raise BadInputError(f"{flag} {shown(text)}: write values, joined by commas")
    return found


def _numbers(flag: str, text: str, least: float, most: float, kind: str) -> tuple[Decimal, ...]:
    try:
        every = (number for part in text.split(",") for number in _part(part.strip(), kind))
        found = tuple(dict.fromkeys(itertools.islice(every, MOST_VALUES + 1)))
        if not all(least <= number <= most for number in found):
            raise ValueError
    except ValueError:
        right = f"{kind}s from {least:g} to {most:,.0f} as 1,2,4 or start:end:step (2:16:2) or doubled (1..256)"
        raise BadInputError(f"{flag} {shown(text)}: write {right}") from None
    if len(found) > MOST_VALUES:
        raise BadInputError(f"{flag} {shown(text)}: more than {MOST_VALUES:,} values; take a larger step")
    return found


def _part(text: str, kind: str) -> Iterator[Decimal]:
    """Raises ValueError."""
    found = re.fullmatch(f"{_NUMBER}(?:(:|\\.\\.){_NUMBER}(?::{_NUMBER})?)?", text)
    if found is None or ("." in text.replace("..", "") and kind == "whole number"):
        raise ValueError
    first, relation, last, step = found.groups()
    low, high = Decimal(first), Decimal(last or first)
    if high < low or (relation == ".." and (step or not low)) or (step and not Decimal(step)):
        raise ValueError
    if relation == "..":
        count = math.ceil(math.log2(high / low))
        return iter([*(low * 2**power for power in range(count)), high])
    stride = Decimal(step or 1)
    return (low + i * stride for i in range(int((high - low) / stride) + 1))
