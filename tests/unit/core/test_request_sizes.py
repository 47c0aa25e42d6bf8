"""Tests of the parsers of shapes, value ranges and numbers of tokens, and of the drawn sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import (
    MAX_TOKENS,
    SizeDistribution,
    TokenRequests,
    names_file,
    parse_bounds,
    parse_input_shape,
    parse_range,
    parse_size_distribution,
    parse_token_lengths,
    select_inputs,
)


def drawn_shapes(text: str, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    return parse_input_shape(text).draw(count, np.random.default_rng(seed))


def test_a_shape_is_written_as_for_perf_analyzer() -> None:
    shape = parse_input_shape("input:0:3, 224,224")
    assert (shape.names, shape.fixed) == ("input:0", (3, 224, 224))
    assert shape.draw(2, np.random.default_rng(0)) == [(3, 224, 224)] * 2


@pytest.mark.parametrize("seed", range(3))
def test_an_interval_is_uniform_whatever_the_seed(seed: int) -> None:
    counts = Counter(drawn_shapes("x:16..19", 256, seed))
    assert counts == {(16,): 64, (17,): 64, (18,): 64, (19,): 64}


@pytest.mark.parametrize("seed", range(3))
def test_weights_are_shares(seed: int) -> None:
    assert Counter(drawn_shapes("x:16*3|128", 256, seed)) == {(16,): 192, (128,): 64}
    assert Counter(drawn_shapes("x:4|8..9*2", 90, seed)) == {(4,): 30, (8,): 30, (9,): 30}


@pytest.mark.parametrize(
    ("text", "fixed", "largest", "mean"),
    [
        ("4", 4, 4, 4),
        ("4|4*2", 4, 4, 4),
        ("1*9|8", None, 8, 1.7),
        ("1..3", None, 3, 2),
        ("1..4*3|16", None, 16, 5.875),
    ],
)
def test_a_mix_has_its_fixed_largest_and_mean_size(text: str, fixed: int | None, largest: int, mean: float) -> None:
    mix = parse_size_distribution(text)
    assert (mix.fixed, mix.largest) == (fixed, largest)
    assert mix.mean == pytest.approx(mean)
    assert mix.draw(4000, np.random.default_rng(0)).mean() == pytest.approx(mean, rel=0.01)


def test_the_order_is_mixed_and_follows_from_the_seed() -> None:
    sizes = drawn_shapes("x:1..100", 100)
    assert sorted(sizes) == [(i,) for i in range(1, 101)]
    assert sizes != sorted(sizes)
    assert sizes == drawn_shapes("x:1..100", 100)
    assert sizes != drawn_shapes("x:1..100", 100, seed=1)


def test_dimensions_are_drawn_on_their_own() -> None:
    pairs = set(drawn_shapes("x:1..4,1..4,7", 256))
    assert len(pairs) == 16
    assert {size for *_, size in pairs} == {7}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=4))
def test_every_size_is_one_of_the_mix(choices: list[tuple[int, int, int]]) -> None:
    text = "|".join(f"{low}..{low + more}*{weight}" for low, more, weight in choices)
    allowed = {size for low, more, _ in choices for size in range(low, low + more + 1)}
    assert {size for (size,) in drawn_shapes(f"x:{text}", 64)} <= allowed


@pytest.mark.parametrize("text", ["1*2000000|2*1", "1*0.00001|2..5*0.25", "1*123456789|7*0.333333333", "3"])
def test_the_text_of_a_mix_has_no_exponent(text: str) -> None:
    assert str(parse_size_distribution(text)) == text
    assert parse_size_distribution(str(parse_size_distribution(text))) == parse_size_distribution(text)


def test_a_shape_fits_the_dimensions_of_a_model() -> None:
    mix = parse_input_shape("x:3,16..32")
    assert mix.fits_model([-1, -1])
    assert mix.fits_model([3, -1])
    assert not mix.fits_model([4, -1])
    assert not mix.fits_model([3, 32])
    assert not mix.fits_model([-1])


def test_inputs_are_selected_by_name() -> None:
    assert select_inputs("a, b", ["a", "b", "c"]) == ("a", "b")
    assert select_inputs("a,b", ["a,b", "a"]) == ("a,b",)
    with pytest.raises(ValueError, match="the model's inputs are a, b"):
        select_inputs("a,z", ["a", "b"])


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("0..30521", (0, 30521)), ("-5..5", (-5, 5)), ("-1.5..2", (-1.5, 2.0)), ("1e-3..1", (1e-3, 1))],
)
def test_bounds_are_read(text: str, bounds: tuple[float, float]) -> None:
    assert parse_bounds(text) == bounds
    assert parse_range(f"a,b:{text}") == ("a,b", bounds)


@pytest.mark.parametrize(
    "text", ["", "5", "..", "1..", "2..1", "nan..1", "0..inf", "0..1e999", "a..b", "٣..٤", "1.2.3..4", "e..1"]
)
def test_invalid_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"LOW\.\.HIGH"):
        parse_bounds(text)


def test_exchanged_bounds_are_named() -> None:
    with pytest.raises(ValueError, match=r"^the lower bound is above the upper one; write LOW"):
        parse_bounds("5..1")


@pytest.mark.parametrize(
    "text",
    ["x", ":5", "x:", "x:0", "x:-1", "x:5..3", "x:5*0", "x:2147483648", "x:1.5", "x:3,", "x:" + "1|" * 64 + "1"],
)
def test_invalid_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|sizes are|at most"):
        parse_input_shape(text)


def drawn_tokens(lengths: SizeDistribution, count: int, seed: int = 0) -> list[int]:
    values: list[int] = lengths.draw(count, np.random.default_rng(seed)).tolist()
    return values


@pytest.mark.parametrize("text", ["128", "5..8"])
def test_lengths_in_tokens_are_drawn_as_sizes(text: str) -> None:
    assert parse_token_lengths(f" {text} ") == parse_size_distribution(text)


def test_a_lognormal_distribution_has_its_median_and_sigma() -> None:
    lengths = parse_token_lengths("lognormal:200:0.5")
    assert lengths.largest == round(200 * np.exp(1.5))
    values = np.array(drawn_tokens(lengths, 20_000))
    assert np.median(values) == pytest.approx(200, rel=0.01)
    assert np.log(values).std() == pytest.approx(0.5, rel=0.02)
    assert values.max() <= lengths.largest
    assert np.mean(values == lengths.largest) < 0.01


def test_a_short_lognormal_distribution_has_at_least_one_token() -> None:
    values = drawn_tokens(parse_token_lengths("lognormal:1:1"), 1000)
    assert min(values) == 1
    assert max(values) <= 20


def test_a_file_is_drawn_with_replacement(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10\n10\n\n 30 \n10\n")
    lengths = parse_token_lengths(str(tmp_path / "lengths.txt"))
    assert Counter(drawn_tokens(lengths, 400)) == {10: 300, 30: 100}


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
def test_invalid_lengths_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|take") as caught:
        parse_token_lengths(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"), [("5\n0\n", "line 2: 0"), ("five", "line 1: five"), ("", "no lengths")]
)
def test_a_file_of_invalid_lengths_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "lengths").write_text(content)
    with pytest.raises(ValueError, match=words):
        parse_token_lengths(str(tmp_path / "lengths"))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lengths").open("wb") as file:
        file.truncate(1 << 25)
    with pytest.raises(BadInputError, match="16 MiB"):
        parse_token_lengths(str(tmp_path / "lengths"))


def test_only_texts_that_are_paths_name_a_file() -> None:
    texts = ["128", "32..256", "lognormal:1:2", "-5", "a.txt", "./128", "/tmp/x", "lognormal.txt"]
    assert [text for text in texts if names_file(text)] == ["a.txt", "./128", "/tmp/x", "lognormal.txt"]


def test_a_prompt_and_its_output_must_fit_the_model() -> None:
    prompt, output = parse_token_lengths("16..64"), parse_token_lengths("32")
    TokenRequests(prompt, output, "ids", "tokens", 96).check()
    TokenRequests(prompt, output, "ids", "tokens").check()
    with pytest.raises(ValueError, match=r"up to 64 tokens and outputs of up to 32 are 96 tokens, .* at most 95"):
        TokenRequests(prompt, output, "ids", "tokens", 95).check()
