"""``tune --version``: the version of the installed package."""

from __future__ import annotations

DISTRIBUTION = "tritune"


def version_line(distribution: str = DISTRIBUTION) -> str:
    """Return ``tritune X.Y.Z``, or a line that says that the package is not installed."""
    from importlib import metadata

    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} of an unknown version: the package is not installed (pip install .)"
