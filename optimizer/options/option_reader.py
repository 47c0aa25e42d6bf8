"""Convert option values to RunOptions, and check combinations of options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from optimizer.core.endpoint import ProtocolName
from optimizer.core.safe_text import exists, is_folder, quote
from optimizer.options.addresses import DEFAULT_URL, SSL_FLAGS, server_address
from optimizer.options.option import Option
from optimizer.options.run_options import (
    DEFAULTS,
    EXHAUSTIVE_SEARCHES,
    PROGRAM_TARGETS,
    SEARCHERS,
    SIMULATED_OBJECTIVES,
    RunOptions,
    default_search,
)
from optimizer.options.table import OPTIONS, OPTIONS_BY_NAME, REQUEST_TIME_OPTIONS, TARGET_OPTIONS
from optimizer.options.values import MAX_INT32, OptionError, format_number, move_model

MIN_SIMILARITY = 0.6  # of a proposed flag; 1 is the same text
MAX_PROPOSALS = 5  # flags that are equally similar
MODEL_ARGUMENT = "MODEL"  # stands for the model among names of options
# options that name code, a program, an address, or data that are sent to a server
EXTERNAL = ("model-repository", "input-data", "cluster", *(option.name for option in TARGET_OPTIONS))
MAX_FLAG_LENGTH = 100  # further characters are not compared
SIMILAR_FLAGS: Final = {  # the folder of the runs, which commands that write runs name differently
    "--out": "--results",
    "--results": "--out",
}


def _advise_sweep(setting: str, flag: str) -> str:
    """Return the advice on an option that would fix a ``setting``, and the ``flag`` of `tune sweep` for it."""
    return f"{setting} is searched; limit it in a profile, or measure given values with `tune sweep {flag}`"


SEARCH_ADVICE: Final = {  # for options of `tune sweep`, perf_analyzer and Model Analyzer that a search does not have
    **dict.fromkeys(
        ("--concurrency", "--concurrency-range", "--max-concurrency"),
        _advise_sweep("the concurrency", "--concurrency"),
    ),
    **dict.fromkeys(
        ("--request-rate", "--request-rate-range"),
        "--load rate searches the highest rate; measure given rates with `tune sweep --request-rate`",
    ),
    "--max-batch-size": _advise_sweep("max_batch_size", "--max-batch-size"),
    "--max-queue-delay": _advise_sweep("the queue delay", "--max-queue-delay"),
    "--instance-count": _advise_sweep("the number of instances", "--instance-count"),
    **dict.fromkeys(
        ("--latency", "--latency-threshold", "--latency-budget", "--percentile"),
        "a bound on the latency is written --sla-p95 20ms",
    ),
    **dict.fromkeys(("--model-name", "--profile-models", "-m"), "write the model without an option"),
    "--triton-launch-mode": "the server is chosen with --target",
}


def check_options(options: RunOptions, explicit: Collection[str]) -> None:
    """Raise OptionError if options contradict each other."""
    _check_load(options, explicit)
    check_target_options(options, explicit)
    _check_remote(options)
    _check_shared_memory(options)
    _check_search(options)
    _check_cluster(options)
    if options.study_name is not None and options.storage is None:
        raise _fault("study-name", "--storage is missing; give the database of all workers", options.study_name)


def check_target_options(options: RunOptions, explicit: Collection[str]) -> None:
    """Raise OptionError if an option does not belong to the target, or needs another option that is missing."""
    if misplaced := _misplaced_option(options, explicit):
        raise _requires(*misplaced)
    _check_ssl(options, explicit)
    if options.target == "docker" and options.docker_image is None:
        image = "nvcr.io/nvidia/tritonserver:…-py3"
        raise _fault("target", f"--docker-image is missing; give an image such as {image}", "docker")


def _misplaced_option(options: RunOptions, explicit: Collection[str]) -> tuple[str, str, str] | None:
    """Return the name and value of an option that does not belong to the target, and the targets that take it."""
    for option in TARGET_OPTIONS:
        if option.name in explicit and options.target not in option.targets:
            value = option.value_in(options)
            shown = option.redact(value[0] if option.repeatable else value)
            return option.name, shown, f"--target {' or '.join(option.targets)}"
    return None


def _fault(name: str, problem: str, value: str | None = None) -> OptionError:
    """Return the error about the option ``name``, which begins with its flag and the ``value``, if that matters."""
    shown = f"--{name}" if value is None else f"--{name} {quote(value)}"
    return OptionError(name, f"{shown}: {problem}")


def _requires(name: str, value: str, other: str) -> OptionError:
    """Return the error about an option that has no effect without the option ``other``."""
    return _fault(name, f"works only with {other}; add {other}, or remove --{name}", value)


def _check_ssl(options: RunOptions, explicit: Collection[str]) -> None:
    """Raise OptionError if a PEM file is of the other protocol than ``--url``, lacks its key, or has no effect."""
    address, url = server_address(options.url), quote(options.url or DEFAULT_URL)
    flags = SSL_FLAGS[address.protocol]
    other_protocol: ProtocolName = "grpc" if address.protocol == "http" else "http"
    for name, flag in SSL_FLAGS[other_protocol].items():
        if flag[2:] in explicit:
            problem = f"--url {url} does not begin with {other_protocol}s://"
            raise _fault(flag[2:], f"{problem}; begin the URL with {other_protocol}s://, or give {flags[name]}")
    files = {"ca": options.tls_ca, "cert": options.tls_cert, "key": options.tls_key}
    set_flags = [flags[name] for name, file in files.items() if file is not None]
    if (flags["cert"] in set_flags) != (flags["key"] in set_flags):
        present, missing = ("key", "cert") if options.tls_cert is None else ("cert", "key")
        raise _fault(flags[present][2:], f"a client certificate needs its key; give {flags[missing]} too")
    if set_flags and not address.tls:
        raise _fault(set_flags[0][2:], f"--url {url} is not encrypted; begin it with {address.protocol}s://")


def _check_load(options: RunOptions, explicit: Collection[str]) -> None:
    timing = [name for name in REQUEST_TIME_OPTIONS if name in explicit]
    if len(timing) > 1:
        both = " and ".join(f"--{name}" for name in timing)
        raise OptionError(timing[0], f"{both} both set the times of the requests: give one of them")
    if options.load != "rate":
        if timing:
            raise _requires(timing[0], options.request_times, "--load rate")
        return
    if options.protocol == "http":
        why = "requests at a rate are sent over gRPC only"
        if "protocol" in explicit:
            raise _fault("protocol", f"{why}; leave it out", "http")
        raise _fault("url", f"{why}; give the host:port of its gRPC", options.url or DEFAULT_URL)
    if options.perf_analyzer_image is not None:
        problem = "perf_analyzer does not send requests at a rate; leave it out"
        raise _fault("perf-analyzer-image", problem, options.perf_analyzer_image)


def _check_remote(options: RunOptions) -> None:
    if options.target != "remote":
        return
    if options.protocol != server_address(options.url).protocol:
        advice = "a gRPC address; give http://host:port"
        if options.protocol == "grpc":
            advice = "an HTTP address; give the host:port of its gRPC"
        raise _fault("protocol", f"--url is {advice}", options.protocol)
    if options.server_cpus is not None:
        raise _fault("server-cpus", "the CPUs of a remote server cannot be set; leave it out", options.server_cpus)


def _check_shared_memory(options: RunOptions) -> None:
    size = options.output_shared_memory_bytes
    if options.shared_memory == "none":
        if size is not None:
            needed = "--shared-memory system or cuda"
            raise _requires("output-shared-memory-size", f"{format_number(size)}B", needed)
        return
    if size is not None and not 1 <= size <= MAX_INT32:
        raise _fault("output-shared-memory-size", "write 1B to 2GiB", f"{format_number(size)}B")
    if options.shared_memory == "cuda" and options.load == "rate":
        problem = "tune's own client, which sends at a rate, has system shared memory only; use that"
        raise _fault("shared-memory", problem, options.shared_memory)
    if options.perf_analyzer_image is not None:
        problem = "a perf_analyzer in a container does not share the memory; leave --perf-analyzer-image out"
        raise _fault("shared-memory", problem, options.shared_memory)
    if options.docker_shm_size is not None:
        problem = "the container then has the shared memory of this machine; leave --docker-shm-size out"
        raise OptionError("docker-shm-size", f"--shared-memory {options.shared_memory}: {problem}")


def _check_search(options: RunOptions) -> None:
    if options.search == "simulated" and options.objectives[0] not in SIMULATED_OBJECTIVES:
        *alternatives, last = (name for name in SEARCHERS if name != "simulated")
        raise OptionError(
            "search",
            f"--search simulated ranks by throughput or goodput; with --objective {','.join(options.objectives)} "
            f"take {', '.join(alternatives)} or {last}",
        )
    if options.search in EXHAUSTIVE_SEARCHES and options.warm_start is not None:
        problem = f"--search {options.search} measures every configuration anyway; leave one of the two out"
        raise _fault("warm-start", problem)


def _check_cluster(options: RunOptions) -> None:
    if options.cluster is None:
        if options.cluster_cpus is not None:
            raise _requires("cluster-cpus", str(options.cluster_cpus), "--cluster")
        return
    if options.target not in PROGRAM_TARGETS:
        problem = f"each trial starts its own server, which --target {options.target} does not"
        raise _fault("cluster", f"{problem}; take {' or '.join(PROGRAM_TARGETS)}")
    if options.study_name is not None:
        raise OptionError("cluster", "--cluster runs the trials of one study in parallel: leave --study-name out")
    for name in ("server-cpus", "client-cpus", "perf-analyzer-image"):
        if OPTIONS_BY_NAME[name].value_in(options) is not None:
            reason = (
                "uses tune's own perf_analyzer" if name == "perf-analyzer-image" else "gets free CPUs of its node"
            )
            raise _fault(name, f"a trial on a cluster {reason}: leave it out")


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


def flag_advice(flag: str, flags: Iterable[str]) -> str:
    """Return advice on a flag that is not among the ``flags`` of the command.

    It is from SEARCH_ADVICE if these are options of a search, else it proposes the flag of SIMILAR_FLAGS, or those
    that are spelled most alike; case, dashes and underscores do not count. It is empty if none is similar.
    """
    flags = list(flags)
    name = flag if flag == "-m" else f"--{flag.lstrip('-').replace('_', '-')}"
    if name in SEARCH_ADVICE and "--search" in flags:
        return SEARCH_ADVICE[name]
    if (similar := SIMILAR_FLAGS.get(name)) in flags:
        return f"did you mean {similar}?"
    word = _letters(flag[:MAX_FLAG_LENGTH])
    similarity = {other: difflib.SequenceMatcher(None, _letters(other), word).ratio() for other in flags}
    highest = max(similarity.values(), default=0.0)
    nearest = [other for other, value in similarity.items() if value == highest]
    if highest < MIN_SIMILARITY:
        return ""
    *alternatives, last = nearest[:MAX_PROPOSALS]
    return f"did you mean {', '.join(alternatives)}{' or ' if alternatives else ''}{last}?"


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
    if misplaced := _misplaced_option(resumed, parsed.keys()):
        name, value, targets = misplaced
        problem = f"works only with {targets}, not with the --target {options.target} of before"
        raise _fault(name, f"{problem}; remove --{name}", value)
    check_target_options(resumed, parsed.keys())
    _check_cluster(resumed)  # no other option of a resumed run contradicts those of the run
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


def _letters(flag: str) -> str:
    return re.sub("[-_]", "", flag).lower()


def _parse(option: Option, value: object) -> Any:
    """Return the value of the option's field. Raises OptionError."""
    if option.type is None:
        if value is not True:
            raise _fault(option.name, f"{quote(str(value))} is neither true nor false")
        return value
    elements = value if isinstance(value, (list, tuple)) else (value,)
    for element in elements:
        if isinstance(element, bool) or not isinstance(element, (str, int, float, Path)):
            raise _fault(option.name, f"{type(element).__name__} is not text, a number or a list of them")
    if option.repeatable:
        return tuple(_parse_text(option, str(element)) for element in elements)
    return _parse_text(option, ",".join(map(str, elements)))


def _parse_text(option: Option, text: str) -> Any:
    assert option.type is not None
    try:
        return option.type.parse(text)
    except ValueError as error:
        raise _fault(option.name, str(error), option.redact(text)) from None


def _fields(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of RunOptions for parsed values. Raises OptionError if a bound is given twice."""
    fields: dict[str, Any] = {}
    for name, value in parsed.items():
        option = OPTIONS_BY_NAME[name]
        if option.key or option.other_keys:
            of_field = fields.setdefault(option.field, {})
            for key, bound in value if option.other_keys else ((option.key, value),):
                if key in of_field:
                    raise _fault(name, f"{key} has two bounds; give one of them")
                of_field[key] = bound
        elif option.field:
            fields[option.field] = option.switch_value if option.type is None else value
    return fields


def _default(option: Option, options: RunOptions) -> object:
    return default_search(options.objectives) if option.name == "search" else option.value_in(DEFAULTS)
