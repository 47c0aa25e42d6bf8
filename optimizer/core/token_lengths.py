"""Numbers of tokens of prompts and outputs, as users write them: ``128``, ``32..256`` or ``lognormal:128:0.5``.

NUMBER                    the same for all requests
LOW..HIGH                 uniform, both bounds included
lognormal:MEDIAN:SIGMA    SIGMA is the standard deviation of the logarithm; clipped at three of them
FILE                      a file with one number a line, drawn with replacement
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.safe_text import exists, is_file, one_line, read_bytes

PLACE_OF_TOKENS = "{tokens}"
MAX_TOKENS = 1_000_000  # of a prompt or an output
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
    generate. ``maximum`` is the largest number of tokens of a prompt and its output; None if it is unknown.
    ``length_input`` gets the number of tokens of the prompt. ``output_text`` is the text of an ``output_input`` of
    strings, with PLACE_OF_TOKENS for the number.
    """

    prompt: SizeDistribution
    output: SizeDistribution
    prompt_input: str
    output_input: str
    maximum: int | None = None
    length_input: str = ""
    output_text: str = ""

    def check(self) -> None:
        """Raise ValueError for more tokens than the model allows, and for a text without a place for the number."""
        if self.output_text and PLACE_OF_TOKENS not in self.output_text:
            raise ValueError(f"output_text has no {PLACE_OF_TOKENS}, which stands for the number of tokens")
        longest = self.prompt.largest + self.output.largest
        if self.maximum is not None and longest > self.maximum:
            raise ValueError(
                f"prompts of up to {self.prompt.largest} tokens and outputs of up to {self.output.largest} are "
                f"{longest} tokens, and the model has at most {self.maximum}; shorten one of them"
            )


def names_file(text: str) -> bool:
    """Return whether ``text`` is the path of a file with lengths, not one of the other forms."""
    return not re.match(r"[0-9+-]|lognormal:", text.strip())


def parse_token_lengths(text: str, folder: Path = Path()) -> SizeDistribution:
    """Return the distribution in ``text``; a relative path begins in ``folder``.

    Raises ValueError (one line, without ``text`` itself), and BadInputError for a file that cannot be read.
    """
    words = text.strip()
    if names_file(words):
        return _of_file(folder / words)
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
    if not is_file(path):
        raise ValueError(f"{'not a file' if exists(path) else 'no such file'}; {FORMS}")
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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
