"""The clients: when they send requests, and when they receive responses."""

from __future__ import annotations

from optimizer.simulator.compilation import inlined
from optimizer.simulator.dynamic_batcher.cyclic_tables import next_gap
from optimizer.simulator.dynamic_batcher.interval import count_latency
from optimizer.simulator.dynamic_batcher.records import FOREVER, IN_TRANSIT, Arrays, ScenarioRow, State

REFUSED_PAUSE = 100_000  # ns, a client whose request was refused sends again no sooner than this after it arrived
MAX_REFUSED = 20  # refused requests for each wanted one, after which a closed loop ends in any case


@inlined
def send_first(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Send the first requests: one of each client in a closed loop, and all in an open loop."""
    state.last_arrival = state.last_response = -scenario.spacing
    if scenario.concurrency > 0:
        state.total, initial = FOREVER, scenario.concurrency
    else:
        state.total = initial = scenario.arrivals_to - scenario.arrivals_from
    for i in range(initial):
        sent = 0 if scenario.concurrency > 0 else arrays.tables.arrivals[scenario.arrivals_from + i]
        _send(state, scenario, arrays, sent)


@inlined
def _send(state: State, scenario: ScenarioRow, arrays: Arrays, sent: int) -> None:
    request = arrays.flight[IN_TRANSIT, state.issued & state.mask]
    gap = scenario.spacing + next_gap(state, arrays.tables)
    state.last_arrival = max(sent + scenario.send, state.last_arrival + gap)
    request.sent, request.arrived = sent, state.last_arrival
    state.issued += 1


@inlined
def next_arrival(state: State, arrays: Arrays) -> int:
    """Return when the next request arrives; FOREVER if none is in transit."""
    if state.arrived == state.issued:
        return FOREVER
    return int(arrays.flight[IN_TRANSIT, state.arrived & state.mask].arrived)


@inlined
def answer(state: State, scenario: ScenarioRow, arrays: Arrays, j: int) -> None:
    """Answer the requests that instance ``j`` has executed. In a closed loop, each client sends its next request."""
    for i in range(arrays.instances[j].requests):
        state.last_response = max(state.now + scenario.receive, state.last_response + scenario.spacing)
        count_latency(state, arrays.latencies, state.last_response - arrays.sent_times[j, i])
        if scenario.concurrency > 0:
            _send(state, scenario, arrays, state.last_response + scenario.client)


@inlined
def answer_refused(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Answer the requests that are refused now. In a closed loop, each client sends its next request."""
    for _ in range(state.refused):
        state.last_response = max(state.now + scenario.receive, state.last_response + scenario.spacing)
        if scenario.concurrency > 0:
            _send(state, scenario, arrays, max(state.last_response + scenario.client, state.now + REFUSED_PAUSE))
    if scenario.concurrency > 0 and state.refusals >= MAX_REFUSED * (
        scenario.warm_up_requests + scenario.measured_requests
    ):
        state.total = 0  # give up
