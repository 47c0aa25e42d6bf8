"""A server that crashes may have been unlucky; one that crashes each time cannot serve the configuration."""

from __future__ import annotations

from collections.abc import Callable

from optimizer.errors import DeploymentError, ServerCrashed

CRASHES = 3  # of one configuration: it is infeasible


def tried_again(attempt: Callable[[], None], worth_it: Callable[[], bool]) -> None:
    """Run ``attempt``, which deploys and measures, until it does not crash, while it is ``worth_it``.

    Raises DeploymentError with the last crash's reason after CRASHES of them, ServerCrashed where it is not worth it
    before, and any other error of ``attempt``.
    """
    for crash in range(1, CRASHES + 1):
        try:
            attempt()
            return
        except ServerCrashed as error:
            if crash == CRASHES:
                raise DeploymentError(f"crashed {crash} times: {error}", log=error.log) from error
            if not worth_it():
                raise
