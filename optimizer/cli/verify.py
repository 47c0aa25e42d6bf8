"""``tune verify RUN``: continue the test of a recommendation, or test it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optimizer.cli.commands import add_run
from optimizer.cli.exit_codes import EXIT_CODES, exit_code
from optimizer.cli.output import open_console, print_json, progress_on_terminal, show_result
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import show_path
from optimizer.options.addresses import server_address
from optimizer.options.command_line import Parser, add_model_of_run, add_results, values_of
from optimizer.options.option_reader import EXTERNAL, changed_options, retarget
from optimizer.options.run_options import RunOptions
from optimizer.options.table import TARGET_OPTIONS
from optimizer.options.values import parse_budget_seconds, parse_optional
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_lookup import find_run
from optimizer.study.run_request import read_run_request, read_stored_options, refuse_foreign_values

_TARGET = {option.name for option in TARGET_OPTIONS}
EPILOG = """\
The test continues where the run ended it, with all windows so far, on the same
machine and server. All sessions together err as one test does, so the command
may be repeated until PASS. trials.csv, run.json and the report are updated.

With --fresh the recommendation and the two next best configurations are
measured in a separate test, without the windows of the run. The recommendation
holds if it meets the SLA and neither of the others is significantly better by
the first objective. The results are in the folder verify/ of the run.

With --fresh --target remote a running server is measured, for example that of
production before a release. It must run with --model-control-mode=explicit and
get no other requests. Its model is restored at the end.

exit codes: 0 PASS, 1 no configuration meets the SLA, 2 bad input, 3
environment, 4 UNDECIDED, 130 interrupted; with --fresh 0 the recommendation
holds, 1 it does not hold, 4 the measurements do not decide

examples:
  tune verify latest
  tune verify --budget 10m results/dlrm/20261120-231154
  tune verify --fresh --target remote --url triton:8001 dlrm
"""


@dataclass(frozen=True)
class VerifyArguments:
    """The command line of ``tune verify``.

    Attributes:
        run: The folder of the run.
        options: Those of the run, with the target options of the command line.
        budget_seconds: Time of the measurements; None for the default.
        is_fresh: Make a separate test.
        as_json: Print one JSON document.
        verbose: Print the details of the result too.
    """

    run: RunFolder
    options: RunOptions
    budget_seconds: float | None
    is_fresh: bool
    as_json: bool
    verbose: bool


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune verify",
        usage="[options] RUN [MODEL]",
        description="Continue the test of the recommendation of a run on fresh servers, or test it\nagain (--fresh).",
        epilog=EPILOG,
    )
    add_run(parser)
    add_model_of_run(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="Make a separate test, also on another server or machine"
    )
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="Wall time of the measurements: 5m, 90s (default: 3m; with --fresh twice the expected time)",
    )
    add_results(parser)
    parser.add_options(
        {*_TARGET, "storage", "json", "verbose"},
        hidden=set(EXTERNAL) - _TARGET,
        defaults={"target": "that of the run", "storage": "that of the run"},
    )
    return parser


def read_verify_arguments(argv: list[str]) -> VerifyArguments:
    """Return the parsed command line. Raises BadInputError naming the flag, its value and the allowed values."""
    arguments = build_parser().read(argv)
    budget_seconds = parse_optional("--budget", arguments.budget, parse_budget_seconds)
    values = values_of(arguments)
    values.pop("budget", None)
    run = find_run(arguments.run, arguments.results, "run")
    as_json = values.pop("json", False) is True
    verbose = values.pop("verbose", False) is True
    read_options = _fresh_options if arguments.fresh else _continued_options
    options = read_options(run, arguments.model, values)
    return VerifyArguments(run, options, budget_seconds, arguments.fresh, as_json, verbose)


def _continued_options(run: RunFolder, model: str | None, values: dict[str, object]) -> RunOptions:
    if changed := changed_options(read_stored_options(run), values):
        raise BadInputError(
            f"--{changed[0]}: the test of a run continues on the server of that run; give --fresh too"
        )
    return read_run_request(model, {**values, "resume": str(run.path)}, "verify").options


def _fresh_options(run: RunFolder, model: str | None, values: dict[str, object]) -> RunOptions:
    run.refuse_links()
    stored, about = read_stored_options(run, other_machine=True), f"verify {show_path(run.path)}"
    if changed := changed_options(stored, {name: value for name, value in values.items() if name not in _TARGET}):
        raise BadInputError(f"{about}: the run has its own model and data; leave --{changed[0]} out")
    options = retarget(stored, values)
    refuse_foreign_values(run, stored, options, about, model, values)
    if options.target == "remote":
        protocol = server_address(options.url).protocol
        if options.protocol != protocol:
            other = "http://host:port" if protocol == "grpc" else "the host:port of its gRPC"
            raise BadInputError(f"{run.path} was measured over {options.protocol}: give --url {other}")
        options = replace(options, server_cpus=None)
    return options


def absent_cpus(run: RunFolder, options: RunOptions) -> list[str]:
    """Return the lists of CPUs of the run that ``options`` lack because this machine does not have these CPUs."""
    stored = run.read_options()
    names = ["client_cpus"] if options.target == "remote" else ["client_cpus", "server_cpus"]
    return [
        f"--{name.replace('_', '-')} {getattr(stored, name)}"
        for name in names
        if getattr(stored, name) != getattr(options, name)
    ]


def main(argv: list[str]) -> int:
    """Run ``tune verify`` and return its exit code. Raises TuneError."""
    arguments = read_verify_arguments(argv)
    progress = progress_on_terminal()
    if not arguments.is_fresh:
        from optimizer.results.summary import VERIFY_MINUTES
        from optimizer.study.tuning_run import continue_confirmation

        seconds = arguments.budget_seconds or 60.0 * VERIFY_MINUTES
        with continue_confirmation(arguments.run, arguments.options, seconds, progress) as continued:
            show_result(continued, as_json=arguments.as_json, verbose=arguments.verbose)
        return exit_code(continued.status, continued.outcome.verdict)
    from optimizer.results.verification import print_verification
    from optimizer.study.fresh_verification import verify_fresh

    for option in absent_cpus(arguments.run, arguments.options):
        progress.on_progress(f"{option} of the run is left out: this machine does not have these CPUs")
    result = verify_fresh(arguments.run, arguments.options, arguments.budget_seconds, progress)
    if arguments.as_json:
        print_json(result.document())
    else:
        print_verification(open_console(), result)
    return EXIT_CODES[result.verified.verdict]
