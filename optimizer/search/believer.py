"""A process that has been told what it predicts of some cells itself."""

from __future__ import annotations

import numpy as np

from optimizer.search.process import Array, Process


class Believer:
    """A kriging believer (Ginsbourger, Le Riche and Carraro 2010, section 4.2): cells at ``inputs``
    [cells, features], with ``noise`` [cells, cells], count as measured with what ``process`` predicts of them. So its
    means stay as they are, and its deviations shrink near those cells."""

    def __init__(self, process: Process, inputs: Array, noise: Array) -> None:
        self._process, self._inputs = process, inputs
        covariance = process.covariance(inputs, inputs)
        self._factor = np.linalg.cholesky(covariance + process.noise_scale**2 * noise)

    def predict(self, inputs: Array, expected: Array | None = None) -> tuple[Array, Array]:
        """As of a Process; of the same array it is cheaper the next time."""
        from scipy.linalg import solve_triangular

        mean, deviation = self._process.predict_again(inputs, expected)
        told = solve_triangular(self._factor, self._process.covariance(self._inputs, inputs), lower=True)
        return mean, np.sqrt(np.maximum(deviation**2 - np.einsum("ij,ij->j", told, told), 1e-12))
