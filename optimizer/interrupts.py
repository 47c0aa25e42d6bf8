"""Ctrl-C, a terminal that closes, a polite kill: one KeyboardInterrupt, that is neither lost nor repeated.

Python drops an exception that a signal handler raises while a destructor or a weak reference's callback runs
(any import has those). So an interrupt that nobody has acknowledged is raised again after a while; until then
further signals are not, since they would cut the first one's cleaning up short.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
HAS_TIMER = hasattr(signal, "setitimer")  # not on Windows, where tune can replay
AGAIN_SECONDS = 1.5

_installed = False
_pending = False


def install() -> None:
    """Let the signals raise KeyboardInterrupt, but those that whoever started this process has set to be ignored:
    nohup, or a shell for what runs in the background."""
    global _installed
    _installed = True
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    if HAS_TIMER:
        signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _report_unless_interrupt


def acknowledge() -> None:
    """The interrupt has been caught and the process ends: signals no longer disturb it.

    A process that is not the command's, such as a notebook's, goes on: its signals stay its own.
    """
    if not _installed:
        return
    if HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """What is done inside is done to its end, however long it takes: an interrupt comes after it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where none arrives
        return
    came: list[int] = []
    signums = [*SIGNALS, *([signal.SIGALRM] if _installed and HAS_TIMER else [])]
    before = {
        signum: signal.signal(signum, lambda signum, _: came.append(signum))
        for signum in signums
        if signal.getsignal(signum) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in came:
            if HAS_TIMER and signum == signal.SIGALRM:
                signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            else:
                signal.raise_signal(signum)


def _interrupt(signum: int, _: FrameType | None) -> None:
    global _pending
    if _pending and HAS_TIMER and signum != signal.SIGALRM:
        return
    _pending = True
    if HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    raise KeyboardInterrupt


def _report_unless_interrupt(lost: sys.UnraisableHookArgs) -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
