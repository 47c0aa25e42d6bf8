"""Requests of tokens, as a tokenizer leaves them: ids, segments, mask."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

FIRST_WORD = 999  # of BERT's vocabulary: what comes before are marks, unused entries and single letters
CLASSIFY, SEPARATE = 101, 102
QUESTION_SHARE = 0.08  # of the tokens: some 12 of a SQuAD question before 150 of its paragraph
PADDED_SHARE = 0.5  # of the sequence at most


def token_requests(
    samples: int, tokens: int, vocabulary: int, rng: np.random.Generator
) -> tuple[Tokens, Tokens, Tokens]:
    """Ids, segment ids and mask, [samples, tokens] each: a question and a paragraph, padded to the sequence's length.

    What a request costs does not depend on the padding, which is computed as any token is.
    """
    ids = rng.integers(FIRST_WORD, vocabulary, (samples, tokens), dtype=np.int32)
    lengths = rng.integers(max(1, round((1 - PADDED_SHARE) * tokens)), tokens + 1, (samples, 1))
    places = np.arange(tokens)[None, :]
    mask = (places < lengths).astype(np.int32)
    question = max(1, round(QUESTION_SHARE * tokens))
    ids[:, 0] = CLASSIFY
    ids[places == lengths - 1] = SEPARATE
    segments = ((places > question) & (mask == 1)).astype(np.int32)
    return ids * mask, segments, mask
