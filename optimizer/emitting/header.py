"""The comment that every file begins with: where it comes from, what was measured, and what is not certain."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from optimizer.emitting.server import MEMORY_HEADROOM
from optimizer.emitting.serving import Serving
from optimizer.emitting.winner import Winner
from optimizer.report import words
from optimizer.untrusted import one_line

LONGEST_LINE = 400


def header(winner: Winner, *more: str) -> list[str]:
    """Without the marks of a comment; ``more`` are lines about the file itself."""
    load = winner.point.load
    samples = f"{words.exact(load.request_batch_size)} sample{'' if load.request_batch_size == 1 else 's'} a request"
    memory = f", memory {words.size(winner.memory_bytes)}" if winner.memory_bytes else ""
    tritune = f"tritune {metadata.version('tritune')}"
    lines = [
        f"{winner.model}, as tuned by {tritune}: run {winner.run}, written {winner.written}",
        f"measured: {words.performance(winner.point, winner.latency)} ({samples}){memory}",
        f"bound: {winner.goal or 'none'}",
        f"verdict: {winner.verdict}",
        f"on: {winner.hardware}, Triton {winner.triton}",
        f"by: {winner.command}",
    ]
    if not winner.is_confirmed:
        lines.append(
            f"WARNING: {'not within the bound for certain' if winner.goal else 'not confirmed'}: "
            "`tune verify` the run before this goes to production"
        )
    return [one_line(line, LONGEST_LINE) for line in (*lines, *more)]


def of_serving(winner: Winner, serving: Serving, *, mounts_configs: bool) -> list[str]:
    """More lines: what is still to be done, and what the figures below are made of."""
    names, where = ", ".join(winner.configs), serving.repository.text
    if mounts_configs:
        before = f"{where} has {names}, each with a config.pbtxt, which the one given here is mounted over"
    else:
        before = f"put the config.pbtxt of {names}, which `tune emit --format pbtxt` writes, into {where}"
    lines = [
        f"before: {before}",
        f"image: with Triton {winner.triton}, which was measured, or newer, and the backends of the models",
    ]
    if winner.memory_bytes is None:
        lines.append("memory: was not measured, so that no limit is set")
    else:
        lines.append(f"memory limit: {MEMORY_HEADROOM:g} times what was measured")
    if winner.cpus is None:
        lines.append("CPUs: the server was on another machine, so that no limit is set")
    return [one_line(line, LONGEST_LINE) for line in lines]


def commented(lines: Iterable[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
