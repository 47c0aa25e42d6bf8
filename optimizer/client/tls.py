"""TLS to a server, for every client alike."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimizer.client.connection import Tls
from optimizer.errors import BadInputError
from optimizer.untrusted import one_line, read_bytes

MAX_BYTES = 4 << 20
_HINT = "give a file of certificates in PEM"


def context(tls: Tls, create: Callable[..., Any] = ssl.create_default_context) -> ssl.SSLContext:
    """Certificate and host name of the server are checked. Raises BadInputError where a file cannot be used."""
    made: ssl.SSLContext = create(cadata=None if tls.ca is None else _text(tls.ca))
    if tls.cert is not None and tls.key is not None:
        _text(tls.cert), _text(tls.key)
        try:
            made.load_cert_chain(tls.cert, tls.key, password=lambda: _encrypted(tls.key))
        except (ssl.SSLError, OSError) as error:
            why = getattr(error, "reason", None) or error.strerror or "it cannot be read"
            names = f"{one_line(str(tls.cert))} with the key {one_line(str(tls.key))}"
            raise BadInputError(f"{names}: not a certificate and its key ({why})") from None
    elif tls.cert is not None or tls.key is not None:
        alone = one_line(str(tls.cert or tls.key))
        raise BadInputError(f"{alone}: a certificate and its key go together; give both")
    return made


def trusted(tls: Tls) -> Path | None:
    """The file of what is trusted: for clients that would look elsewhere for it by themselves."""
    if tls.ca is not None:
        return tls.ca
    usual = ssl.get_default_verify_paths().cafile
    return None if usual is None else Path(usual)


def _text(path: Path) -> str:
    try:
        text = read_bytes(path, MAX_BYTES, _HINT).decode("ascii", errors="replace")
        if "-----BEGIN " not in text:
            raise ValueError
        if "CERTIFICATE-----" in text:
            ssl.create_default_context(cadata=text)
    except (ValueError, ssl.SSLError):
        raise BadInputError(f"{one_line(str(path))}: holds no PEM that can be read; {_HINT}") from None
    return text


def _encrypted(key: Path | None) -> str:
    raise BadInputError(f"{one_line(str(key))}: the key has a password; give one without")
