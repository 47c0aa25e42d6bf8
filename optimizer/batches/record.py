"""batch.json: what a batch has come to, written after each slice; the next batch is compared with it."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from objectives.metrics import METRICS
from optimizer.batches.suite import Suite
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.profile.safe_paths import is_file, plain_name
from optimizer.store.disk import cannot_write, write_whole
from optimizer.store.locks import locked
from optimizer.untrusted import one_line, read_bytes

FILE = "batch.json"
MAX_BYTES = 64 << 20
LONGEST_NAME = 80  # characters of a run's folder

State = Literal["waiting", "searched", "found", "none", "failed"]
Kind = Literal["new", "lost", "gained", "noise", "undecided", "incomparable", "met", "missed", "same", "failed"]


@dataclass(frozen=True)
class Figure:
    """A metric of what is recommended, with the interval that its confirmation gives; None is unknown."""

    metric: str
    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: a batch.json comes from anywhere."""
        if self.metric not in METRICS or not 0 < self.value < math.inf:
            raise ValueError(f"{self.metric} {self.value} is no figure")


@dataclass(frozen=True)
class Change:
    """The difference to an earlier batch. ``share``: of its figure, negative is worse; ``low`` and ``high`` are what
    the intervals allow."""

    kind: Kind
    since: str
    told: str
    share: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class EntryRecord:
    """``folder``: of the run, in that of the batch. ``waiting``: it has not had its minimum; ``searched``: it may
    go on, or be confirmed. ``seconds``: wall time without what was set up once.

    Figures are comparable where all ``conditions`` are the same; ``circumstances`` may explain a difference.
    """

    model: str
    sla: str
    target: str
    command: str
    folder: str
    state: State = "waiting"
    reason: str = ""
    seconds: float = 0.0
    search_is_over: bool = False
    trials: int = 0
    measured: int = 0
    figure: Figure | None = None
    baseline: Figure | None = None
    headline: str = ""
    verdict: str = ""
    speedup: float | None = None
    configuration: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    circumstances: dict[str, str] = field(default_factory=dict)
    change: Change | None = None
    regressed: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, as that of ``Figure``."""
        plain_name(self.folder)

    @property
    def label(self) -> str:
        return " · ".join(filter(None, (self.model, self.sla, self.target)))

    @property
    def is_done(self) -> bool:
        return self.state in ("found", "none", "failed")


@dataclass(frozen=True)
class BatchRecord:
    """``previous``: the batch that it is compared with; ``gone``: entries that only that one has."""

    suite: str
    started: str
    budget_seconds: float
    entries: tuple[EntryRecord, ...]
    status: Literal["running", "finished", "interrupted"] = "running"
    written: str = ""
    previous: str = ""
    gone: tuple[str, ...] = ()

    @property
    def spent_seconds(self) -> float:
        return sum(entry.seconds for entry in self.entries)

    @property
    def date(self) -> str:
        return one_line(self.started[:10])


RECORD = TypeAdapter(BatchRecord)


def begun(suite: Suite, budget_seconds: float) -> BatchRecord:
    """That of a new batch."""
    folders: list[str] = []
    for number, entry in enumerate(suite.entries):
        name = re.sub(r"[^A-Za-z0-9]+", "-", entry.label).strip("-")[:LONGEST_NAME] or "run"
        folders.append(name if name not in folders else f"{name}-{number + 1}")
    entries = (
        EntryRecord(one.model, one.sla, one.target, one.command, folder)
        for one, folder in zip(suite.entries, folders, strict=True)
    )
    return BatchRecord(suite.name, time.strftime("%Y-%m-%dT%H:%M:%S%z"), budget_seconds, tuple(entries))


def gone_on(record: BatchRecord, suite: Suite, budget_seconds: float | None) -> BatchRecord:
    """``record`` to go on with: what is done stays, what failed is tried again.

    Raises BadInputError where the suite has other entries by now.
    """
    then, now = ({entry.label: entry.command for entry in entries} for entries in (record.entries, suite.entries))
    for label in [*then, *now]:
        if then.get(label) != now.get(label):
            how = "has gone from it" if label not in now else "is new in it" if label not in then else "is another"
            told = f"{suite.path}: {label} {how} since that batch began; start a new one, without --resume"
            raise BadInputError(told)
    by_label = {entry.label: entry for entry in record.entries}
    entries = (by_label[label] for label in now)
    tried = (replace(one, state="waiting", reason="") if one.state == "failed" else one for one in entries)
    return replace(record, entries=tuple(tried), budget_seconds=budget_seconds or record.budget_seconds)


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """``results/batches/<suite>/<batch>/``: batch.json, index.html, junit.xml and a folder for each run."""

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

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises EnvironmentFault naming the process that is at work in the folder."""

        def busy(holder: str) -> None:
            raise EnvironmentFault(f"{self.path}: {holder} is at work on this batch; wait for its end, or end it")

        lock = self.path / ".lock"
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(lock, busy))
            except OSError as error:
                raise cannot_write(lock, error) from error
            yield
