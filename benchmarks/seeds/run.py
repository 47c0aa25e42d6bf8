"""The documents' studies repeated on this machine, with the published figures beside.

    python benchmarks/seeds/run.py [--anew] [--out DIR] [STUDY ...]

Each study is a few `tune sweep` or `tune` commands, run as a user would. Its table is written beside this file,
STUDY.md. What is measured is kept in DIR (results/seeds): interrupted, the command goes on where it was; a study
that is measured is only written again, unless --anew. A machine that is busy shows in the notes of the table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measured import Measured, NotMeasured, measure
from published import published
from side_by_side import tables
from studies import STUDIES, Study

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=list(STUDIES), help=", ".join(STUDIES))
    parser.add_argument("--anew", action="store_true", help="measure again what is measured")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "seeds", help="where it is kept")
    given = parser.parse_args()
    unknown = [name for name in given.studies if name not in STUDIES]
    if unknown:
        parser.error(f"no study is called {unknown[0]}; there are {', '.join(STUDIES)}")
    sys.exit(max([repeat(STUDIES[name], given.out, anew=given.anew) for name in given.studies]))


def repeat(study: Study, out: Path, *, anew: bool) -> int:
    """Writes the study's table; 1 where a step gave nothing."""
    print(f"{study.name}: {study.title}", flush=True)
    found: list[Measured] = []
    missing: list[str] = []
    code = 0
    for number, step in enumerate(study.steps):
        try:
            found.append(measure(step, out / f"{study.name}-{number}", anew=anew))
        except NotMeasured as error:
            missing.append(f"not measured: {step.command} {step.words}: {error}")
            code = max(code, 0 if step.needs_gpu else 1)
    text = markdown(study, found, missing)
    (HERE / f"{study.name}.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
    return code


def markdown(study: Study, found: list[Measured], missing: list[str]) -> str:
    cells = [cell for one in found for cell in one.cells]
    notes = dict.fromkeys([note for one in found for note in one.notes] + [*study.remarks, *missing])
    loads = [one.load_average for one in found if one.load_average is not None]
    lines = [
        f"# {study.title}",
        "",
        f"Written by `python benchmarks/seeds/run.py {study.name}`.",
        "",
        f"- The document: {study.there}.",
        f"- What it found: {study.point}.",
        f"- Here: {study.here}.",
        f"- Machine: {', '.join(dict.fromkeys(one.hardware for one in found)) or 'none'}; "
        f"{', '.join(dict.fromkeys(one.began[:10] for one in found))}; load averages when the steps began: "
        f"{', '.join(f'{load:g}' for load in loads) or 'not known'}.",
        *(f"- Note: {note}." for note in notes),
        "",
        tables(cells, published(study.name), study.ratios),
        "",
        "## Commands",
        "",
        "```sh",
        *(one.command for one in found),
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
