"""MiniLM behind its tokenizer, as an ensemble: a text in, the logits of two labels out.

    minilm            ensemble   TEXT STRING [1] -> output FP32 [2]
    minilm_tokenize   python     TEXT -> input_ids, token_type_ids, attention_mask INT32 [-1]
    minilm_model      ONNX       these three -> output, see ``minilm_model``

The tokenizer is BERT's (lower case, word pieces) with a small vocabulary. Requests of one batch have to be of one
length in the model, so that texts of different lengths make batches only where they are padded to a common multiple.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field
from tritonclient.grpc import model_config_pb2 as pb

from optimizer.models import minilm_model, serving
from optimizer.models.builder import Builder, Draft, Facts, Interface, Kind, Say, Settings, Tensor
from optimizer.models.input_data import write_texts
from optimizer.models.minilm_model import SHAPE
from optimizer.models.sentences import sentences, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME, TOKENIZE, MODEL = "minilm", "minilm_tokenize", "minilm_model"
TEXT = Tensor("TEXT", "STRING", (1,))
TOKENS = minilm_model.INTERFACE.inputs
INTERFACE = Interface(inputs=(TEXT,), outputs=minilm_model.INTERFACE.outputs)
MOST_TOKENS = 128  # a text is cut off there


class MinilmSettings(Settings):
    """``pad_to_multiple_of`` tokens each text is padded to; 1 is as long as it is. ``samples`` of request data."""

    pad_to_multiple_of: int = Field(default=1, ge=1, le=MOST_TOKENS)
    samples: int = Field(default=251, ge=1)
    seed: int = Field(default=0, ge=0)


def write(settings: MinilmSettings, draft: Draft, say: Say) -> Facts:
    say(f"building minilm: a tokenizer, and {SHAPE.layers} layers of {SHAPE.hidden}")
    values, requests = (np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(2))
    tokenizer = make_tokenizer(settings.pad_to_multiple_of)
    tokenize = draft.beside(TOKENIZE).version
    shutil.copyfile(Path(__file__).with_name("minilm_tokenize.py"), tokenize / "model.py")
    tokenizer.save(str(tokenize / "tokenizer.json"))
    parameters = minilm_model.write_model(draft.beside(MODEL).version, values)
    texts = sentences(settings.samples, requests)
    write_texts(draft.input_data, TEXT.name, texts)
    return {
        "precision": "fp32",
        "mean_tokens": round(float(np.mean([len(tokenizer.encode(text).ids) for text in texts])), 1),
        "pad_to_multiple_of": settings.pad_to_multiple_of,
        "parameters": parameters,
        "seed": settings.seed,
    }


def make_tokenizer(pad_to_multiple_of: int) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = vocabulary()
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", pieces["[SEP]"]), ("[CLS]", pieces["[CLS]"]))
    tokenizer.enable_truncation(MOST_TOKENS)
    tokenizer.enable_padding(pad_to_multiple_of=pad_to_multiple_of)
    return tokenizer


def configs(max_batch_size: int, kind: Kind) -> Sequence[pb.ModelConfig]:
    ensemble = pb.ModelConfig(name=NAME, platform="ensemble", max_batch_size=max_batch_size)
    steps = ensemble.ensemble_scheduling.step
    names = [tensor.name for tensor in TOKENS]
    _add_step(steps, TOKENIZE, [TEXT.name], names)
    _add_step(steps, MODEL, names, [minilm_model.OUTPUT])
    tokenize = pb.ModelConfig(name=TOKENIZE, backend="python", max_batch_size=max_batch_size)
    return [
        serving.with_tensors(ensemble, INTERFACE),
        serving.with_instance(serving.with_tensors(tokenize, Interface((TEXT,), TOKENS)), "KIND_CPU"),
        serving.onnx_config(MODEL, minilm_model.INTERFACE, max_batch_size, kind),
    ]


def _add_step(steps: pb.ModelEnsembling, model: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """A tensor has the same name in the ensemble as in its models."""
    same_inputs, same_outputs = ({name: name for name in names} for names in (inputs, outputs))
    steps.add(model_name=model, model_version=-1, input_map=same_inputs, output_map=same_outputs)


BUILDER = Builder(
    name=NAME,
    version=1,
    source="transformer-deploy, demo",
    settings=MinilmSettings,
    interface=lambda _: INTERFACE,
    write=write,
    configs=configs,
)
