"""Pack all that run.py needs on a machine without network: server, load generator, tune and its dependencies.

    python benchmarks/gpu/pack.py [--python python3.12] [--out DIR]

The machine needs Linux on x86-64 with that version of Python, torch with CUDA, numpy, pandas, numba, scipy, onnx and
onnxruntime. The binary, the libraries and one stub are taken from the pinned server's wheels. On the machine:

    tar -xf tritune-gpu.tar.xz -C /tmp && . /tmp/tritune-gpu/env.sh && python3 benchmarks/gpu/run.py
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

from optimizer.deploy import runtime

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "tritune-gpu"
# tune's other dependencies in the installed versions; --no-deps omits the packages above
CARRIED = (
    *("optuna", "alembic", "colorlog", "Mako", "SQLAlchemy", "tqdm"),
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
    *("tritonclient", "grpcio", "protobuf", "python-rapidjson"),
)
ENVIRONMENT = """\
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TRITUNE_CACHE="$here/cache" PYTHONPATH="$here/site-packages"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="interpreter of the target machine's version")
    parser.add_argument("--out", type=Path, default=Path("pack"), help="folder of the archive")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / NAME
        version, library = _asked(arguments.python)
        _install(arguments.python, folder / "site-packages")
        _server(folder / "cache", version, library)
        (folder / "env.sh").write_text(ENVIRONMENT)
        packed = arguments.out / f"{NAME}.tar.xz"
        with tarfile.open(packed, "w:xz", preset=4) as archive:
            archive.add(folder, NAME, filter=_plain)
        unpacked = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB, {unpacked / 2**20:.0f} MiB unpacked")


def _asked(python: str) -> tuple[str, Path]:
    """Return the version and the shared library that the stub links."""
    script = "import sys, sysconfig as s; print('{}.{}'.format(*sys.version_info), s.get_config_var('LIBDIR'))"
    version, libraries = subprocess.run(
        [python, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    name = f"libpython{version}.so.1.0"
    for folder in (libraries, "/usr/lib/x86_64-linux-gnu"):
        if (library := Path(folder, name)).exists():
            return version, library
    sys.exit(f"{python}: no {name} beside it; use one that was built with --enable-shared")


def _install(python: str, folder: Path) -> None:
    pins = [f"{name}=={metadata.version(name)}" for name in CARRIED]
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*install, str(ROOT), *pins], check=True)


def _server(cache: Path, version: str, library: Path) -> None:
    """Add the server as ``runtime.ensure`` installs it, without files for other Python versions.

    An empty folder replaces the numpy that the stub expects, because PyTorch's tensors pass without numpy.
    """
    whole = runtime.ensure(print)
    trimmed = runtime.Runtime(cache / whole.root.name)
    for file in whole.root.rglob("*"):
        inside = file.relative_to(whole.root)
        other_stub = "python_backend_stubs" in inside.parts and version not in inside.parts
        if file.is_file() and not other_stub and not file.name.startswith("libpython"):
            target = trimmed.root / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    shutil.copy(library, trimmed.libraries)
    if strip := shutil.which("strip"):
        subprocess.run([strip, "--strip-debug", trimmed.libraries / library.name], check=True)
    if wheel := runtime.NUMPY_WHEELS.get(version):
        (cache / f"numpy-1.26.4-{wheel.sha256[:12]}").mkdir()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Remove owner and modification time from an archive member."""
    if "__pycache__" in member.name:
        return None
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
