"""``tune`` on a server in a container, then ``tune verify --fresh`` of the recommendation on a running server."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from objectives.sla import Verdict
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.model.repository import read_repository_model
from tests.command_fixtures import FOUND, Run, Sandbox, Tune
from tests.podman import Engine
from tests.remote_server import RunningServer
from tests.repositories import write_steady

BRIEFLY = ("--budget", "20s", "--max-trials", "2", "--measurement-interval", "100ms", "--confidence", "80%")


def test_what_a_container_serves_best_is_verified_on_a_server_that_runs(
    engine: Engine, sandbox: Sandbox, tune: Tune, tmp_path: Path
) -> None:
    """The model sleeps, because one that computes would take both cores during all windows."""
    write_steady(sandbox.working_folder)
    images = ("--target", "docker", "--docker-image", engine.image, "--perf-analyzer-image", engine.image)
    env = {"DOCKER_HOST": engine.base_url}
    run = Run(sandbox, tune(*images, "--sla-p95", "500ms", *BRIEFLY, "--json", "steady.yaml", env=env))
    assert run.ended.code in FOUND, run.ended.stderr_lines
    info = run.info()
    assert info["fingerprint"]["target"] == "docker"
    assert engine.image not in info["fingerprint"]["server"]
    assert f"{engine.image} tritonserver " in (run.folder / "logs" / "commands.log").read_text()
    assert f"{engine.image} -m sleeper" in (run.folder / "logs" / "commands.log").read_text()

    source = read_repository_model(sandbox.working_folder / "models", "sleeper", gpu=False)
    with contextlib.closing(RunningServer(source, tmp_path / "log")) as server:
        server.load("sleeper")
        before = server.serving()
        verified = tune("verify", "--fresh", run.folder, "--json", "--target", "remote", "--url", server.server.grpc)
        assert server.serving() == before
    document = json.loads(verified.stdout)
    assert verified.code == EXIT_CODES[Verdict(document["verdict"])], verified.stderr_lines
    assert not document["measured"][0]["confirmation"]["perf_analyzer"]["contradicts_pass"], "they share the CPUs"
    assert document["measured"][0]["max_batch_size"] == run.document["recommended"]["max_batch_size"]
    assert f"measured on the server at {server.server.grpc}" in document["notes"][0]
