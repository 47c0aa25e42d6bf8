"""The entry point of the ``tune`` command: it runs a subcommand and reports its errors."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from optimizer.cli.commands import (
    COMMANDS,
    COMPLETION_FLAG,
    overview,
    print_completion_script,
    refuse_misspelt_command,
    refuse_options_before_command,
    requested_words,
    version_line,
)
from optimizer.cli.output import INTERRUPTED, fail, flush, guarded_streams, print_message
from optimizer.core import interrupts
from optimizer.core.errors import EnvironmentFault, TuneError
from optimizer.core.files import DISK_FAULTS, write_error

NEAR_LIMIT_BYTES = 64 << 20  # of `ulimit -v`: libraries allocate and map blocks of this size
# errors of the dynamic loader, of Python and of protobuf
OUT_OF_MEMORY = (
    *("Cannot allocate memory", "failed to map segment", "can't start new thread"),
    "Couldn't build proto file into descriptor pool: out of memory",
)
# Address space for the report of an error, which may be a lack of memory. A process that cannot reserve it ends at
# once, because Python does not always survive a lack of memory within an import.
RESERVE_BYTES = 32 << 20


def main() -> NoReturn:
    """Run the command in ``sys.argv`` and exit."""
    with guarded_streams():
        try:
            with mmap.mmap(-1, RESERVE_BYTES):
                code = _run(sys.argv[1:])
        except Exception as error:
            code = _report_unexpected(error)
    gc.freeze()  # else Python searches all objects for garbage before it ends, which takes 0.6 s after a run
    sys.exit(code)


def _run(argv: list[str]) -> int:
    """Run the command and return its exit code. Errors of ``tune`` are reported here, and others are raised."""
    try:
        interrupts.install()
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each failed TLS handshake prints a line
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else ONNX Runtime sends telemetry, also in files
        if os.environ.get("COLUMNS", "").strip("0") == "":
            os.environ.pop("COLUMNS", None)  # some terminals set 0 for an unknown width, and rich takes it literally
        return _dispatch(argv)
    except KeyboardInterrupt:
        interrupts.acknowledge()
        # OpenBLAS starts a thread for each CPU, and raises SIGINT if a limit does not permit that
        from optimizer.machine.hardware import MORE_THREADS, thread_problem

        if thread_problem(1):  # its text names the number of needed threads, here 1
            return fail(f"no more processes and threads can be started; {MORE_THREADS}", EnvironmentFault.exit_code)
        return fail("interrupted", INTERRUPTED)
    except TuneError as error:
        for line in str(error).split("\n"):  # one_line escapes other line separators
            print_message(line)
        for note in getattr(error, "__notes__", ()):
            print_message(note)
        if error.log is not None:
            print_message(f"log: {error.log}")
        return error.exit_code


def _report_unexpected(error: Exception) -> int:
    """Report an error that is not one of ``tune``, and return the exit code."""
    if interrupts.is_pending():  # a library has replaced the interrupt, as numpy does while it is imported
        interrupts.acknowledge()
        return fail("interrupted", INTERRUPTED)
    if is_out_of_memory(error):
        return fail(
            "not enough memory to load or run tune; close other programs, or raise the limit of `ulimit -v`",
            EnvironmentFault.exit_code,
        )
    if isinstance(error, OSError) and error.errno in (*DISK_FAULTS, errno.EROFS):
        fault = write_error(Path(error.filename or "a file"), error)
        return fail(str(fault), fault.exit_code)
    if not _has_working_folder():
        message = "the working folder does not exist any more; change to another one"
        return fail(message, EnvironmentFault.exit_code)
    from optimizer.options.addresses import redact  # takes longer to import than all of the above

    # a bug in tune; exit code 1 would mean that no configuration meets the SLA
    print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    return fail("this is a bug in tune; please report the traceback above", EnvironmentFault.exit_code)


def _has_working_folder() -> bool:
    """Return whether the working folder of this process still exists, as another program may have removed it."""
    try:
        return bool(Path.cwd())
    except FileNotFoundError:
        return False


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or an error that led to it is a lack of memory, even if a library calls it otherwise.

    Close to the limit of ``ulimit -v`` every error counts as one, because native libraries lose a MemoryError or
    replace it, and Python's parser calls it an error of syntax.
    """
    if _is_near_limit():
        return True
    while error is not None:
        if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_near_limit() -> bool:
    """Return whether the address space of this process has come close to the limit of ``ulimit -v``."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit_bytes != resource.RLIM_INFINITY and limit_bytes - address_space_peak_bytes() < NEAR_LIMIT_BYTES


def address_space_peak_bytes() -> int:
    """Return the largest address space that this process has had: VmPeak of proc(5)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmPeak"].split()[0]) * 1024


def _dispatch(argv: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for the words that may come next
        argv = requested_words()
    first = argv[0] if argv else ""
    try:
        if first in ("-h", "--help"):
            print(overview(), end="")
            return 0
        if first == "--version":
            print(version_line())
            return 0
        if first.partition("=")[0] == COMPLETION_FLAG:
            return print_completion_script(argv)
        if first not in COMMANDS:
            refuse_options_before_command(argv)
            refuse_misspelt_command(argv)
        command, arguments = (first, argv[1:]) if first in COMMANDS else ("run", argv)
        return int(import_module(f"optimizer.cli.{command}").main(arguments))
    finally:
        flush()
