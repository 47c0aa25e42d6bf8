"""Compare MiniLM behind FastAPI and behind Triton by one client, and Triton also by perf_analyzer."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from closed_loop import Load
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.files import cache_folder
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings, free_port
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.builders import build

TOKENS = (16, 128)
CONCURRENCY = (1, 2, 4, 8)
SECONDS = 3.0
START_SECONDS = 60.0
MAX_BATCH_SIZE = 8
FIGURES = ("throughput_infer_per_sec", *(f"latency_{name}_ms" for name in ("avg", "p50", "p90", "p95", "p99")))
CONFIGURATIONS = {
    "Triton": Candidate(MAX_BATCH_SIZE),
    "Triton, dynamic batching": Candidate(MAX_BATCH_SIZE, dynamic_batching=True),
}
NOTES = [
    f"one client for both servers: http.client of Python's library, a thread and a persistent connection for each "
    f"request in flight, JSON requests and responses, {SECONDS:g} s for each cell after 1 s of warm-up; it shares "
    "the CPUs with the server",
    "FastAPI: one uvicorn worker, one session of ONNX Runtime with default options; the responses of both servers "
    "were compared before the measurements",
    "perf_analyzer measured the same Triton server over gRPC with binary tensors",
]


def measure(folder: Path) -> list[dict[str, Any]]:
    """Measure all cells, with logs in ``folder``. Raises ModuleNotFoundError without FastAPI and uvicorn."""
    for name in ("fastapi", "uvicorn"):
        importlib.import_module(name)
    return [cell for tokens in TOKENS for cell in _measure(tokens, folder)]


def _measure(tokens: int, folder: Path) -> Iterator[dict[str, Any]]:
    source = build(
        "minilm_model",
        {"tokens": tokens},
        cache=cache_folder(),
        max_batch_size=MAX_BATCH_SIZE,
        kind="KIND_CPU",
        on_progress=print,
    )
    requests = _requests(source)
    with _fastapi(source, folder / "fastapi.log") as address:
        load = Load(address, PurePosixPath("/predict"), [json.dumps(request).encode() for request in requests])
        expected = json.loads(load.ask())
        yield from _loads(load, f"FastAPI · {tokens} tokens")
    target = EmbeddedTarget(source, TargetSettings(folder / "tritonserver.log"))
    with contextlib.closing(target):
        for name, candidate in CONFIGURATIONS.items():
            with target.deploy(candidate) as endpoint:
                path = PurePosixPath(f"/v2/models/{source.name}/infer")
                load = Load(endpoint.http, path, [_kserve(request) for request in requests])
                answer = json.loads(load.ask())["outputs"][0]["data"]
                np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-3)
                yield from _loads(load, f"{name} · {tokens} tokens")
                if not candidate.dynamic_batching:
                    yield from _by_perf_analyzer(source, endpoint, tokens, folder / "perf_analyzer.log")


def _by_perf_analyzer(source: ModelSource, endpoint: Endpoint, tokens: int, log: Path) -> Iterator[dict[str, Any]]:
    installed = runtime.ensure(print)
    assert source.input_data is not None
    analyzer = PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        log,
        input_data=source.input_data,
        shapes=tuple(f"{tensor.name}:{tokens}" for tensor in source.config.input),
        window_ms=1000,
        repeat=False,
    )
    for concurrency in CONCURRENCY:
        measurement = analyzer.measure(endpoint, LoadPoint(1, concurrency))
        figures = {name: getattr(measurement, name) for name in FIGURES}
        yield _cell(f"Triton, perf_analyzer · {tokens} tokens", concurrency) | figures


def _loads(load: Load, label: str) -> Iterator[dict[str, Any]]:
    for concurrency in CONCURRENCY:
        yield _cell(label, concurrency) | load.measure(concurrency, SECONDS)


def _cell(label: str, concurrency: int) -> dict[str, Any]:
    print(f"  {label}, {concurrency} in flight", flush=True)
    return {"label": label, "request_batch_size": 1, "concurrency": concurrency}


def _requests(source: ModelSource) -> list[dict[str, list[int]]]:
    """Return the model's request data that perf_analyzer sends: the bytes of INT32 tensors, one request a row."""
    assert source.input_data is not None
    rows = json.loads(source.input_data.read_text())["data"]
    return [
        {name: np.frombuffer(base64.b64decode(t["content"]["b64"]), "<i4").tolist() for name, t in row.items()}
        for row in rows
    ]


def _kserve(request: dict[str, list[int]]) -> bytes:
    """Return the same request as JSON for Triton's HTTP endpoint."""
    inputs = [
        {"name": name, "shape": [1, len(values)], "datatype": "INT32", "data": values}
        for name, values in request.items()
    ]
    return json.dumps({"inputs": inputs}).encode()


@contextlib.contextmanager
def _fastapi(source: ModelSource, log: Path) -> Iterator[str]:
    """Start the server and yield its address."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "uvicorn", "--log-level", "warning", "--host", "127.0.0.1"]
    model = source.repository / source.name / "1" / "model.onnx"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", address.rpartition(":")[2], "fastapi_server:app"],
            cwd=Path(__file__).parent,
            env={**os.environ, "TRITUNE_BASELINE_MODEL": str(model)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server responds."""
    deadline = time.monotonic() + START_SECONDS
    load = Load(address, PurePosixPath("/predict"), [b"{}"])
    while process.poll() is None and time.monotonic() < deadline:
        try:
            load.ask()
        except OSError:
            time.sleep(0.1)
        except RuntimeError:  # an error response shows that the server runs
            return
    raise RuntimeError(f"the FastAPI server did not start; see {log}")
