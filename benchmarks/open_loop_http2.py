"""Compare the open-loop client's own HTTP/2 frames with the package h2.

    pip install h2
    python benchmarks/open_loop_http2.py [--rounds 5] [--rates 3000 7000] [--in-flight 16 64]

The clients alternate within each round on one tritonserver, which serves the small mlp of tables/mlp.yaml:

- ``own``: ``optimizer.measure.load_client.http2``, whose frames are written by hand and whose header blocks by hpack
- ``h2``: frames, flow control and header blocks by h2, with its checks of headers switched off

In the open loop requests are sent at planned times (a Poisson process). In the closed loop a fixed number of requests
is kept in flight. Prints a Markdown table for each load; the last result is kept in open_loop_http2.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import numpy as np
from open_loop_rate import SECONDS, bench

from optimizer.core.endpoint import Endpoint
from optimizer.core.process import run_command
from optimizer.machine import hardware
from optimizer.measure.load_client import client
from optimizer.measure.load_client.arrivals import PoissonArrivals
from optimizer.measure.load_client.http2 import Http2Connection, call_status
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS
from optimizer.measure.load_client.open_loop import LATE_MS, SentRequests
from optimizer.measure.load_client.plan import SendPlan, SendRecord

CLOSED_SECONDS = 2.0
OPEN_COLUMNS = ("sent req/s", "late", "lateness p99 ms", "p50 ms", "p99 ms", "CPU µs a request")
CLOSED_COLUMNS = ("answered req/s", "p50 ms", "p99 ms", "CPU µs a request")
MAX_WINDOW = 2**31 - 1


class H2Connection:
    """The interface of Http2Connection, by the package h2."""

    def __init__(
        self, authority: str, method: str, headers: Mapping[str, str] | None = None, *, encrypted: bool = False
    ) -> None:
        config = h2.config.H2Configuration(
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
        )
        self._connection = h2.connection.H2Connection(config)
        self._connection.local_settings = h2.settings.Settings(
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: MAX_WINDOW,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: 2**24 - 1,
            }
        )
        self._connection.initiate_connection()
        self._connection.increment_flow_control_window(MAX_WINDOW - 65_535)
        self._headers = [
            (b":method", b"POST"),
            (b":scheme", b"https" if encrypted else b"http"),
            (b":path", method.encode()),
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
        ]
        self.outbox = bytearray(self._connection.data_to_send())
        self._calls = 0
        self._unsent: dict[int, bytes] = {}

    def request(self, message: bytes) -> int:
        """Start a call with ``message`` and return its number, counted from 0."""
        number, stream = self._calls, 2 * self._calls + 1
        self._calls += 1
        self._connection.send_headers(stream, self._headers)
        self._unsent[stream] = b"\0" + len(message).to_bytes(4, "big") + message
        self._send()
        return number

    def receive(self, data: bytes) -> list[tuple[int, str]]:
        """Return the calls that ended with ``data``: their numbers and error messages (empty: success)."""
        ended: list[tuple[int, str]] = []
        try:
            events = self._connection.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            raise ConnectionError(str(error)) from error
        for event in events:
            if isinstance(event, h2.events.TrailersReceived) or (
                isinstance(event, h2.events.ResponseReceived) and event.stream_ended
            ):
                self._unsent.pop(event.stream_id, None)
                ended.append((event.stream_id // 2, call_status(dict(event.headers))))
            elif isinstance(event, h2.events.DataReceived):
                self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self._unsent.pop(event.stream_id, None)
                if event.error_code:
                    ended.append(
                        (event.stream_id // 2, f"the server reset the request (HTTP/2 error {event.error_code})")
                    )
            elif isinstance(event, h2.events.ConnectionTerminated):
                raise ConnectionError(f"the server ended the connection (HTTP/2 error {event.error_code})")
        self._send()
        return ended

    def _send(self) -> None:
        for stream, rest in list(self._unsent.items()):
            while rest:
                size = min(
                    len(rest),
                    self._connection.local_flow_control_window(stream),
                    self._connection.max_outbound_frame_size,
                )
                if size <= 0:
                    break
                self._connection.send_data(stream, rest[:size], end_stream=size == len(rest))
                rest = self._unsent[stream] = rest[size:]
            if not rest:
                del self._unsent[stream]
        self.outbox += self._connection.data_to_send()


Connections: TypeAlias = type[Http2Connection] | type[H2Connection]
CONNECTIONS: dict[str, Connections] = {"own": Http2Connection, "h2": H2Connection}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=int, nargs="*", default=[3000, 7000])
    parser.add_argument("--in-flight", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--variants", nargs="+", choices=list(CONNECTIONS), default=list(CONNECTIONS))
    parser.add_argument("--client", nargs=2, metavar=("VARIANT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(*arguments.client)
        return
    with bench() as (endpoint, messages, folder):
        for rate in arguments.rates:
            rows: dict[str, list[list[float]]] = {name: [] for name in arguments.variants}
            for seed in range(arguments.rounds):
                for name in rows:
                    rows[name].append(open_loop(name, endpoint, messages, rate, seed, folder))
            print_table(f"open loop, {rate:,} requests/s", OPEN_COLUMNS, rows)
        for in_flight in arguments.in_flight:
            rows = {name: [] for name in arguments.variants}
            for _ in range(arguments.rounds):
                for name in rows:
                    rows[name].append(closed_loop(name, endpoint, messages, in_flight, folder))
            print_table(f"closed loop, {in_flight} in flight", CLOSED_COLUMNS, rows)
    print(f"\nmedians of {arguments.rounds} rounds; {hardware.detect()}; {time.strftime('%Y-%m-%d')}")


def run_client(variant: str, folder: str) -> None:
    setattr(client, "Http2Connection", CONNECTIONS[variant])  # noqa: B010
    sys.argv = [sys.argv[0], folder]
    client.main()


def launch(variant: str, folder: Path) -> SendRecord:
    command: list[str | Path] = [sys.executable, __file__, "--client", variant, folder]
    done = run_command(command, timeout_seconds=60, log=folder / "client.log")
    if done.exit_code != 0:
        sys.exit(f"{variant}: {done.output}")
    record = SendRecord.read(folder)
    if record.error:
        sys.exit(f"{variant}: {record.error}")
    return record


def cpu_us(record: SendRecord) -> float:
    return record.cpu_share * record.ended_ns / 1e3 / max(1, int((record.sent_ns >= 0).sum()))


def open_loop(
    variant: str, endpoint: Endpoint, messages: list[bytes], rate: float, seed: int, folder: Path
) -> list[float]:
    planned_ns = (1e9 * PoissonArrivals().plan(rate, SECONDS, seed)).astype(np.int64).tolist()
    SendPlan(endpoint.grpc, latency_bound_ms=0.0).write(folder, messages, planned_ns)
    record = launch(variant, folder)
    requests = SentRequests.of(record, SECONDS)
    sent = record.sent_ns[record.sent_ns >= LEAD_IN_SECONDS * 1e9]
    return [
        (len(sent) - 1) / (sent[-1] - sent[0]) * 1e9,
        requests.late_share(LATE_MS),
        float(np.percentile(requests.late_by_ms, 99)),
        *np.percentile(requests.latencies_ms, [50, 99]).tolist(),
        cpu_us(record),
    ]


def closed_loop(variant: str, endpoint: Endpoint, messages: list[bytes], in_flight: int, folder: Path) -> list[float]:
    SendPlan(endpoint.grpc, 0.0, concurrency=in_flight, seconds=CLOSED_SECONDS).write(folder, messages)
    record = launch(variant, folder)
    answered = (record.answered_ns >= 0) & (record.answered_ns < 1e9 * CLOSED_SECONDS)
    latencies_ms = (record.answered_ns - record.sent_ns)[answered] / 1e6
    quantiles_ms: list[float] = np.percentile(latencies_ms, [50, 99]).tolist()
    return [len(latencies_ms) / CLOSED_SECONDS, *quantiles_ms, cpu_us(record)]


def print_table(title: str, columns: tuple[str, ...], rows: Mapping[str, list[list[float]]]) -> None:
    print(f"\n**{title}**\n\n| client | " + " | ".join(columns) + " | rate, relative to own | p99, relative to own |")
    print("| --- |" + " --: |" * (len(columns) + 2))
    p99 = columns.index("lateness p99 ms") if "lateness p99 ms" in columns else columns.index("p99 ms")
    own = rows.get("own") or next(iter(rows.values()))
    for name, rounds in rows.items():
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        cells = [
            f"{value:,.0f}" if unit.endswith("req/s") else f"{value:.2%}" if unit == "late" else f"{value:.3g}"
            for unit, value in zip(columns, medians, strict=True)
        ]
        ratios = [
            statistics.median(a[index] / b[index] for a, b in zip(rounds, own, strict=True)) for index in (0, p99)
        ]
        print("| " + " | ".join([name, *cells, *(f"{ratio:.2f}" for ratio in ratios)]) + " |", flush=True)


if __name__ == "__main__":
    main()
