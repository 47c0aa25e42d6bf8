"""Convert option values to RunOptions and back, also for a resumed run or another working folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.core.safe_text import exists, is_folder, quote
from optimizer.options.addresses import server_address
from optimizer.options.conflicts import (
    check_cluster,
    check_options,
    check_target_options,
    misplaced_option,
    option_fault,
)
from optimizer.options.flag_advice import flag_advice
from optimizer.options.option import Option
from optimizer.options.run_options import DEFAULTS, RunOptions, default_search
from optimizer.options.table import OPTIONS, OPTIONS_BY_NAME, REQUEST_TIME_OPTIONS, TARGET_OPTIONS
from optimizer.options.values import OptionError, move_model

MODEL_ARGUMENT = "MODEL"  # stands for the model among names of options
# options that name code, a program, an address, or data that are sent to a server
EXTERNAL = ("model-repository", "input-data", "cluster", *(option.name for option in TARGET_OPTIONS))


def run_options(model: str, values: Mapping[str, object]) -> RunOptions:
    """Return the options of a run from values by option name, such as ``{"sla-p95": "20ms", "seed": 3}``.

    A value is text as on the command line, a number, a path, True for a switch, or a list for a repeatable option or
    one whose text is a comma-separated list. An option with the value None or False is not set. Raises OptionError.
    """
    return parsed_options(model, parse_values(values))


def parsed_options(model: str, parsed: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run from values that ``parse_values`` returned. Raises OptionError."""
    options = RunOptions(model=model, **_fields(parsed))
    if "search" not in parsed:
        options = replace(options, search=default_search(options.objectives))
    if options.target == "remote" and "protocol" not in parsed:
        options = replace(options, protocol=server_address(options.url).protocol)
    check_options(options, parsed.keys())
    return options


def parse_values(
    values: Mapping[str, object], is_known: Callable[[Option], bool] = lambda option: True
) -> dict[str, Any]:
    """Return the parsed values of the options that are set, by name.

    Raises OptionError for an invalid value, and for an option that is not in the table or not ``is_known``.
    """
    parsed = {}
    for name, value in values.items():
        option = OPTIONS_BY_NAME.get(name)
        if option is None or not is_known(option):
            similar = flag_advice(name, (other.flag for other in OPTIONS if is_known(other)))
            advice = similar or "`tune run --help-all` shows the options"
            raise OptionError(name, f"--{quote(name)}: unknown option; {advice}")
        if value is not None and value is not False:
            parsed[name] = _parse(option, value)
    return parsed


def latency_bounds_ms(values: Mapping[str, object]) -> dict[str, float]:
    """Return the latency bounds in ``values`` by metric, such as ``{"p95": 20.0}``. Raises OptionError."""
    bounds: dict[str, float] = _fields(parse_values(values)).get("sla_ms", {})
    return bounds


def retarget(options: RunOptions, values: Mapping[str, object]) -> RunOptions:
    """Return ``options`` with the target options in ``values``; if they name another server, with no others of it.

    The addresses, headers and certificates of a remote server are not those of one at another address. Raises
    OptionError.
    """
    parsed = parse_values(values)
    former: list[Option] = []
    if parsed.get("target", options.target) != options.target:
        former = [*TARGET_OPTIONS]
    elif "url" in parsed and server_address(parsed["url"]).host_port != server_address(options.url).host_port:
        former = [option for option in TARGET_OPTIONS if option.targets == ("remote",)]
    options = replace(options, **{option.field: getattr(DEFAULTS, option.field) for option in former})
    options = replace(options, **_fields(parsed))
    check_target_options(options, parsed.keys())
    return options


def resume_options(options: RunOptions, values: Mapping[str, object]) -> RunOptions:
    """Return the options of a resumed run or sweep with the values given with ``--resume``. Raises OptionError."""
    parsed = parse_values(values)
    fields = _fields(parsed)
    fields.pop("out", None)  # where the run is looked for
    resumed = replace(options, **fields)
    if misplaced := misplaced_option(resumed, parsed.keys()):
        name, value, targets = misplaced
        problem = f"works only with {targets}, not with the --target {options.target} of before"
        raise option_fault(name, f"{problem}; remove --{name}", value)
    check_target_options(resumed, parsed.keys())
    check_cluster(resumed)  # no other option of a resumed run contradicts those of the run
    return resumed


def written_values(options: RunOptions) -> dict[str, str | list[str] | bool]:
    """Return values by option name that ``run_options`` reads as ``options``; defaults and secrets are left out.

    The seed, and the options that a file of Model Analyzer may set, are written even if they are defaults.
    """
    written: dict[str, str | list[str] | bool] = {}
    for option in OPTIONS:
        if not option.field:
            continue
        value, default = option.value_in(options), _default(option, options)
        always = option.always_written or (option.from_model_analyzer and options.from_model_analyzer is not None)
        if option.name in REQUEST_TIME_OPTIONS and options.load != "rate":
            always = False
        if value is None or not option.is_for(options) or (value == default and not always):
            continue
        if option.type is None:
            written[option.name] = True
        elif option.repeatable:
            written[option.name] = [option.type.write(element) for element in value]
        else:
            written[option.name] = option.type.write(value)
    return written


def external_values(options: RunOptions) -> dict[str, list[str]]:
    """Return the values that name code, a program, an address or a file of data, by the name of the option.

    The path of a profile or of a model is among them, as ``MODEL``. Paths are absolute. Defaults are left out.
    """
    here = Path.cwd()
    model = move_model(here, options)
    external = {MODEL_ARGUMENT: [model]} if "/" in model and exists(Path(model)) else {}
    for name, value in written_values(options).items():
        kind = OPTIONS_BY_NAME[name].type
        if name in EXTERNAL and kind is not None and value != "zero":  # of --input-data
            texts = value if isinstance(value, list) else [str(value)]
            external[name] = [kind.move(here, text, options) if kind.move else text for text in texts]
    return external


def external_names(options: RunOptions) -> set[str]:
    """Return the names of ``external_values`` without a profile that is given by its name.

    Such a profile is tune's own, or in the user's ``configs/``.
    """
    names = set(external_values(options))
    return names if exists(Path(options.model)) else names - {MODEL_ARGUMENT}


def changed_options(options: RunOptions, values: Mapping[str, object]) -> list[str]:
    """Return the options in ``values`` that a resumed run cannot change.

    An option of EXTERNAL with its original value does not count, because a run from someone else needs it. Raises
    OptionError.
    """
    given_names = (name for name, value in values.items() if value is not None)
    set_options = [name for name in given_names if "resume" not in OPTIONS_BY_NAME[name].taken_by]
    if unchangeable := [name for name in set_options if name not in EXTERNAL]:
        return unchangeable
    changed = replace(options, **_fields(parse_values(values)))
    before, after = external_values(options), external_values(changed)
    return [name for name in set_options if before.get(name) != after.get(name)]


def move_options(folder: Path, options: RunOptions) -> RunOptions:
    """Return options that were given in ``folder``, with relative paths rewritten for the current working folder.

    They are unchanged if ``folder`` is the current working folder or does not exist.
    """
    if not is_folder(folder) or folder.samefile(Path.cwd()):
        return options
    moved: dict[str, Any] = {"model": move_model(folder, options)}
    for option in OPTIONS:
        move = option.type.move if option.type is not None and option.field else None
        if move is None or (value := getattr(options, option.field)) is None:
            continue
        moved[option.field] = (
            tuple(move(folder, element, options) for element in value)
            if option.repeatable
            else move(folder, value, options)
        )
    return replace(options, **moved)


def _parse(option: Option, value: object) -> Any:
    """Return the value of the option's field. Raises OptionError."""
    kind = option.type
    if kind is None:
        if value is not True:
            raise option_fault(option.name, f"{quote(str(value))} is neither true nor false")
        return value
    elements = value if isinstance(value, (list, tuple)) else (value,)
    for element in elements:
        if isinstance(element, bool) or not isinstance(element, (str, int, float, Path)):
            raise option_fault(option.name, f"{type(element).__name__} is not text, a number or a list of them")
    parsed = []
    for text in map(str, elements) if option.repeatable else [",".join(map(str, elements))]:
        try:
            parsed.append(kind.parse(text))
        except ValueError as error:
            raise option_fault(option.name, str(error), option.redact(text)) from None
    return tuple(parsed) if option.repeatable else parsed[0]


def _fields(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of RunOptions for parsed values. Raises OptionError if a bound is given twice."""
    fields: dict[str, Any] = {}
    for name, value in parsed.items():
        option = OPTIONS_BY_NAME[name]
        if option.key or option.other_keys:
            of_field = fields.setdefault(option.field, {})
            for key, bound in value if option.other_keys else ((option.key, value),):
                if key in of_field:
                    raise option_fault(name, f"{key} has two bounds; give one of them")
                of_field[key] = bound
        elif option.field:
            fields[option.field] = option.switch_value if option.type is None else value
    return fields


def _default(option: Option, options: RunOptions) -> object:
    return default_search(options.objectives) if option.name == "search" else option.value_in(DEFAULTS)
