"""The Docker engine of this machine: connecting to it, explaining its errors, and removing containers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from optimizer.core.errors import EnvironmentFault
from optimizer.core.process_owner import read_owner
from optimizer.core.safe_text import shorten

if TYPE_CHECKING:
    from docker import DockerClient


OWNER = "tritune.owner"  # the label of a container with the process that started it
DEFAULT_SOCKET = "unix:///var/run/docker.sock"
CALL_SECONDS = 60
# an engine on this machine has an address of one of these schemes and hosts
LOCAL_SCHEMES, LOCAL_HOSTS = ("http", "https", "http+docker"), (None, "localhost", "127.0.0.1", "::1")

# Patterns of error texts (of Docker, containerd, runc, NVIDIA's toolkit, Podman), and the message to the user.
EXPLANATIONS = (
    (
        r"PermissionError|permission denied.{0,80}(docker daemon|sock\b)",
        "no permission for Docker's socket ({where}); join its group (sudo usermod -aG docker $USER, then log in "
        "again), or use rootless Docker",
    ),
    (
        r"FileNotFoundError|Connection ?refused|Connection aborted|RemoteDisconnected|Broken pipe|Max retries",
        "Docker does not run at {where}; start it (systemctl start docker), or set DOCKER_HOST",
    ),
    (r"timed out", "Docker does not answer at {where}; check it (systemctl status docker)"),
    (r"bind address format", f"DOCKER_HOST {{where}}: not an address; write one such as {DEFAULT_SOCKET}"),
    (r"fetching server API version", "no Docker answers at {where} ({error}); set DOCKER_HOST to its address"),
    (r"no such image|image not known|ImageNotFound", "Docker has no image {image}; pull it: docker pull {image}"),
    (
        r"could not select device driver|nvidia-container|libnvidia|nvidia\.com/gpu|unknown device|\bCDI\b",
        "Docker gives the container no GPU ({error}); install the NVIDIA Container Toolkit and restart Docker, or "
        "leave the GPUs out",
    ),
    (
        r"executable file not found|exec: .{0,80}no such file",
        "the image {image} has no such command ({error}); name one in which it is on PATH, as in NVIDIA's images",
    ),
    (
        r"port is already allocated|address already in use",
        "a port was taken by another process meanwhile ({error}); try again",
    ),
    (
        r"bind source path does not exist|statfs .{1,300}no such file",
        "Docker does not see a folder of this machine ({error}); set TMPDIR to one that it sees, or check its mount",
    ),
    (
        r"no space left|disk quota exceeded",
        "Docker has no space left; free some (docker system df tells where)",
    ),
)


def connect(base_url: str | None = None) -> DockerClient:
    """Return a client of the engine at ``base_url``, by default the engine of the ``docker`` command.

    Raises EnvironmentFault if it does not answer, denies access, or is on another machine.
    """
    try:
        import docker
    except ImportError:
        raise EnvironmentFault(
            "the docker target needs the docker SDK for Python; pip install 'tritune[docker]'"
        ) from None
    with translated_errors(where=base_url):
        if base_url is None:
            client = docker.from_env(timeout=CALL_SECONDS)
        else:
            client = docker.DockerClient(base_url=base_url, timeout=CALL_SECONDS)
        client.ping()
    address = urlsplit(client.api.base_url)
    if address.scheme not in LOCAL_SCHEMES or address.hostname not in LOCAL_HOSTS:
        client.close()
        raise EnvironmentFault(
            f"the Docker engine at {shorten(client.api.base_url)} is on another machine, and cannot see this one's "
            "files; run tune there"
        )
    return client


@contextlib.contextmanager
def translated_errors(image: str = "", where: str | None = None) -> Iterator[None]:
    """Translate errors of the SDK into an EnvironmentFault with one line of advice; ``where`` is the base URL."""
    try:
        yield
    except sdk_errors() as error:
        raise EnvironmentFault(explain_error(error_text(error), image, where)) from error


def sdk_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the errors that the SDK raises."""
    from docker.errors import DockerException
    from requests import RequestException

    return DockerException, RequestException


def error_text(error: Exception) -> str:
    """Return the engine's explanation, or else the text of the error."""
    return str(getattr(error, "explanation", None) or error)


def engine_address() -> str:
    """Return the address of the engine of the ``docker`` command, from DOCKER_HOST or the current Docker context."""
    from docker.context import ContextAPI

    return os.environ.get("DOCKER_HOST") or ContextAPI.kwargs_from_context().get("base_url") or DEFAULT_SOCKET


def explain_error(text: str, image: str, where: str | None = None) -> str:
    """Return an explanation of the error ``text`` with advice."""
    where = shorten(where or engine_address())
    for pattern, explanation in EXPLANATIONS:
        if re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            return explanation.format(image=image, error=shorten(text), where=where)
    return f"Docker refuses: {shorten(text)}; its log may have details (journalctl -u docker)"


def remove_orphaned_containers(client: DockerClient) -> None:
    """Remove the containers of processes that no longer exist. Raises EnvironmentFault."""
    with translated_errors():
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            owner = read_owner(container.labels.get(OWNER, ""))
            if owner is not None and owner.has_ended():
                remove(client, container.id)


def remove_named(client: DockerClient, prefix: str) -> None:
    """Remove tune's containers whose names start with ``prefix``. Raises EnvironmentFault."""
    with translated_errors():
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            if container.name.startswith(f"{prefix}-"):
                remove(client, container.id)


def image_id(image: str) -> str:
    """Return the short id of an image. Raises EnvironmentFault if the engine does not answer or lacks the image."""
    with contextlib.closing(connect()) as client, translated_errors(image):
        return str(client.images.get(image).short_id)


def remove(client: DockerClient, name: str) -> None:
    """Kill and remove a container; no effect if it does not exist."""
    from docker.errors import APIError

    try:
        client.api.remove_container(name, force=True, v=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # removed already, or being removed
            raise
