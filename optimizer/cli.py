"""The ``tune`` command: arguments to options, results to the terminal, errors to one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from objectives.sla import Constraint
from optimizer import interrupts
from optimizer.arguments.values import Parser
from optimizer.command_line import redact
from optimizer.errors import EnvironmentFault, TuneError
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from optimizer.budget import Budget
    from optimizer.machine.hardware import Hardware
    from optimizer.problem import Problem
    from optimizer.session import Result
    from optimizer.stack import WatcherMaker

COMMANDS = ("run", "verify", "plan", "sweep", "replay", "models", "setup", "doctor")
INTERRUPTED = 130
BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main() -> NoReturn:
    """Entry point of the console script."""
    interrupts.install()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reports to its maker, and writes files for it
    try:
        code = _dispatch(sys.argv[1:])
    except KeyboardInterrupt:
        interrupts.acknowledge()
        code = _fail("interrupted", INTERRUPTED)
    except TuneError as error:
        for line in str(error).splitlines():
            _fail(line, 0)
        if error.log is not None:
            _fail(f"the log: {error.log}", 0)
        code = error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in BROKEN_DISK:
            where = error.filename or "a file"
            sys.exit(_fail(f"{where}: {error.strerror}; see to that disk, then `tune --resume` goes on", 3))
        # a fault of tune's own: 1 would mean that no configuration meets the SLA
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        code = _fail("this is a fault of tune itself; the trace above tells where", EnvironmentFault.exit_code)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    print(f"tune: {one_line(message)}", file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    command = "run"
    if arguments and arguments[0] in COMMANDS:
        command, arguments = arguments[0], arguments[1:]
    if command == "run":
        return _run(arguments)
    if command == "verify":
        return _verify(arguments)
    if command == "plan":
        from optimizer.commands.plan import main as plan

        return plan(arguments)
    if command == "sweep":
        return _sweep(arguments)
    if command == "replay":
        return _replay(arguments)
    parser = Parser(prog=f"tune {command}")
    if command == "models":
        parser.description = "The models that come with tune, and those in ./configs."
        parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
        given = parser.parse_args(arguments)
        from optimizer.listing import print_models

        print_models(as_json=given.json)
        return 0
    if command == "setup":
        parser.description = "Fetch and unpack the embedded server and perf_analyzer, compile the simulator, once."
        parser.parse_args(arguments)
        from optimizer import runtime
        from optimizer.batcher.ahead import compile_ahead

        say = partial(print, flush=True)  # into a pipe too
        ready = runtime.ensure(say)
        compile_ahead(say)
        print(f"ready: {ready.root}")
        return 0
    parser.description = "Check what tune needs on this machine, with the mend for what is missing."
    parser.parse_args(arguments)
    from optimizer.doctor import diagnose

    return diagnose()


# -- tune run ---------------------------------------------------------------------------------------------------


def _run(arguments: list[str]) -> int:
    from optimizer.arguments.run import read_run_arguments

    given = read_run_arguments(arguments)
    if given.mapped is not None and given.print_profile:
        from optimizer.machine import hardware
        from optimizer.model_analyzer.profile import profile_text

        gpu = bool(hardware.detect().gpus) and hardware.onnxruntime_on_gpu()
        print(profile_text(given.mapped, given.options, gpu=gpu), end="")
        return 0
    for note in given.mapped.notes if given.mapped is not None and not given.as_json else ():
        print(note, file=sys.stderr, flush=True)
    from optimizer.session import tune

    result = tune(given.options, given.resumed, *_shown_on(_terminal()))
    _print(result, as_json=given.as_json)
    return {"found": 0, "none": 1, "interrupted": INTERRUPTED}[result.status]


def _terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _shown_on(terminal: Console) -> tuple[Callable[[str], None], WatcherMaker]:
    """What is told while something slow goes on: a line for each preparation, then a live display."""
    from optimizer.report.console import LiveWatcher, QuietWatcher

    def say(line: str) -> None:
        if terminal.is_terminal:
            terminal.print(one_line(line), highlight=False, markup=False)

    def watch(problem: Problem, budget: Budget, hardware: Hardware) -> LiveWatcher | QuietWatcher:
        return (
            LiveWatcher(terminal, problem, budget, hardware=str(hardware)) if terminal.is_terminal else QuietWatcher()
        )

    return say, watch


def _print(result: Result, *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(result.document, indent=2))
        return
    from rich.console import Console

    from optimizer.report.console import print_best_so_far, print_outcome

    if result.status == "interrupted":
        print_best_so_far(Console(), result.outcome, result.task.problem, results_dir=result.folder.path)
        return
    print_outcome(
        Console(),
        result.outcome,
        result.task.problem,
        hardware=str(result.hardware),
        notes=result.notes,
        facts=result.task.source.facts,
        results_dir=result.folder.path,
        command=result.command,
        config_path=result.folder.best_config if result.outcome.recommended else None,
    )


# -- tune verify ------------------------------------------------------------------------------------------------


def _verify(arguments: list[str]) -> int:
    from optimizer.arguments.verify import read_verify_arguments

    given = read_verify_arguments(arguments)
    from optimizer.confirm.verify import verify
    from optimizer.report.verified import document, print_verified

    result = verify(given.run, given.options, *_shown_on(_terminal()))
    folder = str(result.folder.path)
    if given.as_json:
        import json

        print(json.dumps(document(result.verified, result.before, folder, result.notes), indent=2))
    else:
        from rich.console import Console

        print_verified(Console(), result.verified, result.before, result.problem, folder, result.notes)
    return 0 if result.verified.holds else 1


# -- tune sweep -------------------------------------------------------------------------------------------------


def _sweep(arguments: list[str]) -> int:
    from optimizer.arguments.sweep import read_sweep_arguments

    given = read_sweep_arguments(arguments)
    from optimizer.sweeping.console import Progress, print_sweep
    from optimizer.sweeping.document import write_csv
    from optimizer.sweeping.sweeper import sweep

    say, _ = _shown_on(_terminal())
    result = sweep(given.options, given.asked, given.resumed, say, lambda plan: Progress(say, plan))
    if given.csv is not None:
        write_csv(given.csv, result.cells)
    if given.as_json:
        import json

        print(json.dumps(result.document, indent=2))
    else:
        from rich.console import Console

        print_sweep(Console(), result.cells, result.document)
    if result.status == "interrupted":
        return INTERRUPTED
    return 0 if any(cell.has_figures for cell in result.cells) else 1


# -- tune replay ------------------------------------------------------------------------------------------------


def _replay(arguments: list[str]) -> int:
    from pathlib import Path

    from rich.console import Console

    from optimizer.arguments.replay import read_replay_arguments

    given = read_replay_arguments(arguments)
    from optimizer.replay.comparison import compare, document
    from optimizer.replay.console import closest, print_comparison
    from optimizer.replay.recording import read_recording

    recording = read_recording(Path(given.table))
    problem = recording.problem([Constraint(f"latency-{name}", bound) for name, bound in given.sla_ms.items()])
    best = recording.best(problem)
    if best is None:
        return _fail(closest(recording, problem), 1)
    with Console(stderr=True).status("") as status:
        comparison = compare(
            recording,
            problem,
            best,
            given.methods,
            seeds=range(given.seeds),
            max_trials=given.max_trials,
            say=status.update,
        )
    if given.as_json:
        import json

        print(json.dumps(document(comparison), indent=2))
    else:
        print_comparison(Console(), comparison)
    return 0
