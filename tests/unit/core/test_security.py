"""Tests that untrusted input cannot leave its folder, run code, block, exhaust memory or control the terminal."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.units import parse_bytes, parse_duration_ms, parse_rate
from optimizer.config import model_config
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import named_file, one_line, read_bytes, read_tail
from optimizer.deploy import server_process
from optimizer.model.profile import parse_profile
from optimizer.model.profile_lookup import list_profiles
from optimizer.model.profile_types import MAX_INPUT_DATA_BYTES
from optimizer.model.repository import read_repository_model
from optimizer.options.addresses import redact
from optimizer.options.command_line import command_line
from optimizer.options.run_options import RunOptions
from optimizer.results import configuration_text
from optimizer.store.recording import read_recording
from optimizer.store.trials_reader import MAX_COLUMNS, MAX_ROWS
from tests.repositories import doubler, serialized, write_model

ROOT = Path(__file__).parents[3]
CONTROL_CHARACTERS = (
    "\0",
    "\n",
    "\r",
    "\t",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\x85",
    "\x9b31m",
    "\u2028",
    "\u202e",
    "\ud800",
    "\ufeff",
)
ONNX_CONFIG = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
HEADER = "max_batch_size,instance_count,concurrency,throughput_infer_per_sec,latency_p95_ms"


def one_line_message(error: pytest.ExceptionInfo[BadInputError]) -> str:
    """Return the message of the error and assert that it is one line."""
    assert str(error.value).isprintable()
    return str(error.value)


# -- source code ------------------------------------------------------------------------------------------------

FORBIDDEN = {
    *("eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "pickle.load", "pickle.loads"),
    *("marshal.loads", "shelve.open", "tempfile.mktemp"),
}


def dotted_name(node: ast.expr) -> str:
    """Return a name such as ``os.system``; an empty string for another expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangerous_expressions(source: str) -> Iterator[str]:
    """Yield what runs arbitrary code, uses a predictable name in a shared folder or listens on all addresses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = dotted_name(node.func)
            if name in FORBIDDEN:
                yield name
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                    yield ast.unparse(keyword)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "0.0.0.0" in node.value:
            yield node.value


def test_no_source_runs_what_it_reads_or_opens_itself_to_the_network() -> None:
    sources = [path for package in ("objectives", "optimizer") for path in (ROOT / package).rglob("*.py")]
    assert len(sources) > 50
    problems = {path.name: list(dangerous_expressions(path.read_text(encoding="utf-8"))) for path in sources}
    assert {name: expressions for name, expressions in problems.items() if expressions} == {}


@pytest.mark.parametrize(
    "source",
    ["eval(x)", "os.system(x)", "yaml.load(x)", "pickle.loads(x)", "run(x, shell=True)", "np.load(x, allow_pickle=y)",
     "tempfile.mktemp()", "a = ['--http-address=0.0.0.0']"],
)  # fmt: skip
def test_a_dangerous_call_is_detected(source: str) -> None:
    assert len(list(dangerous_expressions(source))) == 1


# -- files ------------------------------------------------------------------------------------------------------


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100, "split it") == b"x" * 100
    with pytest.raises(BadInputError, match=r"f: larger than 0 MiB; split it$"):
        read_bytes(path, 99, "split it")


@pytest.mark.parametrize(
    ("name", "message"),
    [("pipe", "pipe: is a device or a pipe"), ("folder", "folder: is a folder"),
     ("/dev/zero", "/dev/zero: is a device or a pipe"), ("none", "none: no such file"),
     ("a\0", r"a\x00: cannot be read: not a path"), ("\x1b[31m", r"\x1b[31m: no such file"),
     ("loop", "loop: cannot be read: Too many levels of symbolic links"),
     ("n" * 300, f"{'n' * 300}: cannot be read: File name too long")],
)  # fmt: skip
def test_a_path_that_is_no_file_is_refused_without_blocking(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    with pytest.raises(BadInputError) as error:
        read_bytes(Path(name), 100, "")
    assert one_line_message(error) == f"{message}; check the path"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("none", "none: no such file"), ("folder", "folder: is a folder"), ("file/none", "file/none: no such file"),
     ("", "'': is empty"), (" \n", r"' \n': is empty"), ("\x1b[31m", r"\x1b[31m: no such file")],
)  # fmt: skip
def test_a_wrong_name_of_a_file_is_refused_with_its_argument(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    assert named_file("--trace", "file", "a CSV file") == Path("file")
    with pytest.raises(BadInputError) as error:
        named_file("--trace", name, "a CSV file")
    assert one_line_message(error) == f"--trace {shown}; give a CSV file"


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1000 + b"\xffend")
    assert read_tail(log, 4) == "�end"
    assert read_tail(log, 10, start=1001) == "end"
    assert read_tail(log, 10, start=2000) == ""


def test_input_data_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "data.json").open("wb") as file:
        file.truncate(MAX_INPUT_DATA_BYTES + 1)  # the file is sparse
    with pytest.raises(BadInputError, match=r"request.input_data: 'data.json' is larger than 1024 MiB; write fewer"):
        parse_profile(b"model: {builder: mlp}\nrequest: {input_data: data.json}", tmp_path / "p.yaml")


# -- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", CONTROL_CHARACTERS)
def test_unprintable_characters_are_escaped(mark: str) -> None:
    line = one_line(f"é{mark}…")
    assert line.isprintable()
    assert line.startswith("é\\")
    assert line.endswith("…")


def test_a_long_line_keeps_its_ends() -> None:
    line = one_line("begin" + "x" * 1000 + "end", 60)
    assert len(line) == 60
    assert (line[:5], line[-3:]) == ("begin", "end")
    assert one_line("x" * 60, 60) == "x" * 60


@pytest.mark.parametrize(
    "name", ["../m", "..", ".", "", "/etc", "a/b", "a\\b", *(f"m{mark}" for mark in CONTROL_CHARACTERS)]
)
def test_a_model_name_is_no_path(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, "m", ONNX_CONFIG, doubler())
    (tmp_path / "models").mkdir()
    with pytest.raises(BadInputError, match=r"^model name: ") as error:
        read_repository_model(tmp_path / "models", name, gpu=False)
    one_line_message(error)


# names that a shell would expand, split or run; the Python backend starts the process of a model through a shell
SHELL_NAMES = ("m$(touch PWNED)", "m`touch PWNED`", "m;touch PWNED", "m touch", "m#1", "m<x", "m>x", "m|x", "m&",
         "m'", 'm"', "m*", "m?", "m[1]", "m{1,2}", "~m", "m$HOME", "m!", "m^", "m(")  # fmt: skip


@pytest.mark.parametrize("name", SHELL_NAMES)
def test_a_name_that_a_shell_would_interpret_is_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, ONNX_CONFIG, doubler())
    with pytest.raises(BadInputError, match=r"^model name: .* shell .* rename it with letters, digits and ") as error:
        read_repository_model(tmp_path, name, gpu=False)
    one_line_message(error)


@pytest.mark.parametrize("name", ["dlrm", "my_model-1.2", "modèle", "模型", "a+b", "a=b", "a,b", "a:b", "a@b", "a%b"])
def test_a_name_that_a_shell_takes_literally_is_accepted(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, ONNX_CONFIG, doubler())
    assert read_repository_model(tmp_path, name, gpu=False).name == name


@pytest.mark.parametrize("is_embedded", [False, True])
@pytest.mark.parametrize("filename", ["$(touch PWNED).onnx", "m x.onnx"])
def test_a_file_name_that_a_shell_would_interpret_is_refused(
    filename: str, is_embedded: bool, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, "m", f'{ONNX_CONFIG}default_model_filename: "{filename}"\n', doubler())
    (folder / "1" / "model.onnx").rename(folder / "1" / filename)
    with pytest.raises(BadInputError, match=r"config.pbtxt: default_model_filename: .* shell ") as error:
        read_repository_model(tmp_path, "m", gpu=False, is_embedded=is_embedded)
    one_line_message(error)


@pytest.mark.parametrize(
    ("head", "value", "reason"),
    [
        (ONNX_CONFIG, "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "only models of the backend python"),
        ('backend: "python"\n', "/x/$(touch PWNED)", "shell"),
        ('backend: "python"\n', "$$TRITON_MODEL_DIRECTORY/a b", "shell"),
    ],
)
def test_an_environment_that_would_run_commands_is_refused(
    head: str, value: str, reason: str, tmp_path: Path
) -> None:
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}\n'
    write_model(tmp_path, "m", head + parameter, doubler())
    with pytest.raises(BadInputError, match=rf"config.pbtxt: parameters.EXECUTION_ENV_PATH.*: .*{reason}") as error:
        read_repository_model(tmp_path, "m", gpu=False)
    one_line_message(error)


@pytest.mark.parametrize("name", ["a b", "$(touch PWNED)", "a;b"])
def test_the_folder_of_a_server_is_on_a_path_that_a_shell_takes_literally(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert server_process.temporary_parent() == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert server_process.temporary_parent() == tmp_path


def test_names_in_a_repository_are_shown_harmlessly(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[31mmodels"
    write_model(folder, "a\x1b[2J", ONNX_CONFIG, doubler())
    with pytest.raises(BadInputError) as error:
        read_repository_model(folder, "m", gpu=False)
    assert r"\x1b[31mmodels: no model 'm' there; it has a\x1b[2J" in one_line_message(error)


@pytest.mark.parametrize("filename", ["../../secret.onnx", "/etc/passwd", "a/b.onnx", "\\033[31m"])
def test_a_model_file_stays_in_its_version(filename: str, tmp_path: Path) -> None:
    write_model(tmp_path, "m", f'{ONNX_CONFIG}default_model_filename: "{filename}"\n', doubler())
    (tmp_path / "secret.onnx").write_bytes(serialized(doubler()))
    with pytest.raises(BadInputError, match=r"config.pbtxt: default_model_filename: ") as error:
        read_repository_model(tmp_path, "m", gpu=False)
    one_line_message(error)


@pytest.mark.parametrize("name", ["config.pbtxt", "1/model.onnx"])
def test_a_pipe_in_a_repository_does_not_block(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, "m", ONNX_CONFIG, doubler())
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(BadInputError, match=f"{name}: is a device or a pipe; check the path$"):
        read_repository_model(tmp_path, "m", gpu=False)


def test_a_version_is_a_decimal_number(tmp_path: Path) -> None:
    (write_model(tmp_path, "m", ONNX_CONFIG, doubler()) / "1").rename(tmp_path / "m" / "²")
    with pytest.raises(BadInputError, match=r"no version folder with model.onnx"):
        read_repository_model(tmp_path, "m", gpu=False)


def test_an_input_type_that_triton_does_not_know_is_refused(tmp_path: Path) -> None:
    model = doubler()
    model.graph.input[0].type.tensor_type.elem_type = 999
    write_model(tmp_path, "m", ONNX_CONFIG, model)
    with pytest.raises(BadInputError, match=r"input 'x' of .*model.onnx has a type that Triton does not know; write"):
        read_repository_model(tmp_path, "m", gpu=False)


@pytest.mark.parametrize(
    "section", ['request: {shapes: {"x\\e[31m": [1]}}', 'space: {config: {"parameters.\\r.a": [1]}}']
)
def test_a_key_of_a_profile_is_printable(section: str) -> None:
    with pytest.raises(BadInputError, match=r"has control characters$") as error:
        parse_profile(f"model: {{builder: mlp}}\n{section}".encode(), Path("p.yaml"))
    one_line_message(error)


def test_a_profile_that_cannot_be_named_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    for name in ("good", "bad\x1b[31m", "a..b"):
        Path("configs", f"{name}.yaml").write_text("model: {builder: mlp}\ndescription: mine\n")
    assert [name for name, path in list_profiles().items() if path.parent == Path("configs")] == ["good"]


@pytest.mark.parametrize("mark", [mark for mark in CONTROL_CHARACTERS if mark != "\ud800"])
def test_a_config_is_written_without_control_characters(mark: str, tmp_path: Path) -> None:
    config = ModelConfig(name=f'modèle"{mark}\\')
    config.parameters[f"key{mark}"].string_value = mark
    path = tmp_path / "config.pbtxt"
    path.write_text(model_config.to_text(config))
    assert all(line.isprintable() for line in path.read_text().split("\n"))
    assert "modèle" in path.read_text()
    assert model_config.read(path) == config


def test_the_cells_of_a_table_are_shown_harmlessly(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f'{HEADER},"thr\x1b[31m"\n1,1,1,9,5,"a\nb"\n1,1,1,9,5,\u202ec\n')
    shown = [configuration_text.configuration(row.candidate) for row in read_recording(path).rows]
    assert [line.isprintable() for line in shown] == [True, True]
    assert r"thr\x1b[31m=a\nb" in shown[0]


# -- resources --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parse", [parse_duration_ms, parse_bytes, lambda text: parse_rate(text, 1)])
def test_many_blanks_are_refused(parse: object) -> None:
    """A regular expression with quadratic time would exceed the time limit."""
    for text in ("1" + " " * 1_000_000 + "x", " " * 1_000_000, "9" * 1_000_000):
        with pytest.raises(ValueError, match="write a positive "):
            parse(text)  # type: ignore[operator]


def test_many_backslashes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text('name: "' + "\\" * 1_000_000 + '"')
    with pytest.raises(BadInputError, match=r"config.pbtxt: has 100 backslashes in a row"):
        model_config.read(path)


def test_many_combinations_are_refused_at_once() -> None:
    many = ", ".join(map(str, range(1, 1001)))
    text = f"model: {{builder: mlp}}\nspace:\n  max_batch_size: [{many}]\n  max_queue_delay_microseconds: [{many}]\n"
    with pytest.raises(
        BadInputError, match=r"^p.yaml:2: space: the choices have 1,000,000 combinations; give at most"
    ):
        parse_profile(text.encode(), Path("p.yaml"))


def test_a_policy_of_many_sizes_is_refused() -> None:
    sizes = ", ".join(map(str, range(1, 34)))
    text = f"model: {{builder: mlp}}\nspace: {{preferred_batch_size: [[{sizes}]]}}"
    with pytest.raises(BadInputError, match=r"space.preferred_batch_size: .* has more than 32 sizes$"):
        parse_profile(text.encode(), Path("p.yaml"))


def test_a_message_with_a_long_quotation_is_shortened() -> None:
    with pytest.raises(BadInputError) as error:
        parse_profile(f"model: {{builder: mlp}}\n? {'a' * 100_000}\n: 1".encode(), Path("p.yaml"))
    assert len(one_line_message(error)) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{HEADER}\n" + "1,1,1,9,5\n" * (MAX_ROWS + 1),
            "t.csv: has more than 50,000 rows; leave out what is not needed",
        ),
        (
            ",".join([HEADER, *map(str, range(MAX_COLUMNS + 1 - len(HEADER.split(","))))]),
            "t.csv: has more than 1,000 columns; leave out what is not needed",
        ),
    ],
    ids=["rows", "columns"],
)
def test_a_table_is_bounded(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text)
    with pytest.raises(BadInputError) as error:
        read_recording(Path("t.csv"))
    assert one_line_message(error) == message


def test_a_column_of_many_values_is_no_parameter(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER},stamp\n" + "".join(f"1,1,{i},9,5,{i}\n" for i in range(1, 1002)))
    with pytest.raises(BadInputError, match=r"t.csv: the column 'stamp' has 1,001 values, too many for a parameter"):
        read_recording(path)


# -- secrets ----------------------------------------------------------------------------------------------------

SECRETS = [
    "postgresql://me:SECRET@host/db",
    "postgresql://me@tenant:SECRET@host/db",  # the form of user names on Azure
    "postgresql+psycopg://:SECRET@host:5432/db?sslmode=require",
    "mysql://me:SEC@SECRET/RET:SECRET@host/db",
    "mysql://me:SECRET\nSECRET@host/db",
    "mysql://host/db?user=me&password=SECRET",
    "mysql://host/db?sslpassword=SECRET&x=1",
    "postgresql://host/db?auth_token=SECRET",
]


@pytest.mark.parametrize("url", SECRETS)
def test_a_password_is_neither_shown_nor_kept(url: str) -> None:
    texts = (redact(url), redact(f"--storage={url}"), redact(f"could not connect to {url}: refused"))
    for text in (*texts, command_line(RunOptions("m", storage=url))):
        assert "SEC" not in text
        assert "***" in text


def test_a_password_is_not_shown_as_a_driver_decodes_it() -> None:
    url = "postgresql://me:SEC%40RET@host/db"
    assert redact("FATAL: no SEC@RET, nor SEC%40RET", url) == "FATAL: no ***, nor ***"


@pytest.mark.parametrize("url", ["sqlite:///study.db", "runs/study.journal", "postgresql://me@host:5432/db", ""])
def test_an_address_without_a_password_is_unchanged(url: str) -> None:
    assert redact(url) == url
    assert redact("it failed", url) == "it failed"
