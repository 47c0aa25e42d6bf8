"""What a fleet costs and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOURS_A_MONTH = 730.0  # a twelfth of a year
SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency that an hour was given in. ``scaled_per_hour``: where replicas follow the hours of a day."""

    per_hour: float
    per_month: float
    per_million: float
    scaled_per_hour: float | None = None
    scaled_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """Of the GPUs, as they drew it at the load that was measured; less of it is drawn at less. None is unknown."""

    watts: float | None
    joules_per_1000: float | None


def costs(replica_hour: float, replicas: int, inferences_per_s: float, by_hour: Sequence[int]) -> Cost:
    """``inferences_per_s`` on average over a day; ``by_hour``: replicas in each hour of it, empty: always all."""
    hour = replica_hour * replicas
    millions = inferences_per_s * SECONDS_AN_HOUR / 1e6
    scaled = replica_hour * sum(by_hour) / len(by_hour) if by_hour else None
    return Cost(hour, HOURS_A_MONTH * hour, hour / millions, scaled, None if scaled is None else scaled / millions)


def power(replica_watts: float | None, replicas: int, inferences_per_s: float) -> Power:
    if replica_watts is None:
        return Power(None, None)
    watts = replica_watts * replicas
    return Power(watts, 1000 * watts / inferences_per_s)
