"""Test stateful models on the real server: their output check, the sequences of perf_analyzer, and a short run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.config import model_config
from optimizer.core.candidate import Candidate
from optimizer.core.errors import DeploymentError
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.output_check import SequenceOutputCheck
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.model.builders.request_data import write_input_data
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import FOUND, Sandbox, Tune
from tests.generated_requests import write_requests
from tests.repositories import STATES, write_sums
from tests.stack_fixtures import embedded_model

LENGTH = 7
PROFILE = """\
model: {builder: accumulator}
request: {sequence_length: 20}
load: {max_concurrency: 4}
space:
  max_batch_size: [4, 16]
  instance_group_count: [1]
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("sums")
    write_sums(folder / "models", folder / "steps")
    with embedded_model(folder, "sums") as target:
        yield target


@pytest.fixture
def check(sums: EmbeddedTarget, tmp_path: Path) -> SequenceOutputCheck:
    """Return an output check with the outputs of the model that keeps a state for each sequence."""
    made = SequenceOutputCheck(
        tmp_path / "reference.npz",
        input_data=write_requests(sums.source.config, tmp_path),
        shapes=(),
        request_batch_size=1,
        sequence_length=6,
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


@pytest.mark.parametrize("samples", [LENGTH - 3, LENGTH + 3])
def test_perf_analyzer_sends_sequences_of_the_same_length(
    perf_analyzer: PerfAnalyzer, tmp_path: Path, samples: int
) -> None:
    """Their length is not that of the data file, to which perf_analyzer sets it by default."""
    log, data = tmp_path / "steps", tmp_path / "data.json"
    write_sums(tmp_path / "models", log)
    source = read_repository_model(tmp_path / "models", "sums", gpu=False)
    write_input_data(data, {source.config.input[0].name: np.ones((samples, 1), np.float32)})
    load = LoadPoint(1, concurrency=6)
    with (
        contextlib.closing(EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))) as target,
        target.deploy(Candidate(8)) as endpoint,
    ):
        replace(perf_analyzer, input_data=data, sequence_length=LENGTH).measure(endpoint, load, 1.5)
    lengths: list[int] = []
    steps: dict[str, int] = {}
    for line in log.read_text().splitlines():
        sequence, start, end, _, _ = line.split()
        steps[sequence] = 1 if start == "1" else steps[sequence] + 1
        assert len(steps) <= load.concurrency
        lengths += [steps.pop(sequence)] if end == "1" else []
    whole, last = lengths[: -round(load.concurrency)], lengths[-round(load.concurrency) :]
    assert whole
    assert set(whole) == {LENGTH}
    assert max(last) <= LENGTH, "it cuts the last ones short"


def test_a_run_ends_with_a_recommendation_that_loads(tune: Tune, sandbox: Sandbox) -> None:
    """Few requests are in flight, because the model computes and would take both cores."""
    (sandbox.working_folder / "sums.yaml").write_text(PROFILE)
    briefly = ("--budget", "20s", "--max-trials", "2", "--measurement-interval", "100ms", "--no-confirmation")
    ended = tune("--sla-p95", "500ms", *briefly, "sums.yaml")
    assert ended.code in FOUND, ended.stderr
    (best,) = sandbox.root.rglob("best/config.pbtxt")
    config = model_config.read(best)
    assert config.sequence_batching.HasField("oldest")
    assert not config.HasField("dynamic_batching")
    assert "dynamic_batching {}" not in ended.stdout
