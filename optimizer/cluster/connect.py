"""The connection to a Ray cluster, and what is wrong with one in a line."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from optimizer.arguments.cluster import AUTO, SCHEME
from optimizer.errors import EnvironmentFault
from optimizer.interrupts import SIGNALS
from optimizer.untrusted import one_line

REACH_SECONDS = 5.0


def import_ray() -> Any:
    """Raises EnvironmentFault where it is not installed."""
    try:
        import ray
    except ImportError:
        raise EnvironmentFault("--cluster needs Ray: pip install 'tritune[ray]', here and on each node") from None
    return ray


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ray, connected to the cluster at ``address``. Raises EnvironmentFault where there is none, or one of
    another version."""
    ray = import_ray()
    if address != AUTO:
        _reach(address)
    with _quiet():
        try:
            with _own_signals():
                ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:  # of a client that cannot connect anything may come
            raise EnvironmentFault(f"--cluster {address}: {told(error)}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def told(error: Exception) -> str:
    """Why there is no connection, and what mends it."""
    text = str(error)
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "ersion mismatch" in text and len(versions) == 2:
        (ray_there, python_there), (ray_here, python_here) = versions
        return (
            f"the cluster has Ray {ray_there} on Python {python_there}, and here it is Ray {ray_here} on Python "
            f"{python_here}; install the cluster's here"
        )
    if isinstance(error, ConnectionError) and "any running Ray" in text:
        return "this machine is part of no Ray cluster; `ray start --head` begins one, or give ray://HOST:PORT"
    return f"cannot connect: {one_line(' '.join(text.split()), 200)}; `ray status` on a node tells how the cluster is"


def _reach(address: str) -> None:
    """Ray's own attempt takes half a minute."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise EnvironmentFault(
            f"--cluster {address}: nobody answers ({one_line(why, 100)}); is the head node up (`ray start --head`), "
            "and is that the port of its Ray Client server, 10001 if it was told none?"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray tells of dead workers on standard output, which may be a document, whatever it is asked."""
    from ray._private import worker

    before = getattr(worker, "_worker_logs_enabled", True)
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Those that Ray takes over are given back."""
    own = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in own.items():
                signal.signal(signum, handler)
