"""Transformer encoders: BERT for question answering, and MiniLM as a sentence classifier.

BERT in ONNX (Devlin et al. 2018) begins with token, position and segment embeddings and a layer norm. Each layer has
self-attention and a feed-forward part with exact GELU (by erf), both followed by a residual and a layer norm. Weights
are random with the standard deviation of BERT's initialization, since the cost of a request depends on shapes alone.

MiniLM-L6-H384 (Wang et al. 2020), alone and as an ensemble with its tokenizer:

    minilm            ensemble   TEXT STRING [1] -> output FP32 [2]
    minilm_tokenize   python     TEXT -> input_ids, token_type_ids, attention_mask INT32 [-1]
    minilm_model      ONNX       these three -> output, the logits of two labels

``minilm_model`` takes up to 512 tokens: 6 layers of 384, then the first token's vector through a layer with tanh.
The tokenizer is BERT's (lower case, word pieces) with a small vocabulary. All requests of a batch must have the same
number of tokens, so texts of different lengths share a batch only if they are padded to a common multiple.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from optimizer.config.model_config_proto import ModelConfig
from optimizer.model.builders.builder import (
    Builder,
    BuilderSettings,
    Draft,
    InstanceKind,
    Interface,
    ModelFacts,
    Samples,
    onnx_config,
    python_config,
    with_tensors,
)
from optimizer.model.builders.onnx_graph import LargeGraph
from optimizer.model.builders.request_data import sentences, token_requests, vocabulary, write_input_data
from optimizer.model.input_data import TensorSpec, entries_to_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INITIAL_STD = 0.02
EPSILON = 1e-12
SEGMENTS = 2


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder: each of the ``heads`` has hidden / heads features, the feed-forward part ``inner``."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int = 30522
    positions: int = 512


class EncoderGraph(LargeGraph):
    """A graph with an encoder of ``shape``; see ``LargeGraph`` for the other arguments."""

    def __init__(
        self, name: str, path: Path, dtype: npt.DTypeLike, rng: np.random.Generator | None, shape: EncoderShape
    ) -> None:
        super().__init__(name, path, dtype, rng)
        self._shape = shape
        self._axes_1_2 = self.constant("axes_1_2", np.array([1, 2], np.int64))
        head = shape.hidden // shape.heads
        self._split = self.constant("split_heads", np.array([0, 0, shape.heads, head], np.int64))
        self._joined = self.constant("join_heads", np.array([0, 0, shape.hidden], np.int64))
        self._scale = self.scalar("attention_scale", 1 / math.sqrt(head))
        self._half, self._one = self.scalar("half", 0.5), self.scalar("one", 1.0)
        self._root_half = self.scalar("root_half", math.sqrt(0.5))

    def encode(self, ids: str, segments: str, mask: str) -> str:
        """Add the encoder and return its output, [batch, tokens, hidden].

        The inputs are INT32 [batch, tokens]; in ``mask`` 1 is a token and 0 is padding.
        """
        x = self._embed(ids, segments)
        penalties = self._attention_penalties(mask)
        for layer in range(self._shape.layers):
            x = self._layer(x, penalties, f"layer.{layer}")
        return x

    def dense(self, x: str, fan_in: int, width: int, name: str, to: str | None = None) -> str:
        """Add a fully connected layer: ``x`` [batch, tokens, fan_in] -> [batch, tokens, width]."""
        weight = self.normal(f"{name}.weight", [fan_in, width], INITIAL_STD)
        bias = self.normal(f"{name}.bias", [width], INITIAL_STD)
        product = self.op("MatMul", x, weight, to=f"{name}.product")
        return self.op("Add", product, bias, to=to or f"{name}.sum")

    def _embed(self, ids: str, segments: str) -> str:
        shape = self._shape
        tables = {"token": shape.vocabulary, "position": shape.positions, "segment": SEGMENTS}
        token, position, segment = (
            self.normal(f"embedding.{name}", [rows, shape.hidden], INITIAL_STD) for name, rows in tables.items()
        )
        size = self.op("Shape", ids, to="tokens", start=1, end=2)
        begin = self.constant("zero", np.array([0], np.int64))
        positions = self.op("Slice", position, begin, size, to="position_embedding")
        tokens = self.op("Gather", token, ids, to="token_embedding", axis=0)
        segment_rows = self.op("Gather", segment, segments, to="segment_embedding", axis=0)
        both = self.op("Add", tokens, segment_rows, to="token_and_segment")
        total = self.op("Add", both, positions, to="embedded")
        return self._norm(total, "embedding.norm")

    def _attention_penalties(self, mask: str) -> str:
        """Return the term added to the attention scores: 0 at tokens, a large negative number at padding."""
        is_token = self.cast(mask, to="mask_float")
        is_padding = self.op("Sub", self._one, is_token, to="padding")
        penalty = self.scalar("penalty", -10000.0)
        by_token = self.op("Mul", is_padding, penalty, to="penalties")
        return self.op("Unsqueeze", by_token, self._axes_1_2, to="attention.penalties")

    def _layer(self, x: str, mask: str, name: str) -> str:
        shape = self._shape
        attended = self._attention(x, mask, f"{name}.attention")
        x = self._norm(self.op("Add", attended, x, to=f"{name}.attended"), f"{name}.attention.norm")
        inner = self._gelu(self.dense(x, shape.hidden, shape.inner, f"{name}.inner"), f"{name}.gelu")
        out = self.dense(inner, shape.inner, shape.hidden, f"{name}.output")
        return self._norm(self.op("Add", out, x, to=f"{name}.summed"), f"{name}.norm")

    def _attention(self, x: str, mask: str, name: str) -> str:
        hidden = self._shape.hidden
        by_head = {}
        for part, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            projected = self.dense(x, hidden, hidden, f"{name}.{part}")
            heads = self.op("Reshape", projected, self._split, to=f"{name}.{part}.heads")
            by_head[part] = self.op("Transpose", heads, to=f"{name}.{part}.by_head", perm=perm)
        scores = self.op("MatMul", by_head["query"], by_head["key"], to=f"{name}.scores")
        scaled = self.op("Mul", scores, self._scale, to=f"{name}.scaled")
        masked = self.op("Add", scaled, mask, to=f"{name}.masked")
        shares = self.op("Softmax", masked, to=f"{name}.shares", axis=-1)
        mixed = self.op("MatMul", shares, by_head["value"], to=f"{name}.mixed")
        back = self.op("Transpose", mixed, to=f"{name}.by_token", perm=[0, 2, 1, 3])
        joined = self.op("Reshape", back, self._joined, to=f"{name}.joined")
        return self.dense(joined, hidden, hidden, f"{name}.output")

    def _gelu(self, x: str, name: str) -> str:
        erf = self.op("Erf", self.op("Mul", x, self._root_half, to=f"{name}.argument"), to=f"{name}.erf")
        half = self.op("Mul", x, self._half, to=f"{name}.half")
        return self.op("Mul", half, self.op("Add", erf, self._one, to=f"{name}.factor"), to=name)

    def _norm(self, x: str, name: str) -> str:
        return self.layer_norm(x, self._shape.hidden, name, EPSILON)


BERT_INPUTS, BERT_OUTPUTS = ("input__0", "input__1", "input__2"), ("output__0", "output__1")
BERT_SHAPES = {
    "tiny": EncoderShape(layers=2, hidden=128, heads=2, inner=512),
    "mini": EncoderShape(layers=4, hidden=256, heads=4, inner=1024),
    "base": EncoderShape(layers=12, hidden=768, heads=12, inner=3072),
    "large": EncoderShape(layers=24, hidden=1024, heads=16, inner=4096),
}


class BertSettings(BuilderSettings):
    """``sequence``: tokens in a request, including padding. ``samples``: entries of request data."""

    size: Literal["tiny", "mini", "base", "large"] = "base"
    sequence: int = Field(default=384, ge=1, le=512)
    precision: Literal["fp32", "fp16"] = "fp32"
    samples: Samples = 61


def bert_interface(settings: BertSettings) -> Interface:
    """Return the inputs and outputs of BERT."""
    return Interface(
        inputs=tuple(TensorSpec(name, "INT32", (settings.sequence,)) for name in BERT_INPUTS),
        outputs=tuple(TensorSpec(name, settings.precision.upper(), (settings.sequence,)) for name in BERT_OUTPUTS),
    )


def write_bert(settings: BertSettings, draft: Draft) -> ModelFacts:
    """Write BERT and its request data."""
    shape, tokens = BERT_SHAPES[settings.size], settings.sequence
    draft.on_progress(
        f"building bert: {settings.size}, {shape.layers} layers of {shape.hidden}, sequences of {tokens}"
    )
    values, requests = settings.generators(2)
    graph = draw_bert(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    data = token_requests(settings.samples, tokens, shape.vocabulary, requests)
    write_input_data(draft.input_data, dict(zip(BERT_INPUTS, data, strict=True)))
    facts = {"precision": settings.precision, "size": settings.size, "sequence": tokens}
    return {**facts, "parameters": graph.parameters}


def draw_bert(settings: BertSettings, weights: Path, rng: np.random.Generator | None) -> LargeGraph:
    """Return the ONNX graph of BERT; its weights are written to the file ``weights``."""
    shape = BERT_SHAPES[settings.size]
    dtype = np.dtype(np.float16 if settings.precision == "fp16" else np.float32)
    graph = EncoderGraph("bert", weights, dtype, rng, shape)
    ids, segments, mask = (graph.input(name, np.int32, [settings.sequence]) for name in BERT_INPUTS)
    encoded = graph.encode(ids, segments, mask)
    logits = graph.dense(encoded, shape.hidden, 2, "answer")
    last = graph.constant("last_axis", np.array([2], np.int64))
    for index, name in enumerate(BERT_OUTPUTS):
        which = graph.constant(f"logit_{index}", np.array([index], np.int64))
        column = graph.op("Gather", logits, which, to=f"{name}.column", axis=2)
        graph.op("Squeeze", column, last, to=name)
        graph.output(name, dtype, [settings.sequence])
    return graph


BERT_BUILDER = Builder(
    name="bert",
    version=2,
    source="NVIDIA DeepLearningExamples, LanguageModeling/BERT",
    settings=BertSettings,
    interface=bert_interface,
    write=write_bert,
)


ENSEMBLE, TOKENIZER, CLASSIFIER = "minilm", "minilm_tokenize", "minilm_model"
MINILM_SOURCE = "transformer-deploy, demo"
MINILM_SHAPE = EncoderShape(layers=6, hidden=384, heads=12, inner=1536)
LABELS = 2
MAX_TOKENS = 128  # the ensemble truncates longer texts
TEXT = TensorSpec("TEXT", "STRING", (1,))
TOKENS = tuple(TensorSpec(name, "INT32", (-1,)) for name in ("input_ids", "token_type_ids", "attention_mask"))
MINILM_OUTPUT = TensorSpec("output", "FP32", (LABELS,))
MINILM_INPUTS = tuple(tensor.name for tensor in TOKENS)


class ClassifierSettings(BuilderSettings):
    """Request data of ``minilm_model``: ``samples`` of ``tokens`` each. The model takes any number of tokens."""

    tokens: int = Field(default=16, ge=2, le=512)
    samples: Samples = 251


class EnsembleSettings(BuilderSettings):
    """Texts are padded to a multiple of ``pad_to_multiple_of`` tokens; 1 does not pad. ``samples``: request data."""

    pad_to_multiple_of: int = Field(default=1, ge=1, le=MAX_TOKENS)
    samples: Samples = 251


def write_classifier(settings: ClassifierSettings, draft: Draft) -> ModelFacts:
    """Write the ONNX model and token requests."""
    shape = MINILM_SHAPE
    draft.on_progress(
        f"building minilm_model: {shape.layers} layers of {shape.hidden}, requests of {settings.tokens} tokens"
    )
    weights, requests = settings.generators(2)
    parameters = _write_minilm(draft.version, weights)
    data = token_requests(settings.samples, settings.tokens, shape.vocabulary, requests)
    write_input_data(draft.input_data, dict(zip(MINILM_INPUTS, data, strict=True)), with_shapes=True)
    return {"precision": "fp32", "tokens": settings.tokens, "parameters": parameters}


def write_ensemble(settings: EnsembleSettings, draft: Draft) -> ModelFacts:
    """Write the tokenizer, the ONNX model and texts as request data."""
    draft.on_progress(f"building minilm: a tokenizer, and {MINILM_SHAPE.layers} layers of {MINILM_SHAPE.hidden}")
    weights, requests = settings.generators(2)
    tokenizer = make_tokenizer(settings.pad_to_multiple_of)
    served = draft.sibling(TOKENIZER)
    served.copy_model("minilm_tokenize.py")
    tokenizer.save(str(served.version / "tokenizer.json"))
    parameters = _write_minilm(draft.sibling(CLASSIFIER).version, weights)
    texts = sentences(settings.samples, requests)
    draft.input_data.write_bytes(entries_to_json([{TEXT.name: [text]} for text in texts]))
    return {
        "precision": "fp32",
        "mean_tokens": round(float(np.mean([len(tokenizer.encode(text).ids) for text in texts])), 1),
        "pad_to_multiple_of": settings.pad_to_multiple_of,
        "parameters": parameters,
    }


def make_tokenizer(pad_to_multiple_of: int) -> Tokenizer:
    """Return BERT's tokenizer with the vocabulary of the request data."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = vocabulary()
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", pieces["[SEP]"]), ("[CLS]", pieces["[CLS]"]))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_to_multiple_of=pad_to_multiple_of)
    return tokenizer


def draw_minilm(weights: Path, rng: np.random.Generator | None) -> LargeGraph:
    """Return the ONNX graph of ``minilm_model``; its weights are written to the file ``weights``."""
    graph = EncoderGraph("minilm", weights, np.float32, rng, MINILM_SHAPE)
    ids, segments, mask = (graph.input(name, np.int32, ["tokens"]) for name in MINILM_INPUTS)
    encoded = graph.encode(ids, segments, mask)
    first = graph.op("Gather", encoded, graph.constant("first", np.array(0, np.int64)), to="first_token", axis=1)
    pooled = graph.op("Tanh", graph.dense(first, MINILM_SHAPE.hidden, MINILM_SHAPE.hidden, "pooler"), to="pooled")
    graph.dense(pooled, MINILM_SHAPE.hidden, LABELS, "labels", to=MINILM_OUTPUT.name)
    graph.output(MINILM_OUTPUT.name, np.float32, [LABELS])
    return graph


def _write_minilm(version: Path, rng: np.random.Generator) -> int:
    """Write model.onnx and its weights into the version folder; return the number of parameters."""
    graph = draw_minilm(version / "weights.bin", rng)
    graph.save(version / "model.onnx")
    return graph.parameters


def _ensemble_configs(max_batch_size: int, kind: InstanceKind) -> Sequence[ModelConfig]:
    ensemble = ModelConfig(name=ENSEMBLE, platform="ensemble", max_batch_size=max_batch_size)
    steps = ensemble.ensemble_scheduling.step
    for model, inputs, outputs in (
        (TOKENIZER, [TEXT.name], MINILM_INPUTS),
        (CLASSIFIER, MINILM_INPUTS, [MINILM_OUTPUT.name]),
    ):
        # a tensor has the same name in the ensemble as in its models
        same_inputs, same_outputs = ({name: name for name in names} for names in (inputs, outputs))
        steps.add(model_name=model, model_version=-1, input_map=same_inputs, output_map=same_outputs)
    return [
        with_tensors(ensemble, Interface((TEXT,), (MINILM_OUTPUT,))),
        python_config(TOKENIZER, Interface((TEXT,), TOKENS), max_batch_size),
        onnx_config(CLASSIFIER, Interface(TOKENS, (MINILM_OUTPUT,)), max_batch_size, kind),
    ]


MINILM_BUILDER = Builder(
    name=ENSEMBLE,
    version=1,
    source=MINILM_SOURCE,
    settings=EnsembleSettings,
    interface=lambda _: Interface((TEXT,), (MINILM_OUTPUT,)),
    write=write_ensemble,
    configs=_ensemble_configs,
)
CLASSIFIER_BUILDER = Builder(
    name=CLASSIFIER,
    version=1,
    source=MINILM_SOURCE,
    settings=ClassifierSettings,
    interface=lambda _: Interface(TOKENS, (MINILM_OUTPUT,)),
    write=write_classifier,
)
