"""A model that random integers break: an embedding takes the numbers of its rows, and random is any integer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from objectives.metrics import Measurement
from optimizer.errors import BadInputError, MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint, LoadGenerator
from optimizer.trial import LoadPoint
from optimizer.untrusted import one_line

_OUTSIDE = re.compile(
    r"out of (?:data |the )?(?:bounds|range)|outside (?:the )?(?:bounds|range)|is not in \[0|index\w* out of"
    r"|(?:indices|index)\b.{0,80}must be (?:within|less|in)|IndexError|device-side assert",
    re.IGNORECASE,
)
_HIGHEST = re.compile(r"range \[-?\d{1,18}, ?(\d{1,18})\]")  # as ONNX Runtime tells it
_LONGEST_NAMES, _LONGEST_CAUSE = 100, 200


def hint(message: str, unbounded: tuple[str, ...]) -> str:
    """What mends a failed request whose ``unbounded`` inputs hold any integer of their type; empty where ``message``
    does not tell of an index that is out of bounds."""
    if not unbounded or not _OUTSIDE.search(message):
        return ""
    highest = found[1] if (found := _HIGHEST.search(message)) else "30521"
    names = one_line(", ".join(unbounded), _LONGEST_NAMES)
    first = one_line(unbounded[0], 60)
    return (
        f"random data has any integer of its type in {names}, which may be an index: give bounds, such as "
        f"--input-range {first}:0..{highest}, or real requests by --input-data FILE"
    )


@dataclass
class HintingLoad:
    """``load_generator``, whose failures say so where the random data are the cause.

    Before anything has been measured that ends the run: all configurations would fail alike.
    """

    load_generator: LoadGenerator
    unbounded: tuple[str, ...]
    _measured: bool = field(default=False, init=False)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Raises BadInputError as well."""
        try:
            found = self.load_generator.measure(endpoint, load, seconds)
        except MeasurementError as error:
            raise self._explained(error) from error
        self._measured = True
        return found

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Raises BadInputError as well."""
        try:
            found = self.load_generator.windows(endpoint, load, seconds, count)
        except MeasurementError as error:
            raise self._explained(error) from error
        self._measured = True
        return found

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return self.load_generator.warm_up(endpoint, load)

    def _explained(self, error: MeasurementError) -> BadInputError | MeasurementError:
        told = hint(str(error), self.unbounded)
        if not told or isinstance(error, ServerCrashed):
            return error
        kind = MeasurementError if self._measured else BadInputError
        return kind(f"{one_line(str(error), _LONGEST_CAUSE)}; {told}", log=error.log)
