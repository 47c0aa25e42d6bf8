"""The answers of several models that are served at the same time: a guard for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from optimizer.interfaces import Endpoint, Guard


class Guards:
    """``guards`` are by model of the endpoint."""

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        self._guards = guards

    @property
    def needs_reference(self) -> bool:
        return any(guard.needs_reference for guard in self._guards.values())

    @property
    def note(self) -> str:
        notes = {name: guard.note for name, guard in self._guards.items()}
        return "; ".join(f"{name}: {note}" for name, note in notes.items() if note)

    def reference(self, endpoint: Endpoint) -> None:
        for guard, one in self._pairs(endpoint):
            if guard.needs_reference:
                guard.reference(one)

    def check(self, endpoint: Endpoint) -> None:
        """Raises DeploymentError where the answers of one differ."""
        for guard, one in self._pairs(endpoint):
            guard.check(one)

    def _pairs(self, endpoint: Endpoint) -> Iterator[tuple[Guard, Endpoint]]:
        return ((self._guards[one.model], one) for one in (endpoint, *endpoint.beside))
