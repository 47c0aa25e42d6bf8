"""Hand out test files to processes so that those of pure computation run while the others wait for servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ORDER = {"stack": 0, "contract": 1, "cli": 2, "study": 3}  # of folders whose tests wait for processes or servers
COMPUTING, COMPUTING_LONGEST = len(ORDER), len(ORDER) + 1  # ranks of all other files
LONGEST = "test_searchers.py"
SERVER_PROCESSES = 3  # with four, one or two tests of real servers fail on two cores
LOW_PRIORITY = 10  # added to the niceness of further processes, so that they take only the time that servers leave
BACKGROUND = "background"  # the key of a process's settings


class BackgroundScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Give files in order to SERVER_PROCESSES processes, and files of pure computation from the end to the others."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if _is_background(node):
            if not self._computing_files_left():
                return
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not _is_background(node) or self._computing_files_left():
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()  # it completes its files first

    def _computing_files_left(self) -> bool:
        return bool(self.workqueue) and _rank(Path(next(reversed(self.workqueue)))) >= COMPUTING


def _rank(path: Path) -> int:
    """Return the rank of a test file in the order of all files. Those from COMPUTING on start no server."""
    return COMPUTING_LONGEST if path.name == LONGEST else ORDER.get(path.parent.name, COMPUTING)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config, "workerinput", {}).get(BACKGROUND):
        os.nice(LOW_PRIORITY)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that wait for servers first, because they take longest."""
    items.sort(key=lambda item: _rank(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BackgroundScheduling | None:
    return BackgroundScheduling(config, log) if _has_background(config) else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[BACKGROUND] = _has_background(node.config) and _is_background(node)


def _has_background(config: pytest.Config) -> bool:
    return bool(config.getoption("dist") == "loadfile")


def _is_background(node: WorkerController) -> bool:
    return int(node.gateway.id.removeprefix("gw")) >= SERVER_PROCESSES
