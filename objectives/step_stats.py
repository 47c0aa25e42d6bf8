"""The statistics of each model that serves a part of a request, as text.

A word is ``model:instances:requests:executions:queue_ns:compute_ns:busy_ns``. This is the form of
``Measurement.step_stats`` and of the column ``step_stats``; words are separated by spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, unquote


class StepStatistic(NamedTuple):
    """The counters of one model during a measurement, summed over its versions and the servers.

    Attributes:
        model: Name of the model.
        instances: Number of its instances; 0 for an ensemble.
        requests: Requests to this model that were served.
        executions: Executions of the model.
        queue_ns: Time of these requests in its queue.
        compute_ns: Time of these requests in executions: input, inference and output.
        busy_ns: Time of the executions.
    """

    model: str
    instances: int
    requests: int
    executions: int
    queue_ns: int
    compute_ns: int
    busy_ns: int


# bounded digits: see objectives.batch_stats; the times of many requests in one execution add up
_STATISTIC = re.compile("[^: ]+:[0-9]{1,4}(:[0-9]{1,9}){2}(:[0-9]{1,18}){3}", re.ASCII)


def to_text(statistics: Iterable[StepStatistic]) -> str:
    """Return the statistics as text that ``from_text`` reads."""
    return " ".join(":".join([quote(model, safe=""), *map(str, counters)]) for model, *counters in statistics)


def from_text(text: str) -> tuple[StepStatistic, ...]:
    """Return the statistics in ``text``, that of the model of the requests first; an empty tuple for an empty text.

    If several models get load at the same time, those of each follow the model of its requests.

    Raises ValueError naming the expected form.
    """
    statistics = []
    for word in text.split():
        model, *counters = word.split(":")
        if not _STATISTIC.fullmatch(word) or not (name := unquote(model)).isprintable():
            raise ValueError("not a list of model:instances:requests:executions:queue_ns:compute_ns:busy_ns")
        statistics.append(StepStatistic(name, *map(int, counters)))
    return tuple(statistics)


def pool(texts: Iterable[str]) -> str:
    """Return the statistics of several windows of one configuration together: counters are summed by model."""
    sums: dict[str, StepStatistic] = {}
    for step in (step for text in texts for step in from_text(text)):
        before = sums.get(step.model)
        total = step[2:] if before is None else map(sum, zip(before[2:], step[2:], strict=True))
        sums[step.model] = StepStatistic(step.model, step.instances, *total)
    return to_text(sums.values())
