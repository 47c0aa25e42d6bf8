"""Every measurement of runs as one table: CSV, Parquet."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from objectives.sla import worst_violation
from optimizer.errors import BadInputError
from optimizer.pages import measured
from optimizer.store.finished import FinishedRun
from optimizer.trial import SETTINGS, Trial

if TYPE_CHECKING:
    import pandas as pd


def measurements(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """A row a measurement, and one for a trial without any. Columns are named as in trials.csv; ``run`` is added, and
    ``meets``: whether the measurement is stable and within its run's bounds. Preferred sizes are a text, with blanks
    between; ``confirmation`` is the number of the fresh server, missing in the search."""
    import pandas as pd

    frame = pd.DataFrame([row for run in runs for trial in run.trials for row in _rows(run, trial)])
    paths = {path for run in runs for path in run.problem.space.fields}
    texts = [path for path in sorted(paths) if path in frame and frame[path].dtype == object]
    # choices of one parameter may be of several types, which Parquet has no column for
    return frame.astype(dict.fromkeys(texts, "string")).astype({"confirmation": "Int64", "requests": "Int64"})


def csv(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False).encode()


def parquet(frame: pd.DataFrame) -> bytes:
    """Raises BadInputError where pyarrow is not installed."""
    data = io.BytesIO()
    try:
        frame.to_parquet(data, engine="pyarrow", index=False)
    except ImportError:
        raise BadInputError(
            "--format parquet: Parquet is written by pyarrow; pip install 'tritune[parquet]'"
        ) from None
    return data.getvalue()


def _rows(run: FinishedRun, trial: Trial) -> list[dict[str, object]]:
    candidate = trial.candidate
    about = {
        "run": measured.name(run),
        "model": run.problem.model,
        "trial": trial.number,
        **{name: getattr(candidate, name) for name in SETTINGS},
        "preferred_batch_sizes": " ".join(map(str, candidate.preferred_batch_sizes)),
        **dict(candidate.fields),
        "deploy_seconds": trial.deploy_seconds,
        "status": trial.status,
    }
    figures_of = [(load, m, None) for load, m in trial.measurements]
    figures_of += [(one.load, one.measurement, one.server) for one in trial.confirmations]  # type: ignore[misc]
    rows = []
    for load, measurement, server in figures_of:
        figures = asdict(measurement)
        meets = measurement.stable and worst_violation(run.problem.constraints, measurement) <= 0
        rows.append({**about, **asdict(load), **figures, "confirmation": server, "meets": meets})
    return rows or [{**about, "requests": None, "reason": trial.reason, "confirmation": None, "meets": False}]


MAKERS = {"csv": csv, "parquet": parquet}
