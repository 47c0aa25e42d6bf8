"""MiniLM-L6-H384 (Wang et al. 2020) as a classifier of sentences with two labels.

INT32 ``input_ids``, ``token_type_ids``, ``attention_mask``, [-1] each: any number of tokens up to 512, but all
requests of one batch have the same -> 6 layers of 384, the first token's vector through a layer with tanh ->
``output`` [2], logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from optimizer.models.builder import Builder, Draft, Facts, Interface, Say, Settings, Tensor
from optimizer.models.input_data import write_input_data
from optimizer.models.onnx_graph import Graph, WeightFile
from optimizer.models.text_requests import token_requests
from optimizer.models.transformer import Encoder, Shape

SHAPE = Shape(layers=6, hidden=384, heads=12, inner=1536)
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
OUTPUT = "output"
LABELS = 2
INTERFACE = Interface(
    inputs=tuple(Tensor(name, "INT32", (-1,)) for name in INPUTS), outputs=(Tensor(OUTPUT, "FP32", (LABELS,)),)
)


class MinilmModelSettings(Settings):
    """``tokens`` of each of the ``samples`` of request data; the model takes any number."""

    tokens: int = Field(default=16, ge=2, le=512)
    samples: int = Field(default=251, ge=1)
    seed: int = Field(default=0, ge=0)


def write(settings: MinilmModelSettings, draft: Draft, say: Say) -> Facts:
    say(f"building minilm_model: {SHAPE.layers} layers of {SHAPE.hidden}, requests of {settings.tokens} tokens")
    values, requests = (np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(2))
    parameters = write_model(draft.version, values)
    data = token_requests(settings.samples, settings.tokens, SHAPE.vocabulary, requests)
    write_input_data(draft.input_data, dict(zip(INPUTS, data, strict=True)), with_shapes=True)
    return {
        "precision": "fp32",
        "tokens": settings.tokens,
        "parameters": parameters,
        "seed": settings.seed,
    }


def write_model(version: Path, rng: np.random.Generator) -> int:
    """model.onnx and its weights into the version folder; how many parameters it has."""
    graph = draw(version / "weights.bin", rng)
    graph.save(version / "model.onnx")
    return graph.parameters


def draw(weights: Path, rng: np.random.Generator | None) -> Graph:
    """The graph, its weights in ``weights``."""
    graph = Graph("minilm")
    ids, segments, mask = (graph.input(name, np.int32, ["tokens"]) for name in INPUTS)
    encoder = Encoder(graph, WeightFile(graph, weights, np.float32, rng), SHAPE, np.float32)
    encoded = encoder.encode(ids, segments, mask)
    first = graph.op("Gather", encoded, graph.constant("first", np.array(0, np.int64)), to="first_token", axis=1)
    pooled = graph.op("Tanh", encoder.dense(first, SHAPE.hidden, SHAPE.hidden, "pooler"), to="pooled")
    encoder.dense(pooled, SHAPE.hidden, LABELS, "labels", to=OUTPUT)
    graph.output(OUTPUT, np.float32, [LABELS])
    return graph


BUILDER = Builder(
    name="minilm_model",
    version=1,
    source="transformer-deploy, demo",
    settings=MinilmModelSettings,
    interface=lambda _: INTERFACE,
    write=write,
)
