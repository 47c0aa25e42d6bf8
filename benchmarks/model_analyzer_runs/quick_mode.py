"""Run Model Analyzer's quick mode on tune's server, load generator, model and requests.

It is installed into its own environment. Server and load generator are wrapper scripts that set the environment of
the pinned binaries, log their start and become the binary. The bounds of the space are tune's; all other settings
are Model Analyzer's defaults.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import yaml

from lib.idle_machine import CpuUsage
from model_analyzer_runs.launches import (
    LOAD_GENERATOR,
    SERVER,
    Observer,
    log_start,
    seconds_of_loads,
    seconds_of_servers,
)
from model_analyzer_runs.search_cost import SearchCost, StatedResult
from optimizer.config.model_source import ModelSource
from optimizer.core.process import SupervisedProcess, run_command
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import embedded_installation, server_environment
from optimizer.deploy.installed_server import ServerFolder
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.target_settings import free_port
from optimizer.study.task import Task

VERSION = "1.58.0"
PROTOBUF = "protobuf<7"  # version 7 and later lack the field that the peer reads
NAME = f"Model Analyzer {VERSION}, quick mode"
INSTALL_SECONDS = 900.0
LOOK_SECONDS = 0.05  # interval between checks of running processes
WINDOWS = 3  # perf_analyzer reports the mean of the three that agree
# tune's environment is not the peer's
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_HEADERS = {
    "variant": "Model Config Path",
    "concurrency": "Concurrency",
    "satisfies": "Satisfies Constraints",
    "throughput": "Throughput (infer/sec)",
    "p95": "p95 Latency (ms)",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of the space in the peer's terms."""

    least_batch: int
    most_batch: int
    most_instances: int
    most_concurrency: int
    sweeps: int = 3  # configurations with a load sweep, in addition to the given one: its default

    @classmethod
    def of(cls, task: Task) -> Bounds:
        """Return tune's bounds: batches at least as large as a request, instances, and requests in flight."""
        space, batch = task.problem.space, task.problem.request_batch_size
        sizes = [size for size in space.max_batch_size if size >= batch]
        return cls(min(sizes), max(sizes), max(space.instance_count), task.problem.max_concurrency)

    def __str__(self) -> str:
        return (
            f"max_batch_size {self.least_batch} to {self.most_batch} by doubling, instances 1 to "
            f"{self.most_instances}, concurrency up to {self.most_concurrency}"
        )


@dataclass(frozen=True)
class PeerStack:
    """The folders and settings with which tune starts its server, for a server that another program starts."""

    source: ModelSource
    installed: Runtime
    folder: ServerFolder

    @classmethod
    def of(cls, source: ModelSource) -> PeerStack:
        installed = runtime.ensure(print)
        return cls(source, installed, ServerFolder(source, embedded_installation(installed)))

    def close(self) -> None:
        self.folder.remove()

    def write_wrappers(self, folder: Path, starts: Path, request_batch_size: int) -> tuple[Path, Path]:
        """Write scripts that start the server and the load generator and log each start to ``starts``."""
        settings = server_environment(self.installed)
        names = ("LD_LIBRARY_PATH", "PYTHONPATH", "PATH", "ORT_DISABLE_TELEMETRY")
        exports = "".join(f"export {name}={quote(settings[name])}\n" for name in names)
        flags = [
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            f"--backend-directory={self.folder.backends}",
            f"--backend-config=python,shm-region-prefix-name={self.folder.shared_memory_prefix}",
        ]
        if self.source.config.input and self.source.config.output:
            flags.append(
                "--disable-auto-complete-config"
            )  # tune does this too; it saves a stub process for each model load
        server = folder / "tritonserver.sh"
        binary = quote(str(self.installed.tritonserver))
        server.write_text(
            f"#!/bin/sh\n{log_start(SERVER, starts)}{exports}cd {quote(str(self.folder.packages))} || exit 1\n"
            f'exec {binary} "$@" {" ".join(map(quote, flags))}\n'
        )
        load_generator = folder / "perf_analyzer.sh"
        binary = quote(str(self.installed.perf_analyzer))
        libraries = quote(str(self.installed.perf_analyzer_libraries))
        # No cd, because the peer reads the output from its own folder. Quick mode supports requests of one sample
        # only, and the last -b counts.
        load_generator.write_text(
            f"#!/bin/sh\n{log_start(LOAD_GENERATOR, starts)}export LD_LIBRARY_PATH={libraries}\n"
            f'exec {binary} "$@" -b {request_batch_size}\n'
        )
        for script in (server, load_generator):
            script.chmod(0o755)
        return server, load_generator


def install(work: Path, on_progress: Callable[[str], None]) -> Path:
    """Return the peer's environment in ``work``, created on first use. Exits with pip's message if that fails."""
    home = work / f"model-analyzer-{VERSION}"
    if (home / "complete").exists():
        return home
    on_progress(f"installing Model Analyzer {VERSION} (once)")
    shutil.rmtree(home, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    python = home / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands: list[list[str | Path]] = [
        [sys.executable, "-m", "venv", home],
        [*pip, f"triton-model-analyzer=={VERSION}", PROTOBUF],
        # compile modules and list matplotlib's fonts now, which is no part of a search
        [python, "-c", "import model_analyzer.entrypoint, matplotlib.pyplot"],
    ]
    for command in commands:
        done = run_command(command, timeout_seconds=INSTALL_SECONDS, log=work / "install.log", env=_environment(home))
        if done.exit_code != 0:
            sys.exit(f"cannot install the peer: {done.output.strip()[-2000:]}")
    frozen = run_command(
        [python, "-m", "pip", "freeze"], timeout_seconds=60, log=work / "freeze.log", env=_environment(home)
    )
    (home / "complete").write_text(frozen.output)
    return home


def search(home: Path, task: Task, bounds: Bounds, sla_ms: float, out: Path) -> SearchCost:
    """Run quick mode to its end, and store configuration, results, logs and launches in ``out``, an absolute path."""
    shutil.rmtree(out, ignore_errors=True)  # otherwise it continues from the checkpoint of an interrupted run
    out.mkdir(parents=True)
    starts = out / "starts.txt"
    with contextlib.closing(PeerStack.of(task.source)) as stack:
        scratch = stack.folder.path / "peer"  # removed with tune's own folders if this process is killed
        scratch.mkdir()
        wrappers = stack.write_wrappers(scratch, starts, task.problem.space.request_batch_size)
        config = configuration(task, bounds, sla_ms, stack.folder.repository, wrappers, scratch, out)
        (out / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        observer = Observer(starts)
        before, started = CpuUsage.now(), time.time()
        with SupervisedProcess(
            [home / "bin" / "model-analyzer", "profile", "-f", out / "config.yaml"],
            log=out / "model_analyzer.log",
            env=_environment(home),
            cwd=scratch,
            shm_patterns=(f"{stack.folder.shared_memory_prefix}*",),
        ) as process:
            while process.exit_code() is None:
                observer.watch(LOOK_SECONDS)
            wall_seconds = time.time() - started
        others = CpuUsage.now().others_since(before)
        observer.close()
        if process.exit_code() != 0:
            sys.exit(f"Model Analyzer ended with exit code {process.exit_code()}: see {out / 'model_analyzer.log'}")
        _keep_configurations(scratch / "variants", out / "configurations")
    with (out / "launches.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("program", "started_seconds", "ended_seconds"))
        for launch in observer.launches:
            table.writerow((launch.program, round(launch.started - started, 3), round(launch.ended - started, 3)))
    rows = read_results(out / "results" / "metrics-model-inference.csv")
    return SearchCost(
        name=NAME,
        wall_seconds=wall_seconds,
        confirm_seconds=None,
        server_seconds=seconds_of_servers(observer.launches),
        load_generator_seconds=seconds_of_loads(observer.launches),
        configurations=len({row["variant"] for row in rows}),
        measurements=len(rows),
        launches=sum(launch.program == LOAD_GENERATOR for launch in observer.launches),
        window_seconds=median_window_seconds((out / "perf_analyzer.log").read_text(errors="replace")),
        others_share=others,
        found=winner(rows, out / "configurations"),
    )


def configuration(
    task: Task,
    bounds: Bounds,
    sla_ms: float,
    repository: Path,
    wrappers: tuple[Path, Path],
    scratch: Path,
    out: Path,
) -> dict[str, object]:
    """Return Model Analyzer's configuration file."""
    if sla_ms != int(sla_ms):
        sys.exit(f"Model Analyzer takes whole milliseconds only, not a bound of {sla_ms:g} ms")
    if spaced := [path for path in (str(task.input_data), str(scratch), str(out)) if re.search(r"[\s=]", path)]:
        sys.exit(
            f"Model Analyzer splits paths at blanks and '=', so it cannot use {spaced[0]}: "
            "choose another --work or --out"
        )
    flags: dict[str, object] = {"percentile": "95", "input-data": str(task.input_data)}
    if task.shapes:
        flags["shape"] = list(task.shapes)
    server, load_generator = wrappers
    return {
        "model_repository": str(repository),
        "output_model_repository_path": str(scratch / "variants"),
        "checkpoint_directory": str(out / "checkpoints"),
        "export_path": str(out),
        "triton_launch_mode": "local",
        "triton_server_path": str(server),
        "triton_output_path": str(out / "tritonserver.log"),
        "triton_http_endpoint": f"127.0.0.1:{free_port()}",
        "triton_grpc_endpoint": f"127.0.0.1:{free_port()}",
        "triton_metrics_url": f"http://127.0.0.1:{free_port()}/metrics",
        "client_protocol": "grpc",
        "perf_analyzer_path": str(load_generator),
        "perf_output": True,
        "perf_output_path": str(out / "perf_analyzer.log"),
        "run_config_search_mode": "quick",
        "run_config_search_min_model_batch_size": bounds.least_batch,
        "run_config_search_max_model_batch_size": bounds.most_batch,
        "run_config_search_max_instance_count": bounds.most_instances,
        "run_config_search_max_concurrency": bounds.most_concurrency,
        "num_configs_per_model": bounds.sweeps,
        "skip_detailed_reports": True,  # plots take time and are not needed to determine the winner
        "inference_output_fields": [
            "model_name",
            "batch_size",
            "concurrency",
            "model_config_path",
            "instance_group",
            "max_batch_size",
            "satisfies_constraints",
            "perf_throughput",
            "perf_latency_p95",
        ],
        "profile_models": {
            task.source.name: {
                "cpu_only": True,
                "objectives": ["perf_throughput"],
                "constraints": {"perf_latency_p95": {"max": int(sla_ms)}},
                "perf_analyzer_flags": flags,
            }
        },
    }


def read_results(path: Path) -> list[dict[str, str]]:
    """Return the rows of Model Analyzer's inference table by short column names."""
    with path.open(newline="") as file:
        reader = csv.DictReader((line for line in file if line.strip()), skipinitialspace=True)
        rows = [{str(key).strip(): str(value).strip() for key, value in row.items()} for row in reader]
    if missing := set(_HEADERS.values()) - set(rows[0] if rows else ()):
        sys.exit(f"{path}: no column {', '.join(sorted(missing))}")
    return [{name: row[header] for name, header in _HEADERS.items()} for row in rows]


def winner(rows: list[dict[str, str]], configurations: Path) -> StatedResult | None:
    """Return the row with the highest throughput within the bound, or None if no measurement met the bound."""
    passing = [row for row in rows if row["satisfies"] == "Yes"]
    if not passing:
        return None
    best = max(passing, key=lambda row: float(row["throughput"]))
    return StatedResult(
        config=(configurations / f"{best['variant']}.pbtxt").read_text(),
        concurrency=int(best["concurrency"]),
        throughput_infer_per_sec=float(best["throughput"]),
        latency_p95_ms=float(best["p95"]),
    )


def median_window_seconds(log: str) -> float:
    """Return the median length of perf_analyzer's windows: their requests divided by the rate."""
    lengths: list[float] = []
    for launch in log.split("Perf Analyzer Launched")[1:]:
        batch = re.search(r"Batch size: (\d+)", launch)
        requests = re.search(r"Request count: (\d+)", launch)
        rate = re.search(r"Throughput: ([\d.e+]+) infer/sec", launch)
        if batch and requests and rate and float(rate[1]):
            lengths.append(int(requests[1]) * int(batch[1]) / float(rate[1]) / WINDOWS)
    if not lengths:
        sys.exit("the output of the peer's perf_analyzer cannot be parsed")
    return statistics.median(lengths)


def _keep_configurations(variants: Path, kept: Path) -> None:
    """Remove all files except config.pbtxt from the models that Model Analyzer wrote; each is a complete copy."""
    kept.mkdir(exist_ok=True)
    for config in variants.glob("*/config.pbtxt"):
        shutil.copy(config, kept / f"{config.parent.name}.pbtxt")


def _environment(home: Path) -> dict[str, str]:
    """Return the user's environment variables with the peer's programs first on PATH."""
    plain = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {
        **plain,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "MPLCONFIGDIR": str(home / "matplotlib"),
    }
