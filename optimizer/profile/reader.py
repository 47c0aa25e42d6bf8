"""``configs/*.yaml`` -> Profile: what is served, how it is asked, what may vary, what is good enough.

Every fault is a BadInputError with one line each: ``file:line: key.path: value … what would be right``.

A profile may have a ``gpu`` section with the same keys. Where a GPU is found, a key given there replaces the
same key of the same section above it (``gpu.model.settings`` replaces all of ``model.settings``). A section
that is there but empty counts as left out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, PrivateAttr, StringConstraints, ValidationError
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import proto_path
from optimizer.errors import BadInputError
from optimizer.models import BUILDERS
from optimizer.profile import yaml_lines
from optimizer.profile.faults import fault_lines, meant
from optimizer.profile.schema import (
    BUILT,
    STORED,
    BesideSection,
    BuiltModel,
    LoadSection,
    Model,
    OnnxRuntimeSection,
    RequestSection,
    ScoreSection,
    Section,
    SlaSection,
    SpaceSection,
    StoredModel,
    ToleranceSection,
)
from optimizer.profile.values import INT32_MAX, MIX, NUMBER
from optimizer.profile.yaml_lines import Located, fault, show
from optimizer.requests.sizes import parse_dim
from optimizer.space import Space
from optimizer.trial import INSTANCE_GPUS, SERVER_CPUS, SERVER_OPTION
from optimizer.untrusted import one_line, read_bytes

if TYPE_CHECKING:
    from optimizer.models.builder import Builder

_MAX_FAULTS: Final = 10
_MAX_COMBINATIONS: Final = 100_000  # of choices; to look at them takes a second
_KEY: Final = "[key]"  # pydantic's step to the key of a mapping
_PARAMETERS: Final = {  # as Space calls them -> as a profile does, in Triton's terms
    "max_batch_size": "max_batch_size",
    "max_queue_delay_us": "max_queue_delay_microseconds",
    "preferred_batch_sizes": "preferred_batch_size",
    "instance_count": "instance_group_count",
    SERVER_CPUS: "server_cpus",
    INSTANCE_GPUS: "instance_group_gpus",
}
_MAY_BE_EMPTY: Final = ("sla", "request", "load", "space", "score", "tolerance")
_SECTIONS: Final[dict[str, type[BaseModel]]] = {
    BUILT: BuiltModel,
    STORED: StoredModel,
    "sla": SlaSection,
    "request": RequestSection,
    "load": LoadSection,
    "space": SpaceSection,
    "onnxruntime": OnnxRuntimeSection,
    "score": ScoreSection,
    "tolerance": ToleranceSection,
}


class Profile(Section):
    """One model and its study. ``space`` is None where it is to be derived from the model's own config."""

    model: Model
    description: Annotated[str, StringConstraints(max_length=1000)] = ""
    sla: SlaSection = SlaSection()
    request: RequestSection = RequestSection()
    load: LoadSection = LoadSection()
    space: SpaceSection | None = None
    score: ScoreSection | None = None
    tolerance: ToleranceSection = ToleranceSection()

    _path: Path = PrivateAttr()
    _folder: Path = PrivateAttr()
    _source: Located = PrivateAttr()
    _base: Located = PrivateAttr()
    _gpu: Located | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path:
        """The file it was read from."""
        return self._path

    @property
    def name(self) -> str:
        """The file's name without its ending: what the profile is found by."""
        return self._path.stem

    def for_hardware(self, *, gpu: bool) -> Profile:
        """The profile as it holds on a machine with, or without, a GPU."""
        source = _merged(self._base, self._gpu) if gpu else self._base
        return _build(source, self._base, self._gpu, self._path, self._folder)

    def space_fault(self, error: ValueError) -> BadInputError:
        """What ``Space`` or ``proto_path`` say, at the line of the parameter that they begin with."""
        name, _, rest = str(error).partition(": ")
        if self.space and name in self.space.config:
            return self.fault("space", "config", name, problem=rest)
        if name.startswith(SERVER_OPTION):
            return self.fault("space", "server", name.removeprefix(SERVER_OPTION), problem=rest)
        if name in _PARAMETERS:
            return self.fault("space", _PARAMETERS[name], problem=rest)
        return self.fault("space", problem=str(error))

    def fault(self, *location: str | int, problem: str) -> BadInputError:
        """An error about what stands at ``location``, such as ``("space", "preferred_batch_size", 1)``.

        For checks that need more than this file (the model's own config, say); the caller raises it.
        """
        here = self._source.at(location)
        return fault(str(self._path), here.line, here.keys, problem)


def load_profile(path: Path) -> Profile:
    """The profile in ``path``, as it holds without a GPU; its ``gpu`` section is checked too.

    Raises BadInputError, with one line for each fault.
    """
    return parse_profile(read_profile_bytes(path), path)


def read_profile_bytes(path: Path) -> bytes:
    """The bytes of the file. Raises BadInputError, too, where those are more than a profile has."""
    return read_bytes(path, yaml_lines.MAX_BYTES, "a profile is a page of YAML")


def parse_profile(data: bytes, path: Path) -> Profile:
    """As ``load_profile``, of ``data`` that stands in ``path``."""
    return located_profile(yaml_lines.parse(data, str(path)), path, path.parent)


def located_profile(root: Located, path: Path, folder: Path) -> Profile:
    """As ``parse_profile``, of what was read from ``path`` already; its own paths are those in ``folder``."""
    file = str(path)
    if not isinstance(root.value, dict):
        problem = f"{show(root.plain())} is not a profile; it starts with a line 'model:'"
        raise fault(file, root.line, (), problem)
    gpu = root.value.get("gpu")
    if gpu is not None and gpu.value is not None and not isinstance(gpu.value, dict):
        problem = f"{show(gpu.plain())} is not a mapping; leave the key out or fill it"
        raise fault(file, gpu.line, gpu.keys, problem)
    base = replace(root, value={key: child for key, child in root.value.items() if key != "gpu"})

    profiles: list[Profile] = []
    faults: list[str] = []
    for source in (base, _merged(base, gpu)):
        try:
            profiles.append(_build(source, base, gpu, path, folder))
        except BadInputError as error:
            faults += [line for line in str(error).splitlines() if line not in faults]
    if faults:
        if len(faults) > _MAX_FAULTS:
            faults[_MAX_FAULTS:] = [f"{one_line(file)}: and {len(faults) - _MAX_FAULTS} more"]
        raise BadInputError("\n".join(faults))
    return profiles[0]


def _merged(base: Located, gpu: Located | None) -> Located:
    """``base`` with each key of each section of ``gpu`` put in its place. Both are mappings."""
    if gpu is None or not isinstance(base.value, dict) or not isinstance(gpu.value, dict):
        return base
    sections = dict(base.value)
    for key, over in gpu.value.items():
        below = sections.get(key)
        if below is not None and isinstance(below.value, dict) and isinstance(over.value, dict):
            over = replace(below, value={**below.value, **over.value})
        sections[key] = over
    return replace(base, value=sections)


def _build(source: Located, base: Located, gpu: Located | None, path: Path, folder: Path) -> Profile:
    given = source.plain()
    if isinstance(given, dict):
        given = {key: value for key, value in given.items() if value is not None or key not in _MAY_BE_EMPTY}
    try:
        profile = Profile.model_validate(given, context={"folder": folder})
    except ValidationError as error:
        lines = fault_lines(error, source, str(path), known=_known_keys, ignore=(BUILT, STORED, NUMBER, MIX, _KEY))
        raise BadInputError("\n".join(lines)) from None
    profile._path, profile._folder = path, folder
    profile._source, profile._base, profile._gpu = source, base, gpu
    _check_builder(profile)
    _check_space(profile)
    return profile


def _known_keys(location: Sequence[str | int], keys: Sequence[str]) -> Collection[str]:
    if not location:
        return [*Profile.model_fields, *(["gpu"] if not keys else [])]
    if len(location) > 2 and location[:2] == ("space", "models"):
        return list(BesideSection.model_fields)
    return list(_SECTIONS[str(location[-1])].model_fields)


def _check_builder(profile: Profile) -> None:
    """The builder's own settings class says what ``model.settings`` may be."""
    if not isinstance(profile.model, BuiltModel):
        return
    name = profile.model.builder
    if name not in BUILDERS:
        problem = f"{show(name)} is no builder; {meant(name, sorted(BUILDERS))}"
        raise profile.fault("model", "builder", problem=problem)
    builder: Builder = importlib.import_module(BUILDERS[name]).BUILDER
    try:
        builder.parse(profile.model.settings)
    except ValidationError as error:
        source = profile._source.at(("model", "settings"))
        known = list(builder.settings.model_fields)
        lines = fault_lines(error, source, str(profile.path), known=lambda *_: known)
        raise BadInputError("\n".join(lines)) from None


def _check_space(profile: Profile) -> None:
    """As far as can be told without the model's own config."""
    if profile.space is None:
        return
    space, sizes = profile.space, parse_dim(str(profile.request.batch_size))
    size = sizes.largest
    if space.max_batch_size and size > (largest := max(*space.max_batch_size, 1)):  # no server would take it
        problem = f"{size} is larger than every space.max_batch_size; write at most {largest}"
        raise profile.fault("request", "batch_size", problem=problem)
    lists = (
        space.max_batch_size,
        space.max_queue_delay_microseconds,
        space.preferred_batch_size,
        space.instance_group_count,
        *space.fields().values(),
    )
    combinations = math.prod(len(choices) for choices in lists if choices)
    if combinations > _MAX_COMBINATIONS:
        problem = f"the choices have {combinations:,} combinations; leave at most {_MAX_COMBINATIONS:,}"
        raise profile.fault("space", problem=problem)
    try:
        for config in (space.config, *(one.config for one in space.models.values())):
            for path, values in config.items():
                for value in values:
                    proto_path.normal(ModelConfig.DESCRIPTOR, path, value)
        Space(
            max_batch_size=space.max_batch_size or (INT32_MAX,),
            max_queue_delay_us=space.max_queue_delay_microseconds or ("off",),
            preferred_batch_sizes=(space.max_batch_size and space.preferred_batch_size) or ("none",),
            instance_count=space.instance_group_count or (1,),
            fields=space.fields(),
            request_batch_size=sizes.fixed or 1,
        )
    except ValueError as error:
        raise profile.space_fault(error) from None
