"""The change of a batch's entries since an earlier batch.

Each result has the confidence interval of its confirmation. If two intervals overlap, the change is within noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from objectives.intervals import ConfidenceInterval
from objectives.metrics import METRICS
from optimizer.machine.cpu_usage import DISTURBANCE_LIMIT
from optimizer.results import formatting
from optimizer.results.comparison import is_regression
from optimizer.study.batch.record import BatchRecord, Change, ChangeKind, EntryRecord, Estimate

SAME_BASELINE = 0.02  # relative change of a baseline that is not mentioned


def compare_batches(batch: BatchRecord, earlier: Sequence[BatchRecord], share: float | None) -> BatchRecord:
    """Return ``batch`` with the change of each entry since the first batch of ``earlier``, the newest first.

    An entry that is missing there, or failed and does not fail now, is compared with the newest batch in which it did
    not fail. An entry has regressed if it lost ``share`` or more and the intervals do not overlap. With None, none
    regresses.
    """
    entries = []
    for entry in batch.entries:
        dated = [(other, record.date) for record in earlier for other in record.entries if other.label == entry.label]
        if entry.state != "failed":
            dated.sort(key=lambda pair: pair[0].state == "failed")  # stable, so the newest of both kinds comes first
        before, date = next(iter(dated), (None, earlier[0].date))
        change = compare_entries(before, entry, date) if entry.is_done else None
        entries.append(replace(entry, change=change, regressed=_is_regression(change, share)))
    labels = {entry.label for entry in batch.entries}
    gone = tuple(entry.label for entry in earlier[0].entries if entry.label not in labels)
    return replace(batch, entries=tuple(entries), gone=gone)


def _is_regression(change: Change | None, share: float | None) -> bool:
    if share is None or change is None or change.share is None or change.high is None:
        return False
    return is_regression(change.share, change.high, share)


def compare_entries(earlier: EntryRecord | None, current: EntryRecord, since: str) -> Change:
    """Return the change of an entry. ``since`` is the date of the earlier batch."""
    if earlier is None:
        return Change("new", since, f"not in the batch of {since}")
    if not earlier.is_done:
        return Change("new", since, f"not done on {since}")
    ending = f"it {_ending(earlier)} on {since}"
    if current.state == "failed":
        return Change("failed", since, f"it failed too on {since}" if earlier.state == "failed" else ending)
    if earlier.recommended is None:
        return Change(_change_from_nothing(earlier, current), since, ending)
    if difference := _different_condition(earlier, current):
        return Change("incomparable", since, f"not comparable with {since}: {difference}")
    if current.recommended is None:
        is_open = earlier.is_undecided or current.is_undecided
        return Change("undecided" if is_open else "missed", since, ending)
    old, new = (
        replace(estimate, unsure=estimate.unsure or "UNDECIDED") if entry.is_undecided else estimate
        for entry, estimate in ((earlier, earlier.recommended), (current, current.recommended))
    )
    change = _compare_estimates(old, new, since)
    if change.kind in ("lost", "gained"):
        return replace(change, description=change.description + _explain(earlier, current))
    return change


def _change_from_nothing(earlier: EntryRecord, current: EntryRecord) -> ChangeKind:
    """Return the kind of the change of an entry that recommended nothing in the earlier batch and has not failed."""
    if current.recommended is not None and not current.is_undecided:
        return "met"
    if earlier.has_missed and current.has_missed:
        return "same"
    return "incomparable" if earlier.state == "failed" else "undecided"


def _compare_estimates(old: Estimate, new: Estimate, since: str) -> Change:
    """Return the change of a value under the same conditions; it is noise if the interval of the change has 0."""
    if not _have_ratio(old, new):
        old_value, new_value = (
            formatting.quantity(METRICS[estimate.metric], estimate.value) for estimate in (old, new)
        )
        text = f"{old.metric}: {new_value} now and {old_value} on {since}, which have no ratio"
        return Change("undecided", since, text)
    share, interval = _improvement(old, new), _improvement_interval(old, new)
    signed = f"{_signed(share)} since {since}"
    if interval is None:
        when, why = ("then", old.unsure) if old.unsure or old.low is None else ("now", new.unsure)
        return Change("undecided", since, f"{signed}, which may be noise ({when}: {why or 'no interval'})", share)
    if disturbance := _different_disturbance(old, new):
        return Change("undecided", since, f"{signed}, which may be noise ({disturbance})", share)
    low, high = interval.low, interval.high
    if low <= 0 <= high:
        return Change("noise", since, f"{signed}, within noise", share, low, high)
    kind: ChangeKind = "lost" if high < 0 else "gained"
    nearest, furthest = map(change_percent, sorted((abs(low), abs(high))))
    text = f"{kind} {change_percent(share)} since {since} (between {nearest} and {furthest})"
    return Change(kind, since, text, share, low, high)


def _different_disturbance(old: Estimate, new: Estimate) -> str:
    """Return how other processes used the machine then and now; empty if the same, or if that is unknown."""
    old_share, new_share = old.other_cpu_share, new.other_cpu_share
    if old_share is None or new_share is None or abs(new_share - old_share) <= DISTURBANCE_LIMIT:
        return ""
    return (
        f"other processes or machines took {100 * new_share:.0f} % of the CPUs now, and {100 * old_share:.0f} % then"
    )


def _have_ratio(old: Estimate, new: Estimate) -> bool:
    """Return whether the values can be compared by their ratio: an error rate may be 0, and a score below it."""
    return min(old.value, new.value) > 0


def _improvement(old: Estimate, new: Estimate) -> float:
    """Return the relative improvement; negative is worse, also for metrics where lower is better.

    Both values are positive, see ``_have_ratio``.
    """
    return (new.value / old.value if METRICS[new.metric].better == "higher" else old.value / new.value) - 1


def _improvement_interval(old: Estimate, new: Estimate) -> ConfidenceInterval | None:
    """Return the interval of the improvement, with both values anywhere in their intervals; None if it is unknown.

    The intervals of a disturbed confirmation do not hold for a quiet machine, so they are not compared.
    """
    if old.unsure or new.unsure:
        return None
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return None
    if min(old.low, new.low) <= 0:
        return None
    if METRICS[new.metric].better == "higher":
        return ConfidenceInterval(new.low / old.high - 1, new.high / old.low - 1)
    return ConfidenceInterval(old.low / new.high - 1, old.high / new.low - 1)


def _explain(earlier: EntryRecord, current: EntryRecord) -> str:
    """Return a clause about the baseline, versions and model files, to append to a change; empty without changes."""
    text, old, new = "", earlier.baseline, current.baseline
    if old and new and old.metric == new.metric and _have_ratio(old, new):
        change = _improvement(old, new)
        text = f"; its baseline {'as before' if abs(change) < SAME_BASELINE else _signed(change)}"
    names = sorted(earlier.circumstances.keys() & current.circumstances.keys())
    changed = [
        f"{name} {earlier.circumstances[name]} -> {current.circumstances[name]}"
        for name in names
        if earlier.circumstances[name] != current.circumstances[name]
    ]
    return f"{text}; {', '.join(changed)}" if changed else text


def _different_condition(earlier: EntryRecord, current: EntryRecord) -> str:
    """Return the first condition that differs; empty if an entry measured nothing."""
    if not current.conditions:
        return ""
    for name in earlier.conditions.keys() | current.conditions.keys():
        old, new = earlier.conditions.get(name, ""), current.conditions.get(name, "")
        if old != new:
            return f"other {name}, {old or 'none'} then and {new or 'none'} now"
    return ""


def _ending(entry: EntryRecord) -> str:
    """Return how ``entry`` ended, as a clause without its subject."""
    if entry.is_undecided:
        return f"ended UNDECIDED {'without' if entry.recommended is None else 'with'} a recommendation"
    endings = {
        "found": "had a configuration that meets its bounds",
        "none": "had no configuration that meets its bounds",
    }
    return endings.get(entry.state, "failed")


def change_percent(share: float) -> str:
    """Return the size of the change ``share`` in percent: ``5.8 %``, ``12 %``, ``0.43 %``."""
    size = 100 * abs(share)
    return f"{size:.0f} %" if size >= 10 else f"{size:.2g} %"


def _signed(share: float) -> str:
    return f"{'-' if share < 0 else '+'}{change_percent(share)}"
