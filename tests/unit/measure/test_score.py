"""Test the scorer: reading labelled samples, metrics, and errors on one line."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives import pareto
from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, DeploymentError
from optimizer.core.trial import LoadPoint, Point
from optimizer.measure.score import BUILT_IN_METRICS, MAX_REQUEST_SAMPLES, Scorer, accuracy, auc, read_scorer
from optimizer.model import recorded_samples
from optimizer.model.profile import load_profile
from optimizer.model.profile_schema import ScoreSection
from optimizer.model.profile_types import SCORES
from optimizer.model.recorded_samples import read_npz
from tests.inference_server import FakeInferenceServer, Model

Array = npt.NDArray[Any]
X = np.random.default_rng(0).standard_normal((150, 2)).astype(np.float32)
LABELS = (X[:, 0] > X[:, 1]).astype(np.int64)


def classifier(feeds: dict[str, Array]) -> dict[str, Array]:
    """Return a logit."""
    return {"y": (feeds["x"][..., :1] - feeds["x"][..., 1:]).astype(np.float32)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("labelled.npz", x=X, labels=LABELS)
    Path("accuracy.py").write_text(
        "def score(outputs, labels):\n    return float(len(outputs['y']) == len(labels))\n"
    )
    return tmp_path


def section(text: str) -> ScoreSection:
    Path("p.yaml").write_text(f"model: {{builder: mlp}}\nscore: {text}\n")
    result = load_profile(Path("p.yaml")).score
    assert result
    return result


def scorer(**arrays: Array) -> Scorer:
    arguments: dict[str, Any] = {"x": X, "labels": LABELS, **arrays}
    np.savez("labelled.npz", **arguments)
    return read_scorer(section("{data: labelled.npz, metric: accuracy}"))


def score_of(scorer_to_use: Scorer, server: FakeInferenceServer) -> float:
    with server.serving() as endpoint:
        return scorer_to_use.measure(endpoint)


# -- the profile --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_files_are_relative_to_the_profile() -> None:
    arguments = section("{data: labelled.npz, metric: 'accuracy.py:score', minimum: 0.9}")
    assert arguments.data == Path("labelled.npz").resolve()
    assert arguments.metric == (Path("accuracy.py").resolve(), "score")
    assert arguments.minimum == 0.9
    assert section("{data: labelled.npz, metric: auc}").metric == "auc"
    assert section("{data: labelled.npz, metric: auc, minimum: 9e-1}").minimum == 0.9


@pytest.mark.usefixtures("folder")
def test_without_a_section_there_is_no_score() -> None:
    Path("p.yaml").write_text("model: {builder: mlp}\nscore:\ntolerance:\n")
    assert load_profile(Path("p.yaml")).score is None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("score: 1", "score: 1 is not a mapping"),
        ("score: {metric: auc}", "score.data: missing"),
        ("score: {data: labelled.npz}", "score.metric: missing"),
        ("score: {data: none.npz, metric: auc}", "score.data: 'none.npz' does not exist in "),
        ("score: {data: ../x.npz, metric: auc}", "score.data: '../x.npz' leads out of its folder"),
        ("score: {data: /etc/passwd, metric: auc}", "score.data: '/etc/passwd' must be a relative path"),
        (
            "score: {data: labelled.npz, metric: f1}",
            "score.metric: 'f1' is not a metric; write accuracy, auc, or a file",
        ),
        ("score: {data: labelled.npz, metric: [auc]}", "score.metric: ['auc'] is not a metric"),
        ("score: {data: labelled.npz, metric: 'accuracy.py:'}", "score.metric: 'accuracy.py:' is not a metric"),
        ("score: {data: labelled.npz, metric: 'none.py:f'}", "score.metric: 'none.py' does not exist"),
        ("score: {data: labelled.npz, metric: '../a.py:f'}", "score.metric: '../a.py' leads out of its folder"),
        ("score: {data: labelled.npz, metric: auc, minimum: x}", "score.minimum: 'x' is not a number"),
        ("score: {data: labelled.npz, metric: auc, minimum: true}", "score.minimum: true is not a number"),
        ("score: {data: labelled.npz, metric: auc, minimum: 'nan'}", "score.minimum: 'nan' is not a number"),
        ("score: {data: labelled.npz, metric: auc, min: 1}", "score.min: unknown key; did you mean minimum?"),
        ("tolerance: {relative: -1}", "tolerance.relative: -1 is not at least 0"),
        ("tolerance: {absolut: 1}", "tolerance.absolut: unknown key; did you mean absolute?"),
    ],
)
def test_an_error_is_one_line_with_its_place(text: str, line: str) -> None:
    Path("p.yaml").write_text(f"model: {{builder: mlp}}\n{text}\n")
    with pytest.raises(BadInputError) as error:
        load_profile(Path("p.yaml"))
    assert str(error.value).startswith(f"p.yaml:2: {line}")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("folder")
def test_a_tolerance_may_have_an_exponent() -> None:
    Path("p.yaml").write_text("model: {builder: mlp}\ntolerance: {relative: 1e-3, absolute: 0}\n")
    tolerance = load_profile(Path("p.yaml")).tolerance
    assert (tolerance.relative, tolerance.absolute) == (0.001, 0.0)


# -- the samples --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "needs an array for each of the model's inputs and an array 'labels'"),
        ({"labels": LABELS}, "needs an array for each of the model's inputs and an array 'labels'"),
        ({"x": X, "labels": LABELS[:9]}, "one entry per sample, but the lengths are x 150, labels 9"),
        ({"x": X[:0], "labels": LABELS[:0]}, "one entry per sample, but the lengths are x 0, labels 0"),
        ({"x": np.float32(1), "labels": LABELS}, "x 0, labels 150"),
        ({"x": np.array([None] * 150), "labels": LABELS}, "has Python objects"),
    ],
)
def test_invalid_samples_are_reported_on_one_line(arrays: dict[str, Any], message: str) -> None:
    np.savez("labelled.npz", **arrays)
    with pytest.raises(BadInputError) as error:
        read_scorer(section("{data: labelled.npz, metric: auc}"))
    assert message in str(error.value)
    assert "labelled.npz: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK", b"x,labels\n1,2\n", b"\x93NUMPY"])
def test_a_file_of_another_format_is_reported_on_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(BadInputError, match=r"a\.npz: not a \.npz file; np\.savez writes one$"):
        read_npz(tmp_path / "a.npz")


def test_a_file_that_unpacks_to_too_much_is_refused_unread(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    struct.pack_into(
        "<L", data, data.index(b"PK\x01\x02") + 24, recorded_samples.MAX_BYTES + 1
    )  # the size in the archive's directory
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(BadInputError, match="larger than 512 MiB; write fewer samples"):
        read_npz(tmp_path / "a.npz")


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("max_batch_size", "largest"), [(8, 8), (1000, MAX_REQUEST_SAMPLES), (1, 1)])
def test_all_samples_are_sent_in_order_in_requests_of_allowed_size(max_batch_size: int, largest: int) -> None:
    server = FakeInferenceServer(classifier, max_batch_size=max_batch_size)
    assert score_of(scorer(), server) == 1.0
    assert max(shape[0] for shape in server.request_shapes) == largest
    assert sum(shape[0] for shape in server.request_shapes) == len(X)


@pytest.mark.usefixtures("folder")
def test_without_a_batch_dimension_a_sample_is_a_request() -> None:
    server = FakeInferenceServer(classifier, inputs=[("x", "FP32", (2,))], max_batch_size=0)
    assert score_of(scorer(), server) == 1.0
    assert server.request_shapes == [(2,)] * len(X)


@pytest.mark.usefixtures("folder")
def test_samples_are_cast_to_the_models_types_without_loss() -> None:
    assert score_of(scorer(x=X.astype(np.float64)), FakeInferenceServer(classifier)) == 1.0
    whole = (10 * X).round()
    server = FakeInferenceServer(classifier, inputs=[("x", "INT32", (-1, 2))])
    assert score_of(scorer(x=whole, labels=whole[:, 0] > whole[:, 1]), server) == 1.0
    with pytest.raises(BadInputError, match=r"labelled\.npz: sample 1, input x: \S+ is not INT32"):
        score_of(scorer(), server)
    with pytest.raises(BadInputError, match=r"labelled\.npz: sample 1, input x: 300 is not INT8"):
        score_of(scorer(x=np.full((150, 2), 300)), FakeInferenceServer(classifier, inputs=[("x", "INT8", (-1, 2))]))
    with pytest.raises(BadInputError, match=r"labelled\.npz: sample 1, input x: 70000\.0 is too large for FP16"):
        score_of(scorer(x=np.full((150, 2), 7e4)), FakeInferenceServer(classifier, inputs=[("x", "FP16", (-1, 2))]))


@pytest.mark.usefixtures("folder")
def test_samples_that_do_not_fit_the_model_are_reported_on_one_line() -> None:
    with pytest.raises(
        BadInputError, match=r"labelled\.npz: input x: has the shape \[150, 3\], which is not .* the model's \[2\]"
    ):
        score_of(scorer(x=np.zeros((150, 3))), FakeInferenceServer(classifier))
    with pytest.raises(BadInputError, match=r"labelled\.npz: has the inputs x, z, but the model's inputs are x$"):
        score_of(scorer(z=X), FakeInferenceServer(classifier))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("refusal", ["Exceeds maximum queue size", "Request timeout expired"])
def test_a_queue_that_refuses_requests_is_scored_with_fewer_at_once(refusal: str) -> None:
    def classify_slowly(feeds: dict[str, Array]) -> dict[str, Array]:
        time.sleep(0.005)  # so that requests overlap
        return classifier(feeds)

    server = FakeInferenceServer(classify_slowly, refusal=refusal)
    assert score_of(scorer(), server) == 1.0
    assert sum(shape[0] for shape in server.request_shapes) > len(X), "the first attempt was refused"


@pytest.mark.usefixtures("folder")
def test_a_failed_request_is_a_deployment_error() -> None:
    def fail_request(feeds: dict[str, Array]) -> dict[str, Array]:
        raise RuntimeError("no such row")

    with pytest.raises(DeploymentError, match="the server failed a request: no such row"):
        score_of(scorer(), FakeInferenceServer(fail_request))


# -- metrics ------------------------------------------------------------------------------------------------------


def scorer_of_program(program: str) -> Scorer:
    Path("accuracy.py").write_text(program)
    return read_scorer(section("{data: labelled.npz, metric: 'accuracy.py:score'}"))


@pytest.mark.usefixtures("folder")
def test_a_metric_function_gets_all_outputs_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    program = "def score(outputs, labels):\n    print('hm')\n    return -abs(outputs['y']).sum() - labels.sum()\n"
    expected = -np.abs(X[:, 0] - X[:, 1]).sum() - LABELS.sum()
    assert score_of(scorer_of_program(program), FakeInferenceServer(classifier)) == pytest.approx(expected)
    assert capsys.readouterr() == ("", "hm\n")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("def score(:", "SyntaxError: "),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def other(): ...", "AttributeError: "),
        ("score = 3", "TypeError: 'int' object is not callable"),
        ("def score(outputs, labels): return outputs['z']", "KeyError: 'z'"),
        ("def score(outputs, labels): raise ValueError('a\\nb')", r"ValueError: a\nb"),
        ("def score(outputs, labels): return 'good'", "ValueError: could not convert string to float"),
        ("def score(outputs): return 1", "TypeError: score() takes 1 positional argument"),
    ],
)
def test_an_error_in_a_metric_function_is_one_line(program: str, message: str) -> None:
    with pytest.raises(BadInputError) as error:
        score_of(scorer_of_program(program), FakeInferenceServer(classifier))
    assert str(error.value).startswith(f"metric accuracy.py:score: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("folder")
def test_a_score_that_is_not_finite_is_a_deployment_error() -> None:
    nan_scorer = scorer_of_program("def score(outputs, labels): return float('nan')")
    with pytest.raises(DeploymentError, match=r"the score of its outputs is nan \(accuracy.py:score\)"):
        score_of(nan_scorer, FakeInferenceServer(classifier))


def test_every_metric_of_the_profile_schema_exists() -> None:
    assert tuple(BUILT_IN_METRICS) == SCORES


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ([[0.1, 0.7, 0.2], [3, 1, 2]], [1, 2], 0.5),  # the largest column
        ([[0.6], [0.4], [0.2]], [1, 1, 0], 2 / 3),  # probabilities
        ([0.6, 0.4, 0.2], [1, 1, -1], 2 / 3),
        ([[0.6], [-0.4], [5.0]], [1, 1, 1], 2 / 3),  # logits
        ([3, 5, 7], [3, 5, 8], 2 / 3),  # classes
    ],
)
def test_accuracy(values: Any, labels: list[int], expected: float) -> None:
    assert accuracy({"y": np.array(values)}, np.array(labels)) == pytest.approx(expected)
    assert accuracy({"y": np.array(values)}, np.array(labels)[:, None]) == pytest.approx(expected)


@settings(deadline=None)  # the first one imports scipy
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(samples: list[tuple[int, bool]]) -> None:
    good = [value for value, label in samples if label]
    bad = [value for value, label in samples if not label]
    values, labels = np.array([[float(value)] for value, _ in samples]), np.array([label for _, label in samples])
    if not good or not bad:
        with pytest.raises(BadInputError, match="needs samples of both labels"):
            auc({"y": values}, labels)
        return
    pairs = [1.0 if g > b else 0.5 if g == b else 0.0 for g in good for b in bad]
    assert auc({"y": values}, labels) == pytest.approx(np.mean(pairs))
    assert auc({"y": np.hstack([-values, values])}, labels) == pytest.approx(np.mean(pairs))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("model", "labels", "message"),
    [
        (lambda feeds: {"a": feeds["x"], "b": feeds["x"]}, LABELS, "needs a single output, but the model has a, b"),
        (lambda feeds: {"a": feeds["x"]}, LABELS + 1, "the labels must be columns of the output, from 0 to 1"),
        (classifier, np.array(["no", "yes"])[LABELS], "needs numeric outputs and labels; give a function instead"),
        (classifier, X, "needs one label per sample, but the labels have the shape [150, 2]"),
    ],
)
def test_unsuitable_outputs_for_a_built_in_metric_are_one_line(model: Model, labels: Array, message: str) -> None:
    with pytest.raises(BadInputError) as error:
        score_of(scorer(labels=labels), FakeInferenceServer(model))
    assert str(error.value).startswith(f"metric accuracy: {message}")


# -- as a constraint ----------------------------------------------------------------------------------------------


def test_a_score_is_a_constraint_like_any_other() -> None:
    def point(throughput: float, score: float | None) -> Point:
        measured = Measurement(throughput, latency_p95_ms=1.0, stable=True, score=score)
        return Point(0, Candidate(8), LoadPoint(1, 1), measured)

    fast, good, unknown = point(2000, 0.8), point(1000, 0.95), point(3000, None)
    sla = Sla.from_bounds({"score": 0.9})
    assert sla.best_point([fast, good, unknown], (METRICS["throughput"],)) == good
    assert sla.best_point([fast, unknown], (METRICS["throughput"],)) is None
    assert sla.closest_point([fast, unknown]) == fast
    assert pareto.pareto_front([fast, good, unknown], (METRICS["throughput"], METRICS["score"])) == [fast, good]
