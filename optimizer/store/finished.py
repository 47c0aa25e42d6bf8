"""A run as its folder tells of it, with its model or without: what reports, plans and answers are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objectives.metrics import METRICS
from objectives.sla import parse_constraint
from optimizer.options import RunOptions
from optimizer.outcome import Outcome, assess
from optimizer.problem import Problem
from optimizer.space import Space
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import SETTINGS, Candidate, Trial

UNKNOWN_CONCURRENCY = 256  # what the run might have gone up to says nothing of what it measured


@dataclass(frozen=True)
class FinishedRun:
    """``status`` is ``found``, ``none``, ``interrupted``, ``failed``, or ``running`` for one that is at work or was
    killed; ``info`` is run.json whole. ``outcome`` is None where nothing was measured.

    ``problem`` holds what run.json keeps of it: bounds, objectives, space and requests, no mix of their sizes.
    """

    folder: RunFolder
    options: RunOptions
    info: Mapping[str, Any]
    problem: Problem
    baseline: Candidate
    dynamic_batching: Candidate
    trials: tuple[Trial, ...]
    outcome: Outcome | None

    @property
    def status(self) -> str:
        return str(self.info.get("status", "running"))

    @property
    def name(self) -> str:
        """``<model>/<run>``"""
        return self.folder.study_name


def read_run(run: str | Path, out: str = "results") -> FinishedRun:
    """The run in the folder ``run``, or ``<model>/<run>`` in ``out``; a line that a crash tore is left out.

    Raises BadInputError, in one line, where there is none or it is damaged.
    """
    folder = RunFolder.find(str(run), out, "run")
    options, info = folder.read_options(), folder.read_info()
    try:
        problem = _problem(info["problem"], info["hardware"], options)
        compared = {role: info["problem"].get(role) for role in ("baseline", "dynamic_batching")}
        trials = tuple(TrialsTable(folder.trials, problem.model, problem.space.fields).read(mend=False))
        baseline = _candidate(compared["baseline"]) or _first(trials)
        plain = _candidate(compared["dynamic_batching"]) or _plain(trials, baseline)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise folder.no_record(f"no {error}" if isinstance(error, KeyError) else str(error)) from None
    outcome = assess(trials, problem, baseline, plain) if trials else None
    return FinishedRun(folder, options, info, problem, baseline, plain, trials, outcome)


def _problem(info: Mapping[str, Any], hardware: Mapping[str, Any], options: RunOptions) -> Problem:
    size = info["request_batch_size"]
    choices = {name: tuple(values) for name, values in info["space"].items()}
    own = {name: choices.pop(name) for name in SETTINGS if name in choices}
    return Problem(
        model=str(info["model"]),
        space=Space(**own, fields=choices, request_batch_size=size if isinstance(size, int) else 1),
        request_batch_size=size,
        max_concurrency=UNKNOWN_CONCURRENCY,
        objectives=tuple(METRICS[name] for name in info["objectives"]),
        constraints=tuple(map(parse_constraint, info["constraints"])),
        open_loop=options.load == "rate",
        cpu_count=None if hardware["gpus"] else hardware["cpu_count"],
        confidence=options.confidence,
    )


def _candidate(values: Mapping[str, Any] | None) -> Candidate | None:
    """From what ``candidate_document`` wrote."""
    if values is None:
        return None
    own = {name: values[name] for name in SETTINGS}
    own["preferred_batch_sizes"] = tuple(own["preferred_batch_sizes"])
    return Candidate(**own, fields=tuple(sorted((k, v) for k, v in values.items() if k not in SETTINGS)))


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    """As run.json keeps it: settings by their names, other fields by their paths."""
    own = {name: getattr(candidate, name) for name in SETTINGS}
    return {**own, "preferred_batch_sizes": list(candidate.preferred_batch_sizes), **dict(candidate.fields)}


def _first(trials: Sequence[Trial]) -> Candidate:
    """Runs of earlier versions do not tell what they compared with; they too measured the baseline first."""
    return trials[0].candidate if trials else Candidate(1)


def _plain(trials: Sequence[Trial], baseline: Candidate) -> Candidate:
    second = trials[1].candidate if len(trials) > 1 else baseline
    return second if second.dynamic_batching and not second.preferred_batch_sizes else baseline
