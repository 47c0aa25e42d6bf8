"""The DLRM and BERT studies on this machine's GPU, the published figures beside.

    python benchmarks/gpu/run.py [--smoke] [--out DIR] [--minutes M]

PyTorch writes the models; `tune sweep` and `tune` measure them through the PyTorch backend, on the GPU where torch
was built with CUDA. Writes dlrm.md and bert.md into DIR (this folder) within M minutes (10): what is not begun by
then is named as not measured. --smoke takes tiny models and one measurement of each kind, on any machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "seeds"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.steps import BERT, DLRM, PROFILES, RANDOM, OnGpu, Step
from published import Row
from side_by_side import tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TUNE = (sys.executable, "-c", "import sys; from optimizer.cli import main; sys.exit(main())")
NEVER_BEGUN_WITHIN = 20.0  # seconds of the end
LAST_WORDS = 15.0  # seconds that an interrupted command has
ROLES = {"baseline": "as given", "recommended": "recommended"}
GPU_COLUMNS = {  # of a cell -> in the table, and how often its unit goes into it
    "gpu_utilization": ("GPU busy, %", 0.01),
    "gpu_memory_bytes": ("GPU memory, GB", 1e9),
    "gpu_power_watts": ("GPU power, W", 1.0),
    "energy_joules_per_1000_infer": ("J/1000 infer", 1.0),
    "gpu_sm_clock_mhz": ("SM clock, MHz", 1.0),
}


@dataclass
class Found:
    """What the steps of a study gave."""

    cells: list[Row] = field(default_factory=list)
    hardware: str = ""
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny models, seconds")
    parser.add_argument("--out", type=Path, default=HERE, help="where the tables go")
    parser.add_argument("--work", type=Path, default=ROOT / "results" / "gpu", help="models and results")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it")
    given = parser.parse_args()
    ends = time.monotonic() + 60 * given.minutes
    work = given.work.absolute()
    _write_models(work, smoke=given.smoke)
    given.out.mkdir(parents=True, exist_ok=True)
    found = {study: Found() for study in (DLRM, BERT)}
    for study in found:
        for step in study.steps:
            if not given.smoke or step.smoke:
                _measure(study, step, found[study], work, ends, smoke=given.smoke)
        text = markdown(study, found[study])
        (given.out / f"{study.model}.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    sys.exit(0 if all(one.cells for one in found.values()) else 1)


def markdown(study: OnGpu, found: Found) -> str:
    about = study.study
    lines = [
        f"# {about.title}",
        "",
        "Written by `python benchmarks/gpu/run.py`.",
        "",
        f"- The document: {about.there}.",
        f"- What it found: {about.point}.",
        f"- Here: {about.here}.",
        f"- Machine: {found.hardware or 'not known'}; {time.strftime('%Y-%m-%d')}.",
        *(f"- Note: {note}." for note in dict.fromkeys(found.notes)),
        "",
        tables(found.cells, study.printed(), about.ratios),
        "",
        *_gpu_table(found.cells),
        "## Commands",
        "",
        "```sh",
        *found.commands,
        "```",
        "",
    ]
    return "\n".join(lines)


def _gpu_table(cells: Sequence[Row]) -> list[str]:
    """Nothing where no GPU was read."""
    known = [cell for cell in cells if any(cell.get(name) is not None for name in GPU_COLUMNS)]
    if not known:
        return []
    names = [name for name, _ in GPU_COLUMNS.values()]
    lines = ["## The GPU meanwhile", "", f"|  | batch | concurrency | {' | '.join(names)} |"]
    lines.append("| --- |" + " --: |" * (2 + len(names)))
    for cell in known:
        figures = [
            "" if cell.get(name) is None else f"{cell[name] / unit:,.4g}" for name, (_, unit) in GPU_COLUMNS.items()
        ]
        at = (cell["label"], f"{cell['request_batch_size']}", f"{cell['concurrency']}")
        lines.append(f"| {' | '.join([*at, *figures])} |")
    return [*lines, ""]


def _write_models(work: Path, *, smoke: bool) -> None:
    from gpu import models

    print("writing the models", flush=True)
    models.write(work / "models", models.TINY if smoke else models.AS_PUBLISHED)
    for model, space in PROFILES.items():
        own = "" if smoke else f"{space}\n"
        (work / f"{model}.yaml").write_text(f"model: {{repository: models, name: {model}}}\n{own}")


def _measure(study: OnGpu, step: Step, found: Found, work: Path, ends: float, *, smoke: bool) -> None:
    command = [] if step.run else ["sweep"]
    words = [*command, *(step.smoke if smoke else step.words).split(), *RANDOM.split()]
    shown = f"tune {' '.join(words)} {study.model}.yaml"
    if ends - time.monotonic() < NEVER_BEGUN_WITHIN:
        found.notes.append(f"not measured, the time was over: {shown}")
        return
    print(f"+ {shown}", flush=True)
    document = _tune([*words, "--json", "--out", str(work / "runs"), f"{work / study.model}.yaml"], ends)
    cells = _of_run(document) if step.run else document.get("cells", [])
    if not cells:
        found.notes.append(f"not measured: {shown}: {document.get('holds_back') or document['status']}")
        return
    found.cells += [cell | {"label": step.label(cell)} for cell in cells]
    found.hardware = document["hardware"]
    found.notes += [note for note in document["notes"] if not note.startswith("served by")]
    found.commands.append(shown)


def _of_run(document: dict[str, Any]) -> list[Row]:
    return [document[role] | {"role": name} for role, name in ROLES.items() if document.get(role)]


def _tune(words: Sequence[str], ends: float) -> dict[str, Any]:
    """The document of a command; interrupted when the time is over, of what there is by then."""
    with subprocess.Popen([*TUNE, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            told, _ = running.communicate(timeout=max(1.0, ends - time.monotonic() - LAST_WORDS))
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            told, _ = running.communicate(timeout=LAST_WORDS)
    document: dict[str, Any] = json.loads(told) if told else {"status": f"exit code {running.returncode}"}
    return document


if __name__ == "__main__":
    main()
