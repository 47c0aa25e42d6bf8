"""Convolutions with seeded weights for models of images. Batch norms are folded into them, as any export does."""

from __future__ import annotations

import math

from optimizer.models.onnx_graph import Graph, WeightFile

Pair = tuple[int, int]


class Convolutions:
    """Adds to ``graph``; weights go to ``weights``. Of a batch norm's scale and shift both count as parameters, as in
    training, although folding leaves but one number, the bias."""

    def __init__(self, graph: Graph, weights: WeightFile) -> None:
        self._graph = graph
        self._weights = weights

    def conv(
        self,
        x: str,
        channels: Pair,
        kernel: int,
        name: str,
        *,
        stride: Pair = (1, 1),
        padding: Pair | None = None,
        groups: int = 1,
        relu: bool = True,
        gain: float = 1.0,
    ) -> str:
        """``x`` [batch, channels[0], height, width] convolved to channels[1], its batch norm folded in, ReLU.

        He's scale times ``gain`` keeps the second moment of the activations. Without ``padding`` as much as keeps
        the size.
        """
        before, after = channels
        fan_in = before // groups * kernel**2
        weight = self._weights.normal(
            f"{name}.weight", [after, before // groups, kernel, kernel], gain * math.sqrt((2 if relu else 1) / fan_in)
        )
        bias = self._weights.normal(f"{name}.bias", [after], 0.1 * gain)
        self._graph.parameters += after
        pads = (kernel // 2, kernel // 2) if padding is None else padding
        out = self._graph.op(
            "Conv",
            x,
            weight,
            bias,
            to=f"{name}.conv" if relu else name,
            kernel_shape=[kernel, kernel],
            strides=list(stride),
            pads=[*pads, *pads],
            group=groups,
        )
        return self._graph.op("Relu", out, to=name) if relu else out

    def max_pool(self, x: str, kernel: int, name: str, *, stride: Pair, padding: Pair = (0, 0)) -> str:
        return self._graph.op(
            "MaxPool", x, to=name, kernel_shape=[kernel, kernel], strides=list(stride), pads=[*padding, *padding]
        )

    def add_relu(self, x: str, shortcut: str, name: str) -> str:
        return self._graph.op("Relu", self._graph.op("Add", x, shortcut, to=f"{name}.sum"), to=name)
