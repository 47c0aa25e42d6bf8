"""Fewer samples where perf_analyzer would take long to prepare requests of them.

At each launch perf_analyzer makes a request for each sample of the data: that one and those that follow it, as many
as a request has. 4,096 such requests of 4,096 samples take it 33 s on a core of 2.5 GHz.
"""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.requests import data
from optimizer.requests.sent import Sent
from optimizer.requests.written import keep_content

MOST_PREPARED = 1 << 19  # samples in all of those requests together: about a second
LEAST_SAMPLES = 8
ENTRY_BYTES = 10  # of an entry in the file, at least


def thinned(path: Path, sent: Sent, cache: Path) -> tuple[Path, str]:
    """``path``, perf_analyzer's JSON, or a file in ``cache`` with as many of its samples as are soon prepared, from
    all over it; and a note that says so. Raises BadInputError, EnvironmentFault."""
    most = max(LEAST_SAMPLES, MOST_PREPARED // sent.samples)
    if sent.open_loop or sent.samples == 1 or path.stat().st_size <= most * ENTRY_BYTES:
        return path, ""
    entries = data.read_entries(path)
    if len(entries) <= most:
        return path, ""
    chosen = [entries[i * len(entries) // most] for i in range(most)]
    content = '{"data": [\n' + ",\n".join(map(json.dumps, chosen)) + "\n]}\n"
    note = (
        f"{most:,} of the {len(entries):,} samples given are sent: perf_analyzer takes long to prepare requests of "
        f"{sent.samples:,} from more (--load rate sends all)"
    )
    return keep_content(content.encode(), cache), note
