"""Why a run ended as it did: what bounds it, what binds, what would help, why the runner-up lost."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.batcher.simulator import ClosedLoop, Overheads, ServiceTimes, lognormal_jitter, simulate
from optimizer.commands.explain import main
from optimizer.errors import BadInputError
from optimizer.explaining.binding import binding
from optimizer.explaining.bottleneck import Kind, bottleneck, seen
from optimizer.explaining.document import document
from optimizer.explaining.explanation import Explanation, explain
from optimizer.explaining.forecast import Forecast, Forecaster
from optimizer.explaining.remedies import gain
from optimizer.explaining.told import print_explanation
from optimizer.problem import Problem
from optimizer.space import Space
from optimizer.store.finished import read_run
from optimizer.trial import Candidate, LoadPoint, Point, Trial, latest_points
from tests import played_server

SAMPLE = Path("results/dlrm/sample")
BATCHED = Candidate(8, dynamic_batching=True)
HOLDING = replace(BATCHED, max_queue_delay_us=5000)
BOUND = Constraint("latency-p95", 20.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


def with_bound(folder: Path, bound: str) -> Path:
    info = json.loads((folder / "run.json").read_text())
    info["problem"]["constraints"] = [bound]
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def text_of(told: Explanation, width: int = 80) -> str:
    text = io.StringIO()
    print_explanation(Console(file=text, width=width), told)
    return text.getvalue()


def measured(busy: float, instances: int = 1, **stages_ms: float) -> tuple[Point, list[Trial]]:
    """800 infer/s in batches of 8: 100 executions a second, that take ``busy`` of the instances' time."""
    counted = f"8:100:{round(busy * instances * 1e9)}"
    m = Measurement(800.0, mean_batch_size=8.0, batch_stats=counted, requests=800, stable=True, **stages_ms)  # type: ignore[arg-type]
    point = Point(0, replace(BATCHED, instance_count=instances), LoadPoint(1, 16), m)
    return point, [Trial(0, point.candidate, ((point.load, m),))]


@pytest.mark.parametrize(
    ("kind", "busy", "more", "stages_ms"),
    [
        ("compute", 0.95, 0.01, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("compute", 0.95, None, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("compute", 0.4, 0.3, {"queue_ms": 1.0, "compute_infer_ms": 5.0}),
        ("instances", 0.95, 0.3, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("copying", 0.95, 0.3, {"queue_ms": 9.0, "compute_infer_ms": 2.0, "compute_input_ms": 3.0}),
        ("copying", 0.5, 0.0, {"compute_infer_ms": 2.0, "compute_input_ms": 2.0, "compute_output_ms": 1.0}),
        ("queue", 0.5, 0.0, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("client", 0.5, 0.0, {"network_ms": 6.0, "client_send_ms": 3.0, "queue_ms": 8.0, "compute_infer_ms": 1.0}),
    ],
)
def test_what_bounds_is_decided_by_where_the_time_goes(
    kind: Kind, busy: float, more: float | None, stages_ms: dict[str, float]
) -> None:
    one = seen(*measured(busy, 2, **stages_ms))
    assert one.busy_share == pytest.approx(busy)
    found = bottleneck(one, more)
    assert found.kind == kind
    assert f"The 2 instances computed {busy:.0%} of the time" in " ".join(found.reasons)


def test_without_stage_times_nothing_is_made_up() -> None:
    point = Point(0, BATCHED, LoadPoint(1, 4), Measurement(100.0, latency_p95_ms=5.0, stable=True))
    one = seen(point, [Trial(0, BATCHED, ((point.load, point.measurement),))])
    assert one.busy_share is None
    assert bottleneck(one, None).kind == "unknown"


def test_a_batcher_that_holds_requests_back_is_told_from_bursts() -> None:
    point, trials = measured(0.5, queue_ms=9.0, compute_infer_ms=2.0)
    assert "bursts" in " ".join(bottleneck(seen(point, trials), None).reasons)
    held = replace(point, candidate=HOLDING)
    assert "holds them back" in " ".join(bottleneck(seen(held, trials), None).reasons)


def test_other_processes_are_named() -> None:
    point, trials = measured(0.9, compute_infer_ms=5.0)
    disturbed = replace(point, measurement=replace(point.measurement, other_cpu_share=0.3))
    assert "took 30 % of the CPUs" in " ".join(bottleneck(seen(disturbed, trials), None).reasons)


def test_the_bound_that_what_served_more_misses_binds() -> None:
    def point(throughput: float, p95_ms: float, memory: float) -> Point:
        m = Measurement(throughput, latency_p95_ms=p95_ms, server_memory_bytes=memory, stable=True)
        return Point(0, BATCHED, LoadPoint(1, 4), m)

    bounds = (BOUND, Constraint("memory", 1e9))
    ours, late, large = point(100, 15.0, 5e8), point(110, 25.0, 5e8), point(120, 15.0, 2e9)
    both = point(200, 30.0, 3e9)
    found = binding(ours, [ours, late, large, both], bounds, met=True)
    assert (found.constraint, found.beyond) == (bounds[1], large)
    assert found.gain == pytest.approx(0.2)
    assert found.used == {"p95 <= 20 ms": 0.75, "memory <= 1000000000 bytes": 0.5}
    assert binding(ours, [ours], bounds, met=True).constraint is None
    assert binding(both, [], bounds, met=False).constraint == bounds[1]


# -- forecasts, against a server whose service times they do not see ---------------------------------------------

SPACE = Space((1, 8, 32), ("off", 0, 500, 2000), ("none", "max/2"), (1, 2, 3))


def played(candidate: Candidate, load: int, *, faster: float = 1.0) -> Measurement:
    """3 ms + 0.3 ms a sample; instances take half of each other's time."""
    times = ServiceTimes.linear(faster * 3e-3, faster * 3e-4, max(candidate.max_batch_size, 1), 8, contention=0.5)
    overheads = Overheads(2e-4, 2e-4, 0.0, 5e-5)
    found = simulate(candidate, ClosedLoop(load), times, overheads, jitter=lognormal_jitter(0.1))
    return played_server.told(found, candidate)


def best(candidate: Candidate, bound_ms: float, *, faster: float = 1.0) -> float:
    found = [played(candidate, load, faster=faster) for load in range(1, 65)]
    return max(m.throughput_infer_per_sec or 0 for m in found if (m.latency_p95_ms or 0) <= bound_ms)


def test_gains_are_those_of_the_server_that_was_measured() -> None:
    own = Candidate(32, True, instance_count=2)
    problem = Problem("m", SPACE, 1, 64, constraints=(BOUND,))
    tried = [Candidate(1), Candidate(32, True), own, Candidate(8, True, instance_count=3)]
    loads = (2, 8, 16, 24)
    trials = [
        Trial(i, one, tuple((LoadPoint(1, load), played(one, load)) for load in loads)) for i, one in enumerate(tried)
    ]
    subject = Point(2, own, LoadPoint(1, 16), played(own, 16))
    forecaster = Forecaster(latest_points(trials), subject, problem)
    usual, truth = forecaster.best([own], 20.0), best(own, 20.0)
    assert usual is not None
    three = replace(own, instance_count=3)
    asked: list[tuple[str, Forecast | None, float]] = [
        ("three instances", forecaster.best([three], 20.0), best(three, 20.0)),
        ("twice as fast", forecaster.best([own], 20.0, infer_share=0.5), best(own, 20.0, faster=0.5)),
        ("half the bound", forecaster.best([own], 10.0), best(own, 10.0)),
        ("twice the bound", forecaster.best([own], 40.0), best(own, 40.0)),
    ]
    for what, forecast, wanted in asked:
        assert 1 + (gain(forecast, usual) or 0.0) == pytest.approx(wanted / truth, rel=0.15), what
    assert forecaster.best([own], 1.0) is None


# -- runs ---------------------------------------------------------------------------------------------------------


def test_the_sample_run_is_explained() -> None:
    told = explain(read_run(SAMPLE))
    assert told.bottleneck.kind == "compute"
    assert told.subject.busy_share == pytest.approx(0.93, abs=0.01)
    assert str(told.binding.constraint) == "p95 <= 20 ms"
    assert told.simulation is not None
    names = {one.name: one for one in told.simulation.remedies}
    assert {"more instances", "FP16", "larger batches", "nearer client", "no copying"} == names.keys()
    half, more, twice = told.simulation.other_slas
    assert (half.bound_ms, more.bound_ms, twice.bound_ms) == (10.0, 30.0, 40.0)
    assert (half.gain or 0) < 0 < (more.gain or 0) <= (twice.gain or 0) + 0.02
    assert told.runner_up is not None
    assert told.runner_up.point.trial == 5
    assert told.runner_up.interval.low < told.runner_up.less < told.runner_up.interval.high
    assert "too close" in told.runner_up.missed
    shown = text_of(told, 200)
    assert max(map(len, shown.splitlines())) <= 80
    assert "assumed, not measured: inference takes 0.5" in " ".join(shown.split())
    assert "What bounds the throughput: computing" in shown


def test_the_assumed_factor_is_the_callers(capsys: pytest.CaptureFixture[str]) -> None:
    def gained(factor: str) -> float:
        assert main([str(SAMPLE), "--json", "--fp16-factor", factor]) == 0
        told = json.loads(capsys.readouterr().out)
        return float(next(one["gain"] for one in told["simulated"]["remedies"] if one["name"] == "FP16"))

    assert gained("0.4") > gained("0.8") > gained("1") == pytest.approx(0.0, abs=0.001)
    with pytest.raises(BadInputError, match=r"--fp16-factor 2: write a share"):
        main([str(SAMPLE), "--fp16-factor", "2"])


def test_a_run_without_a_recommendation_says_what_holds_it_back(folder: Path) -> None:
    told = explain(read_run(with_bound(folder, "p95 <= 2 ms")))
    shown = " ".join(text_of(told).split())
    assert not told.recommended
    assert told.runner_up is None
    assert "p95 <= 2 ms is missed" in shown
    assert "no load meets the bound" in shown
    assert "The lowest p95 that is expected" in shown
    json.dumps(document(told), allow_nan=False)


def test_of_a_run_without_a_bound(folder: Path) -> None:
    info = json.loads((folder / "run.json").read_text())
    info["problem"]["constraints"] = []
    (folder / "run.json").write_text(json.dumps(info))
    told = explain(read_run(folder))
    assert "None: the run had no bound." in text_of(told)
    json.dumps(document(told), allow_nan=False)


def test_of_a_run_that_was_killed_what_was_measured_is_told(folder: Path) -> None:
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "status": "running"}))
    lines = (folder / "trials.csv").read_text().splitlines(keepends=True)
    (folder / "trials.csv").write_text("".join(lines[:4]) + lines[4][:30])
    told = explain(read_run(folder))
    assert "was killed" in text_of(told)
    assert told.simulation is not None
    assert told.simulation.points == 3


def test_where_nothing_was_measured_one_line_says_so(folder: Path) -> None:
    (folder / "trials.csv").unlink()
    with pytest.raises(BadInputError, match="nothing was measured") as caught:
        explain(read_run(folder))
    assert "\n" not in str(caught.value)
