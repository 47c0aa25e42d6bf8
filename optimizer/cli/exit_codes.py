"""The exit codes of verdicts and of runs. Errors have theirs in ``optimizer/core/errors.py``.

``Verdict`` takes long to import, so no module that is loaded before the command is known imports this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from objectives.sla import Verdict
from optimizer.cli.output import INTERRUPTED

if TYPE_CHECKING:
    from optimizer.study.tuning_run import RunStatus

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNDECIDED: 4}


def exit_code(status: RunStatus, verdict: Verdict) -> int:
    """Return the exit code of a run: that of its verdict, unless it was interrupted or others continue its study."""
    ended_early = {"left": 0, "interrupted": INTERRUPTED}
    return ended_early.get(status, EXIT_CODES[verdict])
