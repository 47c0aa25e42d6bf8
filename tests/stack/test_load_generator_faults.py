"""perf_analyzer killed, hanging, printing garbage, writing no figures or impossible ones: programs that do so.

The server that it is to load answers that it lives, and no more than that is needed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from optimizer.deploy.tritonserver import free_port
from optimizer.errors import MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.trial import Candidate, LoadPoint

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
    """A server that lives."""

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
def gone() -> Endpoint:
    """Nobody listens there."""
    return Endpoint("m", Candidate(8), grpc=f"127.0.0.1:{free_port()}")


@pytest.fixture
def stopped() -> Iterator[Endpoint]:
    """Connections are made, as the kernel does for a stopped process, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Endpoint("m", Candidate(8), grpc=f"127.0.0.1:{listening.getsockname()[1]}")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """Where the program runs; at the end nothing of it runs any more."""
    (tmp_path / "output").write_text(OUTPUT)
    (tmp_path / "figures.csv").write_text(table(FIGURES))
    yield tmp_path
    assert [process for process in psutil.process_iter() if str(tmp_path) in _traces(process)] == []


def _traces(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join([*process.cmdline(), process.cwd()])
    return ""


def generator(here: Path, program: str) -> PerfAnalyzer:
    """A perf_analyzer that does what the shell's ``program`` says, and counts how often it is started."""
    binary = here / "perf_analyzer"
    binary.write_text(f'#!/bin/sh\necho "$@" >> launches\n{program}\n')
    binary.chmod(0o755)
    return PerfAnalyzer(binary, here, here / "perf_analyzer.log", window_ms=50, patience=False, drain_seconds=1)


def launches(here: Path) -> list[str]:
    return (here / "launches").read_text().splitlines()


def failure(here: Path, program: str, endpoint: Endpoint) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        generator(here, program).measure(endpoint, LOAD)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    return caught.value


def test_one_that_succeeds_is_read(here: Path, living: Endpoint) -> None:
    """So that the others fail for what is wrong with them."""
    found = generator(here, SUCCEED).measure(living, LOAD)
    assert (found.throughput_infer_per_sec, found.latency_p95_ms, found.queue_ms) == (996.8, 2.05, 0.3)
    assert (found.requests, found.latency_avg_ms) == (500, 1.6)
    assert found.stable
    assert len(launches(here)) == 1


# -- how it ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo started; kill -9 $$", "perf_analyzer ended with SIGKILL: started"),
        ("kill -ABRT $$", "perf_analyzer ended with SIGABRT: it printed nothing"),
        ("exit 2", "perf_analyzer ended with exit code 2: it printed nothing"),
        (
            "echo 'Failed to obtain stable measurement'; echo bye; exit 2",
            "perf_analyzer ended with exit code 2: Failed to obtain stable measurement",
        ),
        ("echo 'error: bad flag'; exit 99", "perf_analyzer ended with exit code 99: error: bad flag"),
        (
            "echo 'Thread [0] had error: it broke\n\nAt:\n  model.py(1)\nThread [1] had error: too'; exit 99",
            "perf_analyzer ended with exit code 99: it broke",
        ),
        ("exit 7", "perf_analyzer ended with exit code 7: it printed nothing"),
        ("cat output", "perf_analyzer wrote no figures: Avg gRPC time: 1600 usec (marshal 3 usec)"),
        ("cat output; : > perf.csv", "perf_analyzer wrote no figures: Avg gRPC time: 1600 usec (marshal 3 usec)"),
    ],
)
def test_one_that_fails_is_tried_once_more_and_then_said_to_have_failed(
    program: str, said: str, here: Path, living: Endpoint
) -> None:
    error = failure(here, program, living)
    assert not isinstance(error, ServerCrashed)
    assert str(error) == said
    assert len(launches(here)) == 2


@pytest.mark.parametrize(
    "program", ["kill -9 $$", "exit 99", "exit 0", "head -c 1000 /dev/urandom > perf.csv; exit 0"]
)
def test_one_that_fails_once_costs_nothing(program: str, here: Path, living: Endpoint) -> None:
    once = f'if [ "$(wc -l < launches)" = 1 ]; then {program}; fi; {SUCCEED}'
    assert generator(here, once).measure(living, LOAD).stable
    assert len(launches(here)) == 2


def test_one_that_is_not_there(here: Path, living: Endpoint) -> None:
    missing = replace(generator(here, SUCCEED), binary=here / "missing")
    with pytest.raises(MeasurementError, match=r"exit code 127: .*No such file"):
        missing.measure(living, LOAD)


def test_windows_without_an_answer_are_taken_longer_and_then_given_up(here: Path, living: Endpoint) -> None:
    error = failure(here, "exit 3", living)
    assert isinstance(error, ServerCrashed)
    assert str(error).startswith("no request was answered within 6.25 s at ")
    words = [line.split() for line in launches(here)]
    asked = [int(line[line.index("--measurement-interval") + 1]) for line in words]
    assert asked == [50, 250, 1250, 6250]


def test_requests_that_fail_in_windows_without_an_answer_are_not_waited_for_longer(
    here: Path, living: Endpoint
) -> None:
    program = "echo 'cb::Error: No valid requests recorded'; echo 'Thread [0] had error: it broke'; exit 99"
    assert str(failure(here, program, living)) == "perf_analyzer ended with exit code 99: it broke"
    assert len(launches(here)) == 2


@pytest.mark.parametrize(
    "program", ["sleep 600", "trap '' TERM INT HUP; while :; do sleep 0.1; done", "kill -STOP $$"]
)
def test_one_that_hangs_is_killed(program: str, here: Path, living: Endpoint) -> None:
    """The server answers; whether it or its model hangs cannot be known from outside."""
    started = time.monotonic()
    error = failure(here, program, living)
    assert isinstance(error, ServerCrashed)
    assert str(error).startswith("perf_analyzer had to be killed after ")
    assert len(launches(here)) == 1
    assert time.monotonic() - started < 10


# -- what it says -----------------------------------------------------------------------------------------------


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
def test_figures_that_cannot_be_are_no_measurement(text: str, here: Path, living: Endpoint) -> None:
    (here / "figures.csv").write_text(text)
    assert str(failure(here, SUCCEED, living)).startswith("perf_analyzer wrote a CSV that cannot be read: ")


@pytest.mark.parametrize("bytes_from", ["head -c 100000 /dev/urandom", r"printf '\377\376\033[2J\000\n'"])
def test_garbage_is_no_measurement(bytes_from: str, here: Path, living: Endpoint) -> None:
    failure(here, f"{bytes_from}; {bytes_from} > perf.csv", living)
    failure(here, f"{bytes_from}; exit 99", living)


def test_garbage_beside_good_figures_leaves_the_windows_unknown(here: Path, living: Endpoint) -> None:
    garbage = "Pass [1] throughput: 1.2.3e+ infer/sec. p95 latency: 9 usec\nRequest count: " + "9" * 5000
    (here / "output").write_text(garbage)
    found = generator(here, SUCCEED).measure(living, LOAD)
    assert (found.stable, found.reason, found.requests) == (False, "only 0 of 3 windows", None)


def test_figures_of_an_earlier_measurement_are_not_taken_again(here: Path, living: Endpoint) -> None:
    generator(here, SUCCEED).measure(living, LOAD)
    assert "wrote no figures" in str(failure(here, "cat output", living))


def test_endless_output_is_cut_off(here: Path, living: Endpoint) -> None:
    started = time.monotonic()
    patient = replace(generator(here, "head -c 100000000 /dev/zero; sleep 600"), drain_seconds=60)
    with pytest.raises(MeasurementError):
        patient.measure(living, LOAD)
    assert time.monotonic() - started < 20


def test_enormous_figures_are_read_in_part(here: Path, living: Endpoint) -> None:
    assert "cannot be read" in str(failure(here, "head -c 50000000 /dev/zero > perf.csv", living))


# -- the server behind it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["exit 99", "exit 3", "kill -9 $$", "cat output"])
def test_where_the_server_is_gone_that_is_said_at_once(program: str, here: Path, gone: Endpoint) -> None:
    error = failure(here, program, gone)
    assert isinstance(error, ServerCrashed)
    assert str(error).endswith("; the server no longer answers")
    assert len(launches(here)) == 1


def test_where_the_server_is_stopped_the_end_of_patience_is_not_waited_for(here: Path, stopped: Endpoint) -> None:
    started = time.monotonic()
    patient = replace(generator(here, "sleep 600"), drain_seconds=60, probe_seconds=1)
    with pytest.raises(ServerCrashed, match="the server did not answer within 1 s"):
        patient.measure(stopped, LOAD)
    assert time.monotonic() - started < 30


def test_a_model_whose_process_died_is_a_crash(here: Path, living: Endpoint) -> None:
    program = "echo \"Thread [0] had error: Stub process 'm_0_0' is not healthy.\"; exit 99"
    error = failure(here, program, living)
    assert isinstance(error, ServerCrashed)
    assert str(error) == "perf_analyzer ended with exit code 99: Stub process 'm_0_0' is not healthy."
    assert len(launches(here)) == 1


# -- warming up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["kill -9 $$", "exit 99", "sleep 600", "head -c 100000 /dev/urandom", ":"])
def test_a_warm_up_that_fails_leaves_the_telling_to_the_measurement(
    program: str, here: Path, living: Endpoint
) -> None:
    assert generator(here, program).warm_up(living, LOAD) is None


def test_a_warm_up_notices_a_stopped_server(here: Path, stopped: Endpoint) -> None:
    patient = replace(generator(here, "sleep 600"), drain_seconds=60, probe_seconds=1)
    with pytest.raises(ServerCrashed):
        patient.warm_up(stopped, LOAD)
