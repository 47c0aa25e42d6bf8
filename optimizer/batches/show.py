"""What a batch says in words, wherever it is shown."""

from __future__ import annotations

from pathlib import Path

from objectives.metrics import METRICS
from optimizer.batches.difference import percent
from optimizer.batches.record import BatchRecord, EntryRecord
from optimizer.report import words

STATES = {"none": "none meets it", "failed": "failed", "waiting": "not begun", "searched": "not confirmed"}
KINDS = {
    "new": "new",
    "noise": "within noise",
    "undecided": "undecided",
    "incomparable": "not comparable",
    "met": "now met",
    "missed": "was met",
    "same": "the same",
    "failed": "–",
}


def title(batch: BatchRecord) -> str:
    """What the batch amounts to, in one line."""
    states = [entry.state for entry in batch.entries]
    told = [f"{states.count('found')} of {words.count(len(states), 'run')} found a configuration"]
    told += [f"{states.count('none')} found none"] if "none" in states else []
    told += [f"{states.count('failed')} failed"] if "failed" in states else []
    regressed = sum(entry.regressed for entry in batch.entries)
    told += [f"{regressed} regressed"] if regressed else []
    told += ["interrupted"] if batch.status == "interrupted" else []
    return f"{batch.suite}: {', '.join(told)}"


def totals(batch: BatchRecord) -> str:
    spent = f"{words.clock(batch.spent_seconds)} of {words.clock(batch.budget_seconds)} spent"
    trials = words.count(sum(entry.trials for entry in batch.entries), "configuration")
    against = f"compared with {Path(batch.previous).name}" if batch.previous else "no earlier batch to compare with"
    return f"{trials} tried, {spent}, {against}"


def figure_words(entry: EntryRecord) -> str:
    """``13,315 infer/s``; empty where there is none."""
    return words.quantity(METRICS[entry.figure.metric], entry.figure.value) if entry.figure else ""


def interval_words(entry: EntryRecord) -> str:
    """``13,158 to 13,729``."""
    figure = entry.figure
    if figure is None or figure.low is None or figure.high is None:
        return ""
    return f"{words.number(figure.low)} to {words.number(figure.high)}"


def state_words(entry: EntryRecord) -> str:
    return entry.verdict if entry.state == "found" else STATES[entry.state]


def change_words(entry: EntryRecord) -> str:
    """``lost 5.8%``."""
    change = entry.change
    if change is None:
        return ""
    if change.kind in ("lost", "gained"):
        return f"{change.kind} {percent(change.share or 0.0)}"
    return KINDS[change.kind]
