"""``tune emit``: write the recommendation of a run as files for production."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from optimizer.cli.commands import add_run
from optimizer.cli.output import check_decided
from optimizer.core.errors import BadInputError
from optimizer.core.files import output_error, replace_file
from optimizer.core.safe_text import exists, quote, show_path
from optimizer.options.command_line import Parser, add_results, value_of
from optimizer.results.autoscaling import SCALING_FLAGS, add_scaling_limits, read_scaling_limits

if TYPE_CHECKING:
    from optimizer.emit.production import ModelRepository, ProductionServer
    from optimizer.emit.recommended import Recommendation


@dataclass(frozen=True, slots=True)
class EmitFormat:
    """A format of ``--format``; ``_files`` calls its emitter.

    Attributes:
        files: The files that it writes, for the help.
        options: The options that it takes in addition to those of every format.
        schemes: The places of a model repository that its server can read; empty for a format without a server.
        needs_image: Whether the image of its server must be known.
    """

    files: str
    options: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    needs_image: bool = True


_BUCKETS = ("s3", "gs", "as")
_SERVER_OPTIONS = ("--image", "--model-repository", "--name")
_CLUSTER_OPTIONS = (*_SERVER_OPTIONS, "--service-account", *SCALING_FLAGS)
FORMATS = {
    "pbtxt": EmitFormat("config.pbtxt of each model, and model.json if the run changed it"),
    "per-device": EmitFormat(
        "MODEL/configs/DEVICE.pbtxt for each RUN, for tritonserver --model-config-name=DEVICE", ("--device",)
    ),
    "docker": EmitFormat("run.sh, which calls `docker run`", _SERVER_OPTIONS, ("path", *_BUCKETS)),
    "compose": EmitFormat("compose.yaml", _SERVER_OPTIONS, ("path", *_BUCKETS)),
    "kubernetes": EmitFormat(
        "ConfigMap, Deployment, Service, HorizontalPodAutoscaler",
        (*_CLUSTER_OPTIONS, "--autoscale-on"),
        ("pvc", *_BUCKETS),
    ),
    "helm-values": EmitFormat("values.yaml and its chart", (*_CLUSTER_OPTIONS, "--autoscale-on"), ("pvc", *_BUCKETS)),
    "kserve": EmitFormat("InferenceService", _CLUSTER_OPTIONS, ("pvc", "s3", "gs", "https"), needs_image=False),
}
FORMAT_OPTIONS = tuple(dict.fromkeys(option for each in FORMATS.values() for option in each.options))
SCHEME_NAMES = {"path": "a folder", "pvc": "pvc://CLAIM/PATH"}
_EPILOG = """\
formats:
{formats}

exit codes: 0 done, 2 bad input, such as a run that has not ended, or an
UNDECIDED one without --force

examples:
  tune emit results/dlrm/20261120-231154 > config.pbtxt
  tune emit results/dlrm/20261120-231154 --format kubernetes --image IMAGE \\
      --model-repository pvc://models
  tune emit results/dlrm/on-a10 results/dlrm/on-h100 --format per-device \\
      --out models
"""


def _epilog() -> str:
    """Return the text below the options in the help: the formats with their files, and examples."""
    lines = (
        textwrap.fill(
            each.files, 80, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15, break_on_hyphens=False
        )
        for name, each in FORMATS.items()
    )
    return _EPILOG.format(formats="\n".join(lines))


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune emit",
        usage="[options] RUN [RUN ...]",
        description="Write the recommendation of a run as files for production.",
        epilog=_epilog(),
    )
    add_run(parser, "runs", nargs="+")
    add = parser.add_argument
    add("--format", choices=FORMATS, default="pbtxt", metavar="FORMAT", help="Format, see below (default: pbtxt)")
    add(
        "--out",
        metavar="DIR",
        help="Folder to write the files to (default: a single file is printed on standard output)",
    )
    add("--force", action="store_true", help="Emit also an UNDECIDED recommendation, and overwrite existing files")
    add(
        "--model-warmup",
        action="store_true",
        help="Let the models run their preferred batch sizes once before they are ready",
    )
    add(
        "--device",
        action="append",
        metavar="NAME",
        help="Device name of each RUN, in their order (default: from its hardware)",
    )
    add("--image", help="Server image (default: that of a run with --target docker; kserve: that of the runtime)")
    add(
        "--model-repository",
        metavar="URL",
        help="Model repository in production: FOLDER, s3://…, gs://…, as://…, pvc://CLAIM/PATH",
    )
    add("--name", help="Name of the service (default: from the model's name)")
    add("--service-account", metavar="NAME", help="Service account of the pods, for example to read a bucket")
    add_scaling_limits(parser, maximum_note="; equal to the minimum: no autoscaling")
    add(
        "--autoscale-on",
        choices=("requests", "cpu"),
        metavar="METRIC",
        help="requests: the measured load, through prometheus-adapter; cpu: CPU time, which needs no adapter "
        "(default: requests)",
    )
    add_results(parser)
    return parser


def read_emit_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises BadInputError naming the flag, its value and the allowed values."""
    arguments = build_parser().read(argv)
    if arguments.format != "per-device" and len(arguments.runs) > 1:
        raise BadInputError(f"--format {arguments.format} takes one run; only --format per-device takes several")
    for flag in FORMAT_OPTIONS:
        if value_of(arguments, flag) is not None and flag not in FORMATS[arguments.format].options:
            raise BadInputError(f"{flag}: --format {arguments.format} does not use it; leave it out")
    devices: list[str] = arguments.device or []
    for device in devices:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}", device):
            raise BadInputError(f"--device {quote(device)}: write letters, digits and dashes, such as h100")
    if devices and len(devices) != len(arguments.runs):
        raise BadInputError(f"--device: give one for each of the {len(arguments.runs)} runs, in their order")
    return arguments


def production_server(arguments: argparse.Namespace, recommendation: Recommendation) -> ProductionServer:
    """Return the server that serves a recommendation in production. Raises BadInputError."""
    from optimizer.emit.production import ProductionServer, name_of, read_image, read_name

    given_image = recommendation.run.options.docker_image if arguments.image is None else arguments.image
    image = "" if given_image is None else read_image(given_image)
    missing = []
    if not image and FORMATS[arguments.format].needs_image:
        triton = f"Triton {recommendation.triton_version}, the measured version, or newer"
        missing.append(f"--image is missing; give an image of NVIDIA with {triton}")
    if arguments.model_repository is None:
        missing.append(f"--model-repository is missing; give {_repository_places(arguments)}")
    if missing:
        raise BadInputError(f"--format {arguments.format}: {'; '.join(missing)}")
    limits = read_scaling_limits(arguments)
    metric: Literal["requests", "cpu"] = arguments.autoscale_on or "requests"
    if metric == "cpu" and (recommendation.gpus or recommendation.cpus is None):
        reason = "the model runs on a GPU" if recommendation.gpus else "the number of the server's CPUs is unknown"
        raise BadInputError(f"--autoscale-on cpu: {reason}; leave it out to scale on requests")
    account, processes = arguments.service_account, recommendation.server_processes
    return ProductionServer(
        recommendation,
        image=image,
        repository=_read_repository(arguments),
        name=name_of(recommendation.model) if arguments.name is None else read_name(arguments.name),
        service_account="" if account is None else read_name(account, "--service-account"),
        min_replicas=limits.min_replicas * processes,
        max_replicas=limits.max_replicas * processes,
        target_utilization=limits.target_utilization,
        autoscaled_by=metric,
    )


def _read_repository(arguments: argparse.Namespace) -> ModelRepository:
    """Return the model repository of production. Raises BadInputError if the format cannot refer to it."""
    from optimizer.emit.production import read_repository

    repository = read_repository(arguments.model_repository)
    if repository.scheme not in FORMATS[arguments.format].schemes:
        raise BadInputError(
            f"--model-repository {quote(arguments.model_repository)}: "
            f"{arguments.format} cannot read models from there; give one of {_repository_places(arguments)}"
        )
    return repository


def _repository_places(arguments: argparse.Namespace) -> str:
    return ", ".join(SCHEME_NAMES.get(scheme, f"{scheme}://…") for scheme in FORMATS[arguments.format].schemes)


def main(argv: list[str]) -> int:
    """Run ``tune emit`` and return its exit code. Raises BadInputError."""
    arguments = read_emit_arguments(argv)
    from optimizer.emit.pbtxt import with_warm_up
    from optimizer.emit.recommended import read_recommendation
    from optimizer.results.finished_run import read_run

    recommendations = [read_recommendation(read_run(run, arguments.results)) for run in arguments.runs]
    for recommendation in recommendations:
        check_decided(recommendation, "emits", force=arguments.force)
    if arguments.model_warmup:
        recommendations = [with_warm_up(recommendation) for recommendation in recommendations]
    files = _files(arguments, recommendations)
    if arguments.out is None and len(files) > 1:
        raise BadInputError(f"--format {arguments.format} writes {len(files)} files here: give --out DIR")
    if arguments.out is None:
        print(*files.values(), end="")
    else:
        _write(Path(arguments.out), files, force=arguments.force)
    return 0


def _files(arguments: argparse.Namespace, recommendations: list[Recommendation]) -> dict[str, str]:
    from optimizer.emit import docker, kubernetes, pbtxt

    if arguments.format == "per-device":
        return pbtxt.emit_per_device(recommendations, arguments.device or [])
    (recommendation,) = recommendations
    if arguments.format == "pbtxt":
        return pbtxt.emit_pbtxt(recommendation)
    emitters: Mapping[str, Callable[[ProductionServer], dict[str, str]]] = {
        "docker": docker.emit_docker,
        "compose": docker.emit_compose,
        "kubernetes": kubernetes.emit_kubernetes,
        "helm-values": kubernetes.emit_values,
        "kserve": kubernetes.emit_kserve,
    }
    files = emitters[arguments.format](production_server(arguments, recommendation))
    with_chart = arguments.format == "helm-values" and arguments.out is not None
    return {**files, **kubernetes.chart()} if with_chart else files


def _write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Write all files, or none if one exists and ``force`` is not set.

    After a full disk each file has its old content, the new one, or does not exist. A server would load an empty
    config.pbtxt.
    """
    existing = [name for name in files if exists(folder / name)]
    if existing and not force:
        raise BadInputError(f"{show_path(folder / existing[0])} exists; give another --out, or --force")
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
            if text.startswith("#!"):
                path.chmod(0o755)
        except OSError as error:
            raise output_error(path, error) from None
        print(show_path(path))
