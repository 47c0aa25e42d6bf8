"""A stateful Triton Python model: one step of a GRU for all sequences of a batch, computed by ONNX Runtime.

This file is copied into the repository as ``model.py``, next to ``step.onnx``. It needs onnxruntime and nothing of
tritune. The parameter ``intra_op_thread_count`` has the meaning of Triton's ONNX Runtime backend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import triton_python_backend_utils as pb_utils  # exists only inside Triton

MAX_STATES = 65_536  # a sequence that never ends keeps its state until so many others have begun


class TritonPythonModel:
    """The class that Triton's Python backend instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph of one step."""
        config = json.loads(args["model_config"])
        threads = config.get("parameters", {}).get("intra_op_thread_count", {}).get("string_value", "0")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(threads)
        file = Path(args["model_repository"]) / args["model_version"] / "step.onnx"
        self._session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        width = next(tensor.shape[1] for tensor in self._session.get_inputs() if tensor.name == "state")
        self._start = np.zeros(width, np.float32)
        self._states: dict[int, npt.NDArray[np.float32]] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run one step of the sequences that are ready; a slot without a request gets an answer that Triton drops."""
        inputs = np.concatenate([_array(request, "input") for request in requests])
        starts, ends, ready, sequences = (
            [int(_array(request, name).flat[0]) for request in requests]
            for name in ("START", "END", "READY", "CORRID")
        )
        is_new = [bool(start) or not here for start, here in zip(starts, ready, strict=True)]
        missing = [not new and sequence not in self._states for new, sequence in zip(is_new, sequences, strict=True)]
        before = np.stack(
            [
                self._start if new else self._states.get(sequence, self._start)
                for new, sequence in zip(is_new, sequences, strict=True)
            ]
        )
        outputs, after = self._session.run(["output", "next_state"], {"input": inputs, "state": before})
        responses = []
        for place, sequence in enumerate(sequences):
            if missing[place]:
                error = pb_utils.TritonError(f"sequence {sequence} has no state: it has not started here")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if ready[place] and ends[place]:
                self._states.pop(sequence, None)
            elif ready[place]:
                self._states[sequence] = after[place]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("output", outputs[place : place + 1])]))
        while len(self._states) > MAX_STATES:
            del self._states[next(iter(self._states))]
        return responses


def _array(request: Any, name: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array
