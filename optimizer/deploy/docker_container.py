"""A container that runs one command, and its settings: files, ports, GPUs and limits as in ``docker run``."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from optimizer.core import interrupts
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.files import expand_home
from optimizer.core.process import FinishedProcess, log_command, wait_and_stop
from optimizer.core.process_owner import this_process
from optimizer.core.safe_text import exists, one_line
from optimizer.deploy.docker_engine import OWNER, connect, remove, sdk_errors, translated_errors
from optimizer.deploy.server_process import temporary_folder
from optimizer.deploy.target_settings import LOOPBACK
from optimizer.machine.nvml import BUS_ORDER, VISIBLE_DEVICES
from optimizer.measure.perf_analyzer import PerfAnalyzerCommand
from optimizer.options.values import format_cpus

if TYPE_CHECKING:
    from docker import DockerClient


NO_GPUS, ALL_GPUS = "none", "all"
# recommended by NVIDIA for its images
SHM_SIZE = "1g"
ULIMITS = ("memlock=-1", "stack=67108864")
SDK_NAMES = {"network": "network_mode", "ipc": "ipc_mode", "workdir": "working_dir"}  # by flag of `docker run`
GPU_VARIABLES = (VISIBLE_DEVICES, "NVIDIA_VISIBLE_DEVICES")  # they would hide GPUs that --docker-gpus gives


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder ``source`` of this machine, visible at ``at`` in the container.

    One that ``may_vanish`` is left out of a container that starts after that.
    """

    source: Path
    at: str
    read_only: bool = True
    may_vanish: bool = False


@dataclass(frozen=True, slots=True)
class Ulimit:
    """A resource limit of the container; -1 means unlimited."""

    name: str
    soft: int
    hard: int


@dataclass(frozen=True)
class ContainerSettings:
    """Settings of a container. ``ports`` are published at free ports of loopback; ``gpus`` are ids, or ``all``.

    With ``host_ipc`` it has the shared memory of this machine. ``environment`` has variables by name; the value None
    stands for that of this process.
    """

    binds: tuple[Bind, ...] = ()
    ports: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    shm_size: str = ""
    ulimits: tuple[Ulimit, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    cpus: frozenset[int] | None = None
    host_network: bool = False
    host_ipc: bool = False
    user: str = ""
    folder: str = ""
    entrypoint: str = ""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the SDK's ``containers.create``."""
        from docker import types

        request = {"count": -1} if self.gpus == (ALL_GPUS,) else {"device_ids": list(self.gpus)}
        mounts = [
            types.Mount(bind.at, str(bind.source), type="bind", read_only=bind.read_only)
            for bind in self._binds_now()
        ]
        arguments: dict[str, Any] = {
            "mounts": mounts,
            "ports": {f"{port}/tcp": (LOOPBACK, None) for port in self.ports},
            "device_requests": [types.DeviceRequest(**request, capabilities=[["gpu"]])] if self.gpus else None,
            "environment": {
                name: os.environ[name] if value is None else value for name, value in self._variables().items()
            },
            "ulimits": [types.Ulimit(name=limit.name, soft=limit.soft, hard=limit.hard) for limit in self.ulimits],
            **{SDK_NAMES.get(flag, flag.replace("-", "_")): text for flag, text in self._texts().items()},
        }
        return {name: value for name, value in arguments.items() if value}

    def flags(self) -> list[str]:
        """Return the same settings as flags of ``docker run``."""
        flags = [f"--volume={bind.source}:{bind.at}{':ro' if bind.read_only else ''}" for bind in self._binds_now()]
        flags += [f"--publish={LOOPBACK}::{port}" for port in self.ports]
        if self.gpus:
            ids = ",".join(self.gpus)
            flags.append("--gpus=all" if self.gpus == (ALL_GPUS,) else f'--gpus="device={ids}"')
        flags += [
            f"--env={name}" if value is None else f"--env={name}={value}" for name, value in self._variables().items()
        ]
        flags += [f"--ulimit={limit.name}={limit.soft}:{limit.hard}" for limit in self.ulimits]
        return flags + [f"--{name}={value}" for name, value in self._texts().items() if value]

    def _binds_now(self) -> list[Bind]:
        """Return the binds without those that have vanished, for which the engine would refuse the container."""
        return [bind for bind in self.binds if not bind.may_vanish or exists(bind.source)]

    def _texts(self) -> dict[str, str]:
        """Return the settings that are one text by their flag of ``docker run``; empty if they are not set."""
        return {
            "shm-size": self.shm_size,
            "cpuset-cpus": format_cpus(self.cpus or ()),
            "user": self.user,
            "network": "host" if self.host_network else "",
            "workdir": self.folder,
            "ipc": "host" if self.host_ipc else "",
            "entrypoint": self.entrypoint,
        }

    def _variables(self) -> dict[str, str | None]:
        return {**(BUS_ORDER if self.gpus else {}), **self.environment}


def read_gpus(text: str) -> tuple[str, ...]:
    """Return the GPUs of ``none``, ``all``, or comma-separated ids (numbers, UUIDs). Raises BadInputError."""
    if text == NO_GPUS:
        return ()
    ids = tuple(part.strip() for part in text.split(","))
    are_ids = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,79}", gpu) and gpu != NO_GPUS for gpu in ids)
    if not are_ids or len(set(ids)) < len(ids):
        raise _refused("gpus", text, "write none, all, or ids of GPUs such as 0,1 or their UUIDs (nvidia-smi -L)")
    if ALL_GPUS in ids and len(ids) > 1:
        raise _refused("gpus", text, "write all alone, or ids alone")
    return ids


def read_mount(text: str, reserved: Iterable[str] = ()) -> Bind:
    """Return the mount of ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``.

    Raises BadInputError, also if this machine has no such source, and for a target at or below one of ``reserved``.
    """
    bind = parse_mount(text)
    if any(PurePosixPath(bind.at).is_relative_to(folder) for folder in reserved):
        raise _refused("mount", text, "the model repository is there; choose another folder in the container")
    if not bind.source.exists():
        raise _refused("mount", text, f"there is no {one_line(text.partition(':')[0])} on this machine")
    return bind


def parse_mount(text: str) -> Bind:
    """Return the mount of ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``. Raises BadInputError."""
    source, _, target_and_mode = text.partition(":")
    at, _, mode = target_and_mode.partition(":")
    target = PurePosixPath(at)
    if not source or not at or mode not in ("", "ro", "rw") or not text.isprintable():
        raise _refused("mount", text, "write FOLDER:FOLDER_IN_THE_CONTAINER, then :ro where it may only be read")
    if not target.is_absolute() or ".." in target.parts or len(target.parts) < 2:
        raise _refused("mount", text, "the folder in the container is an absolute path, such as /data")
    return Bind(expand_home(source).absolute(), str(target), read_only=mode == "ro")


def read_ulimits(texts: Iterable[str]) -> tuple[Ulimit, ...]:
    """Return the limits of ``NAME=SOFT`` or ``NAME=SOFT:HARD``; the last of a name counts. Raises BadInputError."""
    limits = {}
    for text in texts:
        match = re.fullmatch(r"([a-z]{2,12})=(-1|\d{1,18})(?::(-1|\d{1,18}))?", text)
        if match is None:
            raise _refused("ulimit", text, "write NAME=LIMIT or NAME=SOFT:HARD, such as memlock=-1")
        limits[match[1]] = Ulimit(match[1], int(match[2]), int(match[3] or match[2]))
    return tuple(limits.values())


def read_environment(texts: Iterable[str]) -> dict[str, str | None]:
    """Return the variables of ``parse_environment``.

    Raises BadInputError also if this process lacks a variable whose value it has to pass.
    """
    variables = parse_environment(texts)
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise _refused("env", name, f"{name} is not set in the environment; export it, or write {name}=VALUE")
    return variables


def parse_environment(texts: Iterable[str]) -> dict[str, str | None]:
    """Return the variables of ``NAME=VALUE``, or of ``NAME`` with the value None. The last of a name counts.

    Raises BadInputError.
    """
    variables: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w{0,199}", name, re.ASCII) or not value.isprintable():
            raise _refused(
                "env", name, "write NAME=VALUE in printable characters, or NAME to pass the value that tune has"
            )
        if name in GPU_VARIABLES:
            raise _refused("env", name, "give the GPUs of the container with --docker-gpus")
        variables[name] = value if equals else None
    return variables


def read_shm_size(text: str) -> str:
    """Return a size in bytes or with a unit, such as ``512m``, unchanged. Raises BadInputError if it is not one."""
    if not re.fullmatch(r"[1-9]\d{0,15}[bkmg]?", text):
        raise _refused("shm-size", text, "write bytes, or a size such as 512m or 1g")
    return text


def _refused(name: str, text: str, rule: str) -> BadInputError:
    return BadInputError(f"--docker-{name} {one_line(text, 200)!r}: {rule}")


POLL_SECONDS = 0.02
LOG_ENDS_SECONDS = 5.0  # after the container's end


class Container:
    """A running container of ``image`` with ``command``; its output goes to ``log``, its name starts with ``name``.

    If this process is killed, the next run removes the container. Raises EnvironmentFault if the engine does not
    start it; all methods raise it if the engine no longer answers.
    """

    def __init__(
        self,
        client: DockerClient,
        image: str,
        command: Sequence[str],
        settings: ContainerSettings,
        *,
        log: Path,
        name: str = "tritune",
    ) -> None:
        self.log = log
        log.touch()
        self._client = client
        self._ended: int | None = None
        self._name = f"{name}-{secrets.token_hex(4)}"
        log_command(["docker", "run", "--rm", *settings.flags(), image, *command], log)
        try:
            with translated_errors(image):
                self._container = client.containers.create(
                    image, list(command), name=self._name, labels={OWNER: str(this_process())}, **settings.arguments()
                )
                if settings.gpus and not self._container.attrs["HostConfig"].get("DeviceRequests"):
                    raise EnvironmentFault(
                        "this engine cannot give containers GPUs through Docker's API; use Docker itself"
                    )
                output = self._container.attach(stream=True)  # before the start, so that it is complete
                self._container.start()
                self._container.reload()
        except BaseException:
            with contextlib.suppress(EnvironmentFault), translated_errors():
                remove(client, self._name)
            raise
        self._collector = threading.Thread(target=self._collect, args=(output,), daemon=True)
        self._collector.start()

    def address(self, port: int) -> str:
        """Return the ``host:port`` of this machine for the container's ``port``; with port 0 once it has ended."""
        published = self._container.ports.get(f"{port}/tcp") or ()
        return next((f"{binding['HostIp']}:{binding['HostPort']}" for binding in published), f"{LOOPBACK}:0")

    @property
    def pid(self) -> int | None:
        """The process id; None if the engine runs in a virtual machine or another namespace."""
        pid = self._container.attrs["State"]["Pid"]
        try:
            is_local = self._container.id in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return None
        return pid if is_local else None

    def exit_code(self) -> int | None:
        """Return the exit code; None while the container runs."""
        if self._ended is None and not self._collector.is_alive():
            with translated_errors():
                self._container.reload()
            state = self._container.attrs["State"]
            if not state["Running"]:
                self._ended = state["ExitCode"]
        return self._ended

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for the end of the container; return its exit code, or None after ``timeout_seconds``."""
        deadline = time.monotonic() + timeout_seconds
        self._collector.join(timeout_seconds)
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # the output has ended, the container not yet
        return code

    def memory_bytes(self) -> float | None:
        """Return the memory in use without reclaimable file cache; None if the engine does not report it."""
        try:
            memory = self._container.stats(stream=False, one_shot=True).get("memory_stats") or {}
        except sdk_errors():
            return None
        files = memory.get("stats") or {}  # total_inactive_file: cgroup v1, inactive_file: v2
        used = memory.get("usage", 0) - files.get("total_inactive_file", files.get("inactive_file", 0))
        return float(used) if used > 0 else None

    def stop(self) -> None:
        """Kill and remove the container."""
        with interrupts.deferred(), translated_errors():
            remove(self._client, self._name)
        self._collector.join(LOG_ENDS_SECONDS)

    def _collect(self, output: Iterable[bytes]) -> None:
        # the container's end or the next write reports an engine that stops or a disk that is full
        with contextlib.suppress(*sdk_errors(), OSError), self.log.open("ab", buffering=0) as file:
            for chunk in output:
                file.write(chunk)


RESULTS = "/results"
SDK_COMMAND = "perf_analyzer"  # on the PATH of NVIDIA's SDK image


@dataclass(frozen=True)
class ContainerRunner:
    """Runs perf_analyzer in a container of ``image``, in the network of this machine.

    ``base_url`` is as for DockerTarget. Raises EnvironmentFault if Docker does not run it.
    """

    image: str
    base_url: str | None = None

    def __call__(self, command: PerfAnalyzerCommand) -> FinishedProcess:
        program, *arguments = command.arguments
        with contextlib.closing(connect(self.base_url)) as client, temporary_folder() as scratch:
            with translated_errors():
                rootless = any("rootless" in option for option in client.info().get("SecurityOptions") or ())
            settings = ContainerSettings(
                binds=(Bind(scratch, RESULTS, read_only=False), *(Bind(path, str(path)) for path in command.reads)),
                cpus=command.cpus,
                host_network=True,
                user="" if rootless else f"{os.getuid()}:{os.getgid()}",  # in rootless Docker, root is this user
                folder=RESULTS,
                entrypoint=program,
            )
            command.log.unlink(missing_ok=True)
            container = Container(client, self.image, arguments, settings, log=command.log)
            done = wait_and_stop(container, command.timeout_seconds, command.check)
            for file in scratch.iterdir():
                shutil.move(file, command.log.parent / file.name)
            return done
