"""What is told of GPUs: by the real pynvml with a stand-in library under it, by Triton's metrics, or by nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from optimizer.machine import triton_metrics
from optimizer.machine.gpu_attribution import used_by, visible
from optimizer.machine.gpu_figures import GpuFigures, Reading, figures, throttle_note, throttling
from optimizer.machine.nvml import Gpu
from tests.nvml_fixtures import A100, StandIn, nvml, nvml_library

__all__ = ["nvml", "nvml_library"]

RECORD = """
import json, os, sys, time
from dataclasses import asdict
from optimizer.interfaces import Endpoint
from optimizer.machine.gpu_attribution import visible
from optimizer.machine.gpu_telemetry import GpuTelemetry
from optimizer.machine.nvml import survey
from optimizer.machine.telemetry import ProcessTelemetry
from optimizer.trial import Candidate
asked = json.loads(os.environ["ASKED"])
told = open(os.environ["STAND_IN_NVML"]).read().replace("SELF", str(os.getpid()))
open(os.environ["STAND_IN_NVML"], "w").write(told)
at = {"gpus": asked.get("gpus"), "metrics": asked.get("metrics", "")}
endpoint = Endpoint("m", Candidate(1), server_pid=os.getpid(), **at)
with GpuTelemetry(ProcessTelemetry(), visible(survey().gpus)).record(endpoint) as samples:
    time.sleep(asked.get("seconds", 0.15))
print(json.dumps(asdict(samples)))
"""

SURVEY = """
import json
from optimizer.machine.nvml import survey
print(json.dumps([survey().fault, survey().mend]))
"""


def recorded(nvml: StandIn, *, environment: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
    """What is recorded of a server that is the recording process itself (``SELF`` in what NVML tells)."""
    found = nvml.run(RECORD, ASKED=json.dumps(asked), **(environment or {}))
    return {name: value for name, value in found.items() if name.startswith("gpu_")}


UNKNOWN = dict.fromkeys(
    ("gpu_utilization", "gpu_memory_bytes", "gpu_power_watts", "gpu_sm_clock_mhz", "gpu_memory_clock_mhz")
) | {"gpu_throttling": ""}
OTHERS = {**A100, "utilization": 10, "power": 60_000, "process": ["999999 7000000000"]}

# -- through NVML -----------------------------------------------------------------------------------------------


def test_the_gpu_on_which_the_server_runs(nvml: StandIn) -> None:
    """The other one is somebody else's. Power is by the energy counter, which the stand-in moves by 200 W."""
    nvml.tell(OTHERS, {**A100, "process": ["999999 5000000000", "SELF 3000000000"]})
    found = recorded(nvml, seconds=0.8)
    assert found.pop("gpu_power_watts") == pytest.approx(200, rel=0.05)
    assert found == {
        "gpu_utilization": 0.75,
        "gpu_memory_bytes": 3e9,
        "gpu_sm_clock_mhz": 1410,
        "gpu_memory_clock_mhz": 1593,
        "gpu_throttling": "power limit",
    }


def test_without_processes_the_instance_groups_tell(nvml: StandIn) -> None:
    """As in a container, where processes have other numbers; memory and power are the device's then."""
    no_counter = {**A100, "energy": "error 3"}
    nvml.tell(OTHERS, no_counter)
    found = recorded(nvml, gpus=[1])
    assert (found["gpu_memory_bytes"], found["gpu_power_watts"]) == (10 << 30, 250)
    both = recorded(nvml)
    assert (both["gpu_memory_bytes"], both["gpu_power_watts"]) == (20 << 30, 310)
    chosen = recorded(nvml, environment={"CUDA_VISIBLE_DEVICES": "GPU-1"}, gpus=[0])
    assert chosen == found
    assert recorded(nvml, gpus=[]) == UNKNOWN


def test_what_a_device_refuses_is_unknown(nvml: StandIn) -> None:
    nvml.tell({"name": "GRID", "utilization": 50, "power": "error 3", "memory": "error 999"})
    assert recorded(nvml) == UNKNOWN | {"gpu_utilization": 0.5}


def test_under_mig_only_the_memory_of_processes_is_the_servers(nvml: StandIn) -> None:
    cut = {**A100, "mig": 1}
    nvml.tell({**cut, "process": ["SELF 1000", "SELF 500"]})
    assert recorded(nvml) == UNKNOWN | {"gpu_memory_bytes": 1500}
    nvml.tell(cut)
    assert recorded(nvml) == UNKNOWN


@pytest.mark.parametrize(
    ("library", "fault"),
    [
        ({"init": "error 18"}, ("NVML: RM has detected an NVML/RM version mismatch", "reboot")),
        ({"init": "error 9"}, ("NVML: Driver Not Loaded", "modprobe nvidia")),
        ({"devices": "error 999"}, ("NVML: Unknown Error", "nvidia-smi")),
        ({"devices": 1}, ("NVML, GPU 0: GPU is lost", "Xid")),
    ],
)
def test_faults_are_told_with_their_mend(nvml: StandIn, library: dict[str, object], fault: tuple[str, str]) -> None:
    nvml.tell({"name": "A", "handle": "error 15"}, **library)
    told = nvml.run(
        "import json; from optimizer.machine.nvml import survey as s; print(json.dumps([s().fault, s().mend]))"
    )
    assert told[0] == fault[0]
    assert fault[1] in told[1]
    assert recorded(nvml) == UNKNOWN


DOCTOR = """
import json
from optimizer.doctor import check_gpu
from optimizer.machine.hardware import gpu_names
found = check_gpu()
print(json.dumps([found.state, found.found, found.mend, gpu_names()]))
"""


def test_the_doctor_names_gpus_driver_and_faults(nvml: StandIn) -> None:
    """With the onnxruntime of the tests, which is its CPU build."""
    nvml.tell(A100, {**A100, "mig": 1})
    state, found, mend, names = nvml.run(DOCTOR)
    assert (state, len(names)) == ("warn", 2)
    assert found.startswith("NVIDIA A100-SXM4-80GB, NVIDIA A100-SXM4-80GB (MIG), driver 580.159.04")
    assert "onnxruntime-gpu" in mend
    assert nvml.run(DOCTOR, CUDA_VISIBLE_DEVICES="1")[3] == ["NVIDIA A100-SXM4-80GB"]
    assert nvml.run(DOCTOR, CUDA_VISIBLE_DEVICES="")[1] == "2, all hidden by CUDA_VISIBLE_DEVICES"
    nvml.tell(init="error 18")
    state, found, mend, names = nvml.run(DOCTOR)
    assert (state, found, names) == ("warn", "NVML: RM has detected an NVML/RM version mismatch", [])
    assert "reboot" in mend


# -- which GPUs are the server's --------------------------------------------------------------------------------

FOUR = tuple(Gpu(i, "A", f"GPU-{letter}0", False, None) for i, letter in enumerate("abca"))


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        ("2,0", [2, 0]),
        ("", []),
        ("-1,0", []),
        ("1,9,0", [1]),
        ("0,0", [0]),
        ("GPU-b,GPU-c0", [1, 2]),
        ("GPU-a", []),  # of two
        ("MIG-1234", [1]),
    ],
)
def test_cuda_visible_devices(chosen: str, seen: list[int]) -> None:
    devices = {"MIG-1234": "GPU-b0"}
    assert [gpu.index for gpu in visible(FOUR, chosen, devices.get)] == seen


def test_on_the_cpu_there_are_none() -> None:
    assert used_by({1}, FOUR, ()) == ()


# -- what readings come to --------------------------------------------------------------------------------------


def test_before_and_after_the_load_does_not_count() -> None:
    samples = [
        {"a": Reading(0.1 * i, utilization=u, power_watts=p, memory_bytes=m)}
        for i, (u, p, m) in enumerate([(0, 50, 9), (0.8, 300, 5), (0, 100, 5), (1.0, 200, 6), (0, 50, 1)])
    ]
    found = figures(samples)
    assert found == GpuFigures(utilization=0.6, memory_bytes=9, power_watts=200)


def test_what_one_of_two_does_not_tell_is_unknown() -> None:
    one = Reading(0.0, utilization=0.5, power_watts=100, memory_bytes=1.0, sm_clock_mhz=1000)
    sample = {"a": one, "b": replace(one, power_watts=None, utilization=None, memory_bytes=2.0)}
    assert figures([sample]) == GpuFigures(memory_bytes=3, sm_clock_mhz=1000)
    assert figures([]) == GpuFigures()


def test_a_counter_that_stands_still_is_none() -> None:
    samples = [{"a": Reading(float(i), power_watts=40, energy_joules=7)} for i in range(3)]
    assert figures(samples).power_watts == 40
    moving = [{"a": Reading(float(i), power_watts=40, energy_joules=7 + 90 * i)} for i in range(3)]
    assert figures(moving).power_watts == 90


def test_lowered_clocks_are_counted() -> None:
    assert throttle_note(["", ""]) == ""
    told = throttle_note(["", "temperature", "power limit, temperature", ""])
    assert told == "the GPU lowered its clocks in 2 of 4 measurements: power limit, temperature"


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ([], ""),
        ([0x00, 0x01, 0x02], ""),  # idle, and clocks that somebody set
        ([0x00, 0x04], "power limit"),
        ([0x21, 0x44], "power limit, temperature, temperature limit of the hardware"),
    ],
)
def test_clocks_that_a_gpu_lowered(bits: list[int], words: str) -> None:
    assert throttling(bits) == words


# -- from Triton's metrics --------------------------------------------------------------------------------------

METRICS = """\
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-10000000-0000"} 0.42
nv_gpu_memory_used_bytes{gpu_uuid="GPU-10000000-0000"} 2048000000.000000
nv_gpu_memory_total_bytes{gpu_uuid="GPU-10000000-0000"} 85899345920
nv_gpu_power_usage{gpu_uuid="GPU-10000000-0000"} 181.5
nv_energy_consumption{gpu_uuid="GPU-10000000-0000"} 1.2e3
nv_gpu_utilization{gpu_uuid="GPU-0"} 0
nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"} 0
nv_gpu_power_usage{gpu_uuid="GPU-0"} 0
nv_inference_count{model="m",version="1"} 7
"""


@pytest.fixture
def metrics() -> Iterator[str]:
    """The address of an endpoint that answers as Triton's."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_zero_is_what_triton_could_not_read() -> None:
    found = triton_metrics.parse(METRICS, 1.0)
    assert found == {"GPU-10000000-0000": Reading(1.0, 0.42, 2048000000.0, 181.5, 1200.0)}


def test_where_nothing_answers_nothing_is_known() -> None:
    assert triton_metrics.read("127.0.0.1:9") == {}
    assert triton_metrics.read("no such host:x") == {}


def test_the_servers_metrics_complete_what_nvml_does_not_tell(nvml: StandIn, metrics: str) -> None:
    """Under MIG, and without NVML; of a GPU that is the server's by its processes."""
    from_triton = {"gpu_utilization": 0.42, "gpu_memory_bytes": 2048000000.0, "gpu_power_watts": 181.5}
    cut = {**A100, "mig": 1}
    nvml.tell(cut, {**cut, "process": ["SELF 1000"]})
    assert recorded(nvml, metrics=metrics) == UNKNOWN | from_triton | {"gpu_memory_bytes": 1000}
    nvml.tell(init="error 18")
    assert recorded(nvml, metrics=metrics) == UNKNOWN | from_triton
