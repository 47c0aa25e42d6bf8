"""What the driver sends a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.load.sweep import SweepRules
from optimizer.trial import Trial


@dataclass(frozen=True, slots=True)
class SearchJob:
    """One trial, from where it stands; the search has to end in ``seconds_left``. ``references`` are the answers to
    compare with, by the name of their file, for a worker that may have none."""

    trial: Trial
    role: str
    rules: SweepRules
    seconds_left: float
    references: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ConfirmJob:
    """The last part of a study, on one worker. ``trials`` are all of them."""

    trials: tuple[Trial, ...]
    seconds_left: float
    references: Mapping[str, bytes]


Job = SearchJob | ConfirmJob
