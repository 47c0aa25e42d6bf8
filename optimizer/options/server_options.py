"""Options of tritonserver that apply to all models: which ones may be set, and how a candidate sets them.

A candidate's field ``server.<option>``, such as ``server.rate-limit``, sets an option. The value DEFAULT omits it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from optimizer.core.candidate import SERVER_OPTION_PREFIX, FieldValue

DEFAULT = "default"
MAX_VALUE_LENGTH = 1000
METRICS_CONFIG = "--metrics-config"
DEFAULT_LEVELS = frozenset((0.5, 0.9, 0.95, 0.99))  # of Triton's quantiles; that of 0.999 is not precise enough
ERROR_SHARE = 0.1  # the error of a level as a share of its distance from 1
QUANTILE_COST = "20 to 30 µs of CPU time a request"  # benchmarks/latency_quantiles.md
# set by tune itself, or able to stop, hide or open the server; the user needs allow-client-shm for --shared-memory
_RESERVED = re.compile(
    r"help|id|model-(repository|store|control-mode|config-name|namespacing)|repository-poll-secs|load-model"
    r"|exit-on-error|disable-auto-complete-config|strict-(model-config|readiness)|backend-directory|log-(file|error)"
    r"|allow-(?!client-shm$).*|(http|grpc|metrics)-(address|port)|reuse-(http|grpc)-port|http-restricted-api"
    r"|grpc-restricted-protocol|grpc-use-ssl.*|(sagemaker|vertex-ai)-.*"
)


class _Values(NamedTuple):
    """The values that an option takes: a pattern for the whole text, and the same in words."""

    pattern: str
    words: str


_COUNT = _Values("[0-9]+", "a whole number from 0")
_SWITCH = _Values("(?i:true|on|1|false|off|0)", "true, false")  # tritonserver ignores the case
_SETTING = _Values("[^=]+=.*", "SETTING=VALUE, NAME,SETTING=VALUE")
_VALUES: Final = {  # those of Triton's command_line_parser.cc; other options are passed on unchecked
    "rate-limit": _Values("(?i:off|execution_count)", "off, execution_count"),
    "rate-limit-resource": _Values("[^:]+:[0-9]+(:[0-9]+)?", "NAME:COUNT, NAME:COUNT:GPU"),
    "pinned-memory-pool-byte-size": _COUNT,
    "cuda-memory-pool-byte-size": _Values("[0-9]+:[0-9]+", "GPU:BYTES"),
    "buffer-manager-thread-count": _COUNT,
    "model-load-thread-count": _COUNT,
    "model-load-retry-count": _COUNT,
    "cache-config": _SETTING,
    "backend-config": _SETTING,
    "host-policy": _SETTING,
    "log-verbose": _Values("[0-9]+|true|false", _COUNT.words),
    "log-info": _SWITCH,
    "log-warning": _SWITCH,
    "log-format": _Values("ISO8601", "ISO8601"),
    "trace-config": _SETTING,
    "min-supported-compute-capability": _Values(r"[0-9]+(\.[0-9]+)?", "a number such as 7.5"),
    "exit-timeout-secs": _COUNT,
    "grpc-infer-allocation-pool-size": _COUNT,
}
_WITHOUT_DASHES: Final = {name.replace("-", ""): name for name in _VALUES}


def check_option_name(name: str) -> str:
    """Return ``name`` if it is the name of an option that may be set, without dashes. Raises ValueError."""
    if not re.fullmatch("[a-z][a-z0-9-]*", name):
        raise ValueError("write the name of an option of tritonserver without the dashes, such as rate-limit")
    if _RESERVED.fullmatch(name):
        raise ValueError(f"--{name} is set by tune itself")
    if (meant := _WITHOUT_DASHES.get(name.replace("-", ""), name)) != name:
        raise ValueError(f"tritonserver has no option --{name}; did you mean {meant}?")
    return name


def normalize_value(name: str, value: FieldValue) -> FieldValue:
    """Return ``value`` as tritonserver reads it: booleans in lower case, but ``off`` for false of ``rate-limit``.

    Raises ValueError if the option ``name`` does not take it.
    """
    if isinstance(value, bool):
        value = "off" if name == "rate-limit" and not value else str(value).lower()
    text = str(value)
    if not text or not text.isprintable() or len(text) > MAX_VALUE_LENGTH:
        raise ValueError(f"{text[:50]!r} is not an option value; write 1 to {MAX_VALUE_LENGTH} printable characters")
    allowed = _VALUES.get(name)
    if allowed is not None and text != DEFAULT and not re.fullmatch(allowed.pattern, text, re.ASCII):
        raise ValueError(f"{text[:50]!r} does not fit; it takes {allowed.words} or {DEFAULT}")
    return value


def option_names(paths: Iterable[str]) -> list[str]:
    """Return the names of the options among the field paths of a space."""
    return [path.removeprefix(SERVER_OPTION_PREFIX) for path in paths if path.startswith(SERVER_OPTION_PREFIX)]


def latency_quantiles(levels: Iterable[float], *, explicit: bool = False) -> tuple[str, ...]:
    """Return the arguments with which Triton exports the quantiles ``levels`` of its request times.

    They name the levels if Triton does not export each of them precisely by default, or with ``explicit``.
    """
    ordered_levels = sorted(set(levels))
    if not ordered_levels:
        return ()
    arguments = (f"{METRICS_CONFIG}=summary_latencies=true",)
    if not explicit and DEFAULT_LEVELS.issuperset(ordered_levels):
        return arguments
    named = ",".join(f"{level:g}:{ERROR_SHARE * (1 - level):.1g}" for level in ordered_levels)
    return (*arguments, f"{METRICS_CONFIG}=summary_quantiles={named}")


def to_arguments(fields: Iterable[tuple[str, FieldValue]]) -> tuple[str, ...]:
    """Return the arguments of tritonserver that a candidate's fields set, such as ``--rate-limit=off``."""
    return tuple(
        f"--{path.removeprefix(SERVER_OPTION_PREFIX)}={value}"
        for path, value in fields
        if path.startswith(SERVER_OPTION_PREFIX) and value != DEFAULT
    )
