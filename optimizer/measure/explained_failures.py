"""Load generators that explain the failures of another one, which shared memory or the requests have caused."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint, SharedMemory
from optimizer.core.errors import BadInputError, MeasurementError, RequestFailed, ServerCrashed
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.safe_text import one_line
from optimizer.core.trial import LoadPoint
from optimizer.measure.server_errors import is_refused_by_queue, lacks_gpu_memory, lacks_memory
from optimizer.measure.shared_memory import check_is_shared

T = TypeVar("T")


@dataclass
class ExplainingLoadGenerator(ABC):
    """Wraps ``load_generator`` and explains its failures. Each method raises BadInputError too."""

    load_generator: LoadGenerator

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        return self._explain(endpoint, lambda: self.load_generator.measure(endpoint, load, seconds))

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return self._explain(endpoint, lambda: self.load_generator.measure_windows(endpoint, load, seconds, count))

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return self._explain(endpoint, lambda: self.load_generator.warm_up(endpoint, load))

    @abstractmethod
    def _explain(self, endpoint: Endpoint, measure: Callable[[], T]) -> T:
        """Return the result of ``measure``, which sends requests to ``endpoint``. Raises BadInputError too."""


_TOO_SMALL = "shared memory size specified with the request for output"


@dataclass
class SharedMemoryLoadGenerator(ExplainingLoadGenerator):
    """Wraps ``load_generator``, whose requests use shared memory, and explains failures that this causes.

    Before the first load it checks whether the server maps ``system`` shared memory of this machine. Raises
    BadInputError if it does not, or if an output is larger than its shared memory: all measurements would fail.
    """

    shared_memory: SharedMemory
    _is_checked: bool = field(default=False, init=False)

    def _explain(self, endpoint: Endpoint, measure: Callable[[], T]) -> T:
        if self.shared_memory.kind == "system" and not self._is_checked:
            check_is_shared(endpoint)
            self._is_checked = True
        try:
            return measure()
        except MeasurementError as error:
            if _TOO_SMALL not in str(error):
                raise
            raise BadInputError(
                f"{one_line(str(error), 2 * _MAX_CAUSE)}; set a larger --output-shared-memory-size, which is "
                "the size for each sample of an output of strings or of variable shape",
                log=error.log,
            ) from error


_INDEX_ERROR = re.compile(
    r"out of (?:data |the )?(?:bounds|range)|outside (?:the )?(?:bounds|range)|is not in \[0|index\w* out of"
    r"|(?:indices|index)\b.{0,80}must be (?:within|less|in)|IndexError|device-side assert\b",
    re.IGNORECASE,
)
_VALID_RANGE = re.compile(r"range \[-?\d{1,18}, ?(\d{1,18})\]")  # part of a message of ONNX Runtime
_EXAMPLE_HIGHEST = "30521"
_RAISED_BY_MODEL = "Failed to process the request(s) for model"  # how Triton's Python backend reports an exception
_REFUSED_DATA = "Failed to init manager inputs"  # perf_analyzer's message
_MAX_NAMES, _MAX_CAUSE = 100, 200  # limits in characters
REFUSED_CONFIGURATIONS = 3  # configurations whose measurements all failed with one error
_NUMBERS = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", re.IGNORECASE)


def index_hint(message: str, unbounded: tuple[str, ...], other_model: str = "") -> str:
    """Return how to avoid a request that failed with an index out of bounds; an empty string for other messages.

    ``unbounded`` are the inputs with random integers of the whole range of their type. ``other_model`` is the name of
    their model if it is another one than the tuned model, which alone can get recorded requests.
    """
    if not unbounded or not _INDEX_ERROR.search(message):
        return ""
    valid = _VALID_RANGE.search(message)
    return _bounds_hint(
        unbounded, other_model, "which may be an index", f"0..{valid[1] if valid else _EXAMPLE_HIGHEST}"
    )


def duration_hint(unbounded: tuple[str, ...], other_model: str = "") -> str:
    """Return how to avoid a request that takes too long; arguments as in ``index_hint``, at least one input."""
    return _bounds_hint(unbounded, other_model, "which may be a number of responses or a duration", "1..10")


def _bounds_hint(unbounded: tuple[str, ...], other_model: str, meaning: str, example: str) -> str:
    names = one_line(", ".join(unbounded), _MAX_NAMES)
    bounded = ",".join(unbounded)  # the message of a failure does not say which input is meant
    if len(bounded) > _MAX_NAMES:
        bounded = one_line(unbounded[0], 60)
    return (
        f"the random data of {names}, {meaning}, includes all integers of its type: give bounds, such "
        f"as --input-range {bounded}:{example}, or {_real_requests(other_model)}"
    )


def _real_requests(other_model: str) -> str:
    if not other_model:
        return "real requests with --input-data FILE"
    name = one_line(other_model, 60)
    return f"tune {name} instead, because only the tuned model gets real requests (--input-data FILE)"


def random_numbers_hint(message: str) -> str:
    """Return how to give other numbers than random ones if a model in Python raised an exception; else nothing.

    Backends in Python, such as tritune's own for ONNX Runtime, also raise one if the server lacks memory.
    """
    if _RAISED_BY_MODEL not in message or lacks_memory(message) or lacks_gpu_memory(message):
        return ""
    return (
        "random floats are normally distributed, and random integers are any value of their type: if the model takes "
        "others, give bounds with --input-range NAME:LOW..HIGH, or real requests with --input-data FILE"
    )


def refusal_hint(message: str, *, is_stateful: bool) -> str:
    """Return what to do if each measurement of REFUSED_CONFIGURATIONS configurations failed with ``message``.

    The text is empty if a queue refused the requests, or if the server lacks memory: a lower load, or another
    candidate, may serve them.
    """
    if is_refused_by_queue(message) or lacks_memory(message) or lacks_gpu_memory(message):
        return ""
    remedies = "give requests that the model takes with --input-data FILE, or correct the model"
    if not is_stateful:  # a failed request makes the rest of its sequence void
        remedies += ", or permit some failures with --max-error-rate"
    return (
        f"no measurement succeeded in the first {REFUSED_CONFIGURATIONS} configurations, so they are not the cause: "
        f"{remedies}"
    )


@dataclass
class RefusedRequestsLoadGenerator(ExplainingLoadGenerator):
    """Wraps ``load_generator`` and explains failures that the data of the requests cause.

    The error message ends with a hint if perf_analyzer cannot read the requests, or if one fails because an index is
    out of bounds and an input in ``unbounded`` has random integers. With ``has_unbounded_numbers`` (random numbers
    without bounds) it also does so if a model in Python raised an exception. Before the first successful measurement
    the error is a BadInputError, which ends the run, since every configuration would fail in the same way. An
    exception of the model ends it at ``baseline`` only: another candidate may cause one itself, and after
    ``--resume`` or on a cluster it may be measured first. Any other error of the model ends it once
    REFUSED_CONFIGURATIONS configurations, ``baseline`` among them, have failed with it. ``other_models`` get load
    too, and a message may be about one of them.
    """

    unbounded: tuple[str, ...]
    has_unbounded_numbers: bool = False
    baseline: Candidate | None = None
    is_stateful: bool = False
    other_models: tuple[str, ...] = ()
    _measured: bool = field(default=False, init=False)
    _refused: dict[str, set[Candidate]] = field(default_factory=dict, init=False)  # by error, without its numbers

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return self.load_generator.warm_up(endpoint, load)

    def _explain(self, endpoint: Endpoint, measure: Callable[[], T]) -> T:
        try:
            result = measure()
        except MeasurementError as error:
            hint, fails_always = index_hint(str(error), self.unbounded), not self._measured
            if _REFUSED_DATA in str(error):
                hint = "perf_analyzer does not take these requests: correct the file of --input-data"
            if not hint and self.has_unbounded_numbers:
                hint = random_numbers_hint(str(error))
                fails_always = fails_always and endpoint.candidate == self.baseline
            if not hint and self._is_always_refused(endpoint, error):
                hint, fails_always = refusal_hint(str(error), is_stateful=self.is_stateful), True
            if not hint or isinstance(error, ServerCrashed):
                raise
            if self.other_models:
                names = one_line(", ".join(self.other_models), _MAX_NAMES)
                hint += f"; {names} can get bounds only, with --input-range MODEL/INPUT:LOW..HIGH"
            kind = BadInputError if fails_always else MeasurementError
            raise kind(f"{one_line(str(error), _MAX_CAUSE)}; {hint}", log=error.log) from error
        self._measured = True
        return result

    def _is_always_refused(self, endpoint: Endpoint, error: MeasurementError) -> bool:
        """Return whether no measurement has succeeded, and ``error`` was the same in enough configurations."""
        if self._measured or not isinstance(error, RequestFailed):
            return False
        same = _NUMBERS.sub("", str(error))  # loads, values and the numbers of instances differ
        self._refused.setdefault(same, set()).add(endpoint.candidate)
        return self.baseline in self._refused[same] and len(self._refused[same]) >= REFUSED_CONFIGURATIONS
