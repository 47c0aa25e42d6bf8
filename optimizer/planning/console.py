"""A plan on a terminal: the answer first, then what it rests on."""

from __future__ import annotations

from rich.console import Console

from objectives.sla import worst_violation
from optimizer.planning.answer import Answer, Load
from optimizer.planning.plan import Plan
from optimizer.planning.sentence import PUBLISHED, sentence
from optimizer.planning.source import Source
from optimizer.planning.traffic import SPLIT, Recorded
from optimizer.report import words
from optimizer.report.plain_tables import plain_table, print_table


def print_plan(console: Console, plan: Plan) -> None:
    for answer in plan.answers:
        _print_answer(console, plan, answer)
    if len(plan.answers) > 1:
        _print_side_by_side(console, plan)
    source = plan.answers[0].source
    if source.builder in PUBLISHED:
        published = PUBLISHED[source.builder]
        _line(console, "published", f'"{published.sentence}" ({published.title})')


def headline(plan: Plan, answer: Answer) -> str:
    """The answer in one sentence."""
    source, goal = answer.source, words.bounds(answer.source.bounds)
    have = _replicas(source, answer.replicas)
    if answer.count is not None:
        return f"{source.model}: {have} for {_rate(answer, answer.rate)} within {goal}"
    if answer.carries is None:
        if answer.replicas == 0 and plan.question.rate is None and answer.rate == 0:
            return f"{source.model}: that does not pay for one replica of {source.hardware}"
        alone = f": it takes {words.number(answer.alone_ms)} ms with hardly any load" if answer.alone_ms else ""
        return f"{source.model}: no number of replicas is sure to meet {goal}{alone}"
    if not answer.found:
        return f"{source.model}: at no rate are {have} sure to meet {goal}"
    if plan.question.rate is None:
        return f"{source.model}: {have} for {_rate(answer, answer.rate)} within {goal}"
    assert answer.tightest_ms is not None, "known where a rate is carried"
    latency, (surely_ms, _) = words.short(source.bounds[0].metric), answer.tightest_ms
    rate = _rate(answer, answer.rate)
    if surely_ms == float("inf"):
        return f"{source.model}: {have} cannot be sure to serve {rate} at all"
    return f"{source.model}: {have} serve {rate} within {latency} <= {words.number(surely_ms)} ms"


def _print_answer(console: Console, plan: Plan, answer: Answer) -> None:
    source, question = answer.source, plan.question
    console.print(headline(plan, answer), style="bold", highlight=False, markup=False)
    console.print()
    if answer.count is not None:
        count = answer.count
        told = f"{count.low:,} to {count.safe:,}, most likely {count.likely:,}; "
        told = "" if count.low == count.safe else told
        _line(console, "replicas", f"{told}{count.safe:,} with the margin of 99.9%")
    if answer.carries is not None and answer.carries.likely:
        low, likely, high = (_infer(answer, rate) for rate in _of(answer))
        _line(console, "rate", f"{low} with the margin of 99.9%, most likely {likely}, at most {high}")
    if answer.at_rate is not None:
        latency = words.short(source.bounds[0].metric)
        at = f"{answer.at_rate.utilization:.0%} used, {latency} {words.number(answer.at_rate.latency_ms)} ms"
        _line(console, "each", f"{at}, {_infer(answer, answer.rate / answer.replicas)}")
        _line(console, "one lost", _one_lost(answer))
        _line(console, "burst, 2x", _burst(answer))
    for label, text in _money(answer):
        _line(console, label, text)
    _line(console, "traffic", f"{_traffic(plan)}; {question.balancer}: {SPLIT[question.balancer]}")
    _line(console, "server", words.configuration(source.candidate))
    runs = ", ".join(source.runs)
    _line(console, "hardware", source.hardware)
    _line(console, "from", f"{words.count(len(source.evidence.deployments), 'deployment')} of {runs}")
    if worst_violation(source.bounds, source.point.measurement) <= 0:
        _line(console, "measured", sentence(source))
    if answer.headroom:
        console.print()
        _print_headroom(console, answer)
    console.print()


def _print_headroom(console: Console, answer: Answer) -> None:
    latency = words.short(answer.source.bounds[0].metric)
    table = plain_table(">of the rate", ">infer/s", f">{latency} ms", ">used", ">busy", "within the bound")
    for load in answer.headroom:
        surely = "yes" if load.surely else "likely" if load.meets else "no"
        cells = (f"{load.rate / answer.rate:.0%}", words.number(_size(answer) * load.rate))
        table.add_row(*cells, words.number(load.latency_ms), f"{load.utilization:.0%}", f"{load.busy:.0%}", surely)
    print_table(console, table)


def _print_side_by_side(console: Console, plan: Plan) -> None:
    table = plain_table("hardware", ">replicas", ">likely", ">infer/s", ">per hour", ">per million")
    for answer in plan.answers:
        count = "" if answer.count is None else f"{answer.count.low:,}–{answer.count.safe:,}"
        cost = answer.cost
        money = ("", "") if cost is None else (_amount(cost.per_hour), _amount(cost.per_million))
        replicas = f"{answer.replicas:,}" if answer.found else "none"
        table.add_row(answer.source.hardware, replicas, count, _infer(answer, answer.rate).split()[0], *money)
    print_table(console, table)
    console.print()


def _one_lost(answer: Answer) -> str:
    lost, spare = answer.one_lost, answer.spare
    needed = "" if spare is None else f"; {_replicas(answer.source, spare)} survive it (N+1)"
    return f"nothing is left{needed}" if lost is None else f"{_survives(answer, lost)}{needed}"


def _burst(answer: Answer) -> str:
    assert answer.in_burst is not None, "told with the rest"
    more = "no number is sure to" if answer.for_burst is None else f"{_replicas(answer.source, answer.for_burst)} do"
    return _survives(answer, answer.in_burst) + ("" if answer.in_burst.surely else f"; {more}")


def _survives(answer: Answer, load: Load) -> str:
    latency = words.short(answer.source.bounds[0].metric)
    verdict = "survived" if load.surely else "likely survived" if load.meets else "not survived"
    return f"{verdict} ({latency} {words.number(load.latency_ms)} ms)"


def _money(answer: Answer) -> list[tuple[str, str]]:
    told = []
    if answer.cost is not None:
        cost = answer.cost
        text = f"{_amount(cost.per_hour)} an hour, {_amount(cost.per_month)} a month (730 hours)"
        told.append(("cost", f"{text}, {_amount(cost.per_million)} a million inferences"))
        if cost.scaled_per_hour is not None and cost.scaled_per_million is not None:
            scaled = f"{_amount(cost.scaled_per_hour)} an hour, {_amount(cost.scaled_per_million)} a million"
            range_ = f"{min(answer.by_hour):,} to {max(answer.by_hour):,} replicas"
            told.append(("by the hour", f"{scaled}, with {range_} as the day goes"))
    if answer.power is not None:
        watts, joules = answer.power.watts, answer.power.joules_per_1000
        known = f"{words.number(watts)} W of GPUs at the measured load, {words.number(joules)} J a 1,000 inferences"
        told.append(("power", words.UNKNOWN if watts is None else known))
    return told


def _traffic(plan: Plan) -> str:
    traffic, day = plan.question.traffic, plan.question.day
    if isinstance(traffic, Recorded):
        return f"as recorded ({words.number(traffic.rate)} req/s), stretched to the rate"
    if day.peak_factor > 1:
        return f"a day's sine, Poisson at its peak of {words.exact(day.peak_factor)} times the mean"
    return type(traffic).__name__


def _of(answer: Answer) -> tuple[float, float, float]:
    assert answer.carries is not None, "where a rate was asked for"
    return answer.carries.safe, answer.carries.likely, answer.carries.high


def _replicas(source: Source, count: int) -> str:
    told = words.count(count, "replica")
    return f"{told} ({words.count(count * source.gpus, 'GPU')})" if source.gpus else told


def _rate(answer: Answer, rate: float) -> str:
    """In inferences, and in requests where those are of several."""
    size = _size(answer)
    requests = f" ({words.number(rate)} req/s of {words.exact(size)})" if size != 1 else ""
    return f"{_infer(answer, rate)}{requests}"


def _infer(answer: Answer, rate: float) -> str:
    return f"{words.number(_size(answer) * rate)} infer/s"


def _size(answer: Answer) -> float:
    return answer.source.evidence.problem.request_batch_size


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _line(console: Console, label: str, text: str) -> None:
    table = plain_table("", "")
    table.show_header = False
    table.columns[0].min_width = 12
    table.add_row(label, text)
    print_table(console, table)
