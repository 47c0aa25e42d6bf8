"""A copy of the model repository for a server: a config.pbtxt of its own for each model, the rest shared."""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import Message

from optimizer import model_config
from optimizer.deploy import leftovers
from optimizer.errors import EnvironmentFault
from optimizer.model_source import ModelSource


class PrivateRepository(ABC):
    """In a temporary folder. Raises EnvironmentFault where the disk refuses it."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        with _refusals_told():
            self.path = leftovers.new_folder()
        with self._filling():
            for name, config in source.models.items():
                self._add_model(name, ensemble=config.HasField("ensemble_scheduling"))
                self.write_config(name, config)

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    def write_config(self, model: str, config: Message) -> None:
        """Make ``config`` the model's config.pbtxt. Raises EnvironmentFault."""
        with _refusals_told():
            self.repository.joinpath(model, "config.pbtxt").write_text(model_config.to_text(config))

    def remove(self) -> None:
        """May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)

    @abstractmethod
    def _share(self, entry: Path, at: Path) -> None:
        """Let a server find the file or folder ``entry`` of the given repository at ``at`` in this one."""

    @contextlib.contextmanager
    def _filling(self) -> Iterator[None]:
        """Nothing is left where that fails."""
        try:
            with _refusals_told():
                yield
        except BaseException:
            self.remove()
            raise

    def _add_model(self, name: str, *, ensemble: bool) -> None:
        model = self.repository / name
        model.mkdir(parents=True)
        for entry in self._source.folder(name).iterdir():
            if entry.name != "config.pbtxt":
                self._share(entry, model / entry.name)
        if ensemble:  # whose version folder is empty, and seldom kept
            model.joinpath("1").mkdir(exist_ok=True)


@contextlib.contextmanager
def _refusals_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or "it cannot be written"
        mend = "free space there or set TMPDIR"
        raise EnvironmentFault(f"no temporary folder for the server: {why}; {mend}") from error
