"""How perf_analyzer's command line is run: from this machine's files, or as a target's image has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from optimizer.process import Finished, run

REFUSED = "parameter keys starting with 'triton_' are reserved"  # what servers before 2.34 say of newer requests


@dataclass(frozen=True)
class Launch:
    """As ``process.run`` takes it. What the command writes into its folder comes to where ``log`` is; ``reads`` are
    the files that it reads."""

    command: Sequence[str]
    timeout_seconds: float
    log: Path
    reads: Sequence[Path] = ()
    cpus: frozenset[int] | None = None
    check: Callable[[], None] = lambda: None


Launcher: TypeAlias = Callable[[Launch], Finished]


@dataclass(frozen=True)
class OnThisMachine:
    """With ``libraries`` beside those of the system."""

    libraries: Path

    def __call__(self, launch: Launch) -> Finished:
        environment = {
            "LD_LIBRARY_PATH": str(self.libraries),
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
        }
        return run(
            launch.command,
            timeout_seconds=launch.timeout_seconds,
            log=launch.log,
            env=environment,
            cwd=launch.log.parent,
            cpus=launch.cpus,
            check=launch.check,
        )


@dataclass
class ForEveryServer:
    """As OnThisMachine; once a server refuses the requests of the given perf_analyzer as too new, with the ``older``
    one, which is fetched then."""

    libraries: Path
    older: Callable[[], Path]
    _found: Path | None = field(default=None, init=False)

    def __call__(self, launch: Launch) -> Finished:
        here = OnThisMachine(self.libraries)
        if self._found is None:
            done = here(launch)
            if REFUSED not in done.output:
                return done
            self._found = self.older()
        return here(replace(launch, command=[str(self._found), *launch.command[1:]]))
