"""Labelled samples and metrics: what is read, what is judged, and every fault in one line."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives import pareto
from objectives.metrics import METRICS, Measurement
from objectives.sla import Constraint
from optimizer.answers import npz
from optimizer.answers.npz import read_npz
from optimizer.answers.score import LARGEST_REQUEST, Scorer, read_scorer
from optimizer.answers.score_metrics import BUILT_IN, accuracy, auc
from optimizer.errors import BadInputError, DeploymentError
from optimizer.profile.reader import load_profile
from optimizer.profile.schema import ScoreSection
from optimizer.profile.values import SCORES
from optimizer.trial import Candidate, LoadPoint, Point
from tests.answering_server import AnsweringServer, Model

Array = npt.NDArray[Any]
X = np.random.default_rng(0).standard_normal((150, 2)).astype(np.float32)
LABELS = (X[:, 0] > X[:, 1]).astype(np.int64)


def classifier(feeds: dict[str, Array]) -> dict[str, Array]:
    """A logit."""
    return {"y": (feeds["x"][..., :1] - feeds["x"][..., 1:]).astype(np.float32)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("labelled.npz", x=X, labels=LABELS)
    Path("accuracy.py").write_text(
        "def score(outputs, labels):\n    return float(len(outputs['y']) == len(labels))\n"
    )
    return tmp_path


def section(text: str) -> ScoreSection:
    Path("p.yaml").write_text(f"model: {{builder: mlp}}\nscore: {text}\n")
    found = load_profile(Path("p.yaml")).score
    assert found
    return found


def scorer(**arrays: Array) -> Scorer:
    given: dict[str, Any] = {"x": X, "labels": LABELS, **arrays}
    np.savez("labelled.npz", **given)
    return read_scorer(section("{data: labelled.npz, metric: accuracy}"))


def scored(made: Scorer, server: AnsweringServer) -> float:
    with server.serving() as endpoint:
        return made.measure(endpoint)


# -- the profile --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_the_section_names_files_beside_the_profile() -> None:
    given = section("{data: labelled.npz, metric: 'accuracy.py:score', minimum: 0.9}")
    assert given.data == Path("labelled.npz").resolve()
    assert given.metric == (Path("accuracy.py").resolve(), "score")
    assert given.minimum == 0.9
    assert section("{data: labelled.npz, metric: auc}").metric == "auc"
    assert section("{data: labelled.npz, metric: auc, minimum: 9e-1}").minimum == 0.9


@pytest.mark.usefixtures("here")
def test_no_section_is_no_score() -> None:
    Path("p.yaml").write_text("model: {builder: mlp}\nscore:\ntolerance:\n")
    assert load_profile(Path("p.yaml")).score is None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("score: 1", "score: 1 is not a mapping"),
        ("score: {metric: auc}", "score.data: missing"),
        ("score: {data: labelled.npz}", "score.metric: missing"),
        ("score: {data: none.npz, metric: auc}", "score.data: 'none.npz' does not exist in "),
        ("score: {data: ../x.npz, metric: auc}", "score.data: '../x.npz' leads out of the folder"),
        ("score: {data: /etc/passwd, metric: auc}", "score.data: '/etc/passwd' must be a relative path"),
        (
            "score: {data: labelled.npz, metric: f1}",
            "score.metric: 'f1' is no metric; write accuracy, auc, or a file",
        ),
        ("score: {data: labelled.npz, metric: [auc]}", "score.metric: ['auc'] is no metric"),
        ("score: {data: labelled.npz, metric: 'accuracy.py:'}", "score.metric: 'accuracy.py:' is no metric"),
        ("score: {data: labelled.npz, metric: 'none.py:f'}", "score.metric: 'none.py' does not exist"),
        ("score: {data: labelled.npz, metric: '../a.py:f'}", "score.metric: '../a.py' leads out of the folder"),
        ("score: {data: labelled.npz, metric: auc, minimum: x}", "score.minimum: 'x' is not a number"),
        ("score: {data: labelled.npz, metric: auc, minimum: true}", "score.minimum: true is not a number"),
        ("score: {data: labelled.npz, metric: auc, minimum: 'nan'}", "score.minimum: 'nan' is not a number"),
        ("score: {data: labelled.npz, metric: auc, min: 1}", "score.min: unknown key; did you mean minimum?"),
        ("tolerance: {relative: -1}", "tolerance.relative: -1 is not at least 0"),
        ("tolerance: {absolut: 1}", "tolerance.absolut: unknown key; did you mean absolute?"),
    ],
)
def test_a_fault_is_one_line_with_its_place(text: str, line: str) -> None:
    Path("p.yaml").write_text(f"model: {{builder: mlp}}\n{text}\n")
    with pytest.raises(BadInputError) as error:
        load_profile(Path("p.yaml"))
    assert str(error.value).startswith(f"p.yaml:2: {line}")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("here")
def test_a_tolerance_is_read_as_yaml_writers_write_it() -> None:
    Path("p.yaml").write_text("model: {builder: mlp}\ntolerance: {relative: 1e-3, absolute: 0}\n")
    tolerance = load_profile(Path("p.yaml")).tolerance
    assert (tolerance.relative, tolerance.absolute) == (0.001, 0.0)


# -- the samples --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": X}, "needs the model's inputs by name and an array 'labels'"),
        ({"labels": LABELS}, "needs the model's inputs by name and an array 'labels'"),
        ({"x": X, "labels": LABELS[:9]}, "one entry a sample in its first dimension (x 150, labels 9)"),
        ({"x": X[:0], "labels": LABELS[:0]}, "one entry a sample in its first dimension (x 0, labels 0)"),
        ({"x": np.float32(1), "labels": LABELS}, "(x 0, labels 150)"),
        ({"x": np.array([None] * 150), "labels": LABELS}, "has Python objects"),
    ],
)
def test_samples_that_are_none_are_one_line(arrays: dict[str, Any], says: str) -> None:
    np.savez("labelled.npz", **arrays)
    with pytest.raises(BadInputError) as error:
        read_scorer(section("{data: labelled.npz, metric: auc}"))
    assert says in str(error.value)
    assert "labelled.npz: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK", b"x,labels\n1,2\n", b"\x93NUMPY"])
def test_another_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(BadInputError, match=r"a\.npz: not a \.npz file; np\.savez writes one$"):
        read_npz(tmp_path / "a.npz")


def test_what_unpacks_to_more_than_is_read_is_refused_unread(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    struct.pack_into("<L", data, data.index(b"PK\x01\x02") + 24, npz.MAX_BYTES + 1)  # its size in the directory
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(BadInputError, match="larger than 512 MiB; write fewer samples"):
        read_npz(tmp_path / "a.npz")


# -- asking -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("max_batch_size", "largest"), [(8, 8), (1000, LARGEST_REQUEST), (1, 1)])
def test_all_samples_are_asked_in_order_in_requests_that_the_server_takes(max_batch_size: int, largest: int) -> None:
    server = AnsweringServer(classifier, max_batch_size=max_batch_size)
    assert scored(scorer(), server) == 1.0
    assert max(shape[0] for shape in server.asked) == largest
    assert sum(shape[0] for shape in server.asked) == len(X)


@pytest.mark.usefixtures("here")
def test_without_a_batch_dimension_a_sample_is_a_request() -> None:
    server = AnsweringServer(classifier, inputs=[("x", "FP32", (2,))], max_batch_size=0)
    assert scored(scorer(), server) == 1.0
    assert server.asked == [(2,)] * len(X)


@pytest.mark.usefixtures("here")
def test_samples_are_cast_to_the_models_types_where_nothing_is_lost() -> None:
    assert scored(scorer(x=X.astype(np.float64)), AnsweringServer(classifier)) == 1.0
    whole = (10 * X).round()
    server = AnsweringServer(classifier, inputs=[("x", "INT32", (-1, 2))])
    assert scored(scorer(x=whole, labels=whole[:, 0] > whole[:, 1]), server) == 1.0
    with pytest.raises(BadInputError, match="x holds float32, and the model takes INT32"):
        scored(scorer(), server)
    with pytest.raises(BadInputError, match="x holds int64, and the model takes INT8"):
        scored(scorer(x=np.full((150, 2), 300)), AnsweringServer(classifier, inputs=[("x", "INT8", (-1, 2))]))


@pytest.mark.usefixtures("here")
def test_samples_that_do_not_fit_the_model_are_one_line() -> None:
    with pytest.raises(
        BadInputError, match=r"labelled\.npz: a sample of x has the shape \[3\], and the model takes \[2\]"
    ):
        scored(scorer(x=np.zeros((150, 3))), AnsweringServer(classifier))
    with pytest.raises(BadInputError, match=r"labelled\.npz: has x, z beside labels, and the model's inputs are x$"):
        scored(scorer(z=X), AnsweringServer(classifier))


@pytest.mark.usefixtures("here")
def test_a_request_that_fails_is_the_deployments_fault() -> None:
    def fails(feeds: dict[str, Array]) -> dict[str, Array]:
        raise RuntimeError("no such row")

    with pytest.raises(DeploymentError, match="the server failed a request: no such row"):
        scored(scorer(), AnsweringServer(fails))


# -- metrics ------------------------------------------------------------------------------------------------------


def function(program: str) -> Scorer:
    Path("accuracy.py").write_text(program)
    return read_scorer(section("{data: labelled.npz, metric: 'accuracy.py:score'}"))


@pytest.mark.usefixtures("here")
def test_a_function_gets_all_outputs_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    program = "def score(outputs, labels):\n    print('hm')\n    return -abs(outputs['y']).sum() - labels.sum()\n"
    expected = -np.abs(X[:, 0] - X[:, 1]).sum() - LABELS.sum()
    assert scored(function(program), AnsweringServer(classifier)) == pytest.approx(expected)
    assert capsys.readouterr() == ("", "hm\n")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("program", "says"),
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
def test_what_is_wrong_with_a_function_is_one_line(program: str, says: str) -> None:
    with pytest.raises(BadInputError) as error:
        scored(function(program), AnsweringServer(classifier))
    assert str(error.value).startswith(f"metric accuracy.py:score: {says}")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("here")
def test_a_score_that_is_no_number_is_the_deployments_fault() -> None:
    made = function("def score(outputs, labels): return float('nan')")
    with pytest.raises(DeploymentError, match=r"the score of its answers is nan \(accuracy.py:score\)"):
        scored(made, AnsweringServer(classifier))


def test_the_metrics_that_a_profile_may_name_are_there() -> None:
    assert tuple(BUILT_IN) == SCORES


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


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("model", "labels", "says"),
    [
        (lambda feeds: {"a": feeds["x"], "b": feeds["x"]}, LABELS, "is for one output, and the model has a, b"),
        (lambda feeds: {"a": feeds["x"]}, LABELS + 1, "the labels must be columns of the output, from 0 to 1"),
        (classifier, np.array(["no", "yes"])[LABELS], "is for numbers; give a function instead"),
        (classifier, X, "needs one label a sample, and labels have the shape [150, 2]"),
    ],
)
def test_what_a_built_in_metric_cannot_judge_is_one_line(model: Model, labels: Array, says: str) -> None:
    with pytest.raises(BadInputError) as error:
        scored(scorer(labels=labels), AnsweringServer(model))
    assert str(error.value).startswith(f"metric accuracy: {says}")


# -- as a constraint ----------------------------------------------------------------------------------------------


def test_a_score_is_a_constraint_like_any_other() -> None:
    def point(throughput: float, score: float | None) -> Point:
        measured = Measurement(throughput, latency_p95_ms=1.0, stable=True, score=score)
        return Point(0, Candidate(8), LoadPoint(1, 1), measured)

    fast, good, unknown = point(2000, 0.8), point(1000, 0.95), point(3000, None)
    bound = (Constraint("score", 0.9),)
    assert pareto.best([fast, good, unknown], (METRICS["throughput"],), bound) == good
    assert pareto.best([fast, unknown], (METRICS["throughput"],), bound) is None
    assert pareto.closest([fast, unknown], bound) == fast
    assert pareto.front([fast, good, unknown], (METRICS["throughput"], METRICS["score"])) == [fast, good]
