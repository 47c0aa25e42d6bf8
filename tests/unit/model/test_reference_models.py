"""The models of the documents: published numbers of parameters, and outputs compared with plain formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from scipy import special
from tokenizers import Tokenizer
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.model import input_data as request_data
from optimizer.model.builders import build
from optimizer.model.builders.convolutional import (
    ResnextSettings,
    TextRecognitionSettings,
    draw_resnext,
    draw_text_recognition,
)
from optimizer.model.builders.encoders import (
    EPSILON,
    MINILM_SHAPE,
    TOKENS,
    BertSettings,
    draw_bert,
    draw_minilm,
    make_tokenizer,
)
from optimizer.model.builders.python_models import minilm_tokenize
from optimizer.model.builders.request_data import vocabulary
from optimizer.model.builders.stateful import draw_gru
from tests.built_models import Array, obtain, run, weights_of
from tests.conftest import not_none

HIDDEN = 12


# -- parameters -----------------------------------------------------------------------------------------------------


def test_a_model_has_as_many_parameters_as_published(tmp_path: Path) -> None:
    """BERT's as Hugging Face counts BertForQuestionAnswering, MiniLM's those of its 22.7 M and two labels,
    ResNeXt's as timm counts resnext101_32x4d, the text recognizer's 44.3 M (Baek et al. 2019, table 2)."""
    file = tmp_path / "weights.bin"
    assert draw_bert(BertSettings(size="base"), file, None).parameters == 108_893_186
    assert draw_bert(BertSettings(size="large"), file, None).parameters == 334_094_338
    assert draw_minilm(file, None).parameters == 22_713_216 + 2 * 384 + 2
    assert draw_resnext(ResnextSettings(), file, None).parameters == 44_177_704
    recogniser = draw_text_recognition(TextRecognitionSettings(), file, None).parameters
    assert round(recogniser / 1e6, 1) == 44.3


# -- BERT -----------------------------------------------------------------------------------------------------------


def norm(x: Array, w: dict[str, Array], name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    out: Array = centred / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * w[f"{name}.scale"] + w[f"{name}.bias"]
    return out


def dense(x: Array, w: dict[str, Array], name: str) -> Array:
    out: Array = x @ w[f"{name}.weight"] + w[f"{name}.bias"]
    return out


def reference_encoding(
    w: dict[str, Array], ids: Array, segments: Array, mask: Array, layers: int, heads: int
) -> Array:
    """Compute BERT for one sample, head by head, in double precision."""
    w = {name: values.astype(np.float64) for name, values in w.items()}
    x = w["embedding.token"][ids] + w["embedding.position"][: len(ids)] + w["embedding.segment"][segments]
    x = norm(x, w, "embedding.norm")
    for layer in range(layers):
        name = f"layer.{layer}"
        query, key, value = (dense(x, w, f"{name}.attention.{part}") for part in ("query", "key", "value"))
        size = x.shape[1] // heads
        mixed = []
        for head in range(heads):
            columns_of_head = slice(head * size, (head + 1) * size)
            scores = query[:, columns_of_head] @ key[:, columns_of_head].T / np.sqrt(size) + (1 - mask) * -10000.0
            mixed.append(special.softmax(scores, axis=-1) @ value[:, columns_of_head])
        x = norm(dense(np.concatenate(mixed, 1), w, f"{name}.attention.output") + x, w, f"{name}.attention.norm")
        inner = dense(x, w, f"{name}.inner")
        gelu = inner * special.ndtr(inner)
        x = norm(dense(gelu, w, f"{name}.output") + x, w, f"{name}.norm")
    return x


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return obtain(tmp_path_factory.mktemp("bert"), "bert", size="tiny", sequence=16, samples=5)


def tokens(rng: np.random.Generator, samples: int, length: int) -> tuple[Array, Array, Array]:
    ids = rng.integers(0, 30522, (samples, length), dtype=np.int32)
    segments = rng.integers(0, 2, (samples, length), dtype=np.int32)
    mask = (np.arange(length) < rng.integers(1, length + 1, (samples, 1))).astype(np.int32)
    return ids, segments, mask


def test_bert_computes_the_published_formulas(tiny: ModelSource) -> None:
    ids, segments, mask = tokens(np.random.default_rng(1), 3, 16)
    begin, end = run(tiny, input__0=ids, input__1=segments, input__2=mask)
    assert begin.shape == end.shape == (3, 16)
    w = weights_of(tiny)
    for sample in range(3):
        logits = dense(reference_encoding(w, ids[sample], segments[sample], mask[sample], 2, 2), w, "answer")
        np.testing.assert_allclose(begin[sample], logits[:, 0], atol=1e-4)
        np.testing.assert_allclose(end[sample], logits[:, 1], atol=1e-4)


def test_half_precision_is_close(tmp_path: Path, tiny: ModelSource) -> None:
    half = obtain(tmp_path, "bert", size="tiny", sequence=16, samples=5, precision="fp16")
    ids, segments, mask = tokens(np.random.default_rng(2), 2, 16)
    feed = {"input__0": ids, "input__1": segments, "input__2": mask}
    (whole, _), (rough, _) = run(tiny, **feed), run(half, **feed)
    assert rough.dtype == np.float16
    np.testing.assert_allclose(rough.astype(np.float32), whole, atol=0.05)


@pytest.fixture(scope="module")
def bare_minilm(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return obtain(tmp_path_factory.mktemp("bare"), "minilm_model", samples=3, tokens=7)


def test_minilm_takes_any_number_of_tokens(bare_minilm: ModelSource) -> None:
    w = weights_of(bare_minilm)
    for length in (5, 12):
        ids, segments, mask = tokens(np.random.default_rng(length), 2, length)
        (logits,) = run(bare_minilm, input_ids=ids, token_type_ids=segments, attention_mask=mask)
        assert logits.shape == (2, 2)
        encoded = reference_encoding(w, ids[1], segments[1], mask[1], 6, 12)
        expected = dense(np.tanh(dense(encoded[0], w, "pooler")), w, "labels")
        np.testing.assert_allclose(logits[1], expected, atol=1e-4)


# -- MiniLM with its tokenizer --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return obtain(tmp_path_factory.mktemp("minilm"), "minilm", max_batch_size=8, samples=40)


def config_of(source: ModelSource, model: str) -> ModelConfig:
    return model_config.read(source.repository / model / "config.pbtxt")


def tensors_of(fields: Iterable[Any]) -> dict[str, tuple[int, list[int]]]:
    return {field.name: (field.data_type, list(field.dims)) for field in fields}


def test_the_ensemble_leads_a_text_through_both_models(ensemble: ModelSource) -> None:
    assert ensemble.config == config_of(ensemble, "minilm")
    assert tensors_of(ensemble.config.input) == {"TEXT": (DataType.TYPE_STRING, [1])}
    assert tensors_of(ensemble.config.output) == {"output": (DataType.TYPE_FP32, [2])}
    at_hand = tensors_of(ensemble.config.input)
    for step in ensemble.config.ensemble_scheduling.step:
        part = config_of(ensemble, step.model_name)
        assert part.max_batch_size == ensemble.config.max_batch_size == 8
        assert [group.count for group in part.instance_group] == [1]
        assert {name: at_hand[inside] for name, inside in step.input_map.items()} == tensors_of(part.input)
        written = tensors_of(part.output)
        at_hand |= {inside: written[name] for name, inside in step.output_map.items()}
        (version,) = (entry for entry in (ensemble.repository / step.model_name).iterdir() if entry.is_dir())
        assert {"model.py", "model.onnx"} & {file.name for file in version.iterdir()}
    assert at_hand["output"] == (DataType.TYPE_FP32, [2])
    assert (ensemble.repository / "minilm" / "1").is_dir(), "Triton wants a version of an ensemble too"


def test_each_of_its_models_gets_another_max_batch_size(ensemble: ModelSource) -> None:
    cache = ensemble.repository.parent.parent
    smaller_batches = build(
        "minilm", {"samples": 40}, cache=cache, max_batch_size=2, kind="KIND_GPU", on_progress=pytest.fail
    )
    models = ("minilm", "minilm_tokenize", "minilm_model")
    assert [config_of(smaller_batches, model).max_batch_size for model in models] == [2, 2, 2]
    kinds = [config_of(smaller_batches, model).instance_group[0].kind for model in models[1:]]
    assert kinds == [ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_GPU]
    weights = Path("minilm_model", "1", "weights.bin")
    assert (ensemble.repository / weights).samefile(smaller_batches.repository / weights)


def tokenize(source: ModelSource, *texts: str) -> dict[str, Array]:
    file = source.repository / "minilm_tokenize" / "1" / "tokenizer.json"
    return dict(minilm_tokenize.tokenize(Tokenizer.from_file(str(file)), texts))


def pieces(ids: Array) -> list[str]:
    names = {number: piece for piece, number in vocabulary().items()}
    return [names[int(number)] for number in ids]


def test_texts_become_word_pieces_as_in_bert(ensemble: ModelSource) -> None:
    tokens = tokenize(ensemble, "The ÉVENT was disappointing, zip!", "漢")
    assert {array.dtype for array in tokens.values()} == {np.dtype(np.int32)}
    first, second = tokens["input_ids"]
    words = ["the", "event", "was", "disappoin", "##ting", ",", "z", "##i", "##p", "!"]
    assert pieces(first) == ["[CLS]", *words, "[SEP]"]
    assert pieces(second) == ["[CLS]", "[UNK]", "[SEP]"] + ["[PAD]"] * 9
    assert (first[0], first[-1], second[1], second[-1]) == (101, 102, 100, 0), "BERT's numbers"
    assert tokens["attention_mask"].tolist() == [[1] * 12, [1] * 3 + [0] * 9]
    assert not tokens["token_type_ids"].any()
    assert max(vocabulary().values()) < MINILM_SHAPE.vocabulary


def test_a_text_is_cut_off_at_128_tokens_and_padded_to_a_multiple(tmp_path: Path, ensemble: ModelSource) -> None:
    assert tokenize(ensemble, "good " * 1000)["input_ids"].shape == (1, 128)
    padded = minilm_tokenize.tokenize(make_tokenizer(16), ["good", ""])
    assert padded["input_ids"].shape == (2, 16)
    assert padded["attention_mask"].sum(axis=1).tolist() == [3, 2]


def test_requests_are_texts_of_many_lengths(ensemble: ModelSource) -> None:
    entries = list(
        request_data.parse_entries(
            not_none(ensemble.input_data), [request_data.InputTensor("TEXT", "BYTES", (1,), True)]
        )
    )
    lengths = [tokenize(ensemble, entry["TEXT"][0].decode())["input_ids"].shape[1] for entry in entries]
    assert len(lengths) == 40
    assert min(lengths) < 10 < 25 < max(lengths)
    assert len(set(lengths)) > 8
    assert ensemble.facts["mean_tokens"] == round(float(np.mean(lengths)), 1)


def test_padding_does_not_change_the_output(ensemble: ModelSource) -> None:
    part = replace(ensemble, name="minilm_model")
    (alone,) = run(part, **tokenize(ensemble, "It was great."))
    (other_models,) = run(
        part, **tokenize(ensemble, "It was great.", "The actor was really charming, and we laughed.")
    )
    assert other_models.shape == (2, 2)
    assert np.isfinite(other_models).all()
    np.testing.assert_allclose(other_models[0], alone[0], atol=1e-5)
    assert np.abs(other_models[0] - other_models[1]).max() > 1e-4


def test_requests_without_the_tokenizer_say_their_shape(bare_minilm: ModelSource) -> None:
    inputs = [request_data.InputTensor(item.name, item.datatype, item.dims, True) for item in TOKENS]
    for entry in request_data.parse_entries(not_none(bare_minilm.input_data), inputs):
        assert {array.shape for array in entry.values()} == {(7,)}


# -- models of images -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resnext_tells_images_apart_and_batches_are_their_parts(tmp_path: Path, precision: str) -> None:
    source = obtain(tmp_path, "resnext", depth="50", image=64, precision=precision)
    dtype = np.float16 if precision == "fp16" else np.float32
    images = np.random.default_rng(3).standard_normal((2, 3, 64, 64)).astype(dtype)
    (batch,) = run(source, input__0=images)
    assert batch.shape == (2, 1000)
    assert np.isfinite(batch).all()
    (first_alone,) = run(source, input__0=images[:1])
    np.testing.assert_allclose(batch[:1].astype(np.float32), first_alone.astype(np.float32), atol=2e-2)
    assert 0.05 < np.abs(batch.astype(np.float32)).mean() < 50, "neither vanished nor exploded"
    assert np.abs(batch[0] - batch[1]).max() > 1e-3


def test_the_text_recogniser_reads_26_places(tmp_path: Path) -> None:
    source = obtain(tmp_path, "text_recognition", width=64)
    words = np.random.default_rng(4).standard_normal((2, 1, 32, 100)).astype(np.float32)
    (logits,) = run(source, **{"input.1": words})
    assert logits.shape == (2, 26, 37)
    assert np.isfinite(logits).all()
    assert 0.05 < np.abs(logits).mean() < 50
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


# -- stateful models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "strategy"), [("accumulator", "oldest"), ("gru", "direct")])
def test_the_configuration_has_all_control_inputs(tmp_path: Path, name: str, strategy: str) -> None:
    source = build(name, {}, cache=tmp_path, max_batch_size=4, kind="KIND_CPU", on_progress=print)
    assert source.is_stateful
    batching = source.config.sequence_batching
    assert batching.WhichOneof("strategy_choice") == strategy
    assert [control.name for control in batching.control_input] == ["START", "END", "READY", "CORRID"]
    assert (source.repository / name / "1" / "model.py").exists()


def test_a_step_of_the_graph_computes_a_gru(tmp_path: Path) -> None:
    graph = draw_gru(HIDDEN, np.random.default_rng(1))
    graph.save(tmp_path / "step.onnx")
    model = onnx.load(str(tmp_path / "step.onnx"))
    onnx.checker.check_model(model, full_check=True)
    w = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    rng = np.random.default_rng(2)
    x, h = (rng.standard_normal((3, width)).astype(np.float32) for width in (64, HIDDEN))
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"), providers=["CPUExecutionProvider"])
    output, after = session.run(["output", "next_state"], {"input": x, "state": h})

    def sigmoid(values: Any) -> Any:
        return 1 / (1 + np.exp(-values))

    wz, wr, wh = np.split(w["gru.input"][0], 3)
    rz, rr, rh = np.split(w["gru.recurrent"][0], 3)
    z, r = sigmoid(x @ wz.T + h @ rz.T), sigmoid(x @ wr.T + h @ rr.T)
    expected = (1 - z) * np.tanh(x @ wh.T + (r * h) @ rh.T) + z * h
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output, expected @ w["output.weight"], rtol=1e-4, atol=1e-5)
