"""Measure what shared memory changes for the recommendation of a run (``tune explain --measure``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, MeasurementError
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.safe_text import show_path
from optimizer.core.trial import LoadPoint, Point
from optimizer.deploy.remote_address import other_machine_address
from optimizer.options.option_reader import external_names
from optimizer.options.run_options import RunOptions
from optimizer.results.configuration_text import configuration
from optimizer.results.finished_run import FinishedRun
from optimizer.results.shared_memory_effect import SharedMemoryEffect, write_effect
from optimizer.store.run_folder import WRITTEN_FORMAT, RunFolder
from optimizer.study.environment import Environment
from optimizer.study.run_request import read_stored_options

FOLDER = "explain"  # holds the logs, in the folder of the run


def measure_shared_memory(run: FinishedRun, on_progress: Callable[[str], None], rounds: int, seconds: float) -> None:
    """Measure the recommendation of ``run``, or its closest candidate, with and without system shared memory in turn.

    Both are measured for ``seconds`` in each of the ``rounds`` on the same fresh server, at the best load of the run.
    The effect is stored in the folder of the run. Raises BadInputError if the run has no such point or cannot use
    shared memory, else as a run.
    """
    point, options = _measured_point(run), read_stored_options(run.folder)
    _refuse_unmeasurable(run, options)
    shared = replace(options, shared_memory="system")
    environment = Environment.detect(shared, on_progress)
    task = environment.make_task()
    with run.folder.locked():
        folder = RunFolder.create(str(run.folder.path), FOLDER)
        fingerprint = environment.fingerprint(task)
        without = replace(shared, shared_memory="none", output_shared_memory_bytes=None)
        generators = [
            environment.make_generators(task, folder, generator_options).confirmation
            for generator_options in (without, shared)
        ]
        on_progress(f"measuring {configuration(point.candidate)} without and with shared memory, {rounds} rounds")
        with (
            environment.open_target(task, folder) as target,
            target.deploy(point.candidate, fresh=True) as endpoint,
        ):
            pairs = _measure(endpoint, point.load, generators, rounds, seconds)
        effect = SharedMemoryEffect(
            trial=point.trial,
            concurrency=point.load.concurrency,
            pairs=pairs,
            confidence=run.problem.confidence,
            hardware=str(environment.hardware),
            same_machine=run.folder.fingerprint() == fingerprint,
            measured=time.strftime(WRITTEN_FORMAT),
        )
        write_effect(run.folder.path, effect)


def _measured_point(run: FinishedRun) -> Point:
    """Return the recommendation or, without one, the closest candidate. Raises BadInputError if there is neither."""
    if run.shown is None:
        raise BadInputError(f"{show_path(run.folder.path)}: --measure: nothing was measured; run `tune` first")
    return run.shown


def _refuse_unmeasurable(run: FinishedRun, options: RunOptions) -> None:
    """Raise BadInputError if the effect of shared memory on ``run`` cannot be measured on this machine."""
    address, problem = other_machine_address(options), ""
    if options.load == "rate":
        problem = "requests are sent at a rate, so the throughput is the same; compare a run with --shared-memory"
    elif address:
        problem = f"the server at {address} is on another machine or behind a tunnel, so it shares no memory"
    elif not run.problem.is_simulated:
        problem = "the model streams or keeps state, and tune's own client sends its tensors in messages"
    elif run.concurrent_models:
        problem = "several models got load at the same time, and their requests use no shared memory"
    elif options.perf_analyzer_image is not None:
        problem = "its perf_analyzer ran in a container, which does not share memory with the server"
    elif options.cluster is not None:
        problem = "it was measured on the nodes of a cluster, not on this machine"
    elif external_names(options) and not run.folder.is_own(options):
        problem = "run.json was not written by your tune on this machine, and names code, addresses or data"
    if problem:
        raise BadInputError(f"{show_path(run.folder.path)}: --measure: {problem}")
    run.folder.refuse_links()


def _measure(
    endpoint: Endpoint, load: LoadPoint, generators: list[LoadGenerator], count: int, seconds: float
) -> tuple[tuple[float, float], ...]:
    """Return the throughputs of each of ``count`` rounds in infer/s, without and with shared memory.

    The order alternates, so that a drift of the machine cancels. Raises MeasurementError if a round served nothing,
    and ServerCrashed.
    """
    for generator in generators:
        generator.warm_up(endpoint, load)
    rounds = []
    for number in range(count):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        served = {index: generators[index].measure(endpoint, load, seconds) for index in order}
        without, with_it = (served[index].throughput_infer_per_sec for index in (0, 1))
        if not without or not with_it:
            raise MeasurementError("no request was answered in a round")
        rounds.append((without, with_it))
    return tuple(rounds)
