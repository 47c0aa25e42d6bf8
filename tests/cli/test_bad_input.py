"""Bad input gives exit code 2 and one line with the value, its place and the allowed values; nothing is started.

The command gets a cache that is empty and a pip that finds nothing: whatever needed the server, or built a
model, would end with exit code 3 and leave the cache folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto

from optimizer.machine import hardware
from optimizer.model.builders.onnx_graph import Graph
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import SCHEMA_VERSION
from tests.command_fixtures import TUNE, Ended, Playground, Tune
from tests.repositories import doubler, serialized, write_model

CONFIG = """\
platform: "onnxruntime_onnx"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
LONG = "x" * 5000
SECRET = "geheim"
CA_FLAG = "--ssl-grpc-root-certifications-file"


@dataclass(frozen=True)
class Bad:
    """A command in a folder with ``files``; stderr has a line with the words of each element of ``lines``."""

    arguments: str
    lines: tuple[tuple[str, ...], ...]
    files: dict[str, str] = field(default_factory=dict)

    def write_files(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text)

    def __str__(self) -> str:
        return " ".join([*self.arguments.split(), *(repr(text)[1:40] for text in self.files.values())])[:70]


def bad(arguments: str, *words: str, **files: str) -> Bad:
    return Bad(arguments, (words,), files)


def profile(text: str, *lines: tuple[str, ...]) -> Bad:
    return Bad("p.yaml", lines, {"p.yaml": text})


FLAGS = [
    bad("--sla-p95 20 mlp", "--sla-p95 20: ", "20ms?"),
    bad("--sla-p95 -20ms mlp", "--sla-p95 -20ms: ", "positive", "20ms"),
    bad("--sla-p95=-20ms mlp", "--sla-p95 -20ms: ", "positive", "20ms"),
    bad("--sla-p99 -20 mlp", "--sla-p99 -20: ", "positive", "20ms"),
    bad("--sla-avg 0ms mlp", "--sla-avg 0ms: ", "greater than zero", "20ms"),
    bad("--sla-p50 0 mlp", "--sla-p50 0: ", "greater than zero", "20ms"),
    bad("--sla-p90 soon mlp", "--sla-p90 soon: ", "20ms, 0.02s or 500us"),
    bad("--sla-p95= mlp", "--sla-p95 '': ", "20ms"),
    bad("--sla-p95 nanms mlp", "--sla-p95 nanms: ", "20ms"),
    bad("--sla-p95", "--sla-p95", "expected one argument"),
    bad("--slap95 20ms mlp", "--slap95 is not an option", "did you mean --sla-p95?", "tune run --help-all"),
    bad("--sla-p100 20ms mlp", "--sla-p100 20ms: ", "above 0 and below 100", "p99.9"),
    bad("--sla-p0=20ms mlp", "--sla-p0 20ms: ", "above 0 and below 100", "p99.9"),
    bad("--sla-p99.9 soon mlp", "--sla-p99.9 soon: ", "20ms, 0.02s or 500us"),
    bad("--sla-p99.9 mlp --sla-p99.5", "--sla-p99.5", "expected one argument"),
    bad("--sla-pinf 20ms mlp", "--sla-pinf is not an option", "did you mean --sla-p"),
    bad("--sla p99.9 mlp", "--sla p99.9: ", "write METRIC<=TIME", "p99.9<=30ms"),
    bad("--sla p95<=20ms,p99<=30ms mlp", "give an option for each bound", "--sla 'p95<=20ms' --sla 'p99<=30ms'"),
    bad("--sla max<=20ms mlp", "--sla max<=20ms: ", "not avg or a percentile"),
    bad("--sla-p99 20ms --sla p99<=30ms mlp", "--sla: p99 has two bounds", "one of them"),
    bad("--max-error-rate 0% mlp", "--max-error-rate 0%: ", "above 0% and below 100%", "0.1%"),
    bad("--max-error-rate 0.1 mlp", "--max-error-rate 0.1: ", "write a percentage", "0.1%"),
    bad("--max-error-rate 100% mlp", "--max-error-rate 100%: ", "below 100%"),
    bad("--search simulated --objective energy mlp", "--search simulated", "goodput", "tpe"),
    bad("--budget 0 mlp", "--budget 0: ", "greater than zero", "5m"),
    bad("--budget 0s mlp", "--budget 0s: ", "greater than zero", "5m"),
    bad("--budget -5m mlp", "--budget -5m: ", "positive", "5m"),
    bad("--budget 5 mlp", "--budget 5: ", "a unit is missing: 5m?"),
    bad("--budget long mlp", "--budget long: ", "5m, 90s"),
    bad("--max-trials 0 mlp", "--max-trials 0: ", "from 1 to 2147483647"),
    bad("--max-trials -1 mlp", "--max-trials -1: ", "from 1 to 2147483647"),
    bad("--max-trials 99999999999 mlp", "--max-trials 99999999999: ", "from 1 to 2147483647"),
    bad("--max-trials x mlp", "--max-trials x: ", "whole number"),
    bad("--max-trials 1.5 mlp", "--max-trials 1.5: ", "whole number"),
    bad("--seed x mlp", "--seed x: ", "whole number from 0 to 4294967295"),
    bad("--seed -1 mlp", "--seed -1: ", "whole number from 0 to 4294967295"),
    bad("--seed 4294967296 mlp", "--seed 4294967296: ", "from 0 to 4294967295"),
    bad(f"--seed {'9' * 5000} mlp", "--seed 99", "from 0 to 4294967295"),
    bad("--request-batch-size 0 mlp", "--request-batch-size 0: ", "1 to 2147483647"),
    bad("--request-batch-size 2147483648 mlp", "--request-batch-size 2147483648: ", "1 to 2147483647"),
    bad("--request-batch-size 1e3 mlp", "--request-batch-size 1e3: ", "whole number"),
    bad("--sequence-length 0 accumulator", "--sequence-length 0: ", "1 to 2147483647"),
    bad("--sequence-length 9..3 accumulator", "--sequence-length 9..3: ", "the lower one first"),
    bad("--sequence-length x accumulator", "--sequence-length x: ", "whole number"),
    bad("--shape 16 mlp", "--shape 16: ", "NAME:SIZES", "input_ids:16..128"),
    bad("--shape ids:0 mlp", "--shape ids:0: ", "from 1 to 2147483647"),
    bad("--shape ids:9..3 mlp", "--shape ids:9..3: ", "the lower one first"),
    bad("--input-range ids:9 mlp", "--input-range ids:9: ", "0..30521"),
    bad("--string-length 0 mlp", "--string-length 0: ", "1 to 1048576"),
    bad("--input-data= mlp", "--input-data '': ", "random, zero"),
    bad("--out= mlp", "--out '': ", "write a path"),
    bad("explain run --results=", "--results '': ", "write a path"),
    bad("plan run --results=", "--results '': ", "write a path"),
    bad("report run --out=", "--out '': ", "write a path"),
    bad("emit run --out=", "--out '': ", "write a path"),
    bad("compare run run --results=", "--results '': ", "write a path"),
    bad("batch suite.yaml --out=", "--out '': ", "write a path"),
    bad("report run --results=", "--results '': ", "write a path"),
    bad("--model-repository= m", "--model-repository '': ", "write a path"),
    bad("--load rate --request-distribution= mlp", "--request-distribution '': ", "poisson, constant"),
    bad("--load rate --request-intervals= mlp", "--request-intervals '': ", "a file of intervals"),
    bad("--load rate --request-intervals poisson mlp", "--request-intervals poisson: ", "--request-distribution"),
    bad(
        "--load rate --request-distribution constant --request-intervals i.txt mlp",
        "--request-distribution and --request-intervals both set",
        "give one of them",
    ),
    bad("--load rate --request-distribution spike:4 mlp", "--request-distribution spike:4: ", "spike:4x:10%:1s"),
    bad("--load rate --request-distribution wave mlp", "--request-distribution wave: ", "spike, ramp, diurnal"),
    bad("--load rate --request-intervals t.csv mlp", "--request-intervals t.csv: ", "--request-trace"),
    bad("--load rate --request-trace t.txt mlp", "--request-trace t.txt: ", "ends in .csv"),
    bad("--load rate --request-trace t.csv mlp", "t.csv: ", "cannot be read"),
    bad("--load rate --request-trace t.csv mlp", "t.csv:2: ", "'x' is not a number", **{"t.csv": "time_s\nx\n"}),
    bad(
        "--load rate --request-batch-size 2 --request-trace t.csv mlp",
        "--request-batch-size 2: t.csv has the size of each request",
        **{"t.csv": "time_s,batch_size\n1,1\n2,2\n"},
    ),
    bad("--request-trace t.csv mlp", "--request-trace t.csv", "--load rate"),
    bad("--storage= mlp", "--storage '': ", "./study.journal", "sqlite:///study.db"),
    bad("--storage bogus mlp", "--storage bogus: ", "./bogus.journal", "sqlite:///study.db"),
    bad("--variants mlp mlp", "--variants mlp: ", "the tuned model itself", "leave it out"),
    bad("--concurrent-models mlp mlp", "--concurrent-models mlp: ", "the tuned model itself", "leave it out"),
    bad("--min-throughput much mlp", "--min-throughput much: ", "4000/s", "500req/s"),
    bad("--max-memory 4 mlp", "--max-memory 4: ", "4GiB"),
    bad("--load fast mlp", "--load fast: ", "concurrency, rate"),
    bad("--request-distribution constant mlp", "--request-distribution constant", "--load rate"),
    bad("--request-intervals i.txt mlp", "--request-intervals i.txt", "--load rate"),
    bad("--load rate --protocol http mlp", "--load rate", "gRPC"),
    bad("--min-score high mlp", "--min-score high: ", "0.9"),
    bad("--confidence 99.99999% mlp", "--confidence 99.99999%: ", "99%", "from 80% to 99.99%"),
    bad("--confidence sure mlp", "--confidence sure: ", "99%"),
    bad("--min-score nan mlp", "--min-score nan: ", "0.9"),
    bad("--server-cpus 8191 mlp", "--server-cpus 8191: ", "cannot be used here"),
    bad("--client-cpus some mlp", "--client-cpus some: ", "0-3"),
    bad("verify", "RUN"),
    bad("sweep --concurrency 0 mlp", "--concurrency 0: ", "1,2,4 or start:end:step"),
    bad("sweep --sla-p95 5ms mlp", "--sla-p95: ", "leave it out"),
    bad("sweep nosuch", "no model 'nosuch'"),
    bad("verify nowhere", "RUN nowhere: ", "run.json"),
    bad("verify --budget 3 nowhere", "--budget 3: ", "a unit is missing: 3m?"),
    bad("--objective speed mlp", "--objective speed: ", "throughput, ", "memory, energy"),
    bad("--objective throughput,throughput mlp", "--objective throughput,throughput: ", "each once"),
    bad("--objective= mlp", "--objective '': ", "throughput, "),
    bad("--search best mlp", "--search best: ", "tpe, ", "grid"),
    bad(
        "--objective memory --search simulated mlp",
        "--search simulated ranks by throughput or goodput; with --objective memory take tpe, nsga2, random, grid",
    ),
    bad("--target moon mlp", "--target moon: ", "embedded, "),
    bad("--target local --tritonserver ./no mlp", "--tritonserver", "/no", "no such file"),
    bad("--target local --tritonserver mine mlp", "--tritonserver mine", "no such program", "whole path", mine=""),
    bad("--target local --tritonserver ./mine mlp", "--tritonserver", "/mine", "chmod +x", mine=""),
    bad("--url triton:8001 mlp", "--url triton:8001", "works only with --target remote"),
    bad("--target remote --header a:$NOT_THERE mlp", "--header a", "$NOT_THERE is not set", "export it"),
    bad(f"--target remote --url grpcs://h:1 {CA_FLAG} no.pem mlp", f"{CA_FLAG} no.pem", "no such file"),
    bad(f"--target remote {CA_FLAG} no.pem mlp", CA_FLAG, "is not encrypted", "grpcs://"),
    bad(f"--target remote {CA_FLAG}=-- mlp", f"{CA_FLAG} --: ", "write a value"),
    bad("--sla-p95 -- mlp", "--sla-p95 --: ", "only marks the end of the options", "write a value"),
    bad("--measurement-interval 5 mlp", "--measurement-interval 5: ", "5ms?"),
    bad("--measurement-interval 1h mlp", "--measurement-interval 1h: ", "50ms to 15s"),
    bad("--protocol tcp mlp", "--protocol tcp: ", "grpc, http"),
    bad("--frob mlp", "--frob", "tune run --help-all"),
    bad("--results there mlp", "--results is not an option of `tune run`", "did you mean --out?"),
    bad("--sla 20ms mlp", "--sla 20ms: ", "write METRIC<=TIME", "p99.9<=30ms"),
    bad("", "MODEL is missing", "tune models"),
    bad("run", "MODEL is missing", "tune models"),
    bad("mlp dlrm", "dlrm", "tune run --help-all"),
    bad("models mlp", "mlp", "tune models --help"),
    bad("doctor --now", "--now", "tune doctor --help"),
    bad("setup --now", "--now", "tune setup --help"),
]

NAMES = [
    bad("dlrn", "'dlrn'", "did you mean dlrm?", "tune models"),
    bad("run dlrn", "'dlrn'", "did you mean dlrm?"),
    bad("dlmr --sla-p95 20ms", "'dlmr'", "did you mean dlrm?"),
    bad("reprot run", "'reprot'", "did you mean `tune report`?", "tune --help"),
    bad("optimise", "'optimise'", "tune models"),
    bad(LONG, "xxx", "tune models"),
    bad("../mlp", "../mlp: no such file or folder", "the folder of a Triton model", "tune models"),
    bad("./notes.txt", "./notes.txt: is no profile, ONNX file or model folder", "tune models", **{"notes.txt": ""}),
    bad("no.yaml", "no.yaml: ", "no such file"),
    bad("--request-batch-size 64 mlp", "--request-batch-size 64 ", "mlp.yaml", "(8, 32)"),
    bad("--out file/results mlp", "file/results", "Not a directory", "--out", file="text"),
    bad("--out file mlp", "results folder file", "Not a directory", "--out", file="text"),
    bad("--out /proc/tritune mlp", "/proc/tritune", "cannot write there", "--out"),
    bad(f"--out {LONG} mlp", "xxx", "File name too long", "--out"),
]

STORAGES = [
    bad("--storage nosuch://host/db mlp", "--storage nosuch://host/db: ", "sqlite, postgresql or mysql"),
    bad("--storage :// mlp", "--storage ://: ", "Could not parse"),
    bad("--storage postgresql:/u:geheim@host/db mlp", "--storage postgresql:", "sqlite:///study.db"),
    bad("--storage sqlite:///none/study.db mlp", "--storage sqlite:///none/study.db: ", "unable to open"),
    bad("--storage oracle://u:geheim@host/db mlp", "--storage oracle://u:***@host/db: ", "driver"),
    bad("--storage nosuch://u:gehe/im@geheim@host/db mlp", "nosuch://u:***@host/db", "sqlite"),
    bad("--storage nosuch://u@host/db?password=geheim mlp", "u@host/db?password=***", "sqlite"),
    bad("--storage postgresql://u:geheim@127.0.0.1:1/db mlp", "--storage postgresql://u:***@127.0.0.1:1/db: "),
    bad("--storage file/study mlp", "--storage file/study: ", "cannot be opened", file="text"),
]

PROFILES = [
    profile("", ("p.yaml: ", "empty", "model:")),
    profile("- mlp\n", ("p.yaml:1: ", "model:")),
    profile("model: {builder: mlp\n", ("p.yaml:2:1: ", "expected ',' or '}'")),
    profile("model:\n\tbuilder: mlp\n", ("p.yaml:2:1: ", "cannot start any token")),
    profile("model: {builder: mlp}\nslo: {p95: 20ms}\n", ("p.yaml:2: slo: ", "did you mean sla?")),
    profile("model: {builder: mlp}\nsla:\n  pp9: 20ms\n", ("p.yaml:3: sla.pp9: ", "did you mean p")),
    profile("model: {builder: mlp}\nsla:\n  p100: 20ms\n", ("p.yaml:3: sla.p100: ", "above 0 and below 100")),
    profile("model: {builder: mlp}\nsla: {p99.9: 30}\n", ("p.yaml:2: sla.p99.9: ", "30ms?")),
    profile("model: {builder: mlp, settings: {layer: 2}}\n", ("p.yaml:1: ", "layer", "did you mean layers?")),
    profile("model: {builder: mpl}\n", ("p.yaml:1: model.builder: ", "'mpl'", "did you mean mlp?")),
    profile("model: {builder: mlp}\nmodel: {builder: mlp}\n", ("p.yaml:2: model: ", "twice", "line 1")),
    profile("model: {builder: mlp}\nsla: {p95: 20}\n", ("p.yaml:2: sla.p95: ", "20ms?")),
    profile("model: {builder: mlp}\nsla: {p95: -20ms}\n", ("p.yaml:2: sla.p95: ", "'-20ms'", "positive")),
    profile("model: {builder: mlp}\nspace: {max_batch_size: 8}\n", ("p.yaml:2: space.max_batch_size: ", "[8]")),
    profile(
        "model: {builder: mlp}\nrequest:\n  batch_size: many\nload:\n  max_concurrency: 0\n",
        ("p.yaml:3: request.batch_size: ", "'many'", "whole number"),
        ("p.yaml:5: load.max_concurrency: ", "0 ", "at least 1"),
    ),
    profile(
        "model: {builder: accumulator}\nrequest: {sequence_length: 0}\n",
        ("p.yaml:2: request.sequence_length: ", "0 is not at least 1"),
    ),
    profile(
        "model: {builder: mlp}\nspace:\n  config:\n    dynamic_batching.priority: [1]\n",
        ("p.yaml:4: space.config.dynamic_batching.priority: ", "priority_levels"),
    ),
    profile(
        "model: {builder: mlp}\nrequest: {batch_size: 9}\nspace: {max_batch_size: [4, 8]}\n",
        ("p.yaml:2: request.batch_size: ", "9 ", "at most 8"),
    ),
]

ESCAPES = [
    profile("model: {repository: .., name: m}\n", ("p.yaml:1: model.repository: ", "'..'", "leads out")),
    profile("model: {repository: /etc, name: m}\n", ("p.yaml:1: model.repository: ", "'/etc'", "relative")),
    profile("model: {repository: link, name: m}\n", ("p.yaml:1: model.repository: ", "'link'", "leads out")),
    profile("model: {repository: models, name: ../m}\n", ("p.yaml:1: model.name: ", "'../m'", "without folders")),
    profile("model: {repository: models, name: /m}\n", ("p.yaml:1: model.name: ", "'/m'", "without folders")),
    profile("model: {repository: models, name: ..}\n", ("p.yaml:1: model.name: ", "'..'")),
    profile("model: {repository: models, name: out}\n", ("p.yaml:1: model.name: ", "'out'", "leads out")),
    profile(
        "model: {builder: mlp}\nrequest: {input_data: ../secret.json}\n",
        ("p.yaml:2: request.input_data: ", "'../secret.json'", "leads out"),
    ),
    profile(
        "model: {builder: mlp}\nrequest: {input_data: link.json}\n",
        ("p.yaml:2: request.input_data: ", "'link.json'", "leads out"),
    ),
]


TWO = "profile_models: [m, n]\nmodel_repository: models\n"
MODEL_ANALYZER = [
    bad("--from-model-analyzer no.yaml", "no.yaml: ", "cannot be read: No such file"),
    bad("--from-model-analyzer f", "f: has several models; ", "m, n", f=TWO),
    bad("--from-model-analyzer f o", "f: no model 'o' in it; it has m, n", f=TWO),
    bad("--from-model-analyzer f m", "f:2: model_repository: 'models' does not exist ", "--model-repository", f=TWO),
    bad("--from-model-analyzer f m", "f:3: latency-budget: ", "latency_budget?", f=f"{TWO}latency-budget: 5\n"),
    bad("--from-model-analyzer f m", "f:3: concurrency: 'all' is not a whole number", f=f"{TWO}concurrency: all\n"),
    bad("--from-model-analyzer f m", "f:4:1: ", "expected", f=f"{TWO}profile_models: {{\n"),
    bad("--from-model-analyzer f --model-repository no m", "--model-repository no: no such", f="concurrency: 1"),
    bad("--print-profile mlp", "--print-profile ", "--from-model-analyzer FILE"),
]


def tune_without_server(tune: Tune, playground: Playground, *arguments: str) -> Ended:
    """Run the command and assert that it neither prepared a server nor left files."""
    before = entries(playground.here)
    ended = tune(*arguments, env=without_server(playground))
    assert not (playground.root / "cache").exists()
    assert entries(playground.here) == before
    assert ended.stdout == ""
    return ended


def without_server(playground: Playground) -> dict[str, str | Path]:
    """Return an environment in which the server is not installed and cannot be downloaded."""
    return {
        "TRITUNE_CACHE": playground.root / "cache",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": playground.root / "no wheels",
        "PIP_CONFIG_FILE": os.devnull,
    }


def entries(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def assert_says(ended: Ended, *lines: tuple[str, ...], code: int = 2) -> None:
    """Assert that stderr has one line for each of ``lines``, with its words in their order."""
    assert ended.code == code, ended.stderr
    assert len(ended.errors) == len(lines), ended.stderr
    for complaint, words in zip(ended.errors, lines, strict=True):
        assert complaint.startswith("tune: ")
        at = 0
        for word in words:
            assert word in complaint[at:], complaint
            at = complaint.index(word, at) + len(word)


@pytest.mark.parametrize("case", [FLAGS[0], NAMES[0], PROFILES[0]], ids=str)
def test_the_installed_command_reports_bad_input_in_one_line(case: Bad, tune: Tune, playground: Playground) -> None:
    """The command runs in a new process, as users start it."""
    case.write_files(playground.here)
    assert_says(tune_without_server(tune, playground, *case.arguments.split()), *case.lines)


@pytest.mark.parametrize("case", [*FLAGS, *NAMES, *PROFILES], ids=str)
def test_bad_flags_model_names_and_profiles_are_reported(
    case: Bad, called_tune: Tune, playground: Playground
) -> None:
    case.write_files(playground.here)
    assert_says(tune_without_server(called_tune, playground, *case.arguments.split()), *case.lines)


@pytest.mark.parametrize("case", MODEL_ANALYZER, ids=str)
def test_errors_in_a_model_analyzer_file_name_the_line(case: Bad, called_tune: Tune, playground: Playground) -> None:
    case.write_files(playground.here)
    ended = tune_without_server(called_tune, playground, *case.arguments.split(), "--json")
    assert_says(ended, *case.lines)


def test_a_model_analyzer_file_is_printed_as_a_profile(called_tune: Tune, playground: Playground) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    (playground.here / "f").write_text("model_repository: models\nprofile_models: m\nlatency_budget: 5\ngpus: all\n")
    ended = called_tune("--from-model-analyzer", "f", "--print-profile", env=without_server(playground))
    assert (ended.code, ended.complaints) == (0, [])
    assert "line 4, gpus: ignored: " in ended.stdout
    assert ended.stdout.endswith("model: {repository: models, name: m}\nsla: {p99: 5ms}\n")


@pytest.mark.parametrize("case", STORAGES, ids=str)
def test_a_bad_storage_is_reported_without_its_password(case: Bad, called_tune: Tune, playground: Playground) -> None:
    case.write_files(playground.here)
    ended = tune_without_server(called_tune, playground, *case.arguments.split())
    assert_says(ended, *case.lines)
    assert SECRET not in ended.stderr


@pytest.mark.parametrize("case", ESCAPES, ids=str)
def test_a_profile_cannot_refer_to_files_outside_its_folder(
    case: Bad, called_tune: Tune, playground: Playground
) -> None:
    write_model(playground.root, "m", CONFIG, doubler())
    write_model(playground.here / "models", "m", CONFIG, doubler())
    (playground.root / "secret.json").write_text("{}")
    (playground.here / "link").symlink_to(playground.root)
    (playground.here / "link.json").symlink_to(playground.root / "secret.json")
    (playground.here / "models" / "out").symlink_to(playground.root / "m")
    case.write_files(playground.here)
    assert_says(tune_without_server(called_tune, playground, *case.arguments.split()), *case.lines)


# -- repositories -----------------------------------------------------------------------------------------------


def weighty_onnx(folder: Path) -> bytes:
    """Return an ONNX model that consists mostly of weights."""
    import numpy as np

    graph = Graph("weighty")
    x = graph.input("x", np.float32, [4])
    graph.op("Gemm", x, graph.weight("w", np.ones((4, 4096), np.float32)), to="y")
    graph.output("y", np.float32, [4096])
    graph.save(folder / "weighty.onnx")
    return (folder / "weighty.onnx").read_bytes()


@dataclass(frozen=True)
class Repository:
    """A repository ``models`` whose model ``m`` is faulty, and the expected message."""

    spoil: Callable[[Path], object]
    words: tuple[str, ...]


def replace_config(text: str | bytes) -> Callable[[Path], object]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda model: (model / "config.pbtxt").write_bytes(data)


def replace_by_a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("")


def replace_onnx(data: bytes) -> Callable[[Path], object]:
    return lambda model: (model / "1" / "model.onnx").write_bytes(data)


def without_config(model: Path) -> None:
    (model / "config.pbtxt").unlink()
    (model / "1" / "model.onnx").rename(model / "net.onnx")


def with_weights_in(location: str) -> ModelProto:
    model = doubler()
    weights = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    return model


def with_operator(name: str, domain: str = "") -> ModelProto:
    model = doubler()
    model.graph.node[0].op_type, model.graph.node[0].domain = name, domain
    if domain:
        model.opset_import.add(domain=domain, version=1)
    return model


REPOSITORIES = {
    "gone": Repository(lambda model: shutil.rmtree(model), ("models: ", "'m'", "none")),
    "a file": Repository(replace_by_a_file, ("models: ", "'m'", "none")),
    "neither config nor model": Repository(
        without_config,
        ("models/m: ", "config.pbtxt is missing", "to tune 'net.onnx', name that file"),
    ),
    "no version": Repository(lambda m: shutil.rmtree(m / "1"), ("models/m: ", "model.onnx", "models/m/1/model.onnx")),
    "no model file": Repository(lambda m: (m / "1" / "model.onnx").unlink(), ("models/m: ", "models/m/1/model.onnx")),
    "other name": Repository(replace_config(f'name: "n"\n{CONFIG}'), ("m/config.pbtxt: ", "'n'", "'m'", "equal")),
    "other backend": Repository(
        replace_config('backend: "tensorrt_plan"\n'),
        ("config.pbtxt: ", "'tensorrt_plan'", "python, pytorch"),
    ),
    "no backend": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text("max_batch_size: 8\n"),
            (m / "1" / "model.onnx").rename(m / "1" / "model.bin"),
        ),
        ("config.pbtxt: ", "backend ''", "onnxruntime"),
    ),
    "stateful and decoupled": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ }}\nmodel_transaction_policy {{ decoupled: true }}\n"),
        ("config.pbtxt: ", "sequence_batching and decoupled: ", "tune a copy with one of them"),
    ),
    "stateful with dynamic batching": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ }}\ndynamic_batching {{ }}\n"),
        ("config.pbtxt:", '"dynamic_batching" is specified along with field "sequence_batching"'),
    ),
    "implicit state": Repository(
        replace_config(f'{CONFIG}sequence_batching {{ state {{ input_name: "s" output_name: "t" }} }}\n'),
        ("config.pbtxt: ", "sequence_batching.state: ", "no implicit state", "--target local"),
    ),
    "sequence ids as texts": Repository(
        replace_config(
            f'{CONFIG}sequence_batching {{ control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID '
            "data_type: TYPE_STRING } } }\n"
        ),
        ("config.pbtxt: ", "control input 'ID' is TYPE_STRING", "TYPE_UINT64"),
    ),
    "oldest without candidates": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ oldest {{ }} }}\n"),
        ("config.pbtxt: ", "sequence_batching.oldest: max_candidate_sequences is missing"),
    ),
    "preferred size of sequences above the limit": Repository(
        replace_config(
            f"{CONFIG}sequence_batching {{ oldest {{ max_candidate_sequences: 4 preferred_batch_size: 16 }} }}\n"
        ),
        ("config.pbtxt: ", "sequence_batching.oldest: preferred_batch_size 16 is above max_batch_size 8"),
    ),
    "preferred size above the limit": Repository(
        replace_config(f"{CONFIG}dynamic_batching {{ preferred_batch_size: [4, 16] }}\n"),
        ("config.pbtxt: ", "preferred_batch_size 16", "max_batch_size 8", "Triton refuses"),
    ),
    "PyTorch without tensors": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "pytorch_libtorch"\n'),
            (m / "1" / "model.onnx").rename(m / "1" / "model.pt"),
        ),
        ("config.pbtxt: ", "write input and output", "dims"),
    ),
    "PyTorch weights alone": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text(CONFIG.replace("onnxruntime_onnx", "pytorch_libtorch")),
            (m / "1" / "model.onnx").rename(m / "1" / "model.pt"),
        ),
        ("m/1/model.pt: ", "not TorchScript", "torch.jit.save"),
    ),
    "max_batch_size below 0": Repository(
        replace_config(CONFIG.replace(": 8", ": -1")), ("config.pbtxt: ", "max_batch_size -1 is below 0")
    ),
    "preferred size below 1": Repository(
        replace_config(f"{CONFIG}dynamic_batching {{ preferred_batch_size: -1 }}\n"),
        ("config.pbtxt: ", "preferred_batch_size -1 is below 1"),
    ),
    "dims of 0": Repository(
        replace_config(CONFIG.replace("dims: 4", "dims: 0", 1)), ("config.pbtxt: ", "input 'x': dims [0]", "from 1")
    ),
    "dims below 0": Repository(
        replace_config(CONFIG.replace("dims: 4", "dims: -5")),
        ("config.pbtxt: ", "input 'x': dims [-5]", "-1 for a variable size"),
    ),
    "an input twice": Repository(
        replace_config(f'{CONFIG}input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}\n'),
        ("config.pbtxt: ", "input 'x' is there 2 times"),
    ),
    "another type": Repository(
        replace_config(CONFIG.replace("TYPE_FP32", "TYPE_INT32", 1)),
        ("config.pbtxt: ", "input 'x' has data_type TYPE_INT32", "the graph has TYPE_FP32"),
    ),
    "another type of an output": Repository(
        replace_config(CONFIG.replace("FP32", "INT64").replace("INT64", "FP32", 1)),
        ("config.pbtxt: ", "output 'y' has data_type TYPE_INT64", "the graph has TYPE_FP32"),
    ),
    "other dims": Repository(
        replace_config(CONFIG.replace("dims: 4", "dims: 5", 1)),
        ("config.pbtxt: ", "input 'x' has dims [5] after the batch dimension", "the shape [-1, 4]"),
    ),
    "dims without the batch dimension": Repository(
        replace_config(CONFIG.replace(": 8", ": 0")),
        ("config.pbtxt: ", "input 'x' has dims [4], and the graph has the shape [-1, 4]"),
    ),
    "a scalar": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler(dims=()))),
        ),
        ("input 'x' of ", "model.onnx: it is a scalar", "the shape [1]"),
    ),
    "a configured scalar": Repository(
        replace_config(CONFIG.replace(": 8", ": 0").replace("dims: 4", "dims: 1 reshape { }", 1)),
        ("config.pbtxt: ", "input 'x': it is a scalar"),
    ),
    "a version that is not there": Repository(
        replace_config(f"{CONFIG}version_policy {{ specific {{ versions: [3, 4] }} }}\n"),
        ("config.pbtxt: ", "version_policy: there is no version 3, 4; the model has 1"),
    ),
    "a custom operator": Repository(
        replace_onnx(serialized(with_operator("Frobnicate", "com.example"))),
        ("m/1/model.onnx: ", "has no operator 'com.example:Frobnicate'", "--target local"),
    ),
    "an unknown operator": Repository(
        replace_onnx(serialized(with_operator("Frobnicate"))), ("m/1/model.onnx: ", "has no operator 'Frobnicate'")
    ),
    "an operator whose name is not UTF-8": Repository(
        replace_onnx(serialized(with_operator("Frobnicate")).replace(b"Frobnicate", b"Frobnic\x80te")),
        ("m/1/model.onnx: ", "the name of an operator is not UTF-8"),
    ),
    "too many instances": Repository(
        replace_config(f"{CONFIG}instance_group {{ count: 100000 kind: KIND_CPU }}\n"),
        ("config.pbtxt: ", "100,000 instances are above the limit of 64", "--max-instance-count"),
    ),
    "instances below 0": Repository(
        replace_config(f"{CONFIG}instance_group {{ count: -5 kind: KIND_CPU }}\n"),
        ("config.pbtxt: ", "instance_group: count -5 is below 0"),
    ),
    "weights outside the folder": Repository(
        replace_onnx(serialized(with_weights_in("../../secret.bin"))),
        ("m/1/model.onnx: its weights are in '../../secret.bin', outside the folder of the model",),
    ),
    "unclosed": Repository(
        replace_config('platform: "onnxruntime_onnx"\ninput {\n'), ("m/config.pbtxt:2: ", 'Expected "}"')
    ),
    "unknown field": Repository(
        replace_config(f"{CONFIG}max_bach_size: 8\n"), ("m/config.pbtxt:5: ", "max_bach_size")
    ),
    "wrong type": Repository(replace_config(f"max_batch_size: many\n{CONFIG}"), ("m/config.pbtxt:1: ", "many")),
    "not text": Repository(replace_config(b"\xff\xfe\x00"), ("m/config.pbtxt: ", "byte 0")),
    "unknown input": Repository(
        replace_config(CONFIG.replace('"x"', '"z"')), ("m/config.pbtxt: ", "input 'z'", "1/model.onnx", "has x")
    ),
    "unknown output": Repository(
        replace_config(CONFIG.replace('"y"', '"w"')), ("m/config.pbtxt: ", "output 'w'", "1/model.onnx", "has y")
    ),
    "no batch dimension": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler(dims=(4,)))),
        ),
        ("m/config.pbtxt: ", "max_batch_size is 8", "input 'x'", "no batch dimension", "[4]", "max_batch_size: 0"),
    ),
    "dims unknown": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler(dims=("batch", "words")))),
        ),
        ("input 'x' of m ", "[-1]", "--shape x:16..128", "request.shapes", "{x: [128]}", "request.input_data"),
    ),
    "random bytes": Repository(replace_onnx(random.Random(0).randbytes(4096)), ("m/1/model.onnx: ", "not an ONNX")),
    "empty": Repository(replace_onnx(b""), ("m/1/model.onnx: ", "not an ONNX model")),
    "text": Repository(replace_onnx(b"version https://git-lfs"), ("m/1/model.onnx: ", "not an ONNX model")),
    "cut in the graph": Repository(
        replace_onnx(serialized(doubler())[:-5]), ("m/1/model.onnx: ", "not an ONNX model")
    ),
    "cut in the weights": Repository(
        lambda m: (m / "1" / "model.onnx").write_bytes(weighty_onnx(m)[:30_000]), ("m/1/model.onnx: ", "not an ONNX")
    ),
}


@pytest.mark.parametrize("case", REPOSITORIES)
def test_a_faulty_model_repository_is_reported(case: str, called_tune: Tune, playground: Playground) -> None:
    spoilt = REPOSITORIES[case]
    spoilt.spoil(write_model(playground.here / "models", "m", CONFIG, doubler()))
    ended = tune_without_server(called_tune, playground, "--sla-p95", "20ms", "--model-repository", "models", "m")
    assert_says(ended, spoilt.words)


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
@pytest.mark.parametrize("group", ["kind: KIND_GPU", "gpus: 0"])
def test_a_model_for_a_gpu_is_refused_without_one(group: str, called_tune: Tune, playground: Playground) -> None:
    write_model(playground.here, "m", f"{CONFIG}instance_group {{ count: 1 {group} }}\n", doubler())
    ended = tune_without_server(called_tune, playground, "--sla-p95", "20ms", "m")
    assert_says(ended, ("m/config.pbtxt: instance_group: ", "GPU"))


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
def test_an_accelerator_of_a_gpu_is_refused_on_a_cpu(called_tune: Tune, playground: Playground) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    choices = "  onnxruntime:\n    precision_mode: [FP16]\n    execution_accelerator: [none, tensorrt]\n"
    profile = f"model: {{repository: models, name: m}}\nspace:\n{choices}"
    (playground.here / "p.yaml").write_text(profile)
    ended = tune_without_server(called_tune, playground, "--sla-p95", "20ms", "p.yaml")
    assert_says(ended, ("p.yaml:5: space.onnxruntime.execution_accelerator: needs a GPU, and this model is served",))


def test_the_number_of_instances_is_limited(called_tune: Tune, playground: Playground) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    profile = "model: {repository: models, name: m}\nspace: {instance_group_count: [1, 65]}\n"
    (playground.here / "p.yaml").write_text(profile)
    too_many = ("65 instances are above the limit of 64", "--max-instance-count")
    ended = tune_without_server(called_tune, playground, "--sla-p95", "20ms", "p.yaml")
    assert_says(ended, ("p.yaml:2: space.instance_group_count: ", *too_many))
    assert_says(called_tune("sweep", "--instance-count", "1,65", "models/m"), ("--instance-count: ", *too_many))
    allowed = called_tune("--max-instance-count", "65", "--sla-p95", "20ms", "p.yaml", env=without_server(playground))
    assert_says(allowed, ("pip could not fetch the server",), code=3)


def test_instances_that_cannot_fit_into_memory_are_refused(called_tune: Tune, playground: Playground) -> None:
    group = "instance_group { count: 1000000 kind: KIND_CPU }\n"
    write_model(playground.here, "m", CONFIG + group, doubler())
    arguments = ["--max-instance-count", "1000000", "--sla-p95", "20ms", "m"]
    ended = tune_without_server(called_tune, playground, *arguments)
    assert_says(ended, ("m/config.pbtxt: instance_group: ", "1,000,000 instances need about", "GiB; write fewer"))


def test_a_model_folder_is_checked_like_a_repository(called_tune: Tune, playground: Playground) -> None:
    folder = write_model(playground.here, "m", CONFIG, None)
    ended = tune_without_server(called_tune, playground, "--sla-p95", "20ms", str(folder))
    assert_says(ended, (f"{folder}: ", "model.onnx", f"{folder}/1/model.onnx"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.onnx", ("gone.onnx: ", "no such file")),
        ("text.onnx", ("text.onnx: ", "not an ONNX model")),
        ("net.pt", ("net.pt: ", "does not contain its tensors' dims", "NAME/config.pbtxt", "docs/pytorch.md")),
    ],
)
def test_a_file_that_is_not_a_model_is_reported(
    name: str, words: tuple[str, ...], called_tune: Tune, playground: Playground
) -> None:
    (playground.here / "text.onnx").write_text("version https://git-lfs")
    assert_says(tune_without_server(called_tune, playground, "--sla-p95", "20ms", name), words)


def test_an_unknown_model_is_reported_with_the_models_of_the_repository(
    called_tune: Tune, playground: Playground
) -> None:
    write_model(playground.here / "models", "first", CONFIG, doubler())
    write_model(playground.here / "models", "second", CONFIG, doubler())
    for name, shown in (("third", "'third'"), (LONG, f"'{LONG[:58]}…")):
        ended = tune_without_server(called_tune, playground, "--model-repository", "models", name)
        assert_says(ended, ("models: no model ", f"{shown} there", "first, second"))


def test_a_missing_model_is_reported_with_the_models_of_the_repository(
    called_tune: Tune, playground: Playground
) -> None:
    folder = playground.here / "models"
    write_model(folder, "first", CONFIG, doubler())
    write_model(folder, "bare", CONFIG, doubler())
    (folder / "bare" / "config.pbtxt").unlink()  # an ONNX model needs none
    (folder / "notes").mkdir()
    ended = tune_without_server(called_tune, playground, "--model-repository", "models")
    assert_says(ended, ("MODEL is missing: models has the models bare, first",))
    ended = tune_without_server(called_tune, playground, "./models")
    assert_says(ended, ("this is a model repository with bare, first; give --model-repository FOLDER and one",))
    ended = tune_without_server(called_tune, playground, "--model-repository", "models/notes", "first")
    assert_says(ended, ("models/notes: no model 'first' there; it has none",))
    ended = tune_without_server(called_tune, playground, "--model-repository", "models/first", "first")
    assert_says(ended, ("models/first: is the folder of a model; give the repository, which contains that folder: ",))


@pytest.mark.parametrize("name", ["../m", "/m", "a/b", ".", ".."])
def test_a_model_name_cannot_lead_out_of_its_repository(name: str, called_tune: Tune, playground: Playground) -> None:
    write_model(playground.here, "m", CONFIG, doubler())
    (playground.here / "models").mkdir()
    ended = tune_without_server(called_tune, playground, "--model-repository", "models", name)
    assert_says(ended, (repr(name),))


@pytest.mark.parametrize("path", ["nowhere", "file", LONG])
def test_a_missing_repository_folder_is_reported(path: str, called_tune: Tune, playground: Playground) -> None:
    (playground.here / "file").write_text("")
    ended = tune_without_server(called_tune, playground, "--model-repository", path, "m")
    assert_says(ended, (f"--model-repository {path[:100]}", "no such folder"))


@pytest.mark.parametrize("name", ["m$(touch PWNED)", "m x"])
@pytest.mark.parametrize("kind", ["model", "step", "bls-composing-models", "concurrent-models", "variants"])
def test_a_model_name_that_a_shell_would_interpret_is_refused(
    name: str, kind: str, called_tune: Tune, playground: Playground
) -> None:
    models = playground.here / "models"
    write_model(models, name, CONFIG, doubler())
    arguments = [f"models/{name}"]
    if kind == "step":
        steps = f'ensemble_scheduling {{ step {{ model_name: "{name}" model_version: -1 }} }}\n'
        write_model(models, "chain", CONFIG.replace("onnxruntime_onnx", "ensemble") + steps, None)
        arguments = ["--model-repository", "models", "chain"]
    elif kind != "model":
        write_model(models, "m", CONFIG, doubler())
        arguments = [f"--{kind}", name, "models/m"]
    assert_says(tune_without_server(called_tune, playground, *arguments), (repr(name), "shell", "rename it"))


def test_a_request_larger_than_max_batch_size_is_refused(called_tune: Tune, playground: Playground) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    arguments = ["--request-batch-size", "9", "--model-repository", "models", "m"]
    ended = tune_without_server(called_tune, playground, *arguments)
    assert_says(ended, ("--request-batch-size 9 ", "max_batch_size 8", "config.pbtxt"))


def test_a_request_batch_for_a_model_without_batching_is_refused(called_tune: Tune, playground: Playground) -> None:
    config = CONFIG.replace("max_batch_size: 8", "max_batch_size: 0")
    write_model(playground.here / "models", "m", config, doubler(dims=(4,)))
    arguments = ["--request-batch-size", "2", "--model-repository", "models", "m"]
    assert_says(
        tune_without_server(called_tune, playground, *arguments), ("--request-batch-size 2 ", "max_batch_size 0")
    )


# -- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--input-data none.npz", ("input data none.npz: ", "no such file or folder", "random or zero")),
        ("--input-data x.json", ("x.json: entry 1, input x: has 1 values", "[4] has 4")),
        ("--input-data x.csv", ("x.csv:3: input x: ", '"b" is not FP32')),
        ("--input-data x.json --input-range x:0..1", ("input data x.json: ", "random requests only")),
        ("--shape x:3", ("shape x:3: ", "x has dims [4]")),
        ("--shape z:3", ("shape z:3: ", "the model's inputs are x")),
        ("--input-data zero --input-range x:0..1", ("range x:0..1: ", "zero has no range of values")),
        ("--input-data /dev/zero", ("input data /dev/zero: ", "is a device", "give a file or folder")),
        ("--input-data nan.json", ("nan.json: entry 1, input x: NaN is not a number of JSON", "b64")),
        ("--input-data huge.json", ("huge.json: entry 1, input x: Infinity is not a number of JSON", "b64")),
        ("--input-data huge.csv", ("huge.csv:2: input x: ", '"1e400" is not FP32')),
        ("--input-data large.json", ("large.json: entry 1, input x: 1e+39 is too large for FP32",)),
        ("--string-data a", ("--string-data", "m has no input of strings (its inputs are x FP32)", "leave them out")),
        ("--string-length 9", ("--string-length", "m has no input of strings", "leave them out")),
        ("--variants m", ("--variants m: m is the tuned model itself", "name models that can replace it")),
        ("--concurrent-models m", ("--concurrent-models m: m is the tuned model itself", "leave it out")),
        ("--bls-composing-models m", ("--bls-composing-models m: m is the tuned model itself", "leave it out")),
    ],
)
def test_request_data_that_does_not_fit_the_model_is_refused(
    called_tune: Tune, playground: Playground, arguments: str, words: tuple[str, ...]
) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    (playground.here / "x.json").write_text('{"data": [{"x": [1]}]}')
    (playground.here / "x.csv").write_text("x[0],x[1],x[2],x[3]\n1,2,3,4\n1,b,3,4\n")
    (playground.here / "nan.json").write_text('{"data": [{"x": [1, 2, 3, NaN]}]}')
    (playground.here / "huge.json").write_text('{"data": [{"x": [1, 2, 3, 1e400]}]}')
    (playground.here / "large.json").write_text('{"data": [{"x": [1, 2, 3, 1e39]}]}')
    (playground.here / "huge.csv").write_text("x[0],x[1],x[2],x[3]\n1,2,3,1e400\n")
    options = [*arguments.split(), "--model-repository", "models", "m"]
    assert_says(tune_without_server(called_tune, playground, *options), words)


# -- results and resuming ---------------------------------------------------------------------------------------


def test_a_read_only_results_folder_is_reported(called_tune: Tune, playground: Playground) -> None:
    """Permissions do not stop root, so the folder is a read-only mount in a separate mount namespace."""
    (playground.here / "results").mkdir()
    mount = "mount --bind results results && mount -o remount,bind,ro results"
    space = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*space, mount], cwd=playground.here, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not possible here")
    command = [*space, f'{mount} && exec "$0" "$@"', str(TUNE), "--sla-p95", "20ms", "mlp"]
    done = subprocess.run(command, cwd=playground.here, capture_output=True, text=True, timeout=120, check=False)
    assert_says(
        Ended(done.returncode, done.stdout, done.stderr, 0), ("folder results: ", "Read-only file system", "--out")
    )
    assert entries(playground.here / "results") == set()


def write_run(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(text)


def record(**options: object) -> str:
    kept = {**asdict(RunOptions("mlp", {"p95": 10.0})), **options}
    return json.dumps({"schema_version": SCHEMA_VERSION, "options": kept})


def test_resuming_a_folder_without_run_json_is_refused(called_tune: Tune, playground: Playground) -> None:
    (playground.here / "empty").mkdir()
    for run in ("nowhere", "empty", LONG):
        ended = tune_without_server(called_tune, playground, "--resume", run)
        assert_says(ended, (f"--resume {run[:100]}", "run.json", "give a run's folder"))


REFUSED_RUNS = {
    "a model argument": (record(), "--resume run mlp", ("--resume run", "'mlp'", "out")),
    "different settings": (
        record(),
        "--resume run --sla-p95 5ms --seed 3 --budget 5m",
        ("--resume run", "leave --sla-p95, --seed out"),
    ),
    "an invalid objective": (record(objectives=["speed"]), "verify run", ("run/run.json: ", "--objective speed")),
    "a test on another server": (
        record(),
        "verify --target remote --url h:1 run",
        ("--target: the test of a run continues on the server of that run; give --fresh too",),
    ),
    "a storage that was not given": (
        record(storage="sqlite:///other.db"),
        "--resume run",
        ("--resume run: ", "outside its folder", "give --storage sqlite:///other.db"),
    ),
    "a storage behind the folder": (
        record(storage="run/../other.journal"),
        "verify run",
        ("--resume run: ", "outside its folder", "give --storage run/../other.journal"),
    ),
    "a database server": (
        record(storage="postgresql://me@host/db"),
        "--resume run",
        ("--resume run: ", "outside its folder", "give --storage postgresql://me@host/db"),
    ),
    "a model named like a flag": (record(model="--help"), "--resume run", ("no model '--help'",)),
    "another file of options": (
        record(),
        "--resume run --from-model-analyzer f",
        ("--resume run keeps the options of the run; leave --from-model-analyzer out",),
    ),
    "a program that was not given": (
        record(target="local", tritonserver="./evil"),
        "--resume run",
        ("--resume run: run.json was not written by your tune", "add --target local --tritonserver ./evil"),
    ),
    "an address that was not given": (
        record(target="remote", url="h:1", headers=["a:$SECRET"]),
        "verify run --target remote",
        ("--resume run: run.json was not written by your tune", "add --url h:1 --header 'a:$SECRET'"),
    ),
    "an address of a separate test that was not given": (
        record(target="remote", url="h:1"),
        "verify --fresh run",
        ("verify run: run.json was not written by your tune", "add --target remote --url h:1"),
    ),
    "another address": (
        record(target="remote", url="h:1"),
        "--resume run --target remote --url h:2",
        ("--resume run keeps the options of the run; leave --url out",),
    ),
    "a repository that was not given": (
        record(model="m", model_repository="models"),
        "--resume run --budget 5m",
        ("--resume run: run.json was not written by your tune", "add --model-repository models"),
    ),
    "a model in the folder of the run": (
        record(model="run"),
        "--resume run",
        ("--resume run: run.json was not written by your tune", "add run"),
    ),
    "another model for a test": (record(), "verify run mlp", ("--resume run", "'mlp'", "out")),
    "a redacted password": (
        record(storage="postgresql://u:***@host/db"),
        "--resume run",
        ("--resume run: ", "password", "--storage"),
    ),
}


@pytest.mark.parametrize("case", REFUSED_RUNS)
def test_a_run_that_cannot_be_continued_or_verified_is_refused(
    case: str, called_tune: Tune, playground: Playground
) -> None:
    text, arguments, words = REFUSED_RUNS[case]
    write_run(playground.here / "run", text)
    assert_says(tune_without_server(called_tune, playground, *arguments.split()), words)


@pytest.mark.parametrize("name", ["trials.csv", "study.journal", "logs", "logs/commands.log"])
def test_a_run_whose_file_is_a_link_is_not_continued(name: str, called_tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", record())
    path = playground.here / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(playground.here)
    for words in (("--resume", "run"), ("verify", "--fresh", "run")):
        assert_says(
            tune_without_server(called_tune, playground, *words),
            (f"run/{name}: is a link", "replace it by that file"),
        )


BROKEN_RECORDS = {
    "": ("line 1 column 1",),
    '{"options": ': ("line 1 column 13",),
    "\x00\x01": ("line 1 column 1",),
    "[]": ("not the record of a run",),
    "{}": ("no 'schema_version'",),
    '{"schema_version": 1}': ("no 'options'",),
    '{"schema_version": 2, "options": {}}': ("schema_version 2", f"reads {SCHEMA_VERSION}", "begin a new run"),
    '{"schema_version": "x", "options": {}}': ("schema_version 'x'", f"reads {SCHEMA_VERSION}"),
    '{"schema_version": 1, "options": 5}': ("not the record of a run",),
    '{"schema_version": 1, "options": {}}': ("options.model",),
    record(model=5): ("options.model",),
    record(budget_seconds="long"): ("options.budget_seconds",),
    record(objectives=5): ("options.objectives",),
    record(sla_ms={"p95": "20ms"}): ("options.sla_ms.p95",),
    record(colour="red"): ("'colour'",),
    record(budget_seconds=-1.0): ("--budget -1s",),
    record(max_trials=0): ("--max-trials 0",),
    record(sla_ms={"p100": 20.0}): ("'p100' is not a metric",),
    record(objectives=["speed"]): ("--objective speed",),
    record(search="best"): ("--search best: ", "tpe"),
    record(objectives=["memory"]): (
        "--search simulated ranks by throughput or goodput; with --objective memory take tpe",
    ),
    record(min_throughput="much"): ("--min-throughput much",),
}


@pytest.mark.parametrize("text", BROKEN_RECORDS)
def test_resume_reports_an_invalid_run_json(text: str, called_tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", text)
    ended = tune_without_server(called_tune, playground, "--resume", "run")
    assert_says(ended, ("run/run.json: ", *BROKEN_RECORDS[text]))


@pytest.mark.parametrize(
    ("table", "word"),
    [("model,trial\nmlp,0\n", "trials.csv: its columns"), ("\x00\n", "trials.csv: its columns")],
)
def test_resume_reports_an_invalid_trials_table(
    table: str, word: str, called_tune: Tune, playground: Playground
) -> None:
    """The error is found before a server starts: there is no server log."""
    write_run(playground.here / "run", record())
    (playground.here / "run" / "trials.csv").write_text(table)
    before = entries(playground.here)
    ended = called_tune("--resume", "run")
    assert_says(ended, (word,))
    assert entries(playground.here) == before


# -- the environment --------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
def test_the_energy_objective_without_a_gpu_ends_with_exit_code_3(called_tune: Tune, playground: Playground) -> None:
    ended = tune_without_server(called_tune, playground, "--objective", "energy", "mlp")
    assert_says(ended, ("--objective energy: ", "NVIDIA GPU", "throughput, latency-p95 or memory"), code=3)


def test_a_server_that_cannot_be_downloaded_ends_with_exit_code_3(tune: Tune, playground: Playground) -> None:
    """Valid input gets as far as the server, which pip then tries to download; the tests above rely on that."""
    write_model(playground.here / "models", "m", CONFIG, doubler())
    arguments = ["--sla-p95", "20ms", "--model-repository", "models", "m"]
    ended = tune(*arguments, env=without_server(playground))
    assert_says(ended, ("pip could not fetch the server: ", "nvidia-pytriton==0.7.0", "pip config list"), code=3)
    assert ended.stdout == ""
    assert not (playground.here / "results").exists()
