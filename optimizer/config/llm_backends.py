"""What distinguishes models of Triton's vLLM and TensorRT-LLM backends from others."""

from __future__ import annotations

from optimizer.config.model_config_proto import ModelConfig

VLLM = "vllm"
TENSORRT_LLM = "tensorrtllm"
REPORTS_METRICS = "REPORT_CUSTOM_METRICS"  # parameter of config.pbtxt with which the vLLM backend exports metrics
KV_CACHE_SHARE = "kv_cache_free_gpu_mem_fraction"  # parameter of TensorRT-LLM, also with its Python runtime


def has_llm_engine(config: ModelConfig) -> bool:
    """Return whether the model is an engine of vLLM or TensorRT-LLM.

    An engine takes most of the GPU's free memory for its KV cache when it is loaded, so that two of them do not fit.
    """
    return config.backend in (VLLM, TENSORRT_LLM) or KV_CACHE_SHARE in config.parameters
