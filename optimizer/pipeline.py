"""A model with those that it is made of, or that may take its place: ensembles, BLS, variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.errors import BadInputError
from optimizer.model_source import ModelSource
from optimizer.profile.yaml_lines import show
from optimizer.repository import is_ensemble, read_model_config, read_repository_model
from optimizer.untrusted import one_line

DEEPEST = 8  # ensembles in ensembles


def read_source(
    repository: Path,
    name: str,
    *,
    gpu: bool,
    composing: Sequence[str] = (),
    variants: Sequence[str] = (),
    batcher: str | None = None,
) -> ModelSource:
    """The model ``repository/name``, with the rest as ``assembled``. Raises BadInputError."""
    top = _read(repository, name, gpu)
    return assembled(top, gpu=gpu, composing=composing, variants=variants, batcher=batcher)


def assembled(
    top: ModelSource,
    *,
    gpu: bool,
    composing: Sequence[str] = (),
    variants: Sequence[str] = (),
    batcher: str | None = None,
) -> ModelSource:
    """``top`` with the models of its repository that it is made of: the steps of an ensemble, those that a model in
    Python calls (``composing``); or with those that may take its place.

    The space is about ``batcher``'s settings: without it about those of the largest model that batches. Raises
    BadInputError where one of them is not there, or they do not go together.
    """
    name, repository = top.name, top.repository
    parts: dict[str, ModelSource] = {}
    for step in (*_steps(top.config), *composing):
        _gather(repository, step, gpu, parts, path=(name,))
    if variants and parts:
        raise BadInputError(f"{name}: variants are of one model, and this one is made of {', '.join(parts)}")
    others = dict.fromkeys((name, *variants)) if variants else ()
    kinds = {other: top.config if other == name else _read(repository, other, gpu).config for other in others}
    for other, config in kinds.items():
        _check_variant(name, top.config, other, config)
    facts = dict(top.facts)
    if parts:
        facts["model_bytes"] = sum(int(part.facts.get("model_bytes", 0)) for part in parts.values()) or int(
            facts.get("model_bytes", 0)
        )
    return replace(
        top,
        facts=facts,
        composing={part: found.config for part, found in parts.items()},
        batcher=_batcher(top, parts, batcher),
        variants=kinds,
    )


def _read(repository: Path, name: str, gpu: bool) -> ModelSource:
    config = read_model_config(repository, name)
    if is_ensemble(config):
        return ModelSource(repository, name, config)
    return read_repository_model(repository, name, gpu=gpu)


def _steps(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def _gather(repository: Path, name: str, gpu: bool, parts: dict[str, ModelSource], path: tuple[str, ...]) -> None:
    """``name`` into ``parts``, after those that it is made of."""
    if name in path or len(path) > DEEPEST:
        raise BadInputError(f"{one_line(path[0])}: its ensembles call one another ({' > '.join((*path, name))})")
    if name in parts:
        return
    try:
        part = _read(repository, name, gpu)
    except BadInputError as error:
        raise BadInputError(f"{one_line(path[-1])} is made of {show(name)}: {error}") from None
    for step in _steps(part.config):
        _gather(repository, step, gpu, parts, (*path, name))
    parts[name] = part


def _batcher(top: ModelSource, parts: dict[str, ModelSource], wanted: str | None) -> str:
    able = {name: part for name, part in parts.items() if not is_ensemble(part.config)}
    if wanted is not None and wanted != top.name and wanted not in able:
        raise BadInputError(f"model.batcher: {show(wanted)} is no model of {top.name}, which has {', '.join(able)}")
    if wanted is not None or not able:
        return "" if wanted == top.name else wanted or ""
    batching = {name: part for name, part in able.items() if part.config.max_batch_size > 1} or able
    return max(batching, key=lambda name: int(batching[name].facts.get("model_bytes", 0)))


def _check_variant(name: str, config: ModelConfig, other: str, variant: ModelConfig) -> None:
    """Requests to one must be requests to the other."""
    if is_ensemble(variant):
        raise BadInputError(f"{other}: an ensemble cannot be a variant; give the variants to its own steps")
    ours, theirs = ({one.name: (one.data_type, tuple(one.dims)) for one in of.input} for of in (config, variant))
    if ours != theirs:
        raise BadInputError(
            f"{other}: its inputs are not those of {name}, so that one load cannot measure both; tune them one by one"
        )
    if (config.max_batch_size > 0) != (variant.max_batch_size > 0):
        raise BadInputError(f"{other}: only one of {name} and {other} takes batches; give both a max_batch_size")
