"""Sizes of requests as users write them: input shapes, value ranges, batch sizes, priorities, numbers of tokens.

    shape    NAMES:DIM,DIM,...            as perf_analyzer's --shape, without the batch dimension
    NAMES    NAME or NAME,NAME,...        these inputs have the same sizes in each request
    DIM      CHOICE or CHOICE|CHOICE|...
    CHOICE   SIZE or LOW..HIGH, then *WEIGHT (1 by default)
    range    NAMES:LOW..HIGH              both bounds included

The number of samples of a request (the request batch size), the number of requests in a sequence, and the priorities
of requests are written as a DIM too.

Numbers of tokens of prompts and outputs are written as ``128``, ``32..256`` or ``lognormal:128:0.5``:

    NUMBER                    the same for all requests
    LOW..HIGH                 uniform, both bounds included
    lognormal:MEDIAN:SIGMA    SIGMA is the standard deviation of the logarithm; clipped at three of them
    FILE                      a file with one number a line, drawn with replacement
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from objectives.metrics import plain_number
from optimizer.core.safe_text import file_fault, one_line, read_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


DISTRIBUTION_MARKS = ("*", "|", "..")  # a DIM with one of these has several sizes
MAX_SIZE = 2**31 - 1
MAX_CHOICES = 64
MAX_PRIORITIES = 16  # limit for one load, because each priority has its own statistics
DRAWN_SIZES = 8192  # number of sizes that are drawn to estimate a quantile
ValueRange: TypeAlias = "tuple[int, int] | tuple[float, float]"
WEIGHT_DECIMALS = 9  # that _CHOICE reads
_CHOICE = re.compile(r"([0-9]{1,10})(?:\.\.([0-9]{1,10}))?(?:\*([0-9]{1,9}(?:\.[0-9]{1,9})?))?")


@dataclass(frozen=True, slots=True)
class SizeDistribution:
    """The distribution of the sizes of one dimension.

    ``choices`` are ``(low, high, weight)``: sizes are uniform within each interval, both bounds included.
    """

    choices: tuple[tuple[int, int, float], ...]

    @property
    def fixed(self) -> int | None:
        """The size if there is only one, otherwise None."""
        return self.smallest if self.smallest == self.largest else None

    @property
    def smallest(self) -> int:
        """The smallest size."""
        return min(low for low, _, _ in self.choices)

    @property
    def largest(self) -> int:
        """The largest size."""
        return max(high for _, high, _ in self.choices)

    @property
    def mean(self) -> float:
        """The mean size."""
        weights = sum(weight for _, _, weight in self.choices)
        return self.fixed or sum(weight * (low + high) / 2 for low, high, weight in self.choices) / weights

    def share_above(self, size: int) -> float:
        """Return the share of the sizes above ``size``."""
        weights = sum(weight for _, _, weight in self.choices)
        above = ((weight, max(0, high - max(low - 1, size)) / (high - low + 1)) for low, high, weight in self.choices)
        return sum(weight * share for weight, share in above) / weights

    def quantiles(self, count: int) -> list[int]:
        """Return ``count`` quantiles at equal distances, from the smallest to the largest size."""
        import numpy as np

        drawn = np.sort(self.draw(DRAWN_SIZES, np.random.default_rng(0)))
        inner: list[int] = drawn[np.linspace(0, len(drawn) - 1, count).round().astype(int)].tolist()
        return [self.smallest, *inner[1:-1], self.largest]

    def __str__(self) -> str:
        """Return the text that ``parse_size_distribution`` reads as this distribution."""
        if len(self.choices) == 1:
            ((low, high, _),) = self.choices
            return str(low) if low == high else f"{low}..{high}"
        spans = [(str(low) if low == high else f"{low}..{high}", weight) for low, high, weight in self.choices]
        return "|".join(f"{span}*{plain_number(weight, WEIGHT_DECIMALS)}" for span, weight in spans)

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return ``count`` sizes in random order, shape [count].

        The distribution is divided into ``count`` equally likely parts, and one size is drawn from each (stratified
        sampling). So the sizes follow the distribution closely for every seed.
        """
        import numpy as np  # the options are parsed without it, so that help and errors of the command are fast

        lows, highs, weights = (np.array(column) for column in zip(*self.choices, strict=True))
        probabilities, ends = weights / weights.sum(), np.cumsum(weights) / weights.sum()
        levels = (rng.permutation(count) + rng.random(count)) / count  # of the drawn quantiles
        chosen = np.minimum(np.searchsorted(ends, levels, side="right"), len(ends) - 1)
        shares = (levels - (ends - probabilities)[chosen]) / probabilities[chosen]  # of the chosen interval
        spans = (highs - lows + 1)[chosen]
        sizes: npt.NDArray[np.int64] = lows[chosen] + np.clip((shares * spans).astype(np.int64), 0, spans - 1)
        return sizes


@dataclass(frozen=True, slots=True)
class InputShape:
    """The sizes of the inputs ``names``, which is the user's text and may list several inputs."""

    names: str
    dims: tuple[SizeDistribution, ...]

    @property
    def fixed(self) -> tuple[int, ...] | None:
        """The sizes if every request has the same, otherwise None."""
        sizes = tuple(size for dim in self.dims if (size := dim.fixed) is not None)
        return sizes if len(sizes) == len(self.dims) else None

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest size of each dimension."""
        return tuple(dim.largest for dim in self.dims)

    def fits_model(self, model_dims: Collection[int]) -> bool:
        """Return whether a model with ``model_dims`` accepts all these sizes; -1 accepts any size."""
        if len(model_dims) != len(self.dims):
            return False
        return all(model_dim in (-1, dim.fixed) for model_dim, dim in zip(model_dims, self.dims, strict=True))

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
        """Return the sizes of ``count`` requests, see ``SizeDistribution.draw``."""
        columns = [dim.draw(count, rng).tolist() for dim in self.dims]
        return list(zip(*columns, strict=True))


def parse_input_shape(text: str) -> InputShape:
    """Return the shape in ``text``, such as ``ids:16..128``. Raises ValueError with an example."""
    names, _, dims = text.rpartition(":")
    if not names.strip():
        raise ValueError("write NAME:SIZES, such as input_ids:128 or input_ids:16..128")
    return InputShape(names, parse_size_distributions(dims))


def parse_size_distributions(text: str) -> tuple[SizeDistribution, ...]:
    """Return the distributions in ``text``, such as ``3,16..128``. Raises ValueError with an example."""
    return tuple(parse_size_distribution(part.strip()) for part in text.split(","))


def parse_range(text: str) -> tuple[str, ValueRange]:
    """Return the input names and the value range in ``text``. Raises ValueError with an example."""
    names, _, bounds = text.rpartition(":")
    if not names.strip():
        raise ValueError("write NAME:LOW..HIGH, such as input_ids:0..30521")
    return names, parse_bounds(bounds)


def parse_bounds(text: str) -> ValueRange:
    """Return the bounds in ``text``, as integers if both are. Raises ValueError with an example."""
    low, dots, high = (part.strip() for part in text.partition(".."))
    if dots and all(re.fullmatch("[+-]?[0-9]{1,20}", bound) for bound in (low, high)):
        bounds: ValueRange = (int(low), int(high))
    else:
        bounds = (_number(low), _number(high))
    if dots and bounds[0] > bounds[1]:
        raise ValueError("the lower bound is above the upper one; write LOW..HIGH, such as 0..30521")
    if not dots or not all(map(math.isfinite, bounds)):
        raise ValueError("write LOW..HIGH, such as 0..30521")
    return bounds


def select_inputs(names: str, inputs: Collection[str]) -> tuple[str, ...]:
    """Return the inputs that the text ``names`` lists; an input's own name may contain a comma.

    Raises ValueError if one is not an input of the model.
    """
    if names in inputs:
        return (names,)
    selected = tuple(name.strip() for name in names.split(","))
    if any(name not in inputs for name in selected):
        raise ValueError(f"the model's inputs are {', '.join(inputs)}")
    return selected


def parse_size_distribution(text: str) -> SizeDistribution:
    """Return the distribution in ``text``, such as ``16*3|64..128``. Raises ValueError with an example."""
    choices = []
    for part in text.split("|"):
        match = _CHOICE.fullmatch(part.strip())
        if match is None:
            raise ValueError("write sizes such as 128, 16..128 or 16*3|128*1")
        low, high = int(match[1]), int(match[2] or match[1])
        weight = float(match[3] or 1)
        if not 1 <= low <= high <= MAX_SIZE or weight <= 0:
            raise ValueError(f"sizes are from 1 to {MAX_SIZE}, the lower one first, and weights are greater than 0")
        choices.append((low, high, weight))
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"give at most {MAX_CHOICES} choices")
    return SizeDistribution(tuple(choices))


def parse_priorities(text: str) -> SizeDistribution:
    """Return the shares of priorities in ``text``, such as ``1*20|2*80``. Raises ValueError with an example."""
    rule = f"write at most {MAX_PRIORITIES} different priorities from 1 and their shares, such as 1*20|2*80"
    try:
        shares = parse_size_distribution(text)
    except ValueError:
        raise ValueError(rule) from None
    levels = {low for low, _, _ in shares.choices}
    if len(levels) < len(shares.choices) or len(levels) > MAX_PRIORITIES:
        raise ValueError(rule)
    if any(low != high for low, high, _ in shares.choices):
        raise ValueError(rule)
    return SizeDistribution(tuple(sorted(shares.choices)))


def _number(text: str) -> float:
    """Return the number in ``text``; NaN for any other text, such as ``inf``."""
    try:
        return float(text) if re.fullmatch(r"[0-9.eE+-]{1,40}", text) else math.nan
    except ValueError:
        return math.nan


# -- numbers of tokens ------------------------------------------------------------------------------------------

TOKENS_PLACEHOLDER = "{tokens}"
MAX_TOKENS = 1_000_000  # limit for a prompt or an output
MAX_LOGNORMAL = 1 << 16  # its distribution is a table
MAX_FILE_BYTES = 16 << 20
CLIPPED_SIGMAS = 3.0
FORMS = "write a number such as 128, a range 32..256, lognormal:128:0.5, or a file with one number a line"
_RANGE = re.compile(r"([0-9]+)(?:\.\.([0-9]+))?")
_LOGNORMAL = re.compile(r"lognormal:([0-9.]{1,20}):([0-9.]{1,20})")


@dataclass(frozen=True, slots=True)
class TokenRequests:
    """The lengths of prompts and outputs, and the inputs of the model that get them.

    ``prompt_input`` is the input with the tokens of the prompt, ``output_input`` that with the number of tokens to
    generate. ``max_tokens`` is the largest number of tokens of a prompt and its output; None if it is unknown.
    ``length_input`` gets the number of tokens of the prompt. ``output_text`` is the text of an ``output_input`` of
    strings, with TOKENS_PLACEHOLDER for the number.
    """

    prompt: SizeDistribution
    output: SizeDistribution
    prompt_input: str
    output_input: str
    max_tokens: int | None = None
    length_input: str = ""
    output_text: str = ""

    def check(self) -> None:
        """Raise ValueError for more tokens than the model allows, and for a text without TOKENS_PLACEHOLDER."""
        if self.output_text and TOKENS_PLACEHOLDER not in self.output_text:
            raise ValueError(f"output_text has no {TOKENS_PLACEHOLDER}, which stands for the number of tokens")
        longest = self.prompt.largest + self.output.largest
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(
                f"prompts of up to {self.prompt.largest} tokens and outputs of up to {self.output.largest} are "
                f"{longest} tokens, and the model has at most {self.max_tokens}; shorten one of them"
            )


def names_file(text: str) -> bool:
    """Return whether ``text`` is the path of a file with lengths, not one of the other forms."""
    return not re.match(r"[0-9+-]|lognormal:", text.strip())


def parse_token_lengths(text: str) -> SizeDistribution:
    """Return the distribution in ``text``.

    Raises ValueError (one line, without ``text`` itself), and BadInputError for a file that cannot be read.
    """
    words = text.strip()
    if words and names_file(words):
        return _of_file(Path(words))
    if match := _RANGE.fullmatch(words):
        low, high = int(match[1][:20]), int((match[2] or match[1])[:20])
        if not 1 <= low <= high <= MAX_TOKENS:
            raise ValueError(f"write lengths from 1 to {MAX_TOKENS:,} tokens, the lower one first")
        return SizeDistribution(((low, high, 1.0),))
    if match := _LOGNORMAL.fullmatch(words):
        return _lognormal(_number(match[1]), _number(match[2]))
    raise ValueError(FORMS)


def _lognormal(median: float, sigma: float) -> SizeDistribution:
    """Return the distribution of rounded lognormal numbers from 1 to the clipped end, where the rest of it goes."""
    if not (1 <= median <= MAX_TOKENS and 0 < sigma <= 3):
        raise ValueError(f"write lognormal:MEDIAN:SIGMA with a median from 1 to {MAX_TOKENS:,} and a sigma up to 3")
    largest = round(median * math.exp(CLIPPED_SIGMAS * sigma))
    if largest > MAX_LOGNORMAL:
        raise ValueError(f"lengths of up to {largest:,} tokens; take a smaller median or sigma")

    def share_below(length: float) -> float:
        return 0.5 * (1 + math.erf(math.log(length / median) / sigma / math.sqrt(2)))

    ends = [0.0, *(share_below(length + 0.5) for length in range(1, largest)), 1.0]
    shares = ((length, ends[length] - ends[length - 1]) for length in range(1, largest + 1))
    return SizeDistribution(tuple((length, length, share) for length, share in shares if share > 0))


def _of_file(path: Path) -> SizeDistribution:
    if fault := file_fault(path):
        raise ValueError(f"{fault}; {FORMS}")
    counts: Counter[int] = Counter()
    lines = read_bytes(path, MAX_FILE_BYTES, "give fewer lengths").decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not re.fullmatch(r"[0-9]{1,20}", line.strip()) or not 1 <= int(line) <= MAX_TOKENS:
            shown = one_line(line.strip(), 40)
            raise ValueError(f"line {number}: {shown} is not a number of tokens from 1 to {MAX_TOKENS:,}")
        counts[int(line)] += 1
    if not counts:
        raise ValueError("the file has no lengths; write one number a line")
    return SizeDistribution(tuple((length, length, float(count)) for length, count in sorted(counts.items())))
