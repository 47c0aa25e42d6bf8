"""Triton's rules for PyTorch models: the order of their inputs and outputs, and their parameters; PyTorch's messages.

This module does not import torch, so that it can be tested without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

TRUE, FALSE = {"true", "1", "on", "yes"}, {"false", "0", "off", "no"}
_TORCHSCRIPT = re.compile(
    r"The following operation failed in the TorchScript interpreter\..*\n[\w.]*Error: ", re.DOTALL
)
_ADVICE = re.compile(  # the long end of the messages of CUDA
    r"\s+(Search for `cuda|CUDA kernel errors might|Of the allocated memory |If reserved but unallocated memory ).*",
    re.DOTALL,
)


@dataclass(frozen=True)
class Parameters:
    """The parameters of config.pbtxt, with their names in lower case. None leaves PyTorch's default."""

    inference_mode: bool = True
    disable_optimized_execution: bool = False
    disable_cudnn: bool = False
    enable_cache_cleaning: bool = False
    enable_jit_profiling: bool | None = None
    enable_jit_executor: bool | None = None
    enable_tensor_fuser: bool | None = None
    intra_op_thread_count: int = 0
    inter_op_thread_count: int = 0


def read_parameters(parameters: Mapping[str, str]) -> Parameters:
    """Return the values of the ``parameters`` in config.pbtxt. Raises ValueError for a wrong value.

    Unknown parameters are ignored, and so is ENABLE_WEIGHT_SHARING, because each instance is a process of its own.
    """
    values: dict[str, bool | int] = {}
    for field in fields(Parameters):
        key = field.name.upper()
        if key in parameters:
            read = _whole if key.endswith("_COUNT") else _boolean
            values[field.name] = read(key, parameters[key].strip())
    return Parameters(**values)  # type: ignore[arg-type]


def positions(names: Sequence[str], arguments: Sequence[str] = ()) -> list[int]:
    """Return the position of each tensor of the configuration among the model's arguments or outputs.

    If all tensors have names of the forward function's ``arguments``, the names give it. If all are named like
    ``INPUT__0`` or ``OUTPUT__0``, the indexes give it. Otherwise it is the order in the configuration.
    """
    if arguments and all(name in arguments for name in names):
        return [arguments.index(name) for name in names]
    indices = [name.partition("__")[2] for name in names]
    if all(index.isascii() and index.isdigit() for index in indices):
        return [int(index) for index in indices]
    return list(range(len(names)))


def in_order(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the names of the inputs in the order of the forward function's arguments.

    Raises ValueError if an argument is missing or has two inputs.
    """
    by_position = dict(zip(positions(names, arguments), names, strict=True))
    if sorted(by_position) != list(range(len(names))):
        takes = f"; it takes {', '.join(arguments)}" if arguments else ""
        raise ValueError(
            f"the inputs {', '.join(names)} do not match the arguments of the model: name them like these, "
            f"or INPUT__0, INPUT__1 and so on{takes}"
        )
    return [by_position[index] for index in range(len(names))]


def cause(message: str) -> str:
    """Return a message of PyTorch without the traceback of TorchScript and the general advice on CUDA errors.

    Both are so long that the cause between them would be lost where only a part of a message is shown.
    """
    return _ADVICE.sub("", _TORCHSCRIPT.sub("", message)).strip()


def _boolean(key: str, text: str) -> bool:
    if text.lower() not in TRUE | FALSE:
        raise ValueError(f"parameter {key} is {text!r}; write true or false")
    return text.lower() in TRUE


def _whole(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"parameter {key} is {text!r}; write a whole number of 0 or more")
    return int(text)
