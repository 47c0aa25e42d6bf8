"""Find the model that the user named: a profile, a model in a repository, an ONNX file or a Model Analyzer file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from optimizer.config import gpu_placement, model_json
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import INSTANCE_GPUS
from optimizer.core.errors import BadInputError
from optimizer.core.files import cache_folder
from optimizer.core.request_sizes import SizeDistribution, parse_size_distribution
from optimizer.core.safe_text import is_file, is_folder, one_line, quote, show_path
from optimizer.deploy.installed_server import Installation, complete_config
from optimizer.deploy.target_factory import server_installation
from optimizer.deploy.target_settings import model_load_timeout_within
from optimizer.machine import nvml
from optimizer.machine.hardware import Hardware
from optimizer.measure.load_client.arrivals import SIZE, RecordedArrivals, option_arrivals
from optimizer.model.instances import DeviceAssignment, too_many_instances
from optimizer.model.onnx_file import read_bare_onnx
from optimizer.model.profile import Profile, load_profile
from optimizer.model.profile_lookup import MODEL_ENDINGS, PROFILE_ENDINGS, find_profile, list_profiles
from optimizer.model.profile_schema import BuiltModel, OnnxModel, SpaceSection, StoredModel
from optimizer.model.repository import hash_model_files, read_source, refuse_unmeasurable
from optimizer.options.run_options import PROGRAM_TARGETS, RunOptions, is_trace
from optimizer.options.values import load_shares, parse_cpus, usable_cpus
from optimizer.store.run_folder import MODEL_HASH

DEFAULT_LARGEST_BATCH = 64

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class NamedModel:
    """A model with its profile, if it has one.

    ``batch`` is the number of samples in a request. ``notes`` describe how a Model Analyzer file was converted.
    ``file`` is the ONNX file of a model that is in no repository; None for a model with a profile.
    """

    source: ModelSource
    batch: SizeDistribution
    profile: Profile | None = None
    notes: tuple[str, ...] = ()
    file: Path | None = None


def find_model(
    options: RunOptions, hardware: Hardware, on_progress: OnProgress, *, start_server: bool = True
) -> NamedModel:
    """Return the model that ``options`` name, built if necessary, as ``hardware`` serves it. Raises BadInputError.

    A stored model that declares no inputs or outputs is loaded on a server, which knows them. Without
    ``start_server`` it is returned without them.
    """
    finder = _Finder(options, DeviceAssignment.of(options, hardware.gpus), on_progress, start_server)
    if names_profile(options):
        return finder.of_named_profile(load_profile(find_profile(options.model)))
    if options.model_repository is not None:
        if not is_folder(Path(options.model_repository)):
            repository = quote(options.model_repository)
            raise BadInputError(f"--model-repository {repository}: no such folder; give the folder of the models")
        if options.from_model_analyzer is not None:
            return finder.of_model_analyzer(Path(options.from_model_analyzer))
        return finder.of_repository(Path(options.model_repository), options.model)
    if _is_model_folder(options.model):
        absolute = Path(options.model).absolute()
        return finder.of_repository(absolute.parent, absolute.name)
    return finder.of_onnx_file(Path(options.model))


@dataclass(frozen=True)
class _Finder:
    """Finds the model of ``options`` for the devices of ``assignment``. The arguments are those of ``find_model``."""

    options: RunOptions
    assignment: DeviceAssignment
    on_progress: OnProgress
    start_server: bool

    def of_named_profile(self, profile: Profile) -> NamedModel:
        """Return the model of ``profile``, whose section ``gpu`` applies if a GPU serves it."""
        on_gpu = self.assignment.reaches("onnxruntime")
        if isinstance(profile.model, StoredModel):  # all others are ONNX
            on_gpu = self.assignment.stored_on_gpu(profile.model.repository, profile.model.name)
        return self._of_profile(profile.for_hardware(gpu=on_gpu))

    def of_model_analyzer(self, file: Path) -> NamedModel:
        """Return the model of Model Analyzer's ``file``, with a profile that has its settings."""
        from optimizer.model.model_analyzer.reader import build_profile, read_model_analyzer

        imported = read_model_analyzer(file, self.options.model)
        repository = Path(self.options.model_repository or ".")
        on_gpu = self.assignment.stored_on_gpu(repository, imported.model)
        read = partial(self.assignment.read, repository, largest_batch=DEFAULT_LARGEST_BATCH)
        profile = build_profile(imported, self.options, read).for_hardware(gpu=on_gpu)
        return replace(self._of_profile(profile), notes=tuple(map(str, imported.notes)))

    def of_repository(self, repository: Path, name: str) -> NamedModel:
        """Return the model ``name`` in ``repository``, with the other models that the options name."""
        batch = self._request_sizes()
        source = read_source(
            partial(self._read_stored_model, repository, largest_batch=max(DEFAULT_LARGEST_BATCH, batch.largest)),
            name,
            composing=self.options.bls_composing_models,
            variants=self.options.variants,
            concurrent=self.options.concurrent_models,
        )
        return NamedModel(self._with_hash(source), batch)

    def of_onnx_file(self, path: Path) -> NamedModel:
        """Return the model of an ONNX file, which gets a configuration of its own also in a repository."""
        _refuse_other_models(self.options)
        batch = self._request_sizes()
        if (model := _model_of_version(path)) is not None:
            self.on_progress(
                f"{show_path(model / 'config.pbtxt')} is ignored, because {one_line(path.name)} is tuned as a "
                f"file of its own; to use it: tune {shlex.quote(show_path(model))}"
            )
        return NamedModel(self._read_onnx_file(path, max(DEFAULT_LARGEST_BATCH, batch.largest)), batch, file=path)

    def _of_profile(self, profile: Profile) -> NamedModel:
        """Return the model of ``profile``. Raises BadInputError if its space or its requests do not fit the model."""
        options, model, batch = self.options, profile.model, self._request_sizes(profile.request.batch_size)
        section = profile.space or SpaceSection()
        _check_space(section, profile, self.assignment.gpu_count)
        if section.max_batch_size and 0 < max(section.max_batch_size) < batch.largest:
            listed = ", ".join(map(str, section.max_batch_size))
            above = f"{batch.largest} is above every max_batch_size of {profile.path} ({listed})"
            raise size_fault(options, profile, f"{above}; lower it, or add a larger one to the space")
        if isinstance(model, StoredModel):
            source = read_source(
                partial(self._read_stored_model, model.repository),
                model.name,
                composing=options.bls_composing_models or model.bls_composing_models or (),
                variants=options.variants or model.variants or (),
                concurrent=options.concurrent_models or model.concurrent_models or (),
                batcher=model.batcher,
            )
            source = self._with_hash(source)
        else:
            _refuse_other_models(options)
            largest = max(*(section.max_batch_size or (DEFAULT_LARGEST_BATCH,)), batch.largest)
            source = (
                self._read_onnx_file(model.onnx, largest)
                if isinstance(model, OnnxModel)
                else self._build_model(model, largest)
            )
        if section.model_json:
            _check_model_json(source, profile, is_remote=options.target == "remote")
            source = replace(source, varies_model_json=True)
        for name in section.models:
            if name not in source.models or name == source.tuned_model:
                served = ", ".join(other for other in source.models if other != source.tuned_model)
                problem = (
                    f"not a model served with it, which are: {served}"
                    if served
                    else f"no other model is served with {source.name}; leave it out"
                )
                raise profile.fault("space", "models", name, problem=problem)
        return NamedModel(source, batch, profile)

    def _request_sizes(self, default: int | str = 1) -> SizeDistribution:
        """Return the samples of a request; ``default`` are those without an option or a trace that has them."""
        if (recorded := trace_sizes(self.options)) is not None:
            if self.options.request_batch_size is not None:
                raise sizes_given_twice(self.options.request_batch_size, self.options)
            return recorded
        return parse_size_distribution(str(self.options.request_batch_size or default))

    def _read_onnx_file(self, file: Path, largest_batch: int) -> ModelSource:
        on_gpu = self.assignment.reaches("onnxruntime")
        return read_bare_onnx(file, gpu=on_gpu, largest_batch=largest_batch, cache=cache_folder())

    def _build_model(self, model: BuiltModel, largest_batch: int) -> ModelSource:
        """Return a built-in model, built in the cache if it is not there."""
        from optimizer.model.builders import build

        built = build(
            model.builder,
            model.settings,
            cache=cache_folder(),
            max_batch_size=largest_batch,
            kind="KIND_GPU" if self.assignment.reaches("onnxruntime") else "KIND_CPU",
            on_progress=self.on_progress,
        )
        return read_source(
            lambda name: built if name == built.name else self._read_stored_model(built.repository, name), built.name
        )

    def _read_stored_model(
        self, repository: Path, name: str, largest_batch: int = DEFAULT_LARGEST_BATCH
    ) -> ModelSource:
        """Return the model with its configuration completed from the model's own metadata; see ``find_model``."""
        options, config = self.options, repository / name / "config.pbtxt"
        source = self.assignment.read(repository, name, largest_batch)
        counts, on_gpu = [gpu_placement.instance_total(source.config)], self.assignment.on_gpu(source.config)
        if problem := too_many_instances(counts, source, options, on_gpu=on_gpu):
            raise BadInputError(f"{show_path(config)}: instance_group: {problem}")
        if options.target in PROGRAM_TARGETS:
            missing = gpu_placement.missing_device(source.config, self.assignment.gpu_count)
            # the nodes of a cluster have their own GPUs, and a GPU may work although NVML does not
            if missing and options.cluster is None and not nvml.survey().fault:
                raise BadInputError(f"{show_path(config)}: {missing}")
            if self.start_server:
                find = partial(self._server_installation, config)
                source = complete_config(source, find, model_load_timeout_within(options.budget_seconds))
        elif not (source.config.input and source.config.output):
            raise BadInputError(
                f"{config}: has no inputs or outputs; add those that the server reports "
                f"(GET /v2/models/{name}/config)"
            )
        refuse_unmeasurable(source.config, config)
        return source

    def _with_hash(self, source: ModelSource) -> ModelSource:
        """Return the stored model with the SHA-256 of its files.

        Those of a remote server are not known, and those of a container perhaps only to its user.
        """
        if self.options.target == "remote":
            return source
        sha256 = hash_model_files(source, needs_permission=self.options.target != "docker")
        return replace(source, facts={**source.facts, MODEL_HASH: sha256}) if sha256 else source

    def _server_installation(self, config: Path) -> Installation:
        model = show_path(config.parent)
        self.on_progress(
            f"no config.pbtxt declares the inputs and outputs of {model}: starting a server, which knows them"
        )
        return server_installation(self.options, self.on_progress)


def undeclared_models(source: ModelSource) -> list[str]:
    """Return the names of the models that declare no inputs or outputs, so that only a server knows them."""
    return [name for name, config in source.models.items() if not (config.input and config.output)]


def trace_sizes(options: RunOptions) -> SizeDistribution | None:
    """Return the sizes of the requests in the trace of ``options``; None if there are none. Raises BadInputError."""
    if options.load != "rate" or not is_trace(options.request_times):
        return None
    arrivals = option_arrivals(options.request_times)
    assert isinstance(arrivals, RecordedArrivals)
    return None if arrivals.classes is None else arrivals.classes.sizes


def sizes_given_twice(size: int | str, options: RunOptions) -> BadInputError:
    """Return the error about a size of requests that is given in addition to a trace with sizes."""
    return BadInputError(
        f"--request-batch-size {size}: {one_line(options.request_times)} has the size of each request; leave the "
        f"option or the column {SIZE} out"
    )


def size_fault(options: RunOptions, profile: Profile | None, problem: str) -> BadInputError:
    """Return an error about the samples of a request, which names what gives them: an option, a trace or a profile.

    ``problem`` begins with the wrong value.
    """
    if not options.request_batch_size:
        if trace_sizes(options) is not None:
            return BadInputError(f"{one_line(options.request_times)}: {SIZE} {problem}")
        if profile is not None:
            return profile.fault("request", "batch_size", problem=problem)
    return BadInputError(f"--request-batch-size {problem}")


def names_profile(options: RunOptions) -> bool:
    """Return whether ``options`` name a profile, rather than a model of a repository or a file."""
    is_model = _is_model_folder(options.model) or options.model.endswith(MODEL_ENDINGS)
    return options.model_repository is None and not is_model


def _model_of_version(file: Path) -> Path | None:
    """Return the model folder of a file in a version folder of a repository; None if it is in none."""
    version = file.parent
    is_version = version.absolute().name.isdecimal() and is_file(version / ".." / "config.pbtxt")
    return (version.parent if version.name else version / "..") if is_version else None


def _is_model_folder(model: str) -> bool:
    path = Path(model)
    return is_folder(path) and not model.endswith(PROFILE_ENDINGS) and not _has_profile_name(path)


def other_models(options: RunOptions) -> dict[str, tuple[str, ...]]:
    """Return the other models of the repository that ``options`` name, by their keys in a profile."""
    return {
        "bls_composing_models": options.bls_composing_models,
        "concurrent_models": options.concurrent_models,
        "variants": options.variants,
    }


def _refuse_other_models(options: RunOptions) -> None:
    """Raise BadInputError for options that name other models of the repository, because there is no repository."""
    for key, names in other_models(options).items():
        flag = f"--{key.replace('_', '-')}"
        if Path(options.model).stem in load_shares(names):
            raise BadInputError(f"{flag} {','.join(names)}: {options.model} is the tuned model itself; leave it out")
        if names:
            raise BadInputError(
                f"{flag} {quote(','.join(names))}: {quote(options.model)} is not in a repository; put the models "
                "into one and name it with --model-repository"
            )


def _has_profile_name(folder: Path) -> bool:
    """Return whether ``folder`` is not a model but has the name of a profile, as a folder of results does."""
    named = str(folder) == folder.name and folder.name in list_profiles()
    return named and not is_file(folder / "config.pbtxt")


def _check_space(section: SpaceSection, profile: Profile, gpu_count: int) -> None:
    """Check the search space of ``profile`` before anything is built. Raises BadInputError."""
    for i, chosen in enumerate(section.instance_group_gpus or ()):
        if problem := gpu_placement.missing_gpu(INSTANCE_GPUS, chosen, gpu_count):
            raise profile.fault("space", INSTANCE_GPUS, i, problem=problem)
    for path, choices in section.config.items():
        for i, choice in enumerate(choices):
            if problem := gpu_placement.missing_gpu(path, choice, gpu_count):
                raise profile.fault("space", "config", path, i, problem=problem)
    for i, chosen in enumerate(section.server_cpus or ()):
        try:
            parse_cpus(chosen, among=usable_cpus())
        except ValueError as error:
            raise profile.fault("space", "server_cpus", i, problem=str(error)) from None


def _check_model_json(source: ModelSource, profile: Profile, *, is_remote: bool) -> None:
    """Raise BadInputError if the tuned model, or a variant, has no model.json that can be changed."""
    for name in dict.fromkeys((source.tuned_model, *source.variants)):
        folder = source.folder(name)
        if not (versions := model_json.versions(folder)):
            problem = (
                f"no version folder of {name} has a {model_json.FILE}, as a model of the vLLM backend has; "
                "leave it out"
            )
            raise profile.fault("space", "model_json", problem=problem)
        for version in versions:
            model_json.parse(version / model_json.FILE)
        if is_remote:
            model_json.check_override_size(folder)
