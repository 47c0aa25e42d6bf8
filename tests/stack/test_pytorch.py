"""The project's own PyTorch backend on a real server: its outputs equal PyTorch's. And a model of the GPU studies.

Only where torch is installed: ``pip install -e '.[test,pytorch]'``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from optimizer.config import model_config
from optimizer.core.errors import DeploymentError
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import Run, Sandbox, run_tune
from tests.repositories import write_model

torch: Any = pytest.importorskip("torch", reason="torch is not installed (the extra pytorch)")
Tensor: TypeAlias = torch.Tensor

KINDS = ("FP32", "FP64", "FP16", "INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL")
CONFIG = """\
platform: "pytorch_libtorch"
max_batch_size: 16
input [ { name: "ids" data_type: TYPE_INT64 dims: 3 }, { name: "x" data_type: TYPE_FP32 dims: 3 } ]
output [ { name: "OUTPUT__1" data_type: TYPE_FP32 dims: 3 }, { name: "OUTPUT__0" data_type: TYPE_INT64 dims: 3 } ]
instance_group { count: 1 kind: KIND_CPU }
"""
BY_INDEX = CONFIG.replace('platform: "pytorch_libtorch"', 'backend: "pytorch"').replace('"ids"', '"INPUT__1"')
EXPORTED = BY_INDEX.replace('"x"', '"INPUT__0"')


class Two(torch.nn.Module):  # type: ignore[misc]
    """Arguments and outputs are in another order than in the configurations."""

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids + 1, x * 2 + ids


class Refuses(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids + 1, x[7] * 2


class Dictionary(torch.nn.Module):  # type: ignore[misc]
    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["ids"] + tensors["x"]


class Flip(torch.nn.Module):  # type: ignore[misc]
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(item.flip(1) for item in tensors)


def save_script(folder: Path, module: Any) -> None:
    (folder / "1").mkdir()
    torch.jit.save(torch.jit.script(module), folder / "1" / "model.pt")


def save_export(folder: Path) -> None:
    (folder / "1").mkdir()
    samples = torch.export.Dim("samples", min=1, max=16)
    tensors = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    shapes = ({0: samples}, {0: samples})
    torch.export.save(torch.export.export(Two(), tensors, dynamic_shapes=shapes), folder / "1" / "model.pt2")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[InferenceServerClient]:
    """Return the model ``repository/m`` below ``folder`` as configured."""
    source = read_repository_model(folder / "repository", "m", gpu=False)
    target = EmbeddedTarget(source, TargetSettings(folder / "tritonserver.log"))
    with (
        contextlib.closing(target),
        target.deploy(model_config.candidate_of(source.config)) as endpoint,
        InferenceServerClient(endpoint.grpc) as client,
    ):
        yield client


def infer(client: InferenceServerClient, feeds: dict[str, tuple[str, Any]]) -> Any:
    tensors = []
    for name, (kind, array) in feeds.items():
        tensor = InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return client.infer("m", tensors)


def assert_answers(client: InferenceServerClient, x_name: str, ids_name: str) -> None:
    for rows in (1, 2, 16):
        x = np.random.default_rng(rows).standard_normal((rows, 3), np.float32)
        ids = np.arange(3 * rows).reshape(rows, 3)
        answer = infer(client, {ids_name: ("INT64", ids), x_name: ("FP32", x)})
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT__0"), ids + 1)
        np.testing.assert_allclose(answer.as_numpy("OUTPUT__1"), x * 2 + ids, rtol=1e-6)


def test_torchscript_takes_inputs_by_the_names_of_its_arguments(tmp_path: Path) -> None:
    save_script(write_model(tmp_path / "repository", "m", CONFIG, None), Two())
    with serving(tmp_path) as client:
        assert_answers(client, "x", "ids")
        with pytest.raises(InferenceServerException, match="batch-size"):
            assert_answers_of(client, 17)


def assert_answers_of(client: InferenceServerClient, rows: int) -> None:
    infer(client, {"ids": ("INT64", np.zeros((rows, 3), int)), "x": ("FP32", np.zeros((rows, 3), np.float32))})


def test_requests_of_a_batch_get_their_own_outputs(tmp_path: Path) -> None:
    batching = "dynamic_batching { preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 5000000 }\n"
    save_script(write_model(tmp_path / "repository", "m", CONFIG + batching, None), Two())
    with serving(tmp_path) as client, ThreadPoolExecutor(3) as pool:
        requests = [
            {"ids": ("INT64", np.full((rows, 3), 10 * rows)), "x": ("FP32", np.full((rows, 3), rows, np.float32))}
            for rows in (1, 2, 3)
        ]
        answers = list(pool.map(lambda request: infer(client, request), requests))
        for rows, answer in enumerate(answers, 1):
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT__0"), np.full((rows, 3), 10 * rows + 1))
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT__1"), np.full((rows, 3), 12 * rows))
        batches = client.get_inference_statistics("m").model_stats[0].batch_stats
        assert [batch.batch_size for batch in batches] == [6]


def test_the_cause_of_a_failure_in_torchscript_is_in_the_answer_and_the_log(tmp_path: Path) -> None:
    save_script(write_model(tmp_path / "repository", "m", CONFIG, None), Refuses())
    with serving(tmp_path) as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException) as caught:
                assert_answers_of(client, 1)
            assert re.match(r"pytorch: .{0,20}index 7 .*out of", caught.value.message())
    logged = [line for line in (tmp_path / "tritonserver.log").read_text().splitlines() if "pytorch: " in line]
    assert logged == [f"error of m_0_0: {caught.value.message()}"]


@pytest.mark.parametrize("threads", ["", 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }'])
def test_an_exported_program_takes_inputs_by_index(threads: str, tmp_path: Path) -> None:
    save_export(write_model(tmp_path / "repository", "m", EXPORTED + threads, None))
    with serving(tmp_path) as client:
        assert_answers(client, "INPUT__0", "INPUT__1")


def test_a_model_may_return_a_dictionary_without_inference_mode(tmp_path: Path) -> None:
    config = CONFIG.partition("output")[0] + 'output { name: "sum" data_type: TYPE_FP32 dims: 3 }\n'
    config += 'parameters { key: "INFERENCE_MODE" value { string_value: "false" } }\n'
    save_script(write_model(tmp_path / "repository", "m", config, None), Dictionary())
    with serving(tmp_path) as client:
        x, ids = np.ones((2, 3), np.float32), np.arange(6).reshape(2, 3)
        answer = infer(client, {"ids": ("INT64", ids), "x": ("FP32", x)})
        np.testing.assert_array_equal(answer.as_numpy("sum"), ids + x)


def test_every_type_passes(tmp_path: Path) -> None:
    config = 'backend: "pytorch"\nmax_batch_size: 4\n'
    for i, kind in enumerate(KINDS):
        config += f'input {{ name: "INPUT__{i}" data_type: TYPE_{kind} dims: 4 }}\n'
        config += f'output {{ name: "OUTPUT__{i}" data_type: TYPE_{kind} dims: 4 }}\n'
    traced = torch.jit.trace(Flip(), example_inputs())
    folder = write_model(tmp_path / "repository", "m", config, None)
    (folder / "1").mkdir()
    torch.jit.save(traced, folder / "1" / "model.pt")
    with serving(tmp_path) as client:
        feeds = {f"INPUT__{i}": (KINDS[i], item.numpy()) for i, item in enumerate(example_inputs())}
        answer = infer(client, feeds)
        for i, (_, array) in enumerate(feeds.values()):
            result = answer.as_numpy(f"OUTPUT__{i}")
            assert result.dtype == array.dtype
            np.testing.assert_array_equal(result, array[:, ::-1])


def example_inputs() -> tuple[Any, ...]:
    kinds = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    return tuple(
        (torch.arange(8).reshape(2, 4) % (2 if kind == "bool" else 8)).to(getattr(torch, kind)) for kind in kinds
    )


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    wrong = CONFIG.replace('"ids"', '"INPUT__1"').replace('"x"', '"INPUT__2"')
    save_script(write_model(tmp_path / "repository", "m", wrong, None), Two())
    with (
        pytest.raises(DeploymentError, match=r"INPUT__1, INPUT__2 do not match the arguments of the model: .*x, ids"),
        serving(tmp_path),
    ):
        pass


def test_dlrm_of_the_gpu_study_draws_the_same_tables_whenever_it_is_loaded(tmp_path: Path) -> None:
    from gpu.models import TINY, write_dlrm

    sizes = replace(TINY, rows=20_000)
    write_dlrm(tmp_path, sizes)
    file = tmp_path / "dlrm" / "1" / "model.pt"
    first = torch.jit.load(str(file))
    torch.rand(1)
    second = torch.jit.load(str(file), map_location="cpu")
    assert first.table.weight.numel() * 4 > 100 * file.stat().st_size
    assert float(first.table.weight.std()) == pytest.approx(0.05, rel=0.01)
    inputs = torch.rand(4, 13), torch.randint(2**40, (4, 26))
    assert torch.equal(first(*inputs), second(*inputs))
    on_meta = torch.jit.load(str(file), map_location="meta")
    assert on_meta.table.weight.device.type == "meta"  # they are drawn on the device of the model


def test_torchscript_is_tuned(sandbox: Sandbox) -> None:
    folder = write_model(sandbox.working_folder / "models", "m", CONFIG, None)
    save_script(folder, Two())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    arguments = [
        "--sla-p95",
        "500ms",
        "--budget",
        "3m",
        "--max-trials",
        "2",
        "--no-confirmation",
        "--json",
        "models/m",
    ]
    run = Run(sandbox, run_tune(sandbox, *arguments))
    run.assert_found()
    assert "own Python-based pytorch backend" in " ".join(run.document["notes"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
