"""``tune watch`` on the real server: a low load of the recommendation fits, another request size does not.

The assertions hold on a machine of any speed, also if its speed changes after the run: then only times may differ.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.metrics_page import read_metrics_page
from optimizer.model.repository import read_repository_model
from optimizer.options.server_options import latency_quantiles
from optimizer.results.finished_run import read_run
from optimizer.watch.server_metrics import models_of, read_server
from tests.command_fixtures import FINISHED, UNDECIDED, Sandbox, Tune
from tests.repositories import write_steady
from tests.stack_fixtures import served

BRIEFLY = ("--budget", "20s", "--max-trials", "3", "--measurement-interval", "200ms", "--no-output-check")
INTERVAL = ("--interval", "500ms")
INTERVALS = (8, 40)  # more of them on a machine that serves too few requests
LOWEST_RATE = 40.0  # requests per second
TIMES = {"queue time", "execution time", "time in the server"}


def test_a_low_load_fits_and_larger_requests_do_not(sandbox: Sandbox, tune: Tune, tmp_path: Path) -> None:
    write_steady(sandbox.working_folder)
    steady = read_repository_model(sandbox.working_folder / "models", "sleeper", gpu=False)
    tuned = tune("--sla-p95", "500ms", "--sla-p97", "500ms", *BRIEFLY, "steady.yaml")
    assert tuned.code in FINISHED, tuned.stderr_lines
    (folder,) = (sandbox.working_folder / "results").glob("*/*")
    run = read_run(folder)
    assert run.outcome is not None
    recommended = run.outcome.recommended
    assert recommended is not None

    exported = latency_quantiles(run.problem.sla.latency_levels)
    settings = TargetSettings(tmp_path / "tritonserver.log", exports_metrics=True, arguments=exported)
    target = EmbeddedTarget(steady, settings)
    with contextlib.closing(target), target.deploy(recommended.candidate) as endpoint:
        assert models_of(read_metrics_page(endpoint.metrics)) == ["sleeper"]

        def watched(load: LoadPoint) -> tuple[int, dict[str, Any]]:
            with served(endpoint, steady, load, tmp_path / "client.log"):
                for intervals in INTERVALS:
                    ended = tune(
                        "watch", folder, "--url", endpoint.metrics, *INTERVAL, "--intervals", f"{intervals}", "--json"
                    )
                    if ended.code != UNDECIDED:
                        break
            return ended.code, json.loads(ended.stdout)

        rate = max(LOWEST_RATE, 0.02 * recommended.throughput_infer_per_sec)
        code, fits = watched(LoadPoint(1, request_rate=round(rate)))
        differing = {check["name"] for check in fits["checks"] if check["status"] == "differs"}
        assert differing <= TIMES, fits
        undecided = {check["name"] for check in fits["checks"] if check["status"] == "undecided"}
        assert undecided <= TIMES, fits
        verdict = (1, "FAIL") if differing else (UNDECIDED, "UNDECIDED") if undecided else (0, "PASS")
        assert (code, fits["verdict"]) == verdict, fits
        assert fits["requests"] > 0
        assert {"p95 in the server", "p97 in the server"} <= {check["name"] for check in fits["checks"]}
        assert fits["unchecked_bounds"] == []
        assert fits["search"]["earlier_trials"] == len(run.trials)

        size = recommended.candidate.max_batch_size
        code, larger = watched(LoadPoint(size, request_rate=round(rate)))
        assert (code, larger["verdict"]) == (1, "FAIL"), larger
        statuses = {check["name"]: check["status"] for check in larger["checks"]}
        assert statuses["samples per request"] == "differs"
        commands = " ".join(step["command"] or "" for step in larger["next_steps"])
        assert f"--request-batch-size {size}" in commands
        assert f"--warm-start {folder}" in fits["search"]["command"]
        assert f"--request-batch-size {size}" in larger["search"]["command"]
        assert "--warm-start" not in larger["search"]["command"], "tune takes measurements of the same size only"


def test_a_server_without_counters_of_times_has_none(mlp: ModelSource, tmp_path: Path) -> None:
    hidden = ("--metrics-config=counter_latencies=false",)
    settings = TargetSettings(tmp_path / "tritonserver.log", exports_metrics=True, arguments=hidden)
    target = EmbeddedTarget(mlp, settings)
    with contextlib.closing(target), target.deploy(Candidate(64)) as endpoint:
        counters = read_server(f"http://{endpoint.metrics}/metrics", "mlp")
    assert all(map(math.isnan, (counters.request_ms, counters.queue_ms, counters.compute_ms)))
