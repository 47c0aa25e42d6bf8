"""Options of the whole server as dimensions: part of a candidate, not of config.pbtxt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, server_options
from optimizer.arguments.sweep import read_sweep_arguments
from optimizer.deploy.choose import check_space
from optimizer.errors import BadInputError
from optimizer.options import RunOptions
from optimizer.profile.reader import load_profile
from optimizer.report.words import configuration, triton_lines
from optimizer.space import Space
from optimizer.store.run_folder import RunFolder
from optimizer.trial import Candidate

LIMIT, POOL = "server.rate-limit", "server.pinned-memory-pool-byte-size"
CANDIDATE = Candidate(8, fields=((POOL, "0"), (LIMIT, "execution_count")))
PROFILE = "model: {{builder: mlp}}\nspace:\n  max_batch_size: [8]\n  server:\n    {}\n"


def profile(folder: Path, server: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(PROFILE.format(server))
    return path


def test_a_profile_lists_them(tmp_path: Path) -> None:
    space = load_profile(profile(tmp_path, "rate-limit: [off, execution_count]")).space
    assert space is not None
    found = Space((8,), fields=space.fields())
    assert found.fields == {LIMIT: ("off", "execution_count")}  # which YAML takes for false
    assert [server_options.words(one.fields) for one in found.candidates()] == [
        ("--rate-limit=off",),
        ("--rate-limit=execution_count",),
    ]
    assert Space((8,), fields={"server.x": ("default", True, 5)}).fields == {"server.x": ("default", "true", 5)}
    assert server_options.words((("server.x", "default"),)) == ()


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("http-port: [9]", "space.server.*--http-port is given by tune itself"),
        ("--rate-limit: [off]", "space.server.*without the dashes, such as rate-limit"),
        ("rate-limit: []", "space.server.rate-limit"),
        ("rate-limit: ['']", "space.server.rate-limit.*no value of an option"),
        ('rate-limit: ["a\\nb"]', "space.server.rate-limit.*no value of an option"),
    ],
)
def test_a_profile_with_what_is_none_names_the_line(tmp_path: Path, server: str, told: str) -> None:
    with pytest.raises(BadInputError, match=f"mine.yaml:5: {told}") as caught:
        load_profile(profile(tmp_path, server))
    assert "\n" not in str(caught.value)


def test_a_sweep_lists_them() -> None:
    asked = read_sweep_arguments(["--config", f"{LIMIT}=off,execution_count", "m"]).asked
    assert asked.choices.fields == {LIMIT: ("off", "execution_count")}
    with pytest.raises(BadInputError, match=r"--config server.id: --id is given by tune itself"):
        read_sweep_arguments(["--config", "server.id=1", "m"])


def test_config_pbtxt_does_not_know_them() -> None:
    written = model_config.apply(CANDIDATE, ModelConfig(name="m"))
    assert "limit" not in model_config.to_text(written)
    assert model_config.differences(CANDIDATE, written) == []
    assert model_config.candidate_of(written, [LIMIT]) == Candidate(8)


def test_they_are_told(tmp_path: Path) -> None:
    assert configuration(CANDIDATE).endswith("pinned-memory-pool-byte-size=0 · rate-limit=execution_count")
    line = "# server_options: --pinned-memory-pool-byte-size=0 --rate-limit=execution_count"
    assert triton_lines(CANDIDATE)[-1] == line
    folder = RunFolder(tmp_path)
    folder.best.mkdir()
    folder.write_best({"m": "name: 'm'"}, server_options.words(CANDIDATE.fields))
    assert (folder.best / "server_options").read_text() == (
        "--pinned-memory-pool-byte-size=0\n--rate-limit=execution_count\n"
    )
    folder.write_best({"m": "name: 'm'"})
    assert not (folder.best / "server_options").exists()


@pytest.mark.parametrize("field", [LIMIT, "server_cpus"])
def test_a_server_that_cannot_be_restarted_has_none(field: str) -> None:
    space = Space((8,), fields={field: ("0", "1")})
    options = RunOptions("m", target="remote")
    with pytest.raises(BadInputError, match="--target remote cannot start its server anew with other options"):
        check_space(space, options, print)
