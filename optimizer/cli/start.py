"""The entry point of the installed ``tune``: Ctrl-C ends it with one line even while its modules are being imported.

This module imports as little as possible, because Python itself answers an interrupt with a traceback until ``main``
is called.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command in ``sys.argv`` and exit."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # otherwise the caller ignores it, as nohup
        signal.signal(signal.SIGINT, _end)
    from optimizer.cli.main import main as run

    run()


def _end(_signum: int, _frame: object) -> None:
    """End the process at once: nothing has been started that would need cleaning up."""
    os.write(2, b"tune: interrupted\n")
    os._exit(130)
