"""Tests of which of several servers is named as the cause of a crash, and which are stopped, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, ServerCrashed, TuneError
from optimizer.deploy.managed_target import ManagedTarget
from optimizer.deploy.several_servers import ServerProcesses


@dataclass
class TargetWithoutProcess(ManagedTarget):
    """A target whose server is only its state: it can be dead, have a logged error or refuse to serve."""

    source: ModelSource
    log: Path
    dies: bool = False
    logs_error: bool = False
    refuses: bool = False
    runs: bool = False

    def launch(self, candidate: Candidate, position: int = 0) -> None:
        self.runs = True

    def serve(self, candidate: Candidate, *, from_files: bool = False) -> Endpoint:
        if self.refuses:
            raise DeploymentError("no memory", log=self.log, lacks_gpu_memory=True)
        return Endpoint("sums", candidate)

    def responds(self) -> bool:
        return not self.dies

    def has_logged_error(self) -> bool:
        return self.logs_error

    def stop_after_crash(self, error: ServerCrashed) -> ServerCrashed:
        self.runs = False
        return ServerCrashed("tritonserver died" if self.dies else str(error), log=self.log)

    def stop(self) -> None:
        self.runs = False


@pytest.fixture
def targets(tmp_path: Path) -> list[TargetWithoutProcess]:
    source = ModelSource(tmp_path, "sums", ModelConfig(name="sums"))
    return [TargetWithoutProcess(source, tmp_path / f"{number}.log") for number in (1, 2)]


def crash_error(targets: Sequence[TargetWithoutProcess]) -> ServerCrashed:
    """Return the error after one of the load generator while ``targets`` serve."""
    candidate = Candidate(8, fields=((SERVER_PROCESSES, len(targets)),))
    with pytest.raises(ServerCrashed) as caught, ServerProcesses(targets).deploy(candidate):
        raise ServerCrashed("no answer")
    return caught.value


def causes(error: BaseException) -> list[BaseException]:
    """Return the errors that led to ``error``; an endless chain fails."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        assert cause not in chain
        chain.append(cause)
    return chain


@pytest.mark.parametrize(
    ("dead", "erring", "message", "log"),
    [
        ((2,), (), "server process 2 of 2: tritonserver died", "2.log"),
        ((1, 2), (), "server process 1 of 2: tritonserver died", "1.log"),
        ((2,), (1,), "server process 2 of 2: tritonserver died", "2.log"),
        ((), (2,), "server process 2 of 2: no answer", "2.log"),
        ((), (1, 2), "no answer", "1.log"),
        ((), (), "no answer", "1.log"),
    ],
    ids=["dead", "both dead", "a dead one first", "one error", "two errors", "nothing"],
)
def test_one_server_is_blamed_and_all_stop(
    targets: list[TargetWithoutProcess], dead: tuple[int, ...], erring: tuple[int, ...], message: str, log: str
) -> None:
    for number, target in enumerate(targets, 1):
        target.dies, target.logs_error = number in dead, number in erring
    error = crash_error(targets)
    assert str(error) == message
    assert error.log
    assert error.log.name == log
    assert not any(target.runs for target in targets), "a server that hangs would fail the next attempt, too"
    assert [str(cause) for cause in causes(error)] == [message, "no answer"]


def test_a_single_server_has_no_number(targets: list[TargetWithoutProcess]) -> None:
    targets[0].dies = True
    assert str(crash_error(targets[:1])) == "tritonserver died"
    assert not targets[0].runs


@pytest.mark.parametrize(("count", "message"), [(1, "no memory"), (2, "server process 1 of 2: no memory")])
def test_a_server_that_refuses_is_named(targets: list[TargetWithoutProcess], count: int, message: str) -> None:
    targets[0].refuses = True
    candidate = Candidate(8, fields=((SERVER_PROCESSES, count),))
    with pytest.raises(TuneError) as caught, ServerProcesses(targets).deploy(candidate):
        pass
    assert [str(cause) for cause in causes(caught.value)] == [message, "no memory"][-count:]
    assert isinstance(caught.value, DeploymentError)
    assert caught.value.lacks_gpu_memory
