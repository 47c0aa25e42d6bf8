"""The result of a run in sentences: the answer, the verdict with its cause, and the next step."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from objectives.load_sequence import MARGIN
from objectives.metrics import METRICS
from objectives.sequential import LOOKS
from objectives.sla import Verdict
from objectives.verdict import estimand, needed_requests
from optimizer.core.notes import UsualStatesJudged
from optimizer.core.safe_text import one_line, show_path
from optimizer.machine.cpu_usage import DISTURBANCE_LIMIT, describe_disturbance, lost_cpu_to_others
from optimizer.results import formatting, outcome_values

if TYPE_CHECKING:
    from objectives.sla import Constraint
    from optimizer.config.problem import Problem
    from optimizer.confirmation.verdicts import ConfirmedLoad
    from optimizer.core.trial import Point
    from optimizer.results.no_recommendation import InconclusiveResult
    from optimizer.results.recommendation import Outcome

VERIFY_MINUTES = 3  # time in the proposed command that continues the tests, if the next verdict does not need more
SPARE_TIME_FACTOR = 1.25  # multiple of the estimated time until the next verdict, in that command
GAIN_NOTE = (
    "A gain is the ratio of means over the windows at the same speed of the machine, so it differs from that of the "
    "shown values."
)
MAX_VERDICT_SECONDS = 1e6  # run.json may have been changed
MIN_PERCENT = 1e-4  # a smaller share is shown as 0


def answer(outcome: Outcome, problem: Problem) -> str:
    """Return the result in one line: the model, the verdict, throughput and latencies of the recommendation, the SLA.

    For a model that streams, the output tokens per second follow the throughput.
    """
    return f"{problem.model}: {_answer(outcome, problem)}"


def _answer(outcome: Outcome, problem: Problem) -> str:
    """Return the answer without the name of the model, see ``answer``."""
    goal, best = formatting.bounds(problem.sla), outcome.recommended
    if best is None and outcome.inconclusive is not None:
        measured = "no measurement" if goal and outcome.inconclusive.kind != "unstable" else "no stable measurement"
        return f"UNDECIDED, {measured} " + (f"meets {goal}" if goal else "was made")
    if best is None:
        return "FAIL, no configuration " + (f"meets {goal}" if goal else "could be measured")
    throughput = outcome_values.estimate(outcome, best, "throughput")
    if best.measurement.output_tokens_per_sec is not None:
        throughput += f", {outcome_values.estimate(outcome, best, formatting.OUTPUT_THROUGHPUT)}"
    shown = dict.fromkeys(bound.metric for bound in problem.sla.latencies)
    if outcome.objective.name not in ("throughput", formatting.OUTPUT_THROUGHPUT):
        shown[outcome.objective.name] = None
    values = [f"{formatting.goal_label(metric)} {outcome_values.estimate(outcome, best, metric)}" for metric in shown]
    measured = ", ".join([throughput, *values])
    return f"{outcome.verdict.value} at {measured} (SLA: {goal})" if goal else measured


def cause(outcome: Outcome) -> str:
    """Return why the verdict is UNDECIDED or FAIL, without a full stop; empty for PASS."""
    return one_line(undecided_cause(outcome) or outcome.no_recommendation_reason)


def no_change(outcome: Outcome) -> str:
    """Return the sentence in place of the changes, if the current configuration is recommended."""
    if outcome.trials == 1:
        return "No change: no other configuration was measured."
    return "No change: the current configuration is recommended."


def headline(outcome: Outcome, problem: Problem) -> str:
    """Return the result in one sentence: the model, the answer and its cause."""
    return f"{problem.model}: {answer_with_cause(outcome, problem)}"


def answer_with_cause(outcome: Outcome, problem: Problem) -> str:
    """Return the answer and its cause, without the name of the model."""
    because = cause(outcome)
    return f"{_answer(outcome, problem)}: {because}" if because else _answer(outcome, problem)


def undecided_cause(outcome: Outcome) -> str:
    """Return why the verdict of the run is UNDECIDED, without a full stop; empty for another verdict."""
    if outcome.verdict is not Verdict.UNDECIDED:
        return ""
    if outcome.inconclusive is not None:
        return _inconclusive_cause(outcome, outcome.inconclusive)
    confirmed = outcome.confirmed
    if confirmed is None or not confirmed.error:
        if _only_baseline_measured(outcome):
            return "the run ended before any other configuration than the current one was measured"
        untested = _untested(outcome, confirmed)
        if (tested := _last_tested(outcome)) is not None:
            why = f" ({_disturbed_windows(tested)})" if tested.judged.counts_disturbed else ""
            return f"no configuration passed its test on fresh servers{why}, and this one {untested}"
        return f"it {untested}"
    return undecided_test_cause(confirmed)


def undecided_test_cause(confirmed: ConfirmedLoad) -> str:
    """Return why the test ``confirmed`` on fresh servers did not decide, without a full stop."""
    if confirmed.judged.counts_disturbed:
        return "; ".join(filter(None, (_missing_servers(confirmed), _disturbed_windows(confirmed))))
    disturbance = describe_disturbance(confirmed.point.measurement)
    return "; ".join(filter(None, (_cause_in_test(confirmed), disturbance)))


def _disturbed_windows(confirmed: ConfirmedLoad) -> str:
    return f"other programs disturbed {formatting.percent(confirmed.judged.disturbed_share)} of the windows"


def _untested(outcome: Outcome, compared: ConfirmedLoad | None) -> str:
    """Return how the recommendation, which was not tested at its load, was measured: a clause without its subject.

    ``compared`` is its confirmation if it was measured for comparison only.
    """
    best = outcome.recommended
    assert best is not None
    tested = [entry for entry in outcome.confirmed_loads if entry.error]
    at_other_loads = [entry for entry in tested if entry.point.candidate == best.candidate]
    text = "was not tested on fresh servers"
    if compared is not None:
        text = f"was compared on {formatting.count(compared.servers, 'fresh server')}, but not tested"
    if at_other_loads:
        loads = " and ".join(formatting.named_load(entry.point.load) for entry in at_other_loads)
        text += f" at {'this load' if compared is None else 'it'}, only at {loads}"
    missed = outcome.sla.missed(best.measurement)
    if not missed:
        return text
    measured = _measured(missed, best)
    expected = f"is expected to meet {formatting.bounds(missed)} at its usual speed"
    return f"{text}; it measured {measured} while the machine was slow, and {expected}"


def _inconclusive_cause(outcome: Outcome, result: InconclusiveResult) -> str:
    """Return why an outcome without a recommendation is not FAIL."""
    counted = f"{result.disturbed:,} of {result.total:,}"
    if (test := result.test) is not None:
        if result.kind == "test_disturbed":
            disturbed = f"other programs disturbed {counted} windows on fresh servers"
            return "; ".join(filter(None, (disturbed, _missing_servers(test))))
        missed = _measured(outcome.sla.missed(test.point.measurement), test.point)
        cause = undecided_test_cause(test)
        if not missed:
            return f"the test on fresh servers did not decide: {cause}"
        return f"fresh servers had {missed}, but their test did not decide: {cause}"
    if result.kind == "search_disturbed":
        limit = formatting.percent(DISTURBANCE_LIMIT)
        return f"other processes or machines took more than {limit} of the CPUs in {counted} measurements"
    if result.kind == "closest_disturbed" and outcome.closest:
        return f"the closest configuration may be faster: {describe_disturbance(outcome.closest.measurement)}"
    return outcome.no_recommendation_reason


def _measured(bounds: Iterable[Constraint], point: Point) -> str:
    """Return the values of ``point`` for ``bounds``, such as ``p95 22.5 ms``."""
    return " and ".join(
        f"{formatting.short_metric(bound.metric)} {formatting.value_of(point, bound.metric)}" for bound in bounds
    )


def _advice_if_inconclusive(result: InconclusiveResult, tests: RemainingTests) -> str:
    """Return what to do if another measurement may find a configuration to recommend."""
    has_test = _has_test_to_continue(result, tests)
    if result.kind == "test_undecided":
        return "continue the test" if has_test else "run again, because more servers cannot change the verdict"
    return f"stop other programs on this machine, then {'continue the test' if has_test else 'run again'}"


def _has_test_to_continue(result: InconclusiveResult, tests: RemainingTests) -> bool:
    return result.kind in ("test_disturbed", "test_undecided") and not tests.is_complete


def _cause_in_test(confirmed: ConfirmedLoad) -> str:
    """Return why the test on fresh servers did not decide, apart from a disturbance."""
    judged, servers = confirmed.judged, confirmed.servers
    if confirmed.crash or confirmed.has_lost:
        return judged.reason
    if missing := _missing_servers(confirmed):
        return missing
    bound = next((constraint for constraint in confirmed.sla if METRICS[constraint.metric].quantile), None)
    slow = judged.slow_share
    if bound is None or slow.is_unknown or judged.latency_rise > 0:  # its bounds are not those of the SLA
        return judged.reason
    allowed = 1 - (METRICS[bound.metric].quantile or 0.0)
    if not slow.low <= allowed < slow.high:  # another constraint is undecided
        return judged.reason
    low, high = (100 * end if 100 * end >= MIN_PERCENT else 0.0 for end in (slow.low, slow.high))
    share = f"{formatting.number(low, 2) if low else '0'} to {formatting.number(high, 2)} %"
    timing = METRICS[bound.metric].timing
    over = f"{formatting.exact(bound.bound)} ms"
    measured = f"{share} of the requests are slower than {over}"
    if timing is not None and timing.needs_streaming:
        measured = f"{share} of the requests have a {timing.subject} above {over}"
    effective, needed = judged.effective_requests, needed_requests(bound, confirmed.error)
    too_few = (
        f"{measured}; {formatting.short_metric(bound.metric)} needs about {formatting.approximate(needed)} "
        f"effective requests, and these were {formatting.approximate(effective)}"
    )
    if (confirmed.point.measurement.requests or 0) < needed:
        return too_few
    latency_ms = METRICS[bound.metric].value(confirmed.point.measurement)
    if latency_ms is not None and latency_ms <= math.exp(-MARGIN) * bound.bound:
        return f"the {servers} servers differ too much ({measured})"
    return too_few if effective < needed else f"{measured}, and {100 * allowed:.4g} % may be"


def _missing_servers(confirmed: ConfirmedLoad) -> str:
    """Return why the test ended before its first look; empty if it did not, or if it lost a server.

    A test that is not likely to pass is given up even if time is left. The windows do not show whether it was.
    """
    if confirmed.servers >= LOOKS[0] or confirmed.crash or confirmed.has_lost:
        return ""
    measured = f"{confirmed.servers} of at least {formatting.count(LOOKS[0], 'fresh server')}"
    judged = confirmed.judged
    if not judged.unlikely:
        return f"the time ended after {measured}"
    load = " and ".join(_measured_against(bound, confirmed) for bound in judged.unlikely)
    cause = f"the test ended after {measured}, and {load} was not likely to pass in the time that was left"
    has_lower_bound = judged.latency_rise > 0 and any(METRICS[bound.metric].timing for bound in judged.unlikely)
    return f"{cause}; {UsualStatesJudged(judged.latency_rise)}" if has_lower_bound else cause


def _measured_against(bound: Constraint, confirmed: ConfirmedLoad) -> str:
    """Return ``bound`` with the measured value: ``p95 <= 20 ms (19.5 ms from 210 effective requests)``."""
    effective = confirmed.judged.effective_by_metric.get(bound.metric)
    requests = f" from {formatting.approximate(effective)} effective requests" if effective else ""
    return f"{formatting.bound(bound)} ({formatting.value_of(confirmed.point, bound.metric)}{requests})"


def _last_tested(outcome: Outcome) -> ConfirmedLoad | None:
    """Return the newest test on fresh servers; None if nothing was tested, or only compared."""
    return next((entry for entry in reversed(outcome.confirmed_loads) if entry.error), None)


def is_disturbed_test(confirmed: ConfirmedLoad | None) -> bool:
    """Return whether other processes or machines took CPU time from the test, or usually do so in the run."""
    if confirmed is None or not confirmed.error:
        return False
    judged = confirmed.judged
    has_usual_states = judged.latency_rise > 0 and confirmed.servers >= LOOKS[0]  # before, servers are missing
    return judged.counts_disturbed or has_usual_states or lost_cpu_to_others(confirmed.point.measurement)


def _better_comparison(outcome: Outcome) -> str:
    """Return which compared configuration was measurably better than the recommendation, as a clause; else nothing.

    The test of the recommendation may have ended at a low load, because one of its servers was slow.
    """
    dynamic = outcome.dynamic_batching
    gains = {
        "the current configuration": outcome.baseline.gain,
        "dynamic_batching {}": dynamic.gain if dynamic else None,
    }
    ratios = {name: gain.ratio for name, gain in gains.items() if gain is not None}
    better = f"had {formatting.advantage(outcome.objective)}"
    return next((f"{name} {better}" for name, ratio in ratios.items() if ratio and ratio.interval.high < 1), "")


def _only_baseline_measured(outcome: Outcome) -> bool:
    """Return whether the run ended before the search, so that its recommendation says nothing of other settings."""
    is_baseline, other = outcome.recommended is outcome.baseline.point, outcome.dynamic_batching
    return outcome.trials == 1 and is_baseline and other is not None and not other.is_tried


@dataclass(frozen=True, slots=True)
class RemainingTests:
    """The tests on fresh servers that a later session of a run can continue.

    Attributes:
        is_complete: Whether no further server can change a verdict, so that there are none.
        verdict_seconds: The estimated time until the next verdict; 0 if it is unknown.
    """

    is_complete: bool = False
    verdict_seconds: float = 0.0

    def document(self) -> dict[str, object]:
        """Return the keys of run.json that ``read`` reads."""
        return {
            "confirmation_complete": self.is_complete,
            "next_verdict_seconds": round(self.verdict_seconds, 1) or None,
        }

    @classmethod
    def read(cls, info: Mapping[str, object]) -> RemainingTests:
        """Return those in run.json. Without valid keys they are neither complete nor is their time known."""
        seconds = info.get("next_verdict_seconds")
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_VERDICT_SECONDS:
            seconds = 0.0
        return cls(info.get("confirmation_complete") is True, float(seconds))


UNKNOWN_TESTS = RemainingTests()


def verify_command(folder: str | Path, tests: RemainingTests = UNKNOWN_TESTS) -> str:
    """Return the command that continues the test of the recommendation of the run in ``folder``.

    Its budget suffices for the next one of the ``tests``.
    """
    minutes = max(VERIFY_MINUTES, math.ceil(SPARE_TIME_FACTOR * tests.verdict_seconds / 60))
    return f"tune verify {shlex.quote(show_path(folder))} --budget {minutes}m"


def next_command(outcome: Outcome, folder: str | Path, longer: str, tests: RemainingTests = UNKNOWN_TESTS) -> str:
    """Return the command to run after the UNDECIDED run in ``folder``; empty for another verdict.

    The command continues the test or makes a separate one. After a run that measured only the baseline it is
    ``longer``, which repeats the run with a larger budget. Without a recommendation and without a test to continue it
    is empty, because only a new run helps.
    """
    if outcome.verdict is not Verdict.UNDECIDED:
        return ""
    if outcome.inconclusive is not None:
        is_continued = _has_test_to_continue(outcome.inconclusive, tests)
        return verify_command(folder, tests) if is_continued else ""
    return step_if_undecided(outcome, folder, longer, tests).command


def fresh_command(folder: str | Path) -> str:
    """Return the command that makes a separate test of the recommendation of the run in ``folder``."""
    return f"tune verify --fresh {shlex.quote(show_path(folder))}"


@dataclass(frozen=True, slots=True)
class NextStep:
    """The next step: ``advice`` is a clause without a full stop, ``command`` carries it out (may be empty).

    ``alternative`` is another step that may follow instead.
    """

    advice: str
    command: str
    alternative: NextStep | None = None


def next_step(
    outcome: Outcome,
    folder: str | Path,
    reproduce: str,
    longer: str = "",
    *,
    tests: RemainingTests = UNKNOWN_TESTS,
    can_serve: bool = False,
) -> NextStep:
    """Return the one thing to do after the run in ``folder``, which has ended.

    Args:
        outcome: The outcome of the run.
        folder: The folder of the run.
        reproduce: The command that repeats the run.
        longer: The same with a larger budget, for a run that measured only the baseline.
        tests: The tests that are left.
        can_serve: Whether ``tune serve`` can start the measured server.
    """
    run = shlex.quote(show_path(folder))
    if outcome.inconclusive is not None:
        command = next_command(outcome, folder, longer, tests) or reproduce
        return NextStep(_advice_if_inconclusive(outcome.inconclusive, tests), command)
    if outcome.verdict is Verdict.UNDECIDED:
        return step_if_undecided(outcome, folder, longer or reproduce, tests)
    if outcome.closest is not None:
        return NextStep("see what would help, or relax the bound", f"tune explain {run}")
    if outcome.recommended is None:
        return NextStep(f"remove the cause (see {run}/logs), then run again", reproduce)
    if outcome.crashes:
        cause = "the crash" if len(outcome.crashes) == 1 else "the crashes"
        return NextStep(f"find the cause of {cause} in {run}/logs before you deploy it", f"tune emit {run}")
    if (better := _better_comparison(outcome)) and not tests.is_complete:
        advice = f"{better}, but no test has confirmed that it meets the SLA at that load; continue the tests"
        return NextStep(advice, verify_command(folder, tests))
    if outcome.recommended is outcome.baseline.point:
        return NextStep("keep the current configuration, and see what limits it", f"tune explain {run}")
    return _deployment(folder, can_serve=can_serve)


def step_if_undecided(outcome: Outcome, folder: str | Path, run_again: str, tests: RemainingTests) -> NextStep:
    """Return the step after the run in ``folder``, whose recommendation is UNDECIDED.

    The command is ``run_again`` if only the baseline was measured, because its test says nothing of other settings.
    """
    if outcome.confirmed and outcome.confirmed.crash:
        logs = f"{shlex.quote(show_path(folder))}/logs"
        return NextStep(f"find the cause of the crash in {logs}, then make a separate test", fresh_command(folder))
    is_disturbed = is_disturbed_test(outcome.confirmed or _last_tested(outcome))
    if tests.is_complete:
        because = "because more servers cannot change the verdict"
        first = "stop other programs on this machine, then " if is_disturbed else ""
        return NextStep(f"{first}make a separate test, {because}", fresh_command(folder))
    if _only_baseline_measured(outcome):
        return NextStep("run again with a larger --budget", run_again)
    if is_disturbed:
        return NextStep("stop other programs on this machine, then continue the test", verify_command(folder, tests))
    advice = "continue the test" if _last_tested(outcome) else "test it on fresh servers"
    return NextStep(advice, verify_command(folder, tests))


def _deployment(folder: str | Path, *, can_serve: bool) -> NextStep:
    """Return the step that deploys the recommendation of the run in ``folder``."""
    run = shlex.quote(show_path(folder))
    files = [path for path in (Path(folder) / "best").rglob("*") if path.is_file()]
    into = " --out tuned_models" if len(files) > 1 else ""  # a single file goes to standard output
    serve = NextStep("or start its server on this machine, without Docker", f"tune serve {run}")
    return NextStep(
        "deploy it; --format writes files for Docker, Kubernetes or KServe",
        f"tune emit {run}{into}",
        serve if can_serve else None,
    )


def verdict(outcome: Outcome) -> str:
    """Return the verdict on the recommendation with its confidence intervals, or why it was not confirmed."""
    confirmed = outcome.confirmed
    if confirmed is None:
        if not outcome.sla:
            return f"{formatting.NO_SLA}; not measured again on fresh servers"
        return f"UNDECIDED: {undecided_cause(outcome)}"
    judged = confirmed.judged
    reason = "" if judged.verdict is Verdict.PASS else f": {judged.reason}"
    text = f"{formatting.verdict(confirmed)}{reason}" if outcome.sla else formatting.NO_SLA
    windows, servers = formatting.count(confirmed.windows, "measurement"), confirmed.servers
    measured = f"{windows} on {formatting.count(servers, 'fresh server')}"
    return f"{text} ({', '.join(confirmed_intervals(confirmed))}; {measured})"


def verdict_lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Return (label, text) of the verdict, of the estimand of a share of requests, and of perf_analyzer's check."""
    if outcome.recommended is None:
        return []
    is_share = any(METRICS[constraint.metric].quantile for constraint in outcome.sla)
    estimated = []
    if outcome.confirmed and is_share:
        estimated = [("estimand", estimand(outcome.sla, outcome.confirmed.judged.latency_rise))]
    check = [("cross-check", text)] if (text := cross_check(outcome)) else []
    return [("verdict", verdict(outcome)), *estimated, *check]


def confirmed_intervals(confirmed: ConfirmedLoad) -> list[str]:
    """Return the known confidence intervals of the throughput, the output tokens and the bounded latencies."""
    throughputs = {"throughput": confirmed.throughput}
    if (tokens := confirmed.interval(formatting.OUTPUT_THROUGHPUT)) is not None:
        throughputs[formatting.OUTPUT_THROUGHPUT] = tokens
    texts = [formatting.interval(METRICS[metric], interval) for metric, interval in throughputs.items()]
    latencies = {confirmed.latency: confirmed.latency_ms, **confirmed.other_intervals}
    return texts + [
        f"{formatting.short_metric(metric)} {formatting.interval(METRICS[metric], interval)}"
        for metric, interval in latencies.items()
        if metric != formatting.OUTPUT_THROUGHPUT and not interval.is_unknown
    ]


def cross_check(outcome: Outcome) -> str:
    """Return how perf_analyzer's measurements on the confirmed servers compare with those of tune's own client.

    The text is empty if perf_analyzer did not measure next to another load generator.
    """
    agreement = outcome.confirmed.agreement if outcome.confirmed else None
    if agreement is None:
        return ""
    if not agreement.ratios:
        return f"perf_analyzer was not compared with tune's own client: {agreement.reason or 'too few servers'}"
    ratios = [
        f"{formatting.short_metric(entry.metric)} {entry.ratio:.2f}x "
        f"({entry.interval.low:.2f} to {entry.interval.high:.2f})"
        for entry in agreement.ratios
    ]
    servers = formatting.count(agreement.pairs, "server")
    text = f"perf_analyzer against tune's own client on the same {servers}: {', '.join(ratios)}"
    return f"{text}; {agreement.disagreement}" if agreement.disagreement else text


def evidence(outcome: Outcome) -> str:
    """Return the confidence of the intervals and the extent of the test, in one or two sentences.

    Another one explains a gain that clearly differs from the ratio of the shown values, as after a disturbance.
    """
    confirmed = outcome.confirmed
    if confirmed is None:
        return "Measured in the search only, which overestimates its best configurations."
    windows, servers = formatting.count(confirmed.windows, "measurement"), confirmed.servers
    confidence = formatting.confidence(confirmed.judged.confidence)
    gains = [compared.gain for compared in (outcome.baseline, outcome.dynamic_batching) if compared]
    note = f" {GAIN_NOTE}" if any(gain and gain.differs_from_values for gain in gains) else ""
    return f"Intervals: {confidence}. Recommended: {windows} on {formatting.count(servers, 'fresh server')}.{note}"
