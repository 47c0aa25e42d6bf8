"""Formats ``kubernetes``, ``helm-values`` and ``kserve``: manifests, values for the chart, and an InferenceService.

The first two have the same content.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line
from optimizer.deploy.target_settings import GRPC_PORT, HTTP_PORT, METRICS_PORT
from optimizer.emit import production
from optimizer.emit.pbtxt import repository_files
from optimizer.emit.production import ProductionSettings, deployment_header, is_stateful, numbered_names, to_yaml
from optimizer.emit.recommended import Recommendation
from optimizer.results import autoscaling, formatting

RATE_WINDOW = f"{autoscaling.RATE_WINDOW_SECONDS // 60}m"


def target_load(recommended: Recommendation, settings: ProductionSettings) -> float:
    """Return the requests in flight, or per second, that a replica should get on average."""
    measured = recommended.served_rate if recommended.is_streaming else recommended.knee
    return autoscaling.target_load(measured, settings.target_utilization)


def is_scaled_by_rate(recommended: Recommendation) -> bool:
    """Return whether the metric of the autoscaler is the rate of requests, not the requests in flight.

    Triton's duration of a request ends when the backend's execution returns. A model that streams then still sends
    responses (https://github.com/triton-inference-server/server/issues/8463), so too few requests would be in flight.
    """
    return recommended.is_rate or recommended.is_streaming


def _quantity(load: float) -> str:
    """Return ``load`` as a quantity of Kubernetes: 14, or 350m for 0.35."""
    return f"{load:.0f}" if load == int(load) else f"{round(1e3 * load)}m"


def pod_metrics(recommended: Recommendation, settings: ProductionSettings) -> list[dict[str, Any]]:
    """Return the metrics of the HorizontalPodAutoscaler."""
    if settings.autoscaled_by == "cpu":
        utilization = round(100 * settings.target_utilization)
        goal: dict[str, Any] = {"type": "Utilization", "averageUtilization": utilization}
        return [{"type": "Resource", "resource": {"name": "cpu", "target": goal}}]
    goal = {"type": "AverageValue", "averageValue": _quantity(target_load(recommended, settings))}
    return [{"type": "Pods", "pods": {"metric": {"name": metric_name(recommended)}, "target": goal}}]


def metric_name(recommended: Recommendation) -> str:
    """Return the name of the metric of this model. Each model has its own rule in prometheus-adapter."""
    model = re.sub(r"[^a-z0-9]+", "_", recommended.model.lower()).strip("_")
    return f"triton_{model}_requests_{'per_second' if is_scaled_by_rate(recommended) else 'in_flight'}"


def adapter_rule(recommended: Recommendation) -> dict[str, Any]:
    """Return a rule for prometheus-adapter that computes the metric from Triton's own metrics.

    Requests in flight are the sum of request durations per second (Little's law).
    """
    is_rate = is_scaled_by_rate(recommended)
    series = "nv_inference_request_success" if is_rate else "nv_inference_request_duration_us"
    model = f"model={json.dumps(recommended.model, ensure_ascii=False)}"
    query = f"sum by (<<.GroupBy>>) (rate(<<.Series>>{{<<.LabelMatchers>>,{model}}}[{RATE_WINDOW}]))"
    resources = {name: {"resource": name} for name in ("namespace", "pod")}
    return {
        "seriesQuery": f'{series}{{namespace!="",pod!="",{model}}}',
        "resources": {"overrides": resources},
        "name": {"as": metric_name(recommended)},
        "metricsQuery": query if is_rate else f"{query} / 1e6",
    }


def autoscaling_notes(recommended: Recommendation, settings: ProductionSettings) -> list[str]:
    """Return comment lines on how replicas are scaled and the rule that prometheus-adapter needs."""
    if not settings.is_autoscaled:
        return []
    share = f"{100 * settings.target_utilization:g}%"
    if settings.autoscaled_by == "cpu":
        return [f"replicas: scaled to keep CPUs at {share}; the measured load is not used"]
    measured = formatting.exact(recommended.knee)
    if recommended.is_streaming:
        measured = formatting.number(recommended.served_rate)
    target = formatting.request_load(target_load(recommended, settings), is_rate=is_scaled_by_rate(recommended))
    return [
        f"replicas: scaled to keep each at {target}, {share} of the measured {measured};",
        f"prometheus-adapter computes {metric_name(recommended)} with this rule in its rules.custom:",
        *(f"  {line}" for line in to_yaml([adapter_rule(recommended)]).splitlines()),
    ]


MANIFEST_FILE = "kubernetes.yaml"
LABEL = "app.kubernetes.io/name"
CHECKSUM = "checksum/config"  # pods never read a changed bucket, or a changed ConfigMap that has a subPath
TRITON_USER = 1000  # user id in NVIDIA's images
MEBIBYTE = 1 << 20
PORTS = {"http": HTTP_PORT, "grpc": GRPC_PORT, "metrics": METRICS_PORT}


def emit_kubernetes(recommended: Recommendation, settings: ProductionSettings) -> dict[str, str]:
    """Return ``kubernetes.yaml``."""
    return {
        MANIFEST_FILE: to_yaml(*manifests(recommended, settings), header=kubernetes_header(recommended, settings))
    }


def kubernetes_header(recommended: Recommendation, settings: ProductionSettings) -> list[str]:
    """Return the comment lines on top of the file."""
    notes = [
        *container_notes(recommended),
        *sharing_notes(recommended),
        *sequence_notes(recommended, settings),
        *autoscaling_notes(recommended, settings),
    ]
    return deployment_header(recommended, settings, *notes)


def container_notes(recommended: Recommendation) -> list[str]:
    """Return comment lines on folders and limits of the measured container, which this format does not set."""
    notes = []
    if recommended.mounts:
        folders = ", ".join(f"{mount.at} (there {mount.source})" for mount in recommended.mounts)
        notes.append(f"WARNING: the measured container had the folders {folders}; add a volume for each")
    if recommended.ulimits:
        limits = ", ".join(recommended.ulimits)
        notes.append(f"limits: the measured container had {limits}; set them in the container runtime of the nodes")
    return notes


def sequence_notes(recommended: Recommendation, settings: ProductionSettings) -> list[str]:
    """Return a comment line on the replicas of a stateful model; empty for a single one."""
    if not is_stateful(recommended) or settings.max_replicas == 1:
        return []
    return [
        "WARNING: sessionAffinity sends all requests from an address to one replica, so clients behind one proxy "
        "share it; a replica that is removed ends its sequences, which --min-replicas equal to --max-replicas avoids"
    ]


def sharing_notes(recommended: Recommendation) -> list[str]:
    """Return comment lines on the replicas of several server processes; empty for a single one."""
    processes = recommended.server_processes
    if processes == 1:
        return []
    notes = [
        f"replicas: each is one server process, and {processes} of them have the resources of the measured device; a "
        "gRPC connection stays on one replica of a Service, so put a proxy in front that balances requests"
    ]
    if recommended.gpus:
        notes.append(
            f"GPU: {processes} replicas share each; configure the NVIDIA device plugin to share a GPU among "
            f"{processes} pods (sharing.mps or sharing.timeSlicing)"
        )
    return notes


def manifests(recommended: Recommendation, settings: ProductionSettings) -> list[dict[str, Any]]:
    """Return the Kubernetes objects in the order of the file."""
    objects = [deployment(recommended, settings), service(recommended, settings)]
    if settings.repository.is_mounted:
        objects.insert(0, config_map(recommended, settings))
    if settings.is_autoscaled:
        objects.append(autoscaler(recommended, settings))
    return objects


def config_keys(recommended: Recommendation) -> dict[str, str]:
    """Return the key of each file in the ConfigMap, by path."""
    return {path: f"{name}{Path(path).suffix}" for path, name in numbered_names(recommended).items()}


def config_map(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    """Return the ConfigMap with the config.pbtxt of each model and each changed model.json."""
    texts = repository_files(recommended)
    data = {key: texts[path] for path, key in config_keys(recommended).items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(settings), "data": data}


def config_checksum(recommended: Recommendation) -> str:
    """Return the SHA-256 of the configurations. It differs only if the server has to start again to read them."""
    digest = hashlib.sha256()
    for path, text in sorted(repository_files(recommended).items()):
        settings = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        digest.update(f"{path}\0{settings}\0".encode())
    return digest.hexdigest()


def deployment(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    """Return the Deployment of the server. Its pods start again when the configurations change."""
    annotations = {
        CHECKSUM: config_checksum(recommended),
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(METRICS_PORT),
        "prometheus.io/path": "/metrics",
    }
    spec: dict[str, Any] = {} if settings.is_autoscaled else {"replicas": settings.min_replicas}
    spec["selector"] = {"matchLabels": {LABEL: settings.name}}
    spec["template"] = {
        "metadata": {"labels": {LABEL: settings.name}, "annotations": annotations},
        "spec": _pod(recommended, settings),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(settings), "spec": spec}


def service(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    """Return the Service with the HTTP, gRPC and metrics ports.

    For a stateful model it sends all requests from an address to the same replica.
    """
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()]
    spec = {"selector": {LABEL: settings.name}, **session_affinity(recommended), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(settings), "spec": spec}


def session_affinity(recommended: Recommendation) -> dict[str, str]:
    """Return the field of the Service and of the chart; empty if requests may reach any replica."""
    return {"sessionAffinity": "ClientIP"} if is_stateful(recommended) else {}


def autoscaler(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    """Return the HorizontalPodAutoscaler of the Deployment."""
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": settings.name},
        "minReplicas": settings.min_replicas,
        "maxReplicas": settings.max_replicas,
        "metrics": pod_metrics(recommended, settings),
    }
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    return {**kind, "metadata": _metadata(settings), "spec": spec}


def _metadata(settings: ProductionSettings) -> dict[str, Any]:
    return {"name": settings.name, "labels": {LABEL: settings.name}}


def _pod(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    account: dict[str, Any] = {"automountServiceAccountToken": False}
    if settings.service_account:
        account = {"serviceAccountName": settings.service_account}
    container = {
        "name": "triton",
        "image": settings.image,
        "args": production.command(recommended, settings),
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        **probes(recommended, "http"),
        "resources": resources(recommended),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": _mounts(recommended, settings),
    }
    return {
        **account,
        "terminationGracePeriodSeconds": production.STOP_SECONDS,
        "securityContext": {"runAsNonRoot": True, "runAsUser": TRITON_USER},
        "containers": [container],
        "volumes": _volumes(recommended, settings),
    }


def probes(recommended: Recommendation, port: str | int) -> dict[str, Any]:
    """Return startup, readiness and liveness probes. A start may take LOADS_ALLOWED times the measured load time."""

    def at(path: str, every_seconds: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": every_seconds,
            "timeoutSeconds": production.PROBE_SECONDS,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": at(production.READY, 5, -(-production.start_seconds(recommended) // 5)),
        "readinessProbe": at(production.READY, 5, 3),
        "livenessProbe": at(production.LIVE, 10, 6),
    }


def resources(recommended: Recommendation) -> dict[str, Any]:
    """Return resource requests equal to the limits, which reserves the measured resources for the pod."""
    limits = production.limits(recommended)
    amounts: dict[str, Any] = {}
    if limits.cpus is not None:
        amounts["cpu"] = str(production.cpu_amount(limits.cpus))
    if limits.memory_bytes is not None:
        amounts["memory"] = f"{limits.memory_bytes // MEBIBYTE}Mi"
    if limits.gpus:
        amounts["nvidia.com/gpu"] = str(limits.gpus)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def shared_memory(recommended: Recommendation) -> dict[str, Any]:
    """Return the volume for shared memory, through which Python models exchange tensors."""
    size = -(-production.limits(recommended).shared_memory_bytes // MEBIBYTE)
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}


def _mounts(recommended: Recommendation, settings: ProductionSettings) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if not settings.repository.is_mounted:
        return mounts
    models: dict[str, Any] = {"name": "models", "mountPath": production.MODELS, "readOnly": True}
    if settings.repository.path:
        models["subPath"] = settings.repository.path
    configs = [
        {
            "name": "configs",
            "mountPath": f"{production.MODELS}/{path}",
            "subPath": key,
            "readOnly": True,
        }
        for path, key in config_keys(recommended).items()
    ]
    return [*mounts, models, *configs]


def _volumes(recommended: Recommendation, settings: ProductionSettings) -> list[dict[str, Any]]:
    volumes = [shared_memory(recommended)]
    if settings.repository.is_mounted:
        claim = {"claimName": settings.repository.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
        volumes.append({"name": "configs", "configMap": {"name": settings.name}})
    return volumes


VALUES_FILE = "values.yaml"
CHART = Path(__file__).parent / "chart"


def emit_values(recommended: Recommendation, settings: ProductionSettings) -> dict[str, str]:
    """Return ``values.yaml`` for the chart."""
    use = f"helm install {settings.name} ./chart --values {VALUES_FILE}, with the chart that --out writes"
    return {
        VALUES_FILE: to_yaml(values(recommended, settings), header=[*kubernetes_header(recommended, settings), use])
    }


def chart() -> dict[str, str]:
    """Return the files of the chart by path."""
    return {
        f"chart/{path.relative_to(CHART).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(CHART.rglob("*"))
        if path.is_file()
    }


def values(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    """Return the values that make the chart render the same objects as ``manifests``."""
    chart_values: dict[str, Any] = {
        "fullnameOverride": settings.name,
        "image": settings.image,
        "args": production.command(recommended, settings),
        "configChecksum": config_checksum(recommended),
        "serviceAccountName": settings.service_account,
        "probes": probes(recommended, "http"),
        "resources": resources(recommended),
        "sharedMemory": shared_memory(recommended)["emptyDir"]["sizeLimit"],
        "replicas": settings.min_replicas,
        **session_affinity(recommended),
        "autoscaling": {"enabled": settings.is_autoscaled},
    }
    if settings.repository.is_mounted:
        chart_values["modelRepository"] = {"claim": settings.repository.claim, "path": settings.repository.path}
        texts = repository_files(recommended)
        chart_values["files"] = [
            {"path": path, "key": key, "content": texts[path]} for path, key in config_keys(recommended).items()
        ]
    if settings.is_autoscaled:
        chart_values["autoscaling"] |= {
            "maxReplicas": settings.max_replicas,
            "metrics": pod_metrics(recommended, settings),
        }
    return chart_values


FILE = "inferenceservice.yaml"
HTTP = 8080  # port of KServe's Triton runtime
SMALLEST_SCALE_TARGET = 1  # KServe's scaleTarget is a whole number


def emit_kserve(recommended: Recommendation, settings: ProductionSettings) -> dict[str, str]:
    """Return ``inferenceservice.yaml``. Raises BadInputError for several replicas of a stateful model."""
    if is_stateful(recommended) and settings.max_replicas > 1:
        raise BadInputError(
            f"--format kserve: {one_line(recommended.model)} is stateful, and Knative sends the steps of a sequence "
            "to different replicas; use a single one (--max-replicas 1), or --format kubernetes"
        )
    notes = [*container_notes(recommended), *sharing_notes(recommended), *_knative_notes(recommended, settings)]
    lines = deployment_header(recommended, settings, *notes, mounts_configs=False)
    return {FILE: to_yaml(inference_service(recommended, settings), header=lines)}


def _knative_notes(recommended: Recommendation, settings: ProductionSettings) -> list[str]:
    """Return a comment line on how Knative scales the replicas; empty for a fixed number."""
    if not settings.is_autoscaled:
        return []
    share, measured = f"{100 * settings.target_utilization:g}%", recommended.knee
    load = formatting.request_load(measured, is_rate=recommended.is_rate)
    if measured < SMALLEST_SCALE_TARGET:
        return [
            f"NOTE: replicas are scaled to keep each at {share} of {SMALLEST_SCALE_TARGET}, the smallest scaleTarget "
            f"and above the measured {load}; with a lower --target-utilization Knative adds replicas earlier"
        ]
    return [f"replicas: scaled to keep each at {share} of the measured {load}"]


def inference_service(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    """Return the InferenceService. Its target is the measured load, which Knative multiplies by the utilization."""
    share = f"{100 * settings.target_utilization:g}"
    metadata = {
        "name": settings.name,
        "annotations": {
            "autoscaling.knative.dev/target-utilization-percentage": share,
            CHECKSUM: config_checksum(recommended),
        },
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": _predictor(recommended, settings)},
    }


def _predictor(recommended: Recommendation, settings: ProductionSettings) -> dict[str, Any]:
    account = {"serviceAccountName": settings.service_account} if settings.service_account else {}
    scaled = {
        "minReplicas": settings.min_replicas,
        "maxReplicas": settings.max_replicas,
        "scaleMetric": "rps" if recommended.is_rate else "concurrency",
        "scaleTarget": max(SMALLEST_SCALE_TARGET, math.floor(recommended.knee)),
    }
    if not recommended.is_rate:  # further requests wait in Knative's queue, not in Triton's
        scaled["containerConcurrency"] = max(1, math.floor(recommended.knee))
    arguments = [*recommended.arguments, *recommended.affordable_quantiles]
    model: dict[str, Any] = {
        "modelFormat": {"name": "triton"},
        "protocolVersion": "v2",
        "storageUri": settings.repository.text,
        **({"image": settings.image} if settings.image else {}),
        **({"args": arguments} if arguments else {}),
        **probes(recommended, HTTP),
        "resources": resources(recommended),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    return {**account, **scaled, "model": model, "volumes": [shared_memory(recommended)]}
