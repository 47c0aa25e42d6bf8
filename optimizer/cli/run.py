"""``tune MODEL`` or ``tune run MODEL``: find the best configuration of a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from optimizer.cli.commands import add_model, complete_run
from optimizer.cli.exit_codes import exit_code
from optimizer.cli.output import open_console, print_json, progress_on_terminal, show_result
from optimizer.core.errors import BadInputError
from optimizer.options.command_line import Parser, values_of
from optimizer.options.run_options import RunOptions
from optimizer.options.table import OPTIONS, OPTIONS_BY_NAME
from optimizer.study.run_request import RunRequest, read_run_request

if TYPE_CHECKING:
    from optimizer.model.model_analyzer.reader import ModelAnalyzerImport


EPILOG = """\
Without a profile the search space is derived from the model and the machine;
--dry-run shows it. A profile.yaml may list other settings to search, such as
fields of config.pbtxt or options of the server: `tune init MODEL` writes one,
and docs/search-space.md has its keys.

exit codes: 0 PASS (without any bound: found), 1 no configuration meets the
SLA, 2 bad input, 3 environment, 4 UNDECIDED, 130 interrupted

examples:
  tune --sla-p95 20ms dlrm
  tune --sla-p99 50ms --model-repository ./models my_model
  tune --resume results/dlrm/20261120-231154

`tune --help` lists the other commands.
"""


def read_run_arguments(argv: list[str]) -> RunRequest:
    """Return the parsed command line. Raises BadInputError naming the flag, its value and the allowed values."""
    namespace = build_parser(OPTIONS_BY_NAME).read(argv)
    values = values_of(namespace)
    if "print-profile" in values and "from-model-analyzer" not in values:
        raise BadInputError("--print-profile prints the file of --from-model-analyzer FILE: give that too")
    return read_run_request(namespace.model, values)


class _Help(argparse.Action):
    """Print the help: ``--help`` with the common options, ``--help-all`` with all."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        names = [option.name for option in OPTIONS if option.is_common or option_string == "--help-all"]
        build_parser(names).print_help()
        parser.exit()


def build_parser(names: Collection[str] = ()) -> Parser:
    """Return the parser of the command line with the options ``names`` of the table."""
    parser = Parser(
        "tune run",
        "[options] MODEL",
        "Find the Triton Inference Server configuration that serves the most requests\n"
        "within a latency bound: try configurations on a real server, measure each with\n"
        "perf_analyzer, or tune's own client if the model streams or keeps state.\n"
        "The word `run` can be left out.",
        EPILOG,
        add_help=False,
    )
    add_model(parser, "A name from `tune models`, a profile.yaml, a model.onnx, or a Triton model folder", "?")
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="Show the common options")
    parser.add_argument("--help-all", action=_Help, nargs=0, help="Show all options")
    parser.add_options(names)
    parser.set_completer("--resume", complete_run)
    parser.set_completer("--warm-start", partial(complete_run, with_files=True))  # a table is one
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune run`` and return its exit code. Raises TuneError."""
    request = read_run_arguments(argv)
    options, imported, parsed = request.options, request.model_analyzer, request.parsed
    as_json = "json" in parsed
    if imported is not None and "print-profile" in parsed:
        return _print_profile(imported, options)
    progress = progress_on_terminal(parsed.get("log"))
    if "dry-run" in parsed:  # the preview has the notes
        return _preview(options, progress.on_progress, as_json=as_json)
    if imported is not None and not as_json:
        for note in imported.notes:
            print(note, file=sys.stderr, flush=True)
    from optimizer.study.tuning_run import tune

    writes_report = "no-report" not in parsed
    with tune(options, request.resumed, progress, report=writes_report) as result:
        show_result(result, as_json=as_json, verbose="verbose" in parsed)
    return exit_code(result.status, result.outcome.verdict)


def _print_profile(imported: ModelAnalyzerImport, options: RunOptions) -> int:
    """Print the profile of Model Analyzer's file and return the exit code. Raises BadInputError."""
    from functools import partial
    from pathlib import Path

    from optimizer.deploy.visible_gpus import visible_gpus
    from optimizer.model.instances import DeviceAssignment
    from optimizer.model.model_analyzer.reader import render_imported_profile
    from optimizer.study.model_finder import DEFAULT_LARGEST_BATCH

    assignment = DeviceAssignment.of(options, visible_gpus(options).names)
    repository = Path(options.model_repository or ".")
    read = partial(assignment.read, repository, largest_batch=DEFAULT_LARGEST_BATCH)
    print(render_imported_profile(imported, options, read), end="")
    return 0


def _preview(options: RunOptions, on_progress: Callable[[str], None], *, as_json: bool) -> int:
    """Print the preview of a run and return the exit code. Raises TuneError."""
    from optimizer.study.run_preview import preview, print_preview

    shown = preview(options, on_progress)
    if as_json:
        print_json(shown.document())
    else:
        print_preview(open_console(), shown)
    return 0
