"""Make the task of a run from its options: model, requests, search space, objectives and constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from objectives.metrics import METRICS, QUANTILES
from objectives.sla import Sla
from objectives.units import parse_rate
from optimizer.config import model_config
from optimizer.config.backends import backend_of, is_ensemble
from optimizer.config.gpu_placement import instance_total
from optimizer.config.model_source import ModelSource, configured_candidate
from optimizer.config.ort_settings import check_ort_settings
from optimizer.config.problem import ConcurrentModel, Problem
from optimizer.config.queue_policy import Fields, configured_queue, with_default_queue
from optimizer.config.search_space import INSTANCE_COUNT, SearchSpace
from optimizer.core.candidate import Candidate, FieldChoices, FieldValue, model_of_field
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.files import cache_folder
from optimizer.core.notes import OpenLoopSampleLimit, PerfAnalyzerSampleLimit
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.trial import TrialRole
from optimizer.deploy.remote_address import other_machine_address
from optimizer.machine.hardware import Hardware
from optimizer.measure.load_client.arrivals import Arrivals, RecordedArrivals, option_arrivals
from optimizer.measure.output_comparison import Tolerance
from optimizer.model.default_space import build_space
from optimizer.model.instances import DeviceAssignment, has_gpu_choice, too_many_instances
from optimizer.model.profile_schema import LoadSection, ScoreSection, SpaceSection
from optimizer.model.requests import InputOptionError, RequestBatching, RequestOptions, Requests, prepare_requests
from optimizer.options.run_options import RunOptions
from optimizer.study.model_finder import NamedModel, find_model
from optimizer.study.option_check import (
    check_own_client,
    check_recorded_classes,
    check_requests,
    check_server_settings,
    check_shared_memory,
    check_warm_up,
)
from optimizer.study.task_requests import (
    make_requests,
    request_options,
    request_priorities,
    sequence_lengths,
    token_requests,
)

DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True)
class Task:
    """The model, the problem and the requests of a run.

    Attributes:
        source: The model, and the models that are served with it.
        problem: The search space, the objectives and the constraints.
        baseline: The model's own configuration.
        dynamic_batching: The same with default dynamic batching.
        input_data: The requests, in perf_analyzer's JSON.
        shapes: Argument of perf_analyzer.
        tolerance: The allowed difference from the baseline's outputs.
        score: How outputs are scored; None if they are not.
        unbounded: Names of the inputs that get any integer of their type.
        has_unbounded_numbers: Whether the user gave no bounds for the random numbers of an input.
        concurrent: The requests to the models that get load at the same time, by model.
        notes: Notes for the user on the conversion of Model Analyzer's file.
        request_note: A note for the user on the requests.
        on_gpu: Whether any instance of any model runs on a GPU.
        token_output: The output whose elements are the tokens of a model that streams; empty if each response is one
            token.
        sequence_length: Number of requests in a sequence to a stateful model; None for other models.
    """

    source: ModelSource
    problem: Problem
    baseline: Candidate
    dynamic_batching: Candidate
    input_data: Path
    shapes: tuple[str, ...] = ()
    tolerance: Tolerance = DEFAULT_TOLERANCE
    score: ScoreSection | None = None
    unbounded: tuple[str, ...] = ()
    has_unbounded_numbers: bool = False
    concurrent: Mapping[str, Requests] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    request_note: PerfAnalyzerSampleLimit | OpenLoopSampleLimit | None = None
    on_gpu: bool = False
    token_output: str = ""
    sequence_length: SizeDistribution | None = None

    def comparisons(self) -> list[tuple[TrialRole, Candidate]]:
        """Return the roles and configurations that are measured first; one if both behave the same."""
        roles: list[tuple[TrialRole, Candidate]] = [
            ("baseline", self.baseline),
            ("dynamic_batching", self.dynamic_batching),
        ]
        return roles[: 1 if self.baseline == self.dynamic_batching else 2]


def prepare_task(
    options: RunOptions,
    hardware: Hardware,
    on_progress: Callable[[str], None],
    swept: FieldChoices | None = None,
) -> Task:
    """Find or build the model and return its task. Raises BadInputError.

    ``hardware`` is the server's. Whether its GPUs serve the model follows from configuration and backend. ``swept``
    are the fields that a sweep tries in place of the space, so they decide which priorities can be sent.
    """
    arrivals = option_arrivals(options.request_times) if options.load == "rate" else None  # before a model is built
    named = find_model(options, hardware, on_progress)
    source, profile = named.source, named.profile
    hardware = serving_hardware(named, hardware, options)
    space = search_space(named, hardware, options)
    fields = space.fields if swept is None else swept
    _check_options_of_model(named, options, arrivals, fields, on_gpu=bool(hardware.gpus))
    sequence_length = sequence_lengths(named, options)
    problem = _make_problem(named, space, hardware, options, arrivals, fields)
    for hint in _hints_on_low_percentiles(problem.sla):
        on_progress(hint)
    _check_options_of_problem(named, options, problem)
    batching = RequestBatching(
        named.batch.largest, options.load == "rate", options.seed, mixed=named.batch.fixed is None
    )
    asked = request_options(named, options)
    requests = make_requests(named, batching, _own_options(asked, source), problem.tokens)
    if options.model_warmup:
        check_warm_up(source, requests.largest)
        source = replace(source, warm_up=requests.largest)
    baseline, dynamic_batching = _compared_candidates(source, space.fields)
    return Task(
        source=source,
        problem=problem,
        baseline=baseline,
        dynamic_batching=dynamic_batching,
        input_data=requests.input_data,
        shapes=requests.shapes,
        tolerance=Tolerance(profile.tolerance.relative, profile.tolerance.absolute) if profile else DEFAULT_TOLERANCE,
        score=profile.score if profile else None,
        unbounded=requests.unbounded,
        has_unbounded_numbers=requests.has_unbounded_numbers,
        concurrent=_concurrent_requests(source, batching, asked),
        notes=named.notes,
        request_note=requests.note,
        on_gpu=bool(hardware.gpus),
        token_output=(profile.tokens.output_tensor if profile else None) or "",
        sequence_length=sequence_length,
    )


def _check_options_of_model(
    named: NamedModel, options: RunOptions, arrivals: Arrivals | None, fields: FieldChoices, *, on_gpu: bool
) -> None:
    """Raise BadInputError if the model cannot get the requests of ``arrivals`` and ``options``."""
    if isinstance(arrivals, RecordedArrivals) and arrivals.classes is not None:
        check_recorded_classes(arrivals.name, arrivals.classes, named.source, fields)
    check_requests(named, named.profile.score if named.profile else None, options)
    check_shared_memory(options, named.source, on_gpu=on_gpu)


def _check_options_of_problem(named: NamedModel, options: RunOptions, problem: Problem) -> None:
    """Raise BadInputError if the server or the load client of ``options`` does not fit ``problem``."""
    try:
        check_server_settings(named.source, options, problem)
    except ParameterError as error:
        assert named.profile is not None, "without a profile the space has no settings of the server"
        raise named.profile.space_fault(error) from None
    check_own_client(named, options, problem)


def _concurrent_requests(
    source: ModelSource, batching: RequestBatching, asked: RequestOptions
) -> dict[str, Requests]:
    """Return the requests to each model that gets load at the same time as the tuned one.

    They are random. In ``asked`` and in ``unbounded`` their inputs are ``MODEL/INPUT``. A range may name several
    inputs of a model, separated by commas.
    """
    requests = {}
    for name in source.concurrent:
        prefix = f"{name}/"
        shapes, ranges = (
            tuple(text.removeprefix(prefix).replace(f",{prefix}", ",") for text in texts if text.startswith(prefix))
            for texts in (asked.shapes, asked.ranges)
        )
        options = RequestOptions(shapes=shapes, ranges=ranges)
        try:
            index_ranges, config = source.index_ranges_of(name), source.composing[name]
            own = prepare_requests(options, config, batching, cache_folder(), index_ranges=index_ranges)
        except InputOptionError as error:
            raise InputOptionError(error.kind, f"{prefix}{error.text}", error.problem) from None
        requests[name] = replace(own, unbounded=tuple(f"{prefix}{tensor}" for tensor in own.unbounded))
    return requests


def _own_options(asked: RequestOptions, source: ModelSource) -> RequestOptions:
    """Return ``asked`` without the shapes and ranges of the other models that get load."""
    others = tuple(f"{name}/" for name in source.concurrent)
    shapes, ranges = (
        tuple(text for text in texts if not text.startswith(others)) for texts in (asked.shapes, asked.ranges)
    )
    return replace(asked, shapes=shapes, ranges=ranges)


def _make_problem(
    named: NamedModel,
    space: SearchSpace,
    hardware: Hardware,
    options: RunOptions,
    arrivals: Arrivals | None,
    fields: FieldChoices,
) -> Problem:
    """Return the problem to solve on ``hardware``, which serves the model; ``fields`` are those that are tried."""
    source, batch, on_gpu = named.source, named.batch, bool(hardware.gpus)
    load = named.profile.load if named.profile else LoadSection()
    return Problem(
        model=source.name,
        space=space,
        request_batch_size=batch.mean,
        request_mix=None if batch.fixed else batch,
        max_concurrency=load.max_concurrency,
        objectives=tuple(METRICS[_metric(name, on_gpu)] for name in options.objectives),
        sla=_sla(named, options, on_gpu=on_gpu),
        open_loop=options.load == "rate",
        confidence=options.confidence,
        fixed_shapes=model_config.has_fixed_shapes(source.tuned_config),
        # that of another machine is unknown
        cpu_count=None if on_gpu or other_machine_address(options) else hardware.cpu_count,
        kind=source.kind,
        request_times=arrivals.times if arrivals else None,
        tokens=token_requests(named, request_options(named, options), options),
        priorities=request_priorities(named, fields, options, arrivals),
        queue=_common_queue(source),
        concurrent=_concurrent_models(source),
    )


def _concurrent_models(source: ModelSource) -> tuple[ConcurrentModel, ...]:
    """Return the other models that get load, with their configuration; none if one of them is an ensemble."""
    configs = {name: source.composing[name] for name in source.concurrent}
    if any(map(is_ensemble, configs.values())):
        return ()
    candidates = {name: model_config.candidate_of(config, keep_counts=True) for name, config in configs.items()}
    for name, candidate in candidates.items():
        if not candidate.instance_count:  # its groups have different counts, which no candidate changes
            candidates[name] = replace(candidate, instance_count=instance_total(configs[name]))
    return tuple(ConcurrentModel(name, share, candidates[name]) for name, share in source.concurrent.items())


def _compared_candidates(source: ModelSource, fields: FieldChoices) -> tuple[Candidate, Candidate]:
    """Return the model's own configuration, and the same with default dynamic batching if Triton allows it."""
    baseline = configured_candidate(source, fields)
    dynamic_batching = baseline
    if source.is_stateful:
        pass  # Triton allows no dynamic batching next to the sequence batcher
    elif source.tuned_config.max_batch_size > 1 and not baseline.dynamic_batching:
        dynamic_batching = replace(baseline, dynamic_batching=True)
    elif baseline.dynamic_batching:
        dynamic_batching = replace(baseline, max_queue_delay_us=0, preferred_batch_sizes=())
    return with_default_queue(baseline, fields), with_default_queue(dynamic_batching, fields)


def _common_queue(source: ModelSource) -> Fields:
    """Return the queue settings in config.pbtxt of the tuned model; none if its variants have other ones."""
    tuned, *variants = map(configured_queue, (source.tuned_config, *source.variants.values()))
    return tuned if all(other == tuned for other in variants) else ()


def serving_hardware(named: NamedModel, hardware: Hardware, options: RunOptions) -> Hardware:
    """Return the hardware that serves the model: ``hardware``, without its GPUs if none is used."""
    assignment = DeviceAssignment.of(options, hardware.gpus)
    section = named.profile.space if named.profile else None
    chooses_gpu = section is not None and has_gpu_choice(section.fields())
    return hardware if chooses_gpu or assignment.source_on_gpu(named.source) else replace(hardware, gpus=())


def _metric(metric: str, on_gpu: bool) -> str:
    """Return the name of the metric: memory is that of the GPU for a model on one, else that of the server."""
    return "gpu-memory" if metric == "memory" and on_gpu else metric


def search_space(named: NamedModel, hardware: Hardware, options: RunOptions) -> SearchSpace:
    """Return the search space of the model on the hardware that serves it. Raises BadInputError."""
    section = named.profile.space if named.profile else None
    try:
        embedded = options.target == "embedded"
        space = build_space(section or SpaceSection(), named.source, named.batch, hardware, is_embedded=embedded)
        _check_instances(space, named.source, options, on_gpu=bool(hardware.gpus))
        check_settings(space.fields, named.source, options, on_gpu=bool(hardware.gpus))
        return space
    except ValueError as error:
        if named.profile:
            raise named.profile.space_fault(error) from None
        config = named.source.folder(named.source.name) / "config.pbtxt"
        raise BadInputError(f"{config}: {error}") from None


def check_settings(
    fields: Mapping[str, Iterable[FieldValue]], source: ModelSource, options: RunOptions, *, on_gpu: bool
) -> None:
    """Raise ParameterError if a choice of ``fields`` has no effect on how the tuned model is executed.

    ``on_gpu`` is whether any model is, or may be, served on a GPU.
    """
    config = source.tuned_config
    is_known = on_gpu or options.target != "remote"  # a remote server need not report its GPUs
    assignment = DeviceAssignment(int(on_gpu), is_embedded=options.target == "embedded")
    tuned_fields = {path: values for path, values in fields.items() if not model_of_field(path)}
    on_gpu = assignment.on_gpu(config) or (on_gpu and has_gpu_choice(tuned_fields))
    check_ort_settings(
        fields,
        config,
        backend_of(config),
        on_gpu=on_gpu if is_known else None,
        is_embedded=options.target == "embedded",
    )


def _check_instances(space: SearchSpace, source: ModelSource, options: RunOptions, *, on_gpu: bool) -> None:
    """Raise ParameterError if a choice is too large a number of instances."""
    choices: dict[str, Iterable[FieldValue]] = {"instance_count": space.instance_count}
    choices |= {path: values for path, values in space.fields.items() if path.endswith(f"/{INSTANCE_COUNT}")}
    for path, values in choices.items():
        counts = [int(value) for value in values]
        if problem := too_many_instances(counts, source, options, on_gpu=on_gpu):
            raise ParameterError(path, problem)


def _sla(named: NamedModel, options: RunOptions, *, on_gpu: bool) -> Sla:
    """Return the SLA; latency bounds of the command line replace those of the profile."""
    score = named.profile.score if named.profile else None
    bounds: dict[str, float] = dict(options.sla_ms.items())
    if not bounds and named.profile:
        bounds = named.profile.sla.latency_bounds_ms()
    if options.min_throughput:
        bounds["throughput"] = parse_rate(options.min_throughput, named.batch.mean)
    if options.max_memory_bytes:
        bounds[_metric("memory", on_gpu)] = options.max_memory_bytes
    if options.max_error_percent:
        bounds["error-rate"] = options.max_error_percent
    min_score = options.min_score if options.min_score is not None or score is None else score.minimum
    if min_score is not None:
        bounds["score"] = min_score
    sla = Sla.from_bounds(bounds)
    _check_timings(sla, options.objectives, named)
    return sla


def _hints_on_low_percentiles(sla: Sla) -> Iterator[str]:
    """Yield the share of late requests that each bound on a percentile between p50 and p90 permits."""
    for bound in sla.latencies:
        metric = METRICS[bound.metric]
        if metric.quantile is None or not 0.5 < metric.quantile < 0.9:
            continue
        swapped = f"p{metric.statistic[:0:-1]}"
        meant = f"; did you mean {swapped}?" if swapped in QUANTILES else ""
        yield f"{bound} lets {100 * (1 - metric.quantile):.4g} % of the requests be late{meant}"


def _check_timings(sla: Sla, objectives: Sequence[str], named: NamedModel) -> None:
    """Raise BadInputError if the goals need responses that stream, and the model does not send them."""
    if named.source.is_streaming:
        return
    timings = {bound: METRICS[bound.metric].timing for bound in sla.latencies}
    streamed = [bound for bound, timing in timings.items() if timing and timing.needs_streaming]
    if "output-throughput" in objectives:
        goal, remedy = "--objective output-throughput", "use --objective throughput"
    elif streamed:
        goal, remedy = f"the bound {streamed[0]}", "bound its latency instead, such as --sla-p95 20ms"
    else:
        return
    raise BadInputError(
        f"{goal}: {named.source.name} sends one response to a request; only a decoupled model streams "
        f"(model_transaction_policy in config.pbtxt), so {remedy}"
    )
