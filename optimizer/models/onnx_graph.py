"""A small writer of ONNX graphs with named weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

# Opset 17 with IR 8 has every operator that is needed here and loads in onnxruntime since 1.12 (2022), so in
# the native backends of older Triton images too.
OPSET = 17
IR_VERSION = 8


class Graph:
    """A graph under construction. Methods that add a tensor return its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._weights: list[Any] = []
        self.parameters = 0
        """Trainable values so far; index tables and shapes are none."""

    def input(self, name: str, dtype: npt.DTypeLike, dims: Sequence[int | str]) -> str:
        """A model input of ``[batch, *dims]``; a dim that has a name may be any."""
        self._inputs.append(_value(name, dtype, dims))
        return name

    def output(self, name: str, dtype: npt.DTypeLike, dims: Sequence[int | str]) -> None:
        """Declare the tensor ``name``, written by a node, as a model output of ``[batch, *dims]``."""
        self._outputs.append(_value(name, dtype, dims))

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """A constant that is stored in the model file and not counted as parameters."""
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, name: str, values: npt.NDArray[Any]) -> str:
        """Trained values that are stored in the model file."""
        self.parameters += values.size
        return self.constant(name, values)

    def external_weight(
        self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], file: Path, offset: int = 0
    ) -> str:
        """Trained values that lie, row-major and little-endian, in ``file`` in the model file's folder.

        onnxruntime maps such a file instead of reading it, so that processes serving the same model share its
        pages, and a model file itself cannot exceed 2 GB.
        """
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
        """A node with one output, named ``to``; an input that is left out is empty."""
        self._nodes.append(helper.make_node(kind, list(inputs), [to], name=f"{kind}:{to}", **attributes))
        return to

    def cast(self, x: str, dtype: npt.DTypeLike, to: str) -> str:
        """``x`` as another type (of the node the attribute ``to``, which is the output's name everywhere else)."""
        self._nodes.append(helper.make_node("Cast", [x], [to], name=f"Cast:{to}", to=_onnx_type(dtype)))
        return to

    def save(self, path: Path) -> None:
        """Write the model file."""
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._weights)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="tritune")
        model.ir_version = IR_VERSION
        path.write_bytes(model.SerializeToString())


class Layers:
    """Fully connected layers with seeded random weights.

    He's scale keeps the second moment of the activations from layer to layer, so that neither many layers nor
    half precision make the outputs vanish or overflow.
    """

    def __init__(self, graph: Graph, dtype: npt.DTypeLike, rng: np.random.Generator) -> None:
        self._graph = graph
        self._dtype = dtype
        self._rng = rng

    def dense(self, x: str, fan_in: int, width: int, *, name: str, relu: bool, to: str) -> str:
        """``x`` [batch, fan_in] -> ``to`` [batch, width]; weights ``<name>.weight`` and ``<name>.bias``."""
        std = np.sqrt((2.0 if relu else 1.0) / fan_in)
        values = std * self._rng.standard_normal((fan_in, width))
        weight = self._graph.weight(f"{name}.weight", values.astype(self._dtype))
        values = 0.1 * self._rng.standard_normal(width)
        bias = self._graph.weight(f"{name}.bias", values.astype(self._dtype))
        product = self._graph.op("Gemm", x, weight, bias, to=f"{name}.gemm" if relu else to)
        return self._graph.op("Relu", product, to=to) if relu else product

    def mlp(self, x: str, fan_in: int, widths: Sequence[int], *, name: str, relu_at_end: bool, to: str) -> str:
        """Layers ``<name>.0``, ``<name>.1``, … of these widths, ReLU between; ``to`` [batch, last width]."""
        for i, width in enumerate(widths):
            last = i == len(widths) - 1
            out = to if last else f"{name}.{i}"
            x = self.dense(x, fan_in, width, name=f"{name}.{i}", relu=relu_at_end or not last, to=out)
            fan_in = width
        return x


class WeightFile:
    """Weights of a model that may be large: written to ``path`` one after another, never all in memory.

    ``path`` lies beside the model file. Weights begin at whole pages, as ONNX advises for files that are mapped. They
    are drawn from ``rng``; without it all are zero and take no room on the disk, which says what a model consists of.
    """

    PAGE_BYTES = 4096

    def __init__(self, graph: Graph, path: Path, dtype: npt.DTypeLike, rng: np.random.Generator | None) -> None:
        self._graph = graph
        self._path = path
        self._dtype = np.dtype(dtype)
        self._rng = rng
        path.write_bytes(b"")

    def normal(self, name: str, shape: Sequence[int], std: float, mean: float = 0.0) -> str:
        """Normally distributed values."""
        offset = -(-self._path.stat().st_size // self.PAGE_BYTES) * self.PAGE_BYTES
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
        return self._graph.external_weight(name, self._dtype, shape, self._path, offset)


def _onnx_type(dtype: npt.DTypeLike) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _value(name: str, dtype: npt.DTypeLike, dims: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _onnx_type(dtype), ["batch", *dims])
