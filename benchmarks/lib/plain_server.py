"""A tritonserver that is started from a config.pbtxt with Triton's own options only, and perf_analyzer for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

from optimizer.config import model_config
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint, SharedMemory
from optimizer.core.process import SupervisedProcess
from optimizer.deploy.embedded_target import embedded_installation
from optimizer.deploy.installed_server import ServerFolder
from optimizer.deploy.managed_target import auto_complete_options
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.server_log import ServerLog
from optimizer.deploy.target_settings import free_port
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.options.values import parse_cpus
from optimizer.study.task import Task

START_SECONDS = 180.0  # a model of 8 GB that is copied to a GPU
CHECK_SECONDS = 0.2
CALL_SECONDS = 2.0


class NotReadyError(RuntimeError):
    """Raised if the server is not ready in time; the message has the error in its log."""


@contextlib.contextmanager
def plain_server(
    task: Task, config: str, installed: Runtime, log: Path, cpus: frozenset[int] | None = None
) -> Iterator[Endpoint]:
    """Serve the model of ``task`` with ``config``, the text of a config.pbtxt, on a new server.

    The server loads all of its repository at its start, as Triton does by default. ``installed`` has the program and
    its backends; ``log`` gets its output. It runs on ``cpus``; None for all. Raises NotReadyError.
    """
    installation = embedded_installation(installed)
    folder = ServerFolder(task.source, installation)
    name, http, grpc = task.source.name, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    try:
        folder.repository.joinpath(name, "config.pbtxt").write_text(config)
        command: list[str | Path] = [
            installation.tritonserver,
            f"--model-repository={folder.repository}",
            f"--backend-directory={folder.backends}",
            f"--backend-config=python,shm-region-prefix-name={folder.shared_memory_prefix}",
            *(f"--{protocol}-address=127.0.0.1" for protocol in ("http", "grpc")),
            *(f"--{name}-port={at.rpartition(':')[2]}" for name, at in (("http", http), ("grpc", grpc))),
            "--allow-metrics=false",
            *auto_complete_options(task.source.models.values()),
        ]
        with SupervisedProcess(
            command,
            log=log,
            env=installation.environment,
            cwd=folder.packages,
            cpus=cpus,
            shm_patterns=(f"{folder.shared_memory_prefix}*",),
        ) as process:
            _wait_until_ready(process, grpc, name)
            yield Endpoint(name, candidate_of(task, config), grpc, http, process.pid)
    finally:
        folder.remove()


def perf_analyzer_for(
    task: Task,
    installed: Runtime,
    log: Path,
    cpus: frozenset[int] | None = None,
    shared_memory: SharedMemory | None = None,
) -> PerfAnalyzer:
    """Return perf_analyzer with the requests of ``task``, on ``cpus``; ``log`` gets its output."""
    return PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        log,
        input_data=task.input_data,
        shapes=task.shapes,
        repeat=False,
        cpus=cpus,
        shared_memory=shared_memory,
    )


def recorded_cpus(text: str) -> frozenset[int] | None:
    """Return the CPUs of ``server_cpu_list`` or ``client_cpu_list`` in run.json; None for all."""
    return parse_cpus(text) if text else None


def candidate_of(task: Task, config: str) -> Candidate:
    """Return the settings of a config.pbtxt that are dimensions of the search space of ``task``."""
    parsed = text_format.Parse(config, ModelConfig())
    return model_config.candidate_of(parsed, tuple(task.problem.space.fields))


def _wait_until_ready(process: SupervisedProcess, address: str, model: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    with contextlib.closing(InferenceServerClient(address)) as client:
        while time.monotonic() < deadline and process.exit_code() is None:
            with contextlib.suppress(InferenceServerException):
                if client.is_model_ready(model, client_timeout=CALL_SECONDS):
                    return
            time.sleep(CHECK_SECONDS)
    raise NotReadyError(f"the plain server is not ready: {ServerLog(process.log).startup_failure()}")
