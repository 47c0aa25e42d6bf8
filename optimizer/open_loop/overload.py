"""Whether a server is overloaded, told while requests are still being sent.

Above a server's capacity an open loop has no steady state: the queue grows for as long as requests are sent. With
*acceptable* the larger of the latency bound and the latency of a request alone, *age* that of the oldest unanswered
request, and *backlog* the time in which as many requests were lately answered as are unanswered now, a server that
has left more than one request in a hundred unanswered is overloaded

- when age and backlog are longer than 0.5 s and than twice what is acceptable; or
- when for 2 s the age has grown from each half second to the next, and age and backlog are longer than 50 ms and than
  twice what is acceptable.

The first takes 1 s at twice the capacity, and tells a server that has stopped; the second an excess of a few percent.
Neither is met by a few requests that take long, nor by a pause that the server makes good.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

from objectives.metrics import OVERLOADED

STOPPED_SECONDS = 0.5
GROWTH_STEP_SECONDS, GROWTH_STEPS = 0.5, 4
GROWN_SECONDS = 0.05
FACTOR = 2.0  # times what is acceptable
FEW = 0.01  # of all requests


class OverloadWatch:
    """Is told of the requests again and again, some twenty times a second; all times in seconds.

    ``patience_seconds`` is how long an answer is worth waiting for.
    """

    def __init__(self, acceptable_seconds: float) -> None:
        self.patience_seconds = max(STOPPED_SECONDS, FACTOR * acceptable_seconds)
        self._grown_seconds = max(GROWN_SECONDS, FACTOR * acceptable_seconds)
        self._answered: deque[tuple[float, int]] = deque()  # lately, oldest first
        self._ages: deque[float] = deque(maxlen=GROWTH_STEPS + 1)  # a step apart
        self._next_step = 0.0

    def reason(self, now: float, sent: int, answered: int, age: float) -> str:
        """Why the server is overloaded; empty where it is not.

        ``now`` is the time since the first request, ``sent`` and ``answered`` count requests since then; ``age`` is 0
        where all are answered.
        """
        unanswered = sent - answered
        shorter = min(age, self._backlog(now, unanswered, answered))
        grew = self._grew(now, age)
        many = unanswered > FEW * sent
        if many and (shorter > self.patience_seconds or (grew and shorter > self._grown_seconds)):
            return f"{OVERLOADED}: {unanswered:,} requests unanswered after {now:.1f} s, the oldest for {age:.2f} s"
        return ""

    def _backlog(self, now: float, unanswered: int, answered: int) -> float:
        self._answered.append((now, answered))
        while len(self._answered) > 1 and self._answered[1][0] <= now - self.patience_seconds:
            self._answered.popleft()
        then, answered_then = self._answered[0]
        lately = answered - answered_then
        return unanswered * (now - then) / lately if lately else math.inf

    def _grew(self, now: float, age: float) -> bool:
        """Whether the age has grown at each of the last steps; told once, at the last one."""
        if now < self._next_step:
            return False
        self._next_step = now + GROWTH_STEP_SECONDS
        self._ages.append(age)
        return len(self._ages) > GROWTH_STEPS and all(before < after for before, after in pairwise(self._ages))
