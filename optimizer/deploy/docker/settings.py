"""What a container is given: files, ports, GPUs, limits. Read from text as the ``docker`` command takes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from optimizer.errors import BadInputError
from optimizer.machine import cpus as cpu_lists
from optimizer.untrusted import one_line

LOOPBACK = "127.0.0.1"
NO_GPUS, ALL_GPUS = "none", "all"
# NVIDIA's advice for its images
SHM_SIZE = "1g"
ULIMITS = ("memlock=-1", "stack=67108864")


@dataclass(frozen=True, slots=True)
class Bind:
    """``source`` of this machine, seen at ``at`` in the container."""

    source: Path
    at: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Ulimit:
    name: str
    soft: int
    hard: int


@dataclass(frozen=True)
class ContainerSettings:
    """``ports`` are the container's, published at free ones of loopback; ``gpus`` are ids, or ``all`` alone."""

    binds: tuple[Bind, ...] = ()
    ports: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    shm_size: str = ""
    ulimits: tuple[Ulimit, ...] = ()
    cpus: frozenset[int] | None = None
    host_network: bool = False
    user: str = ""
    folder: str = ""
    entrypoint: str = ""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the SDK's ``containers.create``."""
        from docker import types

        every = {"count": -1} if self.gpus == (ALL_GPUS,) else {"device_ids": list(self.gpus)}
        mounts = [types.Mount(one.at, str(one.source), type="bind", read_only=one.read_only) for one in self.binds]
        found: dict[str, Any] = {
            "mounts": mounts,
            "ports": {f"{port}/tcp": (LOOPBACK, None) for port in self.ports},
            "device_requests": [types.DeviceRequest(**every, capabilities=[["gpu"]])] if self.gpus else None,
            "shm_size": self.shm_size,
            "ulimits": [types.Ulimit(name=one.name, soft=one.soft, hard=one.hard) for one in self.ulimits],
            "cpuset_cpus": cpu_lists.show(self.cpus or ()),
            "network_mode": "host" if self.host_network else None,
            "user": self.user,
            "working_dir": self.folder,
            "entrypoint": self.entrypoint,
        }
        return {name: value for name, value in found.items() if value}

    def flags(self) -> list[str]:
        """The same for ``docker run``."""
        flags = [f"--volume={one.source}:{one.at}{':ro' if one.read_only else ''}" for one in self.binds]
        flags += [f"--publish={LOOPBACK}::{port}" for port in self.ports]
        if self.gpus:
            chosen = ",".join(self.gpus)
            flags.append("--gpus=all" if self.gpus == (ALL_GPUS,) else f'--gpus="device={chosen}"')
        flags += [f"--ulimit={one.name}={one.soft}:{one.hard}" for one in self.ulimits]
        named = {"shm-size": self.shm_size, "cpuset-cpus": cpu_lists.show(self.cpus or ()), "user": self.user}
        named |= {"network": "host" if self.host_network else "", "workdir": self.folder}
        named["entrypoint"] = self.entrypoint
        return flags + [f"--{name}={value}" for name, value in named.items() if value]


def read_gpus(text: str) -> tuple[str, ...]:
    """``none``, ``all``, or ids (numbers, UUIDs) with commas. Raises BadInputError."""
    if text == NO_GPUS:
        return ()
    ids = tuple(part.strip() for part in text.split(","))
    named = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,79}", one) and one != NO_GPUS for one in ids)
    if not named or len(set(ids)) < len(ids):
        raise _refused("gpus", text, "write none, all, or ids of GPUs such as 0,1 or their UUIDs (nvidia-smi -L)")
    if ALL_GPUS in ids and len(ids) > 1:
        raise _refused("gpus", text, "write all alone, or ids alone")
    return ids


def read_mount(text: str, taken: Iterable[str] = ()) -> Bind:
    """``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``; at none of ``taken`` or below. Raises BadInputError."""
    source, _, rest = text.partition(":")
    at, _, mode = rest.partition(":")
    target = PurePosixPath(at)
    if not source or not at or mode not in ("", "ro", "rw") or not text.isprintable():
        raise _refused("mount", text, "write FOLDER:FOLDER_IN_THE_CONTAINER, then :ro where it may only be read")
    if not target.is_absolute() or ".." in target.parts or len(target.parts) < 2:
        raise _refused("mount", text, "the folder in the container is an absolute path, such as /data")
    if any(target.is_relative_to(one) for one in taken):
        raise _refused("mount", text, "the model repository is there; choose another folder in the container")
    here = Path(source).expanduser().absolute()
    if not here.exists():
        raise _refused("mount", text, f"there is no {one_line(source)} on this machine")
    return Bind(here, str(target), read_only=mode == "ro")


def read_ulimits(texts: Iterable[str]) -> tuple[Ulimit, ...]:
    """``NAME=SOFT`` or ``NAME=SOFT:HARD``, -1 for no limit; the later one of a name counts. Raises BadInputError."""
    found = {}
    for text in texts:
        match = re.fullmatch(r"([a-z]{2,12})=(-1|\d{1,18})(?::(-1|\d{1,18}))?", text)
        if match is None:
            raise _refused("ulimit", text, "write NAME=LIMIT or NAME=SOFT:HARD, such as memlock=-1")
        found[match[1]] = Ulimit(match[1], int(match[2]), int(match[3] or match[2]))
    return tuple(found.values())


def read_shm_size(text: str) -> str:
    """Bytes, or with a unit: ``1g``, ``512m``. Raises BadInputError."""
    if not re.fullmatch(r"[1-9]\d{0,15}[bkmg]?", text):
        raise _refused("shm-size", text, "write bytes, or a size such as 512m or 1g")
    return text


def _refused(what: str, text: str, mend: str) -> BadInputError:
    return BadInputError(f"--docker-{what} {one_line(text, 200)!r}: {mend}")
