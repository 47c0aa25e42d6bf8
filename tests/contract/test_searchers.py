"""The contract of search methods.

A new method needs a class that inherits ``SearcherContract`` (all requirements, several seconds) or
``SmokeContract`` and names it in the fixture ``method``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.interfaces import Searcher
from optimizer.core.request_sizes import SizeDistribution, TokenRequests
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.run_options import EXHAUSTIVE_SEARCHES, SEARCHERS
from optimizer.search import make_searcher
from optimizer.search.candidate_tracker import MAX_DEPLOYMENTS, CandidateTracker
from optimizer.search.optuna_samplers import sampler_for
from optimizer.search.simulated import SimulationGuidedSearcher
from optimizer.search.transfer import TransferredStudy
from optimizer.store.optuna_study import open_study

THREADS = "parameters.intra_op_thread_count.string_value"
SLA = Sla.from_bounds({"p95": 20.0})
WIDE = SearchSpace((1, 2, 4, 8, 16), ("off", 0, 100, 500), ("none", "max/2,max"), (1, 2, 3), {THREADS: (1, 2, 4)})
MIDDLE = SearchSpace((1, 2, 4, 8, 16), ("off", 0, 500), instance_count=(1, 2), fields={THREADS: (1, 2)})
SMALL = SearchSpace((1, 4), ("off", 0, 100), ("none", "max/2"), (1, 2))  # most combinations are invalid or alike
FEW = SearchSpace((1, 4), ("off", 0, 100, 500))  # four candidates
PAIR = SearchSpace((1, 4), ("off", 0))  # a slow method exhausts these two in a second
SIX = SearchSpace((1, 4), ("off", 0, 100, 200, 500, 1000))


def problem_of(space: SearchSpace, *objectives: str) -> Problem:
    metrics = tuple(METRICS[name] for name in objectives or ("throughput",))
    return Problem("m", space, space.request_batch_size, 64, metrics, SLA)


def measured(candidate: Candidate, *, p95: float | None = None, stable: bool = True) -> Measurement:
    """Simulate a server: batching increases the throughput until the latency exceeds the bound."""
    size = candidate.max_batch_size if candidate.dynamic_batching else 1
    return Measurement(
        throughput_infer_per_sec=100.0 * candidate.instance_count * size**0.5,
        latency_p95_ms=p95 if p95 is not None else 2.0 * size + candidate.max_queue_delay_us / 100,
        server_memory_bytes=1e6 * size,
        requests=500,
        stable=stable,
    )


def trial(number: int, candidate: Candidate, *measurements: Measurement) -> Trial:
    loads = (LoadPoint(1, 4), LoadPoint(1, 8), LoadPoint(1, 16))
    return Trial(number, candidate, tuple(zip(loads, measurements or (measured(candidate),), strict=False)))


def run(searcher: Searcher, count: int, start: int = 0) -> list[Trial]:
    """Observe ``count`` suggestions, or fewer if there are no more, and return their trials."""
    trials: list[Trial] = []
    for number in range(start, start + count):
        candidate = searcher.suggest()
        if candidate is None:
            break
        trials.append(trial(number, candidate))
        searcher.observe(trials[-1])
    return trials


def study_of_another_machine(problem: Problem) -> TransferredStudy:
    candidates = problem.space.candidates()[::2]
    measurements = [measured(candidate, p95=3.0 + number) for number, candidate in enumerate(candidates)]
    return TransferredStudy(
        tuple(trial(n, *fields) for n, fields in enumerate(zip(candidates, measurements, strict=True)))
    )


Suggestions = dict[str, list[str]]  # by method
HAS_GP = bool(find_spec("torch") and find_spec("scipy"))


def suggestions_of_every_method() -> Suggestions:
    return {
        method: [str(t.candidate) for t in run(make_searcher(method, problem_of(space), 3), count)]
        for method, (space, count) in {**dict.fromkeys(SEARCHERS, (WIDE, 8)), "simulated": (MIDDLE, 4)}.items()
        if HAS_GP or method != "gp"
    }


def test_suggestions_do_not_depend_on_the_process() -> None:
    """Another process, which hashes text in another way, suggests the same."""
    code = "from tests.contract.test_searchers import *; print(json.dumps(suggestions_of_every_method()))"
    own_seed = os.environ.get("PYTHONHASHSEED", "random")
    variables = {"PYTHONHASHSEED": "2" if own_seed == "1" else "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **variables},
        check=True,
    )
    suggested = json.loads(done.stdout)
    assert suggested == suggestions_of_every_method()
    assert all(suggested.values())


class SuggestionContract:
    """The requirements that depend on how a method predicts measurements."""

    many = 12  # suggestions, if a few are not enough
    large = WIDE  # the space of tests that do not exhaust it
    forecasts = False  # whether measurements are forecast
    deployments = 1  # of one candidate at most

    @pytest.fixture
    def method(self) -> str:
        raise NotImplementedError

    def make(self, method: str, problem: Problem, seed: int = 0, storage: Path | None = None) -> Searcher:
        return make_searcher(method, problem, seed, str(storage) if storage else None)

    def test_suggestions_are_valid_and_canonical(self, method: str) -> None:
        candidates = [t.candidate for t in run(self.make(method, problem_of(self.large)), self.many)]
        assert len(candidates) == self.many
        assert set(candidates) <= set(self.large.candidates())
        assert max(Counter(candidates).values()) <= self.deployments

    def test_measurements_are_forecast_only_by_methods_that_predict(self, method: str) -> None:
        searcher = self.make(method, problem_of(self.large))
        candidate = self.large.candidates()[-1]
        assert searcher.forecast(candidate, LoadPoint(1, 8), None) is None, "nothing was measured"
        run(searcher, 3)
        made = searcher.forecast(candidate, LoadPoint(1, 8), None)
        assert (made is not None) is self.forecasts
        assert searcher.forecast(candidate, LoadPoint(1, request_rate=100.0), None) is None
        if made is not None:
            assert 0 < made.throughput_infer_per_sec_low < made.throughput_infer_per_sec
            assert made.throughput_infer_per_sec < made.throughput_infer_per_sec_high
            assert 0 < made.latency_ms_low < made.latency_ms < made.latency_ms_high
            assert made.latency == "latency-p95"


class SmokeContract(SuggestionContract):
    """The requirements that every search method is tested for."""

    small = SMALL  # the space of tests that exhaust it

    def test_a_method_is_declared_as_exhaustive_if_its_searcher_is(self, method: str) -> None:
        searcher = self.make(method, problem_of(self.small))
        assert searcher.is_exhaustive is (method in EXHAUSTIVE_SEARCHES)

    def test_a_small_space_is_exhausted_and_then_nothing_is_suggested(self, method: str) -> None:
        """Trials that another searcher has made count as tried."""
        stored = run(self.make(method, problem_of(self.small), 1), 3)
        resumed = self.make(method, problem_of(self.small), 1)
        for finished_trial in stored:
            resumed.observe(finished_trial)
        candidates = [t.candidate for t in (*stored, *run(resumed, 100, 3))]
        assert set(candidates) == set(self.small.candidates())
        assert max(Counter(candidates).values()) <= self.deployments
        assert resumed.suggest() is None
        assert resumed.suggest() is None

    def test_a_stored_study_is_continued(self, method: str, tmp_path: Path) -> None:
        storage = tmp_path / "study.journal"
        first = self.make(method, problem_of(self.small), 1, storage)
        stored = run(first, 3)
        killed_at = first.suggest()
        resumed = self.make(method, problem_of(self.small), 1, storage)
        for finished_trial in stored:
            resumed.observe(finished_trial)
        rest = run(resumed, 100, 3)
        again = {t.candidate for t in rest} & {t.candidate for t in stored}
        assert {t.candidate for t in (*stored, *rest)} == set(self.small.candidates())
        assert not again or self.deployments > 1
        assert killed_at in {t.candidate for t in rest}
        study = optuna.load_study(study_name="tritune", storage=journal(storage))
        numbers = [t.user_attrs["trial"] for t in study.trials if "trial" in t.user_attrs]
        assert sorted(numbers) == list(range(len(stored) + len(rest)))
        assert not any(t.state == optuna.trial.TrialState.RUNNING for t in study.trials)


class SearcherContract(SmokeContract):
    """All requirements of a search method, for those that users meet by default."""

    enough = SMALL  # the space of a test that begins with five candidates

    def test_suggestions_in_flight_are_not_repeated(self, method: str) -> None:
        searcher = self.make(method, problem_of(FEW))
        flying = [searcher.suggest() for _ in range(3)]
        assert None not in flying
        assert len(set(flying)) == 3
        for number, candidate in enumerate(flying):
            assert candidate is not None
            searcher.observe(trial(number, candidate))
        rest = {t.candidate for t in run(searcher, 100, 3)}
        assert rest | set(flying) == set(FEW.candidates())
        assert self.deployments > 1 or rest.isdisjoint(flying)

    def test_failed_and_incomplete_trials_are_observed(self, method: str) -> None:
        searcher = self.make(method, problem_of(self.enough))
        every = list(self.enough.candidates())
        infeasible = measured(every[1], p95=900.0)
        observed = [
            Trial(0, every[0], status="failed", reason="out of memory"),
            trial(1, every[1], infeasible, infeasible),
            trial(2, every[2], measured(every[2], stable=False)),
            trial(3, every[3], Measurement(reason="timed out")),
            Trial(4, every[4]),
        ]
        for observed_trial in observed:
            searcher.observe(observed_trial)
        rest = {t.candidate for t in run(searcher, 100, 5)}
        assert rest | {observed_trial.candidate for observed_trial in observed} == set(self.enough.candidates())
        assert rest.isdisjoint(observed_trial.candidate for observed_trial in (observed[0], *observed[3:])), (
            "nothing was measured"
        )
        assert self.deployments > 1 or rest.isdisjoint(observed_trial.candidate for observed_trial in observed)

    def test_suggested_trials_may_fail(self, method: str) -> None:
        searcher = self.make(method, problem_of(self.small))
        candidates: list[Candidate] = []
        while (candidate := searcher.suggest()) is not None:
            searcher.observe(Trial(len(candidates), candidate, status="failed", reason="no memory"))
            candidates.append(candidate)
        assert sorted(map(str, candidates)) == sorted(map(str, self.small.candidates()))

    def test_trials_from_outside_the_space_count_for_their_equivalents_only(self, method: str) -> None:
        searcher = self.make(method, problem_of(self.small))
        searcher.observe(trial(0, Candidate(64, True, 77, (32,), 9, (("backend", "x"),))))
        searcher.observe(trial(1, Candidate(64)))  # one at a time, as max_batch_size 1 without batching
        suggested = [t.candidate for t in run(searcher, 100, 2)]
        assert {*suggested, Candidate(1)} == set(self.small.candidates())
        assert suggested.count(Candidate(1)) < self.deployments

    def test_observing_a_trial_twice_changes_nothing(self, method: str) -> None:
        once, twice = (self.make(method, problem_of(self.large), 5) for _ in range(2))
        done = run(once, self.many // 2)
        for number in range(self.many // 2):
            assert twice.suggest() == done[number].candidate
            for _ in range(2):
                twice.observe(done[number])
        assert once.suggest() == twice.suggest()

    def test_two_workers_share_a_study(self, method: str, tmp_path: Path) -> None:
        storage = tmp_path / "study.journal"
        first_worker, second_worker = (self.make(method, problem_of(self.small), seed, storage) for seed in (1, 2))
        candidates: list[Candidate] = []
        for worker in (first_worker, second_worker) * (self.deployments * len(self.small)):
            for done in run(worker, 1, len(candidates)):
                candidates.append(done.candidate)
        assert set(candidates) == set(self.small.candidates())
        assert max(Counter(candidates).values()) <= self.deployments

    def test_several_objectives_are_accepted(self, method: str) -> None:
        searcher = self.make(method, problem_of(self.large, "throughput", "memory"))
        assert len(run(searcher, self.many)) == self.many


class TestTpe(SearcherContract):
    @pytest.fixture
    def method(self) -> str:
        return "tpe"

    def test_a_good_candidate_is_found_sooner_than_by_chance(self) -> None:
        """One of the best five is among the first 30 of 225 candidates, most of the time."""
        problem = problem_of(WIDE)
        feasible = [c for c in WIDE.candidates() if SLA.is_met(measured(c))]
        good = sorted(feasible, key=lambda c: measured(c).throughput_infer_per_sec or 0)[-5:]
        hits = sum(
            any(t.candidate in good for t in run(make_searcher("tpe", problem, seed), 30)) for seed in range(5)
        )
        assert hits >= 4

    def test_the_same_seed_gives_the_same_suggestions(self) -> None:
        first, second, other = (run(make_searcher("tpe", problem_of(WIDE), seed), 6) for seed in (7, 7, 8))
        assert first == second != other


class TestSimulated(SearcherContract):
    forecasts = True
    deployments = MAX_DEPLOYMENTS
    many = 5
    small = PAIR
    enough = SIX
    large = MIDDLE  # the method simulates each candidate before each suggestion

    @pytest.fixture
    def method(self) -> str:
        return "simulated"

    def make(self, method: str, problem: Problem, seed: int = 0, storage: Path | None = None) -> Searcher:
        """Return a searcher that continues although no improvement is expected."""
        study = open_study(str(storage) if storage else None, "tritune", problem, sampler_for("random", seed))
        return SimulationGuidedSearcher(CandidateTracker(problem, study), smallest_gain=-1)

    def test_a_forecast_is_that_of_the_last_suggestion(self) -> None:
        """It is made without the trials that ended since, and does not change the next suggestion."""
        searcher, asked = (make_searcher("simulated", problem_of(self.large)) for _ in range(2))
        candidate, load = self.large.candidates()[-1], LoadPoint(1, 8)
        for each in (searcher, asked):
            run(each, 3)
        suggested = searcher.suggest()
        assert suggested is not None
        assert asked.suggest() == suggested
        made = asked.forecast(candidate, load, None)
        for each in (searcher, asked):
            each.observe(trial(3, suggested))
        assert asked.forecast(candidate, load, None) == made
        assert asked.suggest() == searcher.suggest()
        assert asked.forecast(candidate, load, None) != made

    def test_a_resumed_search_makes_the_same_forecast(self) -> None:
        problem, load = problem_of(self.large), LoadPoint(1, 8)
        searcher, resumed = (make_searcher("simulated", problem) for _ in range(2))
        stored = run(searcher, 3)
        suggested = searcher.suggest()
        assert suggested is not None
        for finished_trial in stored:
            resumed.observe(finished_trial)
        assert resumed.forecast(suggested, load, None) == searcher.forecast(suggested, load, None)

    def test_a_suggestion_has_an_expected_load(self) -> None:
        searcher = make_searcher("simulated", problem_of(self.large))
        searcher.observe(trial(0, Candidate(1)))
        candidate = searcher.suggest()
        assert candidate is not None
        assert 1 <= (searcher.expected_load(candidate) or 0) <= 64


class TestSimulatedWithoutASimulator(SuggestionContract):
    """The search of a model that streams or keeps state. Only its predictions are made in another way."""

    forecasts = True
    deployments = MAX_DEPLOYMENTS
    many = 5
    large = MIDDLE

    @pytest.fixture
    def method(self) -> str:
        return "simulated"

    def make(self, method: str, problem: Problem, seed: int = 0, storage: Path | None = None) -> Searcher:
        """Return a searcher that continues although no improvement is expected."""
        study = open_study(str(storage) if storage else None, "tritune", problem, sampler_for("random", seed))
        tracker = CandidateTracker(replace(problem, kind=ModelKind.STREAMING), study)
        return SimulationGuidedSearcher(tracker, smallest_gain=-1)


class TestSimulatedContinuousBatching(SuggestionContract):
    """The search of a model that generates tokens, with the simulator of continuous batching."""

    forecasts = True
    deployments = MAX_DEPLOYMENTS
    many = 3  # the simulation of each token takes long
    large = replace(MIDDLE, fields={})

    @pytest.fixture
    def method(self) -> str:
        return "simulated"

    def make(self, method: str, problem: Problem, seed: int = 0, storage: Path | None = None) -> Searcher:
        """Return a searcher that continues although no improvement is expected."""
        lengths = SizeDistribution(((16, 64, 1.0),))
        of_tokens = replace(problem, tokens=TokenRequests(lengths, lengths, "INPUT_IDS", "MAX_TOKENS"))
        return TestSimulatedWithoutASimulator().make(method, of_tokens, seed, storage)


class TestTpeWithTransfer(SmokeContract):
    """A warm start from another study: half of the candidates, with measurements that are wrong here."""

    @pytest.fixture
    def method(self) -> str:
        return "tpe"

    def make(self, method: str, problem: Problem, seed: int = 0, storage: Path | None = None) -> Searcher:
        return make_searcher(
            method, problem, seed, str(storage) if storage else None, transferred=study_of_another_machine(problem)
        )


class TestNsga2(SmokeContract):
    @pytest.fixture
    def method(self) -> str:
        return "nsga2"


class TestRandom(SmokeContract):
    @pytest.fixture
    def method(self) -> str:
        return "random"


class TestGrid(SmokeContract):
    @pytest.fixture
    def method(self) -> str:
        return "grid"

    def test_the_first_candidates_cover_every_choice(self) -> None:
        early = [t.candidate for t in run(make_searcher("grid", problem_of(WIDE)), 10)]
        for setting in ("max_batch_size", "max_queue_delay_us", "instance_count", "fields"):
            everywhere = {getattr(c, setting) for c in WIDE.candidates()}
            assert {getattr(c, setting) for c in early} == everywhere


@pytest.mark.skipif(not HAS_GP, reason="needs tritune[gp]")
class TestGp(SmokeContract):
    @pytest.fixture
    def method(self) -> str:
        return "gp"


def journal(path: Path) -> optuna.storages.BaseStorage:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


def test_every_method_is_covered_by_the_contract() -> None:
    classes = {*SmokeContract.__subclasses__(), *SearcherContract.__subclasses__()}
    tested = {cls.__name__.removeprefix("Test").lower() for cls in classes - {SearcherContract, TestTpeWithTransfer}}
    assert tested == set(SEARCHERS)


def test_gp_without_its_packages_names_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadInputError, match=r"needs torch; pip install 'tritune\[gp\]'"):
        make_searcher("gp", problem_of(SMALL))


class TestTheStudy:
    """The content of the Optuna study afterwards."""

    def observed(self, tmp_path: Path, *trials: Trial) -> list[optuna.trial.FrozenTrial]:
        storage = tmp_path / "study.journal"
        searcher = make_searcher("random", problem_of(SMALL), storage=str(storage))
        for finished_trial in trials:
            searcher.observe(finished_trial)
        return optuna.load_study(study_name="tritune", storage=journal(storage)).trials

    def test_the_value_is_that_of_the_best_feasible_point(self, tmp_path: Path) -> None:
        candidate = Candidate(4, True, 100, (2,), 2)
        low, high, beyond = (Measurement(t, latency_p95_ms=p, stable=True) for t, p in [(50, 5), (90, 18), (99, 21)])
        (kept,) = self.observed(tmp_path, trial(0, candidate, low, high, beyond))
        assert kept.values == [90]
        assert kept.constraints == {"p95 <= 20 ms": pytest.approx(-0.1)}
        assert kept.user_attrs["load"] == {"request_batch_size": 1, "concurrency": 8, "request_rate": 0.0}
        assert kept.user_attrs["trial"] == 0
        assert kept.user_attrs["candidate"] == {
            "max_batch_size": 4,
            "dynamic_batching": True,
            "max_queue_delay_us": 100,
            "preferred_batch_sizes": [2],
            "instance_count": 2,
            "fields": {},
        }
        assert [p["throughput_infer_per_sec"] for p in kept.user_attrs["points"]] == [50, 90, 99]
        json.dumps(kept.user_attrs)

    def test_without_a_feasible_point_the_least_violation_is_stored(self, tmp_path: Path) -> None:
        far, near = (Measurement(t, latency_p95_ms=p, stable=True) for t, p in [(90, 40), (50, 30)])
        (kept,) = self.observed(tmp_path, trial(0, Candidate(1), far, near))
        assert kept.values == [50]
        assert kept.constraints == {"p95 <= 20 ms": pytest.approx(0.5)}

    def test_an_unknown_constraint_is_stored_as_a_large_violation(self, tmp_path: Path) -> None:
        (kept,) = self.observed(tmp_path, trial(0, Candidate(1), Measurement(90, stable=True)))
        assert kept.constraints == {"p95 <= 20 ms": 1e6}

    def test_the_last_measurement_of_a_repeated_load_counts(self, tmp_path: Path) -> None:
        lucky, usual = (Measurement(t, latency_p95_ms=9, stable=True) for t in (90, 70))
        repeated = Trial(0, Candidate(1), ((LoadPoint(1, 4), lucky), (LoadPoint(1, 4), usual)))
        assert self.observed(tmp_path, repeated)[0].values == [70]

    @pytest.mark.parametrize(
        ("failed_trial", "reason"),
        [
            (Trial(0, Candidate(1), status="failed", reason="no memory"), "no memory"),
            (trial(0, Candidate(1), Measurement(reason="timed out")), "timed out"),
            (trial(0, Candidate(1), measured(Candidate(1), stable=False)), "no stable measurement"),
        ],
    )
    def test_a_failed_trial_stores_its_reason(self, tmp_path: Path, failed_trial: Trial, reason: str) -> None:
        (kept,) = self.observed(tmp_path, failed_trial)
        assert kept.state == optuna.trial.TrialState.FAIL
        assert kept.user_attrs["reason"].startswith(reason)

    def test_a_trial_from_outside_the_space_is_stored_without_parameters(self, tmp_path: Path) -> None:
        (kept,) = self.observed(tmp_path, trial(3, Candidate(64, True, 7)))
        assert kept.params == {}
        assert kept.user_attrs["candidate"]["max_batch_size"] == 64
        assert kept.user_attrs["points"]


def test_a_trial_of_a_dead_process_is_failed_and_repeated(tmp_path: Path) -> None:
    storage = tmp_path / "study.journal"
    code = (
        "from tests.contract.test_searchers import *\n"
        f"print(make_searcher('tpe', problem_of(SMALL), 1, {str(storage)!r}).suggest())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    searcher = make_searcher("tpe", problem_of(SMALL), 1, str(storage))
    study = optuna.load_study(study_name="tritune", storage=journal(storage))
    assert {t.state for t in study.trials} == {optuna.trial.TrialState.FAIL}
    assert done.stdout.strip() in {str(t.candidate) for t in run(searcher, 100)}


def test_the_order_of_replayed_trials_does_not_matter() -> None:
    every = list(SMALL.candidates())
    rests = set()
    for seed in (1, 2):
        searcher = make_searcher("grid", problem_of(SMALL))
        replayed = [trial(number, candidate) for number, candidate in enumerate(every[:4])]
        random.Random(seed).shuffle(replayed)
        for finished_trial in replayed:
            searcher.observe(finished_trial)
        rests.add(tuple(t.candidate for t in run(searcher, 100, 4)))
    assert len(rests) == 1
