"""Make the load generators of a run: one for the search, one for the confirmation on fresh servers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from optimizer.core.errors import BadInputError
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.measurement_windows import FIRST_WINDOW_MS, RATE_WINDOW_MS, STREAM_WINDOW_MS
from optimizer.core.safe_text import quote
from optimizer.core.stopwatch import Stopwatch
from optimizer.deploy import docker_engine, runtime
from optimizer.deploy.docker_container import SDK_COMMAND, ContainerRunner
from optimizer.deploy.perf_analyzer_release import ensure_older
from optimizer.machine.nvml import BUS_ORDER
from optimizer.measure.combined_load import ConcurrentLoadGenerator, ServerProcessesLoadGenerator
from optimizer.measure.explained_failures import RefusedRequestsLoadGenerator, SharedMemoryLoadGenerator
from optimizer.measure.load_client.arrivals import parse_arrivals
from optimizer.measure.load_client.base_generator import LoadClientGenerator
from optimizer.measure.load_client.client_process import SCRATCH
from optimizer.measure.load_client.generators import (
    ClosedLoopGenerator,
    OpenLoopGenerator,
    SequenceGenerator,
)
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer, PerfAnalyzerRunner
from optimizer.model.input_data import MAX_SENT_BYTES, MAX_SENT_ENTRIES, count_entries
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import RunFolder
from optimizer.study.task import Task


class PerfAnalyzerReason(Enum):
    """Why perf_analyzer, not the project's own client, measures the confirmation of a closed loop."""

    HTTP = "the load is sent over HTTP, and that client speaks gRPC only"
    SEVERAL_MODELS = "several models get load at the same time"
    IMAGE = "--perf-analyzer-image names the program that sends the load"
    CUDA = "that client passes tensors in system shared memory only, not in that of a GPU"
    INPUT_DATA = "the input data file has more entries than that client keeps in memory"


@dataclass(frozen=True)
class ClientChoice:
    """Which programs send the load of a run.

    Attributes:
        own_client_searches: Whether the project's own client measures the search; otherwise perf_analyzer does.
        perf_analyzer_reason: Why perf_analyzer measures a closed loop on fresh servers; None if the own client does.
        perf_analyzer_checks: Whether perf_analyzer checks the own client on each fresh server.
    """

    own_client_searches: bool
    perf_analyzer_reason: PerfAnalyzerReason | None
    perf_analyzer_checks: bool


def choose_clients(options: RunOptions, task: Task) -> ClientChoice:
    """Return which programs send the load of ``task``.

    The own client measures open loops, sequences and streams, and what ``Problem.why_own_client`` names. It is not
    checked by perf_analyzer in an open loop, a stream, or a mix of lengths or priorities. Several servers need one
    perf_analyzer each, whose regions of shared memory would have the same names.
    """
    problem, length, streams = task.problem, task.sequence_length, task.source.is_streaming
    if not (problem.open_loop or length is not None or streams or problem.why_own_client):
        reason = _perf_analyzer_reason(options, task)
        return ClientChoice(False, reason, perf_analyzer_checks=reason is None)
    has_mix = problem.priorities is not None or (length is not None and length.fixed is None)
    would_collide = problem.space.max_server_processes > 1 and options.shared_memory != "none"
    checks = not (problem.open_loop or streams or has_mix or would_collide)
    return ClientChoice(True, None, perf_analyzer_checks=checks)


def _perf_analyzer_reason(options: RunOptions, task: Task) -> PerfAnalyzerReason | None:
    """Return why the own client cannot send a closed loop that perf_analyzer searches; None if it can."""
    if options.protocol != "grpc":
        return PerfAnalyzerReason.HTTP
    if task.source.concurrent:
        return PerfAnalyzerReason.SEVERAL_MODELS
    if options.perf_analyzer_image is not None:
        return PerfAnalyzerReason.IMAGE
    if options.shared_memory == "cuda":
        return PerfAnalyzerReason.CUDA
    return PerfAnalyzerReason.INPUT_DATA if is_too_large(task) else None


@dataclass(frozen=True)
class LoadGenerators:
    """The load generators of a run.

    Attributes:
        search: It measures the search. For a closed loop it is perf_analyzer, unless the model streams or is
            stateful, or perf_analyzer does not report a goal.
        confirmation: It measures the windows on fresh servers, on which the verdict depends.
        cross_checking: perf_analyzer if the own closed-loop client confirms, which it checks on each fresh server;
            None otherwise. Several server processes get one perf_analyzer each. It does not check models that
            stream: with ``--streaming`` it takes the first response for the end of a request, so neither its latency
            nor its request rate are those of whole requests.
    """

    search: LoadGenerator
    confirmation: LoadGenerator
    cross_checking: LoadGenerator | None = None


def make_load_generators(
    options: RunOptions,
    task: Task,
    folder: RunFolder,
    cpus: frozenset[int],
    stopwatch: Stopwatch,
    on_progress: Callable[[str], None],
) -> LoadGenerators:
    """Return the load generators of ``task``, which run on ``cpus``; their logs are in ``folder``."""
    for scratch in list(folder.perf_analyzer_log.parent.rglob(f"{SCRATCH}*")):  # a killed run has left them
        shutil.rmtree(scratch, ignore_errors=True)
    if task.problem.why_own_client and not task.problem.open_loop and is_too_large(task):
        raise BadInputError(
            f"--input-data {quote(str(task.input_data))}: has more than {MAX_SENT_ENTRIES:,} entries, but "
            f"{task.problem.why_own_client}; that client keeps them in memory, so give fewer"
        )
    clients, own_client = choose_clients(options, task), _make_own_client(options, task, folder, cpus, stopwatch)
    if clients.own_client_searches:
        generator = _make_searching(own_client, task)
        if not clients.perf_analyzer_checks:
            return LoadGenerators(generator, generator)
        perf_analyzer = _make_perf_analyzer(options, folder, on_progress, own_client)
        return LoadGenerators(generator, generator, cross_checking=_make_checker(perf_analyzer, task))
    perf_analyzer = _make_perf_analyzer(options, folder, on_progress, own_client)
    search = _make_searching(perf_analyzer, task)
    if clients.perf_analyzer_reason:
        return LoadGenerators(search, search)
    return LoadGenerators(search, _explain_shared_memory_errors(own_client), cross_checking=search)


def _make_checker(perf_analyzer: PerfAnalyzer, task: Task) -> LoadGenerator:
    """Return ``perf_analyzer`` as it checks the own client, or one for each server process."""
    if task.sequence_length is not None:
        perf_analyzer = replace(perf_analyzer, sequence_length=task.sequence_length.fixed)
    if task.problem.space.max_server_processes > 1:
        return ServerProcessesLoadGenerator(partial(_for_server_process, perf_analyzer))
    return perf_analyzer


def _make_searching(generator: LoadClientGenerator | PerfAnalyzer, task: Task) -> LoadGenerator:
    """Return ``generator`` as it searches with the load of ``task``; one for each of several models."""
    several = bool(task.source.concurrent)
    sender = make_concurrent(generator, task) if several else _explain_shared_memory_errors(generator)
    return RefusedRequestsLoadGenerator(
        sender,
        task.unbounded,
        task.has_unbounded_numbers,
        task.baseline,
        is_stateful=task.sequence_length is not None,
        other_models=tuple(task.source.concurrent),
    )


def _explain_shared_memory_errors(generator: LoadClientGenerator | PerfAnalyzer) -> LoadGenerator:
    """Return ``generator``, with explanations of its failures if it uses shared memory."""
    return SharedMemoryLoadGenerator(generator, generator.shared_memory) if generator.shared_memory else generator


def perf_analyzer_identity(options: RunOptions, task: Task, on_progress: Callable[[str], None]) -> str:
    """Return the version of the perf_analyzer that measures or checks ``task``, or the ID of its image.

    The result is empty if tune's own client alone measures. Raises EnvironmentFault.
    """
    clients = choose_clients(options, task)
    if clients.own_client_searches and not clients.perf_analyzer_checks:
        return ""
    if options.perf_analyzer_image is not None:
        return docker_engine.image_id(options.perf_analyzer_image)
    return runtime.ensure(on_progress).perf_analyzer_version


def _make_own_client(
    options: RunOptions, task: Task, folder: RunFolder, cpus: frozenset[int], stopwatch: Stopwatch
) -> LoadClientGenerator:
    """Return the generator that starts tune's own client: for an open loop, for sequences, or for a closed loop."""
    default_ms = RATE_WINDOW_MS if task.problem.open_loop else FIRST_WINDOW_MS
    if task.source.is_streaming:
        default_ms = STREAM_WINDOW_MS
    make: Callable[..., LoadClientGenerator] = ClosedLoopGenerator
    if task.problem.open_loop:
        arrivals, mix = parse_arrivals(options.request_times), task.problem.request_mix
        make = partial(OpenLoopGenerator, arrivals=arrivals, request_mix=mix)
    elif task.sequence_length is not None:
        make = partial(SequenceGenerator, sequence_length=task.sequence_length)
    return make(
        log=folder.perf_analyzer_log.with_name("open_loop.log" if task.problem.open_loop else "closed_loop.log"),
        input_data=task.input_data,
        shapes=task.shapes,
        priorities=task.problem.priorities,
        sla=task.problem.sla.latencies,
        seed=options.seed,
        window_ms=round(options.measurement_interval_ms or default_ms),
        cpus=cpus,
        stopwatch=stopwatch,
        is_streaming=task.source.is_streaming,
        token_output=task.token_output,
        shared_memory=options.requested_shared_memory(),
        counts_failures=bool(task.problem.sla.permitted_failures),
    )


def _make_perf_analyzer(
    options: RunOptions, folder: RunFolder, on_progress: Callable[[str], None], own_client: LoadClientGenerator
) -> PerfAnalyzer:
    """Return perf_analyzer with the settings that the project's own client has too."""
    installed, image = runtime.ensure(on_progress), options.perf_analyzer_image
    runner: PerfAnalyzerRunner
    if image is None:
        variables = {} if options.target == "remote" else BUS_ORDER  # the order of the servers that tune starts
        older = partial(ensure_older, on_progress)
        runner = LocalRunner(installed.perf_analyzer_libraries, variables, older)
    else:
        runner = ContainerRunner(image)
    return PerfAnalyzer(
        installed.perf_analyzer if image is None else Path(SDK_COMMAND),
        runner,
        folder.perf_analyzer_log,
        protocol=options.protocol,
        input_data=own_client.input_data,
        shapes=own_client.shapes,
        stopwatch=own_client.stopwatch,
        window_ms=own_client.window_ms,
        latency_bound_ms=own_client.latency_bound_ms,
        cpus=own_client.cpus,
        shared_memory=own_client.shared_memory,
    )


def _for_server_process(checker: PerfAnalyzer, number: int) -> PerfAnalyzer:
    """Return ``checker`` with files of its own for a server process, from 1."""
    log = checker.log if number == 1 else checker.log.parent / f"process-{number}" / checker.log.name
    log.parent.mkdir(exist_ok=True)
    return replace(checker, log=log)


def is_too_large(task: Task) -> bool:
    """Return whether the own client cannot keep all entries of the file of requests in memory.

    It keeps a single entry of any size.
    """
    count = count_entries(task.input_data)
    return count > MAX_SENT_ENTRIES or (count > 1 and task.input_data.stat().st_size > MAX_SENT_BYTES)


def make_concurrent(generator: LoadClientGenerator | PerfAnalyzer, task: Task) -> ConcurrentLoadGenerator:
    """Return one generator for each model, each with its own files; none continues when the others have ended."""
    generator = replace(generator, repeat=False)
    generators = {task.source.name: generator}
    for name, requests in task.concurrent.items():
        log = generator.log.parent / name / generator.log.name
        log.parent.mkdir(exist_ok=True)
        generators[name] = replace(generator, log=log, input_data=requests.input_data, shapes=requests.shapes)
    shares = {task.source.name: 1.0, **task.source.concurrent}
    for number, (name, one) in enumerate(generators.items()):
        if isinstance(one, OpenLoopGenerator):  # models do not get their requests at the same times
            generators[name] = replace(one, seed=one.seed + number, lowest_share=min(shares.values()) / shares[name])
    return ConcurrentLoadGenerator(generators, shares)
