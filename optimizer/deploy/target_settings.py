"""The settings that a run passes to a target, among them the ports of its servers and the limit of a load."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optimizer.core.errors import BadInputError
from optimizer.core.stopwatch import Stopwatch
from optimizer.options.addresses import MAX_PORT

LOOPBACK = "127.0.0.1"
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002  # Triton's own
PORT_STEP = 10  # between the ports of two server processes
MODEL_LOAD_TIMEOUT_SECONDS = 120.0  # the default
MIN_MODEL_LOAD_TIMEOUT_SECONDS = 5.0  # with a shorter budget the baseline is measured nevertheless
MODEL_LOAD_SHARE = 0.1  # of the budget: a run needs about ten loads, four of them on the fresh servers of a verdict


@dataclass(frozen=True)
class ServerPorts:
    """The ports of a server."""

    http: int = HTTP_PORT
    grpc: int = GRPC_PORT
    metrics: int = METRICS_PORT


def port_problem(port: int) -> str:
    """Return why no server can listen on ``port`` of LOOPBACK; empty if one can."""
    if port > MAX_PORT:
        return f"the largest port is {MAX_PORT}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not occupy it, as for Triton
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
    return ""


def choose_ports(
    processes: int, user_ports: Mapping[str, int], find_problem: Callable[[int], str] = port_problem
) -> tuple[ServerPorts, ...]:
    """Return the ports of each of ``processes`` servers on LOOPBACK.

    ``user_ports`` are the ports of the first server that the user chose, by their field of ServerPorts. Another port
    is Triton's own if that is free, otherwise any free one. The ports of each further server are PORT_STEP higher.
    ``find_problem`` returns why a port cannot be used, see ``port_problem``.

    Raises BadInputError, which names the option, for a chosen port that cannot be used.
    """
    first_server = ServerPorts(**user_ports)
    reserved = {port + PORT_STEP * position for position in range(processes) for port in user_ports.values()}
    used_ports, server_ports = set[int](), list[ServerPorts]()
    for position in range(processes):
        ports = {}
        for name, first in vars(first_server).items():
            port = first + PORT_STEP * position
            unusable = used_ports if name in user_ports else used_ports | reserved
            problem = "it is given twice" if port in unusable else find_problem(port)
            if problem and name in user_ports:
                where = f"port {port} of server process {position + 1}" if position else f"port {port}"
                raise BadInputError(f"--{name}-port {first}: {where} cannot be used ({problem}); give another")
            ports[name] = _free_port_except(used_ports | reserved) if problem else port
            used_ports.add(ports[name])
        server_ports.append(ServerPorts(**ports))
    return tuple(server_ports)


def free_port() -> int:
    """Return a free TCP port of LOOPBACK. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _free_port_except(used_ports: set[int]) -> int:
    return next(port for port in iter(free_port, None) if port not in used_ports)


@dataclass(frozen=True)
class TargetSettings:
    """The settings of a target in addition to the model and the options.

    Attributes:
        log: The file that gets the server's output.
        cpus: The CPUs of the server; None for all.
        sees_gpus: Whether a server on this machine sees the GPUs that this process sees. Without, it sees none, and a
            model without a fixed device is served on the CPU.
        metrics: The address of the metrics of a server on another machine; empty if it has none.
        stopwatch: It counts the time that the server takes.
        on_progress: It gets one line for each slow preparation.
        ports: The ports of each server on this machine, for clients of the user; without them, any free ones.
        choose_port: Return a port for a server without ``ports``; called for each port at each start.
        arguments: Further options of a server on this machine; those that its version does not know are left out.
        exports_metrics: Whether a server of this machine exports the metrics of its models also if it has no
            ``ports`` and no model has metrics that tune reads. NVML provides the data of GPUs.
        model_load_timeout_seconds: The limit of the start of the server, and of the loading of a model.
    """

    log: Path
    cpus: frozenset[int] | None = None
    sees_gpus: bool = True
    metrics: str = ""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    on_progress: Callable[[str], None] = print
    ports: tuple[ServerPorts, ...] = ()
    choose_port: Callable[[], int] = free_port
    arguments: tuple[str, ...] = ()
    exports_metrics: bool = False
    model_load_timeout_seconds: float = MODEL_LOAD_TIMEOUT_SECONDS


def model_load_timeout_within(budget_seconds: float) -> float:
    """Return ``model_load_timeout_seconds`` for a run with this budget.

    A large budget permits more than the default: a backend may compile its kernels or build a TensorRT engine.
    """
    shortest = min(MODEL_LOAD_TIMEOUT_SECONDS, budget_seconds)
    return max(MIN_MODEL_LOAD_TIMEOUT_SECONDS, shortest, MODEL_LOAD_SHARE * budget_seconds)
