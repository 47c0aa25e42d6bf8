"""The releases of perf_analyzer next to the pinned one of the runtime: a newer one, and one for older servers.

The newer release measures where it starts. It needs a newer C library than the server does, and the system's OpenSSL.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

from optimizer.core.files import cache_folder
from optimizer.core.safe_text import is_file, one_line
from optimizer.deploy.server_process import is_older
from optimizer.deploy.wheels import Wheel, install_missing, make_executable
from optimizer.machine.hardware import describe_unsupported_libc

NEWER_VERSION, OLDER_VERSION = "2.60.0", "2.36.0"
NEWER_GLIBC = (2, 38)
START_LIMIT_SECONDS = 60.0  # on a busy machine or from a network disk it may take more than 10 s

NEWER_WHEEL = Wheel(
    f"perf-analyzer=={NEWER_VERSION}",
    "23ef56b107ae9233e5cf09fbdf508dd9b936a52f1bae2f63f53c8117087b3f25",
    ("perf_analyzer/bin/perf_analyzer",),
)
# Newer versions set triton_enable_empty_final_response in each request, which servers before OLDER_SERVERS refuse.
OLDER_SERVERS = (2, 34)
OLDER_WHEEL = Wheel(
    f"tritonclient=={OLDER_VERSION}",
    "56a124e3f1901c5d392d00d8daa2de40156a1de1b4d3d3a4296b3e55c77a230d",
    (f"tritonclient-{OLDER_VERSION}.data/data/bin/perf_analyzer",),
)


def newer_perf_analyzer() -> Path | None:
    """Return the program of the newer release; None if it is not unpacked or does not start."""
    return None if newer_problem() else newer_program()


def newer_problem() -> str:
    """Return why the newer release does not measure on this machine, as a clause; empty if it does."""
    if reason := glibc_problem():
        return reason
    return start_problem(newer_program()) if is_file(newer_program()) else "it is not unpacked"


def newer_program() -> Path:
    """Return where the program of the newer release is, or would be."""
    return _program(NEWER_VERSION, NEWER_WHEEL)


def glibc_problem(libc: tuple[str, str] | None = None) -> str:
    """Return why the C library (default: this system's) is too old for the newer release; empty if it is not."""
    library = describe_unsupported_libc(NEWER_GLIBC, libc)
    return f"it needs glibc {'.'.join(map(str, NEWER_GLIBC))}, this is {library}" if library else ""


@functools.cache
def start_problem(program: Path) -> str:
    """Return why ``program`` does not start, as a clause; empty if it does. Cached for this process."""
    try:
        done = subprocess.run(
            [program, "--version"], env={}, capture_output=True, text=True, timeout=START_LIMIT_SECONDS, check=False
        )
    except OSError as error:
        return f"it does not start: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it does not start within {START_LIMIT_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return f"it does not start: {one_line(lines[0].removeprefix(f'{program}: '))}"


def ensure_newer(on_progress: Callable[[str], None]) -> None:
    """Download and unpack the newer release, unless it is there or this system is too old for it.

    Raises EnvironmentFault if pip cannot download it.
    """
    if not glibc_problem():
        _ensure(NEWER_VERSION, NEWER_WHEEL, f"fetching perf_analyzer {NEWER_VERSION} (7 MB, once)", on_progress)


def ensure_older(on_progress: Callable[[str], None]) -> Path:
    """Return the perf_analyzer for servers before 2.34, which is downloaded on first use. Raises EnvironmentFault."""
    return _ensure(
        OLDER_VERSION, OLDER_WHEEL, "fetching perf_analyzer for servers before 2.34 (12 MB, once)", on_progress
    )


def measuring_version(version: str, server_version: str) -> str:
    """Return the version that measures a server where ``version`` is used: the older one for an older server."""
    return OLDER_VERSION if is_older(server_version, OLDER_SERVERS) else version


def _program(version: str, wheel: Wheel) -> Path:
    return _folder(version, wheel) / wheel.members[0]


def _folder(version: str, wheel: Wheel) -> Path:
    return cache_folder() / f"perf_analyzer-{version}-{wheel.sha256[:12]}"


def _ensure(version: str, wheel: Wheel, message: str, on_progress: Callable[[str], None]) -> Path:
    def finish(draft: Path) -> None:
        make_executable(draft / wheel.members[0])

    content = f"perf_analyzer {version}"
    folder, program = _folder(version, wheel), _program(version, wheel)
    install_missing((wheel,), folder, finish, on_progress, needed=(program,), content=content, message=message)
    return program
