"""Tell the test files that wait for servers and processes from those of pure computation."""

from __future__ import annotations

from pathlib import Path

import pytest

# ranks of folders whose tests wait for processes or servers, or measure times
ORDER = {"stack": 0, "contract": 1, "cli": 2, "study": 3}
ORDER |= dict.fromkeys(("benchmarks", "core", "deploy", "machine", "measure", "store", "watch"), 4)
COMPUTING, COMPUTING_LONGEST = 5, 6  # ranks of all other files
LONGEST = "test_searchers.py"
OPTION = "--files"
WAIT, COMPUTE = "waiting", "computing"  # its values


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        choices=(WAIT, COMPUTE),
        help="run only the files that wait for servers or processes, or only the others, as .ci/run does",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the files that ``--files`` excludes, because importing all files takes 5 s."""
    if config.getoption(OPTION) is None or not collection_path.name.startswith("test_"):
        return None
    return (_rank(collection_path) >= COMPUTING) is not _only_computes(config) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that wait for servers first, because they take longest.

    The order of the files that only compute is reversed, so that the longest one comes first.
    """
    if _only_computes(config):
        items.sort(key=lambda item: (_rank(item.path), item.path), reverse=True)
    else:
        items.sort(key=lambda item: _rank(item.path))


def _rank(path: Path) -> int:
    """Return the rank of a test file in the order of all files. Those from COMPUTING on start no server."""
    return COMPUTING_LONGEST if path.name == LONGEST else ORDER.get(path.parent.name, COMPUTING)


def _only_computes(config: pytest.Config) -> bool:
    return bool(config.getoption(OPTION) == COMPUTE)
