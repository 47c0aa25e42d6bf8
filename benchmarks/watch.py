"""Measure how often `tune watch` tells the load of a run from a changed one, on a real server.

    python benchmarks/watch.py --run RUN [--rounds 5] [--interval 0.5] [--intervals 12]

RUN is the folder of a run of the built-in model mlp on this machine, such as that of `tune --sla-p95 20ms mlp`. Each
round starts a server with its recommendation for each case. It sends the load of the case with tune's own client, and
judges the server's metrics as `tune watch` does. (The client gives up a rate that the server does not reach, also if
the machine is disturbed. So cases of servers that may not reach a rate are closed loops.) Cases with the load and the
server of the run should fit: other judgements are false alarms. In the other cases one thing differs that changes a
metric, so it should be detected. Rates are shares of the rate that `tune plan` calls safe for one server. Prints a
Markdown table; the latest one is in watch.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lib.measured_model import write_requests
from lib.output import print_progress, print_title
from lib.records import this_machine
from objectives.sla import Verdict
from optimizer.core.candidate import Candidate
from optimizer.core.errors import MeasurementError, TuneError
from optimizer.core.files import cache_folder
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import embedded_installation
from optimizer.deploy.installed_server import InstalledTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.model.builders import build
from optimizer.results import configuration_text, formatting
from optimizer.results.finished_run import read_run
from optimizer.simulator.simulate import compile_simulator
from optimizer.watch.expectation import Expectation, derive_expectation
from optimizer.watch.fit_check import Judgement
from optimizer.watch.server_metrics import observe_loads, read_server
from optimizer.watch.watch_report import check_name

LEAD_SECONDS, MORE_SECONDS = 2.0, 1.0  # of the load before and after the observation
SUMMARIES = "--metrics-config=summary_latencies=true"
GAVE_UP = "the client gave up"
OUTCOMES = ("fits", "near the capacity", "no longer fits", "undecided", GAVE_UP)
SLOW_MODEL = {"hidden_width": 1024, "layers": 4}


@dataclass(frozen=True)
class LoadCase:
    """One thing to judge: a load on a server.

    ``settings`` are those of the model. With ``summaries`` the server computes quantiles of its request times.
    """

    name: str
    fits: bool
    load: LoadPoint
    candidate: Candidate
    settings: dict[str, int] = field(default_factory=dict)
    summaries: bool = False


def cases(expectation: Expectation) -> list[LoadCase]:
    """Return the loads that fit, then those that do not."""
    recommended, size = expectation.point.candidate, expectation.request_samples
    safe = expectation.safe_rate
    if safe is None:
        sys.exit(f"{expectation.run.folder.path}: has no safe rate; give a run with a latency bound")
    unbatched = replace(
        recommended, max_batch_size=1, dynamic_batching=False, max_queue_delay_us=0, preferred_batch_sizes=()
    )

    def at(share: float, samples: float = size) -> LoadPoint:
        return LoadPoint(samples, request_rate=round(share * safe))

    clients = expectation.point.load.concurrency or 1
    fewer, closed, crowded = (LoadPoint(size, concurrency=max(1, round(share * clients))) for share in (0.5, 1, 4))
    larger = "a larger model"
    return [
        *(LoadCase(f"independent requests, {share:.0%}", True, at(share), recommended) for share in (0.1, 0.5, 0.9)),
        LoadCase("a closed loop with half of the clients", True, fewer, recommended),
        LoadCase("the run's own closed loop", True, closed, recommended),
        LoadCase("requests of 4 times the samples, 10%", False, at(0.1, 4 * size), recommended),
        LoadCase("a closed loop with 4 times the clients", False, crowded, recommended),
        LoadCase("without batching, the run's own closed loop", False, closed, unbatched),
        LoadCase(f"{larger}, the run's own closed loop", False, closed, recommended, settings=SLOW_MODEL),
        LoadCase(f"{larger}, 5%", False, at(0.05), recommended, settings=SLOW_MODEL),
        LoadCase("with summary_latencies, the run's own closed loop", False, closed, recommended, summaries=True),
    ]


def judged(case: LoadCase, expectation: Expectation, folder: Path, interval: float, count: int) -> Judgement | None:
    """Serve ``case`` on a new server, send its load, and return the judgement on its metrics.

    It is None if the client gave up before the last interval ended.
    """
    source = build(
        "mlp", case.settings, cache=cache_folder(), max_batch_size=64, kind="KIND_CPU", on_progress=print_progress
    )
    installation = embedded_installation(runtime.ensure(print_progress))
    if case.summaries:
        installation = replace(installation, arguments=(SUMMARIES,))
    target = InstalledTarget(source, installation, TargetSettings(folder / "tritonserver.log", exports_metrics=True))
    kind = OpenLoopGenerator if case.load.request_rate else ClosedLoopGenerator
    client = kind(log=folder / "client.log", input_data=write_requests(source, folder))
    with contextlib.closing(target), target.deploy(case.candidate) as endpoint:
        url = f"http://{endpoint.metrics}/metrics"

        def send() -> None:
            try:
                client.measure(endpoint, case.load, LEAD_SECONDS + interval * count + MORE_SECONDS)
            except MeasurementError as error:  # the server may be overloaded
                print_progress(f"{case.name}: {error}")

        sender = threading.Thread(target=send)
        sender.start()
        try:
            while sender.is_alive() and not read_server(url, endpoint.model).requests:
                time.sleep(interval)
            time.sleep(LEAD_SECONDS)
            observed = next(observe_loads([url], endpoint.model, interval, count))
            has_load = sender.is_alive()
        finally:
            sender.join()
    return Judgement(expectation, observed.loads, 1, observed.lost_intervals) if has_load else None


def outcome(judgement: Judgement | None) -> str:
    if judgement is None:
        return GAVE_UP
    if judgement.verdict is Verdict.FAIL:
        return "no longer fits"
    if judgement.verdict is Verdict.UNDECIDED:
        return "undecided"
    return "near the capacity" if any(check.status == "near" for check in judgement.checks) else "fits"


def table(results: Sequence[tuple[LoadCase, list[Judgement | None]]]) -> str:
    """Return the Markdown table."""
    lines = [
        f"| server and load | should | {' | '.join(OUTCOMES)} | checks that differed |",
        f"| --- | --- |{' --: |' * len(OUTCOMES)} --- |",
    ]
    for case, judgements in results:
        counts = Counter(map(outcome, judgements))
        names = Counter(
            check_name(check, judgement.expectation)
            for judgement in judgements
            if judgement
            for check in judgement.differing
        )
        shown = ", ".join(f"{name} ({count})" for name, count in names.most_common()) or "–"
        cells = [counts[word] for word in OUTCOMES]
        should = "fit" if case.fits else "differ"
        lines.append(f"| {case.name} | {should} | {' | '.join(map(str, cells))} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Judge each case in each round and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="folder of a run of mlp on this machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=float, default=0.5, help="seconds of an interval")
    parser.add_argument("--intervals", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further judgement begins after this time")
    arguments = parser.parse_args()
    compile_simulator(print_progress)
    run = read_run(arguments.run)
    if run.problem.model != "mlp":
        sys.exit(f"{arguments.run}: is no run of mlp")
    expectation = derive_expectation(run)
    if expectation.server_processes > 1:
        sys.exit(f"{arguments.run}: has several server processes; give a run with one")
    results: list[tuple[LoadCase, list[Judgement | None]]] = [(case, []) for case in cases(expectation)]
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for case, judgements in results:
                if time.monotonic() > ends:
                    break
                try:
                    judgements.append(
                        judged(case, expectation, Path(folder), arguments.interval, arguments.intervals)
                    )
                except TuneError as error:
                    print_progress(f"{case.name}: {error}")
                    continue
                judgement = judgements[-1]
                names = [check_name(check, expectation) for check in judgement.differing] if judgement else []
                print_progress(f"round {number + 1}: {case.name}: {outcome(judgements[-1])} {', '.join(names)}")
    confirmed = expectation.confirmed_rate.interval(1 - run.problem.confidence)
    assert confirmed is not None, "the run has a throughput"
    seconds = arguments.interval * arguments.intervals
    words = (
        f"--run RUN --rounds {arguments.rounds} --interval {arguments.interval:g} --intervals {arguments.intervals}"
    )
    print_title("Judgements of `tune watch`: latest measurement", words.split())
    verdict = run.outcome.verdict.value if run.outcome else "no verdict"
    print(
        f"Each judgement observes a new server of mlp for {seconds:g} s. The run, `{run.info.get('command')}`, has "
        f"the verdict {verdict}: {configuration_text.configuration(expectation.point.candidate)}, "
        f"{formatting.number(confirmed.low)} to {formatting.number(confirmed.high)} requests/s. The percentages are "
        f"shares of the {formatting.number(expectation.safe_rate)} requests/s that `tune plan` calls safe.\n"
    )
    print(f"Machine: {this_machine()}.\n")
    print(table(results))


if __name__ == "__main__":
    main()
