"""One or several Ctrl-C raise one KeyboardInterrupt, and no process or file is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_fixtures import Sandbox, Tune, eventually

START_SECONDS = 600.0
GONE_SECONDS = 600.0

PRELUDE = """\
import os, signal, time
from optimizer.core import interrupts
interrupts.install()
interrupts.REPEAT_SECONDS = 2.0  # the programs handle an interrupt sooner, also on a slow machine
def press(signum=signal.SIGINT):
    os.kill(os.getpid(), signum)
    time.sleep(0.01)
"""


def output_of(program: str) -> str:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_interrupt_that_python_drops_is_raised_again() -> None:
    """Python ignores an exception that a destructor raises."""
    program = """
        class Victim:
            def __del__(self):
                press()
        try:
            Victim()
            print("dropped", flush=True)
            time.sleep(50)
        except KeyboardInterrupt:
            print("caught")
    """
    assert output_of(program) == "dropped\ncaught\n"


def test_further_signals_do_not_disturb_the_cleanup() -> None:
    program = """
        try:
            try:
                press(signal.SIGHUP)
            finally:
                press(), press(signal.SIGTERM)
                print("cleaned")
        except KeyboardInterrupt:
            interrupts.acknowledge()
            press(), press(signal.SIGTERM)
            time.sleep(interrupts.REPEAT_SECONDS + 0.1)
            print("ended")
    """
    assert output_of(program) == "cleaned\nended\n"


def test_after_the_first_interrupt_only_a_second_ctrl_c_interrupts() -> None:
    program = """
        try:
            press(signal.SIGTERM)
        except KeyboardInterrupt:
            interrupts.acknowledge_first()
        press(signal.SIGTERM), press(signal.SIGHUP)
        time.sleep(interrupts.REPEAT_SECONDS + 0.1)
        print("not interrupted")
        try:
            press()
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert output_of(program) == "not interrupted\ninterrupted\n"


@pytest.mark.parametrize(("first", "shown"), [("press()", "put back\nthen True\n"), ("pass", "put back\n")])
def test_code_in_a_deferred_block_runs_to_its_end(first: str, shown: str) -> None:
    """The protected code runs longer than the interval after which an interrupt is repeated."""
    program = f"""
        try:
            try:
                {first}
            finally:
                with interrupts.deferred():
                    press(signal.SIGTERM), time.sleep(interrupts.REPEAT_SECONDS + 0.1), print("put back")
                print("then", interrupts.is_pending())
        except KeyboardInterrupt:
            interrupts.acknowledge()
            print("caught")
    """
    assert output_of(program) == f"{shown}caught\n"


def test_a_server_that_ends_slowly_is_stopped_and_its_folder_removed(tmp_path: Path) -> None:
    """The interrupt is repeated while the server ends."""
    program = f"""
        from pathlib import Path
        from optimizer.config.model_config_proto import ModelConfig
        from optimizer.config.model_source import ModelSource
        from optimizer.deploy.installed_server import Installation, ServerFolder, TritonServer
        from optimizer.deploy.managed_target import ManagedTarget
        from optimizer.deploy.target_settings import TargetSettings

        class SlowServer(TritonServer):
            def stop(self):
                time.sleep(interrupts.REPEAT_SECONDS + 0.5)
                print("stopped")

        root = Path({str(tmp_path)!r})
        (root / "models" / "m" / "1").mkdir(parents=True)
        source = ModelSource(root / "models", "m", ModelConfig(name="m"))
        installation, settings = Installation(Path("tritonserver"), {{}}, root), TargetSettings(root / "log")
        folder = ServerFolder(source, installation)
        target = ManagedTarget(source, SlowServer(folder, installation, settings), folder, settings)
        try:
            try:
                press()
            finally:
                target.close()
        except KeyboardInterrupt:
            interrupts.acknowledge()
        print("removed" if not folder.path.exists() else "left")
    """
    assert output_of(program) == "stopped\nremoved\n"


def test_other_exceptions_of_destructors_are_still_reported() -> None:
    program = """
        import sys
        sys.stderr = sys.stdout
        class Faulty:
            def __del__(self):
                raise ValueError("mine")
        Faulty()
    """
    shown = output_of(program)
    assert "Faulty.__del__" in shown
    assert "ValueError: mine" in shown


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_raises_one_interrupt(signum: signal.Signals) -> None:
    program = f"""
        try:
            press({int(signum)})
        except KeyboardInterrupt:
            interrupts.acknowledge()
            print("caught once")
    """
    assert output_of(program) == "caught once\n"


# -- tune setup -------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_index() -> Iterator[socket.socket]:
    """Return the address of a package index that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(START_SECONDS)
        yield server


def fetching_from(index: socket.socket, cache: Path) -> dict[str, str | Path]:
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
        "PIP_NO_CACHE_DIR": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "TRITUNE_CACHE": cache,
    }


def fetching_from_nowhere(sandbox: Sandbox, cache: Path) -> dict[str, str | Path]:
    nothing = sandbox.root / "nothing"
    nothing.mkdir()
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": nothing, "TRITUNE_CACHE": cache}


def test_an_interrupted_setup_leaves_nothing(sandbox: Sandbox, silent_index: socket.socket) -> None:
    cache = sandbox.root / "cache"
    process = sandbox.start("setup", env=fetching_from(silent_index, cache))
    connection, _ = silent_index.accept()  # pip is at work
    with connection:
        assert list(cache.glob(".setup-*/wheels"))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=START_SECONDS)
    assert (process.returncode, stderr) == (130, "tune: interrupted\n")
    assert sandbox.processes() == []
    assert list(cache.iterdir()) == []


def test_the_next_setup_removes_the_files_of_a_killed_one(
    sandbox: Sandbox, silent_index: socket.socket, tune: Tune
) -> None:
    """The pip process ends too."""
    cache = sandbox.root / "cache"
    (cache / ".setup-of-an-earlier-version").mkdir(parents=True)
    process = sandbox.start("setup", env=fetching_from(silent_index, cache))
    connection, _ = silent_index.accept()
    with connection:
        process.kill()
        process.communicate()
        assert eventually(lambda: sandbox.processes() == [], GONE_SECONDS), sandbox.processes()
    assert list(cache.glob(".setup-*/wheels"))
    ended = tune("setup", env=fetching_from_nowhere(sandbox, cache))
    assert ended.code == 3
    assert list(cache.iterdir()) == []


def test_a_setup_waits_for_a_running_setup(sandbox: Sandbox, silent_index: socket.socket) -> None:
    """The command names the process that it waits for, and installs the server itself when that process ends."""
    cache = sandbox.root / "cache"
    first = sandbox.start("setup", env=fetching_from(silent_index, cache))
    connection, _ = silent_index.accept()
    with connection:
        second = sandbox.start("setup", env=fetching_from_nowhere(sandbox, cache))
        assert second.stdout is not None
        assert second.stdout.readline().startswith(f"waiting: process {first.pid} on ")
        first.terminate()
        first.communicate()
        _, stderr = second.communicate(timeout=START_SECONDS)
    assert stderr.startswith("tune: pip could not fetch the server: ")
    assert list(cache.iterdir()) == []


def test_no_interrupt_is_raised_in_the_compiler() -> None:
    """An interrupt in the code that loads a compiled function can end the process with a double free."""
    program = """
        from optimizer.simulator.simulate import compile_simulator
        modules = set()
        def look(signum, frame):
            while frame:
                modules.add(frame.f_globals["__name__"].split(".")[0])
                frame = frame.f_back
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        compile_simulator(lambda line: None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("optimizer" in modules, modules & {"numba", "llvmlite"})
    """
    assert output_of(program) == "True set()\n"
