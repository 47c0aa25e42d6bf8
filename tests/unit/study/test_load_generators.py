"""Test which load generator confirms a closed loop, and why it is perf_analyzer in some cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.measurement_windows import MIN_WINDOWS, REQUESTS_PER_WINDOW
from optimizer.core.request_sizes import SizeDistribution, parse_priorities, parse_size_distribution
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.machine.nvml import BUS_ORDER
from optimizer.measure.combined_load import ConcurrentLoadGenerator, ServerProcessesLoadGenerator
from optimizer.measure.explained_failures import RefusedRequestsLoadGenerator
from optimizer.measure.load_client.client_process import SCRATCH
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator, SequenceGenerator
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.input_data import MAX_SENT_BYTES, MAX_SENT_ENTRIES, count_entries
from optimizer.model.requests import RequestBatching, RequestOptions, prepare_requests
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import RunFolder
from optimizer.study.load_generators import LoadGenerators, PerfAnalyzerReason, choose_clients, make_load_generators
from optimizer.study.task import Task
from tests.inference_server import FakeInferenceServer
from tests.load_clients import planned_task
from tests.programs import unpack_empty_runtime

OPTIONS = RunOptions("m")
REQUESTS = Path(__file__).parents[2] / "data" / "requests.json"
SLA = Sla.from_bounds({"p95": 20.0, "throughput": 5.0})


def task_with(
    input_data: Path = REQUESTS,
    concurrent: Mapping[str, float] | None = None,
    open_loop: bool = False,
    streaming: bool = False,
    sequence_length: SizeDistribution | None = None,
    sla: Sla = SLA,
    priorities: SizeDistribution | None = None,
    server_processes: int = 1,
) -> Task:
    space = SearchSpace((1,), fields={SERVER_PROCESSES: (server_processes,)})
    problem = Problem("m", space, 1, 1, sla=sla, open_loop=open_loop, priorities=priorities)
    source = SimpleNamespace(concurrent=concurrent or {}, name="m", is_streaming=streaming)
    requests: dict[str, Any] = {
        "input_data": input_data,
        "shapes": (),
        "unbounded": (),
        "has_unbounded_numbers": True,
        "baseline": Candidate(4),
        "concurrent": {},
        "token_output": "ids",
        "sequence_length": sequence_length,
    }
    return cast("Task", SimpleNamespace(problem=problem, source=source, **requests))


def perf_analyzer_reason(options: RunOptions, task: Task) -> PerfAnalyzerReason | None:
    return choose_clients(options, task).perf_analyzer_reason


def data_file(folder: Path, entries: int) -> Path:
    path = folder / "data.json"
    path.write_text('{"data": [' + ", ".join(['{"x": [1]}'] * entries) + "]}")
    return path


def test_the_own_client_confirms_what_it_can_send(tmp_path: Path) -> None:
    assert perf_analyzer_reason(OPTIONS, task_with(data_file(tmp_path, 5))) is None
    for url in ("triton:8001", "grpcs://triton:8001", "127.0.0.1:8001"):
        assert perf_analyzer_reason(replace(OPTIONS, target="remote", url=url), task_with()) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (replace(OPTIONS, protocol="http"), PerfAnalyzerReason.HTTP),
        (replace(OPTIONS, target="remote", protocol="http", url="http://127.0.0.1:8000"), PerfAnalyzerReason.HTTP),
        (replace(OPTIONS, perf_analyzer_image="triton-sdk"), PerfAnalyzerReason.IMAGE),
    ],
)
def test_perf_analyzer_confirms_a_load_that_the_own_client_cannot_send(
    options: RunOptions, reason: PerfAnalyzerReason
) -> None:
    assert perf_analyzer_reason(options, task_with()) is reason


def test_perf_analyzer_confirms_several_models_and_large_data(tmp_path: Path) -> None:
    assert perf_analyzer_reason(OPTIONS, task_with(concurrent={"other": 1.0})) is PerfAnalyzerReason.SEVERAL_MODELS
    assert perf_analyzer_reason(OPTIONS, task_with(data_file(tmp_path, MAX_SENT_ENTRIES))) is None
    large_data = data_file(tmp_path, MAX_SENT_ENTRIES + 1)
    assert perf_analyzer_reason(OPTIONS, task_with(large_data)) is PerfAnalyzerReason.INPUT_DATA


def test_the_own_client_confirms_with_one_large_sample(tmp_path: Path) -> None:
    """Random requests of a large input are one sample, whose file is larger than several samples may be."""
    options = RequestOptions(shapes=(f"x:{MAX_SENT_BYTES // 4}",))
    text = 'name: "m" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: -1 }'
    model = text_format.Parse(text, ModelConfig())
    for open_loop in (False, True):
        requests = prepare_requests(options, model, RequestBatching(8, open_loop), tmp_path)
        assert requests.input_data.stat().st_size > MAX_SENT_BYTES
        assert (count_entries(requests.input_data), requests.note) == (1, None)
        assert perf_analyzer_reason(OPTIONS, task_with(requests.input_data)) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the folder of a run on a machine whose server and perf_analyzer have been downloaded."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    unpack_empty_runtime(tmp_path / "cache")
    return RunFolder.create(str(tmp_path), "m")


def make(options: RunOptions, task: Task, folder: RunFolder) -> LoadGenerators:
    made = make_load_generators(options, task, folder, frozenset({0}), Stopwatch(), print)
    assert choose_clients(options, task).perf_analyzer_checks == (made.cross_checking is not None)
    return made


def test_the_search_keeps_perf_analyzer(folder: RunFolder) -> None:
    made = make(OPTIONS, task_with(), folder)
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, PerfAnalyzer)
    assert made.search.has_unbounded_numbers
    assert made.search.baseline == Candidate(4)
    assert isinstance(made.confirmation, ClosedLoopGenerator)
    assert made.confirmation.sla == Sla.from_bounds({"p95": 20.0})
    assert made.cross_checking is made.search
    assert perf_analyzer_reason(OPTIONS, task_with()) is None


def test_perf_analyzer_confirms_over_http(folder: RunFolder) -> None:
    options = replace(OPTIONS, protocol="http")
    made = make(options, task_with(), folder)
    assert made.confirmation is made.search
    assert made.cross_checking is None
    assert perf_analyzer_reason(options, task_with()) is PerfAnalyzerReason.HTTP


def test_one_open_loop_searches_and_confirms(folder: RunFolder) -> None:
    assert perf_analyzer_reason(replace(OPTIONS, protocol="http"), task_with(open_loop=True)) is None
    made = make(OPTIONS, task_with(open_loop=True), folder)
    assert made.confirmation is made.search
    assert made.cross_checking is None
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, OpenLoopGenerator)


def test_each_model_has_an_open_loop_of_its_own(folder: RunFolder) -> None:
    task = task_with(open_loop=True, concurrent={"other": 0.25})
    task.concurrent["other"] = SimpleNamespace(input_data=REQUESTS, shapes=("x:2",))  # type: ignore[index]
    made = make(OPTIONS, task, folder)
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, ConcurrentLoadGenerator)
    own, other = made.search.load_generator.generators.values()
    assert isinstance(own, OpenLoopGenerator)
    assert isinstance(other, OpenLoopGenerator)
    assert (own.shapes, other.shapes) == ((), ("x:2",))
    assert own.seed != other.seed, "models do not get their requests at the same times"
    assert own.log != other.log
    for log in (own.log, other.log):
        (log.parent / f"{SCRATCH}killed").mkdir()
    make(OPTIONS, task, folder)
    assert not list(folder.path.rglob(f"{SCRATCH}*")), "a killed run has left them"
    load = LoadPoint(1, request_rate=80.0)
    with FakeInferenceServer(lambda feeds: feeds, inputs=(("x", "FP32", (-1, 1)),)).serving() as endpoint:
        loads = ((own, load), (replace(other, shapes=()), load.scaled(0.25)))
        tasks = [planned_task(generator, endpoint, own_load) for generator, own_load in loads]
    seconds = MIN_WINDOWS * REQUESTS_PER_WINDOW / 20 + LEAD_IN_SECONDS
    assert [task.plan.seconds for task in tasks] == pytest.approx([seconds] * 2), "both take the same time"


@pytest.mark.parametrize(("rate", "requests"), [(50.0, 60), (20.0, 60), (10.0, 30), (5.0, 15), (2.0, 10), (0.2, 3)])
def test_windows_at_a_low_rate_have_fewer_requests(folder: RunFolder, rate: float, requests: int) -> None:
    """180 requests take 36 s at 5 requests/s, and a run of three minutes would measure a configuration or two."""
    generator = OpenLoopGenerator(log=folder.path / "log", input_data=REQUESTS)
    assert generator.default_seconds(LoadPoint(1, request_rate=rate)) == pytest.approx(MIN_WINDOWS * requests / rate)


def test_the_own_client_measures_stateful_models(folder: RunFolder) -> None:
    task = task_with(sequence_length=parse_size_distribution("5"))
    assert choose_clients(OPTIONS, task).own_client_searches
    made = make(OPTIONS, task, folder)
    assert made.confirmation is made.search
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, SequenceGenerator)
    assert isinstance(made.cross_checking, PerfAnalyzer)
    assert made.cross_checking.sequence_length == 5


def test_the_own_client_measures_models_that_stream(folder: RunFolder) -> None:
    made = make(OPTIONS, task_with(streaming=True), folder)
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, ClosedLoopGenerator)
    assert (made.search.load_generator.is_streaming, made.search.load_generator.token_output) == (True, "ids")
    assert made.confirmation is made.search
    assert made.cross_checking is None
    assert perf_analyzer_reason(OPTIONS, task_with(streaming=True)) is None


@pytest.mark.parametrize("bounds", [{"p99.9": 30.0}, {"p95": 20.0, "error-rate": 0.1}])
def test_the_own_client_searches_for_what_perf_analyzer_does_not_report(
    bounds: dict[str, float], folder: RunFolder
) -> None:
    made = make(OPTIONS, task_with(sla=Sla.from_bounds(bounds)), folder)
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, ClosedLoopGenerator)
    assert made.search.load_generator.counts_failures is ("error-rate" in bounds)
    assert made.confirmation is made.search
    assert isinstance(made.cross_checking, PerfAnalyzer)


def test_the_own_client_alone_sends_several_priorities(folder: RunFolder, tmp_path: Path) -> None:
    made = make(OPTIONS, task_with(priorities=parse_priorities("1*20|2*80")), folder)
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    assert isinstance(made.search.load_generator, ClosedLoopGenerator)
    assert str(made.search.load_generator.priorities) == "1*20|2*80"
    assert made.cross_checking is None


def test_the_own_client_refuses_data_that_it_cannot_keep_in_memory(folder: RunFolder, tmp_path: Path) -> None:
    task = task_with(data_file(tmp_path, MAX_SENT_ENTRIES + 1), sla=Sla.from_bounds({"p99.9": 30.0}))
    with pytest.raises(BadInputError, match=r"has more than 65,536 entries, .* report p99\.9, .*, so give fewer$"):
        make(OPTIONS, task, folder)


def test_a_perf_analyzer_for_each_server_process_checks_the_own_client(folder: RunFolder) -> None:
    task = task_with(server_processes=2)
    assert choose_clients(OPTIONS, task).own_client_searches
    made = make(OPTIONS, task, folder)
    assert made.confirmation is made.search
    assert isinstance(made.cross_checking, ServerProcessesLoadGenerator)
    first, second = map(made.cross_checking.make, (1, 2))
    assert isinstance(first, PerfAnalyzer)
    assert isinstance(second, PerfAnalyzer)
    assert first.log != second.log
    assert second.log.parent.is_dir()


def test_perf_analyzers_of_several_servers_would_share_memory_regions(folder: RunFolder) -> None:
    made = make(replace(OPTIONS, shared_memory="system"), task_with(server_processes=2), folder)
    assert made.cross_checking is None


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (RunOptions("m", measurement_interval_ms=700.0), BUS_ORDER),
        (RunOptions("m", measurement_interval_ms=700.0, target="remote", url="triton:8001"), {}),
    ],
    ids=["a server that tune starts", "the server of the user"],
)
def test_perf_analyzer_measures_like_the_own_client(
    options: RunOptions, variables: dict[str, str], folder: RunFolder
) -> None:
    """It sees the GPUs in the order of the server that tune starts."""
    made = make(options, task_with(), folder)
    assert isinstance(made.search, RefusedRequestsLoadGenerator)
    checker, own_client = made.search.load_generator, made.confirmation
    assert isinstance(checker, PerfAnalyzer)
    assert isinstance(own_client, ClosedLoopGenerator)
    for generator in (checker, own_client):
        assert (generator.window_ms, generator.latency_bound_ms) == (700, 20.0)
        assert (generator.input_data, generator.cpus) == (REQUESTS, frozenset({0}))
    assert isinstance(checker.runner, LocalRunner)
    assert checker.runner.variables == variables
