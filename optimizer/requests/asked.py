"""What the user wants sent, in the user's words: the command line over the profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """``input_data``: ``random``, ``zero``, or a file or folder of samples; empty is not given. ``shapes`` and
    ``ranges`` are texts, see ``sizes``; of two about one input the later counts. Strings as in ``Values``."""

    input_data: str = ""
    shapes: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    string_data: str | None = None
    string_length: int | None = None

    @property
    def is_recorded(self) -> bool:
        return self.input_data not in ("", "random", "zero")

    def over(self, below: Asked) -> Asked:
        """With what ``below`` says and this does not; samples that are given here replace all of it."""
        if self.is_recorded:
            return self
        return Asked(
            self.input_data or below.input_data,
            below.shapes + self.shapes,
            below.ranges + self.ranges,
            below.string_data if self.string_data is None else self.string_data,
            self.string_length or below.string_length,
        )
