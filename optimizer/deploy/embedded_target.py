"""A tritonserver on this machine, run as a process, and the embedded target, which uses the pinned server."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError, DeploymentError, EnvironmentFault
from optimizer.core.process import SupervisedProcess
from optimizer.deploy import runtime
from optimizer.deploy.managed_target import ManagedTarget, RepositoryCopy, exports_metrics, load_model, server_options
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.server_process import Server, remove_leftovers, shared_memory_prefix
from optimizer.deploy.target_settings import LOAD_SECONDS, LOOPBACK, ServerPorts, TargetSettings
from optimizer.machine.nvml import VISIBLE_DEVICES, mps_share
from optimizer.measure.failure_causes import missing_module, without_traceback
from optimizer.measure.server_client import CallError
from optimizer.options.run_options import RunOptions

STUB_SHELL = "bash"  # with which Triton's Python backend starts the process of a model
NO_STUB_SHELL = "bash is missing, with which Triton starts the process of a model"
INSTALL_STUB_SHELL = "apt-get install bash"
# the driver, and the libraries of CUDA that ONNX Runtime and PyTorch load
CUDA_LIBRARIES = ("libcuda.so.1", "libcudart.so.*", "libcublas.so.*", "libcudnn.so.*", "libnvinfer.so.*")
LEAST_ADDRESS_SPACE = 4 << 30  # bytes: tritonserver reserves more than it uses
MORE_ADDRESS_SPACE = "ulimit -v unlimited"
WITHOUT_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}  # its thread and requests would disturb measurements


@dataclass(frozen=True)
class Installation:
    """A tritonserver program and how it is started.

    ``backends`` is its backend directory. If it is None, a directory is assembled in the server's folder, from the
    ``runtime`` and tune's own backends. ``options`` are the names of the options that this version knows; None means
    all that tune uses. ``arguments`` are the user's.
    """

    tritonserver: Path
    environment: Mapping[str, str]
    backends: Path | None = None
    options: frozenset[str] | None = None
    arguments: tuple[str, ...] = ()
    runtime: Runtime | None = None

    def knows(self, word: str) -> bool:
        """Return whether ``--name`` or ``--name=value`` is an option of this version."""
        return self.options is None or word.removeprefix("--").partition("=")[0] in self.options


BACKENDS = Path(__file__).parent / "backends"


class ServerFolder(RepositoryCopy):
    """A copy of the model repository whose shared files are symbolic links, with the backends of the server."""

    def __init__(self, source: ModelSource, installation: Installation) -> None:
        super().__init__(source)
        self.backends = installation.backends or self.path / "backends"
        with self._removed_on_error():
            self.packages.mkdir()
            if installation.runtime is not None:
                self._assemble_backends(installation.runtime)
                self._link_packages(installation.runtime)

    @property
    def packages(self) -> Path:
        """The working directory of the server, which is first on the stub's search path for packages.

        It holds the packages of which the stub needs another version than this environment has, and no user files.
        """
        return self.path / "packages"

    @property
    def shared_memory_prefix(self) -> str:
        return shared_memory_prefix(self.path)

    def _share(self, entry: Path, at: Path) -> None:
        at.symlink_to(entry.resolve())

    def _assemble_backends(self, installed: Runtime) -> None:
        """Copy the backends: Triton refuses a library that is a link out of the backend directory."""
        shutil.copytree(installed.python_backend, self.backends / "python")
        shutil.copy(installed.stub, self.backends / "python")
        for backend in BACKENDS.iterdir():
            if backend.joinpath("model.py").exists():
                shutil.copytree(backend, self.backends / backend.name)
        openvino = runtime.openvino_folder()
        if openvino is not None and openvino.is_dir():
            self.backends.joinpath("onnxruntime", "openvino").symlink_to(openvino)

    def _link_packages(self, runtime: Runtime) -> None:
        folder = runtime.stub_packages
        for package in folder.iterdir() if folder else ():
            self.packages.joinpath(package.name).symlink_to(package)


class TritonServer(Server):
    """A tritonserver process that serves the repository in ``folder``.

    Over HTTP, models are loaded only with the header ``tritune: <http_secret>``.
    """

    def __init__(self, folder: ServerFolder, installation: Installation, settings: TargetSettings) -> None:
        super().__init__(folder.path.name, str(installation.tritonserver), "--tritonserver", settings)
        self.http_secret = secrets.token_hex(16)
        self._folder = folder
        self._installation = installation
        self._environment = {**installation.environment, **({} if settings.gpus else {VISIBLE_DEVICES: ""})}
        self._settings = settings

    def package_advice(self, module: str) -> str:
        """Return how to install a package: the embedded server's models run with the packages of tune."""
        if self._installation.runtime is not None:
            python = shlex.quote(sys.executable)
            return f"install the package with {module} into the environment of tune: {python} -m pip install PACKAGE"
        return (
            f"install the package with {module} for the Python that is first on PATH, which runs the models of this "
            "server: python3 -m pip install PACKAGE"
        )

    def _launch(self) -> SupervisedProcess:
        choose_port = self._settings.choose_port
        ports = self._settings.ports[0] if self._settings.ports else ServerPorts(choose_port(), choose_port())
        self.http, self.grpc = "", f"{LOOPBACK}:{ports.grpc}"
        # A web page can send requests to loopback, and a load request can carry code: it now needs a secret header.
        http = [f"--http-restricted-api=model-repository:tritune={self.http_secret}"]
        if self._installation.knows(http[0]):
            self.http = f"{LOOPBACK}:{ports.http}"
            http += [f"--http-address={LOOPBACK}", f"--http-port={ports.http}"]
        else:
            http = ["--allow-http=false"]
        command: list[str | Path] = [
            self._installation.tritonserver,
            f"--id={self._folder.path.name}",
            f"--model-repository={self._folder.repository}",
            "--model-control-mode=explicit",
            *http,
            f"--grpc-address={LOOPBACK}",
            f"--grpc-port={ports.grpc}",
            *self._metrics_options(),
            f"--backend-directory={self._folder.backends}",
            # also read by backends that are based on the Python backend
            f"--backend-config=python,shm-region-prefix-name={self._folder.shared_memory_prefix}",
            *filter(self._installation.knows, self._settings.arguments),
            *self._installation.arguments,
            *self._chosen,
        ]
        return SupervisedProcess(
            command,
            log=self.log,
            env={**self._environment, **mps_share(self._processes, self._environment)},
            cwd=self._folder.packages,
            cpus=self._cpus,
            shm_patterns=(f"{self._folder.shared_memory_prefix}*",),
        )

    def _metrics_options(self) -> list[str]:
        """Return the options of the metrics. Those of GPUs and CPUs are off, because NVML and psutil provide them."""
        if not self._settings.exports_metrics:
            return ["--allow-metrics=false"]
        port = self._settings.ports[0].metrics if self._settings.ports else self._settings.choose_port()
        self.metrics = f"{LOOPBACK}:{port}"
        options = [f"--metrics-address={LOOPBACK}", f"--metrics-port={port}"]
        options += ["--allow-gpu-metrics=false", "--allow-cpu-metrics=false"]
        return list(filter(self._installation.knows, options))


class InstalledTarget(ManagedTarget):
    """Serves candidates on a tritonserver of this machine."""

    def __init__(self, source: ModelSource, installation: Installation, settings: TargetSettings) -> None:
        remove_leftovers()
        folder = ServerFolder(source, installation)
        with contextlib.ExitStack() as undo:
            undo.callback(folder.remove)
            settings = replace(
                settings,
                arguments=(*server_options(source), *settings.arguments),
                exports_metrics=settings.exports_metrics or bool(settings.ports) or exports_metrics(source),
            )
            super().__init__(source, TritonServer(folder, installation, settings), folder, settings)
            undo.pop_all()


def embedded_installation(installed: Runtime) -> Installation:
    """Return the pinned tritonserver. Raises EnvironmentFault if Python has no shared library, or bash is missing."""
    return Installation(installed.tritonserver, server_environment(installed), runtime=installed)


def server_environment(installed: Runtime) -> dict[str, str]:
    """Return the environment of the server and its Python stubs.

    Raises EnvironmentFault if Python has no shared library, bash is missing or the address space is too small.
    """
    libpython = runtime.libpython_folder()
    if libpython is None:
        raise EnvironmentFault(runtime.libpython_advice())
    search_path = stub_search_path()
    if shutil.which(STUB_SHELL, path=search_path) is None:
        raise EnvironmentFault(f"{NO_STUB_SHELL}; {INSTALL_STUB_SHELL}")
    if problem := address_space_problem():
        raise EnvironmentFault(f"{problem}; {MORE_ADDRESS_SPACE}")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    # a libpython needs the standard library of its own build: distributions build different modules into theirs
    own_python = {"PYTHONHOME": str(installed.stub_python)} if libpython.parent == installed.stub_python else {}
    return {
        **WITHOUT_TELEMETRY,
        **os.environ,  # Python models may need variables of the user
        **own_python,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, (installed.libraries, libpython, *cuda_folders()))),
        # the stub embeds this Python and finds the packages of this environment by PYTHONPATH and PATH
        "PYTHONPATH": os.pathsep.join(packages),
        "PATH": search_path,
    }


def cuda_folders() -> list[str]:
    """Return the folders of ``LD_LIBRARY_PATH`` with the CUDA driver or CUDA's libraries.

    Some containers have the driver nowhere else. Other folders are left out: their libraries may not suit the server.
    """
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return [folder for folder in folders if any(next(Path(folder).glob(name), None) for name in CUDA_LIBRARIES)]


def address_space_problem() -> str:
    """Return why the limit on the address space, which the server inherits, is too low; empty if it is not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_ADDRESS_SPACE:
        return ""
    needed = LEAST_ADDRESS_SPACE >> 30
    return f"the address space is limited to {soft / 2**30:.1f} GiB, and the server needs {needed} GiB"


def stub_search_path() -> str:
    """Return the PATH of the server and its stubs, which has the system's programs even if PATH is empty."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), os.defpath)
    return os.pathsep.join(filter(None, folders))


class EmbeddedTarget(InstalledTarget):
    """Serves candidates on the pinned tritonserver, which is installed on first use."""

    def __init__(self, source: ModelSource, settings: TargetSettings) -> None:
        super().__init__(source, embedded_installation(runtime.ensure(settings.say)), settings)


def check_options(options: RunOptions, say: Callable[[str], None]) -> None:
    """Accept all options: the pinned server is installed when the model is known."""


def server_identity(options: RunOptions, say: Callable[[str], None]) -> str:
    """Return the version of the pinned server."""
    return runtime.TRITON_VERSION


def make_target(source: ModelSource, options: RunOptions, settings: TargetSettings) -> EmbeddedTarget:
    """Return the target on the pinned server."""
    return EmbeddedTarget(source, settings)


def complete_config(
    source: ModelSource, find: Callable[[], Installation], limit_seconds: float = LOAD_SECONDS
) -> ModelSource:
    """Return ``source`` with the inputs and outputs that Triton's auto-completion finds in the model.

    ``find`` returns the server to start for it; it has to start, and the model to load, within ``limit_seconds``. A
    source that is complete is returned unchanged. Raises BadInputError if the model does not load, or has no inputs
    or outputs either.
    """
    if source.config.input and source.config.output:
        return source
    where = source.repository / source.name / "config.pbtxt"
    installation = find()
    folder = ServerFolder(source, installation)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        settings = TargetSettings(folder.path / "tritonserver.log", load_timeout_seconds=limit_seconds)
        server = TritonServer(folder, installation, settings)
        undo.callback(server.stop)
        client = server.client()
        try:
            load_model(server, client, source.name, None, limit_seconds)
            completed = client.config(source.name)
        except (CallError, DeploymentError) as error:
            reason = without_traceback(str(error)) if isinstance(error, CallError) else str(error)
            if module := missing_module(str(error)):
                reason += f"; {server.package_advice(module)}"
            raise BadInputError(f"{where}: has no inputs or outputs, and {reason}") from None
    if not (completed.input and completed.output):
        raise BadInputError(
            f"{where}: has no inputs or outputs, and the model does not declare them either; write them"
        )
    config = model_config.with_explicit_counts(source.config, gpu=True)  # a copy
    for name in ("input", "output"):
        config.ClearField(name)
        getattr(config, name).extend(getattr(completed, name))
    config.max_batch_size = completed.max_batch_size
    for name in ("dynamic_batching", "model_transaction_policy"):
        if completed.HasField(name) and not (name == "dynamic_batching" and config.WhichOneof("scheduling_choice")):
            getattr(config, name).CopyFrom(getattr(completed, name))
    if list(config.dynamic_batching.preferred_batch_size) == [config.max_batch_size]:  # added by Triton
        config.dynamic_batching.ClearField("preferred_batch_size")
    return replace(source, config=config)
