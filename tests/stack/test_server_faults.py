"""Tests for servers that are killed, stopped or out of memory, loads that fail or hang, and ports in use.

Each fault is reported with a reason, the next candidate is served, and no process, memory or folder is left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc import InferenceServerClient

from objectives.metrics import Measurement
from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError, ServerCrashed, ServerFault
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings, free_port
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import Sandbox, assert_search_ended, eventually, run_tune
from tests.csv_tables import read_rows
from tests.generated_requests import write_requests
from tests.repositories import (
    FAULT,
    FAULTY_BATCH,
    SLEEPER_CONFIG,
    doubler,
    skip_without_python_models,
    write_bls,
    write_faulty,
    write_model,
    write_sleeper,
)
from tests.stack_fixtures import leftovers

HANG_SECONDS = 3.0  # limit of the load that hangs
MEMORY_LIMIT = 6 * 2**30  # bytes of address space: more than the server has, less than "allocate" wants
HARMLESS, HARMFUL = LoadPoint(1, 2), LoadPoint(FAULTY_BATCH, 1)


def candidate(fault: str = "none", max_batch_size: int = 8) -> Candidate:
    return Candidate(max_batch_size, fields=((FAULT, fault),))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    skip_without_python_models()
    repository = tmp_path_factory.mktemp("models")
    write_faulty(repository)
    return read_repository_model(repository, "faulty", gpu=False)


@pytest.fixture
def make_target(source: ModelSource, tmp_path: Path) -> Iterator[Callable[..., EmbeddedTarget]]:
    """Yield a factory of targets, which are closed at the end of the test and must leave nothing."""
    before = leftovers()
    with contextlib.ExitStack() as closing:

        def make(choose_port: Callable[[], int] = free_port) -> EmbeddedTarget:
            log = tmp_path / f"tritonserver-{free_port()}.log"
            target = EmbeddedTarget(source, TargetSettings(log, choose_port=choose_port))
            closing.callback(target.close)
            return target

        yield make
    assert leftovers() <= before


@pytest.fixture
def target(make_target: Callable[..., EmbeddedTarget]) -> EmbeddedTarget:
    return make_target()


@pytest.fixture
def load_generator(source: ModelSource, tmp_path: Path) -> PerfAnalyzer:
    installed = runtime.ensure(print)
    return PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        tmp_path / "perf_analyzer.log",
        write_requests(source.config, tmp_path),
        window_ms=100,
        repeat=False,
    )


def server(target: EmbeddedTarget, endpoint: Endpoint | None = None) -> psutil.Process:
    """Return the process of tritonserver."""
    if endpoint is None:
        with target.deploy(candidate()) as endpoint:
            return server(target, endpoint)
    (process,) = psutil.Process(endpoint.server_pid).children()
    assert process.name() == "tritonserver"
    return process


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def suspend(process: psutil.Process) -> bool:
    """Stop a process and wait for its last thread: on a busy machine one may respond after the signal was sent."""
    process.suspend()
    tasks = Path(f"/proc/{process.pid}/task")

    def is_stopped() -> bool:
        states = set()
        for stat in tasks.glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                states.add(stat.read_text().rpartition(")")[2].split()[0])
        return states <= {"T", "Z", "X"}

    assert eventually(is_stopped, 60)
    return True


def limit_memory(process: psutil.Process) -> None:
    """Limit the memory of the server and of the stubs that it will start."""
    process.rlimit(psutil.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def refusal(target: EmbeddedTarget, refused_candidate: Candidate) -> DeploymentError:
    with pytest.raises(DeploymentError) as caught, target.deploy(refused_candidate):
        pass
    assert "\n" not in str(caught.value)
    return caught.value


def assert_serves(target: EmbeddedTarget, load_generator: PerfAnalyzer) -> None:
    with target.deploy(candidate(max_batch_size=4)) as endpoint:
        assert load_generator.measure(endpoint, HARMLESS).throughput_infer_per_sec


@contextlib.contextmanager
def meanwhile(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Do ``act`` once ``condition`` holds, while the body of the context runs."""
    acted = []

    def wait_and_act() -> None:
        if eventually(condition, 60):
            acted.append(act())

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert acted, "the condition never held"


# -- loading ----------------------------------------------------------------------------------------------------


def test_a_failed_load_keeps_the_server_and_fails_the_candidate(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    with target.deploy(candidate()) as endpoint:
        before = server(target, endpoint)
    error = refusal(target, candidate("loading: raise", max_batch_size=2))
    assert "ValueError: no such weights" in str(error)
    assert not isinstance(error, ServerCrashed)
    with InferenceServerClient(endpoint.grpc) as client:
        assert client.is_model_ready("faulty")
        assert model_config.candidate_of(client.get_model_config("faulty").config).max_batch_size == 8
    assert_serves(target, load_generator)
    assert server(target) == before


def test_a_load_that_hangs_is_given_up_and_the_server_replaced(
    target: EmbeddedTarget, load_generator: PerfAnalyzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server(target)
    with monkeypatch.context() as patch:  # only for this load: on a busy machine a normal one may take as long
        patch.setattr(target._loader, "_timeout_seconds", HANG_SECONDS)
        error = refusal(target, candidate("loading: hang"))
    assert str(error) == "loading took longer than 3 s; a run with --budget 1h permits 360 s"
    assert not isinstance(error, ServerCrashed)
    assert is_gone(before)
    assert_serves(target, load_generator)


def test_a_model_that_dies_while_loading_is_a_crash(target: EmbeddedTarget, load_generator: PerfAnalyzer) -> None:
    error = refusal(target, candidate("loading: segfault"))
    assert isinstance(error, ServerCrashed)
    assert str(error).startswith("the model's process died while loading")
    assert_serves(target, load_generator)


def test_a_model_is_served_whatever_the_folder_of_temporary_files_is_called(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b $(touch PWNED)"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with contextlib.closing(target):
        assert server(target).is_running()
    assert list(folder.iterdir()) == []


def test_a_process_of_a_model_that_never_starts_ends_the_load(target: EmbeddedTarget) -> None:
    """Triton would wait for the process until the time limit of the load."""
    stub = target._folder.path / "backends" / "python" / "triton_python_backend_stub"
    stub.write_text("#!/bin/sh\necho pb_stub: no arguments >&2\nexit 3\n")
    error = refusal(target, candidate())
    assert isinstance(error, ServerCrashed)
    assert str(error) == "the model's process died while loading: pb_stub: no arguments"


def test_a_server_killed_while_loading_is_a_crash(target: EmbeddedTarget, load_generator: PerfAnalyzer) -> None:
    error = refusal(target, candidate("loading: kill the server"))
    assert isinstance(error, ServerCrashed)
    assert str(error).startswith("tritonserver died (SIGKILL) while loading")
    assert_serves(target, load_generator)


def test_a_server_that_dies_while_it_replaces_a_model_is_replaced(target: EmbeddedTarget) -> None:
    """The model that is unloaded may be the cause."""
    before = server(target)
    with target.deploy(candidate("loading: kill a server that serves")) as endpoint:
        assert server(target, endpoint) != before
    assert is_gone(before)


def test_a_server_stopped_while_loading_is_noticed_and_replaced(source: ModelSource, tmp_path: Path) -> None:
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with contextlib.closing(target):
        before = server(target)
        loads = target.log.read_bytes().count(b"loading: faulty")

        def loading() -> bool:
            return target.log.read_bytes().count(b"loading: faulty") > loads

        with meanwhile(loading, lambda: suspend(before)):
            error = refusal(target, candidate("loading: hang"))
        assert isinstance(error, ServerCrashed)
        assert str(error).startswith("tritonserver no longer answers while loading")
        assert is_gone(before)
        assert server(target) != before


def test_a_model_that_needs_too_much_memory_to_load_is_refused(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    limit_memory(server(target))
    assert "Unable to allocate 8.00 GiB" in str(refusal(target, candidate("loading: allocate")))
    assert_serves(target, load_generator)


def test_a_server_that_runs_out_of_memory_itself_is_replaced(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    process = server(target)
    now = process.memory_info().vms
    process.rlimit(psutil.RLIMIT_AS, (now, now))
    message = ""
    try:  # the server dies and is replaced, or reports it, depending on which allocation fails first
        with target.deploy(candidate(max_batch_size=2)) as endpoint:
            assert server(target, endpoint) != process
    except DeploymentError as error:
        message = str(error)
    assert message == "" or "Cannot allocate memory" in message
    assert is_gone(process)
    assert_serves(target, load_generator)


@pytest.mark.parametrize("victim", ["supervisor", "tritonserver"])
def test_a_server_stopped_between_two_deployments_is_replaced(
    victim: str, target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    before = server(target)
    stopped = before.parent() if victim == "supervisor" else before
    assert stopped is not None
    for process in {stopped, before}:
        suspend(process)
    assert_serves(target, load_generator)
    assert is_gone(before)
    assert is_gone(stopped)


# -- measuring --------------------------------------------------------------------------------------------------


def measured(
    target: EmbeddedTarget, load_generator: PerfAnalyzer, fault: str, load: LoadPoint = HARMFUL
) -> Measurement:
    with target.deploy(candidate(fault)) as endpoint:
        return load_generator.measure(endpoint, load)


def failure(target: EmbeddedTarget, load_generator: PerfAnalyzer, fault: str) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        measured(target, load_generator, fault)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_server_killed_while_measuring_is_reported(target: EmbeddedTarget, load_generator: PerfAnalyzer) -> None:
    error = failure(target, load_generator, "executing: kill the server")
    assert isinstance(error, ServerCrashed)
    assert str(error).startswith("tritonserver died (SIGKILL) while serving")
    assert_serves(target, load_generator)


def test_a_server_stopped_while_measuring_is_noticed_and_replaced(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    with target.deploy(candidate()) as endpoint:
        before = server(target, endpoint)
    # it must not end before the server is stopped, and a stopped server does not respond later
    slow = replace(load_generator, window_ms=1000, overdue_seconds=1.0)
    with meanwhile(slow.log.exists, lambda: suspend(before)), pytest.raises(ServerCrashed) as caught:
        measured(target, slow, "none", HARMLESS)
    assert str(caught.value).startswith("tritonserver no longer answers while ")
    assert is_gone(before)
    assert_serves(target, load_generator)


def test_a_crash_at_one_batch_size_spares_the_other_sizes(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    fault = "executing: segfault"
    assert measured(target, load_generator, fault, HARMLESS).throughput_infer_per_sec
    error = failure(target, load_generator, fault)
    assert isinstance(error, ServerCrashed)
    assert "not healthy" in str(error)
    assert measured(target, load_generator, fault, HARMLESS).throughput_infer_per_sec


def test_a_model_that_hangs_at_one_batch_size_is_ended_with_its_server(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    before = server(target)
    error = failure(target, replace(load_generator, drain_seconds=3), "executing: hang")
    assert isinstance(error, ServerCrashed)
    assert re.fullmatch(r"perf_analyzer was killed after \d+ s, because .* completed no request for 3 s", str(error))
    assert is_gone(before)
    assert_serves(target, load_generator)


def test_many_requests_in_flight_may_be_answered_long_after_the_last_window(
    target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    """One request after the other takes half a second, so the last ones take longer than a server may hang."""
    patient = replace(load_generator, window_ms=600, drain_seconds=3)
    assert measured(target, patient, "executing: take long", LoadPoint(FAULTY_BATCH, 24)).throughput_infer_per_sec


@pytest.mark.parametrize(("how", "said"), [("raise", "no such"), ("allocate", "Unable to allocate")])
def test_requests_that_fail_cost_the_measurement_and_not_the_server(
    how: str, said: str, target: EmbeddedTarget, load_generator: PerfAnalyzer
) -> None:
    before = server(target)
    limit_memory(before)
    error = failure(target, load_generator, f"executing: {how}")
    assert not isinstance(error, ServerCrashed)
    assert said in str(error)
    assert_serves(target, load_generator)
    assert server(target) == before


# -- ports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["http", "grpc"])
def test_a_port_taken_between_probe_and_bind_is_replaced(
    which: int, make_target: Callable[..., EmbeddedTarget], load_generator: PerfAnalyzer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = [free_port(), free_port()]
        chosen[which] = taken.getsockname()[1]
        target = make_target(lambda: chosen.pop(0) if chosen else free_port())
        assert_serves(target, load_generator)
    assert chosen == []


def test_another_server_at_the_port_is_not_used(
    make_target: Callable[..., EmbeddedTarget], load_generator: PerfAnalyzer
) -> None:
    other = make_target()
    with other.deploy(candidate()) as endpoint:
        chosen = [free_port(), int(endpoint.grpc.rpartition(":")[2])]
        target = make_target(lambda: chosen.pop(0) if chosen else free_port())
        assert_serves(target, load_generator)
        with target.deploy(candidate()) as own_endpoint:
            assert own_endpoint.grpc != endpoint.grpc


def test_the_error_says_that_every_port_is_in_use(make_target: Callable[..., EmbeddedTarget]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first_listener,
        socket.create_server(("127.0.0.1", 0)) as second_listener,
    ):
        ports = itertools.cycle(listener.getsockname()[1] for listener in (first_listener, second_listener))
        target = make_target(lambda: next(ports))
        with pytest.raises(ServerFault, match="already in use"), target.deploy(candidate()):
            pass


# -- a whole run ------------------------------------------------------------------------------------------------

PROFILE = """\
model: {repository: models, name: faulty}
load: {max_concurrency: 4}
space:
  max_batch_size: [2, 8]
  max_queue_delay_microseconds: [off, 0]
  instance_group_count: [1]
"""


def test_a_run_continues_if_one_batch_size_crashes(sandbox: Sandbox) -> None:
    """Batches of three need dynamic batching and a max_batch_size of at least three."""
    skip_without_python_models()
    config = write_faulty(sandbox.working_folder / "models") / "config.pbtxt"
    config.write_text(config.read_text().replace('"none"', '"executing: exit"'))
    (sandbox.working_folder / "crashes.yaml").write_text(PROFILE)
    ended = run_tune(
        sandbox,
        "--sla-p95",
        "500ms",
        "--budget",
        "3m",
        "--max-trials",
        "3",
        "--no-confirmation",
        "--json",
        "crashes.yaml",
    )
    document = json.loads(ended.stdout)
    folder = sandbox.working_folder / document["results_dir"]
    rows = read_rows(folder / "trials.csv")
    failed = [row for row in rows if row["status"] == "failed"]
    assert (document["recommended"] is not None) == assert_search_ended(ended, folder)
    assert len(rows) > len(failed) > 0
    for row in failed:
        assert "not healthy" in row["reason"]
        assert (row["max_batch_size"], row["dynamic_batching"]) == ("8", "true")


def test_a_model_that_the_server_refuses_is_bad_input(sandbox: Sandbox) -> None:
    """The graph cannot be checked without the server; the search does not begin."""
    model = doubler()
    model.graph.node[0].input[1] = "frobnicated"
    config = SLEEPER_CONFIG.replace("python", "onnxruntime")
    write_model(sandbox.working_folder, "m", config, model)
    ended = run_tune(sandbox, "--sla-p95", "20ms", "m")
    assert ended.code == 2
    assert ended.stderr_lines[0].startswith("tune: the server refuses the model as it is configured: ")
    assert "frobnicated" in ended.stderr_lines[0]
    (table,) = (sandbox.working_folder / "results").glob("m/*/trials.csv")
    assert len(table.read_text().splitlines()) == 2


def test_a_configuration_that_the_server_cannot_read_is_refused_with_the_cause_in_its_log(
    sandbox: Sandbox,
) -> None:
    skip_without_python_models()
    config = write_sleeper(sandbox.working_folder, milliseconds=1) / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: 4", "dims: 4 reshape { shape: 2 }", 1))
    ended = run_tune(sandbox, "--sla-p95", "20ms", "sleeper")
    assert ended.code == 2
    assert "has different size for dims and reshape for sleeper; correct its config.pbtxt" in ended.stderr_lines[0]


def test_a_model_that_fails_given_requests_ends_the_run_after_three_configurations(sandbox: Sandbox) -> None:
    """The check of the outputs has fewer requests than the file, so that it does not see the failure."""
    skip_without_python_models()
    folder = write_sleeper(sandbox.working_folder / "models", milliseconds=1)
    program = folder / "1" / "model.py"
    refusal = "if (x > 4).any(): raise ValueError('a value above 4')"
    line = next(line for line in program.read_text().splitlines() if "get_input_tensor" in line)
    indent = line[: len(line) - len(line.lstrip())]
    program.write_text(program.read_text().replace(line, f"{line}\n{indent}{refusal}"))
    (sandbox.working_folder / "d.csv").write_text("x\n" + '"[1, 2, 3, 4]"\n' * 64 + '"[5, 6, 7, 8]"\n' * 64)
    ended = run_tune(sandbox, "--sla-p95", "20ms", "--input-data", "d.csv", "--model-repository", "models", "sleeper")
    assert ended.code == 2
    assert "ValueError: a value above 4" in ended.stderr_lines[0]
    assert "no measurement succeeded in the first 3 configurations" in ended.stderr_lines[0]


def test_the_option_for_the_models_of_a_bls_model_is_named(sandbox: Sandbox) -> None:
    skip_without_python_models()
    write_bls(sandbox.working_folder / "models", milliseconds=1)
    ended = run_tune(sandbox, "--sla-p95", "20ms", "--model-repository", "models", "caller")
    assert ended.code == 2
    assert "Model 'first' is not ready" in ended.stderr_lines[0]
    assert "; name the models that it calls with --bls-composing-models; " in ended.stderr_lines[0]
    assert ended.stderr_lines[0].endswith(" or give other requests with --input-data, --input-range or --string-data")


def test_a_model_that_loads_but_fails_every_request_is_bad_input(sandbox: Sandbox) -> None:
    skip_without_python_models()
    folder = write_sleeper(sandbox.working_folder / "models", milliseconds=1)
    program = folder / "1" / "model.py"
    program.write_text(program.read_text().replace("time.sleep(0.001)", "raise ValueError('frobnicated')"))
    ended = run_tune(sandbox, "--sla-p95", "20ms", "--model-repository", "models", "sleeper")
    assert ended.code == 2
    refusal = "tune: the server refuses the model as it is configured: the model loads, but every request fails "
    assert ended.stderr_lines[0].startswith(refusal)
    assert "frobnicated" in ended.stderr_lines[0]
    assert "--input-data" in ended.stderr_lines[0]
