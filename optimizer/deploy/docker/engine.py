"""The Docker engine of this machine, through the docker SDK for Python: reached, understood, tidied up."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from optimizer.deploy.leftovers import read_owner
from optimizer.errors import EnvironmentFault
from optimizer.server_health import shortened

if TYPE_CHECKING:
    from docker import DockerClient

OWNER = "tritune.owner"  # the label of every container of ours: the process that started it
USUAL = "unix:///var/run/docker.sock"
CALL_SECONDS = 60
ON_THIS_MACHINE = ("http", "https", "http+docker"), (None, "localhost", "127.0.0.1", "::1")

# what an engine, or the way to it, says (Docker, containerd, runc, NVIDIA's toolkit, Podman): what that means
MEANINGS = (
    (
        r"PermissionError|permission denied.{0,80}(docker daemon|sock\b)",
        "no permission for Docker's socket ({where}); join its group (sudo usermod -aG docker $USER, then log in "
        "again), or use rootless Docker",
    ),
    (
        r"FileNotFoundError|Connection ?refused|Connection aborted|RemoteDisconnected|Broken pipe|Max retries",
        "Docker does not run at {where}; start it (systemctl start docker), or set DOCKER_HOST",
    ),
    (r"timed out", "Docker does not answer at {where}; see to it (systemctl status docker)"),
    (r"bind address format", f"DOCKER_HOST {{where}}: not an address; write one such as {USUAL}"),
    (r"fetching server API version", "no Docker answers at {where} ({said}); set DOCKER_HOST to its address"),
    (r"no such image|image not known|ImageNotFound", "Docker has no image {image}; fetch it: docker pull {image}"),
    (
        r"could not select device driver|nvidia-container|libnvidia|nvidia\.com/gpu|unknown device|\bCDI\b",
        "Docker gives the container no GPU ({said}); install the NVIDIA Container Toolkit and restart Docker, or "
        "leave the GPUs out",
    ),
    (
        r"executable file not found|exec: .{0,80}no such file",
        "the image {image} has no such command ({said}); name one in which it is on PATH, as in NVIDIA's images",
    ),
    (
        r"port is already allocated|address already in use",
        "a port was taken by another process meanwhile ({said}); try again",
    ),
    (
        r"bind source path does not exist|statfs .{1,300}no such file",
        "Docker does not see a folder of this machine ({said}); set TMPDIR to one that it sees, or see to its mount",
    ),
    (
        r"no space left|disk quota exceeded",
        "Docker has no space left; free some (docker system df tells where)",
    ),
)


def connect(base_url: str | None = None) -> DockerClient:
    """The engine at ``base_url``, by default the one that the ``docker`` command would ask.

    Raises EnvironmentFault where it does not answer, may not be asked, or is on another machine.
    """
    try:
        import docker
    except ImportError:
        mend = "pip install 'tritune[docker]'"
        raise EnvironmentFault(f"the docker target needs the docker SDK for Python; {mend}") from None
    with refusals_told(where=base_url):
        if base_url is None:
            client = docker.from_env(timeout=CALL_SECONDS)
        else:
            client = docker.DockerClient(base_url=base_url, timeout=CALL_SECONDS)
        client.ping()
    schemes, hosts = ON_THIS_MACHINE
    where = urlsplit(client.api.base_url)
    if where.scheme not in schemes or where.hostname not in hosts:
        client.close()
        raise EnvironmentFault(
            f"the Docker engine at {shortened(client.api.base_url)} is on another machine, and cannot see this one's "
            "files; run tune there"
        )
    return client


@contextlib.contextmanager
def refusals_told(image: str = "", where: str | None = None) -> Iterator[None]:
    """What the SDK raises comes out as EnvironmentFault: one line, with what mends it. ``where`` as ``base_url``."""
    try:
        yield
    except sdk_errors() as error:
        raise EnvironmentFault(meaning(said_by(error), image, where)) from error


def sdk_errors() -> tuple[type[Exception], ...]:
    """What the SDK raises."""
    from docker.errors import DockerException
    from requests import RequestException

    return DockerException, RequestException


def said_by(error: Exception) -> str:
    """The engine's own words where there are some."""
    return str(getattr(error, "explanation", None) or error)


def meaning(said: str, image: str, where: str | None = None) -> str:
    """What ``said`` means, and what mends it."""
    where = shortened(where or os.environ.get("DOCKER_HOST") or USUAL)
    for pattern, words in MEANINGS:
        if re.search(pattern, said, re.IGNORECASE | re.DOTALL):
            return words.format(image=image, said=shortened(said), where=where)
    return f"Docker refuses: {shortened(said)}; its own log may tell more (journalctl -u docker)"


def remove_left_containers(client: DockerClient) -> None:
    """Remove the containers of processes that no longer exist. Raises EnvironmentFault."""
    with refusals_told():
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            owner = read_owner(container.labels.get(OWNER, ""))
            if owner is not None and owner.is_gone():
                remove(client, container.id)


def remove_named(client: DockerClient, beginning: str) -> None:
    """Remove the containers of ours whose names begin so. Raises EnvironmentFault."""
    with refusals_told():
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            if container.name.startswith(f"{beginning}-"):
                remove(client, container.id)


def image_id(image: str, base_url: str | None = None) -> str:
    """As the engine names its contents, short. Raises EnvironmentFault where the engine does not answer or does not
    have it."""
    with contextlib.closing(connect(base_url)) as client, refusals_told(image):
        return str(client.images.get(image).short_id)


def remove(client: DockerClient, name: str) -> None:
    """Kill and remove a container; no effect where there is none."""
    from docker.errors import APIError

    try:
        client.api.remove_container(name, force=True, v=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # gone, or going
            raise
