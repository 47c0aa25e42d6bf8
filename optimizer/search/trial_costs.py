"""The expected time of a trial, which the gain that it promises is weighed against.

The acquisition function is the expected improvement per second (Snoek, Larochelle and Adams 2012, "Practical Bayesian
optimization of machine learning algorithms", section 3.2).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from optimizer.core.trial import Candidate, Trial


class TrialCosts:
    """The times of finished trials, and the expected time of the next trial of a candidate.

    A deployment loads the model once for each instance, so its time is that of the deployments with the closest
    number of instances, in all server processes together. The measurements of a trial take the median time of those
    so far.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._deploy_seconds: dict[int, list[float]] = {}
        measure_seconds = []
        for trial in trials:
            if trial.deploy_seconds is not None:
                self._deploy_seconds.setdefault(_instances(trial.candidate), []).append(trial.deploy_seconds)
            if seconds := sum(measurement.measure_seconds or 0.0 for _, measurement in trial.measurements):
                measure_seconds.append(seconds)
        self._measure_seconds = statistics.median(measure_seconds) if measure_seconds else 0.0
        self._usual_seconds = (
            statistics.fmean(map(self.seconds, (trial.candidate for trial in trials))) if trials else 0.0
        )

    def seconds(self, candidate: Candidate) -> float:
        """Return the expected time of a trial of ``candidate``; 0 if no times are known."""
        known = self._deploy_seconds
        if not known:
            return self._measure_seconds
        closest = min(known, key=lambda count: (abs(count - _instances(candidate)), count))
        return statistics.median(known[closest]) + self._measure_seconds

    def relative(self, candidate: Candidate) -> float:
        """Return the expected time relative to the mean of the trials so far; 1 if no times are known."""
        return self.seconds(candidate) / self._usual_seconds if self._usual_seconds else 1.0


def _instances(candidate: Candidate) -> int:
    """Return the number of instances of all server processes of ``candidate``."""
    return candidate.instances * candidate.server_processes
