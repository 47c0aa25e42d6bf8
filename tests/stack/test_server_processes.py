"""Several servers behind one load: the load is spread, statistics and memory are summed, and all of them stop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from objectives import batch_stats
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import ServerCrashed
from optimizer.core.interfaces import Endpoint
from optimizer.core.shared_memory import SharedMemory
from optimizer.core.trial import SERVER_PROCESSES, Candidate, LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.server_processes import ServerProcesses
from optimizer.machine.conditions import ProcessTelemetry
from optimizer.measure.load_client.generator import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.load_client.launcher import LoadClientGenerator
from optimizer.measure.load_client.plan import SendRecord
from optimizer.measure.load_client.responses import StreamedRequests
from optimizer.measure.perf_output import read_statistics
from optimizer.model.repository import read_repository_model
from optimizer.options.values import usable_cpus
from tests.repositories import write_streamer

TWO = Candidate(64, dynamic_batching=True, fields=((SERVER_PROCESSES, 2),))
LOADS = {"closed loop": LoadPoint(1, concurrency=4), "open loop": LoadPoint(1, request_rate=200.0)}
SECONDS = 1.0


@pytest.fixture(scope="module")
def servers(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    folder = tmp_path_factory.mktemp("servers")
    logs = [folder / "tritonserver.log", folder / "tritonserver-2.log"]
    targets = [EmbeddedTarget(mlp, log=log, say=print, cpus=usable_cpus()) for log in logs]
    with contextlib.closing(ServerProcesses(targets)) as target:
        yield target
    assert all(log.stat().st_size for log in logs), "each server has its own log"


@pytest.fixture
def endpoint(servers: ServerProcesses) -> Iterator[Endpoint]:
    with servers.deploy(TWO) as endpoint:
        yield endpoint


@pytest.fixture(params=LOADS)
def generator(request: pytest.FixtureRequest, mlp: ModelSource, tmp_path: Path) -> LoadClientGenerator:
    kind = ClosedLoopGenerator if request.param == "closed loop" else OpenLoopGenerator
    return kind(log=tmp_path / "client.log", input_data=str(mlp.input_data))


def load_of(generator: LoadClientGenerator) -> LoadPoint:
    return LOADS["open loop" if isinstance(generator, OpenLoopGenerator) else "closed loop"]


def executions(endpoint: Endpoint) -> list[int]:
    """Return the executions of each server so far."""
    statistics = [read_statistics(replace(server, replicas=())) for server in endpoint.servers]
    return [int(each.execution_count) if each else 0 for each in statistics]


@pytest.mark.parametrize("shared", [None, SharedMemory("system")], ids=["messages", "shared memory"])
def test_the_load_is_spread_and_the_statistics_are_summed(
    generator: LoadClientGenerator, shared: SharedMemory | None, endpoint: Endpoint
) -> None:
    before = executions(endpoint)
    measured = replace(generator, shared_memory=shared).measure(endpoint, load_of(generator), SECONDS)
    done = [after - earlier for after, earlier in zip(executions(endpoint), before, strict=True)]
    assert min(done) > 0.1 * sum(done), "both servers get a share, also if one has a busy CPU"
    assert sum(one.executions for one in batch_stats.from_text(measured.batch_stats)) == sum(done)
    assert measured.throughput_infer_per_sec
    assert measured.queue_ms is not None


def test_the_memory_of_the_servers_is_summed(endpoint: Endpoint) -> None:
    """The servers share the pages of their libraries, which count in parts."""
    used = []
    for servers in (endpoint, replace(endpoint, replicas=())):
        with ProcessTelemetry().record(servers) as usage:
            pass
        used.append(usage.server_memory_bytes or 0.0)
    assert used[0] > 1.5 * used[1] > 0


def test_the_servers_divide_the_cpus(endpoint: Endpoint) -> None:
    each = [set(psutil.Process(server.server_pid).children()[0].cpu_affinity()) for server in endpoint.servers]
    if len(usable_cpus()) > 1:
        assert not each[0] & each[1]
    assert each[0] | each[1] == usable_cpus()


def kill_and_measure(servers: ServerProcesses, generator: LoadClientGenerator) -> None:
    """Kill the second server before its load."""
    with servers.deploy(TWO) as endpoint:
        psutil.Process(endpoint.replicas[0].server_pid).children()[0].kill()
        with pytest.raises(ServerCrashed, match=r"; server process 2 of 2 no longer answers$") as caught:
            generator.measure(endpoint, load_of(generator), SECONDS)
        raise caught.value


def test_a_server_that_dies_under_load_is_named_and_all_start_again(
    servers: ServerProcesses, generator: LoadClientGenerator
) -> None:
    message = r"^server process 2 of 2: tritonserver died \(SIGKILL\) while measuring"
    with pytest.raises(ServerCrashed, match=message) as caught:
        kill_and_measure(servers, generator)
    assert "\n" not in str(caught.value)
    assert caught.value.log
    assert caught.value.log.name == "tritonserver-2.log"
    with servers.deploy(TWO) as endpoint:
        assert executions(endpoint) == [0, 0], "both servers are new"


@pytest.mark.parametrize("kind", [ClosedLoopGenerator, OpenLoopGenerator])
def test_a_stream_of_each_server_arrives_at_its_own_request(
    kind: type[ClosedLoopGenerator | OpenLoopGenerator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests ask for different numbers of responses in turn."""
    counts, records = (5, 0, 17, 1, 2), list[SendRecord]()
    read = SendRecord.read

    def keep(folder: Path) -> SendRecord:
        records.append(read(folder))
        return records[-1]

    monkeypatch.setattr(SendRecord, "read", keep)
    write_streamer(tmp_path / "models", 5.0)
    source = read_repository_model(tmp_path / "models", "streamer", gpu=False)
    data = tmp_path / "counts.json"
    data.write_text(json.dumps({"data": [{"count": [count]} for count in counts]}))
    targets = [EmbeddedTarget(source, log=tmp_path / f"{number}.log", say=print) for number in range(2)]
    generator = kind(log=tmp_path / "client.log", input_data=str(data), streams=True)
    load = replace(load_of(generator), request_rate=20.0) if kind is OpenLoopGenerator else load_of(generator)
    with contextlib.closing(ServerProcesses(targets)) as servers, servers.deploy(TWO) as endpoint:
        generator.measure(endpoint, load, SECONDS)
        assert all(executions(endpoint))
    (record,) = records
    assert record.responses
    streamed = StreamedRequests.decode(record.responses)
    assert streamed.responses.tolist() == np.resize(counts, len(record.sent_ns)).tolist()


def test_all_servers_stop_at_the_end(mlp: ModelSource, tmp_path: Path) -> None:
    targets = [EmbeddedTarget(mlp, log=tmp_path / f"{number}.log", say=print) for number in range(2)]
    with contextlib.closing(ServerProcesses(targets)) as servers, servers.deploy(TWO) as endpoint:
        pids = [server.server_pid or 0 for server in endpoint.servers]
        assert all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))
