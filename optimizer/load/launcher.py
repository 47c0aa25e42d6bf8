"""How perf_analyzer's command line is run: from this machine's files, or as a target's image has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from optimizer.process import Finished, run


class Launcher(Protocol):
    def __call__(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float,
        log: Path,
        reads: Sequence[Path],
        cpus: frozenset[int] | None,
        check: Callable[[], None],
    ) -> Finished:
        """As ``process.run``, in a folder whose files come to where ``log`` is. ``reads`` are the files that the
        command reads."""
        ...


@dataclass(frozen=True)
class OnThisMachine:
    """With ``libraries`` beside those of the system."""

    libraries: Path

    def __call__(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float,
        log: Path,
        reads: Sequence[Path],
        cpus: frozenset[int] | None,
        check: Callable[[], None],
    ) -> Finished:
        environment = {
            "LD_LIBRARY_PATH": str(self.libraries),
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
        }
        return run(
            command,
            timeout_seconds=timeout_seconds,
            log=log,
            env=environment,
            cwd=log.parent,
            cpus=cpus,
            check=check,
        )


REFUSED = "parameter keys starting with 'triton_' are reserved"  # what servers before 2.34 say of newer requests


@dataclass
class ForEveryServer:
    """As OnThisMachine; once a server refuses the requests of the given perf_analyzer as too new, with the ``older``
    one, which is fetched then."""

    libraries: Path
    older: Callable[[], Path]
    _found: Path | None = field(default=None, init=False)

    def __call__(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float,
        log: Path,
        reads: Sequence[Path],
        cpus: frozenset[int] | None,
        check: Callable[[], None],
    ) -> Finished:
        here = OnThisMachine(self.libraries)
        launch = partial(here, timeout_seconds=timeout_seconds, log=log, reads=reads, cpus=cpus, check=check)
        if self._found is None:
            done = launch(command)
            if REFUSED not in done.output:
                return done
            self._found = self.older()
        return launch([str(self._found), *command[1:]])
