"""Run the DLRM and BERT studies on this machine's GPU and compare them with the published results.

    python benchmarks/gpu/run.py [--smoke] [--out DIR] [--minutes M]

PyTorch writes the models; `tune sweep` and `tune` measure them through the PyTorch backend, on the GPU if torch was
built with CUDA. Writes dlrm.md and bert.md into DIR (this folder) within M minutes (10); steps that have not begun by
then are listed as not measured. --smoke uses tiny models and one measurement of each kind, on any machine.
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

from gpu.steps import BERT, DLRM, PROFILES, RANDOM, GpuStep, OnGpu
from published import Row
from side_by_side import tables

from optimizer.core.notes import OwnBackend

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TUNE = (sys.executable, "-c", "import sys; from optimizer.cli.main import main; sys.exit(main())")
NEVER_BEGUN_WITHIN = 20.0  # seconds before the limit, no step begins
LAST_WORDS = 15.0  # seconds for an interrupted command to end
# the report names the backend itself
OWN_BACKENDS = {str(OwnBackend(name)) for name in ("onnxruntime", "pytorch")}
ROLES = {"baseline": "as given", "recommended": "recommended"}
GPU_COLUMNS = {  # a cell's column -> the table's column and the factor between their units
    "gpu_utilization": ("GPU busy, %", 0.01),
    "gpu_memory_bytes": ("GPU memory, GB", 1e9),
    "gpu_power_watts": ("GPU power, W", 1.0),
    "energy_joules_per_1000_infer": ("J/1000 infer", 1.0),
    "gpu_sm_clock_mhz": ("SM clock, MHz", 1.0),
}


@dataclass
class StudyResults:
    """The results of a study's steps."""

    cells: list[Row] = field(default_factory=list)
    hardware: str = ""
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="use tiny models; takes seconds")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the tables")
    parser.add_argument("--work", type=Path, default=ROOT / "results" / "gpu", help="folder of models and results")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the whole run (10)")
    arguments = parser.parse_args()
    ends = time.monotonic() + 60 * arguments.minutes
    work = arguments.work.absolute()
    _write_models(work, smoke=arguments.smoke)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {study: StudyResults() for study in (DLRM, BERT)}
    for study in results:
        for step in study.steps:
            if not arguments.smoke or step.smoke:
                _measure(study, step, results[study], work, ends, smoke=arguments.smoke)
        text = markdown(study, results[study])
        (arguments.out / f"{study.model}.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    sys.exit(0 if all(one.cells for one in results.values()) else 1)


def markdown(study: OnGpu, results: StudyResults) -> str:
    about = study.study
    lines = [
        f"# {about.title}",
        "",
        "Written by `python benchmarks/gpu/run.py`.",
        "",
        f"- Published study: {about.there}.",
        f"- Published result: {about.point}.",
        f"- This study: {about.setup}.",
        f"- Machine: {results.hardware or 'not known'}; {time.strftime('%Y-%m-%d')}.",
        *(f"- Note: {note}." for note in dict.fromkeys(results.notes)),
        "",
        tables(results.cells, study.printed(), about.ratios),
        "",
        *_gpu_table(results.cells),
        "## Commands",
        "",
        "```sh",
        *results.commands,
        "```",
        "",
    ]
    return "\n".join(lines)


def _gpu_table(cells: Sequence[Row]) -> list[str]:
    """Return the table of GPU metrics, or nothing if no GPU was read."""
    known = [cell for cell in cells if any(cell.get(name) is not None for name in GPU_COLUMNS)]
    if not known:
        return []
    names = [name for name, _ in GPU_COLUMNS.values()]
    lines = ["## GPU metrics", "", f"|  | batch | concurrency | {' | '.join(names)} |"]
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


def _measure(study: OnGpu, step: GpuStep, results: StudyResults, work: Path, ends: float, *, smoke: bool) -> None:
    command = [] if step.run else ["sweep"]
    words = [*command, *(step.smoke if smoke else step.words).split(), *RANDOM.split()]
    shown = f"tune {' '.join(words)} {study.model}.yaml"
    if ends - time.monotonic() < NEVER_BEGUN_WITHIN:
        results.notes.append(f"not measured, because the time limit was reached: {shown}")
        return
    print(f"+ {shown}", flush=True)
    document = _tune([*words, "--json", "--out", str(work / "runs"), f"{work / study.model}.yaml"], ends)
    cells = _of_run(document) if step.run else document.get("cells", [])
    if not cells:
        results.notes.append(f"not measured: {shown}: {document.get('holds_back') or document['status']}")
        return
    results.cells += [cell | {"label": step.label(cell)} for cell in cells]
    results.hardware = document["hardware"]
    results.notes += [note for note in document["notes"] if note not in OWN_BACKENDS]
    results.commands.append(shown)


def _of_run(document: dict[str, Any]) -> list[Row]:
    return [document[role] | {"role": name} for role, name in ROLES.items() if document.get(role)]


def _tune(words: Sequence[str], ends: float) -> dict[str, Any]:
    """Return the document of a command, or the part that was complete when the time was over."""
    with subprocess.Popen([*TUNE, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            output, _ = running.communicate(timeout=max(1.0, ends - time.monotonic() - LAST_WORDS))
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(timeout=LAST_WORDS)
    document: dict[str, Any] = json.loads(output) if output else {"status": f"exit code {running.returncode}"}
    return document


if __name__ == "__main__":
    main()
