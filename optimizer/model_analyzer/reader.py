"""A file of Model Analyzer -> what it asks for in tune's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.model_analyzer.beside import CONCURRENTLY, beside
from optimizer.model_analyzer.goals import goals
from optimizer.model_analyzer.keys import FILE, MODEL, Key, ignored
from optimizer.model_analyzer.notes import Note, Notes
from optimizer.model_analyzer.requests import requests
from optimizer.model_analyzer.source import Part, Source
from optimizer.model_analyzer.space import space
from optimizer.model_analyzer.sweeps import Choices
from optimizer.model_analyzer.values import Values
from optimizer.profile import yaml_lines
from optimizer.profile.yaml_lines import Located
from optimizer.untrusted import one_line, read_bytes

MOST_NAMES = 300  # characters of a list in an error
_NOTHING = ignored("nothing is given")
BESIDE = Key("mapped to", "`model.concurrent_models`: its load; what else is said of it is not taken over")


@dataclass(frozen=True)
class Mapped:
    """What the file asks for: ``flags``, ``sections`` and ``choices`` as in Part.

    ``name`` is the model's, and where it stands; ``repository`` is None where the file has none.
    """

    file: Path
    name: Located
    repository: Located | None
    flags: tuple[str, ...]
    sections: Mapping[tuple[str, str], Located]
    choices: Mapping[str, Choices]
    notes: tuple[Note, ...]

    @property
    def model(self) -> str:
        return str(self.name.value)

    def words(self, repository: str | None) -> list[str]:
        """The flags of tune that the file stands for; ``repository`` is in place of the file's own.

        Raises BadInputError where there is none, or it is not there.
        """
        if repository is None:
            if self.repository is None:
                file = one_line(str(self.file))
                raise BadInputError(f"{file}: model_repository: missing; give --model-repository DIR")
            try:
                repository = str(Values(self.file).path(self.repository))
            except BadInputError as error:
                raise BadInputError(f"{error}; --model-repository DIR says where it is") from None
        return [*self.flags, f"--model-repository={repository}"]


def read_model_analyzer(file: Path, model: str | None) -> Mapped:
    """The file as it holds for ``model``; None is the only one in it.

    Raises BadInputError: ``file:line: key.path: …``.
    """
    data = read_bytes(file, yaml_lines.MAX_BYTES, "a configuration of Model Analyzer is a page of YAML")
    root = yaml_lines.parse(data, str(file), hint="a configuration of Model Analyzer has a line 'profile_models:'")
    values, notes = Values(file), Notes(file)
    given = values.mapping(root, list(FILE))
    for key, where in root.value.items() if isinstance(root.value, dict) else ():
        notes.say(where, FILE[key] if key in given else _NOTHING)
    together = CONCURRENTLY in given and values.boolean(given[CONCURRENTLY])
    name, section, others = _choose(given.get("profile_models"), model, values, notes, together=together)
    own = {} if section is None else values.mapping(section, list(MODEL))
    notes.say_each(own, MODEL)
    source = Source(values, notes, given, own)
    parts: list[Part] = [goals(source), beside(source, others), requests(source), space(source)]
    return Mapped(
        file=file,
        name=name,
        repository=given.get("model_repository"),
        flags=tuple(flag for part in parts for flag in part.flags),
        sections={key: where for part in parts for key, where in part.sections.items()},
        choices={key: choices for part in parts for key, choices in part.choices.items()},
        notes=tuple(notes),
    )


def _choose(
    where: Located | None, model: str | None, values: Values, notes: Notes, *, together: bool
) -> tuple[Located, Located | None, list[Located]]:
    """The model that is tuned, what the file says of it alone, and the names of the others."""
    models: dict[str, tuple[Located, Located | None]] = {}
    for key, section in _models(where, values):
        name = values.name(key)
        if name in models:
            raise values.fault(key, f"{name} is given twice")
        models[name] = key, section
    listed, file = one_line(", ".join(models), MOST_NAMES), one_line(str(values.file))
    if model is None and len(models) != 1 and not (together and models):
        problem = f"has several models; add the one to tune: {listed}" if models else "names no model; add MODEL"
        raise BadInputError(f"{file}: {problem}")
    if model is not None and models and model not in models:
        raise BadInputError(f"{file}: no model {one_line(repr(model), MOST_NAMES)} in it; it has {listed}")
    chosen = next(iter(models)) if model is None else model
    others = [key for name, (key, _) in models.items() if name != chosen]
    told = BESIDE if together else ignored(f"{chosen} is tuned; MODEL chooses")
    for key in others:
        notes.say(replace(key, keys=("profile_models", str(key.value))), told)
    return *models.get(chosen, (Located(chosen, 1, ("profile_models",)), None)), others


def _models(where: Located | None, values: Values) -> list[tuple[Located, Located | None]]:
    """The names in ``profile_models``, and what is given for each: a mapping, names, or a list of both."""
    if where is None:
        return []
    if isinstance(where.value, dict):
        return [(replace(child, value=name), child) for name, child in where.value.items()]
    if isinstance(where.value, tuple):
        return [one for item in where.value for one in _models(item, values)]
    return [(name, None) for name in values.names(where)]
