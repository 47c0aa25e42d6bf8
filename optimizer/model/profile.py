"""Read ``configs/*.yaml``: the model, its requests and load, the search space and the SLA.

Every error is a BadInputError with lines such as ``file:line: key.path: value, problem and allowed values``.

A profile may have a ``gpu`` section with the same keys. If the model is served on a GPU, a key in it replaces the
same key of the same section (``gpu.model.settings`` replaces all of ``model.settings``). An empty section counts as
missing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, Field, PrivateAttr, StringConstraints, ValidationError

from optimizer.config import field_path, model_config
from optimizer.config.batching import is_sequence_field
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.search_space import SearchSpace, refuse_field_of_key
from optimizer.core import yaml_lines
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.core.safe_text import format_value, one_line, read_bytes, show_path
from optimizer.core.yaml_lines import LocatedValue, PlainValue, located_error
from optimizer.model.builders import BUILDERS, load_builder
from optimizer.model.builders.builder import inputs_of_config
from optimizer.model.input_data import TensorSpec
from optimizer.model.profile_schema import (
    BUILT,
    ONNX,
    STORED,
    BuiltModel,
    LoadSection,
    Model,
    ModelSpaceSection,
    OnnxModel,
    OnnxRuntimeSection,
    ProfileSection,
    RequestSection,
    ScoreSection,
    SlaSection,
    SpaceSection,
    StoredModel,
    TokensSection,
    ToleranceSection,
    keys_of_parameter,
)
from optimizer.model.profile_types import MIX, NUMBER, fault_lines, suggest
from optimizer.options.values import MAX_INT32

_MAX_FAULTS: Final = 10
_MAX_COMBINATIONS: Final = 100_000  # checking this many combinations takes a second
_KEY_STEP: Final = "[key]"  # in pydantic's locations, the step to the key of a mapping
MAY_BE_EMPTY: Final = ("sla", "request", "tokens", "load", "space", "score", "tolerance")
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    BUILT: BuiltModel,
    ONNX: OnnxModel,
    STORED: StoredModel,
    "sla": SlaSection,
    "request": RequestSection,
    "tokens": TokensSection,
    "load": LoadSection,
    "space": SpaceSection,
    "onnxruntime": OnnxRuntimeSection,
    "score": ScoreSection,
    "tolerance": ToleranceSection,
}
GPU_DESCRIPTION: Final = "Keys that replace those above if the model is served on a GPU"


class ProfileError(BadInputError):
    """Errors of a profile, one per line. ``lines``: the same as a list."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class Profile(ProfileSection):
    """A model and how to tune it. ``space`` is None if it is to be derived from the model's config.pbtxt."""

    model: Model = Field(description="The model: one that a builder writes, an ONNX file, or a model of a repository")
    description: Annotated[str, StringConstraints(max_length=1000)] = Field(
        default="",
        description="Short description of the model, which `tune models` shows",
        examples=["ranks the items of a shop"],
    )
    sla: SlaSection = Field(
        default=SlaSection(),
        description="Bounds on percentiles of the latency, also p99.9; bounds of the command line replace them all",
    )
    request: RequestSection = Field(default=RequestSection(), description="One request of the load generator")
    tokens: TokensSection = Field(
        default=TokensSection(), description="Prompts and outputs of a model that streams its responses"
    )
    load: LoadSection = Field(default=LoadSection(), description="Load of the closed loop, from 1 request in flight")
    space: SpaceSection | None = Field(
        default=None,
        description="The search space: the choices of each setting of config.pbtxt (default: derived from the model)",
    )
    score: ScoreSection | None = Field(
        default=None, description="Quality of the outputs for labelled samples (default: not computed)"
    )
    tolerance: ToleranceSection = Field(
        default=ToleranceSection(), description="Allowed difference between batched and unbatched outputs"
    )

    _path: Path = PrivateAttr()
    _folder: Path = PrivateAttr()
    _source: LocatedValue = PrivateAttr()
    _base: LocatedValue = PrivateAttr()
    _gpu: LocatedValue | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path:
        """The profile's file."""
        return self._path

    @property
    def name(self) -> str:
        """The name by which the profile is found: its file name without the ending."""
        return self._path.stem

    def tree(self) -> dict[str, PlainValue]:
        """Return the keys and values of the file as they are written there, with those of its ``gpu`` section."""
        keys = self._base.plain()
        assert isinstance(keys, dict)
        return keys if self._gpu is None else {**keys, "gpu": self._gpu.plain()}

    def for_hardware(self, *, gpu: bool) -> Profile:
        """Return the profile for a model served on a GPU, or on the CPU."""
        source = _merge(self._base, self._gpu) if gpu else self._base
        return _validate(source, self._base, self._gpu, self._path, self._folder)

    def space_fault(self, error: ValueError) -> BadInputError:
        """Return the error at the line of the parameter that it names, else at the line of the space."""
        if not isinstance(error, ParameterError):
            return self.fault("space", problem=str(error))
        in_config = self.space is not None and error.parameter in self.space.config
        keys = ("config", error.parameter) if in_config else keys_of_parameter(error.parameter)
        return self.fault("space", *keys, problem=error.problem if keys else str(error))

    def fault(self, *location: str | int, problem: str) -> BadInputError:
        """Return an error about the value at ``location``, such as ``("space", "preferred_batch_size", 1)``.

        For checks that need more than this file, such as the model's config.pbtxt; the caller raises it.
        """
        node = self._source.at(location)
        return located_error(str(self._path), node.line, node.keys, problem)


def load_profile(path: Path) -> Profile:
    """Return the profile in the file for serving on the CPU; its ``gpu`` section is checked too.

    Raises BadInputError with one line per error.
    """
    data = read_bytes(path, yaml_lines.MAX_BYTES, "a profile is a page of YAML")
    return parse_profile(data, path)


def parse_profile(data: bytes, path: Path) -> Profile:
    """Return the profile with the content ``data`` of the file ``path``; see ``load_profile``."""
    return parse_profile_tree(
        yaml_lines.parse(data, str(path), hint="a profile starts with a line 'model:'"), path, path.parent
    )


def parse_profile_tree(root: LocatedValue, path: Path, folder: Path) -> Profile:
    """Return the profile with the tree ``root`` of the file ``path``; its relative paths begin in ``folder``."""
    file = str(path)
    if not isinstance(root.value, dict):
        problem = f"{format_value(root.plain())} is not a profile; it starts with a line 'model:'"
        raise located_error(file, root.line, (), problem)
    if "profile_models" in root.value and "model" not in root.value:
        problem = "this is a configuration of Model Analyzer; give it with --from-model-analyzer FILE"
        raise located_error(file, root.line, (), problem)
    gpu = root.value.get("gpu")
    if gpu is not None and gpu.value is not None and not isinstance(gpu.value, dict):
        problem = f"{format_value(gpu.plain())} is not a mapping; leave the key out or fill it"
        raise located_error(file, gpu.line, gpu.keys, problem)
    base = replace(root, value={key: child for key, child in root.value.items() if key != "gpu"})

    profiles: list[Profile] = []
    lines: list[str] = []
    for source in (base, _merge(base, gpu)):
        try:
            profiles.append(_validate(source, base, gpu, path, folder))
        except ProfileError as error:
            lines += error.lines
        except BadInputError as error:
            lines.append(str(error))
    if lines:
        lines = list(dict.fromkeys(lines))  # most errors of the base are errors with the gpu section, too
        if len(lines) > _MAX_FAULTS:
            lines[_MAX_FAULTS:] = [f"{one_line(file)}: and {len(lines) - _MAX_FAULTS} more"]
        raise ProfileError(lines)
    return profiles[0]


def _merge(base: LocatedValue, gpu: LocatedValue | None) -> LocatedValue:
    """Return ``base`` with the keys of each section of ``gpu`` replaced. Both are mappings."""
    if gpu is None or not isinstance(base.value, dict) or not isinstance(gpu.value, dict):
        return base
    sections = dict(base.value)
    for key, section in gpu.value.items():
        below = sections.get(key)
        if below is not None and isinstance(below.value, dict) and isinstance(section.value, dict):
            section = replace(below, value={**below.value, **section.value})
        sections[key] = section
    return replace(base, value=sections)


def _validate(
    source: LocatedValue, base: LocatedValue, gpu: LocatedValue | None, path: Path, folder: Path
) -> Profile:
    values = source.plain()
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if value is not None or key not in MAY_BE_EMPTY}
    try:
        profile = Profile.model_validate(values, context={"folder": folder})
    except ValidationError as error:
        ignore = (BUILT, ONNX, STORED, NUMBER, MIX, _KEY_STEP)
        lines = fault_lines(
            error,
            source,
            str(path),
            allowed_keys=_allowed_keys,
            ignore=ignore,
            section_of=functools.partial(_section_of, values),
        )
        raise ProfileError(lines) from None
    profile._path, profile._folder = path, folder
    profile._source, profile._base, profile._gpu = source, base, gpu
    _check_builder(profile)
    _check_tokens(profile)
    _check_space(profile)
    return profile


def _allowed_keys(location: Sequence[str | int], keys: Sequence[str]) -> Collection[str]:
    if not location:
        return [*Profile.model_fields, *(["gpu"] if not keys else [])]
    if len(location) > 2 and location[:2] == ("space", "models"):
        return list(ModelSpaceSection.model_fields)
    return list(SECTIONS[str(location[-1])].model_fields)


def _section_of(values: object, keys: Sequence[str]) -> tuple[str, ...] | None:
    """Return the path of another section that has the key ``keys[-1]``; None if there is none.

    ``values`` is the content of the profile, whose builder has settings of its own.
    """
    prefix = keys[:1] if keys[0] == "gpu" else ()
    section = _section_of_field().get(keys[-1])
    if section is None and keys[-1] in _builder_settings(values):
        section = ("model", "settings")
    if section is None or (*prefix, *section) == tuple(keys[:-1]):
        return None
    return (*prefix, *section)


@functools.cache
def _section_of_field() -> dict[str, tuple[str, ...]]:
    """Return the path of its section for each key of a profile; the names of the keys are unique."""
    paths = {BUILT: ("model",), ONNX: ("model",), STORED: ("model",), "onnxruntime": ("space", "onnxruntime")}
    fields = {
        name: paths.get(title, (title,)) for title, section in SECTIONS.items() for name in section.model_fields
    }
    return {**dict.fromkeys(Profile.model_fields, ()), **fields}


def _builder_settings(values: object) -> Collection[str]:
    model = values.get("model") if isinstance(values, dict) else None
    name = model.get("builder") if isinstance(model, dict) else None
    return load_builder(name).settings.model_fields if isinstance(name, str) and name in BUILDERS else ()


def _check_builder(profile: Profile) -> None:
    """Raise BadInputError if the builder is unknown or its settings class refuses ``model.settings``."""
    if not isinstance(profile.model, BuiltModel):
        return
    name = profile.model.builder
    if name not in BUILDERS:
        problem = f"{format_value(name)} is no builder; {suggest(name, sorted(BUILDERS))}"
        raise profile.fault("model", "builder", problem=problem)
    builder = load_builder(name)
    try:
        builder.parse(profile.model.settings)
    except ValidationError as error:
        source = profile._source.at(("model", "settings"))
        setting_names = list(builder.settings.model_fields)
        lines = fault_lines(error, source, str(profile.path), allowed_keys=lambda *_: setting_names)
        raise ProfileError(lines) from None


def _check_tokens(profile: Profile) -> None:
    """Raise BadInputError if the prompts and outputs are not complete, or longer than the model allows."""
    tokens = profile.tokens
    if tokens.prompt is None and tokens.output is None:
        return
    for key in ("prompt", "output", "prompt_input", "output_input"):
        if getattr(tokens, key) is None:
            raise profile.fault("tokens", problem=f"{key} is missing; generated prompts need it")
    if profile.request.options().is_recorded:
        problem = "request.input_data has prompts of its own; leave out prompt and output, or the input data"
        raise profile.fault("tokens", problem=problem)
    try:
        tokens.requests()
    except ValueError as error:
        raise profile.fault("tokens", problem=str(error)) from None


def _check_space(profile: Profile) -> None:
    """Raise BadInputError for errors that show without the model's config.pbtxt."""
    if profile.space is None:
        return
    space, sizes = profile.space, parse_size_distribution(str(profile.request.batch_size))
    size = sizes.largest
    if space.max_batch_size and size > (largest := max(*space.max_batch_size, 1)):  # every server would refuse it
        problem = f"{size} is larger than every space.max_batch_size; write at most {largest}"
        raise profile.fault("request", "batch_size", problem=problem)
    _check_combinations(profile, space)
    _check_repeated_fields(profile, space)
    try:
        _check_choices(space, sizes.fixed or 1)
    except ValueError as error:
        raise profile.space_fault(error) from None


def _check_combinations(profile: Profile, space: SpaceSection) -> None:
    """Raise BadInputError if the space has too many combinations of choices."""
    lists = (
        space.max_batch_size,
        space.max_queue_delay_microseconds,
        space.preferred_batch_size,
        space.instance_group_count,
        *space.fields().values(),
    )
    combinations = math.prod(len(choices) for choices in lists if choices)
    if combinations > _MAX_COMBINATIONS:
        problem = f"the choices have {combinations:,} combinations; give at most {_MAX_COMBINATIONS:,}"
        raise profile.fault("space", problem=problem)


def _check_repeated_fields(profile: Profile, space: SpaceSection) -> None:
    """Raise BadInputError if a path in ``config`` is a field that another key of the space sets."""
    with_keys = space.model_copy(update={"config": {}}).fields()
    for path in space.config:
        if path in with_keys:
            key = ".".join(keys_of_parameter(path))
            raise profile.fault("space", "config", path, problem=f"space.{key} sets this field too; keep one of them")


def _check_choices(space: SpaceSection, request_batch_size: int) -> None:
    """Raise ValueError if a choice is not valid, or no combination of choices is."""
    for config in (space.config, *(section.config for section in space.models.values())):
        for path, values in config.items():
            refuse_field_of_key(path)
            for value in values:
                field_path.normalize_value(ModelConfig.DESCRIPTOR, path, value)
    stateful = any(map(is_sequence_field, space.fields()))  # its delay and sizes are fields of the batcher
    SearchSpace(
        max_batch_size=space.max_batch_size or (MAX_INT32,),
        max_queue_delay_us=(not stateful and space.max_queue_delay_microseconds) or ("off",),
        preferred_batch_sizes=(not stateful and space.max_batch_size and space.preferred_batch_size) or ("none",),
        instance_count=space.instance_group_count or (1,),
        fields=space.fields(),
        request_batch_size=request_batch_size,
    )


def inputs_and_source(profile: Profile) -> tuple[tuple[TensorSpec, ...], str]:
    """Return the model's inputs, as far as known without reading the model file, and where the model comes from.

    Raises BadInputError if its config.pbtxt cannot be read.
    """
    model = profile.model
    if isinstance(model, BuiltModel):
        builder = load_builder(model.builder)
        return builder.interface(builder.parse(model.settings)).inputs, builder.source
    if isinstance(model, OnnxModel):
        return (), show_path(model.onnx)
    folder = model.repository / model.name
    return inputs_of_config(model_config.read(folder / "config.pbtxt")), show_path(folder)
