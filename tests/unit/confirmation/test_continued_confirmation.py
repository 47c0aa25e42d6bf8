"""Tests of a confirmation that continues in later sessions, on a server with random latencies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from objectives.load_sequence import ERROR_SHARES
from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from objectives.sla import Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation import windows
from optimizer.confirmation.candidate_tests import next_verdict
from optimizer.confirmation.confirmer import Confirmer
from optimizer.confirmation.plan import ConfirmationPlan, plan_document, read_plan_document
from optimizer.confirmation.server_plan import START_SECONDS, WINDOWS
from optimizer.confirmation.verdicts import judge_confirmations
from optimizer.confirmation.windows import begun_error, errors_by_load
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, MeasurementError
from optimizer.core.trial import ConfirmationWindow, FreshServer, LoadPoint, Trial
from optimizer.measure.measurer import Measurer
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.trials_table import TrialsTable
from tests.conftest import not_none
from tests.random_server import (
    BASELINE,
    BOUND_MS,
    COMPARISONS,
    FAST,
    FASTER,
    LOADS,
    SERVED,
    RandomServer,
    TimedServer,
    drawn_problem,
    searched,
)

BEST = 2  # trial of FASTER
UNIX_SECONDS = 1e9  # Unix time at which the clock of a server is 0
SLOWER = {FASTER: (1.25, 1.35, 1.2), FAST: (1.3, 1.2)}  # the highest loads of the search fail


class InterruptibleServer(TimedServer):
    """A server whose session is interrupted after ``servers_left`` fresh servers.

    The load generator fails in each measurement of the candidates ``lossy`` on a fresh server.
    """

    servers_left = 1000

    def __init__(self, *, lossy: Collection[Candidate] = (), **server: Any) -> None:
        super().__init__(**server)
        self.lossy = lossy

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        if not self.servers_left:
            self.deployed.pop()
            raise KeyboardInterrupt
        self.servers_left -= 1
        begin = UNIX_SECONDS + self.seconds
        windows = super().measure_windows(endpoint, load, seconds, count)
        if endpoint.candidate in self.lossy:
            raise MeasurementError("the load generator cannot keep up")
        end = UNIX_SECONDS + self.seconds
        return [replace(window, begin_unix_seconds=begin, end_unix_seconds=end) for window in windows]


@dataclass
class Sessions:
    """One run whose confirmation takes several sessions. Table and plan are stored as ``tune`` does."""

    problem: Problem
    server: InterruptibleServer
    folder: Path
    documents: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = TrialsTable(self.folder / "trials.csv", "drawn", {})
        self.add_to_table(searched(RandomServer(), LOADS))

    def add_to_table(self, trials: list[Trial]) -> None:
        for trial in trials:
            for load, measurement in trial.measurements:
                self.table.append(trial, load, measurement)

    @property
    def plan(self) -> ConfirmationPlan | None:
        return read_plan_document(json.loads(self.documents[-1])) if self.documents else None

    def store_plan(self, plan: ConfirmationPlan) -> None:
        planned_trials = self.plan.predictions.keys() if self.plan else set()
        tested = {trial.number for trial in self.table.read() if errors_by_load(trial)}
        assert not tested & (plan.predictions.keys() - planned_trials), "loads are fixed before the first window"
        self.documents.append(json.dumps(plan_document(plan)))

    def run(self, seconds: float = 6000, servers: int = 1000, node: str = "") -> list[Trial]:
        """Continue on ``node`` for ``seconds``, or until an interruption after ``servers``."""
        self.server.servers_left = servers
        measuring = Measurer(self.server, self.server, self.table, QuietObserver(), node=node)
        confirmer = Confirmer(self.problem, self.server, measuring, self.server.budget(seconds), self.table.read())
        confirmer.recorded_plan, confirmer.store_plan = self.plan, self.store_plan
        with contextlib.suppress(KeyboardInterrupt):
            self.measured = confirmer.run(COMPARISONS)
        self.limit = measuring.disturbance_limit
        return self.table.read()


@pytest.fixture
def new_sessions(problem: Problem, tmp_path: Path) -> Callable[[], Sessions]:
    def make_sessions(**server: object) -> Sessions:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return Sessions(problem, InterruptibleServer(**server), folder)  # type: ignore[arg-type]

    return make_sessions


@dataclass(frozen=True)
class Uninterrupted:
    """The trials of a confirmation that was not interrupted, its sessions, and the arguments of its server."""

    trials: list[Trial]
    sessions: Sessions
    server: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[{}, {"slow": SLOWER}, {"slow": {FASTER: (9.0,)}}, {"served": {**SERVED, FASTER: 900.0}}],
)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    sessions = Sessions(
        drawn_problem(), InterruptibleServer(**request.param), tmp_path_factory.mktemp("uninterrupted")
    )
    return Uninterrupted(sessions.run(), sessions, request.param)


@pytest.mark.parametrize("servers", [1, 11])
def test_an_interrupted_confirmation_measures_the_same_as_an_uninterrupted_one(
    new_sessions: Callable[..., Sessions], servers: int, uninterrupted: Uninterrupted
) -> None:
    in_parts, at_once = new_sessions(**uninterrupted.server), uninterrupted.sessions
    in_parts.run(servers=servers)
    in_parts.run(servers=servers)
    assert in_parts.run() == uninterrupted.trials
    assert in_parts.server.deployed == at_once.server.deployed
    assert in_parts.plan == at_once.plan


@pytest.mark.parametrize("slow", [{}, SLOWER, {FASTER: (1.45, 1.1), FAST: (1.4,)}, {FASTER: (9.0,), FAST: (9.0,)}])
def test_repeating_until_pass_spends_no_more_error_than_one_session(
    new_sessions: Callable[..., Sessions], slow: dict[Candidate, tuple[float, ...]], problem: Problem
) -> None:
    """Short sessions give up loads that a longer one would continue, so the decisions may be others."""
    sessions = new_sessions(slow=slow)
    trials, errors = list[Trial](), dict[tuple[int, LoadPoint], float]()
    for _ in range(12):
        trials = sessions.run(seconds=30)
        for trial in trials:
            for load, error in errors_by_load(trial).items():
                assert errors.setdefault((trial.number, load), error) == error, "the error of a test is fixed"
        for confirmed_load in judge_confirmations(trials, problem):
            assert confirmed_load.judged.verdict is not Verdict.PASS or confirmed_load.servers in LOOKS
    assert errors
    for number, predictions in not_none(sessions.plan).predictions.items():
        tested = errors_by_load(trials[number])
        for share in set(tested.values()):
            places = [predictions.loads.index(load) for load, error in tested.items() if error == share]
            assert places == sorted(places), "a share is used once, or handed on after a PASS"
    assert 0 < begun_error(trials) <= (1 - problem.confidence) * (1 + 1e-9)
    tested_trials = {trial.number for trial in trials if errors_by_load(trial)}
    assert BEST in tested_trials
    assert len(tested_trials) <= 2, "the best candidate and one other"


def test_a_complete_confirmation_deploys_nothing(new_sessions: Callable[..., Sessions], problem: Problem) -> None:
    sessions = new_sessions()
    trials = sessions.run()
    deployed = len(sessions.server.deployed)
    assert next_verdict(not_none(sessions.plan), trials, problem, is_cross_checked=False) is None
    assert sessions.run() == trials
    assert len(sessions.server.deployed) == deployed


def test_what_the_next_verdict_needs_is_known(new_sessions: Callable[..., Sessions], problem: Problem) -> None:
    sessions = new_sessions()
    trials = sessions.run(servers=1)
    look = not_none(next_verdict(not_none(sessions.plan), trials, problem, is_cross_checked=False))
    assert look.missing_servers == LOOKS[0] - 1
    assert look.seconds == pytest.approx(look.missing_servers * (START_SECONDS + WINDOWS * 0.5))


def test_a_pass_needs_a_planned_number_of_servers(problem: Problem) -> None:
    server, trial, load = RandomServer(), Trial(1, FASTER), LoadPoint(1, 9)
    verdicts = []
    for number in range(1, LOOKS[1] + 1):
        for window in server.measure_windows(Endpoint("", FASTER), load, 0.5, WINDOWS):
            trial = trial.with_confirmation(ConfirmationWindow(number, load, window, 0.01))
        (confirmed,) = judge_confirmations([trial], problem)
        verdicts.append(confirmed.judged.verdict)
        if number == LOOKS[0] + 1:
            assert confirmed.judged.reason == f"{number} of {LOOKS[1]} fresh servers were measured"
            assert confirmed.judged.is_promising
    assert [number for number, verdict in enumerate(verdicts, 1) if verdict is Verdict.PASS] == [LOOKS[0], LOOKS[1]]


def test_a_better_candidate_of_a_later_search_gets_the_error_that_is_left(
    new_sessions: Callable[..., Sessions], problem: Problem
) -> None:
    later = Candidate(64, True, 1000, (), 2)
    sessions = new_sessions(served={BASELINE: 300.0, FAST: 1000.0, FASTER: 1200.0, later: 2000.0})
    sessions.run()
    first_plan = sessions.plan
    load = LoadPoint(1, 20)
    better_trial = Trial(3, later, ((load, sessions.server.measure(Endpoint("", later), load)),))
    sessions.add_to_table([better_trial])
    trials = sessions.run()
    plan = not_none(sessions.plan)
    assert plan.finalists[0] == 3
    assert BEST not in plan.finalists, "it was tested"
    assert plan.error == pytest.approx(not_none(first_plan).error * (1 - ERROR_SHARES[0]))
    assert set(errors_by_load(trials[3]).values()) == {plan.error * ERROR_SHARES[0]}
    assert begun_error(trials) <= 1 - problem.confidence
    assert trials[BEST].confirmations == sessions.table.read()[BEST].confirmations


def test_a_search_that_finds_nothing_better_keeps_the_plan(new_sessions: Callable[..., Sessions]) -> None:
    sessions = new_sessions()
    sessions.run(servers=3)
    plan = sessions.plan
    worse = Candidate(1, instance_count=2)
    sessions.add_to_table(
        [Trial(3, worse, ((LoadPoint(1, 1), Measurement(50.0, 1.0, latency_p95_ms=1.0, stable=True)),))]
    )
    sessions.run(servers=3)
    assert sessions.plan == plan


def test_a_lost_measurement_at_the_end_is_repeated(new_sessions: Callable[..., Sessions], problem: Problem) -> None:
    sessions = new_sessions()
    trial = sessions.run(servers=1)[BEST]
    last = trial.confirmations[-1]
    lost = FreshServer(last.server + 1, last.error_probability)
    sessions.table.append(trial, last.load, Measurement(reason="tritonserver died"), lost)
    trials = sessions.run()
    assert not any(window.is_lost for window in trials[BEST].confirmations)
    tested_loads = [confirmed_load for confirmed_load in judge_confirmations(trials, problem) if confirmed_load.error]
    assert Verdict.PASS in {confirmed_load.judged.verdict for confirmed_load in tested_loads}


def test_lost_measurements_of_several_loads_are_repeated(
    new_sessions: Callable[..., Sessions], problem: Problem
) -> None:
    sessions = new_sessions(lossy=(BASELINE, FAST, FASTER))
    lost = [window for trial in sessions.run() for window in trial.confirmations]
    assert len({(window.server, window.load) for window in lost}) > 2 * len(LOADS)
    assert all(window.is_lost for window in lost)
    sessions.server.lossy = ()
    trials = sessions.run()
    assert trials == sessions.measured, "the table has what the session measured"
    assert not any(window.is_lost for trial in trials for window in trial.confirmations)
    servers = [{window.server for window in trial.confirmations} for trial in trials]
    assert sum(map(len, servers)) == len(set.union(*servers)), "each server has its own number"
    tested_loads = [confirmed_load for confirmed_load in judge_confirmations(trials, problem) if confirmed_load.error]
    assert [confirmed_load.judged.verdict for confirmed_load in tested_loads] == [Verdict.PASS]


def test_a_repeated_server_does_not_change_a_test_that_has_ended(
    new_sessions: Callable[..., Sessions], problem: Problem
) -> None:
    """It was lost before the end of the test, and it differs from other servers more than they do."""
    sessions = new_sessions(lossy=(BASELINE,), slow={BASELINE: (1.0, 1.6)})
    before = sessions.run()
    passed = next(entry for entry in judge_confirmations(before, problem) if entry.judged.verdict is Verdict.PASS)
    assert passed.point.trial == BEST
    assert before[0].candidate == BASELINE
    lost = [window.server for window in before[0].confirmations]
    tested = [window.server for window in before[BEST].confirmations if window.load == passed.point.load]
    assert lost
    assert max(lost) < max(tested)
    sessions.server.lossy = ()
    after = sessions.run()
    repeated = [window.server for window in after[0].confirmations]
    assert min(repeated) > max(tested)
    assert len(set(repeated)) > 1
    spreads = [windows.tested_spreads(trials, trials[BEST], passed.point.load, problem) for trials in (before, after)]
    assert spreads[0] == spreads[1]
    entries = [entry for entry in judge_confirmations(after, problem) if entry.point.load == passed.point.load]
    assert passed.judged in [entry.judged for entry in entries if entry.point.trial == BEST]


def test_confirmations_of_another_plan_are_refused(new_sessions: Callable[..., Sessions]) -> None:
    sessions = new_sessions()
    trial = sessions.run(servers=1)[BEST]
    window = trial.confirmations[-1]
    sessions.table.append(
        trial, replace(window.load, concurrency=2), window.measurement, FreshServer(2, window.error_probability)
    )
    with pytest.raises(BadInputError, match=r"trial 2 do not follow the plan in run\.json; `tune verify --fresh`"):
        sessions.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": "much"}, "confirmation_plan.error: "),
        ({"error": 2.0}, "confirmation_plan.error: 2 is not between 0 and 1"),
        ({"finalists": None}, "confirmation_plan.finalists: "),
        (
            {"predictions": {"2": {"loads": [], "log_latency_ratios": [], "throughput_infer_per_sec": []}}},
            "confirmation_plan.predictions.2: ",
        ),
        (
            {
                "predictions": {
                    "2": {
                        "loads": [{"request_batch_size": 1}],
                        "log_latency_ratios": [1.0],
                        "throughput_infer_per_sec": [],
                    }
                }
            },
            "predictions.2",
        ),
        (
            {
                "predictions": {
                    "2": {
                        "loads": [{"request_batch_size": 1}],
                        "log_latency_ratios": [1.0],
                        "throughput_infer_per_sec": [1.0],
                        "highest_first": 1,
                    }
                }
            },
            "predictions.2: highest_first is not one of the loads",
        ),
    ],
)
def test_a_damaged_plan_is_refused(
    new_sessions: Callable[..., Sessions], change: dict[str, object], message: str
) -> None:
    sessions = new_sessions()
    sessions.run(servers=1)
    document = json.loads(sessions.documents[-1])
    assert plan_document(read_plan_document(document)) == document
    with pytest.raises(ValueError, match=message) as refused:
        read_plan_document({**document, **change})
    assert "\n" not in str(refused.value)


def test_the_disturbance_limit_is_that_of_the_first_session(new_sessions: Callable[..., Sessions]) -> None:
    sessions = new_sessions()
    sessions.run(servers=1)
    limit = sessions.limit
    shared = Measurement(
        50.0,
        latency_p95_ms=BOUND_MS,
        stable=True,
        measure_seconds=1.0,
        end_unix_seconds=UNIX_SECONDS + sessions.server.seconds + 60,
        other_cpu_share=0.5,
    )
    sessions.add_to_table([Trial(3, Candidate(1, instance_count=2), 9 * ((LoadPoint(1, 1), shared),))])
    sessions.run(servers=1)
    assert sessions.limit == limit == pytest.approx(0.1)


def test_the_disturbance_limit_is_that_of_the_node_that_confirms(new_sessions: Callable[..., Sessions]) -> None:
    sessions = new_sessions()
    for number, (node, share) in enumerate({"shared": 0.5, "quiet": 0.0}.items(), start=3):
        measured = Measurement(
            50.0, latency_p95_ms=BOUND_MS, stable=True, measure_seconds=1.0, other_cpu_share=share, node=node
        )
        candidate = Candidate(1, instance_count=number)
        sessions.add_to_table([Trial(number, candidate, 3 * ((LoadPoint(1, 1), measured),))])
    limits = {}
    for node in ("shared", "quiet"):
        sessions.run(servers=1, node=node)
        limits[node] = sessions.limit
    assert limits == {"shared": pytest.approx(0.6), "quiet": pytest.approx(0.1)}
