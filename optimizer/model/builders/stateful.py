"""Two stateful reference models, in Python: a running sum, and a gated recurrent unit (GRU, Cho et al. 2014).

    accumulator   oldest   input FP32 [16] -> output FP32 [16], the sum of the inputs of the sequence so far
    gru           direct   input FP32 [64] -> output FP32 [8], after one step of the recurrent layer

Each model keeps the states of its sequences itself, by the control input CORRID. Triton's implicit state needs a
native backend, and the backends of the embedded server are based on Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from optimizer.config.model_config_proto import TYPE_UINT64, ModelConfig, ModelSequenceBatching
from optimizer.model.builders.builder import (
    Builder,
    BuilderSettings,
    Draft,
    Interface,
    ModelFacts,
    Samples,
    python_config,
)
from optimizer.model.builders.onnx_graph import Graph
from optimizer.model.builders.request_data import write_input_data
from optimizer.model.input_data import TensorSpec

ACCUMULATOR, GRU = "accumulator", "gru"
ACCUMULATOR_WIDTH = 16
INPUT_WIDTH, OUTPUT_WIDTH = 64, 8  # of the GRU
CANDIDATE_SEQUENCES = 64
IDLE_MICROSECONDS = 5_000_000
SUM_INTERFACE = Interface(
    (TensorSpec("input", "FP32", (ACCUMULATOR_WIDTH,)),), (TensorSpec("output", "FP32", (ACCUMULATOR_WIDTH,)),)
)
GRU_INTERFACE = Interface(
    (TensorSpec("input", "FP32", (INPUT_WIDTH,)),), (TensorSpec("output", "FP32", (OUTPUT_WIDTH,)),)
)


class AccumulatorSettings(BuilderSettings):
    """FP32 ``input`` [16] -> FP32 ``output`` [16]; ``samples``: entries of request data."""

    samples: Samples = 251


class GruSettings(BuilderSettings):
    """FP32 ``input`` [64] -> a GRU of ``hidden_width`` -> FP32 ``output`` [8]; ``samples``: request data."""

    hidden_width: int = Field(default=256, ge=1, le=4096)
    samples: Samples = 251


def write_accumulator(settings: AccumulatorSettings, draft: Draft) -> ModelFacts:
    """Write the model and its request data."""
    draft.on_progress("building accumulator: a running sum of each sequence")
    (requests,) = settings.generators(1)
    draft.copy_model("accumulator.py")
    samples = requests.standard_normal((settings.samples, ACCUMULATOR_WIDTH), dtype=np.float32)
    write_input_data(draft.input_data, {"input": samples})
    return {"precision": "fp32", "parameters": 0}


def write_gru(settings: GruSettings, draft: Draft) -> ModelFacts:
    """Write the model, the ONNX graph of one step and request data."""
    draft.on_progress(f"building gru: a recurrent layer of {settings.hidden_width}")
    weights, requests = settings.generators(2)
    draft.copy_model("gru.py")
    graph = draw_gru(settings.hidden_width, weights)
    graph.save(draft.version / "step.onnx")
    samples = requests.standard_normal((settings.samples, INPUT_WIDTH), dtype=np.float32)
    write_input_data(draft.input_data, {"input": samples})
    return {"precision": "fp32", "parameters": graph.parameters}


def draw_gru(hidden: int, rng: np.random.Generator) -> Graph:
    """Return the graph of one step: ``input``, ``state`` [batch, hidden] -> ``output``, ``next_state``."""

    def weight(name: str, *shape: int) -> str:
        return graph.weight(name, (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    graph = Graph(GRU)
    x = graph.input("input", np.float32, [INPUT_WIDTH])
    state = graph.input("state", np.float32, [hidden])
    axis = graph.constant("axis", np.array([0], np.int64))
    step = graph.op("Unsqueeze", x, axis, to="step")
    before = graph.op("Unsqueeze", state, axis, to="before")
    layer = [weight("gru.input", 1, 3 * hidden, INPUT_WIDTH), weight("gru.recurrent", 1, 3 * hidden, hidden)]
    bias = graph.weight("gru.bias", np.zeros((1, 6 * hidden), np.float32))
    graph.op("GRU", step, *layer, bias, "", before, to="outputs", hidden_size=hidden)  # [1, 1, batch, hidden]
    both = graph.constant("both", np.array([0, 1], np.int64))
    graph.op("Squeeze", "outputs", both, to="next_state")
    width = weight("output.weight", hidden, OUTPUT_WIDTH)
    graph.op("MatMul", "next_state", width, to="output")
    graph.output("output", np.float32, [OUTPUT_WIDTH])
    graph.output("next_state", np.float32, [hidden])
    return graph


def _sequence_configs(
    name: str, interface: Interface, strategy: ModelSequenceBatching, max_batch_size: int
) -> Sequence[ModelConfig]:
    """Return the configuration of a Python model on a CPU with the control inputs START, END, READY and CORRID."""
    config = python_config(name, interface, max_batch_size)
    config.sequence_batching.CopyFrom(strategy)
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = IDLE_MICROSECONDS
    control = ModelSequenceBatching.Control
    for signal in ("START", "END", "READY"):
        flag = batching.control_input.add(name=signal).control.add(
            kind=control.Kind.Value(f"CONTROL_SEQUENCE_{signal}")
        )
        flag.int32_false_true.extend([0, 1])
    batching.control_input.add(name="CORRID").control.add(kind=control.CONTROL_SEQUENCE_CORRID, data_type=TYPE_UINT64)
    return [config]


OLDEST = ModelSequenceBatching(
    oldest=ModelSequenceBatching.StrategyOldest(max_candidate_sequences=CANDIDATE_SEQUENCES)
)
DIRECT = ModelSequenceBatching(direct=ModelSequenceBatching.StrategyDirect())
ACCUMULATOR_BUILDER = Builder(
    name=ACCUMULATOR,
    version=1,
    source="tritune's own",
    settings=AccumulatorSettings,
    interface=lambda _: SUM_INTERFACE,
    write=write_accumulator,
    configs=lambda max_batch_size, _: _sequence_configs(ACCUMULATOR, SUM_INTERFACE, OLDEST, max_batch_size),
)
GRU_BUILDER = Builder(
    name=GRU,
    version=1,
    source="tritune's own",
    settings=GruSettings,
    interface=lambda _: GRU_INTERFACE,
    write=write_gru,
    configs=lambda max_batch_size, _: _sequence_configs(GRU, GRU_INTERFACE, DIRECT, max_batch_size),
)
