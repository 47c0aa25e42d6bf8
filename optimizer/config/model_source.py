"""A model in a Triton repository with the models that it uses, and the configurations that a candidate gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from optimizer.config import model_config, model_json
from optimizer.config.backends import is_ensemble
from optimizer.config.batching import resolve_preferred_sizes
from optimizer.config.gpu_placement import instance_total
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.problem import ModelKind
from optimizer.config.search_space import (
    INSTANCE_COUNT,
    MAX_BATCH_SIZE,
    MAX_QUEUE_DELAY,
    OFF,
    PREFERRED_BATCH_SIZE,
    SPACE_KEYS,
)
from optimizer.core.candidate import SERVER_PROCESSES, VARIANT, Candidate, FieldValue, fields_of_model, model_of_field
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError


@dataclass(frozen=True)
class ModelSource:
    """A model in a repository, and the other models that are served with it.

    A model has the folder ``repository/name`` with ``config.pbtxt`` and numbered versions.

    Attributes:
        repository: Folder of the models.
        name: Model that receives the requests.
        config: Its config.pbtxt.
        input_data: perf_analyzer JSON file with inputs; None for random data.
        facts: Properties for results (precision, rows, bytes, content hash, ...).
        composing: Configurations of the models that it calls: steps of an ensemble, or models of a BLS model.
        batcher: The composing model that the candidate configures; empty for the model itself.
        concurrent: Composing models that receive load of their own at the same time on the same device. The value is
            their load as a multiple of the model's.
        has_shared_models: Whether a composing model serves requests of several models that receive load.
        variants: Configurations of models with the same inputs and outputs, one of which is served in its place. The
            model itself is one of them.
        warm_up: Sizes of the variable dimensions of warm-up requests, by input. The server runs such requests of each
            batch size before it accepts others. None for no warm-up.
        varies_model_json: Whether candidates set keys of model.json. Otherwise tune does not read this file.
        batch_obstacle: Why the graph of an ONNX model that is served without batches has no batch dimension; empty if
            it may have one. None for all other models.
        index_ranges: Valid values of inputs that select rows of a table, by model and input; both ends are included.
    """

    repository: Path
    name: str
    config: ModelConfig
    input_data: Path | None = None
    facts: dict[str, str | int | float] = field(default_factory=dict)
    composing: Mapping[str, ModelConfig] = field(default_factory=dict)
    batcher: str = ""
    concurrent: Mapping[str, float] = field(default_factory=dict)
    has_shared_models: bool = False
    variants: Mapping[str, ModelConfig] = field(default_factory=dict)
    warm_up: Mapping[str, tuple[int, ...]] | None = None
    varies_model_json: bool = False
    batch_obstacle: str | None = None
    index_ranges: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)

    @property
    def kind(self) -> ModelKind:
        """The kind of the model: a decoupled one streams, and one with a sequence batcher keeps state.

        ``model_config.check_config`` refuses a model that does both.
        """
        if self.config.HasField("sequence_batching"):
            return ModelKind.STATEFUL
        return ModelKind.STREAMING if self.config.model_transaction_policy.decoupled else ModelKind.BATCHED

    @property
    def is_streaming(self) -> bool:
        """Whether the model sends any number of responses to a request (a decoupled model)."""
        return self.kind is ModelKind.STREAMING

    @property
    def is_stateful(self) -> bool:
        """Whether the model takes sequences of requests, which Triton's sequence batcher routes to one instance."""
        return self.kind is ModelKind.STATEFUL

    @property
    def tuned_model(self) -> str:
        """The model that the candidate configures."""
        return self.batcher or self.name

    @property
    def tuned_config(self) -> ModelConfig:
        """The config.pbtxt of the model that the candidate configures."""
        return self.composing[self.batcher] if self.batcher else self.config

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The config.pbtxt of every model that may be served, by name."""
        return {**self.composing, **self.variants, self.name: self.config}

    def leaves(self, name: str) -> dict[str, ModelConfig]:
        """Return the models that execute the requests to ``name``, by name: itself, or the steps of an ensemble."""
        config = self.models[name]
        steps = [self.leaves(step.model_name) for step in config.ensemble_scheduling.step]
        return {model: used for step in steps for model, used in step.items()} if steps else {name: config}

    def steps(self, serving: Mapping[str, ModelConfig], model: str = "") -> tuple[tuple[str, int], ...]:
        """Return ``Endpoint.steps`` of ``model``, by default the tuned one; the server reports ``serving``.

        It is empty for an ensemble with a step that calls other models: their times are a part of those of the step,
        and no file says which step calls them. It is also empty if a model serves requests of several models that
        receive load, because the server's statistics do not tell these requests apart.
        """
        model = model or self.name
        if not self.composing or self.has_shared_models:
            return ()
        leaves = {name: self.leaves(name) for name in (self.name, *self.concurrent)}
        called = [name for name in leaves[model] if name != model]
        if model == self.name:
            others = {name for other in self.concurrent for name in leaves[other]}
            parts = [name for name, config in self.composing.items() if not is_ensemble(config)]
            called = [name for name in parts if name not in others]
            if is_ensemble(self.config) and not leaves[model].keys() >= set(called):
                return ()
        return tuple((name, instance_total(serving[name])) for name in (model, *called))

    def index_ranges_of(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the ranges of the inputs of the model ``name`` that are valid for all models its requests reach.

        These are the steps of an ensemble, and the variants of the model.
        """
        ranges = [
            (tensor, limits)
            for model in (name, *(self.variants if name == self.name else ()))
            for tensor, limits in self.index_ranges.get(model, {}).items()
        ]
        for step in self.models[name].ensemble_scheduling.step:
            of_step = self.index_ranges_of(step.model_name)
            ranges += [(step.input_map[tensor], limits) for tensor, limits in of_step.items()]
        narrowest: dict[str, tuple[int, int]] = {}
        for tensor, (low, high) in ranges:
            narrowest[tensor] = (low, min(high, narrowest.get(tensor, (low, high))[1]))
        return narrowest

    def folder(self, model: str) -> Path:
        """Return the folder with the versions of a model."""
        return self.repository / model


@dataclass(frozen=True)
class ServedModels:
    """The models that a candidate serves, with their configurations.

    ``model`` receives the requests, and the batches of ``batcher`` are counted. ``settings`` and ``configs`` are by
    model, in the order of loading. ``files`` is the content of each model.json of ``batcher``, by path in its folder;
    empty if no candidate changes it.
    """

    model: str
    batcher: str
    settings: Mapping[str, Candidate]
    configs: Mapping[str, ModelConfig]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def differences(self, serving: Mapping[str, ModelConfig]) -> list[str]:
        """Return descriptions of the settings that the server does not have; see ``model_config.differences``."""
        differences = []
        for name, candidate in self.settings.items():
            prefix = f"{name}: " if len(self.settings) > 1 else ""
            differences += [f"{prefix}{text}" for text in model_config.differences(candidate, serving[name])]
        return differences

    def served_by(self, server: Endpoint, source: ModelSource, reported: Mapping[str, ModelConfig]) -> Endpoint:
        """Return ``server``, the place where ``model`` is reached, with the other models of ``source``.

        ``reported`` are the configurations that the server reports.
        """
        concurrent = tuple(
            replace(server, model=name, candidate=self.settings[name], steps=source.steps(reported, name))
            for name in source.concurrent
        )
        return replace(
            server,
            batcher=self.batcher,
            max_batch_size=self.configs[self.model].max_batch_size,
            steps=source.steps(reported),
            concurrent_models=concurrent,
        )


def served_models(source: ModelSource, candidate: Candidate) -> ServedModels:
    """Return the models that ``candidate`` serves, with their configurations.

    Raises DeploymentError if settings of one model contradict each other, and the errors of ``model_config.apply``
    and ``model_json.files_with``.
    """
    model = candidate.served_model(source.name)
    batcher = source.batcher or model
    bases = {**source.composing, model: source.variants.get(model, source.config)}
    tuned = replace(candidate, fields=candidate.config_fields)
    settings = {
        name: tuned if name == batcher else _settings(name, config, fields_of_model(candidate.fields, name))
        for name, config in bases.items()
    }
    for name, config in bases.items():  # an ensemble accepts no larger requests than each of its steps
        for step in config.ensemble_scheduling.step:
            least = min(settings[name].max_batch_size, settings[step.model_name].max_batch_size)
            settings[name] = replace(settings[name], max_batch_size=least)
    configs = {name: model_config.apply(settings[name], base) for name, base in bases.items()}
    if source.warm_up is not None:
        configs[batcher] = model_config.with_warmup(configs[batcher], source.warm_up)
    files: dict[str, bytes] = {}
    if source.varies_model_json:  # also for a candidate without such keys, which needs the original file again
        files = model_json.files_with(source.folder(batcher), candidate.model_json)
    return ServedModels(model, batcher, settings, configs, files)


def configured_candidate(source: ModelSource, paths: Iterable[str]) -> Candidate:
    """Return the candidate that the files config.pbtxt describe, with the fields of ``paths`` that they have.

    Raises the errors of ``model_config.candidate_of``.
    """
    paths = list(paths)
    fields: dict[str, FieldValue] = {VARIANT: source.name} if VARIANT in paths else {}
    if SERVER_PROCESSES in paths:
        fields[SERVER_PROCESSES] = 1
    fields |= model_json.values(source.folder(source.tuned_model), paths)
    for name, config in {**source.composing, source.name: source.config}.items():
        parameters = [path.removeprefix(f"{name}/") for path in paths if model_of_field(path) == name]
        if parameters:
            fields |= {f"{name}/{path}": value for path, value in _parameters_of(config, parameters).items()}
    configured = model_config.candidate_of(
        source.tuned_config, [path for path in paths if path != VARIANT and not model_of_field(path)]
    )
    return replace(configured, fields=tuple(sorted({**dict(configured.fields), **fields}.items())))


def _settings(name: str, config: ModelConfig, fields: Mapping[str, FieldValue]) -> Candidate:
    """Return the candidate that ``config`` describes, with ``fields`` in place of its settings."""
    return candidate_with_fields(name, model_config.candidate_of(config, keep_counts=True), fields)


def candidate_with_fields(name: str, candidate: Candidate, fields: Mapping[str, FieldValue]) -> Candidate:
    """Return ``candidate`` of the model ``name`` with ``fields``, see ``fields_of_model``, in place of its settings.

    Raises DeploymentError for preferred batch sizes that do not fit.
    """
    candidate = replace(
        candidate,
        fields=tuple(sorted((path, value) for path, value in fields.items() if path not in SPACE_KEYS)),
        max_batch_size=int(fields.get(MAX_BATCH_SIZE, candidate.max_batch_size)),
        instance_count=int(fields.get(INSTANCE_COUNT, candidate.instance_count)),
    )
    if (delay := fields.get(MAX_QUEUE_DELAY)) == OFF:
        return replace(candidate, dynamic_batching=False, max_queue_delay_us=0, preferred_batch_sizes=())
    if delay is not None:
        candidate = replace(candidate, dynamic_batching=True, max_queue_delay_us=int(delay))
    sizes = tuple(size for size in candidate.preferred_batch_sizes if size <= candidate.max_batch_size)
    if candidate.dynamic_batching and PREFERRED_BATCH_SIZE in fields:
        resolved = resolve_preferred_sizes(str(fields[PREFERRED_BATCH_SIZE]), candidate.max_batch_size)
        if resolved is None or max(resolved, default=0) > candidate.max_batch_size:
            raise DeploymentError(
                f"{name}: preferred_batch_size {fields[PREFERRED_BATCH_SIZE]} does not fit {candidate.max_batch_size}"
            )
        sizes = resolved
    return replace(candidate, preferred_batch_sizes=sizes)


def _parameters_of(config: ModelConfig, paths: Iterable[str]) -> dict[str, FieldValue]:
    """Return the parameters ``paths`` of a model, as ``_settings`` reads them; absent ones are left out."""
    fields = [path for path in paths if path not in SPACE_KEYS]
    candidate = model_config.candidate_of(config, fields, keep_counts=INSTANCE_COUNT not in paths)
    parameters = {
        MAX_BATCH_SIZE: candidate.max_batch_size,
        INSTANCE_COUNT: candidate.instance_count,
        **dict(candidate.fields),
        MAX_QUEUE_DELAY: candidate.max_queue_delay_us if candidate.dynamic_batching else OFF,
        PREFERRED_BATCH_SIZE: ",".join(map(str, candidate.preferred_batch_sizes)) or "none",
    }
    return {path: value for path, value in parameters.items() if path in paths}
