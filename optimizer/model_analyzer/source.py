"""What a file says of one model: the model's own sections before those that hold for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optimizer.model_analyzer.keys import Keys, ignored
from optimizer.model_analyzer.notes import Notes
from optimizer.model_analyzer.sweeps import Choices
from optimizer.model_analyzer.values import Values
from optimizer.profile.yaml_lines import Located

_HAS_ITS_OWN = ignored("the model has its own")


@dataclass(frozen=True)
class Source:
    """``given`` is what the file says for all models, ``own`` for the one, both by key."""

    values: Values
    notes: Notes
    given: Mapping[str, Located]
    own: Mapping[str, Located]

    def find(self, name: str) -> Located | None:
        """The model's own where it is not empty, else the file's."""
        own, given = self.own.get(name), self.given.get(name)
        if own is None or own.value in ((), {}):
            return given
        if given is not None:
            self.notes.say(given, _HAS_ITS_OWN)
        return own

    def section(self, name: str, known: Keys) -> dict[str, Located]:
        """The keys of what ``find`` finds, each with a note."""
        where = self.find(name)
        found = {} if where is None else self.values.mapping(where, list(known))
        self.notes.say_each(found, known)
        return found

    def parameters(self, known: Keys) -> dict[str, Located]:
        """Key by key the model's own, else the file's; a model with a rate of its own has no concurrency."""
        own = self.values.mapping(self.own["parameters"], list(known)) if "parameters" in self.own else {}
        self.notes.say_each(own, known)
        found = {name: where for name in known if (where := own.get(name, self.given.get(name))) is not None}
        hidden = own.keys() & self.given.keys()
        if "request_rate" in own and "concurrency" not in own and "concurrency" in found:
            del found["concurrency"]
            hidden |= {"concurrency"}
        for name in hidden:
            self.notes.say(self.given[name], _HAS_ITS_OWN)
        return found

    def whole(self, name: str) -> int | None:
        return self.values.whole(self.given[name]) if name in self.given else None

    def is_true(self, name: str) -> bool:
        return name in self.given and self.values.boolean(self.given[name])


@dataclass(frozen=True)
class Part:
    """A part of what the file asks for.

    ``flags``: words of tune's command line. ``sections``: of a profile, by paths such as ``("sla", "p99")``.
    ``choices``: of its space, by ``sweeps.OWN`` or proto path.
    """

    flags: list[str] = field(default_factory=list)
    sections: dict[tuple[str, str], Located] = field(default_factory=dict)
    choices: dict[str, Choices] = field(default_factory=dict)
