"""Request data of the reference models: token ids and English-like texts, written for perf_analyzer."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.model.input_data import to_json


def write_input_data(path: Path, columns: Mapping[str, npt.NDArray[Any]], *, with_shapes: bool = False) -> None:
    """Write one entry per sample. A column holds the samples of an input, ``[samples, *dims]``, in the input's dtype.

    ``with_shapes``: write the shape of each tensor, which inputs with dynamic dims need. perf_analyzer with ``-b B``
    joins B successive entries into a request and starts over at the end. It reads the whole file at every start.
    """
    rows = zip(*columns.values(), strict=True)
    samples = [dict(zip(columns, row, strict=True)) for row in rows]
    path.write_bytes(to_json(samples, with_shapes=with_shapes))


Tokens = npt.NDArray[np.int32]

FIRST_WORD = 999  # first id of BERT's vocabulary after special tokens and unused entries
CLASSIFY, SEPARATE = 101, 102
QUESTION_SHARE = 0.08  # share of the tokens: SQuAD has about 12 in a question and 150 in a paragraph
MAX_PADDED_SHARE = 0.5  # largest share of the sequence that is padding


def token_requests(
    samples: int, tokens: int, vocabulary: int, rng: np.random.Generator
) -> tuple[Tokens, Tokens, Tokens]:
    """Return ids, segment ids and mask, [samples, tokens] each: a question and a paragraph, padded.

    Padding does not change the cost of a request, because it is computed like any token.
    """
    ids = rng.integers(FIRST_WORD, vocabulary, (samples, tokens), dtype=np.int32)
    lengths = rng.integers(max(1, round((1 - MAX_PADDED_SHARE) * tokens)), tokens + 1, (samples, 1))
    positions = np.arange(tokens)[None, :]
    mask = (positions < lengths).astype(np.int32)
    question = max(1, round(QUESTION_SHARE * tokens))
    ids[:, 0] = CLASSIFY
    ids[positions == lengths - 1] = SEPARATE
    segments = ((positions > question) & (mask == 1)).astype(np.int32)
    return ids * mask, segments, mask


THINGS = """
film movie story plot ending cast actor concert band singer event show book chapter hotel room breakfast restaurant
kitchen waiter service phone screen battery camera keyboard website delivery price museum tour"""
QUALITIES = """
great good wonderful brilliant charming funny clever beautiful surprising excellent comfortable honest fresh friendly
bad boring awful terrible disappointing confusing expensive noisy predictable forgettable broken slow dirty
unbearable careless ordinary"""
DEGREES = "very really quite rather truly almost never always surprisingly incredibly"
LINKS = "and but although because while whenever unless"
REMARKS = """
i would go again
i will not come back
we laughed a lot
nobody in the audience moved
my friends agreed
it was worth every cent
it took far too long
they should have known better
you can't ask for more
i'd recommend it to anyone
she left after twenty minutes
we're still talking about it"""
COMMON = """
a an the this that these those is are be been has have had do did does not no yes on in at by for from of off to up
with as about into over more most some any all one two first last new old day time year people way what who when where
why how which there here he she we they you me him her us them my your his our their live sign right home life"""
SPECIAL_TOKENS = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
MAX_WHOLE_WORD_LENGTH = 7  # longer words are two pieces, as rare words are in a vocabulary of fixed size
ENDING_LETTERS = 4  # length of the second piece
REMARK_SHARE = 0.3
LAST_CLAUSE_PROBABILITY = 0.5
MAX_CLAUSES = 12


def sentences(count: int, rng: np.random.Generator) -> list[str]:
    """Return texts of 1 to 12 clauses, most of them short: 6 to about 60 tokens."""
    return [_sentence(rng) for _ in range(count)]


def vocabulary() -> dict[str, int]:
    """Return the word pieces and their ids; they can spell every ASCII text."""
    text = " ".join([THINGS, QUALITIES, DEGREES, LINKS, REMARKS, COMMON, "was"])
    pieces = [SPECIAL_TOKENS.get(number, f"[unused{number}]") for number in range(FIRST_WORD)]
    pieces += string.punctuation + string.digits + string.ascii_lowercase
    pieces += [f"##{character}" for character in string.digits + string.ascii_lowercase]
    for word in re.findall("[a-z]+", text):
        pieces += (
            [word] if len(word) <= MAX_WHOLE_WORD_LENGTH else [word[:-ENDING_LETTERS], f"##{word[-ENDING_LETTERS:]}"]
        )
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def _sentence(rng: np.random.Generator) -> str:
    clauses = min(int(rng.geometric(LAST_CLAUSE_PROBABILITY)), MAX_CLAUSES)
    text = _clause(rng) + "".join(f", {_pick(LINKS.split(), rng)} {_clause(rng)}" for _ in range(clauses - 1))
    return f"{text[0].upper()}{text[1:]}{_pick(['.', '!'], rng)}"


def _clause(rng: np.random.Generator) -> str:
    if rng.random() < REMARK_SHARE:
        return _pick(REMARKS.strip().split("\n"), rng)
    thing, degree, quality = (_pick(words.split(), rng) for words in (THINGS, DEGREES, QUALITIES))
    return f"the {thing} was {degree} {quality}"


def _pick(choices: list[str], rng: np.random.Generator) -> str:
    return choices[rng.integers(len(choices))]
