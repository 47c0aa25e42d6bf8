"""How samples are put into requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.errors import BadInputError
from optimizer.requests.recorded import Sample
from optimizer.untrusted import one_line


@dataclass(frozen=True, slots=True)
class Sent:
    """``samples`` in a request, by an open loop or by perf_analyzer, whose requests of several samples are all of one
    shape. ``seed`` is of what is random. ``mixed``: ``samples`` in the largest request, fewer in others."""

    samples: int = 1
    open_loop: bool = False
    seed: int = 0
    mixed: bool = False

    def check(self, source: str, samples: Sequence[Sample]) -> None:
        """Raises BadInputError where the samples of ``source``, one after the other, cannot be sent so."""
        shapes = [tuple(array.shape for array in sample.values()) for sample in samples]
        if self.samples == 1 or len(set(shapes)) == 1:
            return
        if not self.open_loop:
            raise BadInputError(
                f"{one_line(source, 200)}: perf_analyzer sends requests of {self.samples} samples in one shape only; "
                "set --request-batch-size 1, or take --load rate"
            )
        groups = [set(shapes[i : i + self.samples]) for i in range(0, len(shapes), self.samples)]
        if self.mixed or len(shapes) % self.samples or any(len(group) > 1 for group in groups):
            raise BadInputError(
                f"{one_line(source, 200)}: samples of different shapes cannot be in one request of {self.samples}; "
                "set --request-batch-size 1, or put samples of one shape together"
            )
