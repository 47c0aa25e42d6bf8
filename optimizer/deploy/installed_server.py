"""A tritonserver that is installed on this machine: its process, and the target that serves candidates on it.

It also completes a model configuration that leaves inputs and outputs to Triton's auto-completion.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.config import model_config
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError, DeploymentError, ServerFault
from optimizer.core.process import SupervisedProcess
from optimizer.core.safe_text import readable_entries
from optimizer.deploy import runtime
from optimizer.deploy.managed_target import (
    ManagedTarget,
    RepositoryCopy,
    auto_complete_options,
    exports_metrics,
    load_model,
)
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.server_process import Server, remove_leftovers, shared_memory_prefix
from optimizer.deploy.target_settings import LOOPBACK, ServerPorts, TargetSettings
from optimizer.machine.nvml import BUS_ORDER, VISIBLE_DEVICES, mps_share
from optimizer.measure.server_client import CallError
from optimizer.measure.server_errors import missing_module, without_traceback

STUB_SHELL = "bash"  # shell with which Triton's Python backend starts the process of a model
NO_STUB_SHELL = "bash is missing, with which Triton starts the process of a model"
INSTALL_STUB_SHELL = "apt-get install bash"
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

        It links the packages of which the stub needs another version than this environment has, and those in the
        folders of the user's PYTHONPATH, which the stub ignores.
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
        folders = [*filter(None, [runtime.stub_packages]), *map(Path, user_python_path())]
        for package in (package for folder in folders for package in readable_entries(folder)):
            if not package.name.startswith("."):
                with contextlib.suppress(FileExistsError):  # the first one counts
                    self.packages.joinpath(package.name).symlink_to(package)


def user_python_path() -> list[str]:
    """Return the folders of the user's ``PYTHONPATH``, absolute because the server runs in another folder."""
    return [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


class TritonServer(Server):
    """A tritonserver process that serves the repository in ``folder``.

    Over HTTP, models are loaded only with the header ``tritune: <http_secret>``.
    """

    def __init__(self, folder: ServerFolder, installation: Installation, settings: TargetSettings) -> None:
        super().__init__(folder.path.name, str(installation.tritonserver), "--tritonserver", settings)
        self.http_secret = secrets.token_hex(16)
        self._folder = folder
        self._installation = installation
        self._environment = {**BUS_ORDER, **installation.environment}
        if not settings.sees_gpus:
            self._environment[VISIBLE_DEVICES] = ""
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
            *self._server_options,
        ]
        return SupervisedProcess(
            command,
            log=self.log.path,
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
                arguments=(*auto_complete_options(source.models.values()), *settings.arguments),
                exports_metrics=settings.exports_metrics or bool(settings.ports) or exports_metrics(source),
            )
            super().__init__(source, TritonServer(folder, installation, settings), folder, settings)
            undo.pop_all()


def complete_config(source: ModelSource, find: Callable[[], Installation], limit_seconds: float) -> ModelSource:
    """Return ``source`` with the inputs and outputs that Triton's auto-completion finds in the model.

    ``find`` returns the server to start for it; it has to start, and the model to load, within ``limit_seconds``. A
    source that is complete is returned unchanged. Raises BadInputError if the model does not load, or has no inputs
    or outputs either.
    """
    if source.config.input and source.config.output:
        return source
    path = source.repository / source.name / "config.pbtxt"
    completed = _auto_completed_config(source, find(), path, limit_seconds)
    if not (completed.input and completed.output):
        raise BadInputError(
            f"{path}: has no inputs or outputs, and the model does not declare them either; write them"
        )
    config = model_config.with_explicit_counts(source.config, gpu=True)  # a copy
    for name in ("input", "output"):
        config.ClearField(name)
        getattr(config, name).extend(getattr(completed, name))
    config.max_batch_size = completed.max_batch_size
    if completed.HasField("dynamic_batching") and not config.WhichOneof("scheduling_choice"):
        config.dynamic_batching.CopyFrom(completed.dynamic_batching)
    if completed.HasField("model_transaction_policy"):
        config.model_transaction_policy.CopyFrom(completed.model_transaction_policy)
    return replace(source, config=model_config.without_default_preferred_size(config))


def _auto_completed_config(
    source: ModelSource, installation: Installation, path: Path, limit_seconds: float
) -> ModelConfig:
    """Return the configuration that a new server reports for the model, whose config.pbtxt is ``path``.

    Raises BadInputError if the model does not load.
    """
    folder = ServerFolder(source, installation)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        settings = TargetSettings(folder.path / "tritonserver.log", model_load_timeout_seconds=limit_seconds)
        server = TritonServer(folder, installation, settings)
        undo.callback(server.stop)
        try:
            client = server.client()
            load_model(server, client, source.name, None, limit_seconds)
            return client.config(source.name)
        except (CallError, DeploymentError) as error:
            reason = without_traceback(str(error)) if isinstance(error, CallError) else str(error)
            if module := missing_module(str(error)):
                reason += f"; {server.import_advice(module, source.config)}"
            raise BadInputError(f"{path}: has no inputs or outputs, and {reason}") from None
        except ServerFault as error:
            raise ServerFault(str(error)) from None  # without the log, which is removed with the folder
