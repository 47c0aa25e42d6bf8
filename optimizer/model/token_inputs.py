"""The inputs of a model that streams: a prompt, its number of tokens, and the number of tokens to generate.

A prompt is integers of a variable size, or a string. A string gets as many common English words as the prompt has
tokens, since most tokenizers make one token of such a word. The number of tokens to generate is an integer, or a
string such as ``{"max_tokens": 32}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.core.errors import ParameterError
from optimizer.core.request_sizes import TOKENS_PLACEHOLDER, InputShape, SizeDistribution, TokenRequests
from optimizer.core.safe_text import one_line
from optimizer.model.builders.request_data import COMMON
from optimizer.model.input_data import InputSample, InputTensor

OUTPUT_SEED, PROMPT_SEED = 2, 3  # streams of random numbers, so that lengths do not depend on each other


@dataclass(frozen=True)
class TokenInputs:
    """The lengths ``tokens`` and the inputs of the model that get them. Raises ParameterError if these do not fit."""

    tokens: TokenRequests
    tensors: Mapping[str, InputTensor]
    model: str

    def __post_init__(self) -> None:
        prompt, output = (
            self._tensor(key, name)
            for key, name in (("prompt_input", self.tokens.prompt_input), ("output_input", self.tokens.output_input))
        )
        if not (_is_text(prompt) or (_is_whole(prompt) and prompt.dims.count(-1) == 1)):
            raise self._fault("prompt_input", prompt, "a prompt needs integers with one variable size, or strings")
        if not (_is_text(output) or (_is_whole(output) and -1 not in output.dims)):
            raise self._fault("output_input", output, "the number of tokens needs an integer of a fixed size")
        if _is_text(output) != bool(self.tokens.output_text):
            example = f'{{"max_tokens": {TOKENS_PLACEHOLDER}, "ignore_eos": true}}'
            needs = "a string needs" if _is_text(output) else "only a string has"
            raise self._fault("output_input", output, f"{needs} tokens.output_text, such as '{example}'")
        if name := self.tokens.length_input:
            length = self._tensor("length_input", name)
            if not _is_whole(length) or -1 in length.dims:
                raise self._fault("length_input", length, "the number of tokens needs an integer of a fixed size")

    @property
    def filled(self) -> tuple[str, ...]:
        """The inputs whose values do not depend on the ranges of the user."""
        filled_inputs = (self.tokens.output_input, self.tokens.length_input)
        return tuple(name for name in filled_inputs if name)

    @property
    def prompt_shape(self) -> InputShape | None:
        """The sizes of the prompt; None for a string."""
        prompt = self.tensors[self.tokens.prompt_input]
        if _is_text(prompt):
            return None
        sizes = (self.tokens.prompt if dim == -1 else SizeDistribution(((dim, dim, 1.0),)) for dim in prompt.dims)
        return InputShape(prompt.name, tuple(sizes))

    def fill(self, samples: Sequence[InputSample], seed: int) -> None:
        """Set the numbers of tokens, and the prompts if they are strings."""
        tokens = self.tokens
        outputs = tokens.output.draw(len(samples), np.random.default_rng([seed, OUTPUT_SEED])).tolist()
        rng = np.random.default_rng([seed, PROMPT_SEED])
        prompts = tokens.prompt.draw(len(samples), rng).tolist()
        is_text, words = _is_text(self.tensors[tokens.prompt_input]), COMMON.split()
        for sample, output, prompt in zip(samples, outputs, prompts, strict=True):
            text = tokens.output_text.replace(TOKENS_PLACEHOLDER, str(output))
            sample[tokens.output_input].fill(text.encode() if text else output)
            if is_text:
                sample[tokens.prompt_input].fill(" ".join(rng.choice(words, prompt)).encode())
            if tokens.length_input:
                sample[tokens.length_input].fill(prompt if is_text else sample[tokens.prompt_input].size)

    def _tensor(self, key: str, name: str) -> InputTensor:
        if name not in self.tensors:
            inputs = one_line(", ".join(self.tensors), 200)
            raise ParameterError(
                key, f"{one_line(name, 60)}: {self.model} has no such input; its inputs are {inputs}"
            )
        return self.tensors[name]

    def _fault(self, key: str, tensor: InputTensor, needs: str) -> ParameterError:
        name = one_line(tensor.name, 60)
        return ParameterError(key, f"{name}: it is {tensor.datatype} {list(tensor.dims)}, but {needs}")


def _is_whole(tensor: InputTensor) -> bool:
    return tensor.datatype.startswith(("INT", "UINT"))


def _is_text(tensor: InputTensor) -> bool:
    return tensor.datatype == "BYTES" and -1 not in tensor.dims
