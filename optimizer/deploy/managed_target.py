"""The target whose server tune starts: a copy of the model repository, and the loading of candidates into it."""

from __future__ import annotations

import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import Message

from optimizer.config import gpu_placement, model_config, model_json
from optimizer.config.backends import has_llm_engine
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource, ServedModels, served_models
from optimizer.config.version_folders import is_model_folder
from optimizer.core import interrupts
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, EnvironmentFault, ModelRefused, ServerCrashed
from optimizer.core.process import RunningProcess
from optimizer.core.safe_text import exists, readable_entries
from optimizer.deploy.server_process import (
    Server,
    dead_model_processes,
    new_folder,
    remove_environment_folders,
    temporary_parent,
)
from optimizer.deploy.target_settings import TargetSettings, model_load_timeout_within
from optimizer.measure.server_client import CallError, ServerClient
from optimizer.measure.server_errors import (
    hides_cause,
    lacks_gpu_memory,
    lacks_memory,
    missing_module,
    model_died,
    without_traceback,
)


class RepositoryCopy(ABC):
    """A copy of a model repository in a temporary folder. Each model has its own config.pbtxt there.

    If candidates change model.json, each model has its own copy of this file, too. All other files are shared with
    the original, also those next to the models, which some models read. Raises EnvironmentFault if the folder cannot
    be written.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        with _disk_errors():
            self.path = new_folder()
        with self._removed_on_error():
            for name, config in source.models.items():
                self._add_model(name, ensemble=config.HasField("ensemble_scheduling"))
                self.write_config(name, config)
            for entry in readable_entries(source.repository):
                is_other = not (entry.name.startswith(".") or entry.name in source.models or is_model_folder(entry))
                if is_other and exists(entry):  # else a link that leads nowhere, see ``forget_vanished``
                    self._share(entry, self.repository / entry.name)

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    def write_config(self, model: str, config: Message) -> None:
        """Write the config.pbtxt of ``model``. Raises EnvironmentFault if the disk refuses it."""
        with _disk_errors():
            self.repository.joinpath(model, "config.pbtxt").write_text(model_config.to_text(config))

    def write_files(self, model: str, files: Mapping[str, bytes]) -> None:
        """Write each model.json, by path in the folder of ``model``. Raises EnvironmentFault as above."""
        with _disk_errors():
            for path, content in files.items():
                self.repository.joinpath(model, path).write_bytes(content)

    def forget_vanished(self) -> None:
        """Remove links to files and folders that were removed: Triton cannot list a repository with one of them."""
        with _disk_errors():
            for entry in self.repository.iterdir():
                if not exists(entry):
                    entry.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder; no effect if it does not exist."""
        shutil.rmtree(self.path, ignore_errors=True)

    @abstractmethod
    def _share(self, entry: Path, at: Path) -> None:
        """Make the file or folder ``entry`` of the original repository visible to the server at ``at``."""

    @contextlib.contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            with _disk_errors():
                yield
        except BaseException:
            self.remove()
            raise

    def _add_model(self, name: str, *, ensemble: bool) -> None:
        model = self.repository / name
        model.mkdir(parents=True)
        changeable = model_json.versions(self._source.folder(name)) if self._source.varies_model_json else []
        for entry in self._source.folder(name).iterdir():
            if entry in changeable:
                self._add_version(entry, model / entry.name)
            elif entry.name != "config.pbtxt":
                self._share(entry, model / entry.name)
        if ensemble:  # Triton needs its version folder, which is empty and therefore often not in the repository
            model.joinpath("1").mkdir(exist_ok=True)

    def _add_version(self, version: Path, at: Path) -> None:
        """Add a version folder with its own model.json, which candidates change."""
        at.mkdir()
        for entry in version.iterdir():
            if entry.name == model_json.FILE:
                at.joinpath(entry.name).write_bytes(entry.read_bytes())
            else:
                self._share(entry, at / entry.name)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or "it cannot be written"
        raise EnvironmentFault(
            f"no temporary folder for the server in {temporary_parent()}: {reason}; free space there or set TMPDIR"
        ) from error


class ModelContent(NamedTuple):
    """The files that a model is loaded with: the text of config.pbtxt, and each model.json by its path."""

    config: str
    model_json: Mapping[str, bytes]


UNKNOWN_CONTENT = ModelContent("", {})  # content of a loaded model whose configuration is unknown
CHECK_SECONDS = 2.0  # between two checks whether a server that loads a model still responds


class ModelLoader:
    """Loads the models of a deployment into ``server``, from ``folder``."""

    def __init__(self, server: Server, folder: RepositoryCopy, settings: TargetSettings) -> None:
        self._server = server
        self._folder = folder
        self._log = settings.log
        self._timeout_seconds = settings.model_load_timeout_seconds
        self._sees_gpus = settings.sees_gpus
        self._loaded: dict[str, ModelContent] = {}  # by model
        self._loaded_by: RunningProcess | None = None

    def load(self, models: ServedModels, *, from_files: bool) -> dict[str, ModelConfig]:
        """Load those of ``models`` that are not loaded with this configuration yet, and unload all others.

        Return the configurations that the server reports, in which it has chosen the kind of each instance. With
        ``from_files`` the server reads config.pbtxt from disk instead of an override in the request. If the server
        dies, it may be due to the models that it unloads, so ``models`` is loaded once more by a new one. Raises
        ModelRefused if the server refuses the configuration, DeploymentError if it does not load, ServerCrashed or
        ServerFault if the server fails.
        """
        client = self._server.client()
        if self._server.running is not self._loaded_by:
            self._loaded, self._loaded_by = {}, self._server.running
        replaces_models = bool(self._loaded)
        try:
            return self._load_all(models, client, from_files=from_files)
        except ServerCrashed as error:
            if not (replaces_models and error.has_ended):
                raise
        return self.load(models, from_files=from_files)

    def _load_all(self, models: ServedModels, client: ServerClient, *, from_files: bool) -> dict[str, ModelConfig]:
        self._server.log.mark()
        self._folder.forget_vanished()
        for name in [name for name in self._loaded if name not in models.configs]:
            self._unload(name, client)
        configs = {name: model_config.without_response_cache(config) for name, config in models.configs.items()}
        files = {name: models.files if name == models.batcher else {} for name in configs}
        contents = {name: ModelContent(model_config.to_text(configs[name]), files[name]) for name in configs}
        changed = [name for name in contents if self._loaded.get(name) != contents[name]]
        for name in changed:
            self._folder.write_files(name, files[name])
            if from_files:
                self._folder.write_config(name, configs[name])
        if from_files:
            changed = self._unload_ensembles(changed, configs, client)
        for name in changed:
            if name in self._loaded and (files[name] or self._fills_gpu(configs[name])):
                self._unload(name, client)
            if name in self._loaded:
                self._loaded[name] = UNKNOWN_CONTENT  # a refused reload leaves the old configuration loaded
            self._load(client, name, configs[name], from_files=from_files)
            self._loaded[name] = contents[name]  # also if the next model is refused
        self._loaded = contents
        return self._check(models, client)

    def _unload_ensembles(
        self, changed: list[str], configs: Mapping[str, ModelConfig], client: ServerClient
    ) -> list[str]:
        """Unload the ensembles with their steps if one of these is in ``changed`` and one may use a GPU's memory.

        Return the models to load. Triton loads an ensemble together with all of its steps, also those that have not
        changed, and each is loaded before its old copy ends.
        """
        steps = {step.model_name for config in configs.values() for step in config.ensemble_scheduling.step}
        ensembles = {name for name, config in configs.items() if config.HasField("ensemble_scheduling")}
        connected = [name for name in configs if name in steps | ensembles]
        if any(name in changed for name in connected) and any(self._fills_gpu(configs[name]) for name in connected):
            for name in reversed(connected):  # a step of a loaded ensemble cannot be unloaded
                if name in self._loaded:
                    self._unload(name, client)
        if any(name in self._loaded for name in connected):
            return changed
        self._loaded |= dict.fromkeys(steps, UNKNOWN_CONTENT)  # some are loaded even if another step is refused
        to_load = {*changed, *ensembles} - steps
        return [name for name in configs if name in to_load]

    def _fills_gpu(self, config: ModelConfig) -> bool:
        """Return whether a model has to be unloaded before it is loaded again, because it may use a GPU's memory.

        Triton loads the new model first, and ends the processes of the old one up to seconds after that. So a GPU
        would have to hold both, and the memory of the old one would count as that of the new one. New processes also
        have no errors of CUDA that make all further calls fail.
        """
        return has_llm_engine(config) or (self._sees_gpus and gpu_placement.used_gpus([config]) != ())

    def _load(self, client: ServerClient, name: str, config: ModelConfig, *, from_files: bool) -> None:
        override = None if from_files else model_config.to_override_json(config)
        try:
            load_model(self._server, client, name, override, self._timeout_seconds)
        except CallError as error:
            raise self._handle_failure(error, config) from error

    def _unload(self, name: str, client: ServerClient) -> None:
        """Unload a model and wait for the end of the unload, which runs in the background."""
        self._loaded.pop(name)
        deadline = time.monotonic() + self._timeout_seconds
        try:
            client.unload(name)
            while client.holds(name):
                if time.monotonic() > deadline:
                    raise self._server.stop_after_crash("unloading", f"{name} was not unloaded")
                time.sleep(0.02)
        except CallError as error:
            raise self._handle_failure(error) from error

    def _check(self, models: ServedModels, client: ServerClient) -> dict[str, ModelConfig]:
        """Return the served configurations.

        Raises DeploymentError if they differ from ``models``: a failed reload may leave the old one ready.
        """
        try:
            serving = {name: client.config(name) for name in models.configs}
            ready = all(map(client.is_ready, models.configs))
        except CallError as error:
            raise self._handle_failure(error) from error
        differences = models.differences(serving)
        if differences or not ready:
            self._loaded = dict.fromkeys(self._loaded, UNKNOWN_CONTENT)
            raise DeploymentError(
                f"the server serves another configuration: {'; '.join(differences) or 'not ready'}", log=self._log
            )
        return serving

    def _handle_failure(self, error: CallError, loaded: ModelConfig | None = None) -> DeploymentError:
        """Return the error to raise: the server refuses the model that it ``loaded``, or it has crashed.

        A server that has crashed or lacks memory is stopped.
        """
        answer = str(error)
        if model_died(answer):
            return self._server.stop_after_crash("loading", "the model's process died while loading")
        if not self._server.responds():
            return self._server.stop_after_crash("loading")
        message = without_traceback(answer)
        if hides_cause(message) and (cause := self._server.log.unreadable_model()):
            message = f"the server cannot read {cause}"
        advice = self._server.import_advice(module, loaded) if loaded and (module := missing_module(answer)) else ""
        message = f"{message}; {advice}" if advice else message
        if lacks_memory(answer):
            self._server.stop()  # a new process has all of the memory for the next candidate
            return DeploymentError(message, log=self._log)
        if too_little := lacks_gpu_memory(answer):
            self._server.stop()  # instances that did load hold their memory until their processes have ended
        return ModelRefused(message, log=self._log, lacks_gpu_memory=too_little, has_advice=bool(advice))


def load_model(server: Server, client: ServerClient, name: str, config: str | None, limit_seconds: float) -> None:
    """Load a model with the configuration ``config`` (JSON), or with its file if that is None.

    A load ends as soon as the server or the process of the model has died. Raises ServerCrashed for that,
    DeploymentError after ``limit_seconds``, and CallError if the server refuses the model.
    """
    died_before = dead_model_processes(server.pid)
    died: frozenset[int] = frozenset()
    loading = _in_background(lambda: client.load(name, config, limit_seconds))
    while not wait_for([loading], CHECK_SECONDS).done:
        if not server.responds():
            raise server.stop_after_crash("loading")
        # the server itself notices most of these deaths; between two checks it has the time to do so
        died, died_earlier = dead_model_processes(server.pid) - died_before, died
        if died & died_earlier:
            raise server.stop_after_crash("loading", "the model's process died while loading")
    try:
        loading.result()
    except CallError as error:
        if error.failure != "overdue":
            raise
        server.stop()  # a load cannot be cancelled
        raise DeploymentError(_slow_load(limit_seconds), log=server.log.path) from error


def _slow_load(limit_seconds: float) -> str:
    one_hour = model_load_timeout_within(3600.0)  # less than the limit of a sweep, which has no budget
    advice = f"; a run with --budget 1h permits {one_hour:g} s" if limit_seconds < one_hour else ""
    return f"loading took longer than {limit_seconds:g} s{advice}"


def _in_background(call: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


class ManagedTarget:
    """Serves candidates of ``source`` on a server that tune starts, from a copy of the model repository.

    A candidate is deployed by loading the model with its configuration as an override, and verified by reading the
    configuration back. With several models the configurations are written to files, because an override does not
    apply to the steps of an ensemble. The server starts with the first deployment, or earlier with ``start()``. It is
    restarted when it has died or no longer responds, and for a candidate with other CPUs or server options.

    A ServerCrashed that the load generator raises while a candidate is served stops the server, and is raised again
    with the error in the server's log.

    With several server processes each has its own target, and ServerProcesses calls ``launch``, ``serve`` and
    ``stop_after_crash`` of each.
    """

    def __init__(self, source: ModelSource, server: Server, folder: RepositoryCopy, settings: TargetSettings) -> None:
        self.source = source
        self._sees_gpus = settings.sees_gpus
        self.log = server.log.path
        self._server = server
        self._folder = folder
        self._stopwatch = settings.stopwatch
        self._loader = ModelLoader(server, folder, settings)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        """Serve ``candidate`` and yield where it is reached.

        With ``fresh`` a new server reads config.pbtxt from disk, which proves that the file loads. Raises
        DeploymentError, ServerCrashed or ServerFault.
        """
        if fresh:
            self.stop()
        endpoint = self.serve(candidate, from_files=fresh)
        try:
            yield endpoint
        except ServerCrashed as error:
            raise self.stop_after_crash(error) from error

    def close(self) -> None:
        """Stop the server and remove the copy of the repository; interrupts are delayed until that is done."""
        with interrupts.deferred(), contextlib.ExitStack() as closing:
            closing.callback(remove_environment_folders)
            closing.callback(self._folder.remove)
            closing.callback(self.stop)

    def start(self) -> None:
        """Launch the server without waiting for it; no effect while it is running."""
        self._server.start()

    def forget_vanished(self) -> None:
        """Remove links of the copy to files that were removed from the original repository."""
        self._folder.forget_vanished()

    def launch(self, candidate: Candidate, position: int = 0) -> None:
        """Launch the server for ``candidate`` without waiting for it; no effect while it runs with its settings.

        ``position`` is its number among the server processes, from 0.
        """
        with self._stopwatch.count("server"):
            self._server.position = position
            self._server.run_for(candidate)
            self._server.start()

    def stop(self) -> None:
        """Stop the server; the next deployment starts a new one."""
        with self._stopwatch.count("server"):
            self._server.stop()

    def responds(self) -> bool:
        """Return whether the server runs and responds."""
        return self._server.responds()

    def has_logged_error(self) -> bool:
        """Return whether the server has logged an error since its last deployment began."""
        return bool(self._server.log.last_error())

    @property
    def server_version(self) -> str:
        """The version that the server reports; empty before the first deployment."""
        return self._server.version

    def serve(self, candidate: Candidate, *, from_files: bool = False) -> Endpoint:
        """Serve ``candidate`` until the next call and return where it is reached; see ``deploy`` for the errors.

        With ``from_files``, or with several models, the server reads config.pbtxt from disk.
        """
        models, server = served_models(self.source, candidate), self._server
        with self._stopwatch.count("server"):
            server.run_for(candidate)
            reported = self._loader.load(models, from_files=from_files or len(self.source.models) > 1)
        gpus = gpu_placement.used_gpus(reported.values()) if self._sees_gpus else ()
        endpoint = Endpoint(models.model, candidate, server.grpc, server.http, server.pid)
        return replace(
            models.served_by(endpoint, self.source, reported),
            memory_bytes=server.memory_bytes,
            gpus=gpus,
            fell_back_to_cpu=self._sees_gpus
            and gpus == ()
            and gpu_placement.used_gpus(models.configs.values()) is None,
            metrics=server.metrics,
        )

    def stop_after_crash(self, error: ServerCrashed) -> ServerCrashed:
        """Stop the server after ``error`` of the load generator; return the error with the last one in its log."""
        return self._server.stop_after_crash(error.doing, str(error) if self._server.responds() else "")


def exports_metrics(source: ModelSource) -> bool:
    """Return whether a model of ``source`` exports metrics that tune reads: those of a language model's engine."""
    return any(map(has_llm_engine, source.models.values()))


def auto_complete_options(configs: Iterable[ModelConfig]) -> list[str]:
    """Return the server options that turn Triton's auto-completion off, or none if one of ``configs`` needs it.

    It is on only then, because with it a Python model takes one more stub process a load, and backends add dynamic
    batching to a config.pbtxt that has none.
    """
    complete = all(config.input and config.output for config in configs)
    return ["--disable-auto-complete-config"] if complete else []
