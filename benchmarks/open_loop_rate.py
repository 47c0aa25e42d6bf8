"""Measure which rate the open-loop client sustains on the same cores as the server, and gRPC's Python library.

    python benchmarks/open_loop_rate.py [--rounds 3] [--rates 1000 3000]

The model is the small mlp of tables/mlp.yaml, of which the machine serves several thousand requests/s; arrivals are a
Poisson process. Prints a Markdown table; the latest one is in open_loop_rate.md. Target: at 3,000 requests/s at most
1 % of the requests are sent more than 1 ms late. The library's row is for its asyncio client, the steadier one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import numpy as np
from grpc import aio

from lib.measured_model import prepare_model
from lib.output import measured_on, print_head, print_progress, row
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.process import run_command
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure import server_calls
from optimizer.measure.load_client.arrivals import PoissonArrivals
from optimizer.measure.load_client.client import START_SECONDS
from optimizer.measure.load_client.client_files import NEVER, SendPlan, SendRecord, write_record
from optimizer.measure.load_client.http2 import INFER_METHOD
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS
from optimizer.measure.load_client.open_loop import SentRequests
from optimizer.model.inference_requests import read_request_inputs, to_message
from optimizer.options.run_options import RunOptions

PROFILE = Path(__file__).with_name("tables") / "mlp.yaml"
RATES = (1000, 2000, 3000, 4000, 5000)
SECONDS = 2.0 + LEAD_IN_SECONDS
CANDIDATE = Candidate(64, True, fields=(("parameters.intra_op_thread_count.string_value", "1"),))
CLIENTS = {
    "tune": ["-m", "optimizer.measure.load_client.client"],
    "grpc.aio": [__file__, "--client"],
}
COLUMNS = ("client", "planned req/s", "sent req/s", "late", "worst", "p50 ms", "p95 ms", "p99 ms", "CPU, of one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES))
    parser.add_argument("--client", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        send_with_library(arguments.client)
        return
    print_head(*COLUMNS)
    with bench() as (endpoint, messages, folder):
        for rate in arguments.rates:
            rows: dict[str, list[list[float]]] = {name: [] for name in CLIENTS}
            for seed in range(arguments.rounds):
                for name in CLIENTS:
                    rows[name].append(figures(measure(name, endpoint, messages, rate, seed, folder)))
            for name, result in rows.items():
                print(line(name, rate, result), flush=True)
    print("\n" + measured_on(f"medians of {arguments.rounds} rounds, late also the worst"))


@contextlib.contextmanager
def bench() -> Iterator[tuple[Endpoint, list[bytes], Path]]:
    prepared = prepare_model(RunOptions(str(PROFILE)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = EmbeddedTarget(prepared.source, TargetSettings(folder / "server.log", on_progress=print_progress))
        with contextlib.closing(target), target.deploy(CANDIDATE) as endpoint:
            inputs = read_request_inputs(
                server_calls.model_metadata(endpoint),
                CANDIDATE.max_batch_size,
                input_data=prepared.input_data,
                shapes=(),
                request_batch_sizes=[1] * 256,
            )
            yield endpoint, [to_message(endpoint.model, one) for one in inputs], folder


def measure(
    client: str, endpoint: Endpoint, messages: list[bytes], rate: float, seed: int, folder: Path
) -> SendRecord:
    planned_ns = (1e9 * PoissonArrivals().plan(rate, SECONDS, seed)).astype(np.int64).tolist()
    SendPlan((endpoint.grpc,), latency_bound_ms=0.0).write(folder, messages, planned_ns)
    done = run_command([sys.executable, *CLIENTS[client], folder], timeout_seconds=60, log=folder / "client.log")
    if done.exit_code != 0:
        sys.exit(f"{client} at {rate} requests/s: {done.output}")
    return SendRecord.read(folder)


def figures(record: SendRecord) -> list[float]:
    """Return the sent rate, the share of late requests, p50, p95 and p99, and the share of a core."""
    requests = SentRequests.of(record, SECONDS)
    sent = record.sent_ns[record.sent_ns >= LEAD_IN_SECONDS * 1e9]
    rate = (len(sent) - 1) / (sent[-1] - sent[0]) * 1e9
    return [rate, requests.late_share, *np.percentile(requests.latencies_ms, [50, 95, 99]), record.cpu_share]


def line(client: str, rate: int, rounds: list[list[float]]) -> str:
    sent, late, p50, p95, p99, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
    worst = max(late for _, late, *_ in rounds)
    cells = [f"{rate:,}", f"{sent:,.0f}", f"{late:.2%}", f"{worst:.2%}", *(f"{ms:.2f}" for ms in (p50, p95, p99))]
    return row(client, *cells, f"{cpu:.2f}")


# -- the same plan, sent by gRPC's Python library -------------------------------------------------------------------

_number: ContextVar[int] = ContextVar("_number")  # the library creates a task for each call


def send_with_library(folder: Path) -> None:
    # epoll, which asyncio selects by default, sleeps for whole milliseconds
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(_send(*SendPlan.read(folder), folder))


async def _send(job: SendPlan, messages: list[bytes], planned_ns: list[int], folder: Path) -> None:
    sent_ns, answered_ns = [NEVER] * len(planned_ns), [NEVER] * len(planned_ns)
    start_ns = time.monotonic_ns()

    def note_sent(number: int) -> bytes:
        _number.set(number)
        sent_ns[number] = time.monotonic_ns() - start_ns
        return messages[number % len(messages)]

    def note_answered(_: bytes) -> None:
        answered_ns[_number.get()] = time.monotonic_ns() - start_ns

    async with aio.insecure_channel(job.addresses[0]) as channel:
        call = channel.unary_unary(INFER_METHOD, note_sent, note_answered)
        await call(0)
        gc.collect()
        gc.freeze()
        gc.disable()
        cpu_seconds = time.process_time()
        start_ns = time.monotonic_ns() + int(1e9 * START_SECONDS)
        calls = []
        for number, due_ns in enumerate(planned_ns):
            wait_ns = start_ns + due_ns - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            calls.append(call(number))
        for one in calls:
            await one
        cpu_seconds = time.process_time() - cpu_seconds
    ended_ns = time.monotonic_ns() - start_ns
    facts = {"ended_ns": ended_ns, "cpu_share": cpu_seconds / ended_ns * 1e9}
    write_record(folder, (planned_ns, sent_ns, answered_ns), facts)


if __name__ == "__main__":
    main()
