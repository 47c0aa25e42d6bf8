"""Test the stateful reference models without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from optimizer.model.builders import build
from optimizer.model.builders.stateful import draw_gru

HIDDEN = 12


@pytest.mark.parametrize(("name", "strategy"), [("accumulator", "oldest"), ("gru", "direct")])
def test_the_configuration_has_all_control_inputs(tmp_path: Path, name: str, strategy: str) -> None:
    source = build(name, {}, cache=tmp_path, max_batch_size=4, kind="KIND_CPU", say=print)
    assert source.is_stateful
    batching = source.config.sequence_batching
    assert batching.WhichOneof("strategy_choice") == strategy
    assert [control.name for control in batching.control_input] == ["START", "END", "READY", "CORRID"]
    assert (source.repository / name / "1" / "model.py").exists()


def test_a_step_of_the_graph_computes_a_gru(tmp_path: Path) -> None:
    graph = draw_gru(HIDDEN, np.random.default_rng(1))
    graph.save(tmp_path / "step.onnx")
    model = onnx.load(str(tmp_path / "step.onnx"))
    onnx.checker.check_model(model, full_check=True)
    w = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    rng = np.random.default_rng(2)
    x, h = (rng.standard_normal((3, width)).astype(np.float32) for width in (64, HIDDEN))
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"), providers=["CPUExecutionProvider"])
    output, after = session.run(["output", "next_state"], {"input": x, "state": h})

    def sigmoid(values: Any) -> Any:
        return 1 / (1 + np.exp(-values))

    wz, wr, wh = np.split(w["gru.input"][0], 3)
    rz, rr, rh = np.split(w["gru.recurrent"][0], 3)
    z, r = sigmoid(x @ wz.T + h @ rz.T), sigmoid(x @ wr.T + h @ rr.T)
    expected = (1 - z) * np.tanh(x @ wh.T + (r * h) @ rh.T) + z * h
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output, expected @ w["output.weight"], rtol=1e-4, atol=1e-5)
