"""The inputs and outputs of a model whose config.pbtxt leaves them to Triton's auto-completion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError, DeploymentError, ServerFault
from optimizer.deploy.installed_server import Installation, ServerFolder, TritonServer
from optimizer.deploy.managed_target import load_model
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.failure_causes import missing_module, without_traceback
from optimizer.measure.server_client import CallError


def complete_config(source: ModelSource, find: Callable[[], Installation], limit_seconds: float) -> ModelSource:
    """Return ``source`` with the inputs and outputs that Triton's auto-completion finds in the model.

    ``find`` returns the server to start for it; it has to start, and the model to load, within ``limit_seconds``. A
    source that is complete is returned unchanged. Raises BadInputError if the model does not load, or has no inputs
    or outputs either.
    """
    if source.config.input and source.config.output:
        return source
    where = source.repository / source.name / "config.pbtxt"
    installation = find()
    folder = ServerFolder(source, installation)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        settings = TargetSettings(folder.path / "tritonserver.log", model_load_timeout_seconds=limit_seconds)
        server = TritonServer(folder, installation, settings)
        undo.callback(server.stop)
        try:
            client = server.client()
            load_model(server, client, source.name, None, limit_seconds)
            completed = client.config(source.name)
        except (CallError, DeploymentError) as error:
            reason = without_traceback(str(error)) if isinstance(error, CallError) else str(error)
            if module := missing_module(str(error)):
                reason += f"; {server.package_advice(module)}"
            raise BadInputError(f"{where}: has no inputs or outputs, and {reason}") from None
        except ServerFault as error:
            raise ServerFault(str(error)) from None  # without the log, which is removed with the folder
    if not (completed.input and completed.output):
        raise BadInputError(
            f"{where}: has no inputs or outputs, and the model does not declare them either; write them"
        )
    config = model_config.with_explicit_counts(source.config, gpu=True)  # a copy
    for name in ("input", "output"):
        config.ClearField(name)
        getattr(config, name).extend(getattr(completed, name))
    config.max_batch_size = completed.max_batch_size
    for name in ("dynamic_batching", "model_transaction_policy"):
        if completed.HasField(name) and not (name == "dynamic_batching" and config.WhichOneof("scheduling_choice")):
            getattr(config, name).CopyFrom(getattr(completed, name))
    return replace(source, config=model_config.without_default_preferred_size(config))
