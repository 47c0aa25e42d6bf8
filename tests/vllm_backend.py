"""A stand-in for Triton's vLLM backend: a Python-based backend with the same inputs, outputs and parameter file.

Tests copy this file to ``backends/vllm/model.py`` of a tritonserver. It reads the engine arguments from the file
``model.json`` in the version folder, streams one word per token with continuous batching, and exports metrics under
vLLM's names. It runs no language model: an iteration sleeps for a time that depends on the tokens in it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

ENGINE_ARGUMENTS = {
    "model": "stand-in",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "enable_chunked_prefill": True,
    "scheduling_policy": "fcfs",
    "disable_log_stats": False,
}
CACHE_TOKENS = 20_000  # in the KV cache at a memory utilization of 1
# Times of an iteration, a prompt token and a sequence. An iteration takes longer than its responses take the CPU.
STEP_SECONDS, TOKEN_SECONDS, SEQUENCE_SECONDS = 0.008, 0.00001, 0.0001
DEFAULT_TOKENS = 16  # vLLM's own default of max_tokens

FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens")
OUTPUTS = {"text_output": "TYPE_STRING", "finish_reason": "TYPE_STRING", "num_output_tokens": "TYPE_UINT32"}


@dataclass
class Sequence:
    """A request in the engine: its sender, its lengths in tokens, and the rest of its prompt to compute."""

    sender: Any
    streams: bool
    counts_tokens: bool
    prompt_tokens: int
    max_tokens: int
    prefill_left: int
    words: list[str] = field(default_factory=list)


class Metrics:
    """The metrics of the engine under vLLM's names, with the labels that the backend gives them."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._families: list[Any] = []
        kinds = pb_utils.MetricFamily
        self.cache_usage = self._add("vllm:gpu_cache_usage_perc", kinds.GAUGE, labels)
        self.running = self._add("vllm:num_requests_running", kinds.GAUGE, labels)
        self.waiting = self._add("vllm:num_requests_waiting", kinds.GAUGE, labels)
        self.prompt_tokens = self._add("vllm:prompt_tokens_total", kinds.COUNTER, labels)
        self.generation_tokens = self._add("vllm:generation_tokens_total", kinds.COUNTER, labels)
        self.preemptions = self._add("vllm:num_preemptions_total", kinds.COUNTER, labels)

    def _add(self, name: str, kind: Any, labels: dict[str, str]) -> Any:
        family = pb_utils.MetricFamily(name=name, description=name, kind=kind)
        self._families.append(family)  # a metric ends with its family
        return family.Metric(labels=labels)


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):  # type: ignore[no-untyped-def]
        inputs = {"text_input": "TYPE_STRING", "sampling_parameters": "TYPE_STRING"}
        inputs |= dict.fromkeys((*FLAGS, "return_num_output_tokens"), "TYPE_BOOL")
        written_config = config.as_dict()
        for name, kind in inputs.items():
            if name not in [tensor["name"] for tensor in written_config["input"]]:
                optional = {} if name == "text_input" else {"optional": True}
                config.add_input({"name": name, "data_type": kind, "dims": [1], **optional})
        for name, kind in OUTPUTS.items():
            if name not in [tensor["name"] for tensor in written_config["output"]]:
                config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        file = Path(args["model_repository"], args["model_version"], "model.json")
        engine_arguments = json.loads(file.read_text())
        if unknown := engine_arguments.keys() - ENGINE_ARGUMENTS.keys():
            raise TypeError(f"AsyncEngineArgs got an unexpected keyword argument {sorted(unknown)[0]!r}")
        self.arguments = ENGINE_ARGUMENTS | engine_arguments
        self.capacity = int(CACHE_TOKENS * self.arguments["gpu_memory_utilization"])
        parameters = json.loads(args["model_config"])["parameters"]
        reports = parameters.get("REPORT_CUSTOM_METRICS", {}).get("string_value", "").lower() == "true"
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self.metrics = Metrics(labels) if reports and not self.arguments["disable_log_stats"] else None
        self.arrived: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self.engine = threading.Thread(target=self.run)
        self.engine.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            text = self.value(request, "text_input", b"").decode()
            sampling = json.loads(self.value(request, "sampling_parameters", b"{}"))
            length = len(text.split())
            self.arrived.put(
                Sequence(
                    request.get_response_sender(),
                    bool(self.value(request, "stream", False)),
                    bool(self.value(request, "return_num_output_tokens", False)),
                    length,
                    int(sampling.get("max_tokens", DEFAULT_TOKENS)),
                    length,
                )
            )

    def finalize(self) -> None:
        self.arrived.put(None)
        self.engine.join()

    @staticmethod
    def value(request: Any, name: str, default: Any) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().reshape(-1)[0]

    def run(self) -> None:
        """Run iterations: each computes prompt tokens up to the budget, and one token of each decoding sequence."""
        waiting: list[Sequence] = []
        running: list[Sequence] = []
        while True:
            while not self.arrived.empty() or not (waiting or running):
                arrived = self.arrived.get()
                if arrived is None:
                    return
                waiting.append(arrived)
            while waiting and len(running) < self.arguments["max_num_seqs"]:
                if running and self.used(running) + waiting[0].prompt_tokens >= self.capacity:
                    break
                running.append(waiting.pop(0))
            self.iterate(running)
            running = [sequence for sequence in running if len(sequence.words) < sequence.max_tokens]
            if self.metrics is not None:
                self.metrics.cache_usage.set(min(1.0, self.used(running) / self.capacity))
                self.metrics.running.set(len(running))
                self.metrics.waiting.set(len(waiting))

    @staticmethod
    def used(running: list[Sequence]) -> int:
        return sum(sequence.prompt_tokens + len(sequence.words) for sequence in running)

    def iterate(self, running: list[Sequence]) -> None:
        decoding = [sequence for sequence in running if not sequence.prefill_left]
        budget = max(0, self.arguments["max_num_batched_tokens"] - len(decoding))
        prompts = 0
        for sequence in running:
            if sequence.prefill_left:
                chunk = min(sequence.prefill_left, budget - prompts)
                sequence.prefill_left -= chunk
                prompts += chunk
        time.sleep(STEP_SECONDS + prompts * TOKEN_SECONDS + len(decoding) * SEQUENCE_SECONDS)
        done = [sequence for sequence in running if not sequence.prefill_left]
        for sequence in done:
            self.add_token(sequence)
        if self.metrics is not None:
            self.metrics.prompt_tokens.increment(prompts)
            self.metrics.generation_tokens.increment(len(done))

    def add_token(self, sequence: Sequence) -> None:
        sequence.words.append(f" w{len(sequence.words)}")
        finished = len(sequence.words) == sequence.max_tokens
        if not (sequence.streams or finished):
            return
        text, count = (sequence.words[-1], 1) if sequence.streams else ("".join(sequence.words), len(sequence.words))
        tensors = [pb_utils.Tensor("text_output", np.array([text], dtype=np.object_))]
        if sequence.counts_tokens:
            tensors.append(pb_utils.Tensor("num_output_tokens", np.array([count], dtype=np.uint32)))
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if finished else 0
        sequence.sender.send(pb_utils.InferenceResponse(tensors), flags=flags)
