"""Find the Triton Inference Server configuration that serves the most requests within a latency bound.

The Python interface is ``from optimizer import load_run, tune`` (see docs/python.md). Its modules are imported on
first use, so importing this package is cheap and has no side effects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimizer.api import Run, load_run, tune
    from optimizer.core.errors import TuneError


_PUBLIC = {
    "Run": "optimizer.api",
    "TuneError": "optimizer.core.errors",
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
