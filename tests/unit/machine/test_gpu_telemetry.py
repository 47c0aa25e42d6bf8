"""Tests of GPU telemetry with the real pynvml on a fake NVML library, with Triton's metrics, and with neither."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.core.resource_usage import ResourceUsage
from optimizer.machine.gpu_telemetry import (
    describe_throttling,
    gpu_readings,
    read_gpu_metrics,
    summarize,
    summarize_updates,
    throttle_note,
)
from optimizer.machine.metrics_page import parse_metrics_page
from optimizer.machine.nvml import MPS_PIPES, MPS_THREADS, Gpu, GpuReading, filter_visible, gpus_used_by, mps_share
from optimizer.machine.process_telemetry import INTERVAL_SECONDS
from tests.nvml_fixtures import A100, StandIn, nvml, nvml_library
from tests.telemetry_fakes import metrics_server

__all__ = ["nvml", "nvml_library"]

RECORD = """
import json, os, sys, time
from dataclasses import asdict
from optimizer.core.endpoint import Endpoint
from optimizer.machine.nvml import filter_visible
from optimizer.machine.gpu_telemetry import GpuTelemetry
from optimizer.machine.nvml import survey
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.core.candidate import Candidate
settings = json.loads(os.environ["ASKED"])
state = open(os.environ["STAND_IN_NVML"]).read().replace("SELF", str(os.getpid()))
open(os.environ["STAND_IN_NVML"], "w").write(state)
options = {"gpus": settings.get("gpus"), "metrics": settings.get("metrics", "")}
endpoint = Endpoint("m", Candidate(1), server_pid=os.getpid(), **options)
with GpuTelemetry(ProcessTelemetry(), filter_visible(survey().gpus)).record(endpoint) as samples:
    time.sleep(settings.get("seconds", 0.15))
print(json.dumps(asdict(samples)))
"""

SURVEY = """
import json
from optimizer.machine.nvml import survey
print(json.dumps([survey().fault, survey().remedy]))
"""


def recorded(nvml: StandIn, *, environment: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    """Return the GPU metrics of a server that is the recording process itself (``SELF`` in the fake NVML's file)."""
    usage = nvml.run(RECORD, ASKED=json.dumps(settings), **(environment or {}))
    return {name: value for name, value in usage.items() if name.startswith("gpu_")}


UNKNOWN = dict.fromkeys(
    ("gpu_utilization", "gpu_memory_bytes", "gpu_power_watts", "gpu_sm_clock_mhz", "gpu_memory_clock_mhz")
) | {"gpu_throttling": ""}
OTHER_GPU = {**A100, "utilization": 10, "power": 60_000, "process": ["999999 7000000000"]}

# -- through NVML -----------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_gpu_on_which_the_server_runs(nvml: StandIn) -> None:
    """Another process uses the other GPU. The fake energy counter adds 400 J to each reading; the power is 9 kW."""
    nvml.set_answers(OTHER_GPU, {**A100, "process": ["999999 5000000000", "SELF 3000000000"], "power": 9_000_000})
    usage = recorded(nvml, seconds=2)
    assert 0 < usage.pop("gpu_power_watts") <= 400 / INTERVAL_SECONDS
    assert usage == {
        "gpu_utilization": 0.75,
        "gpu_memory_bytes": 3e9,
        "gpu_sm_clock_mhz": 1410,
        "gpu_memory_clock_mhz": 1593,
        "gpu_throttling": "power limit",
    }


def test_a_gpu_on_which_the_server_only_has_its_memory_pool_does_not_count(nvml: StandIn) -> None:
    """Triton allocates a pool on each GPU that it sees, also on those without instances."""
    for gpus, utilization, memory in (([1], 0.75, 3e9), ([0, 1], 0.425, 3.5e9), (None, 0.425, 3.5e9)):
        nvml.set_answers({**OTHER_GPU, "process": ["SELF 500000000"]}, {**A100, "process": ["SELF 3000000000"]})
        usage = recorded(nvml, gpus=gpus)
        assert usage["gpu_utilization"] == pytest.approx(utilization)
        assert usage["gpu_memory_bytes"] == memory


def test_without_processes_the_instance_groups_choose_the_gpus(nvml: StandIn) -> None:
    """Processes have other IDs in a container, so memory and power are those of the device."""
    no_counter = {**A100, "energy": "error 3"}
    nvml.set_answers(OTHER_GPU, no_counter)
    usage = recorded(nvml, gpus=[1])
    assert (usage["gpu_memory_bytes"], usage["gpu_power_watts"]) == (10 << 30, 250)
    usage_of_both = recorded(nvml)
    assert (usage_of_both["gpu_memory_bytes"], usage_of_both["gpu_power_watts"]) == (20 << 30, 310)
    usage_of_visible = recorded(nvml, environment={"CUDA_VISIBLE_DEVICES": "GPU-1"}, gpus=[0])
    assert usage_of_visible == usage
    assert recorded(nvml, gpus=[]) == UNKNOWN


def test_the_power_now_is_preferred_to_the_mean_over_a_second(nvml: StandIn) -> None:
    """The readings count if there is no energy counter, or if the load is too short for it."""
    for instant, watts in ((400_000, 400), ("error 3", 250)):
        nvml.set_answers({**A100, "energy": "error 3", "instant_power": instant})
        assert recorded(nvml)["gpu_power_watts"] == watts


def test_a_reading_that_the_device_refuses_is_unknown(nvml: StandIn) -> None:
    nvml.set_answers({"name": "GRID", "utilization": 50, "power": "error 3", "memory": "error 999"})
    assert recorded(nvml) == UNKNOWN | {"gpu_utilization": 0.5}


def test_under_mig_only_the_memory_of_processes_is_the_servers(nvml: StandIn) -> None:
    partitioned = {**A100, "mig": 1}
    nvml.set_answers({**partitioned, "process": ["SELF 1000", "SELF 500"]})
    assert recorded(nvml) == UNKNOWN | {"gpu_memory_bytes": 1500}
    nvml.set_answers(partitioned)
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
def test_faults_are_reported_with_advice(nvml: StandIn, library: dict[str, object], fault: tuple[str, str]) -> None:
    nvml.set_answers({"name": "A", "handle": "error 15"}, **library)
    finding = nvml.run(SURVEY)
    assert finding[0] == fault[0]
    assert fault[1] in finding[1]
    assert recorded(nvml) == UNKNOWN


DOCTOR = """
import json
from optimizer.cli.doctor import check_gpu
from optimizer.machine.hardware import gpu_names
finding = check_gpu()
print(json.dumps([finding.state, finding.detail, finding.fix, gpu_names()]))
"""


def test_the_doctor_names_gpus_driver_and_faults(nvml: StandIn) -> None:
    """The tests install the CPU build of onnxruntime."""
    nvml.set_answers(A100, {**A100, "mig": 1})
    state, text, advice, names = nvml.run(DOCTOR)
    assert (state, len(names)) == ("warn", 2)
    assert text.startswith("NVIDIA A100-SXM4-80GB, NVIDIA A100-SXM4-80GB (MIG), driver 580.159.04")
    assert "onnxruntime-gpu" in advice
    assert nvml.run(DOCTOR, CUDA_VISIBLE_DEVICES="1")[3] == ["NVIDIA A100-SXM4-80GB"]
    assert nvml.run(DOCTOR, CUDA_VISIBLE_DEVICES="")[1] == "2, all hidden by CUDA_VISIBLE_DEVICES"
    nvml.set_answers(init="error 18")
    state, text, advice, names = nvml.run(DOCTOR)
    assert (state, text, names) == ("warn", "NVML: RM has detected an NVML/RM version mismatch", [])
    assert "reboot" in advice


# -- the GPUs of the server -------------------------------------------------------------------------------------

FOUR_GPUS = tuple(Gpu(i, "A", f"GPU-{letter}0", False, None) for i, letter in enumerate("abca"))


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        ("2,0", [2, 0]),
        ("", []),
        ("-1,0", []),
        ("1,9,0", [1]),
        ("0,0", [0]),
        ("GPU-b,GPU-c0", [1, 2]),
        ("GPU-a", []),  # ambiguous prefix
        ("MIG-1234", [1]),
    ],
)
def test_cuda_visible_devices_limits_the_gpus(variable: str, visible: list[int]) -> None:
    find_parent = {"MIG-1234": "GPU-b0"}.get
    assert [gpu.index for gpu in filter_visible(FOUR_GPUS, variable, find_parent)] == visible


def test_a_server_on_the_cpu_uses_no_gpus() -> None:
    assert gpus_used_by({1}, FOUR_GPUS, ()) == ()


# -- summaries of readings --------------------------------------------------------------------------------------


def test_readings_before_and_after_the_load_do_not_count() -> None:
    values = [(0, 50, 9), (0.8, 300, 5), (0, 100, 5), (1.0, 200, 6), (0, 50, 1)]
    samples = [
        {"a": GpuReading(0.1 * i, utilization=utilization, power_watts=watts, memory_bytes=memory)}
        for i, (utilization, watts, memory) in enumerate(values)
    ]
    usage = summarize(samples)
    assert usage == ResourceUsage(gpu_utilization=0.6, gpu_memory_bytes=9, gpu_power_watts=200)


def test_a_sum_is_unknown_if_one_gpu_gives_no_reading() -> None:
    reading = GpuReading(0.0, utilization=0.5, power_watts=100, memory_bytes=1.0, sm_clock_mhz=1000)
    sample = {"a": reading, "b": replace(reading, power_watts=None, utilization=None, memory_bytes=2.0)}
    assert summarize([sample]) == ResourceUsage(gpu_memory_bytes=3, gpu_sm_clock_mhz=1000)
    assert summarize([]) == ResourceUsage()


def test_a_counter_that_does_not_change_is_ignored() -> None:
    samples = [{"a": GpuReading(float(i), power_watts=40, energy_joules=7)} for i in range(3)]
    assert summarize(samples).gpu_power_watts == 40
    moving = [{"a": GpuReading(float(i), power_watts=40, energy_joules=7 + 90 * i)} for i in range(3)]
    assert summarize(moving).gpu_power_watts == 90


@pytest.mark.parametrize(("seconds", "watts"), [(1.0, 280), (1.9, 280), (3.6, 300), (5.0, 300), (9.0, 300)])
def test_the_energy_of_triton_counts_between_its_updates(seconds: float, watts: float) -> None:
    """A GPU takes 300 W, Triton updates its counter every 2 s, and its reading of the power is 280 W."""
    times_s = [0.55 + 0.1 * i for i in range(int(10 * seconds) + 1)]
    samples = [{"a": GpuReading(time_s, power_watts=280, energy_joules=600.0 * (time_s // 2))} for time_s in times_s]
    assert summarize(samples).gpu_power_watts == pytest.approx(watts)


def test_a_value_of_triton_from_before_the_load_does_not_count() -> None:
    def sample(seconds: float) -> dict[str, GpuReading]:
        updated = seconds >= 1.2
        return {"a": GpuReading(seconds, 0.9 if updated else 0.1, 8e9, 300 if updated else 60)}

    usage = summarize_updates([sample(0.1 * i) for i in range(30)])
    assert (usage.gpu_utilization, usage.gpu_memory_bytes, usage.gpu_power_watts) == pytest.approx((0.9, 8e9, 300))
    assert summarize_updates([sample(0.1 * i) for i in range(10)]) == ResourceUsage(gpu_memory_bytes=8e9)
    assert summarize_updates([]) == ResourceUsage()


def test_a_note_counts_the_measurements_with_lowered_clocks() -> None:
    assert throttle_note(["", ""]) is None
    note = throttle_note(["", "temperature", "power limit, temperature", ""])
    assert (
        str(note)
        == "the GPU lowered its clocks, and so its throughput, in 2 of 4 measurements: power limit, temperature"
    )


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ([], ""),
        ([0x00, 0x01, 0x02], ""),  # idle, and clocks set by a user
        ([0x00, 0x04], "power limit"),
        ([0x21, 0x44], "power limit, temperature, temperature limit of the hardware"),
    ],
)
def test_the_reasons_for_lowered_clocks_are_described(bits: list[int], words: str) -> None:
    assert describe_throttling(bits) == words


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


TWO_GPUS = METRICS + METRICS.replace("GPU-10000000-0000", "GPU-20000000-0000")


@pytest.fixture
def metrics(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the address of the metrics of a Triton server, in which an energy counter advances."""
    page, energies = getattr(request, "param", METRICS), itertools.count(1200)
    with metrics_server(lambda: page.replace("1.2e3", str(next(energies)))) as address:
        yield address


def test_a_zero_from_triton_is_unknown() -> None:
    readings = gpu_readings(parse_metrics_page(METRICS), 1.0)
    assert readings == {"GPU-10000000-0000": GpuReading(1.0, 0.42, 2048000000.0, 181.5, 1200.0)}


def test_readings_are_unknown_if_no_server_answers() -> None:
    assert read_gpu_metrics("127.0.0.1:9") == {}
    assert read_gpu_metrics("no such host:x") == {}


def test_the_servers_metrics_complete_the_readings_of_nvml(nvml: StandIn, metrics: str) -> None:
    """They fill unknown values with MIG and without NVML, for the GPUs that the server's processes use."""
    from_triton = {"gpu_utilization": 0.42, "gpu_memory_bytes": 2048000000.0, "gpu_power_watts": 181.5}
    partitioned = {**A100, "mig": 1}
    nvml.set_answers(partitioned, {**partitioned, "process": ["SELF 1000"]})
    assert recorded(nvml, metrics=metrics, seconds=0.4) == UNKNOWN | from_triton | {"gpu_memory_bytes": 1000}
    nvml.set_answers(init="error 18")
    assert recorded(nvml, metrics=metrics, seconds=0.4) == UNKNOWN | from_triton


@pytest.mark.parametrize("metrics", [TWO_GPUS], indirect=True)
def test_some_of_the_gpus_of_another_machine_are_unknown(nvml: StandIn, metrics: str) -> None:
    nvml.set_answers(init="error 18")
    for gpus, memory in ((None, 4096000000.0), ([0, 1], 4096000000.0), ([0], None)):
        assert recorded(nvml, metrics=metrics, gpus=gpus, seconds=0.4)["gpu_memory_bytes"] == memory


def test_servers_share_a_gpu_under_mps(tmp_path: Path) -> None:
    """A limit that the user has set counts for each server."""
    running = {MPS_PIPES: str(tmp_path)}
    assert mps_share(2, running) == {}, "the daemon does not run"
    (tmp_path / "control").touch()
    assert mps_share(2, running) == {MPS_THREADS: "50"}
    assert mps_share(3, running) == {MPS_THREADS: "33.33"}
    assert mps_share(1, running) == {}
    assert mps_share(2, running | {MPS_THREADS: "30"}) == {}
