"""Settings of the autoscaler that `tune emit` writes and `tune plan` simulates: options, defaults, target, metric."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from optimizer.options.values import parse_optional, parse_value, whole_number

DEFAULT_MIN_REPLICAS, DEFAULT_MAX_REPLICAS = 1, 10
MAX_REPLICAS = 10_000
DEFAULT_UTILIZATION = 0.7  # share of the measured load that a replica should get on average
DEFAULT_UTILIZATION_TEXT = f"{DEFAULT_UTILIZATION:.0%}"
RATE_WINDOW_SECONDS = 60  # over which prometheus-adapter averages the metric


@dataclass(frozen=True)
class ScalingLimits:
    """The numbers of replicas between which an autoscaler scales, and their target.

    ``target_utilization`` is the share of its measured load that a replica should get on average.
    """

    min_replicas: int = DEFAULT_MIN_REPLICAS
    max_replicas: int = DEFAULT_MAX_REPLICAS
    target_utilization: float = DEFAULT_UTILIZATION


SCALING_FLAGS = ("--min-replicas", "--max-replicas", "--target-utilization")


def add_scaling_limits(parser: argparse._ActionsContainer, of: str = "", maximum_note: str = "") -> None:
    """Add SCALING_FLAGS to ``parser``; in their help, ``of`` follows "replicas", and the note the maximum."""
    for name, bound, default in (("min", "Minimum", DEFAULT_MIN_REPLICAS), ("max", "Maximum", DEFAULT_MAX_REPLICAS)):
        text = f"{bound} number of replicas{of} (default: {default}){maximum_note if name == 'max' else ''}"
        parser.add_argument(f"--{name}-replicas", metavar="N", help=text)
    text = f"Share of its measured load that a replica should get (default: {DEFAULT_UTILIZATION_TEXT}%)"
    parser.add_argument("--target-utilization", metavar="PERCENT", help=text)


def read_scaling_limits(arguments: argparse.Namespace) -> ScalingLimits:
    """Return the values of SCALING_FLAGS, or their defaults. Raises BadInputError."""
    min_replicas, max_replicas = arguments.min_replicas, arguments.max_replicas
    least = parse_optional("--min-replicas", min_replicas, whole_number(1, MAX_REPLICAS), DEFAULT_MIN_REPLICAS)
    most_by_default = max(DEFAULT_MAX_REPLICAS, least)
    percent: str = DEFAULT_UTILIZATION_TEXT if arguments.target_utilization is None else arguments.target_utilization
    return ScalingLimits(
        least,
        parse_optional("--max-replicas", max_replicas, whole_number(least, MAX_REPLICAS), most_by_default),
        parse_value("--target-utilization", percent.removesuffix("%"), whole_number(1, 100)) / 100,
    )


def target_load(measured_load: float, utilization: float) -> float:
    """Return the requests in flight, or per second, that a replica should get on average.

    It is rounded down to thousandths, the smallest quantity of an autoscaler in Kubernetes.
    """
    return max(1, math.floor(1e3 * measured_load * utilization + 1e-6)) / 1e3  # 70 % of 90 are 63
