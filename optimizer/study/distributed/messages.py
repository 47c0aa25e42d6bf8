"""Messages between driver and workers: events, jobs, and the task with its files."""

from __future__ import annotations

import copyreg
import io
import queue
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from objectives.metrics import METRICS, Measurement
from optimizer.config.model_config_proto import ModelConfig
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.candidate import Candidate
from optimizer.core.errors import EnvironmentFault
from optimizer.core.notes import Note
from optimizer.core.trial import FreshServer, LoadPoint, Point, Trial, TrialRole
from optimizer.measure.load_search import LoadSearchRules
from optimizer.model.profile_schema import ScoreSection
from optimizer.model.profile_types import MetricFunction
from optimizer.options.run_options import RunOptions, is_distribution
from optimizer.study.task import Task


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """The worker has started a trial."""

    number: int
    candidate: Candidate
    role: TrialRole


@dataclass(frozen=True, slots=True)
class LoadMeasured:
    """A new row of the trials table; ``fresh`` is None in the search."""

    trial: Trial
    load: LoadPoint
    measurement: Measurement
    fresh: FreshServer | None


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """The candidate of the trial could not be deployed."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class ConfirmationPlanned:
    """The plan of the confirmation is fixed; its windows follow."""

    plan: ConfirmationPlan


@dataclass(frozen=True, slots=True)
class ConfirmationStep:
    """The confirmation has measured ``trial`` on one server."""

    trial: Trial
    best: Point | None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the user."""

    line: str


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial of the search has ended.

    ``log`` is the end of the server's log if it failed. ``references`` are the baseline's outputs by file name, if
    this worker has just taken them. ``notes`` are for the user, on all deployments of the worker so far.
    """

    trial: Trial
    log: str
    references: Mapping[str, bytes]
    notes: tuple[Note, ...]
    server_version: str


@dataclass(frozen=True, slots=True)
class ConfirmationEnded:
    """The confirmation has ended. ``trials`` are all trials; ``notes`` are as those of TrialEnded."""

    trials: tuple[Trial, ...]
    notes: tuple[Note, ...]
    server_version: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker cannot continue.

    ``log`` is the end of the log; ``everywhere`` is true if no other worker could continue either.
    """

    reason: str
    log: str
    everywhere: bool


Event: TypeAlias = (
    TrialStarted
    | LoadMeasured
    | TrialFailed
    | ConfirmationPlanned
    | ConfirmationStep
    | LogLine
    | TrialEnded
    | ConfirmationEnded
    | WorkerFailed
)


@dataclass
class Outbox:
    """A queue of events for the driver. To the measurer it is a TrialStore and a ProgressObserver."""

    _waiting: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def put(self, event: Event) -> None:
        """Add an event."""
        self._waiting.put(event)

    def take(self, seconds: float) -> list[Event]:
        """Return all waiting events; if there are none, wait up to ``seconds`` for the first one."""
        events: list[Event] = []
        try:
            events.append(self._waiting.get(timeout=seconds))
            while True:
                events.append(self._waiting.get_nowait())
        except queue.Empty:
            return events

    def send_line(self, line: str) -> None:
        self.put(LogLine(line))

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, fresh: FreshServer | None = None
    ) -> None:
        self.put(LoadMeasured(trial, load, measurement, fresh))

    def append_failure(self, trial: Trial) -> None:
        self.put(TrialFailed(trial))

    def read(self) -> list[Trial]:
        """Return nothing: the driver has the table."""
        return []

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None:
        self.put(TrialStarted(number, candidate, role))

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        """Do nothing: ``append`` reports the measurement."""

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self.put(ConfirmationStep(trial, best))


@dataclass(frozen=True, slots=True)
class SearchJob:
    """A trial of the search, with its measurements so far.

    The search ends in ``seconds_left``. ``references`` are the baseline's outputs by file name, for a worker that may
    lack them.
    """

    trial: Trial
    role: TrialRole
    rules: LoadSearchRules
    seconds_left: float
    references: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ConfirmJob:
    """The confirmation of a study. ``trials`` are all its trials; ``plan`` is that of an earlier session."""

    trials: tuple[Trial, ...]
    plan: ConfirmationPlan | None
    seconds_left: float
    references: Mapping[str, bytes]


ClusterJob = SearchJob | ConfirmJob


MODELS = Path("models")
Relocate = Callable[[Path], Path]


@dataclass(frozen=True)
class TaskBundle:
    """A task for another machine, with all its files.

    Paths in ``task`` and ``arrivals`` are relative to the tar archive ``files``. ``objectives`` are the names of the
    task's metrics: a pickled metric would not be identical to the one on the other machine.
    """

    task: Task
    arrivals: str
    objectives: tuple[str, ...]
    files: bytes


def pack(task: Task, options: RunOptions) -> TaskBundle:
    """Return ``task`` with all its files. Raises EnvironmentFault if a file cannot be read."""
    names: dict[Path, Path] = {}

    def place(path: Path) -> Path:
        return names.setdefault(path.absolute(), Path("files", str(len(names)), path.name))

    source = task.source
    models = {MODELS / name: source.folder(name) for name in source.models}
    moved = replace(_moved(task, place, MODELS), problem=replace(task.problem, objectives=()))
    times = options.request_times
    arrivals = times if is_distribution(times) else str(place(Path(times)))
    files = models | {name: path for path, name in names.items()}
    return TaskBundle(moved, arrivals, tuple(metric.name for metric in task.problem.objectives), _tar(files))


def unpack(bundle: TaskBundle, folder: Path) -> tuple[Task, str]:
    """Return the task with its files in ``folder``, and the request distribution, or its file of intervals there.

    Raises EnvironmentFault if the disk refuses the files.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(bundle.files)) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12 has Python 3.11.2
            archive.extractall(folder)
    except OSError as error:
        reason = error.strerror or "it cannot be written"
        raise EnvironmentFault(
            f"no space for the model on this node: {reason}; free space there or set TMPDIR"
        ) from error
    problem = replace(bundle.task.problem, objectives=tuple(METRICS[name] for name in bundle.objectives))
    task = replace(_moved(bundle.task, lambda path: folder / path, folder / MODELS), problem=problem)
    return task, bundle.arrivals if is_distribution(bundle.arrivals) else str(folder / bundle.arrivals)


def _moved(task: Task, place: Relocate, repository: Path) -> Task:
    """Return ``task`` with each file at the path that ``place`` returns, and its models in ``repository``."""
    input_data = task.source.input_data
    source = replace(task.source, repository=repository, input_data=None if input_data is None else place(input_data))
    return replace(
        task,
        source=source,
        input_data=place(task.input_data),
        score=None if task.score is None else _score(task.score, place),
        concurrent={name: replace(sent, input_data=place(sent.input_data)) for name, sent in task.concurrent.items()},
    )


def _parse(content: bytes) -> ModelConfig:
    config = ModelConfig()
    config.ParseFromString(content)
    return config


# a ModelConfig is pickled by its serialized form: its default way names a module that cannot be imported
copyreg.pickle(ModelConfig, lambda config: (_parse, (config.SerializeToString(),)))


def _score(score: ScoreSection, place: Relocate) -> ScoreSection:
    metric = score.metric
    if isinstance(metric, MetricFunction):
        metric = metric._replace(file=place(metric.file))
    return score.model_copy(update={"data": place(score.data), "metric": metric})


def _tar(files: Mapping[Path, Path]) -> bytes:
    """Return a tar archive of ``files`` (name in the archive: path); links are followed."""
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
            for name, path in files.items():
                archive.add(path, str(name))
    except OSError as error:
        raise EnvironmentFault(
            f"{error.filename or 'a file of the model'}: {error.strerror}; make it readable"
        ) from error
    return packed.getvalue()
