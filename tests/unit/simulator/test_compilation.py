"""Tests of the compilation of the simulated loops: once, in another process, stored, locked, again after a change."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from optimizer.core.errors import EnvironmentFault
from optimizer.core.locks import file_lock
from optimizer.simulator.compilation import CompiledOnce, compiled, inlined

ROOT = Path(__file__).parents[3]


def doubled(x: int) -> int:
    return 2 * x


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which compiled loops are stored; it is empty."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    return tmp_path / "cache"


def test_the_compiler_is_loaded_where_something_is_simulated_only() -> None:
    code = (
        "import sys; from optimizer.simulator.simulate import trace; assert 'numba' not in sys.modules;"
        "from optimizer.simulator.dynamic_batcher import event_loop; assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_functions_of_a_loop_are_inlined() -> None:
    """Numba 0.61 to 0.68 know the private option ``_nrt``, without which each call counts references."""

    @inlined
    def add_one(values: npt.NDArray[np.int64]) -> None:
        values[0] += 1

    def add_two(values: npt.NDArray[np.int64]) -> None:
        add_one(values)
        add_one(values)

    values = np.zeros(1, np.int64)
    compiled(add_two)(values)
    assert values[0] == 2


def test_a_compiler_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    for decorator in (compiled, inlined, CompiledOnce):
        with pytest.raises(EnvironmentFault, match=r"which the variable NUMBA_DISABLE_JIT switches off; unset it$"):
            decorator(doubled)


def test_a_process_waits_for_another_one_that_compiles(cache: Path) -> None:
    once = CompiledOnce(doubled)
    assert once.lock_path is not None
    with ThreadPoolExecutor(1) as pool:
        with file_lock(once.lock_path, pytest.fail):
            waiting = pool.submit(once, 21)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=2)
            assert not list(cache.rglob("*.nbi"))
        assert waiting.result() == 42
    assert list(cache.rglob("*.nbi"))
    assert not list(cache.rglob("*.lock"))


@pytest.mark.usefixtures("cache")
def test_stored_code_is_loaded_while_another_process_compiles() -> None:
    """The other process may compile the loop of another version."""
    first, second = CompiledOnce(doubled), CompiledOnce(doubled)
    assert first(21) == 42
    assert second.lock_path is not None
    with ThreadPoolExecutor(1) as pool, file_lock(second.lock_path, pytest.fail):
        assert pool.submit(second, 21).result(timeout=600) == 42


@pytest.mark.usefixtures("cache")
def test_a_process_waits_for_no_other_function_and_no_other_checkout(tmp_path: Path) -> None:
    """The event loops of both simulators have the same name, and all checkouts share one cache folder."""
    loops = list[CompiledOnce[[int], int]]()
    for place in ("checkout/event_loop", "checkout/iteration_loop", "other/event_loop"):
        source = tmp_path / f"{place}.py"
        source.parent.mkdir(exist_ok=True)
        source.write_text("def doubled(x):\n    return 2 * x\n")
        loops.append(CompiledOnce(runpy.run_path(str(source))["doubled"]))
    assert loops[0].lock_path is not None
    with ThreadPoolExecutor(1) as pool, file_lock(loops[0].lock_path, pytest.fail):
        assert [pool.submit(loop, 21).result(timeout=600) for loop in loops[1:]] == [42, 42]


LOOP = """
from optimizer.simulator.compilation import CompiledOnce, compile_loop

@CompiledOnce
def small_loop(x):
    return 2 * x

def simulate_smallest():
    small_loop(21)

if __name__ == "__main__":
    import small_loop
    from numba.core.event import install_recorder
    with install_recorder("numba:compile") as compilations:
        compile_loop("the small loop", lambda: small_loop.small_loop, small_loop.simulate_smallest, print)
    print(small_loop.small_loop(21), len(compilations.buffer))
"""


def write_source(source: Path, text: str, clock_ahead_seconds: float = 0) -> None:
    source.write_text(text)
    written = source.stat().st_mtime + clock_ahead_seconds
    os.utime(source, (written, written))


def run_small_loop(folder: Path) -> str:
    """Return the output of ``small_loop.py`` in ``folder``, which also has the cache."""
    path = os.pathsep.join(filter(None, [str(folder), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITUNE_CACHE": str(folder / "cache")}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, str(folder / "small_loop.py")]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_loop_is_compiled_once_in_another_process_and_again_if_it_or_a_callee_changes(tmp_path: Path) -> None:
    """The compiler takes 90 MB, which Python would not return to the operating system.

    Numba 0.61 to 0.68 stamp stored code with the file of the function only. A source may come from a machine whose
    clock is ahead of this one's.
    """
    callee = "from optimizer.simulator.compilation import inlined\n\n@inlined\ndef factor():\n    return {}\n"
    loop = "from callee import factor\n" + LOOP.replace("2 * x", "factor() * x")
    write_source(tmp_path / "small_loop.py", loop)
    write_source(tmp_path / "callee.py", callee.format(2))
    assert run_small_loop(tmp_path) == "compiling the small loop (once)\n42 0\n"
    assert run_small_loop(tmp_path) == "42 0\n"
    write_source(tmp_path / "callee.py", callee.format(3))
    assert run_small_loop(tmp_path) == "compiling the small loop (once)\n63 0\n"
    write_source(tmp_path / "small_loop.py", loop + "\n", 7200)  # another version
    assert run_small_loop(tmp_path) == "compiling the small loop (once)\n63 0\n"
    assert run_small_loop(tmp_path) == "63 0\n"


def test_without_a_folder_for_its_lock_the_loop_is_compiled(cache: Path) -> None:
    once = CompiledOnce(doubled)
    assert once.lock_path is not None
    shutil.rmtree(once.lock_path.parent)
    assert once(21) == 42


def test_without_a_writable_cache_the_loop_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba also looks for a folder next to the source, where a file is in the way, and in the home of the user."""
    for variable in ("TRITUNE_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, "/dev/null/folder")
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    (tmp_path / "__pycache__").write_text("")
    source = tmp_path / "loop.py"
    source.write_text("def doubled(x):\n    return 2 * x\n")
    once = CompiledOnce[..., int](runpy.run_path(str(source))["doubled"])
    assert once.lock_path is None
    assert once(21) == 42
    assert not once.is_stored()
