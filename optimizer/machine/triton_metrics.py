"""Triton's own metrics of its GPUs, from its Prometheus endpoint: where NVML does not reach (another machine).

Triton writes 0 for what it could not read, and refreshes the figures every ``--metrics-interval-ms`` (2 s).
"""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from http.client import HTTPException
from typing import Any

from optimizer.machine.gpu_figures import Reading

CALL_SECONDS = 2.0
MAX_BYTES = 4 << 20
METRICS = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_memory_used_bytes": "memory_bytes",
    "nv_gpu_power_usage": "power_watts",
    "nv_energy_consumption": "energy_joules",
}
_LINE = re.compile(r'(nv_[a-z_]+)\{gpu_uuid="([^"]+)"\} ([0-9.eE+-]+)')


def read(address: str) -> dict[str, Reading]:
    """By GPU UUID, of the server whose metrics are at ``address`` (``host:port``); empty where it tells nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=CALL_SECONDS) as answer:
            text = answer.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError, HTTPException):
        return {}
    return parse(text, time.monotonic())


def parse(text: str, at_seconds: float) -> dict[str, Reading]:
    """Prometheus' text format -> what it says of each GPU. Nothing draws 0 W or has 0 bytes in use: unknown."""
    values: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if not (match := _LINE.fullmatch(line)) or match[1] not in METRICS:
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if value > 0 or match[1] == "nv_gpu_utilization":
                values.setdefault(match[2], {})[METRICS[match[1]]] = value
    return {uuid: Reading(at_seconds, **own) for uuid, own in values.items() if own.keys() - {"utilization"}}
