"""What the reference models cost to build, and whether this machine serves one request of each within its bound.

    python benchmarks/reference_models.py [--only NAME ...] [--build-only] > benchmarks/reference_models.md

Each profile's model is built, in a process and a cache of its own, and then served as the profile's baseline (one
instance, no dynamic batching, all cores) to one request in flight: its p95, the least of three measurements, and what
others took of the CPUs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from optimizer import runtime
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deployment import as_given
from optimizer.errors import DeploymentError, MeasurementError
from optimizer.interfaces import Endpoint
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.machine import hardware
from optimizer.machine.cpu_time import Usage
from optimizer.model_source import ModelSource
from optimizer.models import build
from optimizer.profile.find import find_profile, list_profiles
from optimizer.profile.reader import Profile, load_profile
from optimizer.profile.schema import BuiltModel
from optimizer.sources.pipeline import assembled
from optimizer.sources.repository import read_repository_model
from optimizer.trial import LoadPoint

MOST_SECONDS, MOST_BYTES = 120.0, 3e9
MEASUREMENTS = 3
PUBLISHED = {  # parameters
    "bert": "108,893,186 (transformers, BertForQuestionAnswering)",
    "bert-384": "108,893,186",
    "bert-large": "334,094,338 (transformers, BertForQuestionAnswering)",
    "bert-large-128": "334,094,338",
    "minilm-16": "22.7 M (transformers, MiniLM-L6-H384)",
    "resnext101-32x4d": "44,177,704 (timm)",
    "resnext50-32x4d": "25,028,904 (timm)",
    "text_recognition": "44.3 M (Baek et al. 2019, table 2)",
}
COLUMNS = ("profile", "build s", "peak MB", "disk MB", "parameters", "published", "p95 ms (others)", "its bound")


@dataclass(frozen=True)
class Built:
    seconds: float
    peak_bytes: int
    disk_bytes: int
    parameters: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="profiles (all)")
    parser.add_argument("--build-only", action="store_true", help="serve none")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # profile, cache
    given = parser.parse_args()
    if given.child:
        print(json.dumps(asdict(_build(load_profile(find_profile(given.child[0])), Path(given.child[1])))))
        return
    print("# The reference models, as last measured\n")
    print(f"`{shlex.join(['python', 'benchmarks/reference_models.py', *sys.argv[1:]])}`\n")
    print(f"Limits of a build: {MOST_SECONDS:.0f} s, {MOST_BYTES / 1e6:,.0f} MB of memory, as many of disk.\n")
    print(_line(COLUMNS))
    print(_line(["---", *["--:"] * (len(COLUMNS) - 1)]))
    all_met = True
    for name in given.only or [listed.name for listed in list_profiles()]:
        profile = load_profile(find_profile(name))
        with tempfile.TemporaryDirectory() as cache:
            built = _in_own_process(name, Path(cache))
            all_met &= built.seconds <= MOST_SECONDS and max(built.peak_bytes, built.disk_bytes) <= MOST_BYTES
            served = "" if given.build_only else _served(profile, Path(cache))
        bound = ", ".join(map(str, profile.sla.constraints()))
        sizes = (f"{number / 1e6:,.0f}" for number in (built.peak_bytes, built.disk_bytes))
        counts = (f"{built.parameters:,}", PUBLISHED.get(name, ""))
        print(_line([name, f"{built.seconds:.1f}", *sizes, *counts, served, bound]), flush=True)
    machine = hardware.detect()
    print(f"\nthe limits are {'met' if all_met else 'MISSED'}; ", end="")
    print(f"{machine.cpu}, {machine.cpu_count} cores; {time.strftime('%Y-%m-%d')}")


def _in_own_process(name: str, cache: Path) -> Built:
    command = [sys.executable, __file__, "--child", name, str(cache)]
    return Built(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def _build(profile: Profile, cache: Path) -> Built:
    started = time.perf_counter()
    source = _obtain(profile, cache)
    seconds = time.perf_counter() - started
    parameters = source.facts["parameters"]
    assert isinstance(parameters, int)
    disk_bytes = sum(file.stat().st_blocks * 512 for file in source.repository.rglob("*"))
    return Built(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, disk_bytes, parameters)


def _obtain(profile: Profile, cache: Path) -> ModelSource:
    assert isinstance(profile.model, BuiltModel)
    largest = max((profile.space and profile.space.max_batch_size) or (8,))
    model = profile.model
    built = build(
        model.builder, model.settings, cache=cache, max_batch_size=largest, kind="KIND_CPU", say=lambda _: None
    )
    return assembled(built, partial(read_repository_model, built.repository, gpu=False))


def _served(profile: Profile, cache: Path) -> str:
    """p95 in ms, the least of some measurements, and what others took of the CPUs."""
    source = _obtain(profile, cache)
    installed = runtime.ensure(lambda _: None)
    load = LoadPoint(int(profile.request.batch_size), 1)
    load_generator = PerfAnalyzer(
        installed.perf_analyzer,
        installed.perf_analyzer_libraries,
        cache / "perf_analyzer.log",
        input_data=str(source.input_data or "random"),
    )
    target = EmbeddedTarget(source, log=cache / "tritonserver.log", say=lambda _: None)
    try:
        with target.deploy(as_given(source, ())) as endpoint:
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
    """And the share of the CPUs' time that others took meanwhile."""
    before = Usage.now(server_pid=endpoint.server_pid)
    p95_ms = load_generator.measure(endpoint, load).latency_p95_ms
    return p95_ms or math.inf, Usage.now(server_pid=endpoint.server_pid).others_since(before)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
