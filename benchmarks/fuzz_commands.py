"""Run ``tune`` on hostile words and files: mutations of valid ones, and noise.

    python benchmarks/fuzz_commands.py [--cases 10000] [--seed 0] [--state FILE] > benchmarks/fuzz_commands.md

Each case calls the entry point of ``tune`` in this process, with real files, under an audit hook. One case in
``COMMAND_EVERY`` is run again as a command. A case is right if

- the exit code is one of 0, 1, 2, 3, 4 and 130, and the command's is the same,
- standard error has at most one line of error (a document's faults have a line each), which is printable, and no
  warning or traceback; a refusal (2 or 3) has one,
- it takes at most ``MOST_CPU_SECONDS`` of CPU time, which a busy machine does not change,
- nothing is written outside the folder of results and the cache, and no child process is left.

A case ends where ``tune`` would start a server or a download. If it is not right, its smallest form is printed, and
the exit code is 1. With ``--state`` an interrupted fuzzer continues with the next case.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import io
import json
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings

from lib.command_check import STOPPED, check_output
from lib.fuzz_sections import SECTIONS, Case, CommandCase, ReaderCase
from lib.output import measured_on, print_title
from optimizer.core.files import cache_folder, write_atomically
from optimizer.core.process import SUPERVISOR
from optimizer.model.profile_files import COPY_NAME
from optimizer.simulator.simulate import compile_simulator
from tests.command_fixtures import TUNE, Ended, Sandbox, call_tune

CASES, SMOKE_CASES = 10_000, 300
BATCH = 25  # cases of a section before the next section's turn
COMMAND_EVERY = (
    43  # so that the commands are spread over sections and places in a batch: no common divisor with BATCH
)
MOST_CPU_SECONDS = 20.0
MOST_SECONDS = 300.0  # only a deadlock takes so long
MOST_BYTES = 4 << 30  # of memory: a case must not take that of the whole machine
OUTPUT_FLAGS = ("--out", "--storage", "--csv")
# they leave the folder of a run as it is
READS_ONLY = ("plan", "explain", "compare", "emit", "replay", "models", "init", "cache")
LISTS_FONTS = "fc-list"  # matplotlib starts it once
ALL_PHASES = (Phase.generate, Phase.shrink)


class Stopped(BaseException):
    """The command began to start a server or a download."""


class OutOfTime(BaseException):
    """The command took more than ``MOST_CPU_SECONDS``."""


# -- effects of a command --------------------------------------------------------------------------------------------


class CapturedOutput:
    """The standard output and error of this process, including what libraries write, as texts."""

    def __enter__(self) -> CapturedOutput:
        self._saved = [os.dup(1), os.dup(2)]
        self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        self._streams = contextlib.ExitStack()
        for number, (name, errors) in enumerate((("stdout", "strict"), ("stderr", "backslashreplace")), 1):
            os.dup2(self._files[number - 1].fileno(), number)
            stream = open(number, "w", encoding="utf-8", errors=errors, closefd=False)
            self._streams.enter_context(mock.patch.object(sys, name, stream))
        return self

    @property
    def error_descriptor(self) -> int:
        """The standard error that this replaces."""
        return self._saved[1]

    def readouterr(self) -> tuple[str, str]:
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (self._read(file) for file in self._files)
        return out, err

    @staticmethod
    def _read(file: Any) -> str:
        file.seek(0)
        text = file.read().decode(errors="replace")
        file.seek(0)
        file.truncate()
        return str(text)

    def __exit__(self, *_: object) -> None:
        self._streams.close()
        for number, descriptor in enumerate(self._saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for file in self._files:
            file.close()


class AuditHook:
    """Records and prevents writes outside ``root``, new processes and connections of the code in this process."""

    WRITES = ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.symlink")
    STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "pty.spawn")

    def __init__(self, root: Path, *others: Path) -> None:
        self._places = tuple(os.path.realpath(place) for place in (root, Path("/dev/null"), *others))
        self.faults: list[str] = []

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check an audit event, as ``sys.addaudithook`` gives it."""
        if event == "open":
            path, mode, flags = arguments
            if set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._check_write(event, path, -1)
        elif event in self.WRITES:
            path = arguments[1 if event == "os.symlink" else 0]
            descriptor = arguments[-1] if event in ("os.mkdir", "os.remove", "os.rmdir", "os.symlink") else -1
            self._check_write(event, path, descriptor)
        elif event in ("os.rename", "os.link"):
            self._check_write(event, arguments[1], arguments[3])
        elif event in self.STARTS:
            self._check_start(event, arguments)
        elif event == "socket.getaddrinfo" and not _is_this_machine(arguments[0]):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        elif event == "socket.connect" and isinstance(arguments[1], tuple) and not _is_this_machine(arguments[1][0]):
            raise ConnectionRefusedError(111, "Connection refused")

    def _check_write(self, event: str, path: Any, descriptor: int) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        if descriptor != -1:  # relative to an open folder, as shutil.rmtree removes files
            name = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), name)  # noqa: PTH115, PTH118
        folder, base = os.path.split(name)  # os.path keeps bytes that are no UTF-8, and resolves no last link
        real = f"{os.path.realpath(folder)}/{base}"
        if not any(real == place or real.startswith(f"{place}/") for place in self._places):
            self.faults.append(f"{event} {real}")
            raise PermissionError(13, "Permission denied", name)

    def _check_start(self, event: str, arguments: tuple[Any, ...]) -> None:
        words = list(map(os.fsdecode, arguments[1])) if event == "subprocess.Popen" else [event]
        if words[0] == LISTS_FONTS:
            return
        if str(SUPERVISOR) not in words:
            self.faults.append(f"starts {shlex.join(words)}")
        raise Stopped(shlex.join(words))


def _is_this_machine(host: object) -> bool:
    return str(host) in ("localhost", "::1", "None") or str(host).startswith("127.")


_watching: list[AuditHook] = []


@functools.cache
def _add_hook() -> None:  # once: an audit hook cannot be removed
    sys.addaudithook(lambda event, arguments: _watching[-1].see(event, arguments) if _watching else None)


@contextlib.contextmanager
def watched(watch: AuditHook) -> Iterator[None]:
    _add_hook()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # an import would write into the package
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.remove(watch)
        sys.dont_write_bytecode = before


@contextlib.contextmanager
def limited(report_to: int, cpu_seconds: float = MOST_CPU_SECONDS) -> Iterator[None]:
    """Limit CPU time (raises OutOfTime), wall time (ends this process) and memory (the code gets MemoryError)."""

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    _, hard = memory = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, out_of_time)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES if hard < 0 else min(MOST_BYTES, hard), hard))
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=report_to)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, memory)
        signal.signal(signal.SIGPROF, handler)


# -- one case -------------------------------------------------------------------------------------------------------


class CaseFolders:
    """The folders of the cases below ``root``: each case has a working folder of its own, all share home and cache.

    The working folder is deep enough for ``../../etc``. The compiled simulator is that of the user's cache.
    """

    def __init__(self, root: Path) -> None:
        self.sandbox = Sandbox(root)
        self._cache = root / "cache"
        self._home = root / "home"
        for folder in (self.sandbox.working_folder, self.sandbox.temporary, self._cache, self._home):
            folder.mkdir(parents=True)
        self.compiled = cache_folder() / "compiled"
        compile_simulator(lambda _: None)  # a first case must not take that time
        self._link_compiled()
        self.env: Mapping[str, str | Path] = {
            "HOME": self._home,
            "TRITUNE_CACHE": self._cache,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_NO_INDEX": "1",
            "MPLCONFIGDIR": self._cache / "matplotlib",
            "COLUMNS": "100",
        }
        self._count = 0

    def _link_compiled(self) -> None:
        with contextlib.suppress(FileExistsError):  # `tune cache --clean` removes it
            (self._cache / self.compiled.name).symlink_to(self.compiled)

    @contextlib.contextmanager
    def folder(self, case: CommandCase) -> Iterator[Path]:
        """Yield a new working folder with the case's files. Afterwards check the written files, and remove it."""
        self._count += 1
        folder = self.sandbox.working_folder / "a/b" / str(self._count)
        folder.mkdir(parents=True)
        for name, content in {**case.valid, **case.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.symlink_to(content)
            else:
                path.write_bytes(content)
        before = self._files()
        try:
            yield folder
            allowed = _places_to_write(case.words, folder, before)
            after = self._files()
            made = {parent for place in allowed for parent in place.parents}
            changed = {path for path in before.keys() | after.keys() if before.get(path, "") != after.get(path, "")}
            wrong = [path for path in sorted(changed - made) if not any(map(path.is_relative_to, allowed))]
            assert not wrong, f"wrote {wrong[0]}"
        finally:
            shutil.rmtree(self.sandbox.working_folder / "a")
            self._link_compiled()
            if len(list(self._cache.glob("*/*"))) > 100:
                for kept in self._cache.iterdir():
                    if not kept.is_symlink() and kept.is_dir():
                        shutil.rmtree(kept)

    def _files(self) -> dict[Path, bytes | str | None]:
        """Return the content of each file, the target of each link and None for each folder, without the cache."""
        contents: dict[Path, bytes | str | None] = {}
        for parent, folders, files in os.walk(self.sandbox.root):
            path = Path(parent)
            if path == self.sandbox.root:
                folders.remove(self._cache.name)
            for name in (*folders, *files):
                file = path / name
                contents[file] = str(file.readlink()) if file.is_symlink() else None
                if name in files and not file.is_symlink():
                    contents[file] = file.read_bytes()
        return contents


def _places_to_write(words: tuple[str, ...], folder: Path, before: Collection[Path]) -> list[Path]:
    """Return where ``tune`` with ``words`` may write: the results, what its flags name, and the files of a profile.

    ``before`` are the files that there were: a profile is overwritten only with ``--force``.
    """
    places = [folder / "results"]
    if not words or words[0] not in READS_ONLY:
        places.append(folder / "run")
    for word, following in zip(words, (*words, "")[1:], strict=True):
        flag, equals, value = word.partition("=")
        if flag in OUTPUT_FLAGS:
            name = (value if equals else following).removeprefix("sqlite:///")
            places.append(Path(os.path.normpath(folder / name)))
    if words[:1] == ("init",):
        places += [place.parent / COPY_NAME for place in (folder / COPY_NAME, *places)]
        places += [path for path in folder.glob("*.yaml") if path not in before or "--force" in words]
    return places


def attempt(case: Case, place: CaseFolders, *, as_command: bool = False) -> tuple[str, float]:
    """Return how the case ended, and the seconds of CPU time. Raises AssertionError if it is not right.

    It ends ``accepted`` (also where a server would be needed), ``refused`` (exit code 2) or ``environment`` (3).
    """
    started = time.process_time()
    outcome = _read(case) if isinstance(case, ReaderCase) else _call(case, place)
    seconds = time.process_time() - started
    assert seconds <= MOST_CPU_SECONDS, f"took {seconds:.1f} s of CPU time"
    if as_command and isinstance(case, CommandCase) and isinstance(outcome, int):
        code = _run(case, place)
        assert code == outcome, f"exit code {code} as a command, {outcome} in this process"
    return {2: "refused", 3: "environment"}.get(outcome or 0, "accepted"), seconds


def _call(case: CommandCase, place: CaseFolders) -> int | None:
    """Return the exit code of the case in this process; None if it came to the start of a server."""
    watch = AuditHook(place.sandbox.root, place.compiled)
    with place.folder(case) as folder, CapturedOutput() as output:
        try:
            with limited(output.error_descriptor), watched(watch):
                ended = call_tune(place.sandbox, output, *case.words, cwd=folder, env=place.env)
        except Stopped:
            ended = Ended(STOPPED, *output.readouterr(), os.getpid())
        except OutOfTime:
            raise AssertionError(f"took more than {MOST_CPU_SECONDS:g} s of CPU time") from None
        check_output(ended, case, watch.faults)
    return None if ended.code == STOPPED else ended.code


def _run(case: CommandCase, place: CaseFolders) -> int:
    """Return the exit code of the case as a command."""
    limit = int(10 * MOST_CPU_SECONDS)  # a start imports what this process has imported already
    with place.folder(case) as folder:
        try:
            process = subprocess.run(
                [TUNE, *case.words],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(place.sandbox.temporary), **place.env},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=MOST_SECONDS,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(str(error)) from None
        left = place.sandbox.processes()
        assert not left, f"left {left}"
        ended = Ended(
            process.returncode, process.stdout.decode(errors="replace"), process.stderr.decode(errors="replace"), 0
        )
        check_output(ended, case, [])
    return ended.code


def _read(case: ReaderCase) -> int:
    """Return 2 if the reader raised its own error, else 0."""
    printed, refusal = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            case.read(case.content)
        except AssertionError:
            raise
        except case.error as error:
            refusal = error
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
    assert printed.getvalue() == "", printed.getvalue()
    if refusal is None:
        return 0
    assert type(refusal).__module__.startswith("optimizer."), repr(refusal)  # not a subclass of Python's own
    assert str(refusal).strip(), repr(refusal)
    assert str(refusal).isprintable(), repr(refusal)
    return 2


# -- all cases ------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """The cases of a section."""

    tried: int = 0
    right: int = 0
    accepted: int = 0
    refused: int = 0
    environment: int = 0
    commands: int = 0
    slowest_cpu_s: float = 0.0


@dataclass
class State:
    """The cases so far, which a continued fuzzer skips. ``faults`` are the smallest cases that are not right."""

    seed: int
    sections: dict[str, Tally]
    faults: list[str] = field(default_factory=list)

    @property
    def next_case(self) -> int:
        return sum(tally.tried for tally in self.sections.values())

    @classmethod
    def read(cls, path: Path | None, of_seed: int) -> State:
        """Return the state in a file, or a new one. Exits with a message if the file has another seed or sections."""
        new = cls(of_seed, {name: Tally() for name in SECTIONS})
        if path is None or not path.exists():
            return new
        document = json.loads(path.read_text())
        if document["seed"] != of_seed or document["sections"].keys() != new.sections.keys():
            sys.exit(f"{path}: of another seed or version of this fuzzer; give another --state")
        tallies = {name: Tally(**values) for name, values in document["sections"].items()}
        return cls(of_seed, tallies, document["faults"])

    def write(self, path: Path | None) -> None:
        if path is not None:
            document = {"next_case": self.next_case, **asdict(self)}
            write_atomically(path, json.dumps(document, indent=1))


def fuzz_batch(state: State, cases: int, place: CaseFolders, phases: tuple[Phase, ...] = ALL_PHASES) -> None:
    """Try up to ``cases`` cases of the section whose turn it is. The first one that is not right ends the batch.

    The cases depend on the seed and on the number of the first one.
    """
    first = state.next_case
    name = min(state.sections, key=lambda section: state.sections[section].tried)
    tally = state.sections[name]
    wrong: list[tuple[Case, str]] = []

    @seed(random.Random(f"{state.seed} {first}").getrandbits(64))
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    @given(SECTIONS[name])
    def every_case(case: Case) -> None:
        as_command = state.next_case % COMMAND_EVERY == COMMAND_EVERY // 2
        try:
            outcome, seconds = attempt(case, place, as_command=as_command)
        except AssertionError as error:
            wrong.append((case, str(error)))
            raise
        if not wrong:  # the cases after it are attempts to make it smaller
            tally.tried, tally.right = tally.tried + 1, tally.right + 1
            setattr(tally, outcome, getattr(tally, outcome) + 1)
            tally.commands += as_command and isinstance(case, CommandCase)
            tally.slowest_cpu_s = max(tally.slowest_cpu_s, seconds)

    try:
        every_case()
    except Exception:
        if not wrong:
            raise
        tally.tried += 1
        state.faults.append(f"{name}: {_describe(*wrong[-1])}")


def _describe(case: Case, fault: str) -> str:
    """Return a case and its fault on two lines."""
    if isinstance(case, ReaderCase):
        return f"{case.read.__name__}({case.content!r})\n  {fault}"
    files = "".join(f" {name}={content!r}" for name, content in case.files.items())
    return f"tune {shlex.join(case.words)}{ascii(files)[1:-1]}\n  {fault}"


def fuzz(state: State, cases: int, place: CaseFolders, path: Path | None = None) -> None:
    """Try cases until ``state`` has as many. It is written to ``path`` after each batch."""
    while state.next_case < cases:
        fuzz_batch(state, min(BATCH, cases - state.next_case), place)
        state.write(path)
        if sys.stderr.isatty():
            print(f"\r{state.next_case:,} cases, {len(state.faults)} faults", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help=f"all cases together ({CASES})")
    parser.add_argument("--smoke", action="store_true", help=f"{SMOKE_CASES} cases, as in CI")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="JSON file to continue from; it is written after each batch")
    arguments = parser.parse_args()
    state = State.read(arguments.state, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        fuzz(state, SMOKE_CASES if arguments.smoke else arguments.cases, CaseFolders(Path(folder)), arguments.state)
    print_title("Bad input to the command line: latest run")
    print("A case is right if `tune` ends with a documented exit code, at most one line of error for each fault, no")
    print("traceback, in time, and leaves no process and no file outside its folders. *Accepted* includes cases")
    print("that would need a server next. *Commands* were run again as real commands.\n")
    print("| section | tried | right | accepted | refused (2) | environment (3) | commands | slowest CPU s |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for name, tally in {**state.sections, "**all**": _total(state)}.items():
        numbers = (tally.tried, tally.right, tally.accepted, tally.refused, tally.environment, tally.commands)
        print(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} | {tally.slowest_cpu_s:.1f} |")
    print(f"\n{measured_on()}")
    for fault in state.faults:
        print(f"\n{fault}", file=sys.stderr)
    return 1 if state.faults else 0


def _total(state: State) -> Tally:
    total = Tally()
    for tally in state.sections.values():
        for name, value in asdict(tally).items():
            before = getattr(total, name)
            setattr(total, name, max(before, value) if isinstance(value, float) else before + value)
    return total


if __name__ == "__main__":
    sys.exit(main())
