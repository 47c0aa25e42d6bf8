"""The folder that a server of tune's own runs from: a repository; for the embedded one backends and packages too."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from google.protobuf.message import Message

from optimizer import model_config
from optimizer.deploy import leftovers
from optimizer.deploy.installation import Installation
from optimizer.errors import EnvironmentFault
from optimizer.model_source import ModelSource
from optimizer.runtime import Runtime

BACKENDS = Path(__file__).parent.parent / "backends"


class ServerFolder:
    """A private copy of the repository (links, and a config.pbtxt for each model) in a temporary folder.

    Raises EnvironmentFault where the disk refuses it.
    """

    def __init__(self, source: ModelSource, installation: Installation) -> None:
        self._source = source
        with contextlib.ExitStack() as undo:
            try:
                self.path = leftovers.new_folder()
                undo.callback(self.remove)
                self._link_repository()
                self.packages.mkdir()
                self.backends = installation.backends or self.path / "backends"
                if installation.brought is not None:
                    self._assemble_backends(installation.brought)
                    self._link_packages(installation.brought)
            except OSError as error:
                raise _refused(error) from error
            undo.pop_all()

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    @property
    def packages(self) -> Path:
        """The server's current folder, which comes first in the stub's search for packages: holds what the stub
        needs otherwise than this environment has it, and nothing of the user's."""
        return self.path / "packages"

    @property
    def shared_memory_prefix(self) -> str:
        return leftovers.shared_memory_prefix(self.path)

    def write_config(self, model: str, config: Message) -> None:
        """Make ``config`` the model's config.pbtxt. Raises EnvironmentFault."""
        try:
            self.repository.joinpath(model, "config.pbtxt").write_text(model_config.to_text(config))
        except OSError as error:
            raise _refused(error) from error

    def remove(self) -> None:
        """May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _link_repository(self) -> None:
        for name, config in self._source.models.items():
            model = self.repository / name
            model.mkdir(parents=True)
            for entry in self._source.folder(name).iterdir():
                if entry.name != "config.pbtxt":
                    model.joinpath(entry.name).symlink_to(entry.resolve())
            if config.HasField("ensemble_scheduling"):  # whose version folder is empty, and seldom kept
                model.joinpath("1").mkdir(exist_ok=True)
            self.write_config(name, config)

    def _assemble_backends(self, runtime: Runtime) -> None:
        """Copies: Triton refuses a backend whose library a link leads out of the backend directory."""
        shutil.copytree(runtime.python_backend, self.backends / "python")
        shutil.copy(runtime.stub, self.backends / "python")
        for backend in BACKENDS.iterdir():
            if backend.joinpath("model.py").exists():
                shutil.copytree(backend, self.backends / backend.name)

    def _link_packages(self, runtime: Runtime) -> None:
        own = runtime.stub_packages
        for package in own.iterdir() if own else ():
            self.packages.joinpath(package.name).symlink_to(package)


def _refused(error: OSError) -> EnvironmentFault:
    why = error.strerror or "it cannot be written"
    return EnvironmentFault(f"no temporary folder for the server: {why}; free space there or set TMPDIR")
