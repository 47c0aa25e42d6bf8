"""Test load shapes and traces on the real server: a spike that it recovers from, sizes and priorities of requests.

The assertions hold on a machine of any speed: the model sleeps, which is the shortest time of an execution.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.measure.load_client.arrivals import RecordedArrivals, parse_arrivals
from optimizer.measure.load_client.client import WARM_UPS
from optimizer.measure.load_client.client_files import NEVER
from optimizer.measure.load_client.generators import OpenLoopGenerator
from tests.load_clients import KeptRecords
from tests.repositories import write_sleeper
from tests.stack_fixtures import SLEEP_MS, embedded_model

PERIOD = 2.0
SPIKE = f"spike:30x:10%:{PERIOD:g}s"  # of 8 requests a second and 231 in the burst, if the mean is 30
RATE = LoadPoint(1, request_rate=30.0)


@pytest.fixture
def open_loop(sleeper: EmbeddedTarget, random_requests: Path, tmp_path: Path) -> OpenLoopGenerator:
    return OpenLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=Sla.from_bounds({"p95": 1000.0})
    )


def test_the_latency_of_a_spike_is_measured_in_each_window(
    sleeper: EmbeddedTarget, open_loop: OpenLoopGenerator
) -> None:
    """The burst brings 46 requests in the time of 20, so the last ones wait for two dozen others."""
    with sleeper.deploy(Candidate(8)) as endpoint:
        windows = replace(open_loop, arrivals=parse_arrivals(SPIKE)).measure_windows(endpoint, RATE, 0.5, 3)
    assert len(windows) == 3, "the server recovers from each burst, so it is not overloaded"
    requests = sum(window.requests or 0 for window in windows)
    assert requests == pytest.approx(3 * PERIOD * RATE.request_rate, rel=0.2), "the mean rate"
    for window in windows:  # each is a whole period, although 0.5 s were planned
        assert window.requests == pytest.approx(PERIOD * RATE.request_rate, rel=0.4)
        assert window.latency_p95_ms is not None
        assert window.latency_p95_ms > 5 * SLEEP_MS


def test_a_mean_rate_above_the_capacity_is_an_overload(sleeper: EmbeddedTarget, open_loop: OpenLoopGenerator) -> None:
    arrivals, sla, client = parse_arrivals("diurnal:1.5x:1s"), Sla.from_bounds({"p95": 50.0}), KeptRecords()
    shaped = replace(open_loop, arrivals=arrivals, sla=sla, run_client=client)
    with sleeper.deploy(Candidate(8)) as endpoint:
        result = shaped.measure(endpoint, LoadPoint(1, request_rate=300.0), 30.0)
    assert result.overloaded
    assert result.reason.startswith("overloaded: ")
    assert np.any(client.records[-1].sent_ns == NEVER), "it ends early"


LARGE, SMALL, OTHER = 2, 1, 3  # samples of the requests of a burst, and of those between two bursts
BURST = 10  # requests of each size
PERIODS = 2
PROGRAM = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        with open("LOG", "a") as log:
            log.writelines(f"{len(x)}\\n" for x in inputs)
        time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in inputs]
"""


def overtaking_share(executed: list[int]) -> float:
    """Return the share of the small requests that were executed before a large one that was sent earlier."""
    larges = smalls = overtaking = 0
    for size in executed:
        larges += size == LARGE
        if size == SMALL:
            smalls += 1
            overtaking += larges < BURST * math.ceil(smalls / BURST)
    return overtaking / smalls


@pytest.mark.parametrize("has_priorities", [True, False])
def test_a_trace_sets_sizes_and_priorities(
    tmp_path: Path, open_loop: OpenLoopGenerator, has_priorities: bool
) -> None:
    """A burst begins with the large requests, and the small ones overtake them if they have the first priority.

    With priorities, Triton 2.51 may wait for the next request before it executes those in its queue. So others
    follow the burst.
    """
    sizes = [LARGE] * BURST + [SMALL] * BURST
    timed = [(0.001 * i, size) for i, size in enumerate(sizes)] + [(0.04 * i, OTHER) for i in range(1, 50)]
    samples = [size for _, size in timed]
    header, rows = "time_s,batch_size", [f"{at},{size}" for at, size in timed]
    model = write_sleeper(tmp_path / "models", 0)
    (model / "1" / "model.py").write_text(PROGRAM.replace("LOG", str(tmp_path / "executed")))
    if has_priorities:
        header, rows = f"{header},priority", [f"{row},{1 if row.endswith(f',{SMALL}') else 2}" for row in rows]
        with (model / "config.pbtxt").open("a") as config:
            config.write("dynamic_batching { priority_levels: 2 default_priority_level: 2 }\n")
    (tmp_path / "trace.csv").write_text("\n".join([header, *rows]))
    arrivals = parse_arrivals(str(tmp_path / "trace.csv"))
    assert isinstance(arrivals, RecordedArrivals)
    assert arrivals.classes is not None
    recorded = replace(open_loop, arrivals=replace(arrivals, start=0), request_mix=arrivals.classes.sizes)
    load = LoadPoint(sum(samples) / len(samples), request_rate=len(samples) / PERIOD)
    with (
        embedded_model(tmp_path, "sleeper") as target,
        target.deploy(Candidate(4, dynamic_batching=True)) as endpoint,
    ):
        result = recorded.measure(endpoint, load, seconds=PERIODS * PERIOD - 0.1)
    executed = [int(line) for line in (tmp_path / "executed").read_text().split()][WARM_UPS:]
    share = overtaking_share(executed)
    if has_priorities:
        assert share > 0.5
        return
    assert share < 0.5
    assert sorted(executed) == sorted((PERIODS + 1) * samples), "the lead-in is a period too"
    assert result.requests == pytest.approx(PERIODS * len(samples), abs=1)
    assert result.throughput_infer_per_sec == pytest.approx(sum(samples) / PERIOD, rel=0.03)
