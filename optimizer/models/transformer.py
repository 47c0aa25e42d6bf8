"""The encoder of BERT (Devlin et al. 2018) in ONNX, as BERT itself and its distilled relatives have it.

Token, position and segment embeddings, layer norm; then layers of self-attention and a feed-forward part with GELU
(the exact one, by erf), each with a residual and a layer norm after it. Weights are random, of the size that BERT
begins its training with: what a request costs depends on shapes alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.models.onnx_graph import Graph, WeightFile

INITIAL_STD = 0.02
EPSILON = 1e-12
SEGMENTS = 2


@dataclass(frozen=True)
class Shape:
    """``hidden`` wide, ``layers`` deep, ``heads`` of hidden / heads each, ``inner`` wide in the feed-forward part."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int = 30522
    positions: int = 512


class Encoder:
    """Adds an encoder to ``graph``; its weights are in ``weights``, of type ``dtype`` as all that it computes."""

    def __init__(self, graph: Graph, weights: WeightFile, shape: Shape, dtype: npt.DTypeLike) -> None:
        self._graph = graph
        self._weights = weights
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._axes_1_2 = graph.constant("axes_1_2", np.array([1, 2], np.int64))
        head = shape.hidden // shape.heads
        self._split = graph.constant("split_heads", np.array([0, 0, shape.heads, head], np.int64))
        self._joined = graph.constant("join_heads", np.array([0, 0, shape.hidden], np.int64))
        self._scale = self._scalar("attention_scale", 1 / math.sqrt(head))
        self._half, self._one = self._scalar("half", 0.5), self._scalar("one", 1.0)
        self._root_half = self._scalar("root_half", math.sqrt(0.5))

    def encode(self, ids: str, segments: str, mask: str) -> str:
        """INT32 [batch, tokens] each (mask: 1 is a token, 0 padding) -> [batch, tokens, hidden]."""
        x = self._embed(ids, segments)
        hidden_from = self._mask(mask)
        for layer in range(self._shape.layers):
            x = self._layer(x, hidden_from, f"layer.{layer}")
        return x

    def dense(self, x: str, fan_in: int, width: int, name: str, to: str | None = None) -> str:
        """``x`` [batch, tokens, fan_in] -> [batch, tokens, width]."""
        weight = self._weights.normal(f"{name}.weight", [fan_in, width], INITIAL_STD)
        bias = self._weights.normal(f"{name}.bias", [width], INITIAL_STD)
        product = self._graph.op("MatMul", x, weight, to=f"{name}.product")
        return self._graph.op("Add", product, bias, to=to or f"{name}.sum")

    def _embed(self, ids: str, segments: str) -> str:
        graph, shape = self._graph, self._shape
        tables = {"token": shape.vocabulary, "position": shape.positions, "segment": SEGMENTS}
        token, position, segment = (
            self._weights.normal(f"embedding.{name}", [rows, shape.hidden], INITIAL_STD)
            for name, rows in tables.items()
        )
        size = graph.op("Shape", ids, to="tokens", start=1, end=2)
        begin = graph.constant("zero", np.array([0], np.int64))
        positions = graph.op("Slice", position, begin, size, to="position_embedding")
        tokens = graph.op("Gather", token, ids, to="token_embedding", axis=0)
        belongs = graph.op("Gather", segment, segments, to="segment_embedding", axis=0)
        total = graph.op("Add", graph.op("Add", tokens, belongs, to="token_and_segment"), positions, to="embedded")
        return self._norm(total, "embedding.norm")

    def _mask(self, mask: str) -> str:
        """What is added to the attention's scores: 0 where there is a token, a large negative number at padding."""
        graph = self._graph
        is_token = graph.cast(mask, self._dtype, to="mask_float")
        is_padding = graph.op("Sub", self._one, is_token, to="padding")
        penalty = self._scalar("penalty", -10000.0)
        by_token = graph.op("Mul", is_padding, penalty, to="penalties")
        return graph.op("Unsqueeze", by_token, self._axes_1_2, to="attention.penalties")

    def _layer(self, x: str, mask: str, name: str) -> str:
        graph, shape = self._graph, self._shape
        attended = self._attention(x, mask, f"{name}.attention")
        x = self._norm(graph.op("Add", attended, x, to=f"{name}.attended"), f"{name}.attention.norm")
        inner = self._gelu(self.dense(x, shape.hidden, shape.inner, f"{name}.inner"), f"{name}.gelu")
        out = self.dense(inner, shape.inner, shape.hidden, f"{name}.output")
        return self._norm(graph.op("Add", out, x, to=f"{name}.summed"), f"{name}.norm")

    def _attention(self, x: str, mask: str, name: str) -> str:
        graph, hidden = self._graph, self._shape.hidden
        by_head = {}
        for part, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            projected = self.dense(x, hidden, hidden, f"{name}.{part}")
            heads = graph.op("Reshape", projected, self._split, to=f"{name}.{part}.heads")
            by_head[part] = graph.op("Transpose", heads, to=f"{name}.{part}.by_head", perm=perm)
        scores = graph.op("MatMul", by_head["query"], by_head["key"], to=f"{name}.scores")
        scaled = graph.op("Mul", scores, self._scale, to=f"{name}.scaled")
        masked = graph.op("Add", scaled, mask, to=f"{name}.masked")
        shares = graph.op("Softmax", masked, to=f"{name}.shares", axis=-1)
        mixed = graph.op("MatMul", shares, by_head["value"], to=f"{name}.mixed")
        back = graph.op("Transpose", mixed, to=f"{name}.by_token", perm=[0, 2, 1, 3])
        joined = graph.op("Reshape", back, self._joined, to=f"{name}.joined")
        return self.dense(joined, hidden, hidden, f"{name}.output")

    def _gelu(self, x: str, name: str) -> str:
        graph = self._graph
        erf = graph.op("Erf", graph.op("Mul", x, self._root_half, to=f"{name}.argument"), to=f"{name}.erf")
        half = graph.op("Mul", x, self._half, to=f"{name}.half")
        return graph.op("Mul", half, graph.op("Add", erf, self._one, to=f"{name}.factor"), to=name)

    def _norm(self, x: str, name: str) -> str:
        scale = self._weights.normal(f"{name}.scale", [self._shape.hidden], INITIAL_STD, mean=1.0)
        bias = self._weights.normal(f"{name}.bias", [self._shape.hidden], INITIAL_STD)
        return self._graph.op("LayerNormalization", x, scale, bias, to=name, axis=-1, epsilon=EPSILON)

    def _scalar(self, name: str, value: float) -> str:
        return self._graph.constant(name, np.array(value, self._dtype))
