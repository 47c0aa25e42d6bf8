"""Short reviews as people write them, and a vocabulary of word pieces for them laid out as BERT's."""

from __future__ import annotations

import re
import string

import numpy as np

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
MARKS = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
FIRST_CHARACTER = 999  # where BERT's vocabulary has it; marks and unused entries come before
LONGEST_WHOLE_WORD = 7  # longer ones are split in two, as the rarer ones are in a vocabulary of fixed size
ENDING = 4  # letters of the second piece
REMARK_SHARE = 0.3
LAST_CLAUSE = 0.5  # probability that the text ends with a clause
MOST_CLAUSES = 12


def sentences(count: int, rng: np.random.Generator) -> list[str]:
    """One to a dozen clauses each, most of them short: 6 to some 60 tokens."""
    return [_sentence(rng) for _ in range(count)]


def vocabulary() -> dict[str, int]:
    """Pieces and their ids. Any text of ASCII characters can be spelt, letter by letter at worst."""
    text = " ".join([THINGS, QUALITIES, DEGREES, LINKS, REMARKS, COMMON, "was"])
    pieces = [MARKS.get(place, f"[unused{place}]") for place in range(FIRST_CHARACTER)]
    pieces += string.punctuation + string.digits + string.ascii_lowercase
    pieces += [f"##{character}" for character in string.digits + string.ascii_lowercase]
    for word in re.findall("[a-z]+", text):
        pieces += [word] if len(word) <= LONGEST_WHOLE_WORD else [word[:-ENDING], f"##{word[-ENDING:]}"]
    return {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}


def _sentence(rng: np.random.Generator) -> str:
    clauses = min(int(rng.geometric(LAST_CLAUSE)), MOST_CLAUSES)
    text = _clause(rng) + "".join(f", {_one(LINKS.split(), rng)} {_clause(rng)}" for _ in range(clauses - 1))
    return f"{text[0].upper()}{text[1:]}{_one(['.', '!'], rng)}"


def _clause(rng: np.random.Generator) -> str:
    if rng.random() < REMARK_SHARE:
        return _one(REMARKS.strip().split("\n"), rng)
    thing, degree, quality = (_one(words.split(), rng) for words in (THINGS, DEGREES, QUALITIES))
    return f"the {thing} was {degree} {quality}"


def _one(choices: list[str], rng: np.random.Generator) -> str:
    return choices[rng.integers(len(choices))]
