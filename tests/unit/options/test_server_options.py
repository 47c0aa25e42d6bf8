"""Server options as dimensions of the search space: part of a candidate, not of config.pbtxt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.cli.sweep import read_sweep_arguments
from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.model.profile import load_profile
from optimizer.options import server_options
from optimizer.options.run_options import RunOptions
from optimizer.results.configuration_text import configuration, triton_lines
from optimizer.store.run_folder import RunFolder, write_configs
from optimizer.study.option_check import check_server_settings

LIMIT, POOL = "server.rate-limit", "server.pinned-memory-pool-byte-size"
CANDIDATE = Candidate(8, fields=((POOL, "0"), (LIMIT, "execution_count")))
PROFILE = "model: {{builder: mlp}}\nspace:\n  max_batch_size: [8]\n  server:\n    {}\n"


def profile(folder: Path, server: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(PROFILE.format(server))
    return path


def test_a_profile_lists_server_options(tmp_path: Path) -> None:
    space = load_profile(profile(tmp_path, "rate-limit: [off, execution_count]")).space
    assert space is not None
    search_space = SearchSpace((8,), fields=space.fields())
    assert search_space.fields == {LIMIT: ("off", "execution_count")}  # which YAML takes for false
    assert [server_options.to_arguments(candidate.fields) for candidate in search_space.candidates()] == [
        ("--rate-limit=off",),
        ("--rate-limit=execution_count",),
    ]
    assert SearchSpace((8,), fields={"server.x": ("default", True, 5)}).fields == {"server.x": ("default", "true", 5)}
    assert server_options.to_arguments((("server.x", "default"),)) == ()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("http-port: [9]", "space.server.*--http-port is set by tune itself"),
        ("--rate-limit: [off]", "space.server.*without the dashes, such as rate-limit"),
        ("rate-limit: []", "space.server.rate-limit"),
        ("rate-limit: ['']", "space.server.rate-limit.*is not an option value"),
        ('rate-limit: ["a\\nb"]', "space.server.rate-limit.*is not an option value"),
        (
            "rate-limit: [off, sometimes]",
            "space.server.rate-limit: 'sometimes' does not fit; it takes off, execution_count or default$",
        ),
        ("rate-limit: [on]", "space.server.rate-limit: 'on' does not fit"),
        (
            "pinned-memory-pool-byte-size: [0, 1GB]",
            "space.server.pinned-memory-pool-byte-size: '1GB' does not fit; it takes a whole number from 0 or ",
        ),
        ("model-load-thread-count: [1, -2]", "space.server.model-load-thread-count: '-2' does not fit"),
    ],
)
def test_an_invalid_option_in_a_profile_names_the_line(tmp_path: Path, server: str, message: str) -> None:
    with pytest.raises(BadInputError, match=f"mine.yaml:5: {message}") as caught:
        load_profile(profile(tmp_path, server))
    assert "\n" not in str(caught.value)


def test_a_sweep_lists_server_options() -> None:
    request = read_sweep_arguments(["--config", f"{LIMIT}=off,execution_count", "m"]).request
    assert request.choices.fields == {LIMIT: ("off", "execution_count")}
    with pytest.raises(BadInputError, match=r"--config server.id: --id is set by tune itself"):
        read_sweep_arguments(["--config", "server.id=1", "m"])
    with pytest.raises(
        BadInputError, match=r"--config server.rate-limit: 'x' does not fit; it takes off, execution_"
    ):
        read_sweep_arguments(["--config", f"{LIMIT}=off,x", "m"])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rate-limit", ("off", "OFF", False, "execution_count", "default")),
        ("rate-limit-resource", ("R1:4", "R1:4:0")),
        ("cuda-memory-pool-byte-size", ("0:67108864",)),
        ("buffer-manager-thread-count", (0, 4, "4")),
        ("backend-config", ("onnxruntime,default-max-batch-size=4", "auto-complete-config=0")),
        ("log-verbose", (0, 1, True)),
        ("log-info", (True, False, "True", "on", "off", 1)),
        ("log-format", ("default", "ISO8601")),
        ("min-supported-compute-capability", (6.0, "7.5", 8)),
        ("an-option-of-a-newer-server", ("anything", 1.5)),
    ],
)
def test_values_of_options_that_tritonserver_takes_are_accepted(name: str, values: tuple[str | float, ...]) -> None:
    for value in values:
        server_options.normalize_value(name, value)


def test_server_options_are_not_in_config_pbtxt() -> None:
    written = model_config.apply(CANDIDATE, ModelConfig(name="m"))
    assert "limit" not in model_config.to_text(written)
    assert model_config.differences(CANDIDATE, written) == []
    assert model_config.candidate_of(written, [LIMIT]) == Candidate(8)


def test_server_options_are_shown(tmp_path: Path) -> None:
    assert configuration(CANDIDATE).endswith("pinned-memory-pool-byte-size=0 · rate-limit=execution_count")
    line = "# server_options: --pinned-memory-pool-byte-size=0 --rate-limit=execution_count"
    assert triton_lines(CANDIDATE)[-1] == line
    folder = RunFolder(tmp_path)
    folder.best.mkdir()
    write_configs(folder.best, {"m": "name: 'm'"}, server_options.to_arguments(CANDIDATE.fields), {})
    assert (folder.best / "server_options").read_text() == (
        "--pinned-memory-pool-byte-size=0\n--rate-limit=execution_count\n"
    )
    write_configs(folder.best, {"m": "name: 'm'"}, (), {})
    assert not (folder.best / "server_options").exists()


@pytest.mark.parametrize(
    ("field", "options", "said"),
    [
        (POOL, {"target": "remote", "url": "h:8001"}, "start the server at h:8001, .* --target embedded or local"),
        ("server_cpus", {"target": "remote", "url": "h:8001"}, "start the server at h:8001"),
        ("server_cpus", {"cluster": "auto"}, "on a cluster each trial gets free CPUs of its node"),
    ],
)
def test_a_server_whose_settings_cannot_be_chosen_has_none(field: str, options: dict[str, Any], said: str) -> None:
    problem = Problem("m", SearchSpace((8,), fields={field: ("0", "1")}), 1, 64)
    with pytest.raises(ParameterError, match=said) as caught:
        check_server_settings(ModelSource(Path(), "m", ModelConfig()), RunOptions("m", **options), problem)
    assert caught.value.parameter == field


@pytest.mark.parametrize(
    ("levels", "named"),
    [
        ((), None),
        ((0.95, 0.99), ""),  # Triton exports them by default
        ((0.97,), "0.97:0.003"),
        ((0.999, 0.5), "0.5:0.05,0.999:0.0001"),  # the default error is 0.001: any of the slowest thousandth
    ],
)
def test_triton_exports_each_level_with_a_tenth_of_its_tail_as_error(
    levels: tuple[float, ...], named: str | None
) -> None:
    arguments = server_options.latency_quantiles(levels)
    switched_on = () if named is None else ("--metrics-config=summary_latencies=true",)
    assert arguments == (*switched_on, *([f"--metrics-config=summary_quantiles={named}"] if named else []))
