"""The meaning of error messages, which Triton and its backends send as text only."""

from __future__ import annotations

import re

from optimizer.core.safe_text import shorten


def model_died(message: str) -> bool:
    """Return whether the message says that the stub process of a Python model died; the server itself is alive."""
    return re.search(r"stub process\b.{0,200}\bis (not healthy|unhealthy)", message, re.IGNORECASE) is not None


def is_rejection(message: str) -> bool:
    """Return whether the message says that Triton rejected a request because its queue was full."""
    return "exceeds maximum queue size" in message.lower()


def is_refused_by_queue(message: str) -> bool:
    """Return whether the message says that Triton refused a request: its queue was full, or it waited there too long.

    Fewer requests in flight may all be served.
    """
    return is_rejection(message) or "request timeout expired" in message.lower()


def lacks_memory(message: str) -> bool:
    """Return whether the message says that the server or one of its backends could not allocate memory.

    A failed allocation inside a Python model does not count, since that is memory of its own process.
    """
    return re.search(r"\b(cannot allocate memory|std::bad_alloc)\b", message, re.IGNORECASE) is not None


def lacks_gpu_memory(message: str) -> bool:
    """Return whether a message of PyTorch, CUDA, cuBLAS or ONNX Runtime says that a GPU has too little free memory.

    All processes of the server share that memory.
    """
    pattern = r"\bCUDA\b.{0,40}\bout of memory\b|\bcudaErrorMemoryAllocation\b|\bCUBLAS_STATUS_ALLOC_FAILED\b"
    return re.search(f"{pattern}|Failed to allocate memory for requested buffer", message, re.IGNORECASE) is not None


def hides_cause(message: str) -> bool:
    """Return whether the message says that Triton cannot read a model, for a reason that only its log has.

    For a step of an ensemble it may say that the model is not available.
    """
    return "failed to poll from model repository" in message or "models that are not available" in message


def without_traceback(message: str) -> str:
    """Return the server's message on one line, without the Python traceback that a backend appends."""
    return shorten(re.split(r"\s+At:\s", message)[0].rstrip(" .;\n"))  # Triton ends the reason of a version with ;


def why_request_failed(message: str) -> str:
    """Return the server's message on one line for a measurement in which no request may fail.

    If the queue refused the request, the option that permits this follows. It is shown with its command, because
    `tune sweep` does not take it.
    """
    reason = without_traceback(message)
    if not is_refused_by_queue(message):
        return reason
    return f"{reason}; `tune --max-error-rate SHARE` permits the queue to refuse a share of the requests"


def missing_model(message: str) -> str:
    """Return the model that a Python model called and the server has not loaded; empty for other errors."""
    match = re.search(r"Failed for execute the inference request\. Model '([^']+)' is not ready", message)
    return match[1] if match else ""


def missing_module(message: str) -> str:
    """Return the top-level name of the module that a Python model could not import; empty for other errors."""
    match = re.search(r"ModuleNotFoundError: No module named '(\w+)", message)
    return match[1] if match else ""
