"""The comparison of two runs in sentences and as the document of ``tune compare --json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from objectives.confidence import Verdict
from optimizer.results import formatting, result_document, summary
from optimizer.results.comparison import ComparedRun, Comparison, different_settings, recorded_text, run_path

ASPECT_PLURALS = {
    "machine": "machines",
    "server": "servers",
    "model": "models",
    "requests": "requests",
    "objective": "objectives",
}


def answer(comparison: Comparison) -> str:
    """Return whether the runs differ, in one sentence without a full stop."""
    if comparison.mismatch:
        return f"not comparable: {comparison.mismatch}"
    if undecided := [side.label for side in comparison.runs if side.outcome.verdict is Verdict.UNDECIDED]:
        whose = "its throughput is" if len(undecided) == 1 else "their throughputs are"
        return f"{' and '.join(undecided)} ended UNDECIDED, so {whose} not confirmed"
    return ratio_sentence(comparison)


def ratio_sentence(comparison: Comparison) -> str:
    """Return the ratio of the throughputs in one sentence, or why there is none."""
    if comparison.ratio is None:
        return f"no ratio of the throughputs: {comparison.no_ratio}"
    factor = formatting.factor(comparison.ratio)
    if comparison.ratio.is_measurable:
        return f"The recommendation of B serves {factor} the throughput of A"
    return f"no measurable difference: {factor}"


def difference_warning(comparison: Comparison) -> str:
    """Return a sentence about other differences than the configurations; empty if there are none."""
    different = [
        ASPECT_PLURALS[aspect.name]
        for aspect in comparison.aspects
        if aspect.name in ASPECT_PLURALS and aspect.is_same is False
    ]
    if not different:
        return ""
    compares = "the ratio compares" if comparison.ratio else "the throughputs compare"
    return f"The {_listed(different)} differ, so {compares} these as well as the configurations."


def _listed(nouns: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(nouns[:-1]), nouns[-1])))


def regression_sentence(comparison: Comparison, limit: float) -> str:
    """Return whether B lost ``limit`` or more, in one sentence without a full stop."""
    percent = f"{100 * limit:.3g} %"
    if comparison.ratio is None:
        return "not judged, because there is no ratio of the throughputs"
    if comparison.has_regressed(limit):
        return f"B serves {100 * (1 - comparison.ratio.estimate):.3g} % less than A (limit: {percent})"
    return f"none: B shows no measurable loss of {percent} or more"


def document(comparison: Comparison, limit: float | None = None) -> dict[str, Any]:
    """Return the document of ``--json``. Each pair is [A, B]; ``limit`` is that of ``--fail-on-regression``."""
    ratio, is_same = comparison.ratio, {aspect.name: aspect.is_same for aspect in comparison.aspects}
    pairs = {
        aspect.name: {name: list(pair) for name, pair in aspect.differences.items()} for aspect in comparison.aspects
    }
    return {
        "answer": answer(comparison),
        "ratio": ratio.estimate if ratio else None,
        "ratio_interval": list(ratio.bounds) if ratio else None,
        "confidence": comparison.confidence,
        "is_measurable": ratio.is_measurable if ratio else None,
        "no_ratio": comparison.no_ratio or None,
        "is_regression": None if limit is None else comparison.has_regressed(limit),
        "same_machine": is_same["machine"],
        "same": is_same,
        "warning": difference_warning(comparison) or None,
        "differences": {
            "configuration": {name: list(pair) for name, pair in different_settings(comparison).items()},
            **{name: different for name, different in pairs.items() if different},
        },
        "a": _run_document(comparison.a),
        "b": _run_document(comparison.b),
    }


def _run_document(side: ComparedRun) -> dict[str, Any]:
    """Return the part of the document on one of the two runs."""
    outcome, baseline = side.outcome, side.outcome.baseline
    return {
        "run": run_path(side.run),
        "written": recorded_text(side.run.info.get("written")),
        "verdict": outcome.verdict.value,
        "undecided_cause": summary.undecided_cause(outcome) or None,
        "next_command": side.next_command or None,
        "model": side.run.problem.model,
        "sla": list(map(str, outcome.sla)),
        "recommended": result_document.entry(side.recommended),
        "confirmation": result_document.confirmation(side.confirmed) if side.confirmed else None,
        "baseline": result_document.entry(baseline.point) if baseline.point else None,
        "speedup": outcome.speedup,
        "speedup_interval": list(baseline.gain.bounds) if baseline.gain else None,
    }
