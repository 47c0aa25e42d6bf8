"""What production has: the image, where the models are, how many replicas. What the user says, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from optimizer.arguments.values import shown
from optimizer.errors import BadInputError

Scheme: TypeAlias = Literal["s3", "gs", "as", "https", "pvc", "path"]
LONGEST_NAME = 50  # what Kubernetes and KServe add to it stays within 63
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
    """``text`` as given, a path made absolute. ``claim`` and ``path`` are those of ``pvc://claim/path``."""

    text: str
    scheme: Scheme
    claim: str = ""
    path: str = ""

    @property
    def is_mounted(self) -> bool:
        """Whether the server sees it as a folder; else it reads from the storage by itself."""
        return self.scheme in ("pvc", "path")


@dataclass(frozen=True)
class Serving:
    """``target_utilization``: the share of the measured load that a replica is to get on average.

    ``autoscaled_by``: the requests that a replica gets, or the CPU time that it takes.
    """

    image: str
    repository: ModelRepository
    name: str
    service_account: str = ""
    min_replicas: int = 1
    max_replicas: int = 10
    target_utilization: float = 0.7
    autoscaled_by: Literal["requests", "cpu"] = "requests"

    @property
    def is_autoscaled(self) -> bool:
        return self.max_replicas > self.min_replicas


def read_repository(text: str) -> ModelRepository:
    """Raises BadInputError."""
    if not text or not text.isprintable() or len(text) > 2000:
        raise _refused(text, "give a folder, pvc://CLAIM, s3://BUCKET/PATH or gs://BUCKET/PATH")
    if text.startswith("pvc:"):
        claim = _CLAIM.fullmatch(text)
        path = (claim[2] or "").strip("/") if claim else ""
        if claim is None or ".." in path.split("/"):
            raise _refused(text, "write pvc://CLAIM or pvc://CLAIM/PATH, with the claim's name in small letters")
        return ModelRepository(text, "pvc", claim[1], path)
    if url := _URL.fullmatch(text):
        scheme: Scheme = url[1]  # type: ignore[assignment]
        return ModelRepository(text, scheme)
    if "://" in text:
        raise _refused(text, "write s3://BUCKET/PATH, gs://BUCKET/PATH, as://ACCOUNT/PATH, pvc://CLAIM or a folder")
    if any(mark in text for mark in ':,"'):
        raise _refused(text, "a container engine cannot mount a folder with a colon, comma or quote in its name")
    return ModelRepository(str(Path(text).expanduser().absolute()), "path")


def read_image(text: str) -> str:
    """Raises BadInputError."""
    if not _IMAGE.fullmatch(text):
        raise BadInputError(f"--image {shown(text)}: write REPOSITORY:TAG or REPOSITORY@DIGEST")
    return text


def read_name(text: str, flag: str = "--name") -> str:
    """Raises BadInputError where Kubernetes would."""
    if not _NAME.fullmatch(text):
        raise BadInputError(
            f"{flag} {shown(text)}: write small letters, digits and dashes, at most {LONGEST_NAME}, a letter first"
        )
    return text


def name_of(model: str) -> str:
    """A name for what serves ``model``, such as Kubernetes takes: ``Tiny_Model v2`` -> ``tiny-model-v2``."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"model-{plain}"
    return named[:LONGEST_NAME].strip("-")


def _refused(text: str, mend: str) -> BadInputError:
    return BadInputError(f"--model-repository {shown(text)}: {mend}")
