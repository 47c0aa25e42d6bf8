"""batch.json, the record of a batch: written after each step and compared with by the next batch."""

from __future__ import annotations

import contextlib
import math
import re
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from objectives.intervals import ObjectiveGain
from objectives.sla import metric_name
from optimizer.core.errors import BadInputError
from optimizer.core.files import write_atomically
from optimizer.core.locks import folder_lock
from optimizer.core.safe_text import check_file_name, is_file, one_line, quote, read_bytes, show_path
from optimizer.results.formatting import ComparedSide, count
from optimizer.results.summary import UNKNOWN_TESTS, RemainingTests
from optimizer.store.run_folder import BATCH_FILE, WRITTEN_FORMAT, FileIn, damaged_record, new_folder
from optimizer.store.run_lookup import BATCHES, newest_first, subfolders
from optimizer.study.batch.suite import Suite

MAX_NAME_LENGTH = 80  # limit for the name of a run's folder

EntryStatus = Literal["waiting", "searched", "found", "none", "failed"]
ChangeKind = Literal["new", "lost", "gained", "noise", "undecided", "incomparable", "met", "missed", "same", "failed"]


@dataclass(frozen=True)
class Estimate:
    """A metric of a recommendation with its confidence interval.

    ``unsure`` is the reason if there is no interval, or one that is shown but not compared with another batch.
    ``other_cpu_share`` is the share of the CPU time that other processes or machines took, 0 to 1.
    """

    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    unsure: str = ""
    other_cpu_share: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values: a batch.json may come from anywhere."""
        if metric_name(self.metric) != self.metric or not math.isfinite(self.value):
            raise ValueError(f"{self.metric} {self.value} is not a measured value")


@dataclass(frozen=True)
class Change:
    """The change of an entry since an earlier batch; ``description`` is a text for people.

    ``share`` is the relative improvement, negative if worse, with its interval from ``low`` to ``high``.
    """

    kind: ChangeKind
    since: str
    description: str
    share: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class EntryRecord:
    """One entry of a batch.

    Attributes:
        model: Name of the entry, which is the model by default.
        sla: The bounds of the suite, as text; empty for those of the profile.
        target: The target and its address; empty for the embedded server.
        command: The command that reproduces the run, with paths from the folder of the suite.
        folder: The folder of its run, in that of the batch.
        earlier_folder: The folder of its earlier measurements, which a changed model or server made useless; empty
            without them.
        state: ``waiting`` before its minimum search, ``searched`` while its search may continue or be confirmed, then
            ``found``, ``none`` or ``failed``.
        reason: Why it failed; empty for another state.
        seconds: Its wall time without preparations that happen once.
        search_is_over: Whether its search has converged or used up its trials, or measured nothing new.
        trials: Number of trials.
        measured: Number of trials and measurements when its latest step ended, which shows whether a step was idle.
        recommended: The first objective of the recommendation; None without one.
        bounded: Each metric that the SLA bounds, of the recommendation; empty without one.
        concurrency: Requests in flight of its load in a closed loop; None in an open loop.
        request_rate: Requests per second of its load in an open loop; None in a closed loop.
        baseline: The first objective of the baseline; None if it is unknown.
        headline: The result in one sentence.
        verdict: PASS, FAIL or UNDECIDED; empty before the first step.
        remaining_tests: The tests on fresh servers that `tune verify` can continue.
        gain: Gain in the first objective over the baseline on fresh servers; None if it is unknown.
        missed_in_usual_states: Which of the recommendation and the baseline (``compared``) is the reason of a missing
            gain: it meets the bounds as measured, but not in the usual states of the run. None for another reason.
        throughput_notes: Notes that the recommendation passed with clearly less throughput than the search measured.
        configuration: The recommended configuration, as text.
        conditions: Entries of two batches are comparable if all of these are the same.
        circumstances: Versions and the hash of the model, which may explain a change.
        change: The change since an earlier batch; None without one.
        regressed: Whether the change is a regression.
    """

    model: str
    sla: str
    target: str
    command: str
    folder: str
    earlier_folder: str = ""
    state: EntryStatus = "waiting"
    reason: str = ""
    seconds: float = 0.0
    search_is_over: bool = False
    trials: int = 0
    measured: int = 0
    recommended: Estimate | None = None
    bounded: tuple[Estimate, ...] = ()
    concurrency: int | None = None
    request_rate: float | None = None
    baseline: Estimate | None = None
    headline: str = ""
    verdict: str = ""
    remaining_tests: RemainingTests = UNKNOWN_TESTS
    gain: ObjectiveGain | None = None
    missed_in_usual_states: ComparedSide | None = None
    throughput_notes: tuple[str, ...] = ()
    configuration: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    circumstances: dict[str, str] = field(default_factory=dict)
    change: Change | None = None
    regressed: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if one of the folders leads out of the batch."""
        for name in (self.folder, *filter(None, [self.earlier_folder])):
            check_file_name(name)

    @property
    def label(self) -> str:
        """Return model, SLA and target, which identify the entry in its suite."""
        return " · ".join(filter(None, (self.model, self.sla, self.target)))

    @property
    def bounds(self) -> str:
        """Return the bounds of the suite; without them those of the profile, which are known after its run."""
        return self.sla or self.conditions.get("bounds", "")

    @property
    def is_undecided(self) -> bool:
        """Return whether it has ended, and its verdict is neither PASS nor FAIL."""
        return (self.state == "found" and self.verdict != "PASS") or (
            self.state == "none" and self.verdict == "UNDECIDED"
        )

    @property
    def has_missed(self) -> bool:
        """Return whether no configuration meets its bounds."""
        return self.state == "none" and not self.is_undecided

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left to do for the entry."""
        return self.state in ("found", "none", "failed")


@dataclass(frozen=True)
class BatchRecord:
    """A batch.

    ``previous`` is the batch.json that it is compared with, as a path from the folder of this batch, and ``gone`` the
    entries that only that one has. ``regression_share`` is the value of ``--fail-on-regression``, 0 to 1; None
    without it.
    """

    suite: str
    started: str
    budget_seconds: float
    entries: tuple[EntryRecord, ...]
    status: Literal["running", "finished", "interrupted"] = "running"
    written: str = ""
    previous: str = ""
    regression_share: float | None = None
    gone: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """Return the number of runs with each result: ``2 of 4 runs passed, 1 undecided, 1 failed``."""
        undecided = sum(entry.is_undecided for entry in self.entries)
        passed = sum(entry.state == "found" and not entry.is_undecided for entry in self.entries)
        missed = sum(entry.has_missed for entry in self.entries)
        failed = sum(entry.state == "failed" for entry in self.entries)
        regressed = sum(entry.regressed for entry in self.entries)
        parts = [
            f"{passed} of {count(len(self.entries), 'run')} passed",
            f"{undecided} undecided" if undecided else "",
            f"{missed} found none" if missed else "",
            f"{failed} failed" if failed else "",
            f"{regressed} regressed" if regressed else "",
            {"running": "not finished", "interrupted": "interrupted"}.get(self.status, ""),
        ]
        return ", ".join(filter(None, parts))

    @property
    def spent_seconds(self) -> float:
        """Return the time that all entries have used."""
        return sum(entry.seconds for entry in self.entries)

    @property
    def date(self) -> str:
        """Return the date when the batch started."""
        return one_line(self.started[:10])


RECORD = TypeAdapter(BatchRecord)


def new_record(suite: Suite, budget_seconds: float) -> BatchRecord:
    """Return the record of a new batch."""
    folders: list[str] = []
    for number, entry in enumerate(suite.entries):
        name = re.sub(r"[^A-Za-z0-9]+", "-", entry.label).strip("-")[:MAX_NAME_LENGTH] or "run"
        while name in folders:
            name = f"{name}-{number + 1}"
        folders.append(name)
    entries = (
        EntryRecord(entry.model, entry.sla, entry.target, entry.command, folder)
        for entry, folder in zip(suite.entries, folders, strict=True)
    )
    return BatchRecord(suite.name, time.strftime(WRITTEN_FORMAT), budget_seconds, tuple(entries))


def resumed_record(record: BatchRecord, suite: Suite, budget_seconds: float | None) -> BatchRecord:
    """Return ``record`` for a resume: entries that are done stay, failed ones are tried again.

    With a larger ``budget_seconds`` the tests of UNDECIDED entries continue. Raises BadInputError if the suite has
    changed since the batch started.
    """
    recorded, current = (
        {entry.label: entry.command for entry in entries} for entries in (record.entries, suite.entries)
    )
    for label in [*recorded, *current]:
        if recorded.get(label) != current.get(label):
            change = "was removed" if label not in current else "is new" if label not in recorded else "has changed"
            raise BadInputError(
                f"{suite.path}: {label} {change} since that batch started; start a new one, without --resume"
            )
    by_label = {entry.label: entry for entry in record.entries}
    has_more_time = budget_seconds is not None and budget_seconds > record.budget_seconds
    entries = tuple(_resumed_entry(by_label[label], has_more_time=has_more_time) for label in current)
    return replace(record, entries=entries, budget_seconds=budget_seconds or record.budget_seconds)


def _resumed_entry(entry: EntryRecord, *, has_more_time: bool) -> EntryRecord:
    if entry.state == "failed":
        return replace(entry, state="waiting", reason="")
    if has_more_time and entry.is_undecided and not entry.remaining_tests.is_complete:
        # a test of the baseline alone says nothing of other settings, so its search begins
        return replace(entry, state="waiting" if entry.trials == 1 else "searched", search_is_over=entry.trials > 1)
    return entry


MAX_BYTES = 64 << 20


class StoredBatch(NamedTuple):
    """The record of a batch and its file, whose name may be another one than batch.json."""

    path: Path
    record: BatchRecord


def read_record(path: Path) -> BatchRecord:
    """Return the record of a batch in a file of any name. Raises BadInputError if it is none."""
    data = read_bytes(path, MAX_BYTES, "give the folder of a batch")
    try:
        return RECORD.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise damaged_record(path, "batch", f"{key}: {first['msg']}") from None


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """The folder of a batch: batch.json, index.html, index.md, junit.xml and a folder for each run."""

    path: Path

    record = FileIn(BATCH_FILE)
    index = FileIn("index.html")
    markdown = FileIn("index.md")
    junit = FileIn("junit.xml")

    @classmethod
    def create(cls, out: str, suite: str) -> BatchFolder:
        """Create a folder named by the current time. Raises BadInputError if ``out`` cannot be written."""
        return cls(new_folder(out, f"{BATCHES}/{suite}"))

    @classmethod
    def named(cls, name: str, out: str) -> BatchFolder | None:
        """Return the batch that ``name`` stands for; None if there is none.

        ``name`` is the path of a batch, its batch.json, or a folder of batches, which stands for the newest one. It
        may start from the folder of all batches in ``out``: ``<suite>/<batch>``, or a suite.
        """
        path = Path(name)
        path = path.parent if path.name == BATCH_FILE else path
        for folder in (path, Path(out) / BATCHES / path) if name.strip() else ():
            if is_file(folder / BATCH_FILE):
                return cls(folder)
            if batches := cls.all_in(folder):
                return batches[0]
        return None

    @classmethod
    def find(cls, name: str, out: str, flag: str) -> BatchFolder:
        """Return the batch that ``name`` stands for. Raises BadInputError, naming ``flag``, if there is none."""
        if (found := cls.named(name, out)) is None:
            raise BadInputError(
                f"{flag} {quote(name)}: no {BATCH_FILE} there; give the folder of a batch, such as those in "
                f"{show_path(Path(out) / BATCHES)}"
            )
        return found

    @classmethod
    def all_in(cls, folder: Path) -> list[BatchFolder]:
        """Return the batches in the folder of a suite, the newest first."""
        return [cls(path) for path in newest_first(path for path in subfolders(folder) if is_file(path / BATCH_FILE))]

    @classmethod
    def readable_in(cls, folder: Path) -> list[StoredBatch]:
        """Return the batches in the folder of a suite whose records can be read, the newest first."""
        stored = []
        for batch in cls.all_in(folder):
            with contextlib.suppress(BadInputError):
                stored.append(StoredBatch(batch.record, batch.read()))
        return stored

    def read(self) -> BatchRecord:
        """Return the record. Raises BadInputError if batch.json is not the record of a batch."""
        return read_record(self.record)

    def write(self, record: BatchRecord) -> None:
        """Write ``record`` to batch.json. Raises EnvironmentFault if the disk refuses it."""
        write_atomically(self.record, RECORD.dump_json(record, indent=2) + b"\n")

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that locks the folder. Raises EnvironmentFault, naming the process that has the lock."""
        return folder_lock(self.path, "this batch")
