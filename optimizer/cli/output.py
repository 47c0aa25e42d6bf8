"""The output of the commands: errors, progress, results, questions on a terminal, and the streams.

The streams report closed pipes and full disks, and write similar characters for those that their encoding lacks.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TextIO

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_file, one_line, show_path

if TYPE_CHECKING:
    from rich.console import Console

    from optimizer.emit.recommended import Recommendation
    from optimizer.results.progress_observers import Progress
    from optimizer.study.tuning_run import RunResult


INTERRUPTED = 130
MAX_MESSAGE_CHARACTERS = 900  # a longer message loses its middle


def print_message(message: str) -> None:
    """Print ``message`` to standard error, as one line with the prefix ``tune:``."""
    print(f"tune: {one_line(message, MAX_MESSAGE_CHARACTERS)}", file=sys.stderr, flush=True)


def fail(message: str, code: int) -> int:
    """Print an error to standard error and return ``code``."""
    print_message(message)
    return code


def print_json(document: object, indent: int | None = 2) -> None:
    """Print the result of a command as JSON; on one line without ``indent``.

    Raises ValueError for NaN and infinity, which JSON does not have.
    """
    print(json.dumps(document, indent=indent, allow_nan=False), flush=True)


def busy(text: str) -> AbstractContextManager[object]:
    """Return a context that shows ``text`` and a spinner on a terminal. Only standard error may be written in it."""
    console = open_console(stderr=True)
    return console.status(text) if console.is_interactive else contextlib.nullcontext()


def progress_on_terminal(log: str | None = None, *, with_time: bool = False) -> Progress:
    """Return the progress of a run on standard error; the arguments are those of ``make_progress``."""
    from optimizer.results.progress_observers import make_progress

    return make_progress(open_console(stderr=True), log, with_time=with_time)


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error. It imports rich, which takes a while."""
    from rich.console import Console

    return Console(stderr=stderr)


def show_result(result: RunResult, *, as_json: bool, verbose: bool) -> None:
    """Print the result of a run, and how the page of the batch that it belongs to is written again."""
    from optimizer.store.run_folder import BATCH_FILE

    folder, task, environment = result.record.folder, result.record.task, result.record.environment
    if is_file(folder.path.parent / BATCH_FILE):
        batch = shlex.quote(show_path(folder.path.parent))
        print_message(f"note: the run belongs to a batch; `tune report {batch}` writes its page again")
    if as_json:
        print_json(result.document)
        return
    if result.status == "left":
        print(f"{result.continued_by}; the measurements of this run are in {folder.path}")
        return
    from optimizer.options.command_line import command_line, command_with_larger_budget
    from optimizer.options.run_options import PROGRAM_TARGETS
    from optimizer.results.terminal_summary import RunDetails, print_best_so_far, print_outcome

    if result.status == "interrupted":
        command = result.continue_command
        print_best_so_far(open_console(), result.outcome, task.problem, results_dir=folder.path, command=command)
        return
    details = RunDetails(
        baseline=task.baseline,
        hardware=str(environment.hardware),
        notes=result.record.notes,
        facts=task.source.facts,
        results_dir=folder.path,
        command=command_line(environment.options),
        longer_command=command_with_larger_budget(environment.options),
        tuned_part=task.source.batcher,
        config_path=folder.best_config if result.outcome.recommended else None,
        report_path=result.report_path,
        can_serve=environment.options.target in PROGRAM_TARGETS,
        remaining_tests=result.record.remaining_tests,
    )
    print_outcome(open_console(), result.outcome, task.problem, details, verbose=verbose)


def check_decided(recommendation: Recommendation, verb: str, *, force: bool) -> None:
    """Raise BadInputError for an UNDECIDED recommendation; with ``force`` print a warning instead.

    ``verb`` is that of the command, such as "emits".
    """
    if not recommendation.is_undecided:
        return
    from optimizer.results import summary

    step = recommendation.run.step_if_undecided
    problem = one_line(
        f"{recommendation.run.name}: the verdict is UNDECIDED: {summary.undecided_cause(recommendation.outcome)}; "
        f"{step.advice}: `{step.command}`"
    )
    if not force:
        raise BadInputError(f"{problem}; --force {verb} it nevertheless")
    print_message(f"note: {problem}")


# replaces characters that the encoding of a stream lacks; the others become a question mark
_SIMILAR = {"±": "+-", "·": "|", "µ": "u", "×": "x", "–": "-", "−": "-", "…": "...", "→": "->", "≤": "<=", "●": "o"}
APPROXIMATE = "tune-approximate"  # the name of this way in ``codecs``


def _approximate(error: UnicodeError) -> tuple[str, int]:
    """Return similar characters for those that cannot be encoded, and where to continue; see ``codecs``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SIMILAR.get(character, "?") for character in error.object[error.start : error.end]), error.end


class OutputClosed(SystemExit):
    """The program that reads the output has ended, as in ``tune models | head -1``. Ends the command as SIGPIPE."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGPIPE)

    def __str__(self) -> str:
        return "the program that reads the output has ended"


class Output:
    """A stream that reports its write errors as errors of ``tune``; all other attributes are those of ``stream``.

    A closed pipe raises OutputClosed. Other errors of standard output raise BadInputError; those of standard error
    discard the rest of it, because nothing could show the message.
    """

    def __init__(self, stream: TextIO, *, is_error: bool) -> None:
        self._stream = stream
        self._is_error = is_error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text`` and return its length."""
        with self._translated_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with self._translated_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard()
            raise OutputClosed from None
        except OSError as error:
            self._discard()
            if not self._is_error:
                raise BadInputError(
                    f"standard output: cannot be written: {error.strerror}; free space there, or write it elsewhere"
                ) from None

    def _discard(self) -> None:
        """Discard the buffered text and all later output; otherwise Python tries to write it again when it exits."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard standard output and standard error within the context; they get similar characters if they lack some.

    A stream that is closed (``>&-``) is None and stays so.
    """
    before = sys.stdout, sys.stderr
    codecs.register_error(APPROXIMATE, _approximate)
    with contextlib.ExitStack() as undo:
        for stream in before:
            if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
                undo.callback(reconfigure, errors=stream.errors)
                reconfigure(errors=APPROXIMATE)
        guarded: list[Any] = [stream and Output(stream, is_error=stream is before[1]) for stream in before]
        sys.stdout, sys.stderr = guarded
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def flush() -> None:
    """Write what standard output has buffered. Raises OutputClosed and BadInputError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def confirm_deletion(question: str, flag: str, *, is_confirmed: bool) -> bool:
    """Return whether to delete something: ``is_confirmed`` (``--yes``), or else the answer to ``question``.

    Raises BadInputError, which begins with ``flag``, if there is no terminal to ask on.
    """
    if is_confirmed:
        return True
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        raise BadInputError(f"{flag}: there is no terminal to ask on; give --yes to delete without a question")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except UnicodeDecodeError:
        answer = ""
    return answer.strip().lower() in ("y", "yes")
