"""The results of a study's steps: each command runs as a user runs it, once, and its results are stored."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastapi_baseline
import int8
from kept import StepResults
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.core.errors import TuneError
from optimizer.core.notes import OwnBackend
from optimizer.machine import hardware
from optimizer.machine.conditions import machine_conditions
from published import Row
from studies import Step

ROOT = Path(__file__).parents[2]
PROFILES = Path(__file__).with_name("profiles")
# the report names the backend itself
OWN_BACKENDS = {str(OwnBackend(name)) for name in ("onnxruntime", "pytorch")}
ROLES = {"baseline": "as given", "recommended": "recommended"}


class NotMeasured(Exception):
    """The reason why a step has no result, in one line."""


def measure(step: Step, folder: Path, *, again: bool) -> StepResults:
    """Return the results of this step from ``folder``; measure the missing ones first. Raises NotMeasured."""
    if step.needs_gpu and not (hardware.gpu_names() and hardware.onnxruntime_on_gpu()):
        raise NotMeasured("needs a GPU and onnxruntime-gpu, so it was not run on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    if step.command == "fastapi":
        return _fastapi(step, folder / "fastapi.json", again=again)
    *flags, model = step.words.split()
    words = [*flags, _model(model, folder)]
    if step.command == "run":
        return _run(step, words, folder, again=again)
    document = _sweep([*words, "--json", "--out", _seen(folder)], folder, again=again)
    cells = [cell | {"label": step.label(cell)} for cell in document["cells"]]
    notes = [note for note in document["notes"] if note not in OWN_BACKENDS]
    load = (document["machine"]["load_average"] or [None])[0]
    return StepResults(f"tune sweep {' '.join(words)}", document["hardware"], document["began"], load, cells, notes)


def _sweep(words: list[str], folder: Path, *, again: bool) -> dict[str, Any]:
    given = read_sweep_arguments(words).request.given
    for path in sorted(folder.glob("*/*/sweep.json"), reverse=True) if not again else ():
        document: dict[str, Any] = json.loads(path.read_text())
        if document["options"] == given:
            return (
                document
                if document["status"] == "done"
                else _tune(["sweep", "--json", "--resume", _seen(path.parent)])
            )
    return _tune(["sweep", *words])


def _run(step: Step, words: list[str], folder: Path, *, again: bool) -> StepResults:
    kept = folder / "run.json"
    document = json.loads(kept.read_text()) if kept.exists() and not again else None
    if document is None or document["words"] != words:
        began, load = _now(), _load()
        document = _tune([*words, "--json", "--out", _seen(folder)]) | {"words": words, "began": began, "load": load}
        kept.write_text(json.dumps(document))
    rows = [document[role] | {"role": name} for role, name in ROLES.items() if document[role]]
    if not rows:
        raise NotMeasured(document["holds_back"])
    cells = [cell | {"label": step.label(cell)} for cell in rows]
    best = rows[-1]
    notes = [f"{cells[-1]['label']}: {_configuration(best)}"] if best["role"] == ROLES["recommended"] else []
    return StepResults(
        f"tune {' '.join(words)}", document["hardware"], document["began"], document["load"], cells, notes
    )


def _configuration(cell: Row) -> str:
    fields = {name: value for name, value in cell.items() if "." in name}
    settings = {name: cell[name] for name in ("instance_count", "dynamic_batching", "max_queue_delay_us")} | fields
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _fastapi(step: Step, kept: Path, *, again: bool) -> StepResults:
    if again or not kept.exists():
        began, load = _now(), _load()
        try:
            cells = fastapi_baseline.measure(kept.parent)
        except ModuleNotFoundError as error:
            raise NotMeasured(f"needs the extra fastapi ({error}): pip install 'tritune[fastapi]'") from None
        except (RuntimeError, TuneError, AssertionError) as error:
            raise NotMeasured(str(error)) from error
        kept.write_text(json.dumps({"cells": cells, "began": began, "load": load}))
    document = json.loads(kept.read_text())
    cells = [cell | {"label": step.label(cell)} for cell in document["cells"]]
    command = "python benchmarks/published_studies/run.py minilm-fastapi"
    return StepResults(
        command, str(hardware.detect()), document["began"], document["load"], cells, fastapi_baseline.NOTES
    )


def _tune(words: Sequence[str]) -> dict[str, Any]:
    """Run tune and return its document. Its standard error is shown as it arrives."""
    done = subprocess.run(
        [Path(sys.executable).with_name("tune"), *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in EXIT_CODES.values() or not done.stdout:
        raise NotMeasured(f"tune {' '.join(words)} ended with exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _model(name: str, folder: Path) -> str:
    """Return a profile of this folder, the quantized model (created first), or a model name of ``tune``."""
    if name == int8.NAME:
        return _seen(int8.profile(PROFILES / "bert_mini.yaml", folder))
    path = PROFILES / f"{name}.yaml"
    return _seen(path) if path.exists() else name


def _seen(path: Path) -> str:
    """Return a path relative to ROOT, where the commands run."""
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _load() -> float | None:
    averages = machine_conditions()["load_average"]
    return averages[0] if isinstance(averages, list) else None
