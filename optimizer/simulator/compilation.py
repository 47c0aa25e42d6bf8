"""Compilation of the simulators' event loops to machine code by Numba, and the folder that stores the code."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import cache_folder
from optimizer.core.locks import file_lock
from optimizer.core.process import run_command

Ints: TypeAlias = npt.NDArray[Any]  # int64
Floats: TypeAlias = npt.NDArray[Any]  # float64
Records: TypeAlias = npt.NDArray[Any]  # of a type by ``record_type``
PACKAGES = Path(__file__).parents[2]  # where Python finds this program
COMPILE_SECONDS = 600.0
SIMULATION_THREADS = max(1, min(4, os.cpu_count() or 1))
F = TypeVar("F", bound=Callable[..., Any])
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def record_type(state: type) -> np.dtype[Any]:
    """Return the type of a NumPy record that has the annotated fields of ``state``: int, float or bool."""
    kinds = {int: np.int64, float: np.float64, bool: np.bool_}
    return np.dtype([(name, kinds[kind]) for name, kind in get_type_hints(state).items()], align=True)


def compile_loop(
    name: str,
    loop: Callable[[], CompiledOnce[..., Any]],
    simulate: Callable[[], object],
    on_progress: Callable[[str], None],
) -> None:
    """Load a compiled event loop. If its code is not stored, compile it first in a child process (about 10 s).

    Args:
        name: The name of the simulator.
        loop: Imports and returns the event loop.
        simulate: Runs a short simulation, which loads the loop. It is a function of a module that calls the loop.
        on_progress: Receives a line before a compilation.
    """
    pool = ThreadPoolExecutor(1)  # an interrupt, which only the main thread sees, can make LLVM free memory twice
    try:
        if not pool.submit(lambda: loop().is_stored()).result():
            on_progress(f"compiling {name} (once)")
            _compile_in_child(simulate)
        pool.submit(simulate).result()
    finally:
        pool.shutdown(wait=False)


def _compile_in_child(simulate: Callable[[], object]) -> None:
    """Compile what ``simulate`` calls in another process, because the compiler would keep 90 MB in this one.

    If that fails, for example without a folder for the code, this process compiles it.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    program = f"from {simulate.__module__} import {simulate.__name__} as simulate; simulate()"
    log = _code_folder() / "compile.log"
    with suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        run_command(
            [sys.executable, "-P", "-c", program],
            timeout_seconds=COMPILE_SECONDS,
            log=log,
            env={**os.environ, "PYTHONPATH": path},
        )


def compiled(function: F, **options: bool) -> F:
    """Return ``function`` compiled to machine code that releases the GIL; ``options`` are Numba's.

    It is compiled with the first function that calls it, and stored as a part of the loop that contains it.
    """
    result: F = _import_numba().njit(nogil=True, **options)(function)
    return result


def _import_numba() -> Any:
    """Return the module numba. Raises EnvironmentFault if its compiler is switched off."""
    numba: Any = importlib.import_module("numba")
    if numba.config.DISABLE_JIT:
        raise EnvironmentFault(
            "the simulator needs Numba's compiler, which the variable NUMBA_DISABLE_JIT switches off; unset it"
        )
    return numba


def inlined(function: F) -> F:
    """Return ``function`` compiled for inlining into its compiled callers.

    It allocates no array and is not called from Python. So it needs no reference counts, which Numba would otherwise
    count up and down for each array in each call: an event loop of such functions took 11 times as long. The option
    ``_nrt`` of Numba is private (``test_functions_of_a_loop_are_inlined``).
    """
    return compiled(function, _nrt=False, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


class CompiledOnce(Generic[Parameters, Result]):
    """A compiled function with stored code, for calls from Python.

    The code is stored in ``$NUMBA_CACHE_DIR``, else in the cache folder of ``tune``, else in a folder that Numba
    selects. If none is writable, each process compiles the function again. All functions and constants that
    it uses must be in the same folder: the code is stale as soon as a file of this folder, or this module, changes.

    The first process compiles it. Others that start meanwhile wait and load the result, which takes less time than
    to compile it as well. A process that finds stored code does not wait: the other may compile another version.
    The lock is next to the stored code, so no process waits for another function, or for that of another checkout.
    Without a cache folder that can be locked, each process compiles it.
    """

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        self._loop = _stored(function)
        self._is_loaded = False

    def __call__(self, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        """Return the result of the function."""
        with ExitStack() as stack:
            if not self._is_loaded and self.lock_path is not None and not self.is_stored():
                with suppress(OSError):
                    stack.enter_context(file_lock(self.lock_path, lambda holder: None))
            result: Result = self._loop(*arguments, **keywords)
        self._is_loaded = True
        return result

    @property
    def lock_path(self) -> Path | None:
        """The file that a process locks while it compiles the function; None if the code cannot be stored."""
        index = self._cache_file
        return Path(f"{index._index_path}.lock") if index else None

    def is_stored(self) -> bool:
        """Return whether there is code of the present version of the files, as Numba decides it.

        The times of the files do not show it: where clocks differ, code can seem older than its source.
        """
        index = self._cache_file
        return bool(index and index._load_index())

    @property
    def _cache_file(self) -> Any:
        """Numba's index of the stored code; None without a writable folder.

        It is private, and so are its attributes (see ``test_compilation.py``).
        """
        return getattr(self._loop._cache, "_cache_file", None)


def _stored(function: Callable[..., Any]) -> Any:
    """Return ``function`` compiled as ``compiled`` does it, with stored code if a folder for it is writable.

    Numba would use stored code as long as the file with the function is unchanged. Here the code depends on all files
    of its folder. The attributes are private (see ``test_compilation.py``).
    """
    numba = _import_numba()
    with _cache_folder_set(numba):
        try:
            loop = numba.njit(cache=True, nogil=True)(function)
        except RuntimeError:  # no writable folder
            return compiled(function)
    cache_file = loop._cache._cache_file
    cache_file._source_stamp = cache_file._source_stamp, _digest(Path(function.__code__.co_filename).parent)
    return loop


def _digest(folder: Path) -> str:
    """Return a hash of the names and contents of this module and of the Python files in ``folder``."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(filter(Path.is_file, folder.glob("*.py")))):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _code_folder() -> Path:
    return cache_folder() / "compiled"


@contextmanager
def _cache_folder_set(numba: Any) -> Iterator[None]:
    """Set Numba's cache folder while a function is decorated. Functions of other packages keep their own."""
    configured = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = configured or str(_code_folder())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = configured
