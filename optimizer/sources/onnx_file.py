"""An ONNX file of the user's: read without its weights, its weights looked for, its version known to the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from optimizer.errors import BadInputError
from optimizer.profile.yaml_lines import show
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

MAX_BYTES = 1 << 31  # protobuf's own bound: larger models have their weights beside
STANDARD = ("", "ai.onnx", "ai.onnx.ml")  # domains of operators that come with a version of ONNX itself
MOST_WORDS = 120  # characters of a library's own message


def read_onnx(path: Path) -> ModelProto:
    """The model without weights in external files. Raises BadInputError where the file is no ONNX model."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise BadInputError(f"{shown(path)}: not a file")
        if path.stat().st_size > MAX_BYTES:
            raise BadInputError(
                f"{shown(path)}: larger than {MAX_BYTES >> 30} GiB, which no ONNX model can be; "
                "save it with its weights in a file beside it (onnx.save, save_as_external_data=True)"
            )
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        problem = f"not an ONNX model ({one_line(' '.join(str(error).split()), MOST_WORDS)})"
        raise BadInputError(f"{shown(path)}: {problem}") from None
    if not model.graph.node:
        raise BadInputError(f"{shown(path)}: not an ONNX model (its graph is empty)")
    return model


def external_files(model: ModelProto, path: Path) -> tuple[PurePosixPath, ...]:
    """The files with the model's weights, relative to the folder of ``path``, each once and in order of their names.

    Raises BadInputError where one is missing, too short or elsewhere.
    """
    from onnx import TensorProto

    needed: dict[str, int] = {}
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            location = entries.get("location", "")
            needed[location] = max(needed.get(location, 0), _end(entries))
    for location, size in needed.items():
        where = f"{shown(path)}: its weights are in {show(location)}"
        parts = PurePosixPath(location).parts
        if not location.isprintable() or not parts or ".." in parts or location.startswith("/"):
            raise BadInputError(f"{where}, which does not lie beside it; save the model with its weights beside it")
        file = path.parent / location
        if not file.is_file():
            raise BadInputError(f"{where}, which is missing; put that file into {shown(path.parent)}")
        if file.stat().st_size < size:
            told = f"{file.stat().st_size:,} bytes of at least {size:,}"
            raise BadInputError(f"{where}, which is cut off ({told}); fetch or save it again")
    return tuple(map(PurePosixPath, sorted(needed)))


def check_versions(model: ModelProto, path: Path) -> None:
    """Raises BadInputError where the installed ONNX Runtime refuses any model of such an opset and IR version."""
    import onnxruntime
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", tensors[:1], tensors[1:])
    probe = helper.make_model(graph, opset_imports=[o for o in model.opset_import if o.domain in STANDARD])
    probe.ir_version = model.ir_version
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's have no base of their own
        opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in probe.opset_import) or "none"
        raise BadInputError(
            f"{shown(path)}: has IR version {probe.ir_version} and opset {one_line(opsets, MOST_WORDS)}, which the "
            f"installed onnxruntime {onnxruntime.__version__} does not take; pip install -U onnxruntime, or export "
            f"the model with an older opset ({one_line(' '.join(str(error).split()), MOST_WORDS)})"
        ) from None


def shown(path: Path) -> str:
    return one_line(str(path))


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Those of the graph and of the graphs within its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _end(entries: dict[str, str]) -> int:
    """Where in its file a tensor ends, as far as it says so."""
    offset, length = (entries.get(key, "0") for key in ("offset", "length"))
    return int(offset) + int(length) if offset.isdecimal() and length.isdecimal() else 0
