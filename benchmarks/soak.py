"""Run, sweep and resume tune for an hour, disturb it with killed servers, full disks and more, and find its faults.

    python benchmarks/soak.py [--minutes 60] [--seed 0] [--work FOLDER] [--smoke] > benchmarks/soak.md

A round starts an operation on the model mlp: a run with a fixed number of requests in flight (run) or at a request
rate (rate), a sweep, or a study through the Python interface. All studies run in one process. After a random time an
event happens, and when the operation has ended, it is resumed without an event. The events are

- SIGKILL to tune, tritonserver, the process of a model (stub), the load generator, or a supervisor of these
- an interrupt of tune: SIGINT, SIGTERM or SIGHUP
- a full disk: the results are on a tmpfs in a mount namespace, which needs no root where user namespaces are allowed
- tritonserver and the processes of its models are stopped (SIGSTOP) for 1 to 20 s and continue after that
- a slow client: for 5 s the load generator is stopped half of the time
- a step of the clock: tune is killed. With libfaketime it is resumed with its clocks an hour back. Without it, it is
  resumed in a time namespace whose monotonic clocks are a day ahead.

A round is right if each end has an exit code that its event allows, at most one line of error and no traceback, no
process, shared memory or temporary folder is left, and each row that a table had before is still there. The process
of the studies may have at most 5 % more file handles and memory after its last study than after its second.

Each round is one line of FOLDER/rounds.jsonl. A repeated command continues until all rounds together took --minutes,
and prints the tables (Markdown). Its exit code is 1 if a round was wrong. A folder holds rounds of one machine and
one seed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import psutil

from lib.command_check import STOPPED, check_output
from lib.fuzz_sections import CommandCase
from lib.output import head, judged, print_progress, print_title, row
from lib.records import Records, this_machine
from lib.study_worker import StudyWorker, Usage
from optimizer.cli.output import INTERRUPTED
from optimizer.core import interrupts
from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import SHARED_MEMORY_FOLDER
from optimizer.core.process import SUPERVISOR
from optimizer.deploy import runtime
from optimizer.deploy.server_process import remove_leftovers
from optimizer.measure.load_client.client_process import CLIENT
from optimizer.simulator.simulate import compile_simulator
from optimizer.store.run_folder import RUN_FILE, SWEEP_FILE
from tests.command_fixtures import FINISHED, Ended, Sandbox, eventually
from tests.storage_fixtures import SmallDisk, mounted_disk

MODEL = "mlp"
MINUTES, SMOKE_MINUTES = 60.0, 3.0
WORK = Path(tempfile.gettempdir(), "tritune_soak")
EARLIEST_SECONDS, LATEST_SECONDS = 1.0, 15.0  # of an event after the start
LONGEST_PAUSE_SECONDS, SLOW_SECONDS, SLOW_PERIOD_SECONDS = 20.0, 5.0, 0.1
MOST_SECONDS = 240.0  # only an operation that hangs takes so long
GONE_SECONDS = 60.0  # until a model's process notices that its server and its supervisor have died
DISK_MEBIBYTES = 16
MOST_GROWTH = 0.05
CLOCK_SECONDS = 86_400
CLOCK_AHEAD = (  # the beginning of a command whose monotonic clocks are ahead
    *("unshare", "--map-root-user", "--time", f"--monotonic={CLOCK_SECONDS}", f"--boottime={CLOCK_SECONDS}"),
    *("--fork", "--kill-child"),
)
FAKETIME = "*/faketime/libfaketime.so.1"  # in /usr/lib

STUDY, SWEEP = "study", "sweep"
RUN_WORDS = ("--sla-p95", "50ms", "--budget", "60s", "--max-trials", "3", "--no-confirmation")
WORDS = {  # of the commands
    "run": RUN_WORDS,
    "rate": (*RUN_WORDS, "--load", "rate"),
    SWEEP: ("sweep", "--max-queue-delay", "off,0", "-b", "1,2", "--concurrency", "1,4,8"),
}
STUDY_KEYWORDS = {"sla_p95": "50ms", "budget": "60s", "max_trials": 3, "no_confirmation": True}

TRITONSERVER, STUB, LOAD_GENERATOR, A_SUPERVISOR = "tritonserver", "stub", "load generator", "supervisor"
PROGRAMS = {
    "tritonserver": TRITONSERVER,
    "triton_python_backend_stub": STUB,
    "perf_analyzer": LOAD_GENERATOR,
}
KILLED = {f"kill {part}": part for part in (TRITONSERVER, STUB, LOAD_GENERATOR, A_SUPERVISOR)}
NOTHING, PAUSED_SERVER, SLOW_CLIENT = "none", "paused server", "slow client"
KILL_TUNE, INTERRUPT, FULL_DISK, CLOCK_STEP = "kill tune", "interrupt", "full disk", "clock step"
SURVIVED = frozenset({*FINISHED, EnvironmentFault.exit_code})  # exit codes of a command whose child was killed
EVENTS = {  # event -> allowed exit codes; the operation may end before the event
    NOTHING: frozenset(FINISHED),
    **dict.fromkeys(KILLED, SURVIVED),
    PAUSED_SERVER: SURVIVED,
    SLOW_CLIENT: frozenset(FINISHED),
    KILL_TUNE: frozenset({*FINISHED, -signal.SIGKILL}),
    INTERRUPT: frozenset({*FINISHED, INTERRUPTED}),
    FULL_DISK: SURVIVED,
    CLOCK_STEP: frozenset({*FINISHED, -signal.SIGKILL}),
}
OF_COMMANDS = (KILL_TUNE, INTERRUPT, FULL_DISK, CLOCK_STEP)  # these would end the process of the studies
KINDS = [
    (operation, event)
    for operation in (*WORDS, STUDY)
    for event in EVENTS
    if operation != STUDY or event not in OF_COMMANDS
]
COLUMNS = ("event", "rounds", "happened", "ends by exit code", "after the resume", "leaks", "lost rows", "wrong ends")
PROCESS_COLUMNS = (
    *("process", "studies", "file handles after the second", "after the last", "growth"),
    *("MB after the second", "after the last", "growth"),
)


@dataclass(frozen=True)
class SoakRound:
    """One round.

    Attributes:
        has_happened: Whether the event came before the end of the operation.
        means: How a full disk or a step of the clock was made, or why it could not be; empty for other events.
        exit_codes: Of the operation, and of its resume.
        rows: Rows of the tables at the end, with their headers.
        leaks: Processes, shared memory and folders that were left.
        faults: Why an end of the operation was wrong.
        process: The process of a study; empty for a command.
        usages: Usage of this process after the study and after its resume.
    """

    number: int
    seed: int
    machine: str
    started: str
    operation: str
    event: str
    has_happened: bool
    means: str
    exit_codes: tuple[int, ...]
    seconds: float
    rows: int
    lost_rows: int
    leaks: tuple[str, ...]
    faults: tuple[str, ...]
    process: str
    usages: tuple[Usage, ...]

    @property
    def is_right(self) -> bool:
        return not (self.lost_rows or self.leaks or self.faults)


def planned(seed: int, number: int) -> tuple[str, str]:
    """Return the operation and the event of a round: all kinds in random order, then all in another order."""
    cycle, place = divmod(number, len(KINDS))
    kinds = KINDS.copy()
    random.Random(f"{seed} {cycle}").shuffle(kinds)
    return kinds[place]


# -- observations of a round -------------------------------------------------------------------------------------


def part_of(words: Sequence[str]) -> str:
    """Return which part of tune a process with this command line is; empty for another process."""
    if str(SUPERVISOR) in words:
        return A_SUPERVISOR
    if CLIENT in words:
        return LOAD_GENERATOR
    return PROGRAMS.get(Path(words[0]).name, "") if words else ""


def find_parts(pid: int, *parts: str) -> list[psutil.Process]:
    """Return the processes below ``pid`` that are one of these parts."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if part_of(process.cmdline()) in parts:
                    found.append(process)
    return found


def read_rows(out: Path) -> dict[str, list[bytes]]:
    """Return the complete lines of each trials table below ``out``, by its path."""
    tables = {str(path.relative_to(out)): path.read_bytes() for path in out.glob("*/*/trials*.csv")}
    return {name: content[: content.rfind(b"\n") + 1].splitlines() for name, content in tables.items()}


def count_lost(before: Mapping[str, list[bytes]], after: Mapping[str, list[bytes]]) -> int:
    """Return how many rows are not where they were."""
    return sum(
        line != now
        for name, lines in before.items()
        for line, now in zip_longest(lines, after.get(name, [])[: len(lines)])
    )


def wrong_end(ended: Ended, allowed: Iterable[int]) -> list[str]:
    """Return why the end of a command was wrong; an empty list if it was right."""
    if ended.code not in allowed:
        return [f"exit code {ended.code}: {ended.stderr[-300:]}"]
    code = STOPPED if ended.code == -signal.SIGKILL else ended.code
    try:
        check_output(Ended(code, ended.stdout, ended.stderr, ended.pid), CommandCase(()), [])
    except AssertionError as error:
        return [f"exit code {ended.code}: {error}"]
    return []


# -- one operation ------------------------------------------------------------------------------------------------


class Operation(Protocol):
    """A command or a study that has been started."""

    @property
    def pid(self) -> int: ...

    def has_ended(self) -> bool: ...

    def finish(self) -> Ended:
        """Wait for the end. Raises TimeoutError if it hangs; it is killed then."""


class Command:
    """A command of tune."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> Ended:
        try:
            stdout, stderr = self._process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise TimeoutError from None
        return Ended(self._process.returncode, stdout, stderr, self.pid)


class Study:
    """A study in the long-lived process. ``usage`` is known when it has ended, unless that process died."""

    def __init__(self, worker: StudyWorker) -> None:
        assert worker.pid is not None
        self._worker = worker
        self.pid = worker.pid
        self.usage: Usage | None = None

    def has_ended(self) -> bool:
        return self._worker.has_ended()

    def finish(self) -> Ended:
        if not self._worker.has_ended(MOST_SECONDS):
            self._worker.stop()
            raise TimeoutError
        end = self._worker.read_end()
        if end is None:
            return Ended(STOPPED, "", f"the process of the studies died: {self._worker.errors()}", self.pid)
        self.usage = end.usage
        error = f"tune: {end.error}\n" if end.error else ""
        return Ended(end.exit_code, "", self._worker.errors() + error, self.pid)


# -- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The folder of a round's results, and the commands that run tune.

    Attributes:
        out: The folder of its results.
        seen: The same folder as this process sees it.
        under: A command that runs tune.
        resumed_under: A command that runs the resumed tune.
        disk: The disk that is filled.
        means: See SoakRound.
        is_possible: Whether the event is possible here.
    """

    out: Path
    seen: Path
    under: Sequence[str | Path] = ()
    resumed_under: Sequence[str | Path] = ()
    disk: SmallDisk | None = None
    means: str = ""
    is_possible: bool = True


def strike(event: str, operation: Operation, setting: Setting, chance: random.Random) -> bool:
    """Let the event happen, once the part that it affects runs. Return whether it came before the end."""
    if operation.has_ended():
        return False
    if event in KILLED:
        victims = wait_for_parts(operation, KILLED[event])
        with contextlib.suppress(psutil.Error, IndexError):
            chance.choice(victims).kill()
        return bool(victims)
    if event == PAUSED_SERVER:
        servers = wait_for_parts(operation, TRITONSERVER, STUB)
        hold(servers, operation, chance.uniform(1.0, LONGEST_PAUSE_SECONDS))
        return bool(servers)
    if event == SLOW_CLIENT:
        is_running = bool(wait_for_parts(operation, LOAD_GENERATOR))
        deadline = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < deadline and not operation.has_ended():
            hold(find_parts(operation.pid, LOAD_GENERATOR), operation, SLOW_PERIOD_SECONDS / 2)
            time.sleep(SLOW_PERIOD_SECONDS / 2)
        return is_running
    if event == FULL_DISK and setting.disk:
        setting.disk.fill()
    elif event in (KILL_TUNE, CLOCK_STEP):
        os.kill(operation.pid, signal.SIGKILL)
    elif event == INTERRUPT:
        # tune inherits and keeps the signals that this process ignores, such as SIGHUP under nohup
        received = [number for number in interrupts.SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        os.kill(operation.pid, chance.choice(received))
    return True


def wait_for_parts(operation: Operation, *parts: str) -> list[psutil.Process]:
    """Return the processes of these parts once there are some; an empty list if the operation ends before."""
    while not operation.has_ended():
        if found := find_parts(operation.pid, *parts):
            return found
        time.sleep(0.02)
    return []


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def hold(processes: Iterable[psutil.Process], operation: Operation, seconds: float) -> None:
    """Stop processes for some time, or until the operation ends, and let them continue."""
    held = list(processes)
    try:
        for process in held:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        eventually(operation.has_ended, seconds)
    finally:
        for process in held:
            with contextlib.suppress(psutil.Error):
                process.resume()


# -- all rounds ---------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """The findings of a round. ``known`` files existed before it; ``rows`` are the lines of its tables so far."""

    known: set[Path]
    rows: dict[str, list[bytes]] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    lost_rows: int = 0
    leaks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    def add_rows(self, rows: dict[str, list[bytes]]) -> None:
        self.lost_rows += count_lost(self.rows, rows)
        self.rows = rows


class Soak:
    """Runs rounds in the folders of ``sandbox``."""

    def __init__(self, sandbox: Sandbox, seed: int, machine: str) -> None:
        self._playground, self._seed, self._machine = sandbox, seed, machine
        kill(sandbox.processes())  # of a soak that was killed
        for folder in (sandbox.working_folder, sandbox.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "TMPDIR": str(sandbox.temporary)}
        self._worker = StudyWorker(sandbox.working_folder, env, sandbox.root / "studies.log")

    def close(self) -> None:
        """End everything that was started."""
        self._worker.stop()
        kill(self._playground.processes())

    def run(self, number: int) -> SoakRound:
        """Run a round. Its results are kept if it was not right, unless they were on the full disk."""
        operation, event = planned(self._seed, number)
        chance = random.Random(f"{self._seed} {number}")
        started, began = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
        findings = Findings(self._files(whole=True))
        out = self._playground.working_folder / "results" / str(number)
        shutil.rmtree(out, ignore_errors=True)  # of a round that was killed
        with self._setting(event, out) as setting:
            first = self._start(operation, setting)
            eventually(first.has_ended, chance.uniform(EARLIEST_SECONDS, LATEST_SECONDS))
            findings.add_rows(read_rows(setting.seen))
            has_happened = setting.is_possible and strike(event, first, setting, chance)
            self._end(first, EVENTS[event], setting, findings)
            if setting.disk and has_happened:
                setting.disk.free()
            self._end(self._resume(operation, setting), FINISHED, setting, findings, is_last=True)
        round_ = SoakRound(
            number=number,
            seed=self._seed,
            machine=self._machine,
            started=started,
            operation=operation,
            event=event,
            has_happened=has_happened,
            means=setting.means,
            exit_codes=tuple(findings.exit_codes),
            seconds=round(time.monotonic() - began, 1),
            rows=sum(map(len, findings.rows.values())),
            lost_rows=findings.lost_rows,
            leaks=tuple(findings.leaks),
            faults=tuple(findings.faults),
            process=self._worker.name if operation == STUDY else "",
            usages=tuple(findings.usages),
        )
        if round_.is_right:
            shutil.rmtree(out, ignore_errors=True)
        return round_

    @contextlib.contextmanager
    def _setting(self, event: str, out: Path) -> Iterator[Setting]:
        """Yield how a round with this event runs; its results are in ``out`` if its disk is not filled."""
        with contextlib.ExitStack() as mounted:
            setting = Setting(out, out)
            if event == FULL_DISK:
                setting = self._disk_setting(out, mounted)
            elif event == CLOCK_STEP:
                setting = self._clock_setting(out)
            yield setting

    def _disk_setting(self, out: Path, mounted: contextlib.ExitStack) -> Setting:
        try:
            disk = mounted.enter_context(mounted_disk(self._playground.working_folder / "disk", DISK_MEBIBYTES))
        except OSError as error:
            return Setting(out, out, means=str(error), is_possible=False)
        means = f"tmpfs of {DISK_MEBIBYTES} MiB in a mount namespace"
        mount, seen = disk.mount / "results", disk.path / "results"
        return Setting(mount, seen, disk.command_prefix, disk.command_prefix, disk=disk, means=means)

    def _clock_setting(self, out: Path) -> Setting:
        library = next(Path("/usr/lib").glob(FAKETIME), None)
        if library is not None:
            under = ("env", f"LD_PRELOAD={library}", "FAKETIME=-1h", "NO_FAKE_STAT=1")
            return Setting(out, out, resumed_under=under, means="resumed under libfaketime, all clocks an hour back")
        if subprocess.run([*CLOCK_AHEAD, "true"], capture_output=True, check=False).returncode == 0:
            means = "no libfaketime here; resumed in a time namespace, monotonic clocks a day ahead"
            return Setting(out, out, resumed_under=CLOCK_AHEAD, means=means)
        return Setting(out, out, means="neither libfaketime nor time namespaces here", is_possible=False)

    def _start(self, operation: str, setting: Setting) -> Operation:
        if operation == STUDY:
            return self._start_study({"model": MODEL, "out": str(setting.out), **STUDY_KEYWORDS})
        words: list[str | Path] = [*WORDS[operation], "--out", setting.out, MODEL]
        return Command(self._playground.start(*words, under=setting.under))

    def _resume(self, operation: str, setting: Setting) -> Operation:
        """Resume the operation, or start another if it had not written its record."""
        name = SWEEP_FILE if operation == SWEEP else RUN_FILE
        record = max(setting.seen.glob(f"*/*/{name}"), default=None)
        if record is None:
            return self._start(operation, setting)
        folder = setting.out / record.parent.relative_to(setting.seen)
        if operation == STUDY:
            return self._start_study({"resume": str(folder)})
        words: list[str | Path] = [*([SWEEP] if operation == SWEEP else []), "--resume", folder]
        return Command(self._playground.start(*words, under=setting.resumed_under))

    def _start_study(self, keywords: Mapping[str, object]) -> Study:
        self._worker.start(keywords)
        return Study(self._worker)

    def _end(
        self,
        current: Operation,
        allowed: Iterable[int],
        setting: Setting,
        findings: Findings,
        *,
        is_last: bool = False,
    ) -> None:
        """Wait for the end of an operation, and add its faults and leaks to ``findings``."""
        try:
            ended = current.finish()
            findings.exit_codes.append(ended.code)
            findings.faults += wrong_end(ended, allowed)
        except TimeoutError:
            findings.faults.append(f"did not end within {MOST_SECONDS:g} s")
        if isinstance(current, Study) and current.usage:
            findings.usages.append(current.usage)
        eventually(lambda: not self._processes(), GONE_SECONDS)
        left = self._processes()
        for process in left:
            with contextlib.suppress(psutil.Error):
                findings.leaks.append(f"process {process.name()}")
        kill(left)
        files = self._files(whole=is_last) - findings.known
        findings.leaks += map(str, sorted(files))
        findings.known |= files
        findings.add_rows(read_rows(setting.seen))

    def _processes(self) -> list[psutil.Process]:
        return [process for process in self._playground.processes() if process.pid != self._worker.pid]

    def _files(self, *, whole: bool) -> set[Path]:
        """Return shared memory, and with ``whole`` temporary folders, which a killed run leaves to the next one.

        Shared memory of a running process that is not ours is left out, and Triton's folders in /tmp while any server
        runs, because they do not name their owner.
        """
        files = set()
        for region in SHARED_MEMORY_FOLDER.glob("tritune_*"):
            owner = int(region.name.split("_")[1])
            if owner == self._worker.pid or not psutil.pid_exists(owner):
                files.add(region)
        if whole:
            files |= set(self._playground.temporary.iterdir())
            if not any(process.info["name"] == TRITONSERVER for process in psutil.process_iter(["name"])):
                files |= set(Path("/tmp").glob("python_env_*"))
        return files


# -- output -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """How much more the process of the studies uses after its last study than after its second, as shares."""

    second: Usage
    last: Usage

    @property
    def file_handles(self) -> float:
        return self.last.file_handles / self.second.file_handles - 1

    @property
    def memory(self) -> float:
        return self.last.memory_bytes / self.second.memory_bytes - 1

    @property
    def cells(self) -> list[str]:
        """The cells below the last six of PROCESS_COLUMNS."""
        handles = [f"{self.second.file_handles}", f"{self.last.file_handles}", f"{self.file_handles:+.1%}"]
        megabytes = [f"{usage.memory_bytes / 1e6:.0f}" for usage in (self.second, self.last)]
        return [*handles, *megabytes, f"{self.memory:+.1%}"]


def usages_by_process(rounds: Sequence[SoakRound]) -> dict[str, list[Usage]]:
    """Return the usage of each process of studies, after each study."""
    usages: dict[str, list[Usage]] = {}
    for one in rounds:
        if one.process:
            usages.setdefault(one.process, []).extend(one.usages)
    return usages


def growth(usages: Sequence[Usage]) -> Growth | None:
    """Return the growth; None after fewer than three studies."""
    return Growth(usages[1], usages[-1]) if len(usages) > 2 else None


def targets(rounds: Sequence[SoakRound]) -> dict[str, bool]:
    """Return whether each target is met, by a text with its value."""
    leaks, lost, faults = (sum(counts) for counts in zip(*map(_wrong, rounds), strict=True)) if rounds else (0, 0, 0)
    grown = [one for usages in usages_by_process(rounds).values() if (one := growth(usages))]
    met = {
        f"leaks of processes, shared memory and temporary folders: {leaks} (none)": leaks == 0,
        f"lost rows: {lost} (none)": lost == 0,
        f"wrong ends: {faults} (none)": faults == 0,
    }
    if grown:
        handles, memory = max(one.file_handles for one in grown), max(one.memory for one in grown)
        met[f"growth of file handles: {handles:.1%} (at most {MOST_GROWTH:.0%})"] = handles <= MOST_GROWTH
        met[f"growth of memory: {memory:.1%} (at most {MOST_GROWTH:.0%})"] = memory <= MOST_GROWTH
    return met


def report(rounds: Sequence[SoakRound]) -> list[str]:
    """Return the tables (Markdown) and the faults."""
    lines = head(*COLUMNS)
    for event in EVENTS:
        if of_event := [one for one in rounds if one.event == event]:
            lines.append(row(event, *_cells(of_event)))
    minutes, operations = sum(one.seconds for one in rounds) / 60, Counter(one.operation for one in rounds)
    lines += [
        row("**all**", *_cells(rounds)),
        "",
        f"{minutes:.0f} minutes. Operations: {', '.join(f'{name} {count}' for name, count in operations.items())}. "
        f"Their tables had {sum(one.rows for one in rounds):,} rows.",
        "",
        *sorted({f"- {one.event}: {one.means}" for one in rounds if one.means}),
        "",
        *head(*PROCESS_COLUMNS),
    ]
    for process, usages in usages_by_process(rounds).items():
        grown = growth(usages)
        lines.append(row(process, str(len(usages)), *(grown.cells if grown else ["–"] * 6)))
    lines += ["", *(f"- {text}: {judged(is_met)}" for text, is_met in targets(rounds).items())]
    for one in rounds:
        if not one.is_right:
            lost = [f"{one.lost_rows} rows lost"] if one.lost_rows else []
            lines += ["", f"Round {one.number} ({one.operation}, {one.event}):", ""]
            lines += [f"- {' '.join(text.split())}" for text in (*lost, *one.leaks, *one.faults)]
    return lines


def _wrong(one: SoakRound) -> tuple[int, int, int]:
    return len(one.leaks), one.lost_rows, len(one.faults)


def _cells(rounds: Sequence[SoakRound]) -> list[str]:
    """Return the cells below COLUMNS but the first."""
    ends = [Counter(one.exit_codes[place] for one in rounds if len(one.exit_codes) > place) for place in (0, 1)]
    return [
        str(len(rounds)),
        str(sum(one.has_happened for one in rounds)),
        *(", ".join(f"{code}: {count}" for code, count in sorted(codes.items())) for codes in ends),
        *(str(sum(counts)) for counts in zip(*map(_wrong, rounds), strict=True)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help=f"time of all rounds ({MINUTES:g})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rounds (0)")
    parser.add_argument("--work", type=Path, help=f"folder of the rounds ({WORK})")
    parser.add_argument("--smoke", action="store_true", help=f"check that all works: {SMOKE_MINUTES:g} minutes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    minutes = arguments.minutes or (SMOKE_MINUTES if arguments.smoke else MINUTES)
    work = (arguments.work or (WORK.with_name(f"{WORK.name}_smoke") if arguments.smoke else WORK)).absolute()
    machine, records = this_machine(), Records(work / "rounds.jsonl", SoakRound)
    rounds = records.read(machine)
    if any(one.seed != arguments.seed for one in rounds):
        sys.exit(f"{work}: rounds of another seed; give another folder (--work)")
    runtime.ensure(print_progress)
    compile_simulator(print_progress)
    soak = Soak(Sandbox(work / "play"), arguments.seed, machine)
    try:
        while sum(one.seconds for one in rounds) < 60 * minutes:
            rounds.append(soak.run(len(rounds)))
            records.append(rounds[-1])
            print_progress(f"{sum(one.seconds for one in rounds) / 60:.1f} minutes: {rounds[-1]}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; repeat the command to continue; what is done is in {work}")
    finally:
        soak.close()
        remove_leftovers()
    print_title("Soak: latest run")
    print("\n".join(report(rounds)))
    print(f"\n{machine}; {rounds[-1].started[:10]}")
    return 0 if all(targets(rounds).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
