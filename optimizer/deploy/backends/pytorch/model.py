"""A Python-based Triton backend that serves TorchScript, torch.export archives and AOTInductor packages.

Triton runs this file inside its Python stub for every model whose ``backend`` is ``pytorch`` (or whose ``platform``
is ``pytorch_libtorch``), one process an instance. Names of tensors and parameters have the same meaning as in
Triton's native PyTorch backend, so that a repository written for it loads unmodified. Tensors are passed by DLPack,
without numpy.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from conventions import Parameters, cause, in_order, positions, read_parameters

sys.path.insert(0, str(Path(__file__).parent))


class TritonPythonModel:
    """One instance of a model, in a process of its own, with the interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model. Raises TritonModelException if it or its configuration does not work."""
        config = json.loads(args["model_config"])
        self.name, self.has_failed = args["model_instance_name"], False
        self.device = _device(args["model_instance_kind"], args["model_instance_device_id"])
        self.batched = config["max_batch_size"] > 0
        self.outputs = [output["name"] for output in config["output"]]
        path = _model_file(config, Path(args["model_repository"]) / args["model_version"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            self.parameters = read_parameters(parameters)
            _configure_process(self.parameters)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # also for operators that do not ask on which one their inputs are
            self.can_pin = _can_pin(self.device)
            with self._mode():
                self.call, arguments, self.takes_dictionary = _load(path, self.device)
            names = [tensor["name"] for tensor in config["input"]]
            self.inputs = names if self.takes_dictionary else in_order(names, arguments)
        except (RuntimeError, ValueError) as error:
            raise pb_utils.TritonModelException(f"pytorch: {cause(str(error))}") from error
        self.positions = positions(self.outputs)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the model once for all requests: inputs are concatenated once, outputs are sliced without a copy."""
        try:
            with self._mode():
                inputs, sizes = self._inputs(requests)
                results = self._run(inputs)
                parts = [self._split(result, sizes) for result in results]
                return [self._response(request, [part[i] for part in parts]) for i, request in enumerate(requests)]
        except Exception as error:
            text = f"pytorch: {cause(str(error))}"
            if not self.has_failed:  # once: the log need not have it for each request
                self.has_failed = True
                print(f"error of {self.name}: {text}", file=sys.stderr, flush=True)
            # responses that share a TritonError lose its text
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text)) for _ in requests]
        finally:
            if self.parameters.enable_cache_cleaning and self.device.type == "cuda":
                torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with (
            torch.inference_mode(self.parameters.inference_mode),
            torch.no_grad(),  # also without inference mode
            torch.jit.optimized_execution(not self.parameters.disable_optimized_execution),
        ):
            yield

    def _inputs(self, requests: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """Return each input, concatenated over the requests, and the number of samples of each request."""
        joined = []
        sizes = [1] * len(requests)
        for name in self.inputs:
            tensors = [pb_utils.get_input_tensor_by_name(request, name) for request in requests]
            if any(tensor is None for tensor in tensors):
                raise ValueError(f"input '{name}' is missing")
            arrays = [torch.utils.dlpack.from_dlpack(tensor.to_dlpack()) for tensor in tensors]
            if self.batched:
                sizes = [len(array) for array in arrays]
            joined.append(self._joined(arrays))
        return joined, sizes

    def _joined(self, arrays: list[torch.Tensor]) -> torch.Tensor:
        """Return the concatenation of ``arrays`` on the device. The copy to a GPU may still be running.

        A GPU copies it from page-locked memory. A single array would have to be copied to that memory first. Arrays
        are on a GPU already if the model has FORCE_CPU_ONLY_INPUT_TENSORS set to "no".
        """
        if len(arrays) == 1:
            return arrays[0].to(self.device)
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        source = arrays[0].device
        pinned = self.can_pin and source.type == "cpu"
        joined = torch.empty(shape, dtype=arrays[0].dtype, device=source, pin_memory=pinned)
        return torch.cat(arrays, out=joined).to(self.device, non_blocking=True)

    def _run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs in the order of the configuration."""
        if self.takes_dictionary:
            output = self.call(dict(zip(self.inputs, inputs, strict=True)))
        else:
            output = self.call(*inputs)
        results = [output] if isinstance(output, torch.Tensor) else list(output)
        if any(not isinstance(result, torch.Tensor) for result in results):
            raise ValueError("the model returns something other than a tensor or a tuple of tensors")
        if max(self.positions) >= len(results):
            raise ValueError(f"config.pbtxt has more outputs than the model, which has {len(results)}")
        return [results[position].to("cpu").contiguous() for position in self.positions]

    def _split(self, result: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        return torch.split(result, sizes) if self.batched else (result,)

    def _response(self, request: Any, results: list[torch.Tensor]) -> Any:
        requested = set(request.requested_output_names())
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor.from_dlpack(name, result)
                for name, result in zip(self.outputs, results, strict=True)
                if name in requested
            ]
        )


def _device(kind: str, number: str) -> torch.device:
    if kind == "CPU":
        return torch.device("cpu")
    if kind != "GPU":
        raise pb_utils.TritonModelException(f"instance kind {kind} is not supported; write KIND_CPU or KIND_GPU")
    if not torch.cuda.is_available():
        raise pb_utils.TritonModelException(
            f"KIND_GPU needs a torch that sees the GPU; {torch.__version__} does not: install its CUDA build"
        )
    return torch.device(f"cuda:{number}")


def _can_pin(device: torch.device) -> bool:
    """Return whether page-locked memory can be allocated, from which a GPU copies faster."""
    if device.type != "cuda":
        return False
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:  # the limit of locked memory may be low
        return False
    return True


def _model_file(config: dict[str, Any], version_folder: Path) -> Path:
    """Return the model's file; ``model.pt`` is Triton's default name, also if the configuration names none."""
    name = config.get("default_model_filename") or "model.pt"
    if name != Path(name).name:
        raise pb_utils.TritonModelException(f"default_model_filename {name!r} is not the name of a file")
    exported = version_folder / "model.pt2"
    path = version_folder / name
    return exported if name == "model.pt" and not path.exists() and exported.exists() else path


def _configure_process(parameters: Parameters) -> None:
    """Apply the settings of the whole process, which serves only this instance."""
    if parameters.intra_op_thread_count:
        torch.set_num_threads(parameters.intra_op_thread_count)
    if parameters.inter_op_thread_count:
        torch.set_num_interop_threads(parameters.inter_op_thread_count)
    if parameters.disable_cudnn:
        torch.backends.cudnn.enabled = False
    for is_enabled, enable in (
        (parameters.enable_jit_profiling, torch._C._jit_set_profiling_mode),
        (parameters.enable_jit_executor, torch._C._jit_set_profiling_executor),
        (parameters.enable_tensor_fuser, torch._C._jit_set_texpr_fuser_enabled),
    ):
        if is_enabled is not None:
            enable(is_enabled)


def _load(path: Path, device: torch.device) -> tuple[Callable[..., Any], list[str], bool]:
    """Return the model's function, its argument names if known, and whether its only argument is a dictionary."""
    if path.suffix != ".pt2":
        module = torch.jit.load(str(path), map_location=device).eval()
        arguments = module.forward.schema.arguments[1:]  # the first is self
        takes_dictionary = len(arguments) == 1 and arguments[0].type.kind() == "DictType"
        return module, [argument.name for argument in arguments], takes_dictionary
    with zipfile.ZipFile(path) as archive:
        compiled = any("/data/aotinductor/" in name for name in archive.namelist())
    if compiled:
        number = -1 if device.index is None else device.index
        return torch._inductor.aoti_load_package(str(path), device_index=number), [], False
    program = torch.export.load(str(path))
    if device.type == "cuda":
        program = torch.export.passes.move_to_device_pass(program, device)
    signature = program.module_call_graph[0].signature
    positional, named = signature.in_spec.children()
    if any(not leaf.is_leaf() for leaf in (*positional.children(), *named.children())):
        raise ValueError("its arguments are not all tensors; export it with each tensor as an argument")
    names = list(signature.forward_arg_names or program.graph_signature.user_inputs)
    module = program.module()
    if not named.children():
        return module, names, False
    count, keys = len(positional.children()), list(named.context)
    names = [*names[:count], *keys]
    return lambda *tensors: module(*tensors[:count], **dict(zip(keys, tensors[count:], strict=True))), names, False
