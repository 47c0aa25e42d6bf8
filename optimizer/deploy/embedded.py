"""The embedded target: the pinned tritonserver on loopback, one process serving one trial after another."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import model_config, runtime
from optimizer.errors import DeploymentError, EnvironmentFault, ServerFault
from optimizer.interfaces import Endpoint
from optimizer.model_source import ModelSource
from optimizer.process import SupervisedProcess
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

BACKENDS = Path(__file__).parent.parent / "backends"
START_SECONDS = 60.0
START_ATTEMPTS = 3  # a port may be taken between the probe and the bind
SHM_PREFIX = "tritune_"


class EmbeddedTarget:
    """Serves ``source`` from a private copy of its repository (links, and its own config.pbtxt).

    A candidate is deployed by loading the model with the candidate's configuration as override, and verified
    by reading the configuration back. The server starts with the first deployment, or ahead of it with
    ``start()``, and is replaced when it has died. ``log`` collects what the server prints.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        log: Path,
        say: Callable[[str], None],
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = 120.0,
    ) -> None:
        self.source = source
        self.log = log
        self._runtime = runtime.ensure(say)
        libpython = runtime.libpython_folder()
        if libpython is None:
            raise EnvironmentFault(runtime.libpython_mend())
        self._libraries = f"{self._runtime.libraries}{os.pathsep}{libpython}"
        self._load_timeout_seconds = load_timeout_seconds
        self._stopwatch = stopwatch or Stopwatch()
        self._server: SupervisedProcess | None = None
        self._client: InferenceServerClient | None = None
        remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix=f"tritune-{os.getpid()}-"))
        self._link_repository()
        self._assemble_backends()

    # -- Target ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        wanted = model_config.apply(candidate, self.source.config)
        self._load(model_config.to_override_json(wanted))
        self._check_serving(candidate)
        yield self._endpoint(candidate)

    @contextlib.contextmanager
    def deploy_as_written(self, candidate: Candidate) -> Iterator[Endpoint]:
        """A fresh server loads config.pbtxt from disk, without an override: the proof that the file loads."""
        text = model_config.to_text(model_config.apply(candidate, self.source.config))
        self._folder.joinpath("repository", self.source.name, "config.pbtxt").write_text(text)
        self._stop()
        self._load(None)
        self._check_serving(candidate)
        yield self._endpoint(candidate)

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        remove_environment_folders()

    # -- the server -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Launch the server without waiting for it; no effect while one is running."""
        if self._server is not None and self._server.exit_code() is None:
            return
        self._stop()
        self._http, self._grpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        command: list[str | Path] = [
            self._runtime.tritonserver,
            f"--model-repository={self._folder / 'repository'}",
            "--model-control-mode=explicit",
            "--http-address=127.0.0.1",
            f"--http-port={self._http.rpartition(':')[2]}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self._grpc.rpartition(':')[2]}",
            "--allow-metrics=false",
            f"--backend-directory={self._folder / 'backends'}",
            # Python-based backends take their settings from the Python backend's
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
        ]
        if self.source.config.input and self.source.config.output:
            # else a model in Python fills them in, at the price of one more stub a load
            command.append("--disable-auto-complete-config")
        self._server = SupervisedProcess(
            command, log=self.log, env=self._environment(), cwd=self._packages(), shm_prefix=self._shm_prefix
        )

    @property
    def grpc_address(self) -> str:
        """``host:port`` of the running server."""
        return self._grpc

    @property
    def _shm_prefix(self) -> str:
        # of this target alone: another one in the same process must not lose its regions with it
        return f"{SHM_PREFIX}{os.getpid()}_{self._folder.name.rpartition('-')[2]}_"

    def _ready_client(self) -> InferenceServerClient:
        """A client of a server that is up; starts or replaces the server where needed."""
        for _ in range(START_ATTEMPTS):
            fresh = self._server is None or self._server.exit_code() is not None or self._client is None
            self.start()
            if not fresh and self._client is not None:
                return self._client
            from tritonclient.grpc import InferenceServerClient  # 0.4 s, while the server starts

            client = InferenceServerClient(self._grpc)
            if self._wait_until_ready(client):
                self._client = client
                return client
            client.close()
            if not self._port_was_taken():
                break
        raise ServerFault(f"tritonserver did not start: {last_error(self.log)}", log=self.log)

    def _wait_until_ready(self, client: InferenceServerClient) -> bool:
        from tritonclient.utils import InferenceServerException

        assert self._server is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._server.exit_code() is None:
            with contextlib.suppress(InferenceServerException):
                if client.is_server_ready(client_timeout=2):
                    return True
            time.sleep(0.02)
        return False

    def _port_was_taken(self) -> bool:
        return "ddress already in use" in self.log.read_text(errors="replace")[-20_000:]

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    # -- the model ------------------------------------------------------------------------------------------

    def _load(self, override: str | None) -> None:
        from tritonclient.utils import InferenceServerException

        with self._stopwatch.server():
            client = self._ready_client()
            log_start = self.log.stat().st_size
            try:
                client.load_model(self.source.name, config=override, client_timeout=self._load_timeout_seconds)
            except InferenceServerException as error:
                if "Deadline" in str(error.status()):
                    self._stop()  # the load cannot be called off; a new server can be started
                    raise DeploymentError(
                        f"loading took longer than {self._load_timeout_seconds:g} s", log=self.log
                    ) from error
                if self._server is None or self._server.wait(0.5) is not None:
                    self._stop()
                    raise DeploymentError(
                        f"tritonserver died while loading: {last_error(self.log, log_start)}", log=self.log
                    ) from error
                raise DeploymentError(_cause(error.message()), log=self.log) from error

    def _check_serving(self, candidate: Candidate) -> None:
        """A failed reload can leave the old model ready: only what GET config says counts."""
        from tritonclient.utils import InferenceServerException

        assert self._client is not None
        try:
            with self._stopwatch.server():
                serving = self._client.get_model_config(self.source.name, client_timeout=10).config
                ready = self._client.is_model_ready(self.source.name, client_timeout=10)
        except InferenceServerException as error:
            raise DeploymentError(_cause(error.message()), log=self.log) from error
        wrong = model_config.differences(candidate, serving)
        if wrong or not ready:
            raise DeploymentError(
                f"the server serves another configuration: {'; '.join(wrong) or 'not ready'}", log=self.log
            )

    def _endpoint(self, candidate: Candidate) -> Endpoint:
        assert self._server is not None
        return Endpoint(self.source.name, candidate, self._grpc, self._http, self._server.supervisor_pid)

    # -- its folder -----------------------------------------------------------------------------------------

    def _link_repository(self) -> None:
        model = self._folder / "repository" / self.source.name
        model.mkdir(parents=True)
        for entry in (self.source.repository / self.source.name).iterdir():
            if entry.name != "config.pbtxt":
                model.joinpath(entry.name).symlink_to(entry.resolve())
        model.joinpath("config.pbtxt").write_text(model_config.to_text(self.source.config))

    def _assemble_backends(self) -> None:
        """Copies: Triton refuses a backend whose library a link leads out of the backend directory."""
        backends = self._folder / "backends"
        shutil.copytree(self._runtime.python_backend, backends / "python")
        shutil.copy(self._runtime.stub, backends / "python")
        for backend in BACKENDS.iterdir():
            if backend.joinpath("model.py").exists():
                shutil.copytree(backend, backends / backend.name)

    def _packages(self) -> Path:
        """The server's current folder, which comes first in the stub's search for packages: holds what the stub
        needs otherwise than this environment has it, and nothing of the user's."""
        folder = self._folder / "packages"
        folder.mkdir(exist_ok=True)
        own = self._runtime.stub_packages
        for package in own.iterdir() if own else ():
            link = folder / package.name
            if not link.is_symlink():
                link.symlink_to(package)
        return folder

    def _environment(self) -> dict[str, str]:
        packages = [path for path in sys.path if path.endswith("site-packages")]
        return {
            "ORT_DISABLE_TELEMETRY": "1",  # a thread and requests to its maker beside what is measured
            **os.environ,
            "LD_LIBRARY_PATH": self._libraries,
            # the stub embeds this Python; it finds this environment's packages by these two
            "PYTHONPATH": os.pathsep.join(packages),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove_leftovers() -> None:
    """Remove what runs left whose process no longer exists: shared memory (killed together with the
    supervisor that would have removed it) and temporary folders."""
    for region in Path("/dev/shm").glob(f"{SHM_PREFIX}*"):
        if _owner_is_gone(region.name.removeprefix(SHM_PREFIX).partition("_")[0]):
            with contextlib.suppress(OSError):
                region.unlink()
    for folder in Path(tempfile.gettempdir()).glob("tritune-*"):
        if _owner_is_gone(folder.name.split("-")[1]):
            shutil.rmtree(folder, ignore_errors=True)
    remove_environment_folders()


def remove_environment_folders() -> None:
    """Remove the empty folders in /tmp that Triton's Python backend makes at each start, and that a server leaves
    which does not end by itself (that takes 3 s). They bear no owner: only where no server runs at all."""
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if name.read_text().strip() == "tritonserver":
                return
    for folder in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _owner_is_gone(pid: str) -> bool:
    return pid.isdigit() and not Path(f"/proc/{pid}").exists()


def last_error(log: Path, start: int = 0) -> str:
    """The last line of the server's log from byte ``start`` on that tells of an error, else its last line."""
    try:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError:
        return "its log cannot be read"
    told = [line for line in lines if line.startswith("E") or "error" in line.lower()]
    line = (told or [line for line in lines if line.strip()] or ["it printed nothing"])[-1]
    return _one_line(line.partition("] ")[2] or line)


def _cause(message: str) -> str:
    """The server's message without the Python frames that a backend adds."""
    return _one_line(re.split(r"\s+At:\s", message)[0])


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
