"""The prompts of a model that streams: their lengths by profile and command line, and the file of requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.model import input_data
from optimizer.model.builders import tinygpt
from optimizer.options.run_options import RunOptions
from optimizer.study.run_record import problem_document
from optimizer.study.task import Task, prepare_task

LAPTOP = Hardware(gpus=(), cpu="a CPU", cpu_count=2, memory_bytes=8 << 30)
MODEL = """\
model: {builder: tinygpt, settings: {layers: 1, hidden: 16, heads: 2, vocabulary: 50, positions: 160}}
"""
TOKENS = "prompt_input: INPUT_IDS, output_input: MAX_TOKENS, output_tensor: OUTPUT_ID, maximum: 160"
PROFILE = MODEL + f"request: {{ranges: {{INPUT_IDS: [0, 49]}}}}\ntokens: {{prompt: 16..19, output: 32, {TOKENS}}}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has the cache and the profile."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(PROFILE)
    return tmp_path


def prepare(**options: Any) -> Task:
    return prepare_task(RunOptions(options.pop("model", "p.yaml"), **options), LAPTOP, lambda _: None)


def requests(task: Task) -> list[input_data.InputSample]:
    inputs = tinygpt.interface(tinygpt.TinyGptSettings()).inputs
    tensors = [input_data.InputTensor(spec.name, spec.datatype, spec.dims, True) for spec in inputs]
    return list(input_data.parse_entries(task.input_data, tensors))


def lengths(task: Task) -> tuple[Counter[int], Counter[int]]:
    """Return how often each length of a prompt and of an output is in the requests."""
    samples = requests(task)
    return (
        Counter(sample["INPUT_IDS"].size for sample in samples),
        Counter(int(sample["MAX_TOKENS"][0]) for sample in samples),
    )


def test_the_profile_gives_the_lengths() -> None:
    task = prepare()
    assert task.token_output == "OUTPUT_ID"
    assert problem_document(task)["tokens"] == {
        "prompt": {
            "smallest": 16,
            "mean": 17.5,
            "largest": 19,
            "quantiles": [16] * 5 + [17] * 5 + [18] * 6 + [19] * 5,
        },
        "output": {"smallest": 32, "mean": 32, "largest": 32, "quantiles": [32] * 21},
    }
    assert not task.problem.is_simulated
    assert lengths(task) == ({16: 64, 17: 64, 18: 64, 19: 64}, {32: 256})
    tokens = np.concatenate([sample["INPUT_IDS"] for sample in requests(task)])
    assert (tokens.min(), tokens.max()) == (0, 49)
    assert task.unbounded == ()


def test_options_replace_those_of_the_profile(folder: Path) -> None:
    (folder / "lengths.txt").write_text("3\n5\n")
    assert lengths(prepare(prompt_tokens="lengths.txt")) == ({3: 128, 5: 128}, {32: 256})
    assert lengths(prepare(output_tokens="1..4")) == (
        {16: 64, 17: 64, 18: 64, 19: 64},
        {1: 64, 2: 64, 3: 64, 4: 64},
    )


def test_lengths_of_prompts_and_outputs_are_independent() -> None:
    samples = requests(prepare(output_tokens="1..4"))
    pairs = {(sample["INPUT_IDS"].size, int(sample["MAX_TOKENS"][0])) for sample in samples}
    assert len(pairs) == 16


def test_the_requests_follow_from_the_seed() -> None:
    assert prepare().input_data == prepare().input_data
    assert prepare().input_data != prepare(seed=1).input_data


def test_without_a_section_the_builders_prompts_are_sent(folder: Path) -> None:
    (folder / "p.yaml").write_text(MODEL)
    task = prepare()
    assert task.input_data.name == "input_data.json"
    assert task.token_output == ""
    assert problem_document(task)["tokens"] is None


def test_recorded_prompts_of_the_command_line_replace_the_lengths(folder: Path) -> None:
    samples = [{"INPUT_IDS": np.array([1, 2], np.int32), "MAX_TOKENS": np.array([7], np.int32)}]
    (folder / "mine.json").write_bytes(input_data.to_json(samples))
    assert lengths(prepare(input_data="mine.json")) == ({2: 1}, {7: 1})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_tokens": "0"}, "--prompt-tokens 0: write lengths from 1"),
        ({"prompt_tokens": "5..3"}, "the lower one first"),
        ({"output_tokens": "none.txt"}, "--output-tokens none.txt: no such file; write a number"),
        ({"prompt_tokens": "cache"}, "--prompt-tokens cache: is a folder; write a number"),
        ({"prompt_tokens": ""}, "--prompt-tokens '': write a number"),
        (
            {"output_tokens": "150"},
            "--output-tokens 150: prompts of up to 19 tokens and outputs of up to 150 are 169",
        ),
        ({"prompt_tokens": "3", "model": "mlp"}, "--prompt-tokens 3: mlp sends one response to a request"),
        ({"prompt_tokens": "3", "input_data": "mine.json"}, "--prompt-tokens 3: the input data mine.json"),
        ({"model_warmup": True}, "--model-warmup: tinygpt streams, "),
        ({"shapes": ("INPUT_IDS:3",)}, "input INPUT_IDS: the tokens: section gives its values"),
        ({"input_ranges": ("MAX_TOKENS:1..3",)}, "input MAX_TOKENS: the tokens: section gives its values"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        prepare(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_section_needs_one(folder: Path) -> None:
    (folder / "p.yaml").write_text(MODEL)
    with pytest.raises(BadInputError, match=r"tokens: \{prompt_input: NAME, output_input: NAME\}"):
        prepare(prompt_tokens="3", output_tokens="4")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            "prompt_input: IDS, output_input: MAX_TOKENS",
            "p.yaml:2: tokens.prompt_input: IDS: tinygpt has no such",
        ),
        ("prompt_input: MAX_TOKENS, output_input: INPUT_IDS", "MAX_TOKENS: it is INT32 [1], but a prompt needs"),
        (TOKENS.replace("OUTPUT_ID", "IDS"), "p.yaml:2: tokens.output_tensor: IDS: tinygpt has no such output"),
        ("prompt_input: INPUT_IDS, output_input: INPUT_IDS", "INPUT_IDS: it is INT32 [-1], but the number of tokens"),
    ],
)
def test_the_inputs_must_fit(folder: Path, section: str, words: str) -> None:
    (folder / "p.yaml").write_text(f"{MODEL}tokens: {{prompt: 3, output: 4, {section}}}\n")
    with pytest.raises(BadInputError) as caught:
        prepare()
    assert words in str(caught.value)


def test_a_model_that_does_not_stream_has_no_tokens(folder: Path) -> None:
    (folder / "p.yaml").write_text(
        "model: {builder: mlp}\ntokens: {prompt: 3, output: 4, prompt_input: input, output_input: x}\n"
    )
    with pytest.raises(BadInputError, match=r"p.yaml:2: tokens: mlp sends one response to a request"):
        prepare()
