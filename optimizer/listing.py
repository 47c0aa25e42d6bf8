"""``tune models``: what can be tuned by name."""

from __future__ import annotations

from optimizer.profile.find import list_profiles
from optimizer.profile.reader import load_profile


def print_models() -> None:
    """One line a model: name, bound, what it is; and where its profile lies."""
    for listed in list_profiles():
        slas = ", ".join(str(bound) for bound in load_profile(listed.path).sla.constraints())
        print(f"{listed.name:12} {slas or 'no default SLA':18} {listed.description}")
        print(f"{'':12} {listed.path}")
    print("\ntune --sla-p95 20ms MODEL tunes one; a profile of your own: tune ./my_model.yaml")
