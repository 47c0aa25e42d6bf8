"""perf_analyzer from an image, NVIDIA's SDK image or one like it: a container of it for each launch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optimizer.deploy import leftovers
from optimizer.deploy.docker.container import Container
from optimizer.deploy.docker.engine import connect, refusals_told
from optimizer.deploy.docker.settings import Bind, ContainerSettings
from optimizer.load.launcher import Launch
from optimizer.process import Finished, finished

RESULTS = "/results"
SDK_COMMAND = "perf_analyzer"  # on the PATH of such an image


@dataclass(frozen=True)
class SdkImage:
    """A Launcher that takes the command from ``image``, in the network of this machine.

    ``base_url`` as for DockerTarget. Raises EnvironmentFault where Docker does not run it.
    """

    image: str
    base_url: str | None = None

    def __call__(self, launch: Launch) -> Finished:
        program, *rest = launch.command
        with contextlib.closing(connect(self.base_url)) as client, _new_folder() as scratch:
            with refusals_told():
                rootless = any("rootless" in told for told in client.info().get("SecurityOptions") or ())
            settings = ContainerSettings(
                binds=(Bind(scratch, RESULTS, read_only=False), *(Bind(path, str(path)) for path in launch.reads)),
                cpus=launch.cpus,
                host_network=True,
                user="" if rootless else f"{os.getuid()}:{os.getgid()}",  # rootless: its root is this user
                folder=RESULTS,
                entrypoint=program,
            )
            launch.log.unlink(missing_ok=True)
            container = Container(client, self.image, rest, settings, log=launch.log)
            done = finished(container, launch.timeout_seconds, launch.check)
            for file in scratch.iterdir():
                shutil.move(file, launch.log.parent / file.name)
            return done


@contextlib.contextmanager
def _new_folder() -> Iterator[Path]:
    folder = leftovers.new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
