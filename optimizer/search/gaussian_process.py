"""Gaussian processes for the residuals of a simulation, optionally transferred from another machine."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from objectives.arrays import FloatArray

CovarianceFunction: TypeAlias = Callable[[FloatArray, FloatArray], FloatArray]
Prediction: TypeAlias = tuple[FloatArray, FloatArray]  # mean and standard deviation, each [inputs]

# candidates for the scales of errors and noise on this server, relative to the prior
ERROR_SCALES, NOISE_SCALES = (0.6, 1.0, 2.0), (0.1, 0.3, 1.0, 2.0)
SCALE_STD = 0.8  # prior standard deviation of the logarithm of either scale

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def single_threaded(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return ``function`` with linear algebra in one thread.

    OpenBLAS divides even small systems among threads, which wait for each other in busy loops. That takes a fifth of
    the CPU time of a search, and more next to other processes.
    """

    @wraps(function)
    def limited(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        importlib.import_module("scipy.linalg")  # the limit holds only for libraries that are loaded
        with threadpool_limits(1, "blas"):
            return function(*arguments, **keywords)

    return limited


@dataclass(frozen=True, eq=False)
class SourceCorrelation:
    """The correlation of the residuals with those of ``source``, a process of another machine, at equal inputs."""

    correlation: float
    source: ResidualProcess


class ResidualProcess:
    """A Gaussian process with a known covariance function, except for the scales of errors and noise.

    Both scales are maximum a posteriori estimates from a few candidates, because a handful of points determines no
    further hyperparameters. The regression is Rasmussen and Williams 2006, algorithm 2.1; importing scikit-learn for
    it would use more memory than all other imports of a run.

    With a ``transfer`` the prior is the posterior of the source process, scaled by the correlation (intrinsic
    coregionalization: Alvarez, Rosasco and Lawrence 2012, section 4.2).

    ``unscaled_log_likelihood`` is the log marginal likelihood with both scales at 1, up to a constant. The best
    scales would favor the simulation, which was fitted to the same points.
    """

    def __init__(
        self,
        kernel: CovarianceFunction,
        inputs: FloatArray,
        noise: FloatArray,
        residuals: FloatArray,
        transfer: SourceCorrelation | None = None,
        expected: FloatArray | None = None,
    ) -> None:
        """Condition the process on ``residuals`` [points] at ``inputs`` [points, features].

        ``noise`` [points, points] is the covariance of the noise. ``expected`` [points] are the residuals that are
        expected if this machine and the source are alike.
        """
        self._kernel, self._inputs, self._transfer = kernel, inputs, transfer
        errors = kernel(inputs, inputs)
        if transfer is not None:
            self._source_whitened, source_mean = transfer.source.condition(inputs)
            errors = errors - transfer.correlation**2 * self._source_whitened.T @ self._source_whitened
            prior_mean = source_mean if expected is None else source_mean + expected
            residuals = residuals - transfer.correlation * prior_mean
        fits = list(_fits(errors, noise, residuals))
        self._fit = max(fits, key=lambda fit: fit.log_likelihood)
        self.unscaled_log_likelihood = next(
            fit.log_likelihood for fit in fits if (fit.scale, fit.noise_scale) == (1.0, 1.0)
        )
        # caches by the id of the input array, which stays valid because the array is kept with the value
        self._whitened: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._predictions: dict[int, tuple[FloatArray, Prediction]] = {}

    @property
    def noise_scale(self) -> float:
        """The estimated standard deviation of the noise relative to the prior."""
        return self._fit.noise_scale

    @property
    def log_likelihood(self) -> float:
        """The log marginal likelihood under the best scales, up to a constant."""
        return self._fit.log_likelihood

    def condition(self, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (whitened covariances [points, inputs], mean [inputs]) for a process that transfers from this one.

        The product of two columns of the first is the covariance of two inputs that the points explain.
        """
        from scipy.linalg import solve_triangular

        fit, cross = self._fit, self._kernel(self._inputs, inputs)
        whitened = np.asarray(solve_triangular(fit.factor[0], math.sqrt(fit.scale) * cross, lower=True))
        return whitened, fit.scale * cross.T @ fit.weights

    def covariance(self, inputs: FloatArray, others: FloatArray) -> FloatArray:
        """Return the posterior covariance [inputs, others]."""
        prior = self._kernel(inputs, others)
        if self._transfer is not None:
            whitened = [self._transfer.source.condition(points)[0] for points in (inputs, others)]
            prior = prior - self._transfer.correlation**2 * whitened[0].T @ whitened[1]
        return self._fit.scale * prior - self._whiten(inputs).T @ self._whiten(others)

    def _whiten(self, inputs: FloatArray) -> FloatArray:
        """Return the whitened covariances [points, inputs] as in ``condition``, after transfer (cached per array)."""
        from scipy.linalg import solve_triangular

        if id(inputs) not in self._whitened:
            cross = self._kernel(self._inputs, inputs)
            if self._transfer is not None:
                source_whitened, _ = self._transfer.source.condition(inputs)
                cross = cross - self._transfer.correlation**2 * self._source_whitened.T @ source_whitened
            whitened = solve_triangular(self._fit.factor[0], self._fit.scale * cross, lower=True)
            self._whitened[id(inputs)] = inputs, whitened
        return self._whitened[id(inputs)][1]

    def predict(self, inputs: FloatArray, expected: FloatArray | None = None) -> Prediction:
        """Return (mean, standard deviation), each of shape [inputs], without noise. Cached per array."""
        if id(inputs) not in self._predictions:
            self._predictions[id(inputs)] = inputs, self._predict(inputs, expected)
        return self._predictions[id(inputs)][1]

    def samples(self, inputs: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
        """Return ``count`` joint samples [count, inputs], without noise and transfer.

        ``count`` is even: the second half has the opposite errors of the first, so the mean is that of ``predict``.
        """
        values, vectors = np.linalg.eigh(self.covariance(inputs, inputs))
        errors = rng.standard_normal((count // 2, len(inputs))) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
        return np.asarray(self.predict(inputs)[0] + np.concatenate([errors, -errors]))

    def _predict(self, inputs: FloatArray, expected: FloatArray | None) -> Prediction:
        from scipy.linalg import cho_solve

        fit, cross, mean = self._fit, self._kernel(self._inputs, inputs), np.zeros(len(inputs))
        prior = np.full(len(inputs), float(self._kernel(inputs[:1], inputs[:1])[0, 0]))
        if self._transfer is not None:
            whitened, source_mean = self._transfer.source.condition(inputs)
            correlation = self._transfer.correlation
            cross = cross - correlation**2 * self._source_whitened.T @ whitened
            prior = prior - correlation**2 * np.einsum("ij,ij->j", whitened, whitened)
            mean = correlation * (source_mean if expected is None else source_mean + expected)
        cross = fit.scale * cross
        variance = fit.scale * prior - np.einsum("ij,ij->j", cross, cho_solve(fit.factor, cross))
        return mean + cross.T @ fit.weights, np.sqrt(np.maximum(variance, 1e-12))


@dataclass(frozen=True, eq=False)
class _Fit:
    log_likelihood: float
    scale: float
    noise_scale: float
    factor: Any
    weights: FloatArray


def _fits(errors: FloatArray, noise: FloatArray, residuals: FloatArray) -> Iterator[_Fit]:
    """Yield the regression for each pair of scales."""
    from scipy.linalg import cho_factor, cho_solve

    for error_scale in ERROR_SCALES:
        for noise_scale in NOISE_SCALES:
            factor = cho_factor(error_scale**2 * errors + noise_scale**2 * noise, lower=True)
            weights = cho_solve(factor, residuals)
            log_likelihood = -0.5 * float(residuals @ weights) - float(np.log(np.diag(factor[0])).sum())
            log_likelihood -= 0.5 * (math.log(error_scale) ** 2 + math.log(noise_scale) ** 2) / SCALE_STD**2
            yield _Fit(log_likelihood, error_scale**2, noise_scale, factor, weights)


class FantasyProcess:
    """A kriging believer (Ginsbourger, Le Riche and Carraro 2010, section 4.2).

    The ``inputs`` [inputs, features], which are being measured, count as measured with the prediction of ``process``.
    So the means stay the same, and the standard deviations shrink near those inputs. ``noise`` [inputs, inputs] is
    the covariance of their noise.
    """

    def __init__(self, process: ResidualProcess, inputs: FloatArray, noise: FloatArray) -> None:
        self._process, self._inputs = process, inputs
        covariance = process.covariance(inputs, inputs)
        self._factor = np.linalg.cholesky(covariance + process.noise_scale**2 * noise)

    def predict(self, inputs: FloatArray, expected: FloatArray | None = None) -> Prediction:
        """Return (mean, standard deviation) as ``ResidualProcess.predict`` does."""
        from scipy.linalg import solve_triangular

        mean, std = self._process.predict(inputs, expected)
        whitened = solve_triangular(self._factor, self._process.covariance(self._inputs, inputs), lower=True)
        return mean, np.sqrt(np.maximum(std**2 - np.einsum("ij,ij->j", whitened, whitened), 1e-12))
