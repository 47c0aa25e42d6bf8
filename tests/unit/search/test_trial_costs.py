"""The expected time of a trial follows from the times of earlier ones."""

from __future__ import annotations

import pytest

from objectives.metrics import Measurement
from optimizer.core.trial import SERVER_PROCESSES, Candidate, LoadPoint, Trial
from optimizer.search.trial_costs import TrialCosts


def trial(number: int, instances: int, deploy_seconds: float | None, *measure_seconds: float | None) -> Trial:
    measured = tuple(
        (LoadPoint(1, 2**place), Measurement(100.0, measure_seconds=seconds))
        for place, seconds in enumerate(measure_seconds)
    )
    return Trial(number, Candidate(8, True, instance_count=instances), measured, deploy_seconds=deploy_seconds)


TRIALS = [trial(0, 1, 2.0, 0.5, 0.5), trial(1, 4, 8.0, 1.0), trial(2, 1, 3.0, 0.6, 0.4, 0.5)]


def test_the_deployment_is_that_of_the_closest_number_of_instances() -> None:
    costs = TrialCosts(TRIALS)
    assert costs.seconds(Candidate(16, instance_count=1)) == pytest.approx(2.5 + 1.0)
    assert costs.seconds(Candidate(16, instance_count=6)) == pytest.approx(8.0 + 1.0)


def test_the_instances_of_all_server_processes_count() -> None:
    assert TrialCosts(TRIALS).seconds(Candidate(16, instance_count=2, fields=((SERVER_PROCESSES, 2),))) == (
        pytest.approx(8.0 + 1.0)
    )


def test_an_average_trial_has_the_relative_time_one() -> None:
    costs = TrialCosts(TRIALS)
    relative = [costs.relative(one.candidate) for one in TRIALS]
    assert sum(relative) / len(relative) == pytest.approx(1.0)
    assert relative[1] > 2 * relative[0]


@pytest.mark.parametrize("trials", [[], [trial(0, 1, None, None)]])
def test_without_times_all_trials_take_the_same_time(trials: list[Trial]) -> None:
    costs = TrialCosts(trials)
    assert {costs.relative(Candidate(8, instance_count=count)) for count in (1, 2, 8)} == {1.0}
