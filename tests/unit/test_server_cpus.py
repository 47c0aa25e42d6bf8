"""The CPUs of the server as a dimension of the search: part of a candidate, not of config.pbtxt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import METRICS
from optimizer import model_config
from optimizer.errors import BadInputError
from optimizer.problem import Problem
from optimizer.profile.reader import load_profile
from optimizer.report.words import configuration, triton_lines
from optimizer.search.service import demand
from optimizer.space import Space
from optimizer.trial import SERVER_CPUS, Candidate

LEVEL = "optimization.graph.level"
PROFILE = """\
model: {{builder: mlp}}
space:
  max_batch_size: [8]
  server_cpus: {}
"""


def test_two_spellings_of_one_set_are_one_choice() -> None:
    space = Space((8,), fields={SERVER_CPUS: ("0,1", "0-1", 3)})
    assert space.fields == {SERVER_CPUS: ("0-1", "3")}
    assert len(space) == 2
    assert [candidate.server_cpus for candidate in space.candidates()] == ["0-1", "3"]
    assert Candidate(8).server_cpus is None


def test_what_is_no_list_of_cpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"server_cpus: 'all': write CPU numbers and ranges"):
        Space((8,), fields={SERVER_CPUS: ("all",)})


def test_config_pbtxt_does_not_know_them() -> None:
    candidate = Candidate(8, fields=((LEVEL, 1), (SERVER_CPUS, "0-3")))
    written = model_config.apply(candidate, ModelConfig(name="m"))
    assert "cpus" not in model_config.to_text(written)
    assert written.optimization.graph.level == 1
    assert model_config.differences(candidate, written) == []
    assert model_config.candidate_of(written, [LEVEL, SERVER_CPUS]) == Candidate(8, fields=((LEVEL, 1),))


def test_they_are_told() -> None:
    candidate = Candidate(8, fields=((SERVER_CPUS, "0-3"),))
    assert configuration(candidate) == "batch 8 · 1 instance · no dynamic batching · server_cpus=0-3"
    assert triton_lines(candidate)[-1] == "# the server on CPUs 0-3 (taskset -c, docker run --cpuset-cpus)"


def test_a_profile_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE.format('["0-3,8", 4, 0-1]'))
    space = load_profile(path).space
    assert space is not None
    assert space.server_cpus == ("0-3,8", "4", "0-1")
    assert space.fields() == {SERVER_CPUS: ("0-3,8", "4", "0-1")}


@pytest.mark.parametrize("given", ["[all]", "[true]", "[3-0]", "[[0, 1]]", "[]"])
def test_a_profile_with_others_names_the_line(tmp_path: Path, given: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE.format(given))
    with pytest.raises(BadInputError, match=r"mine.yaml:4: space.server_cpus") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_more_cpus_are_more_cores() -> None:
    threads = ("parameters.intra_op_thread_count.string_value", "1")
    problem = Problem("m", Space((8,)), 1, 64, (METRICS["throughput"],), (), cpu_count=8)
    few, many = (demand((threads, (SERVER_CPUS, chosen)), 4, problem) for chosen in ("0-1", "0-7"))
    assert few > many == demand((threads,), 4, problem)
