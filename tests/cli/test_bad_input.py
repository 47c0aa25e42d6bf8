"""Bad input: one line naming the value, where it stands and what would be right; exit code 2; nothing started.

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

from optimizer.machine import hardware
from optimizer.models.onnx_graph import Graph
from optimizer.options import RunOptions
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


@dataclass(frozen=True)
class Bad:
    """``tune ARGUMENTS`` in a folder with ``files``: one line on stderr for each of ``lines``, having its words."""

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
    bad("--sla-p42 20ms mlp", "--sla-p42", "tune --help"),
    bad("--budget 0 mlp", "--budget 0: ", "greater than zero", "5m"),
    bad("--budget 0s mlp", "--budget 0s: ", "greater than zero", "5m"),
    bad("--budget -5m mlp", "--budget -5m: ", "positive", "5m"),
    bad("--budget 5 mlp", "--budget 5: ", "a unit is missing: 5m?"),
    bad("--budget long mlp", "--budget long: ", "5m, 90s"),
    bad("--max-trials 0 mlp", "--max-trials 0: ", "1 or more"),
    bad("--max-trials -1 mlp", "--max-trials -1: ", "1 or more"),
    bad("--max-trials x mlp", "--max-trials x: ", "whole number"),
    bad("--max-trials 1.5 mlp", "--max-trials 1.5: ", "whole number"),
    bad("--seed x mlp", "--seed x: ", "whole number from 0 to 4294967295"),
    bad("--seed -1 mlp", "--seed -1: ", "whole number from 0 to 4294967295"),
    bad("--seed 4294967296 mlp", "--seed 4294967296: ", "from 0 to 4294967295"),
    bad(f"--seed {'9' * 5000} mlp", "--seed 99", "from 0 to 4294967295"),
    bad("--request-batch-size 0 mlp", "--request-batch-size 0: ", "1 to 2147483647"),
    bad("--request-batch-size 2147483648 mlp", "--request-batch-size 2147483648: ", "1 to 2147483647"),
    bad("--request-batch-size 1e3 mlp", "--request-batch-size 1e3: ", "whole number"),
    bad("--shape 16 mlp", "--shape 16: ", "NAME:SIZES", "input_ids:16..128"),
    bad("--shape ids:0 mlp", "--shape ids:0: ", "from 1 to 2147483647"),
    bad("--shape ids:9..3 mlp", "--shape ids:9..3: ", "the lower one first"),
    bad("--input-range ids:9 mlp", "--input-range ids:9: ", "0..30521"),
    bad("--string-length 0 mlp", "--string-length 0: ", "1 to 1048576"),
    bad("--input-data= mlp", "--input-data '': ", "random, zero"),
    bad("--min-throughput much mlp", "--min-throughput much: ", "4000/s", "500req/s"),
    bad("--max-memory 4 mlp", "--max-memory 4: ", "4GiB"),
    bad("--load fast mlp", "--load", "concurrency", "rate"),
    bad("--arrivals constant mlp", "--arrivals constant", "--load rate"),
    bad("--load rate --protocol http mlp", "--load rate", "gRPC"),
    bad("--min-score high mlp", "--min-score high: ", "0.9"),
    bad("--confidence 99.99999% mlp", "--confidence 99.99999%: ", "99%", "from 80% to 99.99%"),
    bad("--confidence sure mlp", "--confidence sure: ", "99%"),
    bad("--min-score nan mlp", "--min-score nan: ", "0.9"),
    bad("--server-cpus 8191 mlp", "--server-cpus 8191: ", "not among those that can be used"),
    bad("--client-cpus some mlp", "--client-cpus some: ", "0-3"),
    bad("verify", "RUN"),
    bad("sweep --concurrency 0 mlp", "--concurrency 0: ", "1,2,4 or start:end:step"),
    bad("sweep --sla-p95 5ms mlp", "--sla-…", "leave it out"),
    bad("sweep nosuch", "no model 'nosuch'"),
    bad("verify nowhere", "RUN nowhere: ", "run.json"),
    bad("--objective speed mlp", "--objective speed: ", "throughput, ", "memory, energy"),
    bad("--objective throughput,throughput mlp", "--objective throughput,throughput: ", "each once"),
    bad("--objective= mlp", "--objective '': ", "throughput, "),
    bad("--search best mlp", "--search", "'best'", "'tpe'", "'grid'"),
    bad(
        "--objective memory --search simulated mlp",
        "--search simulated ranks by throughput; with --objective memory take tpe, nsga2, random or grid",
    ),
    bad("--target moon mlp", "--target", "'moon'", "'embedded'"),
    bad("--target local --tritonserver ./no mlp", "--tritonserver", "/no", "no such file"),
    bad("--target local --tritonserver mine mlp", "--tritonserver mine", "no such program", "whole path", mine=""),
    bad("--target local --tritonserver ./mine mlp", "--tritonserver", "/mine", "chmod +x", mine=""),
    bad("--url triton:8001 mlp", "--url triton:8001", "only --target remote has it"),
    bad("--target remote --header a:$NOT_THERE mlp", "--header a", "$NOT_THERE is not set", "export it"),
    bad("--target remote --url grpcs://h:1 --tls-ca no.pem mlp", "--tls-ca no.pem", "no such file"),
    bad("--target remote --tls-ca no.pem mlp", "--tls-ca", "is not encrypted", "grpcs://"),
    bad("--measurement-interval 5 mlp", "--measurement-interval 5: ", "5ms?"),
    bad("--measurement-interval 1h mlp", "--measurement-interval 1h: ", "50ms to 15s"),
    bad("--protocol tcp mlp", "--protocol", "'tcp'", "'grpc'", "'http'"),
    bad("--frob mlp", "--frob", "tune --help"),
    bad("--sla 20ms mlp", "--sla", "tune --help"),
    bad("", "which model?", "tune models"),
    bad("run", "which model?", "tune models"),
    bad("mlp dlrm", "dlrm", "tune --help"),
    bad("models mlp", "mlp", "tune --help"),
    bad("doctor --now", "--now", "tune --help"),
    bad("setup --now", "--now", "tune --help"),
]

NAMES = [
    bad("dlrn", "'dlrn'", "did you mean dlrm?", "tune models"),
    bad("run dlrn", "'dlrn'", "did you mean dlrm?"),
    bad("optimise", "'optimise'", "tune models"),
    bad(LONG, "xxx", "tune models"),
    bad("../mlp", "'../mlp'", "without folders"),
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
    profile("model: {builder: mlp}\nsla:\n  p59: 20ms\n", ("p.yaml:3: sla.p59: ", "did you mean p")),
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
    bad("--resume r --from-model-analyzer f", "--resume r ", "leave --from-model-analyzer out", f=TWO),
]


def tune_without_server(tune: Tune, playground: Playground, *arguments: str) -> Ended:
    """Run it, and hold that it got nowhere near a server and left nothing."""
    before = entries(playground.here)
    ended = tune(*arguments, env=without_server(playground))
    assert not (playground.root / "cache").exists()
    assert entries(playground.here) == before
    assert ended.stdout == ""
    return ended


def without_server(playground: Playground) -> dict[str, str | Path]:
    """An environment in which the server is not there and cannot be fetched."""
    return {
        "TRITUNE_CACHE": playground.root / "cache",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": playground.root / "no wheels",
        "PIP_CONFIG_FILE": os.devnull,
    }


def entries(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def assert_says(ended: Ended, *lines: tuple[str, ...], code: int = 2) -> None:
    """One line for each of ``lines``, with its words in their order."""
    assert ended.code == code, ended.stderr
    assert len(ended.complaints) == len(lines), ended.stderr
    for complaint, words in zip(ended.complaints, lines, strict=True):
        assert complaint.startswith("tune: ")
        at = 0
        for word in words:
            assert word in complaint[at:], complaint
            at = complaint.index(word, at) + len(word)


@pytest.mark.parametrize("case", [*FLAGS[::17], NAMES[0], PROFILES[0]], ids=str)
def test_one_line_says_what_is_wrong(case: Bad, tune: Tune, playground: Playground) -> None:
    """In a process that has imported nothing: as users start it."""
    case.write_files(playground.here)
    assert_says(tune_without_server(tune, playground, *case.arguments.split()), *case.lines)


@pytest.mark.parametrize("case", [*FLAGS, *NAMES, *PROFILES], ids=str)
def test_a_bad_flag_name_or_profile(case: Bad, forked_tune: Tune, playground: Playground) -> None:
    case.write_files(playground.here)
    assert_says(tune_without_server(forked_tune, playground, *case.arguments.split()), *case.lines)


@pytest.mark.parametrize("case", MODEL_ANALYZER, ids=str)
def test_a_bad_configuration_of_model_analyzer(case: Bad, forked_tune: Tune, playground: Playground) -> None:
    case.write_files(playground.here)
    ended = tune_without_server(forked_tune, playground, *case.arguments.split(), "--json")
    assert_says(ended, *case.lines)


def test_a_configuration_of_model_analyzer_is_shown_as_a_profile(forked_tune: Tune, playground: Playground) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    (playground.here / "f").write_text("model_repository: models\nprofile_models: m\nlatency_budget: 5\ngpus: all\n")
    ended = forked_tune("--from-model-analyzer", "f", "--print-profile", env=without_server(playground))
    assert (ended.code, ended.complaints) == (0, [])
    assert "line 4, gpus: ignored: " in ended.stdout
    assert ended.stdout.endswith("model: {repository: models, name: m}\nsla: {p99: 5ms}\n")


@pytest.mark.parametrize("case", STORAGES, ids=str)
def test_a_bad_storage_is_named_without_its_password(case: Bad, forked_tune: Tune, playground: Playground) -> None:
    case.write_files(playground.here)
    ended = tune_without_server(forked_tune, playground, *case.arguments.split())
    assert_says(ended, *case.lines)
    assert SECRET not in ended.stderr


@pytest.mark.parametrize("case", ESCAPES, ids=str)
def test_what_a_profile_names_stays_in_its_folder(case: Bad, forked_tune: Tune, playground: Playground) -> None:
    write_model(playground.root, "m", CONFIG, doubler())
    write_model(playground.here / "models", "m", CONFIG, doubler())
    (playground.root / "secret.json").write_text("{}")
    (playground.here / "link").symlink_to(playground.root)
    (playground.here / "link.json").symlink_to(playground.root / "secret.json")
    (playground.here / "models" / "out").symlink_to(playground.root / "m")
    case.write_files(playground.here)
    assert_says(tune_without_server(forked_tune, playground, *case.arguments.split()), *case.lines)


# -- repositories -----------------------------------------------------------------------------------------------


def weighty_onnx(folder: Path) -> bytes:
    """A model of which most bytes are weights."""
    import numpy as np

    graph = Graph("weighty")
    x = graph.input("x", np.float32, [4])
    graph.op("Gemm", x, graph.weight("w", np.ones((4, 4096), np.float32)), to="y")
    graph.output("y", np.float32, [4096])
    graph.save(folder / "weighty.onnx")
    return (folder / "weighty.onnx").read_bytes()


@dataclass(frozen=True)
class Repository:
    """A repository ``models`` whose model ``m`` is spoilt, and what is said about it."""

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
    "stateful": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ }}\n"),
        ("config.pbtxt: ", "sequence_batching: ", "tune sends single ones", "--sequence-length"),
    ),
    "decoupled": Repository(
        replace_config(f"{CONFIG}model_transaction_policy {{ decoupled: true }}\n"),
        ("config.pbtxt: ", "decoupled: ", "answers once", "--streaming"),
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
        ("m/1/model.pt: ", "no TorchScript", "torch.jit.save"),
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
def test_a_spoilt_repository(case: str, forked_tune: Tune, playground: Playground) -> None:
    spoilt = REPOSITORIES[case]
    spoilt.spoil(write_model(playground.here / "models", "m", CONFIG, doubler()))
    ended = tune_without_server(forked_tune, playground, "--sla-p95", "20ms", "--model-repository", "models", "m")
    assert_says(ended, spoilt.words)


def test_a_model_folder_is_checked_as_its_repository_is(forked_tune: Tune, playground: Playground) -> None:
    folder = write_model(playground.here, "m", CONFIG, None)
    ended = tune_without_server(forked_tune, playground, "--sla-p95", "20ms", str(folder))
    assert_says(ended, (f"{folder}: ", "model.onnx", f"{folder}/1/model.onnx"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.onnx", ("gone.onnx: ", "no such file")),
        ("text.onnx", ("text.onnx: ", "not an ONNX model")),
        ("net.pt", ("net.pt: ", "says nothing of its tensors' dims", "NAME/config.pbtxt", "docs/pytorch.md")),
    ],
)
def test_a_bare_file_that_is_no_model(
    name: str, words: tuple[str, ...], forked_tune: Tune, playground: Playground
) -> None:
    (playground.here / "text.onnx").write_text("version https://git-lfs")
    assert_says(tune_without_server(forked_tune, playground, "--sla-p95", "20ms", name), words)


def test_an_unknown_model_of_a_repository_is_named_with_those_there(
    forked_tune: Tune, playground: Playground
) -> None:
    write_model(playground.here / "models", "first", CONFIG, doubler())
    write_model(playground.here / "models", "second", CONFIG, doubler())
    ended = tune_without_server(forked_tune, playground, "--model-repository", "models", "third")
    assert_says(ended, ("models: ", "'third'", "first, second"))


@pytest.mark.parametrize("name", ["../m", "/m", "a/b", ".", ".."])
def test_a_model_name_stays_in_its_repository(name: str, forked_tune: Tune, playground: Playground) -> None:
    write_model(playground.here, "m", CONFIG, doubler())
    (playground.here / "models").mkdir()
    ended = tune_without_server(forked_tune, playground, "--model-repository", "models", name)
    assert_says(ended, (repr(name),))


@pytest.mark.parametrize("path", ["nowhere", "file", LONG])
def test_a_repository_that_is_none(path: str, forked_tune: Tune, playground: Playground) -> None:
    (playground.here / "file").write_text("")
    ended = tune_without_server(forked_tune, playground, "--model-repository", path, "m")
    assert_says(ended, (f"--model-repository {path}: ", "no such folder"))


def test_a_request_larger_than_the_model_takes(forked_tune: Tune, playground: Playground) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    arguments = ["--request-batch-size", "9", "--model-repository", "models", "m"]
    ended = tune_without_server(forked_tune, playground, *arguments)
    assert_says(ended, ("--request-batch-size 9 ", "max_batch_size 8", "config.pbtxt"))


def test_a_batch_for_a_model_without_batches(forked_tune: Tune, playground: Playground) -> None:
    config = CONFIG.replace("max_batch_size: 8", "max_batch_size: 0")
    write_model(playground.here / "models", "m", config, doubler(dims=(4,)))
    arguments = ["--request-batch-size", "2", "--model-repository", "models", "m"]
    assert_says(
        tune_without_server(forked_tune, playground, *arguments), ("--request-batch-size 2 ", "max_batch_size 0")
    )


# -- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--input-data none.npz", ("input data none.npz: ", "no such file or folder", "random or zero")),
        ("--input-data x.json", ("x.json: entry 1, input x: has 1 values", "[4] has 4")),
        ("--input-data x.csv", ("x.csv:3: input x: ", '"b" is not FP32')),
        ("--input-data x.json --input-range x:0..1", ("input data x.json: ", "about random requests")),
        ("--shape x:3", ("shape x:3: ", "x is [4]")),
        ("--shape z:3", ("shape z:3: ", "the model's inputs are x")),
        ("--input-data zero --input-range x:0..1", ("range x:0..1: ", "to be zero")),
    ],
)
def test_requests_that_do_not_fit_the_model(
    forked_tune: Tune, playground: Playground, arguments: str, words: tuple[str, ...]
) -> None:
    write_model(playground.here / "models", "m", CONFIG, doubler())
    (playground.here / "x.json").write_text('{"data": [{"x": [1]}]}')
    (playground.here / "x.csv").write_text("x[0],x[1],x[2],x[3]\n1,2,3,4\n1,b,3,4\n")
    given = [*arguments.split(), "--model-repository", "models", "m"]
    assert_says(tune_without_server(forked_tune, playground, *given), words)


# -- results and resuming ---------------------------------------------------------------------------------------


def test_a_read_only_results_folder(forked_tune: Tune, playground: Playground) -> None:
    """Root is not kept out by modes, but by a read-only mount, in a mount namespace of its own."""
    (playground.here / "results").mkdir()
    mount = "mount --bind results results && mount -o remount,bind,ro results"
    space = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*space, mount], cwd=playground.here, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not possible here")
    command = [*space, f'{mount} && exec "$0" "$@"', str(TUNE), "--sla-p95", "20ms", "mlp"]
    done = subprocess.run(command, cwd=playground.here, capture_output=True, text=True, timeout=60, check=False)
    assert_says(
        Ended(done.returncode, done.stdout, done.stderr, 0), ("folder results: ", "Read-only file system", "--out")
    )
    assert entries(playground.here / "results") == set()


def write_run(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(text)


def record(**options: object) -> str:
    return json.dumps({"options": {**asdict(RunOptions("mlp", {"p95": 10.0})), **options}})


def test_resuming_what_is_no_run(forked_tune: Tune, playground: Playground) -> None:
    (playground.here / "empty").mkdir()
    for run in ("nowhere", "empty", LONG):
        ended = tune_without_server(forked_tune, playground, "--resume", run)
        assert_says(ended, (f"--resume {run}: ", "run.json", "give a run's folder"))


def test_resuming_with_a_model(tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", record())
    assert_says(tune_without_server(tune, playground, "--resume", "run", "mlp"), ("--resume run", "'mlp'", "out"))


def test_resuming_with_other_settings(tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", record())
    given = ("--resume", "run", "--sla-p95", "5ms", "--seed", "3", "--budget", "5m")
    assert_says(tune_without_server(tune, playground, *given), ("--resume run", "leave --sla-p95, --seed out"))


def test_verifying_a_broken_record(forked_tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", record(objectives=["speed"]))
    ended = tune_without_server(forked_tune, playground, "verify", "run")
    assert_says(ended, ("run/run.json: ", "--objective speed"))


BROKEN_RECORDS = {
    "": ("line 1 column 1",),
    '{"options": ': ("line 1 column 13",),
    "\x00\x01": ("line 1 column 1",),
    "[]": ("not the record of a run",),
    "{}": ("no 'options'",),
    '{"options": 5}': ("not the record of a run",),
    '{"options": {}}': ("options.model",),
    record(model=5): ("options.model",),
    record(budget_seconds="long"): ("options.budget_seconds",),
    record(objectives=5): ("options.objectives",),
    record(sla_ms={"p95": "20ms"}): ("options.sla_ms.p95",),
    record(colour="red"): ("'colour'",),
    record(budget_seconds=-1.0): ("--budget -1s",),
    record(max_trials=0): ("--max-trials 0",),
    record(sla_ms={"p42": 20.0}): ("--sla-p42",),
    record(objectives=["speed"]): ("--objective speed",),
    record(search="best"): ("--search", "'best'", "'tpe'"),
    record(objectives=["memory"]): ("--search simulated ranks by throughput; with --objective memory take tpe",),
    record(min_throughput="much"): ("--min-throughput much",),
}


@pytest.mark.parametrize("text", BROKEN_RECORDS)
def test_resuming_a_broken_record(text: str, forked_tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", text)
    ended = tune_without_server(forked_tune, playground, "--resume", "run")
    assert_says(ended, ("run/run.json: ", *BROKEN_RECORDS[text]))


def test_a_record_cannot_smuggle_a_flag_in(forked_tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", record(model="--help"))
    assert_says(tune_without_server(forked_tune, playground, "--resume", "run"), ("no model '--help'",))


def test_resuming_a_study_whose_password_was_not_kept(forked_tune: Tune, playground: Playground) -> None:
    write_run(playground.here / "run", record(storage="postgresql://u:***@host/db"))
    ended = tune_without_server(forked_tune, playground, "--resume", "run")
    assert_says(ended, ("--resume run: ", "password", "--storage"))


@pytest.mark.parametrize(
    ("table", "word"),
    [("model,trial\nmlp,0\n", "trials.csv: its columns"), ("\x00\n", "trials.csv: its columns")],
)
def test_resuming_a_broken_table(table: str, word: str, tune: Tune, playground: Playground) -> None:
    """Found before a server is started: there is no log of one."""
    write_run(playground.here / "run", record())
    (playground.here / "run" / "trials.csv").write_text(table)
    before = entries(playground.here)
    ended = tune("--resume", "run")
    assert_says(ended, (word,))
    assert entries(playground.here) == before


# -- the environment --------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
def test_energy_without_a_gpu_is_a_lack_of_the_machine(tune: Tune, playground: Playground) -> None:
    ended = tune_without_server(tune, playground, "--objective", "energy", "mlp")
    assert_says(ended, ("--objective energy: ", "NVIDIA GPU", "throughput, latency-p95 or memory"), code=3)


def test_without_the_wheels_the_machine_is_at_fault(tune: Tune, playground: Playground) -> None:
    """What the tests above rely on: good input gets as far as the server, and pip is asked for it."""
    write_model(playground.here / "models", "m", CONFIG, doubler())
    arguments = ["--sla-p95", "20ms", "--model-repository", "models", "m"]
    ended = tune(*arguments, env=without_server(playground))
    assert_says(ended, ("pip could not fetch the server: ", "nvidia-pytriton==0.7.0", "pip config list"), code=3)
    assert ended.stdout == ""
    assert not (playground.here / "results").exists()
