"""``tune doctor``: what this machine has of what tune needs, and the mend for what it lacks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optimizer import runtime
from optimizer.errors import EnvironmentFault
from optimizer.machine import hardware, nvml
from optimizer.machine.gpu_attribution import CHOSEN, visible

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """``warn`` is a limit that a run can live with, ``fail`` one that it cannot. ``mend`` is empty for ``ok``."""

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""


def diagnose() -> int:
    """Print every finding; 0 where a run can succeed, else 3."""
    findings = [check() for check in CHECKS]
    for finding in findings:
        print(f"{finding.state:4}  {finding.what:15} {finding.found}")
        if finding.mend:
            print(f"{'':22}-> {finding.mend}")
    failed = sum(finding.state == "fail" for finding in findings)
    print("ready: tune --sla-p95 20ms dlrm" if not failed else f"{failed} to mend before tune can run here")
    return 3 if failed else 0


def check_server(unsupported: str | None = None) -> Finding:
    if reason := runtime.unsupported() if unsupported is None else unsupported:
        return Finding(
            "tritonserver", "fail", reason, "run tune on Linux x86-64 with glibc 2.35 and Python 3.11-3.13"
        )
    found = runtime.installed()
    if found is None:
        return Finding(
            "tritonserver", "warn", f"not yet in {runtime.cache_folder()}", "tune setup (a run does it, too)"
        )
    if not os.access(found.tritonserver, os.X_OK):
        return Finding(
            "tritonserver", "fail", f"{found.tritonserver} cannot be run", f"rm -r {found.root}; tune setup"
        )
    missing = _missing_libraries(found.tritonserver, found.libraries)
    if missing:
        return Finding("tritonserver", "fail", f"misses {missing}", f"apt-get install the package of {missing}")
    return Finding("tritonserver", "ok", f"{runtime.TRITON_VERSION} in {found.root}")


def check_python_stub() -> Finding:
    found = runtime.installed()
    if found is None:
        return Finding("Python backend", "warn", "not unpacked yet", "tune setup")
    if not found.stub.exists():
        return Finding("Python backend", "fail", f"no stub at {found.stub}", "use Python 3.11, 3.12 or 3.13")
    return Finding("Python backend", "ok", f"stub for Python {found.stub.parent.name}")


def check_libpython(folders: Sequence[str | Path] | None = None) -> Finding:
    folder = runtime.libpython_folder(folders)
    if folder is None:
        return Finding("libpython", "fail", "the shared library is missing", runtime.libpython_mend())
    return Finding("libpython", "ok", f"in {folder}")


def check_perf_analyzer() -> Finding:
    found = runtime.installed()
    if found is None:
        return Finding("perf_analyzer", "warn", "not unpacked yet", "tune setup")
    again = f"rm -r {found.root}; tune setup"
    if not os.access(found.perf_analyzer, os.X_OK):
        return Finding("perf_analyzer", "fail", f"{found.perf_analyzer} cannot be run", again)
    missing = _missing_libraries(found.perf_analyzer, found.perf_analyzer_libraries)
    if missing:
        own = any(name in missing for name in ("libb64", "libcudart"))
        mend = again if own else "apt-get install libssl3 zlib1g libstdc++6"
        return Finding("perf_analyzer", "fail", f"misses {missing}", mend)
    return Finding("perf_analyzer", "ok", f"{runtime.TRITON_VERSION}, all libraries found")


def check_onnxruntime() -> Finding:
    try:
        import onnxruntime
    except ImportError as error:
        return Finding("ONNX Runtime", "fail", str(error), "pip install onnxruntime")
    providers = ", ".join(p.removesuffix("ExecutionProvider") for p in onnxruntime.get_available_providers())
    return Finding("ONNX Runtime", "ok", f"{onnxruntime.__version__} ({providers})")


def check_gpu() -> Finding:
    """Which there are, what NVML says of them, and which backends here compute on them."""
    found = nvml.survey()
    gpus = visible(found.gpus)
    words = ", ".join(f"{gpu.name} (MIG)" if gpu.mig else gpu.name for gpu in gpus)
    if found.fault:
        return Finding("GPU", "warn", f"{words + '; ' if words else ''}{found.fault}", found.mend)
    if not found.gpus:
        return Finding("GPU", "warn", "none found through NVML: tune serves on the CPU", "install the NVIDIA driver")
    if not gpus:
        return Finding("GPU", "warn", f"{len(found.gpus)}, all hidden by {CHOSEN}", f"unset {CHOSEN}")
    words += f", driver {found.driver}"
    lacking = {"ONNX": hardware.onnxruntime_on_gpu(), "PyTorch": hardware.torch_on_gpu()}
    without = [kind for kind, reaches in lacking.items() if not reaches]
    if len(without) == len(lacking):
        mend = "pip uninstall onnxruntime; pip install onnxruntime-gpu (PyTorch models: torch's CUDA build)"
        return Finding("GPU", "warn", f"{words}; not used: ONNX Runtime has no CUDA provider, torch no CUDA", mend)
    if any(gpu.mig for gpu in gpus):
        mend = "Triton's metrics and NVML tell no utilisation or power of a MIG instance: these stay unknown"
        return Finding("GPU", "warn", words, mend)
    served = " and ".join(kind for kind, reaches in lacking.items() if reaches)
    return Finding("GPU", "ok", f"{words}, for {served} models")


def check_targets() -> Finding:
    """What there is beside the embedded server: to lack it is no fault. And remote ones that are not as they were."""
    from optimizer.deploy.docker.engine import connect
    from optimizer.deploy.remote.kept_state import FOLDER as REMOTE

    own = shutil.which("tritonserver")
    found = f"local: {own or 'no tritonserver on PATH (--tritonserver names one)'}"
    try:
        with contextlib.closing(connect()) as engine:
            found += f"; docker: {engine.api.base_url} answers"
    except EnvironmentFault as error:
        found += f"; docker: {error}"
    left = sorted(file.stem for file in (runtime.cache_folder() / REMOTE).glob("*.json"))
    if not left:
        return Finding("other targets", "ok", found)
    found += f"; remote: {', '.join(left)} may serve what a run that was killed tried"
    return Finding("other targets", "warn", found, "the next tune --target remote with that --url puts it back first")


def check_cpu() -> Finding:
    machine = hardware.detect()
    text = f"{machine.cpu}, {machine.cpu_count} cores, {machine.memory_bytes / GIB:.1f} GiB"
    if machine.cpu_count < 2:
        return Finding("CPU", "warn", text, "give tune two cores or more: the load generator needs one")
    load = os.getloadavg()[0]
    if load > 0.5 * machine.cpu_count:
        return Finding("CPU", "warn", f"{text}; load {load:.1f}", "stop what else runs: it blurs the measurements")
    return Finding("CPU", "ok", text)


def check_ports() -> Finding:
    from optimizer.deploy.tritonserver import free_port

    try:
        return Finding("ports", "ok", f"127.0.0.1 gives free ones, such as {free_port()}")
    except OSError as error:
        return Finding("ports", "fail", f"127.0.0.1: {error.strerror}", "allow binding to the loopback address")


def check_shared_memory() -> Finding:
    return _room("/dev/shm", Path("/dev/shm"), 0.25, "mount -o remount,size=1G /dev/shm; docker: --shm-size=1g")


def check_disk() -> Finding:
    cache = runtime.cache_folder()
    return _room("disk", next(p for p in (cache, *cache.parents) if p.exists()), 2, "free space or set TRITUNE_CACHE")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_server,
    check_python_stub,
    check_libpython,
    check_perf_analyzer,
    check_onnxruntime,
    check_gpu,
    check_targets,
    check_cpu,
    check_ports,
    check_shared_memory,
    check_disk,
)


def _room(what: str, folder: Path, least_gib: float, mend: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits say nothing of a read-only mount
            free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Finding(what, "fail", f"{folder} cannot be written: {error.strerror}", mend)
    return Finding(
        what,
        "ok" if free >= least_gib else "warn",
        f"{free:.1f} GiB free in {folder}",
        mend * (free < least_gib),
    )


def _missing_libraries(binary: Path, libraries: Path) -> str:
    """What the loader does not find; empty where all is there or ldd cannot say."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return ""
    done = subprocess.run(
        [ldd, binary],
        env={"LD_LIBRARY_PATH": str(libraries), "PATH": os.environ.get("PATH", "")},
        capture_output=True,
        text=True,
        check=False,
    )
    return ", ".join(_not_found(done.stdout))


def _not_found(output: str) -> Iterator[str]:
    for line in output.splitlines():
        if "not found" in line:
            yield line.split()[0]
