"""A container image like NVIDIA's, made of files of this machine: the pinned server, its backends and perf_analyzer.

Its root file system has only the files that these need; the engine imports it from a tar archive.
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

from optimizer.deploy import runtime
from optimizer.deploy.installed_server import BACKENDS
from optimizer.deploy.runtime import Runtime

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY, TAG = "tritune-test-server", runtime.TRITON_VERSION
IMAGE = f"{REPOSITORY}:{TAG}"
SERVER, PACKAGES, LIBRARIES = "/opt/tritonserver", "/opt/packages", "/opt/lib"
UNNEEDED = {"site-packages", "test", "tests", "ensurepip", "idlelib", "tkinter", "lib2to3", "__pycache__"}


def ensure_image(client: DockerClient, scratch: Path) -> str:
    """Return the name of the image, which is built if the engine does not have it."""
    if not client.images.list(IMAGE):
        tar = scratch / "root.tar"
        with tarfile.open(tar, "w", dereference=True) as archive:
            for source, target in _files(runtime.ensure(print)):
                archive.add(source, target, filter=_needed)
            temporary = tarfile.TarInfo("tmp")  # used by the Python backend
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
        response = client.api.import_image_from_file(str(tar), changes=changes)
        tar.unlink()
        client.images.get(json.loads(response)["status"]).tag(REPOSITORY, TAG)
    return IMAGE


def _files(installed: Runtime) -> Iterator[tuple[Path, str]]:
    """Return the files of this machine by their paths in the image."""
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
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    yield Path(spec.origin).parent, f"{PACKAGES}/onnxruntime"
    standard = Path(sys.base_prefix, "lib", f"python{runtime.running_python()}")
    yield standard, str(standard)
    binaries = [installed.tritonserver, installed.stub, installed.perf_analyzer, Path("/bin/bash")]
    binaries += [*standard.glob("lib-dynload/*.so"), *installed.libraries.glob("*.so*")]
    for library in _libraries(binaries, installed):
        yield library, str(library)


def _libraries(binaries: list[Path], installed: Runtime) -> set[Path]:
    """Return the shared libraries that the programs link, by the paths at which they are searched."""
    folder = runtime.libpython_folder(installed)
    assert folder is not None
    environment = {"LD_LIBRARY_PATH": f"{installed.libraries}:{folder}:{installed.perf_analyzer_libraries}"}
    links = subprocess.run(["ldd", *map(str, binaries)], env=environment, capture_output=True, text=True, check=False)
    words = [word for line in links.stdout.splitlines() for word in line.split()[:3] if word.startswith("/")]
    paths = {Path(word) for word in words if not word.endswith(":")}
    return {path for path in paths if not path.is_relative_to(installed.root)}


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if UNNEEDED & set(Path(member.name).parts[1:]) else member
