"""Every measurement of runs as one table: CSV, Parquet."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from objectives.metrics import Measurement
from objectives.sla import worst_violation
from optimizer.analysis import frames
from optimizer.errors import BadInputError
from optimizer.pages import measured
from optimizer.store.finished import FinishedRun
from optimizer.trial import Trial

if TYPE_CHECKING:
    import pandas as pd


def measurements(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """A row a measurement, and one for a trial without any, as ``Run.trials`` has them. ``run`` and ``model`` are
    added, and ``meets``: whether the measurement is stable and within its run's bounds. Preferred sizes are a text,
    with blanks between."""
    import pandas as pd

    found = [_of(run) for run in runs]
    paths = {path for run in runs for path in run.problem.space.fields}
    frame = pd.concat(found, ignore_index=True) if len(found) > 1 else found[0]
    texts = [path for path in sorted(paths) if path in frame and frame[path].dtype == object]
    # choices of one parameter may be of several types, which Parquet has no column for
    return frame.astype(dict.fromkeys(texts, "string"))


def _of(run: FinishedRun) -> pd.DataFrame:
    import pandas as pd

    frame = frames.of_trials(run.trials)
    sizes = frame["preferred_batch_sizes"].map(lambda sizes: " ".join(map(str, sizes)))
    meets = [_meets(run, one) for trial in run.trials for one in _measured(trial)]
    frame = frame.assign(preferred_batch_sizes=sizes, meets=pd.array(meets, dtype="boolean"))
    for place, (name, value) in enumerate({"run": measured.name(run), "model": run.problem.model}.items()):
        frame.insert(place, name, value)
    return frame


def _measured(trial: Trial) -> list[Measurement | None]:
    """In the order of the rows."""
    found = [m for _, m in trial.measurements] + [again.measurement for again in trial.confirmations]
    return [*found] or [None]


def _meets(run: FinishedRun, one: Measurement | None) -> bool:
    return one is not None and one.stable and worst_violation(run.problem.constraints, one) <= 0


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


MAKERS = {"csv": csv, "parquet": parquet}
