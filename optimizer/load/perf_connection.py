"""How perf_analyzer is told to reach a server."""

from __future__ import annotations

from optimizer.deploy import tls
from optimizer.deploy.connection import HIDDEN, Connection
from optimizer.process import Secret


def connecting(at: Connection) -> list[str]:
    """Its words for ``at``. Values of headers are among them: it takes them nowhere else."""
    words = ["-i", at.protocol, "-u", f"https://{at.address}" if at.tls and at.protocol == "http" else at.address]
    if at.tls is not None:
        files = {"ca": tls.trusted(at.tls), "cert": at.tls.cert, "key": at.tls.key}
        flags = _GRPC if at.protocol == "grpc" else _HTTPS
        words += ["--ssl-grpc-use-ssl"] if at.protocol == "grpc" else []
        for name, file in files.items():
            words += [] if file is None else [flags[name], str(file)]
    for name, value in at.sent_headers.items():
        words += ["-H", Secret(f"{name}:{value}", shown=f"{name}:{HIDDEN}")]
    return words


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
