"""``tune models``: what can be tuned by name."""

from __future__ import annotations

from optimizer.errors import BadInputError
from optimizer.profile.find import list_profiles
from optimizer.profile.reader import load_profile


def print_models() -> None:
    """One line a model: name, bound, what it is; and where its profile lies."""
    for listed in list_profiles():
        try:
            bounds = load_profile(listed.path).sla.constraints()
            slas, described = ", ".join(map(str, bounds)) or "no default SLA", listed.description
        except BadInputError as error:
            slas, described = "faulty", str(error).partition("\n")[0]
        print(f"{listed.name:12} {slas:18} {described}")
        print(f"{'':12} {listed.path}")
    print("\ntune --sla-p95 20ms MODEL tunes one; a profile of your own: tune ./my_model.yaml")
