"""Advice on a flag that a command does not have: where its setting is, or the flags that are spelled most alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

MIN_SIMILARITY = 0.6  # least similarity of a proposed flag; 1 is the same text
MAX_PROPOSALS = 5  # limit of equally similar flags
MAX_FLAG_LENGTH = 100  # further characters are not compared
SIMILAR_FLAGS: Final = {  # the folder of the runs, which commands that write runs name differently
    "--out": "--results",
    "--results": "--out",
}


def _advise_sweep(setting: str, flag: str) -> str:
    """Return the advice on an option that would fix a ``setting``, and the ``flag`` of `tune sweep` for it."""
    return f"{setting} is searched; limit it in a profile, or measure given values with `tune sweep {flag}`"


SEARCH_ADVICE: Final = {  # for options of `tune sweep`, perf_analyzer and Model Analyzer that a search does not have
    **dict.fromkeys(
        ("--concurrency", "--concurrency-range", "--max-concurrency"),
        _advise_sweep("the concurrency", "--concurrency"),
    ),
    **dict.fromkeys(
        ("--request-rate", "--request-rate-range"),
        "--load rate searches the highest rate; measure given rates with `tune sweep --request-rate`",
    ),
    "--max-batch-size": _advise_sweep("max_batch_size", "--max-batch-size"),
    "--max-queue-delay": _advise_sweep("the queue delay", "--max-queue-delay"),
    "--instance-count": _advise_sweep("the number of instances", "--instance-count"),
    **dict.fromkeys(
        ("--latency", "--latency-threshold", "--latency-budget", "--percentile"),
        "a bound on the latency is written --sla-p95 20ms",
    ),
    **dict.fromkeys(("--model-name", "--profile-models", "-m"), "write the model without an option"),
    "--triton-launch-mode": "the server is chosen with --target",
}


def flag_advice(flag: str, flags: Iterable[str]) -> str:
    """Return advice on a flag that is not among the ``flags`` of the command.

    It is from SEARCH_ADVICE if these are options of a search, else it proposes the flag of SIMILAR_FLAGS, or those
    that are spelled most alike; case, dashes and underscores do not count. It is empty if none is similar.
    """
    flags = list(flags)
    name = flag if flag == "-m" else f"--{flag.lstrip('-').replace('_', '-')}"
    if name in SEARCH_ADVICE and "--search" in flags:
        return SEARCH_ADVICE[name]
    if (similar := SIMILAR_FLAGS.get(name)) in flags:
        return f"did you mean {similar}?"
    word = _letters(flag[:MAX_FLAG_LENGTH])
    similarity = {other: difflib.SequenceMatcher(None, _letters(other), word).ratio() for other in flags}
    highest = max(similarity.values(), default=0.0)
    nearest = [other for other, value in similarity.items() if value == highest]
    if highest < MIN_SIMILARITY:
        return ""
    *alternatives, last = nearest[:MAX_PROPOSALS]
    return f"did you mean {', '.join(alternatives)}{' or ' if alternatives else ''}{last}?"


def _letters(flag: str) -> str:
    return re.sub("[-_]", "", flag).lower()
