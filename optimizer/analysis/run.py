"""The result of a run, as Python and notebooks have it."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.report import summary, words
from optimizer.store.finished import FinishedRun, read_run
from optimizer.untrusted import read_bytes

if TYPE_CHECKING:
    import pandas as pd

    from optimizer.explaining.explanation import Explanation
    from optimizer.outcome import Outcome
    from optimizer.pages.style import Drawing
    from optimizer.trial import Point

MAX_CONFIG_BYTES = 1 << 20


class Run:
    """A run, finished or not, as its folder has it. Everything is read; nothing here changes the folder.

    ``finished`` is the run in the package's own types, for all that the other attributes leave out.
    """

    def __init__(self, finished: FinishedRun) -> None:
        self.finished = finished

    @classmethod
    def of(cls, run: str | Path, out: str | Path = "results") -> Run:
        """Raises BadInputError where there is no run, or it is damaged."""
        return cls(read_run(run, str(out)))

    @property
    def folder(self) -> Path:
        return self.finished.folder.path

    @property
    def status(self) -> str:
        """``found``, ``none`` (nothing meets the bounds), ``interrupted``, ``failed``, or ``running``: at work or
        killed."""
        return self.finished.status

    @property
    def outcome(self) -> Outcome | None:
        """Recommendation, baselines, front, speed-ups; None where nothing was measured."""
        return self.finished.outcome

    @property
    def recommended(self) -> Point | None:
        """The recommended configuration at its best load, with its measurement; None where nothing meets the
        bounds."""
        return self.outcome.recommended if self.outcome else None

    @property
    def verdict(self) -> str | None:
        """``PASS``, ``FAIL`` or ``UNDECIDED``; None where nothing is recommended or it was not confirmed."""
        confirmed = self.outcome.confirmed if self.outcome else None
        return confirmed.judged.verdict.value if confirmed else None

    @property
    def config_pbtxt(self) -> str | None:
        """The recommended configuration, of several models that of the run's own; None where there is none."""
        best = self.finished.folder.best
        files = (best / "config.pbtxt", best / self.finished.problem.model / "config.pbtxt")
        found = next((file for file in files if file.is_file()), None)
        if self.recommended is None or found is None:
            return None
        return read_bytes(found, MAX_CONFIG_BYTES, "is this a model's configuration?").decode(errors="replace")

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row a measurement (columns as in trials.csv; times in ms, memory in bytes, throughput in infer/s)."""
        from optimizer.analysis import frames

        return frames.of_trials(self.finished.trials)

    @cached_property
    def pareto(self) -> pd.DataFrame:
        """The front: no other measured point has more throughput at a lower p95 latency."""
        from optimizer.analysis import frames

        return frames.of_points(self.outcome.front if self.outcome else ())

    @cached_property
    def confirmations(self) -> pd.DataFrame:
        """One row a configuration that was measured on fresh servers, with verdict and intervals."""
        from optimizer.analysis import frames

        return frames.of_confirmed(self.outcome.again if self.outcome else ())

    @cached_property
    def plots(self) -> Mapping[str, Drawing]:
        """Those of ``tune report``, by name: ``pareto``, ``load``, ``stages``, … A notebook shows one as a picture;
        ``.figure`` is matplotlib's. Empty where nothing was measured; what has nothing to show is left out."""
        if self.outcome is None:
            return {}
        from optimizer.pages.content import section
        from optimizer.pages.drawings import drawings

        return {drawn.name: drawn for drawn in drawings(self.finished, section(self.finished))}

    def explain(self, fp16_factor: float = 0.5) -> Explanation:
        """As ``tune explain``. Raises BadInputError where nothing was measured."""
        from optimizer.explaining.explanation import explain

        return explain(self.finished, fp16_factor)

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self._headline()}>"

    def __str__(self) -> str:
        """The answer as ``tune`` prints it: figures and configuration."""
        lines = [self._headline()]
        point = self._shown()
        if point is not None:
            lines += ["", *(f"  {line}" for line in words.triton_lines(point.candidate)), ""]
            lines += [f"{label:<14}{text}" for label, text in self._figures(point)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        text = io.StringIO()
        text.write(f"<p><strong>{html.escape(self._headline())}</strong></p>")
        point = self._shown()
        if point is not None:
            configuration = "\n".join(words.triton_lines(point.candidate))
            text.write(f"<pre>{html.escape(configuration)}</pre><table>")
            for label, told in self._figures(point):
                text.write(f"<tr><th scope='row'>{html.escape(label)}</th><td>{html.escape(told)}</td></tr>")
            text.write("</table>")
        text.write(f"<p><code>{html.escape(str(self.folder))}</code></p>")
        return text.getvalue()

    def _headline(self) -> str:
        if self.outcome is None:
            return f"{self.finished.problem.model}: nothing was measured ({self.status})"
        return summary.headline(self.outcome, self.finished.problem)

    def _shown(self) -> Point | None:
        return (self.outcome.recommended or self.outcome.closest) if self.outcome else None

    def _figures(self, point: Point) -> list[tuple[str, str]]:
        told = summary.figures(point, self.finished.problem)
        if self.outcome is not None and self.recommended is not None:
            told.append(("verdict", summary.verdict(self.outcome)))
        return told
