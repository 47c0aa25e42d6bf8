"""``tune serve``: the runs and options that it refuses, and its output when the server is ready."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from optimizer.cli.serve import document, print_server
from optimizer.core.endpoint import Endpoint
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import read_run
from optimizer.store.run_folder import RunFolder
from optimizer.study.recommendation_server import RecommendedServer
from tests.bad_input import assert_says
from tests.command_fixtures import Sandbox, Tune
from tests.run_folders import CANDIDATE, MEASURED, change_info, write_run

IMAGE = "example/triton:24.10-py3"
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "undecided": ({"is_confirmed": False}, ("the verdict is UNDECIDED", "tune verify", "; --force serves it")),
    "no recommendation": (
        {"measured": replace(MEASURED, latency_p95_ms=90.0), "is_confirmed": False, "status": "none"},
        ("no configuration met p95 <= 20 ms, so there is nothing to serve", "tune again"),
    ),
    "interrupted": ({"status": "interrupted"}, ("was interrupted", "tune --resume ")),
    "measured in Docker": (
        {"options": RunOptions("", target="docker", docker_image=IMAGE)},
        (f"a container of {IMAGE}", "tune emit ", " --format docker --model-repository FOLDER --out DIR"),
    ),
    "two servers in Docker": (
        {
            "options": RunOptions("", target="docker", docker_image=IMAGE),
            "fields": {"server_processes": [1, 2]},
        },
        (" --format compose ",),
    ),
    "measured on a running server": (
        {"options": RunOptions("", target="remote", url="triton:8001")},
        ("the server at triton:8001, which tune does not start", "tune emit "),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_served_is_refused_with_advice(case: str, called_tune: Tune, sandbox: Sandbox) -> None:
    settings, words = REFUSED[case]
    run = write_run(sandbox.working_folder, **settings)
    assert_says(called_tune("serve", run), words)
    assert not (run / "serve").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere", ("run nowhere: ", "no run.json there")),
        ("--grpc-port 0 run", ("--grpc-port 0: ", "from 1 to 65535")),
        ("--http-port x run", ("--http-port x: ", "write a whole number")),
        ("--http-port 9000 --grpc-port 9000 run", ("--grpc-port 9000: ", "given twice")),
        ("--exit-timeout 30 run", ("--exit-timeout 30: ", "a unit is missing")),
        ("run mlp", ("serve run: ", "leave 'mlp' out")),
        ("--target local run", ("serve run: the run has its own model and server; leave --target out",)),
    ],
)
def test_wrong_options_are_refused(
    arguments: str, words: tuple[str, ...], called_tune: Tune, sandbox: Sandbox
) -> None:
    write_run(sandbox.working_folder)
    assert_says(called_tune("serve", *arguments.split()), words)


def test_quantiles_that_the_run_cannot_export_are_refused(called_tune: Tune, sandbox: Sandbox) -> None:
    options = RunOptions("", target="local", server_args=("--metrics-config=summary_latencies=false",))
    write_run(sandbox.working_folder, options=options)
    words = ("--latency-quantiles: the run has its own --metrics-config", "leave it out")
    assert_says(called_tune("serve", "--latency-quantiles", "run"), words)


def test_a_program_that_a_foreign_run_names_is_not_started(called_tune: Tune, sandbox: Sandbox) -> None:
    options = RunOptions("", target="local", tritonserver="./evil", model_repository="models")
    run = write_run(sandbox.working_folder, options=options)
    change_info(run, signature="0")
    assert_says(called_tune("serve", "run"), ("run.json was not written by your tune", "--tritonserver "))


def test_cpus_that_this_machine_lacks_are_left_out_with_a_message(called_tune: Tune, sandbox: Sandbox) -> None:
    write_run(sandbox.working_folder, options=RunOptions("", server_cpus="3000-3003", client_cpus="3004"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = called_tune("serve", "run", "--grpc-port", str(listener.getsockname()[1]))
    lack, refused = ended.stderr_lines
    assert lack == (
        "tune: note: --server-cpus 3000-3003 of the run is left out: this machine does not have these CPUs"
    )
    assert "--grpc-port " in refused, "the next check is reached"


@pytest.fixture
def served(tmp_path: Path) -> RecommendedServer:
    """Return two server processes, of which the second one has no HTTP."""
    second = Endpoint("doubler", CANDIDATE, "127.0.0.1:8011", "", metrics="127.0.0.1:8012")
    first = Endpoint("doubler", CANDIDATE, "127.0.0.1:8001", "127.0.0.1:8000", metrics="127.0.0.1:8002")
    endpoint, folder = replace(first, replicas=(second,)), RunFolder(tmp_path / "run" / "serve" / "1")
    return RecommendedServer(endpoint, folder, ("doubler",), forget_vanished=lambda: None)


def test_the_throughput_of_several_models_is_said_to_be_their_sum(served: RecommendedServer, tmp_path: Path) -> None:
    run, text = read_run(change_info(write_run(tmp_path), "problem", concurrent_models="other=3")), io.StringIO()
    print_server(Console(file=text, width=80), run, served)
    assert "several models get load, in the proportion doubler 1, other 3; the throughput is their sum" in " ".join(
        text.getvalue().split()
    )


def test_the_addresses_of_each_server_are_printed(served: RecommendedServer, tmp_path: Path) -> None:
    run, text = read_run(write_run(tmp_path)), io.StringIO()
    print_server(Console(file=text, width=80), run, served)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("recommended   doubler: PASS at 1,000 ")
    assert "(SLA: p95 <= 20 ms)" in " ".join(" ".join(lines[:2]).split())
    addresses = [line.split(maxsplit=1) for line in lines if "127.0.0.1" in line]
    assert addresses == [
        ["gRPC", "127.0.0.1:8001"],
        ["127.0.0.1:8011"],
        ["HTTP", "http://127.0.0.1:8000"],
        ["metrics", "http://127.0.0.1:8002/metrics"],
        ["http://127.0.0.1:8012/metrics"],
        [
            "watch",
            f"tune watch {tmp_path}/run --url http://127.0.0.1:8002/metrics --url http://127.0.0.1:8012/metrics",
        ],
    ]
    assert any("off in this version of Triton" in line for line in lines)


def test_the_document_has_the_addresses_and_the_bound(served: RecommendedServer, tmp_path: Path) -> None:
    shown = document(read_run(write_run(tmp_path)), served)
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert shown["servers"] == [
        {"grpc": "127.0.0.1:8001", "http": "http://127.0.0.1:8000", "metrics": "http://127.0.0.1:8002/metrics"},
        {"grpc": "127.0.0.1:8011", "http": None, "metrics": "http://127.0.0.1:8012/metrics"},
    ]
    assert (shown["model"], shown["sla"], shown["verdict"]) == ("doubler", ["p95 <= 20 ms"], "PASS")
    assert shown["logs"] == str(tmp_path / "run" / "serve" / "1" / "logs")
