"""The errors that ``tune`` reports, with the exit code of each.

    TuneError
    ├── BadInputError        2   a value, file or flag of the user is wrong
    │   ├── ChangedRunError  2   a stored run was measured with another model, server or problem
    │   ├── OptionError      2   a value of an option (optimizer.options.values)
    │   └── ProfileError     2   a value of a profile (optimizer.model.profile)
    ├── EnvironmentFault     3   this machine lacks something
    │   └── ServerFault      3   the server did not start or died
    ├── DeploymentError      –   one candidate cannot be deployed: the trial fails, the search continues
    │   └── ModelRefused     –   the server refuses its configuration or its model
    └── MeasurementError     –   one measurement failed: its point is recorded as failed, the search continues
        ├── RequestFailed    –   the server answered a request with an error
        ├── LateError        –   the load client sent too late (optimizer.measure.load_client.open_loop)
        └── NoAnswersError   –   no request was answered (optimizer.measure.load_client.closed_loop)
        (ServerCrashed is both: the server died with a candidate, which may be tried again on a new server;
        RequestOverdue is a ServerCrashed: a request that belongs to no load was not answered in time)

A message is one line that names the fault, its place and the fix. Each note of an error is a further line.

Users never see two other errors, because callers convert them: ParameterError below, and CallError, a failed call of
the server (optimizer.measure.server_client).
"""

from __future__ import annotations

from pathlib import Path


class TuneError(Exception):
    """Base class of all errors. ``log`` is the log file that shows the cause; None if there is none."""

    exit_code = 3

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class BadInputError(TuneError):
    """A value, file or flag of the user is wrong."""

    exit_code = 2


class ChangedRunError(BadInputError):
    """A stored run was measured with another model, server or problem, so it cannot be continued."""


class EnvironmentFault(TuneError):
    """This machine lacks a requirement of the run, such as disk space, a program or a driver."""

    exit_code = 3


class ServerFault(EnvironmentFault):
    """The server did not start or died, so no candidate can be served."""


class DeploymentError(TuneError):
    """One candidate cannot be deployed; its trial fails.

    ``lacks_gpu_memory`` says whether a GPU has too little memory for it.
    """

    def __init__(self, message: str, *, log: Path | None = None, lacks_gpu_memory: bool = False) -> None:
        super().__init__(message, log=log)
        self.lacks_gpu_memory = lacks_gpu_memory


class ModelRefused(DeploymentError):
    """The server refuses the configuration or the model of a candidate.

    For the baseline, which the user gave, the trial runner reports it as BadInputError. ``has_advice`` says whether
    the message ends with what to do.
    """

    def __init__(
        self, message: str, *, log: Path | None = None, lacks_gpu_memory: bool = False, has_advice: bool = False
    ) -> None:
        super().__init__(message, log=log, lacks_gpu_memory=lacks_gpu_memory)
        self.has_advice = has_advice


class MeasurementError(TuneError):
    """One measurement failed and has no values."""


class RequestFailed(MeasurementError):
    """The server answered a request with an error, which the message ends with."""


class ServerCrashed(DeploymentError, MeasurementError):
    """The server or its model died or hangs, while the model was loaded or measured.

    ``has_ended`` says whether the process of the server had ended before it was stopped. ``doing`` is the activity of
    the server that its message names, such as ``serving``.
    """

    def __init__(
        self,
        message: str,
        *,
        log: Path | None = None,
        lacks_gpu_memory: bool = False,
        has_ended: bool = False,
        doing: str = "serving",
    ) -> None:
        super().__init__(message, log=log, lacks_gpu_memory=lacks_gpu_memory)
        self.has_ended = has_ended
        self.doing = doing


class RequestOverdue(ServerCrashed):
    """The server did not answer in time a request that belongs to no load."""


class ParameterError(ValueError):
    """A parameter of a search space, or a field of ModelConfig, cannot have the values given for it.

    Its text is ``parameter: problem``. Callers that know where the parameter was given report it as BadInputError.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(parameter, problem)
        self.parameter = parameter
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.parameter}: {self.problem}"
