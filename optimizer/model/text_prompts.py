"""Prompts and sampling parameters as texts, for language models that read text instead of tokens."""

from __future__ import annotations

import json

import numpy as np

STREAM_FLAGS = ("stream", "streaming")  # inputs with which Triton's LLM backends are asked to stream
# frequent words, each of which is one token in the vocabularies of most models
_WORDS = (
    "time year people way day man thing life child world school state family group country problem hand part place "
    "case week company system program work number night point home water room area money story month book word side"
)


def prompt_text(words: int, rng: np.random.Generator) -> bytes:
    """Return a text of so many random words."""
    return " ".join(rng.choice(_WORDS.split(), words)).encode()


def sampling_parameters(tokens: int) -> bytes:
    """Return vLLM's sampling parameters (JSON) for exactly so many tokens: an end token does not end the output."""
    return json.dumps({"max_tokens": tokens, "ignore_eos": True}).encode()
