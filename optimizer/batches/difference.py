"""The difference of an entry to the same one of an earlier batch, and whether that is more than noise.

Each figure comes with the interval that its confirmation gives. Two that overlap are no difference: "within noise".
"""

from __future__ import annotations

from dataclasses import replace

from objectives.metrics import METRICS
from optimizer.batches.record import BatchRecord, Change, EntryRecord, Figure, Kind

SAME = 0.02  # a baseline that changed by less did not change


def compared(batch: BatchRecord, before: BatchRecord, share: float | None) -> BatchRecord:
    """``batch`` with the difference of each entry. One has regressed where it lost ``share`` or more, and the
    intervals do not overlap; None: none has."""
    earlier = {entry.label: entry for entry in before.entries}
    entries = []
    for entry in batch.entries:
        found = change(earlier.get(entry.label), entry, before.date) if entry.is_done else None
        entries.append(replace(entry, change=found, regressed=is_regression(found, share)))
    gone = tuple(label for label in earlier if label not in {entry.label for entry in batch.entries})
    return replace(batch, entries=tuple(entries), gone=gone)


def is_regression(found: Change | None, share: float | None) -> bool:
    return share is not None and found is not None and found.kind == "lost" and -(found.share or 0.0) >= share


def change(before: EntryRecord | None, now: EntryRecord, since: str) -> Change:
    if before is None or not before.is_done:
        return Change("new", since, f"not in the batch of {since}" if before is None else f"not done on {since}")
    if now.state == "failed":
        return Change("failed", since, f"{_was(before)} on {since}")
    if before.figure is None:
        return Change("met" if now.figure else "same", since, f"{_was(before)} on {since}")
    if other := _other_conditions(before, now):
        return Change("incomparable", since, f"not comparable with {since}: {other}")
    if now.figure is None:
        return Change("missed", since, f"{_was(before)} on {since}")
    return _measured(before, now, before.figure, now.figure, since)


def _measured(before: EntryRecord, now: EntryRecord, old: Figure, new: Figure, since: str) -> Change:
    share = _ratio(old, new) - 1
    low, high = _bounds(old, new)
    if low is None or high is None:
        which, why = ("then", old.unsure) if old.low is None else ("now", new.unsure)
        told = f"{_signed(share)} since {since}, which may be noise ({which}: {why or 'no interval'})"
        return Change("undecided", since, told, share)
    if low <= 0 <= high:
        return Change("noise", since, f"{_signed(share)} since {since}, within noise", share, low, high)
    kind: Kind = "lost" if high < 0 else "gained"
    nearest, furthest = sorted((abs(low), abs(high)))
    told = f"{kind} {percent(share)} since {since} (between {percent(nearest)} and {percent(furthest)})"
    told += _why(before, now)
    return Change(kind, since, told, share, low, high)


def _ratio(old: Figure, new: Figure) -> float:
    """Above 1 is better."""
    return new.value / old.value if METRICS[new.metric].better == "higher" else old.value / new.value


def _bounds(old: Figure, new: Figure) -> tuple[float | None, float | None]:
    """Of the share that was gained, with both figures anywhere in their intervals."""
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return None, None
    if min(old.low, new.low) <= 0:
        return None, None
    if METRICS[new.metric].better == "higher":
        return new.low / old.high - 1, new.high / old.low - 1
    return old.low / new.high - 1, old.high / new.low - 1


def _why(before: EntryRecord, now: EntryRecord) -> str:
    """What else is not as it was."""
    told = ""
    if before.baseline and now.baseline and before.baseline.metric == now.baseline.metric:
        of_baseline = _ratio(before.baseline, now.baseline) - 1
        told = f"; its baseline {'as before' if abs(of_baseline) < SAME else _signed(of_baseline)}"
    names = before.circumstances.keys() & now.circumstances.keys()
    others = [name for name in sorted(names) if before.circumstances[name] != now.circumstances[name]]
    changed = [f"{name} {before.circumstances[name]} -> {now.circumstances[name]}" for name in others]
    return f"{told}; {', '.join(changed)}" if changed else told


def _other_conditions(before: EntryRecord, now: EntryRecord) -> str:
    """The first condition that differs; none is known of what measured nothing."""
    if not now.conditions:
        return ""
    for name in before.conditions.keys() | now.conditions.keys():
        then, here = before.conditions.get(name, ""), now.conditions.get(name, "")
        if then != here:
            return f"other {name}, {then or 'none'} then and {here or 'none'} now"
    return ""


def _was(entry: EntryRecord) -> str:
    told = {"found": "had a configuration that meets its bounds", "none": "had none that meets its bounds"}
    return told.get(entry.state, "failed")


def percent(share: float) -> str:
    """5.8% · 12% · 0.43%."""
    size = 100 * abs(share)
    return f"{size:.0f}%" if size >= 10 else f"{size:.2g}%"


def _signed(share: float) -> str:
    return f"{'-' if share < 0 else '+'}{percent(share)}"
