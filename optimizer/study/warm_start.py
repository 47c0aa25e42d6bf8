"""Read the study of another run that ``--warm-start`` names, and select the trials that fit the problem."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from objectives import batch_stats, model_stats
from objectives.metrics import Measurement
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate, model_of_field
from optimizer.core.errors import BadInputError
from optimizer.core.notes import Note, OtherModelTransferred, TransferLeftOut, WarmStarted, WarmStartMissing
from optimizer.core.safe_text import is_file, is_folder, one_line
from optimizer.core.trial import LoadPoint, Trial
from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import DEFAULTS, RunOptions
from optimizer.results.finished_run import read_shares
from optimizer.store.recording import baselines, read_recording
from optimizer.store.run_folder import RUN_FILE, SWEEP_FILE, RunFolder, read_sweep_record
from optimizer.store.run_lookup import folder_of_runs_error, newest_run
from optimizer.store.trials_table import RunTable, read_run_table
from optimizer.study.task import Task

if TYPE_CHECKING:
    from optimizer.search.transfer import TransferredStudy


FLAG = "--warm-start"
MAX_TRANSFERRED_CONCURRENCY = 1024  # limit of transferred measurements, unless this problem allows more


@dataclass(frozen=True)
class WarmStartSource:
    """The trials of the study that ``--warm-start`` names. An unknown ``model`` is empty.

    ``cpu_count`` is the number of the server's CPUs; None if it served on a GPU or the number is unknown. ``shares``
    are those of the load of other models, see ``ModelSource.concurrent``; None if they are unknown.
    """

    name: str
    trials: tuple[Trial, ...]
    model: str = ""
    fingerprint: Fingerprint | None = None
    cpu_count: int | None = None
    shares: Mapping[str, float] | None = None


def read_warm_start(path_or_run: str, out: str, request_batch_size: float) -> WarmStartSource:
    """Return the trials of a run, a sweep or a table, finished or not.

    ``path_or_run`` is a table, a folder, the name of a folder in ``out``, or a name for ``newest_run``. Raises
    BadInputError if it is none.
    """
    name, newest = one_line(path_or_run), newest_run(path_or_run, out)
    for path in (Path(path_or_run), *([newest.path] if newest else []), Path(out) / path_or_run):
        if is_file(path):
            return _read_source(name, path, path.parent)
        for table in (RunFolder(path).trials, path / f"trials-b{request_batch_size:g}.csv"):
            if is_file(table):
                return _read_source(name, table, path)
        if error := folder_of_runs_error(str(path), FLAG, RUN_FILE, SWEEP_FILE):
            raise error
        if is_folder(path):
            raise BadInputError(f"{FLAG} {name}: it holds no measurements; give the folder of a run, or a table")
    raise BadInputError(
        f"{FLAG} {name}: no such run; give its folder (`tune runs` lists runs), or a table such as its trials.csv"
    )


def select_fitting(
    source: WarmStartSource,
    problem: Problem,
    compared: Sequence[Candidate],
    shares: Mapping[str, float] | None = None,
) -> tuple[TransferredStudy, tuple[Note, ...]]:
    """Return the trials of ``source`` that fit ``problem``, and notes on the rest.

    A trial fits if its configuration is in the space or in ``compared``. Settings of other models that the study did
    not vary, such as a sweep, are those of the first of ``compared``. Only measurements with the same request batch
    size count. Raises BadInputError if none fits, or if other models have not the ``shares`` of the load; None means
    that these are unknown.
    """
    from optimizer.search.transfer import TransferredStudy  # imports Optuna

    if None not in (shares, source.shares) and shares != source.shares:
        there, here = (_describe_load(problem.model, dict(loads or {})) for loads in (source.shares, shares))
        raise BadInputError(f"{FLAG} {source.name}: its load is {there}, and here it is {here}; leave it out")
    space, fitting = problem.space, list[Trial]()
    configured = {path: value for path, value in compared[0].fields if model_of_field(path)} if compared else {}
    baselines_here = {space.canonical(candidate) for candidate in compared}
    other_size = outside = 0
    for trial in source.trials:
        measured = [
            (load, m) for load, m in trial.measurements if _can_be_simulated(trial.candidate, load, m, problem)
        ]
        comparable = [(load, m) for load, m in measured if load.request_batch_size == problem.request_batch_size]
        other_size += len(measured) - len(comparable)
        fields = {**configured, **dict(trial.candidate.fields)}
        candidate = space.canonical(replace(trial.candidate, fields=tuple(sorted(fields.items()))))
        if comparable and (space.parameter_values(candidate) is not None or candidate in baselines_here):
            fitting.append(
                replace(trial, candidate=candidate, measurements=tuple(comparable), confirmations=(), cross_checks=())
            )
        else:
            outside += bool(comparable)
    if not fitting:
        raise BadInputError(f"{FLAG} {source.name}: {_why_none_fits(problem, outside, other_size)}; leave it out")
    machine = one_line(str(source.fingerprint), 200) if source.fingerprint else ""
    notes: list[Note] = [WarmStarted(len(fitting), source.name, machine)]
    if source.model and problem.model not in ("recorded", source.model):
        notes.append(OtherModelTransferred(source.name, source.model))
    if outside:
        notes.append(TransferLeftOut(outside, "configuration", source.name))
    if other_size:
        notes.append(TransferLeftOut(other_size, "measurement", source.name))
    return TransferredStudy(tuple(fitting), source.cpu_count), tuple(notes)


def load_for_recording(path_or_run: str | None, problem: Problem) -> tuple[TransferredStudy | None, tuple[Note, ...]]:
    """Return the trials of ``path_or_run`` that fit the ``problem`` of a recorded table, and notes on the rest.

    None without a ``path_or_run``. Raises BadInputError if it is no run, or none of its trials fits.
    """
    if path_or_run is None:
        return None, ()
    compared = [candidate for _, candidate in baselines(problem.space)]
    return select_fitting(read_warm_start(path_or_run, DEFAULTS.out, problem.request_batch_size), problem, compared)


def _read_source(name: str, table: Path, folder: Path) -> WarmStartSource:
    """Return the trials of ``table``, of a run or recorded, with the fingerprint in run.json of ``folder``."""
    run_table = read_run_table(table)
    if run_table is None:
        recording = read_recording(table)
        run_table = RunTable("", recording.trials(), recording.cpu_count)
    fingerprint, cpu_count = None, run_table.cpu_count
    with contextlib.suppress(BadInputError):  # only the table is needed, so run.json may be damaged
        fingerprint = RunFolder(folder).fingerprint()
    if cpu_count is None and fingerprint is not None and not fingerprint.gpus:
        cpu_count = fingerprint.cpu_count or None
    return WarmStartSource(name, tuple(run_table.trials), run_table.model, fingerprint, cpu_count, _shares_in(folder))


def _shares_in(folder: Path) -> dict[str, float] | None:
    """Return the shares of the load in the record of a run or a sweep; None if there is no intact one."""
    with contextlib.suppress(BadInputError):
        is_sweep = is_file(folder / SWEEP_FILE)
        info = read_sweep_record(folder) if is_sweep else RunFolder(folder).read_info().get("problem")
        return read_shares(info) if isinstance(info, Mapping) else None
    return None


def _describe_load(model: str, shares: Mapping[str, float]) -> str:
    """Return the proportion of the load of ``model`` and of others, such as ``first 1, second 3``."""
    return ", ".join(f"{name} {share:g}" for name, share in {model: 1.0, **shares}.items())


def _why_none_fits(problem: Problem, outside: int, other_size: int) -> str:
    if outside:
        return "none of its configurations is in this space"
    if other_size:
        return f"its request batch sizes differ from {problem.request_batch_size:g}"
    return "it holds no measurements"


def _can_be_simulated(candidate: Candidate, load: LoadPoint, measurement: Measurement, problem: Problem) -> bool:
    """Return whether a measurement has a throughput and its load and batches can be simulated.

    The reader of the table has checked the range of each value.
    """
    largest = max(candidate.max_batch_size, load.request_batch_size)
    return (
        load.concurrency <= max(problem.max_concurrency, MAX_TRANSFERRED_CONCURRENCY)
        and bool(measurement.throughput_infer_per_sec)
        and model_stats.has_models((other.name for other in problem.concurrent), measurement)
        and all(size <= largest for size, _, _ in batch_stats.from_text(measurement.batch_stats))
    )


def load_warm_start(
    options: RunOptions, task: Task, resumed: RunFolder | None
) -> tuple[TransferredStudy | None, tuple[Note, ...]]:
    """Return the trials of the study that ``--warm-start`` names, and notes on them; None without that option.

    A run that is resumed does not need them: if they cannot be read, it continues with a note. The folder ``resumed``
    of a run that has not begun has no run.json. Raises BadInputError for a run that begins.
    """
    if options.warm_start is None:
        return None, ()
    compared = [candidate for _, candidate in task.comparisons()]
    try:
        source = read_warm_start(options.warm_start, options.out, task.problem.request_batch_size)
        return select_fitting(source, task.problem, compared, task.source.concurrent)
    except BadInputError as error:
        if resumed is None or not is_file(resumed.info):
            raise
        return None, (WarmStartMissing(str(error)),)
