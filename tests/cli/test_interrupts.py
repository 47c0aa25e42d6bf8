"""One KeyboardInterrupt for one Ctrl-C or for many: not lost, not repeated."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PRELUDE = """\
import os, signal, time
from optimizer import interrupts
interrupts.install()
def press(signum=signal.SIGINT):
    os.kill(os.getpid(), signum)
    time.sleep(0.01)
"""


def output_of(program: str) -> str:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_one_that_python_drops_comes_again() -> None:
    """An exception raised in a destructor goes nowhere."""
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


def test_more_of_them_do_not_disturb_the_cleaning_up() -> None:
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
            time.sleep(interrupts.AGAIN_SECONDS + 0.1)
            print("ended")
    """
    assert output_of(program) == "cleaned\nended\n"


def test_other_lost_exceptions_are_reported_as_ever() -> None:
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
