"""The GPUs of this machine and their readings, through NVML, and which of them CUDA shows to a program.

No other module calls NVML.

A reading that a device refuses (an old driver, a virtual machine, MIG) is None, never zero.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CONTROL_DEVICE = Path("/dev/nvidiactl")  # exists if a driver is loaded
REMEDIES = {  # NVML error -> what to do
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated while the old one is loaded: reboot, or reload the "
    "nvidia kernel modules",
    "NVML_ERROR_DRIVER_NOT_LOADED": "sudo modprobe nvidia (dmesg has the reason if it fails), or install the driver",
    "NVML_ERROR_NO_PERMISSION": "let this user read and write /dev/nvidia*",
    "NVML_ERROR_GPU_IS_LOST": "reboot; dmesg has its Xid error",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "install the driver's libnvidia-ml.so.1; in a container add utility to "
    "NVIDIA_DRIVER_CAPABILITIES",
}
DEFAULT_REMEDY = "run nvidia-smi for details"
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, which older versions of pynvml lack


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of one GPU at one moment. None means unknown.

    ``at_seconds`` is monotonic time, ``utilization`` is 0 to 1, ``energy_joules`` is a counter with an arbitrary
    start, and ``throttling`` has NVML's bits.
    """

    at_seconds: float
    utilization: float | None = None
    memory_bytes: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttling: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. With MIG it is divided into instances, and NVML reports only the memory of each process."""

    index: int  # NVML's index
    name: str
    uuid: str
    mig: bool
    handle: Any

    def read(self, pids: Collection[int] = ()) -> GpuReading:
        """Return a reading. ``memory_bytes`` is that of ``pids`` if NVML reports it, otherwise all used memory."""
        import pynvml

        memory_bytes = self._memory_of(pids)
        now = time.monotonic()
        if self.mig:
            return GpuReading(now, memory_bytes=memory_bytes)
        if memory_bytes is None:
            memory_bytes = read_or_none(lambda: float(pynvml.nvmlDeviceGetMemoryInfo(self.handle).used))
        power_watts = self._instant_power_watts()
        if not power_watts:
            power_watts = read_or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1000)
        clock = pynvml.nvmlDeviceGetClockInfo
        return GpuReading(
            now,
            utilization=read_or_none(lambda: pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100),
            memory_bytes=memory_bytes,
            power_watts=power_watts,
            energy_joules=read_or_none(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000),
            sm_clock_mhz=read_or_none(lambda: float(clock(self.handle, pynvml.NVML_CLOCK_SM))),
            memory_clock_mhz=read_or_none(lambda: float(clock(self.handle, pynvml.NVML_CLOCK_MEM))),
            throttling=read_or_none(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle))),
        )

    def processes(self) -> dict[int, float | None]:
        """Return the used bytes of each process that computes on this GPU; empty if NVML does not report it."""
        import pynvml

        running = read_or_none(lambda: list(pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle))) or []
        memory_bytes: dict[int, float | None] = {}
        for process in running:
            used = None if process.usedGpuMemory is None else float(process.usedGpuMemory)
            before = memory_bytes.get(process.pid, 0.0)  # with MIG a process can be listed more than once
            memory_bytes[process.pid] = None if used is None or before is None else before + used
        return memory_bytes

    def _instant_power_watts(self) -> float | None:
        """Return the power now. The usual reading is a mean over 1 s on Ampere and later GPUs."""
        import pynvml

        values = read_or_none(lambda: pynvml.nvmlDeviceGetFieldValues(self.handle, [POWER_INSTANT]))
        if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        return float(values[0].value.uiVal) / 1000

    def _memory_of(self, pids: Collection[int]) -> float | None:
        used = [value for pid, value in self.processes().items() if pid in pids] if pids else []
        reported = [value for value in used if value is not None]
        return sum(reported) if reported and len(reported) == len(used) else None


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """The GPUs of this machine, and what prevents reading them.

    Attributes:
        gpus: The GPUs that can be read, in NVML's order.
        driver: Version of the driver; empty if unknown.
        fault: Why the GPUs, or one of them, cannot be read. Empty if all can, or if there is no NVIDIA driver.
        remedy: What to do about the fault.
        unusable: Whether the parts of the driver do not match, so that CUDA does not run either.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    fault: str = ""
    remedy: str = ""
    unusable: bool = False

    @property
    def message(self) -> str:
        """The fault and its remedy in one line; empty without a fault."""
        return f"{self.fault}; {self.remedy}" if self.fault else ""


def survey() -> GpuSurvey:
    """Return every GPU of this machine in NVML's order."""
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = str(read_or_none(pynvml.nvmlSystemGetDriverVersion) or "")
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and not CONTROL_DEVICE.exists():
            return GpuSurvey()
        unusable = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        return GpuSurvey(fault=_fault("NVML", error), remedy=_remedy(error), unusable=unusable)
    gpus, fault, remedy = [], "", ""
    for index in range(count):
        try:
            gpus.append(_open_gpu(index))
        except pynvml.NVMLError as error:
            fault, remedy = _fault(f"NVML, GPU {index}", error), _remedy(error)
    return GpuSurvey(tuple(gpus), driver, fault, remedy)


def parent_of_mig(uuid: str) -> str | None:
    """Return the UUID of the GPU of a MIG instance; None if there is no such instance."""
    import pynvml

    def parent() -> str:
        instance = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))

    return read_or_none(parent)


def read_or_none(read: Callable[[], T]) -> T | None:
    """Return the result of ``read``; None if NVML raises an error."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def _open_gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    mode = read_or_none(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(index, str(name), str(uuid), mode == pynvml.NVML_DEVICE_MIG_ENABLE, handle)


def _fault(where: str, error: Any) -> str:
    return f"{where}: {str(error).rstrip('.')}"


def _remedy(error: Any) -> str:
    import pynvml

    names = (name for name in REMEDIES if getattr(pynvml, name) == error.value)
    return REMEDIES.get(next(names, ""), DEFAULT_REMEDY)


# -- variables and libraries of CUDA -----------------------------------------------------------------------------

MPS_THREADS, MPS_PIPES = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY"  # of processes under MPS
DEFAULT_MPS_PIPES = "/tmp/nvidia-mps"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# NVML's order. By default CUDA numbers the fastest GPU first, so that its numbers are others if GPUs differ.
BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# the driver, and the libraries of CUDA that ONNX Runtime and PyTorch load
CUDA_LIBRARIES = ("libcuda.so.1", "libcudart.so.*", "libcublas.so.*", "libcudnn.so.*", "libnvinfer.so.*")


def cuda_folders() -> list[str]:
    """Return the folders of ``LD_LIBRARY_PATH`` with the CUDA driver or CUDA's libraries.

    Some containers have the driver nowhere else. Other folders are left out: their libraries may not suit the server.
    """
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return [folder for folder in folders if any(next(Path(folder).glob(name), None) for name in CUDA_LIBRARIES)]


def mps_share(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that limits one of ``processes`` servers to its share of a GPU under NVIDIA's MPS.

    The result is empty for a single server, if the MPS of ``environment`` does not run, or if that has a limit.
    """
    control = Path(environment.get(MPS_PIPES) or DEFAULT_MPS_PIPES, "control")
    if processes == 1 or MPS_THREADS in environment or not control.exists():
        return {}
    return {MPS_THREADS: f"{100 / processes:.4g}"}


def filter_visible(
    gpus: Sequence[Gpu],
    chosen: str | None = None,
    find_parent: Callable[[str], str | None] = parent_of_mig,
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows to a program with BUS_ORDER, in its order: ``gpus: [ 0 ]`` means the first.

    As in CUDA, the list may have indices, UUIDs or prefixes of UUIDs, and its first unknown entry ends it.

    Args:
        gpus: GPUs in NVML's order.
        chosen: The value of CUDA_VISIBLE_DEVICES; None for that of this process.
        find_parent: Returns the UUID of the GPU of a MIG instance, see ``parent_of_mig``.
    """
    text = os.environ.get(VISIBLE_DEVICES) if chosen is None else chosen
    if text is None:
        return tuple(gpus)
    selected: list[Gpu] = []
    for word in text.split(","):
        gpu = _find_gpu(word.strip(), gpus, find_parent)
        if gpu is None or gpu in selected:
            break
        selected.append(gpu)
    return tuple(selected)


def gpus_used_by(pids: Collection[int], gpus: Sequence[Gpu], placed: Collection[int] | None) -> tuple[Gpu, ...]:
    """Return the GPUs of ``gpus`` on which the processes ``pids`` compute.

    ``placed`` are the indices of the GPUs that the server's instance groups name; None if one of them names none.
    Only these count, because tritonserver itself allocates memory on every GPU that it sees. NVML does not report the
    processes from within a container, where they have other IDs. Then the result is the GPUs at ``placed``, or all.
    """
    if placed is not None and not placed:
        return ()
    named = tuple(gpus) if placed is None else tuple(gpu for i, gpu in enumerate(gpus) if i in placed)
    in_use = tuple(gpu for gpu in gpus if not gpu.processes().keys().isdisjoint(pids))
    return tuple(gpu for gpu in in_use if gpu in named) or in_use or named


def _find_gpu(word: str, gpus: Sequence[Gpu], find_parent: Callable[[str], str | None]) -> Gpu | None:
    """Return the GPU with the index or UUID ``word``, or the only one whose UUID begins so; None if there is none."""
    if word.isascii() and word.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(word)), None)
    if word.startswith("MIG-"):
        word = find_parent(word) or ""
    matching = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None
