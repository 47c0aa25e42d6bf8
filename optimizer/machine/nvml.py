"""NVIDIA's management library: which GPUs there are, and what each tells of itself. Nothing else calls it.

A reading that a device refuses (an old driver, a virtual machine, MIG) is None, never zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from optimizer.machine.gpu_figures import Reading

T = TypeVar("T")

CONTROL_DEVICE = Path("/dev/nvidiactl")  # there where a driver is loaded
MENDS = {  # by NVML's error, where more can be said than its own words
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated while the old one runs on: reboot, or reload the "
    "nvidia kernel modules",
    "NVML_ERROR_DRIVER_NOT_LOADED": "sudo modprobe nvidia (dmesg says why it is not loaded), or install the driver",
    "NVML_ERROR_NO_PERMISSION": "let this user read and write /dev/nvidia*",
    "NVML_ERROR_GPU_IS_LOST": "reboot; dmesg has its Xid error",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "install the driver's libnvidia-ml.so.1; in a container add utility to "
    "NVIDIA_DRIVER_CAPABILITIES",
}
OTHER_MEND = "see what nvidia-smi says"


@dataclass(frozen=True, slots=True)
class Gpu:
    """``mig``: it is cut into instances, so that what it tells is of all of them; only memory is told by process."""

    index: int  # as NVML counts
    name: str
    uuid: str
    mig: bool
    handle: Any

    def read(self, pids: Collection[int] = ()) -> Reading:
        """``memory_bytes`` is what ``pids`` use where that is told, else all that is in use."""
        own = self._memory_of(pids)
        now = time.monotonic()
        if self.mig:
            return Reading(now, memory_bytes=own)
        import pynvml

        clock = pynvml.nvmlDeviceGetClockInfo
        return Reading(
            now,
            utilization=known(lambda: pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100),
            memory_bytes=known(lambda: float(pynvml.nvmlDeviceGetMemoryInfo(self.handle).used))
            if own is None
            else own,
            power_watts=known(lambda: pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1000),
            energy_joules=known(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000),
            sm_clock_mhz=known(lambda: float(clock(self.handle, pynvml.NVML_CLOCK_SM))),
            memory_clock_mhz=known(lambda: float(clock(self.handle, pynvml.NVML_CLOCK_MEM))),
            throttling=known(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle))),
        )

    def processes(self) -> dict[int, float | None]:
        """What computes on it -> the bytes it uses; empty where NVML does not tell."""
        import pynvml

        running = known(lambda: list(pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle))) or []
        found: dict[int, float | None] = {}
        for one in running:
            used = None if one.usedGpuMemory is None else float(one.usedGpuMemory)
            before = found.get(one.pid, 0.0)  # under MIG a process can be there more than once
            found[one.pid] = None if used is None or before is None else before + used
        return found

    def _memory_of(self, pids: Collection[int]) -> float | None:
        used = [value for pid, value in self.processes().items() if pid in pids] if pids else []
        known_ones = [value for value in used if value is not None]
        return sum(known_ones) if known_ones and len(known_ones) == len(used) else None


@dataclass(frozen=True, slots=True)
class Survey:
    """``fault`` says what keeps the GPUs, or one of them, from being read, and ``mend`` what helps; empty where all
    can be read, or there is no NVIDIA driver at all. ``unusable``: the driver's parts do not fit each other, so that
    CUDA does not run either."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    fault: str = ""
    mend: str = ""
    unusable: bool = False

    @property
    def told(self) -> str:
        """The fault and its mend in a line."""
        return f"{self.fault}; {self.mend}" if self.fault else ""


def survey() -> Survey:
    """Every GPU of this machine, as NVML counts them."""
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = str(known(pynvml.nvmlSystemGetDriverVersion) or "")
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and not CONTROL_DEVICE.exists():
            return Survey()
        unusable = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        return Survey(fault=_fault("NVML", error), mend=_mend(error), unusable=unusable)
    gpus, fault, mend = [], "", ""
    for index in range(count):
        try:
            gpus.append(_gpu(index))
        except pynvml.NVMLError as error:
            fault, mend = _fault(f"NVML, GPU {index}", error), _mend(error)
    return Survey(tuple(gpus), driver, fault, mend)


def device_of_mig(uuid: str) -> str | None:
    """The UUID of the GPU that a MIG instance is part of; None where there is none such."""
    import pynvml

    def parent() -> str:
        instance = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))

    return known(parent)


def known(read: Callable[[], T]) -> T | None:
    """What NVML answers; None where it refuses."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    mode = known(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(index, str(name), str(uuid), mode == pynvml.NVML_DEVICE_MIG_ENABLE, handle)


def _fault(where: str, error: Any) -> str:
    return f"{where}: {str(error).rstrip('.')}"


def _mend(error: Any) -> str:
    import pynvml

    names = (name for name in MENDS if getattr(pynvml, name) == error.value)
    return MENDS.get(next(names, ""), OTHER_MEND)
