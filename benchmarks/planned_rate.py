"""Send the rate that `tune plan` computes for one replica to a real server, and count the requests over the bounds.

    python benchmarks/planned_rate.py [--rounds 4] [--out FOLDER] [MODEL ...] > benchmarks/planned_rate.md

The plan of a model that streams follows from a closed loop with a fixed number of requests in flight. Here `tune`
finds a configuration of the model, `tune plan` computes the rates of a replica from this run, and `tune sweep` sends
these rates in an open loop with Poisson arrivals, each round to a fresh server. A plan is right if at most the
permitted share of the requests is over each bound at the safe rate. With ``--out`` the last run of the model in this
folder is used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.output import measured_on, print_head, print_title, row
from lib.tune_runs import run_tune

COLUMNS = (
    *("model", "verdict", "confirmed infer/s", "bound", "planned", "rate /s", "infer/s"),
    *("measured ms (median)", "each round", "rounds within the bound"),
)
RATES = {"safe": "safe", "likely": "most likely"}  # key of ``measured_capacity``: its name in the table
WINDOW = "2s"  # three of them are a measurement
Document = dict[str, Any]


def tune_json(*arguments: str | Path) -> Document:
    """Return the JSON document that a command of tune prints."""
    words = [Path(sys.executable).with_name("tune"), *arguments, "--json"]
    # a plan of a run without a PASS has an exit code of its own
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=False)
    document: Document = json.loads(done.stdout)
    return document


def configuration_options(configuration: Mapping[str, Any]) -> list[str]:
    """Return the options of ``tune sweep`` for a configuration of its JSON documents."""
    left = dict(configuration)
    options = [f"--max-batch-size={left.pop('max_batch_size')}", f"--instance-count={left.pop('instance_count')}"]
    delay_us, is_batched = left.pop("max_queue_delay_us"), left.pop("dynamic_batching")
    options.append(f"--max-queue-delay={f'{delay_us}us' if delay_us else '0' if is_batched else 'off'}")
    preferred = left.pop("preferred_batch_sizes")
    options.append(f"--preferred-batch-size={'+'.join(map(str, preferred)) or 'none'}")
    return [*options, *(f"--config={path}={value}" for path, value in left.items())]


def rows(model: str, rounds: int, out: Path) -> list[list[str]]:
    """Return the rows of a model: one for each rate and bound."""
    finished = sorted((out / model).glob("*/run.json"))
    folder = finished[-1].parent if finished else run_tune([model], out).folder
    info = json.loads((folder / "run.json").read_text())
    answer = tune_json("plan", folder, "--rate=1/s")["answers"][0]
    capacity = answer["measured_capacity"]
    table = []
    for key, name in RATES.items():
        rate = capacity[key]
        if rate <= 0:
            table.append([model, info["verdict"], f"{capacity['confirmed']:,.0f}", "", name, "none"])
            continue
        swept = []
        for _ in range(rounds):
            options = [*configuration_options(answer["configuration"]), f"--measurement-interval={WINDOW}"]
            options += [f"--request-rate={rate:.4g}", f"--out={out / 'sweeps'}"]
            document = tune_json("sweep", model, *options)
            swept += document["cells"]
        table += [
            [
                *(model, info["verdict"], f"{capacity['confirmed']:,.0f}", sla, name, f"{rate:,.4g}"),
                f"{statistics.median(cell['throughput_infer_per_sec'] for cell in swept):,.4g}",
                *judged(sla, swept),
            ]
            for sla in answer["sla"]
        ]
    return table


def judged(sla: str, cells: list[Document]) -> list[str]:
    """Return the measured values of a bound such as ``ttft-p95 <= 200 ms``, and in how many cells it is met."""
    metric, _, bound, _ = sla.split()
    name = f"{metric if '-' in metric else f'latency-{metric}'}-ms".replace("-", "_")
    values = [cell[name] for cell in cells]
    met = sum(value <= float(bound) for value in values)
    return [
        f"{statistics.median(values):.3g}",
        " ".join(f"{value:.3g}" for value in values),
        f"{met} of {len(values)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["tinygpt"], help="models (tinygpt)")
    parser.add_argument("--rounds", type=int, default=4, help="fresh servers at each rate (4)")
    parser.add_argument("--out", type=Path, help="folder of the runs (a temporary one)")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="planned-rate-"))
    print_title("Planned rates on a real server: latest measurement")
    print_head(*COLUMNS, text=len(COLUMNS))
    for model in arguments.models:
        for cells in rows(model, arguments.rounds, out):
            print(row(*cells, *[""] * (len(COLUMNS) - len(cells))), flush=True)
    print(f"\n{measured_on()}")


if __name__ == "__main__":
    main()
