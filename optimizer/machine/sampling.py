"""Call a function repeatedly next to a measurement."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

INTERVAL_SECONDS = 0.1


@contextlib.contextmanager
def sampled(read: Callable[[], T | None], interval_seconds: float = INTERVAL_SECONDS) -> Iterator[list[T]]:
    """Call ``read`` repeatedly in a thread; the yielded list is complete when the context ends.

    Empty samples and None are left out.
    """
    samples: list[T] = []
    stop = threading.Event()

    def sample() -> None:
        while True:
            if sample := read():
                samples.append(sample)
            if stop.wait(interval_seconds):
                return

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        stop.set()
        sampler.join()
