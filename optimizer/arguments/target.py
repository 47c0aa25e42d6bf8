"""Where trials run: ``--target`` and the flags that belong to each, parsed into fields of RunOptions and back."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, get_args

from optimizer.arguments.values import shown
from optimizer.client.connection import ProtocolName
from optimizer.errors import BadInputError
from optimizer.headers import NAME, hidden
from optimizer.options import RunOptions, Target
from optimizer.server_options import check_name

TARGETS: Final[tuple[Target, ...]] = get_args(Target)
DEFAULT_URL = "localhost:8001"
LARGEST_PORT = 65535
LONGEST = 4096  # characters of one value


class Flag(NamedTuple):
    """``field`` is that of RunOptions; one whose default is a tuple may be repeated."""

    field: str
    targets: tuple[Target, ...]
    metavar: str
    help: str


FLAGS: Final = {
    "--tritonserver": Flag("tritonserver", ("local",), "PATH", "local: the server's program (the one on PATH)"),
    "--backend-directory": Flag(
        "backend_directory", ("local",), "DIR", "local: of its backends (those beside it, else /opt/tritonserver's)"
    ),
    "--server-arg": Flag(
        "server_args", ("local", "docker"), "ARG", "local, docker: given to tritonserver, as --server-arg=--x=y"
    ),
    "--url": Flag(
        "url",
        ("remote",),
        "URL",
        f"remote: HOST:PORT of gRPC, or with grpcs://, http://, https:// ({DEFAULT_URL})",
    ),
    "--metrics-url": Flag(
        "metrics_url",
        ("remote",),
        "HOST:PORT",
        "remote: of its metrics, which tell of GPUs (its host, port 8002)",
    ),
    "--header": Flag(
        "headers", ("remote",), "NAME:VALUE", "remote: of each request; $VARIABLE in it is read when used"
    ),
    "--tls-ca": Flag("tls_ca", ("remote",), "FILE", "remote: certificates that the server's is checked with"),
    "--tls-cert": Flag("tls_cert", ("remote",), "FILE", "remote: the client's own certificate"),
    "--tls-key": Flag("tls_key", ("remote",), "FILE", "remote: the key of that"),
    "--docker-image": Flag("docker_image", ("docker",), "IMAGE", "docker: such as nvcr.io/nvidia/tritonserver:…-py3"),
    "--docker-gpus": Flag("docker_gpus", ("docker",), "GPUS", "docker: all, none, or 0,1"),
    "--docker-mount": Flag("docker_mounts", ("docker",), "SRC:DST", "docker: one folder more in the container"),
    "--docker-shm-size": Flag("docker_shm_size", ("docker",), "SIZE", "docker: of its shared memory, such as 1g"),
    "--docker-ulimit": Flag("docker_ulimits", ("docker",), "NAME=N", "docker: such as memlock=-1"),
    "--perf-analyzer-image": Flag(
        "perf_analyzer_image", TARGETS, "IMAGE", "perf_analyzer of this image, such as Triton's SDK, in Docker"
    ),
}
_DEFAULT: Final = RunOptions("")
REPEATED: Final = tuple(flag for flag, of in FLAGS.items() if isinstance(getattr(_DEFAULT, of.field), tuple))
_URL = re.compile(r"(?:(grpc|grpcs|http|https)://)?((?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5}))/?", re.ASCII)


class Address(NamedTuple):
    """``where`` is ``host:port``."""

    where: str
    protocol: ProtocolName
    tls: bool


def add_target(parser: argparse.ArgumentParser, usual: str = "embedded") -> None:
    group = parser.add_argument_group("where trials run")
    group.add_argument(
        "--target",
        choices=TARGETS,
        help=f"embedded: a server that tune brings; local: yours; docker: an image; remote: one that runs ({usual})",
    )
    for flag, (_, _, metavar, text) in FLAGS.items():
        action = "append" if flag in REPEATED else "store"
        group.add_argument(flag, metavar=metavar, help=text, action=action)


def target(given: argparse.Namespace, before: RunOptions = _DEFAULT) -> dict[str, Any]:
    """Fields of RunOptions. What is not given is as in ``before``, where that has the same target.

    Raises BadInputError for a flag that the target has not, and for a value that can mean nothing.
    """
    chosen: Target = given.target or before.target
    kept = before if chosen == before.target else _DEFAULT
    found: dict[str, Any] = {"target": chosen}
    for flag, of in FLAGS.items():
        value = getattr(given, flag.removeprefix("--").replace("-", "_"))
        if value is None:
            found[of.field] = getattr(kept, of.field)
            continue
        values = cast(Sequence[str], value if isinstance(value, list) else [value])
        if chosen not in of.targets:
            other = f"only --target {' and '.join(of.targets)} has it"
            raise BadInputError(f"{flag} {_told(flag, values[0])}: {other}; give that too, or leave {flag} out")
        for one in values:
            _check(flag, one)
        found[of.field] = tuple(values) if flag in REPEATED else value
    _check_together(found)
    return found


def words(options: RunOptions) -> dict[str, Any]:
    """The flags that give these options again; no value of a header that is a secret."""
    found = {flag: getattr(options, of.field) for flag, of in FLAGS.items()}
    given = {flag: value for flag, value in found.items() if value != getattr(_DEFAULT, FLAGS[flag].field)}
    if options.headers:
        given["--header"] = tuple(map(hidden, options.headers))
    return {**({"--target": options.target} if options.target != _DEFAULT.target else {}), **given}


def address(url: str | None) -> Address:
    """Of ``--url``. Raises BadInputError."""
    found = _URL.fullmatch(url or DEFAULT_URL)
    if found is None or not _is_port(found[3]):
        raise BadInputError(
            f"--url {shown(url or '')}: write host:port of the server's gRPC, such as {DEFAULT_URL}, or "
            "http://host:port"
        )
    scheme = found[1] or "grpc"
    return Address(found[2], "http" if scheme.startswith("http") else "grpc", scheme.endswith("s"))


def _is_port(digits: str) -> bool:
    return 0 < int(digits) <= LARGEST_PORT


def _check(flag: str, value: str) -> None:
    if not value or len(value) > LONGEST or not value.isprintable():
        raise BadInputError(f"{flag} {_told(flag, value)}: give a value of printable characters")
    if flag == "--url":
        address(value)
    found = _URL.fullmatch(value)
    if flag == "--metrics-url" and not (found and found[2] == value and _is_port(found[3])):
        raise BadInputError(f"{flag} {shown(value)}: write host:port alone, such as triton:8002")
    if flag == "--header" and not re.fullmatch(rf"{NAME}:.*", value):
        raise BadInputError(f"{flag} {_told(flag, value)}: write NAME:VALUE, such as Authorization:$TOKEN")
    if flag == "--server-arg" and not re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", value):
        raise BadInputError(f"{flag} {shown(value)}: write an option with its value, --server-arg=--name=value")
    if flag == "--server-arg":
        try:
            check_name(value.removeprefix("--").partition("=")[0])
        except ValueError as error:
            raise BadInputError(f"{flag} {shown(value)}: {error}; leave it out") from None


def _check_together(found: Mapping[str, Any]) -> None:
    if (found["tls_cert"] is None) != (found["tls_key"] is None):
        given, other = ("--tls-key", "--tls-cert") if found["tls_cert"] is None else ("--tls-cert", "--tls-key")
        raise BadInputError(f"{given}: a certificate and its key go together; give {other} too")
    secured = [flag for flag in ("--tls-ca", "--tls-cert", "--tls-key") if found[FLAGS[flag].field] is not None]
    if secured and not address(found["url"]).tls:
        url = shown(found["url"] or DEFAULT_URL)
        raise BadInputError(f"{secured[0]}: --url {url} is not encrypted; write grpcs:// or https:// in front of it")
    if found["target"] == "docker" and found["docker_image"] is None:
        raise BadInputError("--target docker: which image? give --docker-image nvcr.io/nvidia/tritonserver:…-py3")


def _told(flag: str, value: str) -> str:
    return shown(hidden(value)) if flag == "--header" else shown(value)
