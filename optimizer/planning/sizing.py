"""How many replicas a rate takes, and which rate they can take, with what is not known of their speed counted in."""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.planning.fleet import Fleet

TOO_LOW, EXPECTED, SAFE = 0.025, 0.5, 0.999  # probabilities that replicas are no slower


@dataclass(frozen=True, slots=True)
class Count:
    """``safe`` is what to have: with what is believed of the replicas too few in one plan of a thousand. ``likely``:
    as good a guess as any, too few in one of two; ``low``: enough in one of forty."""

    low: int
    likely: int
    safe: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second of all replicas: as is believed of them, ``safe`` is served in 999 plans of 1000, ``high`` in
    one of forty."""

    safe: float
    likely: float
    high: float


def sized(fleet: Fleet, rate: float) -> Count | None:
    """For ``rate`` requests a second; None where no number of replicas is sure to meet the bounds."""
    counts: list[int] = []
    for probability in (SAFE, EXPECTED, TOO_LOW):
        found = fleet.smallest(rate, fleet.replica.belief.pace(probability), counts[-1] if counts else None)
        if found is None and not counts:
            return None
        counts.append(found or counts[-1])
    safe, likely, low = counts
    return Count(low, likely, safe)


def carried(fleet: Fleet, replicas: int) -> Rate:
    safe, likely, high = (
        fleet.highest_rate(replicas, fleet.replica.belief.pace(p)) for p in (SAFE, EXPECTED, TOO_LOW)
    )
    return Rate(safe, likely, high)
