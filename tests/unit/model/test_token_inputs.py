"""Prompts and numbers of tokens in the inputs of models as their backends declare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.request_sizes import TokenRequests, parse_token_lengths
from optimizer.model import input_data
from optimizer.model.input_data import InputTensor
from optimizer.model.requests import RequestBatching, RequestOptions, prepare_requests

VLLM = """\
name: "vllm"
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 }
"""
TENSORRT_LLM = """\
name: "tensorrt_llm"
max_batch_size: 64
input { name: "input_ids" data_type: TYPE_INT32 dims: -1 allow_ragged_batch: true }
input { name: "input_lengths" data_type: TYPE_INT32 dims: 1 reshape { } }
input { name: "request_output_len" data_type: TYPE_INT32 dims: 1 }
input { name: "streaming" data_type: TYPE_BOOL dims: 1 }
"""
TEXT = '{"max_tokens": {tokens}, "ignore_eos": true}'


def tokens(prompt_input: str, output_input: str, **more: Any) -> TokenRequests:
    return TokenRequests(parse_token_lengths("3..6"), parse_token_lengths("8..9"), prompt_input, output_input, **more)


def samples(model: str, requests: TokenRequests, cache: Path, *ranges: str) -> list[input_data.InputSample]:
    config = text_format.Parse(model, ModelConfig())
    result = prepare_requests(RequestOptions(ranges=ranges), config, RequestBatching(), cache, requests)
    types = {"TYPE_STRING": "BYTES"}
    tensors = []
    for tensor in config.input:
        name = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
        datatype = types.get(name, name.removeprefix("TYPE_"))
        tensors.append(InputTensor(tensor.name, datatype, tuple(tensor.dims), config.max_batch_size > 0))
    return input_data.read(Path(result.input_data), tensors)


def test_text_and_a_json_text_for_vllm(tmp_path: Path) -> None:
    sent = samples(VLLM, tokens("text_input", "sampling_parameters", output_text=TEXT), tmp_path, "stream:1..1")
    words = [sample["text_input"][0].decode().split() for sample in sent]
    assert {len(row) for row in words} == {3, 4, 5, 6}
    assert len({" ".join(row) for row in words}) > 200
    parameters = [json.loads(sample["sampling_parameters"][0]) for sample in sent]
    assert {row["max_tokens"] for row in parameters} == {8, 9}
    assert all(row["ignore_eos"] is True for row in parameters)
    assert all(sample["stream"].tolist() == [True] for sample in sent)


def test_the_number_of_tokens_of_the_prompt_for_tensorrt_llm(tmp_path: Path) -> None:
    requests = tokens("input_ids", "request_output_len", length_input="input_lengths")
    sent = samples(TENSORRT_LLM, requests, tmp_path, "input_ids:0..31999", "streaming:1..1")
    assert all(sample["input_lengths"].tolist() == [sample["input_ids"].size] for sample in sent)
    assert {int(sample["request_output_len"][0]) for sample in sent} == {8, 9}
    assert max(np.max(sample["input_ids"]) for sample in sent) < 32000


@pytest.mark.parametrize(
    ("model", "requests", "ranges", "words"),
    [
        (VLLM, tokens("text_input", "sampling_parameters"), (), "a string needs tokens.output_text, such as '{"),
        (VLLM, tokens("stream", "sampling_parameters", output_text=TEXT), (), "it is BOOL [1], but a prompt needs"),
        (TENSORRT_LLM, tokens("input_ids", "request_output_len", output_text=TEXT), (), "only a string has tokens"),
        (
            TENSORRT_LLM,
            tokens("input_ids", "request_output_len", length_input="streaming"),
            (),
            "length_input: streaming: it is BOOL [1]",
        ),
        (TENSORRT_LLM, tokens("input_ids", "streaming"), (), "output_input: streaming: it is BOOL [1]"),
        (TENSORRT_LLM, tokens("input_ids", "request_output_len"), ("streaming:0..2",), "streaming is BOOL: write"),
        (
            TENSORRT_LLM,
            tokens("input_ids", "request_output_len", length_input="input_lengths"),
            ("input_lengths:0..2",),
            "input input_lengths: the tokens: section gives its values",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, model: str, requests: TokenRequests, ranges: tuple[str, ...], words: str
) -> None:
    with pytest.raises((BadInputError, ParameterError)) as caught:
        samples(model, requests, tmp_path, *ranges)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
