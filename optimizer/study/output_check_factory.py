"""Makes the output check of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from optimizer.core.interfaces import OutputCheck
from optimizer.core.notes import OutputsNotCompared
from optimizer.measure.output_check import (
    BaselineOutputCheck,
    CombinedOutputCheck,
    NoOutputCheck,
    SequenceOutputCheck,
    StreamedOutputCheck,
)
from optimizer.model.requests import Requests
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import RunFolder
from optimizer.study.task import Task


def make_output_check(options: RunOptions, task: Task, folder: RunFolder) -> OutputCheck:
    """Return the check that compares outputs with the reference outputs in ``folder``, which it writes if missing."""
    if not options.output_check:
        return NoOutputCheck(OutputsNotCompared())
    length = task.sequence_length
    kind: Callable[..., BaselineOutputCheck] = (
        StreamedOutputCheck if task.source.is_streaming else BaselineOutputCheck
    )
    if length is not None:
        kind = partial(SequenceOutputCheck, sequence_length=length.largest)

    def make_check(file: Path, requests: Task | Requests) -> BaselineOutputCheck:
        return kind(
            file,
            input_data=requests.input_data,
            shapes=requests.shapes,
            request_batch_size=task.problem.space.request_batch_size,
            unbounded=requests.unbounded,
            tolerance=task.tolerance,
        )

    own = make_check(folder.reference, task)
    if not task.concurrent:
        return own
    others = {name: make_check(folder.reference_of(name), requests) for name, requests in task.concurrent.items()}
    return CombinedOutputCheck({task.source.name: own, **others})
