"""A writer of ONNX graphs with named weights. Only writing loads onnx, because most runs find their model built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from onnx import ValueInfoProto

# Opset 17 with IR 8 has every operator needed here and loads in onnxruntime since 1.12 (2022), so also in the
# backends of older Triton images.
OPSET = 17
IR_VERSION = 8
PAGE_BYTES = 4096
NORM_STD = 0.02  # standard deviation of the scales and biases of a layer norm


class Graph:
    """A graph under construction. Methods that add a tensor return its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._weights: list[Any] = []
        self.parameters = 0
        """Trainable values so far; index tables and shapes do not count."""

    def input(self, name: str, dtype: npt.DTypeLike, dims: Sequence[int | str]) -> str:
        """Declare a model input of ``[batch, *dims]``; a dim given by name is dynamic."""
        self._inputs.append(_value(name, dtype, dims))
        return name

    def output(self, name: str, dtype: npt.DTypeLike, dims: Sequence[int | str]) -> None:
        """Declare the tensor ``name`` as a model output of ``[batch, *dims]``."""
        self._outputs.append(_value(name, dtype, dims))

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """Store a constant in the model file; it does not count as parameters."""
        from onnx import numpy_helper

        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, name: str, values: npt.NDArray[Any]) -> str:
        """Store trainable values in the model file."""
        self.parameters += values.size
        return self.constant(name, values)

    def external_weight(
        self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], file: Path, offset: int = 0
    ) -> str:
        """Refer to trainable values, row-major and little-endian, in ``file`` in the model file's folder.

        onnxruntime maps such a file into memory, so processes that serve the same model share its pages. A model
        file itself cannot exceed 2 GB.
        """
        from onnx import TensorProto

        tensor = TensorProto(name=name, data_type=_onnx_type(dtype), dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        values = int(np.prod(shape, dtype=np.int64))
        length = values * np.dtype(dtype).itemsize
        for key, value in (("location", file.name), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        self._weights.append(tensor)
        self.parameters += values
        return name

    def op(self, kind: str, *inputs: str, to: str, **attributes: object) -> str:
        """Add a node with one output, named ``to``; an empty input name omits that input."""
        return self._node(kind, inputs, to, attributes)

    def _node(self, kind: str, inputs: Sequence[str], to: str, attributes: Mapping[str, object]) -> str:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, [to], name=f"{kind}:{to}", **attributes))
        return to

    def save(self, path: Path) -> None:
        """Write the model file."""
        from onnx import helper

        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._weights)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="tritune")
        model.ir_version = IR_VERSION
        path.write_bytes(model.SerializeToString())


class LargeGraph(Graph):
    """A graph with weights in the file ``path``, written one tensor after another, never all in memory.

    ``path`` is in the model file's folder. Each tensor begins at a whole page, as ONNX advises for mapped files.
    Weights and activations have the type ``dtype``. Values are drawn from ``rng``; without it they are zero and the
    file is sparse, which is enough to inspect the graph.
    """

    def __init__(self, name: str, path: Path, dtype: npt.DTypeLike, rng: np.random.Generator | None) -> None:
        super().__init__(name)
        self._path, self._dtype, self._rng = path, np.dtype(dtype), rng
        path.write_bytes(b"")

    def normal(self, name: str, shape: Sequence[int], std: float, mean: float = 0.0) -> str:
        """Append a tensor of normally distributed values; return its name."""
        offset = -(-self._path.stat().st_size // PAGE_BYTES) * PAGE_BYTES
        with self._path.open("r+b", buffering=0) as file:
            if self._rng is None:
                file.truncate(offset + math.prod(shape) * self._dtype.itemsize)
            else:
                values = self._rng.standard_normal(tuple(shape), dtype=np.float32)
                values *= np.float32(std)
                values += np.float32(mean)
                file.truncate(offset)
                file.seek(offset)
                values.astype(self._dtype, copy=False).tofile(file)
        return self.external_weight(name, self._dtype, shape, self._path, offset)

    def scalar(self, name: str, value: float) -> str:
        """Store a constant number of the graph's type in the model file."""
        return self.constant(name, np.array(value, self._dtype))

    def cast(self, x: str, to: str) -> str:
        """Convert ``x`` to the type of the graph. ``op`` cannot, because Cast has an attribute ``to`` as well."""
        return self._node("Cast", [x], to, {"to": _onnx_type(self._dtype)})

    def layer_norm(self, x: str, width: int, name: str, epsilon: float) -> str:
        """Add a normalization of the last axis of ``x``, which has ``width`` values, with a scale and a bias."""
        scale = self.normal(f"{name}.scale", [width], NORM_STD, mean=1.0)
        bias = self.normal(f"{name}.bias", [width], NORM_STD)
        return self.op("LayerNormalization", x, scale, bias, to=name, axis=-1, epsilon=epsilon)


def _onnx_type(dtype: npt.DTypeLike) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _value(name: str, dtype: npt.DTypeLike, dims: Sequence[int | str]) -> ValueInfoProto:
    from onnx import helper

    return helper.make_tensor_value_info(name, _onnx_type(dtype), ["batch", *dims])
