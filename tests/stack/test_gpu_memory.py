"""Reloads of a model on a GPU whose memory holds one copy of it.

The tests have no GPU. A lock on a file stands for its memory: each instance holds it as long as its process lives.
The instances have the kind KIND_MODEL, with which a Python model places itself and may use a GPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optimizer.core.candidate import Candidate
from optimizer.core.errors import ModelRefused, ServerCrashed
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.repository import read_source
from tests.generated_requests import write_requests
from tests.repositories import (
    ENSEMBLE_CONFIG,
    SLEEPER_CONFIG,
    skip_without_python_models,
    stored,
    write_python_model,
    write_sleeper,
)

MODEL = """\
import fcntl

class TritonPythonModel:
    def initialize(self, args):
        self.memory = open(__file__ + ".memory", "w")
        try:
            fcntl.flock(self.memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(
                "CUDA out of memory. Tried to allocate 8.39 GiB.\\nGPU 0 has a total capacity of 10.00 GiB"
            )

    def execute(self, requests):
        return []
"""
DYING_MODEL = """\
import os

class TritonPythonModel:
    def execute(self, requests):
        print("RuntimeError: CUDA out of memory. Tried to allocate 8.39 GiB.", flush=True)
        os._exit(1)
"""
ONE = Candidate(8)
DELAY = "first/max_queue_delay_microseconds"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[EmbeddedTarget]:
    skip_without_python_models()
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    version.joinpath("model.py").write_text(MODEL)
    version.parent.joinpath("config.pbtxt").write_text(SLEEPER_CONFIG.replace("KIND_CPU", "KIND_MODEL"))
    with contextlib.closing(EmbeddedTarget(stored(tmp_path / "models")("m"), TargetSettings(tmp_path / "log"))) as it:
        yield it


def test_the_memory_holds_no_other_copy_during_a_reload(target: EmbeddedTarget) -> None:
    for candidate in (ONE, Candidate(4), Candidate(4, True), ONE):
        with target.deploy(candidate) as endpoint:
            assert endpoint.gpus is None  # they may be on a GPU


def test_after_too_many_instances_the_next_candidate_has_the_whole_memory(target: EmbeddedTarget) -> None:
    for candidate in (ONE, Candidate(4)):
        with pytest.raises(ModelRefused, match="CUDA out of memory") as caught:
            target.serve(replace(candidate, instance_count=2))
        assert "\n" not in str(caught.value)
        assert caught.value.lacks_gpu_memory
        with target.deploy(candidate):
            pass


def test_a_model_that_dies_for_lack_of_memory_lacks_gpu_memory(tmp_path: Path) -> None:
    write_python_model(tmp_path / "models", "m", DYING_MODEL)
    source, installed = stored(tmp_path / "models")("m"), runtime.ensure(print)
    runner = LocalRunner(installed.perf_analyzer_libraries)
    requests = write_requests(source.config, tmp_path)
    perf_analyzer = PerfAnalyzer(installed.perf_analyzer, runner, tmp_path / "load", requests)
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "log"))) as target:
        with pytest.raises(ServerCrashed, match="CUDA out of memory") as caught, target.deploy(ONE) as endpoint:
            perf_analyzer.measure(endpoint, LoadPoint(1, 1))
        assert caught.value.lacks_gpu_memory


def test_all_instances_are_new(tmp_path: Path) -> None:
    """One of an earlier configuration may hold more memory than it needs, or have an error of CUDA that remains."""
    folder = write_sleeper(tmp_path / "models", 1.0)
    folder.joinpath("config.pbtxt").write_text(SLEEPER_CONFIG.replace("KIND_CPU", "KIND_MODEL"))
    source, seen = stored(tmp_path / "models")("sleeper"), set[int]()
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "log"))) as target:
        for count in (1, 2, 1):
            with target.deploy(replace(ONE, instance_count=count)) as endpoint:
                assert endpoint.server_pid
                processes = psutil.Process(endpoint.server_pid).children(recursive=True)
                instances = {process.pid for process in processes if "stub" in process.name()}
            assert len(instances - seen) == len(instances) == count
            seen |= instances


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[EmbeddedTarget]:
    """Serve an ensemble of ``first`` and ``second``; each has a memory of its own."""
    skip_without_python_models()
    models = tmp_path / "models"
    for step in ("first", "second"):
        folder = write_python_model(models, step, MODEL)
        folder.joinpath("config.pbtxt").write_text(SLEEPER_CONFIG.replace("KIND_CPU", "KIND_MODEL"))
    models.joinpath("chain", "1").mkdir(parents=True)
    models.joinpath("chain", "config.pbtxt").write_text(ENSEMBLE_CONFIG)
    source = read_source(stored(models), "chain", batcher="second")
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "log"))) as it:
        yield it


def loads_and_unloads(log: Path) -> list[str]:
    """Return the loads and unloads in a server's log, such as ``loading first`` and ``unloaded first``, in order."""
    pattern = r"\b(loading|unloaded)(?:: | ')(\w+)(?::1\"|' version 1\")"
    return [f"{what} {model}" for what, model in re.findall(pattern, log.read_text())]


def test_steps_are_unloaded_before_their_ensemble_is_loaded(chain: EmbeddedTarget) -> None:
    """Triton loads an ensemble with all of its steps, also those that have not changed."""
    seen = 0
    for candidate in (ONE, Candidate(4), Candidate(4, fields=((DELAY, 100),))):
        with chain.deploy(candidate) as endpoint:
            assert endpoint.gpus is None  # they may be on a GPU
        events = loads_and_unloads(chain.log)
        unloads, loads = events[seen:-3], events[-3:]
        assert unloads == (["unloaded chain", "unloaded second", "unloaded first"] if seen else [])
        assert sorted(loads[:2]) == ["loading first", "loading second"]  # at the same time
        assert loads[2] == "loading chain"
        seen = len(events)
    with chain.deploy(candidate):
        pass
    assert len(loads_and_unloads(chain.log)) == seen, "an unchanged ensemble stays"


def test_after_a_refused_step_the_next_candidate_has_the_whole_memory(chain: EmbeddedTarget) -> None:
    for refused, reason in (
        (
            Candidate(8, True, preferred_batch_sizes=(16,)),
            "cannot read model 'second': dynamic batching preferred size must be <= max batch size",
        ),
        (Candidate(8, fields=(("first/instance_group_count", 2),)), "CUDA out of memory"),
    ):
        with pytest.raises(ModelRefused, match=reason), chain.deploy(refused):
            pass
        with chain.deploy(ONE):
            pass
    failed = re.findall(r"failed to load '(\w+)' version", chain.log.read_text())
    assert failed == ["first"], "only the one with two instances"
