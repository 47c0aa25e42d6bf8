"""Subprocesses under a supervisor: own process group, log, timeout, and no survivor when ``tune`` dies."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

SUPERVISOR = Path(__file__).with_name("supervisor.py")
COMMANDS = "commands.log"  # beside the logs: what was started, so that it can be by hand
CHECK_SECONDS = 1.0  # between looks at a command that runs
MOST_READ, MOST_LOG = 2**20, 2**26  # bytes of a command's output: returned, and let onto the disk


class Running(Protocol):
    """A process or a container that was started; ``log`` gets what it prints."""

    @property
    def log(self) -> Path: ...

    @property
    def pid(self) -> int | None:
        """The process of this machine that it is, or is below of; None where that is not known."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs; 128 + signal where a signal ended it."""
        ...

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit code, or None where it still runs after the timeout."""
        ...

    def stop(self) -> None:
        """Leaves nothing of it. May be called twice."""
        ...


class Secret(str):
    """A word of a command, in whose place ``shown`` is written down."""

    shown: str

    def __new__(cls, word: str, shown: str) -> Secret:
        made = super().__new__(cls, word)
        made.shown = shown
        return made


class SupervisedProcess:
    """A command that is killed, with all its descendants, at ``stop()`` or when this process ends in any way.

    ``cpus``: the only ones that it and its descendants run on; None is those of this process.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        cpus: frozenset[int] | None = None,
        shm_prefix: str = "",
    ) -> None:
        self.log = log
        tell_command(command, log)
        numbers = ",".join(map(str, sorted(cpus or ())))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), shm_prefix, numbers, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                start_new_session=True,  # Ctrl-C in the terminal reaches tune alone
            )

    @property
    def pid(self) -> int:
        """The supervisor's: the command is below it."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while running; 128 + signal for a command that a signal ended."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit code, or None where the command still runs after the timeout."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Kill the command and everything below it, and wait until it is gone. May be called twice."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)  # whoever has stopped the supervisor must not stop us
        self._process.wait()

    def __enter__(self) -> SupervisedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. ``exit_code`` is None where it was killed before its end."""

    exit_code: int | None
    output: str
    seconds: float


def run(
    command: Sequence[str | Path],
    *,
    timeout_seconds: float,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    cpus: frozenset[int] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Finished:
    """Run to the end, to the timeout or until it has printed 64 MiB.

    ``log`` is overwritten with the output, of which the first MiB is returned. ``check`` is called every second
    meanwhile; what it raises ends the command.
    """
    log.unlink(missing_ok=True)
    return finished(SupervisedProcess(command, log=log, env=env, cwd=cwd, cpus=cpus), timeout_seconds, check)


def finished(command: Running, timeout_seconds: float, check: Callable[[], None] = lambda: None) -> Finished:
    """Wait as ``run`` does for what has just been started, and stop it."""
    started = time.monotonic()
    try:
        exit_code = _wait(command, timeout_seconds, check)
    finally:
        command.stop()
    with command.log.open("rb") as file:
        output = file.read(MOST_READ).decode(errors="replace")
    return Finished(exit_code, output, time.monotonic() - started)


def tell_command(command: Sequence[str | Path], log: Path) -> None:
    """Write down beside ``log`` what is started."""
    # a disk that is full will be told by what matters more
    with contextlib.suppress(OSError), log.with_name(COMMANDS).open("a") as told:
        shown = (word.shown if isinstance(word, Secret) else str(word) for word in command)
        told.write(f"{time.strftime('%H:%M:%S')} {shlex.join(shown)}\n")


def ending(exit_code: int) -> str:
    """An exit code in words: ``exit code 3``, ``SIGKILL``."""
    number = exit_code - 128 if exit_code > 128 else -exit_code
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {exit_code}"


def _wait(process: Running, timeout_seconds: float, check: Callable[[], None]) -> int | None:
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0 and process.log.stat().st_size <= MOST_LOG:
        exit_code = process.wait(min(CHECK_SECONDS, left))
        if exit_code is not None:
            return exit_code
        check()
    return None
