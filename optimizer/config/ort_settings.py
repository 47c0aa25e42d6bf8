"""The settings of ONNX Runtime and of its accelerators: which of them have an effect, and where they are known.

The native backend is https://github.com/triton-inference-server/onnxruntime_backend (``src/onnxruntime.cc``). It
reads ``graph.level``, threads and the mode of execution for each model. It ignores the parameters of ``openvino``,
and ``session.intra_op.allow_spinning``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf import text_format

from optimizer.config import field_path
from optimizer.config.backends import ONNXRUNTIME, backend_of
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import CPU_ACCELERATOR, GPU_ACCELERATOR, ORT_SETTING_PATHS, PLAN_CUDA_GRAPHS, FieldValue
from optimizer.core.errors import ParameterError

NO_ACCELERATOR = "none"
OPENVINO, TENSORRT = "openvino", "tensorrt"
INTRA_OP_THREADS, INTER_OP_THREADS, EXECUTION_MODE, GRAPH_LEVEL, SPINNING = (
    ORT_SETTING_PATHS[name]
    for name in ("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "graph_level", "allow_spinning")
)
_ACCELERATORS = (CPU_ACCELERATOR, GPU_ACCELERATOR)
_NAMES = tuple(f"{accelerator}.name" for accelerator in _ACCELERATORS)
_CPU_NAME = f"{CPU_ACCELERATOR}.name"
_THREAD_SETTINGS = (SPINNING, EXECUTION_MODE, INTER_OP_THREADS)  # OpenVINO has its own threads
_READ_GRAPH_SETTINGS = (ONNXRUNTIME, "tensorflow")  # backends that read graph.level and accelerators of a GPU
_UNREAD = "Triton's own onnxruntime backend does not read it; leave it out"


def is_accelerator_name(path: str) -> bool:
    """Return whether ``path`` is the name of the first accelerator of a device, which may be ``none``."""
    return path in _NAMES


def is_accelerator_field(path: str) -> bool:
    """Return whether ``path`` is the name or a parameter of the first accelerator of a device."""
    return path.startswith(_ACCELERATORS)


def absent_accelerators(fields: Mapping[str, FieldValue]) -> tuple[str, ...]:
    """Return the beginnings of the paths of accelerators that ``fields`` switch off with ``none``."""
    return tuple(f"{path}." for path in _ACCELERATORS if fields.get(f"{path}.name") == NO_ACCELERATOR)


def remove_accelerators(config: ModelConfig, device: str) -> None:
    """Remove the accelerators ``cpu_execution_accelerator`` or ``gpu_execution_accelerator`` from ``config``."""
    accelerators = config.optimization.execution_accelerators
    if not getattr(accelerators, device):
        return  # to clear a field of an absent message would create the message
    accelerators.ClearField(device)
    if not accelerators.ListFields():
        config.optimization.ClearField("execution_accelerators")


def is_conditional(paths: Iterable[str]) -> bool:
    """Return whether some settings of ``paths`` have an effect with some values of others only."""
    varied = set(paths)
    pairs = ((INTRA_OP_THREADS, SPINNING), (EXECUTION_MODE, INTER_OP_THREADS))
    return any(name in varied for name in _NAMES) or any(varied.issuperset(pair) for pair in pairs)


def without_effect(fields: Mapping[str, FieldValue]) -> dict[str, str]:
    """Return the settings of ``fields`` that have no effect next to the others, with the reason in words.

    An accelerator that is switched off has no parameters. A pool of one thread does not spin, and operators that run
    one after another use no threads of their own. OpenVINO uses none of ONNX Runtime's threads.
    """
    absent = absent_accelerators(fields)
    reasons = dict.fromkeys(
        (path for path in fields if path.startswith(absent) and path not in _NAMES), "with execution_accelerator none"
    )
    if str(fields.get(INTRA_OP_THREADS)) == "1":
        reasons[SPINNING] = "with intra_op_thread_count 1"
    if str(fields.get(EXECUTION_MODE)) == "0":
        reasons[INTER_OP_THREADS] = "with execution_mode 0"
    if fields.get(_CPU_NAME) == OPENVINO:
        reasons |= dict.fromkeys(_THREAD_SETTINGS, "with execution_accelerator openvino")
    return {path: reason for path, reason in reasons.items() if path in fields}


def accelerator_text(fields: Mapping[str, FieldValue]) -> str:
    """Return the accelerators of ``fields`` as one line of config.pbtxt; empty if there are none."""
    config, absent = ModelConfig(), absent_accelerators(fields)
    for path, value in fields.items():
        if is_accelerator_field(path) and not path.startswith(absent):
            field_path.set_value(config, path, value)
    return str(text_format.MessageToString(config, as_one_line=True, as_utf8=True)).strip()


def uses_openvino(configs: Iterable[ModelConfig], fields: Mapping[str, Iterable[FieldValue]]) -> bool:
    """Return whether the configuration of an ONNX model, or a choice of ``fields``, has OpenVINO."""
    return any(map(has_openvino, configs)) or any(
        OPENVINO in values for path, values in fields.items() if path.endswith(_CPU_NAME)
    )


def has_openvino(config: ModelConfig) -> bool:
    """Return whether ``config`` is that of an ONNX model with OpenVINO."""
    return _openvino(config) is not None


def unread_settings(configs: Iterable[ModelConfig]) -> tuple[str, ...]:
    """Return the settings of ``configs`` that have an effect with tune's own backend and none with Triton's own."""
    return tuple(dict.fromkeys(setting for config in configs for setting in _unread(config)))


def _unread(config: ModelConfig) -> tuple[str, ...]:
    parameters = {key: parameter.string_value for key, parameter in config.parameters.items()}
    threads = parameters.get("intra_op_thread_count", "0")
    if (openvino := _openvino(config)) is not None:
        takes_threads = threads != "0" and "num_of_threads" not in openvino
        return (
            *(f"{key} {value} of openvino" for key, value in sorted(openvino.items())),
            *([f"intra_op_thread_count {threads} with openvino"] if takes_threads else []),
        )
    spins_less = parameters.get("session.intra_op.allow_spinning") == "0" and threads != "1"
    return ("session.intra_op.allow_spinning 0",) if spins_less and _is_onnx(config) else ()


def _openvino(config: ModelConfig) -> dict[str, str] | None:
    """Return the parameters of OpenVINO; None if ``config`` is not that of an ONNX model with OpenVINO."""
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if _is_onnx(config) and accelerator.name.lower() == OPENVINO:
            return dict(accelerator.parameters)
    return None


def _is_onnx(config: ModelConfig) -> bool:
    return backend_of(config) == ONNXRUNTIME


def check_ort_settings(
    fields: Mapping[str, Iterable[FieldValue]],
    config: ModelConfig,
    backend: str,
    *,
    on_gpu: bool | None,
    is_embedded: bool,
) -> None:
    """Raise ParameterError if a choice of ``fields`` has no effect for a model with ``config`` on its device.

    ``on_gpu`` is whether a GPU serves it; None is unknown. ``is_embedded`` is whether tune's own backend does.
    ``backend`` is empty if it is unknown.
    """
    _check_backend(fields, backend)
    _check_device(fields, on_gpu=on_gpu)
    if not is_embedded:
        _check_read_by_triton(fields, config)
    _check_plan_graphs(fields, backend, on_gpu=on_gpu)
    _check_parameters(fields, config)
    _check_threads(fields, config)


def _check_backend(fields: Mapping[str, Iterable[FieldValue]], backend: str) -> None:
    """Raise ParameterError if a setting is one of ONNX models, and the backend is another one."""
    for path in fields if backend not in ("", ONNXRUNTIME) else ():
        of_graph = path == GRAPH_LEVEL or path.startswith(GPU_ACCELERATOR)
        if (of_graph and backend not in _READ_GRAPH_SETTINGS) or path == SPINNING or path.startswith(CPU_ACCELERATOR):
            raise ParameterError(path, f"only ONNX models have it, and the backend is {backend}; leave it out")


def _check_device(fields: Mapping[str, Iterable[FieldValue]], *, on_gpu: bool | None) -> None:
    """Raise ParameterError if an accelerator does not compute on the device of the model."""
    gpu_paths = [path for path in fields if path.startswith(GPU_ACCELERATOR)]
    if gpu_paths and on_gpu is False and set(fields[gpu_paths[0]]) != {NO_ACCELERATOR}:
        raise ParameterError(gpu_paths[0], "needs a GPU, and this model is served on the CPU; leave it out")
    if on_gpu and OPENVINO in fields.get(_CPU_NAME, ()):
        raise ParameterError(
            _CPU_NAME,
            "openvino computes on the CPU, and this model is served on a GPU; leave it out, or write kind: KIND_CPU",
        )


def _check_read_by_triton(fields: Mapping[str, Iterable[FieldValue]], config: ModelConfig) -> None:
    """Raise ParameterError if only tune's own backend reads a setting."""
    if SPINNING in fields:
        raise ParameterError(SPINNING, _UNREAD)
    if INTRA_OP_THREADS in fields and _always_openvino(fields, config):
        raise ParameterError(INTRA_OP_THREADS, f"has no effect with openvino: {_UNREAD}")
    if unread := [path for path in fields if path.startswith(f"{CPU_ACCELERATOR}.parameters.")]:
        raise ParameterError(unread[0], _UNREAD)


def _check_plan_graphs(fields: Mapping[str, Iterable[FieldValue]], backend: str, *, on_gpu: bool | None) -> None:
    """Raise ParameterError if the setting of CUDA graphs is not one of a TensorRT plan on a GPU."""
    if PLAN_CUDA_GRAPHS in fields and backend != "tensorrt":
        raise ParameterError(
            PLAN_CUDA_GRAPHS,
            f"only the tensorrt backend reads it, and the backend is {backend or 'unknown'}; for an ONNX model write "
            "onnxruntime: {execution_accelerator: [tensorrt], cuda_graphs: [false, true]}",
        )
    if PLAN_CUDA_GRAPHS in fields and on_gpu is False:
        raise ParameterError(PLAN_CUDA_GRAPHS, "needs a GPU, and this model is served on the CPU; leave it out")


def _check_parameters(fields: Mapping[str, Iterable[FieldValue]], config: ModelConfig) -> None:
    """Raise ParameterError if parameters of an accelerator have no accelerator."""
    accelerators = config.optimization.execution_accelerators
    for accelerator, existing in (
        (GPU_ACCELERATOR, accelerators.gpu_execution_accelerator),
        (CPU_ACCELERATOR, accelerators.cpu_execution_accelerator),
    ):
        parameters = [path for path in fields if path.startswith(f"{accelerator}.parameters.")]
        if parameters and f"{accelerator}.name" not in fields and not existing:
            example = TENSORRT if accelerator == GPU_ACCELERATOR else OPENVINO
            raise ParameterError(
                parameters[0], f"is a parameter of an accelerator; write execution_accelerator: [{example}], too"
            )
        if parameters and set(fields.get(f"{accelerator}.name", ())) == {NO_ACCELERATOR}:
            raise ParameterError(parameters[0], "has no effect without an accelerator; leave it out")


def _always_openvino(fields: Mapping[str, Iterable[FieldValue]], config: ModelConfig) -> bool:
    configured = OPENVINO if has_openvino(config) else NO_ACCELERATOR
    return set(fields.get(_CPU_NAME, (configured,))) == {OPENVINO}


def _check_threads(fields: Mapping[str, Iterable[FieldValue]], config: ModelConfig) -> None:
    """Raise ParameterError if a choice of threads has no effect with any of the other choices.

    A setting that is no choice has the value of ``config``.
    """
    parameters = {key: parameter.string_value for key, parameter in config.parameters.items()}
    modes = set(map(str, fields.get(EXECUTION_MODE, (parameters.get("execution_mode", "0"),))))
    threads = set(map(str, fields.get(INTRA_OP_THREADS, (parameters.get("intra_op_thread_count", "0"),))))
    if _always_openvino(fields, config) and (paths := [path for path in _THREAD_SETTINGS if path in fields]):
        raise ParameterError(paths[0], "has no effect with openvino, which has its own threads; leave it out")
    if INTER_OP_THREADS in fields and modes <= {"0", ""}:
        raise ParameterError(
            INTER_OP_THREADS, "has no effect with execution_mode 0, the default; write execution_mode: [0, 1], too"
        )
    if SPINNING in fields and threads == {"1"}:
        raise ParameterError(SPINNING, "has no effect with intra_op_thread_count 1, which never waits; leave it out")
