"""perf_analyzer's JSON of samples, kept by its content: the same requests are the same file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from optimizer.errors import BadInputError
from optimizer.requests.data import MAX_BYTES, Array
from optimizer.requests.recorded import Sample
from optimizer.store.disk import cannot_write, write_whole
from optimizer.store.locks import locked


def keep(samples: Sequence[Sample], cache: Path) -> Path:
    """The file in ``cache``, which others may write at the same time. Raises EnvironmentFault where that cannot be
    written, BadInputError where it would be larger than ``data.read`` reads."""
    return keep_content(to_json(samples), cache)


def keep_content(content: bytes, cache: Path) -> Path:
    """As ``keep``."""
    if len(content) > MAX_BYTES:
        raise BadInputError(f"the input data would be more than {MAX_BYTES >> 20} MiB; give fewer samples")
    folder = cache / "requests"
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / ".lock", lambda holder: None):
            if not path.exists() or path.stat().st_size != len(content):
                write_whole(path, content)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def to_json(samples: Sequence[Sample]) -> bytes:
    """Values are base64 of their bytes: the only form in which perf_analyzer takes FP16, and exact."""
    entries = ({name: _tensor(array) for name, array in sample.items()} for sample in samples)
    return ('{"data": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]}\n").encode()


def _tensor(array: Array) -> dict[str, object]:
    from tritonclient.utils import serialize_byte_tensor

    strings = array.dtype == np.object_ and array.size
    raw = serialize_byte_tensor(array).item() if strings else np.ascontiguousarray(array).tobytes()
    return {"content": {"b64": base64.b64encode(raw).decode()}, "shape": list(array.shape)}
