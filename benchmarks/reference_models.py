"""Measure the cost of building the reference models, and check that a single request meets each bound here.

    python benchmarks/reference_models.py [--only NAME ...] [--build-only] > benchmarks/reference_models.md

Each profile's model is built in its own process and cache. It is then served as the profile's baseline (one instance,
no dynamic batching, all cores) with one request in flight. The table has the smallest p95 of three measurements and
the share of the CPUs that other processes used.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib.measured_model import write_requests
from lib.output import measured_on, print_head, print_title, row
from lib.process_pool import run_in_own_process
from objectives.sla import Sla
from optimizer.config.model_source import ModelSource, configured_candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError
from optimizer.core.stopwatch import peak_memory_bytes
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.cpu_usage import CpuUsage
from optimizer.machine.process_telemetry import server_pids
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.builders import build
from optimizer.model.profile import Profile, load_profile
from optimizer.model.profile_lookup import find_profile, list_profiles
from optimizer.model.profile_schema import BuiltModel
from optimizer.model.repository import read_repository_model, read_source

MOST_SECONDS, MOST_BYTES = 120.0, 3e9
MEASUREMENTS = 3
PUBLISHED = {  # published numbers of parameters
    "bert": "108,893,186 (transformers, BertForQuestionAnswering)",
    "bert-384": "108,893,186",
    "bert-large": "334,094,338 (transformers, BertForQuestionAnswering)",
    "bert-large-128": "334,094,338",
    "minilm-16": "22.7 M (transformers, MiniLM-L6-H384)",
    "resnext101-32x4d": "44,177,704 (timm)",
    "resnext50-32x4d": "25,028,904 (timm)",
    "text_recognition": "44.3 M (Baek et al. 2019, table 2)",
}
COLUMNS = (
    "profile",
    "build s",
    "peak MB",
    "disk MB",
    "parameters",
    "published",
    "p95 ms (CPU share of others)",
    "bound",
)


@dataclass(frozen=True)
class Built:
    seconds: float
    peak_bytes: int
    disk_bytes: int
    parameters: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="profiles to build (all)")
    parser.add_argument("--build-only", action="store_true", help="build the models without serving them")
    arguments = parser.parse_args()
    print_title("The reference models: latest measurement")
    print(f"Limits of a build: {MOST_SECONDS:.0f} s, {MOST_BYTES / 1e6:,.0f} MB of memory, the same on disk.\n")
    print_head(*COLUMNS)
    all_met = True
    for name in arguments.only or list_profiles():
        profile = load_profile(find_profile(name))
        with tempfile.TemporaryDirectory() as cache:
            built = run_in_own_process(_build, profile, Path(cache))
            all_met &= built.seconds <= MOST_SECONDS and max(built.peak_bytes, built.disk_bytes) <= MOST_BYTES
            served = "" if arguments.build_only else _served(profile, Path(cache))
        bound = ", ".join(map(str, Sla.from_bounds(profile.sla.latency_bounds_ms())))
        sizes = (f"{number / 1e6:,.0f}" for number in (built.peak_bytes, built.disk_bytes))
        counts = (f"{built.parameters:,}", PUBLISHED.get(name, ""))
        print(row(name, f"{built.seconds:.1f}", *sizes, *counts, served, bound), flush=True)
    print(f"\n{measured_on('All limits are met' if all_met else 'A limit is MISSED')}")


def _build(profile: Profile, cache: Path) -> Built:
    started = time.perf_counter()
    source = _obtain(profile, cache)
    seconds = time.perf_counter() - started
    parameters, peak_bytes = source.facts["parameters"], peak_memory_bytes()
    assert isinstance(parameters, int)
    assert peak_bytes is not None, "Linux has it"
    disk_bytes = sum(file.stat().st_blocks * 512 for file in source.repository.rglob("*"))
    return Built(seconds, peak_bytes, disk_bytes, parameters)


def _obtain(profile: Profile, cache: Path) -> ModelSource:
    assert isinstance(profile.model, BuiltModel)
    largest = max((profile.space and profile.space.max_batch_size) or (8,))
    model = profile.model
    built = build(
        model.builder,
        model.settings,
        cache=cache,
        max_batch_size=largest,
        kind="KIND_CPU",
        on_progress=lambda _: None,
    )
    read = partial(read_repository_model, built.repository, gpu=False)
    return read_source(lambda name: built if name == built.name else read(name), built.name)


def _served(profile: Profile, cache: Path) -> str:
    """Return the smallest p95 of several measurements in ms, and the CPU share of other processes."""
    source = _obtain(profile, cache)
    installed = runtime.ensure(lambda _: None)
    load = LoadPoint(int(profile.request.batch_size), 1)
    load_generator = PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        cache / "perf_analyzer.log",
        input_data=source.input_data or write_requests(source, cache),
    )
    target = EmbeddedTarget(source, TargetSettings(cache / "tritonserver.log", on_progress=lambda _: None))
    try:
        with target.deploy(configured_candidate(source, ())) as endpoint:
            load_generator.warm_up(endpoint, load)
            measured = [_p95_ms(load_generator, endpoint, load) for _ in range(MEASUREMENTS)]
    except (DeploymentError, MeasurementError) as error:
        print(f"{profile.name}: {error}", file=sys.stderr)
        return "failed"
    finally:
        target.close()
    p95_ms, taken = min(measured)
    return f"{p95_ms:,.1f} ({taken:.0%})"


def _p95_ms(load_generator: PerfAnalyzer, endpoint: Endpoint, load: LoadPoint) -> tuple[float, float]:
    """Return the p95 in ms and the CPU share of other processes meanwhile."""
    before = CpuUsage.now(None, *server_pids(endpoint))
    p95_ms = load_generator.measure(endpoint, load).latency_p95_ms
    return p95_ms or math.inf, CpuUsage.now(None, *server_pids(endpoint)).others_since(before)


if __name__ == "__main__":
    main()
