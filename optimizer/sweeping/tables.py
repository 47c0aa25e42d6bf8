"""The record of a sweep: ``trials.csv`` as a run's, one for each size of the requests, since a table is about one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from objectives.metrics import Measurement
from optimizer.errors import BadInputError
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.sweeping.plan import Plan
from optimizer.trial import FieldValue, LoadPoint, Trial


class SweepTables:
    """A ``measuring.Record``. With several request batch sizes there are ``trials-b1.csv``, ``trials-b8.csv``."""

    def __init__(
        self,
        folder: RunFolder,
        model: str,
        plan: Plan,
        choices: Mapping[str, Sequence[FieldValue]],
        fingerprint: str = "",
    ) -> None:
        self._plan = plan
        sizes = plan.request_batch_sizes
        self._tables = {
            size: TrialsTable(
                folder.trials if len(sizes) == 1 else folder.trials.with_name(f"trials-b{size}.csv"),
                model,
                choices,
                fingerprint,
            )
            for size in sizes
        }

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, confirmation: int | None = None
    ) -> None:
        self._tables[load.request_batch_size].append(trial, load, measurement, confirmation)

    def append_failure(self, trial: Trial) -> None:
        for size in {load.request_batch_size for load in self._plan.loads_of(trial.candidate)}:
            self._tables[size].append_failure(trial)

    def read(self) -> list[Trial]:
        """Raises BadInputError where what is there was measured for another plan."""
        found: dict[int, Trial] = {}
        for table in self._tables.values():
            for trial in table.read():
                if self._plan.configurations[trial.number : trial.number + 1] != (trial.candidate,):
                    raise BadInputError(f"{table.path}: trial {trial.number} is none of this sweep's; begin anew")
                before = found.get(trial.number)
                joined = (*before.measurements, *trial.measurements) if before else trial.measurements
                found[trial.number] = replace(trial, measurements=joined)
        return [found[number] for number in sorted(found)]
