"""Latencies of one measurement window as text: exact counts of requests above bounds, and a mergeable sketch.

The sketch is a DDSketch (Masson, Rim and Lee, "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", VLDB 2019) of the package ddsketch: a histogram with logarithmic bins. Merged windows give
the quantiles of all their requests together, each with an error of at most RELATIVE_ACCURACY. The text is the base64
of the compressed protobuf message; it has about 0.2 to 1.5 kB.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from ddsketch import DDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.pb import ddsketch_pb2
from ddsketch.pb.proto import DDSketchProto
from google.protobuf.message import DecodeError

from objectives.arrays import FloatArray

RELATIVE_ACCURACY = 0.005
MIN_LATENCY_MS = 1e-9  # a latency below it, which no clock measures, is counted as this one
MAX_TEXT = 16_384  # characters of a sketch, far more than any measurement needs
MAX_MESSAGE = 1 << 17  # bytes of the uncompressed message
MAX_COUNT = 2**31 - 1
_MAPPING = LogarithmicMapping(RELATIVE_ACCURACY)
_LOG_GAMMA = math.log(_MAPPING.gamma)
_MAX_KEY = 5_000  # absolute key of a bin: far below a nanosecond, or far above a year


def count_over(latencies_ms: FloatArray, bounds_ms: Sequence[float]) -> str:
    """Return the number of latencies above each bound as text, such as ``20:13 10:155`` (bound in ms, count)."""
    distinct = dict.fromkeys(_bound_text(bound) for bound in bounds_ms)
    return " ".join(f"{bound}:{int(np.count_nonzero(latencies_ms > float(bound)))}" for bound in distinct)


def parse_counts(text: str) -> dict[str, int]:
    """Return the counts in a text of ``count_over`` by bound. Raises ValueError with the rule that it breaks."""
    counts = {}
    for word in text.split():
        bound, _, count = word.partition(":")
        try:
            is_valid = 0 < float(bound) < math.inf and _bound_text(float(bound)) == bound
        except ValueError:
            is_valid = False
        if not (is_valid and count.isascii() and count.isdigit() and len(count) <= 10 and int(count) <= MAX_COUNT):
            raise ValueError("not a list of bounds in ms and counts, such as 20:13 10:155")
        counts[bound] = int(count)
    return counts


def requests_over(counts: str, bound_ms: float) -> int | None:
    """Return the exact number of requests above ``bound_ms``; None if they were not counted at this bound."""
    return parse_counts(counts).get(_bound_text(bound_ms)) if counts else None


def sketch_latencies(latencies_ms: FloatArray) -> str:
    """Return the sketch of ``latencies_ms`` as text; empty if there are none."""
    if not len(latencies_ms):
        return ""
    values = np.maximum(latencies_ms, MIN_LATENCY_MS)
    # adding the distinct bins instead of all values takes milliseconds for 50,000 requests
    _, first, counts = np.unique(np.ceil(np.log(values) / _LOG_GAMMA), return_index=True, return_counts=True)
    sketch = DDSketch(RELATIVE_ACCURACY)
    for value, count in zip(values[first].tolist(), counts.tolist(), strict=True):
        sketch.add(value, count)
    return _encode(DDSketchProto.to_proto(sketch).SerializeToString())


def check_sketch(text: str) -> None:
    """Raise ValueError with the rule that ``text`` breaks, if it is neither a sketch nor empty."""
    if text:
        _read(text)


def count(sketch: str) -> int:
    """Return the number of latencies in ``sketch``, which is not empty. Raises ValueError for a wrong text."""
    return round(float(_read(sketch).counts.sum()))


def pooled_quantile_ms(sketches: Sequence[str], level: float) -> float:
    """Return the quantile of the latencies of all ``sketches`` together in ms. Raises ValueError for a wrong text."""
    counts, first_key = _merge(tuple(sketches))
    cumulative = np.cumsum(counts)
    rank = min(max(level, 0.0), 1.0) * (cumulative[-1] - 1)
    return float(_MAPPING.value(first_key + int(np.searchsorted(cumulative, rank, side="right"))))


def merge(sketches: Sequence[str]) -> str:
    """Return the sketch of the latencies of all ``sketches``, at least one. Raises ValueError for a wrong text."""
    return _write(*_merge(tuple(sketches)))


@lru_cache(maxsize=1024)
def scale(sketch: str, factor: float) -> str:
    """Return the sketch of the latencies times ``factor``. Raises ValueError for a wrong text.

    Bins move as a whole, which adds an error of at most half a bin.
    """
    counts, first_key = _read(sketch)
    return _write(counts, first_key + round(math.log(factor) / _LOG_GAMMA))


def share_over(sketch: str, bound_ms: float) -> float:
    """Return the share of the sketch's latencies above ``bound_ms``. Raises ValueError for a wrong text.

    Within the bin of the bound, latencies are taken as evenly distributed on a logarithmic scale.
    """
    counts, first_key = _read(sketch)
    position = math.log(max(bound_ms, MIN_LATENCY_MS)) / _LOG_GAMMA - (first_key - 1)  # measured in bins
    below = float(np.interp(position, np.arange(len(counts) + 1), np.concatenate(([0.0], np.cumsum(counts)))))
    return 1 - below / float(counts.sum())


def _bound_text(bound_ms: float) -> str:
    return f"{bound_ms:.10g}"


def _write(counts: FloatArray, first_key: int) -> str:
    """Return the text of the sketch with these counts of consecutive bins."""
    message = DDSketchProto.to_proto(DDSketch(RELATIVE_ACCURACY))
    del message.positiveValues.contiguousBinCounts[:]
    message.positiveValues.contiguousBinCounts.extend(counts.tolist())
    message.positiveValues.contiguousBinIndexOffset = first_key
    return _encode(message.SerializeToString())


def _encode(message: bytes) -> str:
    return base64.b64encode(zlib.compress(message, 9)).decode()


class _Bins(NamedTuple):
    """The counts of consecutive bins, and the key of the first one."""

    counts: FloatArray
    first_key: int


@lru_cache(maxsize=64)
def _merge(sketches: tuple[str, ...]) -> _Bins:
    """Return the bins of all sketches together."""
    parts = [_read(text) for text in sketches]
    first_key = min(part.first_key for part in parts)
    merged = np.zeros(max(part.first_key + len(part.counts) for part in parts) - first_key)
    for counts, key in parts:
        merged[key - first_key :][: len(counts)] += counts
    return _Bins(merged, first_key)


@lru_cache(maxsize=1024)
def _read(text: str) -> _Bins:
    """Return the bins of a sketch. Raises ValueError for a wrong text."""
    message = _decode(text)
    if message is not None and _has_only_bins(message):
        store = message.positiveValues
        bins = _Bins(np.array(store.contiguousBinCounts, dtype=np.float64), int(store.contiguousBinIndexOffset))
        is_counted = bool(np.all((bins.counts >= 0) & (bins.counts <= MAX_COUNT))) and bins.counts.sum() >= 1
        if is_counted and bins.first_key >= -_MAX_KEY and bins.first_key + len(bins.counts) <= _MAX_KEY:
            return bins
    raise ValueError("not a latency sketch that tune wrote")


def _decode(text: str) -> ddsketch_pb2.DDSketch | None:
    """Return the message in ``text``; None for a wrong text, or one that is larger than the limits."""
    if len(text) > MAX_TEXT:
        return None
    inflater, message = zlib.decompressobj(), ddsketch_pb2.DDSketch()
    try:
        message.ParseFromString(inflater.decompress(base64.b64decode(text, validate=True), MAX_MESSAGE))
    except (ValueError, zlib.error, DecodeError):
        return None
    return message if inflater.eof else None


def _has_only_bins(message: ddsketch_pb2.DDSketch) -> bool:
    """Return whether a message has consecutive bins of tune's mapping, and no other counts."""
    mapping = message.mapping
    is_tunes_mapping = math.isclose(mapping.gamma, _MAPPING.gamma, rel_tol=1e-12) and mapping.indexOffset == 0
    other_counts = len(message.positiveValues.binCounts) + message.negativeValues.ByteSize() + message.zeroCount
    return is_tunes_mapping and not other_counts
