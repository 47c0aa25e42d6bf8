"""Triton repositories for tests: ONNX models with known outputs, a model with a constant service time, and one that
fails as its configuration says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from optimizer.config.model_source import ModelSource
from optimizer.deploy import runtime
from optimizer.model.repository import read_repository_model

Dims = Sequence[str | int]
STEADY_PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 4}
space:
  max_queue_delay_microseconds: [off, 0, 1000]
  instance_group_count: [1]
"""


def skip_without_python_models() -> None:
    """Skip the test if the server of this Python serves no models in Python."""
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")


def stored(repository: Path) -> Callable[[str], ModelSource]:
    """Return a function that reads a model of ``repository``."""
    return partial(read_repository_model, repository, gpu=False)


def onnx_model(
    nodes: Sequence[NodeProto], inputs: Mapping[str, tuple[int, Dims]], outputs: Mapping[str, tuple[int, Dims]]
) -> ModelProto:
    """Return an ONNX model of ``nodes`` whose inputs and outputs are (type, dims) by name."""

    def tensors(named: Mapping[str, tuple[int, Dims]]) -> list[object]:
        return [helper.make_tensor_value_info(name, kind, list(dims)) for name, (kind, dims) in named.items()]

    graph = helper.make_graph(list(nodes), "test", tensors(inputs), tensors(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def doubler(kind: int = TensorProto.FLOAT, dims: Dims = ("batch", 4)) -> ModelProto:
    """Return a model ``x`` -> ``y`` = x + x."""
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return onnx_model([node], {"x": (kind, dims)}, {"y": (kind, dims)})


def write_model(repository: Path, name: str, config: str, model: ModelProto | None) -> Path:
    """Write the model folder ``repository/name``; without ``model`` it has no version."""
    folder = repository / name
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(textwrap.dedent(config))
    if model is not None:
        (folder / "1").mkdir()
        (folder / "1" / "model.onnx").write_bytes(serialized(model))
    return folder


def serialized(model: ModelProto) -> bytes:
    return bytes(model.SerializeToString())


SLEEPER_CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
instance_group { count: 1 kind: KIND_CPU }
"""


def write_python_model(repository: Path, name: str, program: str, config: str = SLEEPER_CONFIG) -> Path:
    """Write the Python model ``name`` with the code ``program``; return its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(program)
    return folder


def write_sleeper(repository: Path, milliseconds: float, loading_seconds: float = 0.0) -> Path:
    """Write a model that takes the same time for every batch, however busy the machine is."""
    return write_python_model(repository, "sleeper", sleeper_program(milliseconds, loading_seconds))


def write_steady(folder: Path) -> None:
    """Write the profile ``steady.yaml`` of a model whose batches all take 8 ms."""
    skip_without_python_models()
    write_sleeper(folder / "models", milliseconds=8)
    (folder / "steady.yaml").write_text(STEADY_PROFILE)


def sleeper_program(milliseconds: float, loading_seconds: float = 0.0) -> str:
    program = f"""\
        import time

        import triton_python_backend_utils as pb_utils


        class TritonPythonModel:
            def initialize(self, args):
                time.sleep({loading_seconds})

            def execute(self, requests):
                time.sleep({milliseconds / 1000})
                answers = []
                for request in requests:
                    x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
                return answers
        """
    return textwrap.dedent(program)


FAULT = "parameters.fault.string_value"  # the field of the configuration that selects the failure
FAULTY_BATCH = 3  # samples
FAULTY_CONFIG = f"""\
{SLEEPER_CONFIG}parameters {{ key: "fault" value {{ string_value: "none" }} }}
"""
FAULTY_PROGRAM = f"""\
import contextlib
import ctypes
import json
import os
import pathlib
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def fail(how):
    if how == "raise":
        raise ValueError("no such\\nweights")
    if how == "hang":
        time.sleep(600)
    if how == "take long":
        time.sleep(0.5)
    if how == "exit":
        os._exit(1)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill the server" or (how == "kill a server that serves" and has_sibling()):
        os.kill(os.getppid(), signal.SIGKILL)
    if how == "allocate":
        np.empty(2**33, np.uint8)  # the pages are not touched: only a limit on the process refuses it


def has_sibling():
    # whether the server has another model process: that of the model which this one replaces
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and stat.parent.name != str(os.getpid()):
                return True
    return False


class TritonPythonModel:
    def initialize(self, args):
        fault = json.loads(args["model_config"])["parameters"]["fault"]["string_value"]
        self.when, _, self.how = fault.partition(": ")
        if self.when == "loading":
            fail(self.how)

    def execute(self, requests):
        time.sleep(0.01)
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        if self.when == "executing" and sum(len(x) for x in inputs) == {FAULTY_BATCH}:
            fail(self.how)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in inputs]
"""


def write_faulty(repository: Path) -> Path:
    """Write a model that fails as ``FAULT`` says: ``loading: HOW``, or ``executing: HOW`` (FAULTY_BATCH samples)."""
    return write_python_model(repository, "faulty", FAULTY_PROGRAM, FAULTY_CONFIG)


ENSEMBLE_CONFIG = """\
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step {
    model_name: "first" model_version: -1
    input_map { key: "x" value: "X" } output_map { key: "y" value: "between" }
  }
  step {
    model_name: "second" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "Y" }
  }
}
"""
BLS_PROGRAM = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "x")) for request in requests]

    def answer(self, x):
        for name in ("first", "second"):
            request = pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=[x])
            answer = request.exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            x = pb_utils.Tensor("x", pb_utils.get_output_tensor_by_name(answer, "y").as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])
"""


def write_ensemble(repository: Path, milliseconds: float) -> Path:
    """Write ``chain``: ``first``, which takes a fifth of ``milliseconds`` per batch, then ``second``."""
    for name, takes in (("first", milliseconds / 5), ("second", milliseconds)):
        write_python_model(repository, name, sleeper_program(takes))
    folder = repository / "chain"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(ENSEMBLE_CONFIG)
    return folder


def write_bls(repository: Path, milliseconds: float) -> Path:
    """Write ``caller``, a Python model that calls ``first`` and ``second`` of ``write_ensemble``."""
    write_ensemble(repository, milliseconds)
    return write_python_model(repository, "caller", BLS_PROGRAM)


STREAMER_CONFIG = """\
backend: "python"
max_batch_size: 8
model_transaction_policy { decoupled: true }
input { name: "count" data_type: TYPE_INT32 dims: 1 }
output { name: "numbers" data_type: TYPE_INT32 dims: 2 }
instance_group { count: 1 kind: KIND_CPU }
"""
STREAMER_PROGRAM = """\
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.respond, args=(request, request.get_response_sender())).start()

    def respond(self, request, sender):
        count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0, 0])
        for number in range(abs(count)):
            time.sleep(INTERVAL)
            numbers = np.array([[number, count]], np.int32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("numbers", numbers)]))
        if count < 0:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no response after {-count}")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_streamer(repository: Path, milliseconds: float) -> Path:
    """Write a decoupled model that sends ``count`` responses, one every ``milliseconds``.

    A response is (its number, count). After a negative count of responses the request fails.
    """
    program = STREAMER_PROGRAM.replace("INTERVAL", str(milliseconds / 1000))
    return write_python_model(repository, "streamer", program, STREAMER_CONFIG)


STATES = "parameters.states.string_value"  # the field that selects how the model keeps its states
SUMS_CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "states" value { string_value: "own" } }
parameters { key: "log" value { string_value: "LOG" } }
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  STRATEGY
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
}
"""
SUMS_PROGRAM = """\
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.states = parameters["states"]["string_value"]
        self.log = open(parameters["log"]["string_value"], "a", buffering=1)
        self.sums = {}

    def execute(self, requests):
        time.sleep(0.001)  # so that steps of other sequences queue
        return [self.answer(request, place) for place, request in enumerate(requests)]

    def answer(self, request, place):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        start, end, ready, sequence = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0])
            for name in ("START", "END", "READY", "CORRID")
        )
        if not ready:
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
        key = {"own": sequence, "one for all": 0, "by place in the batch": place}[self.states]
        y = x if start else self.sums.get(key, np.zeros_like(x)) + x
        self.sums[key] = y
        self.log.write(f"{sequence} {start} {end} {x.item():g} {y.item():g}\\n")
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y.astype(np.float32))])
"""


def write_sums(repository: Path, log: Path, strategy: str = "oldest { max_candidate_sequences: 16 }") -> Path:
    """Write ``sums``, a stateful model whose output is the sum of its sequence; ``STATES`` can make it mix them up.

    It writes a line for each step to ``log``: sequence, start, end, input and output.
    """
    config = SUMS_CONFIG.replace("LOG", str(log)).replace("STRATEGY", strategy)
    return write_python_model(repository, "sums", SUMS_PROGRAM, config)


READER_PROGRAM = """\
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        content = json.loads(Path(args["model_repository"], args["model_version"], "model.json").read_text())
        if content["limit"] < 0:
            raise ValueError("limit is negative")
        self.limit = np.float32(content["limit"])

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full_like(x, self.limit))]) for x in inputs]
"""


def write_reader(repository: Path) -> Path:
    """Write ``reader``, whose outputs are the value of the key ``limit`` in model.json: at first 64."""
    folder = write_python_model(repository, "reader", READER_PROGRAM)
    (folder / "1" / "model.json").write_text('{"limit": 64, "name": "kept"}\n')
    return folder


WIDE_VALUES = 262_144  # FP32 values of a sample of ``wide``: 1 MiB
WIDE_CONFIG = f"""\
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: {WIDE_VALUES} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {WIDE_VALUES} }}
instance_group {{ count: 1 kind: KIND_CPU }}
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
"""


def write_wide(repository: Path) -> Path:
    """Write ``wide``, whose output is twice its input of 1 MiB, so that copies take most of the time.

    It has one thread, because several wait for each request in busy loops.
    """
    return write_model(repository, "wide", WIDE_CONFIG, doubler(dims=("batch", WIDE_VALUES)))
