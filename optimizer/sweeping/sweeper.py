"""``tune sweep``: deploys each configuration of a plan and measures each of its loads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from optimizer import interrupts, model_config, placement, runtime
from optimizer.deployment import deployment
from optimizer.errors import BadInputError, DeploymentError, ServerCrashed
from optimizer.interfaces import Target
from optimizer.machine.notes import machine_notes
from optimizer.measuring import Measuring, Watcher
from optimizer.model_source import ModelSource
from optimizer.options import RunOptions
from optimizer.requests.fitted import Requests
from optimizer.requests.sent import Sent
from optimizer.space import Space
from optimizer.stack import Stack
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.sweeping import document
from optimizer.sweeping.plan import Asked, Cell, Plan, cells, configurations
from optimizer.sweeping.tables import SweepTables
from optimizer.task import Task
from optimizer.trial import VARIANT, Candidate, LoadPoint, Trial

Status = Literal["done", "interrupted"]


@dataclass(frozen=True)
class Result:
    """``document`` is what ``--json`` prints."""

    status: Status
    plan: Plan
    cells: list[Cell]
    folder: RunFolder
    document: dict[str, Any]


@dataclass
class Sweeper:
    """Measures what is missing, each round over all configurations in turn: a drift of the machine hits all alike."""

    plan: Plan
    target: Target
    measuring: Measuring

    def run(self) -> None:
        """All that is measured is in the table, whatever stops it."""
        trials = {trial.number: trial for trial in self.measuring.table.read()}
        for rounds in range(1, self.plan.repeat + 1):
            for number, candidate in enumerate(self.plan.configurations):
                trial = trials.get(number, Trial(number, candidate))
                trials[number] = self._measure(trial, self.plan.missing(trial, rounds))

    def _measure(self, trial: Trial, loads: list[LoadPoint]) -> Trial:
        """``trial`` with ``loads`` measured; one that crashes the server is left, the next gets another server."""
        while loads:
            left = len(loads)
            try:
                trial = self._deploy_and_measure(trial, loads)
            except ServerCrashed as error:
                if len(loads) == left:
                    return self._failed(trial, error)
            except DeploymentError as error:
                return self._failed(trial, error)
        return trial

    def _deploy_and_measure(self, trial: Trial, loads: list[LoadPoint]) -> Trial:
        started = time.monotonic()
        with self.target.deploy(trial.candidate) as endpoint:
            trial = replace(trial, deploy_seconds=round(time.monotonic() - started, 3))
            self.measuring.watcher.trial_started(trial.number, trial.candidate, "sweep")
            self.measuring.load_generator.warm_up(endpoint, loads[0])
            while loads:
                trial = self.measuring.measure(trial, endpoint, loads.pop(0))
        return trial

    def _failed(self, trial: Trial, error: DeploymentError) -> Trial:
        failed = replace(trial, status="failed", reason=str(error))
        self.measuring.table.append_failure(failed)
        self.measuring.watcher.trial_finished(failed, None)
        return failed


def sweep(
    options: RunOptions,
    asked: Asked,
    resumed: RunFolder | None,
    say: Callable[[str], None],
    watch: Callable[[Plan], Watcher],
) -> Result:
    """Measure what is asked, or what is missing of the sweep in ``resumed``. Raises TuneError.

    An interrupt (KeyboardInterrupt) ends it early, with what there is.
    """
    stopwatch = Stopwatch()
    stack = Stack.detect(options, stopwatch, say)
    if resumed is None:
        RunFolder.check(options.out)
    what = stack.task()
    here = stack.fingerprint(what)
    plan, what = _planned(what, asked, len(stack.hardware.gpus))
    folder = resumed or RunFolder.create(options.out, what.source.name)
    with folder.locked():
        table = SweepTables(folder, what.source.name, plan, what.problem.space.fields, here.id)
        status: Status = "done"
        facts = document.Facts(
            command=document.command(asked.words),
            words=list(asked.words),
            model={"name": what.source.name, **what.source.facts},
            hardware=str(stack.hardware),
            fingerprint=here.document(),
            machine=machine_notes(),
            began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            results_dir=str(folder.path),
        )
        document.write(folder, document.of("running", facts, [], stack.notes(what), stopwatch.wall_seconds()))
        try:
            with contextlib.closing(stack.target(what, folder)) as target:
                target.start()
                Sweeper(plan, target, stack.measuring(what, folder, table, watch(plan))).run()
        except KeyboardInterrupt:
            interrupts.acknowledge()
            status = "interrupted"
        found = cells(plan, table.read())
        notes = (*stack.notes(what), *document.notes(found))
        told = document.of(status, facts, found, notes, stopwatch.wall_seconds())
        document.write(folder, told)
    return Result(status, plan, found, folder, told)


def _planned(what: Task, asked: Asked, gpu_count: int) -> tuple[Plan, Task]:
    """The plan for this model, and the task with the fields that are swept as its only parameters."""
    own = model_config.candidate_of(what.source.batched, asked.choices.fields)
    found = _each_variant(configurations(own, asked.choices), what.source)
    for path, value in dict.fromkeys(field for candidate in found for field in candidate.fields):
        if path in asked.choices.fields and (missing := placement.absent(path, value, gpu_count)):
            raise BadInputError(f"--config {path}: {missing}")
    for candidate in found:
        try:
            deployment(what.source, candidate)
        except ValueError as error:
            raise BadInputError(f"--config {error}") from None
    sizes = asked.request_batch_size or (what.problem.request_batch_size,)
    loads = tuple(
        [LoadPoint(size, concurrency) for size in sizes for concurrency in asked.concurrency]
        + [LoadPoint(size, request_rate=rate) for size in sizes for rate in asked.request_rate]
    )
    mix = None if asked.request_batch_size else what.problem.request_mix
    plan = Plan(found, loads, asked.repeat, mix.largest if mix else 0)
    if not len(plan):
        largest = max(candidate.max_batch_size for candidate in found)
        asked_for = mix.largest if mix else min(sizes)
        raise BadInputError(
            f"--request-batch-size {asked_for} is above every max_batch_size ({largest}); lower it, or raise that"
        )
    sent = Requests(what.input_data, note=what.request_note)
    if asked.concurrency:  # the same for requests of any size
        sent = sent.soon_prepared(Sent(round(max(sizes))), runtime.cache_folder())
    fields = {**asked.choices.fields, **({VARIANT: tuple(what.source.variants)} if what.source.variants else {})}
    space = Space((max(candidate.max_batch_size for candidate in found),), fields=fields)
    problem = replace(what.problem, space=space, request_mix=mix)
    return plan, replace(what, problem=problem, input_data=sent.input_data, request_note=sent.note)


def _each_variant(found: tuple[Candidate, ...], source: ModelSource) -> tuple[Candidate, ...]:
    """The same of each model that can take its place, side by side."""
    if not source.variants:
        return found
    return tuple(
        replace(candidate, fields=tuple(sorted((*candidate.fields, (VARIANT, name)))))
        for candidate in found
        for name in source.variants
    )
