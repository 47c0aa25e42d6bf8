"""What this machine has: its GPUs through NVML, else its CPU; and which libraries here compute on them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path

from optimizer.machine.gpu_attribution import visible
from optimizer.machine.nvml import survey


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
    """Those that CUDA lets this process see, as it counts them; empty where NVML does not answer."""
    return tuple(gpu.name for gpu in visible(survey().gpus))


def onnxruntime_on_gpu() -> bool:
    """Whether the installed ONNX Runtime can run on a GPU."""
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def torch_on_gpu() -> bool:
    """Whether the installed torch was built with CUDA: by its ``version.py``, since to import it takes seconds."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return bool(_constant(ast.parse(Path(folder, "version.py").read_text()), "cuda"))
    return False


def _constant(module: ast.Module, name: str) -> object:
    """What ``name`` is set to; None where it is no constant."""
    for node in module.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(node, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
