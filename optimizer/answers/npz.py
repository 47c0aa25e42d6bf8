"""Arrays by name in a .npz file that somebody else may have written: bounded in size, and never a pickle."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.errors import BadInputError
from optimizer.untrusted import one_line, read_bytes

Array: TypeAlias = npt.NDArray[Any]

MAX_BYTES = 512 << 20  # packed, and unpacked
FEWER = "write fewer samples"


def read_npz(path: Path) -> dict[str, Array]:
    """Every array of ``path``. Raises BadInputError where it is no such file, too large, or has Python objects."""
    data = io.BytesIO(read_bytes(path, MAX_BYTES, FEWER))
    name = one_line(str(path))
    try:
        with zipfile.ZipFile(data) as members:
            unpacked = sum(member.file_size for member in members.infolist())
        if unpacked > MAX_BYTES:
            raise BadInputError(f"{name}: larger than {MAX_BYTES >> 20} MiB; {FEWER}")
        with np.load(data, allow_pickle=False) as arrays:
            return {key: np.asarray(arrays[key]) for key in arrays.files}
    except BadInputError:
        raise
    except Exception as error:  # of a damaged file zipfile, zlib and numpy raise a dozen kinds
        if "allow_pickle" in str(error):
            raise BadInputError(f"{name}: has Python objects; write text as np.array([...], dtype='U')") from None
        raise BadInputError(f"{name}: not a .npz file; np.savez writes one") from None
