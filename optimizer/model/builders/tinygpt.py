"""A small language model that streams tokens: a decoder like GPT-2's (Radford et al. 2019) with random weights.

The file ``decoder.onnx`` computes one step of a batch of sequences. It has these inputs and outputs:

    input_ids        INT64  [batch, tokens]                  new tokens, filled up at the end
    token_counts     INT64  [batch]                          number of new tokens, at least 1
    past_counts      INT64  [batch]                          number of tokens in the cache
    past_key.LAYER   FP64   [batch, heads, features, past]   cache; entries from past_counts on are ignored
    past_value.LAYER FP64   [batch, heads, past, features]
    logits           FP64   [batch, vocabulary]              of the token after the last new token
    new_key.LAYER    FP64   [batch, heads, features, tokens] of the new tokens, to be put into the cache
    new_value.LAYER  FP64   [batch, heads, tokens, features]

``past`` is at least 1. The served model is ``python_models/tinygpt.py`` with continuous batching.

The arithmetic has double precision. Batches of different sizes differ by rounding, and in single precision such a
difference may change which token is the most likely one, and with it all tokens that follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from optimizer.config.model_config_proto import ModelConfig
from optimizer.model.builders.builder import (
    Builder,
    BuilderSettings,
    Draft,
    InstanceKind,
    Interface,
    ModelFacts,
    Samples,
    python_config,
)
from optimizer.model.builders.onnx_graph import LargeGraph
from optimizer.model.input_data import TensorSpec, to_json

NAME = "tinygpt"
INPUT_IDS, MAX_TOKENS, OUTPUT_ID = "INPUT_IDS", "MAX_TOKENS", "OUTPUT_ID"
EPSILON = 1e-5
DTYPE = np.float64
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 64), 32  # lengths of the builder's own request data


class TinyGptSettings(BuilderSettings):
    """``positions``: largest number of tokens of a prompt and its output. ``samples``: entries of request data."""

    layers: int = Field(default=4, ge=1, le=48)
    hidden: int = Field(default=256, ge=8, le=2048)
    heads: int = Field(default=4, ge=1, le=64)
    vocabulary: int = Field(default=2048, ge=2, le=65536)
    positions: int = Field(default=512, ge=PROMPT_TOKENS[1] + OUTPUT_TOKENS, le=4096)
    samples: Samples = 251

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> TinyGptSettings:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        return self


@dataclass(frozen=True)
class _Attention:
    """Tensors that the attention of all layers shares."""

    past_bias: str
    new_bias: str
    past_size: str


class DecoderGraph(LargeGraph):
    """The graph of one step of the decoder; see the module for its inputs and outputs."""

    def __init__(self, settings: TinyGptSettings, path: Path, rng: np.random.Generator | None) -> None:
        super().__init__(NAME, path, DTYPE, rng)
        self._settings = settings
        self._features = settings.hidden // settings.heads
        self._split = self.constant("split_heads", np.array([0, 0, settings.heads, self._features], np.int64))
        self._joined = self.constant("join_heads", np.array([0, 0, settings.hidden], np.int64))
        self._zero = self.constant("zero", np.array([0], np.int64))
        self._last_axis = self.constant("last_axis", np.array([3], np.int64))
        self._end = self.constant("end", np.array([2**31 - 1], np.int64))
        self._axis_1 = self.constant("axis_1", np.array([1], np.int64))
        self._first, self._one = (self.constant(f"int_{i}", np.array(i, np.int64)) for i in (0, 1))
        self._scale = self.scalar("attention_scale", 1 / math.sqrt(self._features))
        self._cubic, self._slope = (
            self.scalar("gelu_cubic", 0.044715),
            self.scalar("gelu_slope", math.sqrt(2 / math.pi)),
        )
        self._half, self._unit = self.scalar("half", 0.5), self.scalar("unit", 1.0)

    def draw(self) -> None:
        """Add the whole step."""
        settings = self._settings
        ids = self.input("input_ids", np.int64, ["tokens"])
        token_counts, past_counts = (self.input(name, np.int64, []) for name in ("token_counts", "past_counts"))
        caches = [
            (
                self.input(f"past_key.{layer}", DTYPE, [settings.heads, self._features, "past"]),
                self.input(f"past_value.{layer}", DTYPE, [settings.heads, "past", self._features]),
            )
            for layer in range(settings.layers)
        ]
        x = self._embed(ids, past_counts)
        shared = self._biases(ids, past_counts, caches[0][0])
        for layer, cache in enumerate(caches):
            x = self._layer(x, cache, shared, layer)
        x = self._norm(self._last_tokens(x, token_counts), "final.norm")
        head = self._weight("head.weight", settings.hidden, settings.vocabulary)
        self.op("MatMul", x, head, to="logits")
        self.output("logits", DTYPE, [settings.vocabulary])

    def _embed(self, ids: str, past_counts: str) -> str:
        settings = self._settings
        tokens, positions = (
            self.normal(f"embedding.{name}", [rows, settings.hidden], 1.0)
            for name, rows in (("token", settings.vocabulary), ("position", settings.positions))
        )
        first = self.op("Unsqueeze", past_counts, self._axis_1, to="first_position")
        place = self.op("Add", first, self._range(ids, 1, "token_numbers"), to="unlimited_places")
        # tokens that only fill up a row may be beyond the last position
        most = self.constant("last_position", np.array(settings.positions - 1, np.int64))
        place = self.op("Min", place, most, to="places")
        token_rows = self.op("Gather", tokens, ids, to="token_embedding", axis=0)
        position_rows = self.op("Gather", positions, place, to="position_embedding", axis=0)
        return self.op("Add", token_rows, position_rows, to="embedded")

    def _biases(self, ids: str, past_counts: str, past_key: str) -> _Attention:
        """Return terms of the attention scores: 0 where a token may look, otherwise a large negative number."""
        past_numbers = self._range(past_key, 3, "past_numbers")
        axes = self.constant("axes_1_2_3", np.array([1, 2, 3], np.int64))
        counts = self.op("Unsqueeze", past_counts, axes, to="past_counts_by_head")
        in_past = self.op("Less", past_numbers, counts, to="is_in_past")
        numbers = self._range(ids, 1, "new_numbers")
        rows = self.op("Unsqueeze", numbers, self._axis_1, to="query_numbers")
        not_later = self.op("LessOrEqual", numbers, rows, to="is_not_later")
        allowed, forbidden = self.scalar("allowed", 0.0), self.scalar("forbidden", -1e9)
        return _Attention(
            self.op("Where", in_past, allowed, forbidden, to="past_bias"),
            self.op("Where", not_later, allowed, forbidden, to="new_bias"),
            self.op("Shape", past_key, to="past_size", start=3, end=4),
        )

    def _layer(self, x: str, cache: tuple[str, str], shared: _Attention, layer: int) -> str:
        settings, name = self._settings, f"layer.{layer}"
        attended = self._attend(self._norm(x, f"{name}.attention.norm"), cache, shared, layer)
        x = self.op("Add", x, attended, to=f"{name}.attended")
        inner = self._dense(self._norm(x, f"{name}.norm"), settings.hidden, 4 * settings.hidden, f"{name}.inner")
        active = self._gelu(inner, f"{name}.gelu")
        return self.op("Add", x, self._dense(active, 4 * settings.hidden, settings.hidden, name), to=f"{name}.out")

    def _attend(self, x: str, cache: tuple[str, str], shared: _Attention, layer: int) -> str:
        hidden, name = self._settings.hidden, f"layer.{layer}.attention"
        outputs = {"query": f"{name}.query.by_head", "key": f"new_key.{layer}", "value": f"new_value.{layer}"}
        orders = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
        for part, output in outputs.items():
            projected = self._dense(x, hidden, hidden, f"{name}.{part}")
            split = self.op("Reshape", projected, self._split, to=f"{name}.{part}.heads")
            self.op("Transpose", split, to=output, perm=orders[part])
        self.output(outputs["key"], DTYPE, [self._settings.heads, self._features, "tokens"])
        self.output(outputs["value"], DTYPE, [self._settings.heads, "tokens", self._features])
        past_scores = self._scores(outputs["query"], cache[0], shared.past_bias, f"{name}.past")
        new_scores = self._scores(outputs["query"], outputs["key"], shared.new_bias, f"{name}.new")
        scores = self.op("Concat", past_scores, new_scores, to=f"{name}.scores", axis=3)
        shares = self.op("Softmax", scores, to=f"{name}.shares", axis=-1)
        ends = {"past": (self._zero, shared.past_size), "new": (shared.past_size, self._end)}
        mixed = []
        for part, value in (("past", cache[1]), ("new", outputs["value"])):
            share = self.op("Slice", shares, *ends[part], self._last_axis, to=f"{name}.{part}.shares")
            mixed.append(self.op("MatMul", share, value, to=f"{name}.{part}.mixed"))
        by_head = self.op("Add", *mixed, to=f"{name}.mixed")
        back = self.op("Transpose", by_head, to=f"{name}.by_token", perm=[0, 2, 1, 3])
        return self._dense(self.op("Reshape", back, self._joined, to=f"{name}.joined"), hidden, hidden, name)

    def _scores(self, query: str, key: str, bias: str, name: str) -> str:
        products = self.op("MatMul", query, key, to=f"{name}.products")
        scaled = self.op("Mul", products, self._scale, to=f"{name}.scaled")
        return self.op("Add", scaled, bias, to=f"{name}.scores")

    def _last_tokens(self, x: str, token_counts: str) -> str:
        """Return the rows of the last new tokens: ``x`` [batch, tokens, hidden] -> [batch, hidden]."""
        last = self.op("Sub", token_counts, self._one, to="last_numbers")
        column = self.op("Unsqueeze", last, self._axis_1, to="last_column")
        return self.op("GatherND", x, column, to="last_tokens", batch_dims=1)

    def _gelu(self, x: str, name: str) -> str:
        """Return GELU of ``x`` with tanh, as GPT-2 computes it."""
        square = self.op("Mul", x, x, to=f"{name}.square")
        cubic = self.op("Mul", square, self._cubic, to=f"{name}.cubic")
        sum_ = self.op("Mul", x, self.op("Add", cubic, self._unit, to=f"{name}.factor"), to=f"{name}.sum")
        tanh = self.op("Tanh", self.op("Mul", sum_, self._slope, to=f"{name}.argument"), to=f"{name}.tanh")
        share = self.op("Mul", self.op("Add", tanh, self._unit, to=f"{name}.bent"), self._half, to=f"{name}.share")
        return self.op("Mul", x, share, to=name)

    def _norm(self, x: str, name: str) -> str:
        return self.layer_norm(x, self._settings.hidden, name, EPSILON)

    def _dense(self, x: str, fan_in: int, width: int, name: str) -> str:
        product = self.op("MatMul", x, self._weight(f"{name}.weight", fan_in, width), to=f"{name}.product")
        bias = self.normal(f"{name}.bias", [width], 0.02)
        return self.op("Add", product, bias, to=f"{name}.dense")

    def _weight(self, name: str, fan_in: int, width: int) -> str:
        return self.normal(name, [fan_in, width], 1 / math.sqrt(fan_in))

    def _range(self, of: str, axis: int, name: str) -> str:
        """Return 0, 1, … up to the size of dimension ``axis`` of the tensor ``of``."""
        size = self.op("Shape", of, to=f"{name}.sizes", start=axis, end=axis + 1)
        return self.op("Range", self._first, self.op("Squeeze", size, to=f"{name}.size"), self._one, to=name)


def draw(settings: TinyGptSettings, weights: Path, rng: np.random.Generator | None) -> LargeGraph:
    """Return the ONNX graph; its weights are written to the file ``weights``."""
    graph = DecoderGraph(settings, weights, rng)
    graph.draw()
    return graph


def write(settings: TinyGptSettings, draft: Draft) -> ModelFacts:
    """Write the decoder, the Python model that serves it, and prompts as request data."""
    draft.on_progress(
        f"building tinygpt: {settings.layers} layers of {settings.hidden}, up to {settings.positions} tokens"
    )
    weights, requests = settings.generators(2)
    graph = draw(settings, draft.version / "weights.bin", weights)
    graph.save(draft.version / "decoder.onnx")
    draft.copy_model("tinygpt.py")
    limits = {"positions": settings.positions, "vocabulary": settings.vocabulary}
    (draft.version / "limits.json").write_text(json.dumps(limits) + "\n", encoding="utf-8")
    lengths = requests.integers(*PROMPT_TOKENS, settings.samples, endpoint=True)
    samples = [
        {
            INPUT_IDS: requests.integers(0, settings.vocabulary, length, dtype=np.int32),
            MAX_TOKENS: np.array([OUTPUT_TOKENS], np.int32),
        }
        for length in lengths
    ]
    draft.input_data.write_bytes(to_json(samples))
    return {"precision": "fp64", "positions": settings.positions, "parameters": graph.parameters}


def interface(_: TinyGptSettings) -> Interface:
    """Return the model's inputs and outputs."""
    return Interface(
        inputs=(TensorSpec(INPUT_IDS, "INT32", (-1,)), TensorSpec(MAX_TOKENS, "INT32", (1,))),
        outputs=(TensorSpec(OUTPUT_ID, "INT32", (1,)),),
    )


def _configs(max_batch_size: int, _: InstanceKind) -> Sequence[ModelConfig]:
    """Return the configuration; the instances run on the CPU, because the cache is in the memory of the process."""
    config = python_config(NAME, interface(TinyGptSettings()), max_batch_size)
    config.input[0].allow_ragged_batch = True  # prompts of different lengths share a batch
    config.model_transaction_policy.decoupled = True
    return [config]


BUILDER = Builder(
    name=NAME,
    version=1,
    source="GPT-2 (Radford et al. 2019)",
    settings=TinyGptSettings,
    interface=interface,
    write=write,
    configs=_configs,
)
