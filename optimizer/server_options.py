"""Options of tritonserver that hold for all its models: which may be given, and how a candidate says them.

Among a candidate's fields one is ``server.<option>``, as in ``server.rate-limit``; its value DEFAULT leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from optimizer.trial import SERVER_OPTION, FieldValue

DEFAULT = "default"
LONGEST_VALUE = 1000
# what tune gives by itself, or what would end, hide or open the server
_OWN = re.compile(
    r"help|id|model-(repository|store|control-mode|config-name|namespacing)|repository-poll-secs|load-model"
    r"|exit-on-error|disable-auto-complete-config|strict-(model-config|readiness)|backend-directory|log-(file|error)"
    r"|allow-.*|(http|grpc|metrics)-(address|port)|reuse-(http|grpc)-port|http-restricted-api|grpc-restricted-protocol"
    r"|grpc-use-ssl.*|(sagemaker|vertex-ai)-.*"
)


def check_name(name: str) -> str:
    """``name``, without the dashes in front. Raises ValueError where it is none, or one that tune gives by itself."""
    if not re.fullmatch("[a-z][a-z0-9-]*", name):
        raise ValueError("write the name of an option of tritonserver without the dashes, such as rate-limit")
    if _OWN.fullmatch(name):
        raise ValueError(f"--{name} is given by tune itself")
    return name


def spelled(name: str, value: FieldValue) -> FieldValue:
    """A value as tritonserver reads it; YAML takes ``off`` for false. Raises ValueError."""
    if isinstance(value, bool):
        return "off" if name == "rate-limit" and not value else str(value).lower()
    text = str(value)
    if not text or not text.isprintable() or len(text) > LONGEST_VALUE:
        raise ValueError(f"{text[:50]!r} is no value of an option; write printable characters")
    return value


def names(paths: Iterable[str]) -> list[str]:
    """The options among the paths of a space."""
    return [path.removeprefix(SERVER_OPTION) for path in paths if path.startswith(SERVER_OPTION)]


def words(fields: Iterable[tuple[str, FieldValue]]) -> tuple[str, ...]:
    """Those of a candidate's fields as tritonserver gets them: ``--rate-limit=execution_count``."""
    return tuple(
        f"--{path.removeprefix(SERVER_OPTION)}={value}"
        for path, value in fields
        if path.startswith(SERVER_OPTION) and value != DEFAULT
    )
