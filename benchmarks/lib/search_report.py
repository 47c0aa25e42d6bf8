"""The Markdown of ``search_methods.py``: one row for each table, bound and method, and the targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lib.bounded_tables import (
    EARLIER_LOOSE_SHARE,
    EARLIER_TABLES,
    FEASIBLE_CONFIGURATIONS,
    FEASIBLE_SHARES,
    KINDS,
    TEST_TABLES,
    BoundedTable,
    Kind,
)
from lib.output import print_head, row
from lib.search_runs import Runs
from optimizer.replay.replay import TOLERANCES, ReplayResult, Spread

MAX_TRIALS = 30  # limit for the methods without a stopping rule, and of the restricted mean
SHOWN_AFTER = (6, 10, 30)  # deployments
OWN = "simulated"
COLUMNS = (
    "search",
    "mean regret",
    f"minus that of `{OWN}`",
    "regret",
    *(f"after {count}" for count in SHOWN_AFTER),
    "deployed until it stopped",
    "seconds",
    "until within 5 %",
    "measured",
    "until within 1 %",
    "measured",
    "loads a deployment",
)
INTRODUCTION = f"""\
**Regret** is how far the recommendation is below the table's best throughput (or goodput) under the bound, as a
share of it; *after 6* is the regret after 6 deployments. **Deployed** counts model loads until the search stopped,
including the baselines, without the confirmation; **seconds** is the recorded time of these deployments and their
measurements, without the method's own. **Until within 5 %** is the number of deployments (and of **measured**
loads) until a measurement was that close to the best. Mean regrets are in %, with their standard errors over the
seeds; a difference is that of the seeds that both methods have. Other cells have median / p90 over all searches;
*loads a deployment* is the median.

| search | method | ends |
| --- | --- | --- |
| `simulated` | tritune's own: a simulation of the batcher, corrected by Gaussian processes | by its stopping rule |
| `tpe`, `gp`, `nsga2`, `random` | Optuna's samplers, with Optuna's constraints | after {MAX_TRIALS} deployments |
| `botorch` | BoTorch's constrained qLogNoisyExpectedImprovement over configurations and loads | \
after {MAX_TRIALS} deployments |
| `smac` | SMAC3's random forest and expected improvement, with the violation of the bound as a penalty | \
after {MAX_TRIALS} deployments |
| `quick` | the hill climbing of Model Analyzer's quick search over max_batch_size and instances | \
where no neighbor is better |
| `expert` | 1, 2 or one instance for each core, delay 100 µs, default preferred sizes | after its list |
| `grid` | every configuration at every load once: with noise, what one measurement of each can find | at the end |

All methods see the same measurements, begin with the same two baselines and use the same load search.

No constant of the search may be chosen on the test tables ({", ".join(TEST_TABLES)}) or on the simulated servers,
which have random parameters.
The bounds come from each table. A bound is the p95 that
{", ".join(f"{share:.0%}" for share in FEASIBLE_SHARES.values())} of its rows
(configuration and load) do not exceed, rounded up to two digits. The third is {EARLIER_LOOSE_SHARE:.0%}, as in
earlier results, for {", ".join(EARLIER_TABLES)}.
At least {FEASIBLE_CONFIGURATIONS} configurations meet a bound. Where the goodput is maximized, the bound is on the
p50 instead, and it is the deadline of each request."""
NOISE = """\
Each measurement of a recorded table has random effects of its server, its moment and its own, as large as those
between repeated recordings. Those of a simulated server are 5 % for a server and 4 % for a measurement. All searches
with the same seed see the same effects of a deployment. The best configuration, the regrets and the bounds are those
of the table. A recommendation is one that a confirmation would end with; *until within 5 %* counts
configurations that were measured, even if noise hid how good they are."""
WITHOUT_NOISE = "The measurements are the recorded ones, without noise."
CLOSE = 0.02  # regret of a recommendation from which on the settings of ONNX Runtime count as found
NOT_COMPARED = (OWN, "expert", "grid")
MOST_OF_BEST_RIVAL = 2 / 3  # target for the restricted mean on the test tables


@dataclass(frozen=True)
class BenchmarkTarget:
    """A target of ``simulated``: ``figure`` is at most ``most``.

    It holds on each table under each bound alone, as a user has only one; with ``over_all``, of all runs together.
    """

    kind: Kind
    name: str
    most: float
    figure: Callable[[Sequence[ReplayResult]], float]
    show: Callable[[float], str]
    over_all: bool = False


def print_tables(cases: Sequence[BoundedTable], methods: Sequence[str], runs: Runs) -> None:
    """Print a row for each method over all tables, and the mean regret of each method on each table."""
    methods = [method for method in methods if runs_of(runs, method, cases)]
    print_head(*COLUMNS)
    own = regret_by_seed(runs, OWN, cases)
    for method in methods:
        regrets = regret_by_seed(runs, method, cases)
        common = [regrets[seed] - own[seed] for seed in regrets.keys() & own.keys()] if method != OWN else []
        means = as_mean(list(regrets.values())), as_mean(common, "+")
        print(row(method, *means, *_cells(runs_of(runs, method, cases))))
    print("\nMean regret on each table, in %:\n")
    print_head("table", "within", *methods, text=2)
    for case in cases:
        bound = f"{case.statistic} {case.bound_ms:g} ms ({case.sla})"
        cells = (as_mean(list(regret_by_seed(runs, method, [case]).values())) for method in methods)
        print(row(case.table.stem, bound, *cells))


def regret_by_seed(runs: Runs, method: str, cases: Sequence[BoundedTable]) -> dict[int, float]:
    """Return the mean regret of a method over these tables by seed.

    Searches with one seed see the same noise on all tables, so only different seeds are independent.
    """
    regrets: dict[int, list[float]] = {}
    for job, run in runs.items():
        if job.method == method and job.case in cases:
            regrets.setdefault(job.seed, []).append(run.regret)
    return {seed: statistics.mean(own) for seed, own in regrets.items()}


def as_mean(shares: Sequence[float], sign: str = "") -> str:
    """Return the mean of shares in percent as text, with its standard error if there are two or more."""
    if not shares:
        return ""
    mean = f"{100 * statistics.mean(shares):{sign}.1f}"
    if len(shares) == 1:
        return mean
    return f"{mean} ± {100 * statistics.stdev(shares) / math.sqrt(len(shares)):.1f}"


def print_restricted_means(cases: Sequence[BoundedTable], methods: Sequence[str], runs: Runs) -> None:
    """Print how many deployments each method needs on average to come within 5 % of the best."""
    by_kind: dict[Kind, list[BoundedTable]] = {}
    for case in cases:
        by_kind.setdefault(case.kind, []).append(case)
    means = {
        kind: {method: restricted_mean(replays) for method in methods if (replays := runs_of(runs, method, own))}
        for kind, own in by_kind.items()
    }
    print(f"Mean number of deployments until within 5 %; a search that has not reached it counts as {MAX_TRIALS}.\n")
    print_head("search", *(KINDS[kind] for kind in means))
    for method in methods:
        print(row(method, *(f"{own[method]:.1f}" if method in own else "" for own in means.values())))
    for kind, own in means.items():
        competitors = {method: mean for method, mean in own.items() if method not in NOT_COMPARED}
        if OWN in own and competitors:
            best = min(competitors, key=lambda method: competitors[method])
            share = own[OWN] / competitors[best]
            verdict = "met" if share <= MOST_OF_BEST_RIVAL else "missed"
            target = f" Target: at most {MOST_OF_BEST_RIVAL:.2f}, {verdict}." if kind == "test" else ""
            print(f"\n{KINDS[kind]}: `{OWN}` needs {share:.2f} times as many as `{best}`.{target}")


def print_settings(cases: Sequence[BoundedTable], methods: Sequence[str], runs: Runs) -> None:
    """Print how many deployments the search of each set of ONNX Runtime's settings takes."""
    print(
        f"Median / p90 of deployments. A recommendation is close if it is within {CLOSE:.0%} of the table's best.\n"
    )
    print_head("settings", "search", "regret", "until the recommendation is close", "until it stopped", text=2)
    by_settings: dict[str, list[BoundedTable]] = {}
    for case in cases:
        by_settings.setdefault(case.table.stem.split("-", 2)[-1].replace("+", ", "), []).append(case)
    for settings, own in by_settings.items():
        for method in methods:
            replays = runs_of(runs, method, own)
            close = [next((i for i, r in enumerate(run.regrets, 1) if r <= CLOSE), math.inf) for run in replays]
            stopped = _both([run.effort.deployments for run in replays], as_count)
            regret = _both([run.regret for run in replays], as_percent)
            print(row(settings, method, regret, _both(close, as_count), stopped))


def restricted_mean(runs: Sequence[ReplayResult]) -> float:
    """Return the mean number of deployments until within 5 %, each counted as at most MAX_TRIALS."""
    return statistics.mean(min(run.until[TOLERANCES[0]].deployments, MAX_TRIALS) for run in runs)


def print_targets(cases: Sequence[BoundedTable], runs: Runs) -> None:
    """Print each target of ``simulated`` with the worst table and bound, and with all runs together."""
    print(row("tables", "target", "at most", "worst of one table and bound", "all together", "judged by", ""))
    print(row("---", "---", "--:", "---", "--:", "---", "---"))
    for target in TARGETS:
        own = [case for case in cases if case.kind == target.kind]
        if not own:
            continue
        result = target.figure(runs_of(runs, OWN, own))
        figures = {case: target.figure(runs_of(runs, OWN, [case])) for case in own}
        case, worst = max(figures.items(), key=lambda item: item[1])
        verdict = "met" if (result if target.over_all else worst) <= target.most else "missed"
        where = f"{target.show(worst)} ({case.table.stem}, {case.sla})"
        judged = "all" if target.over_all else "worst"
        cells = [target.kind, target.name, target.show(target.most), where, target.show(result), judged, verdict]
        print(row(*cells))


def runs_of(runs: Runs, method: str, cases: Sequence[BoundedTable]) -> list[ReplayResult]:
    """Return the runs of a method on these tables."""
    return [run for job, run in runs.items() if job.method == method and job.case in cases]


def _cells(runs: Sequence[ReplayResult]) -> list[str]:
    untils = []
    for tolerance in TOLERANCES:
        untils.append(_both([run.until[tolerance].deployments for run in runs], as_count))
        untils.append(_both([run.until[tolerance].measurements for run in runs], as_count))
    return [
        _both([run.regret for run in runs], as_percent),
        *(_both([run.regret_after(count) for run in runs], as_percent) for count in SHOWN_AFTER),
        _both([run.effort.deployments for run in runs], as_count),
        _both([run.seconds[-1] for run in runs], "{:.0f}".format),
        *untils,
        f"{statistics.median(run.effort.measurements / run.effort.deployments for run in runs):.1f}",
    ]


def _both(values: Sequence[float], show: Callable[[float], str]) -> str:
    spread = Spread.of(values)
    return f"{show(spread.median)} / {show(spread.p90)}"


def as_percent(value: float) -> str:
    """Return a share as text with one decimal."""
    return f"{value:.1%}"


def as_count(value: float) -> str:
    """Return a number of deployments as text; ``never`` for infinity."""
    return "never" if math.isinf(value) else f"{value:.1f}".removesuffix(".0")


def _median_regret(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.regret for run in runs]).median


def _p90_regret(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.regret for run in runs]).p90


def _median_deployments(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.effort.deployments for run in runs]).median


def _p90_deployments(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.effort.deployments for run in runs]).p90


TARGETS = (
    BenchmarkTarget("test", "regret, median", 0.01, _median_regret, as_percent, over_all=True),
    BenchmarkTarget("test", "regret, p90", 0.05, _p90_regret, as_percent, over_all=True),
    BenchmarkTarget("test", "deployments, median", 6, _median_deployments, as_count, over_all=True),
    BenchmarkTarget("test", "deployments, p90", 10, _p90_deployments, as_count, over_all=True),
    BenchmarkTarget("training", "regret, median", 0.03, _median_regret, as_percent),
    BenchmarkTarget("training", "regret, p90", 0.08, _p90_regret, as_percent),
    BenchmarkTarget("training", "deployments, median", 6, _median_deployments, as_count),
    BenchmarkTarget("training", "deployments, p90", 10, _p90_deployments, as_count),
)
