"""The search, the deployments and the measurements behind the ``tune`` command.

From Python: ``from optimizer import load_run, tune``. Both are imported when they are asked for, so that importing
this package costs nothing and changes nothing; see docs/python.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimizer.analysis.run import Run as Run
    from optimizer.api import load_run as load_run
    from optimizer.api import tune as tune
    from optimizer.errors import TuneError as TuneError

_PUBLIC = {
    "Run": "optimizer.analysis.run",
    "TuneError": "optimizer.errors",
    "load_run": "optimizer.api",
    "tune": "optimizer.api",
}
__all__ = ["Run", "TuneError", "load_run", "tune"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
