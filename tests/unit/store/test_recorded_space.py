"""The search space of a recorded table, and every search method on it."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest

from objectives.metrics import METRICS
from optimizer.config.problem import Problem
from optimizer.config.search_space import OFF, SearchSpace
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.run_options import SEARCHERS
from optimizer.search import installed_methods, make_searcher
from optimizer.search.candidate_tracker import MAX_DEPLOYMENTS, CandidateTracker
from optimizer.search.optuna_samplers import sampler_for
from optimizer.search.simulated import SimulationGuidedSearcher
from optimizer.store.optuna_study import open_study
from optimizer.store.recording import RecordedSpace, baselines, recorded_space
from tests.conftest import measure_known_server, measurement

SPARSE = {
    Candidate(1): {1, 8},
    Candidate(8, True, 500, (4,)): {8, 16},
    Candidate(16, True, 500, (8,), 2): {16},
    Candidate(16, True, 0, (), 3): set(),
}


def space() -> RecordedSpace:
    return recorded_space(SPARSE, 1)


def test_the_choices_are_those_of_the_candidates() -> None:
    assert space().parameters() == {
        "max_batch_size": (1, 8, 16),
        "max_queue_delay_us": (OFF, 0, 500),
        "preferred_batch_sizes": ("none", "max/2"),
        "instance_count": (1, 2, 3),
    }


def test_absolute_sizes_stay_so_where_that_makes_fewer_choices() -> None:
    same = recorded_space({Candidate(size, True, 500, (4,)): {1} for size in (8, 16, 32)}, 1)
    assert same.preferred_batch_sizes == ("4",)


def test_only_recorded_candidates_are_valid() -> None:
    values: dict[str, FieldValue] = {
        "max_batch_size": 8,
        "max_queue_delay_us": 500,
        "preferred_batch_sizes": "max/2",
        "instance_count": 1,
    }
    assert space().candidate(values) == Candidate(8, True, 500, (4,))
    assert space().candidate({**values, "instance_count": 2}) is None
    assert space().candidate({**values, "max_queue_delay_us": 0}) is None
    assert space().candidate({**values, "max_queue_delay_us": OFF}) == Candidate(1), "behaves as the recorded one"
    assert space().parameter_values(Candidate(8, True, 500, (4,))) == values
    assert space().parameter_values(Candidate(8, True, 500, (4,), 2)) is None
    assert space().candidates() == tuple(SPARSE)
    assert len(space()) == 4


def test_loads_are_those_of_the_candidate() -> None:
    assert space().allowed_concurrencies(Candidate(1)) == (1, 8)
    assert space().allowed_concurrencies(Candidate(8)) == (1, 8), "another spelling of it"
    assert space().allowed_concurrencies(Candidate(16, True, 0, (), 3)) == ()
    assert space().allowed_concurrencies(Candidate(64)) == (1, 8)
    assert space().allowed_concurrencies(Candidate(64, True)) == ()


def test_candidates_that_behave_the_same_are_one_with_the_loads_of_all() -> None:
    alike = recorded_space({Candidate(4): {1}, Candidate(8): {2}, Candidate(8, instance_count=2): {4}}, 1)
    assert alike.candidates() == (Candidate(4), Candidate(4, instance_count=2))
    assert alike.allowed_concurrencies(Candidate(8)) == (1, 2)
    assert alike.allowed_concurrencies(Candidate(8, instance_count=2)) == (4,)


def test_parameters_that_are_gone_without_the_batcher_do_not_part_candidates() -> None:
    path = "dynamic_batching.preserve_ordering"
    on = [Candidate(8, True, 0, (), 1, ((path, value),)) for value in (True, False)]
    kept = recorded_space({on[0]: {1}, on[1]: {1}, Candidate(8): {1}}, 1)
    assert len(kept) == 3
    assert all(kept.parameter_values(candidate) is not None for candidate in kept.candidates())


# -- baselines --------------------------------------------------------------------------------------------------

THREADS = "parameters.intra_op_thread_count.string_value"


def recorded(*candidates: Candidate, request_batch_size: int = 1) -> RecordedSpace:
    return recorded_space({candidate: {1, 8} for candidate in candidates}, request_batch_size)


def test_the_baselines_have_the_fewest_instances_and_the_first_choices() -> None:
    """Candidates are written as in the table; without dynamic batching the smallest size represents all."""
    every = [
        Candidate(size, *batching, count, ((THREADS, threads),))
        for threads in (2, 1)
        for count in (3, 2)
        for size, batching in {4: (False, 0, ()), 8: (True, 0, ()), 16: (True, 0, ()), 32: (True, 500, ())}.items()
    ]
    assert baselines(recorded(*every, Candidate(32, True, 0, (), 2, ((THREADS, 2),)))) == [
        ("baseline", Candidate(4, instance_count=2, fields=((THREADS, 2),))),
        ("dynamic_batching", Candidate(32, True, 0, (), 2, ((THREADS, 2),))),
    ]


def test_a_baseline_that_was_not_recorded_is_left_out() -> None:
    assert baselines(recorded(Candidate(8), Candidate(8, True, 500))) == [("baseline", Candidate(8))]
    assert baselines(recorded(Candidate(8, True), Candidate(8, True, 500))) == [
        ("dynamic_batching", Candidate(8, True))
    ]
    assert baselines(space()) == [("baseline", Candidate(1))]
    few = [Candidate(8, instance_count=2), Candidate(8, True, 0, (), 2), Candidate(16, True, 500)]
    assert baselines(recorded(*few)) == [], "none with one instance"
    assert baselines(recorded(Candidate(8, True), Candidate(16, True, 500))) == [], "none of the largest size"


def test_a_candidate_that_behaves_as_a_baseline_is_one() -> None:
    """A preferred size of 8 without a delay equals max_batch_size 8; batches of one request are no batching."""
    assert baselines(recorded(Candidate(4), Candidate(8, True, 0, (4,)), Candidate(8, True))) == [
        ("baseline", Candidate(4)),
        ("dynamic_batching", Candidate(8, True)),
    ]
    assert baselines(recorded(Candidate(4), Candidate(4, True), request_batch_size=4)) == [("baseline", Candidate(4))]
    assert baselines(recorded(Candidate(0), Candidate(0, instance_count=2))) == [("baseline", Candidate(0))]


def test_a_space_that_was_not_recorded_has_both() -> None:
    whole = SearchSpace(
        (4, 16), (OFF, 0, 500), ("none", "max/2"), (1, 2), {THREADS: ("1", "2")}, request_batch_size=4
    )
    assert baselines(whole) == [
        ("baseline", Candidate(4, fields=((THREADS, "1"),))),
        ("dynamic_batching", Candidate(16, True, fields=((THREADS, "1"),))),
    ]


# -- the search methods -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SEARCHERS)
def test_every_method_proposes_each_recorded_candidate_and_no_other(method: str) -> None:
    if method not in installed_methods():
        pytest.skip("not installed")
    problem = Problem("m", space(), 1, 64, (METRICS["throughput"],))
    searcher = make_searcher(method, problem, seed=1)
    if method == "simulated":  # never stops early
        study = open_study(None, "m", problem, sampler_for("random", 1))
        searcher = SimulationGuidedSearcher(CandidateTracker(problem, study), -1, 1)
    candidates: list[Candidate] = []
    while (candidate := searcher.suggest()) is not None:
        searcher.observe(Trial(len(candidates), candidate, ((LoadPoint(1, 1), measurement(100, 5)),)))
        candidates.append(candidate)
    deployments = MAX_DEPLOYMENTS if method == "simulated" else 1
    assert max(Counter(candidates).values()) <= deployments
    assert set(candidates) == set(SPARSE)


def test_simulated_stops_after_the_best_that_was_recorded() -> None:
    loads = (1, 8, 16, 64)
    candidates = [
        Candidate(size, True, delay, (), count) for size in (1, 8, 64) for delay in (0, 900) for count in (1, 2)
    ]
    server = {c: {load: measure_known_server(c, load, 1) for load in loads} for c in candidates}
    problem = Problem("m", recorded_space({c: set(loads) for c in candidates}, 1), 1, 64, (METRICS["throughput"],))
    searcher = make_searcher("simulated", problem, seed=1)
    tried: dict[Candidate, float] = {}
    while (candidate := searcher.suggest()) is not None:
        assert candidate in server
        assert candidate not in tried
        points = tuple((LoadPoint(1, load), measurement) for load, measurement in server[candidate].items())
        searcher.observe(Trial(len(tried), candidate, points))
        tried[candidate] = max(
            measurement.throughput_infer_per_sec or 0 for measurement in server[candidate].values()
        )
    highest_throughput = max(
        measurement.throughput_infer_per_sec or 0
        for measurements in server.values()
        for measurement in measurements.values()
    )
    assert max(tried.values()) >= 0.95 * highest_throughput
    assert len(tried) < len(problem.space)


def test_gp_is_among_the_installed_where_its_packages_are() -> None:
    assert ("gp" in installed_methods()) == bool(find_spec("torch") and find_spec("scipy"))
