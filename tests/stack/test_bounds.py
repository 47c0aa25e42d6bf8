"""Failed requests, high percentiles and goodput on the real server, whose queue is limited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objectives import priority_stats
from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.queue_policy import DEFAULT_PRIORITY_LEVEL, PRIORITY_LEVELS, PRIORITY_POLICY
from optimizer.core.candidate import Candidate
from optimizer.core.errors import MeasurementError
from optimizer.core.request_sizes import parse_priorities
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.output_check import BaselineOutputCheck
from optimizer.model.repository import read_source
from tests.command_fixtures import Run, Sandbox, run_tune
from tests.generated_requests import write_requests
from tests.repositories import stored, write_ensemble, write_sleeper
from tests.stack_fixtures import SLEEP_MS

POLICY = "dynamic_batching.default_queue_policy."
SHORT_QUEUE = Candidate(1, dynamic_batching=True, fields=((f"{POLICY}max_queue_size", 2),))
LEVELS = ((DEFAULT_PRIORITY_LEVEL, 2), (PRIORITY_LEVELS, 2))
SHORT_QUEUES = ((f"{PRIORITY_POLICY}.1.max_queue_size", 4), (f"{PRIORITY_POLICY}.2.max_queue_size", 4))
TWO_LEVELS = Candidate(1, dynamic_batching=True, fields=(*LEVELS, *SHORT_QUEUES))
EXPIRING_LEVEL = Candidate(
    1, dynamic_batching=True, fields=(*LEVELS, (f"{PRIORITY_POLICY}.2.default_timeout_microseconds", 30_000))
)
NO_LIMIT = Candidate(1, dynamic_batching=True)
EXPIRING, EXPIRING_LATER = (
    Candidate(
        1,
        dynamic_batching=True,
        fields=((f"{POLICY}allow_timeout_override", False), (f"{POLICY}default_timeout_microseconds", timeout_us)),
    )
    for timeout_us in (15_000, 100_000)
)
SLA = Sla.from_bounds({"p95": 35.0})
WIDE_SLA = Sla.from_bounds({"p95": 5000.0})  # a client that is late on a busy machine does not miss it


@pytest.fixture
def ensemble(tmp_path: Path) -> Iterator[EmbeddedTarget]:
    """The target of an ensemble, whose slow step has the queue of a candidate."""
    write_ensemble(tmp_path / "models", SLEEP_MS)
    source = read_source(stored(tmp_path / "models"), "chain", batcher="second")
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))) as target:
        yield target


def test_requests_that_a_full_queue_rejects_are_counted_and_not_served(
    sleeper: EmbeddedTarget, random_requests: Path, tmp_path: Path
) -> None:
    generator = OpenLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=WIDE_SLA, counts_failures=True
    )
    with sleeper.deploy(SHORT_QUEUE) as endpoint:
        windows = generator.measure_windows(endpoint, LoadPoint(1, request_rate=200.0), 1.0, 2)
        with pytest.raises(MeasurementError, match="Exceeds maximum queue size"):
            replace(generator, counts_failures=False).measure_windows(
                endpoint, LoadPoint(1, request_rate=200.0), 1.0, 2
            )
    with sleeper.deploy(NO_LIMIT) as endpoint:
        calm = generator.measure_windows(endpoint, LoadPoint(1, request_rate=20.0), 1.0, 1)
    assert len(windows) == 2, "rejections keep the queue short, so the server is not overloaded"
    for window in windows:
        assert window.rejected_requests
        # the batcher may sleep while the queue is full for as long as the client waits for the last answers
        assert (window.timed_out_requests or 0) <= 3
        assert window.failed_requests == 0
        assert window.throughput_infer_per_sec is not None
        assert window.throughput_infer_per_sec < 110, "the server can serve 100 a second"
        assert window.requests is not None
        assert window.requests + (window.errors or 0) == pytest.approx(200, abs=70), "all are counted once"
        assert (METRICS["error-rate"].value(window) or 0.0) > 20
        assert window.goodput_infer_per_sec == pytest.approx(window.throughput_infer_per_sec)
    assert calm[0].errors == 0


def test_requests_that_expire_in_the_queue_have_timed_out(
    sleeper: EmbeddedTarget, random_requests: Path, tmp_path: Path
) -> None:
    generator = ClosedLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=SLA, counts_failures=True
    )
    with sleeper.deploy(EXPIRING) as endpoint:
        (result,) = generator.measure_windows(endpoint, LoadPoint(1, concurrency=4), 1.0, 1)
    assert result.timed_out_requests
    assert (result.rejected_requests, result.failed_requests) == (0, 0)
    assert result.requests
    assert result.throughput_infer_per_sec is not None
    assert result.throughput_infer_per_sec < 110


@pytest.mark.alone  # next to other tests, a single request may expire
def test_outputs_are_checked_with_fewer_requests_at_once_if_some_expire(
    sleeper: EmbeddedTarget, random_requests: Path, tmp_path: Path
) -> None:
    check = BaselineOutputCheck(
        tmp_path / "reference.npz", input_data=random_requests, shapes=(), request_batch_size=1
    )
    with sleeper.deploy(NO_LIMIT) as endpoint:
        check.record_reference(endpoint)
    with sleeper.deploy(EXPIRING_LATER) as endpoint:
        assert check.check(endpoint) == 0


def test_a_request_that_the_server_refuses_is_the_error_if_none_succeeds(
    sleeper: EmbeddedTarget, random_requests: Path, tmp_path: Path
) -> None:
    generator = ClosedLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=SLA, counts_failures=True
    )
    with sleeper.deploy(SHORT_QUEUE) as endpoint, pytest.raises(MeasurementError, match="batch-size must be <= 1"):
        generator.measure_windows(endpoint, LoadPoint(2, concurrency=2), 0.5, 1)


def test_rejections_are_counted_for_each_priority(
    sleeper: EmbeddedTarget, random_requests: Path, tmp_path: Path
) -> None:
    """Each level has a short queue, and the batcher may sleep for half a second while it is full."""
    generator = OpenLoopGenerator(
        log=tmp_path / "client.log",
        input_data=random_requests,
        sla=WIDE_SLA,
        counts_failures=True,
        priorities=parse_priorities("1*20|2*80"),
    )
    with sleeper.deploy(TWO_LEVELS) as endpoint:
        windows = generator.measure_windows(endpoint, LoadPoint(1, request_rate=150.0), 1.0, 2)
    assert windows
    for window in windows:
        first, second = priority_stats.from_text(window.by_priority)
        assert (first.priority, second.priority) == (1, 2)
        assert second.rejected
        assert first.rejected + second.rejected == window.rejected_requests
        assert first.served + second.served == window.requests
        assert first.served + first.errors == pytest.approx(30, abs=20)
        assert second.served + second.errors == pytest.approx(120, abs=50)


@pytest.mark.parametrize("target", ["sleeper", "ensemble"])
def test_requests_of_a_low_priority_expire_first(target: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Only requests of priority 2 expire, which keeps the queue short. An ensemble passes the priority on."""
    served: EmbeddedTarget = request.getfixturevalue(target)
    generator = ClosedLoopGenerator(
        log=tmp_path / "client.log",
        input_data=write_requests(served.source.config, tmp_path),
        sla=SLA,
        counts_failures=True,
        priorities=parse_priorities("1*20|2*80"),
    )
    with served.deploy(EXPIRING_LEVEL) as endpoint:
        (window,) = generator.measure_windows(endpoint, LoadPoint(1, concurrency=8), 1.0, 1)
    first, second = priority_stats.from_text(window.by_priority)
    assert first.served
    assert first.errors == 0
    assert second.timed_out
    assert second.timed_out == window.timed_out_requests


def test_a_run_with_priorities_shows_each_of_them(sandbox: Sandbox) -> None:
    write_sleeper(sandbox.working_folder / "models", 2.0)
    (sandbox.working_folder / "p.yaml").write_text(
        "model: {repository: models, name: sleeper}\n"
        "load: {max_concurrency: 4}\n"
        "sla: {p95: 500ms}\n"
        "request: {priorities: {1: 0.5, 2: 0.5}}\n"
        "space:\n"
        "  max_batch_size: [4]\n"
        "  max_queue_delay_microseconds: [0]\n"
        "  instance_group_count: [1]\n"
        "  priority_levels: [2]\n"
        "  default_priority_level: [2]\n"
        "  priority_queue_policy: {2: {max_queue_size: [64]}}\n"
    )
    options = ["--max-error-rate", "5%", "--search", "grid", "--max-trials", "3", "--no-confirmation"]
    limits = ["--measurement-interval", "200ms", "--budget", "60s"]
    run = Run(sandbox, run_tune(sandbox, *options, *limits, "--json", "p.yaml"))
    run.assert_found()
    assert [statistic["priority"] for statistic in run.document["recommended"]["priorities"]] == [1, 2]
    assert all(row["by_priority"] for row in run.rows())
    assert any(row[PRIORITY_LEVELS] == "2" for row in run.rows())


def test_a_run_with_a_high_percentile_an_error_rate_and_goodput(sandbox: Sandbox) -> None:
    """The queue is limited to two requests, so that a high load loses requests."""
    write_sleeper(sandbox.working_folder / "models", 2.0)
    (sandbox.working_folder / "p.yaml").write_text(
        "model: {repository: models, name: sleeper}\n"
        "load: {max_concurrency: 8}\n"
        "sla: {p99.9: 500ms}\n"
        "space:\n"
        "  max_batch_size: [4]\n"
        "  max_queue_delay_microseconds: [0]\n"
        "  instance_group_count: [1]\n"
        f"  config: {{{POLICY}max_queue_size: [2]}}\n"
    )
    options = ["--max-error-rate", "1%", "--objective", "goodput", "--max-trials", "2", "--budget", "25s", "--json"]
    run = Run(sandbox, run_tune(sandbox, *options, "--measurement-interval", "200ms", "p.yaml"))
    run.assert_found()
    assert run.document["sla"] == ["p99.9 <= 500 ms", "error-rate <= 1 %"]
    searched = [row for row in run.rows() if not row["load_generator"]]
    assert all(row["goodput_infer_per_sec"] and row["rejected_requests"] for row in searched)
    checked = [row for row in run.rows() if row["load_generator"]]
    assert all(not row["goodput_infer_per_sec"] for row in checked), "perf_analyzer does not count them"
