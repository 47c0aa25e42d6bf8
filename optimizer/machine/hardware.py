"""The hardware and C library of this machine, the devices its libraries support, and the fingerprint of a run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import platform
import re
import resource
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.core.safe_text import one_line
from optimizer.machine.cpus import memory_limit_bytes, read_kernel_file
from optimizer.machine.nvml import filter_visible, survey

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# Measured on two CPUs: a tritonserver with one model instance has 96 threads, and tune has 12.
SERVER_THREADS, CLIENT_THREADS = 100, 32
MORE_THREADS = "raise the limit: `ulimit -u`, or that of the container (docker: --pids-limit)"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a machine.

    Attributes:
        gpus: Names of the GPUs.
        cpu: Name of the CPU.
        cpu_count: Number of CPUs that this process may use.
        memory_bytes: Size of the memory that this process may use.
    """

    gpus: tuple[str, ...]
    cpu: str
    cpu_count: int
    memory_bytes: int

    def __str__(self) -> str:
        cpu = f"{self.cpu}, {self.cpu_count} CPUs"
        return f"{', '.join(self.gpus)} · {cpu}" if self.gpus else cpu


def detect() -> Hardware:
    """Return the hardware of this machine, without GPUs if NVML reports none."""
    import psutil

    cpu_count = len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1
    return Hardware(gpu_names(), _cpu_name(), cpu_count, memory_bytes())


def memory_bytes() -> int:
    """Return the memory of this machine, or the limit of this process's control groups if that is smaller."""
    import psutil

    total: int = psutil.virtual_memory().total
    return min(total, memory_limit_bytes() or total)


def thread_problem(needed: int) -> str:
    """Return why fewer than ``needed`` threads can be started; empty if they can.

    They are started, because several limits apply: those of the user and of each control group, which also count
    processes that are not visible here. If the address space is limited, none is started: each reserves some of it.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return ""
    ended, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(needed):
            thread = threading.Thread(target=ended.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:  # can't start new thread
        possible = f"only {len(threads)}" if threads else "no"
        return f"{possible} more processes and threads can be started, and a run needs at least {needed}"
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    return ""


def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs that CUDA shows to this process, in CUDA's order; empty without NVML."""
    return tuple(gpu.name for gpu in filter_visible(survey().gpus))


def describe_unsupported_libc(oldest_glibc: tuple[int, int], libc: tuple[str, str] | None = None) -> str:
    """Return the name of the C library if it is not glibc, or a glibc before ``oldest_glibc``; empty if it fits.

    The name is such as ``glibc 2.31``. ``libc`` is a name and a version, by default those of this system's C library.
    """
    name, version = libc or platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) >= oldest_glibc:
        return ""
    return f"{name} {version}".strip() or "another C library"


def onnxruntime_on_gpu() -> bool:
    """Return whether the installed ONNX Runtime can run on a GPU."""
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


_CUDA_VERSION = re.compile(r"""^cuda\b[^=\n]*=\s*["'][^"'\n]""", re.MULTILINE)  # in torch's version.py


def torch_on_gpu() -> bool:
    """Return whether the installed torch was built with CUDA.

    This reads its ``version.py``, because importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError, ValueError):
            return _CUDA_VERSION.search(Path(folder, "version.py").read_text()) is not None
    return False


def _cpu_name() -> str:
    for line in read_kernel_file("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


ID_LENGTH = 12  # hexadecimal digits of the fingerprint's ID
BACKEND_PACKAGES = {  # tune's own backend -> packages, one of which has the backend's version
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "pytorch": ("torch",),
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies device, server and perf_analyzer: measurements with different fingerprints are not ranked together.

    Attributes:
        cpu: Name of the CPU; empty for a server on an unknown machine.
        cpu_count: Number of CPUs; 0 for a server on an unknown machine.
        gpus: Names of the GPUs; UUIDs from the server's metrics if the machine is unknown.
        target: embedded, local, docker or remote.
        server: Version of the server, checksum of a local server's program, or ID of a Docker image.
        backends: Backends of the model, with versions if they are not part of the server.
        at: Address of a server on an unknown machine; empty otherwise.
        perf_analyzer: Version of the perf_analyzer that measures or checks, or the ID of its Docker image; empty if
            only tune's own client does. Servers before 2.34 are measured by an older version.
    """

    cpu: str
    cpu_count: int
    gpus: tuple[str, ...]
    target: str
    server: str
    backends: tuple[str, ...]
    at: str = ""
    perf_analyzer: str = ""

    @property
    def id(self) -> str:
        """A short hash of all attributes."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]

    def __str__(self) -> str:
        machine = self.at or ", ".join([*self.gpus, self.cpu, f"{self.cpu_count} CPUs"])
        return f"{machine} · {self.target} server {self.server}, {', '.join(self.backends)}"

    def to_document(self) -> dict[str, Any]:
        """Return the fingerprint as in ``run.json``; ``parse_fingerprint`` reads it."""
        return {"id": self.id, **asdict(self)}

    def differences(self, other: Fingerprint) -> str:
        """Return the differences to ``other`` as text; empty if there are none."""
        names = (field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))
        return "; ".join(
            f"{name.replace('_', ' ')} {_as_text(getattr(other, name))} there, {_as_text(getattr(self, name))} here"
            for name in names
        )


def parse_fingerprint(document: object) -> Fingerprint | None:
    """Return the fingerprint that ``Fingerprint.to_document`` wrote; None for any other document."""
    if not isinstance(document, dict):
        return None
    try:
        return _fingerprint_form().validate_python({name: value for name, value in document.items() if name != "id"})
    except ValueError:
        return None


@functools.cache
def _fingerprint_form() -> TypeAdapter[Fingerprint]:
    from pydantic import TypeAdapter  # imported late, so that help and errors of the command are fast

    return TypeAdapter(Fingerprint)


def backend_identities(backends: Iterable[str], target: str) -> tuple[str, ...]:
    """Return ``Fingerprint.backends`` for the names of a model's backends on a server of ``target``."""
    return tuple(sorted({_with_version(name) if target == "embedded" else name for name in backends}))


def _with_version(backend: str) -> str:
    from importlib import metadata

    for package in BACKEND_PACKAGES.get(backend, ()):
        try:
            return f"{backend} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return backend


def _as_text(value: object) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return one_line(text, 80) or "none"
