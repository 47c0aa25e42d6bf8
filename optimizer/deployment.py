"""What serves a candidate: the configuration of each model that takes part, in the order in which they are loaded.

A candidate's own settings are those of one model. What it has for the others stands among its fields as
``<model>/<parameter>``: a parameter of the space by the name that it has in a profile, or a path in ModelConfig.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config
from optimizer.batching import resolve_policy
from optimizer.errors import DeploymentError
from optimizer.model_source import ModelSource
from optimizer.space import OFF
from optimizer.trial import VARIANT, Candidate, FieldValue, model_of, of_model

SIZE, DELAY, PREFERRED, COUNT = (
    "max_batch_size",
    "max_queue_delay_microseconds",
    "preferred_batch_size",
    "instance_group_count",
)


@dataclass(frozen=True)
class Deployment:
    """``model`` answers the requests; the batches that are counted are those of ``batcher``. ``settings`` and
    ``configs`` are by model, in the order in which they are loaded."""

    model: str
    batcher: str
    settings: Mapping[str, Candidate]
    configs: Mapping[str, ModelConfig]

    def differences(self, serving: Mapping[str, ModelConfig]) -> list[str]:
        """In words, what the server serves otherwise; see ``model_config.differences``."""
        found = []
        for name, wanted in self.settings.items():
            of = f"{name}: " if len(self.settings) > 1 else ""
            found += [f"{of}{told}" for told in model_config.differences(wanted, serving[name])]
        return found


def deployment(source: ModelSource, candidate: Candidate) -> Deployment:
    """Raises DeploymentError where settings of one model contradict each other, else as ``model_config.apply``."""
    model = str(dict(candidate.fields).get(VARIANT, source.name))
    batcher = source.batcher or model
    own = replace(candidate, fields=candidate.config_fields)
    settings = {
        name: own if name == batcher else _settings(name, config, of_model(candidate.fields, name))
        for name, config in source.composing.items()
    }
    top = source.variants.get(model, source.config)
    settings[model] = own if model == batcher else _settings(model, top, of_model(candidate.fields, model))
    given = {**source.composing, model: top}
    for name, config in given.items():  # an ensemble takes no more than each of its steps does
        for step in config.ensemble_scheduling.step:
            least = min(settings[name].max_batch_size, settings[step.model_name].max_batch_size)
            settings[name] = replace(settings[name], max_batch_size=least)
    configs = {name: model_config.apply(one, given[name]) for name, one in settings.items()}
    if source.warm_up is not None:
        configs[batcher] = model_config.warmed_up(configs[batcher], source.warm_up)
    return Deployment(model, batcher, settings, configs)


def as_given(source: ModelSource, paths: Iterable[str]) -> Candidate:
    """The candidate that the configurations say, with those of ``paths`` that are present. Raises as
    ``model_config.candidate_of``."""
    paths = list(paths)
    fields: dict[str, FieldValue] = {VARIANT: source.name} if VARIANT in paths else {}
    for name, config in {**source.composing, source.name: source.config}.items():
        asked = [path.removeprefix(f"{name}/") for path in paths if model_of(path) == name]
        if asked:
            fields |= {f"{name}/{path}": value for path, value in _given(config, asked).items()}
    own = model_config.candidate_of(
        source.batched, [path for path in paths if path != VARIANT and not model_of(path)]
    )
    return replace(own, fields=tuple(sorted({**dict(own.fields), **fields}.items())))


def _settings(name: str, config: ModelConfig, fields: Mapping[str, FieldValue]) -> Candidate:
    """What ``config`` says, with ``fields`` in its place."""
    paths = {path: value for path, value in fields.items() if path not in (SIZE, DELAY, PREFERRED, COUNT)}
    own = replace(model_config.candidate_of(config), fields=tuple(sorted(paths.items())))
    own = replace(
        own,
        max_batch_size=int(fields.get(SIZE, own.max_batch_size)),
        instance_count=int(fields.get(COUNT, own.instance_count)),
    )
    if (delay := fields.get(DELAY)) == OFF:
        return replace(own, dynamic_batching=False, max_queue_delay_us=0, preferred_batch_sizes=())
    if delay is not None:
        own = replace(own, dynamic_batching=True, max_queue_delay_us=int(delay))
    sizes = tuple(size for size in own.preferred_batch_sizes if size <= own.max_batch_size)
    if own.dynamic_batching and PREFERRED in fields:
        found = resolve_policy(str(fields[PREFERRED]), own.max_batch_size)
        if found is None:
            raise DeploymentError(
                f"{name}: preferred_batch_size {fields[PREFERRED]} does not fit {own.max_batch_size}"
            )
        sizes = found
    return replace(own, preferred_batch_sizes=sizes)


def _given(config: ModelConfig, paths: Iterable[str]) -> dict[str, FieldValue]:
    """As ``_settings`` reads them; what a configuration does not say is left out."""
    rest = [path for path in paths if path not in (SIZE, DELAY, PREFERRED, COUNT)]
    own = model_config.candidate_of(config, rest)
    every = {SIZE: own.max_batch_size, COUNT: own.instance_count, **dict(own.fields)}
    every[DELAY] = own.max_queue_delay_us if own.dynamic_batching else OFF
    every[PREFERRED] = ",".join(map(str, own.preferred_batch_sizes)) or "none"
    return {path: value for path, value in every.items() if path in paths}
