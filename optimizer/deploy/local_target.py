"""The local target: a tritonserver that the user has installed, version 2.30 or newer, with its own backends."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from optimizer.config.backends import backend_of
from optimizer.config.model_source import ModelSource
from optimizer.core import process
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.safe_text import is_shell_path, named_file, one_line, shorten, show_path
from optimizer.deploy.installed_server import (
    INSTALL_STUB_SHELL,
    NO_STUB_SHELL,
    STUB_SHELL,
    WITHOUT_TELEMETRY,
    Installation,
    InstalledTarget,
)
from optimizer.deploy.server_process import temporary_folder, too_old_for_http
from optimizer.deploy.target_settings import TargetSettings
from optimizer.options.run_options import RunOptions

DEFAULT_BACKENDS = Path("/opt/tritonserver/backends")  # where NVIDIA's images and builds have them
HELP_SECONDS = 30.0
X86_64 = 62  # e_machine of ELF
MACHINES = {3: "32-bit x86", 40: "32-bit ARM", 183: "ARM (aarch64)", 21: "POWER", 243: "RISC-V"}


class LocalTarget(InstalledTarget):
    """Serves candidates on the user's tritonserver, started with the environment of this shell.

    Raises EnvironmentFault if the server lacks a backend that the models need, or cannot start models in Python.
    """

    def __init__(self, source: ModelSource, installation: Installation, settings: TargetSettings) -> None:
        _check_backends(source, installation)
        super().__init__(source, installation, settings)


def find_installation(
    program: str | None = None, backends: str | None = None, arguments: Sequence[str] = ()
) -> Installation:
    """Return the server of ``--tritonserver``, ``--backend-directory`` and ``--server-arg``, by default from PATH.

    Raises BadInputError for a wrong value of an option, EnvironmentFault if the server cannot run on this machine.
    """
    path = _program(program)
    environment = {**WITHOUT_TELEMETRY, **os.environ}
    options = options_in_help(path, environment)
    installation = Installation(path, environment, _backends(path, backends), options, tuple(arguments))
    for argument in arguments:
        if not installation.knows(argument):
            raise BadInputError(f"--server-arg {argument}: not an option of {path}; `{path.name} --help` lists them")
    return installation


def check_options(options: RunOptions, on_progress: Callable[[str], None]) -> None:
    """Raise the errors of ``find_installation`` for the options of the server."""
    installation_of(options)


def describe_server(options: RunOptions) -> str:
    """Return the server in words."""
    return "the tritonserver of this machine"


def server_identity(options: RunOptions, on_progress: Callable[[str], None]) -> str:
    """Return the name and the hash of the server's program."""
    program = installation_of(options).tritonserver
    return f"{program.name} {hashlib.sha256(program.read_bytes()).hexdigest()[:12]}"


def make_target(source: ModelSource, options: RunOptions, settings: TargetSettings) -> LocalTarget:
    """Return the target on the user's server. Raises BadInputError if it is too old for ``--protocol http``."""
    installation = installation_of(options)
    if options.protocol == "http" and not installation.knows("--http-restricted-api"):
        raise too_old_for_http(str(installation.tritonserver))
    return LocalTarget(source, installation, settings)


def installation_of(options: RunOptions) -> Installation:
    """Return the server that ``options`` name. Raises the errors of ``find_installation``."""
    return find_installation(options.tritonserver, options.backend_directory, options.server_args)


def options_in_help(program: Path, environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the options that ``--help`` lists. Raises EnvironmentFault if it lists none."""
    return _options_in_help(program, program.stat().st_mtime_ns, tuple(sorted(environment.items())))


@lru_cache
def _options_in_help(program: Path, modified_ns: int, environment: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Return the options, cached until the program is modified, because a run needs them several times."""
    with temporary_folder() as folder:
        result = process.run_command(
            [program, "--help"], timeout_seconds=HELP_SECONDS, log=folder / "help.log", env=dict(environment)
        )
    options = frozenset(re.findall(r"^ {1,8}--([a-z][a-z0-9-]*)", result.output, re.MULTILINE))
    if {"model-repository", "model-control-mode"} <= options:
        return options
    last_line = shorten(process.printed_lines(result.output)[-1])
    ended = (
        "does not answer" if result.exit_code is None else f"ended ({process.describe_exit_code(result.exit_code)})"
    )
    raise EnvironmentFault(f"{program} --help {ended}: {last_line}; name a tritonserver that starts from this shell")


def _program(name: str | None) -> Path:
    if name is None:
        program = shutil.which("tritonserver")
        if program is None:
            raise EnvironmentFault("--target local: no tritonserver on PATH; name it with --tritonserver PATH")
    elif "/" in name:
        program = name
    else:
        program = shutil.which(name)
        if program is None:
            raise BadInputError(f"--tritonserver {one_line(name)}: no such program on PATH; write its whole path")
    path = named_file("--tritonserver", str(Path(program).absolute()), "the server's program")
    if not os.access(path, os.X_OK):
        raise BadInputError(f"--tritonserver {show_path(path)}: not executable; chmod +x it, or name another")
    _check_machine(path)
    return path


def _check_machine(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError as error:
        raise BadInputError(f"--tritonserver {path}: cannot be read: {error.strerror}") from None
    if len(head) < 20 or not head.startswith(b"\x7fELF"):
        return  # a script that starts the server
    (machine,) = struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])
    if machine != X86_64:
        made_for = MACHINES.get(machine, f"another machine ({machine})")
        raise EnvironmentFault(
            f"--tritonserver {path}: made for {made_for}, and this machine is x86-64; name another"
        )


def _backends(program: Path, name: str | None) -> Path:
    if name is not None:
        folder = Path(name).absolute()
        if not folder.is_dir():
            raise BadInputError(
                f"--backend-directory {one_line(name)}: no such folder; name the one with its backends"
            )
        return folder
    relative = program.parent.parent / "backends"  # an installation that was moved has them here
    return relative if relative.is_dir() else DEFAULT_BACKENDS


def _check_backends(source: ModelSource, installation: Installation) -> None:
    assert installation.backends is not None
    for name, config in source.models.items():
        backend = backend_of(config)
        folders = [source.folder(name), *source.folder(name).iterdir()]
        if not backend or any((folder / f"libtriton_{backend}.so").exists() for folder in folders):
            continue
        if not (installation.backends / backend).is_dir():
            available = sorted(path.name for path in installation.backends.glob("*") if path.is_dir())
            raise EnvironmentFault(
                f"{name}: backend {one_line(backend, 50)!r} is not in {installation.backends}, which has "
                f"{one_line(', '.join(available), 200) or 'none'}; name its folder with --backend-directory, or a "
                "server that has it with --tritonserver"
            )
        if not (installation.backends / backend / f"libtriton_{backend}.so").exists() or backend == "python":
            _check_stub(installation)


def _check_stub(installation: Installation) -> None:
    """Raise EnvironmentFault if the process of a model in Python cannot be started with this installation."""
    if shutil.which(STUB_SHELL, path=installation.environment.get("PATH")) is None:
        raise EnvironmentFault(f"{NO_STUB_SHELL}; {INSTALL_STUB_SHELL}")
    if not is_shell_path(str(installation.backends)):
        raise EnvironmentFault(
            f"{one_line(str(installation.backends))}: Triton starts models in Python through a shell, which does not "
            "take this path literally; move the backends to a path of letters, digits and / . _ -"
        )
