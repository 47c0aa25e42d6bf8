"""Requests to a server: inference, the metadata and the statistics of a model, and whether the server responds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from objectives import batch_stats
from objectives.metrics import Measurement
from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import DeploymentError, ServerCrashed
from optimizer.measure.failure_causes import is_refused_by_queue, lacks_gpu_memory, model_died, without_traceback
from optimizer.measure.server_client import CALL_SECONDS, CallError, ServerClient

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse, ModelStatistics

PROBE_SECONDS = 5.0  # even under the heaviest load a server answers within a fraction of this
SINGLE_ATTEMPTS = 3
_Responses = TypeVar("_Responses")


def open_client(connection: Connection) -> ServerClient:
    """Return a client for the connection's protocol, without sending anything.

    Raises BadInputError if the TLS files cannot be used.
    """
    if connection.protocol == "grpc":
        from optimizer.measure.grpc_client import GrpcClient  # takes 0.4 s

        return GrpcClient(connection)
    from optimizer.measure.http_client import HttpClient

    return HttpClient(connection)


def infer(endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
    """Send ``messages``, at most ``in_flight`` at a time, and return the responses in the same order.

    Both are serialized: ModelInferRequest and ModelInferResponse.

    Raises:
        DeploymentError: The server failed a request; the message is the server's.
        ServerCrashed: The server or its model died, or left a request unanswered for ``timeout_seconds``.
    """
    with _client(endpoint) as client:
        return client.infer(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def stream(
    endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
) -> list[list[bytes]]:
    """Send ``messages`` to a decoupled model as ``infer`` does, and return all responses with outputs to each.

    Raises the same errors.
    """
    with _client(endpoint) as client:
        return client.stream(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def send_as_queue_permits(send: Callable[[int], _Responses], in_flight: int) -> _Responses:
    """Return ``send(in_flight)``, with half of ``in_flight`` each time that the queue of the model refuses a request.

    Triton's batcher may sleep until even a single request expires, so one at a time is tried SINGLE_ATTEMPTS times.
    Raises the error of the last attempt, or any other error of ``send``.
    """
    singles = 0
    while True:
        singles += in_flight == 1
        try:
            return send(in_flight)
        except DeploymentError as error:
            if singles == SINGLE_ATTEMPTS or not is_refused_by_queue(str(error)):
                raise
            in_flight = max(1, in_flight // 2)


def with_model_name(message: bytes, model: str) -> bytes:
    """Return the serialized ModelInferRequest ``message`` with ``model`` as its model name."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest.FromString(message)
    if request.model_name == model:
        return message
    request.model_name = model
    return bytes(request.SerializeToString())


def model_metadata(endpoint: Endpoint) -> ModelMetadataResponse:
    """Return the names, types and shapes of the model's inputs and outputs. Raises DeploymentError."""
    with _client(endpoint) as client:
        return client.metadata(endpoint.model)


@contextmanager
def _client(endpoint: Endpoint) -> Iterator[ServerClient]:
    with closing(open_client(endpoint.connection)) as client:
        try:
            yield client
        except CallError as error:
            message = without_traceback(str(error))
            if error.failure == "overdue":
                address = endpoint.connection.address
                raise ServerCrashed(f"the server at {address} did not answer a request in time") from error
            if error.failure == "unreachable" or model_died(str(error)):
                raise ServerCrashed(f"the server died during a request: {message}") from error
            raise DeploymentError(
                f"the server failed a request: {message}", lacks_gpu_memory=lacks_gpu_memory(message)
            ) from error


def reports_live(client: ServerClient) -> bool:
    """Return whether the server reports within PROBE_SECONDS that it is live."""
    try:
        client.check(PROBE_SECONDS)
    except CallError:
        return False
    return True


def responds(client: ServerClient, timeout_seconds: float = CALL_SECONDS) -> bool:
    """Return whether the server responds, even if it denies or refuses the health check."""
    try:
        client.check(timeout_seconds)
    except CallError as error:
        return error.failure in ("denied", "refused")
    return True


def all_servers_respond(endpoint: Endpoint) -> bool:
    """Return whether each server of ``endpoint`` responds within PROBE_SECONDS."""
    return not unresponsive_server(endpoint)


def unresponsive_server(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> str:
    """Return the name of the first server that does not respond within ``seconds``; an empty string if all do."""
    servers = endpoint.servers
    for number, server in enumerate(servers, 1):
        with closing(open_client(server.connection)) as client:
            if not responds(client, seconds):
                return f"server process {number} of {len(servers)}" if endpoint.replicas else "the server"
    return ""


def with_statistics(
    measurement: Measurement, before: ModelStatistics | None, after: ModelStatistics | None, *, times: bool = True
) -> Measurement:
    """Return ``measurement`` with the batches executed between two readings, and with ``times`` a request's times.

    They stay unknown if a reading is missing, or if the counters began again between the two.
    """
    if before is None or after is None or _began_again(before, after):
        return measurement
    measurement = replace(
        measurement,
        mean_batch_size=mean_batch_size(before, after),
        batch_stats=batch_stats.to_text(executions_by_size(before, after)),
    )
    if not times:
        return measurement
    first, last = before.inference_stats, after.inference_stats
    requests = max(1, last.success.count - first.success.count)

    def mean_ms(name: str) -> float:
        return float((getattr(last, name).ns - getattr(first, name).ns) / requests / 1e6)

    return replace(
        measurement,
        queue_ms=mean_ms("queue"),
        compute_input_ms=mean_ms("compute_input"),
        compute_infer_ms=mean_ms("compute_infer"),
        compute_output_ms=mean_ms("compute_output"),
    )


def _began_again(before: ModelStatistics, after: ModelStatistics) -> bool:
    """Return whether a counter fell, because another client reloaded the model or another server answers."""
    later = _counters(after)
    return any(count > later.get(name, 0) for name, count in _counters(before).items())


def _counters(statistics: ModelStatistics) -> dict[tuple[str, int], int]:
    """Return the counters of a model, by name and batch size; the size is 0 for those of all requests."""
    counters = {("inferences", 0): statistics.inference_count, ("executions", 0): statistics.execution_count}
    for part in (statistics.inference_stats, *statistics.batch_stats):
        size = getattr(part, "batch_size", 0)
        for field, value in part.ListFields():
            if field.message_type is not None:
                counters |= {(f"{field.name} count", size): value.count, (f"{field.name} ns", size): value.ns}
    return counters


def mean_batch_size(before: ModelStatistics, after: ModelStatistics) -> float | None:
    """Return the inferences per execution between two readings; None if there was no execution."""
    executions = int(after.execution_count - before.execution_count)
    inferences = int(after.inference_count - before.inference_count)
    if executions <= 0:
        return None
    return round(inferences / executions, 3)


def executions_by_size(before: ModelStatistics, after: ModelStatistics) -> list[batch_stats.BatchStatistic]:
    """Return the executions between two readings by batch size."""
    earlier = {batch.batch_size: batch for batch in before.batch_stats}
    entries = []
    for batch in after.batch_stats:
        parts = (batch.compute_input, batch.compute_infer, batch.compute_output)
        executions, ns = batch.compute_infer.count, sum(part.ns for part in parts)
        if (old := earlier.get(batch.batch_size)) is not None:
            executions -= old.compute_infer.count
            ns -= sum(part.ns for part in (old.compute_input, old.compute_infer, old.compute_output))
        if executions > 0 and ns >= 0:
            entries.append(batch_stats.BatchStatistic(batch.batch_size, executions, ns))
    return entries


def read_statistics(endpoint: Endpoint) -> ModelStatistics | None:
    """Return the current statistics of the model that batches, summed over its versions and the servers.

    The result is None if one of them does not respond within PROBE_SECONDS.
    """
    total: ModelStatistics | None = None
    for server in endpoint.servers:
        try:
            with closing(open_client(server.connection)) as client:
                versions = client.statistics(endpoint.batcher or endpoint.model, PROBE_SECONDS)
        except CallError:
            return None
        if not versions:
            return None
        for statistics in versions:
            if total is None:
                total = statistics
            else:
                add_statistics(total, statistics)
    return total


def completed_requests(endpoint: Endpoint) -> int:
    """Return how many requests the model that batches has completed so far, or refused; 0 if this is unknown."""
    statistics = read_statistics(endpoint)
    if statistics is None:
        return 0
    return int(statistics.inference_stats.success.count + statistics.inference_stats.fail.count)


def add_statistics(total: ModelStatistics, statistics: ModelStatistics) -> None:
    """Add the counters of another version or server to ``total``."""
    total.inference_count += statistics.inference_count
    total.execution_count += statistics.execution_count
    _add_durations(total.inference_stats, statistics.inference_stats)
    by_size = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in statistics.batch_stats:
        if (own := by_size.get(batch.batch_size)) is None:
            total.batch_stats.append(batch)
        else:
            _add_durations(own, batch)


def _add_durations(total: Message, statistics: Message) -> None:
    """Add the counts and times of each field that is a StatisticDuration."""
    for field, duration in statistics.ListFields():
        if field.message_type is not None:
            own = getattr(total, field.name)
            own.count += duration.count
            own.ns += duration.ns
