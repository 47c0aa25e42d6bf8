"""Tests of the lengths of prompts and outputs: their syntax, and the drawn numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.token_lengths import MAX_TOKENS, TokenRequests, names_file, parse_token_lengths


def drawn(lengths: SizeDistribution, count: int, seed: int = 0) -> list[int]:
    values: list[int] = lengths.draw(count, np.random.default_rng(seed)).tolist()
    return values


def test_a_number_is_the_length_of_all() -> None:
    lengths = parse_token_lengths(" 128 ")
    assert (lengths.fixed, lengths.largest) == (128, 128)
    assert drawn(lengths, 3) == [128] * 3


@pytest.mark.parametrize("seed", range(3))
def test_a_range_is_uniform(seed: int) -> None:
    assert Counter(drawn(parse_token_lengths("5..8"), 400, seed)) == {5: 100, 6: 100, 7: 100, 8: 100}


def test_a_lognormal_distribution_has_its_median_and_sigma() -> None:
    lengths = parse_token_lengths("lognormal:200:0.5")
    assert lengths.largest == round(200 * np.exp(1.5))
    values = np.array(drawn(lengths, 20_000))
    assert np.median(values) == pytest.approx(200, rel=0.01)
    assert np.log(values).std() == pytest.approx(0.5, rel=0.02)
    assert values.max() <= lengths.largest
    assert np.mean(values == lengths.largest) < 0.01


def test_a_short_lognormal_distribution_has_at_least_one_token() -> None:
    values = drawn(parse_token_lengths("lognormal:1:1"), 1000)
    assert min(values) == 1
    assert max(values) <= 20


def test_a_file_is_drawn_with_replacement(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10\n10\n\n 30 \n10\n")
    lengths = parse_token_lengths("lengths.txt", tmp_path)
    assert Counter(drawn(lengths, 400)) == {10: 300, 30: 100}
    assert parse_token_lengths(str(tmp_path / "lengths.txt")) == lengths


def test_the_order_follows_from_the_seed() -> None:
    lengths = parse_token_lengths("1..1000")
    assert drawn(lengths, 50) == drawn(lengths, 50)
    assert drawn(lengths, 50) != drawn(lengths, 50, seed=1)


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "+5",
        "1.5",
        "0..4",
        "9..4",
        "4..",
        "4...9",
        "5,6",
        f"{MAX_TOKENS + 1}",
        "1" * 5000,
        "lognormal:",
        "lognormal:100",
        "lognormal:0:1",
        "lognormal:100:0",
        "lognormal:100:-1",
        "lognormal:1.2.3:1",
        "lognormal:nan:1",
        "lognormal:100:9",
        "lognormal:900000:1",
        "",
        "missing.txt",
        "\0",
    ],
)
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|take") as caught:
        parse_token_lengths(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"), [("5\n0\n", "line 2: 0"), ("five", "line 1: five"), ("", "no lengths")]
)
def test_a_file_with_other_lines_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "lengths").write_text(content)
    with pytest.raises(ValueError, match=words):
        parse_token_lengths("lengths", tmp_path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lengths").open("wb") as file:
        file.truncate(1 << 25)
    with pytest.raises(BadInputError, match="16 MiB"):
        parse_token_lengths("lengths", tmp_path)


def test_only_paths_name_a_file() -> None:
    texts = ["128", "32..256", "lognormal:1:2", "-5", "a.txt", "./128", "/tmp/x", "lognormal.txt"]
    assert [text for text in texts if names_file(text)] == ["a.txt", "./128", "/tmp/x", "lognormal.txt"]


def test_a_prompt_and_its_output_must_fit_the_model() -> None:
    prompt, output = parse_token_lengths("16..64"), parse_token_lengths("32")
    TokenRequests(prompt, output, "ids", "tokens", 96).check()
    TokenRequests(prompt, output, "ids", "tokens").check()
    with pytest.raises(ValueError, match=r"up to 64 tokens and outputs of up to 32 are 96 tokens, .* at most 95"):
        TokenRequests(prompt, output, "ids", "tokens", 95).check()
