"""Facts about models of Triton's vLLM and TensorRT-LLM backends: inputs, outputs and parameters of config.pbtxt."""

from __future__ import annotations

from optimizer.config.model_config_proto import DataType, ModelConfig

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
_VLLM_OUTPUTS = {
    "text_output": DataType.TYPE_STRING,
    "num_output_tokens": DataType.TYPE_UINT32,
}


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
