"""Repeat the studies of the documents on this machine and compare them with the published results.

    python benchmarks/published_studies/run.py [--step N] [--repeat] [--out DIR] [STUDY ...]

Each study consists of a few `tune sweep` or `tune` commands, run as a user would. Its results are written to
STUDY.jsonl and its tables to STUDY.md in this folder, its plot to docs/images/. Measurements are also stored in DIR
(results/published_studies), so an interrupted command can be continued; a measured study's files are only written
again, unless --repeat is given. --step measures a single step; the other steps keep the results in STUDY.jsonl. The
table has the load averages of the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import plot
from kept import FOLDER, read_kept, write_kept
from measured import ROOT, NotMeasured, measure
from page import markdown
from studies import STUDIES, Study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=list(STUDIES), help=", ".join(STUDIES))
    parser.add_argument("--step", type=int, metavar="N", help="measure only this step of one study; 0 is the first")
    parser.add_argument("--repeat", action="store_true", help="repeat all measurements")
    out = ROOT / "results" / "published_studies"
    parser.add_argument("--out", type=Path, default=out, help="folder of the measurements")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.studies if name not in STUDIES]
    if unknown:
        parser.error(f"no study is called {unknown[0]}; give some of {', '.join(STUDIES)}")
    studies = [STUDIES[name] for name in arguments.studies]
    if arguments.step is not None and (len(studies) > 1 or arguments.step not in range(len(studies[0].steps))):
        parser.error(f"--step {arguments.step}: give one study and the number of one of its steps")
    sys.exit(max([repeat(study, arguments.out, arguments.step, again=arguments.repeat) for study in studies]))


def repeat(study: Study, out: Path, only: int | None, *, again: bool, folder: Path = FOLDER) -> int:
    """Measure all steps, or step ``only``, and write the study's files. Return 1 if one of them has no result."""
    print(f"{study.name}: {study.title}", flush=True)
    records = {} if only is None else read_kept(study.name, folder)
    code = 0
    for number in range(len(study.steps)) if only is None else (only,):
        step = study.steps[number]
        try:
            records[number] = measure(step, out / f"{study.name}-{number}", again=again)
        except NotMeasured as error:
            records[number] = f"not measured: {step.command} {step.words}: {error}"
            code = max(code, 0 if step.needs_gpu else 1)
    write_kept(study.name, records, folder)
    text = markdown(study, read_kept(study.name, folder))
    (folder / f"{study.name}.md").write_text(text, encoding="utf-8")
    plot.write([plot.plot_of(study.name)])
    print(text, flush=True)
    return code


if __name__ == "__main__":
    main()
