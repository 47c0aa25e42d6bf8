"""Tests for a perf_analyzer that is killed, hangs, or writes garbage: shell programs take its place.

The server only reports that it is live.
"""

from __future__ import annotations

import csv
import io
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import EnvironmentFault, MeasurementError, RequestFailed, ServerCrashed
from optimizer.core.trial import LoadPoint, Trial
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.measurer import Measurer
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.measure.perf_output import read_csv
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.trials_table import TrialsTable
from tests.command_fixtures import Sandbox
from tests.inference_server import FakeInferenceServer
from tests.programs import write_program
from tests.storage_fixtures import SmallDisk, small_disk

__all__ = ["small_disk"]

LOAD = LoadPoint(2, 4)
OUTPUT = """\
  Pass [1] throughput: 1000 infer/sec. p95 latency: 2000 usec
  Pass [2] throughput: 1e+03 infer/sec. p95 latency: 2100 usec
  Pass [3] throughput: 990.5 infer/sec. p95 latency: 2050 usec
    Request count: 500
    Avg gRPC time: 1600 usec (marshal 3 usec)
"""
FIGURES = {
    "Concurrency": "4",
    "Inferences/Second": "996.8",
    "Client Send": "10",
    "Network+Server Send/Recv": "200",
    "Server Queue": "300",
    "Server Compute Input": "20",
    "Server Compute Infer": "900",
    "Server Compute Output": "30",
    "Client Recv": "5",
    "p50 latency": "1500",
    "p90 latency": "1900",
    "p95 latency": "2050",
    "p99 latency": "2500",
}
SUCCEED = "cat output; cp figures.csv perf.csv"


def table(*rows: dict[str, str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Living(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A server that reports to be live."""

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)


@pytest.fixture(scope="module")
def living() -> Iterator[Endpoint]:
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Living(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Endpoint("m", Candidate(8), grpc=f"127.0.0.1:{port}")
    server.stop(None)


@pytest.fixture
def gone() -> Iterator[Endpoint]:
    """Return an endpoint that refuses connections: its port is bound, so that no other server takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield Endpoint("m", Candidate(8), grpc=f"127.0.0.1:{bound.getsockname()[1]}")


@pytest.fixture
def stopped() -> Iterator[Endpoint]:
    """Return an endpoint that accepts connections but never responds, like a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Endpoint("m", Candidate(8), grpc=f"127.0.0.1:{listening.getsockname()[1]}")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return the folder where the program runs; check at the end that no process of it is left."""
    (tmp_path / "output").write_text(OUTPUT)
    (tmp_path / "figures.csv").write_text(table(FIGURES))
    yield tmp_path
    assert Sandbox(tmp_path).processes() == []


def generator(folder: Path, program: str, drain_seconds: float = 60) -> PerfAnalyzer:
    """Return a perf_analyzer that runs the shell ``program`` and logs each start.

    A busy machine takes seconds for a short program; ``drain_seconds`` is small only for a program that hangs.
    """
    binary = write_program(folder / "perf_analyzer", f'#!/bin/sh\necho "$@" >> launches\n{program}\n')
    log = folder / "perf_analyzer.log"
    requests = FakeInferenceServer(dict).write_requests(folder)
    return PerfAnalyzer(
        binary, LocalRunner(folder), log, requests, window_ms=50, repeat=False, drain_seconds=drain_seconds
    )


def launches(folder: Path) -> list[str]:
    path = folder / "launches"
    return path.read_text().splitlines() if path.exists() else []


def failure(folder: Path, program: str, endpoint: Endpoint, drain_seconds: float = 60) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        generator(folder, program, drain_seconds).measure(endpoint, LOAD)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    return caught.value


def test_a_valid_run_is_read(folder: Path, living: Endpoint) -> None:
    """The other tests change one thing of this run."""
    result = generator(folder, SUCCEED).measure(living, LOAD)
    assert (result.throughput_infer_per_sec, result.latency_p95_ms, result.queue_ms) == (996.8, 2.05, 0.3)
    assert (result.requests, result.latency_avg_ms) == (500, 1.6)
    assert result.stable
    assert len(launches(folder)) == 1


# -- end of perf_analyzer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo started; kill -9 $$", "perf_analyzer ended with SIGKILL: started"),
        ("kill -ABRT $$", "perf_analyzer ended with SIGABRT: it printed nothing"),
        (
            "echo 'Failed to obtain stable measurement'; echo bye; exit 2",
            "perf_analyzer ended with exit code 2: Failed to obtain stable measurement",
        ),
        (
            "echo 'Thread [0] had error: it broke\n\nAt:\n  model.py(1)\nThread [1] had error: too'; exit 99",
            "perf_analyzer ended with exit code 99: it broke",
        ),
        ("cat output; : > perf.csv", "perf_analyzer wrote no results: Avg gRPC time: 1600 usec (marshal 3 usec)"),
    ],
)
def test_a_failing_run_is_repeated_once_and_then_reported(
    program: str, said: str, folder: Path, living: Endpoint
) -> None:
    error = failure(folder, program, living)
    assert not isinstance(error, ServerCrashed)
    assert str(error) == said
    assert len(launches(folder)) == 2


@pytest.mark.parametrize("program", ["exit 99", "head -c 1000 /dev/urandom > perf.csv; exit 0"])
def test_a_run_that_fails_once_is_repeated(program: str, folder: Path, living: Endpoint) -> None:
    once = f'if [ "$(wc -l < launches)" = 1 ]; then {program}; fi; {SUCCEED}'
    assert generator(folder, once).measure(living, LOAD).stable
    assert len(launches(folder)) == 2


def test_a_full_disk_ends_the_run_instead_of_failing_the_candidate(
    small_disk: SmallDisk, living: Endpoint, tmp_path: Path
) -> None:
    program = generator(small_disk.path, "cat output; cp figures.csv perf.csv")
    small_disk.path.joinpath("output").write_text(OUTPUT)
    small_disk.path.joinpath("figures.csv").write_text(table(FIGURES))
    trials = TrialsTable(tmp_path / "trials.csv", "m", {})
    measurer = Measurer(program, ProcessTelemetry(), trials, QuietObserver())
    small_disk.fill()
    with pytest.raises(EnvironmentFault, match="No space left on device; free space there, then continue"):
        measurer.measure(Trial(0, living.candidate), living, LOAD)
    assert trials.read() == []
    small_disk.free()
    trial = measurer.measure(Trial(0, living.candidate), living, LOAD)
    assert trial.measurements[0][1].throughput_infer_per_sec == 996.8


def test_a_missing_program_is_reported(folder: Path, living: Endpoint) -> None:
    missing = replace(generator(folder, SUCCEED), binary=folder / "missing")
    with pytest.raises(MeasurementError, match=r"exit code 127: .*No such file"):
        missing.measure(living, LOAD)


def test_windows_without_an_answer_are_extended_and_then_given_up(folder: Path, living: Endpoint) -> None:
    error = failure(folder, "exit 3", living)
    assert isinstance(error, ServerCrashed)
    assert str(error) == "no request was answered within 15 s at concurrency 4, request batch size 2"
    words = [line.split() for line in launches(folder)]
    requested = [int(line[line.index("--measurement-interval") + 1]) for line in words]
    assert requested == [50, 250, 1250, 6250, 15000]


def test_a_large_bound_on_the_latency_permits_longer_windows(folder: Path, living: Endpoint) -> None:
    with pytest.raises(ServerCrashed, match="no request was answered within 40 s"):
        replace(generator(folder, "exit 3"), latency_bound_ms=40_000.0).measure(living, LOAD)
    assert len(launches(folder)) == 6


def test_failed_requests_do_not_extend_the_windows(folder: Path, living: Endpoint) -> None:
    program = "echo 'cb::Error: No valid requests recorded'; echo 'Thread [0] had error: it broke'; exit 99"
    error = failure(folder, program, living)
    assert isinstance(error, RequestFailed)
    assert str(error) == "perf_analyzer ended with exit code 99: it broke"
    assert len(launches(folder)) == 2


@pytest.mark.parametrize("program", ["trap '' TERM INT HUP; while :; do sleep 0.1; done", "kill -STOP $$"])
def test_a_hanging_run_is_killed(program: str, folder: Path, living: Endpoint) -> None:
    """The server responds, so it is unknown whether perf_analyzer or the model hangs."""
    error = failure(folder, program, living, drain_seconds=2)
    assert isinstance(error, ServerCrashed)
    assert re.fullmatch(r"perf_analyzer was killed after \d+ s, because .* completed no request for 2 s", str(error))
    assert len(launches(folder)) <= 1, "it is not repeated; a busy machine may not have started it"


# -- output of perf_analyzer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *(
            table({**FIGURES, column: cell})
            for column in ("Inferences/Second", "p95 latency", "Client Recv")
            for cell in ("", "nan", "inf", "-inf", "-1", "1e999", "many", "1,000", "\x00")
        ),
        table(FIGURES, FIGURES),
        table({name: cell for name, cell in FIGURES.items() if name != "p99 latency"}),
        table(FIGURES).splitlines()[0],
        table(FIGURES).partition("300")[0],
        "\n\n",
        "\x1b[2J\x00\n" * 5,
        '"' + "x" * 200_000,
    ],
)
def test_impossible_figures_are_an_error(text: str) -> None:
    with pytest.raises(MeasurementError, match=r"^perf_analyzer wrote a CSV that cannot be read: ") as caught:
        read_csv(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_run_with_impossible_figures_fails(folder: Path, living: Endpoint) -> None:
    (folder / "figures.csv").write_text(table({**FIGURES, "p95 latency": "nan"}))
    assert str(failure(folder, SUCCEED, living)).startswith("perf_analyzer wrote a CSV that cannot be read: ")


@pytest.mark.parametrize("bytes_from", ["head -c 100000 /dev/urandom", r"printf '\377\376\033[2J\000\n'"])
def test_garbage_is_an_error(bytes_from: str, folder: Path, living: Endpoint) -> None:
    failure(folder, f"{bytes_from}; {bytes_from} > perf.csv", living)
    failure(folder, f"{bytes_from}; exit 99", living)


def test_garbage_in_the_output_leaves_the_windows_unknown(folder: Path, living: Endpoint) -> None:
    garbage = "Pass [1] throughput: 1.2.3e+ infer/sec. p95 latency: 9 usec\nRequest count: " + "9" * 5000
    (folder / "output").write_text(garbage)
    result = generator(folder, SUCCEED).measure(living, LOAD)
    assert (result.stable, result.reason, result.requests) == (False, "only 0 of 3 windows", None)


def test_figures_of_an_earlier_run_are_not_used(folder: Path, living: Endpoint) -> None:
    generator(folder, SUCCEED).measure(living, LOAD)
    assert "wrote no results" in str(failure(folder, "cat output", living))


def test_endless_output_is_cut(folder: Path, living: Endpoint) -> None:
    """Otherwise the time limit of the test ends it, since ``drain_seconds`` is longer."""
    patient = replace(generator(folder, "head -c 100000000 /dev/zero; sleep 6000"), drain_seconds=3600)
    with pytest.raises(MeasurementError, match=r"perf_analyzer did not end in time and was killed after \d+ s"):
        patient.measure(living, LOAD)


def test_an_enormous_file_is_read_in_part(folder: Path, living: Endpoint) -> None:
    assert "cannot be read" in str(failure(folder, "head -c 50000000 /dev/zero > perf.csv", living))


# -- state of the server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["exit 3", "cat output"])
def test_a_dead_server_is_reported_at_once(program: str, folder: Path, gone: Endpoint) -> None:
    error = failure(folder, program, gone)
    assert isinstance(error, ServerCrashed)
    assert str(error).endswith("; the server no longer answers")
    assert len(launches(folder)) == 1


def test_a_stopped_server_is_reported_before_the_time_limit(folder: Path, stopped: Endpoint) -> None:
    """Otherwise the time limit of the test ends it, since ``drain_seconds`` is longer."""
    patient = replace(generator(folder, "sleep 6000"), overdue_seconds=0.5, drain_seconds=3600)
    with pytest.raises(ServerCrashed, match="the server did not answer within 5 s"):
        patient.measure(stopped, LOAD)


def test_a_dead_model_process_is_a_crash(folder: Path, living: Endpoint) -> None:
    program = "echo \"Thread [0] had error: Stub process 'm_0_0' is not healthy.\"; exit 99"
    error = failure(folder, program, living)
    assert isinstance(error, ServerCrashed)
    assert str(error) == "perf_analyzer ended with exit code 99: Stub process 'm_0_0' is not healthy"
    assert len(launches(folder)) == 1


# -- warming up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["kill -9 $$", "sleep 600", ":"])
def test_a_failing_warm_up_is_ignored(program: str, folder: Path, living: Endpoint) -> None:
    assert generator(folder, program, drain_seconds=1).warm_up(living, LOAD) is None


def test_a_warm_up_detects_a_stopped_server(folder: Path, stopped: Endpoint) -> None:
    patient = replace(generator(folder, "sleep 600"), overdue_seconds=0.5, drain_seconds=60)
    with pytest.raises(ServerCrashed, match="the server did not answer within 5 s"):
        patient.warm_up(stopped, LOAD)
