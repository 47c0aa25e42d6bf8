"""TLS contexts from PEM files."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimizer.core.endpoint import Tls
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, read_bytes

MAX_BYTES = 4 << 20
_HINT = "give a file with PEM certificates"


def tls_context(tls: Tls, create: Callable[..., Any] = ssl.create_default_context) -> ssl.SSLContext:
    """Return a TLS context that checks the server's certificate and host name.

    ``create`` makes the empty context; gevent has its own. Raises BadInputError if a file cannot be used.
    """
    context: ssl.SSLContext = create(cadata=None if tls.ca is None else _read_pem(tls.ca))
    if tls.cert is not None and tls.key is not None:
        _read_pem(tls.cert), _read_pem(tls.key)
        try:
            context.load_cert_chain(tls.cert, tls.key, password=lambda: _reject_password(tls.key))
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror or "it cannot be read"
            names = f"{one_line(str(tls.cert))} with the key {one_line(str(tls.key))}"
            raise BadInputError(f"{names}: not a certificate and its private key ({reason})") from None
    elif tls.cert is not None or tls.key is not None:
        file = one_line(str(tls.cert or tls.key))
        raise BadInputError(f"{file}: a client certificate needs its private key; give both")
    return context


def ca_file(tls: Tls) -> Path | None:
    """Return the file of trusted CAs, for clients whose own default differs from OpenSSL's."""
    if tls.ca is not None:
        return tls.ca
    default = ssl.get_default_verify_paths().cafile
    return None if default is None else Path(default)


def _read_pem(path: Path) -> str:
    try:
        text = read_bytes(path, MAX_BYTES, _HINT).decode("ascii", errors="replace")
        if "-----BEGIN " not in text:
            raise ValueError
        if "CERTIFICATE-----" in text:
            ssl.create_default_context(cadata=text)
    except (ValueError, ssl.SSLError):
        raise BadInputError(f"{one_line(str(path))}: not a valid PEM file; {_HINT}") from None
    return text


def _reject_password(key: Path | None) -> str:
    raise BadInputError(f"{one_line(str(key))}: the private key has a password; give a key without a password")
