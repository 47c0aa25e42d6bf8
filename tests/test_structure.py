"""The packages import each other in one direction, without exceptions."""

from __future__ import annotations

import pytest

from tests.structure import (
    ROOT,
    code_lines,
    imports_of,
    module_cycles,
    package_levels,
    project_imports,
    sla_names,
    upward_imports,
)


def test_packages_import_only_earlier_ones() -> None:
    assert upward_imports(project_imports()) == []


def test_no_modules_import_each_other() -> None:
    assert module_cycles(project_imports()) == []


def test_the_import_levels_stay_low() -> None:
    assert 1 < package_levels(project_imports()) <= 12


def test_few_modules_stand_at_the_top() -> None:
    assert len(list((ROOT / "optimizer").glob("*.py"))) <= 10


@pytest.mark.parametrize(
    ("importer", "source", "target"),
    [
        ("optimizer.search.grid", "from optimizer import study", "optimizer.study"),
        ("optimizer.search.grid", "from ..study.task import Task", "optimizer.study.task.Task"),
        ("optimizer.search.grid", "def f():\n    import optimizer.study.task", "optimizer.study.task"),
    ],
)
def test_an_import_of_a_later_package_is_reported(importer: str, source: str, target: str) -> None:
    assert upward_imports({importer: imports_of(source, importer)}) == [f"{importer} -> {target}"]


def test_modules_that_import_each_other_are_reported() -> None:
    imports = {"a": {"b.x"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert module_cycles(imports) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def limit(sla: Sla): return sla.latency_bound_ms(metric)", ["Sla"]),
        ("Option(field='sla_ms')", ["sla_ms"]),
        ("def judge_trial(sla: Sla): return sla.is_met(m)", ["Sla", "judge_trial"]),
        ("good = problem.sla.is_met(measurement)", [".is_met"]),
        ("'Return the Sla.'  # of sla_ms\nstart(problem.sla)", []),
    ],
)
def test_a_file_that_names_the_sla_or_asks_it_is_listed(source: str, names: list[str]) -> None:
    assert sla_names(source) == names


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("x = 1  # a comment\n\n# another\n", 1),
        ("'''A docstring\n\nof three lines.'''\nx = 1\n", 1),
        ("class A:\n    'One.'\n\n    async def f(self):\n        'Two.'\n        return 1\n", 3),
        ("text = '''not a\n\ndocstring'''\n", 3),
        ("f(\n    1,\n    # the second\n    2,\n)\n", 4),
        ("def f():\n    x = 1\n    'no docstring'\n", 3),
    ],
)
def test_lines_of_code_are_without_comments_and_docstrings(source: str, lines: int) -> None:
    assert code_lines(source) == lines
