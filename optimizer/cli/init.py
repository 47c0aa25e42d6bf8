"""``tune init``: write a commented profile of a model, to edit and tune."""

from __future__ import annotations

import sys
from pathlib import Path

from optimizer.cli.commands import add_model
from optimizer.cli.output import progress_on_terminal
from optimizer.core.errors import BadInputError
from optimizer.core.files import output_error, replace_file
from optimizer.core.safe_text import exists, one_line, show_path
from optimizer.options.command_line import Parser, value_of, values_of
from optimizer.options.option_reader import run_options
from optimizer.options.table import SLA_OPTIONS

STANDARD_OUTPUT = "-"
OPTIONS = (*SLA_OPTIONS, "model-repository", "bls-composing-models", "concurrent-models", "variants")
EPILOG = """\
The profile has the search space that `tune MODEL` derives, written out. No
server is started. Next to a profile, tritune-profile.schema.json lets editors
complete and check it.

exit codes: 0 done, 2 bad input, such as a file that exists without --force

examples:
  tune init --sla-p95 50ms ./model.onnx
  tune init --model-repository ./models my_model
  tune init --out - dlrm
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "tune init",
        "[options] MODEL",
        "Write a profile of a model, with a comment for each key, to edit and tune.",
        EPILOG,
    )
    add_model(parser, "A model.onnx, a Triton model folder, or a name from `tune models`")
    parser.add_argument("--out", metavar="FILE", help="File of the profile; - prints it (default: ./NAME.yaml)")
    parser.add_argument("--force", action="store_true", help="Overwrite the profile if it exists")
    parser.add_options(OPTIONS)
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune init`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    values = values_of(arguments, OPTIONS)
    from optimizer.study.initial_profile import initial_profile
    from optimizer.study.run_request import missing_model

    if not arguments.model:
        raise missing_model(value_of(arguments, "--model-repository"))
    options = run_options(arguments.model, values)
    is_printed = arguments.out == STANDARD_OUTPUT
    output = None if is_printed or arguments.out is None else Path(arguments.out)
    on_progress, _ = progress_on_terminal()
    profile = initial_profile(options, output, on_progress)
    if is_printed:
        print(profile.text, end="")
    else:
        _write(profile.path, profile.text, force=arguments.force)
    for line in profile.missing:
        print(f"to fill in: {one_line(line)}", file=sys.stderr)
    return 0


def _write(path: Path, text: str, *, force: bool) -> None:
    """Write the profile and, next to it, the JSON Schema of profiles, which its first line names to editors."""
    from optimizer.model.profile_files import COPY_NAME, MODELINE, SCHEMA_FILE

    if exists(path) and not force:
        raise BadInputError(f"{show_path(path)} exists; give another --out, or --force")
    schema = path.with_name(COPY_NAME)
    for file, content in ((schema, SCHEMA_FILE.read_bytes()), (path, f"# {MODELINE}\n{text}")):
        try:
            replace_file(file, content)
        except OSError as error:
            raise output_error(file, error) from None
    print(show_path(path))
    print(show_path(schema))
