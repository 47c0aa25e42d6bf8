"""What goes out: the recommendation of a run that has ended, with the figures that it was measured at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from objectives.confidence import Verdict
from optimizer import model_config, server_options
from optimizer.deploy.docker.settings import ALL_GPUS, SHM_SIZE, read_gpus
from optimizer.errors import BadInputError
from optimizer.machine import cpus
from optimizer.outcome import Outcome
from optimizer.profile.safe_paths import is_file, plain_name
from optimizer.report import summary, words
from optimizer.store.finished import FinishedRun
from optimizer.trial import VARIANT, Point
from optimizer.untrusted import one_line

MOST_MODELS = 100
_PLACED = re.compile(r"the server runs on CPUs? ([0-9,-]+), the load generator")  # as cpus.place notes it
_ON_CPU = "served on the CPU"  # as Stack.notes tells of a GPU that is not used
_BYTES = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Winner:
    """``configs`` by model; ``model`` is the one among them that requests go to. ``arguments`` are the options that
    the measured tritonserver had beside its repository and ports.

    ``cpus`` is how many CPUs that server had, ``device`` the name of its GPU or CPU; None where it ran on another
    machine. ``gpus`` is how many GPUs it had. ``image`` is the one that was measured, where it was one.
    ``load_seconds``: what loading the configuration took.
    """

    run: str
    written: str
    model: str
    configs: Mapping[str, ModelConfig]
    arguments: tuple[str, ...]
    point: Point
    latency: str
    goal: str
    verdict: str
    is_confirmed: bool
    hardware: str
    device: str | None
    gpus: int
    cpus: int | None
    triton: str
    command: str
    shapes: tuple[str, ...] = ()
    image: str | None = None
    shared_memory_bytes: int = 1 << 30
    load_seconds: float | None = None

    @property
    def memory_bytes(self) -> float | None:
        """Of the server's processes."""
        return self.point.measurement.server_memory_bytes

    @property
    def knee(self) -> float:
        """The highest load that met the bounds: requests in flight or, in a run at rates, requests a second."""
        return self.point.load.request_rate or float(self.point.load.concurrency)

    @property
    def is_rate(self) -> bool:
        return bool(self.point.load.request_rate)


def read_winner(run: FinishedRun) -> Winner:
    """Raises BadInputError, in one line, where the run has not ended, recommends nothing or is damaged."""
    found, outcome = _recommended(run)
    options, hardware = run.options, run.info["hardware"]
    remote = options.target == "remote"
    model = str(dict(found.candidate.fields).get(VARIANT, run.problem.model))
    configs = _configs(run, model)
    _check_measured(run, found, configs)
    try:
        gpus = 0 if remote else _gpus(run, configs)
        return Winner(
            run=run.name,
            written=str(run.info.get("written", "")),
            model=model,
            configs=configs,
            arguments=(
                *_completed(configs),
                *server_options.words(found.candidate.fields),
                *options.server_args,
            ),
            point=found,
            latency=words.judged_latency(run.problem.constraints),
            goal=words.bounds(run.problem.constraints),
            verdict=summary.verdict(outcome),
            is_confirmed=outcome.confirmed is not None and outcome.confirmed.judged.verdict is Verdict.PASS,
            hardware="another machine" if remote else _told(hardware),
            device=None if remote else str(hardware["gpus"][0] if gpus else hardware["cpu"]),
            gpus=gpus,
            cpus=None if remote else _cpus(run, found),
            triton=str(run.info.get("versions", {}).get("tritonserver", "unknown")),
            command=str(run.info.get("command", "")),
            shapes=options.shapes,
            image=options.docker_image,
            shared_memory_bytes=_bytes(options.docker_shm_size or SHM_SIZE),
            load_seconds=next((one.deploy_seconds for one in run.trials if one.number == found.trial), None),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise run.folder.no_record(f"no {error}" if isinstance(error, KeyError) else str(error)) from None


def _recommended(run: FinishedRun) -> tuple[Point, Outcome]:
    where = run.folder.path
    if run.status == "left":
        raise BadInputError(
            f"{where}: this worker has left its study {run.options.join} to others; give the folder of the one that "
            "confirmed, or join the study once more"
        )
    if run.status in ("running", "interrupted", "failed"):
        told = {"running": "is at work or was killed", "interrupted": "was interrupted", "failed": "failed"}
        raise BadInputError(
            f"{where}: the run {told[run.status]}, what it would recommend is not known; "
            f"`tune --resume {where}` goes on with it"
        )
    if run.outcome is None or run.outcome.recommended is None:
        goal = words.bounds(run.problem.constraints)
        raise BadInputError(
            f"{where}: no configuration met {goal or 'the bounds'}, so there is nothing to emit; "
            "tune again with a wider bound, a smaller request or more hardware"
        )
    return run.outcome.recommended, run.outcome


def _configs(run: FinishedRun, model: str) -> dict[str, ModelConfig]:
    """By model. Raises BadInputError where they are missing or cannot be read."""
    best = run.folder.best
    single = best / "config.pbtxt"
    files = {path.parent.name: path for path in sorted(best.glob("*/config.pbtxt"))[:MOST_MODELS]}
    if is_file(single):
        files = {model: single}
    try:
        found = {plain_name(name): model_config.read(path) for name, path in files.items()}
    except ValueError as error:
        raise BadInputError(f"{best}: {error}") from None
    if model not in found:
        raise BadInputError(
            f"{best}: has no configuration of {one_line(model)}, it was deleted; "
            f"`tune --resume {run.folder.path}` writes it again"
        )
    return found


def _check_measured(run: FinishedRun, found: Point, configs: Mapping[str, ModelConfig]) -> None:
    """The figures are those of ``found``: of one of the models, which the candidate's own settings are about.

    Another version of tune may have recommended something else of the same measurements.
    """
    own = replace(found.candidate, fields=found.candidate.config_fields)
    if all(model_config.differences(own, config) for config in configs.values()):
        raise BadInputError(
            f"{run.folder.best}: is not what the run's measurements recommend, changed by hand or written by another "
            f"version of tune; `tune --resume {run.folder.path}` writes it again"
        )


def _completed(configs: Mapping[str, ModelConfig]) -> list[str]:
    """As when it was measured: a native backend would add the dynamic batching that the search left out."""
    complete = all(config.input and config.output for config in configs.values())
    return ["--disable-auto-complete-config"] if complete else []


def _told(hardware: Mapping[str, Any]) -> str:
    cpu = f"{hardware['cpu']}, {hardware['cpu_count']} cores"
    return " · ".join([*map(str, hardware["gpus"]), cpu])


def _gpus(run: FinishedRun, configs: Mapping[str, ModelConfig]) -> int:
    there, options = len(run.info["hardware"]["gpus"]), run.options
    if options.target == "docker":
        given = read_gpus(options.docker_gpus or "none")
        return there if given == (ALL_GPUS,) else len(given)
    groups = [group for config in configs.values() for group in config.instance_group]
    on_cpu = groups and all(group.kind == ModelInstanceGroup.KIND_CPU for group in groups)
    return 0 if on_cpu or any(_ON_CPU in str(note) for note in run.info.get("notes", ())) else there


def _cpus(run: FinishedRun, found: Point) -> int:
    """Those that the server was given; where it shared the machine with the load generator, all."""
    chosen = found.candidate.server_cpus or run.options.server_cpus
    if chosen is not None:
        return len(cpus.parse(chosen))
    for note in run.info.get("notes", ()):
        if placed := _PLACED.match(str(note)):
            return len(cpus.parse(placed[1]))
    return int(run.info["hardware"]["cpu_count"])


def _bytes(size: str) -> int:
    """As ``read_shm_size`` takes it: ``512m``."""
    return int(size) if size.isdigit() else int(size[:-1]) * _BYTES[size[-1]]
