"""Triton's backends: the one that serves a model, engines of language models, and vLLM's settings in config.pbtxt."""

from __future__ import annotations

from optimizer.config.model_config_proto import DataType, ModelConfig

ONNXRUNTIME = "onnxruntime"
PLATFORMS = {  # the older field ``platform`` -> backend
    "onnxruntime_onnx": ONNXRUNTIME,
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "ensemble": "",
}


def backend_of(config: ModelConfig) -> str:
    """Return the backend of the model, from ``backend`` or the older ``platform``; empty for an ensemble."""
    platform = str(config.platform)
    return str(config.backend) or PLATFORMS.get(platform, platform)


def is_ensemble(config: ModelConfig) -> bool:
    """Return whether the model is an ensemble, whose steps are checked one by one."""
    return bool(config.HasField("ensemble_scheduling"))


VLLM = "vllm"
TENSORRT_LLM = "tensorrtllm"
KV_CACHE_SHARE = "kv_cache_free_gpu_mem_fraction"  # parameter of TensorRT-LLM, also with its Python runtime
_VLLM_INPUTS = {  # name: data type, and whether the input is optional
    "text_input": (DataType.TYPE_STRING, False),
    "stream": (DataType.TYPE_BOOL, True),
    "sampling_parameters": (DataType.TYPE_STRING, True),
    "exclude_input_in_output": (DataType.TYPE_BOOL, True),
    "return_num_output_tokens": (DataType.TYPE_BOOL, True),
}
_VLLM_OUTPUTS = {"text_output": DataType.TYPE_STRING, "num_output_tokens": DataType.TYPE_UINT32}


def complete_vllm(config: ModelConfig) -> None:
    """Set the decoupled policy, inputs and outputs of a vLLM model as the backend does when it loads the model.

    The backend fixes them, so that a config.pbtxt in a repository rarely has them.
    """
    config.model_transaction_policy.decoupled = True
    if not config.input:
        for name, (data_type, optional) in _VLLM_INPUTS.items():
            config.input.add(name=name, data_type=data_type, dims=[1], optional=optional)
    if not config.output:
        for name, data_type in _VLLM_OUTPUTS.items():
            config.output.add(name=name, data_type=data_type, dims=[-1])


def has_llm_engine(config: ModelConfig) -> bool:
    """Return whether the model is an engine of vLLM or TensorRT-LLM.

    An engine takes most of the GPU's free memory for its KV cache when it is loaded, so that two of them do not fit.
    """
    return config.backend in (VLLM, TENSORRT_LLM) or KV_CACHE_SHARE in config.parameters
