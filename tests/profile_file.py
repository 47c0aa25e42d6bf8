"""A profile that a test writes into the current folder."""

from __future__ import annotations

from pathlib import Path

from optimizer.model.profile import Profile, load_profile

MODEL = "model: {builder: mlp}\n"


def load(text: str | bytes) -> Profile:
    """Return the profile ``text``, which is written to p.yaml."""
    Path("p.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_profile(Path("p.yaml"))
