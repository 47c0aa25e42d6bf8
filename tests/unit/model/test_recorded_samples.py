"""Samples from folders, arrays and tables, converted to the types and shapes of a model's inputs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.core.errors import BadInputError
from optimizer.model.input_data import InputSample, InputTensor
from optimizer.model.recorded_samples import (
    read_csv_samples,
    read_folder,
    read_npy_samples,
    read_npz_samples,
    read_parquet_samples,
)

IDS = InputTensor("ids", "INT32", (3,), True)
X = InputTensor("x", "FP16", (2, 2), True)
TEXT = InputTensor("text", "BYTES", (1,), True)
OPEN = InputTensor("ids", "INT64", (-1,), True)
NONE: frozenset[str] = frozenset()


def lists(samples: list[InputSample]) -> list[dict[str, Any]]:
    return [{name: array.tolist() for name, array in sample.items()} for sample in samples]


def refusal(reader: Any, path: Path, *tensors: InputTensor) -> str:
    with pytest.raises(BadInputError) as caught:
        reader(path, tensors, NONE)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    return message.removeprefix(str(path))


# -- a folder ---------------------------------------------------------------------------------------------------


def test_a_folder_is_one_sample(tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(np.array([1, -2, 3], "<i4").tobytes())
    (tmp_path / "x").write_bytes(np.array([1, 2, 3, 0.5], "<f2").tobytes())
    (tmp_path / "text").write_bytes("añ b\n".encode())
    (tmp_path / "output").write_text("to compare with")
    (sample,) = read_folder(tmp_path, [IDS, X, TEXT, InputTensor("more", "FP32", (1,), True)], frozenset({"more"}))
    assert sample["x"].dtype == np.float16
    assert lists([sample]) == [{"ids": [1, -2, 3], "x": [[1, 2], [3, 0.5]], "text": ["añ b".encode()]}]


def test_strings_are_lines_and_a_dynamic_dim_follows_from_the_size(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one\r\ntwo\n\n")
    (tmp_path / "ids").write_bytes(np.arange(5, dtype="<i8").tobytes())
    (sample,) = read_folder(tmp_path, [InputTensor("text", "BYTES", (-1,), True), OPEN], NONE)
    assert lists([sample]) == [{"text": [b"one", b"two", b""], "ids": [0, 1, 2, 3, 4]}]


@pytest.mark.parametrize(
    ("raw", "tensor", "message"),
    [
        (bytes(13), IDS, ": input ids: has 13 bytes, but a value of INT32 has 4"),
        (bytes(16), IDS, ": input ids: has 4 values, but the model's shape is [3]"),
        (bytes(16), InputTensor("ids", "INT32", (-1, -1), True), "only one open dimension; give --shape ids:SIZES"),
        (b"", InputTensor("a/b", "INT32", (3,), True), "input a/b: 'a/b' has a separator"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, raw: bytes, tensor: InputTensor, message: str) -> None:
    (tmp_path / "ids").write_bytes(raw)
    assert message in refusal(read_folder, tmp_path, tensor)


def test_a_folder_without_an_input_is_refused(tmp_path: Path) -> None:
    assert "ids: no such file; check the path" in refusal(read_folder, tmp_path, IDS)


# -- arrays -----------------------------------------------------------------------------------------------------


def npz(folder: Path, arrays: Mapping[str, Any]) -> Path:
    np.savez(folder / "d.npz", **arrays)
    return folder / "d.npz"


def test_arrays_are_cast_where_nothing_is_lost(tmp_path: Path) -> None:
    given_values = {"ids": np.array([[1.0, 2, 3], [4, 5, 6]]), "x": np.ones((2, 2, 2)), "text": np.array(["añ", "b"])}
    result = read_npz_samples(npz(tmp_path, given_values | {"labels": np.arange(2)}), [IDS, X, TEXT], NONE)
    assert [array.dtype for array in result[0].values()] == [np.int32, np.float16, object]
    assert lists(result)[1] == {"ids": [4, 5, 6], "x": [[1, 1], [1, 1]], "text": [b"b"]}
    assert result[0]["text"].tolist() == ["añ".encode()]


def test_an_array_alone_is_the_only_input(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.arange(6).reshape(2, 3))
    assert lists(read_npy_samples(tmp_path / "d.npy", [OPEN], NONE)) == [{"ids": [0, 1, 2]}, {"ids": [3, 4, 5]}]
    assert "holds one input, but the model has ids, x" in refusal(read_npy_samples, tmp_path / "d.npy", IDS, X)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": [[1, 2, 3], [4, 5.5, 6]]}, ": sample 2, input ids: 5.5 is not INT32"),
        ({"ids": [[1, 2, 2**40]]}, ": sample 1, input ids: 1099511627776 is not INT32"),
        ({"ids": [[1, 2, np.nan]]}, ": sample 1, input ids: nan is not INT32"),
        ({"ids": [["a", "b", "c"]]}, ": input ids: holds <U1, but the model takes INT32"),
        (
            {"ids": [1, 2, 3]},
            ": input ids: has the shape [3], which is not a number of samples, then the model's [3]",
        ),
        ({"ids": np.zeros((0, 3))}, "one entry per sample in its first dimension (ids 0)"),
        ({"idz": [[1, 2, 3]]}, ": lacks input ids; it has idz"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: Mapping[str, Any], message: str) -> None:
    assert message in refusal(read_npz_samples, npz(tmp_path, arrays), IDS)


@pytest.mark.parametrize(("datatype", "value"), [("FP16", 70000.0), ("FP16", 70000), ("FP32", -1e300)])
def test_a_number_that_would_become_infinite_is_refused(tmp_path: Path, datatype: str, value: float) -> None:
    tensor = InputTensor("x", datatype, (2,), True)
    message = f": sample 2, input x: {value} is too large for {datatype}"
    array = np.array([[1, 2], [3, value]])
    assert refusal(read_npz_samples, npz(tmp_path, {"x": array}), tensor) == message
    np.save(tmp_path / "d.npy", array)
    assert refusal(read_npy_samples, tmp_path / "d.npy", tensor) == message
    np.save(tmp_path / "d.npy", np.array([[1, 2], [math.inf, math.nan]]))
    assert lists(read_npy_samples(tmp_path / "d.npy", [tensor], NONE))[1]["x"][0] == math.inf


def test_an_array_of_one_dimension_does_not_fit_two_open_ones(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.arange(4))
    message = ": input x: has the shape [4], which is not a number of samples, then the model's [-1, -1]"
    assert refusal(read_npy_samples, tmp_path / "d.npy", InputTensor("x", "INT64", (-1, -1), True)) == message
    scalar_tensor = InputTensor("x", "INT64", (1, 1), True)
    assert lists(read_npy_samples(tmp_path / "d.npy", [scalar_tensor], NONE))[3] == {"x": [[3]]}


def test_files_without_an_array_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.npy"
    path.write_bytes(b"no")
    assert ": not a .npy file; np.save writes one" in refusal(read_npy_samples, path, IDS)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    assert "has Python objects" in refusal(read_npy_samples, path, IDS)


# -- CSV --------------------------------------------------------------------------------------------------------


def table(folder: Path, text: str) -> Path:
    (folder / "d.csv").write_text(text)
    return folder / "d.csv"


def test_columns_of_elements_are_read_in_any_order(tmp_path: Path) -> None:
    text = "ids[1],ids[0],text,ids[2],x.0,x.1,x.2,x.3,label\n2,1, añ,3,1,2,3,.5,7\n\n5.0,4,,6,-1e1,inf,0,0,\n"
    result = read_csv_samples(table(tmp_path, "\ufeff" + text), [IDS, X, TEXT], NONE)
    assert lists(result) == [
        {"ids": [1, 2, 3], "x": [[1, 2], [3, 0.5]], "text": [" añ".encode()]},
        {"ids": [4, 5, 6], "x": [[-10, np.inf], [0, 0]], "text": [b""]},
    ]


def test_lists_in_cells_may_differ_in_length(tmp_path: Path) -> None:
    result = read_csv_samples(table(tmp_path, 'ids\n"[1, 2]"\n"[[3], [4], [5]]"\n6\n'), [OPEN], NONE)
    assert lists(result) == [{"ids": [1, 2]}, {"ids": [3, 4, 5]}, {"ids": [6]}]


def test_a_name_that_ends_like_an_element_is_no_element(tmp_path: Path) -> None:
    item, two = InputTensor("input.1", "INT8", (1,), True), InputTensor("input", "INT8", (1,), True)
    assert lists(read_csv_samples(table(tmp_path, "input.1,input\n1,2\n"), [two, item], NONE)) == [
        {"input": [2], "input.1": [1]}
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": lacks input ids; it has nothing"),
        ("ids[0],ids[1],ids[2]\n", ": has no rows"),
        ("ids[0],ids[1],ids[2]\n1,2\n", ":2: has 2 cells, but the header has 3"),
        ("ids[0],ids[1],ids[2]\n\n1,2,3\n1,x,3\n", ':4: input ids: "x" is not INT32'),
        ("ids[0],ids[1],ids[2]\n1,,3\n", ':2: input ids: "" is not INT32'),
        ("ids[0],ids[1],ids[2]\n1,2.5,3\n", ":2: input ids: 2.5 is not INT32"),
        ("ids[0],ids[1],ids[2]\n1,1_0,3\n", ':2: input ids: "1_0" is not INT32'),
        ("ids[0],ids[1],ids[2]\n1,2147483648,3\n", ":2: input ids: 2147483648 is not INT32"),
        ("ids[0],ids[0]\n", ": has two columns ids[0]"),
        ("ids,ids[0]\n", "the columns of input ids must be ids, or ids[0], ids[1]"),
        ("ids[0],ids[2]\n", "the columns of input ids must be ids, or ids[0], ids[1]"),
        ('ids\n"[1, 2"\n', 'input ids: "[1, 2" is not INT32'),
        ('ids\n"[1, 2]"\n', ":2: input ids: has 2 values, but the model's shape is [3]"),
        ('ids\n"a\n', ":2: not a row of a CSV file"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(read_csv_samples, table(tmp_path, text), IDS)


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"ids\n\xff")
    assert (
        refusal(read_csv_samples, tmp_path / "d.csv", IDS)
        == ":2: byte 0xff is not UTF-8 text; save the file as UTF-8"
    )


# -- Parquet ----------------------------------------------------------------------------------------------------


def parquet(folder: Path, columns: Mapping[str, Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(dict(columns)), folder / "d.parquet")
    return folder / "d.parquet"


def test_rows_of_parquet_are_samples(tmp_path: Path) -> None:
    columns = {
        "ids": [[1, 2, 3], [4, 5, 6]],
        "x": [[[1, 2], [3, 4]], [[0, 0], [0, 0.5]]],
        "text": ["añ", "b"],
        "n": [1, 2],
    }
    result = read_parquet_samples(parquet(tmp_path, columns), [IDS, X, TEXT], NONE)
    assert lists(result) == [
        {"ids": [1, 2, 3], "x": [[1, 2], [3, 4]], "text": ["añ".encode()]},
        {"ids": [4, 5, 6], "x": [[0, 0], [0, 0.5]], "text": [b"b"]},
    ]
    lengths = read_parquet_samples(parquet(tmp_path, {"ids": [[1], [2, 3]]}), [OPEN], NONE)
    assert lists(lengths) == [{"ids": [1]}, {"ids": [2, 3]}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"ids": [[1, 2, 3], [1, None, 3]]}, ": row 2, input ids: null is not INT32"),
        ({"ids": [[1, 2, 3.5]]}, ": row 1, input ids: 1.0 is not INT32"),
        ({"ids": [[1, 2]]}, ": row 1, input ids: has 2 values, but the model's shape is [3]"),
        ({"ids": ["a"]}, ': row 1, input ids: "a" is not INT32'),
        ({"ids": [b"\xff"]}, "is not INT32"),
        ({"idz": [1]}, ": lacks input ids; it has idz"),
        ({"ids": []}, ": has no rows"),
    ],
)
def test_parquet_that_does_not_fit_is_refused(tmp_path: Path, columns: Mapping[str, Any], message: str) -> None:
    assert message in refusal(read_parquet_samples, parquet(tmp_path, columns), IDS)


def test_parquet_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"ids": [[7, 7, 7]] * 5000})
    read = partial(read_parquet_samples, max_bytes=path.stat().st_size)
    assert "when unpacked; write fewer samples" in refusal(read, path, IDS)


def test_files_that_are_not_parquet_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "d.parquet").write_bytes(b"PAR1PAR1")
    assert (
        refusal(read_parquet_samples, tmp_path / "d.parquet", IDS)
        == ": not a Parquet file; write it with pyarrow.parquet.write_table"
    )


def test_reading_parquet_without_pyarrow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refusal(read_parquet_samples, tmp_path / "d.parquet", IDS) == (
        ": reading Parquet needs pyarrow; pip install 'tritune[parquet]'"
    )
