"""Formats ``kubernetes``, ``helm-values`` and ``kserve``: manifests, values for the chart, and an InferenceService.

The first two have the same content.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line
from optimizer.deploy.target_settings import GRPC_PORT, HTTP_PORT, METRICS_PORT
from optimizer.emit import production
from optimizer.emit.pbtxt import repository_files
from optimizer.emit.production import ProductionServer, deployment_header, numbered_names, to_yaml
from optimizer.emit.recommended import Recommendation
from optimizer.results import autoscaling, formatting

RATE_WINDOW = f"{autoscaling.RATE_WINDOW_SECONDS // 60}m"


def target_load(server: ProductionServer) -> float:
    """Return the requests in flight, or per second, that a replica should get on average."""
    measured = server.recommendation
    load = measured.served_rate if measured.is_streaming else measured.measured_load
    return autoscaling.target_load(load, server.target_utilization)


def is_scaled_by_rate(recommendation: Recommendation) -> bool:
    """Return whether the metric of the autoscaler is the rate of requests, not the requests in flight.

    Triton's duration of a request ends when the backend's execution returns. A model that streams then still sends
    responses (https://github.com/triton-inference-server/server/issues/8463), so too few requests would be in flight.
    """
    return recommendation.is_rate or recommendation.is_streaming


def _quantity(load: float) -> str:
    """Return ``load`` as a quantity of Kubernetes: 14, or 350m for 0.35."""
    return f"{load:.0f}" if load == int(load) else f"{round(1e3 * load)}m"


def pod_metrics(server: ProductionServer) -> list[dict[str, Any]]:
    """Return the metrics of the HorizontalPodAutoscaler."""
    if server.autoscaled_by == "cpu":
        utilization = round(100 * server.target_utilization)
        goal: dict[str, Any] = {"type": "Utilization", "averageUtilization": utilization}
        return [{"type": "Resource", "resource": {"name": "cpu", "target": goal}}]
    goal = {"type": "AverageValue", "averageValue": _quantity(target_load(server))}
    return [{"type": "Pods", "pods": {"metric": {"name": metric_name(server.recommendation)}, "target": goal}}]


def metric_name(recommendation: Recommendation) -> str:
    """Return the name of the metric of this model. Each model has its own rule in prometheus-adapter."""
    model = re.sub(r"[^a-z0-9]+", "_", recommendation.model.lower()).strip("_")
    return f"triton_{model}_requests_{'per_second' if is_scaled_by_rate(recommendation) else 'in_flight'}"


def adapter_rule(recommendation: Recommendation) -> dict[str, Any]:
    """Return a rule for prometheus-adapter that computes the metric from Triton's own metrics.

    Requests in flight are the sum of request durations per second (Little's law).
    """
    is_rate = is_scaled_by_rate(recommendation)
    series = "nv_inference_request_success" if is_rate else "nv_inference_request_duration_us"
    model = f"model={json.dumps(recommendation.model, ensure_ascii=False)}"
    query = f"sum by (<<.GroupBy>>) (rate(<<.Series>>{{<<.LabelMatchers>>,{model}}}[{RATE_WINDOW}]))"
    resources = {name: {"resource": name} for name in ("namespace", "pod")}
    return {
        "seriesQuery": f'{series}{{namespace!="",pod!="",{model}}}',
        "resources": {"overrides": resources},
        "name": {"as": metric_name(recommendation)},
        "metricsQuery": query if is_rate else f"{query} / 1e6",
    }


def autoscaling_notes(server: ProductionServer) -> Iterator[str]:
    """Yield comment lines on how replicas are scaled and the rule that prometheus-adapter needs."""
    recommendation, share = server.recommendation, f"{100 * server.target_utilization:g} %"
    if server.autoscaled_by == "cpu":
        yield f"replicas: scaled to keep CPUs at {share}; the measured load is not used"
        return
    measured = formatting.exact(recommendation.measured_load)
    if recommendation.is_streaming:
        measured = formatting.number(recommendation.served_rate)
    target = formatting.request_load(target_load(server), is_rate=is_scaled_by_rate(recommendation))
    yield f"replicas: scaled to keep each at {target}, {share} of the measured {measured};"
    yield f"prometheus-adapter computes {metric_name(recommendation)} with this rule in its rules.custom:"
    yield from (f"  {line}" for line in to_yaml([adapter_rule(recommendation)]).splitlines())
    if others := recommendation.run.concurrent_models:
        yield (
            f"NOTE: replicas are scaled by the requests to {recommendation.model} alone; they are too few if "
            f"a larger part of the requests than measured is for {', '.join(others)}"
        )


MANIFEST_FILE = "kubernetes.yaml"
LABEL = "app.kubernetes.io/name"
CHECKSUM = "checksum/config"  # pods never read a changed bucket, or a changed ConfigMap that has a subPath
TRITON_USER = 1000  # user id in NVIDIA's images
MEBIBYTE = 1 << 20
PORTS = {"http": HTTP_PORT, "grpc": GRPC_PORT, "metrics": METRICS_PORT}


def emit_kubernetes(server: ProductionServer) -> dict[str, str]:
    """Return ``kubernetes.yaml``."""
    return {MANIFEST_FILE: to_yaml(*manifests(server), header=kubernetes_header(server))}


def kubernetes_header(server: ProductionServer) -> list[str]:
    """Return the comment lines on top of the file."""
    notes = list(container_notes(server.recommendation))
    if server.recommendation.is_stateful and server.max_replicas > 1:
        notes.append(
            "WARNING: sessionAffinity sends all requests from an address to one replica, so clients behind one proxy "
            "share it; a replica that is removed ends its sequences, which --min-replicas equal to --max-replicas "
            "avoids"
        )
    if server.is_autoscaled:
        notes += autoscaling_notes(server)
    return deployment_header(server, *notes)


def container_notes(recommendation: Recommendation) -> Iterator[str]:
    """Yield comment lines on folders, variables and limits of the measured container that these formats do not set.

    The variables are those whose values the run did not store. The last lines are on the replicas of several server
    processes.
    """
    if recommendation.mounts:
        folders = ", ".join(f"{mount.at} (there {mount.source})" for mount in recommendation.mounts)
        yield f"WARNING: the measured container had the folders {folders}; add a volume for each"
    if names := [name for name, value in recommendation.environment.items() if value is None]:
        yield (
            f"WARNING: the measured container had the environment variables {', '.join(names)}, whose values are not "
            "stored; add them to the container, for example from a Secret"
        )
    if recommendation.ulimits:
        limits = ", ".join(recommendation.ulimits)
        yield f"limits: the measured container had {limits}; set them in the container runtime of the nodes"
    if (processes := recommendation.server_processes) > 1:
        yield (
            f"replicas: each is one server process, and {processes} of them have the resources of the measured "
            "device; a gRPC connection stays on one replica of a Service, so put a proxy in front that balances "
            "requests"
        )
        if recommendation.gpus:
            yield (
                f"GPU: {processes} replicas share each; configure the NVIDIA device plugin to share a GPU among "
                f"{processes} pods (sharing.mps or sharing.timeSlicing)"
            )


def manifests(server: ProductionServer) -> list[dict[str, Any]]:
    """Return the Kubernetes objects in the order of the file."""
    objects = [deployment(server), service(server)]
    if server.repository.is_mounted:
        objects.insert(0, config_map(server))
    if server.is_autoscaled:
        objects.append(autoscaler(server))
    return objects


def config_keys(recommendation: Recommendation) -> dict[str, str]:
    """Return the key of each file in the ConfigMap, by path."""
    return {path: f"{name}{Path(path).suffix}" for path, name in numbered_names(recommendation).items()}


def config_map(server: ProductionServer) -> dict[str, Any]:
    """Return the ConfigMap with the config.pbtxt of each model and each changed model.json."""
    texts = repository_files(server.recommendation)
    data = {key: texts[path] for path, key in config_keys(server.recommendation).items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(server), "data": data}


def config_checksum(recommendation: Recommendation) -> str:
    """Return the SHA-256 of the configurations. It differs only if the server has to start again to read them."""
    digest = hashlib.sha256()
    for path, text in sorted(repository_files(recommendation).items()):
        settings = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        digest.update(f"{path}\0{settings}\0".encode())
    return digest.hexdigest()


def deployment(server: ProductionServer) -> dict[str, Any]:
    """Return the Deployment of the server. Its pods start again when the configurations change."""
    annotations = {
        CHECKSUM: config_checksum(server.recommendation),
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(METRICS_PORT),
        "prometheus.io/path": "/metrics",
    }
    spec: dict[str, Any] = {} if server.is_autoscaled else {"replicas": server.min_replicas}
    spec["selector"] = {"matchLabels": {LABEL: server.name}}
    spec["template"] = {
        "metadata": {"labels": {LABEL: server.name}, "annotations": annotations},
        "spec": _pod(server),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(server), "spec": spec}


def service(server: ProductionServer) -> dict[str, Any]:
    """Return the Service with the HTTP, gRPC and metrics ports.

    For a stateful model it sends all requests from an address to the same replica.
    """
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()]
    spec = {"selector": {LABEL: server.name}, **session_affinity(server.recommendation), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(server), "spec": spec}


def session_affinity(recommendation: Recommendation) -> dict[str, str]:
    """Return the field of the Service and of the chart; empty if requests may reach any replica."""
    return {"sessionAffinity": "ClientIP"} if recommendation.is_stateful else {}


def autoscaler(server: ProductionServer) -> dict[str, Any]:
    """Return the HorizontalPodAutoscaler of the Deployment."""
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": server.name},
        "minReplicas": server.min_replicas,
        "maxReplicas": server.max_replicas,
        "metrics": pod_metrics(server),
    }
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    return {**kind, "metadata": _metadata(server), "spec": spec}


def _metadata(server: ProductionServer) -> dict[str, Any]:
    return {"name": server.name, "labels": {LABEL: server.name}}


def _pod(server: ProductionServer) -> dict[str, Any]:
    account: dict[str, Any] = {"automountServiceAccountToken": False}
    if server.service_account:
        account = {"serviceAccountName": server.service_account}
    container = {
        "name": "triton",
        "image": server.image,
        "args": server.command(),
        **environment(server.recommendation),
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        **probes(server, "http"),
        "resources": resources(server),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": _mounts(server),
    }
    return {
        **account,
        "terminationGracePeriodSeconds": production.STOP_SECONDS,
        "securityContext": {"runAsNonRoot": True, "runAsUser": TRITON_USER},
        "containers": [container],
        "volumes": _volumes(server),
    }


def environment(recommendation: Recommendation) -> dict[str, Any]:
    """Return the field ``env`` with the variables of the measured container whose values are stored; empty if none.

    In a value Kubernetes replaces ``$(NAME)``, and ``$$`` by ``$``.
    """
    variables = [
        {"name": name, "value": value.replace("$", "$$")}
        for name, value in recommendation.environment.items()
        if value is not None
    ]
    return {"env": variables} if variables else {}


def probes(server: ProductionServer, port: str | int) -> dict[str, Any]:
    """Return startup, readiness and liveness probes. A start may take LOADS_ALLOWED times the measured load time."""

    def probe(path: str, every_seconds: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": every_seconds,
            "timeoutSeconds": production.PROBE_SECONDS,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe(production.READY, 5, -(-server.start_seconds() // 5)),
        "readinessProbe": probe(production.READY, 5, 3),
        "livenessProbe": probe(production.LIVE, 10, 6),
    }


def resources(server: ProductionServer) -> dict[str, Any]:
    """Return resource requests equal to the limits, which reserves the measured resources for the pod."""
    amounts: dict[str, Any] = {}
    if server.cpus is not None:
        amounts["cpu"] = str(production.cpu_amount(server.cpus))
    if server.memory_bytes is not None:
        amounts["memory"] = f"{server.memory_bytes // MEBIBYTE}Mi"
    if server.gpus:
        amounts["nvidia.com/gpu"] = str(server.gpus)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def shared_memory(server: ProductionServer) -> dict[str, Any]:
    """Return the volume for shared memory, through which Python models exchange tensors."""
    size = -(-server.shared_memory_bytes // MEBIBYTE)
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}


def _mounts(server: ProductionServer) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if not server.repository.is_mounted:
        return mounts
    models: dict[str, Any] = {"name": "models", "mountPath": production.MODELS, "readOnly": True}
    if server.repository.path:
        models["subPath"] = server.repository.path
    configs = [
        {"name": "configs", "mountPath": f"{production.MODELS}/{path}", "subPath": key, "readOnly": True}
        for path, key in config_keys(server.recommendation).items()
    ]
    return [*mounts, models, *configs]


def _volumes(server: ProductionServer) -> list[dict[str, Any]]:
    volumes = [shared_memory(server)]
    if server.repository.is_mounted:
        claim = {"claimName": server.repository.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
        volumes.append({"name": "configs", "configMap": {"name": server.name}})
    return volumes


VALUES_FILE = "values.yaml"
CHART = Path(__file__).parent / "chart"


def emit_values(server: ProductionServer) -> dict[str, str]:
    """Return ``values.yaml`` for the chart."""
    install_line = f"helm install {server.name} ./chart --values {VALUES_FILE}, with the chart that --out writes"
    return {VALUES_FILE: to_yaml(values(server), header=[*kubernetes_header(server), install_line])}


def chart() -> dict[str, str]:
    """Return the files of the chart by path."""
    return {
        f"chart/{path.relative_to(CHART).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(CHART.rglob("*"))
        if path.is_file()
    }


def values(server: ProductionServer) -> dict[str, Any]:
    """Return the values that make the chart render the same objects as ``manifests``."""
    chart_values: dict[str, Any] = {
        "fullnameOverride": server.name,
        "image": server.image,
        "args": server.command(),
        **environment(server.recommendation),
        "configChecksum": config_checksum(server.recommendation),
        "serviceAccountName": server.service_account,
        "probes": probes(server, "http"),
        "resources": resources(server),
        "sharedMemory": shared_memory(server)["emptyDir"]["sizeLimit"],
        "replicas": server.min_replicas,
        **session_affinity(server.recommendation),
        "autoscaling": {"enabled": server.is_autoscaled},
    }
    if server.repository.is_mounted:
        chart_values["modelRepository"] = {"claim": server.repository.claim, "path": server.repository.path}
        texts = repository_files(server.recommendation)
        chart_values["files"] = [
            {"path": path, "key": key, "content": texts[path]}
            for path, key in config_keys(server.recommendation).items()
        ]
    if server.is_autoscaled:
        chart_values["autoscaling"] |= {"maxReplicas": server.max_replicas, "metrics": pod_metrics(server)}
    return chart_values


INFERENCE_SERVICE_FILE = "inferenceservice.yaml"
KSERVE_HTTP_PORT = 8080  # port of KServe's Triton runtime
MIN_SCALE_TARGET = 1  # KServe's scaleTarget is a whole number


def emit_kserve(server: ProductionServer) -> dict[str, str]:
    """Return ``inferenceservice.yaml``. Raises BadInputError for several replicas of a stateful model."""
    if server.recommendation.is_stateful and server.max_replicas > 1:
        raise BadInputError(
            f"--format kserve: {one_line(server.recommendation.model)} is stateful, and Knative sends the steps of a "
            "sequence to different replicas; use a single one (--max-replicas 1), or --format kubernetes"
        )
    notes = [*container_notes(server.recommendation), *([_knative_note(server)] if server.is_autoscaled else [])]
    lines = deployment_header(server, *notes, mounts_configs=False)
    return {INFERENCE_SERVICE_FILE: to_yaml(inference_service(server), header=lines)}


def _knative_note(server: ProductionServer) -> str:
    """Return a comment line on how Knative scales the replicas."""
    share, measured = f"{100 * server.target_utilization:g} %", server.recommendation.measured_load_of_all
    load = formatting.request_load(measured, is_rate=server.recommendation.is_rate)
    if measured < MIN_SCALE_TARGET:
        return (
            f"NOTE: replicas are scaled to keep each at {share} of {MIN_SCALE_TARGET}, the smallest scaleTarget "
            f"and above the measured {load}; with a lower --target-utilization Knative adds replicas earlier"
        )
    return f"replicas: scaled to keep each at {share} of the measured {load}"


def inference_service(server: ProductionServer) -> dict[str, Any]:
    """Return the InferenceService. Its target is the measured load, which Knative multiplies by the utilization."""
    share = f"{100 * server.target_utilization:g}"
    metadata = {
        "name": server.name,
        "annotations": {
            "autoscaling.knative.dev/target-utilization-percentage": share,
            CHECKSUM: config_checksum(server.recommendation),
        },
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": _predictor(server)},
    }


def _predictor(server: ProductionServer) -> dict[str, Any]:
    account = {"serviceAccountName": server.service_account} if server.service_account else {}
    scaled = {
        "minReplicas": server.min_replicas,
        "maxReplicas": server.max_replicas,
        "scaleMetric": "rps" if server.recommendation.is_rate else "concurrency",
        "scaleTarget": max(MIN_SCALE_TARGET, math.floor(server.recommendation.measured_load_of_all)),
    }
    if not server.recommendation.is_rate:  # further requests wait in Knative's queue, not in Triton's
        scaled["containerConcurrency"] = max(1, math.floor(server.recommendation.measured_load_of_all))
    model: dict[str, Any] = {
        "modelFormat": {"name": "triton"},
        "protocolVersion": "v2",
        "storageUri": server.repository.text,
        **({"image": server.image} if server.image else {}),
        **({"args": server.arguments()} if server.arguments() else {}),
        **environment(server.recommendation),
        **probes(server, KSERVE_HTTP_PORT),
        "resources": resources(server),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    return {**account, **scaled, "model": model, "volumes": [shared_memory(server)]}
