"""The base class of the generators that use tune's own load client: its requests, errors and repetitions."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from objectives.arrays import IntArray
from objectives.metrics import LATENCY, TTFT, Measurement
from objectives.sla import Sla
from optimizer.core.endpoint import Endpoint, SharedMemory
from optimizer.core.errors import DeploymentError, MeasurementError, ServerCrashed
from optimizer.core.measurement_windows import MAX_SPREAD, MIN_WINDOWS, longest_window_ms
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.measure import server_calls
from optimizer.measure.load_client.client_files import SendPlan, SendRecord, StreamPlan
from optimizer.measure.load_client.client_process import ClientTask, RunClient, run_client_process
from optimizer.measure.load_client.measured_requests import ALIKE, MIN_STREAMED_REQUESTS, PlannedLoad
from optimizer.measure.load_client.open_loop import LateError
from optimizer.measure.model_statistics import read_all_statistics, with_all_statistics
from optimizer.measure.server_calls import all_servers_respond, unresponsive_server
from optimizer.measure.server_errors import lacks_gpu_memory, model_died, without_traceback
from optimizer.measure.shared_memory import OutgoingRequests, in_shared_memory, output_bytes
from optimizer.model.inference_requests import read_request_inputs, to_message
from optimizer.model.input_data import MAX_SENT_BYTES, MAX_SENT_ENTRIES, count_entries

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse, ModelStatistics


WARM_UP_SECONDS = 0.2
MAX_REPEATED = 256  # distinct requests that are made from the entries of a data file by repeating them
MIN_MIXED_MESSAGES = 16  # distinct requests if they differ in size

IN_TURN: IntArray = np.empty(0, dtype=np.int64)
Summarize: TypeAlias = "Callable[[SendRecord, PlannedLoad, float, int], list[Measurement]]"
DRAWN_PRIORITIES = 4096  # the priorities of later requests repeat these


@dataclass(frozen=True, eq=False)
class RequestClasses:
    """The samples and the priority of each of several requests, and the number of its class.

    The classes are those of a trace, or the priorities. ``entry_order`` has the indexes of the requests in the order
    in which they take the entries of a data file; None for the order of the requests.
    """

    sizes: IntArray
    priorities: IntArray
    numbers: IntArray
    entry_order: IntArray | None = None


@dataclass(frozen=True, eq=False)
class Messages:
    """Serialized requests, the number of samples of each, the metadata of the model, classes and priorities.

    They are sent in turn, or in an order of classes. ``priorities`` is ALIKE if all have the default priority.
    """

    serialized: list[bytes]
    sizes: IntArray
    metadata: ModelMetadataResponse
    classes: IntArray = field(default_factory=lambda: IN_TURN)
    priorities: IntArray = field(default_factory=lambda: ALIKE)

    def order(self, numbers: IntArray) -> IntArray:
        """Return which message to send for each request, by the number of its class; those of a class in turn."""
        counts = np.bincount(self.classes)
        first, index = np.cumsum(counts) - counts, np.empty(len(numbers), dtype=np.int64)
        by_class = np.argsort(numbers, kind="stable")
        requests_of_class = np.bincount(numbers, minlength=len(counts))
        first_of_class = np.cumsum(requests_of_class) - requests_of_class
        index[by_class] = np.arange(len(numbers)) - np.repeat(first_of_class, requests_of_class)
        return first[numbers] + index % counts[numbers]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """When the client sends requests: at planned times, or as long as fewer than ``concurrency`` are in flight.

    Attributes:
        seconds: Duration of the load, or of the time that is judged if the model streams.
        warm_up_seconds: Time of a closed loop before ``seconds``.
        lead_in_seconds: The first part of ``seconds`` of an open loop, which is not judged.
        planned_ns: The planned times of an open loop, those of the lead-in of a model that streams first.
        concurrency: Requests in flight in a closed loop; 0 in an open loop.
        lead_in_requests: Number of planned times that belong to the lead-in of a model that streams.
        parts: Number of measurements into which the time is divided.
        period_seconds: The planned times repeat after this time; 0 if they do not.
        classes: Numbers of the classes of the requests in a trace; IN_TURN without one.
    """

    seconds: float
    warm_up_seconds: float = 0.0
    lead_in_seconds: float = 0.0
    planned_ns: Sequence[int] = ()
    concurrency: int = 0
    lead_in_requests: int = 0
    parts: int = 1
    period_seconds: float = 0.0
    classes: IntArray = field(default_factory=lambda: IN_TURN)


@dataclass(frozen=True, kw_only=True)
class LoadClientGenerator:
    """Sends requests to an endpoint over gRPC, with one client process per measurement; subclasses plan the load.

    Args:
        log: File for the output of the client process. Temporary files are written to its folder.
        input_data: The requests, in perf_analyzer's JSON.
        shapes: ``name:d1,d2``, as for perf_analyzer.
        priorities: Shares of the priorities of the requests; None sends none.
        request_mix: Distribution of the samples per request if the load's request batch size is an average.
        sla: The latency bounds. They decide which differences between windows matter and, in an open loop, which
            backlog is an overload and which late requests void a measurement.
        cpus: CPUs of the client process; None for all.
        shared_memory: System shared memory for inputs and outputs; None sends them in the messages.
        repeat: Repeat a measurement once if late requests void it.
        is_streaming: Whether the model is decoupled: it sends any number of responses to a request.
        token_output: Output of such a model whose elements are the tokens of a response. If it is empty, each
            response with outputs counts as one token.
        counts_failures: Whether failed requests are counted. Otherwise the first one is an error.
        run_client: Sends the requests: ``run_client_process``, or a simulation of it.
    """

    log: Path
    input_data: Path
    shapes: tuple[str, ...] = ()
    request_mix: SizeDistribution | None = None
    priorities: SizeDistribution | None = None
    sla: Sla = field(default_factory=Sla)
    seed: int = 0
    window_ms: int
    cpus: frozenset[int] | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    repeat: bool = True
    is_streaming: bool = False
    token_output: str = ""
    shared_memory: SharedMemory | None = None
    counts_failures: bool = False
    run_client: RunClient = run_client_process
    _messages: dict[tuple[str, bool, float], Messages] = field(default_factory=dict, init=False, repr=False)
    _launches: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return a measurement over three windows, repeated once if late requests void it.

        With ``seconds``, measure once for that time and do not check whether the windows agree. A measurement of an
        overloaded server is not stable.

        Raises:
            MeasurementError: A request failed, none was answered, or late requests void the measurement (see
                open_loop.py).
            ServerCrashed: The server or its model died or hangs.
        """
        if seconds is not None:
            return self._measure(endpoint, load, seconds, math.inf)[0]
        seconds = self.default_seconds(load)
        if self.repeat:
            with contextlib.suppress(LateError):
                return self._measure(endpoint, load, seconds, MAX_SPREAD)[0]
        return self._measure(endpoint, load, seconds, MAX_SPREAD)[0]

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Return ``count`` measurements of ``seconds`` each from one uninterrupted load; one if it is an overload.

        A closed loop on a model that streams continues until MIN_STREAMED_REQUESTS requests have ended in each. If it
        has to stop earlier, see ``StreamingClosedLoopClient``, there are fewer, longer ones. There are fewer if an
        open loop would have more requests than a measurement may have. The load is not interrupted, because a slowly
        growing queue would shrink between the measurements, and because each start of the client costs time.
        """
        return self._measure(endpoint, load, seconds * count, math.inf, count)

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Apply the load for WARM_UP_SECONDS and return the result; None if it is not stable.

        Do nothing for a model that streams: the lead-in of each load warms its server up. Raises ServerCrashed
        if the server no longer answers. Other errors are left to ``measure``.
        """
        if self.is_streaming:
            return None
        try:
            (result,) = self._measure(endpoint, load, WARM_UP_SECONDS, math.inf)
        except ServerCrashed:
            raise
        except MeasurementError:
            return None
        if not result.stable:
            return None
        return Measurement(
            result.throughput_infer_per_sec, latency_p95_ms=result.latency_p95_ms, requests=result.requests
        )

    @property
    def latency_bound_ms(self) -> float:
        """The largest bound on the latency; 0 without one."""
        return max(self.sla.bounds_ms(LATENCY), default=0.0)

    @property
    def _longest_seconds(self) -> float:
        """The duration of the longest measurement in which no request may be answered."""
        return MIN_WINDOWS * longest_window_ms(self.latency_bound_ms) / 1000

    def default_seconds(self, load: LoadPoint) -> float:
        """Return the duration of a measurement whose caller gives none."""
        raise NotImplementedError

    def _measure(
        self, endpoint: Endpoint, load: LoadPoint, seconds: float, spread_limit: float, parts: int = 1
    ) -> list[Measurement]:
        """Return the measurements of ``parts`` equal parts of ``seconds``. Raises the errors of ``measure``."""
        raise NotImplementedError

    def _launch(
        self, endpoint: Endpoint, load: LoadPoint, schedule: Schedule, summarize: Summarize, spread_limit: float
    ) -> list[Measurement]:
        """Apply a load by ``schedule`` and return what ``summarize`` makes of the record."""
        messages = self._messages_for(endpoint, load)
        order = self._order(messages, schedule)
        plan = self._send_plan(endpoint, schedule)
        before = self._statistics(endpoint)
        with self._sending(endpoint, messages, schedule.concurrency) as requests:
            task = ClientTask(endpoint.connection, plan, requests, schedule.planned_ns, order.tolist())
            record, client_seconds = self.run_client(task, self.log, self.cpus, self.stopwatch)
        _check_server(endpoint, record)
        sizes, priorities = messages.sizes, messages.priorities
        if len(order):
            sizes, priorities = sizes[order], priorities[order] if len(priorities) else ALIKE
        seconds, lead_in_seconds = schedule.seconds, schedule.lead_in_seconds
        planned = PlannedLoad(load, seconds, sizes, self.token_output, priorities, lead_in_seconds, self.sla)
        measurements = summarize(record, planned, spread_limit, schedule.parts)
        after = self._statistics(endpoint)
        measure_seconds = round(client_seconds / len(measurements), 3)
        return [
            with_all_statistics(replace(measurement, measure_seconds=measure_seconds), endpoint, before, after)
            for measurement in measurements
        ]

    def _order(self, messages: Messages, schedule: Schedule) -> IntArray:
        """Return which message is sent for each request; IN_TURN if the messages are sent in turn."""
        classes = schedule.classes
        if self.priorities is not None and not len(classes):
            drawn = self.priorities.draw(DRAWN_PRIORITIES, np.random.default_rng(self.seed))
            classes = np.searchsorted([level for level, _, _ in self.priorities.choices], drawn)
        return messages.order(classes) if len(classes) else IN_TURN

    def _send_plan(self, endpoint: Endpoint, schedule: Schedule) -> SendPlan:
        """Return the task of the client process."""
        concurrency = schedule.concurrency
        stream = StreamPlan(
            first_response_bound_ms=max(self.sla.bounds_ms(TTFT), default=0.0),
            fewest_requests=concurrency and max(3 * concurrency, MIN_WINDOWS * MIN_STREAMED_REQUESTS),
            windows=schedule.parts,
            window_requests=MIN_STREAMED_REQUESTS,
            longest_seconds=max(schedule.seconds, self._longest_seconds),
            lead_in_requests=schedule.lead_in_requests,
        )
        return SendPlan(
            tuple(server.connection.address for server in endpoint.servers),
            self.latency_bound_ms,
            concurrency=concurrency,
            seconds=schedule.warm_up_seconds + schedule.seconds,
            period_seconds=schedule.period_seconds,
            stream=stream if self.is_streaming else None,
            sequence_lengths=self._sequence_lengths(),
            counts_failures=self.counts_failures,
        )

    def _sending(
        self, endpoint: Endpoint, messages: Messages, concurrency: int
    ) -> AbstractContextManager[OutgoingRequests]:
        """Return the requests to send, with their tensors in shared memory if there is any."""
        if self.shared_memory is None:
            return contextlib.nullcontext(OutgoingRequests(messages.serialized))
        outputs = output_bytes(
            messages.metadata,
            int(messages.sizes.max()),
            self.shared_memory.output_bytes,
            has_batch=endpoint.largest_request > 0,
        )
        servers = [server.connection for server in endpoint.servers]
        return in_shared_memory(servers, messages.serialized, outputs, concurrency)

    def _statistics(self, endpoint: Endpoint) -> dict[str, ModelStatistics]:
        with self.stopwatch.count("server"):
            return read_all_statistics(endpoint)

    def _sequence_lengths(self) -> tuple[int, ...]:
        """Return the requests of each sequence, in turn; nothing for requests that are independent of each other."""
        return ()

    @property
    def _mixes_sizes(self) -> bool:
        """Whether requests differ in the number of samples, so that few requests would not have all sizes."""
        return self.request_mix is not None

    def _message_count(self, load: LoadPoint, repeated: int) -> int:
        """Return how many distinct requests are sent in turn; they have all entries of the data file.

        The file may have many small entries and a few large ones, so its limit is that of all its bytes. Its
        entries take as many passes as give ``repeated`` requests, or fewer if the requests repeat earlier.
        """
        entries = min(count_entries(self.input_data), MAX_SENT_ENTRIES)
        share = min(1.0, MAX_SENT_BYTES / self.input_data.stat().st_size)
        entries = max(1, math.floor(share * entries))
        if self._mixes_sizes:
            return entries * math.ceil(repeated / entries)
        size = round(load.request_batch_size)
        passes = min(size // math.gcd(entries, size), math.ceil(repeated * size / entries))
        return math.ceil(passes * entries / size)

    def _request_classes(self, load: LoadPoint, count: int) -> RequestClasses:
        """Return ``count`` requests of the load for each priority, of the same sizes, ordered by priority."""
        levels = [level for level, _, _ in self.priorities.choices] if self.priorities else [0]
        sizes = np.full(count, round(load.request_batch_size))
        if self.request_mix is not None:
            sizes = self.request_mix.draw(count, np.random.default_rng(self.seed))
        numbers = np.repeat(np.arange(len(levels)), count)
        return RequestClasses(np.tile(sizes, len(levels)), np.array(levels)[numbers], numbers)

    def _messages_for(self, endpoint: Endpoint, load: LoadPoint) -> Messages:
        """Return the requests of this load (cached). Raises BadInputError, MeasurementError."""
        key = (endpoint.model, endpoint.largest_request > 0, load.request_batch_size)
        if key not in self._messages:
            self._messages[key] = self._make_messages(endpoint, load)
        return self._messages[key]

    def _make_messages(self, endpoint: Endpoint, load: LoadPoint) -> Messages:
        """Return the requests of this load. Raises BadInputError, MeasurementError or ServerCrashed."""
        try:
            metadata = server_calls.model_metadata(endpoint)
        except DeploymentError as error:
            kind = MeasurementError if all_servers_respond(endpoint) else ServerCrashed
            raise kind(str(error)) from error
        mix = self.request_mix
        largest_size = mix.largest if mix else round(load.request_batch_size)
        (largest,) = self._serialize(endpoint, metadata, [largest_size], [0])
        min_count = 1 if mix is None else MIN_MIXED_MESSAGES
        max_count = MAX_SENT_BYTES // len(largest) // (len(self.priorities.choices) if self.priorities else 1)
        count = self._message_count(load, min(MAX_REPEATED, max(min_count, max_count)))
        classes = self._request_classes(load, count)
        order = np.arange(len(classes.numbers)) if classes.entry_order is None else classes.entry_order
        in_entry_order = self._serialize(
            endpoint, metadata, classes.sizes[order].tolist(), classes.priorities[order].tolist()
        )
        serialized = [in_entry_order[index] for index in np.argsort(order).tolist()]
        priorities = classes.priorities if classes.priorities.any() else ALIKE
        return Messages(serialized, classes.sizes, metadata, classes.numbers, priorities)

    def _serialize(
        self,
        endpoint: Endpoint,
        metadata: ModelMetadataResponse,
        sizes: Sequence[int],
        priorities: Sequence[int],
    ) -> list[bytes]:
        """Return a serialized request for each size and priority, with the entries of the data file in this order."""
        inputs = read_request_inputs(
            metadata,
            endpoint.largest_request,
            input_data=self.input_data,
            shapes=self.shapes,
            request_batch_sizes=sizes,
        )
        pairs = zip(inputs, priorities, strict=True)
        return [to_message(endpoint.model, tensors, priority) for tensors, priority in pairs]


def _check_server(endpoint: Endpoint, record: SendRecord) -> None:
    """Raise ServerCrashed if a server or a model has died or hangs according to ``record``."""
    fatal = next(filter(model_died, (record.error, *(record.failures or ()))), "")
    if (record.overload or record.error) and (silent := unresponsive_server(endpoint)):
        reason = f"{without_traceback(record.error) or record.overload}; {silent} no longer answers"
    elif record.hangs or fatal:
        reason = without_traceback(fatal or record.error)
    else:
        return
    raise ServerCrashed(reason, lacks_gpu_memory=lacks_gpu_memory(reason))
