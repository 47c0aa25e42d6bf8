"""Configuration of the documentation site: ``sphinx-build -W -c docs . build/site`` in the root of the repository.

The site contains the pages of ``docs/`` and ``benchmarks/`` and the changelog. They link to each other by relative
paths, which also work on GitHub. The build needs no network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.addnodes import pending_xref

if TYPE_CHECKING:
    from docutils.nodes import document
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
SOURCES = ("docs", "benchmarks", "CONTRIBUTING.md", "CHANGELOG.md")
LIST_OF_MEASUREMENTS = "\n```{toctree}\n:hidden:\n:glob:\n\n*\n*/*\n```\n"

project = "tritune"
html_title = "tritune"
root_doc = "docs/index"
include_patterns = ["docs/*.md", "benchmarks/*.md", "benchmarks/*/*.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in SOURCES]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # the attributes of a data class, which its docstring lists, are not documented twice
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

smartquotes = False  # options in the text keep their two dashes

html_theme = "furo"
html_extra_path = ["site"]  # a page that leads from the root of the site to its first page
html_show_sourcelink = False
html_copy_source = False


def _show_folders_as_text(app: Sphinx, page: document) -> None:
    """Replace each link to a folder of the repository, which is not a part of the site, by its text."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(page.findall(pending_xref)):
        if link["reftype"] == "myst" and (here / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def _add_measurements(_app: Sphinx, page: str, source: list[str]) -> None:
    """Put the pages of ``benchmarks/`` below its first page in the navigation."""
    if page == "benchmarks/README":
        source[0] += LIST_OF_MEASUREMENTS


def _add_tasks(_app: Sphinx, page: str, source: list[str]) -> None:
    """Put the pages of ``docs/README.md`` before the last part of the navigation, with a caption for each section."""
    if page != "docs/index":
        return
    _, *sections = (ROOT / "docs/README.md").read_text(encoding="utf-8").split("\n## ")
    tasks = ""
    for section in sections:
        pages = re.findall(r"^\| \[.+?\]\(([\w-]+)\.md\) \|", section, re.MULTILINE)
        lines = (f":caption: {section.splitlines()[0]}", ":maxdepth: 1", "", *pages)
        tasks += "```{toctree}\n" + "\n".join(lines) + "\n```\n\n"
    before, toctree, project = source[0].rpartition("```{toctree}")
    source[0] = before + tasks + toctree + project


def setup(app: Sphinx) -> None:
    """Connect the handlers."""
    app.connect("doctree-read", _show_folders_as_text)
    app.connect("source-read", _add_measurements)
    app.connect("source-read", _add_tasks)
