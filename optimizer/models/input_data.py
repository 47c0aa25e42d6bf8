"""Request data in the JSON that perf_analyzer's ``--input-data`` takes."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def write_input_data(path: Path, columns: Mapping[str, npt.NDArray[Any]], *, with_shapes: bool = False) -> None:
    """Write one entry a sample. A column is an input's samples, ``[samples, *dims]``, in the input's dtype.

    ``with_shapes``: each says its shape, for inputs with dynamic dims.

    perf_analyzer with ``-b B`` joins B successive entries into a request, starting over at the end. It reads
    the whole file at each launch, some 20 MB a second. Values are base64 of the little-endian bytes: the only
    form in which it takes FP16, exact, and no slower to read than numbers.
    """
    samples = {len(column) for column in columns.values()}
    if len(samples) != 1:
        raise ValueError(f"columns of different lengths: {sorted(samples)}")
    with path.open("w", encoding="ascii") as file:
        file.write('{"data": [')
        for i in range(samples.pop()):
            entry = {name: _tensor(column[i], with_shapes) for name, column in columns.items()}
            file.write((",\n" if i else "\n") + json.dumps(entry))
        file.write("\n]}\n")


def write_texts(path: Path, name: str, texts: Sequence[str]) -> None:
    """Write one entry a text, for the input ``name`` TYPE_STRING [1]."""
    entries = ",\n".join(json.dumps({name: [text]}) for text in texts)
    path.write_text(f'{{"data": [\n{entries}\n]}}\n', encoding="ascii")


def _tensor(values: npt.NDArray[Any], with_shape: bool) -> dict[str, Any]:
    content = {"b64": _base64(values)}
    return {"content": content, "shape": list(values.shape)} if with_shape else content


def _base64(values: npt.NDArray[Any]) -> str:
    little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return base64.b64encode(little_endian.tobytes()).decode("ascii")
