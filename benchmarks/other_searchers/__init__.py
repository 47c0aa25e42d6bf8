"""Search methods that are compared with tritune's own in search_methods.py, and that no run of tune uses."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from optimizer.options.run_options import SEARCHERS
from optimizer.replay.replay import SearcherFactory

REQUIREMENTS = "benchmarks/other_searchers/requirements.txt"


@dataclass(frozen=True)
class Method:
    """A search method of the comparison.

    ``searcher`` is the module of this package and its class that implements the method; empty for one of tritune.
    ``packages`` are those that tritune does not require. ``is_exhaustive``: it measures the whole table, whatever the
    limit on trials. ``is_slow``: a search takes 8 to 60 s, so it is compared on the test tables only.
    """

    searcher: str = ""
    packages: tuple[str, ...] = ()
    is_exhaustive: bool = False
    is_slow: bool = False

    def missing_packages(self) -> list[str]:
        """Return the packages of the method that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


METHODS: dict[str, Method] = {
    **{name: Method() for name in SEARCHERS},
    "grid": Method(is_exhaustive=True),
    "gp": Method(packages=("torch",), is_slow=True),
    "quick": Method("quick_search.QuickSearcher"),
    "botorch": Method("botorch_search.BotorchSearcher", ("botorch",), is_slow=True),
    "smac": Method("smac_search.SmacSearcher", ("smac",), is_slow=True),
    "expert": Method("expert_defaults.ExpertSearcher"),
}


def searcher_factory(name: str) -> str | SearcherFactory:
    """Return what ``replay`` takes as the method ``name`` of METHODS."""
    path = METHODS[name].searcher
    if not path:
        return name
    module, _, class_name = path.partition(".")
    return cast(SearcherFactory, getattr(importlib.import_module(f"{__name__}.{module}"), class_name))
