"""The ``tune`` command: in a process of its own, as users run it, or its entry point in the process of the test."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import psutil
import pytest

from objectives.sla import Verdict
from optimizer.cli.commands import COMMANDS
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.main import main
from optimizer.core import interrupts
from optimizer.simulator.continuous_batching import compile_continuous_batching
from optimizer.simulator.simulate import compile_simulator
from tests.csv_tables import read_rows
from tests.forked_tune import ForkedTune

Env = Mapping[str, str | Path]
RunningTune = subprocess.Popen[str] | ForkedTune
REPORT = "(with report.html)"
UNDECIDED = EXIT_CODES[Verdict.UNDECIDED]  # the exit code of a recommendation with --no-confirmation
FOUND = {EXIT_CODES[Verdict.PASS], UNDECIDED}  # the verdict of a run with a confirmation depends on the machine
FINISHED = {*FOUND, EXIT_CODES[Verdict.FAIL]}
RUN_SECONDS = 800.0  # only a run that hangs takes so long, even if it compiles the simulator on a slow machine
HANG_SECONDS = 600.0  # the same for a start, an end and a clean-up
TUNE = Path(sys.executable).with_name("tune")


@functools.cache
def compile_simulators() -> None:
    """Compile the simulators, so that no run has to: it would say so and start another process."""
    compile_simulator(lambda line: None)
    compile_continuous_batching(lambda line: None)


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command. ``pid`` was its process."""

    code: int
    stdout: str
    stderr: str
    pid: int

    @property
    def stderr_lines(self) -> list[str]:
        """Return the lines of standard error; fail if they hold a traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        return self.stderr.splitlines()

    @property
    def errors(self) -> list[str]:
        """Return the lines of standard error that are errors; the others are progress and notes."""
        return [
            line for line in self.stderr_lines if line.startswith("tune: ") and not line.startswith("tune: note: ")
        ]


@dataclass(frozen=True)
class Sandbox:
    """The folders of one test. All files of ``tune`` lie below ``root``, and its processes name ``root``."""

    root: Path

    @property
    def working_folder(self) -> Path:
        """Return the working directory of the command."""
        return self.root / "here"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def start(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Env | None = None,
        under: Sequence[str | Path] = (),
    ) -> subprocess.Popen[str]:
        """Start ``tune`` with these arguments and capture its output; ``under`` is a command that runs it.

        A run draws no page unless REPORT is among the arguments, because drawing takes as long as a short run. It
        shows no progress unless ``--log`` is among them, so that standard error has its errors only.
        """
        compile_simulators()
        return subprocess.Popen(
            [*under, TUNE, *_words(arguments)],
            cwd=cwd or self.working_folder,
            env={**self._variables, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fork(self, *arguments: str | Path, cwd: Path | None = None) -> ForkedTune:
        """Start ``tune`` as ``start`` does, without the time to import the modules of a run."""
        compile_simulators()
        return ForkedTune(_words(arguments), cwd or self.working_folder, self._variables)

    @property
    def _variables(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary)}

    def processes(self) -> list[psutil.Process]:
        """Return all processes that were started here, found by command line or working directory.

        Many tests wait for their end. Two files of each process take a third of the time of ``psutil.process_iter``.
        """
        root, processes = os.fsencode(self.root), []
        for pid in psutil.pids():
            folder = Path("/proc", str(pid))
            with contextlib.suppress(OSError, psutil.Error):  # a zombie has neither
                if root in (folder / "cmdline").read_bytes() or root in os.fsencode((folder / "cwd").readlink()):
                    processes.append(psutil.Process(pid))
        return processes

    def shared_memory(self, pid: int) -> list[Path]:
        """Return the shared-memory regions of the servers that the ``tune`` with this process id has started."""
        return list(Path("/dev/shm").glob(f"tritune_{pid}_*"))


def _words(arguments: Sequence[str | Path]) -> list[str | Path]:
    """Return the arguments without REPORT, and for a run with the options of ``Sandbox.start``."""
    words = [word for word in arguments if word != REPORT]
    first = str(words[0]) if words else ""
    more = [] if first in (*COMMANDS, "--help", "--version") else ["--log", "none"]
    more += ["--no-report"] if more and len(words) == len(arguments) else []
    at = 0 if first.startswith("-") else 1  # tune looks for the name of a command in the first word only
    return [*words[:at], *more, *words[at:]]


@dataclass(frozen=True)
class Run:
    """A run that has ended, with its files."""

    sandbox: Sandbox
    ended: Ended

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.ended.stdout)
        assert isinstance(document, dict)
        return document

    @property
    def folder(self) -> Path:
        """Return the only run folder in ``results``."""
        (folder,) = (self.sandbox.working_folder / "results").glob("*/*")
        return folder

    def rows(self) -> list[dict[str, str]]:
        return read_rows(self.folder / "trials.csv")

    def assert_found(self) -> None:
        """Assert that the run recommends a configuration, and that its exit code and files have the same verdict."""
        assert (self.ended.code in FOUND, self.ended.stderr) == (True, ""), self.ended
        info = self.info()
        assert info["status"] == "found"
        assert self.ended.code == EXIT_CODES[Verdict(info["verdict"])]
        assert info["verdict"] == info["result"]["verdict"]
        assert info["options"]["confirmation"] or info["verdict"] == "UNDECIDED"

    def info(self) -> dict[str, Any]:
        info = json.loads((self.folder / "run.json").read_text())
        assert isinstance(info, dict)
        return info


def assert_search_ended(ended: Ended, folder: Path) -> bool:
    """Assert that a run with --no-confirmation ended, and return whether it recommends a configuration.

    Whether a load is steady enough depends on the machine: a stable one is always found, and one that other processes
    disturbed may be.
    """
    status = json.loads((folder / "run.json").read_text())["status"]
    assert (ended.code, ended.stderr) == ({"found": UNDECIDED, "none": EXIT_CODES[Verdict.FAIL]}[status], "")
    assert status == "found" or not any(row["stable"] == "true" for row in read_rows(folder / "trials.csv"))
    return bool(status == "found")


class Output(Protocol):
    """Captured output, as the fixture ``capfd`` gives it."""

    def readouterr(self) -> tuple[str, str]: ...


class Tune(Protocol):
    def __call__(self, *arguments: str | Path, cwd: Path | None = None, env: Env | None = None) -> Ended: ...


@contextlib.contextmanager
def open_sandbox(root: Path) -> Iterator[Sandbox]:
    """Yield a sandbox; afterwards check that no process and no temporary folder is left."""
    sandbox = Sandbox(root)
    sandbox.working_folder.mkdir()
    sandbox.temporary.mkdir()
    yield sandbox
    survivors = sandbox.processes()
    names = [f"{process.pid} {process.name()}" for process in survivors if process.is_running()]
    for process in survivors:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert names == []
    assert list(sandbox.temporary.iterdir()) == []


def run_tune(
    sandbox: Sandbox,
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Env | None = None,
    forks: bool = True,
) -> Ended:
    """Run ``tune`` to its end and check that no shared memory of its servers is left.

    Run the installed program instead of a fork if it gets variables, which may matter before its first line.
    """
    is_forked = forks and not env
    process = sandbox.fork(*arguments, cwd=cwd) if is_forked else sandbox.start(*arguments, cwd=cwd, env=env)
    try:
        stdout, stderr = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    assert sandbox.shared_memory(process.pid) == []
    return Ended(process.returncode, stdout, stderr, process.pid)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with open_sandbox(tmp_path) as instance:
        yield instance


@pytest.fixture
def tune(sandbox: Sandbox) -> Tune:
    return functools.partial(run_tune, sandbox)


def call_tune(
    sandbox: Sandbox,
    output: Output,
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Env | None = None,
) -> Ended:
    """Call the entry point of ``tune`` in this process; afterwards restore the state that it changes."""
    settings = {"TMPDIR": sandbox.temporary, **(env or {})}
    output.readouterr()
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ, {name: str(value) for name, value in settings.items()}),
        _signal_handlers_restored(),
    ):
        patch.chdir(cwd or sandbox.working_folder)
        patch.setattr(tempfile, "tempdir", None)  # TMPDIR applies
        patch.setattr(sys, "argv", ["tune", *map(str, arguments)])
        patch.setattr(sys, "unraisablehook", sys.unraisablehook)
        patch.setattr(interrupts, "_installed", False)
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    assert sandbox.shared_memory(os.getpid()) == []
    stdout, stderr = output.readouterr()
    return Ended(ended.value.code, stdout, stderr, os.getpid())


@contextlib.contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    handlers = {signum: signal.getsignal(signum) for signum in (*interrupts.SIGNALS, signal.SIGALRM)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@pytest.fixture
def called_tune(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> Tune:
    return functools.partial(call_tune, sandbox, capfd)


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    """Return whether ``condition`` becomes true within ``seconds``.

    The checks take at most a tenth of a core: one that looks at all processes takes several milliseconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        before = time.thread_time()
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(max(0.02, 9 * (time.thread_time() - before)))
