"""DLRM for the Criteo 1 TB click logs, as the deployment guide in NVIDIA's DeepLearningExamples serves it.

``input__0`` [13] dense features -> bottom MLP 512-256-128, ReLU on each;
``input__1`` INT64 [26] categorical features -> one row of 128 each out of one joint embedding table;
the dot products of each pair of these 27 vectors (351), after the bottom MLP's output (128) and before one
zero of padding: 480 values -> top MLP 1024-1024-512-256, ReLU on each, -> ``output__0`` [1], a logit.

With ``precision: fp16`` the weights, the table, ``input__0`` and ``output__0`` are FP16, as in a model that
was halved as a whole; on a CPU onnxruntime then computes in FP32 between casts.

Weights are random: what a request costs depends on shapes and on which rows it touches, not on the values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from optimizer.models.builder import Builder, Draft, Facts, Interface, Say, Settings, Tensor
from optimizer.models.dlrm_requests import SAMPLES, dense_features, table_indices
from optimizer.models.input_data import write_input_data
from optimizer.models.onnx_graph import Graph, Layers

# Distinct values of the 26 categorical features where values seen fewer than 15 times are merged into one
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
# Standard deviation of an embedding value. It makes that of two rows' dot product 1: √128 · std² = 1.
EMBEDDING_STD = EMBEDDING_DIM**-0.25
CHUNK_ROWS = 1 << 16  # 32 MiB in FP32: what building holds in memory of a table of any size

DType: TypeAlias = np.dtype[Any]


class DlrmSettings(Settings):
    """``max_rows_per_table`` caps each of the 26 tables, which share one matrix. None: no cap, 16.7 GB.

    A feature's index is taken modulo the rows of its table inside the model. So any INT64 is valid, and the
    same requests suit every cap: what a cap does to rare values is feature hashing, as with the reference's
    ``--hash_indices``. ``samples`` is how many samples the request data holds, see ``dlrm_requests``.
    """

    max_rows_per_table: int | None = Field(default=100_000, ge=1)
    precision: Literal["fp32", "fp16"] = "fp32"
    samples: int = Field(default=SAMPLES, ge=1)
    seed: int = Field(default=0, ge=0)


def table_rows(max_rows_per_table: int | None) -> tuple[int, ...]:
    """Rows of each of the 26 tables."""
    return tuple(min(n, max_rows_per_table or n) for n in CARDINALITIES)


def interface(settings: DlrmSettings) -> Interface:
    floats = settings.precision.upper()
    return Interface(
        inputs=(Tensor("input__0", floats, (DENSE_FEATURES,)), Tensor("input__1", "INT64", (len(CARDINALITIES),))),
        outputs=(Tensor("output__0", floats, (1,)),),
    )


def write(settings: DlrmSettings, draft: Draft, say: Say) -> Facts:
    rows = table_rows(settings.max_rows_per_table)
    dtype = np.dtype(np.float16 if settings.precision == "fp16" else np.float32)
    table_bytes = sum(rows) * EMBEDDING_DIM * dtype.itemsize
    say(f"building dlrm: {sum(rows) / 1e6:.2f} M rows, {table_bytes / 1e6:.0f} MB")
    mlps, table, requests = (np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(3))

    table_file = draft.version / "embedding.bin"
    _write_table(table_file, sum(rows), dtype, table, say)
    graph = _graph(rows, dtype, table_file, mlps)
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
        "seed": settings.seed,
    }


def _write_table(path: Path, rows: int, dtype: DType, rng: np.random.Generator, say: Say) -> None:
    """Uniform values with mean 0. Written in chunks, since the whole may be far larger than memory."""
    width = np.float32(EMBEDDING_STD * 12**0.5)  # width w of a uniform distribution: std w/√12
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
                say(f"building dlrm: {done * 100 // rows} % of the embedding table")


def _graph(rows: tuple[int, ...], dtype: DType, table_file: Path, rng: np.random.Generator) -> Graph:
    graph = Graph("dlrm")
    features = graph.input("input__0", dtype, [DENSE_FEATURES])
    indices = graph.input("input__1", np.int64, [len(rows)])

    layers = Layers(graph, dtype, rng)
    bottom = layers.mlp(features, DENSE_FEATURES, BOTTOM, name="bottom", relu_at_end=True, to="bottom")

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
    layers.mlp(padded, EMBEDDING_DIM + PAIRS + 1, TOP, name="top", relu_at_end=False, to="output__0")
    graph.output("output__0", dtype, [1])
    return graph


def _lower_triangle() -> npt.NDArray[np.int64]:
    """Places of (i, j), j < i, in a flattened 27×27 matrix, row by row."""
    i, j = np.tril_indices(VECTORS, -1)
    return (i * VECTORS + j).astype(np.int64)


BUILDER = Builder(
    name="dlrm",
    version=1,
    source="NVIDIA DeepLearningExamples, PyTorch/Recommendation/DLRM",
    settings=DlrmSettings,
    interface=interface,
    write=write,
)
