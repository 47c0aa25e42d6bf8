"""YAML that every reader takes for the same: YAML 1.1 and 1.2 disagree about what ``yes`` and ``1e3`` are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from optimizer.emitting.header import commented

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """Texts in quotes but where nobody can take them for something else; long ones as blocks; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: Any, header: Iterable[str] = ()) -> str:
    """``documents`` of dicts, lists, texts, numbers and booleans, in the order that they have."""
    texts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, default_flow_style=False)
        for document in documents
    ]
    return commented(header) + "---\n".join(texts)
