"""The settings that a run passes to a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimizer.core.stopwatch import Stopwatch
from optimizer.deploy.server_ports import ServerPorts


@dataclass(frozen=True)
class TargetSettings:
    """The settings of a target in addition to the model and the options.

    Attributes:
        log: The file that gets the server's output.
        cpus: The CPUs of the server; None for all.
        gpus: Whether a server on this machine sees GPUs.
        metrics: The address of the metrics of a server on another machine; empty if it has none.
        stopwatch: It counts the time that the server takes.
        say: It gets one line for each slow preparation.
        ports: The ports of each server on this machine, for clients of the user; without them, any free ones.
    """

    log: Path
    cpus: frozenset[int] | None
    gpus: bool
    metrics: str
    stopwatch: Stopwatch
    say: Callable[[str], None]
    ports: tuple[ServerPorts, ...] = ()

    @property
    def first_ports(self) -> ServerPorts | None:
        """The ports of the first server; None for any free ones."""
        return self.ports[0] if self.ports else None
