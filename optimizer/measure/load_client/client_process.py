"""Run the load client as a process: the files of its task, its time limit and environment, and its failures."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from optimizer.core.endpoint import Connection
from optimizer.core.errors import BadInputError, MeasurementError
from optimizer.core.files import write_error
from optimizer.core.process import FinishedProcess, describe_exit_code, printed_lines, run_command
from optimizer.core.safe_text import one_line
from optimizer.core.stopwatch import Stopwatch
from optimizer.measure.load_client.client_files import (
    ALL_ANSWERED_FILE,
    HEADERS_VARIABLE,
    SendPlan,
    SendRecord,
)
from optimizer.measure.shared_memory import OutgoingRequests

# time limit of the client beyond the plan: its start, warm-up and the end of an overload; a large bound extends the
# last two for each server
CLIENT_SECONDS, CLIENT_BOUNDS = 90.0, 12
SCRATCH = "load-client-"  # prefix of the folders with the client's files, in the folder of the log
CLIENT = "optimizer.measure.load_client.client"
SEQUENCE_CLIENT = "optimizer.measure.load_client.sequences"
STREAMING_CLIENT = "optimizer.measure.load_client.streaming_client"
PACKAGES = Path(__file__).parents[3]


@dataclass(frozen=True, eq=False)
class ClientTask:
    """The task of a client: it sends ``requests`` by ``plan`` to the servers of the plan.

    ``planned_ns`` are the planned times of an open loop in nanoseconds. ``order`` has the number of the request that
    is sent at each of them; if it is empty, the requests are sent in turn.
    """

    connection: Connection
    plan: SendPlan
    requests: OutgoingRequests
    planned_ns: Sequence[int]
    order: Sequence[int]

    def write(self, folder: Path) -> None:
        """Write the files that the client reads. Raises OSError."""
        tls = self.connection.tls
        tls_files = None if tls is None else {name: file and str(file) for name, file in asdict(tls).items()}
        slots = tuple(slot.hex() for slot in self.requests.output_slots)
        plan = replace(self.plan, tls=tls_files, output_slots=slots)
        plan.write(folder, self.requests.messages, self.planned_ns, self.order)


class RunClient(Protocol):
    """Runs a load client."""

    def __call__(
        self, task: ClientTask, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
    ) -> tuple[SendRecord, float]:
        """Return the client's record and how long it ran in seconds; set ``task.requests.all_answered``.

        The client may write to ``log`` and its folder, runs on ``cpus`` (None: all), and its time counts in
        ``stopwatch``. Raises BadInputError, MeasurementError, and EnvironmentFault if its files cannot be written.
        """


def run_client_process(
    task: ClientTask, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
) -> tuple[SendRecord, float]:
    """Run the client as a process of its own, see ``RunClient``."""
    connection = task.connection
    if connection.protocol != "grpc":
        raise BadInputError(
            f"tune's own load client needs gRPC, but {connection.address} is an HTTP port; "
            "give the gRPC port with --url"
        )
    try:
        with tempfile.TemporaryDirectory(dir=log.parent, prefix=SCRATCH) as scratch:
            folder = Path(scratch)
            task.write(folder)
            with stopwatch.count("load_generator"):
                done = run_command(
                    [sys.executable, "-P", "-m", _client_module(task.plan), folder],
                    timeout_seconds=_client_limit_seconds(task.plan),
                    log=log,
                    env=_client_environment(connection),
                    cpus=cpus,
                    shm_patterns=task.requests.regions,
                )
            task.requests.all_answered = (folder / ALL_ANSWERED_FILE).exists()
            if done.exit_code != 0:
                raise MeasurementError(_client_failure(done), log=log)
            return SendRecord.read(folder), done.seconds
    except OSError as error:
        raise write_error(log.parent, error) from error


def _client_limit_seconds(plan: SendPlan) -> float:
    """Return the time limit of the client process."""
    load_seconds = max(plan.seconds, plan.stream.longest_seconds if plan.stream else 0.0)
    return load_seconds + CLIENT_SECONDS + CLIENT_BOUNDS * len(plan.addresses) * plan.latency_bound_ms / 1000


def _client_environment(connection: Connection) -> dict[str, str]:
    """Return the environment of the client process, which has the headers because they are secrets."""
    return {
        **os.environ,
        HEADERS_VARIABLE: json.dumps(connection.sent_headers),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")])),
    }


def _client_module(plan: SendPlan) -> str:
    if plan.sequence_lengths:
        return SEQUENCE_CLIENT
    return STREAMING_CLIENT if plan.stream else CLIENT


def _client_failure(done: FinishedProcess) -> str:
    """Return why the client process has no record: it did not end in time, or with an error."""
    if done.exit_code is None:
        return f"the load generator's client did not end within {done.seconds:.0f} s"
    last_line = one_line(printed_lines(done.output)[-1], 200)
    return f"the load generator's client ended with {describe_exit_code(done.exit_code)}: {last_line}"
