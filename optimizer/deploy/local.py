"""The local target: a tritonserver that the user has, of any version from 2.30, with its own backends."""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Unpack

from optimizer import process
from optimizer.deploy import leftovers
from optimizer.deploy.installation import WITHOUT_TELEMETRY, Installation
from optimizer.deploy.installed import InstalledTarget, Settings
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.model_source import ModelSource
from optimizer.server_health import shortened
from optimizer.sources.backends import backend_of
from optimizer.untrusted import one_line

USUAL_BACKENDS = Path("/opt/tritonserver/backends")  # where NVIDIA's images and builds have them
HELP_SECONDS = 30.0
X86_64 = 62  # e_machine of ELF
MACHINES = {3: "32-bit x86", 40: "32-bit ARM", 183: "ARM (aarch64)", 21: "POWER", 243: "RISC-V"}


class LocalTarget(InstalledTarget):
    """As the user starts it from this shell: with its environment, backends and libraries; ``arguments`` are more of
    its command line. Raises EnvironmentFault where it has no backend that the models need."""

    def __init__(
        self, source: ModelSource, installation: Installation, *, log: Path, **settings: Unpack[Settings]
    ) -> None:
        _check_backends(source, installation)
        super().__init__(source, installation, log=log, **settings)


def find(program: str | None = None, backends: str | None = None, arguments: Sequence[str] = ()) -> Installation:
    """The server that ``--tritonserver``, ``--backend-directory`` and ``--server-arg`` name, by default the one on
    PATH. Raises BadInputError for what they cannot mean, EnvironmentFault where it cannot run here."""
    path = _program(program)
    environment = {**WITHOUT_TELEMETRY, **os.environ}
    known = known_options(path, environment)
    installation = Installation(path, environment, _backends(path, backends), known, tuple(arguments))
    for argument in arguments:
        if not installation.knows(argument):
            raise BadInputError(f"--server-arg {argument}: no option of {path}; `{path.name} --help` lists them")
    return installation


def known_options(program: Path, environment: Mapping[str, str]) -> frozenset[str]:
    """The names that its ``--help`` lists. Raises EnvironmentFault where it lists none."""
    return _known_options(program, program.stat().st_mtime_ns, tuple(sorted(environment.items())))


@lru_cache
def _known_options(program: Path, _: int, environment: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Once for each state of the file: a run asks several times."""
    folder = leftovers.new_folder()
    try:
        log = folder / "help.log"
        told = process.run([program, "--help"], timeout_seconds=HELP_SECONDS, log=log, env=dict(environment))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = frozenset(re.findall(r"^ {1,8}--([a-z][a-z0-9-]*)", told.output, re.MULTILINE))
    if {"model-repository", "model-control-mode"} <= found:
        return found
    words = [line for line in told.output.splitlines() if line.strip()] or ["it printed nothing"]
    ended = "does not answer" if told.exit_code is None else f"ended ({process.ending(told.exit_code)})"
    raise EnvironmentFault(
        f"{program} --help {ended}: {shortened(words[-1])}; name a tritonserver that starts from this shell"
    )


def _program(given: str | None) -> Path:
    if given is None:
        found = shutil.which("tritonserver")
        if found is None:
            raise EnvironmentFault("--target local: no tritonserver on PATH; name it with --tritonserver PATH")
    elif "/" in given:
        found = given
    else:
        found = shutil.which(given)
        if found is None:
            raise BadInputError(f"--tritonserver {one_line(given)}: no such program on PATH; write its whole path")
    path = Path(found).absolute()
    if not path.is_file():
        raise BadInputError(f"--tritonserver {one_line(str(path))}: no such file; name the server's program")
    if not os.access(path, os.X_OK):
        raise BadInputError(f"--tritonserver {one_line(str(path))}: not executable; chmod +x it, or name another")
    _check_machine(path)
    return path


def _check_machine(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError as error:
        raise BadInputError(f"--tritonserver {path}: cannot be read: {error.strerror}") from None
    if len(head) < 20 or not head.startswith(b"\x7fELF"):
        return  # a script that starts it
    (machine,) = struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])
    if machine != X86_64:
        made_for = MACHINES.get(machine, f"another machine ({machine})")
        raise EnvironmentFault(f"--tritonserver {path}: made for {made_for}, and this is x86-64; name one for it")


def _backends(program: Path, given: str | None) -> Path:
    if given is not None:
        folder = Path(given).absolute()
        if not folder.is_dir():
            raise BadInputError(f"--backend-directory {one_line(given)}: no such folder; name that of its backends")
        return folder
    beside = program.parent.parent / "backends"  # of a server that was moved as a whole
    return beside if beside.is_dir() else USUAL_BACKENDS


def _check_backends(source: ModelSource, installation: Installation) -> None:
    assert installation.backends is not None
    for name, config in source.models.items():
        backend = backend_of(config)
        own = [source.folder(name), *source.folder(name).iterdir()]
        if not backend or any((folder / f"libtriton_{backend}.so").exists() for folder in own):
            continue
        if not (installation.backends / backend).is_dir():
            there = sorted(path.name for path in installation.backends.glob("*") if path.is_dir())
            raise EnvironmentFault(
                f"{name}: backend {one_line(backend, 50)!r} is not in {installation.backends}, which has "
                f"{one_line(', '.join(there), 200) or 'none'}; name its folder with --backend-directory, or a server "
                "that has it with --tritonserver"
            )
