"""Checks of whether a server responds."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from optimizer.core.endpoint import Endpoint
from optimizer.measure.inference import open_client
from optimizer.measure.server_client import CALL_SECONDS, CallError, ServerClient

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient


PROBE_SECONDS = 5.0  # even under the heaviest load a server answers within a fraction of this


def is_live(client: InferenceServerClient) -> bool:
    """Return whether the server reports within PROBE_SECONDS that it is live."""
    from tritonclient.utils import InferenceServerException

    try:
        return bool(client.is_server_live(client_timeout=PROBE_SECONDS))
    except InferenceServerException:
        return False


def is_responding(client: ServerClient, timeout_seconds: float = CALL_SECONDS) -> bool:
    """Return whether the server responds, even if it denies or refuses the health check."""
    try:
        client.check(timeout_seconds)
    except CallError as error:
        return error.failure in ("denied", "refused")
    return True


def is_alive(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> bool:
    """Return whether each server of ``endpoint`` responds within ``seconds``."""
    return not silent_server(endpoint, seconds)


def silent_server(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> str:
    """Return the name of the first server of ``endpoint`` that does not respond within ``seconds``, else nothing."""
    servers = endpoint.servers
    for number, server in enumerate(servers, 1):
        with closing(open_client(server.connection)) as client:
            if not is_responding(client, seconds):
                return f"server process {number} of {len(servers)}" if endpoint.replicas else "the server"
    return ""
