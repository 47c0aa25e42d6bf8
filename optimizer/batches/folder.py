"""The folder of a batch, ``results/batches/<suite>/<batch>/``: what is kept, and how it is found again."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from optimizer.batches.record import RECORD, BatchRecord
from optimizer.errors import BadInputError
from optimizer.profile.safe_paths import is_file
from optimizer.store.disk import write_whole
from optimizer.store.locks import alone_in
from optimizer.untrusted import one_line, read_bytes

FILE = "batch.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """batch.json, index.html, junit.xml and a folder for each run."""

    path: Path

    @classmethod
    def create(cls, out: str, suite: str) -> BatchFolder:
        """A new folder named by the time. Raises BadInputError where ``out`` cannot be written."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        parent = Path(out) / "batches" / suite
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for name in (stamp, *(f"{stamp}-{i}" for i in range(2, 100))):
                with contextlib.suppress(FileExistsError):
                    (parent / name).mkdir()
                    return cls(parent / name)
        except OSError as error:
            told = f"results folder {out}: cannot write there ({error.strerror}); choose another with --out"
            raise BadInputError(told) from None
        raise BadInputError(f"results folder {parent}: too many batches began this second")

    @classmethod
    def find(cls, batch: str, flag: str) -> BatchFolder:
        """By its path, or that of its batch.json. Raises BadInputError."""
        path = Path(batch)
        path = path.parent if path.name == FILE else path
        if not is_file(path / FILE):
            raise BadInputError(f"{flag} {one_line(batch)}: no {FILE} there; give the folder of a batch")
        return cls(path)

    @classmethod
    def all_of(cls, out: str, suite: str) -> list[BatchFolder]:
        """Those of a suite, the newest first; what is no batch is left out."""
        parent = Path(out) / "batches" / suite
        found = sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []
        return [cls(path) for path in found if is_file(path / FILE)]

    @property
    def record(self) -> Path:
        return self.path / FILE

    @property
    def index(self) -> Path:
        return self.path / "index.html"

    @property
    def junit(self) -> Path:
        return self.path / "junit.xml"

    def read(self) -> BatchRecord:
        """Raises BadInputError where batch.json is not one of ours."""
        data = read_bytes(self.record, MAX_BYTES, "give the folder of a batch")
        try:
            return RECORD.validate_json(data, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            told = one_line(f"{where}: {first['msg']}", 200)
            raise BadInputError(f"{one_line(str(self.record))}: not the record of a batch ({told})") from None

    def write(self, record: BatchRecord) -> None:
        """Raises EnvironmentFault where the disk refuses it."""
        write_whole(self.record, RECORD.dump_json(record, indent=2) + b"\n")

    def locked(self) -> AbstractContextManager[None]:
        """Keep others out of the folder. Raises EnvironmentFault naming the process that is at work in it."""
        return alone_in(self.path, "this batch")
