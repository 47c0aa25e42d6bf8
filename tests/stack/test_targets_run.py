"""``tune`` on a server in a container, then ``tune verify --fresh`` of the recommendation on a running server."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from objectives.sla import Verdict
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.config.model_source import ModelSource
from tests.command_fixtures import FOUND, Run, Sandbox, Tune
from tests.podman import Engine
from tests.remote_server import RunningServer

BRIEFLY = ("--budget", "20s", "--max-trials", "2", "--measurement-interval", "100ms", "--confidence", "80%")


def test_what_a_container_serves_best_is_verified_on_a_server_that_runs(
    engine: Engine, mlp: ModelSource, sandbox: Sandbox, tune: Tune, tmp_path: Path
) -> None:
    images = ("--target", "docker", "--docker-image", engine.image, "--perf-analyzer-image", engine.image)
    env = {"DOCKER_HOST": engine.base_url}
    run = Run(sandbox, tune(*images, "--sla-p95", "500ms", *BRIEFLY, "--json", "mlp", env=env))
    assert run.ended.code in FOUND, run.ended.stderr_lines
    info = run.info()
    assert info["fingerprint"]["target"] == "docker"
    assert engine.image not in info["fingerprint"]["server"]
    assert f"{engine.image} tritonserver " in (run.folder / "logs" / "commands.log").read_text()
    assert f"{engine.image} -m mlp" in (run.folder / "logs" / "commands.log").read_text()

    with contextlib.closing(RunningServer(mlp, tmp_path / "log")) as server:
        server.load("mlp")
        before = server.serving()
        verified = tune("verify", "--fresh", run.folder, "--json", "--target", "remote", "--url", server.server.grpc)
        assert server.serving() == before
    document = json.loads(verified.stdout)
    assert verified.code == EXIT_CODES[Verdict(document["verdict"])], verified.stderr_lines
    assert not document["measured"][0]["confirmation"]["perf_analyzer"]["contradicts_pass"], "they share the CPUs"
    assert document["measured"][0]["max_batch_size"] == run.document["recommended"]["max_batch_size"]
    assert f"measured on the server at {server.server.grpc}" in document["notes"][0]
