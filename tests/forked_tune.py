"""The ``tune`` command as a fork of a process that has imported its modules, which takes 2.4 s of CPU time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from optimizer.cli.start import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("__main__", "tests.forked_tune", "tests.preload", "tests.worker_process"),
        *("sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql", "sqlalchemy.orm"),
    ]
)


class ForkedTune:
    """A running ``tune`` with the attributes and methods of ``subprocess.Popen``; its output is captured."""

    def __init__(self, words: Sequence[str | Path], cwd: Path, env: Mapping[str, str]) -> None:
        out, child_out = FORKS.Pipe(duplex=False)
        err, child_err = FORKS.Pipe(duplex=False)
        with out, err, child_out, child_err:
            arguments = ([str(word) for word in words], str(cwd), dict(env), child_out, child_err)
            self._process = FORKS.Process(target=_run, args=arguments)
            self._process.start()
            self.stdout, self.stderr = _text(out), _text(err)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int:
        """The exit code of a process that has ended; that of a signal is negative."""
        code = self._process.exitcode
        assert code is not None, "still running"
        return code

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("tune", timeout or 0.0)
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of the output and wait for the end."""
        with ThreadPoolExecutor(2) as readers:
            rests = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # this ends the readers
                raise
        for stream in (self.stdout, self.stderr):
            stream.close()
        stdout, stderr = (rest.result() for rest in rests)
        return stdout, stderr

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _text(pipe: Connection) -> TextIO:
    return os.fdopen(os.dup(pipe.fileno()), encoding="utf-8")


def _run(words: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """Run ``tune`` as if this process had been started for it."""
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR applies
    sys.argv = ["tune", *words]
    main()
