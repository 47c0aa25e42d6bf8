"""Settings of the production server that the user gives, and the parts that all emitted files share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from math import ceil, inf
from typing import Any, Literal, TypeAlias

import yaml

from optimizer.core.errors import BadInputError
from optimizer.core.files import expand_home
from optimizer.core.notes import SettingsUnread, SeveralModelsLoaded
from optimizer.core.safe_text import one_line, quote
from optimizer.emit.recommended import Recommendation
from optimizer.options.server_options import QUANTILE_COST
from optimizer.results import autoscaling, formatting, outcome_values, summary

Scheme: TypeAlias = Literal["s3", "gs", "as", "https", "pvc", "path"]
MAX_NAME_CHARACTERS = 50  # what Kubernetes and KServe add to it stays within 63
CREDENTIALS = {  # environment variables that Triton reads them from
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"),
    "as": ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"),
}
_URL = re.compile(r"(s3|gs|as|https)://[^\s/]\S*")
_CLAIM = re.compile(r"pvc://([a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)(?:/(.*))?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,48}[a-z0-9])?")


@dataclass(frozen=True)
class ModelRepository:
    """A model repository of production.

    ``text`` is the user's text, with an absolute path for a folder. ``claim`` and ``path`` are the parts of
    ``pvc://CLAIM/PATH``.
    """

    text: str
    scheme: Scheme
    claim: str = ""
    path: str = ""

    @property
    def is_mounted(self) -> bool:
        """Return True if the server sees the repository as a folder; otherwise Triton reads from cloud storage."""
        return self.scheme in ("pvc", "path")


MODELS = "/models"
LIVE, READY = "/v2/health/live", "/v2/health/ready"
MEMORY_HEADROOM = 1.5  # times the measured memory: production may get larger or more concurrent requests
MEMORY_STEP = 64 << 20
MIN_START_SECONDS = 300  # allows for GPU initialisation and for a model that is copied over the network
LOADS_ALLOWED = 10  # times the measured load time
PROBE_SECONDS = 5
STOP_SECONDS = 60  # until a server that stops is killed: Triton itself waits 30 s for requests in flight


@dataclass(frozen=True)
class ProductionServer:
    """A server that serves a recommendation in production, with the settings of the user.

    A replica is a server; several server processes on one device are several replicas. ``target_utilization`` is the
    share of the measured load that a replica should get on average. ``autoscaled_by``
    selects the metric of the autoscaler: the requests of a replica, or its CPU time.
    """

    recommendation: Recommendation
    image: str
    repository: ModelRepository
    name: str
    service_account: str = ""
    min_replicas: int = autoscaling.DEFAULT_MIN_REPLICAS
    max_replicas: int = autoscaling.DEFAULT_MAX_REPLICAS
    target_utilization: float = autoscaling.DEFAULT_UTILIZATION
    autoscaled_by: Literal["requests", "cpu"] = "requests"

    @property
    def is_autoscaled(self) -> bool:
        return self.max_replicas > self.min_replicas

    @property
    def gpus(self) -> int:
        """The number of GPUs of a replica; several server processes share those of the measured device."""
        return self.recommendation.gpus

    @property
    def cpus(self) -> float | None:
        """The CPUs of a replica: its part of the measured server processes' CPUs; None if they are unknown."""
        cpus = self.recommendation.cpus
        return None if cpus is None else cpus / self.recommendation.server_processes

    @property
    def memory_bytes(self) -> int | None:
        """The limit of a replica's memory: the measured one with MEMORY_HEADROOM; None if it was not measured."""
        memory = self.recommendation.memory_bytes
        if memory is None:
            return None
        return ceil(memory / self.recommendation.server_processes * MEMORY_HEADROOM / MEMORY_STEP) * MEMORY_STEP

    @property
    def shared_memory_bytes(self) -> int:
        """The size of /dev/shm. It counts against the memory, and the measured memory includes the part in use."""
        return int(min(self.recommendation.shared_memory_bytes, self.memory_bytes or inf))

    def arguments(self) -> list[str]:
        """Return the options of tritonserver except the model repository."""
        return [*self.recommendation.arguments, *self.recommendation.affordable_quantiles]

    def command(self) -> list[str]:
        """Return the command line of tritonserver, on its default ports."""
        repository = MODELS if self.repository.is_mounted else self.repository.text
        return ["tritonserver", f"--model-repository={repository}", *self.arguments()]

    def start_seconds(self) -> int:
        """Return how long a server may take to start before it counts as failed."""
        return max(MIN_START_SECONDS, ceil(LOADS_ALLOWED * (self.recommendation.load_seconds or 0)))


def read_repository(text: str) -> ModelRepository:
    """Parse ``--model-repository``. Raises BadInputError."""
    if not text or not text.isprintable() or len(text) > 2000:
        raise _repository_error(text, "give a folder, pvc://CLAIM, s3://BUCKET/PATH or gs://BUCKET/PATH")
    if text.startswith("pvc:"):
        claim = _CLAIM.fullmatch(text)
        path = (claim[2] or "").strip("/") if claim else ""
        if claim is None or ".." in path.split("/"):
            raise _repository_error(
                text, "write pvc://CLAIM or pvc://CLAIM/PATH, with the name of the claim in lower case"
            )
        return ModelRepository(text, "pvc", claim[1], path)
    if url := _URL.fullmatch(text):
        scheme: Scheme = url[1]  # type: ignore[assignment]
        return ModelRepository(text, scheme)
    if "://" in text:
        raise _repository_error(
            text, "write s3://BUCKET/PATH, gs://BUCKET/PATH, as://ACCOUNT/PATH, pvc://CLAIM or a folder"
        )
    if any(mark in text for mark in ':,"'):
        raise _repository_error(
            text, "a container engine cannot mount a folder with a colon, comma or quote in its name"
        )
    return ModelRepository(str(expand_home(text).absolute()), "path")


def read_image(text: str) -> str:
    """Check the name of a container image. Raises BadInputError."""
    if not _IMAGE.fullmatch(text):
        raise BadInputError(f"--image {quote(text)}: write REPOSITORY:TAG or REPOSITORY@DIGEST")
    return text


def read_name(text: str, flag: str = "--name") -> str:
    """Check a name of a Kubernetes object. Raises BadInputError."""
    if not _NAME.fullmatch(text):
        raise BadInputError(
            f"{flag} {quote(text)}: write a lower-case letter, then lower-case letters, digits and dashes, at most "
            f"{MAX_NAME_CHARACTERS} together"
        )
    return text


def name_of(model: str) -> str:
    """Return a Kubernetes name for the service of ``model``: ``Tiny_Model v2`` gives ``tiny-model-v2``."""
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    name = words if words[:1].isalpha() else f"model-{words}"
    return name[:MAX_NAME_CHARACTERS].strip("-")


def numbered_names(recommendation: Recommendation) -> dict[str, str]:
    """Return a name for each config.pbtxt and model.json, by path. The number keeps similar names apart."""
    configs = {f"{model}/config.pbtxt": name_of(model) for model in recommendation.configs}
    names = configs | {path: name_of(path) for path in recommendation.files}
    return {path: f"{number}-{name}" for number, (path, name) in enumerate(names.items(), 1)}


def _repository_error(text: str, advice: str) -> BadInputError:
    return BadInputError(f"--model-repository {quote(text)}: {advice}")


MAX_LINE_CHARACTERS = 400


def header(recommendation: Recommendation, *more: str) -> list[str]:
    """Return the comment lines on top of a file, without comment marks; ``more`` are lines about the file itself."""
    return [one_line(line, MAX_LINE_CHARACTERS) for line in (*_about_run(recommendation), *more)]


def _about_run(recommendation: Recommendation) -> Iterator[str]:
    """Yield comment lines on the measurements of the run and on the steps before production."""
    run, load = recommendation.run, recommendation.point.load
    yield (
        f"{recommendation.model}, as tuned by tritune {metadata.version('tritune')}: run {run.name}, written "
        f"{run.info.get('written', '')}"
    )
    samples = (
        f"{formatting.exact(load.request_batch_size)} sample{'' if load.request_batch_size == 1 else 's'} a request"
    )
    memory = f", memory {formatting.size(recommendation.memory_bytes)}" if recommendation.memory_bytes else ""
    measured = formatting.performance(recommendation.point, recommendation.sla.judged_latency)
    yield f"measured: {measured} ({samples}){memory}"
    if run.problem.has_load_shape:
        yield f"load: {formatting.sending(load.request_rate, run.problem.request_times)}"
    gain = outcome_values.gain_over(recommendation.outcome, recommendation.outcome.baseline)
    yield f"gain over the current configuration: {gain}"
    yield f"bound: {formatting.bounds(recommendation.sla) or 'none'}"
    verdicts = (summary.verdict(recommendation.outcome), recommendation.separate_pass)
    yield f"verdict: {'; '.join(filter(None, verdicts))}"
    yield f"on: {_hardware(recommendation)}, Triton {recommendation.triton_version}"
    yield f"by: {run.info.get('command', '')}"
    if recommendation.server_processes > 1:
        yield (
            f"server processes: {recommendation.server_processes} servers with this configuration share the device, "
            "the CPUs and the load; send each request to the one with the fewest unanswered requests, for example "
            "with Envoy's LEAST_REQUEST or nginx's least_conn"
        )
    if run.options.target == "embedded":
        yield (
            "NOTE: measured on tune's embedded server; the backends of NVIDIA's image differ in speed and memory, so "
            "measure there before you rely on limits and replicas: `tune verify --fresh --target docker` (or local, "
            "remote)"
        )
        served = f"`tune serve {shlex.quote(str(run.folder.path))}`"
        yield f"without Docker: {served} starts the measured server on the machine of the run"
    if run.concurrent_models:
        yield f"NOTE: {SeveralModelsLoaded(recommendation.model, tuple(run.concurrent_models.items()))}"
    if recommendation.unread_settings:
        yield f"NOTE: {SettingsUnread(recommendation.unread_settings)}"
    if recommendation.is_undecided:
        command = run.step_if_undecided.command
        yield f"WARNING: the verdict is UNDECIDED: run `{command}` before you use this in production"


def _hardware(recommendation: Recommendation) -> str:
    """Return the GPUs and the CPUs of the measured server as text."""
    run = recommendation.run
    if run.options.target == "remote":
        return "another machine"
    gpu_names = run.gpus if recommendation.gpus else ()
    hardware = run.info["hardware"]
    return " · ".join([*gpu_names, f"{hardware['cpu']}, {hardware['cpu_count']} CPUs"])


def deployment_header(server: ProductionServer, *more: str, mounts_configs: bool = True) -> list[str]:
    """Return the header with lines on the remaining steps and the origin of the resource limits.

    ``mounts_configs``: the format mounts its own config.pbtxt files into a mounted repository.
    """
    before = f"before: {_preparation(server, mounts_configs=mounts_configs)}"
    return [*header(server.recommendation, before, *_about_server(server)), *more]


def _about_server(server: ProductionServer) -> Iterator[str]:
    """Yield comment lines on the requirements of the server and on the origin of its resource limits."""
    recommendation, names = server.recommendation, ", ".join(server.recommendation.configs)
    is_strict = "--disable-auto-complete-config" in recommendation.arguments
    incomplete = ", such as one whose config.pbtxt is not complete" if is_strict else ""
    yield (
        f"models: the server loads all models of the repository and ends if one cannot be loaded{incomplete}; give "
        f"it a repository with only {names}"
    )
    image = "" if server.image else "that of KServe's runtime, unless `tune emit --image` names another; it "
    yield (
        f"image: {image}needs the measured Triton {recommendation.triton_version} or newer, and the backends of the "
        "models"
    )
    if recommendation.memory_bytes is None:
        yield "memory: not measured, so no limit is set"
    else:
        yield f"memory limit: {MEMORY_HEADROOM:g} times the measured memory, with the shared memory (/dev/shm)"
    options = " ".join(recommendation.quantiles)
    if recommendation.affordable_quantiles:
        yield (
            f"metrics: {options} lets `tune watch` compare the time in the server with the bound; the measured "
            f"server ran without it, and it takes {QUANTILE_COST}"
        )
    elif recommendation.quantiles:
        yield (
            f"metrics: without {options}, so that `tune watch` cannot compare the time in the server with the bound: "
            f"at this rate it would reduce the throughput ({QUANTILE_COST})"
        )
    if recommendation.cpus is None:
        yield "CPUs: the server ran on another machine, so no limit is set"
    if recommendation.is_stateful:
        yield (
            "WARNING: all steps of a sequence must reach the same server, which keeps its state; a proxy in front of "
            "several servers must send all requests of a client, or of a sequence, to one of them"
        )


def _preparation(server: ProductionServer, *, mounts_configs: bool) -> str:
    """Return how to prepare the model repository before the server starts."""
    recommendation, repository = server.recommendation, server.repository.text
    names = ", ".join(recommendation.configs)
    files = "config.pbtxt and model.json" if recommendation.files else "config.pbtxt"
    if mounts_configs and server.repository.is_mounted:
        return (
            f"{repository} contains {names}; the {files} given here is mounted over the one of each model, which "
            "must exist there (it may be empty)"
        )
    command = ["tune", "emit", str(recommendation.run.folder.path), "--format", "pbtxt"]
    command += ["--model-warmup"] * recommendation.warms_up + ["--force"] * recommendation.is_undecided
    is_single = len(recommendation.configs) == 1
    folder = f"{repository.rstrip('/')}/{recommendation.model}" if is_single else repository
    return f"copy the {files} of {names} from `{shlex.join(command)}` into {folder}"


def cpu_amount(cpus: float) -> int | float:
    """Return a number of CPUs as container engines and Kubernetes take it: 4, or 1.5."""
    return int(cpus) if cpus == int(cpus) else round(cpus, 3)


def commented(lines: Iterable[str]) -> str:
    """Return ``lines`` as comment lines of a shell, YAML or config.pbtxt file."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_YAML_KEYWORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """Writes strings in quotes unless no YAML version reads them as another type, long ones as blocks, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN_TEXT.fullmatch(text) and text.lower() not in _YAML_KEYWORDS
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(*documents: Any, header: Iterable[str] = ()) -> str:
    """Return ``documents`` as YAML, with keys in their order, below ``header`` as comment lines."""
    texts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, default_flow_style=False)
        for document in documents
    ]
    return commented(header) + "---\n".join(texts)
