"""Compilation of a simulator's event loop before its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from optimizer.core.files import cache_folder


def compile_loop(module: str, simulate: Callable[[], object], say: Callable[[str], None]) -> None:
    """Load the event loop ``module`` by ``simulate``. If it has to be compiled first (about 10 s), ``say`` so."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    if not any(cache_folder().joinpath("compiled").glob(f"*/{module}.*.{python}.nbi")):
        say("compiling the simulator (once)")
    pool = ThreadPoolExecutor(1)  # an interrupt, which only the main thread sees, can make LLVM free memory twice
    try:
        pool.submit(simulate).result()
    finally:
        pool.shutdown(wait=False)
