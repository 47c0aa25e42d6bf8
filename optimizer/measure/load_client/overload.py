"""When a load client stops because the server is overloaded.

The client starts before every measurement, so this module imports nothing that loads slowly.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

MIN_PATIENCE_SECONDS = 0.5
GROWTH_STEP_SECONDS, GROWTH_STEPS = 0.5, 4
MIN_GROWN_SECONDS = 0.05
PATIENCE_FACTOR = 2.0  # factor on the acceptable latency
UNANSWERED_SHARE = 0.01  # share of all requests: fewer unanswered ones are no overload


class OverloadDetector:
    """Decides from the number of unanswered requests and their age whether the server is overloaded.

    ``acceptable_seconds`` is the largest latency bound, or the latency of a request that is sent alone if that is
    longer. An answer that takes longer than ``patience_seconds`` is not worth waiting for.

    A load whose rate changes is an overload only if the queue never got short enough in a whole ``period_seconds``:
    a burst may exceed the capacity, if the server catches up until the next one. Changes within GROWTH_STEP_SECONDS
    make no difference.
    """

    def __init__(self, acceptable_seconds: float, period_seconds: float = 0.0) -> None:
        self.patience_seconds = max(MIN_PATIENCE_SECONDS, PATIENCE_FACTOR * acceptable_seconds)
        self._grown_seconds = max(MIN_GROWN_SECONDS, PATIENCE_FACTOR * acceptable_seconds)
        self._answered: deque[tuple[float, int]] = deque()  # (time, answers) of the last patience_seconds
        self._ages: deque[float] = deque(maxlen=GROWTH_STEPS + 1)  # GROWTH_STEP_SECONDS apart
        self._next_step = 0.0
        self._period_seconds = period_seconds if period_seconds >= GROWTH_STEP_SECONDS else 0.0
        self._waits: deque[tuple[float, float]] = deque()  # (time, wait) of the last period, the waits ascending

    def reason(self, now: float, sent: int, answered: int, age: float) -> str:
        """Return why the server is overloaded; an empty string if it is not. Call it about 20 times a second.

        ``now`` is the time since the first request in seconds; ``sent`` and ``answered`` count requests since then.
        ``age`` is the time since the oldest unanswered request was sent in seconds, 0 if all are answered.
        """
        unanswered = sent - answered
        wait = min(age, self._backlog_seconds(now, unanswered, answered))
        if self._period_seconds:
            wait, grew = self._shortest_wait(now, wait), False
        else:
            grew = self._has_grown(now, age)
        has_backlog = unanswered > UNANSWERED_SHARE * sent
        if has_backlog and (wait > self.patience_seconds or (grew and wait > self._grown_seconds)):
            return f"overloaded: {unanswered:,} requests unanswered after {now:.1f} s, the oldest for {age:.2f} s"
        return ""

    def _backlog_seconds(self, now: float, unanswered: int, answered: int) -> float:
        """Return how long the server needs for the unanswered requests at the pace of the last patience_seconds."""
        self._answered.append((now, answered))
        while len(self._answered) > 1 and self._answered[1][0] <= now - self.patience_seconds:
            self._answered.popleft()
        earlier, earlier_answered = self._answered[0]
        newly_answered = answered - earlier_answered
        return unanswered * (now - earlier) / newly_answered if newly_answered else math.inf

    def _shortest_wait(self, now: float, wait: float) -> float:
        """Return the shortest wait of the last period; 0 before the first one has ended."""
        waits = self._waits
        while waits and waits[-1][1] >= wait:
            waits.pop()
        waits.append((now, wait))
        while waits[0][0] < now - self._period_seconds:
            waits.popleft()
        return waits[0][1] if now >= self._period_seconds else 0.0

    def _has_grown(self, now: float, age: float) -> bool:
        """Return whether the age has grown at each of the last steps; always false between two steps."""
        if now < self._next_step:
            return False
        self._next_step = now + GROWTH_STEP_SECONDS
        self._ages.append(age)
        return len(self._ages) > GROWTH_STEPS and all(before < after for before, after in pairwise(self._ages))
