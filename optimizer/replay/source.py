"""What ``--warm-start`` names: the study of another machine, and what of it fits the problem here."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.machine.fingerprint import Fingerprint, read
from optimizer.problem import Problem
from optimizer.profile.safe_paths import is_file, is_folder
from optimizer.replay.baselines import baselines
from optimizer.replay.recording import read_recording
from optimizer.report import words
from optimizer.search.elsewhere import Elsewhere
from optimizer.store.run_folder import MAX_INFO_BYTES, RunFolder
from optimizer.store.trials_table import read_foreign
from optimizer.trial import Candidate, Trial
from optimizer.untrusted import one_line, read_bytes

FLAG = "--warm-start"


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
    fit_size = other_size = outside = 0
    for trial in source.trials:
        own = [(load, m) for load, m in trial.measurements if load.request_batch_size == problem.request_batch_size]
        other_size += len(trial.measurements) - len(own)
        fit_size += len(own)
        candidate = space.canonical(trial.candidate)
        if own and (space.values_of(candidate) is not None or candidate in compared):
            kept.append(replace(trial, candidate=candidate, measurements=tuple(own), confirmations=()))
        else:
            outside += bool(own)
    if not kept:
        raise BadInputError(f"{FLAG} {source.name}: {_nothing(source, problem, fit_size, other_size)}; leave it out")
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


def _nothing(source: Source, problem: Problem, fit_size: int, other_size: int) -> str:
    if fit_size:
        return "none of its configurations lies in this space"
    if other_size:
        return f"its requests had other sizes than {problem.request_batch_size:g} samples"
    return "nothing was measured in it"
