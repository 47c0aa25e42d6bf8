"""A few hundred of the inputs that ``benchmarks/fuzz_readers.py`` gives each reader in thousands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from optimizer.errors import BadInputError, EnvironmentFault

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz_readers
from fuzz_readers import READERS, Reader

CASES, FEW_CASES = 300, 80
VALID = {
    "profile": (fuzz_readers.PROFILE, fuzz_readers.STORED),
    "Model Analyzer's file": (fuzz_readers.MODEL_ANALYZER, fuzz_readers.MODEL_ANALYZER_QUICK),
    "table": (fuzz_readers.TABLE, fuzz_readers.FIVE_COLUMNS),
    "config.pbtxt": (fuzz_readers.CONFIG,),
}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_reader_gives_a_value_or_its_own_error(reader: Reader, tmp_path: Path) -> None:
    if reader.name == "samples in Parquet":
        pytest.importorskip("pyarrow")
    cases = FEW_CASES if reader.name.startswith(("samples", "shape", "another")) else CASES
    tally = fuzz_readers.fuzz(reader, cases, 0, fuzz_readers.prepared(tmp_path))
    assert tally.counts["valid"] > 0
    assert tally.counts.total() >= cases


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader.name in VALID], ids=lambda r: r.name)
def test_what_is_mutated_is_valid(reader: Reader, tmp_path: Path) -> None:
    for document in VALID[reader.name]:
        assert (
            fuzz_readers.check(reader, document, fuzz_readers.prepared(tmp_path / str(len(document))))[0] == "valid"
        )


def _multiline(given: Any, folder: Path) -> None:
    raise BadInputError("no\x1b[31m")


def _other(given: Any, folder: Path) -> None:
    raise KeyError(given)


def _kin(given: Any, folder: Path) -> None:
    raise UnicodeDecodeError("utf-8", b"", 0, 1, "no ValueError that a user is to see")


def _talkative(given: Any, folder: Path) -> None:
    print("hello")


@pytest.mark.parametrize(
    ("read", "error", "raised"),
    [
        (_multiline, BadInputError, AssertionError),
        (_other, BadInputError, KeyError),
        (_kin, ValueError, AssertionError),
        (_talkative, EnvironmentFault, AssertionError),
    ],
)
def test_the_fuzzer_notices(read: Any, error: type[Exception], raised: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(raised):
        fuzz_readers.fuzz(Reader("faulty", st.just(b"x"), read, error), 1, 0, tmp_path)
