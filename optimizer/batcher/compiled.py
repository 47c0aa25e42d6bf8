"""Machine code from Python functions, kept on disk between runs.

The compiler is loaded by this module's user when it decorates its first function, and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from optimizer.runtime import cache_folder

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` as machine code that lets other threads run meanwhile.

    The code is stored in ``$NUMBA_CACHE_DIR``, else in the cache folder of ``tune``, else where Numba finds a
    place. Where nothing can be written it is compiled anew in each process.
    """
    numba: Any = importlib.import_module("numba")
    with _stored_in_our_cache(numba):
        try:
            result: F = numba.njit(cache=True, nogil=True)(function)
        except RuntimeError:  # no folder that can be written to
            result = numba.njit(nogil=True)(function)
    return result


@contextmanager
def _stored_in_our_cache(numba: Any) -> Iterator[None]:
    """Numba asks where to store a function's code once, as it is decorated; others' functions are left alone."""
    given = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = given or str(cache_folder() / "compiled")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = given
