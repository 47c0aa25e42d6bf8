"""What this machine has: its GPUs through NVML, else its CPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: tuple[str, ...]
    cpu: str
    cpu_count: int
    memory_bytes: int

    def __str__(self) -> str:
        cpu = f"{self.cpu}, {self.cpu_count} cores"
        return f"{', '.join(self.gpus)} · {cpu}" if self.gpus else cpu


def detect() -> Hardware:
    """GPUs by name where NVML answers; the CPUs that this process may use."""
    import psutil

    cores = len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1
    return Hardware(gpu_names(), _cpu_name(), cores, psutil.virtual_memory().total)


def gpu_names() -> tuple[str, ...]:
    """Empty where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    except pynvml.NVMLError:
        return ()


def onnxruntime_on_gpu() -> bool:
    """Whether the installed ONNX Runtime can run on a GPU."""
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
