"""A task with the files that it names, as it travels to the nodes: packed once, unpacked by each worker."""

from __future__ import annotations

import copyreg
import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import METRICS
from optimizer.errors import EnvironmentFault
from optimizer.options import RunOptions
from optimizer.profile.schema import ScoreSection
from optimizer.profile.values import MetricFunction
from optimizer.requests.fitted import MADE_UP
from optimizer.task import Task

MODELS = Path("models")
NO_FILE = ("poisson", "constant")  # that arrivals can be
Place = Callable[[Path], Path]


@dataclass(frozen=True)
class Parcel:
    """``task`` and ``arrivals`` name files by where they are in ``files``, a tar. ``objectives`` are the task's, by
    name: as objects they would be other ones on the other side."""

    task: Task
    arrivals: str
    objectives: tuple[str, ...]
    files: bytes


def pack(task: Task, options: RunOptions) -> Parcel:
    """Raises EnvironmentFault where a file cannot be read."""
    names: dict[Path, Path] = {}

    def place(path: Path) -> Path:
        return names.setdefault(path.absolute(), Path("files", str(len(names)), path.name))

    source = task.source
    models = {MODELS / name: source.folder(name) for name in source.models}
    moved = replace(_moved(task, place, MODELS), problem=replace(task.problem, objectives=()))
    arrivals = options.arrivals if options.arrivals in NO_FILE else str(place(Path(options.arrivals)))
    files = models | {name: path for path, name in names.items()}
    return Parcel(moved, arrivals, tuple(metric.name for metric in task.problem.objectives), _tar(files))


def unpack(parcel: Parcel, folder: Path) -> tuple[Task, str]:
    """The task with its files in ``folder``, and what ``--arrivals`` is there. Raises EnvironmentFault where the
    disk refuses them."""
    try:
        with tarfile.open(fileobj=io.BytesIO(parcel.files)) as archive:
            archive.extractall(folder, filter="data")
    except OSError as error:
        why = error.strerror or "it cannot be written"
        raise EnvironmentFault(
            f"no room for the model on this node: {why}; free space there or set TMPDIR"
        ) from error
    problem = replace(parcel.task.problem, objectives=tuple(METRICS[name] for name in parcel.objectives))
    task = replace(_moved(parcel.task, lambda path: folder / path, folder / MODELS), problem=problem)
    return task, parcel.arrivals if parcel.arrivals in NO_FILE else str(folder / parcel.arrivals)


def _moved(task: Task, place: Place, repository: Path) -> Task:
    """With each file where ``place`` says, its models in ``repository``."""

    def text(sent: str) -> str:
        return sent if sent in MADE_UP else str(place(Path(sent)))

    own = task.source.input_data
    source = replace(task.source, repository=repository, elsewhere={}, input_data=None if own is None else place(own))
    return replace(
        task,
        source=source,
        input_data=text(task.input_data),
        score=None if task.score is None else _score(task.score, place),
        concurrent={name: replace(sent, input_data=text(sent.input_data)) for name, sent in task.concurrent.items()},
    )


def _reduced(config: ModelConfig) -> tuple[Callable[[bytes], ModelConfig], tuple[bytes]]:
    """How Python pickles it: its own way names a module that cannot be imported."""
    return _read, (config.SerializeToString(),)


def _read(content: bytes) -> ModelConfig:
    config = ModelConfig()
    config.ParseFromString(content)
    return config


copyreg.pickle(ModelConfig, _reduced)


def _score(score: ScoreSection, place: Place) -> ScoreSection:
    metric = score.metric
    if isinstance(metric, MetricFunction):
        metric = metric._replace(file=place(metric.file))
    return score.model_copy(update={"data": place(score.data), "metric": metric})


def _tar(files: Mapping[Path, Path]) -> bytes:
    """By the name that each gets; links are followed."""
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
            for name, path in files.items():
                archive.add(path, str(name))
    except OSError as error:
        raise EnvironmentFault(f"{error.filename or 'a file of the model'}: {error.strerror}; see to it") from error
    return packed.getvalue()
