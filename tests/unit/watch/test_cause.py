"""The cause is too much load, a slower server or bursts, on servers that the simulator of the run plays."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from objectives.confidence import Verdict
from optimizer.cli.plan import main as plan
from optimizer.plan.evidence import EXPECTED
from optimizer.results import formatting
from optimizer.simulator.scenario import SimulationResult
from optimizer.watch.cause import Cause, find_cause
from optimizer.watch.expectation import WhyNotSimulated, compute_ms
from optimizer.watch.fit_check import Judgement, judge
from optimizer.watch.server_metrics import ServedLoad
from optimizer.watch.watch_report import document, headline, next_steps, print_judgement
from tests.unit.watch.test_fit_check import ERROR, INTERVALS, NOISE, RATE, SECONDS, loads, sample

CLIENTS = 47  # of the recommendation


def served(result: SimulationResult) -> list[ServedLoad]:
    """Return the loads, in INTERVALS, of a server that the simulator plays."""
    expected = sample()
    assert expected.replica is not None
    requests = SECONDS * result.throughput_infer_per_sec / expected.request_samples
    execution_ms = compute_ms(result, expected.replica.model.overheads.network_s)
    load = ServedLoad(
        SECONDS,
        requests,
        {},
        requests * expected.request_samples,
        requests * expected.request_samples / result.mean_batch_size,
        requests * 1e3 * result.latency_avg_s,
        requests * 1e3 * result.queue_avg_s,
        requests * execution_ms,
    )
    counted = ("requests", "samples", "executions", "request_ms", "queue_ms", "compute_ms")
    return [
        replace(load, **{name: factor * getattr(load, name) for name in counted})
        for factor in (NOISE * INTERVALS)[:INTERVALS]
    ]


def closed_loop(clients: int, slowness: float = 1.0) -> Judgement:
    """Return the judgement on a server with this number of clients, ``slowness`` times as slow as that of the run."""
    expected = sample()
    assert expected.replica is not None
    usual = expected.replica.slowness_estimate.quantile(EXPECTED)
    slowdown = replace(usual, slowness=slowness * usual.slowness)
    return judge(expected, served(expected.replica.serve_closed_loop(clients, slowdown)), 1)


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
    confirmed = sample().rate.predicted(1, ERROR)
    assert confirmed is not None
    assert kind_of(judge(sample(), loads(1.2 * confirmed.high), 1)) == "load"


def test_a_rate_below_the_confirmed_one_is_a_slower_server_within_the_prediction_interval_too() -> None:
    """A prediction interval also has the rates of servers that are slower than those of the run."""
    rate, requests = 3100.0, 3100.0 * SECONDS
    predicted, confirmed = sample().rate.predicted(1, ERROR), sample().rate.interval(0.01)
    assert predicted is not None
    assert confirmed is not None
    assert predicted.low < rate < 0.97 * confirmed.low
    judgement = judge(sample(), loads(rate, queue_ms=30 * requests, compute_ms=6 * requests), 1)
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
    judgement = judge(replace(sample(), safe_rate=safe_rate or sample().safe_rate), crowded, servers)
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
    cause = find_cause(judge(sample(), loads(RATE, compute_ms=20 * RATE * SECONDS), 1))
    assert isinstance(cause, Cause)
    assert cause.kind == "slower server"
    assert cause.evidence.startswith("an execution takes 20.0 ms, and at most ")


def test_requests_that_wait_for_idle_instances_arrive_in_bursts() -> None:
    judgement = judge(sample(), loads(RATE, queue_ms=30 * RATE * SECONDS), 1)
    assert kind_of(judgement) == "bursts"
    (step,) = next_steps(judgement)
    assert step.command.startswith("tune plan ")
    assert step.command.endswith(" --trace requests.csv")


def test_other_batches_or_an_unknown_model_leave_the_cause_open() -> None:
    no_batches = loads(RATE, executions=RATE * SECONDS, queue_ms=30 * RATE * SECONDS)
    assert find_cause(judge(sample(), no_batches, 1)) is None
    unsimulated = replace(sample(), replica=None, why_not_simulated=WhyNotSimulated.KIND)
    judgement = judge(unsimulated, loads(RATE, queue_ms=30 * RATE * SECONDS), 1)
    assert judgement.differing
    assert find_cause(judgement) is None
    assert [step.advice[:12] for step in next_steps(judgement)] == ["search again"]
