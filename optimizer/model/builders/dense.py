"""Models of fully connected layers: a small multi-layer perceptron for first tries and tests, and DLRM.

DLRM for the Criteo data set (Naumov et al. 2019) has requests that resemble click logs. The cost of a sample depends
on whether its embedding rows are in a CPU cache, so requests must not repeat a few rows as a single random tensor
would. 8191 samples make 212,966 look-ups. With the skew below these touch 77,000 distinct rows of the uncapped tables
and 73,000 of tables capped at 100,000 rows: 37 MB to 39 MB in FP32, in addition to 9.5 MB of MLP weights. That
exceeds the cache of a typical server, while the hottest rows stay cached, as in production. For a larger cache,
increase ``samples``; each thousand delays perf_analyzer's start by about 0.02 s.

The number of samples is prime, so that batches begin at other samples each time perf_analyzer starts over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from optimizer.model.builders.builder import Builder, BuilderSettings, Draft, Interface, ModelFacts, Samples
from optimizer.model.builders.onnx_graph import Graph
from optimizer.model.builders.request_data import write_input_data
from optimizer.model.input_data import TensorSpec


class DenseGraph(Graph):
    """A graph with fully connected layers, whose weights of the type ``dtype`` are drawn from ``rng``.

    He initialization (He et al. 2015) keeps the second moment of the activations from layer to layer, so outputs
    neither vanish nor overflow with many layers or in half precision.
    """

    def __init__(self, name: str, dtype: npt.DTypeLike, rng: np.random.Generator) -> None:
        super().__init__(name)
        self._dtype, self._rng = dtype, rng

    def dense(self, x: str, fan_in: int, width: int, *, name: str, relu: bool, to: str) -> str:
        """Add a layer ``x`` [batch, fan_in] -> ``to`` [batch, width] with ``<name>.weight`` and ``<name>.bias``."""
        std = np.sqrt((2.0 if relu else 1.0) / fan_in)
        values = std * self._rng.standard_normal((fan_in, width))
        weight = self.weight(f"{name}.weight", values.astype(self._dtype))
        values = 0.1 * self._rng.standard_normal(width)
        bias = self.weight(f"{name}.bias", values.astype(self._dtype))
        product = self.op("Gemm", x, weight, bias, to=f"{name}.gemm" if relu else to)
        return self.op("Relu", product, to=to) if relu else product

    def mlp(self, x: str, fan_in: int, widths: Sequence[int], *, name: str, relu_at_end: bool, to: str) -> str:
        """Add layers ``<name>.0``, ``<name>.1``, … with ReLU between them; ``to`` is [batch, last width]."""
        for i, width in enumerate(widths):
            last = i == len(widths) - 1
            out = to if last else f"{name}.{i}"
            x = self.dense(x, fan_in, width, name=f"{name}.{i}", relu=relu_at_end or not last, to=out)
            fan_in = width
        return x


MAX_WIDTH, MAX_LAYERS = 65_536, 1000
MAX_PARAMETERS = 1 << 27  # 512 MiB of weights, which are in memory several times while the model is built
MAX_VALUES = 1 << 24  # limit for the requests: about 300 MB of JSON


class MlpSettings(BuilderSettings):
    """FP32 ``input`` [input_width] -> ``layers`` hidden layers, ReLU -> FP32 ``output`` [output_width]."""

    input_width: int = Field(default=64, ge=1, le=MAX_WIDTH)
    hidden_width: int = Field(default=256, ge=1, le=MAX_WIDTH)
    layers: int = Field(default=2, ge=0, le=MAX_LAYERS)
    output_width: int = Field(default=8, ge=1, le=MAX_WIDTH)
    samples: Samples = 256

    @property
    def widths(self) -> list[int]:
        """The width of each layer behind the input."""
        return [self.hidden_width] * self.layers + [self.output_width]

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        parameters = sum((before + 1) * width for before, width in pairwise([self.input_width, *self.widths]))
        if parameters > MAX_PARAMETERS:
            raise ValueError(f"{parameters:,} parameters are more than {MAX_PARAMETERS:,}; write smaller sizes")
        values = self.samples * self.input_width
        if values > MAX_VALUES:
            raise ValueError(f"{values:,} values of requests are more than {MAX_VALUES:,}; write fewer samples")
        return self


def mlp_interface(settings: MlpSettings) -> Interface:
    """Return the inputs and outputs of the MLP."""
    return Interface(
        inputs=(TensorSpec("input", "FP32", (settings.input_width,)),),
        outputs=(TensorSpec("output", "FP32", (settings.output_width,)),),
    )


def write_mlp(settings: MlpSettings, draft: Draft) -> ModelFacts:
    """Write the MLP and its request data."""
    draft.on_progress(f"building mlp: {settings.layers} hidden layers of {settings.hidden_width}")
    weights, requests = settings.generators(2)
    graph = DenseGraph("mlp", np.float32, weights)
    x = graph.input("input", np.float32, [settings.input_width])
    graph.mlp(x, settings.input_width, settings.widths, name="layer", relu_at_end=False, to="output")
    graph.output("output", np.float32, [settings.output_width])
    graph.save(draft.version / "model.onnx")

    samples = requests.standard_normal((settings.samples, settings.input_width), dtype=np.float32)
    write_input_data(draft.input_data, {"input": samples})
    return {"precision": "fp32", "parameters": graph.parameters}


MLP_BUILDER = Builder(
    name="mlp", version=1, source="tritune's own", settings=MlpSettings, interface=mlp_interface, write=write_mlp
)

SAMPLES = 8191
SKEW = 0.9
"""The exponent s of Zipf's law, probability ∝ rank**-s, for each categorical feature."""


def dense_features(samples: int, features: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return log(1 + count) of log-normal counts, [samples, features]; values from 0 to about 10 fit FP16."""
    typical = rng.uniform(0.0, 4.0, features)  # some features count units, others thousands
    return np.log1p(np.floor(rng.lognormal(typical, 1.5, (samples, features))))


def table_indices(samples: int, cardinalities: Sequence[int], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return Zipf-distributed indices in [0, cardinality), [samples, len(cardinalities)].

    The hottest rows are scattered over the table, because adjacent rows would share pages and be prefetched together.
    """
    columns = []
    for n in cardinalities:
        ranks = _zipf(samples, n, rng)
        columns.append((ranks * _scatter(n) + rng.integers(n)) % n)
    return np.stack(columns, axis=1)


def _zipf(samples: int, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return ranks in [0, n) by inverting the power law on [1, n+1), which needs no table of n weights."""
    e = 1.0 - SKEW
    x: npt.NDArray[np.float64] = ((float(n + 1) ** e - 1.0) * rng.random(samples) + 1.0) ** (1.0 / e)
    return np.minimum(x.astype(np.int64) - 1, n - 1)  # rounding may reach n


def _scatter(n: int) -> int:
    """Return a multiplier near n/φ that is coprime to ``n``: it permutes range(n) and separates successive ranks."""
    candidate = max(1, round(n * 0.6180339887))
    while math.gcd(candidate, n) != 1:
        candidate += 1
    return candidate


# Distinct values of the 26 categorical features; values that occur fewer than 15 times are merged into one
CARDINALITIES = (
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11,
    2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35,
)  # fmt: skip
DENSE_FEATURES = 13
EMBEDDING_DIM = 128
BOTTOM = (512, 256, EMBEDDING_DIM)
TOP = (1024, 1024, 512, 256, 1)
VECTORS = len(CARDINALITIES) + 1
PAIRS = VECTORS * (VECTORS - 1) // 2
# Standard deviation of an embedding value; the dot product of two rows then has standard deviation √128 · std² = 1.
EMBEDDING_STD = EMBEDDING_DIM**-0.25
CHUNK_ROWS = 1 << 16  # 32 MiB in FP32: building never holds more of a table in memory

DType: TypeAlias = np.dtype[Any]


class DlrmSettings(BuilderSettings):
    """``max_rows_per_table`` caps each of the 26 tables, which share one matrix. Without a cap (None) it has 16.7 GB.

    The model takes each index modulo the rows of its table. So any INT64 is valid, and the same requests fit every
    cap; rare values are hashed as by the reference's ``--hash_indices``. ``samples``: entries of request data.
    """

    max_rows_per_table: int | None = Field(default=100_000, ge=1)
    precision: Literal["fp32", "fp16"] = "fp32"
    samples: Samples = SAMPLES


def table_rows(max_rows_per_table: int | None) -> tuple[int, ...]:
    """Return the number of rows of each of the 26 tables."""
    return tuple(min(n, max_rows_per_table or n) for n in CARDINALITIES)


def dlrm_interface(settings: DlrmSettings) -> Interface:
    """Return the inputs and outputs of DLRM."""
    floats = settings.precision.upper()
    return Interface(
        inputs=(
            TensorSpec("input__0", floats, (DENSE_FEATURES,)),
            TensorSpec("input__1", "INT64", (len(CARDINALITIES),)),
        ),
        outputs=(TensorSpec("output__0", floats, (1,)),),
    )


def write_dlrm(settings: DlrmSettings, draft: Draft) -> ModelFacts:
    """Write DLRM and its request data."""
    rows = table_rows(settings.max_rows_per_table)
    dtype = np.dtype(np.float16 if settings.precision == "fp16" else np.float32)
    table_bytes = sum(rows) * EMBEDDING_DIM * dtype.itemsize
    draft.on_progress(f"building dlrm: {sum(rows) / 1e6:.2f} M rows, {table_bytes / 1e6:.0f} MB")
    mlps, table, requests = settings.generators(3)

    table_file = draft.version / "embedding.bin"
    _write_table(table_file, sum(rows), dtype, table, draft.on_progress)
    graph = _draw_dlrm(rows, dtype, table_file, mlps)
    graph.save(draft.version / "model.onnx")
    features = dense_features(settings.samples, DENSE_FEATURES, requests).astype(dtype)
    indices = table_indices(settings.samples, CARDINALITIES, requests)
    write_input_data(draft.input_data, {"input__0": features, "input__1": indices})

    return {
        "precision": settings.precision,
        "rows": sum(rows),
        "max_rows_per_table": settings.max_rows_per_table or "uncapped",
        "embedding_bytes": table_bytes,
        "parameters": graph.parameters,
    }


def _write_table(
    path: Path, rows: int, dtype: DType, rng: np.random.Generator, on_progress: Callable[[str], None]
) -> None:
    """Write uniform values with mean 0, in chunks because the table may be larger than the memory."""
    width = np.float32(EMBEDDING_STD * 12**0.5)  # a uniform distribution of width w has standard deviation w/√12
    chunk = np.empty((CHUNK_ROWS, EMBEDDING_DIM), np.float32)
    with path.open("wb", buffering=0) as file:
        for start in range(0, rows, CHUNK_ROWS):
            values = chunk[: min(CHUNK_ROWS, rows - start)]
            rng.random(out=values, dtype=np.float32)
            values -= 0.5
            values *= width
            values.astype(dtype, copy=False).tofile(file)
            done = start + len(values)
            if done * 10 // rows > start * 10 // rows and rows > 50 * CHUNK_ROWS:
                on_progress(f"building dlrm: {done * 100 // rows} % of the embedding table")


def _draw_dlrm(rows: tuple[int, ...], dtype: DType, table_file: Path, rng: np.random.Generator) -> Graph:
    graph = DenseGraph("dlrm", dtype, rng)
    features = graph.input("input__0", dtype, [DENSE_FEATURES])
    indices = graph.input("input__1", np.int64, [len(rows)])

    bottom = graph.mlp(features, DENSE_FEATURES, BOTTOM, name="bottom", relu_at_end=True, to="bottom")

    # ONNX's Mod takes the sign of the divisor: negative indices become valid rows too
    sizes = graph.constant("table_rows", np.array(rows, np.int64))
    offsets = graph.constant("table_offsets", np.cumsum([0, *rows[:-1]], dtype=np.int64))
    table = graph.external_weight("embedding", dtype, [sum(rows), EMBEDDING_DIM], table_file)
    row = graph.op("Add", graph.op("Mod", indices, sizes, to="row_in_table"), offsets, to="row")
    embedded = graph.op("Gather", table, row, to="embedded", axis=0)

    axis_1 = graph.constant("axis_1", np.array([1], np.int64))
    first = graph.op("Unsqueeze", bottom, axis_1, to="bottom_vector")
    vectors = graph.op("Concat", first, embedded, to="vectors", axis=1)
    transposed = graph.op("Transpose", vectors, to="vectors_t", perm=[0, 2, 1])
    products = graph.op("MatMul", vectors, transposed, to="dots")
    flat_shape = graph.constant("flat_shape", np.array([-1, VECTORS * VECTORS], np.int64))
    flat = graph.op("Reshape", products, flat_shape, to="dots_flat")
    pairs = graph.op("Gather", flat, graph.constant("lower_triangle", _lower_triangle()), to="pairs", axis=1)

    interaction = graph.op("Concat", bottom, pairs, to="interaction", axis=1)
    one_column = graph.constant("one_column", np.array([0, 0, 0, 1], np.int64))
    padded = graph.op("Pad", interaction, one_column, to="padded")  # 480: a multiple of 8, for tensor cores
    graph.mlp(padded, EMBEDDING_DIM + PAIRS + 1, TOP, name="top", relu_at_end=False, to="output__0")
    graph.output("output__0", dtype, [1])
    return graph


def _lower_triangle() -> npt.NDArray[np.int64]:
    """Return the indices of (i, j), j < i, in a flattened 27×27 matrix, row by row."""
    i, j = np.tril_indices(VECTORS, -1)
    return (i * VECTORS + j).astype(np.int64)


DLRM_BUILDER = Builder(
    name="dlrm",
    version=1,
    source="NVIDIA DeepLearningExamples, PyTorch/Recommendation/DLRM",
    settings=DlrmSettings,
    interface=dlrm_interface,
    write=write_dlrm,
)
