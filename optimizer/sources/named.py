"""What the user named: a profile, a model of a repository, an ONNX file, a file of Model Analyzer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer import placement, runtime
from optimizer.deploy.auto_complete import completed
from optimizer.deploy.choose import ON_THIS_MACHINE, installed
from optimizer.errors import BadInputError
from optimizer.machine import cpus
from optimizer.machine.hardware import Hardware
from optimizer.model_source import ModelSource
from optimizer.options import RunOptions
from optimizer.profile.find import find_profile, list_profiles
from optimizer.profile.reader import Profile, load_profile
from optimizer.profile.safe_paths import is_file, is_folder
from optimizer.profile.schema import BuiltModel, SpaceSection
from optimizer.requests.sizes import Dim, parse_dim
from optimizer.serving import Serving
from optimizer.sources.bare_onnx import ENDINGS, read_bare_onnx
from optimizer.sources.pipeline import assembled, read_source
from optimizer.sources.repository import refuse_unmeasurable
from optimizer.trial import INSTANCE_GPUS

LARGEST_BATCH = 64  # where nothing says it

Say = Callable[[str], None]


@dataclass(frozen=True)
class Named:
    """A model, and the profile that says more of it, where there is one. ``batch``: how many samples a request has.
    ``notes``: what became of a file of Model Analyzer."""

    source: ModelSource
    batch: Dim
    profile: Profile | None = None
    notes: tuple[str, ...] = ()


def find(options: RunOptions, hardware: Hardware, say: Say) -> Named:
    """The model, found or built, for what serves it of ``hardware``. Raises BadInputError."""
    serving = Serving.of(options, hardware.gpus)
    if options.model_repository is not None:
        if not is_folder(Path(options.model_repository)):
            raise BadInputError(f"--model-repository {options.model_repository}: no such folder")
        if options.from_model_analyzer is not None:
            return _of_model_analyzer(Path(options.from_model_analyzer), options, serving, say)
        return _of_repository(Path(options.model_repository), options.model, options, serving, say)
    path = Path(options.model)
    if is_folder(path) and not options.model.endswith((".yaml", ".yml")) and not _is_profile_too(path):
        absolute = path.absolute()
        return _of_repository(absolute.parent, absolute.name, options, serving, say)
    if options.model.endswith(ENDINGS):
        _refuse_others(options)
        batch = _batch(options)
        largest = max(LARGEST_BATCH, batch.largest)
        on_gpu = serving.reaches("onnxruntime")
        return Named(read_bare_onnx(path, gpu=on_gpu, largest_batch=largest, cache=runtime.cache_folder()), batch)
    profile = load_profile(find_profile(options.model))
    profile = profile.for_hardware(gpu=_on_gpu(profile, serving))
    return _of_profile(profile, options, serving, say)


def _batch(options: RunOptions, below: int | str = 1) -> Dim:
    """What the command line says, else ``below``."""
    return parse_dim(str(options.request_batch_size or below))


def _refuse_others(options: RunOptions) -> None:
    """Flags that name other models of the same repository, where there is none."""
    for flag, names in (
        ("--bls-composing-models", options.bls_composing_models),
        ("--concurrent-models", options.concurrent_models),
        ("--variants", options.variants),
    ):
        if names:
            raise BadInputError(
                f"{flag} {','.join(names)}: {options.model} stands alone; put the models into one repository and "
                "name it with --model-repository"
            )


def _on_gpu(profile: Profile, serving: Serving) -> bool:
    """Whether a profile is to hold as on a machine with a GPU: where that is what serves its model."""
    if isinstance(profile.model, BuiltModel):  # all are ONNX
        return serving.reaches("onnxruntime")
    return serving.stored_on_gpu(profile.model.repository, profile.model.name)


def _is_profile_too(folder: Path) -> bool:
    """Whether the folder is no model's, and its name a profile's: a folder of results is named after the model."""
    named = str(folder) == folder.name and any(folder.name == listed.name for listed in list_profiles())
    return named and not is_file(folder / "config.pbtxt")


def _of_profile(profile: Profile, options: RunOptions, serving: Serving, say: Say) -> Named:
    batch = _batch(options, profile.request.batch_size)
    section = profile.space or SpaceSection()
    _check(section, profile, batch.largest, serving.gpu_count)
    if isinstance(profile.model, BuiltModel):
        _refuse_others(options)
        source = _built(profile.model, section, batch.largest, options, serving, say)
    else:
        stored = profile.model.repository
        source = read_source(
            lambda name: _stored(stored, name, options, serving, LARGEST_BATCH, say),
            profile.model.name,
            composing=options.bls_composing_models or profile.model.bls_composing_models or (),
            variants=options.variants or profile.model.variants or (),
            concurrent=options.concurrent_models or profile.model.concurrent_models or (),
            batcher=profile.model.batcher,
        )
    for beside in section.models:
        if beside not in source.models or beside == source.tuned:
            known = ", ".join(one for one in source.models if one != source.tuned) or "none"
            raise profile.fault("space", "models", beside, problem=f"is no model beside it; there are: {known}")
    return Named(source, batch, profile)


def _check(section: SpaceSection, profile: Profile, batch: int, gpu_count: int) -> None:
    """Before anything is built."""
    for i, chosen in enumerate(section.instance_group_gpus or ()):
        if problem := placement.absent(INSTANCE_GPUS, chosen, gpu_count):
            raise profile.fault("space", INSTANCE_GPUS, i, problem=problem)
    for path, choices in section.config.items():
        for i, choice in enumerate(choices):
            if problem := placement.absent(path, choice, gpu_count):
                raise profile.fault("space", "config", path, i, problem=problem)
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


def _built(
    model: BuiltModel, section: SpaceSection, batch: int, options: RunOptions, serving: Serving, say: Say
) -> ModelSource:
    from optimizer.models import build

    built = build(
        model.builder,
        model.settings,
        cache=runtime.cache_folder(),
        max_batch_size=max(*(section.max_batch_size or (LARGEST_BATCH,)), batch),
        kind="KIND_GPU" if serving.reaches("onnxruntime") else "KIND_CPU",
        say=say,
    )
    return assembled(built, lambda name: _stored(built.repository, name, options, serving, LARGEST_BATCH, say))


def _of_model_analyzer(file: Path, options: RunOptions, serving: Serving, say: Say) -> Named:
    from optimizer.model_analyzer.profile import profile_of
    from optimizer.model_analyzer.reader import read_model_analyzer

    mapped, repository = read_model_analyzer(file, options.model), Path(options.model_repository or ".")
    on_gpu = serving.stored_on_gpu(repository, mapped.model)
    profile = profile_of(mapped, repository, gpu=on_gpu).for_hardware(gpu=on_gpu)
    return replace(_of_profile(profile, options, serving, say), notes=tuple(map(str, mapped.notes)))


def _of_repository(repository: Path, name: str, options: RunOptions, serving: Serving, say: Say) -> Named:
    batch = _batch(options)
    source = read_source(
        lambda model: _stored(repository, model, options, serving, max(LARGEST_BATCH, batch.largest), say),
        name,
        composing=options.bls_composing_models,
        variants=options.variants,
        concurrent=options.concurrent_models,
    )
    return Named(source, batch)


def _stored(
    repository: Path, name: str, options: RunOptions, serving: Serving, largest_batch: int, say: Say
) -> ModelSource:
    """The model, with what its configuration leaves to the model itself."""
    config = repository / name / "config.pbtxt"
    source = serving.read(repository, name, largest_batch)
    if options.target in ON_THIS_MACHINE:
        source = completed(source, lambda: installed(options, say))
    elif not (source.config.input and source.config.output):
        raise BadInputError(
            f"{config}: has no inputs or outputs; write them as the server tells them (GET /v2/models/{name}/config)"
        )
    refuse_unmeasurable(source.config, config)
    return source
