"""Compare the load client's times of streamed responses with those of Triton's own Python client.

    python benchmarks/streaming_client.py [--rounds 5] [--seconds 4] [--in-flight 1 4 16] [--models streamer tinygpt]
    python benchmarks/streaming_client.py --windows [--rounds 5] [--in-flight 1 4 16]

Both clients send the same requests to the same server and keep the same number of requests in flight. ``streamer``
is a model that sends 16 responses, one every 5 ms, however many requests it has; the times of ``tinygpt`` depend on
the other requests. The clients alternate within each round:

- ``tune``: ``ClosedLoopGenerator``, which opens a call for each request and writes HTTP/2 frames itself.
- ``tritonclient``: ``InferenceServerClient.start_stream``, one stream for all requests. Its callback takes the time
  of each response; an empty final response ends a request.

TTFT is the time to first response, ITL the inter-token latency: the mean time between the responses of a request. A
request counts if it ended after the first requests of the load had ended, and at least FEWEST requests count. Each
client is a process of its own. Prints a Markdown table with the medians of the rounds; the latest one is in
streaming_client.md.

With ``--windows`` it measures the windows of a confirmation instead: how many the client of ``tune`` returns, and how
long its load takes, if the server serves as many requests as planned or a share of SPEEDS. ``streamer`` then sends 1
to 31 responses to a request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.utils import triton_to_np_dtype

from lib.measured_model import prepare_model
from lib.output import measured_on, print_head, print_progress, row
from lib.records import this_machine
from objectives.metrics import Measurement
from optimizer.config.model_source import ModelSource
from optimizer.confirmation.server_plan import WINDOW_REQUESTS, WINDOWS
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.measurement_windows import MIN_WINDOWS
from optimizer.core.process import run_command
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure import server_calls
from optimizer.measure.load_client.client_files import SendPlan, StreamPlan
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.measure.load_client.measured_requests import MIN_STREAMED_REQUESTS
from optimizer.model.inference_requests import read_request_inputs, to_message
from optimizer.model.input_data import from_bytes
from optimizer.model.repository import read_repository_model
from optimizer.options.run_options import RunOptions
from tests.repositories import write_streamer

REQUESTS = 64  # distinct ones
STREAMER, RESPONSES, INTERVAL_MS = "streamer", 16, 5.0
FEWEST = MIN_STREAMED_REQUESTS * MIN_WINDOWS
SPEEDS = (1.0, 0.7, 0.5, 0.3)  # served requests as a share of those that the confirmation planned
VARIED_RESPONSES = tuple(range(1, 2 * RESPONSES))
COLUMNS = (
    *("model", "client", "in flight", "requests/s", "responses/s"),
    *("TTFT p50 ms", "TTFT p95 ms", "ITL p50 ms", "ITL p95 ms", "latency p50 ms", "latency p95 ms"),
)
WINDOW_COLUMNS = (
    *("in flight", "served / planned", "windows", "fewest windows"),
    *("planned s", "measured s", "longest s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--models", nargs="+", choices=(STREAMER, "tinygpt"), default=[STREAMER, "tinygpt"])
    parser.add_argument("--windows", action="store_true")
    parser.add_argument("--client", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        send_with_tritonclient(arguments.client)
        return
    if arguments.windows:
        print_head(*WINDOW_COLUMNS)
        with bench(STREAMER, VARIED_RESPONSES) as (served, endpoint, folder):
            for in_flight in arguments.in_flight:
                measure_windows(served, endpoint, folder, in_flight, arguments.rounds)
        print("\n" + measured_on(f"medians of {arguments.rounds} loads", machine=this_machine()))
        return
    print_head(*COLUMNS, text=2)
    for model in arguments.models:
        with bench(model) as (served, endpoint, folder):
            for in_flight in arguments.in_flight:
                compare(served, endpoint, folder, in_flight, arguments.seconds, arguments.rounds)
    note = f"medians of {arguments.rounds} rounds of at least {arguments.seconds:g} s"
    print("\n" + measured_on(note, machine=this_machine()))


@dataclass(frozen=True)
class Served:
    """A model, its configuration and its requests; ``input_data`` and ``shapes`` as for perf_analyzer."""

    source: ModelSource
    candidate: Candidate
    input_data: Path
    shapes: tuple[str, ...] = ()


def compare(served: Served, endpoint: Endpoint, folder: Path, in_flight: int, seconds: float, rounds: int) -> None:
    """Measure with both clients in turn and print their rows."""
    rows: dict[str, list[list[float]]] = {"tune": [], "tritonclient": []}
    for _ in range(rounds):
        rows["tune"].append(measure_own(served, endpoint, in_flight, seconds, folder))
        rows["tritonclient"].append(measure_other(served, endpoint, in_flight, seconds, folder))
    for name, own in rows.items():
        medians = [f"{statistics.median(column):,.4g}" for column in zip(*own, strict=True)]
        print(row(served.source.name, name, str(in_flight), *medians), flush=True)


def measure_windows(served: Served, endpoint: Endpoint, folder: Path, in_flight: int, rounds: int) -> None:
    """Measure the windows of a confirmation and print a row for each of SPEEDS."""
    generator, load = own_generator(served, folder), LoadPoint(1, concurrency=in_flight)
    requests_per_second = generator.measure(endpoint, load, 4.0).throughput_infer_per_sec or math.nan
    for speed in SPEEDS:
        planned_seconds = speed * WINDOW_REQUESTS / requests_per_second
        loads = [generator.measure_windows(endpoint, load, planned_seconds, WINDOWS) for _ in range(rounds)]
        seconds = [
            (windows[-1].end_unix_seconds or math.nan) - (windows[0].begin_unix_seconds or math.nan)
            for windows in loads
        ]
        counts = f"{statistics.median(map(len, loads)):g}", f"{min(map(len, loads))}"
        times = WINDOWS * planned_seconds, statistics.median(seconds), max(seconds)
        print(row(str(in_flight), f"{speed:g}", *counts, *(f"{each:.3g}" for each in times)), flush=True)


@contextlib.contextmanager
def bench(model: str, responses: Sequence[int] = (RESPONSES,)) -> Iterator[tuple[Served, Endpoint, Path]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        served = streamer(folder, responses) if model == STREAMER else prepared(model)
        target = EmbeddedTarget(served.source, TargetSettings(folder / "server.log", on_progress=print_progress))
        with contextlib.closing(target), target.deploy(served.candidate) as endpoint:
            yield served, endpoint, folder


def prepared(model: str) -> Served:
    made = prepare_model(RunOptions(model))
    return Served(made.source, made.baseline, made.input_data, made.shapes)


def streamer(folder: Path, responses: Sequence[int]) -> Served:
    write_streamer(folder / "models", INTERVAL_MS)
    data = folder / "counts.json"
    data.write_text(json.dumps({"data": [{"count": [count]} for count in responses]}))
    source = read_repository_model(folder / "models", "streamer", gpu=False)
    return Served(source, Candidate(8, dynamic_batching=True), data)


def measure_own(served: Served, endpoint: Endpoint, in_flight: int, seconds: float, folder: Path) -> list[float]:
    return figures(own_generator(served, folder).measure(endpoint, LoadPoint(1, concurrency=in_flight), seconds))


def own_generator(served: Served, folder: Path) -> ClosedLoopGenerator:
    return ClosedLoopGenerator(
        log=folder / "own.log", input_data=served.input_data, shapes=served.shapes, is_streaming=True
    )


def figures(own: Measurement) -> list[float]:
    values = (
        *(own.throughput_infer_per_sec, own.responses_per_sec, own.ttft_p50_ms, own.ttft_p95_ms),
        *(own.itl_p50_ms, own.itl_p95_ms, own.latency_p50_ms, own.latency_p95_ms),
    )
    return [float("nan") if value is None else value for value in values]


# -- the same load, sent by tritonclient ----------------------------------------------------------------------------


def measure_other(served: Served, endpoint: Endpoint, in_flight: int, seconds: float, folder: Path) -> list[float]:
    inputs = read_request_inputs(
        server_calls.model_metadata(endpoint),
        endpoint.largest_request,
        input_data=served.input_data,
        shapes=served.shapes,
        request_batch_sizes=[1] * REQUESTS,
    )
    messages = [to_message(endpoint.model, one) for one in inputs]
    stream = StreamPlan(fewest_requests=max(3 * in_flight, FEWEST))
    SendPlan((endpoint.grpc,), 0.0, concurrency=in_flight, seconds=seconds, stream=stream).write(folder, messages)
    done = run_command([sys.executable, __file__, "--client", folder], timeout_seconds=120, log=folder / "other.log")
    if done.exit_code != 0:
        sys.exit(f"tritonclient: {done.output}")
    result: list[float] = json.loads((folder / "figures.json").read_text())
    return result


@dataclass
class Sent:
    """When a request was sent, got its first and last response with outputs, and ended, in seconds."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    responses: int = 0
    ended: float = 0.0


def send_with_tritonclient(folder: Path) -> None:
    plan, messages, _ = SendPlan.read(folder)
    assert plan.stream is not None, "measure_other wrote it"
    requests = [ModelInferRequest.FromString(message) for message in messages]
    inputs = [_inputs(request) for request in requests]
    arrived: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
    client = InferenceServerClient(plan.addresses[0])
    client.start_stream(lambda result, error: arrived.put((time.monotonic(), result, error)))
    sent: list[Sent] = []
    arrivals: list[float] = []
    ended = 0
    in_flight, begin, end, ended_before = 0, 0.0, math.inf, 0
    while in_flight or end == math.inf:
        while in_flight < plan.concurrency and end == math.inf:
            sent.append(Sent(time.monotonic()))
            client.async_stream_infer(
                requests[0].model_name,
                inputs[(len(sent) - 1) % len(inputs)],
                request_id=str(len(sent) - 1),
                enable_empty_final_response=True,
            )
            in_flight += 1
        now, result, error = arrived.get(timeout=60)
        if error is not None:
            sys.exit(str(error))
        response = result.get_response()
        request = sent[int(response.id)]
        if response.outputs:
            request.first, request.last = request.first or now, now
            request.responses += 1
            arrivals.append(now)
        if response.parameters["triton_final_response"].bool_param:
            request.ended = now
            in_flight -= 1
            ended += 1
            if not begin and all(one.ended for one in sent[: plan.concurrency]):
                begin, ended_before = now, ended
            elif begin and now >= begin + plan.seconds and ended - ended_before >= plan.stream.fewest_requests:
                end = min(end, now)
    client.stop_stream()
    counted = [one for one in sent if begin <= one.ended < end]
    ttft = [1e3 * (one.first - one.sent) for one in counted]
    gaps = [1e3 * (one.last - one.first) / (one.responses - 1) for one in counted if one.responses > 1]
    latency = [1e3 * (one.last - one.sent) for one in counted]
    quantiles = [float(np.quantile(values, share)) for values in (ttft, gaps, latency) for share in (0.5, 0.95)]
    responses = sum(begin <= moment < end for moment in arrivals)
    rates = [len(counted) / (end - begin), responses / (end - begin)]
    (folder / "figures.json").write_text(json.dumps(rates + quantiles))


def _inputs(request: ModelInferRequest) -> list[InferInput]:
    inputs = []
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        array = from_bytes(np.dtype(triton_to_np_dtype(tensor.datatype)), raw).reshape(tuple(tensor.shape))
        inputs.append(InferInput(tensor.name, list(tensor.shape), tensor.datatype).set_data_from_numpy(array))
    return inputs


if __name__ == "__main__":
    main()
