"""The profile that ``tune init`` writes: a model, its inputs, and the search space that ``tune`` derives for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_folder, one_line, show_path
from optimizer.machine.hardware import Hardware
from optimizer.model.builders.builder import inputs_of_config
from optimizer.model.default_space import space_keys
from optimizer.model.input_data import TensorSpec
from optimizer.model.profile import Profile, inputs_and_source, load_profile, parse_profile
from optimizer.model.profile_files import flow, render_profile
from optimizer.model.profile_lookup import PROFILE_ENDINGS, find_profile
from optimizer.model.profile_schema import LoadSection, RequestSection
from optimizer.options.run_options import RunOptions
from optimizer.options.values import format_number
from optimizer.study.environment import Environment
from optimizer.study.model_finder import (
    NamedModel,
    OnProgress,
    find_model,
    names_profile,
    other_models,
    undeclared_models,
)
from optimizer.study.task import search_space, serving_hardware

_EXAMPLE_SIZE = 128  # the size of a variable dim in an example


@dataclass(frozen=True)
class InitialProfile:
    """A profile for the file ``path``. ``missing`` has a line for each thing that the user has to fill in."""

    path: Path
    text: str
    missing: tuple[str, ...] = ()


def initial_profile(options: RunOptions, output: Path | None, on_progress: OnProgress) -> InitialProfile:
    """Return a profile of the model that ``options`` name, with the latency bounds and other models of ``options``.

    No server is started. If ``options`` name a profile, the result has its keys. ``output`` is the file that the
    profile is for; None is the name of the model in the working folder. Raises BadInputError.
    """
    if output is not None:
        _check_output(output)
    if names_profile(options):
        return _from_profile(load_profile(find_profile(options.model)), options, output)
    hardware = Environment.detect(options, on_progress).server_hardware()
    named = find_model(options, hardware, on_progress, start_server=False)
    path = output or Path(f"{named.source.name}.yaml")
    tree: dict[str, Any] = {
        "model": _model_keys(named, options, path),
        "sla": _latency_bounds(options),
        "request": {"batch_size": RequestSection().batch_size},
        "load": {"max_concurrency": LoadSection().max_concurrency},
    }
    remarks: dict[str, Sequence[str]] = {}
    missing: list[str] = []
    if undeclared := _undeclared(named.source):
        missing.append(undeclared)
        remarks["space"] = [undeclared]
    else:
        hardware = serving_hardware(named, hardware, options)
        tree["space"] = space_keys(search_space(named, hardware, options))
        remarks["space"] = [f"These choices are what tune derives for this model and {_devices(hardware)}."]
    inputs = inputs_of_config(named.source.config)
    remarks["model"] = _input_remarks(inputs, batched=named.source.config.max_batch_size > 0)
    remarks["request"] = [_open_dims(tensor) for tensor in inputs if -1 in tensor.dims]
    header = _header(named.source.name, path)
    text = render_profile(tree, header, remarks)
    parse_profile(text.encode(), path)  # raises BadInputError if it is not valid there
    return InitialProfile(path, text, (*missing, *remarks["request"]))


def _from_profile(profile: Profile, options: RunOptions, output: Path | None) -> InitialProfile:
    """Return a profile with the keys of ``profile`` and the latency bounds of ``options``, if there are any."""
    for flag, names in other_models(options).items():
        if names:
            problem = f"{one_line(options.model)} is a profile; write them into its model section"
            raise BadInputError(f"--{flag.replace('_', '-')} {one_line(','.join(names))}: {problem}")
    path = output or Path(f"{profile.name}.yaml")
    tree: dict[str, Any] = profile.tree()
    if bounds := _latency_bounds(options):
        tree["sla"] = bounds
        tree["gpu"] = {name: keys for name, keys in (tree.get("gpu") or {}).items() if name != "sla"}
    inputs: tuple[TensorSpec, ...] = ()
    with contextlib.suppress(BadInputError):  # the inputs are only a comment
        inputs, _ = inputs_and_source(profile)
    text = render_profile(
        tree,
        _header(profile.name, path),
        {"model": _input_remarks(inputs, batched=True) if inputs else []},
    )
    try:
        same = _sections_without_bounds(parse_profile(text.encode(), path)) == _sections_without_bounds(profile)
    except BadInputError:
        same = False
    if not same:
        folder = profile.path.parent
        raise BadInputError(
            f"{show_path(profile.path)}: has paths that begin in its folder; give --out "
            f"{show_path(folder / f'my_{profile.name}.yaml')}"
        )
    return InitialProfile(path, text)


def _check_output(output: Path) -> None:
    name = show_path(output)
    if output.suffix not in PROFILE_ENDINGS:
        raise BadInputError(f"--out {name}: the name of a profile ends in .yaml; give such a name")
    if not is_folder(output.parent):
        raise BadInputError(f"--out {name}: no such folder; create {show_path(output.parent)}")


def _latency_bounds(options: RunOptions) -> dict[str, Any]:
    """Return the latency bounds of ``options`` by metric, as a profile has them, such as ``{"p95": "20ms"}``."""
    return {metric.replace("-", "_"): f"{format_number(ms)}ms" for metric, ms in options.sla_ms.items()}


def _model_keys(named: NamedModel, options: RunOptions, path: Path) -> dict[str, Any]:
    if named.file is not None:
        return {"onnx": _relative(named.file, path)}
    other = {key: [*names] for key, names in other_models(options).items() if names}
    return {"repository": _relative(named.source.repository, path), "name": named.source.name, **other}


def _relative(file: Path, profile: Path) -> str:
    """Return ``file`` relative to the folder of ``profile``. Raises BadInputError if it is not at or below it."""
    target, folder = file.resolve(), profile.parent.resolve()
    if not target.is_relative_to(folder):
        place = target.parent / profile.name
        raise BadInputError(
            f"{show_path(file)} is not below {show_path(folder)}, and a profile names only files below its "
            f"own folder; give --out {show_path(place)}"
        )
    relative = target.relative_to(folder).as_posix()
    if not relative.isprintable():
        raise BadInputError(f"{show_path(file)}: the path has characters that are not printable; rename it")
    return relative


def _undeclared(source: ModelSource) -> str:
    """Return advice on models that declare no inputs or outputs; an empty text if all declare them."""
    names = undeclared_models(source)
    if not names:
        return ""
    return (
        f"no config.pbtxt declares the inputs and outputs of {one_line(', '.join(names))}, which only a server finds "
        "out; so the space is left out and `tune` derives it. To have it here, write input, output and "
        "max_batch_size into config.pbtxt and call `tune init` again."
    )


def _input_remarks(inputs: Iterable[TensorSpec], *, batched: bool) -> list[str]:
    """Return the comment lines on the inputs; empty without inputs. A ``batched`` model has a batch dimension."""
    lines = [f"  {tensor.name}: {tensor.datatype} {list(tensor.dims)}" for tensor in inputs]
    dims = "dims without the batch dimension" if batched else "dims"
    return [f"Inputs of the model, with data type and {dims}:", *lines] if lines else []


def _open_dims(tensor: TensorSpec) -> str:
    """Return advice on an input with variable dims, for which the user has to choose sizes."""
    shape = flow({tensor.name: [_EXAMPLE_SIZE if size == -1 else size for size in tensor.dims]})
    return (
        f"The input {tensor.name} has the dims {list(tensor.dims)}: set shapes in the request section, such as "
        f"{shape}, or input_data."
    )


def _devices(hardware: Hardware) -> str:
    if hardware.gpus:
        return "a GPU"
    return f"{hardware.cpu_count} CPU{'s' if hardware.cpu_count > 1 else ''}"


def _header(name: str, path: Path) -> list[str]:
    return [
        f"Profile of {name}, written by `tune init`. To tune with it: tune {path.name}",
        "A key in a comment is not set, and its value there is an example.",
    ]


def _sections_without_bounds(profile: Profile) -> list[dict[str, object]]:
    """Return all sections but the latency bounds, for serving on the CPU and on a GPU."""
    profiles = [profile.for_hardware(gpu=gpu) for gpu in (False, True)]
    return [{name: value for name, value in sections if name != "sla"} for sections in profiles]
