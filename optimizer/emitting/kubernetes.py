"""``kubernetes``: ConfigMap, Deployment, Service and HorizontalPodAutoscaler."""

from __future__ import annotations

from typing import Any

from optimizer.emitting import autoscaling, server
from optimizer.emitting.header import header, of_serving
from optimizer.emitting.pbtxt import text_of
from optimizer.emitting.serving import Serving, name_of
from optimizer.emitting.winner import Winner
from optimizer.emitting.yaml_text import to_yaml

FILE = "kubernetes.yaml"
LABEL = "app.kubernetes.io/name"
TRITON_USER = 1000  # of NVIDIA's images
MEBIBYTE = 1 << 20
PORTS = {"http": server.HTTP, "grpc": server.GRPC, "metrics": server.METRICS}


def emit_kubernetes(winner: Winner, serving: Serving) -> dict[str, str]:
    return {FILE: to_yaml(*manifests(winner, serving), header=about(winner, serving))}


def about(winner: Winner, serving: Serving) -> list[str]:
    """Lines of a header."""
    prepared = of_serving(winner, serving, mounts_configs=serving.repository.is_mounted)
    return [*header(winner), *prepared, *autoscaling.about(winner, serving)]


def manifests(winner: Winner, serving: Serving) -> list[dict[str, Any]]:
    found = [deployment(winner, serving), service(serving)]
    if serving.repository.is_mounted:
        found.insert(0, config_map(winner, serving))
    if serving.is_autoscaled:
        found.append(autoscaler(winner, serving))
    return found


def config_keys(winner: Winner) -> dict[str, str]:
    """By model; the number keeps two that are spelled alike apart."""
    return {model: f"{number}-{name_of(model)}.pbtxt" for number, model in enumerate(winner.configs, 1)}


def config_map(winner: Winner, serving: Serving) -> dict[str, Any]:
    data = {key: text_of(winner, model) for model, key in config_keys(winner).items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(serving), "data": data}


def deployment(winner: Winner, serving: Serving) -> dict[str, Any]:
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(server.METRICS),
        "prometheus.io/path": "/metrics",
    }
    spec: dict[str, Any] = {} if serving.is_autoscaled else {"replicas": serving.min_replicas}
    spec["selector"] = {"matchLabels": {LABEL: serving.name}}
    spec["template"] = {
        "metadata": {"labels": {LABEL: serving.name}, "annotations": annotations},
        "spec": _pod(winner, serving),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(serving), "spec": spec}


def service(serving: Serving) -> dict[str, Any]:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()]
    spec = {"selector": {LABEL: serving.name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(serving), "spec": spec}


def autoscaler(winner: Winner, serving: Serving) -> dict[str, Any]:
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": serving.name},
        "minReplicas": serving.min_replicas,
        "maxReplicas": serving.max_replicas,
        "metrics": autoscaling.pod_metrics(winner, serving),
    }
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    return {**kind, "metadata": _metadata(serving), "spec": spec}


def _metadata(serving: Serving) -> dict[str, Any]:
    return {"name": serving.name, "labels": {LABEL: serving.name}}


def _pod(winner: Winner, serving: Serving) -> dict[str, Any]:
    account: dict[str, Any] = {"automountServiceAccountToken": False}
    if serving.service_account:
        account = {"serviceAccountName": serving.service_account}
    container = {
        "name": "triton",
        "image": serving.image,
        "args": server.command(winner, serving),
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        **probes(winner, "http"),
        "resources": resources(winner),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": _mounts(winner, serving),
    }
    return {
        **account,
        "terminationGracePeriodSeconds": 60,  # Triton itself waits 30 s for requests in flight
        "securityContext": {"runAsNonRoot": True, "runAsUser": TRITON_USER},
        "containers": [container],
        "volumes": _volumes(winner, serving),
    }


def probes(winner: Winner, port: str | int) -> dict[str, Any]:
    """Ready where its models are; a start may take a multiple of what was measured."""

    def at(path: str, every_seconds: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": every_seconds,
            "timeoutSeconds": server.PROBE_SECONDS,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": at(server.READY, 5, -(-server.start_seconds(winner) // 5)),
        "readinessProbe": at(server.READY, 5, 3),
        "livenessProbe": at(server.LIVE, 10, 6),
    }


def resources(winner: Winner) -> dict[str, Any]:
    """Requests equal to limits, so that nobody else gets what was measured."""
    limits = server.limits(winner)
    found: dict[str, Any] = {}
    if limits.cpus is not None:
        found["cpu"] = str(limits.cpus)
    if limits.memory_bytes is not None:
        found["memory"] = f"{limits.memory_bytes // MEBIBYTE}Mi"
    if limits.gpus:
        found["nvidia.com/gpu"] = str(limits.gpus)
    return {"requests": found, "limits": dict(found)} if found else {}


def shared_memory(winner: Winner) -> dict[str, Any]:
    """The volume; models in Python pass tensors through it."""
    size = -(-winner.shared_memory_bytes // MEBIBYTE)
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}


def _mounts(winner: Winner, serving: Serving) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if not serving.repository.is_mounted:
        return mounts
    models: dict[str, Any] = {"name": "models", "mountPath": server.MODELS, "readOnly": True}
    if serving.repository.path:
        models["subPath"] = serving.repository.path
    configs = [
        {"name": "configs", "mountPath": f"{server.MODELS}/{model}/config.pbtxt", "subPath": key, "readOnly": True}
        for model, key in config_keys(winner).items()
    ]
    return [*mounts, models, *configs]


def _volumes(winner: Winner, serving: Serving) -> list[dict[str, Any]]:
    volumes = [shared_memory(winner)]
    if serving.repository.is_mounted:
        claim = {"claimName": serving.repository.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
        volumes.append({"name": "configs", "configMap": {"name": serving.name}})
    return volumes
