"""Whether a recommendation holds in a separate test (``tune verify --fresh``): rules, console and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from objectives.sequential import LOOKS
from objectives.sla import Verdict
from optimizer.confirmation.plan import finalists
from optimizer.confirmation.server_plan import ServerPlan, estimate_start_seconds, plan_server
from optimizer.confirmation.verdicts import ConfirmedLoad, compare_metric, judge_confirmations
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.notes import Note
from optimizer.core.safe_text import is_file, one_line, read_bytes, show_path
from optimizer.core.trial import latest_points
from optimizer.results import configuration_text, formatting, outcome_values, result_document, summary
from optimizer.results.no_recommendation import intervals_reach_bounds, may_meet_undisturbed
from optimizer.results.summary import NextStep
from optimizer.results.terminal_output import print_indented, print_line, print_unwrapped, print_wrapped
from optimizer.results.terminal_summary import print_next_step
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_lookup import newest_first

if TYPE_CHECKING:
    from optimizer.config.problem import Problem
    from optimizer.core.trial import Point, Trial

RUNNERS_UP = 2  # configurations that are measured again for comparison
TOO_SHORT = "the time ended before its first fresh server was measured"
FOLDER, FILE = "verify", "verify.json"  # each verification has a folder of its own below that of the run
MAX_BYTES = 1 << 20  # limit for verify.json, which may come from anywhere
_TESTED = ("trial", "request_batch_size", "concurrency", "request_rate")  # keys that identify a tested point


@dataclass(frozen=True, slots=True)
class Verification:
    """The configurations that were measured again, and whether verdict and ranking are as before.

    Attributes:
        measured: The measured configurations, the recommendation first.
        failed: The candidates that could not be measured, with the reason.
        verdict_holds: Whether the recommendation passed its test again.
        ranking_holds: Whether no runner-up is better by the first objective; None if the time ended before one was
            measured.
        reason: Why the recommendation does not hold, or is not decided; empty if it holds.
        is_undecided: Whether the verdict or the ranking is not decided, and nothing contradicts them.
    """

    measured: tuple[ConfirmedLoad, ...]
    failed: tuple[tuple[Candidate, str], ...]
    verdict_holds: bool
    ranking_holds: bool | None
    reason: str
    is_undecided: bool = False

    @property
    def holds(self) -> bool:
        return self.verdict_holds and self.ranking_holds is True

    @property
    def verdict(self) -> Verdict:
        """Return PASS if the recommendation holds, UNDECIDED if the measurements do not show whether it does."""
        if self.holds:
            return Verdict.PASS
        return Verdict.UNDECIDED if self.is_undecided else Verdict.FAIL


def verification_candidates(
    recommended: Point, trials: Sequence[Trial], problem: Problem, *, is_cross_checked: bool
) -> list[ServerPlan]:
    """Return the recommendation at its own load, which is tested, then the runners-up for comparison.

    ``is_cross_checked`` says whether perf_analyzer measures each tested server as well.
    """
    other_points = [point for point in latest_points(trials) if point.candidate != recommended.candidate]
    times, start_seconds = problem.request_times, estimate_start_seconds(trials)
    tested = plan_server(
        recommended,
        recommended.load,
        times,
        1 - problem.confidence,
        problem.sla,
        start_seconds,
        is_cross_checked=is_cross_checked,
    )
    runners_up = finalists(other_points, problem, RUNNERS_UP)
    return [tested, *(plan_server(point, point.load, times, start_seconds=start_seconds) for point in runners_up)]


def judge_verification(trials: Sequence[Trial], plans: Sequence[ServerPlan], problem: Problem) -> Verification:
    """Judge the confirmations of ``plans`` in ``trials``; the first plan is that of the recommendation."""
    measured, failed = list[ConfirmedLoad](), list[tuple[Candidate, str]]()
    confirmed_loads = {(entry.point.trial, entry.point.load): entry for entry in judge_confirmations(trials, problem)}
    by_number = {trial.number: trial for trial in trials}
    for plan in plans:
        confirmed = confirmed_loads.get((plan.trial, plan.load))
        if confirmed is None:
            failed.append((plan.candidate, by_number[plan.trial].reason or TOO_SHORT))
        else:
            measured.append(confirmed)
    if not measured or measured[0].point.trial != plans[0].trial:
        is_undecided = by_number[plans[0].trial].status == "ok"  # the time ended
        reason = f"the recommendation could not be measured: {failed[0][1]}"
        return Verification(
            measured=tuple(measured),
            failed=tuple(failed),
            verdict_holds=False,
            ranking_holds=None,
            reason=reason,
            is_undecided=is_undecided,
        )
    recommended, *runners_up = measured
    judged = recommended.judged
    verdict_holds = judged.verdict is Verdict.PASS
    better = [other for other in runners_up if _is_better(other, recommended, trials, problem, len(runners_up))]
    reasons = [] if verdict_holds else [_why_it_did_not_pass(recommended)]
    advantage = formatting.advantage(problem.objectives[0])
    reasons += [f"trial {runner_up.point.trial} now has {advantage} within the SLA" for runner_up in better]
    measured_trials = {confirmed.point.trial for confirmed in measured}
    missing = [plan.trial for plan in plans if plan.trial not in measured_trials]
    unmeasured = [number for number in missing if by_number[number].status == "ok"]
    reasons += [f"the time ended before trial {number} was measured" for number in unmeasured]
    may_pass = judged.verdict is Verdict.UNDECIDED and _may_pass(recommended, problem)
    is_undecided = not better and (may_pass or (verdict_holds and bool(unmeasured)))
    ranking_holds = False if better else None if unmeasured else True
    return Verification(
        measured=tuple(measured),
        failed=tuple(failed),
        verdict_holds=verdict_holds,
        ranking_holds=ranking_holds,
        reason="; ".join(reasons),
        is_undecided=is_undecided,
    )


def _why_it_did_not_pass(recommended: ConfirmedLoad) -> str:
    if recommended.judged.verdict is Verdict.UNDECIDED:
        return summary.undecided_test_cause(recommended)
    return recommended.judged.reason


def _may_pass(recommended: ConfirmedLoad, problem: Problem) -> bool:
    """Return whether the recommendation may pass with more servers, or on a machine that is not disturbed."""
    if recommended.judged.counts_disturbed:
        return may_meet_undisturbed(recommended.point.measurement, problem.sla)
    return intervals_reach_bounds(recommended, problem.sla)


def _is_better(
    other: ConfirmedLoad, recommended: ConfirmedLoad, trials: Sequence[Trial], problem: Problem, comparisons: int
) -> bool:
    """Return True if ``other``, one of ``comparisons``, meets the SLA and is better by more than chance.

    It is compared by the first objective.
    """
    if not problem.sla.is_met(other.point.measurement) or other.judged.verdict is Verdict.FAIL:
        return False
    ratio = compare_metric(other, recommended, trials, problem, problem.objectives[0].name, comparisons)
    return ratio is not None and ratio.interval.low > 1


@dataclass(frozen=True, slots=True)
class Repetition:
    """The commands after a verification that did not pass.

    Attributes:
        command: Repeats the test on the same server.
        longer_command: The same with a larger budget.
        search_command: Searches on this server, and learns from the trials of the run if its search can.
    """

    command: str
    longer_command: str
    search_command: str


@dataclass(frozen=True)
class VerificationResult:
    """The verification of a run and its notes.

    Attributes:
        verified: The configurations that were measured again, with the verdict on each.
        before: The recommendation as the run measured it.
        problem: The problem of the run.
        run: The folder of the run.
        folder: The folder of the new measurements.
        repetition: How the test can be repeated.
        notes: Notes for the user.
    """

    verified: Verification
    before: Point
    problem: Problem
    run: RunFolder
    folder: RunFolder
    repetition: Repetition
    notes: tuple[Note, ...] = ()

    def document(self) -> dict[str, object]:
        """Return the document of ``--json`` and verify.json."""
        verified = self.verified
        return {
            "holds": verified.holds,
            "verdict": verified.verdict.value,
            "verdict_holds": verified.verdict_holds,
            "ranking_holds": verified.ranking_holds,
            "reason": verified.reason or None,
            "next_command": next_step(self).command,
            "before": result_document.entry(self.before),
            "measured": [
                {**result_document.entry(confirmed.point), "confirmation": result_document.confirmation(confirmed)}
                for confirmed in verified.measured
            ],
            "failed": [
                {"configuration": configuration_text.configuration(candidate), "reason": reason}
                for candidate, reason in verified.failed
            ],
            "notes": [str(note) for note in self.notes],
            "results_dir": str(self.folder.path),
        }


def passed_separately(run: RunFolder, point: Point) -> str:
    """Return the verdict of the newest verification of ``run`` if ``point`` passed its test; otherwise "".

    An older verification does not count: one of many tests passes by chance.

    Raises BadInputError, in one line, if the document of the verification is damaged.
    """
    newest = next((path for path in newest_first(run.path.glob(f"{FOLDER}/*")) if is_file(path / FILE)), None)
    if newest is None:
        return ""
    path = newest / FILE
    try:
        measured: list[dict[str, Any]] = json.loads(read_bytes(path, MAX_BYTES, "remove it"))["measured"]
        expected = result_document.entry(point)
        if not measured or any(measured[0].get(name) != expected[name] for name in _TESTED):
            return ""
        tested = measured[0]["confirmation"]
        if tested["verdict"] != Verdict.PASS.value:
            return ""
        servers = formatting.count(int(tested["servers"]), "fresh server")
        return f"PASS in a separate test on {servers} ({FOLDER}/{one_line(newest.name)})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(
            f"{show_path(path)}: not the document of a verification ({one_line(str(error))}); remove its folder"
        ) from None


def print_verification(console: Console, result: VerificationResult) -> None:
    """Print whether the recommendation holds, the metrics before and now, the notes and the next step."""
    verified, problem, before = result.verified, result.problem, result.before
    goal, is_undecided = formatting.bounds(problem.sla) or "no bound", verified.is_undecided
    metrics = outcome_values.shown_metrics(problem)
    holds = "is UNDECIDED" if is_undecided else _holds(verified.holds)
    style = formatting.VERDICT_STYLES[verified.verdict]
    print_indented(console, f"{problem.model}: the recommendation {holds} ({goal})", style=style)
    if verified.reason:
        print_wrapped(console, "cause", verified.reason)
    print_line(console)
    for confirmed in verified.measured:
        point = confirmed.point
        role = "recommended" if point.trial == before.trial else "runner-up"
        configuration = configuration_text.configuration(point.candidate)
        print_indented(console, f"{role}, trial {point.trial}: {configuration}", style="bold")
        lines = [f"now  {formatting.performance(point, *metrics)}"]
        if point.trial == before.trial:
            lines.insert(0, f"was  {formatting.performance(before, *metrics)}")
        intervals = ", ".join(summary.confirmed_intervals(confirmed))
        for line in (*lines, f"{formatting.verdict(confirmed)}, {intervals}"):
            print_indented(console, line, first_indent="  ", indent="    ")
    for candidate, reason in verified.failed:
        failed = f"not measured: {configuration_text.configuration(candidate)}: {reason}"
        print_indented(console, failed, style="red")
    print_line(console)
    if verified.verdict_holds or not is_undecided:
        text = f"{_holds(verified.verdict_holds)}, the ranking of the configurations {_holds(verified.ranking_holds)}"
        print_wrapped(console, "verdict", text)
    for note in result.notes:
        print_wrapped(console, "note", str(note))
    print_unwrapped(console, "results", str(result.folder.path))
    print_next_step(console, next_step(result))


def next_step(result: VerificationResult) -> NextStep:
    """Return what to do after a verification."""
    verified, repetition, logs = result.verified, result.repetition, f"{show_path(result.folder.path)}/logs"
    if verified.verdict_holds and verified.ranking_holds is not False:
        emit = f"tune emit {shlex.quote(one_line(str(result.run.path)))}"
        compare = NextStep("or repeat the test, with time for the other configurations", repetition.longer_command)
        return NextStep("deploy it", emit, None if verified.holds else compare)
    search = NextStep("search again on this server", repetition.search_command)
    if verified.verdict_holds:
        return search
    tested = next((entry for entry in verified.measured if entry.error), None)
    if tested is None:
        if verified.is_undecided:
            return NextStep("repeat the test with a larger --budget", repetition.longer_command)
        return NextStep(f"remove the cause (see {logs}), then repeat the test", repetition.command)
    if tested.crash or tested.has_lost:
        return NextStep(f"find the cause in {logs}, then repeat the test", repetition.command)
    if not verified.is_undecided:
        return search
    if summary.is_disturbed_test(tested):
        return NextStep("stop other programs on this machine, then repeat the test", repetition.longer_command)
    # a value over the bound after four servers may pass with more of them, but is not likely to
    if tested.servers >= LOOKS[-1] or (tested.servers >= LOOKS[0] and not tested.meets_sla):
        return search
    return NextStep("repeat the test with a larger --budget", repetition.longer_command)


def _holds(holds: bool | None) -> str:
    return "is not decided" if holds is None else "holds" if holds else "does not hold"
