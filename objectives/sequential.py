"""Error levels of a test that is repeated while data comes in: a group-sequential test with error spending.

The data are looked at after a planned number of servers, such as 4, 6 and 9. A test at the full error each time would
err more often than allowed, because each look is another chance. Lan and DeMets (1983, "Discrete sequential
boundaries for clinical trials") spend the error over the looks instead.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LOOKS = (4, 6, 9, 13, 19, 28)  # servers after which the verdict is judged; each look has about 1.5 times the data
_GRID = np.linspace(-9.0, 9.0, 1801)  # sums of normal values, in standard deviations
_PARTS = 20  # parts of a matrix, one at a time: the whole one takes 26 MB, and its temporary copies as much


def spent_error(error: float, servers: int) -> float:
    """Return the error that may be spent in all looks up to ``servers`` servers; it approaches ``error``."""
    return error * max(0.0, 1 - 2 / servers)


def look_error(error: float, look: int) -> float:
    """Return the one-sided error of the test at ``look``, one of LOOKS.

    The tests at all looks together err with ``error`` at most. The levels are applied to Student's t as well
    (Jennison and Turnbull 1999, "Group Sequential Methods", section 4.4).
    """
    looks = LOOKS[: LOOKS.index(look) + 1]  # without the later ones, which take time to compute
    return _last_look(error, looks).level


class _Look(NamedTuple):
    """A look: the error of its test, and the density of the sums of normal values that do not end the test."""

    level: float
    density: npt.NDArray[np.float64]
    sums: npt.NDArray[np.float64]


@functools.cache
def _last_look(error: float, looks: tuple[int, ...]) -> _Look:
    """Return the last of ``looks``. The sums are integrated from look to look (Armitage, McPherson and Rowe 1969)."""
    from scipy import special

    look = looks[-1]
    previous, spent_before = 0, 0.0
    sums_before, weights = np.array([0.0]), np.array([1.0])  # the probability of each sum
    if len(looks) > 1:
        previous, spent_before = looks[-2], spent_error(error, looks[-2])
        _, density_before, sums_before = _last_look(error, looks[:-1])
        weights = density_before * (sums_before[1] - sums_before[0])
    added_std = np.sqrt(look - previous)  # standard deviation of the sum since the previous look
    weights = weights / (added_std * np.sqrt(2 * np.pi))
    sums = _GRID * np.sqrt(look)
    density = np.concatenate(
        [
            np.exp(-0.5 * ((part[:, None] - sums_before) / added_std) ** 2) @ weights
            for part in np.array_split(sums, _PARTS)
        ]
    )
    above = (np.cumsum(density[::-1])[::-1] - density / 2) * (sums[1] - sums[0])  # probability of a higher sum
    error_of_look = spent_error(error, look) - spent_before
    bound = float(np.interp(-np.log(error_of_look), -np.log(np.maximum(above, 1e-300)), sums))
    continues = sums < bound  # a higher sum ends the test
    return _Look(float(special.ndtr(-bound / np.sqrt(look))), density[continues], sums[continues])
