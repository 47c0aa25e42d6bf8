"""The search methods of ``benchmarks/rivals``, and the comparison with them in ``benchmarks/search_methods.py``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bounded_tables
import rivals
import search_methods
import search_plots
import search_report
import search_runs
import tried_configurations
from measurement_noise import Noise
from rivals.expert_defaults import ExpertSearcher
from rivals.quick_search import QuickSearcher

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.search_space import Problem, SearchSpace
from optimizer.core.interfaces import Searcher
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.options.run_options import SEARCHERS
from optimizer.replay.engine import NEVER, Effort, ReplayResult, recorded_problem, replay
from optimizer.store.recording import read_recording

KNOWN = Path(__file__).parents[2] / "data" / "known.csv"
SIZES, COUNTS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 5)
WIDE = SearchSpace(SIZES, ("off", 0, 100, 500), ("none", "max/2"), COUNTS)


def problem_of(space: SearchSpace, bound_ms: float = 20.0) -> Problem:
    return Problem("m", space, space.request_batch_size, 64, sla=Sla.from_bounds({"p95": bound_ms}))


def observed(
    searcher: Searcher, server: dict[tuple[int, int], tuple[float, float]], failing: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Return the suggestions of a search; ``server`` has throughput and p95 by max_batch_size and instances."""
    suggested: list[Candidate] = []
    while (candidate := searcher.suggest()) is not None:
        assert candidate not in suggested
        suggested.append(candidate)
        trial = Trial(len(suggested), candidate, status="failed", reason="no memory")
        if candidate not in failing:
            throughput, p95 = server[candidate.max_batch_size, candidate.instance_count]
            measured = Measurement(throughput, latency_p95_ms=p95, requests=500, stable=True)
            trial = Trial(len(suggested), candidate, ((LoadPoint(1, 4), measured),))
        searcher.observe(trial)
    return suggested


def server_of(best_size: int, best_count: int, slow_from: int = 99) -> dict[tuple[int, int], tuple[float, float]]:
    """Return a server with one peak; from ``slow_from`` instances on it misses the bound."""
    top = math.log2(best_size)
    return {
        (size, count): (
            1000 * 2 ** -(abs(math.log2(size) - top) + abs(count - best_count)),
            50.0 if count >= slow_from else 10.0,
        )
        for size in SIZES
        for count in COUNTS
    }


@pytest.mark.parametrize(("peak", "share"), [((1, 1), 1), ((32, 5), 1), ((32, 1), 1), ((8, 3), 0.5)])
def test_quick_search_climbs_to_the_only_peak(peak: tuple[int, int], share: float) -> None:
    """A peak inside may be missed by a step. Neither preferred sizes nor a delay are tried."""
    server = server_of(*peak)
    suggested = observed(QuickSearcher(problem_of(WIDE)), server)
    best = max(server[one.max_batch_size, one.instance_count][0] for one in suggested)
    assert best >= share * server[peak][0]
    assert len(suggested) < len(SIZES) * len(COUNTS) / 2 + 1
    assert {one.max_queue_delay_us for one in suggested} == {0}
    assert {one.preferred_batch_sizes for one in suggested} == {()}


def test_quick_search_returns_from_configurations_that_miss_the_bound() -> None:
    server = server_of(32, 5, slow_from=3)
    suggested = observed(QuickSearcher(problem_of(WIDE)), server)
    passing = [one for one in suggested if one.instance_count < 3]
    best = max(passing, key=lambda one: server[one.max_batch_size, one.instance_count])
    assert (best.max_batch_size, best.instance_count) == (32, 2)
    assert len(passing) < len(suggested)


def test_quick_search_goes_towards_the_bound_while_nothing_meets_it() -> None:
    server = {(size, count): (100.0, 20.0 + size + 10.0 * (5 - count)) for size in SIZES for count in COUNTS}
    server[1, 5] = (100.0, 15.0)
    suggested = observed(QuickSearcher(problem_of(WIDE)), server)
    assert Candidate(1, instance_count=5) in suggested


def test_quick_search_ends_if_the_first_configuration_fails() -> None:
    assert observed(QuickSearcher(problem_of(WIDE)), {}, failing=[Candidate(1)]) == [Candidate(1)]


def test_quick_search_starts_at_twice_the_samples_of_all_instances() -> None:
    space = SearchSpace((4, 16), ("off", 0), instance_count=(1, 2, 3), request_batch_size=2)
    searcher = QuickSearcher(problem_of(space))
    assert [searcher.suggest(), searcher.expected_load(Candidate(4, True))] == [Candidate(4, True), 4]
    searcher = QuickSearcher(problem_of(SearchSpace((64,), (0,), instance_count=(1,))))
    assert searcher.suggest() == Candidate(64, True)
    assert searcher.expected_load(Candidate(64, True)) == 64, "at most the largest concurrency"


def test_expert_defaults_are_a_list_of_two() -> None:
    server = server_of(1, 1)
    expected = [Candidate(32, True, 100, (), 1), Candidate(32, True, 100, (), 2)]
    assert observed(ExpertSearcher(problem_of(WIDE)), server) == expected
    without = SearchSpace((4, 16), ("off", 0, 200), ("none", "max/2"), (1, 4))
    searcher = ExpertSearcher(problem_of(without))
    assert searcher.suggest() == Candidate(16, True, 200, (), 1), "the closest configuration, with a delay"
    assert searcher.suggest() is None, "2 instances are closest to 1"


def test_every_method_has_its_module() -> None:
    assert rivals.METHODS.keys() > set(SEARCHERS) - {"grid"}
    for name, method in rivals.METHODS.items():
        factory = rivals.searcher_factory(name) if not method.missing_packages() else None
        assert factory is None or factory == name or callable(factory)
    assert rivals.Method(packages=("json", "no_such_package")).missing_packages() == ["no_such_package"]


@pytest.mark.parametrize("name", ["botorch", "smac"])
def test_a_model_based_rival_exhausts_a_table_without_repetition(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"needs {rivals.REQUIREMENTS}")
    recording = read_recording(KNOWN)
    problem = recorded_problem(recording, {"p95": 20})
    best = recording.best(problem)
    assert best is not None
    first, second = (replay(recording, problem, best, rivals.searcher_factory(name), 1, 99) for _ in range(2))
    assert first == second
    assert first.effort.deployments == len(recording.space)
    assert first.regret == 0


def test_the_command_leaves_a_method_out_whose_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(rivals.METHODS, "smac", rivals.Method("smac_search.SmacSearcher", ("no_such_package",)))
    assert search_methods._installed(("quick", "smac", "random")) == ("quick", "random")
    line = "smac is left out: it needs no_such_package; pip install -r benchmarks/rivals/requirements.txt\n"
    assert capsys.readouterr().err == line


# -- tables, runs and report ------------------------------------------------------------------------------------


def test_tables_are_split_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("minilm-16", "another"):
        (tmp_path / f"{name}.csv").write_text(KNOWN.read_text())
    every = list(bounded_tables.bounded_tables(tmp_path, tmp_path, frozenset(("training", "test"))))
    assert [(case.kind, case.table.stem) for case in every[::3]] == [("training", "another"), ("test", "minilm-16")]
    assert [case.sla for case in every[:3]] == ["tight", "middle", "loose"]
    assert "no test tables text_recognition-small, dlrm-16, sleep-2 in" in capsys.readouterr().err
    assert [*bounded_tables.bounded_tables(tmp_path, tmp_path, frozenset(("test",)))] == every[3:]
    assert [bounded_tables.feasible_shares(name)["loose"] for name in ("another", "dlrm")] == [0.70, 0.75]


def test_kept_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_runs, "run_jobs", lambda run, jobs, *_: map(run, jobs))
    case = bounded_tables.BoundedTable("training", KNOWN, "middle", 20.0)
    jobs = [search_runs.ReplayJob(case, "expert", seed, 30) for seed in range(2)]
    file = tmp_path / "runs"
    first = search_runs.run_all(jobs[:1], 1, file)
    both = search_runs.run_all(jobs, 1, file)
    assert len(file.read_text().splitlines()) == 2
    assert first[jobs[0]] == both[jobs[0]]
    monkeypatch.setattr(search_runs, "run_jobs", lambda _, jobs, *__: pytest.fail(f"ran {jobs}") if jobs else ())
    again = search_runs.run_all(jobs, 1, file)
    assert {job: (run.regret, dict(run.until)) for job, run in again.items()} == {
        job: (run.regret, dict(run.until)) for job, run in both.items()
    }


def test_the_noise_of_recordings_reaches_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bounded_tables.BoundedTable("training", KNOWN, "middle", 20.0)
    assert search_methods._noise(case) is None
    table = next(iter(bounded_tables.bounded_tables(bounded_tables.TABLES, KNOWN, frozenset(("training",)))))
    noise = search_methods._noise(table)
    assert noise is not None
    quiet, noisy = (search_runs.ReplayJob(case, "expert", 0, 30, one) for one in (None, noise))
    assert noisy.key != quiet.key
    seen: list[Noise | None] = []

    def noted(*arguments: Any, **options: Any) -> ReplayResult:
        seen.append(options["server"] and options["server"].noise)
        return replay(*arguments, **options)

    monkeypatch.setattr(search_runs, "replay", noted)
    assert search_runs._run(quiet).effort.deployments == search_runs._run(noisy).effort.deployments == 3
    assert seen == [None, noise]


def result(within: Effort, regrets: tuple[float, ...], seconds: tuple[float, ...]) -> ReplayResult:
    effort = Effort(len(regrets), len(regrets))
    return ReplayResult(effort, {0.05: within, 0.01: NEVER}, None, regrets[-1], regrets, seconds)


def test_the_report_restricts_the_mean_and_compares_with_the_best_rival(capsys: pytest.CaptureFixture[str]) -> None:
    case = bounded_tables.BoundedTable("test", Path("minilm-16.csv"), "tight", 5.0)
    until = {"simulated": (4, 8), "quick": (10, math.inf), "random": (12, 14), "expert": (3, 3)}
    runs = {
        search_runs.ReplayJob(case, method, seed, 30): result(Effort(at, at), (0.5, 0.02), (1.0, 2.0))
        for method, places in until.items()
        for seed, at in enumerate(places)
    }
    search_report.print_restricted_means([case], tuple(until), runs)
    shown = capsys.readouterr().out
    assert "| quick | 20.0 |" in shown
    assert "`simulated` needs 0.46 times as many as `random`. Target: at most 0.67, met." in shown
    search_report.print_targets([case], runs)
    shown = capsys.readouterr().out
    assert "| test | regret, median | 1.0% | 2.0% (minilm-16, tight) | 2.0% | all | missed |" in shown
    assert "| test | deployments, median | 6 | 2 (minilm-16, tight) | 2 | all | met |" in shown


def test_the_report_compares_methods_on_the_seeds_that_both_have(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [bounded_tables.BoundedTable("test", Path(f"{name}.csv"), "tight", 5.0) for name in ("one", "other")]
    regrets = {"simulated": [(0.0, 0.1), (0.2, 0.3), (0.9, 0.9)], "random": [(0.1, 0.2), (0.4, 0.5)]}
    runs = {
        search_runs.ReplayJob(case, method, seed, 30): result(NEVER, (of_seed[number],), (1.0,))
        for method, seeds in regrets.items()
        for seed, of_seed in enumerate(seeds)
        for number, case in enumerate(cases)
    }
    search_report.print_tables(cases, tuple(regrets), runs)
    shown = capsys.readouterr().out
    # the seeds' means over both tables are 15 and 45 %, and 10 and 20 % more than those of `simulated`
    assert "| random | 30.0 ± 15.0 | +15.0 ± 5.0 |" in shown
    assert "| other | p95 5 ms (tight) | 43.3 ± 24.0 | 35.0 ± 15.0 |" in shown


def test_a_plot_of_regret_against_deployments_and_seconds(tmp_path: Path) -> None:
    runs = [result(NEVER, (0.8, 0.2), (2.0, 5.0)), result(NEVER, (0.4, 0.0), (1.0, 3.0))]
    assert [search_plots.regret_at(runs[0], at) for at in (0, 1.9, 2, 4.9, 5, 99)] == [1, 1, 0.8, 0.8, 0.2, 0.2]
    assert search_plots.mean_regrets([[0.5, 0.0], [0.25, 0.0]]) == [0.375, search_plots.SMALLEST]
    case = bounded_tables.BoundedTable("test", Path("t.csv"), "tight", 5.0)
    jobs = {search_runs.ReplayJob(case, "simulated", seed, 30): run for seed, run in enumerate(runs)}
    path = tmp_path / "plots" / "test.svg"
    search_plots.write_plot(path, [case], ("simulated",), jobs)
    assert 'id="simulated"' in path.read_text()
    assert path.stat().st_size < 100_000


def test_the_highest_throughput_is_interpolated_between_recorded_loads(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    columns = "max_batch_size,instance_count,concurrency,throughput_infer_per_sec,latency_p95_ms"
    table.write_text(f"{columns}\n8,1,1,100,5\n8,1,4,300,20\n8,1,8,310,80\n8,2,1,90,5\n")
    recording = read_recording(table)
    candidate = recording.space.canonical(recording.rows[0].candidate)

    def highest(bound_ms: float) -> float:
        return tried_configurations._highest_throughput(recording, candidate, bound_ms)

    assert [highest(bound_ms) for bound_ms in (4, 5, 20, 100)] == [0, 100, 300, 310]
    assert highest(10) == pytest.approx(200)  # in the middle of 5 and 20 on a logarithmic scale
