"""The Python interface: ``from optimizer import load_run, tune`` (see docs/python.md)."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from optimizer.api.keywords import RunKeywords
from optimizer.core.safe_text import is_file, read_bytes
from optimizer.results import configuration_text, outcome_values, result_document, summary
from optimizer.results.finished_run import FinishedRun, read_run

if TYPE_CHECKING:
    import pandas as pd

    from optimizer.core.trial import Point
    from optimizer.explain.explanation import Explanation
    from optimizer.results.recommendation import Outcome
    from optimizer.results.report.figure_style import Drawing


def tune(model: str | Path | None = None, **keywords: Unpack[RunKeywords]) -> Run:
    """Search, confirm and return the run, as the command ``tune MODEL`` does.

    Args:
        model: As the command's MODEL; None with ``resume=FOLDER``, which continues the run in that folder.
        keywords: The command's options with ``_`` for ``-``, such as ``sla_p95="20ms"`` (docs/reference-options.md).
            Nothing is printed unless ``log`` asks for it.

    Make one run at a time, because parallel runs disturb each other's measurements. An interrupt, such as a
    notebook's stop button, ends the run early; its status is then ``interrupted``.

    Raises:
        BadInputError: A value or a file is invalid.
        EnvironmentFault: The machine lacks something that the run needs.
    """
    from rich.console import Console

    from optimizer.results.progress_observers import make_progress
    from optimizer.study.run_request import read_run_request
    from optimizer.study.tuning_run import tune as run

    values = {name.replace("_", "-"): value for name, value in keywords.items()}
    name = None if model is None else str(model)
    request = read_run_request(name, values, is_known=lambda option: "python" in option.taken_by)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as the command does
    progress = make_progress(Console(stderr=True), request.parsed.get("log", "none"))
    with run(request.options, request.resumed, progress, report="no-report" not in request.parsed) as result:
        folder = result.record.folder.path
    return load_run(folder)


def load_run(run: str | Path, out: str | Path = "results") -> Run:
    """Return a run, whatever its status: the folder ``run``, ``<model>/<run>`` in ``out``, a model, or ``latest``.

    A model stands for its newest run in ``out``, and ``latest`` for the newest of all.

    Raises:
        BadInputError: There is no run, or its files are damaged.
    """
    return Run(read_run(run, str(out)))


MAX_CONFIG_BYTES = 1 << 20


class Run:
    """A finished or unfinished run, read from its folder. The folder is never changed.

    ``finished`` holds the content of the folder as a ``FinishedRun``.
    """

    def __init__(self, finished: FinishedRun) -> None:
        self.finished = finished

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.finished.folder.path

    @property
    def status(self) -> str:
        """``found``, ``none`` (no configuration meets the SLA), ``interrupted``, ``failed``, ``left`` or ``running``.

        ``left``: other workers continue the shared study of the run. A run that was killed stays ``running``.
        """
        return self.finished.status

    @property
    def outcome(self) -> Outcome | None:
        """The recommendation, baselines, Pareto front and speed-ups; None without measurements."""
        return self.finished.outcome

    @property
    def recommended(self) -> Point | None:
        """The recommended configuration at its best load, with its measurement; None if nothing meets the SLA."""
        return self.finished.recommended

    @property
    def verdict(self) -> str | None:
        """``PASS``, ``UNDECIDED``, or ``FAIL`` if nothing is recommended; None without measurements.

        Without any bound, a recommendation is ``PASS``.
        """
        return self.outcome.verdict.value if self.outcome else None

    @property
    def undecided_cause(self) -> str | None:
        """Why the verdict is ``UNDECIDED``; None for another one."""
        return (summary.undecided_cause(self.outcome) or None) if self.outcome else None

    @property
    def confirmation(self) -> Mapping[str, object] | None:
        """The test of the recommendation on fresh servers; None if it was not measured there.

        It has the keys of ``confirmation`` in the document of ``tune --json``: the estimand, the confidence intervals
        of throughput and latency, the interval of the share of slow requests, the numbers of servers and windows.
        """
        confirmed = self.outcome.confirmed if self.outcome else None
        return result_document.confirmation(confirmed) if confirmed else None

    @property
    def configs(self) -> dict[str, str]:
        """The recommended config.pbtxt of each served model by its name; empty without a recommendation.

        An ensemble or a BLS model has one for each of its models. The changed settings are in those of its steps.
        """
        if self.recommended is None:
            return {}
        best = self.finished.folder.best
        files = {path.parent.name: path for path in sorted(best.glob("*/config.pbtxt"))}
        if is_file(best / "config.pbtxt"):
            files = {self.recommended.candidate.served_model(self.finished.problem.model): best / "config.pbtxt"}
        return {
            name: read_bytes(path, MAX_CONFIG_BYTES, "is this a model's configuration?").decode(errors="replace")
            for name, path in files.items()
        }

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row per measurement, with the columns of trials.csv (ms, bytes, infer/s)."""
        from optimizer.results import data_frames

        return data_frames.trials_frame(self.finished.trials)

    @cached_property
    def pareto(self) -> pd.DataFrame:
        """The Pareto front: no other point has a higher throughput and a lower p95 latency.

        ``confirmed`` says whether a point was measured on fresh servers.
        """
        from optimizer.results import data_frames

        return data_frames.front_frame(self.outcome)

    @cached_property
    def confirmations(self) -> pd.DataFrame:
        """One row per configuration that was confirmed on fresh servers, with its verdict and intervals."""
        from optimizer.results import data_frames

        return data_frames.confirmations_frame(self.outcome.confirmed_loads if self.outcome else ())

    @cached_property
    def plots(self) -> Mapping[str, Drawing]:
        """The plots of ``tune report`` by name, such as ``pareto``, ``load``, ``stages``; empty plots are left out.

        A notebook shows a plot as a picture; its ``figure`` is matplotlib's.
        """
        if self.outcome is None:
            return {}
        from optimizer.results.report.content import report_section
        from optimizer.results.report.writer import drawings

        return {drawn.name: drawn for drawn in drawings(self.finished, report_section(self.finished))}

    def explain(self, fp16_factor: float = 0.5) -> Explanation:
        """Return the explanation of ``tune explain``. Raises BadInputError without measurements."""
        from optimizer.explain.explanation import explain

        return explain(self.finished, fp16_factor)

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self._headline()}>"

    def __str__(self) -> str:
        """Return the result as text: the metrics and the configuration."""
        lines = [self._headline()]
        point = self.finished.shown
        if point is not None:
            lines += ["", *(f"  {line}" for line in configuration_text.triton_lines(point.candidate)), ""]
            lines += [f"{label:<14}{text}" for label, text in self._metrics(point)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        text = f"<p><strong>{html.escape(self._headline())}</strong></p>"
        point = self.finished.shown
        if point is not None:
            configuration = "\n".join(configuration_text.triton_lines(point.candidate))
            cells = ((html.escape(label), html.escape(value)) for label, value in self._metrics(point))
            rows = "".join(f"<tr><th scope='row'>{label}</th><td>{value}</td></tr>" for label, value in cells)
            text += f"<pre>{html.escape(configuration)}</pre><table>{rows}</table>"
        return f"{text}<p><code>{html.escape(str(self.folder))}</code></p>"

    def _headline(self) -> str:
        if self.outcome is None:
            return f"{self.finished.problem.model}: nothing was measured ({self.status})"
        return summary.headline(self.outcome, self.finished.problem)

    def _metrics(self, point: Point) -> list[tuple[str, str]]:
        outcome = self.finished.measured
        rows = outcome_values.point_lines(outcome, point, self.finished.problem)
        return [*rows, *summary.verdict_lines(outcome)]
