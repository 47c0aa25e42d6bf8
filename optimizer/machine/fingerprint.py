"""What measurements depend on besides the configuration: the device and the server that they were made on.

Measurements of different fingerprints are never ranked together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optimizer.machine.hardware import Hardware
from optimizer.untrusted import one_line

LENGTH = 12  # of the short form, in hexadecimal digits
PACKAGES = {  # whose version is the backend's, where tune's own backend serves
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "pytorch": ("torch",),
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """``target`` is where the server runs (embedded, local, docker or remote), ``backends`` what serves the model,
    with versions where they are not the server's own. ``server`` is its version; of a local one the
    checksum of its program, of an image its id. ``at``: the address of a server whose machine is not known; CPU is
    then empty, ``cpu_count`` is 0, and GPUs are those that its metrics name."""

    cpu: str
    cpu_count: int
    gpus: tuple[str, ...]
    target: str
    server: str
    backends: tuple[str, ...]
    at: str = ""

    @property
    def id(self) -> str:
        """Short, and the same wherever and whenever the parts are."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]

    def __str__(self) -> str:
        machine = self.at or ", ".join([*self.gpus, self.cpu, f"{self.cpu_count} cores"])
        return f"{machine} · {self.target} server {self.server}, {', '.join(self.backends)}"

    def document(self) -> dict[str, Any]:
        """As run.json has it; ``read`` reads it."""
        return {"id": self.id, **asdict(self)}

    def differences(self, other: Fingerprint) -> str:
        """In words, how ``other`` differs; empty where it does not."""
        names = (field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))
        return "; ".join(
            f"{name.replace('_', ' ')} {_shown(getattr(other, name))} there, {_shown(getattr(self, name))} here"
            for name in names
        )


FINGERPRINT = TypeAdapter(Fingerprint)


def read(document: object) -> Fingerprint | None:
    """What ``Fingerprint.document`` wrote; None for anything else, as runs of earlier versions have it."""
    if not isinstance(document, dict):
        return None
    try:
        return FINGERPRINT.validate_python({name: value for name, value in document.items() if name != "id"})
    except ValidationError:
        return None


def fingerprint(
    hardware: Hardware, backends: Iterable[str], *, target: str, server: str, own_backends: bool, at: str = ""
) -> Fingerprint:
    """Of a server of version ``server``, on this machine unless ``at`` says where else. ``own_backends``: those of
    this project serve in place of the server's."""
    named = tuple(sorted({_versioned(name) if own_backends else name for name in backends}))
    if at:
        return Fingerprint("", 0, hardware.gpus, target, server, named, at)
    return Fingerprint(hardware.cpu, hardware.cpu_count, hardware.gpus, target, server, named)


def _versioned(backend: str) -> str:
    for package in PACKAGES.get(backend, ()):
        try:
            return f"{backend} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return backend


def _shown(value: object) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return one_line(text, 80) or "none"
