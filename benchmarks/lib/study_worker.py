"""A process that runs one study after another through the Python interface, and reports its file handles and memory.

    python benchmarks/lib/study_worker.py < KEYWORDS > ENDS

Each line of KEYWORDS is a JSON object with the arguments of ``optimizer.tune``; each line of ENDS says how that study
ended. ``StudyWorker`` starts the process and talks to it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import optimizer
from objectives.sla import Verdict
from optimizer.cli.exit_codes import EXIT_CODES


@dataclass(frozen=True)
class Usage:
    """File handles of a process, and the bytes of memory that it shares with no other process."""

    file_handles: int
    memory_bytes: int


@dataclass(frozen=True)
class StudyEnd:
    """The end of a study: the exit code of the command in its place, the error, and the usage of the process."""

    exit_code: int
    error: str
    usage: Usage


class StudyWorker:
    """Starts the process with the first study, and again if it has died. Its standard error is added to ``log``."""

    def __init__(self, folder: Path, env: Mapping[str, str], log: Path) -> None:
        self._folder, self._env, self._log = folder, env, log
        self._process: subprocess.Popen[str] | None = None
        self._log_start = 0
        self.name = ""  # process ID and time of the start

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, keywords: Mapping[str, object]) -> None:
        """Start a study without waiting for its end."""
        if self._process is None or self._process.poll() is not None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    [sys.executable, __file__],
                    cwd=self._folder,
                    env=self._env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self.name = f"{self._process.pid} of {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self._log_start = self._log.stat().st_size
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(keywords) + "\n")
        self._process.stdin.flush()

    def has_ended(self, timeout_seconds: float = 0.0) -> bool:
        """Return whether the study ends within this time; also true if the process has died."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        return bool(ready)

    def read_end(self) -> StudyEnd | None:
        """Return how the study ended; None if the process has died. Waits for the end."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            return None
        document = json.loads(line)
        return StudyEnd(**{**document, "usage": Usage(**document["usage"])})

    def errors(self) -> str:
        """Return the standard error of the process since the start of the study."""
        with self._log.open(errors="replace") as log:
            log.seek(self._log_start)
            return log.read()

    def stop(self) -> None:
        """End the process, and the processes that it has started."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def run_study(keywords: Mapping[str, object]) -> StudyEnd:
    """Run one study in this process."""
    exit_code, error = 0, ""
    try:
        exit_code = EXIT_CODES[Verdict(optimizer.tune(**keywords).verdict or "FAIL")]  # type: ignore[arg-type]
    except optimizer.TuneError as fault:
        exit_code, error = fault.exit_code, str(fault)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that the allocator keeps for later is no leak
    process = psutil.Process()
    return StudyEnd(exit_code, error, Usage(process.num_fds(), process.memory_full_info().uss))


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but the results may be written to standard output
    for line in sys.stdin:
        print(json.dumps(asdict(run_study(json.loads(line)))), file=results, flush=True)


if __name__ == "__main__":
    main()
