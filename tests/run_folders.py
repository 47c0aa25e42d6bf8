"""Writes and copies the folder of a finished run without a server, for tests of the code that reads runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from optimizer.config import model_config
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.trial import FreshServer, LoadPoint, Trial
from optimizer.options import server_options
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import candidate_document
from optimizer.store.run_folder import RunFolder, write_configs
from optimizer.store.trials_table import TrialsTable
from tests.conftest import measurement

CONFIG = """\
name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: {dims} }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
instance_group {{ count: 2 kind: {kind} }}
dynamic_batching {{ preferred_batch_size: 4 max_queue_delay_microseconds: 100 }}
"""
SPACE = {"max_batch_size": [8], "max_queue_delay_us": [100], "preferred_batch_sizes": ["4"], "instance_count": [2]}
HARDWARE = {"gpus": [], "cpu": "Some(R) CPU @ 2.50GHz", "cpu_count": 8, "memory_bytes": 1 << 34, "system": "Linux"}
CANDIDATE = Candidate(8, True, 100, (4,), 2)  # the settings of CONFIG
WINDOWS = 3  # on each fresh server
CLOSED, OPEN = LoadPoint(2, concurrency=20), LoadPoint(2, request_rate=150.5)
MEASURED = replace(measurement(1000, 10), server_memory_bytes=1e9)


def change_info(run: Path, section: str = "", /, **values: Any) -> Path:
    """Replace ``values`` in run.json of the folder ``run``, or in one section of it. Return ``run``."""
    info = json.loads((run / "run.json").read_text())
    (info[section] if section else info).update(values)
    (run / "run.json").write_text(json.dumps(info))
    return run


def config_text(name: str, kind: str = "KIND_CPU", dims: str = "4") -> str:
    return CONFIG.format(name=name.replace("\\", "\\\\").replace('"', '\\"'), kind=kind, dims=dims)


def write_run(
    folder: Path,
    model: str = "doubler",
    *,
    configs: Mapping[str, str] | None = None,
    candidate: Candidate = CANDIDATE,
    options: RunOptions | None = None,
    fields: Mapping[str, Sequence[FieldValue]] | None = None,
    load: LoadPoint = CLOSED,
    measured: Measurement = MEASURED,
    status: str = "found",
    hardware: Mapping[str, Any] = HARDWARE,
    server_cpus: float | None = 8,
    server_uses_gpus: bool | None = True,
    is_confirmed: bool = True,
) -> Path:
    """Write a run of one trial at one load, which was also measured on fresh servers; return its folder.

    Without ``is_confirmed`` the confirmation is missing, so the verdict is UNDECIDED. The trial is of ``candidate``
    with the last choice of each of ``fields``.
    """
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True)
    chosen = tuple(sorted((path, values[-1]) for path, values in (fields or {}).items()))
    candidate = replace(candidate, fields=chosen)
    table = TrialsTable(run.trials, model, fields or {})
    table.append(Trial(0, candidate, deploy_seconds=45.0), load, measured)
    for server in range(1, LOOKS[0] + 1) if is_confirmed else ():
        for _ in range(WINDOWS):
            table.append(Trial(0, candidate), load, measured, FreshServer(server, 0.01))
    mode: Literal["rate", "concurrency"] = "rate" if load.request_rate else "concurrency"
    run.write_info(
        replace(options or RunOptions(model), model=model, sla_ms={"p95": 20.0}, load=mode),
        {
            "status": status,
            "command": f"tune --sla-p95 20ms {model}",
            "written": "2026-11-21T10:00:00+0000",
            "problem": {
                "model": model,
                "constraints": ["p95 <= 20 ms"],
                "objectives": ["throughput"],
                "request_batch_size": 2,
                "space": SPACE | {path: list(values) for path, values in (fields or {}).items()},
                "kind": "batched",
                "max_concurrency": 256,
                "baseline": candidate_document(candidate),
                "dynamic_batching": candidate_document(candidate),
            },
            "hardware": dict(hardware),
            "versions": {"tritonserver": "2.51.0"},
            "notes": [],
            "server_cpus": server_cpus,
            "server_uses_gpus": server_uses_gpus,
        },
    )
    files = {f"{model}/1/model.json": json.dumps(candidate.model_json)} if candidate.model_json else {}
    write_configs(run.best, configs or {model: config_text(model)}, server_options.to_arguments(chosen), files)
    for path in run.best.rglob("config.pbtxt"):
        model_config.read(path)  # fails if Triton could not read it
    return run.path


def copy_run(run: Path, name: str, **changes: Any) -> Path:
    """Copy ``run`` to the folder ``name`` next to it, with other values in run.json. A mapping changes a section."""
    copy = Path(shutil.copytree(run, run.parent / name))
    info = json.loads((copy / "run.json").read_text())
    for key, value in changes.items():
        info[key] = {**info[key], **value} if isinstance(value, dict) else value
    (copy / "run.json").write_text(json.dumps(info))
    return copy
