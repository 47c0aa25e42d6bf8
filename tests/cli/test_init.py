"""``tune init``: its files, its output and its errors."""

from __future__ import annotations

import functools

import pytest

from optimizer.model.profile import load_profile
from optimizer.model.profile_files import COPY_NAME, MODELINE, SCHEMA_FILE
from tests.command_fixtures import Sandbox, Tune
from tests.repositories import doubler, serialized, write_python_model


@pytest.fixture
def init(called_tune: Tune, sandbox: Sandbox) -> Tune:
    """Return ``tune init`` in a folder with an ONNX file."""
    (sandbox.working_folder / "net.onnx").write_bytes(serialized(doubler()))
    return functools.partial(called_tune, "init", env={"TRITUNE_CACHE": sandbox.root / "cache"})


def test_the_profile_and_its_schema_are_written(init: Tune, sandbox: Sandbox) -> None:
    ended = init("--sla-p95", "50ms", "net.onnx")
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"net.yaml\n{COPY_NAME}\n", "")
    profile = sandbox.working_folder / "net.yaml"
    assert profile.read_text().startswith(f"# {MODELINE}\n")
    assert load_profile(profile).sla.latency_bounds_ms() == {"p95": 50}
    assert (sandbox.working_folder / COPY_NAME).read_bytes() == SCHEMA_FILE.read_bytes()
    assert sorted(path.name for path in sandbox.working_folder.iterdir()) == ["net.onnx", "net.yaml", COPY_NAME]


def test_an_existing_file_is_overwritten_only_with_force(init: Tune, sandbox: Sandbox) -> None:
    profile = sandbox.working_folder / "net.yaml"
    profile.write_text("mine\n")
    ended = init("net.onnx")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr_lines == ["tune: net.yaml exists; give another --out, or --force"]
    assert profile.read_text() == "mine\n"
    assert not (sandbox.working_folder / COPY_NAME).exists()
    assert init("--force", "net.onnx").code == 0
    assert load_profile(profile).name == "net"
    assert init("--out", "other.yml", "net.onnx").stdout == f"other.yml\n{COPY_NAME}\n"


def test_a_printed_profile_refers_to_no_schema(init: Tune, sandbox: Sandbox) -> None:
    ended = init("--out", "-", "mlp")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("# Profile of mlp, written by `tune init`. To tune with it: tune mlp.yaml\n")
    assert list(sandbox.working_folder.iterdir()) == [sandbox.working_folder / "net.onnx"]


def test_what_is_missing_is_one_line_on_standard_error(init: Tune, sandbox: Sandbox) -> None:
    folder = write_python_model(sandbox.working_folder / "models", "auto", "")
    (folder / "config.pbtxt").write_text('backend: "python"\n')
    ended = init("--model-repository", "models", "auto")
    assert (ended.code, ended.stdout) == (0, f"auto.yaml\n{COPY_NAME}\n")
    (line,) = ended.stderr_lines
    assert line.startswith("to fill in: no config.pbtxt declares the inputs and outputs of auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "tune: no model 'nosuch' in "),
        (("--budget", "5m", "mlp"), "tune: --budget is not an option of `tune init`"),
        (("--out", "mlp", "mlp"), "tune: --out mlp: the name of a profile ends in .yaml"),
    ],
)
def test_bad_input_is_one_line(init: Tune, words: tuple[str, ...], message: str) -> None:
    ended = init(*words)
    assert (ended.code, ended.stdout) == (2, "")
    (line,) = ended.stderr_lines
    assert line.startswith(message)
