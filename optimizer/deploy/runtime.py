"""The pinned tritonserver, perf_analyzer and OpenVINO: downloaded from PyPI by hash, unpacked into a cache folder.

tritonserver, its Python backend and perf_analyzer are in wheels with dependencies (numpy<2, protobuf<5) that must
not replace those of ``tune``. The wheels are therefore downloaded by pip, with the mirror, proxy or wheel folder of
its configuration, checked against the hashes below, and unpacked instead of installed.
"""

from __future__ import annotations

import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import cache_folder
from optimizer.core.safe_text import is_file
from optimizer.deploy import perf_analyzer_release
from optimizer.deploy.wheels import Wheel, install_missing, make_executable
from optimizer.machine.hardware import describe_unsupported_libc

TRITON_VERSION = "2.51.0"
PINNED_PERF_ANALYZER = "2.51.0"
PYTHON_STUBS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

WHEELS = (
    Wheel(
        "nvidia-pytriton==0.7.0",
        "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
        ("pytriton/tritonserver/", "nvidia_pytriton.libs/"),
    ),
    # the newest perf_analyzer on PyPI that runs on glibc 2.35 to 2.37
    Wheel(
        f"tritonclient=={PINNED_PERF_ANALYZER}",
        "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52",
        (f"tritonclient-{PINNED_PERF_ANALYZER}.data/data/bin/perf_analyzer",),
    ),
    Wheel(
        "nvidia-cuda-runtime-cu12==12.9.79",
        "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
        ("nvidia/cuda_runtime/lib/libcudart.so.12",),
    ),
)

# The stub was built before numpy 2 and misreads its arrays (every element is the first one, outputs are empty).
# It gets a numpy of version 1, which does not exist for Python 3.13 and newer.
NUMPY_WHEELS = {
    "3.11": Wheel(
        "numpy==1.26.4",
        "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",
        ("numpy/", "numpy.libs/"),
    ),
    "3.12": Wheel(
        "numpy==1.26.4",
        "675d61ffbfa78604709862923189bad94014bef562cc35cf61d3a07bba02a7ed",
        ("numpy/", "numpy.libs/"),
    ),
}
_NUMPY = "numpy/__init__.py"

# ONNX Runtime with the OpenVINO execution provider. The package replaces onnxruntime, so it is unpacked into a folder
# of its own. The plug-in for the installed onnxruntime (onnxruntime-ep-openvino) offers only CPUs of Intel.
OPENVINO_ONNX_RUNTIME = "1.24.1"
_OPENVINO_MEMBERS = ("onnxruntime/__init__.py", "onnxruntime/capi/")
OPENVINO_WHEELS = {
    version: Wheel(f"onnxruntime-openvino=={OPENVINO_ONNX_RUNTIME}", sha256, _OPENVINO_MEMBERS)
    for version, sha256 in {
        "3.11": "3007c803634cc69c6d52af1dea7ce729d9bb62b9a11070fd2f959119199007a8",
        "3.12": "d617fac2f59a6ab5ea59a788c3e1592240a129642519aaeaa774761dfe35150e",
        "3.13": "2c3bb73e68ac27f4891af8a595c1faf574ec68b772e6583c90a0b997a1822782",
    }.items()
}
_UNUSED_PLUGINS = ("libopenvino_intel_gpu_plugin.so", "libopenvino_intel_npu_plugin.so")  # 24 MB, for other devices


def running_python() -> str:
    """Return the version of the running Python, such as ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Runtime:
    """The paths of the unpacked programs. ``root`` has the layout of the wheels, for relative library paths."""

    root: Path

    @property
    def tritonserver(self) -> Path:
        return self.root / "pytriton/tritonserver/bin/tritonserver"

    @property
    def programs(self) -> tuple[Path, Path]:
        """The programs without which it has to be unpacked again."""
        return self.tritonserver, self.pinned_perf_analyzer

    @property
    def python_backend(self) -> Path:
        return self.root / "pytriton/tritonserver/backends/python"

    @property
    def libraries(self) -> Path:
        return self.root / "nvidia_pytriton.libs"

    @property
    def perf_analyzer(self) -> Path:
        """The newer release where it is unpacked and starts, otherwise the pinned one."""
        return perf_analyzer_release.newer_perf_analyzer() or self.pinned_perf_analyzer

    @property
    def perf_analyzer_version(self) -> str:
        is_pinned = self.perf_analyzer == self.pinned_perf_analyzer
        return PINNED_PERF_ANALYZER if is_pinned else perf_analyzer_release.NEWER_VERSION

    @property
    def pinned_perf_analyzer(self) -> Path:
        return self.root / f"tritonclient-{PINNED_PERF_ANALYZER}.data/data/bin/perf_analyzer"

    @property
    def perf_analyzer_libraries(self) -> Path:
        """Libraries of the releases that are not newer."""
        return self.root / "perf_analyzer.libs"

    @property
    def stub(self) -> Path:
        """The Python backend's stub for the running Python."""
        version = running_python()
        return self.root / f"pytriton/tritonserver/python_backend_stubs/{version}/triton_python_backend_stub"

    @property
    def stub_packages(self) -> Path | None:
        """The packages that replace those of the environment in the stub of the running Python; None if none do."""
        wheel = NUMPY_WHEELS.get(running_python())
        if wheel is None:
            return None
        return self.root.with_name(stub_packages_name(wheel))

    @property
    def stub_python(self) -> Path:
        """A Python for the stub, as a prefix with ``lib``. Only the pack of benchmarks/gpu/pack.py has it."""
        return self.root / "python"


def stub_packages_name(wheel: Wheel) -> str:
    """Return the name of the cache's folder with the packages of a wheel of ``NUMPY_WHEELS``."""
    return f"{wheel.requirement.replace('==', '-')}-{wheel.sha256[:12]}"


def installed() -> Runtime | None:
    """Return the unpacked runtime; None before ``tune setup``."""
    runtime = Runtime(_root())
    has_numpy = runtime.stub_packages is None or is_file(runtime.stub_packages / _NUMPY)
    return runtime if has_numpy and all(map(is_file, runtime.programs)) else None


def ensure(on_progress: Callable[[str], None]) -> Runtime:
    """Return the runtime, which is downloaded and unpacked on first use; ``on_progress`` gets the progress.

    The newer perf_analyzer comes with it if pip can download it. A run never adds it to an unpacked runtime, because
    measurements of two releases are not ranked together; ``tune setup`` adds it. Other processes wait meanwhile, and
    remove incomplete folders of killed ones. Raises EnvironmentFault if this platform has no wheels, or pip cannot
    download the server or numpy.
    """
    if reason := unsupported():
        raise EnvironmentFault(reason)
    if runtime := installed():
        return runtime
    runtime = Runtime(_root())
    was_missing = install_missing(
        WHEELS,
        runtime.root,
        _finish,
        on_progress,
        needed=runtime.programs,
        content="the server",
        message=f"fetching tritonserver {TRITON_VERSION} and perf_analyzer (70 MB, once)",
    )
    if runtime.stub_packages is not None:
        numpy = "numpy for the server's Python backend"
        wheels = (NUMPY_WHEELS[running_python()],)
        message = f"fetching {numpy} (18 MB, once)"
        folder, needed = runtime.stub_packages, (runtime.stub_packages / _NUMPY,)
        install_missing(wheels, folder, lambda _: None, on_progress, needed=needed, content=numpy, message=message)
    if was_missing:
        try:
            perf_analyzer_release.ensure_newer(on_progress)
        except EnvironmentFault as error:
            on_progress(f"perf_analyzer {PINNED_PERF_ANALYZER} measures, because {error}")
    on_progress(f"unpacked into {cache_folder()}")
    return runtime


def _root() -> Path:
    return cache_folder() / f"runtime-{TRITON_VERSION}-{WHEELS[0].sha256[:12]}"


def openvino_folder(python: str = running_python()) -> Path | None:
    """Return where ONNX Runtime with OpenVINO is, or would be; None if this ``python`` has no wheel of it."""
    wheel = OPENVINO_WHEELS.get(python)
    return cache_folder() / f"openvino-{OPENVINO_ONNX_RUNTIME}-{wheel.sha256[:12]}" if wheel else None


def ensure_openvino(on_progress: Callable[[str], None], python: str = running_python()) -> None:
    """Download and unpack ONNX Runtime with OpenVINO, unless it is there; ``on_progress`` gets the progress.

    Raises EnvironmentFault if the version ``python`` has no wheel of it, or pip cannot download it.
    """
    folder = openvino_folder(python)
    if folder is None:
        versions = ", ".join(OPENVINO_WHEELS)
        raise EnvironmentFault(f"openvino needs Python {versions}, this is {python}: leave openvino out")
    message = f"fetching onnxruntime-openvino {OPENVINO_ONNX_RUNTIME} (84 MB, once)"
    wheels = (OPENVINO_WHEELS[python],)
    needed = (folder / _OPENVINO_MEMBERS[0],)
    install_missing(
        wheels, folder, _remove_unused_plugins, on_progress, needed=needed, content="openvino", message=message
    )


def _remove_unused_plugins(root: Path) -> None:
    for name in _UNUSED_PLUGINS:
        root.joinpath("onnxruntime/capi", name).unlink()


def unsupported(
    system: str = platform.system(),
    machine: str = platform.machine(),
    libc: tuple[str, str] | None = None,
    python: tuple[int, int] = sys.version_info[:2],
) -> str:
    """Return why the embedded server cannot run on a system (default: this one); empty if it can."""
    if (system, machine) != ("Linux", "x86_64"):
        return f"the embedded server needs Linux on x86-64, this is {system} on {machine}: run tune on such a machine"
    if library := describe_unsupported_libc((2, 35), libc):
        return f"the embedded server needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04), this is {library}"
    python_version = "{}.{}".format(*python)
    if python_version not in PYTHON_STUBS:
        versions = f"{PYTHON_STUBS[3]} to {PYTHON_STUBS[-1]}"
        return f"the embedded server needs Python {versions}, this is {python_version}"
    return ""


def libpython_folder(
    runtime: Runtime | None,
    folders: Sequence[str | Path] | None = None,
    python: str = running_python(),
    builtin_modules: Collection[str] = sys.builtin_module_names,
) -> Path | None:
    """Return the folder with the shared libpython that the stub of ``python`` links; None if there is none.

    ``folders`` are searched first, by default the folders of this Python and of the system, and then ``runtime``.
    ``builtin_modules`` are the modules that are built into ``python``.
    """
    name = f"libpython{python}.so.1.0"
    for folder in _library_folders() if folders is None else folders:
        if Path(folder, name).exists():
            return Path(folder)
    if runtime is None:
        return None
    if (packed := runtime.stub_python / "lib").joinpath(name).exists():
        return packed
    # The wheel has the library of the newest Python that it was built for. It loads the module math from a file,
    # which a Python of Debian or Ubuntu does not have, because math is built into it.
    is_included = python == PYTHON_STUBS[-1] and "math" not in builtin_modules
    return runtime.libraries if is_included else None


def _library_folders() -> list[str]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", f"/usr/lib/{multiarch}"]
    return [folder for folder in (*folders, "/usr/lib64", "/usr/lib") if folder]


def libpython_advice() -> str:
    """Return the message for a Python without a shared library."""
    version = running_python()
    return (
        f"libpython{version}.so.1.0 is missing: apt-get install libpython{version}, "
        f"or use a Python built with --enable-shared"
    )


def _finish(root: Path) -> None:
    """Make the binaries executable, and name the libraries as perf_analyzer expects them."""
    runtime = Runtime(root)
    for binary in (runtime.tritonserver, runtime.pinned_perf_analyzer, *root.rglob("triton_python_backend_stub")):
        make_executable(binary)
    runtime.perf_analyzer_libraries.mkdir()
    libb64 = next(runtime.libraries.glob("libb64-*.so.0d"))  # auditwheel has changed its name
    shutil.copy(libb64, runtime.perf_analyzer_libraries / "libb64.so.0d")
    libcudart = root / "nvidia/cuda_runtime/lib/libcudart.so.12"
    shutil.move(libcudart, runtime.perf_analyzer_libraries / "libcudart.so.12")
    # perf_analyzer 2.60 opens it by this name, also for system shared memory
    runtime.perf_analyzer_libraries.joinpath("libcudart.so").symlink_to("libcudart.so.12")
    shutil.rmtree(root / "nvidia")
