"""Files and folders: the cache, the package's folders, sizes, CSV rows, and atomic writes of text, CSV and JSON."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from optimizer.core.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.core.safe_text import decode_utf8, show_path

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of the disk, not of the path
FREE_BYTES = 8 << 20  # more than most load generators write during a measurement
SHARED_MEMORY_FOLDER = Path("/dev/shm")
REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space in your quota there",
    errno.EROFS: "make that file system writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.ENOLCK: "use a folder whose file system has locks",
    errno.ENOENT: "move its folder back, which was moved or removed",
}


def shipped_folder(name: str) -> Path:
    """Return the folder ``name`` of the installed package; of the checkout if the package is an editable install."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    if not (package / name).is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / name
    return package / name


def expand_home(text: str) -> Path:
    """Return a path with the home folder in place of ``~`` or ``~user``. As in a shell, an unknown user stays."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def cache_folder() -> Path:
    """Return ``$TRITUNE_CACHE`` if it is set, otherwise ``tritune`` in the user's cache folder.

    This is ``$XDG_CACHE_HOME``, or ``~/.cache`` if that is not set or relative (XDG Base Directory Specification).
    Raises EnvironmentFault if the user has no home folder.
    """
    if folder := os.environ.get("TRITUNE_CACHE"):
        return expand_home(folder).absolute()  # programs in it are started in other folders
    caches = expand_home(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = expand_home("~/.cache")
    if not caches.is_absolute():
        raise EnvironmentFault("the user has no home folder for the cache; set TRITUNE_CACHE to another folder")
    return caches / "tritune"


def stored_bytes(*paths: Path) -> int:
    """Return the total size of the files at or below ``paths``; a file with several hard links counts once.

    Links are not followed. Files that cannot be read, or are removed meanwhile, are left out.
    """
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        folders = () if path.is_symlink() else os.walk(path)
        files = (Path(folder, name) for folder, _, names in folders for name in names)
        for file in (path, *files):
            with contextlib.suppress(OSError):
                status = file.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file of a run atomically, as ``replace_file``; the folder of ``path`` is created if it is missing.

    Raises EnvironmentFault if the disk refuses the write.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise write_error(path, error) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the file atomically: after a crash or a power failure it has the old or the new content.

    Only one process at a time may write ``path``. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        scratch.unlink(missing_ok=True)  # a killed process left it, or it is a link in a downloaded folder
        with scratch.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()  # it exists only after an error


def write_error(path: Path, error: OSError, then: str = "continue with `tune --resume`") -> EnvironmentFault:
    """Return the error to raise if writing ``path``, a file of a run, failed with ``error``.

    ``then`` says what to do once the disk is repaired.
    """
    remedy = REMEDIES.get(error.errno or 0, "check that disk")
    return EnvironmentFault(f"cannot write {show_path(path)}: {error.strerror}; {remedy}, then {then}")


def cache_error(task: str, error: OSError) -> EnvironmentFault:
    """Return the error to raise if ``task``, such as "write into PATH", failed in the cache with ``error``."""
    remedy = "set TRITUNE_CACHE to another folder"
    if error.errno in DISK_FAULTS:
        remedy = f"free space there, or {remedy}"
    return EnvironmentFault(f"cannot {task}: {error.strerror or error}; {remedy}")


def check_disk_space(folder: Path) -> None:
    """Raise EnvironmentFault if the disk of ``folder``, the folder of a run, does not take FREE_BYTES more."""
    scratch = folder / ".space"
    try:
        scratch.unlink(missing_ok=True)  # a killed process left it, or it is a link in a downloaded folder
        with scratch.open("xb") as file:
            file.write(bytes(FREE_BYTES))
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def output_error(path: Path, error: OSError) -> TuneError:
    """Return the error to raise if writing ``path``, which the user chose with ``--out``, failed with ``error``."""
    if error.errno in DISK_FAULTS:
        return write_error(path, error, "run the command again")
    return BadInputError(f"cannot write {show_path(path)}: {error.strerror}; give another place with --out")


def read_csv_rows(data: bytes, file: str, *, strict: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, each with the number of its first line.

    Empty lines are skipped, but a row of empty cells is yielded. With ``strict``, a misplaced quotation mark is an
    error; otherwise it is part of its cell. Raises BadInputError: ``file:line: problem``.
    """
    reader = csv.reader(io.StringIO(decode_utf8(data, file), newline=""), strict=strict)
    before = 0
    try:
        for cells in reader:
            if cells:
                yield before + 1, cells
            before = reader.line_num
    except csv.Error as error:
        raise BadInputError(f"{file}:{before + 1}: not a row of a CSV file ({error})") from None


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table as CSV; values that a row lacks are empty. Raises EnvironmentFault."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    write_atomically(path, text.getvalue())


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(map(str, value)) if isinstance(value, list) else value


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write indented JSON with a final line break. Raises EnvironmentFault."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
