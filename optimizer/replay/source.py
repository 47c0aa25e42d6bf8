"""What ``--warm-start`` names: the study of another machine, and what of it fits the problem here."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.errors import BadInputError
from optimizer.machine.fingerprint import Fingerprint, read
from optimizer.problem import Problem
from optimizer.profile.safe_paths import is_file, is_folder
from optimizer.replay.baselines import baselines
from optimizer.replay.recording import read_recording
from optimizer.replay.rows import MOST, MOST_MS
from optimizer.report import words
from optimizer.search.elsewhere import Elsewhere
from optimizer.store.run_folder import MAX_INFO_BYTES, RunFolder
from optimizer.store.trials_table import read_foreign
from optimizer.trial import Candidate, LoadPoint, Trial
from optimizer.untrusted import one_line, read_bytes

FLAG = "--warm-start"
MOST_CONCURRENCY = 1024  # unless as much is measured here


@dataclass(frozen=True)
class Source:
    """``name`` as given; ``model`` and ``fingerprint`` are empty and None where the study does not tell."""

    name: str
    trials: tuple[Trial, ...]
    model: str = ""
    fingerprint: Fingerprint | None = None


def read_source(given: str, out: str, request_batch_size: float) -> Source:
    """The trials of a run, of a sweep, or in a table, as far as they were written.

    ``given`` is a folder, also one in ``out``, or a table. Raises BadInputError where there is no such thing.
    """
    name = one_line(given)
    for path in (Path(given), Path(out) / given):
        if is_file(path):
            return _of_table(name, path, path.parent)
        for table in (RunFolder(path).trials, path / f"trials-b{request_batch_size:g}.csv"):
            if is_file(table):
                return _of_table(name, table, path)
        if is_folder(path):
            raise BadInputError(f"{FLAG} {name}: nothing was measured in it; give the folder of a run, or a table")
    raise BadInputError(f"{FLAG} {name}: there is no such run; give its folder, or a table such as its trials.csv")


def fitting(source: Source, problem: Problem, compared: Collection[Candidate]) -> tuple[Elsewhere, tuple[str, ...]]:
    """What of ``source`` can be expected here: what it measured of configurations in the space, or ``compared``, with
    requests of as many samples. With it what the user should know of the rest.

    Raises BadInputError where nothing fits.
    """
    space, kept = problem.space, list[Trial]()
    usual = {space.canonical(candidate) for candidate in compared}
    other_size = outside = 0
    for trial in source.trials:
        measured = [(load, m) for load, m in trial.measurements if _is_possible(trial.candidate, load, m, problem)]
        own = [(load, m) for load, m in measured if load.request_batch_size == problem.request_batch_size]
        other_size += len(measured) - len(own)
        candidate = space.canonical(trial.candidate)
        if own and (space.values_of(candidate) is not None or candidate in usual):
            kept.append(replace(trial, candidate=candidate, measurements=tuple(own), confirmations=()))
        else:
            outside += bool(own)
    if not kept:
        raise BadInputError(f"{FLAG} {source.name}: {_nothing(problem, outside, other_size)}; leave it out")
    told = [f"began with what {words.count(len(kept), 'configuration')} of {source.name} showed{_where(source)}"]
    if source.model and problem.model not in ("recorded", source.model):
        told.append(f"{source.name} is of the model {source.model}: how far it holds here, the measurements decide")
    if outside:
        told.append(f"{words.count(outside, 'configuration')} of {source.name} were left out: not in this space")
    if other_size:
        told.append(f"{words.count(other_size, 'measurement')} of {source.name} were left out: other request sizes")
    cpu_count = source.fingerprint.cpu_count if source.fingerprint and not source.fingerprint.gpus else None
    return Elsewhere(tuple(kept), cpu_count or None), tuple(told)


def elsewhere_of(given: str | None, problem: Problem) -> tuple[Elsewhere | None, tuple[str, ...]]:
    """Both of these for a recorded table."""
    if given is None:
        return None, ()
    compared = [candidate for _, candidate in baselines(problem.space)]
    return fitting(read_source(given, "", problem.request_batch_size), problem, compared)


def _of_table(name: str, table: Path, folder: Path) -> Source:
    known = read_foreign(table)
    fingerprint = _fingerprint(folder / "run.json")
    if known is None:
        return Source(name, tuple(read_recording(table).trials()), fingerprint=fingerprint)
    model, trials = known
    return Source(name, tuple(trials), model, fingerprint)


def _fingerprint(info: Path) -> Fingerprint | None:
    """None, too, where run.json is not there or not intact: the table counts."""
    if not is_file(info):
        return None
    try:
        document = json.loads(read_bytes(info, MAX_INFO_BYTES, "give the folder of a run"))
        return read(document.get("fingerprint"))
    except (BadInputError, ValueError, AttributeError, RecursionError):
        return None


def _where(source: Source) -> str:
    return f" on {one_line(str(source.fingerprint), 200)}" if source.fingerprint else ""


def _nothing(problem: Problem, outside: int, other_size: int) -> str:
    if outside:
        return "none of its configurations lies in this space"
    if other_size:
        return f"its requests had other sizes than {problem.request_batch_size:g} samples"
    return "nothing was measured in it"


def _is_possible(candidate: Candidate, load: LoadPoint, measurement: Measurement, problem: Problem) -> bool:
    """Whether a server can have given these figures, at a load that can be simulated: the table may come from
    anywhere."""
    figures = [value for name, value in asdict(measurement).items() if name.endswith("_ms") and value is not None]
    throughput = measurement.throughput_infer_per_sec
    largest = max(candidate.max_batch_size, load.request_batch_size)
    return (
        0 <= load.concurrency <= max(problem.max_concurrency, MOST_CONCURRENCY)
        and 0 <= load.request_rate <= MOST
        and throughput is not None
        and 0 < throughput <= MOST
        and all(0 <= value <= MOST_MS for value in figures)
        and all(
            size <= largest and compute_ns <= 1e6 * MOST_MS * executions
            for size, executions, compute_ns in batch_stats.from_text(measurement.batch_stats)
        )
    )
