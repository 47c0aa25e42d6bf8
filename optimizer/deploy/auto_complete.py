"""What a model in Python says of itself where its config.pbtxt does not (``auto_complete_config``): asked once.

Afterwards the whole configuration is given and the server told to complete nothing: else the model would set its own
max_batch_size and batching over those of each candidate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from optimizer import model_config
from optimizer.deploy.installation import Installation
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.tritonserver import TritonServer
from optimizer.errors import BadInputError
from optimizer.model_source import ModelSource
from optimizer.server_health import cause

LOAD_SECONDS = 120.0


def completed(source: ModelSource, find: Callable[[], Installation]) -> ModelSource:
    """``source`` with what the model itself adds, on a server that ``find`` gives and that is started for it;
    unchanged where nothing is missing.

    Raises BadInputError where the model does not load or leaves its inputs or outputs out.
    """
    if source.config.input and source.config.output:
        return source
    from tritonclient.utils import InferenceServerException

    where = source.repository / source.name / "config.pbtxt"
    installation = find()
    folder = ServerFolder(source, installation)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        server = TritonServer(folder, installation, log=folder.path / "tritonserver.log")
        undo.callback(server.stop)
        client = server.client()
        try:
            client.load_model(source.name, client_timeout=LOAD_SECONDS)
            found = client.get_model_config(source.name, client_timeout=LOAD_SECONDS).config
        except InferenceServerException as error:
            raise BadInputError(f"{where}: has no inputs or outputs, and {cause(error.message() or '')}") from None
    if not (found.input and found.output):
        raise BadInputError(f"{where}: has no inputs or outputs, and the model does not say them either; write them")
    config = model_config.explicit(source.config, gpu=True)  # a copy; the counts are there already
    for name in ("input", "output"):
        config.ClearField(name)
        getattr(config, name).extend(getattr(found, name))
    config.max_batch_size = found.max_batch_size
    for name in ("dynamic_batching", "model_transaction_policy"):
        if found.HasField(name) and not (name == "dynamic_batching" and config.WhichOneof("scheduling_choice")):
            getattr(config, name).CopyFrom(getattr(found, name))
    if list(config.dynamic_batching.preferred_batch_size) == [config.max_batch_size]:  # Triton's own addition
        config.dynamic_batching.ClearField("preferred_batch_size")
    return replace(source, config=config)
