"""``tune plan MODEL|RUN…``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from objectives.sla import Constraint, parse_rate
from optimizer.arguments.values import Parser, add_slas, parsed, shown, slas, whole
from optimizer.errors import BadInputError
from optimizer.planning.day import STEADY, Day
from optimizer.planning.fleet import MOST_REPLICAS
from optimizer.planning.plan import Question
from optimizer.planning.trace_file import read_trace
from optimizer.planning.traffic import BALANCERS, SPLIT, Constant, Poisson

TRAFFIC = ("poisson", "constant", "diurnal")
USUAL_PEAK = 1.5
EPILOG = f"""\
one replica is the server as the run measured it, with all of its GPUs. Give
one of --rate, --gpus, --replicas and --max-cost; --rate with one of the others
asks for the tightest bound that so many keep. Several RUNs of one model are
planned side by side by hardware; those of one hardware are read together,
which narrows the interval.

load balancers:
{chr(10).join(f"  {name}:{chr(10)}    {SPLIT[name]}" for name in BALANCERS)}

exit codes: 0 found, 1 nothing meets the bounds, 2 bad input, 3 environment

examples:
  tune plan dlrm --rate 40000/s --sla-p95 20ms --gpu-hour-cost 2.50
  tune plan dlrm/sample --traffic diurnal --peak-factor 1.8 --rate 10000req/s
  tune plan results/dlrm/sample --trace requests.csv
  tune plan results/dlrm/sample --gpus 8
  tune plan results/dlrm/sample --max-cost 12 --gpu-hour-cost A100=3.2
"""


@dataclass(frozen=True)
class PlanArguments:
    """``of``: models or runs as they were given. ``note``: what could not be used of a recording."""

    of: tuple[str, ...]
    out: str
    question: Question
    note: str
    as_json: bool
    sla_words: tuple[str, ...]


def read_plan_arguments(words: Sequence[str]) -> PlanArguments:
    """Parse once, at the edge. Raises BadInputError naming flag, value and what would be right."""
    given = _parser().parse_args(list(words))
    for flag in ("rate", "gpus", "replicas", "max_cost", "trace"):
        if getattr(given, flag) is not None:
            break
    else:
        raise BadInputError("what is asked? give --rate 40000/s, or --gpus, --replicas or --max-cost for their rate")
    several = [flag for flag in ("gpus", "replicas", "max_cost") if getattr(given, flag) is not None]
    if len(several) > 1:
        both = " and ".join(f"--{flag.replace('_', '-')}" for flag in several[:2])
        raise BadInputError(f"{both} both say how many replicas: give one of them")
    if given.rate is not None:
        parsed("--rate", given.rate, lambda text: parse_rate(text, 1))
    if given.trace is not None and given.traffic is not None:
        raise BadInputError(f"--trace and --traffic {given.traffic} both say how requests come: give one of them")
    if given.peak_factor is not None and given.traffic != "diurnal":
        raise BadInputError(f"--peak-factor {shown(given.peak_factor)} is about --traffic diurnal: give that too")
    costs = _hour_costs(given.gpu_hour_cost or [])
    if given.max_cost is not None and not costs:
        raise BadInputError("--max-cost needs the price of a replica: give --gpu-hour-cost too")
    peak = given.peak_factor or str(USUAL_PEAK)
    trace = None if given.trace is None else read_trace(Path(given.trace))
    bounds = slas(given)
    question = Question(
        traffic=trace.traffic if trace is not None else Constant() if given.traffic == "constant" else Poisson(),
        balancer=given.balancer,
        day=Day(parsed("--peak-factor", peak, _peak_factor)) if given.traffic == "diurnal" else STEADY,
        rate=given.rate,
        replicas=None if given.replicas is None else whole("--replicas", given.replicas, 1, MOST_REPLICAS),
        devices=None if given.gpus is None else whole("--gpus", given.gpus, 1, MOST_REPLICAS),
        most_cost=None if given.max_cost is None else parsed("--max-cost", given.max_cost, _amount),
        hour_costs=costs,
        bounds=tuple(Constraint(f"latency-{name}", bound_ms) for name, bound_ms in bounds.items()),
    )
    note = trace.note if trace is not None else ""
    sla_words = [word for name in bounds for word in (f"--sla-{name}", getattr(given, f"sla_{name}"))]
    return PlanArguments(tuple(given.of), given.out, question, note, given.json, tuple(sla_words))


def _parser() -> Parser:
    parser = Parser(
        prog="tune plan",
        usage="tune plan [options] MODEL|RUN [RUN ...]",
        description="How many replicas a rate takes within a latency bound, or which they can take.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.page = "tune plan --help"
    parser.add_argument("of", nargs="+", metavar="MODEL|RUN", help="the newest run of a model, or folders of runs")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--rate", metavar="RATE", help="40000/s (inferences) or 500req/s (requests)")
    asked.add_argument("--gpus", metavar="N", help="GPUs that there are: for which rate? (machines without GPU)")
    asked.add_argument("--replicas", metavar="N", help="the same in replicas")
    asked.add_argument("--max-cost", metavar="COST", help="of an hour: for which rate, or with --rate which bound?")
    add_slas(asked)
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--traffic", choices=TRAFFIC, help="how requests come (poisson)")
    traffic.add_argument("--peak-factor", metavar="X", help=f"of a day's peak over its mean, 1 to 2 ({USUAL_PEAK})")
    traffic.add_argument("--trace", metavar="FILE.csv", help="a recording, a timestamp in each row")
    traffic.add_argument("--balancer", choices=BALANCERS, default=BALANCERS[0], help=f"({BALANCERS[0]})")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--gpu-hour-cost",
        action="append",
        metavar="[NAME=]COST",
        help="of a GPU (a machine without one); NAME: part of the hardware's; repeatable",
    )
    results.add_argument("--out", default="results", metavar="DIR", help="folder of the runs (results)")
    results.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _hour_costs(texts: Sequence[str]) -> dict[str, float]:
    costs = {}
    for text in texts:
        name, _, cost = text.rpartition("=")
        costs[name] = parsed("--gpu-hour-cost", cost, _amount)
    return costs


def _amount(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise ValueError("write an amount above 0, such as 2.50")
    return value


def _peak_factor(text: str) -> float:
    value = _number(text)
    if not 1 <= value <= 2:
        raise ValueError("write a number from 1 to 2: how much more than on average comes at the peak")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
