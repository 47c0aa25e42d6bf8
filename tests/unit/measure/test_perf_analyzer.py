"""Test the reader of perf_analyzer's output and of the server's statistics, and its command line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tritonclient.grpc.service_pb2 import ModelStatistics

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint, SharedMemory
from optimizer.core.errors import ServerCrashed
from optimizer.core.measurement_windows import MeasurementWindow
from optimizer.core.process import FinishedProcess
from optimizer.core.trial import LoadPoint, Trial
from optimizer.machine.nvml import BUS_ORDER
from optimizer.measure.model_statistics import (
    add_statistics,
    executions_by_size,
    mean_batch_size,
    with_all_statistics,
    with_statistics,
)
from optimizer.measure.perf_analyzer import (
    RESERVED_KEY_ERROR,
    LocalRunner,
    PerfAnalyzer,
    PerfAnalyzerCommand,
)
from optimizer.measure.perf_output import read_windows
from optimizer.store.trials_table import TrialsTable
from tests.inference_server import FakeInferenceServer
from tests.programs import write_program


def statistics(*batches: tuple[int, int, int]) -> ModelStatistics:
    """Return statistics of (size, executions, compute_ns); input, inference and output take a third each."""
    result = ModelStatistics()
    for size, executions, ns in batches:
        batch = result.batch_stats.add()
        batch.batch_size = size
        for part in (batch.compute_input, batch.compute_infer, batch.compute_output):
            part.count, part.ns = executions, ns // 3
        result.execution_count += executions
        result.inference_count += executions * size
    return result


def test_executions_between_two_readings_are_counted_by_size() -> None:
    before, after = statistics((4, 10, 3000), (8, 2, 900)), statistics((4, 30, 9000), (8, 2, 900), (12, 5, 6000))
    assert executions_by_size(before, after) == [(4, 20, 6000), (12, 5, 6000)]
    assert mean_batch_size(before, after) == (20 * 4 + 5 * 12) / 25


def test_statistics_are_unknown_without_a_reading() -> None:
    assert with_statistics(Measurement(1.0), None, statistics((4, 1, 3))) == Measurement(1.0)
    assert executions_by_size(statistics(), statistics()) == []


def statistics_after(requests: int, queue_ns: int) -> ModelStatistics:
    """Return the statistics after ``requests`` in batches of four, which have waited ``queue_ns`` in total."""
    result = statistics((4, requests // 4, 3000 * requests))
    result.inference_stats.success.count, result.inference_stats.queue.ns = requests, queue_ns
    return result


@pytest.mark.parametrize(
    "after",
    [
        statistics_after(40, 8_000_000),  # fewer requests
        statistics_after(400, 8_000_000),  # more requests, but less time in the queue
        statistics((8, 100, 900_000)),  # other batch sizes
    ],
)
def test_statistics_are_unknown_if_the_counters_began_again(after: ModelStatistics, tmp_path: Path) -> None:
    """Another client reloaded the model during the measurement. A negative time would make the table unreadable."""
    before = statistics_after(200, 90_000_000)
    measured = with_statistics(Measurement(1.0, stable=True), before, after)
    assert measured == Measurement(1.0, stable=True)
    assert with_statistics(measured, before, statistics_after(400, 130_000_000)).queue_ms == 0.2
    table = TrialsTable(tmp_path / "trials.csv", "m", {})
    table.append(Trial(0, Candidate(8)), LoadPoint(1, 4), measured)
    assert table.read()[0].measurements == ((LoadPoint(1, 4), measured),)


def test_the_counters_of_each_step_are_recorded_with_the_instances_of_all_servers() -> None:
    endpoint = Endpoint("chain", Candidate(8), batcher="second", steps=(("chain", 0), ("first", 2), ("second", 1)))
    endpoint = replace(endpoint, replicas=(endpoint,))
    before = dict.fromkeys(("chain", "first", "second"), statistics_after(200, 90_000_000))
    after = dict.fromkeys(before, statistics_after(400, 130_000_000))
    measured = with_all_statistics(Measurement(1.0, stable=True), endpoint, before, after)
    assert measured.queue_ms == 0.2
    counters = "200:50:40000000:0:600000"
    assert measured.step_stats == f"chain:0:{counters} first:4:{counters} second:2:{counters}"
    again = {**after, "first": statistics_after(40, 8_000_000)}
    for unknown in ({}, {"second": after["second"]}, again):
        assert with_all_statistics(Measurement(1.0), endpoint, before, unknown).step_stats == ""
    streamed = with_all_statistics(Measurement(1.0, ttft_p50_ms=1.0), endpoint, before, after)
    assert streamed.step_stats == ""


def test_windows_are_read_from_the_output() -> None:
    line = "  Pass [{}] throughput: {} infer/sec. p95 latency: {} usec\n"
    windows = read_windows(line.format(1, "1e+03", 2100) + line.format(2, "990.5", 2200))
    assert windows == [MeasurementWindow(1000, 2.1), MeasurementWindow(990.5, 2.2)]


def test_the_measurement_interval_is_the_window(random_requests: Path, tmp_path: Path) -> None:
    tool = PerfAnalyzer(
        tmp_path / "perf_analyzer", LocalRunner(tmp_path), tmp_path / "log", random_requests, window_ms=5000
    )
    command = tool.command(Endpoint("m", Candidate(1), "127.0.0.1:1"), LoadPoint(4, 7), tool.window_ms)
    pairs = dict(pairwise(command))
    assert pairs["--measurement-interval"] == "5000"
    assert (pairs["-b"], pairs["--concurrency-range"]) == ("4", "7")


@pytest.mark.parametrize(
    ("first_ms", "seconds", "expected"),
    [
        (300, None, ["300", "1500", "7500", "15000"]),
        (4000, None, ["4000", "15000"]),
        (300, 20.0, ["5556", "15000"]),
    ],
)
def test_the_longest_window_is_tried_before_a_slow_model_is_given_up(
    first_ms: int, seconds: float | None, expected: list[str], random_requests: Path, tmp_path: Path
) -> None:
    tried = []

    def find_nothing(command: PerfAnalyzerCommand) -> FinishedProcess:
        tried.append(dict(pairwise(command.arguments))["--measurement-interval"])
        return FinishedProcess(3, "No valid requests recorded within time interval.", 1.0)

    tool = PerfAnalyzer(Path("perf_analyzer"), find_nothing, tmp_path / "log", random_requests, window_ms=first_ms)
    expected_text = "no request was answered within 15 s at concurrency 1,"
    with FakeInferenceServer(dict).serving() as endpoint, pytest.raises(ServerCrashed, match=expected_text):
        tool.measure(endpoint, LoadPoint(1, 1), seconds)
    assert tried == expected


def test_an_older_perf_analyzer_is_used_if_the_server_refuses_newer_requests(tmp_path: Path) -> None:
    requested = []

    def fetch_older() -> Path:
        requested.append("fetched")
        return write_program(tmp_path / "older", "#!/bin/sh\necho measured $1\n")

    refusal = f"Thread [0] had error: {RESERVED_KEY_ERROR} for Triton usage"
    newer = write_program(tmp_path / "newer", f'#!/bin/sh\necho "{refusal}"; exit 99\n')
    runner = LocalRunner(tmp_path, older=fetch_older)
    for _ in range(2):
        finished = runner(PerfAnalyzerCommand([str(newer), "-m"], timeout_seconds=60, log=tmp_path / "log"))
        assert (finished.exit_code, finished.output.split()) == (0, ["measured", "-m"])
    assert requested == ["fetched"]
    accepted = write_program(tmp_path / "accepted", "#!/bin/sh\necho fine\n")
    fine = PerfAnalyzerCommand([str(accepted)], timeout_seconds=60, log=tmp_path / "log")
    assert LocalRunner(tmp_path, older=fetch_older)(fine).output.split() == ["fine"]
    assert requested == ["fetched"]


COLUMNS = (
    *("Inferences/Second", "Client Send", "Network+Server Send/Recv", "Server Queue", "Server Compute Input"),
    *("Server Compute Infer", "Server Compute Output", "Client Recv"),
    *("p50 latency", "p90 latency", "p95 latency", "p99 latency"),
)


def test_the_time_of_a_measurement_begins_with_the_run_that_counts(random_requests: Path, tmp_path: Path) -> None:
    """Before it, a runner may have fetched another release, or another process may have used the shared memory."""
    began = list[float]()

    def run_after_fetching(_: PerfAnalyzerCommand) -> FinishedProcess:
        time.sleep(0.05)
        began.append(time.time())
        (tmp_path / "perf.csv").write_text(f"{','.join(COLUMNS)}\n{','.join('1' for _ in COLUMNS)}\n")
        return FinishedProcess(0, "", 0.0)

    tool = PerfAnalyzer(Path("perf_analyzer"), run_after_fetching, tmp_path / "log", random_requests, repeat=False)
    with FakeInferenceServer(dict).serving() as endpoint:
        result = tool.measure(endpoint, LoadPoint(1, 1))
    assert result.begin_unix_seconds is not None
    assert result.begin_unix_seconds >= began[0] - 0.001, "which is rounded to ms"


def test_the_time_limit_includes_reading_the_data(random_requests: Path, tmp_path: Path) -> None:
    limits = []

    def record_limit(run: PerfAnalyzerCommand) -> FinishedProcess:
        limits.append(run.timeout_seconds)
        return FinishedProcess(0, "", 0.1)

    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"x": [1]}] * 3000}) + " " * 50_000_000)
    tool = PerfAnalyzer(tmp_path / "perf_analyzer", record_limit, tmp_path / "log", random_requests)
    with_data = replace(tool, input_data=data)
    for perf_analyzer in (tool, with_data, replace(with_data, shared_memory=SharedMemory("cuda", 100))):
        perf_analyzer.warm_up(Endpoint("m", Candidate(1), "127.0.0.1:1"), LoadPoint(1, 7))
    little, read, registered = limits
    assert read - little >= 5.0, "50 MB"
    assert registered - read == pytest.approx(3.0), "3,000 entries"


@pytest.mark.parametrize("environment", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}])
def test_perf_analyzer_sees_the_gpus_of_the_server(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "libcuda.so.1").touch()
    path = write_program(
        tmp_path / "perf_analyzer", '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $LD_LIBRARY_PATH"\n'
    )
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for name, value in {"CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": f"{tmp_path}/driver", **environment}.items():
        monkeypatch.setenv(name, value)
    finished = LocalRunner(tmp_path, BUS_ORDER)(PerfAnalyzerCommand([str(path)], 60, tmp_path / "log"))
    order = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert finished.output.split() == ["1", order, f"{tmp_path}:{tmp_path}/driver"]


def test_the_statistics_of_several_servers_are_summed() -> None:
    total = statistics((4, 10, 300))
    add_statistics(total, statistics((4, 1, 60), (8, 2, 90)))
    assert executions_by_size(statistics(), total) == [(4, 11, 360), (8, 2, 90)]
    assert mean_batch_size(statistics(), total) == round((11 * 4 + 2 * 8) / 13, 3)
