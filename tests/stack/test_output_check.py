"""Test output check and scorer on a real server, with a model whose outputs depend on a parameter of its config."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from optimizer.core.candidate import Candidate
from optimizer.core.errors import DeploymentError
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.output_check import BaselineOutputCheck
from optimizer.measure.score import Scorer, accuracy
from optimizer.model.repository import read_repository_model
from tests.generated_requests import write_requests

CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "answers" value { string_value: "honest" } }
"""
PROGRAM = """\
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.answers = json.loads(args["model_config"])["parameters"]["answers"]["string_value"]

    def execute(self, requests):
        time.sleep(0.002)  # so that other requests queue
        xs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [self.answer(x, np.concatenate(xs)) for x in xs]

    def answer(self, x, batch):
        if self.answers == "refused when batched" and len(batch) > len(x):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no more\\nthan one"))
        if self.answers == "of the batch's mean":
            y = x + batch.mean()
        elif self.answers == "random":
            y = np.random.default_rng().random(x.shape)
        elif self.answers == "rounded":
            y = np.round(2 * x, 4)
        else:
            y = 2 * x
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y.astype(np.float32))])
"""


def candidate(answers: str, *, batching: bool = True) -> Candidate:
    return Candidate(8, dynamic_batching=batching, fields=(("parameters.answers.string_value", answers),))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "models" / "m" / "1").mkdir(parents=True)
    (folder / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    (folder / "models" / "m" / "1" / "model.py").write_text(textwrap.dedent(PROGRAM))
    source = read_repository_model(folder / "models", "m", gpu=False)
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(folder / "tritonserver.log"))) as made:
        yield made


def guard(target: EmbeddedTarget, folder: Path) -> BaselineOutputCheck:
    requests = write_requests(target.source.config, folder)
    return BaselineOutputCheck(folder / "reference.npz", input_data=requests, shapes=(), request_batch_size=1)


def referred(target: EmbeddedTarget, folder: Path, answers: str) -> BaselineOutputCheck:
    """Return an output check with the outputs of such a model without batching."""
    made = guard(target, folder)
    with target.deploy(candidate(answers, batching=False)) as endpoint:
        made.record_reference(endpoint)
        made.check(endpoint)
    return made


@pytest.mark.parametrize("answers", ["honest", "rounded"])
def test_a_configuration_with_the_baselines_outputs_passes(
    target: EmbeddedTarget, tmp_path: Path, answers: str
) -> None:
    made = referred(target, tmp_path, "honest")
    with target.deploy(candidate(answers)) as endpoint:
        made.check(endpoint)
    assert made.note is None


def test_outputs_that_depend_on_the_batch_are_rejected(target: EmbeddedTarget, tmp_path: Path) -> None:
    made = referred(target, tmp_path, "of the batch's mean")
    with (
        target.deploy(candidate("of the batch's mean")) as endpoint,
        pytest.raises(
            DeploymentError, match=r"^outputs differ from those of the unbatched baseline: y by [\d.]+ \("
        ) as error,
    ):
        made.check(endpoint)
    said = str(error.value)
    assert " instead of " in said
    assert re.search(r"\d of \d+ responses differ", said)

    resumed = guard(target, tmp_path)  # compares with the same outputs
    assert not resumed.needs_reference
    with (
        target.deploy(candidate("honest")) as endpoint,
        pytest.raises(DeploymentError, match=r"\b(\d+) of \1 responses"),
    ):
        resumed.check(endpoint)


def test_a_model_with_random_outputs_is_noted_and_not_checked(target: EmbeddedTarget, tmp_path: Path) -> None:
    made = referred(target, tmp_path, "random")
    assert "the baseline does not repeat its outputs (y by 0." in str(made.note)
    assert not made.needs_reference
    with target.deploy(candidate("random")) as endpoint:
        made.check(endpoint)


def test_a_configuration_that_fails_requests_is_rejected_with_the_servers_message(
    target: EmbeddedTarget, tmp_path: Path
) -> None:
    made = referred(target, tmp_path, "honest")
    with (
        target.deploy(candidate("refused when batched")) as endpoint,
        pytest.raises(DeploymentError, match=r"^the server failed a request: .*no more than one"),
    ):
        made.check(endpoint)


def test_the_score_is_that_of_the_deployments_outputs(target: EmbeddedTarget, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((200, 4))
    x[0::2] += 5
    labels = x.argmax(axis=1)
    scorer = Scorer(tmp_path / "labelled.npz", {"x": x}, labels, "accuracy", accuracy)
    with target.deploy(candidate("honest")) as endpoint:
        assert scorer.measure(endpoint) == 1.0
    with target.deploy(candidate("random")) as endpoint:
        assert scorer.measure(endpoint) < 0.5
