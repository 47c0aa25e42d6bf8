"""``tune doctor``: check what this machine lacks for a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import cache_folder, shipped_folder
from optimizer.core.measuring_runs import other_runs
from optimizer.core.safe_text import exists, is_file, is_folder
from optimizer.deploy import perf_analyzer_release, runtime
from optimizer.deploy.embedded_target import (
    UNLIMITED_ADDRESS_SPACE,
    address_space_problem,
    noexec_fault,
    stub_search_path,
)
from optimizer.deploy.installed_server import INSTALL_STUB_SHELL, NO_STUB_SHELL, STUB_SHELL
from optimizer.deploy.server_process import (
    NO_TEMPORARY_FOLDER,
    WRITABLE_TEMPORARY_FOLDER,
    orphans,
    temporary_parent,
)
from optimizer.machine import hardware, nvml
from optimizer.machine.nvml import VISIBLE_DEVICES, filter_visible
from optimizer.options.command_line import Parser
from optimizer.results.terminal_output import wrap

GIB = 2**30
WIDTH = 80
INDENT = 22  # width of the state and the name
INSTALL_LIBRARIES = "apt-get install libssl3 zlib1g libstdc++6"  # libraries that perf_analyzer needs


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking a component.

    Attributes:
        state: ``warn`` limits a run, ``fail`` prevents it.
        detail: The state of the component in words.
        fix: What to do; empty for ``ok``.
    """

    state: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def diagnose() -> int:
    """Print all findings and return the exit code: 0 if a run can succeed, else 3."""
    findings = {component: check() for component, check in CHECKS.items()}
    for component, finding in findings.items():
        first, *further_lines = wrap(finding.detail, WIDTH - INDENT) or [""]
        print(f"{finding.state:4}  {component:15} {first}")
        for line in further_lines:
            print(f"{'':{INDENT}}{line}")
        if finding.fix:
            print(f"{'':{INDENT}}-> {finding.fix}")
    failed = sum(finding.state == "fail" for finding in findings.values())
    print("ready: tune --sla-p95 20ms dlrm" if not failed else f"{failed} to fix before tune can run here")
    return EnvironmentFault.exit_code if failed else 0


def check_server(unsupported: str | None = None) -> Finding:
    """Check the embedded server; ``unsupported`` replaces the reason why this system cannot run it."""
    if reason := runtime.unsupported() if unsupported is None else unsupported:
        fix = "run tune on Linux x86-64 with glibc 2.35 and Python 3.11-3.13"
        return Finding("fail", reason, fix)
    installation = runtime.installed()
    if installation is None:
        detail = f"not installed yet in {cache_folder()}"
        return Finding("warn", detail, "tune setup (a run does it too)")
    if fault := noexec_fault(installation.root, "TRITUNE_CACHE"):
        return Finding("fail", *fault)
    if not os.access(installation.tritonserver, os.X_OK):
        detail = f"{installation.tritonserver} cannot be run"
        return Finding("fail", detail, f"rm -r {installation.root}; tune setup")
    missing = _missing_libraries(installation.tritonserver, installation.libraries)
    if missing:
        return Finding("fail", f"misses {missing}", f"apt-get install the package of {missing}")
    return Finding("ok", f"{runtime.TRITON_VERSION} in {installation.root}")


def check_python_stub() -> Finding:
    """Check the stub of Triton's Python backend."""
    installation = runtime.installed()
    if installation is None:
        return Finding("warn", "not unpacked yet", "tune setup")
    if not installation.stub.exists():
        return Finding("fail", f"no stub at {installation.stub}", "use Python 3.11, 3.12 or 3.13")
    return Finding("ok", f"stub for Python {installation.stub.parent.name}")


def check_libpython(folders: Sequence[str | Path] | None = None) -> Finding:
    """Check Python's shared library, which is searched in the unpacked runtime and in ``folders``.

    None searches the folders of this Python and of the system.
    """
    folder = runtime.libpython_folder(runtime.installed(), folders)
    if folder is None:
        return Finding("fail", "the shared library is missing", runtime.libpython_advice())
    return Finding("ok", f"in {folder}")


def check_shell() -> Finding:
    """Check the shell with which Triton's Python backend starts the process of a model."""
    program = shutil.which(STUB_SHELL, path=stub_search_path())
    if program is None:
        return Finding("fail", NO_STUB_SHELL, INSTALL_STUB_SHELL)
    return Finding("ok", program)


def check_address_space() -> Finding:
    """Check the limit on the address space, which the server and its models inherit."""
    if problem := address_space_problem():
        return Finding("fail", problem, UNLIMITED_ADDRESS_SPACE)
    return Finding("ok", "large enough for the server")


def check_threads() -> Finding:
    """Check the limits on processes and threads, which the server needs too."""
    if problem := hardware.thread_problem(hardware.SERVER_THREADS):
        return Finding("fail", problem, hardware.MORE_THREADS)
    return Finding("ok", "enough processes and threads can be started")


def check_perf_analyzer() -> Finding:
    """Check perf_analyzer and its libraries, and say why the newer release does not measure."""
    installation = runtime.installed()
    if installation is None:
        return Finding("warn", "not unpacked yet", "tune setup")
    again = f"rm -r {installation.root}; tune setup"
    if not os.access(installation.perf_analyzer, os.X_OK):
        return Finding("fail", f"{installation.perf_analyzer} cannot be run", again)
    missing = _missing_libraries(installation.perf_analyzer, installation.perf_analyzer_libraries)
    if missing:
        is_shipped = any(name in missing for name in ("libb64", "libcudart"))
        fix = again if is_shipped else INSTALL_LIBRARIES
        return Finding("fail", f"misses {missing}", fix)
    detail = f"{installation.perf_analyzer_version}, all libraries found"
    if not (reason := perf_analyzer_release.newer_problem()):
        return Finding("ok", detail)
    detail += f"; not {perf_analyzer_release.NEWER_VERSION}: {reason}"
    if perf_analyzer_release.glibc_problem():
        return Finding("ok", detail)
    return Finding("warn", detail, _newer_fix())


def _newer_fix() -> str:
    """Return what makes the newer perf_analyzer start on a system whose C library is new enough."""
    program = perf_analyzer_release.newer_program()
    if not is_file(program):
        return "tune setup"
    if _missing_libraries(program, program.parent):
        return INSTALL_LIBRARIES
    return f"rm -r {program.parents[2]}; tune setup"


def check_onnxruntime(python: str = runtime.running_python()) -> Finding:
    """Check ONNX Runtime and name its execution providers. ``python`` is the version of Python."""
    try:
        import onnxruntime
    except ImportError as error:
        return Finding("fail", str(error), "pip install onnxruntime")
    providers = ", ".join(p.removesuffix("ExecutionProvider") for p in onnxruntime.get_available_providers())
    folder = runtime.openvino_folder(python)
    if folder is None:
        state = f"none for Python {python}"
    else:
        state = "unpacked" if is_folder(folder) else "not downloaded yet"
    openvino = f"build with OpenVINO {runtime.OPENVINO_ONNX_RUNTIME}: {state}"
    return Finding("ok", f"{onnxruntime.__version__} ({providers}); {openvino}")


def check_gpu() -> Finding:
    """Check the GPUs that NVML reports and which backends can use them."""
    survey = nvml.survey()
    gpus = filter_visible(survey.gpus)
    names = ", ".join(f"{gpu.name} (MIG)" if gpu.mig else gpu.name for gpu in gpus)
    if survey.fault:
        return Finding("warn", f"{names + '; ' if names else ''}{survey.fault}", survey.remedy)
    if not survey.gpus:
        return Finding("ok", "NVML reports none: tune serves on the CPU; a GPU needs the NVIDIA driver")
    if not gpus:
        detail = f"{len(survey.gpus)}, all hidden by {VISIBLE_DEVICES}"
        return Finding("warn", detail, f"unset {VISIBLE_DEVICES}")
    names += f", driver {survey.driver}"
    on_gpu = {"ONNX": hardware.onnxruntime_on_gpu(), "PyTorch": hardware.torch_on_gpu()}
    without = [kind for kind, works in on_gpu.items() if not works]
    if len(without) == len(on_gpu):
        fix = "pip uninstall onnxruntime; pip install onnxruntime-gpu (PyTorch models: torch's CUDA build)"
        return Finding("warn", f"{names}; not used: ONNX Runtime has no CUDA provider, torch no CUDA", fix)
    if any(gpu.mig for gpu in gpus):
        unknown = "utilization and power stay unknown: neither Triton nor NVML reports them for a MIG instance"
        return Finding("warn", f"{names}; {unknown}", "nothing, or use a GPU without MIG to measure them")
    served = " and ".join(kind for kind, works in on_gpu.items() if works)
    return Finding("ok", f"{names}, for {served} models")


def check_targets() -> Finding:
    """Check the other targets, which may be missing, and remote servers whose configuration was not restored."""
    from optimizer.deploy.docker_engine import connect
    from optimizer.deploy.remote_server import FOLDER, unrestored_servers

    program = shutil.which("tritonserver")
    detail = f"local: {program or 'no tritonserver on PATH (--tritonserver names one)'}"
    try:
        with contextlib.closing(connect()) as engine:
            detail += f"; docker: {engine.api.base_url} answers"
    except EnvironmentFault as error:
        detail += f"; docker: {error}"
    unrestored = unrestored_servers(cache_folder() / FOLDER)
    if not unrestored:
        return Finding("ok", detail)
    detail += f"; remote: {', '.join(unrestored)} may serve a configuration that an earlier run tried"
    return Finding("warn", detail, "tune --target remote with that --url restores the server first")


def check_cpu() -> Finding:
    """Check the number of CPU cores and the system load."""
    machine = hardware.detect()
    text = f"{machine.cpu}, {machine.cpu_count} cores, {machine.memory_bytes / GIB:.1f} GiB"
    if machine.cpu_count < 2:
        return Finding("warn", text, "use a machine with two cores or more: the load generator needs one")
    load = os.getloadavg()[0]
    if load > 0.5 * machine.cpu_count:
        fix = "stop other processes: they disturb the measurements"
        return Finding("warn", f"{text}; load {load:.1f}", fix)
    return Finding("ok", text)


def check_other_runs() -> Finding:
    """Name the runs that measure on this machine now, of all users, and the processes that killed runs left."""
    found = [f"process {run.pid} measures for {run.folder}" for run in other_runs()]
    fixes = ["wait until they end: they change what another run measures"] if found else []
    if left := orphans():
        found.append(f"a killed run left {len(left)} of its server's processes")
        fixes.append(f"kill -9 {' '.join(map(str, left))} (the next run does it too)")
    if not found:
        return Finding("ok", "no tune run measures on this machine")
    return Finding("warn", "; ".join(found), "; ".join(fixes))


def check_ports() -> Finding:
    """Check that a port can be bound on the loopback address."""
    from optimizer.deploy.target_settings import free_port

    try:
        return Finding("ok", f"127.0.0.1 has free ports, such as {free_port()}")
    except OSError as error:
        return Finding("fail", f"127.0.0.1: {error.strerror}", "allow binding to the loopback address")


def check_shared_memory() -> Finding:
    """Check the free space of /dev/shm."""
    fix = "mount -o remount,size=1G /dev/shm; docker: --shm-size=1g"
    return _check_space(Path("/dev/shm"), 0.25, fix)


def check_temporary_files() -> Finding:
    """Check the folder for temporary files, which the server also runs programs from, and its free space."""
    try:
        folder = temporary_parent()
    except EnvironmentFault:
        return Finding("fail", NO_TEMPORARY_FOLDER, WRITABLE_TEMPORARY_FOLDER)
    if fault := noexec_fault(folder, "TMPDIR"):
        return Finding("fail", *fault)
    return _check_space(folder, 0.05, "free space there or set TMPDIR")


def check_disk() -> Finding:
    """Check the cache folder and the free space of its disk."""
    cache, fix = cache_folder(), "free space or set TRITUNE_CACHE"
    try:
        cache.stat()
    except FileNotFoundError:  # a run creates it
        folder = next(parent for parent in cache.parents if exists(parent))
    except OSError as error:
        return Finding("fail", f"{cache} cannot be used: {error.strerror}", fix)
    else:
        folder = cache
    return _check_space(folder, 2, fix)


def check_documentation() -> Finding:
    """Name the folder of the pages that help texts and messages refer to, such as docs/running.md."""
    page = shipped_folder("docs") / "README.md"
    if not page.is_file():
        return Finding("warn", "not installed", "install tritune again; its wheel contains docs/")
    return Finding("ok", f"docs/README.md is {page}")


CHECKS: dict[str, Callable[[], Finding]] = {  # by component, in the order of the output
    "tritonserver": check_server,
    "Python backend": check_python_stub,
    "libpython": check_libpython,
    STUB_SHELL: check_shell,
    "address space": check_address_space,
    "threads": check_threads,
    "perf_analyzer": check_perf_analyzer,
    "ONNX Runtime": check_onnxruntime,
    "GPU": check_gpu,
    "other targets": check_targets,
    "CPU": check_cpu,
    "other runs": check_other_runs,
    "ports": check_ports,
    "/dev/shm": check_shared_memory,
    "temporary files": check_temporary_files,
    "disk": check_disk,
    "documentation": check_documentation,
}


def _check_space(folder: Path, min_free_gib: float, fix: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits do not show a read-only mount
            free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Finding("fail", f"{folder} cannot be written: {error.strerror}", fix)
    text = f"{free:.1f} GiB free in {folder}"
    return Finding("ok", text) if free >= min_free_gib else Finding("warn", text, fix)


def _missing_libraries(binary: Path, libraries: Path) -> str:
    """Return the libraries that the loader does not find; empty if none or if ldd is missing."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return ""
    variables = {"LD_LIBRARY_PATH": str(libraries), "PATH": os.environ.get("PATH", "")}
    done = subprocess.run([ldd, binary], env=variables, capture_output=True, text=True, check=False)
    return ", ".join(line.split()[0] for line in done.stdout.splitlines() if "not found" in line)


def build_parser() -> Parser:
    """Return the parser of the command line."""
    description = "Check whether tune can run on this machine, and say how to fix each problem."
    epilog = "exit codes: 0 tune can run, perhaps with warnings, 3 a problem prevents it"
    return Parser("tune doctor", "[options]", description, epilog)


def main(argv: list[str]) -> int:
    """Run ``tune doctor`` and return its exit code."""
    build_parser().read(argv)
    return diagnose()
