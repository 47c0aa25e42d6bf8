"""Tests for the facts that a run records about its server."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from onnx import TensorProto, helper

from optimizer.cli.sweep import read_sweep_arguments
from optimizer.config.model_config_proto import ModelConfig, ModelInstanceGroup
from optimizer.config.model_source import ModelSource
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_CPUS
from optimizer.core.errors import BadInputError, ServerFault
from optimizer.core.notes import (
    DETAILS,
    BatcherTuned,
    OtherRun,
    OwnBackend,
    SeveralModelsLoaded,
    ShareOfNode,
    WithoutBatches,
)
from optimizer.core.process_owner import this_process
from optimizer.core.stopwatch import Stopwatch
from optimizer.deploy.target_settings import ServerPorts, TargetSettings
from optimizer.deploy.visible_gpus import VisibleGpus
from optimizer.machine.cpus import CpuPlacement, CpuTopology
from optimizer.machine.hardware import Hardware
from optimizer.options.run_options import RunOptions, TargetName
from optimizer.store.recording import RecordedServer
from optimizer.store.run_folder import RunFolder
from optimizer.study.environment import Environment, ServerResources
from optimizer.study.run_record import problem_document
from optimizer.study.task import Task, prepare_task
from tests.repositories import doubler, onnx_model, serialized, write_ensemble, write_model, write_sleeper

CONFIG_OF_DOUBLER = """\
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
HOST = Hardware((), "Some CPU", 16, 1 << 34)


def task_with(*server_cpus: str, on_gpu: bool = False) -> Task:
    fields: dict[str, Any] = {SERVER_CPUS: server_cpus} if server_cpus else {}
    task = SimpleNamespace(problem=SimpleNamespace(space=SimpleNamespace(fields=fields)), on_gpu=on_gpu)
    return cast("Task", task)


@pytest.fixture
def environment() -> Environment:
    """An environment on a host of 16 CPUs without a quota."""
    cores = tuple(frozenset({cpu}) for cpu in range(16))
    topology = CpuTopology(cores, (frozenset(range(16)),))
    return Environment(RunOptions("m"), HOST, VisibleGpus(), Stopwatch(), print, topology=topology)


def test_server_and_load_generator_have_cpus_of_their_own(environment: Environment) -> None:
    server = environment.server_resources(task_with())
    assert (server.server_cpus, server.server_cpu_list, server.client_cpu_list) == (12, "0-11", "12-15")
    assert (server.client_shares_cpus, server.cpu_quota, server.server_uses_gpus) == (False, None, False)


@pytest.mark.parametrize(
    ("url", "shares_cpus"), [("127.0.0.1:1", True), ("localhost:1", True), ("192.0.2.1:8001", None)]
)
def test_a_remote_server_on_this_machine_shares_its_cpus(
    environment: Environment, url: str, shares_cpus: bool | None
) -> None:
    remote = replace(environment, options=RunOptions("m", target="remote", url=url))
    assert remote.server_resources(task_with()) == ServerResources(client_shares_cpus=shares_cpus)


class UnclosableTarget(RecordedServer):
    """A target whose server cannot be restored when it is closed."""

    server_version = ""
    closed = 0

    def start(self) -> None:
        """Do nothing: nothing is deployed."""

    def forget_vanished(self) -> None:
        """Do nothing: there is no model repository."""

    def close(self) -> None:
        self.closed += 1
        raise ServerFault("not restored")


def test_an_error_of_closing_does_not_hide_the_error_before(environment: Environment, tmp_path: Path) -> None:
    task = cast("Task", SimpleNamespace(**vars(task_with()), source=SimpleNamespace(models={})))
    target = UnclosableTarget(())
    opened = partial(environment.open_target, task, RunFolder(tmp_path), make_target=lambda *_: target)
    with pytest.raises(ServerFault, match="no longer answers") as caught, opened():
        raise ServerFault("no longer answers")
    assert caught.value.__notes__ == ["not restored"]
    assert target.closed == 1
    with pytest.raises(ServerFault, match="not restored"), opened() as yielded:
        assert yielded is target
    assert target.closed == 2


def test_only_a_run_that_measures_is_warned_of_another_one(environment: Environment, tmp_path: Path) -> None:
    task = cast("Task", SimpleNamespace(**vars(task_with()), source=SimpleNamespace(models={})))
    lines: list[str] = []
    environment = replace(environment, on_progress=lines.append)
    other = OtherRun(4194304, f"/results/{os.getpid()}")  # no process has this number
    with socket.socket(socket.AF_UNIX) as mark:
        mark.bind(f"\0tritune {other.pid} {this_process().namespace} 0 {other.folder}".encode())
        for ports, warned in (((ServerPorts(1, 2, 3),), False), ((), True)):
            opened = environment.open_target(
                task, RunFolder(tmp_path), ports, make_target=lambda *_: UnclosableTarget(())
            )
            with pytest.raises(ServerFault, match="not restored"), opened:
                pass
            assert (f"WARNING: {other}" in lines) is warned


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (RunOptions("m", budget_seconds=3600.0), 360.0),
        (read_sweep_arguments(["m"]).options, 1800.0),
    ],
    ids=["run", "sweep"],
)
def test_a_tenth_of_the_budget_limits_the_loading_of_a_model_and_30_minutes_in_a_sweep(
    environment: Environment, tmp_path: Path, options: RunOptions, limit: float
) -> None:
    task = cast("Task", SimpleNamespace(**vars(task_with()), source=SimpleNamespace(models={})))
    limits = []

    def make_target(
        source: ModelSource, space: SearchSpace, options: RunOptions, settings: TargetSettings
    ) -> UnclosableTarget:
        limits.append(settings.model_load_timeout_seconds)
        return UnclosableTarget(())

    opened = replace(environment, options=options).open_target(task, RunFolder(tmp_path), make_target=make_target)
    with pytest.raises(ServerFault, match="not restored"), opened:
        pass
    assert limits == [limit]


def test_a_quota_is_what_the_server_had(environment: Environment) -> None:
    server = replace(environment, cpu_quota=1.5).server_resources(task_with())
    assert (server.server_cpus, server.cpu_quota, server.client_shares_cpus) == (1.5, 1.5, True)


@pytest.mark.parametrize(
    ("kind", "fault", "sees"),
    [
        ("KIND_GPU", "NVML: Unknown Error", True),
        ("KIND_CPU", "NVML: Unknown Error", False),
        ("KIND_AUTO", "NVML: Unknown Error", False),
        ("KIND_GPU", "", False),
    ],
)
def test_a_model_that_asks_for_a_gpu_gets_it_although_nvml_has_a_fault(
    environment: Environment, kind: str, fault: str, sees: bool
) -> None:
    group = ModelInstanceGroup(kind=ModelInstanceGroup.Kind.Value(kind))
    source = SimpleNamespace(models={"m": ModelConfig(instance_group=[group])})
    task = cast("Task", SimpleNamespace(**vars(task_with()), source=source))
    assert replace(environment, gpus=VisibleGpus(fault=fault)).server_sees_gpus(task) is sees


@pytest.mark.parametrize("target", ["embedded", "local"])
def test_a_step_that_a_backend_of_tritune_serves_is_noted(
    environment: Environment, target: TargetName, tmp_path: Path
) -> None:
    write_ensemble(tmp_path, 1.0)
    shutil.rmtree(tmp_path / "second")
    write_model(tmp_path, "second", CONFIG_OF_DOUBLER, doubler())
    options = RunOptions("chain", model_repository=str(tmp_path), target=target)
    task = prepare_task(options, HOST, print)
    notes = replace(environment, options=options).notes(task)
    assert notes.count(OwnBackend("onnxruntime")) == (target == "embedded")
    assert BatcherTuned("first") in [note for note in notes if not isinstance(note, DETAILS)], "it is always shown"


@pytest.mark.parametrize("rows", ["n", 1])
def test_an_onnx_file_without_a_batch_dimension_is_noted(
    environment: Environment, rows: str | int, tmp_path: Path
) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(serialized(doubler(dims=(rows, 4))))
    notes = environment.notes(prepare_task(RunOptions(str(file)), HOST, print))
    noted = [note for note in notes if isinstance(note, WithoutBatches) and not isinstance(note, DETAILS)]
    assert noted == ([WithoutBatches("the first dimension of 'x' is fixed")] if rows == 1 else [])


def test_the_error_for_unknown_sizes_says_why_a_file_has_no_batch_dimension(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    shapes = {"x": (TensorProto.FLOAT, ("n", 4)), "scale": (TensorProto.FLOAT, (1,))}
    node = helper.make_node("Mul", ["x", "scale"], ["y"])
    file.write_bytes(serialized(onnx_model([node], shapes, {"y": shapes["x"]})))
    with pytest.raises(BadInputError, match=r"input 'x' of net has dims \[-1, 4\]") as caught:
        prepare_task(RunOptions(str(file)), HOST, print)
    assert caught.value.__notes__ == [str(WithoutBatches("the first dimension of 'scale' is fixed"))]


def test_the_shares_of_the_load_are_noted(environment: Environment, tmp_path: Path) -> None:
    write_ensemble(tmp_path, 1.0)
    profile = tmp_path / "both.yaml"
    profile.write_text("model: {repository: ., name: first, concurrent_models: [second=3]}\n")
    task = prepare_task(RunOptions(str(profile)), HOST, print)
    assert SeveralModelsLoaded("first", (("second", 3.0),)) in environment.notes(task)
    assert problem_document(task)["concurrent_models"] == "second=3"
    replaced = prepare_task(RunOptions(str(profile), concurrent_models=("second=0.5",)), HOST, print)
    assert replaced.source.concurrent == {"second": 0.5}


def test_a_share_of_a_cluster_is_what_the_server_had(environment: Environment) -> None:
    share = CpuPlacement(frozenset({6, 7, 8}), frozenset({9}), ShareOfNode("4 CPUs", 1))
    server = replace(environment, node_placement=share).server_resources(task_with())
    assert (server.server_cpus, server.client_shares_cpus) == (3, False)
    assert server.server_cpu_list == server.client_cpu_list == "", "they differ between the nodes"


def test_cpus_to_choose_from_count_together(environment: Environment) -> None:
    assert environment.server_resources(task_with("0-3", "2-5")).server_cpu_list == "0-5"


def test_nothing_is_known_of_a_remote_server(environment: Environment) -> None:
    remote = replace(environment, options=RunOptions("m", target="remote", url="192.0.2.1:8001"))
    assert remote.server_resources(task_with()).server_cpus is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 12),
        ({"target": "remote", "url": "localhost:8001"}, 12),
        ({"target": "remote", "url": "192.0.2.1:8001"}, None),
    ],
)
def test_the_search_knows_the_cpus_of_a_server_on_this_machine(
    environment: Environment, tmp_path: Path, options: dict[str, str], expected: int | None
) -> None:
    write_sleeper(tmp_path, 1.0)
    of_sleeper = RunOptions("sleeper", model_repository=str(tmp_path), **options)  # type: ignore[arg-type]
    task = replace(environment, options=of_sleeper).make_task(fetch_server=False)
    assert task.problem.cpu_count == expected


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (2.9, 2), (64.0, 12), (None, 12)])
def test_the_search_has_only_the_cpus_of_a_quota(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quota: float | None,
    expected: int,
) -> None:
    write_sleeper(tmp_path, 1.0)
    options = RunOptions("sleeper", model_repository=str(tmp_path))
    limited = replace(environment, options=options, cpu_quota=quota)
    assert limited.make_task(fetch_server=False).problem.cpu_count == expected
