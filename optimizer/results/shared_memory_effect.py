"""The measured effect of shared memory on the throughput of a run's recommendation, as its file keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from objectives.intervals import ConfidenceInterval, GainRatio
from objectives.metrics import METRICS
from optimizer.core.errors import BadInputError
from optimizer.core.files import write_json
from optimizer.core.safe_text import one_line, read_bytes, show_path
from optimizer.results import formatting

FILE = "shared_memory.json"  # name of the file in the folder of the run
MAX_BYTES = 1 << 20
MAX_TEXT_LENGTH = 300
MAX_NUMBER = 1e12  # limit of any number in the file
SHOWN = METRICS["throughput"]


@dataclass(frozen=True, slots=True)
class SharedMemoryEffect:
    """Throughputs of the recommendation with and without shared memory, in turn on one server.

    Attributes:
        trial: Number of the recommendation's trial.
        concurrency: Requests in flight.
        pairs: Inferences per second in each round: without and with ``system`` shared memory.
        confidence: Confidence of each end of the interval.
        hardware: The machine, in words.
        same_machine: Whether machine and server are those of the run.
        measured: Time of the measurement.
    """

    trial: int
    concurrency: float
    pairs: tuple[tuple[float, float], ...]
    confidence: float
    hardware: str
    same_machine: bool
    measured: str

    @property
    def ratio(self) -> GainRatio:
        """The throughput with shared memory relative to that without."""
        return paired_ratio(self.pairs, self.confidence)

    @property
    def means(self) -> tuple[float, float]:
        """The mean throughputs without and with shared memory."""
        without, with_it = (sum(column) / len(self.pairs) for column in zip(*self.pairs, strict=True))
        return without, with_it

    @property
    def is_recommended(self) -> bool:
        """Whether the throughput is higher with shared memory, by more than chance."""
        return self.ratio.interval.low > 1

    def document(self) -> dict[str, Any]:
        """Return the document of the file and of ``--json``."""
        return {
            "trial": self.trial,
            "concurrency": self.concurrency,
            "throughputs_infer_per_sec": [list(pair) for pair in self.pairs],
            "confidence": self.confidence,
            "ratio": self.ratio.estimate,
            "ratio_interval": list(self.ratio.bounds),
            "is_recommended": self.is_recommended,
            "hardware": self.hardware,
            "same_machine": self.same_machine,
            "measured": self.measured,
        }

    def __str__(self) -> str:
        """Return the effect in one sentence without a full stop."""
        without, with_it = (formatting.quantity(SHOWN, mean) for mean in self.means)
        effect = formatting.factor(self.ratio)
        if not self.ratio.is_measurable:
            effect = f"makes no measurable difference: {effect}"
        where = "" if self.same_machine else f", on {self.hardware}"
        return (
            f"{effect}, {with_it} instead of {without} with {self.concurrency:g} requests in flight, measured in "
            f"{formatting.count(len(self.pairs), 'round')} on one server{where}"
        )


def paired_ratio(pairs: Sequence[tuple[float, float]], confidence: float) -> GainRatio:
    """Return the mean ratio of the second to the first throughput of each pair, with its confidence interval.

    The interval is that of Student's t on the mean of the log ratios. A pair is measured within seconds, so a slow
    change of the machine's speed affects both. ``confidence`` is that of each end. At least two pairs are needed.
    """
    from scipy import special

    logs = np.log([second / first for first, second in pairs])
    mean, error = float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs))
    margin = float(special.stdtrit(len(logs) - 1, confidence)) * error
    return GainRatio(math.exp(mean), ConfidenceInterval(math.exp(mean - margin), math.exp(mean + margin)))


def write_effect(folder: Path, effect: SharedMemoryEffect) -> None:
    """Write ``effect`` to the folder of its run. Raises EnvironmentFault."""
    write_json(folder / FILE, effect.document())


def read_effect(folder: Path) -> SharedMemoryEffect | None:
    """Return the effect in the folder of a run; None without one. Raises BadInputError if it is damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return _parse_effect(json.loads(read_bytes(path, MAX_BYTES, "remove it")))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadInputError(
            f"{show_path(path)}: not a measurement of shared memory ({one_line(why, MAX_TEXT_LENGTH)}); remove "
            "the file, or measure again with `tune explain --measure`"
        ) from None


def effect_of_trial(folder: Path, trial: int) -> SharedMemoryEffect | None:
    """Return the effect if it was measured with ``trial``. Raises BadInputError if it is damaged."""
    effect = read_effect(folder)
    return effect if effect is not None and effect.trial == trial else None


def _parse_effect(document: Mapping[str, Any]) -> SharedMemoryEffect:
    """Return the effect in a document. Raises ValueError, KeyError, TypeError or OverflowError if it is damaged."""
    pairs = tuple((float(without), float(with_it)) for without, with_it in document["throughputs_infer_per_sec"])
    if len(pairs) < 2 or not all(1 / MAX_NUMBER < value < MAX_NUMBER for pair in pairs for value in pair):
        raise ValueError(
            f"throughputs_infer_per_sec needs two or more pairs of positive numbers below {MAX_NUMBER:g}"
        )
    confidence = float(document["confidence"])
    if not 0.5 < confidence < 1:
        raise ValueError("confidence is not between 0.5 and 1")
    trial, concurrency = int(document["trial"]), float(document["concurrency"])
    if not (0 <= trial < MAX_NUMBER and 0 < concurrency < MAX_NUMBER):
        raise ValueError(f"trial or concurrency is not between 0 and {MAX_NUMBER:g}")
    return SharedMemoryEffect(
        trial=trial,
        concurrency=concurrency,
        pairs=pairs,
        confidence=confidence,
        hardware=one_line(str(document["hardware"]), MAX_TEXT_LENGTH),
        same_machine=document["same_machine"] is True,
        measured=one_line(str(document["measured"]), MAX_TEXT_LENGTH),
    )
