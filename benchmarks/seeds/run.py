"""Repeat the studies of the documents on this machine and compare them with the published results.

    python benchmarks/seeds/run.py [--repeat] [--out DIR] [STUDY ...]

Each study consists of a few `tune sweep` or `tune` commands, run as a user would. Its table is written to STUDY.md in
this folder. Measurements are stored in DIR (results/seeds), so an interrupted command can be continued; a measured
study's table is only written again, unless --repeat is given. The table has the load averages of the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measured import NotMeasured, StepResults, measure
from published import published
from side_by_side import tables
from studies import STUDIES, Study

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=list(STUDIES), help=", ".join(STUDIES))
    parser.add_argument("--repeat", action="store_true", help="repeat all measurements")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "seeds", help="folder of the measurements")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.studies if name not in STUDIES]
    if unknown:
        parser.error(f"no study is called {unknown[0]}; give some of {', '.join(STUDIES)}")
    sys.exit(max([repeat(STUDIES[name], arguments.out, again=arguments.repeat) for name in arguments.studies]))


def repeat(study: Study, out: Path, *, again: bool) -> int:
    """Write the study's table. Return 1 if a step has no result."""
    print(f"{study.name}: {study.title}", flush=True)
    results: list[StepResults] = []
    missing: list[str] = []
    code = 0
    for number, step in enumerate(study.steps):
        try:
            results.append(measure(step, out / f"{study.name}-{number}", again=again))
        except NotMeasured as error:
            missing.append(f"not measured: {step.command} {step.words}: {error}")
            code = max(code, 0 if step.needs_gpu else 1)
    text = markdown(study, results, missing)
    (HERE / f"{study.name}.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
    return code


def markdown(study: Study, results: list[StepResults], missing: list[str]) -> str:
    cells = [cell for one in results for cell in one.cells]
    notes = dict.fromkeys([note for one in results for note in one.notes] + [*study.remarks, *missing])
    loads = [one.load_average for one in results if one.load_average is not None]
    lines = [
        f"# {study.title}",
        "",
        f"Written by `python benchmarks/seeds/run.py {study.name}`.",
        "",
        f"- Published study: {study.there}.",
        f"- Published result: {study.point}.",
        f"- This study: {study.setup}.",
        f"- Machine: {', '.join(dict.fromkeys(one.hardware for one in results)) or 'none'}; "
        f"{', '.join(dict.fromkeys(one.began[:10] for one in results))}; load averages when the steps began: "
        f"{', '.join(f'{load:g}' for load in loads) or 'not known'}.",
        *(f"- Note: {note}." for note in notes),
        "",
        tables(cells, published(study.name), study.ratios),
        "",
        "## Commands",
        "",
        "```sh",
        *(one.command for one in results),
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
