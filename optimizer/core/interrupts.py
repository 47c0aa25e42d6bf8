"""SIGINT, SIGTERM and SIGHUP as one KeyboardInterrupt that is neither lost nor repeated.

Python drops an exception that a signal handler raises while a destructor or a weak reference's callback runs, which
happens in any import. So an interrupt that was not acknowledged is raised again after ``REPEAT_SECONDS``. Further
signals raise nothing until then, because they would interrupt the cleanup of the first one.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 1.5

_installed = False
_pending = False


def install() -> None:
    """Make the signals raise KeyboardInterrupt.

    Signals that the parent process set to be ignored stay ignored (nohup, or a shell's background jobs).
    """
    global _installed
    _installed = True
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _report_unless_interrupt


def acknowledge() -> None:
    """Ignore all further signals, because the interrupt was caught and the process ends.

    Without ``install`` this does nothing: a notebook that calls ``tune`` keeps running with its own handlers.
    """
    global _pending
    if not _installed:
        return
    _pending = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in (signal.SIGALRM, *SIGNALS):
        signal.signal(signum, signal.SIG_IGN)


def acknowledge_first() -> None:
    """Acknowledge the interrupt, and let only SIGINT raise KeyboardInterrupt from now on, for a second Ctrl-C.

    SIGTERM and SIGHUP often come twice: ``timeout``, and a terminal that closes, also send them to the process group.
    """
    global _pending
    if not _installed:
        return
    for signum in SIGNALS:
        if signum != signal.SIGINT:
            signal.signal(signum, signal.SIG_IGN)
    _pending = False
    signal.setitimer(signal.ITIMER_REAL, 0)


def is_pending() -> bool:
    """Return whether an interrupt was raised and not acknowledged yet."""
    return _pending


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delay interrupts until the context ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    received: list[int] = []
    signums = [*SIGNALS, *([signal.SIGALRM] if _installed else [])]
    before = {
        signum: signal.signal(signum, lambda signum, _: received.append(signum))
        for signum in signums
        if signal.getsignal(signum) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in received:
            if number == signal.SIGALRM:
                signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS)
            else:
                signal.raise_signal(number)


def _interrupt(signum: int, _: FrameType | None) -> None:
    global _pending
    if _pending and signum != signal.SIGALRM:
        return
    _pending = True
    signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS)
    raise KeyboardInterrupt


def _report_unless_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
