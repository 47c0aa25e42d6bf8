"""Fixtures of the real server: the small mlp, built once, and one embedded target per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.config.model_source import ModelSource
from optimizer.core.folders import cache_folder
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.model.builders import build


@pytest.fixture(scope="session")
def mlp() -> ModelSource:
    return build("mlp", {}, cache=cache_folder(), max_batch_size=64, kind="KIND_CPU", say=print)


@pytest.fixture(scope="module")
def embedded(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    target = EmbeddedTarget(mlp, log=tmp_path_factory.mktemp("server") / "tritonserver.log", say=print)
    yield target
    target.close()


@pytest.fixture
def perf_analyzer(mlp: ModelSource, tmp_path: Path) -> PerfAnalyzer:
    installed = runtime.ensure(print)
    return PerfAnalyzer(
        installed.perf_analyzer,
        installed.perf_analyzer_libraries,
        tmp_path / "perf_analyzer.log",
        input_data=str(mlp.input_data),
    )
