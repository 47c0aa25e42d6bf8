"""The requests of each priority in the measurements of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from objectives.latency_sketch import sketch_latencies
from objectives.metrics import Measurement
from objectives.priority_stats import PriorityStatistic, to_text
from optimizer.measure.load_client.failures import OTHER, REJECTED, SERVED, TIMED_OUT, request_kinds
from optimizer.measure.load_client.plan import NEVER, SendRecord

Integers = npt.NDArray[np.int64]
ALIKE: Integers = np.empty(0, dtype=np.int64)  # all requests have the default priority


def with_priorities(
    measurements: Sequence[Measurement],
    record: SendRecord,
    sizes: Integers,
    priorities: Integers,
    times_ns: Integers,
    begin_ns: float,
    end_ns: float,
) -> list[Measurement]:
    """Return ``measurements`` of equal parts of a time with the statistics of each priority.

    Args:
        measurements: One measurement for each part.
        record: All requests, failed ones included, of a server that was not overloaded.
        sizes: Samples of the requests, in turn.
        priorities: Priorities of the requests, in turn; ALIKE returns the measurements unchanged.
        times_ns: When each request counts; outside of all parts for one that does not.
        begin_ns: Begin of the first part in ns after the start of the load.
        end_ns: End of the last part.
    """
    if not len(priorities):
        return list(measurements)
    kinds, count = request_kinds(record), len(record.planned_ns)
    ended_ns = np.where(record.answered_ns == NEVER, record.ended_ns, record.answered_ns)
    latencies_ms = (ended_ns - record.planned_ns) / 1e6
    own_sizes, own_priorities = np.resize(sizes, count), np.resize(priorities, count)
    edges = np.linspace(begin_ns, end_ns, len(measurements) + 1)
    places = np.where(times_ns == end_ns, len(measurements), np.searchsorted(edges, times_ns, side="right")) - 1
    seconds = (end_ns - begin_ns) / len(measurements) / 1e9
    result = []
    for place, measurement in enumerate(measurements):
        statistics = []
        for priority in np.unique(own_priorities).tolist():
            own = (places == place) & (own_priorities == priority)
            served = own & (kinds == SERVED)
            rejected, timed_out, failed = (
                int(np.count_nonzero(own & (kinds == kind))) for kind in (REJECTED, TIMED_OUT, OTHER)
            )
            rate = float(own_sizes[served].sum()) / seconds
            sketch = sketch_latencies(latencies_ms[served])
            count_served = int(served.sum())
            statistics.append(PriorityStatistic(priority, count_served, rejected, timed_out, failed, rate, sketch))
        result.append(replace(measurement, by_priority=to_text(statistics)))
    return result
