"""The ``tune`` command as a user runs it: a process of its own, whose traces can be looked for."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from optimizer.cli import COMMANDS

Env = Mapping[str, str | Path]
REPORT = "(with report.html)"
TUNE = Path(sys.executable).with_name("tune")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(  # what commands import one by one as they need it: that takes longer than bad input
    [
        *("__main__", "optimizer.cli", "optimizer.session"),
        *(f"optimizer.commands.{name}" for name in ("run", "sweep", "verify")),
        *(f"optimizer.arguments.{name}" for name in ("run", "sweep", "verify")),
        *(
            "optimizer.model_analyzer.reader",
            "optimizer.models.mlp",
            "optimizer.report.console",
            "optimizer.store.study",
        ),
        *("onnx", "pynvml", "rich.progress", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql"),
        *("sqlalchemy.orm", "tests.warm_run"),
    ]
)


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``pid`` was its process."""

    code: int
    stdout: str
    stderr: str
    pid: int

    @property
    def complaints(self) -> list[str]:
        """What it wrote to standard error, in lines; a traceback is no complaint but a fault."""
        assert "Traceback" not in self.stderr, self.stderr
        return self.stderr.splitlines()


@dataclass(frozen=True)
class Playground:
    """Folders of one test. All that ``tune`` leaves lies below ``root``, and all it starts names ``root``."""

    root: Path

    @property
    def here(self) -> Path:
        """Where the command runs."""
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
        """``tune`` with these arguments, its output captured; ``under`` is a command that runs a command. A run
        leaves its page out unless REPORT is among them: to draw it takes as long as a short run measures."""
        words = [word for word in arguments if word != REPORT]
        runs = not (arguments and str(arguments[0]) in COMMANDS) and len(words) == len(arguments)
        return subprocess.Popen(
            [*under, TUNE, *(["--no-report"] if runs else []), *words],
            cwd=cwd or self.here,
            env={**os.environ, "TMPDIR": str(self.temporary), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Every process that was started here: its command line or its folder says so."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = [*process.cmdline(), process.cwd()]
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.root) in word for word in words):
                    found.append(process)
        return found

    def shared_memory(self, pid: int) -> list[Path]:
        """The regions of the servers that ``tune`` of that process id has started."""
        return list(Path("/dev/shm").glob(f"tritune_{pid}_*"))


@dataclass(frozen=True)
class Run:
    """A run that has ended, and what it left."""

    playground: Playground
    ended: Ended

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.ended.stdout)
        assert isinstance(document, dict)
        return document

    @property
    def folder(self) -> Path:
        """The only one in ``results``."""
        (folder,) = (self.playground.here / "results").glob("*/*")
        return folder

    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "trials.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def info(self) -> dict[str, Any]:
        info = json.loads((self.folder / "run.json").read_text())
        assert isinstance(info, dict)
        return info


class Tune(Protocol):
    def __call__(
        self, *arguments: str | Path, cwd: Path | None = None, timeout: float = 120, env: Env | None = None
    ) -> Ended: ...


@contextlib.contextmanager
def playing_in(root: Path) -> Iterator[Playground]:
    """At the end nothing that was started may run any more, and no temporary folder may be left."""
    playground = Playground(root)
    playground.here.mkdir()
    playground.temporary.mkdir()
    yield playground
    survivors = playground.processes()
    names = [f"{process.pid} {process.name()}" for process in survivors if process.is_running()]
    for process in survivors:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert names == []
    assert list(playground.temporary.iterdir()) == []


def run_tune(
    playground: Playground,
    *arguments: str | Path,
    cwd: Path | None = None,
    timeout: float = 120,
    env: Env | None = None,
) -> Ended:
    """``tune`` to its end; no shared memory of its servers may be left."""
    process = playground.start(*arguments, cwd=cwd, env=env)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert playground.shared_memory(process.pid) == []
    return Ended(process.returncode, stdout, stderr, process.pid)


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    with playing_in(tmp_path) as found:
        yield found


@pytest.fixture
def tune(playground: Playground) -> Tune:
    return functools.partial(run_tune, playground)


def run_forked_tune(
    playground: Playground,
    *arguments: str | Path,
    cwd: Path | None = None,
    timeout: float = 120,
    env: Env | None = None,
) -> Ended:
    """As ``run_tune``, forked from a process that has imported it already: that takes longer than many a command."""
    outputs = playground.root / "stdout", playground.root / "stderr"
    words = [str(word) for word in arguments]
    environment = {"TMPDIR": playground.temporary, **(env or {})}
    process = FORKS.Process(target=_as_tune, args=(words, cwd or playground.here, environment, outputs))
    process.start()
    try:
        process.join(timeout)
        assert process.exitcode is not None, "still running"
    finally:
        process.kill()
    assert process.pid is not None
    assert playground.shared_memory(process.pid) == []
    stdout, stderr = (path.read_text() for path in outputs)
    return Ended(process.exitcode, stdout, stderr, process.pid)


@pytest.fixture
def forked_tune(playground: Playground) -> Tune:
    return functools.partial(run_forked_tune, playground)


def _as_tune(arguments: list[str], cwd: Path, env: dict[str, str | Path], outputs: tuple[Path, Path]) -> None:
    for path, descriptor in zip(outputs, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(cwd)
    os.environ.update({key: str(value) for key, value in env.items()})
    tempfile.tempdir = None  # that of TMPDIR, not the one that the forking process may have asked for
    sys.argv = ["tune", *arguments]
    from optimizer.cli import main

    main()


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    """Whether ``condition`` comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
