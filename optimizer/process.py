"""Subprocesses under a supervisor: own process group, log, timeout, and no survivor when ``tune`` dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class SupervisedProcess:
    """A command that is killed, with all its descendants, at ``stop()`` or when this process ends in any way."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        shm_prefix: str = "",
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), shm_prefix, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                start_new_session=True,  # Ctrl-C in the terminal reaches tune alone
            )

    @property
    def supervisor_pid(self) -> int:
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
        self._process.wait()

    def __enter__(self) -> SupervisedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. ``exit_code`` is None where it was killed at the timeout."""

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
) -> Finished:
    """Run to the end or to the timeout; ``log`` is overwritten with the output, of which 1 MiB is returned."""
    started = time.monotonic()
    log.unlink(missing_ok=True)
    with SupervisedProcess(command, log=log, env=env, cwd=cwd) as process:
        exit_code = process.wait(timeout_seconds)
    with log.open("rb") as file:
        output = file.read(2**20).decode(errors="replace")
    return Finished(exit_code, output, time.monotonic() - started)
