"""Reads the metrics of the servers at an interval."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import BadStatusLine, HTTPException, RemoteDisconnected
from urllib.error import HTTPError

from optimizer.core.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.core.safe_text import one_line
from optimizer.machine.gpu_telemetry import fetch_metrics_page
from optimizer.watch.server_metrics import (
    ModelCounters,
    ServedLoad,
    is_triton,
    models_of,
    parse_page,
    read_counters,
    served_between,
    together,
)

MOST_NAMED = 5  # models in a message
FIRST_SERVER_ERROR = 500  # HTTP status


@dataclass(frozen=True, slots=True)
class Samples:
    """The newest samples of all servers together; ``lost`` counts those in between that do not count."""

    loads: tuple[ServedLoad, ...]
    lost: int


def read_server(url: str, model: str) -> ModelCounters:
    """Return the counters of ``model`` on the metrics page at ``url``.

    Raises EnvironmentFault if the page cannot be read, and BadInputError if it is not Triton's or lacks the model.
    """
    try:
        text = fetch_metrics_page(url)
    except HTTPError as error:
        if error.code >= FIRST_SERVER_ERROR:
            raise EnvironmentFault(f"--url {url}: the server answers with HTTP status {error.code}") from None
        raise BadInputError(
            f"--url {url}: HTTP status {error.code}, so this is no page of metrics; give that of Triton, "
            "http://HOST:8002/metrics by default"
        ) from None
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, BadStatusLine) and not isinstance(error, RemoteDisconnected):
            raise BadInputError(
                f"--url {url}: no HTTP server answers there, but perhaps one of gRPC; give Triton's page of "
                "metrics, http://HOST:8002/metrics by default"
            ) from None
        reason = getattr(error, "reason", error)  # of a URLError
        raise EnvironmentFault(
            f"--url {url}: the metrics cannot be read ({one_line(str(reason)) or type(error).__name__}); "
            "check the address and that the server runs"
        ) from None
    at_seconds = time.monotonic()
    if not is_triton(text):
        raise BadInputError(
            f"--url {url}: has no metrics of Triton; give its page of metrics, http://HOST:8002/metrics by default"
        )
    page = parse_page(text)
    counters = read_counters(page, model, at_seconds)
    if counters is None:
        served = models_of(page)
        names = ", ".join(map(one_line, served[:MOST_NAMED])) + (", …" if len(served) > MOST_NAMED else "")
        raise BadInputError(
            f"--url {url}: the server has no metrics of the model {one_line(model)} (it has: {names or 'none'}); "
            "give the server of this model, or --model with its name there"
        )
    return counters


def samples(
    urls: Sequence[str],
    model: str,
    interval_seconds: float,
    count: int,
    sleep: Callable[[float], None] = time.sleep,
    on_start: Callable[[], None] = lambda: None,
) -> Iterator[Samples]:
    """Yield the newest ``count`` samples after each new one, as soon as there are ``count``.

    ``on_start`` is called after the first reading of all servers.
    A sample is lost if a server was restarted within it, could not be read, or lacked the model for a while.

    Raises EnvironmentFault or BadInputError if the first reading fails, or the last one and all samples were lost.
    """
    before: dict[str, ModelCounters] = {url: read_server(url, model) for url in urls}
    on_start()
    stalled: dict[str, float] = {}
    started, newest, number = time.monotonic(), deque[ServedLoad | None](maxlen=count), 0
    while True:
        number += 1
        sleep(max(0.0, started + number * interval_seconds - time.monotonic()))
        after: dict[str, ModelCounters] = {}
        fault: TuneError | None = None
        for url in urls:
            try:
                after[url] = read_server(url, model)
            except TuneError as error:
                fault = error
        served = {}
        for url in before.keys() & after.keys():
            if load := served_between(before[url], after[url], stalled.get(url, 0.0)):
                served[url] = load
        stalled = {url: load.stalled_seconds for url, load in served.items()}
        newest.append(together(list(served.values())) if len(served) == len(urls) else None)
        before = after
        if len(newest) < count:
            continue
        loads = tuple(load for load in newest if load is not None)
        if not loads and fault is not None:
            raise fault
        yield Samples(loads, count - len(loads))
