"""Runs of each kind and the files that `tune emit` writes for them, for tests of the emitters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.cli import emit
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.emit.production import ProductionServer, name_of, read_repository
from optimizer.emit.recommended import Recommendation, read_recommendation
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import read_run
from tests.run_folders import HARDWARE, MEASURED, OPEN, config_text, write_run

SAMPLE = Path("tests/data/dlrm/sample")
IMAGE = "example/triton:24.10-py3"
GPUS = HARDWARE | {"gpus": ["NVIDIA H100 80GB HBM3"] * 2}
HOSTILE = "1e3"  # a number for YAML 1.2, a text for 1.1
RATE_LIMIT = "server.rate-limit"

Runs = Mapping[str, Callable[[Path], Path]]
RUNS: Runs = {
    "cpu": write_run,
    "gpu": functools.partial(
        write_run, configs={"doubler": config_text("doubler", "KIND_GPU")}, hardware=GPUS, load=OPEN
    ),
    "several models": functools.partial(
        write_run, configs={name: config_text(name) for name in ("doubler", "Doubler", "yes", "a 'b\" $HOME")}
    ),
    "server options": functools.partial(
        write_run,
        options=RunOptions("doubler", target="local", server_args=("--cache-config=local,size=$((1+1))",)),
        fields={RATE_LIMIT: ["off", "execution_count"]},
    ),
    "variables": functools.partial(
        write_run,
        options=RunOptions(
            "doubler",
            target="docker",
            docker_image=IMAGE,
            docker_env=("LD_PRELOAD=/plugins/a.so:/plugins/b.so", "HF_TOKEN", "TEXT=$(HOME) $$ 'x'"),
        ),
    ),
    "server processes": functools.partial(write_run, fields={SERVER_PROCESSES: [2]}),
    "stateful": functools.partial(
        write_run,
        configs={
            "doubler": config_text("doubler").partition("dynamic_batching")[0] + "sequence_batching { oldest {} }"
        },
        candidate=Candidate(8, instance_count=2),
    ),
    "hostile name": functools.partial(write_run, model=HOSTILE),
    "no memory": functools.partial(write_run, measured=replace(MEASURED, server_memory_bytes=None)),
    "another machine": functools.partial(
        write_run, options=RunOptions("doubler", target="remote", url="triton:8001"), server_cpus=None
    ),
}


def emitted(run: Path, folder: Path, *words: str) -> dict[str, str]:
    """Return the written files by path."""
    assert emit.main([str(run), *words, "--out", str(folder)]) == 0
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def in_production(models: str, format_name: str) -> list[str]:
    mounted = "/srv/my $models" if "path" in emit.FORMATS[format_name].schemes else "pvc://claim/some/path"
    where = mounted if models == "mounted" else models
    return ["--format", format_name, "--image", IMAGE, "--model-repository", where]


def production_file(run: Path, folder: Path, format_name: str, *words: str, models: str = "s3://b/m") -> str:
    """Return the text of the only file that is written for production."""
    (text,) = emitted(run, folder, *in_production(models, format_name), *words).values()
    return text


def recommendation_of(run: Path) -> Recommendation:
    return read_recommendation(read_run(run))


def production_server(run: Path, **more: Any) -> ProductionServer:
    """Return the server that serves the recommendation of ``run``, with the settings ``more``."""
    recommendation, repository = recommendation_of(run), read_repository("pvc://claim/some/path")
    return ProductionServer(recommendation, IMAGE, repository, name_of(recommendation.model), **more)


def by_kind(documents: Any) -> dict[str, Any]:
    return {document["kind"]: document for document in documents}


def read_config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())
