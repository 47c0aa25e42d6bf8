"""The probability of success: which failures tell about which configurations."""

from __future__ import annotations

from dataclasses import replace

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search.candidate_tracker import CandidateTracker
from optimizer.search.feasibility import Feasibility, beyond_gpu_memory
from optimizer.search.optuna_encoding import WORST_VIOLATION, TrialScore, score_trial
from optimizer.search.optuna_samplers import sampler_for
from optimizer.store.optuna_study import open_study

THREADS = "parameters.intra_op_thread_count.string_value"
SPACE = SearchSpace((8, 32, 128), ("off", 0), ("none",), (1, 2, 3, 4), {THREADS: ("1", "2")})
MEMORY = Sla.from_bounds({"gpu-memory": 1e9})


def candidate(size: int = 8, instances: int = 1, threads: str = "1", *, batching: bool = True) -> Candidate:
    return Candidate(size, batching, instance_count=instances, fields=((THREADS, threads),))


def worked(which: Candidate, memory: float = 1e8) -> Trial:
    return Trial(0, which, ((LoadPoint(1, 4), Measurement(100.0, latency_p95_ms=5.0, gpu_memory_bytes=memory)),))


def failed(which: Candidate, *, lacks_gpu_memory: bool = False) -> Trial:
    return Trial(0, which, status="failed", reason="refused", lacks_gpu_memory=lacks_gpu_memory)


def probability(trials: list[Trial], which: Candidate) -> float:
    return float(Feasibility(trials, SPACE, MEMORY).probabilities([which])[0])


def test_without_failures_each_configuration_counts_in_full() -> None:
    assert probability([], candidate()) == probability([worked(candidate())], candidate(128, 4, "2")) == 1


def test_a_family_is_left_after_two_failures() -> None:
    sound = [worked(candidate(128)), worked(candidate(8, threads="2"))]
    once, twice = [failed(candidate(8, 3))], [failed(candidate(size, 3)) for size in (8, 32)]
    assert 0.15 < probability(sound + once, candidate(32, 3)) < 0.6
    assert probability(sound + twice, candidate(128, 3)) < 0.15


def test_settings_that_do_not_fit_into_memory_leave_no_room_for_more() -> None:
    """Two failures, with three and with four instances, concern all configurations of at least three."""
    sound = [worked(candidate(128, 2)), worked(candidate(8, 1, "2"))]
    trials = [*sound, failed(candidate(instances=3)), failed(candidate(32, 4, "2"))]
    for other in (candidate(instances=4), candidate(8, 3, "2"), candidate(128, 3)):
        assert probability(trials, other) < 0.3
    assert probability(trials, candidate(32, 2)) > 0.8


def test_larger_batches_that_fail_leave_smaller_ones() -> None:
    trials = [worked(candidate(8)), worked(candidate(32)), *[failed(candidate(128))] * 2]
    assert probability(trials, candidate(128, 1)) < 0.15
    assert probability(trials, candidate(32)) > 0.4


def test_a_value_that_the_server_rejects_makes_its_configurations_unlikely() -> None:
    trials = [
        worked(candidate(threads="1", instances=2)),
        failed(candidate(threads="2")),
        failed(candidate(32, 2, "2")),
    ]
    assert probability(trials, candidate(128, 4, "2")) < 0.2
    assert probability(trials, candidate(8, 2, "1")) > 0.8


def test_a_success_makes_one_failure_an_exception() -> None:
    failure, success = failed(candidate(instances=2)), worked(candidate(instances=2))
    assert probability([failure], candidate(32, 2)) < 0.5
    assert probability([success, failure], candidate(32, 2)) > 0.8


def test_a_bound_that_is_not_simulated_counts_as_a_failure() -> None:
    trials = [worked(candidate(instances=3), memory=2e9), worked(candidate(32, 3), memory=2e9)]
    assert probability(trials, candidate(128, 3)) < 0.1


def test_a_deployment_that_is_given_up_for_its_latency_tells_nothing_about_its_memory() -> None:
    window = Measurement(40.0, latency_p95_ms=60.0, requests=9)
    given_up = [Trial(0, candidate(size, 3), ((LoadPoint(1, 4), window),)) for size in (8, 32)]
    assert probability([worked(candidate()), *given_up], candidate(128, 3)) == 1.0
    measured = [
        replace(trial, measurements=(*trial.measurements, *worked(trial.candidate, 2e9).measurements))
        for trial in given_up
    ]
    assert probability([worked(candidate()), *measured], candidate(128, 3)) < 0.3


def test_samplers_learn_no_violation_of_a_metric_that_a_given_up_deployment_lacks() -> None:
    problem = Problem("m", SPACE, 1, 64, sla=Sla.from_bounds({"p95": 20.0, "gpu-memory": 1e9}))

    def violations(measurement: Measurement) -> list[float]:
        score = score_trial(Trial(0, candidate(), ((LoadPoint(1, 4), measurement),)), problem)
        assert isinstance(score, TrialScore)
        return list(score.constraints.values())

    assert violations(Measurement(40.0, latency_p95_ms=60.0, requests=9)) == [2.0, 0.0]
    assert violations(Measurement(40.0, latency_p95_ms=60.0, gpu_memory_bytes=4e9)) == [2.0, 3.0]
    assert violations(Measurement(40.0, latency_p95_ms=10.0, stable=True)) == [-0.5, WORST_VIOLATION]


def test_server_processes_need_memory_as_instances_do() -> None:
    """Two failures, with four instances in all, concern a configuration with eight."""
    space = replace(SPACE, fields={**SPACE.fields, SERVER_PROCESSES: (1, 2)})

    def with_processes(instances: int, processes: int, size: int = 8) -> Candidate:
        single_process = candidate(size, instances)
        return replace(single_process, fields=tuple(sorted((*single_process.fields, (SERVER_PROCESSES, processes)))))

    trials = [worked(with_processes(1, 2)), worked(with_processes(2, 1, 128))]
    trials += [failed(with_processes(4, 1)), failed(with_processes(2, 2, 32))]
    feasibility = Feasibility(trials, space, MEMORY)
    more, fewer = feasibility.probabilities([with_processes(4, 2), with_processes(1, 2, 32)])
    assert more < 0.3 < 0.7 < fewer


# -- one failure for lack of GPU memory -----------------------------------------------------------------------------


def test_one_failure_for_lack_of_gpu_memory_rules_out_all_that_need_as_much() -> None:
    beyond = beyond_gpu_memory([failed(candidate(32, 2), lacks_gpu_memory=True)], SPACE.candidates())
    assert beyond == {candidate(size, instances) for size in (32, 128) for instances in (2, 3, 4)}


def test_with_other_settings_the_memory_is_unknown() -> None:
    fitting = [candidate(128, 1), candidate(8, 4), candidate(128, 4, "2"), candidate(32, 4, batching=False)]
    assert beyond_gpu_memory([failed(candidate(32, 2), lacks_gpu_memory=True)], fitting) == set()
    assert beyond_gpu_memory([failed(candidate(32, 2))], SPACE.candidates()) == set()


def test_a_configuration_that_was_served_shows_that_the_memory_suffices() -> None:
    """Another program may have held the memory when the smaller one failed."""
    trials = [failed(candidate(32, 2), lacks_gpu_memory=True), worked(candidate(128, 3))]
    assert beyond_gpu_memory(trials, SPACE.candidates()) == set()
    assert beyond_gpu_memory([trials[0], worked(candidate(128, 1))], SPACE.candidates())


def test_configurations_beyond_the_gpu_memory_are_not_suggested_by_any_method() -> None:
    problem = Problem("m", SPACE, 1, 64, (METRICS["throughput"],), MEMORY)
    tracker = CandidateTracker(problem, open_study(None, "tritune", problem, sampler_for("random", 0)))
    tracker.record(failed(candidate(32, 2), lacks_gpu_memory=True))
    assert tracker.tried() == {candidate(size, instances) for size in (32, 128) for instances in (2, 3, 4)}
    assert not tracker.start(candidate(128, 4))
    assert tracker.start(candidate(128, 1))
