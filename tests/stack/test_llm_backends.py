"""A model of the vLLM backend on a user's server. A stand-in for the backend serves it: tests/vllm_backend.py."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectives.metrics import Measurement
from optimizer.config.backends import KV_CACHE_SHARE
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import ModelRefused
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.local_target import LocalTarget, find_installation
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.engine_telemetry import EngineTelemetry
from optimizer.machine.hardware import Hardware
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.model.repository import read_source
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task, prepare_task
from tests.repositories import SLEEPER_CONFIG, skip_without_python_models, stored
from tests.user_installation import write_installation

BACKEND = Path(__file__).parents[1] / "vllm_backend.py"
CONFIG = """\
backend: "vllm"
instance_group [{ count: 1 kind: KIND_MODEL }]
parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }
"""
PROFILE = """\
model: {repository: models, name: llm}
request: {ranges: {stream: 1..1}}
tokens:
  prompt: 8..32
  output: 16
  prompt_input: text_input
  output_input: sampling_parameters
  output_text: '{"max_tokens": {tokens}, "ignore_eos": true}'
load: {max_concurrency: 16}
space:
  max_batch_size: [0]
  model_json: {max_num_seqs: [1, 8]}
"""
LAPTOP = Hardware(gpus=(), cpu="a CPU", cpu_count=2, memory_bytes=8 << 30)
LOAD = LoadPoint(1, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the profile, the repository and the server."""
    skip_without_python_models()
    folder = tmp_path_factory.mktemp("llm")
    write_installation(folder / "triton", runtime.ensure(print))
    backend = folder / "triton" / "backends" / "vllm"
    backend.mkdir()
    shutil.copy(BACKEND, backend / "model.py")
    version = folder / "models" / "llm" / "1"
    version.mkdir(parents=True)
    version.parent.joinpath("config.pbtxt").write_text(CONFIG)
    version.joinpath("model.json").write_text(json.dumps({"model": "stand-in", "max_num_seqs": 1}))
    folder.joinpath("llm.yaml").write_text(PROFILE)
    return folder


@pytest.fixture(scope="module")
def task(folder: Path) -> Task:
    program = str(folder / "triton" / "bin" / "tritonserver")
    backends = str(folder / "triton" / "backends")
    options = RunOptions(str(folder / "llm.yaml"), target="local", tritonserver=program, backend_directory=backends)
    return prepare_task(options, LAPTOP, print)


@pytest.fixture(scope="module")
def target(folder: Path, task: Task) -> Iterator[LocalTarget]:
    installation = find_installation(
        str(folder / "triton" / "bin" / "tritonserver"), str(folder / "triton" / "backends")
    )
    settings = TargetSettings(folder / "tritonserver.log")
    with contextlib.closing(LocalTarget(task.source, installation, settings)) as target:
        yield target


def sequences(count: int) -> Candidate:
    return Candidate(0, fields=(("model_json.max_num_seqs", count),))


def measure(endpoint: Endpoint, task: Task, tmp_path: Path) -> tuple[Measurement, ResourceUsage]:
    generator = ClosedLoopGenerator(log=tmp_path / "client.log", input_data=task.input_data, is_streaming=True)
    with EngineTelemetry(ProcessTelemetry()).record(endpoint) as usage:
        measured = generator.measure(endpoint, LOAD, 2.0)
    return measured, usage


def test_the_engine_is_tuned_and_its_metrics_are_read(target: LocalTarget, task: Task, tmp_path: Path) -> None:
    """One sequence at a time makes the other seven requests wait for their first token."""
    assert task.baseline.model_json == {"max_num_seqs": 1}
    assert not task.problem.is_simulated
    with target.deploy(sequences(1)) as endpoint:
        narrow, _ = measure(endpoint, task, tmp_path)
    with target.deploy(sequences(8)) as endpoint:
        wide, usage = measure(endpoint, task, tmp_path)
    assert narrow.reason == wide.reason == ""
    assert narrow.output_tokens_per_sec is not None
    assert wide.output_tokens_per_sec is not None
    assert narrow.ttft_p50_ms is not None
    assert wide.ttft_p50_ms is not None
    assert wide.output_tokens_per_sec > 2 * narrow.output_tokens_per_sec
    assert wide.ttft_p50_ms < narrow.ttft_p50_ms / 2
    assert usage.kv_cache_utilization is not None
    assert 0 < usage.kv_cache_utilization < 0.1  # 8 sequences of up to 48 tokens, of 18,000
    # one response is one token: the client and the engine count the same, at times that differ a little
    assert usage.engine_tokens_per_sec == pytest.approx(wide.output_tokens_per_sec, rel=0.3)
    assert usage.engine_preemptions == 0


def test_an_argument_that_the_engine_refuses_is_named(target: LocalTarget) -> None:
    unknown = Candidate(0, fields=(("model_json.max_num_sequences", 8),))
    with pytest.raises(ModelRefused, match="unexpected keyword argument 'max_num_sequences'"), target.deploy(unknown):
        pass


def test_a_remote_server_gets_the_file_and_keeps_its_own(target: LocalTarget, task: Task, tmp_path: Path) -> None:
    with target.deploy(sequences(1)) as endpoint:
        connection = Connection(endpoint.grpc)
        remote = RemoteTarget(connection, task.source, state_folder=tmp_path, metrics=endpoint.metrics)
        with contextlib.closing(remote), remote.deploy(sequences(8)) as reached:
            wide, usage = measure(reached, task, tmp_path)
        restored, _ = measure(endpoint, task, tmp_path)
    assert usage.kv_cache_utilization
    assert wide.output_tokens_per_sec is not None
    assert restored.output_tokens_per_sec is not None
    assert wide.ttft_p50_ms is not None
    assert restored.ttft_p50_ms is not None
    assert wide.output_tokens_per_sec > 2 * restored.output_tokens_per_sec  # one sequence at a time again
    assert wide.ttft_p50_ms < restored.ttft_p50_ms / 2, "the others wait for it"


NOTING = """\
import json

class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        if parameters["refuses"]["string_value"] == "yes":
            raise ValueError("refused")
        self.log = parameters["log"]["string_value"]
        self.note("loaded")

    def note(self, event):
        with open(self.log, "a") as file:
            file.write(event + " ")

    def finalize(self):
        self.note("unloaded")

    def execute(self, requests):
        return []
"""


def test_an_engine_is_unloaded_also_after_another_model_was_refused(tmp_path: Path) -> None:
    """The memory of a GPU does not hold the old engine and the new one."""
    skip_without_python_models()
    for name in ("engine", "caller"):
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        version.joinpath("model.py").write_text(NOTING)
        values = {"refuses": "no", "log": str(tmp_path / name)}
        if name == "engine":
            values[KV_CACHE_SHARE] = "0.9"
        parameters = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
        ]
        version.parent.joinpath("config.pbtxt").write_text(SLEEPER_CONFIG + "".join(parameters))
    source = read_source(stored(tmp_path / "models"), "caller", composing=("engine",), batcher="engine")

    def candidate(share: str, refuses: str) -> Candidate:
        caller = ("caller/parameters.refuses.string_value", refuses)
        return Candidate(8, fields=(caller, (f"parameters.{KV_CACHE_SHARE}.string_value", share)))

    with contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "log"))) as target:
        with pytest.raises(ModelRefused, match="refused"), target.deploy(candidate("0.8", "yes")):
            pass
        with target.deploy(candidate("0.7", "no")):
            pass
        with target.deploy(candidate("0.6", "no")):
            events = ["loaded", "unloaded", "loaded", "unloaded", "loaded"]
            assert (tmp_path / "engine").read_text().split() == events
