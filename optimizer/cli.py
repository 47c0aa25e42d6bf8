"""The ``tune`` command: errors become one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from importlib import import_module
from typing import NoReturn

from optimizer import interrupts
from optimizer.command_line import redact
from optimizer.commands.terminal import INTERRUPTED, fail
from optimizer.errors import EnvironmentFault, TuneError

COMMANDS = (
    *("run", "verify", "sweep", "batch", "replay"),
    *("plan", "report", "explain", "emit"),
    *("models", "setup", "doctor"),
)
BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main() -> NoReturn:
    """Entry point of the console script."""
    interrupts.install()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each failed TLS handshake is a line on the terminal
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reports to its maker, and writes files for it
    try:
        code = _dispatch(sys.argv[1:])
    except KeyboardInterrupt:
        interrupts.acknowledge()
        code = fail("interrupted", INTERRUPTED)
    except TuneError as error:
        for line in str(error).splitlines():
            fail(line, 0)
        if error.log is not None:
            fail(f"the log: {error.log}", 0)
        code = error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in BROKEN_DISK:
            where = error.filename or "a file"
            sys.exit(fail(f"{where}: {error.strerror}; see to that disk, then `tune --resume` goes on", 3))
        # a fault of tune's own: 1 would mean that no configuration meets the SLA
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        code = fail("this is a fault of tune itself; the trace above tells where", EnvironmentFault.exit_code)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    """Without the name of a command it is ``run``."""
    named = bool(arguments) and arguments[0] in COMMANDS
    command, rest = (arguments[0], arguments[1:]) if named else ("run", arguments)
    return int(import_module(f"optimizer.commands.{command}").main(rest))
