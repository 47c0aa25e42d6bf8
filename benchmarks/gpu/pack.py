"""Pack all that run.py needs on a machine without network: server, load generator, tune and its dependencies.

    python benchmarks/gpu/pack.py [--python python3.12] [--out DIR]

The machine needs Linux on x86-64 with that version of Python, torch with CUDA and the packages of ``PRESENT``. The
server, perf_analyzer and their libraries are those of the pinned wheels. For the server's stub the pack has libpython
with its standard library, because the machine may have none, and numpy 1. On the machine:

    python3 -m tarfile -e tritune-gpu.tar.xz /tmp && . /tmp/tritune-gpu/env.sh && python3 benchmarks/gpu/run.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optimizer.deploy import runtime

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "tritune-gpu"
# dependencies of tune that the machine has, with their own dependencies
PRESENT = ("grpcio", "matplotlib", "ml-dtypes", "numba", "numpy", "onnx", "onnxruntime", "pandas", "scipy")
# dependencies that run.py does not use: they fetch wheels, tokenize, and send requests over HTTP
UNUSED = ("pip", "tokenizers", "aiohttp", "brotli", "geventhttpclient")
# parts of the standard library that the stub does not use
LEFT_OUT = ("__pycache__", "site-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3")
LEFT_OUT_PATTERNS = ("config-*", "pydoc_data", "_test*.so", "_tkinter*.so", "xx*.so")
ENVIRONMENT = """\
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TRITUNE_CACHE="$here/cache" PYTHONPATH="$here/site-packages"
"""
ASK = """\
import json, sys, sysconfig
version = "{}.{}".format(*sys.version_info)
print(json.dumps([version, sysconfig.get_config_var("LIBDIR"), sysconfig.get_path("stdlib")]))
"""


@dataclass(frozen=True)
class Interpreter:
    """The Python of the target's version: its shared library, which the stub links, and its standard library."""

    python: str
    version: str
    library: Path
    standard_library: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="interpreter of the target machine's version")
    parser.add_argument("--out", type=Path, default=Path("pack"), help="folder of the archive")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / NAME
        interpreter = _ask(arguments.python)
        pins = dependencies(interpreter.version)
        _install(interpreter, folder / "site-packages", [str(ROOT), *pins])
        _add_server(folder / "cache", interpreter)
        (folder / "env.sh").write_text(ENVIRONMENT)
        packed = arguments.out / f"{NAME}.tar.xz"
        with tarfile.open(packed, "w:xz", preset=9) as archive:
            archive.add(folder, NAME, filter=_plain)
        unpacked = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB, {unpacked / 2**20:.0f} MiB unpacked")


def dependencies(version: str) -> list[str]:
    """Return pins of the packed dependencies of tune, for a version of Python, in the versions installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins: dict[str, str] = {}
    waiting = [Requirement(text) for text in project["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in pins or name in (*PRESENT, *UNUSED):
            continue
        installed = metadata.distribution(name)
        pins[name] = f"{name}=={installed.version}"
        own = [Requirement(text) for text in installed.requires or ()]
        waiting += [needed for needed in own if _applies(needed, requirement.extras, version)]
    return sorted(pins.values())


def _applies(requirement: Requirement, extras: Iterable[str], version: str) -> bool:
    python = {"python_version": version, "python_full_version": f"{version}.0"}
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**python, "extra": extra}) for extra in ("", *extras))


def _ask(python: str) -> Interpreter:
    """Return where an interpreter has its libraries. Exits if its shared library is missing."""
    asked = subprocess.run([python, "-c", ASK], stdout=subprocess.PIPE, text=True, check=True).stdout
    version, libraries, standard_library = json.loads(asked)
    name = f"libpython{version}.so.1.0"
    for folder in (libraries, "/usr/lib/x86_64-linux-gnu"):
        if (library := Path(folder, name)).exists():
            return Interpreter(python, version, library, Path(standard_library))
    sys.exit(f"{python}: no {name} beside it; use one that was built with --enable-shared")


def _install(interpreter: Interpreter, folder: Path, requirements: Iterable[str]) -> None:
    """Install ``requirements``, or what other arguments of pip name, into ``folder``."""
    install = [interpreter.python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--target", str(folder), *requirements], check=True)


def _add_server(cache: Path, interpreter: Interpreter) -> None:
    """Add the server as ``runtime.ensure`` installs it, with the stub of one Python, and libraries for it."""
    whole = runtime.ensure(print)
    trimmed = runtime.Runtime(cache / whole.root.name)
    for file in whole.root.rglob("*"):
        inside = file.relative_to(whole.root)
        other_stub = "python_backend_stubs" in inside.parts and interpreter.version not in inside.parts
        if file.is_file() and not other_stub and not file.name.startswith("libpython"):
            target = trimmed.root / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    library = trimmed.stub_python / "lib"
    ignored = shutil.ignore_patterns(*LEFT_OUT, *LEFT_OUT_PATTERNS)
    shutil.copytree(interpreter.standard_library, library / f"python{interpreter.version}", ignore=ignored)
    shutil.copy(interpreter.library, library)
    if strip := shutil.which("strip"):
        subprocess.run([strip, "--strip-debug", *library.rglob("*.so*")], check=True)
    if wheel := runtime.NUMPY_WHEELS.get(interpreter.version):
        numpy = cache / runtime.stub_packages_name(wheel)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:  # pip takes hashes from a file only
            pins.write(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
            pins.flush()
            _install(interpreter, numpy, ["--only-binary=:all:", "--require-hashes", "-r", pins.name])
        for entry in numpy.iterdir():
            if not any(member.rstrip("/") == entry.name for member in wheel.members):
                shutil.rmtree(entry)
        for tests in [*numpy.rglob("tests")]:
            shutil.rmtree(tests)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Remove owner and modification time from an archive member."""
    if "__pycache__" in member.name:
        return None
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
