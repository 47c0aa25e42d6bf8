"""The runs that ``tune plan`` plans with: those that its arguments name, or a new run of a model that has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_file, is_folder, quote
from optimizer.model.profile_lookup import find_profile
from optimizer.options.option_reader import run_options
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.store.run_folder import RUN_FILE, SWEEP_FILE
from optimizer.store.run_lookup import LATEST, folder_of_runs_error, newest_run, not_found_error, runs_in

if TYPE_CHECKING:
    from optimizer.results.progress_observers import Progress


@dataclass(frozen=True)
class PlannedRuns:
    """Finds runs in a folder, and tunes a model that has none there.

    Attributes:
        results: The folder of the runs.
        sla: The latency bounds of a new run as option values by name.
        on_message: It gets a line for each run that is left out or begins.
        make_progress: Return the progress of a new run.
    """

    results: str
    sla: Mapping[str, object]
    on_message: Callable[[str], None]
    make_progress: Callable[[], Progress]

    def find(self, names: Sequence[str]) -> list[FinishedRun]:
        """Return the runs of ``names`` that can be read; ``on_message`` gets a line for each of several that cannot.

        Raises BadInputError if none can be read, TuneError as a run that tunes a model.
        """
        if len(names) == 1:
            return [self._find_one(names[0])]
        runs, errors = [], []
        for name in names:
            try:
                runs.append(self._find_one(name))
            except BadInputError as error:
                errors.append(error)
                self.on_message(f"left out: {error}")
        if not runs:
            raise errors[-1]
        return runs

    def _find_one(self, name: str) -> FinishedRun:
        """Return the run in a folder, the newest run of all, or that of a model, preferably with a recommendation.

        A model without a run is tuned first.
        """
        folders = (Path(name), Path(self.results) / name)
        is_recorded = any(is_file(path / record) for path in folders for record in (RUN_FILE, SWEEP_FILE))
        if is_recorded or name == LATEST:
            return read_run(name, self.results)
        if newest_run(name, self.results) is None:
            if error := folder_of_runs_error(name, "run", RUN_FILE):
                raise error
            if not name.strip() or _is_run_name(name, self.results):
                raise not_found_error(name, self.results, "run", RUN_FILE)
        newest: FinishedRun | None = None
        model, profile = _model_and_profile(name, self.results)
        for folder in runs_in(self.results, model):
            try:
                run = read_run(folder.path, self.results)
            except BadInputError as error:
                self.on_message(f"left out: {error}")
                continue
            if profile is not None and not _was_tuned_with(run, profile):
                continue
            if run.recommended is not None:
                return run
            newest = newest or run
        return newest or self._tune(name)

    def _tune(self, model: str) -> FinishedRun:
        from optimizer.study.tuning_run import tune

        options = run_options(model, {**self.sla, "out": self.results})
        self.on_message(f"{quote(model)} has no run in {self.results} yet: tuning it first")
        with tune(options, None, self.make_progress()) as result:
            if result.status == "interrupted":
                raise KeyboardInterrupt
        return read_run(result.record.folder.path, self.results)


def _model_and_profile(name: str, results: str) -> tuple[str, Path | None]:
    """Return the name under which the model ``name`` has its runs, and the profile that these runs must have.

    The name of a model with runs is kept, and needs no profile. A profile or a file gives the model its name, which
    other profiles may give too. Raises BadInputError if there is no such model.
    """
    if newest_run(name, results) is not None:
        return name, None
    from optimizer.model.onnx_file import model_name
    from optimizer.model.profile import load_profile
    from optimizer.model.profile_schema import BuiltModel, OnnxModel

    if (profile := _profile(RunOptions(name))) is None:
        path = Path(name)
        return path.absolute().name if is_folder(path) else model_name(path), None
    model = load_profile(profile).model
    if isinstance(model, OnnxModel):
        return model_name(model.onnx), profile
    return model.builder if isinstance(model, BuiltModel) else model.name, profile


def _profile(options: RunOptions) -> Path | None:
    """Return the file of the profile that ``options`` name; None if they name none. Raises BadInputError."""
    from optimizer.study.model_finder import names_profile

    return find_profile(options.model).resolve() if names_profile(options) else None


def _was_tuned_with(run: FinishedRun, profile: Path) -> bool:
    try:
        return _profile(run.options) == profile
    except BadInputError:  # its profile was removed
        return False


def _is_run_name(name: str, out: str) -> bool:
    """Return whether ``name`` is ``<model>/<run>`` rather than a folder or file of a model."""
    path = Path(name)
    is_inside = path.resolve().is_relative_to(Path(out).resolve())
    exists = is_folder(path) or is_file(path)
    return ("/" in name and not exists and not path.suffix) or (is_folder(path) and is_inside)
