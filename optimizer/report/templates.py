"""Templates as all pages use them: what a template names must be there, and blanks stand where they are meant."""

from __future__ import annotations

from pathlib import Path

import jinja2


def environment(folder: Path, *, html: bool) -> jinja2.Environment:
    """Of the templates in ``folder``; every value is escaped where they are ``html``."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
