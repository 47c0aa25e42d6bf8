"""Tests of the server's CPUs as a parameter of the search, which is not part of config.pbtxt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import METRICS
from optimizer.config import model_config
from optimizer.config.search_space import Problem, SearchSpace
from optimizer.core.errors import BadInputError
from optimizer.core.trial import SERVER_CPUS, Candidate
from optimizer.model.profile import load_profile
from optimizer.results.configuration_text import configuration, triton_lines
from optimizer.simulator.fitted_parameters import relative_duration

LEVEL = "optimization.graph.level"
PROFILE = """\
model: {{builder: mlp}}
space:
  max_batch_size: [8]
  server_cpus: {}
"""


def test_two_spellings_of_the_same_cpus_are_one_choice() -> None:
    space = SearchSpace((8,), fields={SERVER_CPUS: ("0,1", "0-1", 3)})
    assert space.fields == {SERVER_CPUS: ("0-1", "3")}
    assert len(space) == 2
    assert [candidate.server_cpus for candidate in space.candidates()] == ["0-1", "3"]
    assert Candidate(8).server_cpus is None


def test_an_invalid_list_of_cpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"server_cpus: 'all': write CPU numbers and ranges"):
        SearchSpace((8,), fields={SERVER_CPUS: ("all",)})


def test_config_pbtxt_does_not_know_them() -> None:
    candidate = Candidate(8, fields=((LEVEL, 1), (SERVER_CPUS, "0-3")))
    written = model_config.apply(candidate, ModelConfig(name="m"))
    assert "cpus" not in model_config.to_text(written)
    assert written.optimization.graph.level == 1
    assert model_config.differences(candidate, written) == []
    assert model_config.candidate_of(written, [LEVEL, SERVER_CPUS]) == Candidate(8, fields=((LEVEL, 1),))


def test_the_summary_shows_them() -> None:
    candidate = Candidate(8, fields=((SERVER_CPUS, "0-3"),))
    assert configuration(candidate) == "batch 8 · 1 instance · no dynamic batching · server_cpus=0-3"
    assert triton_lines(candidate)[-1] == "# server on CPUs 0-3 (taskset -c, docker run --cpuset-cpus)"


def test_a_profile_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE.format('["0-3,8", 4, 0-1]'))
    space = load_profile(path).space
    assert space is not None
    assert space.server_cpus == ("0-3,8", "4", "0-1")
    assert space.fields() == {SERVER_CPUS: ("0-3,8", "4", "0-1")}


@pytest.mark.parametrize("choices", ["[all]", "[true]", "[3-0]", "[[0, 1]]", "[]"])
def test_a_profile_with_others_names_the_line(tmp_path: Path, choices: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE.format(choices))
    with pytest.raises(BadInputError, match=r"mine.yaml:4: space.server_cpus") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_more_cpus_are_more_cores() -> None:
    threads = ("parameters.intra_op_thread_count.string_value", "1")
    problem = Problem("m", SearchSpace((8,)), 1, 64, (METRICS["throughput"],), cpu_count=8)
    few, many = (relative_duration((4, (threads, (SERVER_CPUS, chosen))), 4, problem) for chosen in ("0-1", "0-7"))
    assert few > many == relative_duration((4, (threads,)), 4, problem)
