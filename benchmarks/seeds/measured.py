"""What the steps of a study gave: each command as a user runs it, its results kept, so that nothing is done twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastapi_baseline
import int8
from published import Row
from studies import Step

from optimizer.errors import TuneError
from optimizer.machine import hardware
from optimizer.machine.notes import machine_notes

ROOT = Path(__file__).parents[2]
PROFILES = Path(__file__).with_name("profiles")
ROLES = {"baseline": "as given", "recommended": "recommended"}
NOTHING_FOUND = 1  # exit codes of tune that come with results: 0 and this


@dataclass(frozen=True)
class Measured:
    """``cells`` are named as in trials.csv, with a ``label``. ``notes`` tell how they came about."""

    command: str
    hardware: str
    began: str
    load_average: float | None
    cells: list[Row]
    notes: list[str]


class NotMeasured(Exception):
    """Why, in a line."""


def measure(step: Step, folder: Path, *, anew: bool) -> Measured:
    """What ``folder`` holds of this step, what is missing measured first. Raises NotMeasured."""
    if step.needs_gpu and not (hardware.gpu_names() and hardware.onnxruntime_on_gpu()):
        raise NotMeasured("needs a GPU and onnxruntime-gpu: not run on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    if step.command == "fastapi":
        return _fastapi(step, folder / "fastapi.json", anew=anew)
    *flags, model = step.words.split()
    words = [*flags, _model(model, folder)]
    if step.command == "run":
        return _run(step, words, folder, anew=anew)
    told = _sweep([*words, "--json", "--out", _seen(folder)], folder, anew=anew)
    cells = [cell | {"label": step.label(cell)} for cell in told["cells"]]
    notes = [note for note in told["notes"] if not note.startswith("served by")]
    load = (told["machine"]["load_average"] or [None])[0]
    return Measured(f"tune sweep {' '.join(words)}", told["hardware"], told["began"], load, cells, notes)


def _sweep(words: list[str], folder: Path, *, anew: bool) -> dict[str, Any]:
    for path in sorted(folder.glob("*/*/sweep.json"), reverse=True) if not anew else ():
        told: dict[str, Any] = json.loads(path.read_text())
        if told["words"] == words:
            return told if told["status"] == "done" else _tune(["sweep", "--json", "--resume", _seen(path.parent)])
    return _tune(["sweep", *words])


def _run(step: Step, words: list[str], folder: Path, *, anew: bool) -> Measured:
    kept = folder / "run.json"
    told = json.loads(kept.read_text()) if kept.exists() and not anew else None
    if told is None or told["words"] != words:
        began, load = _now(), _load()
        told = _tune([*words, "--json", "--out", _seen(folder)]) | {"words": words, "began": began, "load": load}
        kept.write_text(json.dumps(told))
    found = [told[role] | {"role": name} for role, name in ROLES.items() if told[role]]
    if not found:
        raise NotMeasured(told["holds_back"])
    cells = [cell | {"label": step.label(cell)} for cell in found]
    best = found[-1]
    notes = [f"{cells[-1]['label']}: {_configuration(best)}"] if best["role"] == ROLES["recommended"] else []
    return Measured(f"tune {' '.join(words)}", told["hardware"], told["began"], told["load"], cells, notes)


def _configuration(cell: Row) -> str:
    fields = {name: value for name, value in cell.items() if "." in name}
    settings = {name: cell[name] for name in ("instance_count", "dynamic_batching", "max_queue_delay_us")} | fields
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _fastapi(step: Step, kept: Path, *, anew: bool) -> Measured:
    if anew or not kept.exists():
        began, load = _now(), _load()
        try:
            cells = fastapi_baseline.measure(kept.parent)
        except ModuleNotFoundError as error:
            raise NotMeasured(f"needs the extra fastapi ({error}): pip install 'tritune[fastapi]'") from None
        except (RuntimeError, TuneError, AssertionError) as error:
            raise NotMeasured(str(error)) from error
        kept.write_text(json.dumps({"cells": cells, "began": began, "load": load}))
    told = json.loads(kept.read_text())
    cells = [cell | {"label": step.label(cell)} for cell in told["cells"]]
    command = "python benchmarks/seeds/run.py 003-fastapi"
    return Measured(command, str(hardware.detect()), told["began"], told["load"], cells, fastapi_baseline.NOTES)


def _tune(words: Sequence[str]) -> dict[str, Any]:
    """Its document. What it says on standard error is shown as it comes."""
    done = subprocess.run(
        [Path(sys.executable).with_name("tune"), *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, NOTHING_FOUND) or not done.stdout:
        raise NotMeasured(f"tune {' '.join(words)} ended with exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _model(name: str, folder: Path) -> str:
    """A profile of this folder, the quantised model that is made first, or a name that tune knows."""
    if name == int8.NAME:
        return _seen(int8.profile(PROFILES / "bert_mini.yaml", folder))
    path = PROFILES / f"{name}.yaml"
    return _seen(path) if path.exists() else name


def _seen(path: Path) -> str:
    """From ROOT, where the commands run."""
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _load() -> float | None:
    averages = machine_notes()["load_average"]
    return averages[0] if isinstance(averages, list) else None
