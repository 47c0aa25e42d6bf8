"""A stateful Triton Python model: ``output`` is the sum of the inputs of the request's sequence so far.

This file is copied into the repository as ``model.py``. It needs nothing of tritune.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils  # exists only inside Triton

MAX_STATES = 65_536  # a sequence that never ends keeps its state until so many others have begun


class TritonPythonModel:
    """The class that Triton's Python backend instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start without sequences."""
        self._sums: dict[int, npt.NDArray[np.float32]] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests of the batch; each belongs to another sequence."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        values = pb_utils.get_input_tensor_by_name(request, "input").as_numpy()
        start, end, ready, sequence = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0])
            for name in ("START", "END", "READY", "CORRID")
        )
        if ready and not start and sequence not in self._sums:
            error = pb_utils.TritonError(f"sequence {sequence} has no state: it has not started here")
            return pb_utils.InferenceResponse(error=error)
        total = values if start or not ready else self._sums[sequence] + values
        if ready and end:
            self._sums.pop(sequence, None)
        elif ready:
            self._sums[sequence] = total
            if len(self._sums) > MAX_STATES:
                del self._sums[next(iter(self._sums))]
        return pb_utils.InferenceResponse([pb_utils.Tensor("output", total)])
