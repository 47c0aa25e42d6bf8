"""Checks whether the options of a run fit its model: requests, trace, priorities, load client, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from optimizer.config.model_source import ModelSource
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.queue_policy import PRIORITY_LEVELS
from optimizer.core.candidate import SERVER_CPUS, SERVER_OPTION_PREFIX, SERVER_PROCESSES, FieldChoices
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.safe_text import one_line
from optimizer.measure.load_client.arrivals import PRIORITY, SIZE, RecordedClasses
from optimizer.model.profile_schema import ScoreSection
from optimizer.model.requests import SEND_AT_RATE
from optimizer.options.run_options import STARTING_TARGETS, RunOptions, is_distribution
from optimizer.study.model_finder import NamedModel, size_fault


def check_requests(named: NamedModel, score: ScoreSection | None, options: RunOptions) -> None:
    """Raise BadInputError if the goals or the requests of ``options`` do not fit the model or its profile."""
    source, batch = named.source, named.batch
    fault = partial(size_fault, options, named.profile)
    if score is None and (options.min_score is not None or "score" in options.objectives):
        flag = "--min-score" if options.min_score is not None else "--objective score"
        raise BadInputError(
            f"{flag}: labelled data are missing; write a profile with a score: section (see docs/output-check.md)"
        )
    if batch.largest > max(limit := source.config.max_batch_size, 1):
        fix = "lower it, or raise max_batch_size in config.pbtxt"
        if named.file is not None:  # such a file gets a config.pbtxt with batches if it can have them
            fix = "leave it out, or export the model with an open first dimension"
        raise fault(f"{batch.largest} is above the model's max_batch_size {limit}; {fix}")
    if batch.fixed is None and options.load != "rate":
        raise fault(
            f"{one_line(str(batch))} is a mix of up to {batch.largest} samples per request, but perf_analyzer sends "
            f"requests of one size: give one size, or {SEND_AT_RATE}",
        )
    for name in source.concurrent:
        if batch.largest > max(limit := source.composing[name].max_batch_size, 1):
            raise fault(
                f"{batch.largest} is above the max_batch_size {limit} of {one_line(name)}, which gets requests of "
                "the same size; lower it, or raise that max_batch_size in config.pbtxt",
            )
    if source.concurrent and batch.fixed is None:
        raise fault(f"{one_line(str(batch))} is a mix, and several models get requests of one size")
    if source.concurrent and options.load == "rate" and not is_distribution(options.request_times):
        raise BadInputError(
            f"{one_line(options.request_times)}: has the requests of one model; leave out the concurrent models, or "
            "give --request-distribution"
        )


def check_server_settings(source: ModelSource, options: RunOptions, problem: Problem) -> None:
    """Raise an error if the model or the options do not allow the settings of the server in the space.

    These are its options, its CPUs and the number of its processes. The error is a ParameterError if a setting is
    not allowed at all, or a BadInputError that names the option.
    """
    settings = [path for path in problem.space.fields if path.startswith(SERVER_OPTION_PREFIX) or path == SERVER_CPUS]
    has_several = problem.space.max_server_processes > 1
    settings += [SERVER_PROCESSES] if has_several else []
    if settings and options.target not in STARTING_TARGETS:
        targets = " or ".join(STARTING_TARGETS)
        raise ParameterError(
            settings[0],
            f"tune does not start the server at {options.url}, and starts no other; leave it out, or tune on "
            f"--target {targets}",
        )
    if SERVER_CPUS in settings and options.cluster is not None:
        raise ParameterError(SERVER_CPUS, "on a cluster each trial gets free CPUs of its node; leave it out")
    if not has_several:
        return
    if source.is_stateful:
        name = one_line(source.name)
        raise ParameterError(
            SERVER_PROCESSES,
            f"{name} is stateful, and all requests of a sequence have to reach the same server; leave it out",
        )
    _check_client_options(source, options, problem.why_own_client)


def _check_client_options(source: ModelSource, options: RunOptions, why: str) -> None:
    """Raise BadInputError for options that tune's own client does not support; ``why`` says why it measures."""
    if options.protocol != "grpc":
        if options.target == "remote":  # its URL decides on the protocol
            raise BadInputError(f"--url {options.url}: {why} over gRPC only; give the gRPC port")
        raise BadInputError(f"--protocol {options.protocol}: {why} over gRPC only; use --protocol grpc")
    if options.shared_memory == "cuda":
        raise BadInputError(f"--shared-memory cuda: {why} with system memory only; give --shared-memory system")
    if options.perf_analyzer_image is not None:
        raise BadInputError(f"--perf-analyzer-image: {why}; leave it out")
    if source.kind is ModelKind.BATCHED and source.concurrent:
        raise BadInputError(f"--concurrent-models: {why} for one model only; leave the others out")


def check_warm_up(source: ModelSource, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInputError if the tuned step of an ensemble or BLS model has an input of unknown size.

    ``sizes`` are those of the inputs with variable dimensions of the requests, by name.
    """
    for tensor in source.tuned_config.input if source.batcher else ():
        if -1 in tensor.dims and tensor.name not in sizes:
            step = one_line(source.batcher)
            raise BadInputError(
                f"--model-warmup: requests go to {one_line(source.name)}, so the size of input "
                f"{one_line(tensor.name)} of {step} is not known; leave it out, or write a model_warmup into the "
                f"config.pbtxt of {step}"
            )


def check_own_client(named: NamedModel, options: RunOptions, problem: Problem) -> None:
    """Raise BadInputError for options that do not fit a model or a goal that only tune's own client measures."""
    source, name, profile = named.source, one_line(named.source.name), named.profile
    is_batched, why = source.kind is ModelKind.BATCHED, problem.why_own_client
    if is_batched and not why:
        return
    if not is_batched:
        why = f"{name} {_describe_kind(source)}, and tune's own client measures it"
    _check_client_options(source, options, why)
    if is_batched:
        return
    if options.model_warmup:
        because = "its requests belong to no sequence" if source.is_stateful else "its requests ask for no tokens"
        raise BadInputError(f"--model-warmup: {why}; {because}, so leave it out")
    if profile and profile.score is not None:
        raise profile.fault("score", problem=f"{why}; scores are those of single responses, so leave the section out")
    if source.is_stateful and options.max_error_percent:
        because = "a failed request makes the rest of its sequence void, and the sequence batcher refuses none"
        raise BadInputError(f"--max-error-rate: {why}; {because}, so leave it out")
    if source.is_stateful and named.batch.largest > 1:
        because = f"{name} is stateful, and Triton takes one sample a request; write 1"
        raise size_fault(options, named.profile, f"{named.batch.largest}: {because}")
    if source.is_stateful and options.load == "rate":
        raise BadInputError(
            f"{name} is stateful and is measured in a closed loop, without a request rate; use --load concurrency "
            "(for a sweep --concurrency)"
        )


def check_recorded_classes(file: str, classes: RecordedClasses, source: ModelSource, fields: FieldChoices) -> None:
    """Raise BadInputError if a request of the trace ``file`` does not fit the model.

    Triton gives a request whose priority the model lacks the default priority, without an error. A priority has to be
    a level of every configuration that has levels. Those without levels treat all requests alike.
    """
    name = one_line(source.name)
    if source.is_streaming or source.is_stateful:
        raise BadInputError(
            f"{file}: {name} {_describe_kind(source)}, and a trace has only its times; "
            f"leave the columns {SIZE} and {PRIORITY} out"
        )
    largest = max(source.config.max_batch_size, 1)
    levels = fewest_levels(source, fields)
    for (size, priority), line in zip(classes.classes, classes.first_lines, strict=True):
        if size > largest:
            raise BadInputError(
                f"{file}:{line}: {SIZE} {size} is above the max_batch_size {largest} of {name}; send such requests "
                "in parts, or raise max_batch_size in config.pbtxt"
            )
        if priority > levels:
            raise BadInputError(
                f"{file}:{line}: {PRIORITY} {priority}: {_describe_levels(name, levels)}; raise {PRIORITY_LEVELS} in "
                f"config.pbtxt, or leave the column {PRIORITY} out"
            )


def _describe_kind(source: ModelSource) -> str:
    return "is stateful" if source.is_stateful else "streams"


def fewest_levels(source: ModelSource, fields: FieldChoices) -> int:
    """Return the fewest priority levels of the configurations that have any; 0 if none has.

    An ensemble passes the priority of a request on to its steps, so the levels are those of the steps.
    """
    levels: list[int] = []
    for name, config in source.leaves(source.name).items():
        path = PRIORITY_LEVELS if name == source.tuned_model else f"{name}/{PRIORITY_LEVELS}"
        levels += map(int, fields.get(path, (config.dynamic_batching.priority_levels,)))
    return min(filter(None, levels), default=0)


def priorities_fault(priorities: SizeDistribution, source: ModelSource, fields: FieldChoices) -> str:
    """Return why the model cannot serve the ``priorities`` of a load; an empty text if it can."""
    name, levels = one_line(source.name), fewest_levels(source, fields)
    if source.is_streaming or source.is_stateful:
        return f"{name} {_describe_kind(source)}; leave the priorities out"
    if priorities.largest > levels:
        return (
            f"{priorities.largest}: {_describe_levels(name, levels)}; raise {PRIORITY_LEVELS} in config.pbtxt, or "
            "set priority_levels in the space of a profile (in a sweep: with --config)"
        )
    return ""


def _describe_levels(name: str, levels: int) -> str:
    return f"{name} has the levels 1 to {levels}" if levels else f"{name} has no priority levels"


def check_shared_memory(options: RunOptions, source: ModelSource, *, on_gpu: bool) -> None:
    """Raise BadInputError if the load on ``source`` cannot use the shared memory of ``options``."""
    if options.shared_memory == "none":
        return
    name = one_line(source.name)
    if source.is_streaming:
        problem = f"{name} streams, and tune's own client receives its responses in messages; leave it out"
    elif source.is_stateful:
        problem = f"{name} is stateful, and tune's own client sends its sequences in messages; leave it out"
    elif source.concurrent:
        # perf_analyzer would unregister the regions of the others
        problem = "it is not used if several models get load at the same time; leave it out"
    elif options.shared_memory == "system" and options.load != "rate" and (tensor := _tensor_with_slash(source)):
        problem = f"perf_analyzer names memory after tensors, and {tensor!r} is no name of a file; {SEND_AT_RATE}"
    elif options.shared_memory == "cuda" and not on_gpu:
        problem = f"{name} is served on the CPU; use --shared-memory system"
    else:
        return
    raise BadInputError(f"--shared-memory {options.shared_memory}: {problem}")


def _tensor_with_slash(source: ModelSource) -> str:
    """Return a tensor of the model whose name has a slash; empty if there is none."""
    tensors = (*source.config.input, *source.config.output)
    return next((one_line(tensor.name, 60) for tensor in tensors if "/" in tensor.name), "")
