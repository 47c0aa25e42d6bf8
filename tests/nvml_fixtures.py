"""GPUs that do not exist: a stand-in for libnvidia-ml.so.1 that the real pynvml loads in a process of its own.

The C compiler of this machine builds it from ``stand_in_nvml.c``; without a compiler these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("stand_in_nvml.c")
ROOT = Path(__file__).parents[1]
A100 = {"name": "NVIDIA A100-SXM4-80GB", "utilization": 75, "memory": 10 << 30, "power": 250_000, "energy": 5_000_000}
A100 |= {"sm_clock": 1410, "memory_clock": 1593, "throttling": 4, "mig": 0, "counted": 400_000}


@dataclass(frozen=True)
class StandIn:
    """The built library. It reads its answers from the file ``answers``."""

    library: Path
    answers: Path

    def set_answers(self, *devices: Mapping[str, object], **library: object) -> None:
        """Set what NVML answers from now on; ``error N`` instead of a value is that error. ``process`` is a list."""
        lines = [f"- {key} {value}" for key, value in ({"driver": "580.159.04"} | library).items()]
        lines += [f"- devices {len(devices)}"] if "devices" not in library else []
        for i, device in enumerate(devices):
            for key, value in ({"uuid": f"GPU-{i}0000000-0000"} | dict(device)).items():
                lines += [f"{i} {key} {item}" for item in (value if isinstance(value, list) else [value])]
        self.answers.write_text("\n".join(lines) + "\n")

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process whose pynvml loads the stand-in."""
        paths = [str(self.library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        variables = {
            "LD_LIBRARY_PATH": os.pathsep.join(paths),
            "STAND_IN_NVML": str(self.answers),
            "PYTHONPATH": str(ROOT),
        }
        return inherited | variables | more

    def run(self, program: str, **environment: str) -> Any:
        """Run ``program`` with this Python and return its output, parsed as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libnvidia-ml.so.1 with")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
    return library


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> StandIn:
    return StandIn(nvml_library, tmp_path / "nvml.txt")
