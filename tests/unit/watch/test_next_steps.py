"""The cause of a difference on servers that the simulator of the run plays, and the proposed commands."""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.sla import Sla, Verdict
from optimizer.cli import verify
from optimizer.cli.plan import build_parser, read_question
from optimizer.cli.plan import main as plan
from optimizer.cli.run import read_run_arguments
from optimizer.config.problem import ModelKind
from optimizer.core.load_shapes import RequestTimes
from optimizer.options.option_reader import run_options
from optimizer.plan.replica import Replica
from optimizer.plan.slowness import EXPECTED
from optimizer.results import formatting
from optimizer.results.summary import NextStep
from optimizer.simulator.scenario import SimulationResult
from optimizer.study.model_finder import trace_sizes
from optimizer.study.warm_start import read_warm_start
from optimizer.watch.expectation import Expectation, WhyNotSimulated
from optimizer.watch.fit_check import Judgement
from optimizer.watch.next_steps import (
    WARM_START_SAVING,
    Cause,
    find_cause,
    nearest_other_size,
    next_steps,
    repeat_search,
)
from optimizer.watch.server_metrics import ServedLoad
from optimizer.watch.watch_report import document, headline, print_judgement
from tests.production_loads import (
    ERROR,
    INTERVALS,
    NOISE,
    RATE,
    SAMPLE,
    SECONDS,
    expectation_of,
    loads,
    recorded_expectation,
)

CLIENTS = 47  # of the recommendation


def simulated_loads(result: SimulationResult) -> list[ServedLoad]:
    """Return the loads, in INTERVALS, of a server that the simulator plays."""
    expected = recorded_expectation()
    requests = SECONDS * result.throughput_infer_per_sec / expected.request_samples
    load = ServedLoad(
        SECONDS,
        requests,
        {},
        requests * expected.request_samples,
        requests * expected.request_samples / result.mean_batch_size,
        requests * 1e3 * result.latency_avg_s,
        requests * 1e3 * result.queue_avg_s,
        requests * 1e3 * result.compute_avg_s,
    )
    counted = ("requests", "samples", "executions", "request_ms", "queue_ms", "compute_ms")
    return [
        replace(load, **{name: factor * getattr(load, name) for name in counted})
        for factor in (NOISE * INTERVALS)[:INTERVALS]
    ]


def closed_loop(clients: int, slowness: float = 1.0) -> Judgement:
    """Return the judgement on a server with this number of clients, ``slowness`` times as slow as that of the run."""
    expected = recorded_expectation()
    assert isinstance(expected.simulation, Replica)
    slowdown = expected.simulation.slowness_estimate.quantile(EXPECTED)
    slowdown = replace(slowdown, slowness=slowness * slowdown.slowness)
    return Judgement(expected, simulated_loads(expected.simulation.serve_closed_loop(clients, slowdown)), 1)


def kind_of(judgement: Judgement) -> str | None:
    cause = find_cause(judgement)
    return cause.kind if cause else None


def test_the_clients_of_the_run_need_no_cause() -> None:
    judgement = closed_loop(CLIENTS)
    assert judgement.verdict is Verdict.PASS
    assert find_cause(judgement) is None


def test_more_clients_are_too_much_load() -> None:
    judgement = closed_loop(4 * CLIENTS)
    assert judgement.verdict is Verdict.FAIL
    assert kind_of(judgement) == "load"
    steps = [step.command.split()[:2] for step in next_steps(judgement)]
    assert steps == [["tune", "plan"]], "a search would end with the same configuration"
    assert "too much load: " in headline(judgement)


def test_a_rate_above_that_of_the_run_is_too_much_load() -> None:
    confirmed = recorded_expectation().confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    assert kind_of(Judgement(recorded_expectation(), loads(1.2 * confirmed.high), 1)) == "load"


def test_a_rate_below_the_confirmed_one_is_a_slower_server_within_the_prediction_interval_too() -> None:
    """A prediction interval also has the rates of servers that are slower than those of the run."""
    rate, requests = 3100.0, 3100.0 * SECONDS
    predicted, confirmed = (
        recorded_expectation().confirmed_rate.predicted(1, ERROR),
        recorded_expectation().confirmed_rate.interval(0.01),
    )
    assert predicted is not None
    assert confirmed is not None
    assert predicted.low < rate < 0.97 * confirmed.low
    judgement = Judgement(recorded_expectation(), loads(rate, queue_ms=30 * requests, compute_ms=6 * requests), 1)
    cause = find_cause(judgement)
    assert cause is not None
    assert cause.kind == "slower server"
    ends = f"{formatting.number(confirmed.low)} to {formatting.number(confirmed.high)}"
    assert cause.evidence.endswith(f"but 3,100 requests/s per server are fewer than the run served ({ends})")


def test_the_number_of_servers_of_an_overload_is_above_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    judgement = closed_loop(4 * CLIENTS)
    (step,) = next_steps(judgement)
    assert "above the present 1: clients send at least the " in step.advice
    program, command, *words = shlex.split(step.command)
    assert (program, command) == ("tune", "plan")
    assert plan([*words, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["replicas"] > 1


@pytest.mark.parametrize(("servers", "safe_rate"), [(2, None), (1, 5000.0)])
def test_a_served_rate_that_the_present_servers_could_serve_is_not_planned(
    servers: int, safe_rate: float | None
) -> None:
    """A closed loop sends no more than is served, so `tune plan` would answer with the present number."""
    served_rate = 3300.0 * servers
    crowded = loads(served_rate, servers, queue_ms=30 * served_rate * SECONDS)
    judgement = Judgement(
        replace(recorded_expectation(), safe_rate=safe_rate or recorded_expectation().safe_rate), crowded, servers
    )
    assert kind_of(judgement) == "load"
    step = next(step for step in next_steps(judgement) if "the present" in step.advice)
    assert step.advice.startswith(f"start more servers than the present {servers}: clients send at least the ")
    assert not any(step.command.startswith("tune plan") for step in next_steps(judgement))


@pytest.mark.parametrize("slowness", [1.5, 2.0])
def test_a_server_that_serves_less_with_the_same_clients_is_slower(slowness: float) -> None:
    judgement = closed_loop(CLIENTS, slowness)
    assert judgement.verdict is Verdict.FAIL
    assert kind_of(judgement) == "slower server"
    commands = [step.command for step in next_steps(judgement)]
    assert commands[0].startswith("tune verify --fresh ")
    assert not any(command.startswith("tune plan") for command in commands)
    text = io.StringIO()
    print_judgement(Console(file=text, width=80), judgement)
    assert "a slower server: " in headline(judgement)
    assert "\ncause " not in text.getvalue(), "the answer has the cause, so no line repeats it"
    assert document(judgement, [])["cause"] == "slower server"


def test_longer_executions_at_a_low_rate_are_a_slower_server() -> None:
    cause = find_cause(Judgement(recorded_expectation(), loads(RATE, compute_ms=20 * RATE * SECONDS), 1))
    assert isinstance(cause, Cause)
    assert cause.kind == "slower server"
    assert cause.evidence.startswith("an execution takes 20.0 ms, and at most ")


def test_requests_that_wait_for_idle_instances_arrive_in_bursts() -> None:
    judgement = Judgement(recorded_expectation(), loads(RATE, queue_ms=30 * RATE * SECONDS), 1)
    assert kind_of(judgement) == "bursts"
    (step,) = next_steps(judgement)
    assert step.command.startswith("tune plan ")
    assert step.command.endswith(" --trace requests.csv")


def test_other_batches_or_an_unknown_model_leave_the_cause_open() -> None:
    no_batches = loads(RATE, executions=RATE * SECONDS, queue_ms=30 * RATE * SECONDS)
    assert find_cause(Judgement(recorded_expectation(), no_batches, 1)) is None
    unsimulated = replace(recorded_expectation(), simulation=WhyNotSimulated.KIND)
    judgement = Judgement(unsimulated, loads(RATE, queue_ms=30 * RATE * SECONDS), 1)
    assert judgement.differing
    assert find_cause(judgement) is None
    assert [step.advice[:12] for step in next_steps(judgement)] == ["search again"]


def test_the_command_of_a_search_has_the_new_request_size() -> None:
    larger = loads(RATE, samples=8 * RATE * SECONDS)
    steps = next_steps(Judgement(recorded_expectation(), larger, 1))
    (search,) = (step for step in steps if step.advice.startswith("search again"))
    assert document(Judgement(recorded_expectation(), larger, 1), ["a"])["search"]["command"] == search.command
    assert "--request-batch-size 8" in search.command
    assert "--warm-start" not in search.command, "tune takes measurements of the same size only"
    assert "--request-batch-size" not in repeat_search(recorded_expectation()).command
    assert f"--warm-start {SAMPLE}" in repeat_search(recorded_expectation()).command


@pytest.mark.parametrize(
    ("run_size", "production_size", "proposed"),
    [(1, 4.2, 4), (1, 1.3, 2), (4, 3.8, 3), (1, 0.6, 1), (2.5, 2.6, 3), (4, 4, 4)],
)
def test_the_proposed_size_is_a_whole_number_on_the_same_side(
    run_size: float, production_size: float, proposed: int
) -> None:
    assert nearest_other_size(run_size, production_size) == proposed


def test_requests_above_every_max_batch_size_need_another_search_space() -> None:
    largest = max(recorded_expectation().run.problem.space.max_batch_size)
    judgement = Judgement(recorded_expectation(), loads(RATE, samples=2 * largest * RATE * SECONDS), 1)
    steps = next_steps(judgement)
    (search,) = (step for step in steps if "search again" in step.advice)
    assert search.advice.startswith(f"raise the largest max_batch_size of the search, {largest}, to {2 * largest}")
    assert search.command == ""
    assert document(judgement, ["a"])["search"]["command"] is None


TRACES = {
    "sizes.csv": "time_s,batch_size,priority\n0,1,1\n0.1,4,2\n0.2,1,1\n",
    "priorities.csv": "time_s,priority\n0,1\n0.1,2\n",
    "times.csv": "time_s\n0\n0.1\n0.3\n",
    "intervals.txt": "100\n200\n",
    "requests.csv": "".join(f"{second}\n" for second in range(200)),
}
RATE_LOAD: dict[str, object] = {"load": "rate"}
RUNS: dict[str, tuple[dict[str, object], ModelKind]] = {
    "closed loop": ({}, ModelKind.BATCHED),
    "grid": ({"search": "grid"}, ModelKind.BATCHED),
    "rate": (RATE_LOAD, ModelKind.BATCHED),
    "mix of sizes": ({**RATE_LOAD, "request-batch-size": "1*50|7*50"}, ModelKind.BATCHED),
    "shape": ({**RATE_LOAD, "request-distribution": "spike:4x:10%:1s"}, ModelKind.BATCHED),
    "constant": ({**RATE_LOAD, "request-distribution": "constant"}, ModelKind.BATCHED),
    "intervals": ({**RATE_LOAD, "request-intervals": "intervals.txt"}, ModelKind.BATCHED),
    "trace with sizes": ({**RATE_LOAD, "request-trace": "sizes.csv"}, ModelKind.BATCHED),
    "trace with priorities": ({**RATE_LOAD, "request-trace": "priorities.csv"}, ModelKind.BATCHED),
    "trace and size": (
        {**RATE_LOAD, "request-trace": "times.csv", "request-batch-size": "4"},
        ModelKind.BATCHED,
    ),
    "trace that is gone": ({**RATE_LOAD, "request-trace": "gone.csv"}, ModelKind.BATCHED),
    "priorities": ({"priorities": "1*20|2*80"}, ModelKind.BATCHED),
    "streaming": ({}, ModelKind.STREAMING),
    "streaming with a shape": ({**RATE_LOAD, "request-distribution": "ramp"}, ModelKind.STREAMING),
    "stateful": ({"sequence-length": "5"}, ModelKind.STATEFUL),
    "several models": ({"concurrent-models": "other", "bls-composing-models": "step"}, ModelKind.BATCHED),
    "shared study": ({"storage": "sqlite:///study.db", "study-name": "dlrm"}, ModelKind.BATCHED),
    "remote": ({"target": "remote", "url": "triton:8001"}, ModelKind.BATCHED),
    "docker": ({"target": "docker", "docker-image": "triton", "docker-gpus": "0,1"}, ModelKind.BATCHED),
}
PRESENT_LOADS: dict[str, Mapping[str, Any]] = {
    "larger requests": {"samples": 8 * RATE * SECONDS},
    "slower": {"compute_ms": 20 * RATE * SECONDS, "queue_ms": 30 * RATE * SECONDS},
    "failures": {"failures": {"REJECTED": 0.1 * RATE * SECONDS}, "stalled_seconds": 5.0},
    "higher rate": {"requests": 1e6},
}


def expected_of(values: dict[str, object], kind: ModelKind) -> Expectation:
    """Return the expectation of the sample as if its run had other options and a model of another kind."""
    options, run = run_options("dlrm", values), recorded_expectation().run
    times = RequestTimes("" if options.request_times == "poisson" else options.request_times)
    is_open = options.load == "rate"
    problem = replace(run.problem, kind=kind, open_loop=is_open, request_times=times if is_open else None)
    run = replace(run, options=options, problem=problem)
    return replace(recorded_expectation(), run=run, simulation=WhyNotSimulated.KIND)  # a simulation takes long


@pytest.mark.parametrize("load", PRESENT_LOADS)
@pytest.mark.parametrize("name", RUNS)
def test_tune_takes_each_proposed_command(
    name: str, load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_folder = SAMPLE.absolute()
    monkeypatch.chdir(tmp_path)
    for file, text in TRACES.items():
        Path(file).write_text(text)
    expected = expected_of(*RUNS[name])
    folder = replace(expected.run.folder, path=sample_folder)
    expected = replace(expected, run=replace(expected.run, folder=folder))
    judgement = Judgement(expected, loads(RATE, **PRESENT_LOADS[load]), 1)
    assert judgement.differing
    steps = next_steps(judgement)
    assert steps
    commands = [*(step.command for step in steps), document(judgement, ["a"])["search"]["command"]]
    for command in filter(None, commands):
        program, *words = shlex.split(command)
        assert program == "tune"
        if words[0] == "plan":
            read_question(build_parser().read(words[1:]))
        elif words[0] == "verify":
            verify.build_parser().read(words[1:])
        else:
            check_search(words, expected)


def check_search(words: list[str], expected: Expectation) -> None:
    """Parse the command of a search as tune does, and make the checks of tune that need files only."""
    options = read_run_arguments(words).options
    if "gone.csv" not in words and options.request_batch_size is not None:
        assert trace_sizes(options) is None, "tune refuses a size next to a trace with sizes"
    request_batch_size = expected.run.options.request_batch_size
    if options.warm_start is not None:
        assert options.request_batch_size == request_batch_size, "tune refuses a warm start with other sizes"
        assert read_warm_start(options.warm_start, options.out, expected.request_samples).trials
    assert (options.storage, options.study_name) == (None, None), "the shared study has the old requests"
    assert (options.model, options.sla_ms) == ("dlrm", expected.run.options.sla_ms)


@pytest.mark.parametrize("name", ["trace with sizes", "trace that is gone"])
def test_a_search_with_a_trace_needs_a_new_trace_for_other_sizes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has the size of each request, so a command with a size of requests would be refused."""
    monkeypatch.chdir(tmp_path)
    Path("sizes.csv").write_text(TRACES["sizes.csv"])
    judgement = Judgement(expected_of(*RUNS[name]), loads(RATE, samples=8 * RATE * SECONDS), 1)
    search = next(step for step in next_steps(judgement) if "search again" in step.advice)
    assert search.advice.startswith("record a new trace")
    assert "--request-batch-size" not in search.command


def test_more_servers_need_no_plan_that_tune_refuses() -> None:
    confirmed = recorded_expectation().confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    many = loads(1.2 * confirmed.high)
    shaped = expected_of(*RUNS["streaming with a shape"])
    (first, *_) = next_steps(Judgement(replace(shaped, safe_rate=None), many, 1))
    assert first == NextStep("start more servers; `tune plan` cannot compute their number from this run", "")
    unbounded = expectation_of(sla=Sla.from_bounds({}))
    (first, *_) = next_steps(Judgement(unbounded, many, 1))
    assert first.command.endswith("--sla-p95 20ms")


def test_a_search_names_the_cost_of_the_earlier_one_and_what_a_warm_start_saves() -> None:
    expected = recorded_expectation()
    run = expected.run
    advice = "search again: the earlier search took 11 trials in 2 min 47 s, with its confirmation"
    assert repeat_search(expected).advice == f"{advice}; {WARM_START_SAVING}"
    exhaustive = replace(run, options=replace(run.options, search="grid"))
    assert repeat_search(replace(expected, run=exhaustive)).advice == advice
    for seconds in (None, True, "7", 0.0, -1.0, math.inf):
        unknown = replace(run, info={**run.info, "result": {"wall_seconds": seconds}})
        assert "took 11 trials, with its" in repeat_search(replace(expected, run=unknown)).advice, seconds
