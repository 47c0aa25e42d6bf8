"""Bad input for a command whose cache is empty and whose pip finds nothing, and the lines that it has to print."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.command_fixtures import Ended, Sandbox, Tune

CONFIG = """\
platform: "onnxruntime_onnx"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
LONG = "x" * 5000
SECRET = "geheim"
CA_FLAG = "--ssl-grpc-root-certifications-file"


@dataclass(frozen=True)
class Bad:
    """A command in a folder with ``files``; stderr has a line with the words of each element of ``lines``."""

    arguments: str
    lines: tuple[tuple[str, ...], ...]
    files: dict[str, str] = field(default_factory=dict)

    def write_files(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text)

    def __str__(self) -> str:
        return " ".join([*self.arguments.split(), *(repr(text)[1:40] for text in self.files.values())])[:70]


def bad(arguments: str, *words: str, **files: str) -> Bad:
    return Bad(arguments, (words,), files)


def profile(text: str, *lines: tuple[str, ...]) -> Bad:
    return Bad("p.yaml", lines, {"p.yaml": text})


def tune_without_server(tune: Tune, sandbox: Sandbox, *arguments: str) -> Ended:
    """Run the command and assert that it neither prepared a server nor left files."""
    before = entries(sandbox.working_folder)
    ended = tune(*arguments, env=without_server(sandbox))
    assert not (sandbox.root / "cache").exists()
    assert entries(sandbox.working_folder) == before
    assert ended.stdout == ""
    return ended


def without_server(sandbox: Sandbox) -> dict[str, str | Path]:
    """Return an environment in which the server is not installed and cannot be downloaded."""
    return {
        "TRITUNE_CACHE": sandbox.root / "cache",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": sandbox.root / "no wheels",
        "PIP_CONFIG_FILE": os.devnull,
    }


def entries(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def assert_says(ended: Ended, *lines: tuple[str, ...], code: int = 2) -> None:
    """Assert that stderr has one line for each of ``lines``, with its words in their order."""
    assert ended.code == code, ended.stderr
    assert len(ended.errors) == len(lines), ended.stderr
    for complaint, words in zip(ended.errors, lines, strict=True):
        assert complaint.startswith("tune: ")
        at = 0
        for word in words:
            assert word in complaint[at:], complaint
            at = complaint.index(word, at) + len(word)
