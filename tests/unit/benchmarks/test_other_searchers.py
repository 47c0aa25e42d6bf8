"""The search methods of ``benchmarks/other_searchers``, and the tables on which they are compared."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

import other_searchers
import search_methods
from lib import bounded_tables
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.interfaces import Searcher
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.run_options import SEARCHERS
from optimizer.replay.replay import recorded_problem, replay
from optimizer.store.recording import read_recording
from other_searchers.expert_defaults import ExpertSearcher
from other_searchers.quick_search import QuickSearcher

KNOWN = Path(__file__).parents[2] / "data" / "known.csv"
SIZES, COUNTS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 5)
WIDE = SearchSpace(SIZES, ("off", 0, 100, 500), ("none", "max/2"), COUNTS)


def problem_of(space: SearchSpace) -> Problem:
    return Problem("m", space, space.request_batch_size, 64, sla=Sla.from_bounds({"p95": 20.0}))


def observed(searcher: Searcher, server: dict[tuple[int, int], float]) -> list[Candidate]:
    """Return the suggestions of a search; ``server`` has the throughput by max_batch_size and instances."""
    suggested: list[Candidate] = []
    while (candidate := searcher.suggest()) is not None:
        assert candidate not in suggested
        suggested.append(candidate)
        throughput = server[candidate.max_batch_size, candidate.instance_count]
        measured = Measurement(throughput, latency_p95_ms=10.0, requests=500, stable=True)
        searcher.observe(Trial(len(suggested), candidate, ((LoadPoint(1, 4), measured),)))
    return suggested


def server_of(best_size: int, best_count: int) -> dict[tuple[int, int], float]:
    """Return the throughput of a server with one peak."""
    top = math.log2(best_size)
    return {
        (size, count): 1000 * 2 ** -(abs(math.log2(size) - top) + abs(count - best_count))
        for size in SIZES
        for count in COUNTS
    }


@pytest.mark.parametrize(("peak", "share"), [((1, 1), 1), ((32, 5), 1), ((32, 1), 1), ((8, 3), 0.5)])
def test_quick_search_climbs_to_the_only_peak(peak: tuple[int, int], share: float) -> None:
    """A peak inside may be missed by a step. Neither preferred sizes nor a delay are tried."""
    server = server_of(*peak)
    suggested = observed(QuickSearcher(problem_of(WIDE)), server)
    best = max(server[candidate.max_batch_size, candidate.instance_count] for candidate in suggested)
    assert best >= share * server[peak]
    assert len(suggested) < len(SIZES) * len(COUNTS) / 2 + 1
    assert {candidate.max_queue_delay_us for candidate in suggested} == {0}
    assert {candidate.preferred_batch_sizes for candidate in suggested} == {()}


def test_expert_defaults_are_a_list_of_two() -> None:
    server = server_of(1, 1)
    expected = [Candidate(32, True, 100, (), 1), Candidate(32, True, 100, (), 2)]
    assert observed(ExpertSearcher(problem_of(WIDE)), server) == expected
    without = SearchSpace((4, 16), ("off", 0, 200), ("none", "max/2"), (1, 4))
    searcher = ExpertSearcher(problem_of(without))
    assert searcher.suggest() == Candidate(16, True, 200, (), 1), "the closest configuration, with a delay"
    assert searcher.suggest() is None, "2 instances are closest to 1"


def test_every_method_has_its_module() -> None:
    assert other_searchers.METHODS.keys() > set(SEARCHERS) - {"grid"}
    for name, method in other_searchers.METHODS.items():
        factory = other_searchers.searcher_factory(name) if not method.missing_packages() else None
        assert factory is None or factory == name or callable(factory)
    assert other_searchers.Method(packages=("json", "no_such_package")).missing_packages() == ["no_such_package"]


@pytest.mark.parametrize("name", ["botorch", "smac"])
def test_a_model_based_rival_exhausts_a_table_without_repetition(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"needs {other_searchers.REQUIREMENTS}")
    recording = read_recording(KNOWN)
    problem = recorded_problem(recording, {"p95": 20})
    first, second = (replay(recording, problem, other_searchers.searcher_factory(name), 1, 99) for _ in range(2))
    assert first == second
    assert first.effort.deployments == len(recording.space)
    assert first.regret == 0


def test_the_command_leaves_a_method_out_whose_package_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = other_searchers.Method("smac_search.SmacSearcher", ("no_such_package",))
    known = {**other_searchers.METHODS, "smac": lacking}
    assert search_methods.installed(("quick", "smac", "random"), known) == ("quick", "random")
    line = "smac is left out: it needs no_such_package; pip install -r benchmarks/other_searchers/requirements.txt\n"
    assert capsys.readouterr().err == line


# -- tables ------------------------------------------------------------------------------------


def test_tables_are_split_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("minilm-16", "another"):
        (tmp_path / f"{name}.csv").write_text(KNOWN.read_text())
    every = list(bounded_tables.bounded_tables(tmp_path, tmp_path, frozenset(("training", "test"))))
    assert [(case.kind, case.table.stem) for case in every[::3]] == [("training", "another"), ("test", "minilm-16")]
    assert [case.sla for case in every[:3]] == ["tight", "middle", "loose"]
    assert "no test tables text_recognition-small, dlrm-16, sleep-2 in" in capsys.readouterr().err
    assert [*bounded_tables.bounded_tables(tmp_path, tmp_path, frozenset(("test",)))] == every[3:]
    assert [bounded_tables.feasible_shares(name)["loose"] for name in ("another", "dlrm")] == [0.70, 0.75]
