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
    ) -> None:
        self._kernel, self._inputs, self._likeness = kernel, inputs, likeness
        errors = kernel(inputs, inputs)
        if likeness is not None:
            self._told, there = likeness.elsewhere.told(inputs)
            errors = errors - likeness.of**2 * self._told.T @ self._told
            learned = learned - likeness.of * (there if expected is None else there + expected)
        fits = list(_fits(errors, noise, learned))
        self._fit = max(fits, key=lambda one: one.density)
        self.usual_density = next(one.density for one in fits if (one.scale, one.noise_scale) == (1.0, 1.0))
        # of arrays that are asked for again: by their ids, which are theirs as long as they are kept
        self._explanations: dict[int, tuple[Array, Array]] = {}
        self._predictions: dict[int, tuple[Array, tuple[Array, Array]]] = {}

    @property
    def noise_scale(self) -> float:
        """The noise as a multiple of the usual."""
        return self._fit.noise_scale

    def told(self, inputs: Array) -> tuple[Array, Array]:
        """[points, cells]: the product of two columns is what these points explain of the cells' covariance; and
        the mean [cells]."""
        from scipy.linalg import solve_triangular

        fit, cross = self._fit, self._kernel(self._inputs, inputs)
        whitened = np.asarray(solve_triangular(fit.factor[0], math.sqrt(fit.scale) * cross, lower=True))
        return whitened, fit.scale * cross.T @ fit.weights

    def covariance(self, inputs: Array, others: Array) -> Array:
        """[inputs, others], after what was learned. Of the same arrays it is cheaper the next time."""
        prior = self._kernel(inputs, others)
        if self._likeness is not None:
            told = [self._likeness.elsewhere.told(own)[0] for own in (inputs, others)]
            prior = prior - self._likeness.of**2 * told[0].T @ told[1]
        return self._fit.scale * prior - self._explaining(inputs).T @ self._explaining(others)

    def _explaining(self, inputs: Array) -> Array:
        """[points, cells]: the product of two columns is what these points explain of the cells' covariance."""
        from scipy.linalg import solve_triangular

        if id(inputs) not in self._explanations:
            cross = self._kernel(self._inputs, inputs)
            if self._likeness is not None:
                cross = cross - self._likeness.of**2 * self._told.T @ self._likeness.elsewhere.told(inputs)[0]
            found = solve_triangular(self._fit.factor[0], self._fit.scale * cross, lower=True)
            self._explanations[id(inputs)] = inputs, found
        return self._explanations[id(inputs)][1]

    def predict_again(self, inputs: Array, expected: Array | None = None) -> tuple[Array, Array]:
        """As ``predict``; of the same array it is worked out once."""
        if id(inputs) not in self._predictions:
            self._predictions[id(inputs)] = inputs, self.predict(inputs, expected)
        return self._predictions[id(inputs)][1]

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
    scale: float
    noise_scale: float
    factor: Any
    weights: Array


def _fits(errors: Array, noise: Array, learned: Array) -> Iterator[_Fit]:
    """One for each pair of scales."""
    from scipy.linalg import cho_factor, cho_solve

    for error_scale in ERROR_SCALES:
        for noise_scale in NOISE_SCALES:
            factor = cho_factor(error_scale**2 * errors + noise_scale**2 * noise, lower=True)
            weights = cho_solve(factor, learned)
            density = -0.5 * float(learned @ weights) - float(np.log(np.diag(factor[0])).sum())
            density -= 0.5 * (math.log(error_scale) ** 2 + math.log(noise_scale) ** 2) / SCALE_SPREAD**2
            yield _Fit(density, error_scale**2, noise_scale, factor, weights)
