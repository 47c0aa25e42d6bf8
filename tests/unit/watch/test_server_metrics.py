"""Counters on recorded pages of the embedded tritonserver 2.51, and the difference of two of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.machine.metrics_page import parse_metrics_page
from optimizer.watch.server_metrics import (
    ModelCounters,
    compute_load,
    is_triton,
    models_of,
    read_counters,
    sum_loads,
)

DATA = Path(__file__).parents[2] / "data"
START, END = ((DATA / f"triton_metrics_{name}.txt").read_text() for name in ("start", "end"))
SECONDS = 3.0  # between the two pages


def counters(text: str, at_seconds: float = 0.0) -> ModelCounters:
    read = read_counters(parse_metrics_page(text), "mlp", at_seconds)
    assert read is not None
    return read


def test_the_recorded_pages_give_the_load_between_them() -> None:
    served = compute_load(counters(START), counters(END, SECONDS))
    assert served is not None
    assert (served.seconds, served.requests, served.samples, served.executions) == (SECONDS, 4609, 9218, 726)
    assert served.failures == {}
    assert served.request_ms / served.requests == pytest.approx(2.457, abs=1e-3)
    assert served.queue_ms + served.compute_ms == pytest.approx(0.98 * served.request_ms, rel=0.02)
    assert served.latencies_ms[0.95] == (6.494, 6.494)
    assert served.pending == 0


def test_a_page_without_requests_has_no_quantiles() -> None:
    read = counters(START)
    assert (read.latencies_ms, read.first_responses) == ({}, {})


def test_series_of_several_versions_gpus_and_reasons_are_summed() -> None:
    text = """
nv_inference_request_success{gpu_uuid="GPU-a",model="m",version="1"} 3
nv_inference_request_success{gpu_uuid="GPU-b",model="m",version="2"} 4
nv_inference_request_success{model="other",version="1"} 5
nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 2
nv_inference_request_failure{model="m",reason="REJECTED",version="2"} 1
nv_inference_request_failure{model="m",version="1"} 6
nv_inference_count{model="m",version="1"} 1.2e+1
"""
    read = read_counters(parse_metrics_page(text), "m", 0.0)
    assert read is not None
    assert (read.requests, read.samples) == (7, 12)
    assert read.failures == {"REJECTED": 3, "any reason": 6}


def test_a_name_with_quotes_and_braces_is_found() -> None:
    page = parse_metrics_page('nv_inference_request_success{model="a\\"}b",version="1"} 3')
    assert models_of(page) == ['a\\"}b']


@pytest.mark.parametrize(
    "line", ["", "# HELP nv_x", "nv_inference_count{model=} x", "nv_inference_count 3", 'a{b="c"} 1e', "\0{} 1"]
)
def test_lines_that_are_no_values_of_a_model_are_left_out(line: str) -> None:
    assert read_counters(parse_metrics_page(line), "m", 0.0) is None


def test_the_page_of_another_program_is_not_triton() -> None:
    assert is_triton(START)
    assert is_triton('nv_gpu_utilization{gpu_uuid="GPU-a"} 0.5\n')
    assert not is_triton("")
    assert not is_triton("<html>nv_gpu</html>")
    assert not is_triton('vllm:num_requests_running{model_name="m"} 3\n')


def test_a_restart_is_no_load() -> None:
    """The counters begin again, or only one of them has not yet passed its old value."""
    assert compute_load(counters(END), counters(START, SECONDS)) is None
    after = counters(END, SECONDS)
    assert compute_load(replace(after, at_seconds=0.0, queue_ms=after.queue_ms + 1), after) is None
    failed = {**after.failures, "OTHER": 1.0}
    assert compute_load(replace(after, at_seconds=0.0, failures=failed), after) is None


def test_times_that_the_server_does_not_export_are_unknown() -> None:
    start, end = (re.sub(r"(?m)^.*_duration_us.*\n", "", text) for text in (START, END))
    served = compute_load(counters(start), counters(end, SECONDS))
    assert served is not None
    assert (served.requests, served.samples, served.executions) == (4609, 9218, 726)
    for load in (served, sum_loads([served, served])):
        assert all(map(math.isnan, (load.request_ms, load.queue_ms, load.compute_ms)))
    assert compute_load(counters(end), counters(start, SECONDS)) is None, "the server was restarted"


def test_a_server_that_serves_nothing_while_requests_wait_is_stalled() -> None:
    waiting = replace(counters(END), pending=3.0)
    later = replace(waiting, at_seconds=SECONDS)
    for before, after, stalled in (
        (waiting, later, SECONDS),
        (replace(waiting, pending=0.0), later, 0.0),  # the requests may have just arrived
        (waiting, replace(later, requests=later.requests + 1), 0.0),
        (waiting, replace(later, failures={"BACKEND": 1.0}), SECONDS),  # Triton fails one after the other
    ):
        served = compute_load(before, after)
        assert served is not None
        assert served.stalled_seconds == stalled
    longer = compute_load(waiting, later, stalled_seconds=SECONDS)
    assert longer is not None
    assert longer.stalled_seconds == 2 * SECONDS


def test_an_ensemble_is_stalled_while_requests_wait_for_a_step() -> None:
    """Triton counts no waiting requests of the ensemble itself. A step that serves others is not stalled."""

    def page(at_seconds: float, served_by_step: int) -> ModelCounters:
        text = f"""
nv_inference_request_success{{model="chain",version="1"}} 7
nv_inference_pending_request_count{{model="chain",version="1"}} 0
nv_inference_request_success{{model="second",version="1"}} {served_by_step}
nv_inference_pending_request_count{{model="second",version="1"}} 3
nv_inference_pending_request_count{{model="other",version="1"}} 5
"""
        read = read_counters(parse_metrics_page(text), "chain", at_seconds, ("first", "second"))
        assert read is not None
        return read

    for served_by_step, stalled in ((7, SECONDS), (8, 0.0)):
        served = compute_load(page(0.0, 7), page(SECONDS, served_by_step))
        assert served is not None
        assert (served.pending, served.stalled_seconds) == (3, stalled)


def test_several_servers_are_summed() -> None:
    server_load = compute_load(counters(START), counters(END, SECONDS))
    assert server_load is not None
    other_server_load = replace(
        server_load, failures={"REJECTED": 2.0}, latencies_ms={0.95: (9.0, 9.0)}, first_responses={100.0: 3.0}
    )
    summed_load = sum_loads([server_load, other_server_load])
    assert (summed_load.requests, summed_load.seconds) == (2 * server_load.requests, SECONDS)
    assert summed_load.failures == {"REJECTED": 2.0}
    assert summed_load.latencies_ms[0.95] == (6.494, 9.0)
    assert summed_load.latencies_ms[0.5] == server_load.latencies_ms[0.5]
    assert summed_load.first_responses == {100.0: 3.0}
