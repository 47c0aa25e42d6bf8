"""``tune cache``: show what tune has cached on this machine, or remove it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optimizer.cli.output import confirm_deletion, open_console, print_json
from optimizer.core.errors import BadInputError
from optimizer.core.files import cache_folder
from optimizer.core.safe_text import one_line, quote, show_path
from optimizer.deploy.cache import (
    REMOVABLE,
    CachedFiles,
    check_unused,
    find_removable,
    read_cache,
    remove_cached,
)
from optimizer.options.command_line import Parser, add_json

FLAG = "--clean"
DECLINED = 1
UNNOTICED_RUNS = "A run that is being prepared, or is in another container, is not noticed and would fail."
EPILOG = f"""\
The cache is in ~/.cache/tritune; the variable TRITUNE_CACHE moves it. The next
run fetches or builds again what it needs: 100 MB for the server, and seconds
to minutes for a model. Runs and their results are not in the cache (see
`tune runs`).

kinds: {", ".join(REMOVABLE)}

The kind remote is never removed. It holds the models that a remote server had
before a tune that was killed; the next `tune --target remote` with the same
--url restores them.

{FLAG} refuses while another tune has a server, tunes a remote one, builds a
model or fetches the server. It does not notice a run that is being prepared, or
is in another container, which would fail.

exit codes: 0 done, 1 the deletion was declined, 2 bad input, 3 the cache is in
use or cannot be removed

examples:
  tune cache
  tune cache --clean models requests
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune cache",
        usage=f"[options] [{FLAG} [KIND ...]]",
        description="Show what tune has cached on this machine, with sizes, or remove it.",
        epilog=EPILOG,
    )
    parser.add_argument(FLAG, metavar="KIND", nargs="*", help="Remove these kinds (default: all)")
    parser.add_argument("--yes", action="store_true", help="Remove without a question; needed without a terminal")
    add_json(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune cache`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    folder = cache_folder()
    if arguments.clean is not None:
        return _clean(folder, arguments.clean, is_confirmed=arguments.yes, as_json=arguments.json)
    if arguments.yes:
        raise BadInputError(f"--yes: works only with {FLAG}; give that too, or leave it out")
    _show(folder, read_cache(folder), as_json=arguments.json)
    return 0


def _clean(folder: Path, names: Sequence[str], *, is_confirmed: bool, as_json: bool) -> int:
    for name in names:
        if name not in REMOVABLE:
            raise BadInputError(f"{FLAG} {quote(name)}: write one or more of {', '.join(REMOVABLE)}")
    removable = find_removable(folder, names or REMOVABLE)
    if removable:
        check_unused(folder)
        kinds = ", ".join(files.kind.name for files in removable)
        question = f"{UNNOTICED_RUNS}\nremove {kinds} ({_size_text(removable)}) from {show_path(folder)}?"
        if not confirm_deletion(question, FLAG, is_confirmed=is_confirmed):
            print("nothing was removed")
            return DECLINED
        remove_cached(folder, removable)
    if as_json:
        print_json(_document(folder, removable))
        return 0
    for files in removable:
        print(f"removed {files.kind.name} ({_size_text([files])})")
    if not removable:
        print(f"nothing to remove in {show_path(folder)}")
    return 0


def _show(folder: Path, cached: Sequence[CachedFiles], *, as_json: bool) -> None:
    if as_json:
        print_json(_document(folder, cached))
        return
    from rich.text import Text

    from optimizer.results.terminal_output import plain_table, print_table

    table = plain_table("kind", ">size", "in the folder", "what it is")
    for files in cached:
        names = "\n".join(one_line(path.name) for path in files.paths)
        table.add_row(*map(Text, (files.kind.name, _size_text([files]), names, files.kind.description)))
    print(f"{_size_text(cached)} in {show_path(folder)}")
    print_table(open_console(), table)


def _document(folder: Path, cached: Sequence[CachedFiles]) -> dict[str, object]:
    return {
        "folder": str(folder),
        "size_bytes": sum(files.size_bytes for files in cached),
        "kinds": [files.document() for files in cached],
    }


def _size_text(cached: Sequence[CachedFiles]) -> str:
    from optimizer.results import formatting

    return formatting.size(sum(files.size_bytes for files in cached))
