"""Output that cannot be written or encoded, an interrupt at the very start and a lack of memory end in one line."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import IO

import pytest

from optimizer.cli.main import NEAR_LIMIT_BYTES, address_space_peak_bytes, is_out_of_memory
from tests.command_fixtures import TUNE, Tune

SAMPLE = Path("tests/data/dlrm/sample").resolve()
UNWRITABLE = ("report", SAMPLE, "--format", "markdown", "--out", "/dev/null")  # fails after the wait
RUNS = ("runs", "--results", SAMPLE.parents[1])
CLOSED = 141  # 128 + SIGPIPE, as of any other program
SECONDS = 600.0


def run(
    *arguments: str | Path,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
    under: tuple[str, ...] = (),
    **env: str,
) -> subprocess.CompletedProcess[bytes]:
    command = [*under, TUNE, *arguments]
    environment = {**os.environ, **env}
    return subprocess.run(command, stdout=stdout, stderr=stderr, env=environment, timeout=SECONDS, check=False)


def test_a_working_folder_that_was_removed_is_named() -> None:
    inside = ("sh", "-c", 'cd "$(mktemp -d)" && rmdir "$PWD" && exec "$@"', "sh")
    ended = run("runs", under=inside)
    complaint = "tune: the working folder does not exist any more; change to another one\n"
    assert (ended.returncode, ended.stderr.decode()) == (3, complaint)


# -- standard output and standard error -------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), RUNS], ids=str)
def test_a_reader_that_has_ended_ends_the_command_as_any_other(arguments: tuple[str | Path, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = run(*arguments, stdout=pipe)
    assert (ended.returncode, ended.stderr) == (CLOSED, b"")


def test_a_closed_standard_error_ends_the_command() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        assert run("--frob", stderr=pipe).returncode == CLOSED


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_named() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = run(*RUNS, stdout=full)
    complaint = "tune: standard output: cannot be written: No space left on device; free space there"
    assert (ended.returncode, ended.stderr.decode()) == (2, f"{complaint}, or write it elsewhere\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_error_changes_nothing_else() -> None:
    with Path("/dev/full").open("wb") as full:
        assert run("--frob", stderr=full).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (("plan", SAMPLE, "--rate", "40000/s"), "simulating replicas", 0),
        (UNWRITABLE, "writing markdown", 2),
    ],
    ids=str,
)
def test_a_wait_is_shown_on_a_terminal(arguments: tuple[str | Path, ...], text: str, code: int) -> None:
    keyboard, terminal = os.openpty()
    with os.fdopen(keyboard, "rb", buffering=0) as shown, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_terminal, shown)  # a command waits while the buffer of the terminal is full
        try:
            ended = run(*arguments, stderr=terminal, TERM="xterm")
        finally:
            os.close(terminal)
        assert (ended.returncode, text in reading.result(), text.encode() in ended.stdout) == (code, True, False)


def read_terminal(shown: FileIO) -> str:
    """Return the text that a terminal gets until its other end is closed."""
    text = b""
    with contextlib.suppress(OSError):  # EIO: it is closed
        while part := shown.read(4096):
            text += part
    return text.decode()


def test_a_wait_is_not_shown_without_a_terminal(called_tune: Tune) -> None:
    ended = called_tune(*UNWRITABLE)
    assert (ended.code, "writing markdown" in ended.stderr) == (2, False)


def test_characters_that_cannot_be_encoded_are_replaced_by_similar_ones() -> None:
    ended = run("models", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii()
    assert b"input__0 FP32 [13] | input__1 INT64 [26]" in ended.stdout


def test_a_character_without_a_similar_one_is_a_question_mark() -> None:
    ended = run("verify", "modèle±1", PYTHONIOENCODING="ascii")
    assert ended.returncode == 2
    assert b"mod?le+-1" in ended.stderr


# -- interrupts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imports", [1, 20, 150])
def test_an_interrupt_while_modules_are_imported_ends_with_one_line(imports: int) -> None:
    """The interrupt comes at an import of `tune` that is counted from the first, so that no clock decides."""
    program = f"""
        import os, signal, sys
        left = {imports}
        def count(event, _):
            global left
            if event == "import":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGINT)
        from optimizer.cli.start import main
        sys.argv = ["tune", "models"]
        sys.addaudithook(count)
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (130, "tune: interrupted\n")


def test_an_interrupt_that_the_caller_ignores_stays_ignored() -> None:
    program = """
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.addaudithook(lambda event, _: event == "import" and os.kill(os.getpid(), signal.SIGINT))
        sys.argv = ["tune", "--help"]
        from optimizer.cli.start import main
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, timeout=SECONDS, check=False).returncode == 0


# -- long names -------------------------------------------------------------------------------------------------


def test_a_long_name_loses_its_middle_in_an_error() -> None:
    ended = run("report", "m" * 5000)
    assert ended.returncode == 2
    (line,) = ended.stderr.decode().splitlines()
    assert len(line) < 1000
    assert "mmm…mmm" in line


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_mb", [1, 10])
def test_a_limit_of_memory_is_named(left_mb: int) -> None:
    """NumPy and hashlib are loaded first: OpenBLAS ends a process that lacks memory, hashlib prints a traceback."""
    program = f"""
        import hashlib, resource, sys, numpy
        from pathlib import Path
        from optimizer.cli.start import main
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + {left_mb} * 1_000_000, resource.RLIM_INFINITY))
        sys.argv = ["tune", "explain", "{SAMPLE}"]
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "tune: not enough memory" in ended.stderr.splitlines()[-1], ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_lack_of_memory_is_recognised_behind_other_errors() -> None:
    hidden = ImportError("numpy could not be imported")
    hidden.__cause__ = OSError("libopenblas.so: failed to map segment from shared object")
    assert is_out_of_memory(hidden)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(TypeError("Couldn't build proto file into descriptor pool: out of memory"))
    assert not is_out_of_memory(ValueError("memory"))


@pytest.mark.parametrize("lost", [SystemError("error return without exception set"), SyntaxError("expected ':'")])
def test_an_error_that_a_library_has_lost_is_a_lack_of_memory_only_close_to_a_limit(lost: Exception) -> None:
    assert not is_out_of_memory(lost)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    peak_bytes = address_space_peak_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (peak_bytes + 2 * NEAR_LIMIT_BYTES, hard))
        assert not is_out_of_memory(lost)
        resource.setrlimit(resource.RLIMIT_AS, (peak_bytes + NEAR_LIMIT_BYTES // 2, hard))
        assert is_out_of_memory(lost)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- the end ----------------------------------------------------------------------------------------------------


def test_a_command_ends_without_a_search_for_garbage() -> None:
    """Python searches all objects that are not frozen when it ends."""
    program = """
        import atexit, gc, sys
        from optimizer.cli.main import main

        atexit.register(lambda: print(len(gc.get_objects()) < gc.get_freeze_count()))
        main()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), "--version"],
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.stdout.splitlines()[-1] == b"True"


def test_an_unknown_width_of_the_terminal_is_no_width_of_zero(called_tune: Tune) -> None:
    shown = called_tune("--sla-p95", "20ms", "mlp", "--dry-run", env={"COLUMNS": "0"})
    assert (shown.code, shown.errors) == (0, [])
