"""``helm-values``: what the chart beside this module is filled with; rendered, that is what ``kubernetes`` is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.emitting import autoscaling, kubernetes, server
from optimizer.emitting.pbtxt import text_of
from optimizer.emitting.serving import Serving
from optimizer.emitting.winner import Winner
from optimizer.emitting.yaml_text import to_yaml

FILE = "values.yaml"
CHART = Path(__file__).parent / "chart"


def emit_values(winner: Winner, serving: Serving) -> dict[str, str]:
    use = f"helm install {serving.name} ./chart --values {FILE}, with the chart that --output writes beside it"
    return {FILE: to_yaml(values(winner, serving), header=[*kubernetes.about(winner, serving), use])}


def chart() -> dict[str, str]:
    """The chart's files, by their paths."""
    return {
        f"chart/{path.relative_to(CHART).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(CHART.rglob("*"))
        if path.is_file()
    }


def values(winner: Winner, serving: Serving) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fullnameOverride": serving.name,
        "image": serving.image,
        "args": server.command(winner, serving),
        "serviceAccountName": serving.service_account,
        "probes": kubernetes.probes(winner, "http"),
        "resources": kubernetes.resources(winner),
        "sharedMemory": kubernetes.shared_memory(winner)["emptyDir"]["sizeLimit"],
        "replicas": serving.min_replicas,
        "autoscaling": {"enabled": serving.is_autoscaled},
    }
    if serving.repository.is_mounted:
        found["modelRepository"] = {"claim": serving.repository.claim, "path": serving.repository.path}
        found["models"] = [
            {"name": model, "key": key, "config": text_of(winner, model)}
            for model, key in kubernetes.config_keys(winner).items()
        ]
    if serving.is_autoscaled:
        found["autoscaling"] |= {
            "maxReplicas": serving.max_replicas,
            "metrics": autoscaling.pod_metrics(winner, serving),
        }
    return found
