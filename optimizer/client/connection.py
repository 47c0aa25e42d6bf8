"""How a server is reached: address, protocol, headers, TLS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from optimizer.errors import BadInputError

ProtocolName: TypeAlias = Literal["grpc", "http"]

HIDDEN = "***"
LONGEST_VALUE = 8192  # of all headers together, characters: what a tritonserver takes over HTTP
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")


@dataclass(frozen=True)
class Tls:
    """Files in PEM: ``ca`` is what the server's certificate is checked with (None: what this machine trusts),
    ``cert`` and ``key`` are the client's own, both or neither."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Connection:
    """``address`` is ``host:port`` of gRPC or HTTP. ``headers`` go with every request; their values are secrets, and
    stand in no text that is shown or kept. Without ``tls`` nothing is encrypted.

    Raises BadInputError for a header that cannot be sent.
    """

    address: str
    protocol: ProtocolName = "grpc"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not _NAME.fullmatch(name):
                raise BadInputError(f"header {ascii(name)[1:-1]:.60}: not a name; write NAME:VALUE")
            if not (value.isascii() and value.isprintable()):
                raise BadInputError(f"header {name}: its value has characters that no header may have; see to it")
        if sum(map(len, self.headers.values())) > LONGEST_VALUE:
            raise BadInputError(f"headers of more than {LONGEST_VALUE:,} characters: no tritonserver takes them")

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def sent_headers(self) -> dict[str, str]:
        """As they go out: gRPC takes lower-case names only, HTTP does not care."""
        return {name.lower(): value for name, value in self.headers.items()}

    def hide(self, text: str) -> str:
        """``text`` without the values of the headers."""
        for value in sorted(filter(None, self.headers.values()), key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return text
