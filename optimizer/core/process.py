"""Run subprocesses under a supervisor.

Each subprocess has its own process group, log and timeout. All child processes end with ``tune``, even if it is
killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
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

from optimizer.core.supervisor import remove_regions

SUPERVISOR = Path(__file__).with_name("supervisor.py")
COMMAND_LOG = "commands.log"  # next to the logs: the started commands, to repeat them by hand
CHECK_SECONDS = 1.0  # between two checks of a running command
MAX_OUTPUT_BYTES, MAX_LOG_BYTES = 2**20, 2**26  # limits of a command's output: returned, and written to the disk


class RunningProcess(Protocol):
    """A started process or container."""

    @property
    def log(self) -> Path:
        """The file that receives its output."""

    @property
    def pid(self) -> int | None:
        """The process on this machine, or an ancestor of it; None if it is not known."""

    def exit_code(self) -> int | None:
        """Return the exit code: None while it runs, 128 + signal if a signal ended it."""

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for its end; return the exit code, or None if it still runs after the timeout."""

    def stop(self) -> None:
        """End it and all processes below it. May be called twice."""


class SecretArgument(str):
    """An argument with a secret; the command log gets ``redacted`` in its place."""

    redacted: str

    def __new__(cls, argument: str, redacted: str) -> SecretArgument:
        """Return the text ``argument`` that knows its redacted form."""
        secret = super().__new__(cls, argument)
        secret.redacted = redacted
        return secret


class SupervisedProcess:
    """A command that is killed, with all its descendants, at ``stop()`` or when this process ends in any way.

    Args:
        command: Program and arguments.
        log: File that the output is appended to.
        env: Environment; None for that of this process.
        cwd: Working folder; None for that of this process.
        cpus: CPUs that the command and its descendants run on; None for those of this process.
        shm_patterns: Shared-memory regions whose names match one of these patterns, as in a shell, are removed at the
            end.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        cpus: frozenset[int] | None = None,
        shm_patterns: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._shm_patterns = shm_patterns
        log_command(command, log)
        numbers = ",".join(map(str, sorted(cpus or ())))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), "/".join(shm_patterns), numbers, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                start_new_session=True,  # Ctrl-C in the terminal reaches tune alone
            )

    @property
    def pid(self) -> int:
        """The process ID of the supervisor, the parent of the command."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code: None while it runs, 128 + signal if a signal ended it."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for its end; return the exit code, or None if it still runs after the timeout."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Kill the command and all its descendants, and wait for their end. May be called twice."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)  # a stopped supervisor could not end its children
        if self._process.wait() < 0:  # it was killed
            _kill_session(self.pid)
            remove_regions([*self._shm_patterns])

    def __enter__(self) -> SupervisedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill_session(leader: int) -> None:
    """Kill the processes of the session whose leader has ended; its id is not used again while the session exists."""
    if Path(f"/proc/{leader}").exists():
        return
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                os.kill(int(folder.name), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class FinishedProcess:
    """The result of a command. ``exit_code`` is None if it was killed at the timeout or the output limit."""

    exit_code: int | None
    output: str
    seconds: float


def run_command(
    command: Sequence[str | Path],
    *,
    timeout_seconds: float,
    log: Path,
    env: Mapping[str, str] | None = None,
    cpus: frozenset[int] | None = None,
    shm_patterns: Sequence[str] = (),
) -> FinishedProcess:
    """Run a command to its end, to the timeout, or until it has printed 64 MiB.

    ``log`` is overwritten with the output, of which the first MiB is returned. The other arguments are those of
    ``SupervisedProcess``.
    """
    log.unlink(missing_ok=True)
    process = SupervisedProcess(command, log=log, env=env, cpus=cpus, shm_patterns=shm_patterns)
    return wait_and_stop(process, timeout_seconds)


def wait_and_stop(
    command: RunningProcess, timeout_seconds: float, check: Callable[[], None] = lambda: None
) -> FinishedProcess:
    """Wait for a started command, as ``run_command`` does, then stop it and return the result.

    ``check`` is called every second; if it raises, the command is killed.
    """
    started = time.monotonic()
    try:
        exit_code = _wait(command, timeout_seconds, check)
    finally:
        command.stop()
    with command.log.open("rb") as file:
        output = file.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    return FinishedProcess(exit_code, output, time.monotonic() - started)


def log_command(command: Sequence[str | Path], log: Path) -> None:
    """Append the command, without its secrets, to ``COMMAND_LOG`` in the folder of ``log``."""
    # ignore a full disk: the run reports it with a file that it needs
    with contextlib.suppress(OSError), log.with_name(COMMAND_LOG).open("a") as file:
        arguments = (each.redacted if isinstance(each, SecretArgument) else str(each) for each in command)
        file.write(f"{time.strftime('%H:%M:%S')} {shlex.join(arguments)}\n")


def describe_exit_code(exit_code: int) -> str:
    """Return an exit code as text: ``exit code 3``, or ``SIGKILL`` for 137 or -9."""
    number = exit_code - 128 if exit_code > 128 else -exit_code
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {exit_code}"


def printed_lines(output: str) -> list[str]:
    """Return the lines of a program's output without the empty ones; ``it printed nothing`` if there is no other."""
    return [line.strip() for line in output.splitlines() if line.strip()] or ["it printed nothing"]


def _wait(process: RunningProcess, timeout_seconds: float, check: Callable[[], None]) -> int | None:
    deadline = time.monotonic() + timeout_seconds
    while (remaining := deadline - time.monotonic()) > 0 and process.log.stat().st_size <= MAX_LOG_BYTES:
        exit_code = process.wait(min(CHECK_SECONDS, remaining))
        if exit_code is not None:
            return exit_code
        check()
    return None
