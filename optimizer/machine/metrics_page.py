"""Read the metrics that a server exports in the text format of Prometheus."""

from __future__ import annotations

import math
import re
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import TypeAlias

MAX_READ_SECONDS = 2.0
MAX_BYTES = 16 << 20  # enough for some thousand models
MetricsPage: TypeAlias = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]  # labels and values, by series
_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]{0,199})\{([^\n]{0,999})\} ([0-9.eE+-]{1,40})")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def read_metrics_page(address: str) -> MetricsPage:
    """Return the metrics of a server at ``host:port``; no series if they cannot be read."""
    try:
        return parse_metrics_page(fetch_metrics_page(f"http://{address}/metrics"))
    except (OSError, ValueError, HTTPException):
        return {}


def fetch_metrics_page(url: str) -> str:
    """Return the text of a metrics page. Proxies are not used.

    Raises OSError (HTTPError for a status that is no success), ValueError or HTTPException if it cannot be read or is
    larger than MAX_BYTES.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=MAX_READ_SECONDS) as response:
        content = response.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    return str(content.decode(errors="replace"))


def parse_metrics_page(text: str) -> MetricsPage:
    """Return the finite values of each series of a metrics page with their labels.

    Lines that are no values are left out, and values without labels, which no caller reads.
    """
    page = defaultdict[str, list[tuple[dict[str, str], float]]](list)
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value):
                page[match[1]].append((dict(_LABEL.findall(match[2])), value))
    return dict(page)
