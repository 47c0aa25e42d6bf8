"""Several servers behind one load: the load is spread, statistics and memory are summed, and all of them stop."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from objectives import batch_stats
from optimizer.config import model_config
from optimizer.config.model_config_proto import ModelInstanceGroup
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.endpoint import Endpoint, SharedMemory
from optimizer.core.errors import MeasurementError, ServerCrashed
from optimizer.core.notes import ServedOnCpu
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.several_servers import ServerProcesses
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.gpu_telemetry import GpuTelemetry
from optimizer.machine.nvml import Gpu
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.combined_load import ServerProcessesLoadGenerator
from optimizer.measure.load_client.base_generator import LoadClientGenerator
from optimizer.measure.load_client.client import WARM_UPS
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.load_client.responses import StreamedRequests
from optimizer.measure.measurer import Measurer
from optimizer.measure.model_statistics import read_statistics
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.model.repository import read_repository_model
from optimizer.options.values import usable_cpus
from optimizer.results.finished_run import read_run
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.trials_table import TrialsTable
from optimizer.watch.expectation import check_server_count, derive_expectation
from optimizer.watch.fit_check import CheckKind, Judgement
from optimizer.watch.server_metrics import observe_loads, read_server
from tests.command_fixtures import UNDECIDED, Sandbox, Tune, eventually
from tests.contract import test_emitters
from tests.emitted_files import emitted, recommendation_of
from tests.load_clients import KeptRecords
from tests.repositories import write_sleeper, write_streamer
from tests.stack_fixtures import ANSWER_SECONDS, served

TWO = Candidate(64, dynamic_batching=True, fields=((SERVER_PROCESSES, 2),))
LOADS = {"closed loop": LoadPoint(1, concurrency=4), "open loop": LoadPoint(1, request_rate=200.0)}
SECONDS = 1.0
ATTEMPTS = 3


@pytest.fixture(scope="module")
def servers(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    folder = tmp_path_factory.mktemp("servers")
    logs = [folder / "tritonserver.log", folder / "tritonserver-2.log"]
    targets = [EmbeddedTarget(mlp, TargetSettings(log, cpus=usable_cpus())) for log in logs]
    with contextlib.closing(ServerProcesses(targets)) as target:
        yield target
    assert all(log.stat().st_size for log in logs), "each server has its own log"


@pytest.fixture
def endpoint(servers: ServerProcesses) -> Iterator[Endpoint]:
    with servers.deploy(TWO) as endpoint:
        yield endpoint


@pytest.fixture(params=LOADS)
def generator(request: pytest.FixtureRequest, mlp_requests: Path, tmp_path: Path) -> LoadClientGenerator:
    kind = ClosedLoopGenerator if request.param == "closed loop" else OpenLoopGenerator
    return kind(log=tmp_path / "client.log", input_data=mlp_requests)


def load_of(generator: LoadClientGenerator) -> LoadPoint:
    return LOADS["open loop" if isinstance(generator, OpenLoopGenerator) else "closed loop"]


def executions(endpoint: Endpoint) -> list[int]:
    """Return the executions of each server so far."""
    statistics = [read_statistics(replace(server, replicas=())) for server in endpoint.servers]
    return [int(each.execution_count) if each else 0 for each in statistics]


@pytest.mark.parametrize(
    ("generator", "shared"),
    [("closed loop", None), ("open loop", SharedMemory("system"))],
    indirect=["generator"],
    ids=["closed loop", "open loop in shared memory"],
)
def test_the_load_is_spread_and_the_statistics_are_summed(
    generator: LoadClientGenerator, shared: SharedMemory | None, endpoint: Endpoint
) -> None:
    before = executions(endpoint)
    measured = replace(generator, shared_memory=shared).measure(endpoint, load_of(generator), SECONDS)
    done = [after - earlier for after, earlier in zip(executions(endpoint), before, strict=True)]
    assert min(done) > WARM_UPS, "both servers get a share"
    assert sum(statistic.executions for statistic in batch_stats.from_text(measured.batch_stats)) == sum(done)
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
    message = r"^server process 2 of 2: tritonserver died \(SIGKILL\) while serving"
    with pytest.raises(ServerCrashed, match=message) as caught:
        kill_and_measure(servers, generator)
    assert "\n" not in str(caught.value)
    assert caught.value.log
    assert caught.value.log.name == "tritonserver-2.log"
    with servers.deploy(TWO) as endpoint:
        assert executions(endpoint) == [0, 0], "both servers are new"


def test_a_stream_of_each_server_arrives_at_its_own_request(tmp_path: Path) -> None:
    """Requests ask for different numbers of responses in turn."""
    counts, client = (5, 0, 17, 1, 2), KeptRecords()
    write_streamer(tmp_path / "models", 5.0)
    source = read_repository_model(tmp_path / "models", "streamer", gpu=False)
    data = tmp_path / "counts.json"
    data.write_text(json.dumps({"data": [{"count": [count]} for count in counts]}))
    targets = [EmbeddedTarget(source, TargetSettings(tmp_path / f"{number}.log")) for number in range(2)]
    generator = OpenLoopGenerator(log=tmp_path / "client.log", input_data=data, is_streaming=True, run_client=client)
    with contextlib.closing(ServerProcesses(targets)) as servers, servers.deploy(TWO) as endpoint:
        generator.measure(endpoint, LoadPoint(1, request_rate=20.0), SECONDS)
        assert all(executions(endpoint))
    (record,) = client.records
    assert record.responses
    streamed = StreamedRequests.decode(record.responses)
    assert streamed.responses.tolist() == np.resize(counts, len(record.sent_ns)).tolist()


# -- from the search to production -----------------------------------------------------------------------------------

SLEEP_MS = 20.0  # one process serves at most 50 requests a second, and two serve twice as many
PROFILE = f"""\
model: {{repository: models, name: sleeper}}
load: {{max_concurrency: 2}}
space:
  max_batch_size: [1]
  max_queue_delay_microseconds: [off]
  instance_group_count: [1]
  {SERVER_PROCESSES}: [2]
"""
PRODUCTION = ("--image", "example/triton:24.10-py3", "--model-repository", "s3://bucket/models")
RATE = 40.0  # of the requests to two processes
TIMES = {
    CheckKind.QUEUE_TIME,
    CheckKind.EXECUTION_TIME,
    CheckKind.TIME_IN_SERVER,
}  # a disturbed machine may change them


def write_slow(repository: Path) -> ModelSource:
    """Write the sleeping model without batching."""
    config = write_sleeper(repository, SLEEP_MS) / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 1"))
    return read_repository_model(repository, "sleeper", gpu=False)


@contextlib.contextmanager
def hanging(endpoint: Endpoint) -> Iterator[None]:
    """Stop the model of the server within the context, and send more requests than it executes at a time.

    Triton notices after a second that the model does not answer, and fails one of the requests.
    """
    stubs = [
        process
        for process in psutil.Process(endpoint.server_pid).children(recursive=True)
        if "stub" in " ".join(process.cmdline()[:1])
    ]
    assert stubs
    x = InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.zeros((1, 4), np.float32))
    answered = threading.Semaphore(0)
    with InferenceServerClient(endpoint.grpc) as client:
        for stub in stubs:
            stub.suspend()
        try:
            for _ in range(8):
                client.async_infer("sleeper", [x], lambda result, error: answered.release())
            assert eventually(
                lambda: read_server(f"http://{endpoint.metrics}/metrics", "sleeper").pending, ANSWER_SECONDS
            )
            yield
        finally:
            for stub in stubs:
                stub.resume()
        assert all(answered.acquire(timeout=ANSWER_SECONDS) for _ in range(8))


def test_two_processes_are_recommended_emitted_and_watched(sandbox: Sandbox, tune: Tune, tmp_path: Path) -> None:
    source = write_slow(sandbox.working_folder / "models")
    (sandbox.working_folder / "processes.yaml").write_text(PROFILE)
    briefly = ("--budget", "60s", "--max-trials", "2", "--measurement-interval", "400ms", "--no-confirmation")
    for attempt in range(ATTEMPTS):  # tune corrects for the machine's speed, on which a sleep does not depend
        where = ("--out", f"results-{attempt}", "--no-output-check", "processes.yaml")
        tuned = tune("--sla-p95", "500ms", *briefly, *where)
        (run,) = (sandbox.working_folder / f"results-{attempt}").glob("*/*")
        if tuned.code == UNDECIDED and recommendation_of(run).server_processes == 2:
            break
    assert tuned.code == UNDECIDED, tuned.stderr_lines
    recommended = recommendation_of(run)
    assert recommended.server_processes == 2
    assert (run / "logs" / "tritonserver-2.log").stat().st_size

    files = emitted(run, tmp_path / "out", "--format", "compose", *PRODUCTION, "--force")
    test_emitters.TestCompose().check(files, run, "s3://bucket/models", tmp_path / "out")
    (text,) = files.values()
    ports = re.findall(r":(\d+):8002\b", text)
    assert ports == ["8002", "8012"]

    logs = [tmp_path / f"{number}.log" for number in range(2)]
    targets = [EmbeddedTarget(source, TargetSettings(log, exports_metrics=True)) for log in logs]
    with (
        contextlib.closing(ServerProcesses(targets)) as servers,
        servers.deploy(recommended.point.candidate) as endpoint,
    ):
        urls = [f"http://{server.metrics}/metrics" for server in endpoint.servers]
        expected = derive_expectation(read_run(run))
        check_server_count(expected, len(urls))
        with served(endpoint, source, LoadPoint(1, request_rate=RATE), tmp_path / "client.log"):
            assert eventually(lambda: all(read_server(url, "sleeper").requests for url in urls), ANSWER_SECONDS)
            observed = next(observe_loads(urls, "sleeper", 0.3, 6))
        judgement = Judgement(expected, observed.loads, len(urls), observed.lost_intervals)
        assert {check.kind for check in judgement.differing} <= TIMES, judgement.differing
        assert judgement.requests > 0
        rate = judgement.check(CheckKind.RATE)
        assert rate is not None
        assert rate.measured is not None
        assert rate.measured.value == pytest.approx(judgement.requests / judgement.seconds)

        with hanging(endpoint.replicas[0]):
            observed = next(observe_loads(urls, "sleeper", 0.9, 2))
        judgement = Judgement(expected, observed.loads, len(urls), observed.lost_intervals)
        assert judgement.differs(CheckKind.STALL)


def test_a_perf_analyzer_for_each_process_measures_them_at_the_same_time(
    servers: ServerProcesses, perf_analyzer: PerfAnalyzer, tmp_path: Path
) -> None:
    def for_process(number: int) -> PerfAnalyzer:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        return replace(perf_analyzer, log=tmp_path / str(number) / "perf_analyzer.log")

    checker, measured = ServerProcessesLoadGenerator(for_process), None
    with servers.deploy(TWO) as endpoint:
        before = executions(endpoint)
        for _ in range(ATTEMPTS):
            try:
                measured = checker.measure(endpoint, LOADS["closed loop"], SECONDS)
                break
            except MeasurementError as error:
                if "not measured at the same time" not in str(error):  # one may start late on a busy machine
                    raise
        done = [after - earlier for after, earlier in zip(executions(endpoint), before, strict=True)]
    assert min(done) > 0
    assert measured
    assert measured.throughput_infer_per_sec
    assert measured.requests
    assert measured.latency_p95_ms is not None


def deployed_as(kind: str, mlp: ModelSource, log: Path) -> Endpoint:
    """Return the endpoint of ``mlp`` with instances of a kind, which was deployed for a moment."""
    config = model_config.copy(mlp.config)
    for group in config.instance_group:
        group.kind = ModelInstanceGroup.Kind.Value(kind)
    target = EmbeddedTarget(replace(mlp, config=config), TargetSettings(log))
    with contextlib.closing(target), target.deploy(Candidate(8)) as endpoint:
        return endpoint


def test_a_backend_that_chooses_its_devices_is_not_said_to_be_on_the_cpu(mlp: ModelSource, tmp_path: Path) -> None:
    endpoint = deployed_as("KIND_MODEL", mlp, tmp_path / "server.log")
    assert (endpoint.gpus, endpoint.fell_back_to_cpu) == (None, False)


def test_instances_without_a_kind_are_on_the_cpu_if_the_server_sees_no_gpu(
    mlp: ModelSource, mlp_requests: Path, tmp_path: Path
) -> None:
    """The server was given the GPUs that NVML shows, but has none: its configuration says KIND_CPU."""
    endpoint = deployed_as("KIND_AUTO", mlp, tmp_path / "server.log")
    assert (endpoint.gpus, endpoint.fell_back_to_cpu) == ((), True)
    telemetry = GpuTelemetry(ProcessTelemetry(), [Gpu(0, "NVIDIA A100-SXM4-80GB", "GPU-recorded", False, None)])
    with telemetry.record(endpoint) as usage:
        pass
    assert (usage.gpu_utilization, usage.gpu_memory_bytes) == (None, None)
    client = ClosedLoopGenerator(log=tmp_path / "client.log", input_data=mlp_requests)
    table = TrialsTable(tmp_path / "trials.csv", "mlp", {})
    measurer = Measurer(client, telemetry, table, QuietObserver())
    measurer.check_deployment(endpoint)
    assert ServedOnCpu("server_sees_no_gpu") in measurer.notes
