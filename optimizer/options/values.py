"""Types of option values: how text is parsed, written back, and moved to another working folder if it is a path."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, overload

from objectives.metrics import METRICS
from objectives.quantiles import parse_percentile
from objectives.sla import metric_name
from objectives.units import parse_duration_ms
from optimizer.core.endpoint import HEADER_NAME
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import STEADY_DISTRIBUTIONS, is_load_shape, parse_load_shape
from optimizer.core.measurement_windows import MAX_WINDOW_MS, MIN_WINDOW_MS
from optimizer.core.request_sizes import DISTRIBUTION_MARKS, names_file, parse_size_distribution
from optimizer.core.safe_text import is_file, is_folder, quote
from optimizer.options.option import MovePath
from optimizer.options.run_options import (
    DISTRIBUTIONS,
    GENERATED_DATA,
    TRACE_ENDING,
    RunOptions,
    is_distribution,
    is_trace,
)
from optimizer.options.server_options import check_option_name

_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)(?!/|:memory:|file:)(.+)", re.DOTALL)
_SQLITE_PATH = re.compile(r"sqlite(?:\+\w+)?:///(?!:memory:|file:)([^?]+)(?:\?.*)?", re.DOTALL)


def move_model(folder: Path, options: RunOptions) -> str:
    """Return MODEL: the path of a profile or model, or a name; a profile of that name may lie in ``folder``."""
    model = options.model
    if options.model_repository is not None:
        return model
    if model.endswith((".yaml", ".yml", ".onnx")) or is_folder(folder / model):
        return str(folder / model)
    profile = folder / "configs" / f"{model}.yaml"
    return str(profile) if is_file(profile) else model


def _move_where(is_path: Callable[[str], bool]) -> MovePath:
    """Return a function that moves the values that are paths, and returns others unchanged."""
    return lambda folder, text, _: str(folder / text) if is_path(text) else text


move_path = _move_where(lambda text: True)
move_request_times = _move_where(lambda text: not is_distribution(text))
move_input_data = _move_where(lambda text: text not in GENERATED_DATA)
move_token_lengths = _move_where(names_file)


def move_program(folder: Path, path: str, _: RunOptions) -> str:
    """Return a path, or the plain name of a program, which is looked up on PATH."""
    return str(folder / path) if "/" in path or (folder / path).exists() else path


def move_mount(folder: Path, mount: str, _: RunOptions) -> str:
    """Return a mount ``SOURCE:TARGET``, whose source may be a relative path."""
    source, colon, target = mount.partition(":")
    return f"{folder / source}{colon}{target}" if source and not source.startswith("~") else mount


def move_run(folder: Path, run: str, options: RunOptions) -> str:
    """Return a run: a path, or a name in the folder of results."""
    return str(folder / (run if (folder / run).exists() else Path(options.out) / run))


def move_storage(folder: Path, storage: str, _: RunOptions) -> str:
    """Return a journal file or the URL of a database, whose SQLite file may have a relative path."""
    if "://" not in storage:
        return str(folder / storage)
    match = _SQLITE_FILE.fullmatch(storage)
    return f"{match[1]}{folder / match[2]}" if match else storage


def storage_file(storage: str) -> Path | None:
    """Return the file of a storage, a journal or an SQLite database; None for other databases."""
    if "://" not in storage:
        return Path(storage)
    match = _SQLITE_PATH.fullmatch(storage)
    return Path(match[1]) if match else None


T = TypeVar("T")
Default = TypeVar("Default")

MAX_SEED = 2**32 - 1  # numpy's limit
MAX_INT32 = 2**31 - 1  # Triton's sizes
MAX_RATE = 1e6  # requests per second
MAX_TEXT_LENGTH = 4096  # characters
MAX_STRING_LENGTH = 1 << 20
MAX_STUDY_NAME_LENGTH = 400
MAX_VALUES = 1000  # limit for the values of a list
MIN_CONFIDENCE, MAX_CONFIDENCE = 0.8, 0.9999
OBJECTIVES = tuple(name for name in METRICS if name != "gpu-memory")  # the objective memory includes it
_DECIMAL = r"([0-9]{1,10}(?:\.[0-9]{1,9})?)"


class OptionError(BadInputError):
    """A value of an option that is not allowed; ``option`` is the option's name without dashes."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def parse_value(flag: str, text: str, parse: Callable[[str], T]) -> T:
    """Return ``parse(text)``. Raises OptionError naming flag and value if ``parse`` raises ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise OptionError(flag.removeprefix("--"), f"{flag} {quote(text)}: {error}") from None


@overload
def parse_optional(flag: str, text: str | None, parse: Callable[[str], T]) -> T | None: ...
@overload
def parse_optional(flag: str, text: str | None, parse: Callable[[str], T], default: Default) -> T | Default: ...
def parse_optional(flag: str, text: str | None, parse: Callable[[str], Any], default: Any = None) -> Any:
    """Return ``parse_value``, or ``default`` for an option that was not given."""
    return default if text is None else parse_value(flag, text, parse)


def format_number(number: float) -> str:
    """Return all digits of ``number`` without an exponent."""
    text = format(Decimal(repr(float(number))), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_latency_metric(text: str) -> str:
    """Return the short name of a latency metric: ``p99.9`` or ``ttft-avg``. Raises ValueError with the rule."""
    try:
        metric = METRICS[metric_name(text)]
    except ValueError:
        percentile = text.rpartition("-")[2].strip()
        if percentile.startswith("p"):
            parse_percentile(percentile)  # its rule, if it is broken
        metric = METRICS["throughput"]
    if metric.timing is None:
        raise ValueError(f"{quote(text)} is not avg or a percentile of the latency, of ttft or of itl")
    return metric.short_name


def parse_latency_bound(text: str) -> tuple[str, float]:
    """Return the metric and the bound in ms of ``p99.9<=30ms``. Raises ValueError with an example."""
    metric, sign, bound = text.partition("<=")
    if not sign:
        raise ValueError("write METRIC<=TIME, such as p99.9<=30ms or ttft-p99.5<=200ms")
    if "," in bound:
        raise ValueError("give an option for each bound, such as --sla 'p95<=20ms' --sla 'p99<=30ms'")
    return parse_latency_metric(metric.strip()), parse_duration_ms(bound)


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        try:
            number = int(text) if len(text) <= 20 else None
        except ValueError:
            number = None
        if number is None or number < minimum or (maximum is not None and number > maximum):
            bounds = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
            raise ValueError(f"write a whole number {bounds}")
        return number

    return parse


def parse_budget_seconds(text: str) -> float:
    """Return a duration such as ``5m`` in seconds."""
    return parse_duration_ms(text, example="5m") / 1000


def parse_interval_ms(text: str) -> float:
    """Return the duration of a measurement window in milliseconds."""
    milliseconds = parse_duration_ms(text, example="300ms")
    if not MIN_WINDOW_MS <= milliseconds <= MAX_WINDOW_MS:
        raise ValueError(f"write a time from {MIN_WINDOW_MS}ms to {MAX_WINDOW_MS / 1000:g}s")
    return milliseconds


def number_where(is_allowed: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    """Return a parser of numbers that are allowed; ``rule`` is the error about all other texts."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise ValueError(rule)
        return value

    return parse


parse_number = number_where(math.isfinite, "write a number such as 0.9")


def text_where(is_allowed: Callable[[str], bool], rule: str) -> Callable[[str], str]:
    """Return a parser that returns allowed texts unchanged; ``rule`` is the error about all others."""

    def parse(text: str) -> str:
        if not is_allowed(text):
            raise ValueError(rule)
        return text

    return parse


parse_string_data = text_where(
    lambda text: len(text) <= MAX_STRING_LENGTH, f"it is longer than {MAX_STRING_LENGTH} characters"
)
parse_input_data = text_where(bool, "write random, zero, or a file or folder of samples")
parse_text = text_where(
    lambda text: 0 < len(text) <= MAX_TEXT_LENGTH and text.isprintable(),
    f"give 1 to {MAX_TEXT_LENGTH:,} printable characters",
)
parse_path = text_where(lambda text: bool(text.strip()), "write a path")
parse_study_name = text_where(
    lambda text: bool(text.strip()) and text.isprintable() and len(text) <= MAX_STUDY_NAME_LENGTH,
    f"give a name of 1 to {MAX_STUDY_NAME_LENGTH} printable characters",
)


def parse_share(text: str) -> float:
    """Return a share such as ``99%`` or ``0.99`` as a fraction; NaN if ``text`` is no number."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan


def parse_regression(text: str) -> float:
    """Return the share of the throughput whose loss is a regression, as a fraction."""
    share = parse_share(text)
    if not 0 < share < 1:
        raise ValueError("write a share such as 5%")
    return share


def parse_confidence(text: str) -> float:
    """Return a confidence level as a fraction."""
    share = parse_share(text)
    if not MIN_CONFIDENCE <= share <= MAX_CONFIDENCE:
        raise ValueError(f"write a share such as 99%, from {MIN_CONFIDENCE:.0%} to {100 * MAX_CONFIDENCE:g}%")
    return round(share, 9)


def parse_error_percent(text: str) -> float:
    """Return a permitted share of failed requests in percent: ``0.1%``. Raises ValueError with an example."""
    match = re.fullmatch(rf"{_DECIMAL}\s*%", text.strip())
    percent = float(match[1]) if match else 0.0
    if not 0 < percent < 100:
        raise ValueError("write a percentage above 0% and below 100%, such as 0.1%")
    return percent


def names_among(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of ``allowed`` names, separated by commas, which keeps their order."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if any(name not in allowed or names.count(name) > 1 for name in names):
            raise ValueError(f"give one or more of {', '.join(allowed)}, each once")
        return names

    return parse


parse_objectives = names_among(OBJECTIVES)  # most important first


def parse_model_names(text: str) -> tuple[str, ...]:
    """Return the model names in ``text`` without repetitions."""
    names = tuple(dict.fromkeys(text.split(",")))
    if not all(names):
        raise ValueError("give names of models, separated by commas")
    return names


_MODEL_WITH_SHARE = re.compile(r"([^=]+)(?:=([0-9]{1,9}(?:\.[0-9]{0,9})?))?")
LOAD_SHARES = (0.01, 100.0)  # smallest and largest share of the load


def load_shares(models: Iterable[str]) -> dict[str, float]:
    """Return the share of the load by model for texts such as ``encoder`` or ``ranker=3``; it is 1 without a number.

    The share of the model that is tuned is 1. The texts are those that ``check_load_share`` accepts.
    """
    matches = (_MODEL_WITH_SHARE.fullmatch(text) for text in models)
    return {match[1]: float(match[2] or 1) for match in matches if match}


def write_load_shares(shares: Mapping[str, float]) -> str:
    """Return ``shares`` as text such as ``encoder=1,ranker=3``."""
    return ",".join(f"{name}={share:g}" for name, share in shares.items())


def check_load_share(text: str) -> str:
    """Return ``text``, a model as for ``load_shares``. Raises ValueError naming it if it has another form."""
    smallest, largest = LOAD_SHARES
    if not any(smallest <= share <= largest for share in load_shares([text]).values()):
        raise ValueError(
            f"{quote(text)} is not a model with a share of the load; write NAME, or NAME=SHARE with a number from "
            f"{smallest:g} to {largest:g} such as ranker=3"
        )
    return text


def parse_concurrent_models(text: str) -> tuple[str, ...]:
    """Return the models in ``text``, each as for ``load_shares``."""
    return tuple(map(check_load_share, text.split(",")))


def parse_usable_cpus(text: str) -> str:
    """Return a list of CPUs in its shortest form; this process must be allowed to run on them."""
    return format_cpus(parse_cpus(text, among=usable_cpus()))


def parse_batch_size(text: str) -> int | str:
    """Return a number of samples or requests, or the text itself if it is a mix of them."""
    if any(mark in text for mark in DISTRIBUTION_MARKS):
        parse_size_distribution(text)
        return text
    try:
        return whole_number(1, MAX_INT32)(text)
    except ValueError as error:
        raise ValueError(f"{error}, or a mix such as 10..30") from None


def parse_distribution(text: str) -> str:
    """Return the name of a distribution, or a load shape."""
    if is_load_shape(text):
        parse_load_shape(text)
    elif text not in STEADY_DISTRIBUTIONS:
        raise ValueError(f"choose from {', '.join(DISTRIBUTIONS)}; a shape may have values, such as spike:4x:10%:1s")
    return text


def parse_intervals(text: str) -> str:
    """Return the path of a file of intervals between requests."""
    if not text.strip():
        raise ValueError("write a file of intervals in microseconds")
    if is_trace(text):
        raise ValueError("give a CSV file with the time of each request as --request-trace")
    return _not_distribution(text)


def parse_trace(text: str) -> str:
    """Return the path of a file with the time of each request."""
    if not text.lower().endswith(TRACE_ENDING):
        raise ValueError("write a CSV file whose name ends in .csv; intervals are given as --request-intervals")
    return _not_distribution(text)


def _not_distribution(text: str) -> str:
    if is_distribution(text):
        raise ValueError(f"give a distribution with --request-distribution, or a file of this name as ./{text}")
    return text


def parse_storage(text: str) -> str:
    """Return an Optuna storage: the URL of a database, or the path of a journal file.

    A new file needs a folder or an ending in its name, because a plain word is more often a mistake.
    """
    is_word = "://" not in text and not re.search(r"[/.:]", text)
    if not text.strip() or (is_word and not is_file(Path(text))):
        file = f"./{quote(text.strip() or 'study')}.journal"
        raise ValueError(f"write a file such as {file}, or a URL such as sqlite:///study.db")
    return text


def parse_header(text: str) -> str:
    """Return a request header ``NAME:VALUE``."""
    name, colon, _ = parse_text(text).partition(":")
    if not colon or not HEADER_NAME.fullmatch(name):
        raise ValueError("write NAME:VALUE, such as Authorization:$TOKEN")
    return text


def parse_server_arg(text: str) -> str:
    """Return an option of tritonserver, such as ``--log-verbose=1``."""
    match = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", parse_text(text))
    if match is None:
        raise ValueError("write an option with its value, --server-arg=--name=value")
    try:
        check_option_name(match[1])
    except ValueError as error:
        raise ValueError(f"{error}; leave it out") from None
    return text


def parse_whole_numbers(text: str, minimum: int, maximum: int = MAX_INT32) -> tuple[int, ...]:
    """Return a list such as ``1,2,4``, ``2:16:2`` or ``1..256`` in its order, without repetitions."""
    return tuple(int(number) for number in _parse_list(text, minimum, maximum, "whole number"))


def parse_rates(text: str) -> tuple[float, ...]:
    """Return a list of request rates per second, which may be fractions."""
    return tuple(float(number) for number in _parse_list(text, 1, MAX_RATE, "rate"))


def parse_words(text: str) -> tuple[str, ...]:
    """Return the values of a comma-separated list without repetitions."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(words) or len(words) > MAX_VALUES:
        raise ValueError("write values, separated by commas")
    return words


def _parse_list(text: str, minimum: float, maximum: float, kind: str) -> tuple[Decimal, ...]:
    numbers = (number for part in text.split(",") for number in _parse_part(part.strip(), kind))
    try:
        values = tuple(dict.fromkeys(itertools.islice(numbers, MAX_VALUES + 1)))
        if not all(minimum <= number <= maximum for number in values):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"write {kind}s from {minimum:g} to {maximum:,.0f} as 1,2,4 or start:end:step (2:16:2) or doubled "
            "(1..256)"
        ) from None
    if len(values) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values; take a larger step")
    return values


def _parse_part(text: str, kind: str) -> Iterator[Decimal]:
    """Return the numbers of one element of a list. Raises ValueError."""
    match = re.fullmatch(f"{_DECIMAL}(?:(:|\\.\\.){_DECIMAL}(?::{_DECIMAL})?)?", text)
    if match is None or ("." in text.replace("..", "") and kind == "whole number"):
        raise ValueError
    first, relation, last, step = match.groups()
    low, high = Decimal(first), Decimal(last or first)
    if high < low or (relation == ".." and (step or not low)) or (step and not Decimal(step)):
        raise ValueError
    if relation == "..":
        doublings = math.ceil(math.log2(high / low))
        return iter([*(low * 2**power for power in range(doublings)), high])
    stride = Decimal(step or 1)
    return (low + i * stride for i in range(int((high - low) / stride) + 1))


# Lists of CPUs as taskset and cpuset write them: ``0-3,8``.

MAX_CPU_COUNT = 8192  # the kernel's NR_CPUS
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


def parse_cpus(text: str, among: frozenset[int] | None = None) -> frozenset[int]:
    """Return the CPUs that ``text`` lists, such as ``0-3,8`` or ``0-6:2``; at least one.

    Raises ValueError (one line) for any other text, and for a CPU that is not ``among`` the usable ones.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError("write CPU numbers and ranges, such as 0-3 or 0-3,8")
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or step < 1:
            raise ValueError(f"{part.strip()} contains no CPU; write the lower number first, such as 0-3")
        if last >= MAX_CPU_COUNT:
            raise ValueError(f"Linux has no CPU {last}; the last can be {MAX_CPU_COUNT - 1}")
        numbers.update(range(first, last + 1, step))
    if among is not None and numbers - among:
        unusable = format_cpus(numbers - among)
        raise ValueError(f"CPU {unusable} cannot be used here; the usable CPUs are {format_cpus(among)}")
    return frozenset(numbers)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return the shortest text that ``parse_cpus`` reads as ``cpus``: ``0-3,8``."""
    ordered = sorted(set(cpus))
    runs = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])  # equal along consecutive numbers
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))
