"""Serve the recommendation of a run to clients, until the user ends it (``tune serve``)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource, served_models
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, ServerCrashed
from optimizer.core.safe_text import one_line, show_path
from optimizer.deploy.server_process import dead_model_processes
from optimizer.deploy.target_settings import ServerPorts
from optimizer.measure.server_calls import open_client, unresponsive_server
from optimizer.measure.server_client import CallError, ServerClient
from optimizer.options.addresses import server_address
from optimizer.options.run_options import PROGRAM_TARGETS, RunOptions
from optimizer.results.finished_run import FinishedRun
from optimizer.store.run_folder import RunFolder
from optimizer.study.environment import Environment
from optimizer.study.task import Task

if TYPE_CHECKING:
    import psutil

FOLDER = "serve"  # holds the logs, in the folder of the run
CHECK_SECONDS = 1.0  # pause between two checks of the servers
UNLOAD_CHECK_SECONDS = 0.05  # pause between two checks whether a model has answered its last request
MIN_CALL_SECONDS = 0.1  # the limit of a call when the time for requests in flight has ended
RESPONSE_SECONDS = 0.3  # the server may still send the last responses for so long
SILENT_SECONDS = 30.0  # a server that responds to no check for so long hangs


@dataclass(frozen=True)
class RecommendedServer:
    """The running servers of a recommendation.

    Attributes:
        endpoint: How clients reach them.
        folder: The folder of their logs.
        models: The loaded models; each comes after those that it calls.
        forget_vanished: Makes the servers able to list their models after files next to these were removed.
    """

    endpoint: Endpoint
    folder: RunFolder
    models: tuple[str, ...]
    forget_vanished: Callable[[], None]


def check_can_be_served(run: RunFolder, options: RunOptions, server_processes: int) -> None:
    """Raise BadInputError, which says what to do, if the run was not measured on a server program of this machine."""
    path = show_path(run.path)
    if options.target == "docker":
        kind = "compose" if server_processes > 1 else "docker"
        raise BadInputError(
            f"{path}: was measured in a container of {options.docker_image}, and `tune serve` starts no containers; "
            f"`tune emit {path} --format {kind} --model-repository FOLDER --out DIR` writes the files that start it"
        )
    if options.target not in PROGRAM_TARGETS:
        raise BadInputError(
            f"{path}: was measured on the server at {server_address(options.url).host_port}, which tune does not "
            f"start; `tune emit {path}` writes the configuration for it"
        )


@contextlib.contextmanager
def recommended_server(
    run: FinishedRun,
    candidate: Candidate,
    configs: Mapping[str, ModelConfig],
    environment: Environment,
    choose_ports: Callable[[], tuple[ServerPorts, ...]],
    arguments: tuple[str, ...],
) -> Iterator[RecommendedServer]:
    """Serve ``candidate``, the recommendation of ``run``, within the context, on servers like those of its test.

    Args:
        run: The run.
        candidate: The recommended configuration.
        configs: The recommended config.pbtxt of each model, by name.
        environment: The environment on this machine with the options of the run.
        choose_ports: It returns the ports of each server. Called when the servers start, so that the ports are free.
        arguments: Further options of the servers; those that their version does not know are left out.

    Raises BadInputError if the model has changed since the run, else as a run.
    """
    task = environment.make_task()
    run.folder.refuse_other_model(task.source.facts)
    _refuse_other_configs(run.folder, task.source, candidate, configs)
    task = replace(task, problem=replace(task.problem, space=run.problem.space))  # its profile may have another one
    if differences := _other_machine(environment, task, run.folder):
        environment.on_progress(
            f"the run was measured with another device or server ({differences}); `tune verify --fresh "
            f"{show_path(run.folder.path)}` measures its recommendation here"
        )
    folder = RunFolder.create(str(run.folder.path), FOLDER)
    with (
        folder.locked(),  # so that `tune runs --delete` refuses the run
        environment.open_target(task, folder, choose_ports(), arguments) as target,
        target.deploy(candidate, fresh=True) as endpoint,
    ):
        models = tuple(served_models(task.source, candidate).configs)
        yield RecommendedServer(endpoint, folder, models, target.forget_vanished)


def wait_for_failure(endpoint: Endpoint) -> None:
    """Wait until a server of ``endpoint`` or the process of a model has ended, or a server hangs.

    Raises ServerCrashed then. Triton does not replace the process of a model, and fails all of its requests.
    """
    dead_before = frozenset[int]()
    while not (silent := unresponsive_server(endpoint, SILENT_SECONDS)):
        dead = frozenset[int]().union(*(dead_model_processes(server.server_pid) for server in endpoint.servers))
        if dead & dead_before:  # a process that Triton itself ends is a zombie for a moment
            raise ServerCrashed("the process of a model has died, and Triton does not replace it")
        dead_before = dead
        time.sleep(CHECK_SECONDS)
    raise ServerCrashed(f"{silent} no longer answers")


def complete_requests(server: RecommendedServer, limit_seconds: float) -> bool:
    """Make the servers refuse new requests and wait for those in flight; return whether all ended within the limit.

    Unloading the models does this. SIGTERM does not suffice: Triton 2.51 then waits until all clients have closed
    their HTTP connections, serves further requests on these, and aborts them at its ``--exit-timeout-secs``.

    Raises ServerCrashed, after the requests to the other servers, if a server died meanwhile.
    """
    deadline = time.monotonic() + limit_seconds
    endpoints, first = server.endpoint.servers, server.models[0]
    before = [_processes(endpoint.server_pid, with_models=False) for endpoint in endpoints]
    with contextlib.ExitStack() as closing:
        clients = [
            closing.enter_context(contextlib.closing(open_client(endpoint.connection))) for endpoint in endpoints
        ]
        # requests in flight to a model may still call those before it
        is_complete = all(
            _unload(model, server, clients, deadline, is_last=model == first) for model in reversed(server.models)
        )
    if is_complete:
        time.sleep(RESPONSE_SECONDS)
    _refuse_dead(endpoints, before)
    return is_complete


def _unload(
    model: str,
    server: RecommendedServer,
    clients: Sequence[ServerClient],
    deadline: float,
    *,
    is_last: bool,
) -> bool:
    """Unload ``model`` from each server and wait for its requests. Return False if some last beyond ``deadline``.

    ``deadline`` is monotonic time. If the model ``is_last``, the end of a model's process shows that it has none.
    """
    processes = [_processes(endpoint.server_pid, with_models=is_last) for endpoint in server.endpoint.servers]
    for client in clients:
        with contextlib.suppress(CallError):
            client.unload(model, _call_seconds(deadline))
    while any(
        _has_requests(model, client, server_processes, _call_seconds(deadline))
        for client, server_processes in zip(clients, processes, strict=True)
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(UNLOAD_CHECK_SECONDS)
        server.forget_vanished()
    return True


def _call_seconds(deadline: float) -> float:
    """Return the limit of a call: a server that hangs does not prolong the end by more than MIN_CALL_SECONDS."""
    return max(deadline - time.monotonic(), MIN_CALL_SECONDS)


def _refuse_dead(servers: Sequence[Endpoint], processes: Sequence[Sequence[psutil.Process]]) -> None:
    """Raise ServerCrashed if a server has died. ``processes`` are those of each server before the unloading.

    A server that got SIGTERM as well has completed its requests, and has ended with the exit code 0.
    """
    for server, server_processes in zip(servers, processes, strict=True):
        if server.server_pid is None or (
            server_processes and all(process.is_running() for process in server_processes)
        ):
            continue
        ended = os.waitid(os.P_PID, server.server_pid, os.WEXITED | os.WNOWAIT)  # the target reads it once more
        if ended and (ended.si_code != os.CLD_EXITED or ended.si_status):
            raise ServerCrashed("", doing="completing the requests in flight")


def _processes(server_pid: int | None, *, with_models: bool) -> list[psutil.Process]:
    """Return the process of the server below ``server_pid``, and those of its models; empty if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        servers = psutil.Process(server_pid).children() if server_pid else []
        return servers + [child for server in servers if with_models for child in server.children()]
    return []


def _has_requests(
    model: str, client: ServerClient, processes: Sequence[psutil.Process], timeout_seconds: float
) -> bool:
    """Return whether a server may have requests in flight to ``model``, which is being unloaded.

    ``processes`` are those of the server when the unload began. A model in Python ends its processes one after
    another, about a second each, after it has answered its last request: the end of the first one is enough.
    """
    if not processes or not all(process.is_running() for process in processes):
        return False
    try:
        return client.holds(model, timeout_seconds)
    except CallError:  # a server that got SIGTERM too refuses calls while it completes its requests
        return True


def _refuse_other_configs(
    run: RunFolder, source: ModelSource, candidate: Candidate, configs: Mapping[str, ModelConfig]
) -> None:
    """Raise BadInputError if the model would be served with other settings than the run recommends.

    Those that the search does not vary come from the config.pbtxt of the model, which may have been edited.
    """
    served = served_models(source, candidate).configs
    if changed := sorted(name for name in {*served, *configs} if served.get(name) != configs.get(name)):
        raise BadInputError(
            f"{show_path(run.best)}: the configuration of {one_line(', '.join(changed))} has changed since the "
            "run; restore config.pbtxt in the model repository, or run `tune` again"
        )


def _other_machine(environment: Environment, task: Task, run: RunFolder) -> str:
    """Return how device and server differ from those of the run, as text; empty if they are the same."""
    measured_on = run.fingerprint()
    if measured_on is None:
        return ""
    fingerprint = environment.fingerprint(task)
    return replace(fingerprint, perf_analyzer="").differences(replace(measured_on, perf_analyzer=""))
