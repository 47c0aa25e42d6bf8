"""How perf_analyzer is told to reach a server."""

from __future__ import annotations

from pathlib import Path

from optimizer.client import tls
from optimizer.client.connection import HIDDEN, Connection, Tls
from optimizer.process import Secret


def connecting(at: Connection) -> list[str]:
    """Its words for ``at``. Values of headers are among them: it takes them nowhere else."""
    words = ["-i", at.protocol, "-u", f"https://{at.address}" if at.tls and at.protocol == "http" else at.address]
    if at.tls is not None:
        flags = _GRPC if at.protocol == "grpc" else _HTTPS
        words += ["--ssl-grpc-use-ssl"] if at.protocol == "grpc" else []
        for name, file in _files(at.tls).items():
            words += [flags[name], str(file)]
    for name, value in at.sent_headers.items():
        words += ["-H", Secret(f"{name}:{value}", shown=f"{name}:{HIDDEN}")]
    return words


def files(at: Connection) -> list[Path]:
    """Those that it reads for ``at``."""
    return [] if at.tls is None else list(_files(at.tls).values())


def _files(own: Tls) -> dict[str, Path]:
    found = {"ca": tls.trusted(own), "cert": own.cert, "key": own.key}
    return {name: file for name, file in found.items() if file is not None}


_GRPC = {
    "ca": "--ssl-grpc-root-certifications-file",
    "cert": "--ssl-grpc-certificate-chain-file",
    "key": "--ssl-grpc-private-key-file",
}
_HTTPS = {
    "ca": "--ssl-https-ca-certificates-file",
    "cert": "--ssl-https-client-certificate-file",
    "key": "--ssl-https-private-key-file",
}
