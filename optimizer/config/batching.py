"""Preferred batch sizes, and which settings of Triton's batchers behave the same.

The rules follow the batch-forming loop of Triton's ``dynamic_batch_scheduler.cc`` for requests that all have the same
number of samples, as in a load of tritune.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

from optimizer.core.candidate import SEQUENCE_PREFIX, Candidate
from optimizer.core.errors import ParameterError

_TERM = re.compile(r"max(?:/([1-9][0-9]*))?|([1-9][0-9]*)")
PREFERRED_SIZES_SYNTAX = 'write "none", or sizes such as "max", "max/2" or 8, joined by commas: "max/2,max"'

UNBATCHED: Hashable = "no batch dimension"
ONE_BY_ONE: Hashable = "one request at a time"
ONE_BY_ONE_QUEUED: Hashable = "one request at a time, through the batcher's queue"
SEQUENCES, STREAMS = "sequences", "streams"
DIRECT_DELAY = "sequence_batching.direct.max_queue_delay_microseconds"
CANDIDATE_SEQUENCES = "sequence_batching.oldest.max_candidate_sequences"
SLOT_UTILIZATION = "sequence_batching.direct.minimum_slot_utilization"
OLDEST_DELAY = "sequence_batching.oldest.max_queue_delay_microseconds"
SEQUENCE_PREFERRED = "sequence_batching.oldest.preferred_batch_size"  # written as those of dynamic batching


def parse_preferred_sizes(value: object) -> str:
    """Return the normal form of preferred batch sizes, which may depend on ``max_batch_size``.

    ``"none"`` (also None or an empty list) sets no preferred sizes. Otherwise the text has comma-separated terms:
    ``max``, ``max/N`` (a fraction of max_batch_size without remainder) or a number of samples. ``value`` may also be
    a list of terms. Raises ParameterError with the allowed forms.
    """
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        terms = [str(item).strip() for item in value]
    else:
        terms = [term.strip() for term in str(value).split(",")]
    if not terms or terms == ["none"]:
        return "none"
    if isinstance(value, bool) or not all(_TERM.fullmatch(term) for term in terms):
        raise ParameterError("preferred_batch_sizes", f"{value!r} are not batch sizes; {PREFERRED_SIZES_SYNTAX}")
    return ",".join(dict.fromkeys(terms))


def resolve_preferred_sizes(text: str, max_batch_size: int) -> tuple[int, ...] | None:
    """Return the parsed sizes for ``max_batch_size``, ascending; None if one is not a whole number."""
    sizes = set()
    for term in () if text == "none" else text.split(","):
        match = _TERM.fullmatch(term)
        assert match is not None, text
        divisor, size = match.groups()
        if size is None and max_batch_size % int(divisor or 1):
            return None
        sizes.add(int(size) if size else max_batch_size // int(divisor or 1))
    return tuple(sorted(sizes))


def format_preferred_sizes(sizes: Iterable[int], max_batch_size: int) -> str:
    """Return ``sizes`` as ``parse_preferred_sizes`` reads them; Triton's default {max_batch_size} is ``none``."""
    distinct = sorted(set(sizes))
    return "none" if distinct in ([], [max_batch_size]) else ",".join(map(str, distinct))


def behaviour(
    candidate: Candidate,
    request_batch_size: int,
    *,
    queued: bool = False,
    stateful: bool = False,
    streams: bool = False,
) -> Hashable | None:
    """Return a key of the batcher's behaviour: equal for candidates that behave the same.

    None if the server refuses a request of that size.

    Args:
        candidate: Configuration of the batcher.
        request_batch_size: Samples of each request.
        queued: Whether other fields of the batcher's queue are set (timeouts, ordering). Then the batcher matters
            even if it never joins two requests.
        stateful: Whether the sequence batcher joins the requests, each of one sample.
        streams: Whether the model streams. Such a model may compute requests together that the batcher passed on one
            by one, so that each setting may matter.
    """
    samples, limit = request_batch_size, candidate.max_batch_size
    if stateful:
        return None if candidate.dynamic_batching or samples != 1 else (SEQUENCES, limit)
    if limit == 0:
        return UNBATCHED if samples == 1 and not candidate.dynamic_batching else None
    if streams and samples <= limit:
        setting = normalize(candidate)
        return STREAMS, limit, setting.dynamic_batching, setting.max_queue_delay_us, setting.preferred_batch_sizes
    fits = limit // samples  # a batch is a whole number of requests, so only this quotient of max_batch_size matters
    if fits == 0:
        return None
    if not candidate.dynamic_batching:
        return ONE_BY_ONE
    # in requests; if none is set, {max_batch_size} applies. A size between k and k+1 requests is never reached, and
    # all sizes between them behave the same: k + 1/2 stands for them
    preferred_sizes = candidate.preferred_batch_sizes or (limit,)
    sizes = {size // samples + (0.5 if size % samples else 0) for size in preferred_sizes}
    if _always_alone(sizes, fits, candidate.max_queue_delay_us):
        return ONE_BY_ONE_QUEUED if queued else ONE_BY_ONE
    if candidate.max_queue_delay_us == 0:
        return 0, _effective_sizes_without_delay(sizes, fits)
    return fits, candidate.max_queue_delay_us, _effective_sizes_with_delay(sizes, fits)


def _always_alone(sizes: set[float], fits: int, delay: int) -> bool:
    """Return whether each request is executed at once and alone, as without the batcher.

    If no second request fits, a single request still waits for the delay unless it reaches a preferred size
    (max_batch_size 24, requests of 16). Without a delay it is also alone if only its own size is preferred.
    """
    if fits == 1 and (delay == 0 or max(sizes) <= 1 or 1 in sizes):
        return True
    return delay == 0 and (max(sizes) <= 1 or {size for size in sizes if size == int(size)} == {1})


def _effective_sizes_without_delay(sizes: set[float], fits: int) -> tuple[float, ...]:
    """Return the preferred sizes (in requests) that affect a batcher without delay.

    A batch grows by one request at a time and is closed at the first size that it reaches. So max_batch_size and
    sizes that are never reached have no effect. If no size can be reached, the largest size closes the batch, or
    max_batch_size if that is smaller.
    """
    reachable = {size for size in sizes if size == int(size)}
    return tuple(sorted(reachable or {min(max(sizes), fits)}))


def _effective_sizes_with_delay(sizes: set[float], fits: int) -> tuple[float, ...]:
    """Return the preferred sizes (in requests) that affect a batcher with a delay.

    A size that is never reached still determines how many requests the batcher waits for, or where it stops.
    """
    if max(sizes) < 1:
        return (0.5,)
    effective = {size for size in sizes if size >= 1}  # the batcher does not wait for less than one request
    # to wait for k + 1/2 requests is to wait for k + 1
    effective -= {size for size in effective if size != int(size) and size + 0.5 in effective}
    # a size just above the limit stops a batch where max_batch_size does
    effective -= {fits + 0.5} if fits in effective else set()
    return tuple(sorted(effective))


def normalize(candidate: Candidate) -> Candidate:
    """Return the same configuration in normal form.

    Preferred sizes are ascending, and ``{max_batch_size}`` is written as no preferred size. Without dynamic batching
    there are no settings of the batcher.
    """
    sizes = tuple(sorted(set(candidate.preferred_batch_sizes)))
    on = candidate.dynamic_batching
    return Candidate(
        max_batch_size=candidate.max_batch_size,
        dynamic_batching=on,
        max_queue_delay_us=candidate.max_queue_delay_us if on else 0,
        preferred_batch_sizes=sizes if on and sizes != (candidate.max_batch_size,) else (),
        instance_count=candidate.instance_count,
        fields=tuple(sorted(f for f in candidate.fields if on or not is_batcher_field(f[0]))),
    )


def is_batcher_field(path: str) -> bool:
    """Return whether a path in ModelConfig is inside ``dynamic_batching``, so that it exists only if that is on."""
    return path.startswith("dynamic_batching.")


def is_sequence_field(path: str) -> bool:
    """Return whether a path in ModelConfig is inside ``sequence_batching``, which makes a model stateful."""
    return path.startswith(SEQUENCE_PREFIX)
