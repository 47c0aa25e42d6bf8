"""Test stateful models on the real server: their output check, agreement with perf_analyzer, and a short run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.sla import Sla
from optimizer.config import model_config
from optimizer.core.errors import DeploymentError
from optimizer.core.files import cache_folder
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.core.trial import Candidate, LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.measure.load_client.generator import SequenceGenerator
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.measure.sequence_check import SequenceOutputCheck
from optimizer.model.builders import build
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import FOUND, Tune
from tests.repositories import STATES, write_sums

MAX_RATIO = 1.6  # between two load generators, one after the other on a shared machine


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("sums")
    write_sums(folder / "models", folder / "steps")
    source = read_repository_model(folder / "models", "sums", gpu=False)
    with contextlib.closing(EmbeddedTarget(source, log=folder / "tritonserver.log", say=print)) as target:
        yield target


@pytest.fixture
def check(sums: EmbeddedTarget, tmp_path: Path) -> SequenceOutputCheck:
    """Return an output check with the outputs of the model that keeps a state for each sequence."""
    made = SequenceOutputCheck(
        tmp_path / "reference.npz", input_data="random", shapes=(), request_batch_size=1, sequence_length=6
    )
    with sums.deploy(keeping("own")) as endpoint:
        made.record_reference(endpoint)
    return made


def keeping(states: str) -> Candidate:
    return Candidate(8, fields=((STATES, states),))


def test_a_model_that_keeps_the_states_apart_passes(sums: EmbeddedTarget, check: SequenceOutputCheck) -> None:
    with sums.deploy(keeping("own")) as endpoint:
        check.check(endpoint)
        check.check(endpoint)  # its sequences are not those of the first check
    assert check.note is None


@pytest.mark.parametrize("states", ["one for all", "by place in the batch"])
def test_a_model_that_mixes_up_states_is_rejected(
    sums: EmbeddedTarget, check: SequenceOutputCheck, states: str
) -> None:
    said = r"^outputs differ from those of the unbatched baseline: y by "
    with sums.deploy(keeping(states)) as endpoint, pytest.raises(DeploymentError, match=said):
        check.check(endpoint)


@pytest.mark.parametrize("name", ["accumulator", "gru"])
def test_perf_analyzer_measures_about_the_same(name: str, perf_analyzer: PerfAnalyzer, tmp_path: Path) -> None:
    source = build(name, {}, cache=cache_folder(), max_batch_size=8, kind="KIND_CPU", say=print)
    own = SequenceGenerator(
        log=tmp_path / "client.log",
        input_data=str(source.input_data),
        sla=Sla.from_bounds({"p95": 1000.0}),
        sequence_length=parse_size_distribution("20"),
    )
    other = replace(perf_analyzer, input_data=str(source.input_data), sequence_length=20)
    load = LoadPoint(1, concurrency=6)
    with (
        contextlib.closing(EmbeddedTarget(source, log=tmp_path / "tritonserver.log", say=print)) as target,
        target.deploy(Candidate(8)) as endpoint,
    ):
        measured = [generator.measure(endpoint, load, 1.5) for generator in (own, other, own, other)]
    ours, theirs = (max(each.throughput_infer_per_sec or 0.0 for each in measured[i::2]) for i in (0, 1))
    assert 1 / MAX_RATIO < ours / theirs < MAX_RATIO


def test_a_run_ends_with_a_recommendation_that_loads(tune: Tune, tmp_path: Path) -> None:
    ended = tune("--sla-p95", "500ms", "--budget", "20s", "--max-trials", "3", "--no-confirmation", "accumulator")
    assert ended.code in FOUND, ended.stderr
    (best,) = tmp_path.rglob("best/config.pbtxt")
    config = model_config.read(best)
    assert config.sequence_batching.HasField("oldest")
    assert not config.HasField("dynamic_batching")
    assert "dynamic_batching {}" not in ended.stdout
