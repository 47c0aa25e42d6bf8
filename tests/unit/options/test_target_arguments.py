"""The options of each target, and the redaction of headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.cli.verify import absent_cpus, read_verify_arguments
from optimizer.core.errors import BadInputError
from optimizer.core.signature import sign
from optimizer.options.addresses import (
    SSL_FLAGS,
    ServerAddress,
    expand_headers,
    redact_header,
    redact_words,
    server_address,
)
from optimizer.options.command_line import command_line
from optimizer.options.option import Option
from optimizer.options.option_reader import external_values, run_options
from optimizer.options.run_options import RunOptions
from optimizer.options.table import TARGET_OPTIONS
from optimizer.options.values import MAX_CPU_COUNT, usable_cpus
from optimizer.store.run_folder import RunFolder
from optimizer.study.run_request import read_stored_options
from tests.run_folders import change_info

SECRET = "geheim"
VALUES = {  # the values that are not arbitrary text
    "--server-arg": "=--log-verbose=1",
    "--url": "=h:1",
    "--metrics-url": "=h:1",
    "--header": "=a:$B",
}


@pytest.mark.parametrize(
    "option", [option for option in TARGET_OPTIONS if option.name != "target"], ids=lambda o: o.name
)
@pytest.mark.parametrize("target", ["embedded", "local", "docker", "remote"])
def test_an_option_belongs_to_its_targets_only(option: Option, target: str) -> None:
    flag = option.flag
    words = ["--target", target, f"{flag}{VALUES.get(flag, '=x')}", "m"]
    words += ["--docker-image", "i"] if target == "docker" and flag != "--docker-image" else []
    for protocol, flags in SSL_FLAGS.items():
        words += ["--url", f"{protocol}s://h:1"] if flag in flags.values() and target == "remote" else []
        certificate, key = flags["cert"], flags["key"]
        words += {certificate: [key, "k"], key: [certificate, "c"]}.get(flag, [])
    if target in option.targets:
        assert option.value_in(read_run_arguments(words).options)
        return
    with pytest.raises(BadInputError, match=r"works only with --target .*; add --target .*, or remove --") as caught:
        read_run_arguments(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [option for option in TARGET_OPTIONS if option.repeatable], ids=lambda o: o.name)
def test_an_empty_list_of_an_option_of_another_target_is_none(option: Option) -> None:
    """In Python, ``docker_env=[]`` is the same as no such keyword."""
    assert run_options("m", {option.name: []}) == RunOptions("m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--target docker m", "--target docker: --docker-image is missing; give an image"),
        ("--target remote --url h m", "--url h: write host:port of the server's gRPC"),
        ("--target remote --url ftp://h:1 m", "--url ftp://h:1: write host:port"),
        ("--target remote --url h:70000 m", "--url h:70000: write host:port"),
        ("--target remote --metrics-url http://h:1 m", "--metrics-url http://h:1: write host:port alone"),
        ("--target remote --header token m", "--header \\*\\*\\*: write NAME:VALUE"),
        (f"--target remote --header {101 * 'a'}:v m", "--header a+:\\*\\*\\*: write NAME:VALUE"),
        (
            "--target remote --url grpcs://h:1 --ssl-grpc-certificate-chain-file c m",
            "--ssl-grpc-certificate-chain-file: a client certificate needs its key; give --ssl-grpc-private-key-file",
        ),
        (
            "--target remote --ssl-grpc-root-certifications-file c m",
            "--ssl-grpc-root-certifications-file: --url localhost:8001 is not encrypted; begin it with grpcs://",
        ),
        (
            "--target remote --url http://h:1 --ssl-https-private-key-file k --ssl-https-client-certificate-file c m",
            "--ssl-https-client-certificate-file: --url http://h:1 is not encrypted; begin it with https://",
        ),
        (
            "--target remote --url grpcs://h:1 --ssl-https-ca-certificates-file c m",
            "--ssl-https-ca-certificates-file: --url grpcs://h:1 does not begin with https://; begin the URL with "
            "https://, or give --ssl-grpc-root-certifications-file",
        ),
        (
            "--target remote --url https://h:1 --ssl-grpc-private-key-file k m",
            "--ssl-grpc-private-key-file: --url https://h:1 does not begin with grpcs://",
        ),
        ("--target remote --protocol http m", "--protocol http: --url is a gRPC address"),
        ("--target remote --protocol grpc --url http://h:1 m", "--protocol grpc: --url is an HTTP address"),
        ("--target remote --url http://h:1 --load rate m", "over gRPC only; give the host:port of its gRPC"),
        ("--perf-analyzer-image i --load rate m", "--perf-analyzer-image i: perf_analyzer does not send"),
        ("--target remote --server-cpus 0 m", "--server-cpus 0: the CPUs of a remote server cannot be set"),
        ("--target local --server-arg=http-port=1 m", "--server-arg http-port=1: write an option with its value"),
        ("--target local --server-arg=--http-port=1 m", "--http-port is set by tune itself; leave it out"),
        ("--target local --server-arg=--allow-metrics=true m", "--allow-metrics is set by tune itself"),
        (
            "--output-shared-memory-size 1MiB m",
            "--output-shared-memory-size 1048576B: works only with --shared-memory",
        ),
        ("--shared-memory system --output-shared-memory-size 3GiB m", "3221225472B: write 1B to 2GiB"),
        ("--shared-memory cuda --load rate m", "--shared-memory cuda: tune's own client, which sends at a rate,"),
        ("--shared-memory system --perf-analyzer-image i m", "leave --perf-analyzer-image out"),
        (
            "--shared-memory system --target docker --docker-image i --docker-shm-size 1g m",
            "the container then has the shared memory of this machine; leave --docker-shm-size out",
        ),
        ("--shared-memory mmap m", "--shared-memory mmap: choose from none, system, cuda"),
        ("--target local --tritonserver= m", "--tritonserver '': give 1 to 4,096 printable characters"),
    ],
)
def test_contradictory_options_give_one_line(words: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        read_run_arguments(words.split(" "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([f"--docker-env=A={SECRET}"], "works only with --target docker"),
        (["--target", "docker", "--docker-image", "i", f"--docker-env=A={SECRET}\n"], "give 1 to 4,096 printable"),
    ],
)
def test_an_error_shows_the_name_of_an_environment_variable_only(words: list[str], problem: str) -> None:
    with pytest.raises(BadInputError, match=f"^--docker-env A: {problem}") as caught:
        read_run_arguments([*words, "m"])
    assert SECRET not in str(caught.value)


def test_shared_memory_can_be_switched_on_in_a_server_that_has_it_off() -> None:
    words = "--target docker --docker-image i --shared-memory system --server-arg=--allow-client-shm=true m"
    assert read_run_arguments(words.split()).options.server_args == ("--allow-client-shm=true",)
    with pytest.raises(BadInputError, match="--allow-client-shm-x is set by tune itself"):
        read_run_arguments(["--target", "local", "--server-arg=--allow-client-shm-x=true", "m"])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (None, ServerAddress("localhost:8001", "grpc", False)),
        ("h:1", ServerAddress("h:1", "grpc", False)),
        ("grpcs://h:1", ServerAddress("h:1", "grpc", True)),
        ("http://h:1/", ServerAddress("h:1", "http", False)),
        ("https://[::1]:8000", ServerAddress("[::1]:8000", "http", True)),
    ],
)
def test_an_address_has_its_protocol_and_whether_it_uses_tls(url: str | None, address: ServerAddress) -> None:
    assert server_address(url) == address


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
def test_a_literal_value_is_redacted(header: str, kept: bool) -> None:
    assert (redact_header(header) == header) is kept
    assert SECRET not in redact_header(header)
    for words in (["--header", header, "m"], [f"--header={header}", "m"]):
        assert (redact_words(words) == words) is kept
        assert SECRET not in str(redact_words(words))


def test_variables_are_read_when_used() -> None:
    environment = {"TOKEN": "abc", "B": "d e"}
    headers = ("Authorization:Bearer $TOKEN", "x: ${B}", "y:$$", "z:a:b")
    assert expand_headers(headers, environment) == {"Authorization": "Bearer abc", "x": "d e", "y": "$$", "z": "a:b"}
    with pytest.raises(BadInputError, match=r"--header a: \$C is not set in the environment; export it"):
        expand_headers(("a:$C",), environment)
    with pytest.raises(BadInputError, match="--header a: a header's value must be printable characters") as caught:
        expand_headers(("a:$C",), {"C": f"{SECRET}\r\nb: c"})
    assert SECRET not in str(caught.value)


REMOTE = ["--target", "remote", "--header", f"Authorization:{SECRET}", "m"]


def test_a_secret_is_in_no_command() -> None:
    assert SECRET not in command_line(read_run_arguments(REMOTE).options)
    request = read_sweep_arguments(REMOTE).request
    assert SECRET not in str(request.given)
    with pytest.raises(BadInputError) as caught:
        read_run_arguments(["--header", f"Authorization:{SECRET}", "m"])
    assert SECRET not in str(caught.value)


def run(folder: Path, options: RunOptions) -> RunFolder:
    folder.mkdir()
    kept = RunFolder(folder)
    kept.write_info(options, {})
    return kept


def test_a_resumed_run_keeps_its_target_and_takes_a_new_header(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", RunOptions("m", target="remote", url="h:1", headers=("a:***",)))
    words = ["--resume", str(folder.path)]
    options = read_run_arguments(words).options
    assert (options.target, options.url) == ("remote", "h:1")
    with pytest.raises(BadInputError, match="--header a: its value is not stored; give it again, or as \\$VARIABLE"):
        expand_headers(options.headers)
    assert expand_headers(read_run_arguments([*words, "--header", "a:b"]).options.headers) == {"a": "b"}
    with pytest.raises(BadInputError, match="leave --target out"):
        read_run_arguments([*words, "--target", "local"])
    embedded = run(tmp_path / "embedded", RunOptions("m"))
    problem = (
        r"--header a:\*\*\*: works only with --target remote, "
        "not with the --target embedded of before; remove --header$"
    )
    with pytest.raises(BadInputError, match=problem):
        read_run_arguments(["--resume", str(embedded.path), "--header", "a:b"])


def test_a_run_from_someone_else_needs_its_addresses_and_its_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "mine"))
    (tmp_path / "m").mkdir()
    options = RunOptions(str(tmp_path / "m"), target="remote", url="h:1", input_data="a.npz")
    folder = str(run(tmp_path / "r", options).path)
    assert read_run_arguments(["--resume", folder]).options == options
    assert read_run_arguments(["--resume", folder, "--url", "h:1"]).options == options
    assert read_verify_arguments(["--fresh", folder]).options == options
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "theirs"))
    again = [options.model, "--input-data", "a.npz", "--target", "remote", "--url", "h:1"]
    readers: list[tuple[Callable[[list[str]], RunOptions], list[str]]] = [
        (lambda words: read_run_arguments(words).options, ["--resume", folder]),
        (lambda words: read_verify_arguments(words).options, [folder]),
    ]
    for read, start in readers:
        with pytest.raises(BadInputError) as caught:
            read(start)
        assert str(caught.value).endswith(f"add {options.model} --input-data a.npz --target remote --url h:1")
        assert read([*start, *again]) == options
        with pytest.raises(BadInputError, match=r"; if you trust them, add --input-data a.npz$"):
            read([*start, options.model, "--target", "remote", "--url", "h:1"])
    in_container = read_verify_arguments(["--fresh", folder, *again[:3], "--target", "docker", "--docker-image", "i"])
    assert (in_container.options.target, in_container.options.url) == ("docker", None)
    with pytest.raises(BadInputError, match=r"the run has its own model and data; leave --input-data out"):
        read_verify_arguments(["--fresh", folder, "--input-data", "b.npz"])


def test_a_run_from_someone_else_may_name_a_profile_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "named.yaml").touch()
    folder = str(run(tmp_path / "r", RunOptions("named")).path)
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "theirs"))
    assert read_run_arguments(["--resume", folder]).options.model == "named"
    monkeypatch.chdir("/")
    with pytest.raises(BadInputError, match=r"add .*/configs/named.yaml$"):  # of the folder where the run began
        read_run_arguments(["--resume", folder])
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "mine"))
    assert read_run_arguments(["--resume", folder]).options.model == f"{tmp_path}/configs/named.yaml"


def test_a_sweep_from_someone_else_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "mine"))
    words = ["--target", "remote", "--url", "h:1", "m"]
    arguments = read_sweep_arguments(words)
    options = arguments.options
    record = {"options": arguments.request.given, "signature": sign(external_values(options))}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    assert read_sweep_arguments(["--resume", str(tmp_path)]).options == options
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "theirs"))
    with pytest.raises(BadInputError, match=r"sweep.json was not .* begin it again: tune sweep --target remote"):
        read_sweep_arguments(["--resume", str(tmp_path)])


def test_a_resumed_sweep_takes_a_header_whose_value_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "mine"))
    began = read_sweep_arguments(REMOTE)
    record = {"options": began.request.given, "signature": sign(external_values(began.options))}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    words = ["--resume", str(tmp_path)]
    with pytest.raises(BadInputError, match="--header Authorization: its value is not stored; give it again"):
        expand_headers(read_sweep_arguments(words).options.headers)
    header = ["--header", f"Authorization:{SECRET}"]
    resumed = read_sweep_arguments([*words, *header])
    assert (resumed.options, resumed.request) == (began.options, began.request)
    assert expand_headers(resumed.options.headers) == {"Authorization": SECRET}
    assert SECRET not in str(resumed.request.given)
    with pytest.raises(BadInputError, match="keeps the options of the sweep; leave --url out"):
        read_sweep_arguments([*words, *header, "--url", "h:1"])
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "theirs"))
    with pytest.raises(BadInputError, match="was not written by your tune"):
        read_sweep_arguments([*words, *header])


def test_stored_options_get_the_same_checks(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", RunOptions("m"))
    change_info(folder.path, "options", server_args=["--http-address=0.0.0.0"], target="local")
    with pytest.raises(BadInputError, match=r"run.json: --server-arg .*: --http-address is set by tune itself"):
        read_stored_options(folder)


def test_verify_takes_the_target_of_the_run_or_another(tmp_path: Path) -> None:
    before = RunOptions("m", target="local", tritonserver="/t", server_args=("--log-verbose=1",), server_cpus="0")
    folder = str(run(tmp_path / "r", before).path)
    assert read_verify_arguments([folder]).options == before
    assert read_verify_arguments(["--fresh", folder]).options == before
    assert read_verify_arguments(["-v", folder]).verbose
    changed = read_verify_arguments(["--fresh", "--tritonserver", "/u", folder]).options
    assert (changed.target, changed.tritonserver, changed.server_args) == (
        "local",
        "/u",
        ("--log-verbose=1",),
    )
    remote = read_verify_arguments(["--fresh", "--target", "remote", "--url", "h:1", folder]).options
    assert (remote.target, remote.url, remote.tritonserver, remote.server_args) == ("remote", "h:1", None, ())
    assert remote.server_cpus is None, "it has CPUs of its own"
    with pytest.raises(BadInputError, match="was measured over grpc: give --url the host:port of its gRPC"):
        read_verify_arguments(["--fresh", "--target", "remote", "--url", "http://h:1", folder])
    with pytest.raises(BadInputError, match="--url h:1: works only with --target remote"):
        read_verify_arguments(["--fresh", "--url", "h:1", folder])


def test_a_server_at_another_address_gets_nothing_of_the_former_one(tmp_path: Path) -> None:
    before = RunOptions(
        "m",
        target="remote",
        url="grpcs://staging:8001",
        metrics_url="staging:9002",
        headers=("Authorization:$TOKEN",),
        tls_ca="ca.pem",
        perf_analyzer_image="sdk",
    )
    folder = str(run(tmp_path / "r", before).path)
    options = read_verify_arguments(["--fresh", "--url", "prod:8001", folder]).options
    assert options == RunOptions("m", target="remote", url="prod:8001", perf_analyzer_image="sdk")
    assert read_verify_arguments(["--fresh", "--url", "grpcs://staging:8001", folder]).options == before


def test_a_separate_test_leaves_out_cpus_that_this_machine_lacks(tmp_path: Path) -> None:
    usable = str(min(usable_cpus()))
    before = RunOptions("m", server_cpus=f"{usable},{MAX_CPU_COUNT - 1}", client_cpus=f"{MAX_CPU_COUNT - 1}")
    folder = run(tmp_path / "r", before)
    options = read_verify_arguments(["--fresh", str(folder.path)]).options
    assert options == replace(before, server_cpus=None, client_cpus=None)
    left_out = [f"--client-cpus {before.client_cpus}", f"--server-cpus {before.server_cpus}"]
    assert absent_cpus(folder, options) == left_out
    remote = read_verify_arguments(["--fresh", "--target", "remote", "--url", "h:1", str(folder.path)]).options
    assert absent_cpus(folder, remote) == left_out[:1], "the server has CPUs of its own"
    with pytest.raises(BadInputError, match="cannot be used here"):
        read_verify_arguments([str(folder.path)])
    kept = run(tmp_path / "kept", replace(before, server_cpus=usable, client_cpus=None))
    assert read_verify_arguments(["--fresh", str(kept.path)]).options.server_cpus == usable


@pytest.mark.parametrize("words", [["--target", "remote", "--url", "h:1"], ["--tritonserver", "/u"]])
def test_a_test_of_a_run_continues_only_on_its_own_server(tmp_path: Path, words: list[str]) -> None:
    folder = str(run(tmp_path / "r", RunOptions("m")).path)
    with pytest.raises(BadInputError, match=f"{words[0]}: the test of a run continues on .*; give --fresh too"):
        read_verify_arguments([*words, folder])


def test_a_continued_test_takes_the_secrets_that_a_run_does_not_keep(tmp_path: Path) -> None:
    options = RunOptions("m", target="remote", url="h:1", storage="postgresql://u:***@h/d")
    folder = str(run(tmp_path / "r", options).path)
    with pytest.raises(BadInputError, match="the password of its storage is not stored; give --storage"):
        read_verify_arguments([folder])
    words = ["--header", "a:b", "--storage", "postgresql://u:p@h/d", "--budget", "90s", folder]
    read = read_verify_arguments(words)
    assert (read.options.headers, read.options.storage) == (("a:b",), "postgresql://u:p@h/d")
    assert (read.budget_seconds, read.options.budget_seconds) == (90.0, options.budget_seconds)
