"""A closed-loop client for any HTTP server, with a fixed number of requests in flight on persistent connections."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

WARM_UP_SECONDS = 1.0
ANSWER_SECONDS = 30.0
OK = 200


@dataclass(frozen=True)
class Load:
    """The requests: ``bodies`` are sent in turn by POST to ``path`` at ``address`` (``host:port``)."""

    address: str
    path: PurePosixPath
    bodies: Sequence[bytes]

    def measure(self, concurrency: int, seconds: float) -> dict[str, float]:
        """Return throughput and latencies, named as in trials.csv, of the requests after a warm-up.

        Raises RuntimeError if a request failed.
        """
        begin = time.perf_counter() + WARM_UP_SECONDS
        end = begin + seconds
        took: list[float] = []
        faults: list[str] = []
        turn = itertools.count()

        def one_in_flight() -> None:
            connection = http.client.HTTPConnection(self.address, timeout=ANSWER_SECONDS)
            try:
                while (sent := time.perf_counter()) < end and not faults:
                    self._ask(connection, self.bodies[next(turn) % len(self.bodies)])
                    answered = time.perf_counter()
                    if sent >= begin and answered <= end:
                        took.append(answered - sent)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                faults.append(str(error))
            finally:
                connection.close()

        threads = [threading.Thread(target=one_in_flight) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults or not took:
            raise RuntimeError(faults[0] if faults else f"no request was answered within {seconds:g} s")
        milliseconds = 1000 * np.array(took)
        quantiles = {f"latency_p{p}_ms": float(np.percentile(milliseconds, p)) for p in (50, 90, 95, 99)}
        return {
            "throughput_infer_per_sec": len(took) / seconds,
            "latency_avg_ms": float(milliseconds.mean()),
            **quantiles,
        }

    def ask(self) -> bytes:
        """Send a single request and return the response."""
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_SECONDS)
        try:
            return self._ask(connection, self.bodies[0])
        finally:
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> bytes:
        connection.request("POST", str(self.path), body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != OK:
            raise RuntimeError(f"{self.path}: HTTP {response.status}: {answer[:200].decode(errors='replace')}")
        return answer
