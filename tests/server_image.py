"""An image as NVIDIA's are, of what is on this machine: the pinned server on PATH with its backends, perf_analyzer.

Its root file system has the files that these need, and nothing else; the engine makes the image of a tar of them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import runtime
from optimizer.deploy.server_folder import BACKENDS
from optimizer.runtime import Runtime

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY, TAG = "tritune-test-server", runtime.TRITON_VERSION
IMAGE = f"{REPOSITORY}:{TAG}"
SERVER, PACKAGES, LIBRARIES = "/opt/tritonserver", "/opt/packages", "/opt/lib"
UNNEEDED = {"site-packages", "test", "tests", "ensurepip", "idlelib", "tkinter", "lib2to3", "__pycache__"}


def ensure_image(client: DockerClient, scratch: Path) -> str:
    """Its name; made where the engine has none yet."""
    if not client.images.list(IMAGE):
        tar = scratch / "root.tar"
        with tarfile.open(tar, "w", dereference=True) as archive:
            for here, there in _files(runtime.ensure(print)):
                archive.add(here, there, filter=_needed)
            temporary = tarfile.TarInfo("tmp")  # the Python backend's
            temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(temporary)
        libraries = f"{SERVER}/lib:{sys.base_prefix}/lib:{LIBRARIES}"
        variables = {
            "PATH": f"{SERVER}/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": libraries,
            "ORT_DISABLE_TELEMETRY": "1",
        }
        # the stub's Python is an isolated one, which looks for packages in the current folder and in its own
        changes = [f"WORKDIR {PACKAGES}", *(f"ENV {name}={value}" for name, value in variables.items())]
        told = client.api.import_image_from_file(str(tar), changes=changes)
        tar.unlink()
        client.images.get(json.loads(told)["status"]).tag(REPOSITORY, TAG)
    return IMAGE


def _files(installed: Runtime) -> Iterator[tuple[Path, str]]:
    """What is here, and where it is in the image."""
    yield installed.tritonserver, f"{SERVER}/bin/tritonserver"
    yield installed.libraries, f"{SERVER}/lib"
    yield installed.python_backend, f"{SERVER}/backends/python"
    yield installed.stub, f"{SERVER}/backends/python/{installed.stub.name}"
    yield BACKENDS / "onnxruntime", f"{SERVER}/backends/onnxruntime"
    yield installed.perf_analyzer, "/usr/bin/perf_analyzer"
    yield installed.perf_analyzer_libraries, LIBRARIES
    for shell in ("bash", "sh", "sleep"):
        yield Path("/bin/bash" if shell == "sh" else f"/bin/{shell}"), f"/bin/{shell}"
    assert installed.stub_packages is not None
    for package in installed.stub_packages.iterdir():
        yield package, f"{PACKAGES}/{package.name}"
    found = importlib.util.find_spec("onnxruntime")
    assert found is not None
    assert found.origin is not None
    yield Path(found.origin).parent, f"{PACKAGES}/onnxruntime"
    standard = Path(sys.base_prefix, "lib", f"python{runtime.running_python()}")
    yield standard, str(standard)
    binaries = [installed.tritonserver, installed.stub, installed.perf_analyzer, Path("/bin/bash")]
    binaries += [*standard.glob("lib-dynload/*.so"), *installed.libraries.glob("*.so*")]
    for library in _libraries(binaries, installed):
        yield library, str(library)


def _libraries(binaries: list[Path], installed: Runtime) -> set[Path]:
    """The shared libraries of the system and of Python that they link, by the paths that they are looked for at."""
    folder = runtime.libpython_folder()
    assert folder is not None
    environment = {"LD_LIBRARY_PATH": f"{installed.libraries}:{folder}:{installed.perf_analyzer_libraries}"}
    told = subprocess.run(["ldd", *map(str, binaries)], env=environment, capture_output=True, text=True, check=False)
    words = [word for line in told.stdout.splitlines() for word in line.split()[:3] if word.startswith("/")]
    paths = {Path(word) for word in words if not word.endswith(":")}
    return {path for path in paths if not path.is_relative_to(installed.root)}


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if UNNEEDED & set(Path(member.name).parts[1:]) else member
