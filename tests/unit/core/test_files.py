"""Tests of the place of the cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.files import cache_folder


@pytest.mark.parametrize(
    ("tritune_cache", "xdg_cache_home", "folder"),
    [
        ("/own", "/common", "/own"),
        ("", "/common", "/common/tritune"),
        ("", "", "/home/user/.cache/tritune"),
        ("", "relative", "/home/user/.cache/tritune"),  # the specification ignores relative paths
        ("", "~/common", "/home/user/common/tritune"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    tritune_cache: str, xdg_cache_home: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", tritune_cache)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg_cache_home)
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder() == Path(folder)


def test_a_relative_cache_begins_in_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", ".cache/tune")
    assert cache_folder() == Path.cwd() / ".cache/tune"


def test_a_user_who_does_not_exist_has_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", "~no-such-user/tune")
    assert cache_folder() == Path.cwd() / "~no-such-user/tune"
