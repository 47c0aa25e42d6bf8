"""The interface of a builder of a reference model, and the cache folder that holds the built models."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from google.protobuf import text_format
from pydantic import BaseModel, ConfigDict, Field

from optimizer.config import model_config
from optimizer.config.model_config_proto import DataType, ModelConfig, ModelInstanceGroup
from optimizer.config.model_source import ModelSource
from optimizer.core.files import cache_error
from optimizer.core.locks import file_lock
from optimizer.core.safe_text import one_line
from optimizer.model.input_data import TensorSpec

ModelFacts: TypeAlias = dict[str, str | int | float]
InstanceKind: TypeAlias = Literal["KIND_CPU", "KIND_GPU"]
Samples: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]  # entries of request data


class BuilderSettings(BaseModel):
    """Base of every builder's settings: immutable and strictly typed; unknown keys are refused.

    ``seed`` determines the weights and the request data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    seed: int = Field(default=0, ge=0)

    def generators(self, count: int) -> list[np.random.Generator]:
        """Return ``count`` independent random generators that follow from the seed."""
        return [np.random.default_rng(child) for child in np.random.SeedSequence(self.seed).spawn(count)]


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs and outputs of a model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The Triton repository of a model that is being built; the model's version folder exists already.

    ``on_progress`` receives progress lines.
    """

    repository: Path
    name: str
    on_progress: Callable[[str], None]

    @property
    def version(self) -> Path:
        """The version folder, for ``model.onnx`` and its weight files."""
        return self.repository / self.name / "1"

    @property
    def input_data(self) -> Path:
        """The file for request data in perf_analyzer's JSON; without it, requests are random."""
        return self.repository / "input_data.json"

    def copy_model(self, file: str) -> None:
        """Copy ``file`` of ``python_models`` as the model.py of the version."""
        shutil.copyfile(Path(__file__).parent / "python_models" / file, self.version / "model.py")

    def sibling(self, name: str) -> Draft:
        """Add another model to the repository, such as a step of an ensemble."""
        draft = Draft(self.repository, name, self.on_progress)
        draft.version.mkdir(parents=True)
        return draft


@dataclass(frozen=True, slots=True)
class Builder:
    """One kind of reference model.

    ``version`` is increased whenever the same settings produce other files than before. ``source`` names the
    document that the model comes from. ``interface`` derives inputs and outputs from the settings alone. ``write``
    puts ``model.onnx`` and optional request data into a draft and returns the facts that are recorded with every
    result; caching, hashing and config.pbtxt are not its task. ``configs`` returns the configurations of a repository
    with several models (an ensemble and its steps) for a max_batch_size and a kind of instances; without it the
    repository holds one ONNX model.
    """

    name: str
    version: int
    source: str
    settings: type[BuilderSettings]
    interface: Callable[[Any], Interface]
    write: Callable[[Any, Draft], ModelFacts]
    configs: Callable[[int, InstanceKind], Sequence[ModelConfig]] | None = None

    def parse(self, values: Mapping[str, object]) -> BuilderSettings:
        """Return the validated settings. Raises pydantic's ValidationError."""
        return self.settings.model_validate(dict(values))

    def model_configs(
        self, settings: BuilderSettings, max_batch_size: int, kind: InstanceKind
    ) -> Sequence[ModelConfig]:
        """Return the configuration of each model in the builder's repository."""
        if self.configs is not None:
            return self.configs(max_batch_size, kind)
        return [onnx_config(self.name, self.interface(settings), max_batch_size, kind)]


def onnx_config(name: str, interface: Interface, max_batch_size: int, kind: InstanceKind) -> ModelConfig:
    """Return the configuration of an ONNX model with one instance (one per GPU for KIND_GPU), without batching."""
    config = ModelConfig(name=name, platform="onnxruntime_onnx", max_batch_size=max_batch_size)
    return with_instance(with_tensors(config, interface), kind)


def python_config(name: str, interface: Interface, max_batch_size: int) -> ModelConfig:
    """Return the configuration of a Python model with one instance, which is on the CPU."""
    config = ModelConfig(name=name, backend="python", max_batch_size=max_batch_size)
    return with_instance(with_tensors(config, interface), "KIND_CPU")


def inputs_of_config(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return the inputs that a configuration declares, with printable names."""
    return tuple(
        TensorSpec(one_line(tensor.name), DataType.Name(tensor.data_type).removeprefix("TYPE_"), tuple(tensor.dims))
        for tensor in config.input
    )


def with_tensors(config: ModelConfig, interface: Interface) -> ModelConfig:
    """Add inputs and outputs to ``config`` and return it."""
    for tensors, fields in ((interface.inputs, config.input), (interface.outputs, config.output)):
        for tensor in tensors:
            fields.add(name=tensor.name, data_type=DataType.Value(f"TYPE_{tensor.datatype}"), dims=tensor.dims)
    return config


def with_instance(config: ModelConfig, kind: InstanceKind) -> ModelConfig:
    """Add one instance of this kind to ``config`` and return it."""
    config.instance_group.add(count=1, kind=ModelInstanceGroup.Kind.Value(kind))
    return config


CONFIG_FILE, BUILT_FILE = "config.pbtxt", "built.json"
_NOT_SHARED = (CONFIG_FILE, BUILT_FILE)  # they differ between models of the same weights


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model that ``builder`` builds. ``max_batch_size`` and the ``kind`` of its instances are in config.pbtxt."""

    builder: Builder
    settings: BuilderSettings
    max_batch_size: int
    kind: InstanceKind

    def find_or_build(self, cache: Path, on_progress: Callable[[str], None]) -> ModelSource:
        """Return the model from the cache; build it first if it is missing or damaged.

        Raises EnvironmentFault if the cache cannot be written (full disk, no permission).
        """
        name, models, weights = self.builder.name, cache / "models", self._weights_name()
        folder = models / f"{weights}-{self.kind.removeprefix('KIND_').lower()}-{self.max_batch_size}"
        waiting = f"waiting: another process is building {name}"
        try:
            models.mkdir(parents=True, exist_ok=True)
            if not _is_intact(folder):
                with file_lock(models / f".{weights}.lock", lambda _: on_progress(waiting)):
                    if not _is_intact(folder):  # the process that held the lock may have built it
                        self._build_at(folder, on_progress)
        except OSError as error:
            raise cache_error(f"build {name} in {models}", error) from error
        return _source(folder, name)

    def _weights_name(self) -> str:
        """Return a name that models have in common whose files differ only in config.pbtxt."""
        identity = [self.builder.name, self.builder.version, self.settings.model_dump(mode="json")]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return f"{self.builder.name}-{digest[:16]}"

    def _build_at(self, folder: Path, on_progress: Callable[[str], None]) -> None:
        """Build the model at ``folder``, replacing a damaged one. The caller holds the lock."""
        draft, retired = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
        for leftover in (draft, retired):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            same_weights = sorted(folder.parent.glob(f"{self._weights_name()}-*"))
            built_variant = next(filter(_is_intact, same_weights), None)
            if built_variant:  # another max_batch_size or kind of instances: only config.pbtxt differs
                ignore = shutil.ignore_patterns(*_NOT_SHARED)
                shutil.copytree(built_variant, draft, copy_function=_link, ignore=ignore)
                facts = _read_facts(built_variant)
            else:
                facts = _write(self.builder, self.settings, Draft(draft, self.builder.name, on_progress))
            for config in self.builder.model_configs(self.settings, self.max_batch_size, self.kind):
                text = text_format.MessageToString(config)
                draft.joinpath(config.name, CONFIG_FILE).write_text(text, encoding="utf-8")
            built = {"files": _sizes(draft), "facts": facts}
            (draft / BUILT_FILE).write_text(json.dumps(built, indent=2) + "\n", encoding="utf-8")
            if folder.exists():
                folder.rename(retired)  # not deleted in place: a server may be reading it
            draft.rename(folder)
        finally:
            for leftover in (draft, retired):
                shutil.rmtree(leftover, ignore_errors=True)


def _write(builder: Builder, settings: BuilderSettings, draft: Draft) -> ModelFacts:
    draft.version.mkdir(parents=True)
    facts = builder.write(settings, draft)
    files = sorted(p for p in draft.repository.glob("*/1/**/*") if p.is_file())
    return {
        "builder": f"{builder.name} v{builder.version}",
        **facts,
        "seed": settings.seed,
        "model_bytes": sum(p.stat().st_size for p in files),
        "sha256": _content_hash(draft, files),
    }


def _content_hash(draft: Draft, files: list[Path]) -> str:
    """Return the SHA-256 of what ``sha256sum`` prints for the files: ``<sha256>  <path>``, sorted by path.

    Paths are relative to the model's version folder, or to the repository for files of an ensemble's other models.
    """
    listing = hashlib.sha256()
    for path in files:
        folder = draft.version if path.is_relative_to(draft.version) else draft.repository
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        listing.update(f"{digest}  {path.relative_to(folder).as_posix()}\n".encode())
    return listing.hexdigest()


def _is_intact(folder: Path) -> bool:
    """Return whether built.json exists and each file that it lists has the recorded size.

    File contents are not read again. Additional files, such as a server's own cache, are ignored.
    """
    try:
        built = json.loads((folder / BUILT_FILE).read_text(encoding="utf-8"))
        files = built["files"].items()
        return isinstance(built["facts"], dict) and all((folder / p).stat().st_size == n for p, n in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != BUILT_FILE
    }


def _source(folder: Path, name: str) -> ModelSource:
    input_data = folder / "input_data.json"
    return ModelSource(
        repository=folder,
        name=name,
        config=model_config.read(folder / name / CONFIG_FILE),
        input_data=input_data if input_data.exists() else None,
        facts=_read_facts(folder),
    )


def _read_facts(folder: Path) -> ModelFacts:
    facts: ModelFacts = json.loads((folder / BUILT_FILE).read_text(encoding="utf-8"))["facts"]
    return facts


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
