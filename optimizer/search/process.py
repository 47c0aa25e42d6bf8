"""Gaussian processes of the errors of a simulation, here and, where another study showed them, elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Kernel: TypeAlias = Callable[[Array, Array], Array]

# How much larger or smaller errors and noise are on this server than usual is told by the measurements
ERROR_SCALES, NOISE_SCALES = (0.6, 1.0), (0.1, 0.3, 1.0, 2.0)
SCALE_SPREAD = 0.8  # of the logarithm of either scale, before anything is measured
# The correlation of the errors on two machines, and how likely each is before anything is measured here. The first
# is that of a study which tells nothing.
LIKENESSES = {0.0: 0.2, 0.8: 0.2, 0.95: 0.3, 0.99: 0.3}


@dataclass(frozen=True, eq=False)
class _Fit:
    """Under one assumption of how alike the machines are: the scales of highest density, and what they imply."""

    likeness: float
    density: float
    scale: float
    noise_scale: float
    factor: Any
    weights: Array


class Process:
    """A Gaussian process whose covariances are known but for how large the errors are, and how large the noise.

    ``learned`` [points] at ``inputs`` [points, features], with ``noise`` [points, points]. Both scales are those of
    the highest posterior density among a few: a handful of points says little of more hyperparameters. So the
    regression is some lines of linear algebra (Rasmussen and Williams 2006, algorithm 2.1), where scikit-learn's
    would cost more memory than all else that a run imports.

    Errors ``elsewhere`` are correlated with these at the same inputs (intrinsic coregionalization: Alvarez, Rosasco
    and Lawrence 2012, section 4.2), by how much is averaged over LIKENESSES as likely as ``learned`` makes them.
    ``expected`` [points] is what else would be ``learned`` if the two were alike.
    """

    def __init__(
        self,
        kernel: Kernel,
        inputs: Array,
        noise: Array,
        learned: Array,
        elsewhere: Process | None = None,
        expected: Array | None = None,
    ) -> None:
        self._kernel, self._inputs, self._elsewhere = kernel, inputs, elsewhere
        errors = kernel(inputs, inputs)
        if elsewhere is None:
            self._fits, self._odds = [_fit(0.0, 1.0, errors, noise, learned)], [1.0]
            return
        self._told, mean = elsewhere.told(inputs)
        mean = mean if expected is None else mean + expected
        self._fits = [
            _fit(likeness, odds, errors - likeness**2 * self._told.T @ self._told, noise, learned - likeness * mean)
            for likeness, odds in LIKENESSES.items()
        ]
        densities = np.array([one.density for one in self._fits])
        odds = np.exp(densities - densities.max())
        self._odds = (odds / odds.sum()).tolist()

    @property
    def noise_scale(self) -> float:
        """The noise as a multiple of the usual, whatever is known of elsewhere."""
        return self._fits[0].noise_scale

    def predict(self, inputs: Array, expected: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation [cells]."""
        means, variances = zip(*self._predictions(inputs, expected), strict=True)
        if len(means) == 1:
            return means[0], np.sqrt(variances[0])
        odds = np.array(self._odds)[:, None]
        mean = (odds * means).sum(axis=0)
        return mean, np.sqrt((odds * (np.array(variances) + (np.array(means) - mean) ** 2)).sum(axis=0))

    def told(self, inputs: Array) -> tuple[Array, Array]:
        """[points, cells]: the product of two columns is what these points explain of the cells' covariance; and
        the mean [cells]."""
        from scipy.linalg import solve_triangular

        (fit,) = self._fits
        cross = self._kernel(self._inputs, inputs)
        whitened = np.asarray(solve_triangular(fit.factor[0], math.sqrt(fit.scale) * cross, lower=True))
        return whitened, fit.scale * cross.T @ fit.weights

    def _predictions(self, inputs: Array, expected: Array | None) -> Iterator[tuple[Array, Array]]:
        """Mean and variance [cells] of each fit."""
        from scipy.linalg import cho_solve

        across = self._kernel(self._inputs, inputs)
        alone = float(self._kernel(inputs[:1], inputs[:1])[0, 0])
        if self._elsewhere is not None:
            told, there = self._elsewhere.told(inputs)
            there = there if expected is None else there + expected
            common, known = self._told.T @ told, np.einsum("ij,ij->j", told, told)
        for fit in self._fits:
            cross, prior, mean = across, np.asarray(alone), np.asarray(0.0)
            if self._elsewhere is not None and fit.likeness:
                cross, prior = across - fit.likeness**2 * common, alone - fit.likeness**2 * known
                mean = fit.likeness * there
            cross = fit.scale * cross
            variance = fit.scale * prior - np.einsum("ij,ij->j", cross, cho_solve(fit.factor, cross))
            yield mean + cross.T @ fit.weights, np.maximum(variance, 1e-12)


def _fit(likeness: float, odds: float, errors: Array, noise: Array, learned: Array) -> _Fit:
    from scipy.linalg import cho_factor, cho_solve

    def fits() -> Iterator[_Fit]:
        for error_scale in ERROR_SCALES:
            for noise_scale in NOISE_SCALES:
                factor = cho_factor(error_scale**2 * errors + noise_scale**2 * noise, lower=True)
                weights = cho_solve(factor, learned)
                density = -0.5 * float(learned @ weights) - float(np.log(np.diag(factor[0])).sum())
                density -= 0.5 * (math.log(error_scale) ** 2 + math.log(noise_scale) ** 2) / SCALE_SPREAD**2
                yield _Fit(likeness, density + math.log(odds), error_scale**2, noise_scale, factor, weights)

    return max(fits(), key=lambda one: one.density)
