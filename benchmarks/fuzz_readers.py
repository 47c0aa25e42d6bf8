"""Every reader of what somebody else wrote, on mutations of valid documents and on plain noise.

    python benchmarks/fuzz_readers.py [--cases 10000] [--seed 0] [--reader NAME ...] > benchmarks/fuzz_readers.md

Whatever it is given, a reader returns a value or raises its own error: printable lines, nothing printed besides, no
warning, within MOST_SECONDS. The first input that breaks this is printed as small as it can be made; exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import shlex
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from objectives.metrics import Measurement
from objectives.sla import parse_bytes, parse_duration_ms, parse_rate
from optimizer import model_config
from optimizer.arguments.run import read_run_arguments
from optimizer.batcher.observations import observation
from optimizer.errors import BadInputError, MeasurementError
from optimizer.load import perf_output, windows
from optimizer.machine.hardware import detect
from optimizer.model_analyzer.profile import profile_text
from optimizer.model_analyzer.reader import read_model_analyzer
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.profile.reader import load_profile, parse_profile
from optimizer.replay.recording import read_recording
from optimizer.replay.source import fitting, read_source
from optimizer.report import words
from optimizer.requests import columns, data, recorded, sizes
from optimizer.requests.data import Tensor
from optimizer.search.figures import is_known, log_figures
from optimizer.search.in_flight import in_flight
from optimizer.sources.repository import read_repository_model
from optimizer.space import Space
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, LoadPoint, Trial, latest_points
from optimizer.untrusted import one_line

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 2.0
MOST_LINES = 11  # a profile tells ten faults, and how many more there are
MOST_CHARACTERS = 1000  # of a line
SILENT = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # as Python has it

PROFILE = b"""\
description: a model
model: {builder: mlp, settings: {input_width: 64, layers: 2}}
sla:
  p95: 20ms
request: {batch_size: 4, input_data: data.json, shapes: {x: [128]}}
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
STORED = b"model:\n  repository: models\n  name: m\nsla: {p99: 0.05s}\n"
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
RECORD = json.dumps(
    {
        "options": asdict(RunOptions("mlp", {"p95": 10.0}, max_trials=5, storage="sqlite:///x.db")),
        "started_in": "../..",
    },
    indent=1,
).encode()
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
x[0],x[1],s,ids,label
1,2.5,some text,"[1, 2, 3]",0
-3e2,nan,"a, b",[4],1
"""
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


@dataclass(frozen=True)
class Reader:
    """``read`` gets an input and a folder that it may write into; it raises ``error`` for what is wrong with it."""

    name: str
    inputs: st.SearchStrategy[Any]
    read: Callable[[Any, Path], object]
    error: type[Exception] = BadInputError


def noise(most: int = 200) -> st.SearchStrategy[bytes]:
    texts = st.text(st.characters(), max_size=most).map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.binary(max_size=most) | texts | st.lists(st.sampled_from(HOSTILE), max_size=6).map(b"".join)


@st.composite
def documents(draw: st.DrawFn, *valid: bytes) -> bytes:
    """One of ``valid`` with a word or a few bytes replaced, a line doubled, dropped or moved; of ten one is noise."""
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


# -- readers ----------------------------------------------------------------------------------------------------


def _profile(data: bytes, folder: Path) -> None:
    profile = load_profile(_written(folder / "p.yaml", data))
    profile.for_hardware(gpu=True)


def _model_analyzer(data: bytes, folder: Path) -> None:
    _written(folder / "models/m/1/model.onnx", _onnx())
    mapped = read_model_analyzer(_written(folder / "ma.yaml", data), None)
    assert all(str(note).isprintable() for note in mapped.notes)
    given = read_run_arguments(["--from-model-analyzer", str(folder / "ma.yaml")])
    text = profile_text(mapped, given.options, gpu=True)
    parse_profile(text.encode(), folder / f"{mapped.model}.yaml")


def _table(data: bytes, folder: Path) -> None:
    for row in read_recording(_written(folder / "t.csv", data)).rows:
        assert words.configuration(row.candidate).isprintable()


def _config(data: bytes, folder: Path) -> None:
    path = folder / "config.pbtxt"
    config = model_config.explicit(model_config.read(_written(path, data)), gpu=False)
    text = model_config.to_text(config)
    assert all(line.isprintable() for line in text.split("\n"))
    assert str(model_config.read(_written(path, text.encode()))) == str(config)  # as text: NaN is no equal of NaN
    json.loads(model_config.to_override_json(config))
    model_config.candidate_of(config)


def _repository(data: bytes, folder: Path) -> None:
    _written(folder / "models/m/config.pbtxt", b'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n')
    _written(folder / "models/m/1/model.onnx", data)
    read_repository_model(folder / "models", "m", gpu=False)


def _bound(given: tuple[Callable[[str], float], str], folder: Path) -> None:
    parse, text = given
    assert 0 < parse(text) < float("inf")


def _options(given: tuple[str, str], folder: Path) -> None:
    flag, text = given
    read_run_arguments([f"{flag}={text}", "m"])


def _record(data: bytes, folder: Path) -> None:
    _written(folder / "run/run.json", data)
    read_run_arguments(["--resume", str(folder / "run")])


def _trials(data: bytes, folder: Path) -> None:
    for trial in TrialsTable(_written(folder / "trials.csv", data), "m", {"threads": ("1", "2")}).read():
        assert one_line(trial.reason) == trial.reason


def _another_study(data: bytes, folder: Path) -> None:
    path = _written(folder / "another.csv", data)
    elsewhere, notes = fitting(read_source(str(path), "", 4), STUDIED, ())
    assert all(note.isprintable() for note in notes)
    for point in in_flight(latest_points(elsewhere.trials), STUDIED):
        observation(point)
        assert not is_known(point, "latency-p95") or np.isfinite(log_figures(point, "latency-p95")).all()
    assert all(STUDIED.space.values_of(candidate) for candidate in elsewhere.best(STUDIED))


def _perf_csv(data: bytes, folder: Path) -> None:
    read = perf_output.read_csv(data.decode(errors="replace"))
    assert all(math.isfinite(value) for value in asdict(read).values() if isinstance(value, float))


def _perf_output(data: bytes, folder: Path) -> None:
    text = data.decode(errors="replace")
    windows.instability(perf_output.read_windows(text))
    perf_output.read_request_count(text)
    perf_output.read_average_ms(text)


def _trials_table() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        table = TrialsTable(Path(folder) / "trials.csv", "m", {"threads": ("1", "2")})
        trial = Trial(0, Candidate(8, True, 500, (4, 8), 2, (("threads", "1"),)), deploy_seconds=1.0)
        table.append(trial, LoadPoint(4, 8), Measurement(400.5, latency_p95_ms=2.5, batch_stats="4:10:2000"))
        table.append(trial, LoadPoint(4, 16), Measurement(reason="the server died"))
        table.append_failure(Trial(1, Candidate(16, fields=(("threads", "2"),)), status="failed", reason="crashed"))
        return table.path.read_bytes()


STUDIED = Problem("m", Space((4, 8, 16), ("off", 500), ("none", "max/2"), (1, 2), {"threads": ("1", "2")}, 4), 4, 64)


@cache
def _onnx() -> bytes:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "test", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])  # that each runtime knows
    model.ir_version = 8
    return bytes(model.SerializeToString())


INPUTS = (Tensor("x", "FP32", (2,), True), Tensor("s", "BYTES", (1,), True), Tensor("ids", "INT64", (-1,), True))


def _samples(read: Callable[..., list[recorded.Sample]], name: str) -> Callable[[bytes, Path], None]:
    def reader(content: bytes, folder: Path) -> None:
        for sample in read(_written(folder / name, content), INPUTS, frozenset({"ids"})):
            for tensor in INPUTS[: len(sample)]:
                assert data.compatible(sample[tensor.name].shape, tensor.shape)
                assert sample[tensor.name].dtype == tensor.dtype

    return reader


def _one_input(content: bytes, folder: Path) -> None:
    recorded.read_npy_samples(_written(folder / "d.npy", content), INPUTS[2:], frozenset())


def _folder(content: bytes, folder: Path) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    for name, size in (("x", 8), ("s", len(content)), ("ids", len(content))):
        _written(folder / "samples" / name, content[:size])
    recorded.read_folder(folder / "samples", INPUTS, frozenset())


def _sizes(text: str, folder: Path) -> None:
    shape = sizes.parse_shape(text)
    assert all(1 <= size <= sizes.LARGEST_SIZE for one in shape.draw(8, np.random.default_rng(0)) for size in one)


def _npz() -> bytes:
    content = io.BytesIO()
    np.savez(content, x=np.zeros((2, 2)), s=np.array(["a", "b"]), ids=np.arange(6).reshape(2, 3))
    return content.getvalue()


def _npy() -> bytes:
    content = io.BytesIO()
    np.save(content, np.arange(6).reshape(2, 3))
    return content.getvalue()


def _parquet() -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    content = io.BytesIO()
    write_table(pyarrow.table({"x": [[1.0, 2.0]] * 2, "s": ["a", "b"], "ids": [[1], [2, 3]]}), content)
    return content.getvalue()


def _texts() -> st.SearchStrategy[str]:
    return documents(*BOUNDS).map(lambda data: data.decode("utf-8", "surrogateescape"))  # as in sys.argv


PARSERS = (parse_duration_ms, parse_bytes, lambda text: parse_rate(text, 4))
FLAGS = (
    "--sla-p95",
    "--min-throughput",
    "--max-memory",
    "--budget",
    "--measurement-interval",
    "--seed",
    "--objective",
    "--shape",
    "--input-range",
)
SHAPES = (b"ids:16..128", b"a,b:16*3|128*0.5,7", b"x:0:1,2,3")
PARQUET = _samples(columns.read_parquet_samples, "d.parquet")
READERS = (
    Reader("profile", documents(PROFILE, STORED), _profile),
    Reader("Model Analyzer's file", documents(MODEL_ANALYZER, MODEL_ANALYZER_QUICK), _model_analyzer),
    Reader("SLA", st.tuples(st.sampled_from(PARSERS), _texts()), _bound, ValueError),
    Reader("table", documents(TABLE, FIVE_COLUMNS), _table),
    Reader("config.pbtxt", documents(CONFIG), _config),
    Reader("command line", st.tuples(st.sampled_from(FLAGS), _texts()), _options),
    Reader("run.json", documents(RECORD), _record),
    Reader("another machine's study", st.deferred(lambda: documents(_trials_table(), TABLE)), _another_study),
    Reader("trials.csv", st.deferred(lambda: documents(_trials_table())), _trials),
    Reader("perf_analyzer's CSV", documents(PERF_CSV), _perf_csv, MeasurementError),
    Reader("perf_analyzer's output", documents(PERF_OUTPUT), _perf_output, MeasurementError),
    Reader("samples in CSV", documents(SAMPLES_CSV), _samples(columns.read_csv_samples, "d.csv")),
    Reader("samples in .npz", st.deferred(lambda: documents(_npz())), _samples(recorded.read_npz_samples, "d.npz")),
    Reader("samples in .npy", st.deferred(lambda: documents(_npy())), _one_input),
    Reader("samples in Parquet", st.deferred(lambda: documents(_parquet())), PARQUET),
    Reader("samples in a folder", documents(bytes(8), b"text of 16 bytes"), _folder),
    Reader("shape", documents(*SHAPES).map(lambda b: b.decode("utf-8", "surrogateescape")), _sizes, ValueError),
    Reader("ONNX model", st.deferred(lambda: documents(_onnx())), _repository),
)


def prepared(folder: Path) -> Path:
    """What the documents name is there."""
    (folder / "models/m/1").mkdir(parents=True)
    _written(folder / "models/m/config.pbtxt", CONFIG)
    _written(folder / "data.json", b"{}")
    (folder / "run").mkdir()
    return folder


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- the property -----------------------------------------------------------------------------------------------


def check(reader: Reader, given: Any, folder: Path) -> tuple[str, float]:
    """``valid`` or ``refused``, and the seconds it took. Raises AssertionError, or what the reader should not."""
    printed = io.StringIO()
    refusal: Exception | None = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in SILENT:
            warnings.simplefilter("ignore", kind)
        started = time.perf_counter()
        try:
            reader.read(given, folder)
        except reader.error as error:
            refusal = error
        seconds = time.perf_counter() - started
    assert printed.getvalue() == ""
    assert seconds <= MOST_SECONDS, f"took {seconds:.1f} s"
    if refusal is None:
        return "valid", seconds
    assert type(refusal) is reader.error, f"not a {reader.error.__name__}: {refusal!r}"
    lines = str(refusal).split("\n")
    assert len(lines) <= MOST_LINES, lines
    for line in lines:
        assert line.strip(), lines
        assert line.isprintable(), line
        assert len(line) <= MOST_CHARACTERS, line
    return "refused", seconds


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0


def fuzz(reader: Reader, cases: int, of_seed: int, folder: Path) -> Tally:
    """So many inputs, the same ones for the same seed. Raises as ``check`` does for the first that fails."""
    tally = Tally()

    @seed(of_seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(reader.inputs)
    def every_input(given: Any) -> None:
        verdict, seconds = check(reader, given, folder)
        tally.counts[verdict] += 1
        tally.slowest_seconds = max(tally.slowest_seconds, seconds)

    every_input()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="for each reader (10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=[reader.name for reader in READERS], help="all")
    asked = parser.parse_args()
    print("# Readers on hostile input, as last run\n")
    print(f"`{shlex.join(['python', 'benchmarks/fuzz_readers.py', *sys.argv[1:]])}`\n")
    print("Each input gives a value or one clean error: printable lines, no other exception, nothing printed, no")
    print(f"warning, at most {MOST_SECONDS:g} s.\n")
    print("| reader | cases | valid | clean errors | slowest ms |\n| --- | --: | --: | --: | --: |", flush=True)
    code = 0
    for reader in READERS:
        if asked.reader and reader.name not in asked.reader:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                tally = fuzz(reader, asked.cases, asked.seed, prepared(Path(folder)))
            except Exception as error:
                notes = "; ".join(getattr(error, "__notes__", []))
                print(f"{reader.name}: {type(error).__name__}: {error}\n{notes}", file=sys.stderr)
                print(f"| {reader.name} | **failed** | | | |", flush=True)
                code = 1
                continue
        valid, refused = tally.counts["valid"], tally.counts["refused"]
        slowest = f"{1000 * tally.slowest_seconds:.0f}"
        print(f"| {reader.name} | {valid + refused:,} | {valid:,} | {refused:,} | {slowest} |", flush=True)
    print(f"\n{detect()}; {time.strftime('%Y-%m-%d')}")
    return code


if __name__ == "__main__":
    sys.exit(main())
