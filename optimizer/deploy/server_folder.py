"""The folder that a server of this machine runs from: a repository, for the embedded one backends and packages."""

from __future__ import annotations

import shutil
from pathlib import Path

from optimizer.deploy import leftovers
from optimizer.deploy.installation import Installation
from optimizer.deploy.private_repository import PrivateRepository
from optimizer.model_source import ModelSource
from optimizer.runtime import Runtime

BACKENDS = Path(__file__).parent.parent / "backends"


class ServerFolder(PrivateRepository):
    """With links to the files of the repository that was given."""

    def __init__(self, source: ModelSource, installation: Installation) -> None:
        super().__init__(source)
        self.backends = installation.backends or self.path / "backends"
        with self._filling():
            self.packages.mkdir()
            if installation.brought is not None:
                self._assemble_backends(installation.brought)
                self._link_packages(installation.brought)

    @property
    def packages(self) -> Path:
        """The server's current folder, which comes first in the stub's search for packages: holds what the stub
        needs otherwise than this environment has it, and nothing of the user's."""
        return self.path / "packages"

    @property
    def shared_memory_prefix(self) -> str:
        return leftovers.shared_memory_prefix(self.path)

    def _share(self, entry: Path, at: Path) -> None:
        at.symlink_to(entry.resolve())

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
