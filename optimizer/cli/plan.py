"""``tune plan MODEL|RUN…``: the number of replicas for a request rate, and their cost."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from textwrap import fill

from objectives.sla import Sla
from objectives.units import parse_duration_ms, parse_rate
from optimizer.cli.commands import add_run
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.output import busy, open_console, print_json, print_message, progress_on_terminal
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import named_file, one_line, quote
from optimizer.options.command_line import Parser, add_json, add_results, value_of, values_of
from optimizer.options.option_reader import latency_bounds_ms
from optimizer.options.table import OUTPUT, SLA_OPTIONS
from optimizer.options.values import number_where, parse_optional, parse_path, parse_value, whole_number
from optimizer.plan.autoscaler import COOL_DOWN_SECONDS, METRIC_DELAY_SECONDS, Autoscaler
from optimizer.plan.capacity_plan import CapacityPlan, CapacityQuestion, hour_cost_of, plan_by_simulation
from optimizer.plan.fleet import MAX_REPLICAS
from optimizer.plan.measured_plan import plan_by_measurements
from optimizer.plan.traffic import (
    BALANCER_SPLITS,
    BALANCERS,
    CONSTANT_DAY,
    ConstantTraffic,
    Day,
    PoissonTraffic,
    read_trace,
)
from optimizer.results.autoscaling import SCALING_FLAGS, add_scaling_limits, read_scaling_limits
from optimizer.results.finished_run import FinishedRun
from optimizer.study.planned_runs import PlannedRuns

TRAFFIC = ("poisson", "constant", "diurnal")
DEFAULT_PEAK_FACTOR = 1.5
AMOUNT = number_where(lambda value: 0 < value < math.inf, "write an amount above 0, such as 2.50")
AUTOSCALER_FLAGS = (*SCALING_FLAGS, "--metric-delay", "--cool-down", "--replica-start")
MAX_DELAY_SECONDS = 3600.0
PEAK_FACTOR = number_where(lambda value: 1 <= value <= 2, "write a number from 1 to 2: the peak relative to the mean")
EPILOG = f"""\
One replica is the measured server with all of its GPUs. Give one of --rate,
--gpus, --replicas and --max-cost. With --rate and one of the others the result
is the tightest latency bound that this number of replicas meets. Several RUNs
of one model are compared by hardware. RUNs on the same hardware are combined,
which narrows the interval. With --traffic diurnal or --trace the autoscaler
that `tune emit --format kubernetes` writes is simulated on this traffic.
Several models (--concurrent-models), and models that stream or keep state, are
planned from their measured throughput, for steady traffic only.

load balancers:
{chr(10).join(fill(f"  {name}: {BALANCER_SPLITS[name]}", 79, subsequent_indent="    ") for name in BALANCERS)}

exit codes: 0 found, 1 nothing meets the bounds, 2 bad input, 3 environment,
4 found, but the verdict of a RUN is UNDECIDED

examples:
  tune plan dlrm --rate 40000/s --sla-p95 20ms --gpu-hour-cost 2.50
  tune plan dlrm/sample --traffic diurnal --peak-factor 1.8 --rate 10000req/s
  tune plan results/dlrm/sample --trace requests.csv --max-replicas 20
  tune plan results/dlrm/sample --gpus 8
  tune plan results/dlrm/sample --max-cost 12 --gpu-hour-cost A100=3.2
"""


def read_question(arguments: Namespace) -> CapacityQuestion:
    """Return the question of a parsed command line.

    Raises BadInputError naming the flag, its value and the allowed values.
    """
    _check_combination(arguments)
    autoscaler = _autoscaler(arguments)
    costs = _hour_costs(arguments.gpu_hour_cost or [])
    if arguments.max_cost is not None and not costs:
        raise BadInputError("--max-cost: --gpu-hour-cost is missing; give the price of a replica too")
    peak = parse_optional("--peak-factor", arguments.peak_factor, PEAK_FACTOR, DEFAULT_PEAK_FACTOR)
    trace_file = parse_optional("--trace", arguments.trace, parse_path)
    trace = None if trace_file is None else read_trace(named_file("--trace", trace_file, "a CSV file of timestamps"))
    synthetic = ConstantTraffic() if arguments.traffic == "constant" else PoissonTraffic()
    return CapacityQuestion(
        traffic=trace or synthetic,
        balancer=arguments.balancer,
        day=Day(peak) if arguments.traffic == "diurnal" else CONSTANT_DAY,
        rate=arguments.rate,
        replicas=parse_optional("--replicas", arguments.replicas, whole_number(1, MAX_REPLICAS)),
        devices=parse_optional("--gpus", arguments.gpus, whole_number(1, MAX_REPLICAS)),
        max_cost=parse_optional("--max-cost", arguments.max_cost, AMOUNT),
        hour_costs=costs,
        sla=Sla.from_bounds(latency_bounds_ms(values_of(arguments, SLA_OPTIONS))),
        autoscaler=autoscaler,
    )


def _check_combination(arguments: Namespace) -> None:
    """Raise BadInputError if options that are given contradict each other, or ask no question."""
    replica_flags = ("--gpus", "--replicas", "--max-cost")
    set_replica_flags = [flag for flag in replica_flags if value_of(arguments, flag) is not None]
    if arguments.rate is None and arguments.trace is None and not set_replica_flags:
        raise BadInputError(
            "nothing to plan: give --rate 40000/s, or --gpus, --replicas or --max-cost for the rate that they serve"
        )
    if len(set_replica_flags) > 1:
        both = " and ".join(set_replica_flags[:2])
        raise BadInputError(f"{both} both set the number of replicas: give one of them")
    if arguments.rate is not None:
        parse_value("--rate", arguments.rate, lambda text: parse_rate(text, 1))
    if arguments.trace is not None and arguments.traffic is not None:
        raise BadInputError(f"--trace and --traffic {arguments.traffic} both set the traffic: give one of them")
    if arguments.peak_factor is not None and arguments.traffic != "diurnal":
        raise BadInputError(
            f"--peak-factor {quote(arguments.peak_factor)}: works only with --traffic diurnal; give that too"
        )


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune plan",
        usage="[options] MODEL|RUN [RUN ...]",
        description="Compute the replicas that a rate needs within a latency bound, or the rate that\nthey sustain.",
        epilog=EPILOG,
    )
    text = "A model, whose newest run is used, folders of runs, or latest, the newest run"
    add_run(parser, "names", "MODEL|RUN", text, nargs="+")
    _add_question(parser)
    parser.add_options(SLA_OPTIONS)
    _add_traffic(parser)
    _add_autoscaler(parser)
    results = parser.add_argument_group(OUTPUT)
    add_results(results)
    add_json(results)
    return parser


def _add_question(parser: Parser) -> None:
    question = parser.add_argument_group("Question")
    question.add_argument(
        "--rate", metavar="RATE", help="Rate to sustain: 40000/s (inferences) or 500req/s (requests)"
    )
    question.add_argument(
        "--gpus", metavar="N", help="Number of GPUs, or of machines without GPUs; computes the rate that they sustain"
    )
    question.add_argument("--replicas", metavar="N", help="Number of replicas; computes the rate that they sustain")
    question.add_argument(
        "--max-cost",
        metavar="COST",
        help="Hourly cost; computes the rate that it sustains, or with --rate the latency bound",
    )
    question.add_argument(
        "--gpu-hour-cost",
        action="append",
        metavar="[NAME=]COST",
        help="Price of a GPU (of a machine without one) per hour; NAME: part of the hardware's name; repeatable",
    )


def _add_traffic(parser: Parser) -> None:
    traffic = parser.add_argument_group("Traffic")
    traffic.add_argument(
        "--traffic", choices=TRAFFIC, help="Distribution of the requests over time (default: poisson)"
    )
    traffic.add_argument(
        "--peak-factor",
        metavar="X",
        help=f"Peak of a day relative to its mean, 1 to 2 (default: {DEFAULT_PEAK_FACTOR})",
    )
    traffic.add_argument("--trace", metavar="FILE.csv", help="Recorded traffic: a timestamp in each row")
    traffic.add_argument(
        "--balancer", choices=BALANCERS, default=BALANCERS[0], help=f"Load balancer (default: {BALANCERS[0]})"
    )


def _add_autoscaler(parser: Parser) -> None:
    autoscaler = parser.add_argument_group("Autoscaler")
    add_scaling_limits(autoscaler, " of the tested autoscaler")
    autoscaler.add_argument(
        "--metric-delay",
        metavar="TIME",
        help=f"Age of the newest metric of the autoscaler (default: {METRIC_DELAY_SECONDS:g}s, as in Kubernetes)",
    )
    autoscaler.add_argument(
        "--cool-down",
        metavar="TIME",
        help=f"Time before the autoscaler removes replicas (default: {COOL_DOWN_SECONDS:g}s, as in Kubernetes)",
    )
    autoscaler.add_argument(
        "--replica-start",
        metavar="TIME",
        help="Time until a new replica serves requests (default: the measured deployment and one readiness probe)",
    )


def _autoscaler(arguments: Namespace) -> Autoscaler | None:
    """Return the autoscaler to test; None without traffic whose rate changes. Raises BadInputError."""
    flags = [flag for flag in AUTOSCALER_FLAGS if value_of(arguments, flag) is not None]
    if arguments.traffic != "diurnal" and arguments.trace is None:
        if flags:
            raise BadInputError(f"{flags[0]}: works only with --traffic diurnal or --trace; give one of them too")
        return None
    return Autoscaler(
        **vars(read_scaling_limits(arguments)),
        metric_delay_s=parse_optional("--metric-delay", arguments.metric_delay, _seconds, METRIC_DELAY_SECONDS),
        cool_down_s=parse_optional("--cool-down", arguments.cool_down, _seconds, COOL_DOWN_SECONDS),
        start_s=parse_optional("--replica-start", arguments.replica_start, _seconds),
    )


def _seconds(text: str) -> float:
    seconds = parse_duration_ms(text, example="30s") / 1e3
    if seconds > MAX_DELAY_SECONDS:
        raise ValueError("write at most 1h")
    return seconds


def _hour_costs(texts: Sequence[str]) -> dict[str, float]:
    costs = {}
    for text in texts:
        name, _, cost = text.rpartition("=")
        costs[name] = parse_value("--gpu-hour-cost", cost, AMOUNT)
    return costs


def main(argv: list[str]) -> int:
    """Run ``tune plan`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    question, sla = read_question(arguments), values_of(arguments, SLA_OPTIONS)
    runs = PlannedRuns(arguments.results, sla, print_message, progress_on_terminal).find(arguments.names)
    if arguments.traffic is None and arguments.trace is None:
        _refuse_shapes(runs)
    if any(run.problem.priorities for run in runs):
        print_message(
            "note: the latencies of the plan are those of all requests in one queue, whatever their priority"
        )
    if any(run.concurrent_models for run in runs):
        print_message("note: the rates are those of all models together, as in the run (--concurrent-models)")
    if note := question.traffic.note:
        print_message(f"note: {note}")
    with busy("simulating replicas"):
        capacity = _plan(question, runs)
    hardware = {fleet.configuration.hardware for fleet in capacity.answers}
    for name, cost in question.hour_costs.items():
        if all(hour_cost_of({name: cost}, device) is None for device in hardware):
            print_message(
                f"note: --gpu-hour-cost {quote(name)}: this price is not used, because the name is no part of "
                f"{' or '.join(sorted(hardware))}"
            )
    simulations = [fleet.simulated for fleet in capacity.answers]
    is_simulated = all(fleet is not None and fleet.at_rate.refused is not None for fleet in simulations)
    if any(run.problem.may_refuse for run in runs) and not is_simulated:
        print_message(
            "note: the plan simulates no refused requests, and docs/plan.md says why: with a limited queue, fewer "
            "requests may be served than it expects"
        )
    from optimizer.plan.plan_report import document, print_plan

    if arguments.json:
        print_json(document(capacity))
    else:
        print_plan(open_console(), capacity)
    return EXIT_CODES[capacity.verdict]


def _refuse_shapes(runs: Sequence[FinishedRun]) -> None:
    """Raise BadInputError if a run was measured with a load shape: steady traffic would need fewer replicas."""
    for run in runs:
        times = run.problem.request_times
        if times is not None and not times.is_steady:
            raise BadInputError(
                f"{run.folder.path}: measured with the load {one_line(times.distribution, 60)}, and a plan for "
                "Poisson traffic has no such bursts; give the traffic, with --trace FILE.csv or --traffic poisson"
            )


def _plan(question: CapacityQuestion, runs: Sequence[FinishedRun]) -> CapacityPlan:
    if not all(run.has_simulated_replica for run in runs):
        return plan_by_measurements(question, runs)
    from optimizer.simulator.simulate import compile_simulator

    compile_simulator(print_message)
    return plan_by_simulation(question, runs)
