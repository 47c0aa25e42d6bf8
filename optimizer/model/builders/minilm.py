"""MiniLM-L6-H384 (Wang et al. 2020) as a sentence classifier, alone and as an ensemble with its tokenizer.

    minilm            ensemble   TEXT STRING [1] -> output FP32 [2]
    minilm_tokenize   python     TEXT -> input_ids, token_type_ids, attention_mask INT32 [-1]
    minilm_model      ONNX       these three -> output, the logits of two labels

``minilm_model`` takes up to 512 tokens: 6 layers of 384, then the first token's vector through a layer with tanh.
The tokenizer is BERT's (lower case, word pieces) with a small vocabulary. All requests of a batch must have the same
number of tokens, so texts of different lengths share a batch only if they are padded to a common multiple.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from optimizer.config.model_config_proto import ModelConfig
from optimizer.model.builders import builder as triton
from optimizer.model.builders.bert import Encoder, EncoderShape
from optimizer.model.builders.builder import (
    Builder,
    BuilderSettings,
    Draft,
    InstanceKind,
    Interface,
    ModelFacts,
    Samples,
    TensorSpec,
)
from optimizer.model.builders.onnx_graph import Graph, WeightFile
from optimizer.model.builders.request_data import sentences, token_requests, vocabulary, write_input_data, write_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


ENSEMBLE, TOKENIZER, CLASSIFIER = "minilm", "minilm_tokenize", "minilm_model"
DOCUMENT = "transformer-deploy, demo"
SHAPE = EncoderShape(layers=6, hidden=384, heads=12, inner=1536)
LABELS = 2
MAX_TOKENS = 128  # the ensemble truncates longer texts
TEXT = TensorSpec("TEXT", "STRING", (1,))
TOKENS = tuple(TensorSpec(name, "INT32", (-1,)) for name in ("input_ids", "token_type_ids", "attention_mask"))
OUTPUT = TensorSpec("output", "FP32", (LABELS,))
INPUT_NAMES = tuple(tensor.name for tensor in TOKENS)


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
    draft.say(f"building minilm_model: {SHAPE.layers} layers of {SHAPE.hidden}, requests of {settings.tokens} tokens")
    weights, requests = settings.generators(2)
    parameters = _write_onnx(draft.version, weights)
    data = token_requests(settings.samples, settings.tokens, SHAPE.vocabulary, requests)
    write_input_data(draft.input_data, dict(zip(INPUT_NAMES, data, strict=True)), with_shapes=True)
    return {"precision": "fp32", "tokens": settings.tokens, "parameters": parameters}


def write_ensemble(settings: EnsembleSettings, draft: Draft) -> ModelFacts:
    """Write the tokenizer, the ONNX model and texts as request data."""
    draft.say(f"building minilm: a tokenizer, and {SHAPE.layers} layers of {SHAPE.hidden}")
    weights, requests = settings.generators(2)
    tokenizer = make_tokenizer(settings.pad_to_multiple_of)
    tokenizer_folder = draft.sibling(TOKENIZER).version
    shutil.copyfile(Path(__file__).with_name("minilm_tokenize.py"), tokenizer_folder / "model.py")
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    parameters = _write_onnx(draft.sibling(CLASSIFIER).version, weights)
    texts = sentences(settings.samples, requests)
    write_texts(draft.input_data, TEXT.name, texts)
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


def draw(weights: Path, rng: np.random.Generator | None) -> Graph:
    """Return the ONNX graph of ``minilm_model``; its weights are written to the file ``weights``."""
    graph = Graph("minilm")
    ids, segments, mask = (graph.input(name, np.int32, ["tokens"]) for name in INPUT_NAMES)
    encoder = Encoder(graph, WeightFile(graph, weights, np.float32, rng), SHAPE, np.float32)
    encoded = encoder.encode(ids, segments, mask)
    first = graph.op("Gather", encoded, graph.constant("first", np.array(0, np.int64)), to="first_token", axis=1)
    pooled = graph.op("Tanh", encoder.dense(first, SHAPE.hidden, SHAPE.hidden, "pooler"), to="pooled")
    encoder.dense(pooled, SHAPE.hidden, LABELS, "labels", to=OUTPUT.name)
    graph.output(OUTPUT.name, np.float32, [LABELS])
    return graph


def _write_onnx(version: Path, rng: np.random.Generator) -> int:
    """Write model.onnx and its weights into the version folder; return the number of parameters."""
    graph = draw(version / "weights.bin", rng)
    graph.save(version / "model.onnx")
    return graph.parameters


def _ensemble_configs(max_batch_size: int, kind: InstanceKind) -> Sequence[ModelConfig]:
    ensemble = ModelConfig(name=ENSEMBLE, platform="ensemble", max_batch_size=max_batch_size)
    steps = ensemble.ensemble_scheduling.step
    for model, inputs, outputs in ((TOKENIZER, [TEXT.name], INPUT_NAMES), (CLASSIFIER, INPUT_NAMES, [OUTPUT.name])):
        # a tensor has the same name in the ensemble as in its models
        same_inputs, same_outputs = ({name: name for name in names} for names in (inputs, outputs))
        steps.add(model_name=model, model_version=-1, input_map=same_inputs, output_map=same_outputs)
    tokenizer = ModelConfig(name=TOKENIZER, backend="python", max_batch_size=max_batch_size)
    return [
        triton.with_tensors(ensemble, Interface((TEXT,), (OUTPUT,))),
        triton.with_instance(triton.with_tensors(tokenizer, Interface((TEXT,), TOKENS)), "KIND_CPU"),
        triton.onnx_config(CLASSIFIER, Interface(TOKENS, (OUTPUT,)), max_batch_size, kind),
    ]


BUILDER = Builder(
    name=ENSEMBLE,
    version=1,
    source=DOCUMENT,
    settings=EnsembleSettings,
    interface=lambda _: Interface((TEXT,), (OUTPUT,)),
    write=write_ensemble,
    configs=_ensemble_configs,
)
CLASSIFIER_BUILDER = Builder(
    name=CLASSIFIER,
    version=1,
    source=DOCUMENT,
    settings=ClassifierSettings,
    interface=lambda _: Interface(TOKENS, (OUTPUT,)),
    write=write_classifier,
)
