"""Gaussian processes of the errors of a simulation, here and, where another study showed them, elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Kernel: TypeAlias = Callable[[Array, Array], Array]

# How much larger or smaller errors and noise are on this server than usual is told by the measurements
SCALES = tuple(itertools.product((0.6, 1.0), (0.1, 0.3, 1.0, 2.0)))
SCALE_SPREAD = 0.8  # of the logarithm of either scale, before anything is measured


@dataclass(frozen=True, eq=False)
class Likeness:
    """Errors ``elsewhere`` have the correlation ``of`` with those at the same inputs here."""

    of: float
    elsewhere: Process


class Process:
    """A Gaussian process whose covariances are known but for how large the errors are, and how large the noise.

    ``learned`` [points] at ``inputs`` [points, features], with ``noise`` [points, points]. Both scales are those of
    the highest posterior density among a few: a handful of points says little of more hyperparameters. So the
    regression is some lines of linear algebra (Rasmussen and Williams 2006, algorithm 2.1), where scikit-learn's
    would cost more memory than all else that a run imports.

    With ``likeness`` it goes on where a process elsewhere ended (intrinsic coregionalization: Alvarez, Rosasco and
    Lawrence 2012, section 4.2); ``expected`` [points] is then what is to be learned here if the two are alike.
    ``scales``: pairs to choose from.

    ``usual_density`` is the logarithm of that of what was learned under the usual scales, but for a constant: those
    that fit best would flatter a simulation, which was fitted to the same points.
    """

    def __init__(
        self,
        kernel: Kernel,
        inputs: Array,
        noise: Array,
        learned: Array,
        likeness: Likeness | None = None,
        expected: Array | None = None,
        scales: Sequence[tuple[float, float]] = SCALES,
    ) -> None:
        self._kernel, self._inputs, self._likeness = kernel, inputs, likeness
        errors = kernel(inputs, inputs)
        if likeness is not None:
            self._told, there = likeness.elsewhere.told(inputs)
            errors = errors - likeness.of**2 * self._told.T @ self._told
            learned = learned - likeness.of * (there if expected is None else there + expected)
        fits = list(_fits(errors, noise, learned, scales))
        self._fit = max(fits, key=lambda one: one.density)
        self.usual_density = next((one.density for one in fits if one.scales == (1.0, 1.0)), math.nan)

    def given(self, inputs: Array, noise: Array, learned: Array, expected: Array | None = None) -> Process:
        """The same process after other points, its scales as they are; without a ``usual_density``."""
        return Process(self._kernel, inputs, noise, learned, self._likeness, expected, (self._fit.scales,))

    @property
    def noise_scale(self) -> float:
        """The noise as a multiple of the usual."""
        return self._fit.scales[1]

    def told(self, inputs: Array) -> tuple[Array, Array]:
        """[points, cells]: the product of two columns is what these points explain of the cells' covariance; and
        the mean [cells]."""
        from scipy.linalg import solve_triangular

        fit, cross = self._fit, self._kernel(self._inputs, inputs)
        whitened = np.asarray(solve_triangular(fit.factor[0], math.sqrt(fit.scale) * cross, lower=True))
        return whitened, fit.scale * cross.T @ fit.weights

    def predict(self, inputs: Array, expected: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation [cells]."""
        from scipy.linalg import cho_solve

        fit, cross, mean = self._fit, self._kernel(self._inputs, inputs), np.zeros(len(inputs))
        prior = np.full(len(inputs), float(self._kernel(inputs[:1], inputs[:1])[0, 0]))
        if self._likeness is not None:
            told, there = self._likeness.elsewhere.told(inputs)
            alike = self._likeness.of
            cross = cross - alike**2 * self._told.T @ told
            prior = prior - alike**2 * np.einsum("ij,ij->j", told, told)
            mean = alike * (there if expected is None else there + expected)
        cross = fit.scale * cross
        variance = fit.scale * prior - np.einsum("ij,ij->j", cross, cho_solve(fit.factor, cross))
        return mean + cross.T @ fit.weights, np.sqrt(np.maximum(variance, 1e-12))


@dataclass(frozen=True, eq=False)
class _Fit:
    density: float
    scales: tuple[float, float]
    factor: Any
    weights: Array

    @property
    def scale(self) -> float:
        """Of the covariances of the errors."""
        return self.scales[0] ** 2


def _fits(errors: Array, noise: Array, learned: Array, scales: Sequence[tuple[float, float]]) -> Iterator[_Fit]:
    """One for each pair of scales."""
    from scipy.linalg import cho_factor, cho_solve

    for error_scale, noise_scale in scales:
        factor = cho_factor(error_scale**2 * errors + noise_scale**2 * noise, lower=True)
        weights = cho_solve(factor, learned)
        density = -0.5 * float(learned @ weights) - float(np.log(np.diag(factor[0])).sum())
        density -= 0.5 * (math.log(error_scale) ** 2 + math.log(noise_scale) ** 2) / SCALE_SPREAD**2
        yield _Fit(density, (error_scale, noise_scale), factor, weights)
