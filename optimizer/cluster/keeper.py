"""What workers tell, kept and shown by the driver: its folder is the one truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optimizer.cluster.events import Failed, Finished, Measured, Said, Started
from optimizer.cluster.place import Happening
from optimizer.cluster.worker import REFERENCES
from optimizer.measuring import Record, Watcher
from optimizer.store.disk import write_whole
from optimizer.store.run_folder import RunFolder


@dataclass
class Keeper:
    table: Record
    watcher: Watcher
    folder: RunFolder
    say: Callable[[str], None]
    _given: set[object] = field(default_factory=set)

    def keep(self, host: str, event: Happening) -> None:
        """A row is on disk when this returns; the rest of what a worker tells is shown, or nothing of the keeper's.
        Raises EnvironmentFault where the disk refuses it."""
        match event:
            case Started(number, candidate, role):
                self.watcher.trial_started(number, candidate, role)
            case Measured(trial, load, measurement, confirmation):
                self.table.append(trial, load, measurement, confirmation)
                self.watcher.measured(trial.number, load, measurement)
            case Failed(trial):
                self.table.append_failure(trial)
            case Finished(trial, best):
                self.watcher.trial_finished(trial, best)
            case Said(line):
                self.say(f"{host}: {line}")

    def log(self, number: int, text: str) -> Path | None:
        """The end of a log that is on a node, of a trial that failed."""
        if not text:
            return None
        path = self.folder.server_log.with_name(f"trial-{number}.log")
        write_whole(path, text)
        return path

    def references(self, worker: object) -> dict[str, bytes]:
        """The answers to compare with, the first time that ``worker`` is sent work after they are known."""
        found = {path.name: path.read_bytes() for path in self.folder.path.glob(REFERENCES)}
        if worker in self._given:
            return {}
        if found:
            self._given.add(worker)
        return found

    def keep_references(self, worker: object, found: Mapping[str, bytes]) -> None:
        """Those of the first baseline that was asked."""
        if found:
            self._given.add(worker)
        for name, content in found.items():
            path = self.folder.path / Path(name).name
            if not path.exists():
                write_whole(path, content)
