"""Imports run one way: objectives <- nouns and seams <- parts <- tuner <- session <- cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("objectives", "optimizer")
NOUNS: tuple[str, ...] = (
    "trial",
    "outcome",
    "batching",
    "space",
    "placement",
    "problem",
    "interfaces",
    "errors",
    "model_source",
    "budget",
)
NOUNS += ("server_options", "machine.cpus", "confirm.plan", "confirm.verification", "requests.sizes")
NOUNS += ("client.connection",)
ROOMS = ("answers", "confirm", "load", "machine", "requests", "store")  # packages that are nothing but their modules
READ: tuple[str, ...] = (
    "report",
    "store.disk",
    "untrusted",
    "trial",
    "confirm.plan",
    "confirm.verification",
    "problem",
    "outcome",
)
READ += ("errors", "budget", "server_options")
REPORT_READS = ("objectives", *(f"optimizer.{name}" for name in READ))
TOP = {
    "course": 3,
    "trial_runner": 3,
    "tuner": 3,
    "confirm.confirmer": 3,
    "searching": 4,
    "study": 3,
    "cluster": 3,
    "replay": 4,
    "session": 4,
    "confirm.verify": 4,
    "api": 5,
    "batches": 4,
    "commands": 5,
    "cli": 6,
    "__main__": 6,
}

Imports = dict[str, set[str]]


def imports_of(source: str, module: str, *, package: bool = False) -> set[str]:
    """The modules that ``source`` imports, relative ones resolved; ``from a import b`` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) - node.level + package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def project_imports() -> Imports:
    found: Imports = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            init = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if init else parts)
            found[module] = imports_of(path.read_text(encoding="utf-8"), module, package=init)
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def rank(module: str) -> int:
    if within(module, "objectives"):
        return 0
    name = module.partition(".")[2]
    if not name or name in ROOMS or within(name, *NOUNS):
        return 1
    return next((high for top, high in TOP.items() if within(name, top)), 2)


def importer_rank(module: str) -> int:
    """The package itself offers what is on top, once it is asked for."""
    return TOP["__main__"] if module == "optimizer" else rank(module)


def faults(imports: Imports) -> list[str]:
    """``importer -> imported`` for each import against the direction."""
    found = []
    for importer, targets in imports.items():
        for target in targets:
            if not within(target, *PACKAGES):
                continue
            report = within(importer, "optimizer.report") and not within(target, *REPORT_READS)
            report &= target.partition(".")[2] not in ROOMS
            search = within(importer, "optimizer.search") and within(target, "optimizer.deploy")
            if (importer_rank(importer) < rank(target) or report or search) and target != "optimizer":
                found.append(f"{importer} -> {target}")
    return sorted(found)


def test_imports_run_one_way() -> None:
    assert faults(project_imports()) == []


def test_the_sources_are_seen() -> None:
    imports = project_imports()
    assert {"objectives.metrics", "objectives.sla", "optimizer.trial", "optimizer.search"} <= set(imports)
    assert "objectives.metrics" in imports["objectives.sla"]
    assert {"objectives.metrics", "optimizer.space"} <= imports["optimizer.problem"]


@pytest.mark.parametrize(
    ("importer", "source", "target"),
    [
        ("objectives.sla", "import optimizer.trial", "optimizer.trial"),
        ("objectives.sla", "from optimizer.errors import TuneError", "optimizer.errors"),
        ("optimizer.search.grid", "from optimizer import deploy", "optimizer.deploy"),
        ("optimizer.search.grid", "from ..deploy.embedded import Server", "optimizer.deploy.embedded"),
        ("optimizer.search.grid", "def f():\n    import optimizer.deploy.docker", "optimizer.deploy.docker"),
        ("optimizer.report.export", "from optimizer.store.study import Study", "optimizer.store.study"),
        ("optimizer.trial", "from .load.sweep import next_load", "optimizer.load.sweep"),
        ("optimizer.load.sweep", "from optimizer.tuner import tune", "optimizer.tuner"),
        ("optimizer.tuner", "from optimizer.session import Session", "optimizer.session"),
        ("optimizer.session", "import optimizer.cli as cli", "optimizer.cli"),
        ("optimizer.report.console", "from optimizer.cli import main", "optimizer.cli"),
    ],
)
def test_an_import_against_the_direction_is_found(importer: str, source: str, target: str) -> None:
    assert f"{importer} -> {target}" in faults({importer: imports_of(source, importer)})


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("optimizer.report.export", "import pandas\nfrom optimizer.trial import Trial\nfrom . import words"),
        ("optimizer.search.grid", "from optimizer.space import Space\nfrom objectives.pareto import front"),
        ("optimizer.cli", "from optimizer.session import Session"),
        ("optimizer.__main__", "from optimizer.cli import main"),
    ],
)
def test_an_import_along_the_direction_is_allowed(importer: str, source: str) -> None:
    assert faults({importer: imports_of(source, importer)}) == []
