"""Options that do not fit the model are refused with the reason: shared memory, traces and priorities."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from optimizer.config.model_source import ModelSource
from optimizer.config.queue_policy import PRIORITY_LEVELS
from optimizer.core.endpoint import DEFAULT_OUTPUT_BYTES, SharedMemory, SharedMemoryName
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.request_sizes import SizeDistribution
from optimizer.deploy import target_factory
from optimizer.machine.hardware import Hardware
from optimizer.model.repository import read_repository_model
from optimizer.options.run_options import RunOptions
from optimizer.study.model_finder import NamedModel
from optimizer.study.option_check import check_requests, check_shared_memory
from optimizer.study.task import Task, prepare_task
from tests.repositories import SLEEPER_CONFIG, write_ensemble, write_sleeper, write_streamer, write_sums

TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)


# -- shared memory --------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> dict[str, ModelSource]:
    folder = tmp_path / "models"
    write_sleeper(folder, 1)
    write_streamer(folder, 1)
    write_sums(folder, tmp_path / "log")
    models = {name: read_repository_model(folder, name, gpu=False) for name in ("sleeper", "streamer", "sums")}
    other = type(models["sleeper"].config)(name="other", max_batch_size=2)
    return {**models, "together": replace(models["sleeper"], composing={"other": other}, concurrent={"other": 1.0})}


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("streamer", "system", "--shared-memory system: streamer streams"),
        ("sums", "system", "--shared-memory system: sums is stateful"),
        ("together", "system", "--shared-memory system: it is not used if several models get load at the same time"),
        ("sleeper", "cuda", "--shared-memory cuda: sleeper is served on the CPU; use --shared-memory system"),
    ],
)
def test_models_that_cannot_use_shared_memory_are_refused(
    model: str, kind: SharedMemoryName, message: str, models: dict[str, ModelSource]
) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        check_shared_memory(RunOptions(model, shared_memory=kind), models[model], on_gpu=False)
    assert "\n" not in str(caught.value)
    check_shared_memory(RunOptions(model), models[model], on_gpu=False)


def test_concurrent_models_get_random_requests_of_one_size(models: dict[str, ModelSource]) -> None:
    options, one_size = RunOptions("together", load="rate"), SizeDistribution(((1, 1, 1.0),))
    check_requests(NamedModel(models["together"], one_size), None, options)
    with pytest.raises(BadInputError, match=r"^times\.csv: has the requests of one model; leave out the concurrent "):
        check_requests(NamedModel(models["together"], one_size), None, replace(options, request_times="times.csv"))
    with pytest.raises(BadInputError, match=r"--request-batch-size 4 is above the max_batch_size 2 of other, which "):
        check_requests(NamedModel(models["together"], SizeDistribution(((4, 4, 1.0),))), None, options)
    mix = SizeDistribution(((1, 2, 1.0),))
    with pytest.raises(BadInputError, match=r"--request-batch-size 1\.\.2 is a mix, and several models get "):
        check_requests(NamedModel(models["together"], mix), None, replace(options, request_batch_size="1..2"))


def test_a_tensor_that_perf_analyzer_cannot_name_a_region_after_is_refused(models: dict[str, ModelSource]) -> None:
    config = type(models["sleeper"].config)()
    config.CopyFrom(models["sleeper"].config)
    config.output[0].name = "dense/BiasAdd:0"
    source = replace(models["sleeper"], config=config)
    with pytest.raises(BadInputError, match="'dense/BiasAdd:0' is no name of a file; send at a rate "):
        check_shared_memory(RunOptions("m", shared_memory="system"), source, on_gpu=False)
    check_shared_memory(RunOptions("m", shared_memory="system", load="rate"), source, on_gpu=False)


def test_other_models_can_use_shared_memory(models: dict[str, ModelSource]) -> None:
    check_shared_memory(RunOptions("sleeper", shared_memory="system"), models["sleeper"], on_gpu=False)
    check_shared_memory(RunOptions("sleeper", shared_memory="cuda"), models["sleeper"], on_gpu=True)


def test_a_server_on_another_machine_is_refused() -> None:
    options = RunOptions("m", target="remote", url="triton.example:8001", shared_memory="system")
    with pytest.raises(BadInputError, match=r"the server at triton\.example:8001 is on another machine"):
        target_factory.check_target(options, print)


def test_the_options_name_the_shared_memory() -> None:
    assert RunOptions("m").requested_shared_memory() is None
    assert RunOptions("m", shared_memory="system").requested_shared_memory() == SharedMemory(
        "system", DEFAULT_OUTPUT_BYTES
    )
    options = RunOptions("m", shared_memory="cuda", output_shared_memory_bytes=2000.0)
    assert options.requested_shared_memory() == SharedMemory("cuda", 2000)


# -- traces and priorities ------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write_sleeper(tmp_path / "models", 1.0)
    with (folder / "config.pbtxt").open("a") as config:
        config.write("dynamic_batching { priority_levels: 2 default_priority_level: 2 }\n")
    write_streamer(tmp_path / "models", 1.0)
    return tmp_path / "models"


def task(repository: Path, trace: str, name: str = "sleeper", size: int | None = None) -> Task:
    file = repository.parent / "trace.csv"
    file.write_text(trace)
    options = RunOptions(
        name, model_repository=str(repository), load="rate", request_times=str(file), request_batch_size=size
    )
    return prepare_task(options, TWO_CPUS, print)


def test_the_sizes_of_a_trace_are_the_mix_of_the_task(repository: Path) -> None:
    made = task(repository, "time_s,batch_size,priority\n0,1,1\n1,1,2\n2,7,0\n")
    assert str(made.problem.request_mix) == "1*2|7*1"
    assert made.problem.request_batch_size == 3
    times = made.problem.request_times
    assert times is not None
    trace = str(repository.parent / "trace.csv")
    assert replace(times, recorded_shares=()) == RequestTimes(trace, recorded_requests=3)


def test_a_trace_without_sizes_leaves_the_size_to_the_option(repository: Path) -> None:
    made = task(repository, "time_s,priority\n0,1\n1,2\n", size=4)
    assert made.problem.request_mix is None
    assert made.problem.request_batch_size == 4


@pytest.mark.parametrize(
    ("trace", "name", "size", "message"),
    [
        (
            "time_s,batch_size\n0,1\n\n1,9\n",
            "sleeper",
            None,
            "trace.csv:4: batch_size 9 is above the max_batch_size 8",
        ),
        ("time_s,priority\n0,1\n1,3\n", "sleeper", None, "trace.csv:3: priority 3: sleeper has the levels 1 to 2; "),
        ("time_s,priority\n0,1\n1,3\n", "streamer", None, "streamer streams, and a trace has only its times"),
        ("time_s,batch_size\n0,1\n1,3\n", "sleeper", 4, "--request-batch-size 4: "),
    ],
)
def test_a_trace_that_the_model_cannot_serve_is_refused(
    repository: Path, trace: str, name: str, size: int | None, message: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        task(repository, trace, name, size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", ["rate", "concurrency"])
def test_priorities_of_a_load_are_those_of_the_task(repository: Path, load: Literal["rate", "concurrency"]) -> None:
    options = RunOptions("sleeper", model_repository=str(repository), load=load, priorities="1*20|2*80")
    assert str(prepare_task(options, TWO_CPUS, print).problem.priorities) == "1*20|2*80"


@pytest.mark.parametrize(
    ("name", "priorities", "message"),
    [
        (
            "sleeper",
            "1*1|3*9",
            "--priorities 3: sleeper has the levels 1 to 2; raise dynamic_batching.priority_levels",
        ),
        ("streamer", "1*1|2*9", "--priorities: streamer streams; leave the priorities out"),
    ],
)
def test_priorities_that_the_model_lacks_are_refused(
    repository: Path, name: str, priorities: str, message: str
) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        prepare_task(RunOptions(name, model_repository=str(repository), priorities=priorities), TWO_CPUS, print)


def test_the_levels_of_an_ensemble_are_those_of_its_steps(tmp_path: Path) -> None:
    """``second`` is tuned, and ``first`` has the levels."""
    folder = write_ensemble(tmp_path / "models", 1.0).parent
    with (folder / "first" / "config.pbtxt").open("a") as config:
        config.write("dynamic_batching { priority_levels: 2 default_priority_level: 2 }\n")

    def priorities(text: str) -> str:
        options = RunOptions("chain", model_repository=str(folder), bls_composing_models=(), priorities=text)
        return str(prepare_task(options, TWO_CPUS, print).problem.priorities)

    assert priorities("1*1|2*1") == "1*1|2*1"
    with pytest.raises(BadInputError, match="--priorities 3: chain has the levels 1 to 2"):
        priorities("1*1|3*1")


def test_the_queue_of_the_configuration_is_part_of_the_problem(repository: Path) -> None:
    made = prepare_task(RunOptions("sleeper", model_repository=str(repository)), TWO_CPUS, print)
    assert dict(made.problem.queue) == {PRIORITY_LEVELS: 2, "dynamic_batching.default_priority_level": 2}
    assert not made.problem.may_refuse


def test_the_fields_of_a_sweep_decide_which_priorities_are_sent(repository: Path) -> None:
    """The profile has levels, but a sweep does not try the space of its profile."""
    (repository / "sleeper" / "config.pbtxt").write_text(SLEEPER_CONFIG)
    profile = repository.parent / "p.yaml"
    profile.write_text(
        "model: {repository: models, name: sleeper}\nspace: {priority_levels: [2], default_priority_level: [2]}\n"
    )
    for name, folder in ((str(profile), None), ("sleeper", str(repository))):
        options = RunOptions(name, model_repository=folder, priorities="1*20|2*80")
        swept = prepare_task(options, TWO_CPUS, print, {PRIORITY_LEVELS: ("2",)})
        assert str(swept.problem.priorities) == "1*20|2*80"
        with pytest.raises(BadInputError, match=r"--priorities 2: sleeper has no priority levels; .* with --config"):
            prepare_task(options, TWO_CPUS, print, {})


def test_priorities_of_a_trace_are_not_mixed_with_others(repository: Path) -> None:
    file = repository.parent / "trace.csv"
    file.write_text("time_s,priority\n0,1\n1,2\n")
    options = RunOptions(
        "sleeper", model_repository=str(repository), load="rate", request_times=str(file), priorities="1*1|2*1"
    )
    with pytest.raises(BadInputError, match=r"--priorities: the trace .*trace.csv has the requests' own"):
        prepare_task(options, TWO_CPUS, print)


def test_a_streaming_model_takes_the_times_of_a_trace(repository: Path) -> None:
    request_times = task(repository, "time_s\n0\n1\n5\n", "streamer").problem.request_times
    assert request_times is not None
    assert request_times.recorded_requests == 3


@pytest.mark.parametrize(
    ("values", "flag"), [({"min_score": 0.9}, "--min-score"), ({"objectives": ("score",)}, "--objective score")]
)
def test_a_score_needs_labelled_data(repository: Path, values: dict[str, Any], flag: str) -> None:
    options = RunOptions("sleeper", model_repository=str(repository), search="random", **values)
    message = f"^{flag}: labelled data are missing; write a profile with a score: section"
    with pytest.raises(BadInputError, match=message):
        prepare_task(options, TWO_CPUS, print)
