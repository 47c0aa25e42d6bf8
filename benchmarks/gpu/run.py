"""Run the studies of steps.py on this machine's GPU and compare them with the published results.

    python benchmarks/gpu/run.py [--smoke] [--study dlrm|bert|bert-table] [--out DIR] [--minutes M]

PyTorch writes the models; `tune sweep` and `tune` measure them through the PyTorch backend, on the GPU if torch was
built with CUDA. plain_rounds.py measures what `tune` compared again. DIR (this folder) gets four files of each study
after each step: its tables (dlrm.md), its cells (dlrm.jsonl), the output of its commands (dlrm.log), and the folders
of its runs (dlrm-runs.tar.xz). A step that fails is listed with its reason, and the others are measured. The whole
takes at most M minutes (10). A step gets at most twice its equal share of the time left; steps that have not begun by
then are listed as not measured. The studies do not fit into 10 minutes; --study runs one of them. --smoke uses tiny
models and fewer measurements, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

sys.path.insert(0, str(Path(__file__).parents[1] / "published_studies"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.report import THROUGHPUT, StudyResults, markdown, write_files
from gpu.steps import PROFILES, STUDIES, GpuStep, OnGpu
from optimizer.core.errors import BadInputError
from optimizer.core.notes import OwnBackend
from optimizer.results.finished_run import read_run
from optimizer.results.forecast_accuracy import check_forecasts
from published import Row

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TUNE = (sys.executable, "-c", "import sys; from optimizer.cli.main import main; sys.exit(main())")
NEVER_BEGUN_WITHIN = 20.0  # seconds before the limit, no step begins
ROUNDS = HERE.parent / "plain_rounds.py"
LAST_WORDS = 15.0  # seconds for an interrupted command to end
LOG_LINES = 40  # of a failed step: of the server's log in the step's log, and of that on the terminal
# the report names the backend itself
OWN_BACKENDS = {str(OwnBackend(name)) for name in ("onnxruntime", "pytorch")}
ROLES = {"baseline": "as given", "recommended": "recommended"}


class NotMeasured(Exception):
    """A step has no figures, with the reason."""


@dataclass
class Clock:
    """The time of the steps that have not begun: ``ends`` is the limit, by ``time.monotonic``."""

    ends: float
    steps: int

    def next_limit(self) -> float:
        """Return when the next step has to end. Raises NotMeasured if there is no time for it."""
        left = self.ends - time.monotonic()
        share, self.steps = 2 * left / self.steps, self.steps - 1
        if left < NEVER_BEGUN_WITHIN:
            raise NotMeasured("the time limit was reached")
        return self.ends - max(0.0, left - share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="use tiny models; takes seconds")
    parser.add_argument("--study", choices=STUDIES, help="run only this study")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the tables")
    parser.add_argument("--work", type=Path, default=ROOT / "results" / "gpu", help="folder of models and results")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the whole run (10)")
    arguments = parser.parse_args()
    studies = [study for study in STUDIES.values() if arguments.study in (None, study.name)]
    clock = Clock(
        time.monotonic() + 60 * arguments.minutes,
        sum(1 + len(study.steps_of(smoke=arguments.smoke)) for study in studies),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    work = arguments.work.absolute()
    results = [measure(study, arguments.out, work, clock, smoke=arguments.smoke) for study in studies]
    sys.exit(0 if all(one.cells and not one.failures for one in results) else 1)


class WriteModel(Protocol):
    """Writes a model and its profile, see ``write_model``."""

    def __call__(self, model: str, work: Path, limit: float, log: TextIO, *, smoke: bool) -> None: ...


def write_model(model: str, work: Path, limit: float, log: TextIO, *, smoke: bool) -> None:
    """Write ``model`` and its profile to ``work`` until ``limit``. Raises NotMeasured."""
    work.mkdir(parents=True, exist_ok=True)
    own = "" if smoke else f"{PROFILES[model]}\n"
    (work / f"{model}.yaml").write_text(f"model: {{repository: models, name: {model}}}\n{own}")
    tiny = ("--tiny",) if smoke else ()
    _, problem = _run([sys.executable, HERE / "models.py", *tiny, model, work / "models"], limit, log)
    if problem:
        raise NotMeasured(problem)


def measure(
    study: OnGpu, out: Path, work: Path, clock: Clock, *, smoke: bool, write: WriteModel = write_model
) -> StudyResults:
    """Run the steps of a study, write its files after each of them, and return its results.

    ``write`` writes its model.
    """
    results = StudyResults()
    path, runs = out / f"{study.name}.log", work / "runs" / study.name
    path.unlink(missing_ok=True)
    with path.open("a+", encoding="utf-8") as log:
        with _isolated(f"python benchmarks/gpu/models.py {study.model}", results, log):
            write(study.model, work, clock.next_limit(), log, smoke=smoke)
        if results.failures:
            clock.steps -= len(study.steps_of(smoke=smoke))  # they are skipped: the others get their time
        for step in [] if results.failures else study.steps_of(smoke=smoke):
            with _isolated(_shown(step, study, smoke=smoke), results, log) as shown:
                words, limit = step.arguments(smoke=smoke), clock.next_limit()
                if step.command == "rounds":
                    document = _measure_again(words, results.last_run, limit, log)
                else:
                    document = _tune([*words, work / f"{study.model}.yaml"], runs, limit, log)
                _add(results, step, document, shown)
                write_files(study, results, out, runs)
        with _isolated(f"write {study.name}.md", results, log):
            write_files(study, results, out, runs)
            print(markdown(study, results), flush=True)
    return results


def _shown(step: GpuStep, study: OnGpu, *, smoke: bool) -> str:
    words = " ".join(step.arguments(smoke=smoke))
    if step.command == "rounds":
        return f"python benchmarks/plain_rounds.py {words} RUN"
    return f"tune {words} {study.model}.yaml"


@contextlib.contextmanager
def _isolated(shown: str, results: StudyResults, log: TextIO) -> Iterator[str]:
    """Run a step. Any error is added to the failures, because it must not lose the figures of the other steps."""
    for output in (log, sys.stdout):
        print(f"+ {shown}", file=output, flush=True)
    begin = log.seek(0, os.SEEK_END)
    try:
        yield shown
    except Exception as error:
        is_expected = isinstance(error, NotMeasured)
        reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
        results.failures.append(f"`{shown}`: {reason}")
        if not is_expected:
            traceback.print_exc(file=log)
        lines = _read_from(begin, log)
        print(*lines[-LOG_LINES:], f"not measured: {reason}", sep="\n", file=sys.stderr, flush=True)


def _read_from(begin: int, log: TextIO) -> list[str]:
    log.flush()
    log.seek(begin)
    return [line for line in log.read().splitlines() if line.strip()]


def _tune(arguments: Sequence[str | Path], runs: Path, limit: float, log: TextIO) -> dict[str, Any]:
    """Return the document of a command. Without one, add the end of the server's log and raise NotMeasured."""
    began = time.time()
    output, problem = _run([*TUNE, *arguments[:-1], "--json", "--out", runs, arguments[-1]], limit, log)
    if output:
        document: dict[str, Any] = json.loads(output)
        if any(cell.get(THROUGHPUT) is not None for cell in _cells(document)):
            return document
        reasons = [cell["reason"] for cell in _cells(document) if cell.get("reason")]
        problem = document.get("holds_back") or next(iter(reasons), None) or f"status {document.get('status')}"
        if document.get("status") == "interrupted":
            problem = "interrupted at its time limit"
    for file in runs.rglob("tritonserver.log"):
        if file.stat().st_mtime >= began:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            print(f"end of {file.name}:", *lines[-LOG_LINES:], sep="\n", file=log, flush=True)
    raise NotMeasured(problem)


def _measure_again(words: Sequence[str], run: Path | None, limit: float, log: TextIO) -> dict[str, Any]:
    """Return the document of plain_rounds.py for the run. Raises NotMeasured without a run or a measurement."""
    if run is None:
        raise NotMeasured("no `tune` has measured anything")
    output, problem = _run([sys.executable, ROUNDS, *words, "--json", run], limit, log)
    document: dict[str, Any] = json.loads(output) if output else {"cells": []}
    if all(cell[THROUGHPUT] is None for cell in document["cells"]):
        reasons = [cell["reason"] for cell in document["cells"] if cell["reason"]]
        raise NotMeasured(problem or next(iter(reasons), "interrupted at its time limit"))
    return document


def _cells(document: dict[str, Any]) -> list[Row]:
    """Return the cells of a sweep, or the two points of a run."""
    if "cells" in document:
        return list(document["cells"])
    return [document[role] | {"role": name} for role, name in ROLES.items() if document.get(role)]


def _add(results: StudyResults, step: GpuStep, document: dict[str, Any], shown: str) -> None:
    results.cells += [cell | {"label": step.label(cell)} for cell in _cells(document)]
    results.hardware = document["hardware"]
    results.notes += [note for note in document["notes"] if note not in OWN_BACKENDS]
    if document.get("holds_back"):
        results.notes.append(f"no recommendation: {document['holds_back'].rstrip('.')}")
    if document["status"] == "interrupted":
        results.notes.append(f"interrupted at its time limit: {shown}")
    results.commands.append(shown)
    results.rounds += document.get("rounds", ())
    if step.command == "run":
        results.last_run = ROOT / document["results_dir"]
        with contextlib.suppress(BadInputError):  # the folder of an interrupted run may lack its end
            checked = check_forecasts(read_run(results.last_run).trials)
            results.forecasts += zip(checked.throughput, checked.latency, strict=True)


def _run(command: Sequence[str | Path], limit: float, log: TextIO) -> tuple[str, str]:
    """Return the output of a command and its error in one line, empty if there is none; ``log`` gets all its errors.

    It is interrupted before ``limit``; an interrupted `tune` prints its measurements.
    """
    begin = log.seek(0, os.SEEK_END)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as running:
        try:
            output, _ = running.communicate(timeout=max(1.0, limit - LAST_WORDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            try:
                output, _ = running.communicate(timeout=LAST_WORDS)
            except subprocess.TimeoutExpired:
                running.kill()
                output, _ = running.communicate()
    if running.returncode == 0:
        return output, ""
    lines = _read_from(begin, log)
    first = next((line for line in lines if line.startswith("tune: ")), lines[-1] if lines else "no message")
    return output, f"{first.removeprefix('tune: ')} (exit code {running.returncode})"


if __name__ == "__main__":
    main()
