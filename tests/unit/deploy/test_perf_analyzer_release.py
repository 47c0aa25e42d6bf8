"""Test which release of perf_analyzer measures on which system and server."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.deploy import perf_analyzer_release
from optimizer.deploy.perf_analyzer_release import (
    NEWER_VERSION,
    OLDER_VERSION,
    glibc_problem,
    measuring_version,
    newer_perf_analyzer,
    newer_problem,
    start_problem,
)
from optimizer.deploy.runtime import PINNED_PERF_ANALYZER, Runtime


@pytest.mark.parametrize("version", ["2.38", "2.41", "3.0"])
def test_the_newer_release_needs_a_newer_c_library(version: str) -> None:
    assert glibc_problem(("glibc", version)) == ""


@pytest.mark.parametrize(
    ("libc", "named"),
    [(("glibc", "2.36"), "glibc 2.36"), (("glibc", "2.9"), "glibc 2.9"), (("", ""), "another C library")],
)
def test_the_reason_names_the_c_library(libc: tuple[str, str], named: str) -> None:
    assert glibc_problem(libc) == f"it needs glibc 2.38, this is {named}"


def program(path: Path, line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def test_the_reason_names_what_a_program_lacks_to_start(tmp_path: Path) -> None:
    assert start_problem(program(tmp_path / "good", "exit 0")) == ""
    lacking = "error while loading shared libraries: libssl.so.3: cannot open shared object file"
    bad = program(tmp_path / "bad", f'echo "$0: {lacking}" >&2; exit 127')
    assert start_problem(bad) == f"it does not start: {lacking}"
    assert start_problem(program(tmp_path / "mute", "exit 3")) == "it does not start: exit code 3"
    assert "No such file" in start_problem(tmp_path / "none")


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the newer release on a system whose C library is new enough."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(perf_analyzer_release, "glibc_problem", lambda: "")
    start_problem.cache_clear()
    wheel = perf_analyzer_release.NEWER_WHEEL
    return tmp_path / f"perf_analyzer-{NEWER_VERSION}-{wheel.sha256[:12]}" / wheel.members[0]


def test_the_newer_release_measures_where_it_is_unpacked(tmp_path: Path, newer: Path) -> None:
    runtime = Runtime(tmp_path / "runtime")
    assert newer_problem() == "it is not unpacked"
    assert (runtime.perf_analyzer, runtime.perf_analyzer_version) == (
        runtime.pinned_perf_analyzer,
        PINNED_PERF_ANALYZER,
    )
    program(newer, "exit 0")
    assert newer_problem() == ""
    assert newer_perf_analyzer() == newer
    assert (runtime.perf_analyzer, runtime.perf_analyzer_version) == (newer, NEWER_VERSION)


def test_the_pinned_release_measures_where_the_newer_one_does_not_start(tmp_path: Path, newer: Path) -> None:
    program(newer, "exit 127")
    assert Runtime(tmp_path / "runtime").perf_analyzer_version == PINNED_PERF_ANALYZER


@pytest.mark.parametrize(
    ("server", "version"),
    [("2.33.0", OLDER_VERSION), ("2.34.0", NEWER_VERSION), ("2.51.0", NEWER_VERSION), ("", NEWER_VERSION)],
)
def test_an_older_server_is_measured_by_an_older_release(server: str, version: str) -> None:
    assert measuring_version(NEWER_VERSION, server) == version
