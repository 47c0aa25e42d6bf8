"""A container that runs one command: its log is collected, and nothing of it is left."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import interrupts
from optimizer.deploy.docker.engine import OWNER, refusals_told, remove, sdk_errors
from optimizer.deploy.docker.settings import LOOPBACK, ContainerSettings
from optimizer.deploy.leftovers import this_process
from optimizer.errors import EnvironmentFault
from optimizer.process import tell_command

if TYPE_CHECKING:
    from docker import DockerClient

POLL_SECONDS = 0.02
LOG_ENDS_SECONDS = 5.0  # after the container's end


class Container:
    """Runs ``command`` in a fresh container of ``image``; ``log`` gets what it prints. Its name begins with ``name``.
    Should this process be killed, the next run removes it.

    Raises EnvironmentFault where the engine does not start it, as do all methods where it no longer answers.
    """

    def __init__(
        self,
        client: DockerClient,
        image: str,
        command: Sequence[str],
        settings: ContainerSettings,
        *,
        log: Path,
        name: str = "tritune",
    ) -> None:
        self.log = log
        log.touch()
        self._client = client
        self._ended: int | None = None
        self._name = f"{name}-{secrets.token_hex(4)}"
        tell_command(["docker", "run", "--rm", *settings.flags(), image, *command], log)
        try:
            with refusals_told(image):
                self._container = client.containers.create(
                    image, list(command), name=self._name, labels={OWNER: str(this_process())}, **settings.arguments()
                )
                if settings.gpus and not self._container.attrs["HostConfig"].get("DeviceRequests"):
                    raise EnvironmentFault("this engine gives containers no GPUs by Docker's API; use Docker itself")
                output = self._container.attach(stream=True)  # ahead of its start: complete, and as long as it runs
                self._container.start()
                self._container.reload()
        except BaseException:
            with contextlib.suppress(EnvironmentFault), refusals_told():
                remove(client, self._name)
            raise
        self._collector = threading.Thread(target=self._collect, args=(output,), daemon=True)
        self._collector.start()

    def address(self, port: int) -> str:
        """``host:port`` of this machine at which the container's ``port`` is reached; nobody's once it has ended."""
        published = self._container.ports.get(f"{port}/tcp") or ()
        return next((f"{one['HostIp']}:{one['HostPort']}" for one in published), f"{LOOPBACK}:0")

    @property
    def pid(self) -> int | None:
        """None where the engine's processes are not this machine's: in a virtual machine, in another namespace."""
        pid = self._container.attrs["State"]["Pid"]
        try:
            ours = self._container.id in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return None
        return pid if ours else None

    def exit_code(self) -> int | None:
        if self._ended is None and not self._collector.is_alive():
            with refusals_told():
                self._container.reload()
            state = self._container.attrs["State"]
            if not state["Running"]:
                self._ended = state["ExitCode"]
        return self._ended

    def wait(self, timeout_seconds: float) -> int | None:
        deadline = time.monotonic() + timeout_seconds
        self._collector.join(timeout_seconds)
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # its output is over, it is not quite
        return code

    def memory_bytes(self) -> float | None:
        """As the engine counts it, without files that the kernel can drop; None where it does not say."""
        try:
            memory = self._container.stats(stream=False, one_shot=True).get("memory_stats") or {}
        except sdk_errors():
            return None
        files = memory.get("stats") or {}  # of control groups of the first version, else of the second
        used = memory.get("usage", 0) - files.get("total_inactive_file", files.get("inactive_file", 0))
        return float(used) if used > 0 else None

    def stop(self) -> None:
        with interrupts.deferred(), refusals_told():
            remove(self._client, self._name)
        self._collector.join(LOG_ENDS_SECONDS)

    def _collect(self, output: Iterable[bytes]) -> None:
        # an engine that ends or a disk that is full will be told by what matters more
        with contextlib.suppress(*sdk_errors(), OSError), self.log.open("ab", buffering=0) as file:
            for chunk in output:
                file.write(chunk)
