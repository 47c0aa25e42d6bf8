"""batch.json: what a batch has come to, written after each slice; the next batch is compared with it."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import TypeAdapter

from objectives.metrics import METRICS
from optimizer.batches.suite import Suite
from optimizer.errors import BadInputError
from optimizer.profile.safe_paths import plain_name
from optimizer.untrusted import one_line

LONGEST_NAME = 80  # characters of a run's folder

State = Literal["waiting", "searched", "found", "none", "failed"]
Kind = Literal["new", "lost", "gained", "noise", "undecided", "incomparable", "met", "missed", "same", "failed"]


@dataclass(frozen=True)
class Figure:
    """A metric of what is recommended, with the interval that its confirmation gives; None where it gives none, for
    the reason ``unsure``."""

    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    unsure: str = ""

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
