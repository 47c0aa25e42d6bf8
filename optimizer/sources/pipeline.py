"""A model with those that it is made of, or that may take its place: ensembles, BLS, variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.errors import BadInputError
from optimizer.model_source import ModelSource
from optimizer.profile.yaml_lines import show
from optimizer.sources.repository import is_ensemble
from optimizer.untrusted import one_line

DEEPEST = 8  # ensembles in ensembles


def read_source(
    read: Callable[[str], ModelSource],
    name: str,
    *,
    composing: Sequence[str] = (),
    variants: Sequence[str] = (),
    concurrent: Sequence[str] = (),
    batcher: str | None = None,
) -> ModelSource:
    """The model ``name`` as ``read`` gives it, with the rest as ``assembled``. Raises BadInputError."""
    top = read(name)
    return assembled(top, read, composing=composing, variants=variants, concurrent=concurrent, batcher=batcher)


def assembled(
    top: ModelSource,
    read: Callable[[str], ModelSource],
    *,
    composing: Sequence[str] = (),
    variants: Sequence[str] = (),
    concurrent: Sequence[str] = (),
    batcher: str | None = None,
) -> ModelSource:
    """``top`` with the models of its repository that it is made of: the steps of an ensemble, those that a model in
    Python calls (``composing``); or with those that may take its place, or that share its device (``concurrent``).

    The space is about ``batcher``'s settings: without it about those of the largest step that batches. Raises
    BadInputError where one of them is not there, or they do not go together.
    """
    name = top.name
    parts: dict[str, ModelSource] = {}
    for step in (*_steps(top.config), *composing, *concurrent):
        _gather(step, read, parts, path=(name,))
    if variants and parts:
        raise BadInputError(
            f"{name}: variants are of one model alone, and beside this one there are {', '.join(parts)}"
        )
    others = dict.fromkeys((name, *variants)) if variants else ()
    kinds = {other: top.config if other == name else read(other).config for other in others}
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
        batcher=_batcher(top, parts, top.name if concurrent and batcher is None else batcher),
        concurrent=tuple(dict.fromkeys(concurrent)),
        variants=kinds,
    )


def _steps(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def _gather(
    name: str, read: Callable[[str], ModelSource], parts: dict[str, ModelSource], path: tuple[str, ...]
) -> None:
    """``name`` into ``parts``, after those that it is made of."""
    if name in path or len(path) > DEEPEST:
        raise BadInputError(f"{one_line(path[0])}: its ensembles call one another ({' > '.join((*path, name))})")
    if name in parts:
        return
    try:
        part = read(name)
    except BadInputError as error:
        raise BadInputError(f"{one_line(path[-1])} is made of {show(name)}: {error}") from None
    for step in _steps(part.config):
        _gather(step, read, parts, (*path, name))
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
