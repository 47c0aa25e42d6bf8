"""How many replicas: from the load at which one was measured to meet the bound."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from optimizer.emitting.serving import Serving
from optimizer.emitting.winner import Winner
from optimizer.emitting.yaml_text import to_yaml
from optimizer.report import words

WINDOW = "1m"  # of the rates


def target(winner: Winner, serving: Serving) -> int:
    """Requests in flight, or a second, that a replica is to get on average."""
    return max(1, math.floor(winner.knee * serving.target_utilization))


def pod_metrics(winner: Winner, serving: Serving) -> list[dict[str, Any]]:
    """For a HorizontalPodAutoscaler."""
    if serving.autoscaled_by == "cpu":
        utilization = round(100 * serving.target_utilization)
        wanted: dict[str, Any] = {"type": "Utilization", "averageUtilization": utilization}
        return [{"type": "Resource", "resource": {"name": "cpu", "target": wanted}}]
    wanted = {"type": "AverageValue", "averageValue": str(target(winner, serving))}
    return [{"type": "Pods", "pods": {"metric": {"name": metric_name(winner)}, "target": wanted}}]


def metric_name(winner: Winner) -> str:
    """One for each model: the rule that makes it is about that model alone."""
    model = re.sub(r"[^a-z0-9]+", "_", winner.model.lower()).strip("_")
    return f"triton_{model}_requests_{'per_second' if winner.is_rate else 'in_flight'}"


def adapter_rule(winner: Winner) -> dict[str, Any]:
    """A rule of prometheus-adapter that makes the metric from Triton's own.

    Requests in flight are what their durations sum up to in a second (Little's law).
    """
    series = "nv_inference_request_success" if winner.is_rate else "nv_inference_request_duration_us"
    model = f"model={json.dumps(winner.model, ensure_ascii=False)}"
    query = f"sum by (<<.GroupBy>>) (rate(<<.Series>>{{<<.LabelMatchers>>,{model}}}[{WINDOW}]))"
    resources = {name: {"resource": name} for name in ("namespace", "pod")}
    return {
        "seriesQuery": f'{series}{{namespace!="",pod!="",{model}}}',
        "resources": {"overrides": resources},
        "name": {"as": metric_name(winner)},
        "metricsQuery": query if winner.is_rate else f"{query} / 1e6",
    }


def about(winner: Winner, serving: Serving) -> list[str]:
    """Lines of a header."""
    if not serving.is_autoscaled:
        return []
    share = f"{100 * serving.target_utilization:g}%"
    if serving.autoscaled_by == "cpu":
        return [f"replicas: as many as keep the CPUs at {share}; the measured load is not asked for"]
    what = "a second" if winner.is_rate else "in flight"
    kept, measured = f"{words.count(target(winner, serving), 'request')} {what}", words.exact(winner.knee)
    return [
        f"replicas: as many as keep each at {kept}, {share} of the {measured} that were measured;",
        f"{metric_name(winner)} is made by prometheus-adapter, with this among its rules.custom:",
        *(f"  {line}" for line in to_yaml([adapter_rule(winner)]).splitlines()),
    ]
