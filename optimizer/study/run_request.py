"""The request for a run: its options, the run that it continues, and the content of Model Analyzer's file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.core.endpoint import REDACTED
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import exists, is_folder, named_file, one_line, quote, show_path
from optimizer.options.addresses import redact
from optimizer.options.command_line import option_words
from optimizer.options.option import Option
from optimizer.options.option_reader import (
    MODEL_ARGUMENT,
    changed_options,
    external_names,
    external_values,
    parse_values,
    parsed_options,
    resume_options,
    run_options,
    written_values,
)
from optimizer.options.run_options import DEFAULTS, RunOptions
from optimizer.options.table import REQUEST_TIME_OPTIONS
from optimizer.options.values import parse_cpus, storage_file, usable_cpus
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_lookup import find_run, newest_run

if TYPE_CHECKING:
    from optimizer.model.model_analyzer.reader import ModelAnalyzerImport


@dataclass(frozen=True)
class RunRequest:
    """A run to do.

    Attributes:
        options: The options, including those that ``model_analyzer`` sets.
        resumed: The run to continue; None for a new one.
        model_analyzer: The content of Model Analyzer's file; None without one, and for a resumed run.
        parsed: The given values by option name, also of the options that are not in ``options``.
    """

    options: RunOptions
    resumed: RunFolder | None = None
    model_analyzer: ModelAnalyzerImport | None = None
    parsed: Mapping[str, Any] = field(default_factory=dict)


def read_run_request(
    model: str | None,
    values: Mapping[str, object],
    flag: str = "--resume",
    is_known: Callable[[Option], bool] = lambda option: True,
) -> RunRequest:
    """Return the run that ``values``, by option name, ask for. Raises BadInputError naming option and value.

    ``flag`` is the option or command with which the user named the run to continue; messages begin with it. Options
    that are not ``is_known`` are refused.
    """
    parsed = parse_values(values, is_known)
    if "resume" in parsed:
        if "dry-run" in parsed:
            raise BadInputError("--dry-run: it describes a new run, but --resume continues one; leave one out")
        options, folder = _resumed(model, parsed["resume"], parsed.get("out", DEFAULTS.out), values, flag)
        return RunRequest(options, folder, parsed=parsed)
    if "from-model-analyzer" not in parsed:
        if not model:
            raise missing_model(parsed.get("model-repository"))
        options = parsed_options(model, parsed)
        return RunRequest(resolve_warm_start(options, options.warm_start), parsed=parsed)
    from optimizer.model.model_analyzer.reader import read_model_analyzer

    file = named_file("--from-model-analyzer", parsed["from-model-analyzer"], "a configuration of Model Analyzer")
    imported = read_model_analyzer(file, model)
    merged = {**imported.options(parsed.get("model-repository")), **values}
    if merged.get("load") != "rate" or any(name in values for name in REQUEST_TIME_OPTIONS):
        for name in REQUEST_TIME_OPTIONS:  # the file's is overridden
            if name not in values:
                merged.pop(name, None)
    if values.get("shared-memory") == "none" and "output-shared-memory-size" not in values:
        merged.pop("output-shared-memory-size", None)  # the file's has no effect
    options = run_options(imported.model, merged)
    return RunRequest(resolve_warm_start(options, options.warm_start), model_analyzer=imported, parsed=parsed)


def missing_model(repository: str | None) -> BadInputError:
    """Return the error for a command line without a model, with the models of the repository if one is given."""
    if repository is not None and is_folder(Path(repository)):
        from optimizer.model.repository import list_models

        if models := list_models(Path(repository)):
            return BadInputError(f"MODEL is missing: {one_line(repository)} has the models {models}")
    return BadInputError("MODEL is missing: `tune models` lists the built-in ones; or give a profile or folder")


def resolve_warm_start(options: RunOptions, name: str | None, folder: Path = Path()) -> RunOptions:
    """Return ``options`` with the folder of the run that --warm-start names: later the name means another run.

    ``name`` is the value as given. Paths and the folder of results start from ``folder``. A path takes precedence.
    """
    run = None if name is None or exists(folder / name) else newest_run(name, str(folder / options.out))
    return options if run is None else replace(options, warm_start=str(run.path))


def read_stored_options(folder: RunFolder, *, other_machine: bool = False) -> RunOptions:
    """Return the options in ``run.json``, which may come from anywhere: they get the same checks as given ones.

    With ``other_machine``, lists of CPUs that this machine does not have are left out. Raises BadInputError.
    """
    options = folder.read_options()
    if other_machine:
        server_cpus, client_cpus = map(_if_usable, (options.server_cpus, options.client_cpus))
        options = replace(options, server_cpus=server_cpus, client_cpus=client_cpus)
    try:
        run_options(options.model, written_values(options))
    except BadInputError as error:
        raise BadInputError(f"{show_path(folder.info)}: {error}") from None
    return options


def _if_usable(cpus: str | None) -> str | None:
    """Return a list of CPUs, or None if this process cannot use them all. Text that is no list stays as it is."""
    try:
        return cpus if cpus is None or parse_cpus(cpus) <= usable_cpus() else None
    except ValueError:
        return cpus


def _resumed(
    model: str | None, resume: str, out: str, values: Mapping[str, object], flag: str
) -> tuple[RunOptions, RunFolder]:
    """Return options and folder of the run ``resume``, a path or a name in the results folder ``out``.

    Raises BadInputError if there is no such run, or if ``values`` change options that a continued run keeps.
    """
    about = f"{flag} {one_line(resume)}"
    folder = find_run(resume, out)
    folder.refuse_links()
    stored = read_stored_options(folder)
    if refused := [f"--{name}" for name in changed_options(stored, values)]:
        raise BadInputError(f"{about} keeps the options of the run; leave {', '.join(refused)} out")
    refuse_foreign_values(folder, stored, stored, about, model, values)
    options = resume_options(stored, values)
    if options.storage and REDACTED in options.storage:
        raise BadInputError(f"{about}: the password of its storage is not stored; give --storage")
    if options.storage and values.get("storage") is None and not _is_inside(folder, options.storage):
        raise BadInputError(
            f"{about}: its run.json names a storage outside its folder, which the run would write; if it is "
            f"yours, give --storage {quote(redact(options.storage))}"
        )
    return options, folder


def refuse_foreign_values(
    folder: RunFolder,
    stored: RunOptions,
    options: RunOptions,
    about: str,
    model: str | None,
    values: Mapping[str, object],
) -> None:
    """Raise BadInputError if a run from someone else names code, programs, addresses or data that the user did not.

    The options of the run are ``stored``; ``options`` are those that apply now. ``model`` and ``values`` are on the
    command line, where the model may only be repeated. ``about`` begins the message.
    """
    named = {name for name, value in values.items() if value is not None}
    if model is not None:
        repeated = external_values(replace(options, model=model)).get(MODEL_ARGUMENT)
        if repeated is None or repeated != external_values(options).get(MODEL_ARGUMENT):
            raise BadInputError(f"{about}: the run has its own model; leave {one_line(repr(model))} out")
        named.add(MODEL_ARGUMENT)
    missing = external_names(options) - named
    if missing and not folder.is_own(stored):
        written = written_values(options)
        arguments = [options.model] if MODEL_ARGUMENT in missing else []  # argparse wants it right behind the run
        arguments += option_words({name: value for name, value in written.items() if name in missing})
        raise BadInputError(
            f"{about}: run.json was not written by your tune on this machine, and names code, addresses or data; if "
            f"you trust them, add {quote(shlex.join(arguments))}"
        )


def _is_inside(folder: RunFolder, storage: str) -> bool:
    """Return whether ``storage`` is a file in the folder of the run, which may come from anywhere."""
    file = storage_file(storage)
    try:
        return file is not None and file.resolve().is_relative_to(folder.path.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a NUL byte
        return False
