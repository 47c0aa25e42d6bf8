"""``tune --load rate`` and ``tune verify`` from the command line, on a real server whose batches take 20 ms."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optimizer import runtime
from tests.command_fixtures import Ended, Playground, playing_in, run_tune
from tests.repositories import sleeper_program, write_sleeper

SLA_MS = 150.0
ALONE_PER_SECOND = 1000 / 20  # what one instance serves without batches
PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 16}
space:
  max_queue_delay_microseconds: [off, 0]
  instance_group_count: [1]
"""


@dataclass(frozen=True)
class Run:
    playground: Playground
    ended: Ended

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.ended.stdout)
        assert isinstance(document, dict)
        return document

    @property
    def folder(self) -> Path:
        return self.playground.here / str(self.document["results_dir"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    with playing_in(tmp_path_factory.mktemp("rate")) as playground:
        write_sleeper(playground.here / "models", milliseconds=20)
        (playground.here / "steady.yaml").write_text(PROFILE)
        arguments = ["--load", "rate", "--sla-p95", f"{SLA_MS:g}ms", "--budget", "45s", "--max-trials", "2", "--json"]
        yield Run(playground, run_tune(playground, *arguments, "steady.yaml"))


def test_the_highest_rate_that_meets_the_bound_is_found(found: Run) -> None:
    assert found.ended.stderr == ""
    assert found.ended.code == 0
    recommended = found.document["recommended"]
    assert recommended["dynamic_batching"], "one after another they are half as fast, or slower"
    assert recommended["latency_p95_ms"] <= SLA_MS
    assert recommended["concurrency"] == 0
    assert recommended["request_rate"] > 1.5 * ALONE_PER_SECOND
    assert recommended["throughput_infer_per_sec"] == pytest.approx(recommended["request_rate"], rel=0.2)


def test_what_serves_requests_one_by_one_is_overloaded_above_its_capacity(found: Run) -> None:
    with (found.folder / "trials.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["trial"] == "0"]
    beyond = [row for row in rows if float(row["request_rate"]) > 1.5 * ALONE_PER_SECOND]
    assert all(row["stable"] == "false" or float(row["latency_p95_ms"]) > SLA_MS for row in beyond)
    assert found.document["baseline"]["request_rate"] < 1.2 * ALONE_PER_SECOND


def test_a_model_that_has_become_slower_is_verified_no_more(found: Run) -> None:
    (found.playground.here / "models" / "sleeper" / "1" / "model.py").write_text(sleeper_program(200))
    ended = run_tune(found.playground, "verify", "--json", str(found.folder))
    assert ended.stderr == ""
    assert ended.code == 1
    verified = json.loads(ended.stdout)
    assert not verified["holds"]
    assert not verified["verdict_holds"]
    assert verified["reason"]
    assert (found.playground.here / verified["results_dir"] / "verify.json").exists()
