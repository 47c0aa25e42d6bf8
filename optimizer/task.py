"""From what the user named to what is tuned: the model, its requests, its space, what is good enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import METRICS
from objectives.sla import Constraint, parse_rate
from optimizer import model_config, runtime
from optimizer.answers.comparison import Tolerance
from optimizer.deployment import as_given
from optimizer.derived_space import space_of
from optimizer.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.model_source import ModelSource
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.profile.schema import ScoreSection, SpaceSection
from optimizer.requests.asked import Asked
from optimizer.requests.fitted import Requests, fitted
from optimizer.requests.sent import Sent
from optimizer.requests.sizes import Dim
from optimizer.serving import Serving, asks_for_gpu
from optimizer.sources.named import Named, find
from optimizer.space import Space
from optimizer.trial import Candidate

MAX_CONCURRENCY = 256
DEFAULT_TOLERANCE = Tolerance()
NOTHING_ASKED = Asked()


@dataclass(frozen=True)
class Task:
    """``baseline`` is the configuration as given, ``dynamic_batching`` the same with plain dynamic batching.

    ``input_data`` and ``shapes`` are perf_analyzer's. ``tolerance`` is by how much answers may differ from the
    baseline's, ``score`` what is to be made of them. ``notes``: what became of a file of Model Analyzer.
    ``request_note``: what the user should know of the requests. ``unbounded``: inputs that get any integer of their
    type. ``concurrent``: what is sent to the models beside. ``on_gpu``: some instances of some model run on a GPU.
    """

    source: ModelSource
    problem: Problem
    baseline: Candidate
    dynamic_batching: Candidate
    input_data: str
    shapes: tuple[str, ...] = ()
    tolerance: Tolerance = DEFAULT_TOLERANCE
    score: ScoreSection | None = None
    unbounded: tuple[str, ...] = ()
    concurrent: Mapping[str, Requests] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    request_note: str = ""
    on_gpu: bool = False

    def comparisons(self) -> list[tuple[str, Candidate]]:
        """What is measured first, by role; one entry where the two behave the same."""
        roles = [("baseline", self.baseline), ("dynamic_batching", self.dynamic_batching)]
        return roles[: 1 if self.baseline == self.dynamic_batching else 2]


def prepare(options: RunOptions, hardware: Hardware, say: Callable[[str], None]) -> Task:
    """Find or build the model and derive the problem. Raises BadInputError.

    ``hardware`` is what the server sees; whether its GPUs serve the model follows from its configuration and backend.
    """
    named = find(options, hardware, say)
    source, batch, profile = named.source, named.batch, named.profile
    if not (on_gpu := _on_gpu(named, options, hardware)):
        hardware = replace(hardware, gpus=())
    space = _space(named, hardware)
    score = profile.score if profile else None
    _check(source, batch, score, options)
    problem = Problem(
        model=source.name,
        space=space,
        request_batch_size=batch.mean,
        request_mix=None if batch.fixed else batch,
        max_concurrency=profile.load.max_concurrency if profile else MAX_CONCURRENCY,
        objectives=tuple(METRICS[_measured(name, on_gpu)] for name in options.objectives),
        constraints=_constraints(named, score, options, on_gpu),
        open_loop=options.load == "rate",
        confidence=options.confidence,
        fixed_shapes=model_config.has_fixed_shapes(source.batched),
        cpu_count=None if hardware.gpus else hardware.cpu_count,
    )
    sent = _requests(source, profile.request.asked() if profile else NOTHING_ASKED, batch, options)
    if options.model_warmup:
        source = replace(source, warm_up=sent.largest)
    given = as_given(source, space.fields)
    plain = given
    if source.batched.max_batch_size > 1 and not given.dynamic_batching:
        plain = replace(given, dynamic_batching=True)
    elif given.dynamic_batching:
        plain = replace(given, max_queue_delay_us=0, preferred_batch_sizes=())
    return Task(
        source,
        problem,
        given,
        plain,
        sent.input_data,
        sent.shapes,
        Tolerance(profile.tolerance.relative, profile.tolerance.absolute) if profile else DEFAULT_TOLERANCE,
        score,
        sent.unbounded,
        {name: _fitted(NOTHING_ASKED, source.composing[name], batch, options) for name in source.concurrent},
        named.notes,
        sent.note,
        on_gpu,
    )


def _on_gpu(named: Named, options: RunOptions, hardware: Hardware) -> bool:
    serving = Serving.of(options, hardware.gpus)
    section = named.profile.space if named.profile else None
    asked = section is not None and asks_for_gpu(section.fields())
    return bool(hardware.gpus) and (asked or serving.source_on_gpu(named.source))


def _measured(metric: str, on_gpu: bool) -> str:
    """Memory is the GPU's of what is served on one, the server's else."""
    return "gpu-memory" if metric == "memory" and on_gpu else metric


def _space(named: Named, hardware: Hardware) -> Space:
    section = named.profile.space if named.profile else None
    try:
        return space_of(section or SpaceSection(), named.source, named.batch, hardware)
    except ValueError as error:
        if named.profile:
            raise named.profile.space_fault(error) from None
        config = named.source.folder(named.source.name) / "config.pbtxt"
        raise BadInputError(f"{config}: {error}") from None


def _check(source: ModelSource, batch: Dim, score: ScoreSection | None, options: RunOptions) -> None:
    if score is None and (options.min_score is not None or "score" in options.objectives):
        flag = "--min-score" if options.min_score is not None else "--objective score"
        raise BadInputError(f"{flag}: there are no labelled data; write a profile with a score: section (see README)")
    asked = "--request-batch-size" if options.request_batch_size else "request.batch_size"
    if batch.largest > max(source.config.max_batch_size, 1):
        raise BadInputError(
            f"{asked} {batch.largest} is above the model's max_batch_size {source.config.max_batch_size}; "
            f"lower it, or raise max_batch_size in config.pbtxt"
        )
    if batch.fixed is None and options.load != "rate":
        raise BadInputError(
            f"{asked} is a mix of up to {batch.largest} samples a request, and perf_analyzer sends requests of one "
            "size: give one, or send at a rate (--load rate, of a sweep --rates)"
        )
    if source.concurrent and options.load == "rate":
        raise BadInputError("--load rate asks one model alone: leave the concurrent models out, or --load rate")


def _constraints(
    named: Named, score: ScoreSection | None, options: RunOptions, on_gpu: bool
) -> tuple[Constraint, ...]:
    """The command line's bounds on latency in place of the profile's, and all others."""
    bounds = [Constraint(f"latency-{name}", bound) for name, bound in options.sla_ms.items()]
    if not bounds and named.profile:
        bounds += named.profile.sla.constraints()
    if options.min_throughput:
        bounds.append(Constraint("throughput", parse_rate(options.min_throughput, named.batch.mean)))
    if options.max_memory_bytes:
        bounds.append(Constraint(_measured("memory", on_gpu), options.max_memory_bytes))
    least = options.min_score if options.min_score is not None or score is None else score.minimum
    if least is not None:
        bounds.append(Constraint("score", least))
    return tuple(bounds)


def _requests(source: ModelSource, below: Asked, batch: Dim, options: RunOptions) -> Requests:
    """What the command line asks for over what the profile does; else the builder's own."""
    asked = Asked(
        options.input_data or "", options.shapes, options.ranges, options.string_data, options.string_length
    ).over(below)
    if source.input_data is not None and asked == NOTHING_ASKED:
        return Requests(str(source.input_data)).soon_prepared(_sent(batch, options), runtime.cache_folder())
    return _fitted(asked, source.config, batch, options)


def _fitted(asked: Asked, config: ModelConfig, batch: Dim, options: RunOptions) -> Requests:
    return fitted(asked, config, _sent(batch, options), runtime.cache_folder())


def _sent(batch: Dim, options: RunOptions) -> Sent:
    return Sent(batch.largest, options.load == "rate", options.seed, mixed=batch.fixed is None)
