"""The place of a remote server: this machine, a machine behind a tunnel, or another one."""

from __future__ import annotations

import ipaddress

import psutil

from optimizer.deploy.target_settings import METRICS_PORT
from optimizer.options.addresses import server_address
from optimizer.options.run_options import RunOptions

SERVER_PROGRAM = "tritonserver"  # the name of its processes begins with it


def listener_pid(address: str) -> int | None:
    """Return the id of the tritonserver that listens at ``host:port`` of this machine's loopback.

    Returns None if the address is on another machine, or if another program or a process of another user listens.
    """
    pid = _listener(address)
    return pid if pid is not None and _is_server(pid) else None


def is_tunnel(address: str) -> bool:
    """Return whether another program than tritonserver listens at ``host:port`` of this machine's loopback.

    It passes the requests on, as ``ssh -L``, ``kubectl port-forward`` and a container engine's proxy do, perhaps to
    another machine.
    """
    pid = _listener(address)
    return pid is not None and not _is_server(pid)


def _is_server(pid: int) -> bool:
    try:
        return psutil.Process(pid).name().startswith(SERVER_PROGRAM)
    except psutil.Error:
        return False


def _listener(address: str) -> int | None:
    """Return the id of the process that listens at ``address``; None if it is unknown or on another machine."""
    if not is_loopback(address):
        return None
    try:
        sockets = [socket for socket in psutil.net_connections("tcp") if socket.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return None
    port = int(address.rpartition(":")[2])
    return next((socket.pid for socket in sockets if socket.laddr and socket.laddr.port == port), None)


def is_loopback(address: str) -> bool:
    """Return whether the host of ``host:port`` is ``localhost`` or a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def metrics_address(options: RunOptions) -> str:
    """Return the address of the metrics of a remote server."""
    host = server_address(options.url).host_port.rpartition(":")[0]
    return options.metrics_url or f"{host}:{METRICS_PORT}"


def other_machine_address(options: RunOptions) -> str:
    """Return the address of a server on another machine or behind a tunnel; empty if the server runs on this one.

    ``--target remote`` with an address on loopback names a server on this machine, unless a tunnel listens there.
    """
    address = server_address(options.url).host_port
    is_here = is_loopback(address) and not is_tunnel(address)
    return "" if options.target != "remote" or is_here else address
