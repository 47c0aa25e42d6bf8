"""What ``tune emit`` writes is what the real server loads."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime
from optimizer.commands import emit
from optimizer.deploy.installation import embedded as installation
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.tritonserver import TritonServer
from optimizer.emitting.winner import read_winner
from optimizer.model_source import ModelSource
from optimizer.store.finished import read_run
from optimizer.trial import Candidate
from tests.run_folders import write_run

USUAL, OF_DEVICE = Candidate(16, True, 500, (8,), 2), Candidate(32, instance_count=1)


def test_a_repository_with_emitted_configurations_serves(mlp: ModelSource, tmp_path: Path) -> None:
    """One for every device and one for a device of its own, warm before they are ready."""
    for name, candidate in (("usual", USUAL), ("device", OF_DEVICE)):
        text = model_config.to_text(model_config.apply(candidate, mlp.config))
        write_run(tmp_path / name, "mlp", configs={"mlp": text}, candidate=candidate)
    arguments = read_winner(read_run(tmp_path / "usual" / "run")).arguments
    installed = installation(runtime.ensure(print))
    folder = ServerFolder(mlp, installed)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        at = str(folder.repository / "mlp"), str(folder.repository)
        emit.main([str(tmp_path / "usual" / "run"), "--warm-up", "--force", "--output", at[0]])
        words = ["--warm-up", "--format", "per-device", "--device", "h100", "--output", at[1]]
        emit.main([str(tmp_path / "device" / "run"), *words])
        for options, wanted in (((), USUAL), (("--model-config-name=h100",), OF_DEVICE)):
            log = tmp_path / f"{wanted.max_batch_size}.log"
            server = TritonServer(folder, installed, log=log, options=(*arguments, *options))
            undo.callback(server.stop)
            client = server.client()
            client.load_model("mlp")
            served: ModelConfig = client.get_model_config("mlp").config
            assert model_config.differences(wanted, served) == []
            assert [sample.batch_size for sample in served.model_warmup] == (
                [1, 8, 16] if wanted is USUAL else [1, 32]
            )
            assert client.is_model_ready("mlp")
            server.stop()
