"""Bad input gives exit code 2 and one line with the value, its place and the allowed values; nothing is started.

The command gets a cache that is empty and a pip that finds nothing: whatever needed the server, or built a
model, would end with exit code 3 and leave the cache folder.
"""

from __future__ import annotations

import pytest

from tests.bad_input import (
    CA_FLAG,
    CONFIG,
    LONG,
    SECRET,
    Bad,
    assert_says,
    bad,
    profile,
    tune_without_server,
    without_server,
)
from tests.command_fixtures import Sandbox, Tune
from tests.repositories import doubler, write_model

FLAGS = [
    bad("--sla-avg 0ms mlp", "--sla-avg 0ms: ", "greater than zero", "20ms"),
    bad("--sla-p95", "--sla-p95", "expected one argument"),
    bad("--sla p95<=20ms,p99<=30ms mlp", "give an option for each bound", "--sla 'p95<=20ms' --sla 'p99<=30ms'"),
    bad("--sla max<=20ms mlp", "--sla max<=20ms: ", "not avg or a percentile"),
    bad("--sla-p99 20ms --sla p99<=30ms mlp", "--sla: p99 has two bounds", "one of them"),
    bad("--max-error-rate 0% mlp", "--max-error-rate 0%: ", "above 0% and below 100%", "0.1%"),
    bad("--max-error-rate 0.1 mlp", "--max-error-rate 0.1: ", "write a percentage", "0.1%"),
    bad("--max-error-rate 100% mlp", "--max-error-rate 100%: ", "below 100%"),
    bad("--budget 5 mlp", "--budget 5: ", "a unit is missing: 5m?"),
    bad("--max-trials 0 mlp", "--max-trials 0: ", "from 1 to 2147483647"),
    bad("--max-trials x mlp", "--max-trials x: ", "whole number"),
    bad("--seed 4294967296 mlp", "--seed 4294967296: ", "from 0 to 4294967295"),
    bad(f"--seed {'9' * 5000} mlp", "--seed 99", "from 0 to 4294967295"),
    bad("--request-batch-size 0 mlp", "--request-batch-size 0: ", "1 to 2147483647"),
    bad("--request-batch-size 1e3 mlp", "--request-batch-size 1e3: ", "whole number"),
    bad("--sequence-length 0 accumulator", "--sequence-length 0: ", "1 to 2147483647"),
    bad("--sequence-length 9..3 accumulator", "--sequence-length 9..3: ", "the lower one first"),
    bad("--shape 16 mlp", "--shape 16: ", "NAME:SIZES", "input_ids:16..128"),
    bad("--input-range ids:9 mlp", "--input-range ids:9: ", "0..30521"),
    bad("--string-length 0 mlp", "--string-length 0: ", "1 to 1048576"),
    bad("--input-data= mlp", "--input-data '': ", "random, zero"),
    bad("--out= mlp", "--out '': ", "write a path"),
    bad("emit run --out=", "--out '': ", "write a path"),
    bad("compare run run --results=", "--results '': ", "write a path"),
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
    bad("--load rate --request-intervals t.csv mlp", "--request-intervals t.csv: ", "--request-trace"),
    bad("--load rate --request-trace t.txt mlp", "--request-trace t.txt: ", "ends in .csv"),
    bad("--load rate --request-trace t.csv mlp", "--request-trace t.csv: no such file; ", "a column time_s"),
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
    bad("--load rate --protocol http mlp", "--protocol http: ", "gRPC"),
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
    bad("verify nowhere", "run nowhere: ", "run.json"),
    bad("verify --budget 3 nowhere", "--budget 3: ", "a unit is missing: 3m?"),
    bad("--objective speed mlp", "--objective speed: ", "throughput, ", "memory, energy"),
    bad("--objective throughput,throughput mlp", "--objective throughput,throughput: ", "each once"),
    bad("--search best mlp", "--search best: ", "tpe, ", "grid"),
    bad("--target moon mlp", "--target moon: ", "embedded, "),
    bad("--target local --tritonserver ./no mlp", "--tritonserver", "/no", "no such file"),
    bad("--target local --tritonserver mine mlp", "--tritonserver mine", "no such program", "whole path", mine=""),
    bad("--target local --tritonserver ./mine mlp", "--tritonserver", "/mine", "chmod +x", mine=""),
    bad("--url triton:8001 mlp", "--url triton:8001", "works only with --target remote"),
    bad("--target remote --header a:$NOT_THERE mlp", "--header a", "$NOT_THERE is not set", "export it"),
    bad(f"--target remote --url grpcs://h:1 {CA_FLAG} no.pem mlp", f"{CA_FLAG} no.pem", "no such file"),
    bad("--measurement-interval 5 mlp", "--measurement-interval 5: ", "5ms?"),
    bad("--measurement-interval 1h mlp", "--measurement-interval 1h: ", "50ms to 15s"),
    bad("--protocol tcp mlp", "--protocol tcp: ", "grpc, http"),
    bad("--results there mlp", "--results is not an option of `tune run`", "did you mean --out?"),
    bad("", "MODEL is missing", "tune models"),
    bad("run", "MODEL is missing", "tune models"),
    bad("models mlp", "mlp", "tune models --help"),
    bad("doctor --now", "--now", "tune doctor --help"),
    bad("setup --now", "--now", "tune setup --help"),
]

NAMES = [
    bad("dlrn", "'dlrn'", "did you mean dlrm?", "tune models"),
    bad("run dlrn", "'dlrn'", "did you mean dlrm?"),
    bad("dlmr --sla-p95 20ms", "'dlmr'", "did you mean dlrm?"),
    bad("help run", "no command 'help'", "did you mean `tune --help`?"),
    bad("version", "no command 'version'", "did you mean `tune --version`?"),
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
    bad("--storage :// mlp", "--storage ://: ", "Could not parse"),
    bad("--storage postgresql:/u:geheim@host/db mlp", "--storage postgresql:", "sqlite:///study.db"),
    bad("--storage nosuch://u:gehe/im@geheim@host/db mlp", "nosuch://u:***@host/db", "sqlite"),
    bad("--storage file/study mlp", "--storage file/study: ", "cannot be opened", file="text"),
]

PROFILES = [
    profile("model: {builder: mlp}\nsla:\n  p100: 20ms\n", ("p.yaml:3: sla.p100: ", "at least 50 and below 100")),
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
]

ESCAPES = [
    profile("model: {repository: models, name: out}\n", ("p.yaml:1: model.name: ", "'out'", "leads out")),
    profile(
        "model: {builder: mlp}\nrequest: {input_data: link.json}\n",
        ("p.yaml:2: request.input_data: ", "'link.json'", "leads out"),
    ),
]


TWO = "profile_models: [m, n]\nmodel_repository: models\n"
MODEL_ANALYZER = [
    bad("--from-model-analyzer no.yaml", "--from-model-analyzer no.yaml: no such file; give ", "configuration"),
    bad("--from-model-analyzer f m", "f:4:1: ", "expected", f=f"{TWO}profile_models: {{\n"),
    bad("--from-model-analyzer f --model-repository no m", "--model-repository no: no such", f="concurrency: 1"),
    bad("--print-profile mlp", "--print-profile ", "--from-model-analyzer FILE"),
]


def test_the_installed_command_reports_bad_input_in_one_line(tune: Tune, sandbox: Sandbox) -> None:
    """The command runs in a new process, as users start it."""
    ended = tune_without_server(tune, sandbox, *NAMES[0].arguments.split())
    assert_says(ended, *NAMES[0].lines)


@pytest.mark.parametrize("case", [*FLAGS, *NAMES, *PROFILES], ids=str)
def test_bad_flags_model_names_and_profiles_are_reported(case: Bad, called_tune: Tune, sandbox: Sandbox) -> None:
    case.write_files(sandbox.working_folder)
    assert_says(tune_without_server(called_tune, sandbox, *case.arguments.split()), *case.lines)


@pytest.mark.parametrize("command", ["run", "sweep", "init"])
def test_an_empty_model_is_missing(sandbox: Sandbox, called_tune: Tune, command: str) -> None:
    assert_says(tune_without_server(called_tune, sandbox, command, ""), ("MODEL is missing", "tune models"))


@pytest.mark.parametrize("case", MODEL_ANALYZER, ids=str)
def test_errors_in_a_model_analyzer_file_name_the_line(case: Bad, called_tune: Tune, sandbox: Sandbox) -> None:
    case.write_files(sandbox.working_folder)
    ended = tune_without_server(called_tune, sandbox, *case.arguments.split(), "--json")
    assert_says(ended, *case.lines)


def test_a_model_analyzer_file_is_printed_as_a_profile(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    (sandbox.working_folder / "f").write_text(
        "model_repository: models\nprofile_models: m\nlatency_budget: 5\ngpus: all\n"
    )
    ended = called_tune("--from-model-analyzer", "f", "--print-profile", env=without_server(sandbox))
    assert (ended.code, ended.stderr_lines) == (0, [])
    assert "line 4, gpus: ignored: " in ended.stdout
    assert ended.stdout.endswith("model: {repository: models, name: m}\nsla: {p99: 5ms}\n")


@pytest.mark.parametrize("case", STORAGES, ids=str)
def test_a_bad_storage_is_reported_without_its_password(case: Bad, called_tune: Tune, sandbox: Sandbox) -> None:
    case.write_files(sandbox.working_folder)
    ended = tune_without_server(called_tune, sandbox, *case.arguments.split())
    assert_says(ended, *case.lines)
    assert SECRET not in ended.stderr


@pytest.mark.parametrize("case", ESCAPES, ids=str)
def test_a_profile_cannot_refer_to_files_outside_its_folder(case: Bad, called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.root, "m", CONFIG, doubler())
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    (sandbox.root / "secret.json").write_text("{}")
    (sandbox.working_folder / "link.json").symlink_to(sandbox.root / "secret.json")
    (sandbox.working_folder / "models" / "out").symlink_to(sandbox.root / "m")
    case.write_files(sandbox.working_folder)
    assert_says(tune_without_server(called_tune, sandbox, *case.arguments.split()), *case.lines)
