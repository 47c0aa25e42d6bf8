"""Which flags go with which target, and what of a header is shown and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.arguments.run import checked_options, read_run_arguments
from optimizer.arguments.sweep import read_sweep_arguments
from optimizer.arguments.target import FLAGS, Address, address
from optimizer.arguments.verify import read_verify_arguments
from optimizer.command_line import command_line
from optimizer.errors import BadInputError
from optimizer.headers import expanded, hidden, hidden_in
from optimizer.options import RunOptions
from optimizer.store.run_folder import RunFolder

SECRET = "geheim"
GIVEN = {  # what the test of a flag gives it
    "--server-arg": "=--log-verbose=1",
    "--url": "=h:1",
    "--metrics-url": "=h:1",
    "--header": "=a:$B",
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("target", ["embedded", "local", "docker", "remote"])
def test_a_flag_goes_with_its_targets_alone(flag: str, target: str) -> None:
    words = ["--target", target, f"{flag}{GIVEN.get(flag, '=x')}", "m"]
    words += ["--docker-image", "i"] if target == "docker" and flag != "--docker-image" else []
    words += ["--url", "grpcs://h:1"] if flag.startswith("--tls") and target == "remote" else []
    words += {"--tls-cert": ["--tls-key", "k"], "--tls-key": ["--tls-cert", "c"]}.get(flag, [])
    if target in FLAGS[flag].targets:
        assert getattr(read_run_arguments(words).options, FLAGS[flag].field)
        return
    with pytest.raises(BadInputError, match="has it; give that too, or leave --") as caught:
        read_run_arguments(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--target docker m", r"--target docker: which image\? give --docker-image"),
        ("--target remote --url h m", "--url h: write host:port of the server's gRPC"),
        ("--target remote --url ftp://h:1 m", "--url ftp://h:1: write host:port"),
        ("--target remote --url h:70000 m", "--url h:70000: write host:port"),
        ("--target remote --metrics-url http://h:1 m", "--metrics-url http://h:1: write host:port alone"),
        ("--target remote --header token m", "--header \\*\\*\\*: write NAME:VALUE"),
        ("--target remote --tls-cert c m", "--tls-cert: a certificate and its key go together; give --tls-key too"),
        (
            "--target remote --tls-ca c m",
            "--tls-ca: --url localhost:8001 is not encrypted; write grpcs:// or https://",
        ),
        ("--target remote --url http://h:1 --tls-ca c m", "--tls-ca: --url http://h:1 is not encrypted"),
        ("--target remote --protocol http m", "--protocol http: --url is that of the server's gRPC"),
        ("--target remote --url http://h:1 --load rate m", "--load rate sends by gRPC only"),
        ("--target remote --server-cpus 0 m", "--server-cpus 0: those of a remote server cannot be chosen"),
        ("--target local --server-arg=http-port=1 m", "--server-arg http-port=1: write an option with its value"),
        ("--target local --server-arg=--http-port=1 m", "--http-port is given by tune itself; leave it out"),
        ("--target local --server-arg=--allow-metrics=true m", "--allow-metrics is given by tune itself"),
        ("--target local --tritonserver= m", "--tritonserver '': give a value of printable characters"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told) as caught:
        read_run_arguments(words.split(" "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (None, Address("localhost:8001", "grpc", False)),
        ("h:1", Address("h:1", "grpc", False)),
        ("grpcs://h:1", Address("h:1", "grpc", True)),
        ("http://h:1/", Address("h:1", "http", False)),
        ("https://[::1]:8000", Address("[::1]:8000", "http", True)),
    ],
)
def test_addresses(url: str | None, found: Address) -> None:
    assert address(url) == found


def test_over_http_the_load_is_sent_so_too() -> None:
    assert read_run_arguments(["--target", "remote", "--url", "http://h:1", "m"]).options.protocol == "http"


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("Authorization:$TOKEN", True),
        ("Authorization: Bearer ${TOKEN}", True),
        ("X-Key:$A$B", True),
        (f"Authorization:{SECRET}", False),
        (f"Authorization:Bearer {SECRET}", False),
        (f"Authorization:{SECRET}-$B", False),
        (f"Authorization:$B-{SECRET}", False),
        (SECRET, False),
    ],
)
def test_a_literal_value_is_hidden(header: str, kept: bool) -> None:
    assert (hidden(header) == header) is kept
    assert SECRET not in hidden(header)
    for words in (["--header", header, "m"], [f"--header={header}", "m"]):
        assert (hidden_in(words) == words) is kept
        assert SECRET not in str(hidden_in(words))


def test_variables_are_read_when_used() -> None:
    environment = {"TOKEN": "abc", "B": "d e"}
    given = ("Authorization:Bearer $TOKEN", "x: ${B}", "y:$$", "z:a:b")
    assert expanded(given, environment) == {"Authorization": "Bearer abc", "x": "d e", "y": "$$", "z": "a:b"}
    with pytest.raises(BadInputError, match=r"--header a: \$C is not set in the environment; export it"):
        expanded(("a:$C",), environment)
    with pytest.raises(BadInputError, match="--header a: its value has characters that no header may have") as caught:
        expanded(("a:$C",), {"C": f"{SECRET}\r\nb: c"})
    assert SECRET not in str(caught.value)


REMOTE = ["--target", "remote", "--header", f"Authorization:{SECRET}", "m"]


def test_a_secret_is_in_no_command() -> None:
    assert SECRET not in command_line(read_run_arguments(REMOTE).options)
    asked = read_sweep_arguments(REMOTE).asked
    assert SECRET not in str(asked.words)
    with pytest.raises(BadInputError) as caught:
        read_run_arguments(["--header", f"Authorization:{SECRET}", "m"])
    assert SECRET not in str(caught.value)


def run(folder: Path, options: RunOptions) -> RunFolder:
    folder.mkdir()
    kept = RunFolder(folder)
    kept.write_info(options, {})
    return kept


def test_a_run_goes_on_where_it_was_and_with_a_header_given_anew(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", RunOptions("m", target="remote", url="h:1", headers=("a:***",)))
    words = ["--resume", str(folder.path)]
    options = read_run_arguments(words).options
    assert (options.target, options.url) == ("remote", "h:1")
    with pytest.raises(BadInputError, match="--header a: its value is not kept; give it again, or as \\$VARIABLE"):
        expanded(options.headers)
    assert expanded(read_run_arguments([*words, "--header", "a:b"]).options.headers) == {"a": "b"}
    with pytest.raises(BadInputError, match="leave --target out"):
        read_run_arguments([*words, "--target", "local"])


def test_what_is_kept_is_held_to_the_same(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", RunOptions("m"))
    info = json.loads(folder.info.read_text())
    info["options"]["server_args"] = ["--http-address=0.0.0.0"]
    info["options"]["target"] = "local"
    folder.info.write_text(json.dumps(info))
    with pytest.raises(BadInputError, match=r"run.json: --server-arg .*: --http-address is given by tune itself"):
        checked_options(folder)


def test_verify_takes_the_target_of_the_run_or_another(tmp_path: Path) -> None:
    before = RunOptions("m", target="local", tritonserver="/t", server_args=("--log-verbose=1",), server_cpus="0")
    folder = str(run(tmp_path / "r", before).path)
    assert read_verify_arguments([folder]).options == before
    anew = read_verify_arguments(["--tritonserver", "/u", folder]).options
    assert (anew.target, anew.tritonserver, anew.server_args) == ("local", "/u", ("--log-verbose=1",))
    remote = read_verify_arguments(["--target", "remote", "--url", "h:1", folder]).options
    assert (remote.target, remote.url, remote.tritonserver, remote.server_args) == ("remote", "h:1", None, ())
    assert remote.server_cpus is None, "it has CPUs of its own"
    with pytest.raises(BadInputError, match="was measured over grpc: give --url host:port of its gRPC"):
        read_verify_arguments(["--target", "remote", "--url", "http://h:1", folder])
    with pytest.raises(BadInputError, match="--url h:1: only --target remote has it"):
        read_verify_arguments(["--url", "h:1", folder])
