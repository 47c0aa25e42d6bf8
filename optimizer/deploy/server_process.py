"""The process of a tritonserver that a run starts, and the files that a killed run left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from optimizer.config import model_config
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection
from optimizer.core.errors import BadInputError, DeploymentError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.core.files import SHARED_MEMORY_FOLDER
from optimizer.core.process import RunningProcess, describe_exit_code
from optimizer.core.process_owner import is_alive, is_leftover, owner_of, this_process
from optimizer.core.safe_text import format_value, is_shell_path, one_line
from optimizer.deploy.server_log import ServerLog
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.cpus import divide_among_servers, read_topology
from optimizer.measure.server_calls import open_client, reports_live
from optimizer.measure.server_client import CallError, ServerClient
from optimizer.measure.server_errors import lacks_gpu_memory
from optimizer.options import server_options
from optimizer.options.values import parse_cpus

NO_TEMPORARY_FOLDER = "no folder for temporary files can be written"
WRITABLE_TEMPORARY_FOLDER = "free space in /tmp, or set TMPDIR to a folder that can be written"


def temporary_parent() -> Path:
    """Return the folder for temporary files, or /tmp if a shell would not take its path literally.

    Triton's Python backend starts the process of a model through bash, with paths that it does not quote. Raises
    EnvironmentFault if no folder can be written, for example because the disk is full.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        raise EnvironmentFault(f"{NO_TEMPORARY_FOLDER}; {WRITABLE_TEMPORARY_FOLDER}") from None
    return Path(folder if is_shell_path(folder) else "/tmp")


def new_folder() -> Path:
    """Create a temporary folder that only this user can read. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=f"tritune-{this_process()}-", dir=temporary_parent()))


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder of ``new_folder`` and remove it at the end."""
    folder = new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shared_memory_prefix(folder: Path) -> str:
    """Return a unique prefix for the shared memory of the server that uses ``folder``, from ``new_folder``."""
    return f"{folder.name.replace('-', '_')}_"


def remove_shared_memory(folder_name: str) -> None:
    """Remove the shared memory of the server that used the folder of this name, if this user may."""
    for region in SHARED_MEMORY_FOLDER.glob(f"{folder_name.replace('-', '_')}_*"):
        with contextlib.suppress(OSError):
            region.unlink()


def orphans() -> list[int]:
    """Return the processes that servers left whose ``tune`` and supervisor were killed together.

    A stub of Triton may then wait forever for a lock in shared memory. It works in the temporary folder of the
    ``tune`` that has ended, in the session of the supervisor; a shell in that folder has a session that lives.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*/cwd"):
        pid = int(folder.parent.name)
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(map(is_leftover, folder.readlink().parts)) and (leader := os.getsid(pid)) and not is_alive(leader):
                found.append(pid)
    return sorted(found)


def remove_leftovers() -> None:
    """Remove the processes, shared memory and temporary folders that processes which no longer exist have left."""
    for pid in orphans():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for region in SHARED_MEMORY_FOLDER.glob("tritune_*"):
        if is_leftover(region.name):
            with contextlib.suppress(OSError):
                region.unlink()
    for folder in temporary_parent().glob("tritune-*"):
        if is_leftover(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    remove_environment_folders()


def processes_with_servers() -> list[int]:
    """Return the ids of the other processes that have a temporary folder for a server now.

    Processes in another container, or with another TMPDIR, are not found.
    """
    owners = {owner_of(folder.name) for folder in temporary_parent().glob("tritune-*")}
    alive = {owner.pid for owner in owners if owner and owner.is_visible and not owner.has_ended()}
    return sorted(alive - {os.getpid()})


def remove_environment_folders() -> None:
    """Remove the empty folders in /tmp that Triton's Python backend creates at each start.

    A server that is killed leaves them. They do not name an owner, so they are removed only if no server runs.
    """
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if name.read_text().strip() == "tritonserver":
                return
    for folder in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):
            folder.rmdir()


MIN_VERSION = (2, 30)  # the first version with the protocol, statistics and options that tune uses
START_LIMIT_SECONDS = 60.0
START_ATTEMPTS = 3  # a port may be taken between the probe and the bind
ENDING_SECONDS = 1.0  # the longest wait for the exit code of a server that died
HTTP_SECONDS, METADATA_BYTES = 0.5, 2**16  # limits of the server's metadata over HTTP


class Server(ABC):
    """A tritonserver with a life cycle: started on demand, checked, restarted and stopped.

    ``name`` is its ``--id``, ``program`` the program or image, and ``flag`` the option that names another one.
    It runs on the CPUs of ``settings`` unless a candidate sets others, see ``run_for``. If several servers serve a
    candidate, this is the one with the number ``position``, from 0.

    ``grpc`` and ``http`` are the ``host:port`` of the running server. ``http`` is empty if this version cannot keep
    others from loading models over HTTP. ``metrics`` is the address of its metrics, empty unless a model exports some
    that tune reads. ``version`` is the version that the server reports. ``running`` is a new
    object with each start.
    """

    def __init__(self, name: str, program: str, flag: str, settings: TargetSettings) -> None:
        self.log = ServerLog(settings.log)
        self.grpc = self.http = self.metrics = self.version = ""
        self._name, self._program, self._flag = name, program, flag
        self._server_options: tuple[str, ...] = ()
        self._default_cpus = self._cpus = settings.cpus
        self.position, self._processes = 0, 1
        self.running: RunningProcess | None = None
        self._start_seconds = min(START_LIMIT_SECONDS, settings.model_load_timeout_seconds)
        self._client: ServerClient | None = None

    @property
    def pid(self) -> int | None:
        """The process that was launched; None if this server does not run."""
        return self.running.pid if self.running else None

    def import_advice(self, module: str, config: ModelConfig) -> str:
        """Return how to give the model with ``config`` the package of ``module``, which it could not import."""
        if environment := model_config.environment_of(config):
            return f"add the package with {module} to the model's own environment {format_value(environment)}"
        return self.package_advice(module)

    @abstractmethod
    def package_advice(self, module: str) -> str:
        """Return how to give the server's Python the package of ``module``, which a model could not import."""

    @abstractmethod
    def _launch(self) -> RunningProcess:
        """Start the server without waiting for it, and set ``grpc`` and ``http``."""

    def memory_bytes(self) -> float | None:
        """Return the server's memory if only its container engine knows it; otherwise None."""
        return None

    def start(self) -> None:
        """Launch the server without waiting for it; no effect while it is running."""
        if self._is_running():
            return
        self.stop()
        self.log.mark()
        self.running = self._launch()

    def run_for(self, candidate: Candidate) -> None:
        """Use the CPUs and server options of ``candidate``, or the defaults, from the next start on.

        Several servers divide the CPUs. A server that runs with other settings is stopped.
        """
        processes = candidate.server_processes
        cpus = self._default_cpus if candidate.server_cpus is None else parse_cpus(candidate.server_cpus)
        if cpus is not None and processes > 1:
            cpus = divide_among_servers(read_topology(cpus), processes)[self.position]
        options = server_options.to_arguments(candidate.fields)
        if (cpus, options, processes) != (self._cpus, self._server_options, self._processes):
            self.stop()
            self._cpus, self._server_options, self._processes = cpus, options, processes

    def client(self) -> ServerClient:
        """Return a client of a live server, which is started or restarted if needed.

        Raises ServerFault if it does not start, or DeploymentError if that may be due to the candidate's options or
        to its number of server processes.
        """
        if self._client is not None:
            if self.responds():
                return self._client
            self.stop()
        deadline = time.monotonic() + self._start_seconds
        for _ in range(START_ATTEMPTS):
            self.start()
            self._client = open_client(Connection(self.grpc))
            if self._comes_up(self._client, deadline):
                self._check_version()
                return self._client
            self.stop()
            if time.monotonic() > deadline:
                break
        settings = f" with {' '.join(self._server_options)}" if self._server_options else ""
        if self._processes > 1:
            settings += f" as one of {self._processes} server processes"
        error = DeploymentError if settings else ServerFault  # the server may start with other settings
        raise error(f"tritonserver did not start{settings}: {self.log.startup_failure()}", log=self.log.path)

    def responds(self) -> bool:
        """Return whether the server runs and responds."""
        return self._client is not None and self._is_running() and reports_live(self._client)

    def stop_after_crash(self, doing: str, cause: str = "") -> ServerCrashed:
        """Stop the server and return the error to raise.

        ``cause`` is by default that the server died or hangs while ``doing``.
        """
        assert self.running is not None
        exit_code = None
        if not cause:
            exit_code = self.running.wait(ENDING_SECONDS)
            ended = "no longer answers" if exit_code is None else f"died ({describe_exit_code(exit_code)})"
            cause = f"tritonserver {ended} while {doing}"
        self.stop()
        logged = self.log.last_error() or self.log.last_output()
        message = f"{cause}: {logged}" if logged else cause
        return ServerCrashed(
            message,
            log=self.log.path,
            lacks_gpu_memory=lacks_gpu_memory(message),
            has_ended=exit_code is not None,
        )

    def stop(self) -> None:
        """Stop the server; no process, port or shared memory is left. No effect if it is not running."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.running is not None:
            self.running.stop()
            self.running = None

    def _is_running(self) -> bool:
        return self.running is not None and self.running.exit_code() is None

    def _comes_up(self, client: ServerClient, deadline: float) -> bool:
        """Return whether the server gets ready, and not another server that has taken one of its ports.

        It opens the HTTP port after the gRPC port, and ends if it cannot.
        """
        while time.monotonic() < deadline and self._is_running():
            with contextlib.suppress(CallError, HTTPException, OSError, ValueError):
                client.check(timeout_seconds=2)
                name, version = client.identity(timeout_seconds=2)
                self.version = one_line(version, 30)
                if name != self._name:
                    return False
                if not self.http or _name_over_http(self.http) == name:
                    return True
            time.sleep(0.02)
        return False

    def _check_version(self) -> None:
        if is_older(self.version, MIN_VERSION):
            self.stop()
            minimum = ".".join(map(str, MIN_VERSION))
            raise EnvironmentFault(
                f"{self._program}: this is Triton {self.version}, and tune needs {minimum} or newer; name another "
                f"with {self._flag}"
            )


def _name_over_http(address: str) -> str:
    """Return the name of the server at ``address``. Raises HTTPException, OSError or ValueError if there is none."""
    connection = HTTPConnection(address, timeout=HTTP_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", "/v2")
        metadata = json.loads(connection.getresponse().read(METADATA_BYTES))
    return str(metadata.get("name")) if isinstance(metadata, dict) else ""


def dead_model_processes(pid: int | None) -> frozenset[int]:
    """Return the processes of models that have ended without being noticed by the server, which runs below ``pid``.

    They are zombies below tritonserver. The result is empty if its processes cannot be seen from here.
    """
    import psutil

    dead = set()
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True) if pid else ():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if process.status() == psutil.STATUS_ZOMBIE and parent and parent.name() == "tritonserver":
                    dead.add(process.pid)
    return frozenset(dead)


def is_older(version: str, minimum: tuple[int, int]) -> bool:
    """Return whether ``version`` of a server is older than ``minimum``; false if it is not a version number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < minimum


def too_old_for_http(program: str) -> BadInputError:
    """Return the error for ``--protocol http`` with a server that lacks ``--http-restricted-api``."""
    return BadInputError(
        f"--protocol http: {program} is too old to keep web pages from loading models over HTTP; leave it out, or "
        "name a newer server"
    )
