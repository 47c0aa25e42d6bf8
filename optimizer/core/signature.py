"""Signatures that show that tune wrote a record for this user on this machine.

The folder of a run may come from anyone, and its record names models with code, programs and addresses. The key is in
the cache folder, where only this user can read it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from pathlib import Path

from optimizer.core.files import cache_folder

KEY_FILE = "signature.key"
_KEY_BYTES = 32


def sign(content: object) -> str | None:
    """Return the signature of ``content``, which JSON can hold; None if the key cannot be stored."""
    path = cache_folder() / KEY_FILE
    key = _read_key(path) or _make_key(path)
    return None if key is None else _signature(key, content)


def is_signed(content: object, signature: object) -> bool:
    """Return whether ``signature`` is what ``sign`` returns for ``content``."""
    key = _read_key(cache_folder() / KEY_FILE)
    if key is None or not isinstance(signature, str):
        return False
    return hmac.compare_digest(_signature(key, content).encode(), signature.encode(errors="replace"))


def _signature(key: bytes, content: object) -> str:
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), "sha256").hexdigest()


def _read_key(path: Path) -> bytes | None:
    try:
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _make_key(path: Path) -> bytes | None:
    """Write a new key, unless another process has just done so, and return it; None if the disk refuses it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size < _KEY_BYTES:  # the disk was full
                path.unlink()
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    except FileExistsError:
        pass
    except OSError:
        return None
    return _read_key(path)
