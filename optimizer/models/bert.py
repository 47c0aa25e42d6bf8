"""BERT for question answering (SQuAD) as NVIDIA's DeepLearningExamples serve it.

INT32 ``input__0`` token ids, ``input__1`` segment ids, ``input__2`` mask, [sequence] each -> the logits of each token
to begin (``output__0``) and to end (``output__1``) the answer, [sequence] each. ``size`` base has 12 layers of 768,
large 24 of 1024; of Google's miniatures ``mini`` (4 of 256) is for a laptop and ``tiny`` (2 of 128) for tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from optimizer.models.builder import Builder, Draft, Facts, Interface, Say, Settings, Tensor
from optimizer.models.input_data import write_input_data
from optimizer.models.onnx_graph import Graph, WeightFile
from optimizer.models.text_requests import token_requests
from optimizer.models.transformer import Encoder, Shape

INPUTS, OUTPUTS = ("input__0", "input__1", "input__2"), ("output__0", "output__1")
SHAPES = {
    "tiny": Shape(layers=2, hidden=128, heads=2, inner=512),
    "mini": Shape(layers=4, hidden=256, heads=4, inner=1024),
    "base": Shape(layers=12, hidden=768, heads=12, inner=3072),
    "large": Shape(layers=24, hidden=1024, heads=16, inner=4096),
}


class BertSettings(Settings):
    """``sequence`` tokens a request, padding included; ``samples`` of request data, of which each is as long."""

    size: Literal["tiny", "mini", "base", "large"] = "base"
    sequence: int = Field(default=384, ge=1, le=512)
    precision: Literal["fp32", "fp16"] = "fp32"
    samples: int = Field(default=61, ge=1)
    seed: int = Field(default=0, ge=0)


def interface(settings: BertSettings) -> Interface:
    return Interface(
        inputs=tuple(Tensor(name, "INT32", (settings.sequence,)) for name in INPUTS),
        outputs=tuple(Tensor(name, settings.precision.upper(), (settings.sequence,)) for name in OUTPUTS),
    )


def write(settings: BertSettings, draft: Draft, say: Say) -> Facts:
    shape, tokens = SHAPES[settings.size], settings.sequence
    say(f"building bert: {settings.size}, {shape.layers} layers of {shape.hidden}, sequences of {tokens}")
    values, requests = (np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(2))
    graph = draw(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    data = token_requests(settings.samples, tokens, shape.vocabulary, requests)
    write_input_data(draft.input_data, dict(zip(INPUTS, data, strict=True)))
    return {
        "precision": settings.precision,
        "size": settings.size,
        "sequence": tokens,
        "parameters": graph.parameters,
        "seed": settings.seed,
    }


def draw(settings: BertSettings, weights: Path, rng: np.random.Generator | None) -> Graph:
    """The graph, its weights in ``weights``."""
    shape = SHAPES[settings.size]
    dtype = np.dtype(np.float16 if settings.precision == "fp16" else np.float32)
    graph = Graph("bert")
    ids, segments, mask = (graph.input(name, np.int32, [settings.sequence]) for name in INPUTS)
    encoder = Encoder(graph, WeightFile(graph, weights, dtype, rng), shape, dtype)
    encoded = encoder.encode(ids, segments, mask)
    logits = encoder.dense(encoded, shape.hidden, 2, "answer")
    last = graph.constant("last_axis", np.array([2], np.int64))
    for place, name in enumerate(OUTPUTS):
        which = graph.constant(f"logit_{place}", np.array([place], np.int64))
        column = graph.op("Gather", logits, which, to=f"{name}.column", axis=2)
        graph.op("Squeeze", column, last, to=name)
        graph.output(name, dtype, [settings.sequence])
    return graph


BUILDER = Builder(
    name="bert",
    version=2,
    source="NVIDIA DeepLearningExamples, LanguageModeling/BERT",
    settings=BertSettings,
    interface=interface,
    write=write,
)
