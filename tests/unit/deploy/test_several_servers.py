"""Which of several servers is blamed for a crash, and which are stopped: servers that only play their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.model_source import ModelSource
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, ServerCrashed, TuneError
from optimizer.core.trial import SERVER_PROCESSES, Candidate
from optimizer.deploy.managed_target import ManagedTarget
from optimizer.deploy.several_servers import ServerProcesses


@dataclass
class PlayedTarget(ManagedTarget):
    """The target of a server without a process; it can be dead, have a logged error or refuse to serve."""

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
def played(tmp_path: Path) -> list[PlayedTarget]:
    source = ModelSource(tmp_path, "sums", ModelConfig(name="sums"))
    return [PlayedTarget(source, tmp_path / f"{number}.log") for number in (1, 2)]


def crash(targets: Sequence[PlayedTarget]) -> ServerCrashed:
    """Return the error after one of the load generator while ``targets`` serve."""
    candidate = Candidate(8, fields=((SERVER_PROCESSES, len(targets)),))
    with pytest.raises(ServerCrashed) as caught, ServerProcesses(targets).deploy(candidate):
        raise ServerCrashed("no answer")
    return caught.value


def causes(error: BaseException) -> list[BaseException]:
    """Return the errors that led to ``error``; an endless chain fails."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        assert cause not in found
        found.append(cause)
    return found


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
    played: list[PlayedTarget], dead: tuple[int, ...], erring: tuple[int, ...], message: str, log: str
) -> None:
    for number, target in enumerate(played, 1):
        target.dies, target.logs_error = number in dead, number in erring
    error = crash(played)
    assert str(error) == message
    assert error.log
    assert error.log.name == log
    assert not any(target.runs for target in played), "a server that hangs would fail the next attempt, too"
    assert [str(cause) for cause in causes(error)] == [message, "no answer"]


def test_a_single_server_has_no_number(played: list[PlayedTarget]) -> None:
    played[0].dies = True
    assert str(crash(played[:1])) == "tritonserver died"
    assert not played[0].runs


@pytest.mark.parametrize(("count", "message"), [(1, "no memory"), (2, "server process 1 of 2: no memory")])
def test_a_server_that_refuses_is_named(played: list[PlayedTarget], count: int, message: str) -> None:
    played[0].refuses = True
    candidate = Candidate(8, fields=((SERVER_PROCESSES, count),))
    with pytest.raises(TuneError) as caught, ServerProcesses(played).deploy(candidate):
        pass
    assert [str(cause) for cause in causes(caught.value)] == [message, "no memory"][-count:]
    assert isinstance(caught.value, DeploymentError)
    assert caught.value.lacks_gpu_memory
