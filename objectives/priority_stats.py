"""Requests counted by priority, as text: ``priority:served:rejected:timed_out:failed:infer_per_sec:sketch``.

This is the form of ``Measurement.by_priority`` and of the column ``by_priority``; statistics are separated by spaces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from objectives import latency_sketch

_NUMBER = "(0|[1-9][0-9]{0,9})"
_STATISTIC = re.compile(
    rf"(?P<counts>{_NUMBER}(:{_NUMBER}){{4}}):(?P<rate>[0-9]{{1,12}}(\.[0-9]{{1,6}})?):(?P<sketch>[A-Za-z0-9+/=]*)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class PriorityStatistic:
    """The requests of one priority.

    Attributes:
        priority: Priority of the requests; 0 is the default level of the model.
        served: Requests that were served.
        rejected: Requests that the server rejected because a queue was full.
        timed_out: Requests that expired in the queue, or whose answer the client gave up.
        failed: Requests that failed for another reason.
        throughput_infer_per_sec: Samples per second of the served requests.
        sketch: Sketch of their latencies, see ``objectives.latency_sketch``; empty if none was served.
    """

    priority: int
    served: int
    rejected: int
    timed_out: int
    failed: int
    throughput_infer_per_sec: float
    sketch: str = ""

    @property
    def errors(self) -> int:
        """The requests that failed for any reason."""
        return self.rejected + self.timed_out + self.failed

    def latency_ms(self, level: float) -> float | None:
        """Return a quantile of the latency of the served requests; None if none was served."""
        return latency_sketch.pooled_quantile_ms([self.sketch], level) if self.sketch else None


def to_text(statistics: Iterable[PriorityStatistic]) -> str:
    """Return the statistics as text that ``from_text`` reads."""
    return " ".join(
        f"{statistic.priority}:{statistic.served}:{statistic.rejected}:{statistic.timed_out}:{statistic.failed}:"
        f"{statistic.throughput_infer_per_sec:.6f}:{statistic.sketch}"
        for statistic in statistics
    )


def from_text(text: str) -> tuple[PriorityStatistic, ...]:
    """Return the statistics in ``text``; an empty tuple for an empty text.

    Raises ValueError naming the expected form.
    """
    statistics = []
    for word in text.split():
        match = _STATISTIC.fullmatch(word)
        if match is None:
            raise ValueError("not a list of priority:served:rejected:timed_out:failed:infer_per_sec:sketch")
        latency_sketch.check_sketch(match["sketch"])
        priority, served, rejected, timed_out, failed = map(int, match["counts"].split(":"))
        rate, sketch = float(match["rate"]), match["sketch"]
        statistics.append(PriorityStatistic(priority, served, rejected, timed_out, failed, rate, sketch))
    return tuple(statistics)


def pool(texts: Sequence[str]) -> str:
    """Return the statistics of windows of equal length together: counts are summed, rates averaged, sketches merged.

    The result is empty unless every window has statistics.
    """
    if not texts or not all(texts):
        return ""
    windows = [{statistic.priority: statistic for statistic in from_text(text)} for text in texts]
    pooled = []
    for priority in sorted({priority for window in windows for priority in window}):
        statistics = [window[priority] for window in windows if priority in window]
        sketches = [statistic.sketch for statistic in statistics if statistic.sketch]
        rates = [statistic.throughput_infer_per_sec for statistic in statistics]
        pooled.append(
            PriorityStatistic(
                priority,
                served=sum(statistic.served for statistic in statistics),
                rejected=sum(statistic.rejected for statistic in statistics),
                timed_out=sum(statistic.timed_out for statistic in statistics),
                failed=sum(statistic.failed for statistic in statistics),
                throughput_infer_per_sec=math.fsum(rates) / len(windows),
                sketch=latency_sketch.merge(sketches) if sketches else "",
            )
        )
    return to_text(pooled)
