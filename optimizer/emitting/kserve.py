"""``kserve``: an InferenceService for KServe's Triton runtime, scaled by Knative."""

from __future__ import annotations

import math
from typing import Any

from optimizer.emitting import kubernetes
from optimizer.emitting.header import header, of_serving
from optimizer.emitting.serving import Serving
from optimizer.emitting.winner import Winner
from optimizer.emitting.yaml_text import to_yaml
from optimizer.report import words

FILE = "inferenceservice.yaml"
HTTP = 8080  # of the runtime


def emit_kserve(winner: Winner, serving: Serving) -> dict[str, str]:
    lines = [*header(winner), *of_serving(winner, serving, mounts_configs=False), *_about(winner, serving)]
    return {FILE: to_yaml(inference_service(winner, serving), header=lines)}


def inference_service(winner: Winner, serving: Serving) -> dict[str, Any]:
    """Knative takes the target's share by itself, so that the target is what was measured."""
    share = f"{100 * serving.target_utilization:g}"
    metadata = {
        "name": serving.name,
        "annotations": {"autoscaling.knative.dev/target-utilization-percentage": share},
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": _predictor(winner, serving)},
    }


def _predictor(winner: Winner, serving: Serving) -> dict[str, Any]:
    account = {"serviceAccountName": serving.service_account} if serving.service_account else {}
    scaled = {
        "minReplicas": serving.min_replicas,
        "maxReplicas": serving.max_replicas,
        "scaleMetric": "rps" if winner.is_rate else "concurrency",
        "scaleTarget": max(1, math.floor(winner.knee)),
    }
    if not winner.is_rate:  # the rest waits in Knative's queue, not in Triton's
        scaled["containerConcurrency"] = winner.point.load.concurrency
    model: dict[str, Any] = {
        "modelFormat": {"name": "triton"},
        "protocolVersion": "v2",
        "storageUri": serving.repository.text,
        **({"image": serving.image} if serving.image else {}),
        **({"args": list(winner.arguments)} if winner.arguments else {}),
        **kubernetes.probes(winner, HTTP),
        "resources": kubernetes.resources(winner),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    return {**account, **scaled, "model": model, "volumes": [kubernetes.shared_memory(winner)]}


def _about(winner: Winner, serving: Serving) -> list[str]:
    what = "requests a second" if winner.is_rate else "requests in flight"
    share = f"{100 * serving.target_utilization:g}%"
    return [f"replicas: as many as keep each at {share} of the {words.exact(winner.knee)} {what} that were measured"]
