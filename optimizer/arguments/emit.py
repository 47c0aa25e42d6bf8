"""``tune emit``: its options, and what they say of production."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Literal

from optimizer.arguments.values import Parser, shown, whole
from optimizer.errors import BadInputError

if TYPE_CHECKING:
    from optimizer.emitting.serving import ModelRepository, Serving
    from optimizer.emitting.winner import Winner

FORMATS = ("pbtxt", "per-device", "docker", "compose", "helm-values", "kserve", "kubernetes")
ENGINE, CLUSTER = ("docker", "compose"), ("kubernetes", "helm-values", "kserve")
TAKEN = {  # options that not every format has a place for
    "--warm-up": FORMATS,
    "--device": ("per-device",),
    "--image": (*ENGINE, *CLUSTER),
    "--model-repository": (*ENGINE, *CLUSTER),
    "--name": (*ENGINE, *CLUSTER),
    "--service-account": CLUSTER,
    "--min-replicas": CLUSTER,
    "--max-replicas": CLUSTER,
    "--target-utilization": CLUSTER,
    "--autoscale-on": ("kubernetes", "helm-values"),
}
SCHEMES = {  # where each format's server can read models from
    **dict.fromkeys(ENGINE, ("path", "s3", "gs", "as")),
    **dict.fromkeys(("kubernetes", "helm-values"), ("pvc", "s3", "gs", "as")),
    "kserve": ("pvc", "s3", "gs", "https"),
}
SPELLED = {"path": "a folder", "pvc": "pvc://CLAIM/PATH"}
MOST_REPLICAS = 10_000
EPILOG = """\
formats:
  pbtxt        config.pbtxt, of each model
  per-device   MODEL/configs/DEVICE.pbtxt of each RUN, for tritonserver
               --model-config-name=DEVICE
  docker       run.sh, with `docker run`
  compose      compose.yaml
  kubernetes   ConfigMap, Deployment, Service, HorizontalPodAutoscaler
  helm-values  values.yaml and the chart that it is for
  kserve       InferenceService

exit codes: 0 done, 2 bad input, such as a run that has not ended

examples:
  tune emit results/dlrm/20261120-231154 > config.pbtxt
  tune emit results/dlrm/20261120-231154 --format kubernetes --image IMAGE \\
      --model-repository pvc://models
  tune emit results/dlrm/on-a10 results/dlrm/on-h100 --format per-device \\
      --output models
"""


def read_emit_arguments(words: list[str]) -> argparse.Namespace:
    """``runs``, ``format``, ``output`` and the rest by their flags. Raises BadInputError."""
    parser = Parser(
        prog="tune emit",
        usage="tune emit [options] RUN",
        description="What a run recommends, as files that production takes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.page = "tune emit --help"
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="the folder of a run, such as results/dlrm/20261120-231154")
    add("--format", choices=FORMATS, default="pbtxt", metavar="FORMAT", help="see below (pbtxt)")
    add("--output", metavar="DIR", help="write the files there; without it the only one goes to standard output")
    add("--force", action="store_true", help="write over files that are there")
    add("--warm-up", action="store_true", help="models run the batches that they aim at before they are ready")
    add("--device", action="append", metavar="NAME", help="of each RUN in turn (made from its hardware)")
    add("--image", help="tritonserver's (that of the run with --target docker; kserve: the runtime's own)")
    add(
        "--model-repository",
        metavar="WHERE",
        help="where production has the models: FOLDER, s3://…, gs://…, as://…, pvc://CLAIM/PATH",
    )
    add("--name", help="of the service (made from the model's)")
    add("--service-account", metavar="NAME", help="which the pods run as, to read a bucket for instance")
    add("--min-replicas", metavar="N", help="(1)")
    add("--max-replicas", metavar="N", help="(10); the same as the least: none are added or taken away")
    add(
        "--target-utilization",
        metavar="PERCENT",
        help="share of the load it was measured at that a replica is to get (70%%)",
    )
    add(
        "--autoscale-on",
        choices=("requests", "cpu"),
        metavar="WHAT",
        help="requests: what was measured, through prometheus-adapter; cpu: CPU time, without it (requests)",
    )
    add("--out", default="results", metavar="DIR", help="folder in which RUN may lie (results)")
    given = parser.parse_args(words)
    if given.format != "per-device" and len(given.runs) > 1:
        raise BadInputError(f"--format {given.format} is of one run; several are for --format per-device")
    for flag, formats in TAKEN.items():
        if getattr(given, flag[2:].replace("-", "_")) and given.format not in formats:
            raise BadInputError(f"{flag}: --format {given.format} has no place for it; leave it out")
    devices: list[str] = given.device or []
    for device in devices:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}", device):
            raise BadInputError(f"--device {shown(device)}: write letters, digits and dashes, such as h100")
    if devices and len(devices) != len(given.runs):
        raise BadInputError(f"--device: give one for each run, {len(given.runs)} in their order")
    return given


def serving_of(given: argparse.Namespace, winner: Winner) -> Serving:
    """What production has for ``winner``. Raises BadInputError."""
    from optimizer.emitting.serving import Serving, name_of, read_image, read_name

    image = given.image or winner.image or ""
    if not image and given.format != "kserve":
        raise BadInputError(
            f"--format {given.format}: which image? give --image, one of NVIDIA's with Triton {winner.triton}, which "
            "was measured, or newer"
        )
    least = whole("--min-replicas", given.min_replicas or "1", 1, MOST_REPLICAS)
    on: Literal["requests", "cpu"] = given.autoscale_on or "requests"
    if on == "cpu" and (winner.gpus or winner.cpus is None):
        why = "the model runs on a GPU" if winner.gpus else "how many CPUs the server had is not known"
        raise BadInputError(f"--autoscale-on cpu: {why}; leave it out: requests are what was measured")
    return Serving(
        image=read_image(image) if image else "",
        repository=_repository(given),
        name=read_name(given.name) if given.name else name_of(winner.model),
        service_account=read_name(given.service_account, "--service-account") if given.service_account else "",
        min_replicas=least,
        max_replicas=whole("--max-replicas", given.max_replicas or str(max(10, least)), least, MOST_REPLICAS),
        target_utilization=_share(given.target_utilization or "70%"),
        autoscaled_by=on,
    )


def _repository(given: argparse.Namespace) -> ModelRepository:
    from optimizer.emitting.serving import read_repository

    schemes = SCHEMES[given.format]
    places = ", ".join(SPELLED.get(scheme, f"{scheme}://…") for scheme in schemes)
    if given.model_repository is None:
        raise BadInputError(f"--format {given.format}: where are the models? give --model-repository: {places}")
    found = read_repository(given.model_repository)
    if found.scheme not in schemes:
        raise BadInputError(
            f"--model-repository {shown(given.model_repository)}: {given.format} cannot read models from there; "
            f"give one of {places}"
        )
    return found


def _share(text: str) -> float:
    return whole("--target-utilization", text.removesuffix("%"), 1, 100) / 100
