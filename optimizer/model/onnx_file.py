"""Read and check the user's ONNX files, and derive a model configuration from the graph."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from optimizer.config import model_config
from optimizer.config.model_config_proto import DataType, ModelConfig, ModelInput, ModelOutput
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError
from optimizer.core.files import cache_error
from optimizer.core.safe_text import check_file, format_value, one_line, show_path
from optimizer.model.profile_lookup import TORCH_ENDINGS, similar_models

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, OperatorSetIdProto, TensorProto, ValueInfoProto


MAX_BYTES = 1 << 31  # protobuf's limit; larger models have their weights in separate files
STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")  # domains of the operators that a version of ONNX defines
MAX_MESSAGE = 120  # limit for the characters of a library's message
MAX_LIST = 300  # limit for the characters of a list in an error
UNKNOWN_OPERATOR = re.compile("is not a registered function/op|No Op registered for")  # ONNX Runtime's messages
TRITON_TYPES = frozenset(DataType.keys())
PLATFORM = "onnxruntime_onnx"
DATA_TYPES = {"FLOAT": "TYPE_FP32", "DOUBLE": "TYPE_FP64", "FLOAT16": "TYPE_FP16", "BFLOAT16": "TYPE_BF16"}
GENERATED_DIM = re.compile(r"unk__\d+|.+_dim_\d+")  # names by tf2onnx and PyTorch's exporter for dynamic dims
LFS_POINTER = b"version https://git-lfs"  # the beginning of a file whose content Git LFS has not fetched
UNSPECIFIC_NAMES = {"", "model"}
TABLE_LOOKUPS = {"Gather": ((0, 1),), "EmbedLayerNormalization": ((2, 0), (4, 1))}  # inputs: a table, its indices
# operators whose outputs have values of their first input
SAME_VALUES = {
    *("Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape"),
    *("Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
}


def read_onnx(path: Path) -> ModelProto:
    """Return the model without weights in external files. Raises BadInputError if the file is not an ONNX model."""
    import onnx
    from google.protobuf.message import DecodeError

    check_file(path)  # a pipe would block
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInputError(
                f"{show_path(path)}: larger than {MAX_BYTES >> 30} GiB, the limit of an ONNX file; "
                "save it with its weights in a separate file (onnx.save, save_as_external_data=True)"
            )
        if fault := _fault_of_bytes(path):
            raise BadInputError(f"{show_path(path)}: not an ONNX model ({fault})")
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError:
        problem = "not an ONNX model (it cannot be decoded; export or download it again)"
        raise BadInputError(f"{show_path(path)}: {problem}") from None
    except (OSError, ValueError) as error:
        problem = f"not an ONNX model ({one_line(' '.join(str(error).split()), MAX_MESSAGE)})"
        raise BadInputError(f"{show_path(path)}: {problem}") from None
    if not model.graph.node:
        raise BadInputError(f"{show_path(path)}: not an ONNX model (its graph is empty)")
    if any(isinstance(text, bytes) for text in _texts(model)):  # instead of str, if it cannot be decoded
        raise BadInputError(f"{show_path(path)}: a name in its graph is not UTF-8; export the model again")
    return model


def _texts(model: ModelProto) -> Iterator[str]:
    """Yield the texts of the model that tune reads."""
    for operator in (*model.graph.node, *model.functions, *model.opset_import):
        yield operator.domain
    for node in model.graph.node:
        yield node.op_type
    for function in model.functions:
        yield function.name
    for tensor in (*model.graph.input, *model.graph.output):
        yield tensor.name
        yield from (dim.dim_param for dim in tensor.type.tensor_type.shape.dim)
    for constant in _tensors(model.graph):
        yield constant.name
        for entry in constant.external_data:
            yield from (entry.key, entry.value)


def _fault_of_bytes(path: Path) -> str:
    """Return the fault and the remedy of a file that was not exported or downloaded completely; empty without one."""
    with path.open("rb") as file:
        begin = file.read(len(LFS_POINTER))
    if not begin:
        return "the file is empty; export or download it again"
    return "it is a pointer of Git LFS; fetch the file with `git lfs pull`" if begin == LFS_POINTER else ""


def external_files(model: ModelProto, path: Path) -> tuple[PurePosixPath, ...]:
    """Return the files with the model's weights, relative to the folder of ``path`` and ordered by name.

    Raises BadInputError if one is missing, too short or not in that folder.
    """
    from onnx import TensorProto

    end_by_location: dict[str, int] = {}
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            location = entries.get("location", "")
            end_by_location[location] = max(end_by_location.get(location, 0), _end_of_tensor(entries))
    for location, end in end_by_location.items():
        where = f"{show_path(path)}: its weights are in {format_value(location)}"
        parts = PurePosixPath(location).parts
        if not location.isprintable() or not parts or ".." in parts or location.startswith("/"):
            raise BadInputError(
                f"{where}, outside the folder of the model; save the model with its weights in the same folder"
            )
        file = path.parent / location
        if not file.is_file():
            raise BadInputError(f"{where}, which is missing; put that file into {show_path(path.parent)}")
        if file.stat().st_size < end:
            sizes = f"{file.stat().st_size:,} bytes of at least {end:,}"
            raise BadInputError(f"{where}, which is truncated ({sizes}); download or save it again")
    return tuple(map(PurePosixPath, sorted(end_by_location)))


def check_loadable(model: ModelProto, path: Path) -> None:
    """Raise BadInputError if the installed ONNX Runtime cannot load the model, whatever its weights are.

    This is the last check of a model, because the import of ONNX Runtime takes long.
    """
    check_versions(model, path)
    check_operators(model, path)


def check_versions(model: ModelProto, path: Path) -> None:
    """Raise BadInputError if the installed ONNX Runtime refuses every model of this opset and IR version."""
    import onnxruntime

    opsets = [opset for opset in model.opset_import if opset.domain in STANDARD_DOMAINS]
    error = _load_alone("", "Identity", opsets, model.ir_version)
    if error is not None:
        shown = ", ".join(f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in opsets) or "none"
        raise BadInputError(
            f"{show_path(path)}: has IR version {model.ir_version} and opset {one_line(shown, MAX_MESSAGE)}, which "
            f"the installed onnxruntime {onnxruntime.__version__} does not take; pip install -U onnxruntime, or "
            f"export the model with an older opset ({one_line(' '.join(str(error).split()), MAX_MESSAGE)})"
        )


def check_operators(model: ModelProto, path: Path) -> None:
    """Raise BadInputError if the installed ONNX Runtime does not have an operator of the model.

    Operators of ONNX and functions of the model itself are not checked. Each other one is loaded in a graph of its
    own, which fails for other reasons if ONNX Runtime has it.
    """
    import onnxruntime
    from onnx import defs

    model_functions = {(function.domain, function.name) for function in model.functions}
    for domain, operator in sorted({(node.domain, node.op_type) for node in model.graph.node} - model_functions):
        if domain in STANDARD_DOMAINS and defs.has(operator, domain):
            continue
        error = _load_alone(domain, operator, model.opset_import, model.ir_version)
        if error is not None and UNKNOWN_OPERATOR.search(str(error)):
            name = f"{domain}:{operator}" if domain else operator
            raise BadInputError(
                f"{show_path(path)}: onnxruntime {onnxruntime.__version__} has no operator {format_value(name)}; "
                "export the model without it, or tune on a server of your own that has it (--target local)"
            )


def _load_alone(
    domain: str, operator: str, opsets: Iterable[OperatorSetIdProto], ir_version: int
) -> Exception | None:
    """Return the error of ONNX Runtime for a graph of this operator alone; None if it loads the graph."""
    import onnxruntime
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    probe = helper.make_model(helper.make_graph([node], "probe", tensors[:1], tensors[1:]), opset_imports=opsets)
    probe.ir_version = ir_version
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        return error
    return None


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield the constant tensors of the graph and of the subgraphs in its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def index_ranges(model: ModelProto) -> dict[str, tuple[int, int]]:
    """Return the valid values, from 0, of each input that selects rows of constant tables.

    Its values may get another shape or type before that. With several tables, the smallest one counts.
    """
    tables = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    input_by_tensor = {tensor.name: tensor.name for tensor in _inputs(model)}
    ranges: dict[str, tuple[int, int]] = {}
    for node in model.graph.node:
        inputs = [*node.input, *[""] * 5]  # a damaged file may have too few
        if node.op_type in SAME_VALUES and inputs[0] in input_by_tensor:
            input_by_tensor |= dict.fromkeys(node.output, input_by_tensor[inputs[0]])
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        for table, indices in TABLE_LOOKUPS.get(node.op_type, ()):
            dims, name = tables.get(inputs[table], ()), input_by_tensor.get(inputs[indices])
            rows = dims[axis] if -len(dims) <= axis < len(dims) else 0
            if name and rows > 0:
                ranges[name] = (0, min(rows - 1, ranges.get(name, (0, rows))[1]))
    return ranges


def _end_of_tensor(entries: dict[str, str]) -> int:
    """Return the end of a tensor in its file, 0 if unknown."""
    offset, length = (entries.get(key, "0") for key in ("offset", "length"))
    return int(offset) + int(length) if offset.isdecimal() and length.isdecimal() else 0


def derive(model: ModelProto, file: Path, name: str, largest_batch: int) -> ModelConfig:
    """Return the configuration that follows from the graph alone.

    ``max_batch_size`` is ``largest_batch``, or 0 for a model without batch dimension. Raises BadInputError if the
    graph does not describe its inputs and outputs.
    """
    size = 0 if batch_obstacle(model) else largest_batch
    config = ModelConfig(name=name, platform=PLATFORM, max_batch_size=size)
    complete(config, model, file.with_name("config.pbtxt"), file)
    for kind, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            raise BadInputError(f"{show_path(file)}: its graph has no {kind}")
    return config


def batch_obstacle(model: ModelProto) -> str:
    """Return why the model has no batch dimension; empty if it has one.

    It has one if the first dimension of every input and output is dynamic and, if named, has the same name.
    """
    symbols = set[str]()
    for tensor in (*_inputs(model), *model.graph.output):
        dims = tensor.type.tensor_type.shape.dim
        if not dims or dims[0].dim_value > 0:
            return f"the first dimension of {format_value(tensor.name)} is " + ("fixed" if dims else "missing")
        symbols.add(dims[0].dim_param)
    named = sorted(symbol for symbol in symbols if symbol and not GENERATED_DIM.fullmatch(symbol))
    return f"the first dimensions have the names {one_line(', '.join(named), MAX_LIST)}" if len(named) > 1 else ""


def complete(config: ModelConfig, model: ModelProto, path: Path, file: Path) -> None:
    """Add inputs and outputs if ``config`` has none, as Triton's backend does; else check that the graph has them.

    Unlike Triton's backend, this never adds a dynamic batcher. ``path`` is the file of ``config``, ``file`` that of
    ``model``. Raises BadInputError.
    """
    batched = config.max_batch_size > 0
    managed = {control.name for control in config.sequence_batching.control_input}  # requests do not contain them
    for state in config.sequence_batching.state:
        managed |= {state.input_name, state.output_name}
    for kind, tensors, configured in (
        ("input", _inputs(model), config.input),
        ("output", list(model.graph.output), config.output),
    ):
        graph_tensors = {tensor.name: tensor for tensor in tensors}
        for name in (tensor.name for tensor in configured if tensor.name not in graph_tensors):
            graph_names = one_line(", ".join(sorted(graph_tensors)), MAX_LIST)
            raise BadInputError(
                f"{show_path(path)}: {kind} {format_value(name)} is not in {show_path(file)}, which has {graph_names}"
            )
        for declared in configured:
            if problem := _mismatch(declared, graph_tensors[declared.name], batched=batched):
                raise BadInputError(f"{show_path(path)}: {kind} {format_value(declared.name)} {problem}")
        for tensor in () if configured else [tensor for tensor in tensors if tensor.name not in managed]:
            which = f"{kind} {format_value(tensor.name)} of {show_path(file)}"
            shape = _shape(tensor, which, is_output=kind == "output")
            if batched and (not shape or shape[0] != -1):
                raise BadInputError(
                    f"{show_path(path)}: max_batch_size is {config.max_batch_size}, but {which} has no "
                    f"batch dimension (its shape is {format_value(tuple(shape))}); write max_batch_size: 0"
                )
            added = configured.add(name=tensor.name, data_type=_data_type(tensor, which))
            if not shape:
                raise BadInputError(f"{which}: {model_config.NO_SCALARS}")
            dims = shape[1:] if batched else shape
            added.dims.extend(dims or [1])
            if not dims:
                added.reshape.SetInParent()  # one scalar per sample


def _mismatch(declared: ModelInput | ModelOutput, tensor: ValueInfoProto, *, batched: bool) -> str:
    """Return how the type or the dims of a configured tensor contradict those of the graph; empty if they do not.

    The dims of outputs are not compared, because a graph may have wrong ones.
    """
    if tensor.type.WhichOneof("value") != "tensor_type":
        return ""
    type_name = _type_name(tensor)
    declared_name = DataType.Name(declared.data_type)
    if type_name in TRITON_TYPES and declared_name != type_name:
        return f"has data_type {declared_name}, and the graph has {type_name}"
    if not isinstance(declared, ModelInput) or not tensor.type.tensor_type.HasField("shape"):
        return ""
    dims = list(declared.reshape.shape if declared.HasField("reshape") else declared.dims)
    expected = _sizes(tensor)
    full = [-1, *dims] if batched else dims
    if len(full) == len(expected) and all(a == b or -1 in (a, b) for a, b in zip(full, expected, strict=True)):
        return ""
    batch = " after the batch dimension" if batched else ""
    return f"has dims {format_value(tuple(dims))}{batch}, and the graph has the shape {format_value(tuple(expected))}"


def _type_name(tensor: ValueInfoProto) -> str:
    """Return Triton's name of the tensor's type, which Triton may not know; empty if ONNX does not know it either."""
    from onnx import helper

    try:
        name = helper.tensor_dtype_to_string(tensor.type.tensor_type.elem_type).removeprefix("TensorProto.")
    except (KeyError, ValueError):
        return ""
    return DATA_TYPES.get(name, f"TYPE_{name}")


def _inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Return the inputs of a request; older graphs list their weights as inputs, too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [tensor for tensor in model.graph.input if tensor.name not in weights]


def _shape(tensor: ValueInfoProto, which: str, *, is_output: bool) -> list[int]:
    kind = tensor.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        shown = str(kind).removesuffix("_type").replace("_", " ")
        advice = "export the model with a tensor in its place"
        if is_output:
            without = "export the model without it (skl2onnx: options={'zipmap': False})"
            advice = f"{without}, or name only the others in config.pbtxt"
        raise BadInputError(f"{which} has the type {shown}, and Triton passes only tensors; {advice}")
    if not tensor.type.tensor_type.HasField("shape"):
        raise BadInputError(f"{which} has no shape in the graph; write it into config.pbtxt")
    return _sizes(tensor)


def _sizes(tensor: ValueInfoProto) -> list[int]:
    """Return the shape of the tensor, with -1 for each dynamic dimension."""
    return [dim.dim_value if dim.dim_value > 0 else -1 for dim in tensor.type.tensor_type.shape.dim]


def _data_type(tensor: ValueInfoProto, which: str) -> Any:
    name = _type_name(tensor)
    if name in ("", "TYPE_UNDEFINED"):
        raise BadInputError(f"{which} has a type that Triton does not know; write it into config.pbtxt")
    if name not in TRITON_TYPES:
        shown = name.removeprefix("TYPE_")
        raise BadInputError(f"{which} has the type {shown}, which Triton cannot pass; convert it in the model (Cast)")
    return DataType.Value(name)


def read_bare_onnx(file: Path, *, gpu: bool, largest_batch: int, cache: Path) -> ModelSource:
    """Return the model in ``file``, with a repository in ``cache`` that links to it.

    ``largest_batch`` becomes max_batch_size if the model has a batch dimension. Raises BadInputError if the file
    cannot be served, EnvironmentFault if the repository cannot be written.
    """
    if not file.exists():
        similar = similar_models(file)
        advice = f"did you mean {' or '.join(similar)}?" if similar else "check the path"
        raise BadInputError(f"{show_path(file)}: no such file; {advice}")
    if file.suffix in TORCH_ENDINGS:
        raise BadInputError(
            f"{show_path(file)}: a PyTorch file does not contain its tensors' dims; make it the model.pt (or "
            "model.pt2) of a folder NAME/1, write NAME/config.pbtxt and name that folder (see docs/pytorch.md)"
        )
    model = read_onnx(file)
    weights = external_files(model, file)
    name = model_name(file)
    config = model_config.with_explicit_counts(derive(model, file, name, largest_batch), gpu=gpu)
    check_loadable(model, file)
    files = [file, *(file.parent / weight for weight in weights)]
    sha256 = digest_files(files)
    try:
        repository = _link(file.absolute(), [str(weight) for weight in weights], name, cache)
    except OSError as error:
        raise cache_error(f"write into {cache}", error) from error
    return ModelSource(
        repository,
        name,
        config,
        facts={
            "batch_dimension": "open" if config.max_batch_size else "none",
            "model_bytes": sum(path.stat().st_size for path in files),
            "sha256": sha256,
        },
        batch_obstacle=None if config.max_batch_size else batch_obstacle(model),
        index_ranges={name: index_ranges(model)},
    )


def digest_files(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the SHA-256 digests of ``files``, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def model_name(file: Path) -> str:
    """Return a name that Triton accepts: of the file, or of its folder if the file is called ``model.onnx``.

    A version number, and the folder ``onnx`` in which Hugging Face keeps such files, are skipped.
    """
    folders = [parent.name for parent in file.absolute().parents]
    parents = [name for name in folders if not name.isdecimal() and name != "onnx"]
    for text in (file.stem, *parents[:1]):
        name = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.-]+", "_", text)).strip("._-")
        if name not in UNSPECIFIC_NAMES:
            return name
    return "model"


def _link(file: Path, weights: list[str], name: str, cache: Path) -> Path:
    """Return a repository of links; runs with the same files share it."""
    key = hashlib.sha256("\0".join([str(file), *weights]).encode(errors="surrogateescape")).hexdigest()[:16]
    repository = cache / "bare" / key
    version = repository / name / "1"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # code in it is executed
    for link, target in (("model.onnx", file), *((weight, file.parent / weight) for weight in weights)):
        path = version / link
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.symlink_to(target)
    return repository
