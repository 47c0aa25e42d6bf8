"""Compare the throughput within a latency bound of ONNX Runtime's settings to that of its defaults.

    python benchmarks/execution.py [--rounds 6] [--seconds 1] [--models mlp:20 …] [--smoke]

Each model is served by one embedded tritonserver with two instances and ``dynamic_batching {}``. In each round each
setting is deployed in turn, and measured in a closed loop at several concurrencies. Its throughput is the highest one
whose p95 is within the bound. Odd rounds take the settings in reverse order. The settings are OpenVINO, graph level
1, operators in parallel, and threads that do not spin; each changes the defaults alone.

Prints a Markdown table: for each model and setting the mean throughput, and its ratio to the defaults with an
interval at 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib.intervals import ratio_within_bound
from lib.measured_model import make_own_client, prepare_model
from lib.output import measured_on, print_head, print_progress, row
from lib.records import this_machine
from optimizer.config.ort_settings import EXECUTION_MODE, GRAPH_LEVEL, SPINNING
from optimizer.core.candidate import CPU_ACCELERATOR, Candidate, FieldValue
from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.options.run_options import RunOptions

MODELS = ("mlp:20", "minilm:300", "resnext50-32x4d:1500")  # name:bound on p95 in ms
SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS = ("mlp:50",), 2, 0.5
DEFAULT = "default"
SETTINGS: dict[str, tuple[tuple[str, FieldValue], ...]] = {
    DEFAULT: (),
    "OpenVINO": ((f"{CPU_ACCELERATOR}.name", "openvino"),),
    "graph level 1": ((GRAPH_LEVEL, 1),),
    "parallel": ((EXECUTION_MODE, "1"),),
    "no spinning": ((SPINNING, "0"),),
}
CONCURRENCIES = (2, 8)
INSTANCES, LARGEST_BATCH = 2, 8
COLUMNS = ("model", "setting", "infer/s", "ratio to the defaults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a measurement (1)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME:BOUND_MS")
    parser.add_argument("--smoke", action="store_true", help="check that everything works: two short rounds")
    given = parser.parse_args()
    if given.smoke:
        given.models, given.rounds, given.seconds = SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS
    runtime.ensure_openvino(print_progress)
    print_head(*COLUMNS, text=2)
    for model in given.models:
        name, _, bound_ms = model.partition(":")
        throughputs = compare(name, float(bound_ms), given.rounds, given.seconds)
        for setting, measured in throughputs.items():
            print(table_row(f"{name}, p95 <= {bound_ms} ms", setting, measured, throughputs[DEFAULT]), flush=True)
    print("\n" + measured_on(f"{given.rounds} rounds of {given.seconds:g} s", machine=this_machine()))


def compare(name: str, bound_ms: float, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the inferences per second within the bound of each setting and round."""
    throughputs: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared = prepare_model(RunOptions(name))
        client = make_own_client(prepared, folder)
        base = Candidate(LARGEST_BATCH, dynamic_batching=True, instance_count=INSTANCES)
        target = EmbeddedTarget(prepared.source, TargetSettings(folder / "server.log", on_progress=print_progress))
        with contextlib.closing(target):
            for number in range(rounds):
                for setting in list(SETTINGS)[:: 1 if number % 2 == 0 else -1]:
                    with target.deploy(replace(base, fields=SETTINGS[setting])) as endpoint:
                        throughputs[setting].append(best_throughput(client, endpoint, bound_ms, seconds))
    return throughputs


def best_throughput(client: LoadGenerator, endpoint: Endpoint, bound_ms: float, seconds: float) -> float:
    """Return the highest throughput of the concurrencies whose p95 is within the bound; 0 if none is."""
    client.measure(endpoint, LoadPoint(1, CONCURRENCIES[0]), seconds)  # warm up
    measured = [client.measure(endpoint, LoadPoint(1, concurrency), seconds) for concurrency in CONCURRENCIES]
    within = [m for m in measured if m.latency_p95_ms is not None and m.latency_p95_ms <= bound_ms]
    return max((m.throughput_infer_per_sec or 0.0 for m in within), default=0.0)


def table_row(model: str, setting: str, measured: Sequence[float], default: Sequence[float]) -> str:
    mean = sum(measured) / len(measured)
    ratio = "1" if setting == DEFAULT else ratio_within_bound(measured, default)
    return row(model, setting, f"{mean:,.0f}", ratio)


if __name__ == "__main__":
    main()
