"""Test the closed loop of the load client on the real server: exact counts, pauses, inputs, a dead server.

Also tests that perf_analyzer, which measures next to it, agrees with it.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from objectives.latency_sketch import requests_over
from objectives.metrics import Measurement
from objectives.pooled_windows import pooled_quantile_ms
from objectives.sla import Constraint, Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.confirmation.verdicts import load_agreement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError, ServerCrashed
from optimizer.core.trial import FreshServer, LoadPoint, Trial
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.load_client.client import WARM_UPS
from optimizer.measure.load_client.client_files import NEVER
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.measure.measurer import Measurer
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.trials_table import TrialsTable
from tests.command_fixtures import eventually
from tests.load_clients import KeptRecords
from tests.stack.test_open_loop import counted, once_loaded, tell_server
from tests.stack_fixtures import ANSWER_SECONDS, embedded_model

MLP = Candidate(8, dynamic_batching=True)
ALONE = Candidate(8)
LOAD = LoadPoint(2, concurrency=4)
BOUNDS_MS = (5.0, 15.0, 35.0)
COMPARED_SERVERS = 3


@pytest.fixture
def generator(random_requests: Path, tmp_path: Path) -> ClosedLoopGenerator:
    sla = Sla(tuple(Constraint("latency-p95", bound_ms) for bound_ms in BOUNDS_MS))
    return ClosedLoopGenerator(log=tmp_path / "client.log", input_data=random_requests, sla=sla)


def counted_since(endpoint: Endpoint, before: tuple[int, int], least: int) -> tuple[int, int]:
    """Return the requests and samples since ``before``, once ``least`` requests of LOAD count.

    The server counts a request after it has sent the answer.
    """

    def difference() -> tuple[int, int]:
        requests, samples = counted(endpoint)
        return requests - before[0], samples - before[1]

    eventually(lambda: difference() >= (least, LOAD.request_batch_size * least), ANSWER_SECONDS)
    return difference()


def test_the_server_answered_exactly_the_requests_of_the_record(
    generator: ClosedLoopGenerator, embedded: EmbeddedTarget
) -> None:
    client = KeptRecords()
    with embedded.deploy(MLP) as endpoint:
        before = counted(endpoint)
        windows = replace(generator, run_client=client).measure_windows(endpoint, LOAD, 0.2, 5)
        (record,) = client.records
        requests, samples = counted_since(endpoint, before, len(record.sent_ns) + WARM_UPS)
    assert np.all(record.answered_ns != NEVER), "the requests in flight at the end are drained"
    assert requests == len(record.sent_ns) + WARM_UPS
    assert samples == LOAD.request_batch_size * requests
    in_windows = sum(window.requests or 0 for window in windows)
    assert 0 < in_windows < requests
    executions = [tuple(map(int, entry.split(":"))) for entry in windows[0].batch_stats.split()]
    missing = samples - sum(size * count for size, count, _ in executions)
    assert 0 <= missing <= MLP.max_batch_size, "a batch is counted after its answers are sent, perhaps too late"


def test_a_pause_of_the_server_is_one_slow_request(generator: ClosedLoopGenerator, sleeper: EmbeddedTarget) -> None:
    pause_seconds = 0.3

    with sleeper.deploy(ALONE) as endpoint:

        def pause() -> None:
            tell_server(endpoint, signal.SIGSTOP)
            time.sleep(pause_seconds)
            tell_server(endpoint, signal.SIGCONT)

        with once_loaded(endpoint, 40, pause):
            (result,) = generator.measure_windows(endpoint, LoadPoint(1, concurrency=1), 4.0, 1)
    slow = requests_over(result.requests_over_ms, 35.0)
    assert slow is not None
    assert slow >= 1
    assert pooled_quantile_ms([result], 1.0) >= 1000 * pause_seconds


def test_a_dead_server_is_reported(generator: ClosedLoopGenerator, embedded: EmbeddedTarget) -> None:
    with embedded.deploy(MLP) as endpoint:
        with (
            once_loaded(endpoint, 100, lambda: tell_server(endpoint, signal.SIGKILL)),
            pytest.raises(ServerCrashed, match="no longer answers"),
        ):
            generator.measure_windows(endpoint, LOAD, 10.0, 3)
        with pytest.raises(ServerCrashed, match="Connection refused; the server no longer answers"):
            generator.measure_windows(endpoint, LOAD, 0.2, 1)


# -- inputs -----------------------------------------------------------------------------------------------------

READER_CONFIG = """\
backend: "python"
max_batch_size: 8
input [{ name: "text" data_type: TYPE_STRING dims: 1 }, { name: "numbers" data_type: TYPE_INT32 dims: 2 }]
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
READER_PROGRAM = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts, numbers = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("text", "numbers"))
        for (text,), pair in zip(texts, numbers):
            if text.decode() != f"sum: {pair.sum()}":
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{text.decode()} of {pair.tolist()}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((len(texts), 1), np.float32))])
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    """Serve a model that refuses a request unless its text is the sum of its numbers."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "models" / "reader" / "1").mkdir(parents=True)
    (folder / "models" / "reader" / "config.pbtxt").write_text(READER_CONFIG)
    (folder / "models" / "reader" / "1" / "model.py").write_text(READER_PROGRAM)
    with embedded_model(folder, "reader") as target:
        yield target


def write_sums(path: Path, *sums: int) -> Path:
    """Write a data file in which the text of entry ``n`` names ``sums[n]``; the numbers add up to ``n``."""
    entries = [{"text": [f"sum: {total}"], "numbers": [n - 3, 3]} for n, total in enumerate(sums)]
    path.write_text(json.dumps({"data": entries}))
    return path


def test_texts_and_several_inputs_are_sent_as_perf_analyzer_sends_them(
    generator: ClosedLoopGenerator, perf_analyzer: PerfAnalyzer, reader: EmbeddedTarget, tmp_path: Path
) -> None:
    right = write_sums(tmp_path / "right.json", *range(12))
    wrong = write_sums(tmp_path / "wrong.json", 0, 1, 2, 4)
    with reader.deploy(MLP) as endpoint:
        for each in (generator, replace(perf_analyzer, window_ms=100)):
            before = counted(endpoint)
            result = replace(each, input_data=right).measure(endpoint, LOAD, seconds=0.4)
            assert result.requests

            def counts(before: tuple[int, int] = before) -> bool:
                """Return whether requests and samples agree; the server counts both after it has sent the answer."""
                requests, samples = (after - then for after, then in zip(counted(endpoint), before, strict=True))
                return requests > 12 and samples == LOAD.request_batch_size * requests

            assert eventually(counts, ANSWER_SECONDS), "all entries were sent"
        with pytest.raises(MeasurementError, match=r"sum: 4 of \[0, 3\]"):
            replace(generator, input_data=wrong).measure(endpoint, LOAD, seconds=0.4)


# -- perf_analyzer next to it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoreLoad:
    """A load generator that sends six times as many requests at the same time as it should."""

    generator: PerfAnalyzer

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        return self.generator.measure(endpoint, replace(load, concurrency=6 * load.concurrency), seconds)

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds) for _ in range(count)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None: ...


def test_perf_analyzer_agrees_unless_it_sends_another_load(
    generator: ClosedLoopGenerator, perf_analyzer: PerfAnalyzer, sleeper: EmbeddedTarget, tmp_path: Path
) -> None:
    """One request at a time takes 10 ms, so 4 in flight take 40 ms each, and 24 take 240 ms."""
    load, error, seconds, count = LoadPoint(1, concurrency=4), 0.01, 0.3, 4
    sla, space = Sla.from_bounds({"p95": 150.0}), SearchSpace(max_batch_size=(8,))
    problem = Problem("sleeper", space, 1, 64, sla=sla, client_shares_cpus=True)
    perf_analyzer = replace(perf_analyzer, input_data=generator.input_data)
    trials = {"same": Trial(0, ALONE), "more": Trial(0, ALONE)}
    measurers = {
        name: Measurer(
            generator,
            ProcessTelemetry(),
            TrialsTable(tmp_path / f"{name}.csv", "sleeper", {}),
            QuietObserver(),
            cross_checking=other,
            disturbance_limit=1.0,
        )
        for name, other in (("same", perf_analyzer), ("more", MoreLoad(perf_analyzer)))
    }
    for server in range(1, COMPARED_SERVERS + 1):
        with sleeper.deploy(ALONE, fresh=True) as endpoint:
            for name, measurer in measurers.items():
                measurer.warm_up(endpoint, load, is_fresh=True)
                fresh = FreshServer(server, error)
                trial = measurer.confirm(trials[name], endpoint, load, fresh, seconds, count)
                trials[name] = measurer.cross_check(trial, endpoint, load, fresh, seconds * 3)
    for name, measurer in measurers.items():
        (stored,) = measurer.table.read()
        assert stored.cross_checks == trials[name].cross_checks
        trials[name] = stored
    agreed, differed = (load_agreement(trials[name], load, problem) for name in ("same", "more"))
    assert agreed is not None
    assert (agreed.pairs, agreed.contradiction) == (COMPARED_SERVERS, "")
    assert all(0.5 < ratio.ratio < 2 for ratio in agreed.ratios), "six times the load is far outside"
    assert differed is not None
    assert re.fullmatch(
        r"perf_analyzer measured \d+ % more p95 latency than tune's own client: .* ms \(allowed: 150\)",
        differed.contradiction,
    )
