"""How Triton's PyTorch backend reads a configuration: which tensor is which argument, which parameters there are.

Without torch, so that it can be looked at where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

TRUE, FALSE = {"true", "1", "on", "yes"}, {"false", "0", "off", "no"}


@dataclass(frozen=True)
class Parameters:
    """``parameters`` of config.pbtxt by their names there, in lower case. None leaves PyTorch's own default."""

    inference_mode: bool = True
    disable_optimized_execution: bool = False
    disable_cudnn: bool = False
    enable_cache_cleaning: bool = False
    enable_jit_profiling: bool | None = None
    enable_jit_executor: bool | None = None
    enable_tensor_fuser: bool | None = None
    intra_op_thread_count: int = 0
    inter_op_thread_count: int = 0


def read_parameters(given: Mapping[str, str]) -> Parameters:
    """Others than PyTorch's are left alone, as are those that mean nothing where each instance is a process of its
    own (ENABLE_WEIGHT_SHARING). Raises ValueError naming the parameter."""
    values: dict[str, bool | int] = {}
    for field in fields(Parameters):
        key = field.name.upper()
        if key in given:
            read = _whole if key.endswith("_COUNT") else _boolean
            values[field.name] = read(key, given[key].strip())
    return Parameters(**values)  # type: ignore[arg-type]


def positions(names: Sequence[str], arguments: Sequence[str] = ()) -> list[int]:
    """Which argument, or which output, each of the configuration's tensors is.

    By the names of the forward function's ``arguments`` where all are such; else by the index in ``INPUT__0`` and
    ``OUTPUT__0`` where all have one; else in the configuration's order.
    """
    if arguments and all(name in arguments for name in names):
        return [arguments.index(name) for name in names]
    indices = [name.partition("__")[2] for name in names]
    if all(index.isascii() and index.isdigit() for index in indices):
        return [int(index) for index in indices]
    return list(range(len(names)))


def in_order(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The inputs as the forward function takes them, the first argument first.

    Raises ValueError where one is left out or given twice.
    """
    found = dict(zip(positions(names, arguments), names, strict=True))
    if sorted(found) != list(range(len(names))):
        takes = f"; it takes {', '.join(arguments)}" if arguments else ""
        raise ValueError(
            f"the inputs {', '.join(names)} do not follow each other as arguments of the model: name them as those, "
            f"or INPUT__0, INPUT__1 and so on{takes}"
        )
    return [found[index] for index in range(len(names))]


def _boolean(key: str, text: str) -> bool:
    if text.lower() not in TRUE | FALSE:
        raise ValueError(f"parameter {key} is {text!r}; write true or false")
    return text.lower() in TRUE


def _whole(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"parameter {key} is {text!r}; write a whole number of 0 or more")
    return int(text)
