"""The flags of what is sent to the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from optimizer.arguments.values import LARGEST_INT32, shown, whole
from optimizer.errors import BadInputError
from optimizer.requests.sizes import MIX_MARKS, parse_dim, parse_range, parse_shape

LONGEST_STRING = 1 << 20


def add_requests(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--request-batch-size", metavar="N", help="samples in each request; a mix 1*9|8*1 at a rate")
    parser.add_argument(
        "--input-data",
        metavar="WHAT",
        help="random, zero, perf_analyzer's JSON or folder, or a .npz, .npy, .csv or .parquet (random)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        metavar="NAME:SIZES",
        help="of an input with open dims: ids:128, a mix ids:16..128 or ids:16*3|128*1, one for several a,b:16..128",
    )
    parser.add_argument(
        "--input-range", action="append", metavar="NAME:LOW..HIGH", help="of random values, such as ids:0..30521"
    )
    parser.add_argument("--string-data", metavar="TEXT", help="what every string is")
    parser.add_argument("--string-length", metavar="N", help="of random strings (128)")


def requests(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of RunOptions. Raises BadInputError."""
    batch, length, text = given.request_batch_size, given.string_length, given.string_data
    if text is not None and len(text) > LONGEST_STRING:
        raise BadInputError(f"--string-data {shown(text)}: is longer than {LONGEST_STRING} characters")
    if given.input_data is not None and not given.input_data:
        raise BadInputError("--input-data '': write random, zero, or a file or folder of samples")
    return {
        "request_batch_size": None if batch is None else _batch_size(batch),
        "input_data": given.input_data,
        "shapes": _checked("--shape", given.shape, parse_shape),
        "ranges": _checked("--input-range", given.input_range, parse_range),
        "string_data": text,
        "string_length": None if length is None else whole("--string-length", length, 1, LONGEST_STRING),
    }


def _batch_size(text: str) -> int | str:
    """A number, or a mix as it was given."""
    if any(mark in text for mark in MIX_MARKS):
        return _checked("--request-batch-size", [text], parse_dim)[0]
    return whole("--request-batch-size", text, 1, LARGEST_INT32)


def _checked(flag: str, texts: list[str] | None, parse: Callable[[str], object]) -> tuple[str, ...]:
    """Each as it was given: what it means depends on the model."""
    for text in texts or ():
        try:
            parse(text)
        except ValueError as error:
            raise BadInputError(f"{flag} {shown(text)}: {error}") from None
    return tuple(texts or ())
