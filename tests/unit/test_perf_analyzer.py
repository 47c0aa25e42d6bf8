"""What is read from perf_analyzer and from the server's statistics around it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tritonclient.grpc.service_pb2 import ModelStatistics

from optimizer.interfaces import Endpoint
from optimizer.load.launcher import REFUSED, ForEveryServer, Launch
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.load.perf_output import read_windows
from optimizer.load.server_statistics import executions_by_size, mean_batch_size
from optimizer.load.windows import Window
from optimizer.trial import Candidate, LoadPoint


def statistics(*batches: tuple[int, int, int]) -> ModelStatistics:
    """Of (size, executions, compute_ns), a third of it for each of input, inference and output."""
    found = ModelStatistics()
    for size, executions, ns in batches:
        batch = found.batch_stats.add()
        batch.batch_size = size
        for part in (batch.compute_input, batch.compute_infer, batch.compute_output):
            part.count, part.ns = executions, ns // 3
        found.execution_count += executions
        found.inference_count += executions * size
    return found


def test_executions_are_counted_by_size_between_two_readings() -> None:
    before, after = statistics((4, 10, 3000), (8, 2, 900)), statistics((4, 30, 9000), (8, 2, 900), (12, 5, 6000))
    assert executions_by_size(before, after) == [(4, 20, 6000), (12, 5, 6000)]
    assert mean_batch_size(before, after) == (20 * 4 + 5 * 12) / 25


def test_a_server_that_tells_nothing_leaves_the_statistics_unknown() -> None:
    assert executions_by_size(None, statistics((4, 1, 3))) == []
    assert executions_by_size(statistics(), statistics()) == []


def test_windows_are_read_as_printed() -> None:
    line = "  Pass [{}] throughput: {} infer/sec. p95 latency: {} usec\n"
    windows = read_windows(line.format(1, "1e+03", 2100) + line.format(2, "990.5", 2200))
    assert windows == [Window(1000, 2.1), Window(990.5, 2.2)]


def test_the_measurement_interval_is_the_window_asked_for(tmp_path: Path) -> None:
    tool = PerfAnalyzer(tmp_path / "perf_analyzer", tmp_path, tmp_path / "log", window_ms=5000)
    command = tool.command(Endpoint("m", Candidate(1), "127.0.0.1:1"), LoadPoint(4, 7), tool.window_ms)
    pairs = dict(pairwise(command))
    assert pairs["--measurement-interval"] == "5000"
    assert (pairs["-b"], pairs["--concurrency-range"]) == ("4", "7")


def test_a_server_that_refuses_newer_requests_is_measured_with_the_older_one(tmp_path: Path) -> None:
    asked = []

    def older() -> Path:
        asked.append("fetched")
        return program("older", "echo measured $1")

    def program(name: str, line: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    newer = program("newer", f'echo "Thread [0] had error: {REFUSED} for Triton usage"; exit 99')
    launcher = ForEveryServer(tmp_path, older)
    for _ in range(2):
        done = launcher(Launch([str(newer), "-m"], timeout_seconds=10, log=tmp_path / "log"))
        assert (done.exit_code, done.output.split()) == (0, ["measured", "-m"])
    assert asked == ["fetched"]
    fine = Launch([str(program("fine", "echo fine"))], timeout_seconds=10, log=tmp_path / "log")
    assert ForEveryServer(tmp_path, older)(fine).output.split() == ["fine"]
    assert asked == ["fetched"]
