"""A private copy of the model repository, as a container sees it: what it shares is mounted there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from optimizer.deploy.docker.settings import Bind
from optimizer.deploy.private_repository import PrivateRepository
from optimizer.model_source import ModelSource

AT = "/models"


class MountedRepository(PrivateRepository):
    """At ``/models`` of a container that is given ``binds``.

    Links are no way to share: a container has none of this machine's paths. The links that the given repository has
    itself work there: what they lead to is mounted where they look for it.
    """

    def __init__(self, source: ModelSource) -> None:
        self._shared: list[Bind] = []
        super().__init__(source)
        self.path.joinpath("repository").chmod(0o755)  # a container's user may be none of this machine's

    @property
    def binds(self) -> tuple[Bind, ...]:
        return (Bind(self.repository, AT), *self._shared)

    def _share(self, entry: Path, at: Path) -> None:
        source = entry.resolve()
        if source.is_dir():
            at.mkdir()
        else:
            at.touch()
        seen_at = f"{AT}/{at.relative_to(self.repository).as_posix()}"
        self._shared.append(Bind(source, seen_at))
        for link in _links(source):
            folder = Path(seen_at, link.relative_to(source)).parent
            leads_to = os.path.normpath(folder / link.readlink())
            inside = Path(leads_to).is_relative_to(AT)
            if not inside and link.exists() and leads_to not in {one.at for one in self._shared}:
                self._shared.append(Bind(link.resolve(), leads_to))


def _links(folder: Path) -> Iterator[Path]:
    for above, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(above, name)).is_symlink())
