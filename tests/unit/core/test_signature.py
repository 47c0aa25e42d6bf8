"""The signature of a record: only this user's key gives it, and a key that cannot be kept gives none."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.signature import KEY_FILE, is_signed, sign


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the key in a cache folder that does not exist yet."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / KEY_FILE


def test_a_record_is_recognised_until_it_is_changed(key: Path) -> None:
    content = {"url": ["h:1"], "MODEL": ["/models/m"]}
    signature = sign(content)
    assert is_signed(dict(reversed(content.items())), signature)
    assert signature == sign(content)
    assert not is_signed({**content, "url": ["h:2"]}, signature)
    assert key.stat().st_mode & 0o077 == 0, "others cannot read the key"
    key.unlink()
    assert not is_signed(content, signature)
    assert not is_signed(content, sign([]))


@pytest.mark.parametrize("signature", [None, 5, "", "é", "\ud800", ["a"]])
def test_any_other_value_is_no_signature(signature: object, key: Path) -> None:
    sign([])
    assert not is_signed([], signature)


def test_a_key_that_was_cut_is_replaced(key: Path) -> None:
    key.parent.mkdir()
    key.write_bytes(b"")
    assert not is_signed([], None)
    assert is_signed([], sign([]))


def test_nothing_is_signed_without_a_place_for_the_key(key: Path) -> None:
    key.parent.write_text("a file in place of the folder")
    assert sign([]) is None
    assert not is_signed([], None)
