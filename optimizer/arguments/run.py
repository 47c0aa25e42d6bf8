"""``tune [run] MODEL``."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from objectives.metrics import METRICS
from objectives.sla import parse_bytes, parse_rate
from optimizer.arguments.requests import add_requests, requests
from optimizer.arguments.target import add_target, address, target
from optimizer.arguments.values import (
    LARGEST_SEED,
    Parser,
    add_slas,
    budget_ms,
    interval_ms,
    parsed,
    shown,
    slas,
    whole,
    with_negative_values,
)
from optimizer.command_line import command_line
from optimizer.errors import BadInputError
from optimizer.headers import HIDDEN
from optimizer.load.windows import FIRST_WINDOW_MS, RATE_WINDOW_MS
from optimizer.machine import cpus
from optimizer.options import RunOptions, default_search
from optimizer.report import LOGS
from optimizer.search import SEARCHERS
from optimizer.store.run_folder import RunFolder
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from optimizer.model_analyzer.reader import Mapped

LONGEST_STUDY_NAME = 400
LEAST_CONFIDENCE, MOST_CONFIDENCE = 0.8, 0.9999
OBJECTIVES = tuple(name for name in METRICS if name != "gpu-memory")  # that is memory, on a GPU
ANEW = ("budget", "max_trials", "storage", "header", "out", "json", "no_report", "log")  # may be given with --resume
EPILOG = """\
commands:
  tune [run] MODEL    find the best configuration (this page)
  tune verify RUN     measure a run's recommendation again: does it still hold?
  tune plan MODEL|RUN how many replicas a rate takes, and what they cost
  tune sweep MODEL    measure given configurations at given loads
  tune batch SUITE    many runs within one budget, compared with the last time
  tune replay TABLE   the same search on a recorded table, without a server
  tune explain RUN    what bounds a run's throughput, and what would help
  tune emit RUN       what a run recommends for Docker, Kubernetes, Helm, KServe
  tune report RUN...  runs as one page, as Markdown, as tables and plots
  tune models         the models that come with tune
  tune setup          fetch the embedded server now rather than at the first run
  tune doctor         what this machine has and what it lacks

what may vary is in a profile.yaml (see configs/ and docs/): settings of the model,
and under space: server: options of the server, where tune starts it

exit codes: 0 found, 1 none meets the SLA, 2 bad input, 3 environment, 130 interrupted

examples:
  tune --sla-p95 20ms dlrm
  tune --sla-p99 50ms --model-repository ./models my_model
  tune --resume results/dlrm/20261120-231154
"""


@dataclass(frozen=True)
class RunArguments:
    """``resumed``: the run that is continued; its own options, with what was given anew. ``mapped``: what a file of
    Model Analyzer asks for, which is in ``options`` as far as they go; ``print_profile``: show it, run nothing.
    ``log``: what is shown meanwhile, one of ``report.LOGS``; None is what suits the terminal."""

    resumed: RunFolder | None
    options: RunOptions
    as_json: bool
    mapped: Mapped | None = None
    print_profile: bool = False
    log: str | None = None
    report: bool = True


def read_run_arguments(words: list[str]) -> RunArguments:
    """Parse once, at the edge. Raises BadInputError naming flag, value and what would be right."""
    words = with_negative_values(words)
    given = _run_parser().parse_args(words)
    if given.print_profile and given.from_model_analyzer is None:
        raise BadInputError("--print-profile shows what --from-model-analyzer FILE becomes: give that too")
    if given.resume is not None or given.from_model_analyzer is None:
        resumed, options = _options(given)
        return RunArguments(resumed, options, given.json, log=given.log, report=not given.no_report)
    from optimizer.model_analyzer.reader import read_model_analyzer

    mapped = read_model_analyzer(Path(given.from_model_analyzer), given.model)
    whole = _run_parser().parse_args([*mapped.words(given.model_repository), *words])
    whole.model = mapped.model
    if whole.load != "rate":  # as given with the command, whatever the file says
        whole.arrivals = given.arrivals
    return RunArguments(
        None, _options(whole)[1], given.json, mapped, given.print_profile, given.log, not given.no_report
    )


def _run_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tune",
        usage="tune [run] [options] MODEL",
        description="Find the Triton Inference Server configuration that serves the most requests within a "
        "latency bound: try configurations on a real server, measure each with perf_analyzer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a name from `tune models`, a profile.yaml, a model.onnx, or a Triton model folder",
    )
    bounds = parser.add_argument_group("what must hold")
    add_slas(bounds)
    bounds.add_argument("--min-throughput", metavar="RATE", help="such as 4000/s (inferences) or 500req/s")
    bounds.add_argument("--max-memory", metavar="SIZE", help="such as 4GiB: of the GPU, else of the server")
    bounds.add_argument("--min-score", metavar="SCORE", help="of the profile's labelled data (see README)")
    bounds.add_argument("--confidence", metavar="SHARE", help="of the verdict: 99%%, 99.9%% (99%%)")
    bounds.add_argument(
        "--no-output-check",
        action="store_true",
        help="accept answers other than the baseline's",
    )
    bounds.add_argument(
        "--objective",
        default="throughput",
        metavar="NAME[,NAME]",
        help=f"{', '.join(OBJECTIVES)} (throughput)",
    )
    tuned = parser.add_argument_group("what is tuned")
    tuned.add_argument("--model-repository", metavar="DIR", help="a Triton repository of your own; MODEL is in it")
    tuned.add_argument("--bls-composing-models", metavar="NAMES", help="that a model in Python calls, with commas")
    tuned.add_argument("--concurrent-models", metavar="NAMES", help="that get the same load at the same time")
    tuned.add_argument("--variants", metavar="NAMES", help="models that may be served in its place, with commas")
    tuned.add_argument(
        "--model-warmup", action="store_true", help="let the server try the batch sizes before it takes requests"
    )
    tuned.add_argument(
        "--from-model-analyzer", metavar="FILE", help="a configuration of Model Analyzer; MODEL is one of its models"
    )
    tuned.add_argument("--print-profile", action="store_true", help="show FILE as a profile.yaml, and end")
    tuned.add_argument("--protocol", default="grpc", choices=("grpc", "http"), help="of the load (grpc)")
    tuned.add_argument(
        "--load",
        default="concurrency",
        choices=("concurrency", "rate"),
        help="requests in flight, or a rate at which they are sent whatever is answered (concurrency)",
    )
    tuned.add_argument(
        "--arrivals", metavar="KIND", help="of --load rate: poisson, constant, or a file of intervals in µs (poisson)"
    )
    tuned.add_argument(
        "--measurement-interval",
        metavar="TIME",
        help=f"of perf_analyzer, three a measurement ({FIRST_WINDOW_MS}ms; {RATE_WINDOW_MS}ms at a rate)",
    )
    tuned.add_argument("--server-cpus", metavar="CPUS", help="that the server runs on, such as 0-3 (see README)")
    tuned.add_argument("--client-cpus", metavar="CPUS", help="that the load generator runs on, such as 4-5")
    add_requests(parser.add_argument_group("what is sent"))
    add_target(parser)
    search = parser.add_argument_group("how long and how")
    search.add_argument("--budget", metavar="TIME", help="wall time of the whole search: 5m, 90s (4m)")
    search.add_argument("--max-trials", metavar="N", help="configurations to try, the baselines included")
    search.add_argument("--search", choices=SEARCHERS, help="search method (simulated; tpe for other objectives)")
    search.add_argument("--seed", default="0", metavar="N", help="of the search (0)")
    search.add_argument("--warm-start", metavar="RUN", help="begin with what a run on another machine showed")
    results = parser.add_argument_group("results")
    results.add_argument("--out", default="results", metavar="DIR", help="folder of the results (results)")
    results.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    results.add_argument("--storage", metavar="URL", help="Optuna storage (a file in the run's folder)")
    results.add_argument("--join", metavar="STUDY", help="share this study of the --storage with other workers")
    results.add_argument("--json", action="store_true", help="one JSON document on standard output")
    results.add_argument("--no-report", action="store_true", help="no report.html: `tune report` makes it later")
    results.add_argument("--log", choices=LOGS, help="what is shown meanwhile (live on a terminal, else none)")
    return parser


def _options(given: argparse.Namespace) -> tuple[RunFolder | None, RunOptions]:
    """Parse once, at the edge. Raises BadInputError naming flag, value and what would be right."""
    budget = None if given.budget is None else parsed("--budget", given.budget, budget_ms) / 1000
    trials = None if given.max_trials is None else whole("--max-trials", given.max_trials, 1)
    if given.resume is not None:
        return _resumed(given, budget, trials)
    if given.model is None:
        raise BadInputError("which model? `tune models` lists those that come with tune; or give a profile or folder")
    bounds_ms = slas(given)
    objectives = tuple(given.objective.split(","))
    for name in objectives:
        if name not in OBJECTIVES or objectives.count(name) > 1:
            raise BadInputError(
                f"--objective {shown(given.objective)}: give one or more of {', '.join(OBJECTIVES)}, each once"
            )
    if given.arrivals is not None and given.load != "rate":
        raise BadInputError(f"--arrivals {shown(given.arrivals)} is about --load rate: give that too")
    if given.load == "rate" and given.protocol == "http":
        raise BadInputError("--load rate sends by gRPC only: leave --protocol http out")
    served = target(given)
    if given.load == "rate" and served["perf_analyzer_image"] is not None:
        raise BadInputError("--load rate sends by tune's own client: leave --perf-analyzer-image out")
    over_http = served["target"] == "remote" and address(served["url"]).protocol == "http"
    if served["target"] == "remote":
        _check_remote(given, over_http=over_http)
    search = given.search or default_search(objectives)
    if search == "simulated" and objectives[0] != "throughput":
        raise BadInputError(
            f"--search simulated ranks by throughput; with --objective {given.objective} "
            "take tpe, nsga2, random or grid"
        )
    if search == "grid" and given.warm_start is not None:
        raise BadInputError("--warm-start: --search grid measures every configuration anyway; leave one out")
    if given.min_throughput is not None:
        parsed("--min-throughput", given.min_throughput, lambda text: parse_rate(text, 1))
    memory = given.max_memory
    interval = given.measurement_interval
    default = RunOptions(given.model)
    return None, RunOptions(
        model=given.model,
        sla_ms=bounds_ms,
        model_repository=given.model_repository,
        bls_composing_models=_names("--bls-composing-models", given.bls_composing_models),
        concurrent_models=_names("--concurrent-models", given.concurrent_models),
        variants=_names("--variants", given.variants),
        model_warmup=given.model_warmup,
        from_model_analyzer=given.from_model_analyzer,
        **served,
        objectives=objectives,
        min_throughput=given.min_throughput,
        max_memory_bytes=None if memory is None else parsed("--max-memory", memory, parse_bytes),
        min_score=None if given.min_score is None else parsed("--min-score", given.min_score, _score),
        confidence=default.confidence
        if given.confidence is None
        else parsed("--confidence", given.confidence, _confidence),
        output_check=not given.no_output_check,
        budget_seconds=default.budget_seconds if budget is None else budget,
        max_trials=trials,
        search=search,
        seed=whole("--seed", given.seed, 0, LARGEST_SEED),
        warm_start=given.warm_start,
        protocol="http" if over_http else given.protocol,
        measurement_interval_ms=None if interval is None else parsed("--measurement-interval", interval, interval_ms),
        **requests(given),
        load=given.load,
        server_cpus=_cpus("--server-cpus", given.server_cpus),
        client_cpus=_cpus("--client-cpus", given.client_cpus),
        arrivals=given.arrivals or default.arrivals,
        storage=given.storage,
        join=_study_name(given),
        out=given.out,
    )


def _check_remote(given: argparse.Namespace, *, over_http: bool) -> None:
    if given.protocol == "http" and not over_http:
        raise BadInputError("--protocol http: --url is that of the server's gRPC; write http://host:port there")
    if over_http and given.load == "rate":
        raise BadInputError("--load rate sends by gRPC only: give --url that of the server's gRPC")
    if given.server_cpus is not None:
        raise BadInputError(f"--server-cpus {given.server_cpus}: those of a remote server cannot be chosen from here")


def _study_name(given: argparse.Namespace) -> str | None:
    name: str | None = given.join
    if name is None:
        return None
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_STUDY_NAME:
        raise BadInputError(f"--join {shown(name)}: give a name of 1 to {LONGEST_STUDY_NAME} printable characters")
    if given.storage is None:
        raise BadInputError(
            f"--join {shown(name)}: in which database? Give the --storage that all workers have, postgresql://…"
        )
    return name


def _names(flag: str, text: str | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys((text or "").split(","))) if text is not None else ()
    if not all(names):
        raise BadInputError(f"{flag} {shown(text or '')}: give names of models, with commas between them")
    return names


def _score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("write a number such as 0.9")
    return value


def _confidence(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not LEAST_CONFIDENCE <= share <= MOST_CONFIDENCE:
        raise ValueError(f"write a share such as 99%, from {LEAST_CONFIDENCE:.0%} to {100 * MOST_CONFIDENCE:g}%")
    return round(share, 9)


def _cpus(flag: str, text: str | None) -> str | None:
    try:
        return None if text is None else cpus.show(cpus.parse(text, among=cpus.available()))
    except ValueError as error:
        raise BadInputError(f"{flag} {shown(text or '')}: {error}") from None


def checked_options(folder: RunFolder) -> RunOptions:
    """Those in the run.json of ``folder``, which may come from anywhere: its values are held to what the command
    line's are. Raises BadInputError."""
    options = folder.read_options()
    try:
        read_run_arguments(shlex.split(command_line(options))[1:])
    except BadInputError as error:
        raise BadInputError(f"{one_line(str(folder.info))}: {error}") from None
    return options


def _resumed(given: argparse.Namespace, budget: float | None, trials: int | None) -> tuple[RunFolder, RunOptions]:
    """The options of the run that is continued; what is in ANEW may be given anew."""
    if given.model is not None:
        raise BadInputError(f"--resume {given.resume} has its own model; leave {given.model!r} out")
    usual = vars(_run_parser().parse_args([]))
    other = [name for name, value in vars(given).items() if value != usual[name] and name not in (*ANEW, "resume")]
    if other:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        raise BadInputError(f"--resume {given.resume} goes on with what the run began with; leave {flags} out")
    folder = RunFolder.find(given.resume, given.out)
    options = checked_options(folder)
    options = replace(
        options,
        budget_seconds=options.budget_seconds if budget is None else budget,
        max_trials=options.max_trials if trials is None else trials,
        storage=given.storage or options.storage,
        headers=tuple(given.header or options.headers),
    )
    if options.storage and HIDDEN in options.storage:
        raise BadInputError(f"--resume {given.resume}: its storage has a password, which is not kept; give --storage")
    return folder, options
