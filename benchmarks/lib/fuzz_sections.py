"""The cases of ``fuzz_commands.py`` by section: valid words and files, mutations of them, and noise."""

from __future__ import annotations

import io
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st

from optimizer.cli.commands import COMMANDS as TUNE_COMMANDS
from optimizer.config import model_config
from optimizer.core import measurement_windows
from optimizer.core.errors import BadInputError, MeasurementError
from optimizer.measure import perf_output
from optimizer.options.table import OPTIONS
from tests.repositories import doubler, serialized
from tests.run_folders import write_run

Files: TypeAlias = Mapping[str, bytes | str]
FAULTS_OF_A_DOCUMENT = 11  # the error about a document lists ten faults and the number of further ones


@dataclass(frozen=True)
class CommandCase:
    """``tune`` with ``words`` in a folder with files.

    A file is given by its content, or as text by the target of a link. ``files`` are hostile, ``valid`` are not.
    ``most_lines`` limits the lines of error.
    """

    words: tuple[str, ...]
    files: Files = field(default_factory=dict)
    valid: Files = field(default_factory=dict, repr=False)
    most_lines: int = 1


@dataclass(frozen=True)
class ReaderCase:
    """``content`` for a reader that no command reaches without a server. It may raise ``error``."""

    read: Callable[[bytes], object]
    content: bytes
    error: type[Exception] = BadInputError


Case: TypeAlias = CommandCase | ReaderCase


# -- valid documents ------------------------------------------------------------------------------------------------

PROFILE = b"""\
description: a model
model: {builder: mlp, settings: {input_width: 64, layers: 2}}
sla:
  p95: 20ms
request: {batch_size: 4}
load:
  max_concurrency: 64
space:
  max_batch_size: [4, 8, 16]
  max_queue_delay_microseconds: [off, 0, 500]
  preferred_batch_size: [none, max/2, [max/2, max]]
  instance_group_count: [1, 2]
  config:
    parameters.intra_op_thread_count.string_value: ["1", "2"]
gpu:
  model: {settings: {layers: 4}}
  space: {config: {}}
"""
STORED = b"model:\n  repository: models\n  name: m\nsla: {p99: 0.05s}\nrequest: {input_data: zero, batch_size: 2}\n"
MODEL_ANALYZER = b"""\
model_repository: models
run_config_search_mode: brute
run_config_search_max_instance_count: 3
client_protocol: grpc
latency_budget: 20
objectives: {perf_throughput: 3, perf_latency_p95: 1}
profile_models:
  m:
    constraints:
      gpu_used_memory: {max: 200}
    parameters:
      concurrency: {start: 2, stop: 64, step: 8}
      batch_sizes: 2, 4
    perf_analyzer_flags: {percentile: 95, shape: [x:4], input-data: data.json, measurement-interval: 500}
    model_config_parameters:
      max_batch_size: [4, 8]
      dynamic_batching:
        preferred_batch_size: [[4], [2, 4]]
        max_queue_delay_microseconds: [0, 100]
      instance_group:
        - - kind: KIND_GPU
            count: 1
        - - kind: KIND_CPU
            count: [1, 2]
      parameters: {intra_op_thread_count: {string_value: ["1", "2"]}}
"""
MODEL_ANALYZER_QUICK = b"""\
model_repository: models
run_config_search_mode: quick
run_config_search_min_model_batch_size: 4
run_config_search_disable: false
profile_models: [m]
request_rate: 10,20
plots: {}
"""
CONFIG = b"""\
name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output { name: "y", data_type: TYPE_FP32, dims: 4 }
instance_group [ { count: 2 kind: KIND_CPU gpus: [ ] } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
optimization { graph { level: -1 } }
parameters { key: "intra_op_thread_count" value { string_value: "2" } }  # as many as fit
default_model_filename: 'model.onnx'
"""
TABLE = b"""\
model,trial,max_batch_size,dynamic_batching,max_queue_delay_us,preferred_batch_sizes,instance_count,threads,\
request_batch_size,concurrency,throughput_infer_per_sec,latency_p95_ms,requests,stable,batch_stats,status,reason
m,0,4,false,0,,1,1,4,1,400.5,2.5,120,true,4:10:2000,ok,
m,1,8,true,500,4 8,2,2,4,8,1e3,17.8,300,true,,ok,"a, b"
m,2,16,true,0,,1,1,4,,,,,false,,failed,it crashed
"""
FIVE_COLUMNS = b"""\
max_batch_size,instance_count,concurrency,throughput_infer_per_sec,latency_p95_ms
1,1,1,9,5
2,1,1,12,6
"""
PERF_CSV = b"""\
Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,\
Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency
4,1558.24,19,338,7196,52,1817,632,4,9989,11493,12420,14565
"""
PERF_OUTPUT = b"""\
Request concurrency: 4
  Pass [1] throughput: 1.5e+03 infer/sec. p95 latency: 12420 usec
  Pass [2] throughput: 990.5 infer/sec. p95 latency: 2200 usec
  Pass [3] throughput: 1000 infer/sec. p95 latency: 2200 usec
    Request count: 845
    Avg gRPC time: 10045 usec (marshal 4 usec)
"""
SAMPLES_CSV = b"""\
x[0],x[1],s,ids
1,2.5,some text,"[1, 2, 3]"
-3e2,0.5,"a, b",[4]
"""
ENSEMBLE = b"""\
name: "m"
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "n" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "z" } },
  { model_name: "o" model_version: -1 input_map { key: "x" value: "z" } output_map { key: "y" value: "y" } }
] }
"""
SAMPLES_CONFIG = b"""\
backend: "python"
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "s" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SAMPLES_JSON = b"""\
{"data": [
  {"x": [1, 2.5], "s": ["some text"], "ids": {"content": [1, 2, 3], "shape": [3]}},
  {"x": [-3e2, 0], "s": {"b64": "YSwgYg=="}, "ids": {"content": [4], "shape": [1]}}
]}
"""
SUITE = b"""\
name: nightly
budget: 4m
defaults:
  sla: {p95: 20ms}
  target: {target: remote, url: 127.0.0.1:1, metrics-url: 127.0.0.1:1}
  options: {max-trials: 3, no-output-check: true}
entries:
  - model: models/m
  - {model: [p.yaml], sla: [{p95: 10ms}, {p99: 0.05s}], name: other}
"""
TRACE = b"timestamp,model\n" + b"".join(b"%.2f,m\n" % (0.01 * i + 0.001 * (i % 7)) for i in range(150))
BOUNDS = (b"20ms", b" 0.02 s", b"500us", b"4GiB", b"1.5 MB", b"4000/s", b".5req/s", b"20", b"1" + b" " * 9999)
HOSTILE = (
    b"\0", b"\x1b[31m", b"\x1b]0;x\x07", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\xc2\x85",
    "\u202e".encode(), "\u2028".encode(), "٣".encode(), "²".encode(), "\U0010ffff".encode(), b"[red]", b"[/]", b"<b>",
    b"9" * 5000, b"-1", b"0", b"1e999", b"-0.0", b"nan", b"inf", b".5", b"0x7f", b"0b1", b"1_000", b"12:30",
    b"2026-01-01", b"true", b"null", b"~", b"2147483648", b"18446744073709551616", b"../../etc/passwd", b"/etc",
    b"..", b"&a ", b"*a", b"&a [*a, *a]", b"<<: *a", b"!!python/object/apply:os.system [id]", b"!!binary aGk=",
    b"!!set", b"? ", b"- ", b"---\n", b"...\n", b"%YAML 9.9\n", b"{" * 2000, b"[" * 2000, b"}" * 9, b"- " * 2000,
    b'"', b"'", b"\\", b"\\x41", b"\\777", b"\\ud800", b'\\N"', b"\\" * 5000, b" " * 5000, b"\n" * 5000, b"a" * 5000,
    b",", b"," * 500, b";", b"#", b"\t", b"{}", b"[]", b"=", b"--help", b"$(id)", b"`id`", b"%s%n", b"{0.__class__}",
)  # fmt: skip


def noise(most: int = 200) -> st.SearchStrategy[bytes]:
    texts = st.text(st.characters(), max_size=most).map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.binary(max_size=most) | texts | st.lists(st.sampled_from(HOSTILE), max_size=6).map(b"".join)


@st.composite
def documents(draw: st.DrawFn, *valid: bytes) -> bytes:
    """Generate a mutation of one of ``valid``; one in ten inputs is noise instead.

    A mutation replaces a word or a few bytes, or duplicates, removes or moves a line.
    """
    if draw(st.integers(0, 9)) == 9:
        return draw(noise())
    data = draw(st.sampled_from(valid))
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2)))):
        words = [match.span() for match in re.finditer(rb"[\w.]+", data)]
        start, end = draw(st.sampled_from(words or [(0, 0)]))
        if draw(st.booleans()):
            start = draw(st.integers(0, len(data)))
            end = start + draw(st.integers(0, 5))
        new = draw(st.sampled_from(HOSTILE) | st.binary(max_size=3) | st.sampled_from(data.split() or [b""]))
        data = data[:start] + new + data[end:]
    lines = data.splitlines(keepends=True)
    if lines and draw(st.integers(0, 3)) == 3:
        line = lines.pop(draw(st.integers(0, len(lines) - 1)))
        for _ in range(draw(st.integers(0, 2))):
            lines.insert(draw(st.integers(0, len(lines))), line)
    return b"".join(lines)


@cache
def _onnx() -> bytes:
    return serialized(doubler())


@cache
def _onnx_with_external_weights() -> bytes:
    """Return a model whose weights are in the file ``w.bin`` next to it."""
    from onnx import TensorProto, helper

    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="w.bin")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "test", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return serialized(model)


@cache
def _npz() -> bytes:
    content = io.BytesIO()
    np.savez(content, x=np.zeros((2, 2)), s=np.array(["a", "b"]), ids=np.arange(6).reshape(2, 3))
    return content.getvalue()


@cache
def _npy() -> bytes:
    content = io.BytesIO()
    np.save(content, np.zeros((2, 4), np.float32))
    return content.getvalue()


@cache
def _run() -> Files:
    """Return the files of a finished run."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder))
        files = (path for path in sorted(run.rglob("*")) if path.is_file())
        return {f"run/{path.relative_to(run)}": path.read_bytes() for path in files}


@cache
def _valid() -> Files:
    """Return the files that words and documents name."""
    return {
        "data.json": b'{"data": [{"x": [1, 2, 3, 4]}]}',
        "ma.yaml": MODEL_ANALYZER,
        "model.onnx": _onnx(),
        "models/m/1/model.onnx": _onnx(),
        "models/m/config.pbtxt": CONFIG,
        "p.yaml": PROFILE,
        "suite.yaml": SUITE,
        "table.csv": FIVE_COLUMNS,
        "trace.csv": TRACE,
        "w.bin": bytes(16),
        **_run(),
        **{f"other/{name.removeprefix('run/')}": content for name, content in _run().items()},
    }


# -- sections -------------------------------------------------------------------------------------------------------

# nothing listens there; the command ends before it asks the server, because it would have to download perf_analyzer
REMOTE = ("--target", "remote", "--url", "127.0.0.1:1", "--metrics-url", "127.0.0.1:1")
REPLAY = ("replay", "--sla-p95", "20ms", "--max-trials", "3", "--search")
SERVICE = ("--image", "nvcr.io/nvidia/tritonserver:24.10-py3", "--model-repository")
RUN_COMMANDS = (
    ("explain", "run", "--json"),
    ("explain", "run"),
    ("compare", "run", "other"),
    ("compare", "other", "run", "--json", "--fail-on-regression", "5%"),
    ("report", "run", "--format", "markdown,csv", "--out", "results"),
    ("report", "run"),
    ("plan", "run", "--rate", "4000/s"),
    ("plan", "run", "--gpus", "2", "--json"),
    ("watch", "run", "--url", "127.0.0.1:1"),
    ("emit", "run"),
    ("emit", "run", "--format", "kubernetes", *SERVICE, "pvc://models", "--out", "results"),
    ("emit", "run", "--format", "compose", *SERVICE, "/srv/models"),
    ("verify", "run", "--fresh", *REMOTE),
    ("verify", "run"),
    ("--resume", "run"),
    (*REPLAY, "random", "run/trials.csv"),
    ("runs", "--results", ".."),
    ("runs", "--results", "..", "--json"),
    ("runs", "--delete", "run", "--yes"),
)
COMMANDS = (
    (
        "run",
        "models/m",
        "--sla-p95",
        "20ms",
        "--budget",
        "5m",
        "--seed",
        "7",
        "--shape",
        "x:4",
        "--input-data",
        "zero",
    ),
    ("--model-repository", "models", "--sla-p99=50ms", "--request-batch-size", "4", "--objective=throughput", "m"),
    (
        "sweep",
        "p.yaml",
        "--instance-count",
        "1,2",
        "--max-queue-delay",
        "off,5ms",
        "--concurrency",
        "1,4",
        "--csv",
        "s.csv",
    ),
    ("plan", "run", "--rate", "40000/s", "--sla-p95", "20ms", "--gpu-hour-cost", "2.50", "--replicas", "8"),
    ("plan", "run", "--gpus", "2", "--traffic", "diurnal", "--peak-factor", "1.8", "--balancer", "random"),
    ("watch", "run", "--url", "127.0.0.1:1", "--interval", "200ms", "--intervals", "2", "--model", "m", "--json"),
    ("emit", "run", "--format", "helm-values", *SERVICE, "s3://models", "--min-replicas", "2", "--out", "results"),
    ("batch", "suite.yaml", "--budget", "4m", "--fail-on-regression", "5%"),
    ("models", "--json"),
    ("--version",),
    ("init", "--sla-p95", "20ms", "./model.onnx"),
    ("init", "--model-repository", "models", "--out", "new.yaml", "m"),
    ("init", "--out", "-", "mlp"),
    ("runs", "m", "--results", "results"),
    ("cache", "--json"),
    ("cache", "--clean", "onnx", "requests", "--yes"),
    *RUN_COMMANDS,
)
STARTS_A_SERVER = ("run", "sweep")
NOT_RUN = ("cluster", "cluster-cpus", "study-name")  # they talk to other machines
FLAGS = (
    *(option.flag for option in OPTIONS if option.name not in NOT_RUN),
    *(
        "--rate",
        "--gpus",
        "--replicas",
        "--max-cost",
        "--trace",
        "--gpu-hour-cost",
        "--format",
        "--results",
        "--force",
    ),
    *(
        "--model-warmup",
        "--device",
        "--image",
        "--name",
        "--max-replicas",
        "--fp16-factor",
        "--fresh",
        "--seeds",
        "--config",
    ),
    *("--delete", "--clean", "--yes", "--fail-on-regression", "--version"),
    *("--request-rate", "--against", "--help", "--no-color", "--", "-", "-x", "--unknown"),
)
NAMES = (b"models/m", b"m", b"run", b"./model.onnx", b"p.yaml", b"mlp", b"results/m", b"../m", b"models/m/1")
TEXTS = (*BOUNDS, *NAMES, b"ids:16..128", b"a,b:16*3|128*0.5,7", b"x:0..5", b"1,8,64", b"0-1", b"grid", b"a=1,2")


def _text(data: bytes) -> str:
    """Return a word of a command line, which has no NUL and decodes other bytes so; no absolute path to write to."""
    return data.replace(b"\0", b"").lstrip(b"/").decode("utf-8", "surrogateescape")


@st.composite
def _command_lines(draw: st.DrawFn) -> Case:
    words = list(draw(st.sampled_from(COMMANDS)))
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 3)))):
        place = draw(st.integers(0, len(words)))
        flag, text = draw(st.sampled_from(FLAGS)), _text(draw(documents(*TEXTS)))
        new, replaced = draw(
            st.sampled_from((([flag, text], 0), ([f"{flag}={text}"], 0), ([flag], 0), ([text], 1), ([], 1)))
        )
        words[place : place + replaced] = new
    command = words[0] if words else ""
    if (command in STARTS_A_SERVER or command not in TUNE_COMMANDS) and "--resume" not in words:
        words += REMOTE
    several = len(words) if command in ("report", "plan", "emit", "batch") else FAULTS_OF_A_DOCUMENT
    return CommandCase(tuple(words), valid=_valid(), most_lines=several)


@st.composite
def _model_names(draw: st.DrawFn) -> Case:
    name = _text(draw(documents(*NAMES)))
    command = draw(
        st.sampled_from(
            (
                (name, *REMOTE),
                ("--model-repository", "models", *REMOTE, name),
                ("models/m", f"--variants={name}", *REMOTE),
                ("models/m", f"--concurrent-models={name}", *REMOTE),
                ("models/m", f"--bls-composing-models={name}", *REMOTE),
                ("plan", "--rate", "10/s", name),
                ("report", "--format", "csv", name),
                ("explain", name),
                ("emit", name),
                ("compare", name, "run"),
                ("runs", name, "--results", ".."),
                ("runs", "--delete", name, "--yes"),
                ("init", name),
                ("init", "--out", f"{name}.yaml", "models/m"),
                ("cache", "--clean", name, "--yes"),
                ("verify", name),
                ("--resume", name),
                ("--from-model-analyzer", "ma.yaml", "--print-profile", name),
                (*REPLAY, "random", name),
            )
        )
    )
    return CommandCase(command, valid=_valid(), most_lines=FAULTS_OF_A_DOCUMENT if name.endswith("yaml") else 2)


@st.composite
def _repositories(draw: st.DrawFn) -> Case:
    ensemble = draw(st.booleans())
    files: dict[str, bytes | str] = {"models/m/config.pbtxt": draw(documents(ENSEMBLE if ensemble else CONFIG))}
    version = draw(st.sampled_from(("1", "1", "1", "2", "0", "-1", "x", "01", "9" * 30, "")))
    models: tuple[bytes | str, ...] = (_onnx(), _onnx(), b"", b"model.onnx", "config.pbtxt", ".", "model.onnx")
    model = draw(st.sampled_from(models))
    for name in ("n", "o") if ensemble else ("m",):
        files[f"models/{name}/{version}/model.onnx"] = model
        files.setdefault(f"models/{name}/config.pbtxt", CONFIG.replace(b'"m"', f'"{name}"'.encode()))
    words = draw(st.sampled_from((("models/m",), ("--model-repository", "models", "m"))))
    command = draw(st.sampled_from(((*words, *REMOTE), (*words, *REMOTE), ("init", *words))))
    return CommandCase((*command, "--sla-p95", "20ms"), files)


@st.composite
def _profiles(draw: st.DrawFn) -> Case:
    words = draw(st.sampled_from((("p.yaml", *REMOTE), ("p.yaml", *REMOTE), ("init", "--out", "-", "p.yaml"))))
    return CommandCase(words, {"p.yaml": draw(documents(PROFILE, STORED))}, _valid(), FAULTS_OF_A_DOCUMENT)


def _onnx_files(content: bytes) -> Case:
    return CommandCase(("model.onnx", "--sla-p95", "20ms", *REMOTE), {"model.onnx": content}, {"w.bin": bytes(16)})


@st.composite
def _input_data(draw: st.DrawFn) -> Case:
    valid = {
        "d.json": SAMPLES_JSON,
        "d.csv": SAMPLES_CSV,
        "d.npz": _npz(),
        "d/ids": b"4",
        **({"d.parquet": _parquet()} if _parquet() else {}),
    }
    name = draw(st.sampled_from((*valid, "d.npy")))
    given: Files = {
        "models/d/config.pbtxt": SAMPLES_CONFIG,
        "models/d/1/model.py": b"",
        "models/m/1/model.onnx": _onnx(),
    }
    given = {**given, "models/m/config.pbtxt": CONFIG}
    files = {name: draw(documents(_npy() if name == "d.npy" else valid[name]))}
    if name == "d/ids":
        given = {**given, "d/x": bytes(8), "d/s": b"text"}
    model = "models/m" if name == "d.npy" else "models/d"
    return CommandCase((model, "--input-data", name.partition("/")[0], "--sla-p95", "20ms", *REMOTE), files, given)


@cache
def _parquet() -> bytes:
    """Return samples in Parquet; empty if pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow.parquet import write_table
    except ImportError:
        return b""
    content = io.BytesIO()
    write_table(pyarrow.table({"x": [[1.0, 2.0]] * 2, "s": ["a", "b"], "ids": [[1], [2, 3]]}), content)
    return content.getvalue()


@st.composite
def _run_folders(draw: st.DrawFn) -> Case:
    words = draw(st.sampled_from(RUN_COMMANDS))
    name = draw(st.sampled_from(sorted(_run())))
    content = _run()[name]
    assert isinstance(content, bytes)
    return CommandCase(words, {name: draw(documents(content))}, _valid(), most_lines=2)


@st.composite
def _tables(draw: st.DrawFn) -> Case:
    content = draw(documents(FIVE_COLUMNS, TABLE))
    words = draw(
        st.sampled_from(((*REPLAY, "random", "t.csv"), (*REPLAY, "simulated", "--warm-start", "t.csv", "table.csv")))
    )
    return CommandCase(words, {"t.csv": content}, {"table.csv": TABLE}, most_lines=3)


def _model_analyzer(content: bytes) -> Case:
    words = ("--from-model-analyzer", "ma.yaml", "--print-profile")
    return CommandCase(words, {"ma.yaml": content}, _valid(), FAULTS_OF_A_DOCUMENT)


def _suites(content: bytes) -> Case:
    return CommandCase(("batch", "suite.yaml"), {"suite.yaml": content}, _valid(), FAULTS_OF_A_DOCUMENT)


def _traces(content: bytes) -> Case:
    return CommandCase(("plan", "run", "--gpus", "2", "--trace", "trace.csv"), {"trace.csv": content}, _valid())


def _read_config(content: bytes) -> None:
    """Read a config.pbtxt, and write it so that it is read as the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.pbtxt"
        path.write_bytes(content)
        config = model_config.with_explicit_counts(model_config.read(path), gpu=False)
        text = model_config.to_text(config)
        assert all(line.isprintable() for line in text.split("\n"))
        path.write_text(text)
        assert str(model_config.read(path)) == str(config)  # as text, because NaN does not equal NaN
    json.loads(model_config.to_override_json(config))
    model_config.candidate_of(config)


def _read_perf_csv(content: bytes) -> None:
    read = perf_output.read_csv(content.decode(errors="replace"))
    assert all(math.isfinite(value) for value in asdict(read).values() if isinstance(value, float))


def _read_perf_output(content: bytes) -> None:
    text = content.decode(errors="replace")
    measurement_windows.describe_instability(perf_output.read_windows(text))
    perf_output.read_request_count(text)
    perf_output.read_average_ms(text)


READER_CASES = (
    documents(CONFIG, ENSEMBLE).map(lambda content: ReaderCase(_read_config, content))
    | documents(PERF_CSV).map(lambda content: ReaderCase(_read_perf_csv, content, MeasurementError))
    | documents(PERF_OUTPUT).map(lambda content: ReaderCase(_read_perf_output, content, MeasurementError))
)
SECTIONS: Mapping[str, st.SearchStrategy[Case]] = {
    "command line": _command_lines(),
    "model names": _model_names(),
    "profiles": _profiles(),
    "repositories": _repositories(),
    "ONNX files": st.deferred(lambda: documents(_onnx(), _onnx_with_external_weights())).map(_onnx_files),
    "input data": _input_data(),
    "run folders": _run_folders(),
    "recorded tables": _tables(),
    "Model Analyzer's files": documents(MODEL_ANALYZER, MODEL_ANALYZER_QUICK).map(_model_analyzer),
    "suites": documents(SUITE).map(_suites),
    "traces": documents(TRACE).map(_traces),
    "config.pbtxt and perf_analyzer's output": READER_CASES,
}
