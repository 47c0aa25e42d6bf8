"""The real server loads the files of ``tune emit``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from optimizer.cli import emit
from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import embedded_installation as installation
from optimizer.deploy.installed_server import ServerFolder, TritonServer
from optimizer.deploy.target_settings import TargetSettings
from optimizer.emit.recommended import read_recommendation
from optimizer.results.finished_run import read_run
from tests.run_folders import write_run

USUAL, OF_DEVICE = Candidate(16, True, 500, (8,), 2), Candidate(32, instance_count=1)


def test_a_repository_with_emitted_configurations_serves(mlp: ModelSource, tmp_path: Path) -> None:
    """Load a default and a per-device configuration, both with warm-up."""
    for name, candidate in (("usual", USUAL), ("device", OF_DEVICE)):
        text = model_config.to_text(model_config.apply(candidate, mlp.config))
        write_run(tmp_path / name, "mlp", configs={"mlp": text}, candidate=candidate)
    arguments = read_recommendation(read_run(tmp_path / "usual" / "run")).arguments
    installed = installation(runtime.ensure(print))
    folder = ServerFolder(mlp, installed)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        at = str(folder.repository / "mlp"), str(folder.repository)
        emit.main([str(tmp_path / "usual" / "run"), "--model-warmup", "--force", "--out", at[0]])
        words = ["--model-warmup", "--format", "per-device", "--device", "h100", "--out", at[1]]
        emit.main([str(tmp_path / "device" / "run"), *words])
        for options, expected in (((), USUAL), (("--model-config-name=h100",), OF_DEVICE)):
            log = tmp_path / f"{expected.max_batch_size}.log"
            server = TritonServer(folder, installed, TargetSettings(log, arguments=(*arguments, *options)))
            undo.callback(server.stop)
            client = server.client()
            client.load("mlp", None, 60)
            served = client.config("mlp")
            assert model_config.differences(expected, served) == []
            assert [sample.batch_size for sample in served.model_warmup] == (
                [1, 8, 16] if expected is USUAL else [1, 32]
            )
            assert client.is_ready("mlp")
            server.stop()
