"""The request for a run: its options, the run that it continues, and the content of Model Analyzer's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import exists, one_line
from optimizer.options.addresses import HIDDEN, redact
from optimizer.options.option import DEFAULTS
from optimizer.options.option_reader import parse_values, resume_options, run_options, written_values
from optimizer.options.run_options import RunOptions
from optimizer.options.table import BY_NAME, TIMING
from optimizer.options.values import quote, storage_file
from optimizer.store.run_folder import RunFolder

if TYPE_CHECKING:
    from optimizer.model.model_analyzer.reader import ModelAnalyzerImport


@dataclass(frozen=True)
class RunRequest:
    """A run to do.

    Attributes:
        options: The options, including those that ``mapped`` sets.
        resumed: The run to continue; None for a new one.
        mapped: The content of Model Analyzer's file; None without one, and for a resumed run.
    """

    options: RunOptions
    resumed: RunFolder | None = None
    mapped: ModelAnalyzerImport | None = None


def read_run_request(model: str | None, values: Mapping[str, object]) -> RunRequest:
    """Return the run that ``values``, by option name, ask for. Raises BadInputError naming option and value."""
    parsed = parse_values(values)
    if "resume" in parsed:
        return _resumed(model, parsed["resume"], parsed.get("out", DEFAULTS.out), values)
    if "from-model-analyzer" not in parsed:
        if model is None:
            raise BadInputError(
                "MODEL is missing: `tune models` lists the built-in ones; or give a profile or folder"
            )
        return RunRequest(_with_found_run(run_options(model, values)))
    from optimizer.model.model_analyzer.reader import read_model_analyzer

    mapped = read_model_analyzer(Path(parsed["from-model-analyzer"]), model)
    merged = {**mapped.options(parsed.get("model-repository")), **values}
    if merged.get("load") != "rate" or any(name in values for name in TIMING):
        for name in TIMING:  # the file's is overridden
            if name not in values:
                merged.pop(name, None)
    return RunRequest(_with_found_run(run_options(mapped.model, merged)), mapped=mapped)


def _with_found_run(options: RunOptions) -> RunOptions:
    """Return ``options`` with the folder of the run that --warm-start names: later the name means another run."""
    name = options.warm_start
    found = None if name is None or exists(Path(name)) else RunFolder.newest(name, options.out)
    return options if found is None else replace(options, warm_start=str(found.path))


def read_stored_options(folder: RunFolder) -> RunOptions:
    """Return the options in ``run.json``, which may come from anywhere: they get the same checks as given ones.

    Raises BadInputError.
    """
    options = folder.read_options()
    try:
        run_options(options.model, written_values(options))
    except BadInputError as error:
        raise BadInputError(f"{one_line(str(folder.info))}: {error}") from None
    return options


def _resumed(model: str | None, resume: str, out: str, values: Mapping[str, object]) -> RunRequest:
    run = one_line(resume)
    if model is not None:
        raise BadInputError(f"--resume {run}: the run has its own model; leave {one_line(repr(model))} out")
    refused = [f"--{name}" for name, value in values.items() if value is not None and "R" not in BY_NAME[name].also]
    if refused:
        raise BadInputError(f"--resume {run} keeps the options of the run; leave {', '.join(refused)} out")
    folder = RunFolder.find(resume, out)
    folder.refuse_links()
    options = resume_options(read_stored_options(folder), values)
    if options.storage and HIDDEN in options.storage:
        raise BadInputError(f"--resume {run}: the password of its storage is not stored; give --storage")
    if options.storage and values.get("storage") is None and not _is_inside(folder, options.storage):
        raise BadInputError(
            f"--resume {run}: its run.json names a storage outside its folder, which the run would write; if it is "
            f"yours, give --storage {quote(redact(options.storage))}"
        )
    return RunRequest(options, folder)


def _is_inside(folder: RunFolder, storage: str) -> bool:
    """Return whether ``storage`` is a file in the folder of the run, which may come from anywhere."""
    file = storage_file(storage)
    try:
        return file is not None and file.resolve().is_relative_to(folder.path.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a NUL byte
        return False
