"""Print the structure of the source: its size, the packages' import levels and the files that the SLA crosses.

Run it from the repository root: ``python tests/structure.py``.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The bottom is first: a package imports only packages of earlier rows. Packages of one row do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("objectives",),
    ("core",),
    ("options",),
    ("machine",),
    ("config",),
    ("simulator",),
    ("model",),
    ("measure",),
    ("deploy",),
    ("store",),
    ("search",),
    ("confirmation",),
    ("results",),
    ("study",),
    ("replay",),
    ("plan", "explain", "emit"),
    ("api", "watch"),
    ("cli",),
)
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
# The SLA's types, the fields that hold its bounds, and the functions that judge it.
SLA_NAMES = re.compile(r"Sla([A-Z]\w*)?|Constraint(Verdict)?|sla_ms|slas|latency_bounds_ms|judge_\w+")
SLA_QUESTIONS = re.compile("is_met|missed|violation|share_of_bound")
# Packages that `tune run` does not use: other commands, and steps after a run.
OTHER_COMMANDS = re.compile(
    r"optimizer\.(replay|plan|explain|emit|api|watch|study\.batch|study\.sweep|results\.verification|cli(?!\.run))\b"
)

Imports = dict[str, set[str]]
# Tokens that do not make a line a line of code.
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def source_files() -> Iterator[Path]:
    """Yield the files of ``objectives`` and ``optimizer``."""
    for top in ("objectives", "optimizer"):
        yield from sorted((ROOT / top).rglob("*.py"))


def code_lines(source: str) -> int:
    """Return the number of lines of ``source`` with a token of code, without comments and docstrings."""
    docstrings, lines = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
            docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1)) if first else set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def imports_of(source: str, module: str, *, package: bool = False) -> set[str]:
    """Return the modules that ``source`` imports, relative ones resolved; ``from a import b`` gives ``a.b``."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            parents = parts[: len(parts) - node.level + package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            modules |= {f"{base}.{alias.name}" for alias in node.names}
    return modules


@functools.cache
def project_imports() -> Imports:
    """Return the imports of each module of ``objectives`` and ``optimizer``."""
    imports: Imports = {}
    for path in source_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        imports[module] = imports_of(path.read_text(encoding="utf-8"), module, package=is_package)
    return imports


def package_of(module: str) -> str | None:
    """Return the package that ``module`` belongs to; None for other projects and for ``optimizer`` itself."""
    parts = module.split(".")
    if parts[0] == "objectives":
        return "objectives"
    return parts[1] if parts[0] == "optimizer" and len(parts) > 1 and parts[1] in RANK else None


def upward_imports(imports: Imports) -> list[str]:
    """Return ``importer -> imported`` for each import of a package of the same or a later row."""
    wrong = set()
    for importer, modules in imports.items():
        importing = package_of(importer)
        for module in modules:
            imported = package_of(module)
            if (
                importing is not None
                and imported is not None
                and importing != imported
                and RANK[imported] >= RANK[importing]
            ):
                wrong.add(f"{importer} -> {module}")
    return sorted(wrong)


def module_cycles(imports: Imports) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    graph = {
        module: {name for target in targets if (name := _known(target, imports)) and name != module}
        for module, targets in imports.items()
    }
    reached = {module: _reach(module, graph) for module in graph}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other])) for module in graph}
    return [list(group) for group in sorted(groups) if group]


def package_levels(imports: Imports) -> int:
    """Return the number of packages on the longest chain of imports, those of a later package left out."""
    graph: dict[str, set[str]] = {package: set() for package in RANK}
    for importer, modules in imports.items():
        package = package_of(importer)
        imported_packages = {package_of(module) for module in modules} - {None, package}
        if package is not None:
            graph[package] |= {
                other for other in imported_packages if other is not None and RANK[other] < RANK[package]
            }

    @functools.cache
    def level(package: str) -> int:
        return 1 + max((level(other) for other in graph[package]), default=0)

    return max(map(level, graph))


def sla_files() -> dict[Path, list[str]]:
    """Return the files that the SLA crosses in ``tune run``, from the flag to the verdict, with what each one names.

    A file counts if its code, without comments and docstrings, names the SLA (``SLA_NAMES``): one of its types, a
    field that holds its bounds, or a function that judges it. Files that only show the SLA count too.

    Other files do not count, although the result may depend on them: those that pass ``problem.sla`` on, rank points
    by ``Problem.best_point``, or ask the SLA whether a measurement meets it (``SLA_QUESTIONS``). None of them decides
    about the verdict. The last ones are returned with the question, such as ``.is_met``.
    """
    files = {}
    for path in source_files():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = sla_names(path.read_text(encoding="utf-8"))
        if names and not OTHER_COMMANDS.match(module):
            files[path.relative_to(ROOT)] = names
    return files


def sla_names(source: str) -> list[str]:
    """Return the names of the SLA in the code of ``source``; if it has none, the questions that it asks the SLA."""
    names, questions = set[str](), set[str]()
    for node in ast.walk(ast.parse(source)):
        values = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "value"))
        names |= {value for value in values if isinstance(value, str) and SLA_NAMES.fullmatch(value)}
        if isinstance(node, ast.Attribute) and SLA_QUESTIONS.fullmatch(node.attr):
            questions.add(f".{node.attr}")
    return sorted(names or questions)


def _known(target: str, imports: Imports) -> str | None:
    """Return the module that an imported name belongs to; None for another project's."""
    return target if target in imports else base if (base := target.rpartition(".")[0]) in imports else None


def _reach(start: str, graph: Imports) -> set[str]:
    reached: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += graph[module]
    return reached


def main() -> None:
    """Print the figures."""
    sources = [path.read_text(encoding="utf-8") for path in source_files()]
    print(f"source files: {len(sources)}")
    print(f"lines of code, without comments and docstrings: {sum(map(code_lines, sources)):,}")
    print(f"lines of the median file: {statistics.median(len(source.splitlines()) for source in sources):g}")
    imports = project_imports()
    print(f"import levels between packages: {package_levels(imports)}")
    print(f"imports of a later package: {len(upward_imports(imports))}")
    print(f"groups of modules that import each other: {len(module_cycles(imports))}")
    files = sla_files()
    asking = {path: names for path, names in files.items() if names[0].startswith(".")}
    print(f"files that the SLA crosses from flag to verdict: {len(files) - len(asking)}")
    print(*(f"  {path}: {', '.join(names)}" for path, names in files.items() if path not in asking), sep="\n")
    print(f"other files that ask whether a measurement meets the SLA: {len(asking)}")
    print(*(f"  {path}: {', '.join(names)}" for path, names in asking.items()), sep="\n")


if __name__ == "__main__":
    main()
