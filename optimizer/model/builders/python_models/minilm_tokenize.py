"""The tokenizer of the ``minilm`` ensemble as a Triton Python model: TEXT -> ids, segments, mask.

This file is copied into the repository as ``model.py``, next to ``tokenizer.json``. It needs the tokenizers library
and nothing of tritune.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

# threads cost more than they save for a short sentence, and Triton runs several instances at the same time
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, npt.NDArray[np.int32]]:
    """Return each output as [texts, tokens of the longest text], padded with zeros."""
    encodings = tokenizer.encode_batch(list(texts))
    columns = {
        "input_ids": [encoding.ids for encoding in encodings],
        "token_type_ids": [encoding.type_ids for encoding in encodings],
        "attention_mask": [encoding.attention_mask for encoding in encodings],
    }
    return {name: np.array(rows, np.int32) for name, rows in columns.items()}


class TritonPythonModel:
    """The class that Triton's Python backend instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer. Raises TritonModelException if the server's numpy cannot pass strings."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        self._triton = pb_utils
        if not np.__version__.startswith("1."):
            raise pb_utils.TritonModelException(
                "TYPE_STRING tensors need numpy 1 in the server: run tune under Python 3.11 or 3.12"
            )
        folder = Path(args["model_repository"]) / args["model_version"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Tokenize each request separately, padded to its own longest text."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        array = self._triton.get_input_tensor_by_name(request, "TEXT").as_numpy()
        texts = [text.decode("utf-8", "replace") for text in array.flat]
        outputs = tokenize(self._tokenizer, texts)
        return self._triton.InferenceResponse([self._triton.Tensor(*output) for output in outputs.items()])
