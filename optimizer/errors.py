"""Every error that ``tune`` reports, and the exit code each ends in.

    TuneError
    ├── BadInputError        2   a value, a file or a flag of the user's
    ├── EnvironmentFault     3   this machine lacks something
    │   └── ServerFault      3   the server did not start or died
    ├── DeploymentError      –   one candidate could not be deployed: the trial fails, the search goes on
    └── MeasurementError     –   one measurement failed: the point is recorded as failed, the search goes on
        (ServerCrashed is both: the server died of a candidate, or at one; on another server it may be tried again)

A message is one line: what happened, where, and what mends it.
"""

from __future__ import annotations

from pathlib import Path


class TuneError(Exception):
    """Base of all. ``log`` is the file in which the cause can be read, where there is one."""

    exit_code = 3

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class BadInputError(TuneError):
    exit_code = 2


class EnvironmentFault(TuneError):
    exit_code = 3


class ServerFault(EnvironmentFault):
    pass


class DeploymentError(TuneError):
    pass


class MeasurementError(TuneError):
    pass


class ServerCrashed(DeploymentError, MeasurementError):
    """The server, or the model in it, died or hangs, while loading or while measuring."""
