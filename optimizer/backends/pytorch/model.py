"""A Python-based Triton backend that serves TorchScript, torch.export archives and AOTInductor packages.

Triton runs this file inside its Python stub for every model whose ``backend`` is ``pytorch`` (or whose ``platform``
is ``pytorch_libtorch``), one process an instance. Tensors are named, and parameters understood, as by Triton's
native PyTorch backend, so that a repository written for that one loads unmodified. They pass by DLPack: numpy is
not needed.
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

sys.path.insert(0, str(Path(__file__).parent))
from conventions import Parameters, in_order, positions, read_parameters


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.device = _device(args["model_instance_kind"], args["model_instance_device_id"])
        self.batched = config["max_batch_size"] > 0
        self.outputs = [output["name"] for output in config["output"]]
        path = _model_file(config, Path(args["model_repository"]) / args["model_version"])
        given = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            self.parameters = read_parameters(given)
            _set_process_up(self.parameters)
            with self._mode():
                self.call, arguments, self.takes_dictionary = _load(path, self.device)
            names = [tensor["name"] for tensor in config["input"]]
            self.inputs = names if self.takes_dictionary else in_order(names, arguments)
        except (RuntimeError, ValueError) as error:
            raise pb_utils.TritonModelException(f"pytorch: {error}") from error
        self.positions = positions(self.outputs)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One run for all requests; their tensors are concatenated once, and sliced without a copy."""
        try:
            with self._mode():
                inputs, sizes = self._inputs(requests)
                results = self._run(inputs)
                parts = [self._split(result, sizes) for result in results]
                return [self._response(request, [part[i] for part in parts]) for i, request in enumerate(requests)]
        except Exception as error:
            failure = pb_utils.TritonError(f"pytorch: {error}")
            return [pb_utils.InferenceResponse(error=failure) for _ in requests]
        finally:
            if self.parameters.enable_cache_cleaning and self.device.type == "cuda":
                torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with (
            torch.inference_mode(self.parameters.inference_mode),
            torch.no_grad(),  # which leaving the inference mode out would end
            torch.jit.optimized_execution(not self.parameters.disable_optimized_execution),
        ):
            yield

    def _inputs(self, requests: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """Each input of all requests together, and how many samples each request has."""
        joined = []
        sizes = [1] * len(requests)
        for name in self.inputs:
            tensors = [pb_utils.get_input_tensor_by_name(request, name) for request in requests]
            if any(tensor is None for tensor in tensors):
                raise ValueError(f"input '{name}' is missing")
            arrays = [torch.utils.dlpack.from_dlpack(tensor.to_dlpack()) for tensor in tensors]
            if self.batched:
                sizes = [len(array) for array in arrays]
            joined.append((arrays[0] if len(arrays) == 1 else torch.cat(arrays)).to(self.device))
        return joined, sizes

    def _run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in the configuration's order."""
        if self.takes_dictionary:
            found = self.call(dict(zip(self.inputs, inputs, strict=True)))
        else:
            found = self.call(*inputs)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        if any(not isinstance(result, torch.Tensor) for result in results):
            raise ValueError("the model answers with something other than a tensor or a tuple of tensors")
        if max(self.positions) >= len(results):
            raise ValueError(f"config.pbtxt has more outputs than the model, which has {len(results)}")
        return [results[position].to("cpu").contiguous() for position in self.positions]

    def _split(self, result: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        return torch.split(result, sizes) if self.batched else (result,)

    def _response(self, request: Any, results: list[torch.Tensor]) -> Any:
        wanted = set(request.requested_output_names())
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor.from_dlpack(name, result)
                for name, result in zip(self.outputs, results, strict=True)
                if name in wanted
            ]
        )


def _device(kind: str, number: str) -> torch.device:
    if kind == "CPU":
        return torch.device("cpu")
    if kind != "GPU":
        raise pb_utils.TritonModelException(f"instance kind {kind} is not known here; write KIND_CPU or KIND_GPU")
    if not torch.cuda.is_available():
        raise pb_utils.TritonModelException(
            f"KIND_GPU needs a torch that sees the GPU; {torch.__version__} does not: install its CUDA build"
        )
    return torch.device(f"cuda:{number}")


def _model_file(config: dict[str, Any], version_folder: Path) -> Path:
    """Triton itself fills ``model.pt`` in where the configuration names no file."""
    name = config.get("default_model_filename") or "model.pt"
    if name != Path(name).name:
        raise pb_utils.TritonModelException(f"default_model_filename {name!r} is not the name of a file")
    exported = version_folder / "model.pt2"
    path = version_folder / name
    return exported if name == "model.pt" and not path.exists() and exported.exists() else path


def _set_process_up(parameters: Parameters) -> None:
    """What holds for the whole process, which has this one instance."""
    if parameters.intra_op_thread_count:
        torch.set_num_threads(parameters.intra_op_thread_count)
    if parameters.inter_op_thread_count:
        torch.set_num_interop_threads(parameters.inter_op_thread_count)
    if parameters.disable_cudnn:
        torch.backends.cudnn.enabled = False
    for wanted, choose in (
        (parameters.enable_jit_profiling, torch._C._jit_set_profiling_mode),
        (parameters.enable_jit_executor, torch._C._jit_set_profiling_executor),
        (parameters.enable_tensor_fuser, torch._C._jit_set_texpr_fuser_enabled),
    ):
        if wanted is not None:
            choose(wanted)


def _load(path: Path, device: torch.device) -> tuple[Callable[..., Any], list[str], bool]:
    """What is called, the names of its arguments as far as known, and whether its one argument is a dictionary."""
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
    given, named = signature.in_spec.children()
    if any(not leaf.is_leaf() for leaf in (*given.children(), *named.children())):
        raise ValueError("its arguments are not all tensors; export it with each tensor as an argument")
    names = list(signature.forward_arg_names or program.graph_signature.user_inputs)
    called = program.module()
    if not named.children():
        return called, names, False
    count, keys = len(given.children()), list(named.context)
    names = [*names[:count], *keys]
    return lambda *tensors: called(*tensors[:count], **dict(zip(keys, tensors[count:], strict=True))), names, False
