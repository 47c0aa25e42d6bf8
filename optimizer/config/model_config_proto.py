"""Triton's protobuf messages of a model configuration, without importing gRPC: all modules import them from here.

The generated module is part of the package ``tritonclient.grpc``, whose own import takes as long as that of all other
modules of a short command. It is loaded from its file under its own name, so the package uses the same module later.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGE = "tritonclient.grpc"
_NAME = f"{_PACKAGE}.model_config_pb2"


def _load() -> None:
    package = find_spec(_PACKAGE)  # imports only the parent of the package, which is empty
    if _NAME in sys.modules or package is None or not package.submodule_search_locations:
        return
    spec = spec_from_file_location(_NAME, Path(package.submodule_search_locations[0], "model_config_pb2.py"))
    if spec is None or spec.loader is None:
        return
    module = sys.modules[_NAME] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise


_load()

from tritonclient.grpc.model_config_pb2 import (  # noqa: E402
    TYPE_STRING,
    TYPE_UINT64,
    DataType,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelSequenceBatching,
)

__all__ = [
    "TYPE_STRING",
    "TYPE_UINT64",
    "DataType",
    "ModelConfig",
    "ModelInput",
    "ModelInstanceGroup",
    "ModelOutput",
    "ModelSequenceBatching",
]
