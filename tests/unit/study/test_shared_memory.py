"""Runs that cannot use shared memory are refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError
from optimizer.core.shared_memory import DEFAULT_OUTPUT_BYTES, SharedMemory, SharedMemoryName
from optimizer.deploy import target_factory
from optimizer.model.repository import read_repository_model
from optimizer.options.run_options import RunOptions
from optimizer.study.option_check import check_shared_memory
from tests.repositories import write_sleeper, write_streamer, write_sums


@pytest.fixture
def models(tmp_path: Path) -> dict[str, ModelSource]:
    folder = tmp_path / "models"
    write_sleeper(folder, 1)
    write_streamer(folder, 1)
    write_sums(folder, tmp_path / "log")
    models = {name: read_repository_model(folder, name, gpu=False) for name in ("sleeper", "streamer", "sums")}
    return {**models, "together": replace(models["sleeper"], concurrent=("other",))}


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("streamer", "system", "--shared-memory system: streamer streams"),
        ("sums", "system", "--shared-memory system: sums is stateful"),
        ("together", "system", "--shared-memory system: several models get load at the same time"),
        ("sleeper", "cuda", "--shared-memory cuda: sleeper is served on the CPU; use --shared-memory system"),
    ],
)
def test_models_that_cannot_use_it_are_refused(
    model: str, kind: SharedMemoryName, message: str, models: dict[str, ModelSource]
) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        check_shared_memory(RunOptions(model, shared_memory=kind), models[model], on_gpu=False)
    assert "\n" not in str(caught.value)
    check_shared_memory(RunOptions(model), models[model], on_gpu=False)


def test_a_tensor_that_perf_analyzer_cannot_name_a_region_after_is_refused(models: dict[str, ModelSource]) -> None:
    config = type(models["sleeper"].config)()
    config.CopyFrom(models["sleeper"].config)
    config.output[0].name = "dense/BiasAdd:0"
    source = replace(models["sleeper"], config=config)
    with pytest.raises(BadInputError, match="'dense/BiasAdd:0' is no name of a file; use --load rate"):
        check_shared_memory(RunOptions("m", shared_memory="system"), source, on_gpu=False)
    check_shared_memory(RunOptions("m", shared_memory="system", load="rate"), source, on_gpu=False)


def test_other_models_can_use_it(models: dict[str, ModelSource]) -> None:
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
