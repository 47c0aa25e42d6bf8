"""Preferred-size policies, and which settings of Triton's dynamic batcher behave the same.

The rules follow the batch-forming loop of Triton's ``dynamic_batch_scheduler.cc`` for requests that all carry
the same number of samples, which is how a configuration is loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from optimizer.trial import Candidate

_TERM = re.compile(r"max(?:/([1-9][0-9]*))?|([1-9][0-9]*)")
GRAMMAR = 'write "none", or sizes such as "max", "max/2" or 8, joined by commas: "max/2,max"'

UNBATCHED: Hashable = "no batch dimension"
ONE_BY_ONE: Hashable = "one request at a time"
ONE_BY_ONE_QUEUED: Hashable = "one request at a time, through the batcher's queue"


def parse_policy(value: object) -> str:
    """The plain spelling of a preferred-size policy.

    ``"none"`` (also None or an empty list) sets no preferred sizes; otherwise comma-separated terms, each
    ``max``, ``max/N`` (of max_batch_size, dividing it exactly) or a number of samples. A list holds terms
    too. Raises ValueError in one line.
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
        raise ValueError(f"preferred_batch_sizes: {value!r} is no policy; {GRAMMAR}")
    return ",".join(dict.fromkeys(terms))


def resolve_policy(policy: str, max_batch_size: int) -> tuple[int, ...] | None:
    """The sizes a parsed policy means for ``max_batch_size``, ascending; None where one is a fraction."""
    sizes = set()
    for term in () if policy == "none" else policy.split(","):
        match = _TERM.fullmatch(term)
        assert match is not None, policy
        divisor, size = match.groups()
        if size is None and max_batch_size % int(divisor or 1):
            return None
        sizes.add(int(size) if size else max_batch_size // int(divisor or 1))
    return tuple(sorted(sizes))


def behaviour(candidate: Candidate, request_batch_size: int, *, queued: bool = False) -> Hashable | None:
    """What the batcher does with requests of ``request_batch_size``: equal for candidates that act alike.

    None where such a request is refused. ``queued``: fields of the batcher's queue (timeouts, ordering) are
    set, so the batcher counts even where it can never join two requests.
    """
    r, limit = request_batch_size, candidate.max_batch_size
    if limit == 0:
        return UNBATCHED if r == 1 and not candidate.dynamic_batching else None
    fits = limit // r  # every batch is a whole number of requests, so only this of max_batch_size is felt
    if fits == 0:
        return None
    if not candidate.dynamic_batching:
        return ONE_BY_ONE
    # in requests; none set means {max_batch_size}. A size between k and k+1 requests is never hit, but a batch
    # compares with it as with any other size in between: k + 1/2
    sizes = {p // r + (0.5 if p % r else 0) for p in candidate.preferred_batch_sizes or (limit,)}
    if _always_alone(sizes, fits, candidate.max_queue_delay_us):
        return ONE_BY_ONE_QUEUED if queued else ONE_BY_ONE
    if candidate.max_queue_delay_us == 0:
        return 0, _felt_without_delay(sizes, fits)
    return fits, candidate.max_queue_delay_us, _felt_with_delay(sizes, fits)


def _always_alone(sizes: set[float], fits: int, delay: int) -> bool:
    """Whether each request leaves at once and alone, as without the batcher.

    Where no second one fits, a lone request still waits out the delay if it reaches no preferred size
    (max_batch_size 24, requests of 16). Without a delay it also leaves alone if only its own size is preferred.
    """
    if fits == 1 and (delay == 0 or max(sizes) <= 1 or 1 in sizes):
        return True
    return delay == 0 and (max(sizes) <= 1 or {s for s in sizes if s == int(s)} == {1})


def _felt_without_delay(sizes: set[float], fits: int) -> tuple[float, ...]:
    """Without a delay a batch grows one request at a time and is closed at the first size that it hits.

    So neither max_batch_size nor a size that is never hit is felt, unless no size is ever hit: then the largest
    closes the batch, or max_batch_size if that is not above it.
    """
    hit = {size for size in sizes if size == int(size)}
    return tuple(sorted(hit or {min(max(sizes), fits)}))


def _felt_with_delay(sizes: set[float], fits: int) -> tuple[float, ...]:
    """With a delay a size that is never hit still says how many requests to wait for, or where to stop."""
    if max(sizes) < 1:
        return (0.5,)
    felt = {size for size in sizes if size >= 1}  # smaller than a request: nothing waits for it
    # waiting for k + 1/2 requests is waiting for k + 1
    felt -= {size for size in felt if size != int(size) and size + 0.5 in felt}
    # just above what fits it stops a batch where max_batch_size does
    felt -= {fits + 0.5} if fits in felt else set()
    return tuple(sorted(felt))


def tidy(candidate: Candidate) -> Candidate:
    """The same numbers in plain form: sizes ascending, {max_batch_size} as none, nothing where off."""
    sizes = tuple(sorted(set(candidate.preferred_batch_sizes)))
    on = candidate.dynamic_batching
    return Candidate(
        max_batch_size=candidate.max_batch_size,
        dynamic_batching=on,
        max_queue_delay_us=candidate.max_queue_delay_us if on else 0,
        preferred_batch_sizes=sizes if on and sizes != (candidate.max_batch_size,) else (),
        instance_count=candidate.instance_count,
        fields=tuple(sorted(f for f in candidate.fields if on or not of_batcher(f[0]))),
    )


def of_batcher(path: str) -> bool:
    """Whether a ModelConfig path lies inside ``dynamic_batching``, and so is gone where that is off."""
    return path.startswith("dynamic_batching.")
