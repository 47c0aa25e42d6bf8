"""Tests of the CPUs and the number of servers as parameters of the search, which are not part of config.pbtxt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import METRICS
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.config import model_config
from optimizer.config.problem import Problem
from optimizer.config.search_space import MAX_SERVER_PROCESSES, SearchSpace
from optimizer.core.candidate import SERVER_CPUS, SERVER_PROCESSES, Candidate, FieldValue
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.model.profile import load_profile
from optimizer.options.run_options import RunOptions
from optimizer.results.configuration_text import configuration, triton_lines
from optimizer.simulator.fitted_parameters import ExecutionSettings, relative_duration
from optimizer.study.task import Task, prepare_task
from tests.repositories import write_sleeper, write_sums

LEVEL = "optimization.graph.level"
PROFILE = """\
model: {{{}}}
space:
  max_batch_size: [8]
  {}: {}
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


@pytest.mark.parametrize(("path", "value", "word"), [(SERVER_CPUS, "0-3", "cpus"), (SERVER_PROCESSES, 2, "process")])
def test_settings_of_the_server_are_not_written_to_config_pbtxt(path: str, value: FieldValue, word: str) -> None:
    candidate = Candidate(8, fields=((LEVEL, 1), (path, value)))
    written = model_config.apply(candidate, ModelConfig(name="m"))
    assert word not in model_config.to_text(written)
    assert written.optimization.graph.level == 1
    assert model_config.differences(candidate, written) == []
    assert model_config.candidate_of(written, [LEVEL, path]) == Candidate(8, fields=((LEVEL, 1),))


def test_the_summary_shows_server_cpus() -> None:
    candidate = Candidate(8, fields=((SERVER_CPUS, "0-3"),))
    assert configuration(candidate) == "batch 8 · 1 instance · no dynamic batching · server_cpus=0-3"
    assert triton_lines(candidate)[-1] == "# server on CPUs 0-3 (taskset -c, docker run --cpuset-cpus)"


def test_a_profile_lists_choices_of_server_cpus(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE.format("builder: mlp", "server_cpus", '["0-3,8", 4, 0-1]'))
    space = load_profile(path).space
    assert space is not None
    assert space.server_cpus == ("0-3,8", "4", "0-1")
    assert space.fields() == {SERVER_CPUS: ("0-3,8", "4", "0-1")}


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        *(("server_cpus", choices) for choices in ("[all]", "[true]", "[3-0]", "[[0, 1]]", "[]")),
        *(("server_processes", choices) for choices in ("[0]", "[1.5]", "[two]", "[true]", "[]", "[[1]]", "[65]")),
    ],
)
def test_invalid_choices_in_a_profile_are_refused_with_their_line(tmp_path: Path, key: str, choices: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE.format("builder: mlp", key, choices))
    with pytest.raises(BadInputError, match=rf"mine.yaml:4: space.{key}") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_a_server_with_more_cpus_computes_faster() -> None:
    threads = ("parameters.intra_op_thread_count.string_value", "1")
    problem = Problem("m", SearchSpace((8,)), 1, 64, (METRICS["throughput"],), cpu_count=8)
    duration_on_few_cpus, duration_on_many_cpus = (
        relative_duration(ExecutionSettings(4, (threads, (SERVER_CPUS, chosen))), 4, problem)
        for chosen in ("0-1", "0-7")
    )
    without_cpus = ExecutionSettings(4, (threads,))
    assert duration_on_few_cpus > duration_on_many_cpus == relative_duration(without_cpus, 4, problem)


# -- number of server processes --------------------------------------------------------------------------------------

TWO_PROCESSES = Candidate(8, fields=((SERVER_PROCESSES, 2),))
TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)


def test_each_number_of_server_processes_is_a_choice() -> None:
    space = SearchSpace((8,), fields={SERVER_PROCESSES: (1, 2, 4, 2)})
    assert [candidate.server_processes for candidate in space.candidates()] == [1, 2, 4]
    assert space.max_server_processes == 4
    assert SearchSpace((8,)).max_server_processes == Candidate(8).server_processes == 1


@pytest.mark.parametrize("value", [0, -1, MAX_SERVER_PROCESSES + 1, 1.5, True, "two"])
def test_an_invalid_number_of_server_processes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^server_processes: .* is not a whole number from 1 to 64$"):
        SearchSpace((8,), fields={SERVER_PROCESSES: (value,)})


def test_the_summary_shows_the_server_processes_unless_there_is_one() -> None:
    assert configuration(TWO_PROCESSES) == "batch 8 · 1 instance · no dynamic batching · 2 server processes"
    assert triton_lines(TWO_PROCESSES)[-1] == "# 2 server processes share the load and the CPUs"
    chosen = Candidate(8, fields=((SERVER_CPUS, "0-3"), (SERVER_PROCESSES, 2)))
    divided = "# 2 server processes share the load; CPUs 0-3 are divided among them"
    assert [line for line in triton_lines(chosen) if "CPU" in line] == [divided]
    one_process = Candidate(8, fields=((SERVER_PROCESSES, 1),))
    assert configuration(one_process) == configuration(Candidate(8))
    assert triton_lines(one_process) == triton_lines(Candidate(8))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_sleeper(tmp_path / "models", 1.0)
    write_sums(tmp_path / "models", tmp_path / "log")
    return tmp_path / "models"


def task(models: Path, name: str = "sleeper", choices: str = "[1, 2]", **options: Any) -> Task:
    profile = models.parent / "mine.yaml"
    profile.write_text(PROFILE.format(f"repository: models, name: {name}", "server_processes", choices))
    return prepare_task(RunOptions(str(profile), **options), TWO_CPUS, print)


def test_the_model_as_configured_has_one_server(models: Path) -> None:
    prepared = task(models)
    assert prepared.baseline.server_processes == 1
    assert prepared.problem.space.parameter_values(prepared.baseline) is not None, "it is in the space"
    profile = load_profile(models.parent / "mine.yaml")
    assert profile.space
    assert profile.space.fields() == {SERVER_PROCESSES: (1, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "remote", "url": "h:8001"},
            r"mine.yaml:4: space.server_processes: .* start the server at h:8001, .*--target embedded or local",
        ),
        ({"protocol": "http"}, "--protocol http: server_processes needs tune's own client, .* over gRPC only"),
        ({"perf_analyzer_image": "sdk"}, "--perf-analyzer-image: server_processes needs .*; leave it out"),
        ({"shared_memory": "cuda"}, "--shared-memory cuda: "),
        ({"concurrent_models": ("other",)}, "--concurrent-models: server_processes needs .* for one model only"),
    ],
)
def test_options_that_do_not_fit_are_refused(models: Path, options: dict[str, Any], message: str) -> None:
    shutil.copytree(models / "sleeper", models / "other")
    config = models / "other" / "config.pbtxt"
    config.write_text(config.read_text().replace("sleeper", "other"))
    with pytest.raises(BadInputError, match=message) as caught:
        task(models, **options)
    assert "\n" not in str(caught.value)


def test_a_stateful_model_has_one_server(models: Path) -> None:
    with pytest.raises(BadInputError, match="all requests of a sequence have to reach the same server") as caught:
        task(models, "sums")
    assert "\n" not in str(caught.value)
    assert task(models, "sums", "[1]").problem.space.max_server_processes == 1


def test_a_sweep_takes_numbers_of_server_processes() -> None:
    request = read_sweep_arguments(["--config", "server_processes=1,2", "m"]).request
    assert request.choices.fields == {SERVER_PROCESSES: (1, 2)}
    with pytest.raises(BadInputError, match="--config server_processes 0: write whole numbers"):
        read_sweep_arguments(["--config", "server_processes=0", "m"])


def test_only_the_own_client_spreads_the_load() -> None:
    one_process, two_processes = (
        Problem("m", SearchSpace((8,), fields={SERVER_PROCESSES: (count,)}), 1, 64) for count in (1, 2)
    )
    assert one_process.why_own_client == ""
    assert two_processes.why_own_client.startswith("server_processes needs tune's own client")
