"""From what the user named to what is tuned: the model, its requests, its space, what is good enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from objectives.metrics import METRICS
from objectives.sla import Constraint, parse_rate
from optimizer import model_config, runtime
from optimizer.answers.comparison import Tolerance
from optimizer.deployment import COUNT, DELAY, OFF, as_given
from optimizer.errors import BadInputError
from optimizer.machine import cpus
from optimizer.machine.hardware import Hardware
from optimizer.model_source import ModelSource
from optimizer.options import RunOptions
from optimizer.pipeline import assembled, read_source
from optimizer.problem import Problem
from optimizer.profile.find import find_profile, list_profiles
from optimizer.profile.reader import Profile, load_profile
from optimizer.profile.safe_paths import is_file, is_folder
from optimizer.profile.schema import ONNX_RUNTIME, BuiltModel, ScoreSection, SpaceSection
from optimizer.repository import backend_of, is_ensemble
from optimizer.space import Space
from optimizer.trial import VARIANT, Candidate, FieldValue

MAX_CONCURRENCY = 256
DEFAULT_DELAYS_US = ("off", 0, 100, 500, 1000, 2000, 5000)
DEFAULT_POLICIES = ("none", "max/2")
DEFAULT_LARGEST_BATCH = 64
DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True)
class Task:
    """``baseline`` is the configuration as given, ``dynamic_batching`` the same with plain dynamic batching.

    ``input_data`` and ``shapes`` are perf_analyzer's. ``tolerance`` is by how much answers may differ from the
    baseline's, ``score`` what is to be made of them.
    """

    source: ModelSource
    problem: Problem
    baseline: Candidate
    dynamic_batching: Candidate
    input_data: str
    shapes: tuple[str, ...] = ()
    tolerance: Tolerance = DEFAULT_TOLERANCE
    score: ScoreSection | None = None

    def comparisons(self) -> list[tuple[str, Candidate]]:
        """What is measured first, by role; one entry where the two behave the same."""
        roles = [("baseline", self.baseline), ("dynamic_batching", self.dynamic_batching)]
        return roles[: 1 if self.baseline == self.dynamic_batching else 2]


def prepare(options: RunOptions, hardware: Hardware, say: Callable[[str], None]) -> Task:
    """Find or build the model and derive the problem. Raises BadInputError.

    ``hardware`` is what the model is served on: it has GPUs only where they serve.
    """
    if options.model_repository is not None:
        if not is_folder(Path(options.model_repository)):
            raise BadInputError(f"--model-repository {options.model_repository}: no such folder")
        return _from_repository(Path(options.model_repository), options.model, options, hardware)
    folder = Path(options.model)
    if is_folder(folder) and not options.model.endswith((".yaml", ".yml")) and not _is_profile_too(folder):
        absolute = folder.absolute()
        return _from_repository(absolute.parent, absolute.name, options, hardware)
    profile = load_profile(find_profile(options.model)).for_hardware(gpu=bool(hardware.gpus))
    return _from_profile(profile, options, hardware, say)


def _is_profile_too(folder: Path) -> bool:
    """Whether the folder is no model's, and its name a profile's: a folder of results is named after the model."""
    named = str(folder) == folder.name and any(folder.name == listed.name for listed in list_profiles())
    return named and not is_file(folder / "config.pbtxt")


def _from_profile(profile: Profile, options: RunOptions, hardware: Hardware, say: Callable[[str], None]) -> Task:
    batch = options.request_batch_size or profile.request.batch_size
    section = profile.space or SpaceSection()
    for i, chosen in enumerate(section.server_cpus or ()):
        try:
            cpus.parse(chosen, among=cpus.available())
        except ValueError as error:
            raise profile.fault("space", "server_cpus", i, problem=str(error)) from None
    if section.max_batch_size and 0 < max(section.max_batch_size) < batch:
        raise BadInputError(
            f"--request-batch-size {batch} is above every max_batch_size of {profile.path} "
            f"({', '.join(map(str, section.max_batch_size))}); lower it, or give space.max_batch_size a larger one"
        )
    if isinstance(profile.model, BuiltModel):
        from optimizer.models import build

        largest = max(section.max_batch_size or (DEFAULT_LARGEST_BATCH,))
        built = build(
            profile.model.builder,
            profile.model.settings,
            cache=runtime.cache_folder(),
            max_batch_size=max(largest, batch),
            kind="KIND_GPU" if hardware.gpus else "KIND_CPU",
            say=say,
        )
        source = assembled(built, gpu=bool(hardware.gpus))
    else:
        source = read_source(
            profile.model.repository,
            profile.model.name,
            gpu=bool(hardware.gpus),
            composing=profile.model.bls_composing_models or (),
            variants=profile.model.variants or (),
            batcher=profile.model.batcher,
        )
    for beside in section.models:
        if beside not in source.models or beside == (source.batcher or source.name):
            known = ", ".join(one for one in source.models if one != (source.batcher or source.name)) or "none"
            raise profile.fault("space", "models", beside, problem=f"is no model beside it; there are: {known}")
    try:
        space = _space(section, source, batch, hardware)
    except ValueError as error:
        raise profile.space_fault(error) from None
    data = profile.request.input_data
    return _task(
        source,
        space,
        batch,
        options,
        hardware,
        slas=_constraints(options) or profile.sla.constraints(),
        max_concurrency=profile.load.max_concurrency,
        input_data=str(data) if data is not None else str(source.input_data or "random"),
        shapes=tuple(f"{name}:{','.join(map(str, dims))}" for name, dims in profile.request.shapes.items()),
        tolerance=Tolerance(profile.tolerance.relative, profile.tolerance.absolute),
        score=profile.score,
    )


def _from_repository(repository: Path, name: str, options: RunOptions, hardware: Hardware) -> Task:
    composing, variants = options.bls_composing_models, options.variants
    source = read_source(repository, name, gpu=bool(hardware.gpus), composing=composing, variants=variants)
    batch = options.request_batch_size or 1
    try:
        space = _space(SpaceSection(), source, batch, hardware)
    except ValueError as error:
        raise BadInputError(f"{repository / name / 'config.pbtxt'}: {error}") from None
    return _task(source, space, batch, options, hardware, slas=_constraints(options))


def _task(
    source: ModelSource,
    space: Space,
    batch: int,
    options: RunOptions,
    hardware: Hardware,
    *,
    slas: tuple[Constraint, ...],
    max_concurrency: int = MAX_CONCURRENCY,
    input_data: str = "random",
    shapes: tuple[str, ...] = (),
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    score: ScoreSection | None = None,
) -> Task:
    if score is None and (options.min_score is not None or "score" in options.objectives):
        flag = "--min-score" if options.min_score is not None else "--objective score"
        raise BadInputError(f"{flag}: there are no labelled data; write a profile with a score: section (see README)")
    if batch > max(source.config.max_batch_size, 1):
        asked = "--request-batch-size" if options.request_batch_size else "request.batch_size"
        raise BadInputError(
            f"{asked} {batch} is above the model's max_batch_size {source.config.max_batch_size}; "
            f"lower it, or raise max_batch_size in config.pbtxt"
        )
    given_shapes = {shape.partition(":")[0] for shape in shapes}
    for tensor in source.config.input if input_data in ("random", "zero") else ():
        if -1 in tensor.dims and tensor.name not in given_shapes:
            raise BadInputError(
                f"input {tensor.name!r} of {source.name} has dims {list(tensor.dims)}, which random requests cannot "
                f"fill: write a profile with request.shapes, such as {{{tensor.name}: [128]}}, or request.input_data"
            )
    bounds = list(slas)
    if options.min_throughput:
        bounds.append(Constraint("throughput", parse_rate(options.min_throughput, batch)))
    if options.max_memory_bytes:
        bounds.append(Constraint("memory", options.max_memory_bytes))
    least = options.min_score if options.min_score is not None or score is None else score.minimum
    if least is not None:
        bounds.append(Constraint("score", least))
    problem = Problem(
        model=source.name,
        space=space,
        request_batch_size=batch,
        max_concurrency=max_concurrency,
        objectives=tuple(METRICS[name] for name in options.objectives),
        constraints=tuple(bounds),
        open_loop=options.load == "rate",
        confidence=options.confidence,
        fixed_shapes=model_config.has_fixed_shapes(source.batched),
        cpu_count=None if hardware.gpus else hardware.cpu_count,
    )
    if options.model_warmup:
        named = (shape.rpartition(":")[::2] for shape in shapes)
        source = replace(source, warm_up={name: tuple(map(int, dims.split(","))) for name, dims in named})
    given = as_given(source, space.fields)
    plain = given
    if source.batched.max_batch_size > 1 and not given.dynamic_batching:
        plain = replace(given, dynamic_batching=True)
    elif given.dynamic_batching:
        plain = replace(given, max_queue_delay_us=0, preferred_batch_sizes=())
    return Task(source, problem, given, plain, input_data, shapes, tolerance, score)


def _space(section: SpaceSection, source: ModelSource, batch: int, hardware: Hardware) -> Space:
    """The profile's choices; what it leaves out is derived from the model's own configuration."""
    largest = source.batched.max_batch_size
    fields = {**_beside(source, hardware), **section.fields()}
    if section == SpaceSection() and not hardware.gpus and backend_of(source.batched) == "onnxruntime":
        # by default each instance computes on every core, which is too many for several of them
        fields[ONNX_RUNTIME["intra_op_thread_count"]] = tuple(
            map(str, _powers_of_two(1, min(hardware.cpu_count, 16)))
        )
    if source.variants:
        fields[VARIANT] = tuple(source.variants)
    if largest == 0:
        return Space((0,), instance_count=section.instance_group_count or _counts(hardware), fields=fields)
    sizes = section.max_batch_size or _powers_of_two(batch, max(largest, batch))
    return Space(
        max_batch_size=tuple(size for size in sizes if size >= batch) or (batch,),
        max_queue_delay_us=section.max_queue_delay_microseconds or DEFAULT_DELAYS_US,
        preferred_batch_sizes=section.preferred_batch_size or DEFAULT_POLICIES,
        instance_count=section.instance_group_count or _counts(hardware),
        fields=fields,
        request_batch_size=batch,
    )


def _beside(source: ModelSource, hardware: Hardware) -> dict[str, tuple[FieldValue, ...]]:
    """What may vary of the models beside the one that the space is about, unless the profile says."""
    fields: dict[str, tuple[FieldValue, ...]] = {}
    given = {**source.composing, source.name: source.config} if source.batcher else {}
    for name, config in given.items():
        if name == source.batcher or is_ensemble(config):
            continue
        own = model_config.candidate_of(config)
        fields[f"{name}/{COUNT}"] = tuple(sorted({own.instance_count, *_counts(hardware)}))
        if own.max_batch_size > 1:
            delay = own.max_queue_delay_us if own.dynamic_batching else OFF
            fields[f"{name}/{DELAY}"] = tuple(dict.fromkeys((OFF, 0, delay)))
    return fields


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """From the request up to what the model's own configuration admits; a graph may be fixed beyond it."""
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, most]))


def _counts(hardware: Hardware) -> tuple[int, ...]:
    return (1, 2, 3, 4) if hardware.gpus else tuple(range(1, min(4, max(2, hardware.cpu_count)) + 1))


def _constraints(options: RunOptions) -> tuple[Constraint, ...]:
    return tuple(Constraint(f"latency-{name}", bound) for name, bound in options.sla_ms.items())
