"""Import of Model Analyzer's files: every documented form, and a note for every key."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli.run import main, read_run_arguments
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.model.model_analyzer.keys import SECTIONS
from optimizer.model.model_analyzer.reader import (
    ModelAnalyzerImport,
    build_profile,
    read_model_analyzer,
    render_imported_profile,
)
from optimizer.model.profile import Profile, parse_profile
from optimizer.model.profile_schema import StoredModel
from optimizer.options.command_line import command_line
from optimizer.options.option_reader import move_options
from optimizer.options.run_options import RunOptions
from optimizer.study import task
from optimizer.study.model_finder import find_model
from optimizer.study.task import Task
from tests.conftest import not_none
from tests.repositories import doubler, stored, write_model

KNOWN = Path(__file__).parents[2] / "data" / "model_analyzer_keys.txt"  # triton-model-analyzer 1.58.0's own names
PAGE = Path(__file__).parents[3] / "docs" / "from-model-analyzer.md"
CONFIG = """\
platform: "onnxruntime_onnx"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
instance_group { count: 3 }
dynamic_batching { max_queue_delay_microseconds: 70 preferred_batch_size: 4 }
"""
MACHINE = Hardware((), "a CPU", 4, 2**34)
HEAD = "model_repository: models\n"
ONE = f"{HEAD}profile_models: m\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with a repository of two models."""
    for name in ("m", "n"):
        write_model(tmp_path / "models", name, CONFIG, doubler())
    (tmp_path / "data.json").write_text('{"data": [{"x": [1, 2, 3, 4]}]}')
    (tmp_path / "intervals.txt").write_text("1000\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, model: str | None = None) -> ModelAnalyzerImport:
    Path("ma.yaml").write_text(text)
    return read_model_analyzer(Path("ma.yaml"), model)


def profile(mapped: ModelAnalyzerImport, *, gpu: bool = False) -> Profile:
    return build_profile(mapped, RunOptions("m", model_repository="models"), stored(Path("models"))).for_hardware(
        gpu=gpu
    )


def prepared(*words: str) -> Task:
    return task.prepare_task(read_run_arguments(list(words)).options, MACHINE, print)


# -- documented forms --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A file's text and the expected import: options (without the repository) and sections of a profile."""

    text: str
    options: dict[str, str | int] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    other_models: dict[str, tuple[str, ...]] = field(default_factory=dict)  # keys of the profile's model


MANUAL = {"max_batch_size": (8,), "max_queue_delay_microseconds": (70,), "preferred_batch_size": ("4",)}
HELD = {**MANUAL, "instance_group_count": (3,)}
EXAMPLES = {
    "automatic": Example(f"{HEAD}profile_models:\n  - m\n"),
    "names with commas": Example(f"{HEAD}profile_models: m,n\n", model="n"),
    "quick": Example(f"run_config_search_mode: quick\n{ONE}"),
    "limits of the search": Example(
        f"""{ONE}
run_config_search_max_instance_count: 3
run_config_search_min_model_batch_size: 16
run_config_search_min_concurrency: 8
run_config_search_max_concurrency: 256
""",
        sections={
            "space": {"instance_group_count": (1, 2, 3), "max_batch_size": (16, 32, 64, 128)},
            "load": {"max_concurrency": 256},
        },
    ),
    "optuna": Example(
        f"""{HEAD}
run_config_search_mode: optuna
run_config_search_max_instance_count: 8
run_config_search_min_concurrency: 32
run_config_search_max_concurrency: 256
use_concurrency_formula: True
min_percentage_of_search_space: 10
optuna_max_trials: 200
optuna_early_exit_threshold: 15
profile_models:
  m:
    model_config_parameters:
      max_batch_size: [1, 4, 8, 32, 64, 128]
      dynamic_batching:
        max_queue_delay_microseconds: [100, 200, 300]
    parameters:
      batch_sizes: 1
""",
        options={"max-trials": 200},
        sections={
            "request": {"batch_size": 1},
            "load": {"max_concurrency": 256},
            "space": {
                "max_batch_size": (1, 4, 8, 32, 64, 128),
                "max_queue_delay_microseconds": (100, 200, 300),
                "instance_group_count": tuple(range(1, 9)),
            },
        },
    ),
    "constraints of all models": Example(
        f"{ONE}constraints:\n  gpu_used_memory:\n    max: 200\n  perf_throughput: {{min: 5}}\n",
        options={"min-throughput": "5/s", "max-memory": "200MB"},
    ),
    "constraints of each model": Example(
        f"""{HEAD}
constraints: {{perf_throughput: {{min: 5}}}}
profile_models:
  m:
    constraints:
      gpu_used_memory:
        max: 200
  n:
    constraints:
      perf_latency_p99:
        max: 50
""",
        sections={"sla": {"p99": "50ms"}},
        model="n",
    ),
    "every latency": Example(
        f"""{ONE}
constraints:
  perf_latency_avg: {{max: 5}}
  perf_latency_p90: {{max: 10}}
  perf_latency_p95: {{max: "20"}}
  perf_latency_p99: {{max: 30}}
  perf_latency: {{max: 40}}
""",
        sections={"sla": {"avg": "5ms", "p90": "10ms", "p95": "20ms", "p99": "30ms"}},
    ),
    "times of a model that streams": Example(
        f"""{ONE}
constraints:
  time_to_first_token_p95: {{max: 200}}
  inter_token_latency_avg: {{max: 30.5}}
objectives: [output_token_throughput, time_to_first_token_p99, inter_token_latency_p50]
""",
        options={"objective": "output-throughput,ttft-p99,itl-p50"},
        sections={"sla": {"ttft_p95": "200ms", "itl_avg": "30.5ms"}},
    ),
    "short forms": Example(
        f"{ONE}latency_budget: 10\nmin_throughput: 100\nconstraints: {{perf_latency: {{max: 99}}}}\n",
        options={"min-throughput": "100/s"},
        sections={"sla": {"p99": "10ms"}},
    ),
    "objectives": Example(
        f"{ONE}objectives:\n- perf_latency_p99\n- perf_throughput\n",
        options={"objective": "latency-p99,throughput"},
    ),
    "objectives with weights": Example(
        f"{ONE}objectives:\n  perf_latency_p99: 2\n  perf_throughput: 3\n",
        options={"objective": "throughput,latency-p99"},
    ),
    "several models at once": Example(
        f"""{HEAD}
run_config_profile_models_concurrently_enable: true
profile_models:
  m:
    weighting: 3
    objectives:
      perf_latency_p99: 1
  n:
    weighting: 1
    objectives:
      perf_throughput: 1
""",
        options={"objective": "latency-p99"},
        other_models={"concurrent_models": ("n",)},
    ),
    "parameters": Example(
        f"""{HEAD}
profile_models:
  m:
    parameters:
      concurrency:
        start: 2
        stop: 64
        step: 8
      batch_sizes: 2,1,3
""",
        sections={"request": {"batch_size": 2}, "load": {"max_concurrency": 58}},
    ),
    "loads of all models": Example(
        f"""{HEAD}
batch_sizes: 4
concurrency: 2, 4,8
profile_models: [m, n]
""",
        sections={"request": {"batch_size": 4}, "load": {"max_concurrency": 8}},
        model="m",
    ),
    "one list of groups": Example(
        f"""{HEAD}
profile_models:
  m:
    model_config_parameters:
      instance_group:
        - kind: KIND_CPU
          count: [1, 2]
""",
        sections={
            "space": {
                **MANUAL,
                "instance_group_count": (1, 2),
                "config": {"instance_group.0.kind": ("KIND_CPU",)},
            }
        },
    ),
    "eight configurations": Example(
        f"""{HEAD}
run_config_search_disable: True
profile_models:
  m:
    model_config_parameters:
      max_batch_size: [6, 8]
      dynamic_batching:
        max_queue_delay_microseconds: [200, 300]
      instance_group:
        - kind: KIND_GPU
          count: [1, 2]
""",
        sections={
            "load": {"max_concurrency": 1},
            "space": {
                "max_batch_size": (6, 8),
                "max_queue_delay_microseconds": (200, 300),
                "preferred_batch_size": ("4",),
                "instance_group_count": (1, 2),
            },
        },
    ),
    "lists of groups": Example(
        f"""{HEAD}
run_config_search_disable: True
profile_models:
  m:
    perf_analyzer_flags:
      percentile: 95
    model_config_parameters:
      max_batch_size: 2
      dynamic_batching:
        preferred_batch_size: [[2], [1, 2]]
      instance_group:
        - - kind: KIND_MODEL
            count: 1
        - - kind: KIND_CPU
            count: 1
    parameters:
      concurrency: 4
""",
        sections={
            "load": {"max_concurrency": 4},
            "space": {
                "max_batch_size": (2,),
                "max_queue_delay_microseconds": (70,),
                "preferred_batch_size": ("2", "1,2"),
                "instance_group_count": (1,),
                "config": {"instance_group.0.kind": ("KIND_MODEL", "KIND_CPU")},
            },
        },
    ),
    "nothing but a switch": Example(
        f"run_config_search_disable: yes\n{ONE}", sections={"load": {"max_concurrency": 1}, "space": HELD}
    ),
    "an empty dynamic_batching": Example(
        f"""{HEAD}
override_output_model_repository: True
concurrency: 1,2
batch_sizes: 1
profile_models:
  m:
    model_config_parameters:
      instance_group:
        -
          kind: KIND_CPU
          count: [1]
      dynamic_batching:
report_model_configs:
  - m_i0
""",
        sections={
            "request": {"batch_size": 1},
            "load": {"max_concurrency": 2},
            "space": {
                **MANUAL,
                "instance_group_count": (1,),
                "config": {"instance_group.0.kind": ("KIND_CPU",)},
            },
        },
    ),
    "other fields": Example(
        f"""{HEAD}
run_config_search_mode: quick
profile_models:
  m:
    cpu_only: true
    model_config_parameters:
      parameters: {{intra_op_thread_count: {{string_value: ["1", "2"]}}}}
      optimization:
        execution_accelerators:
          cpu_execution_accelerator:
            - - name: openvino
            - - name: other
      dynamic_batching: [null, {{}}, {{max_queue_delay_microseconds: 5}}]
""",
        sections={
            "space": {
                "max_queue_delay_microseconds": (70, 5),
                "config": {
                    "parameters.intra_op_thread_count.string_value": ("1", "2"),
                    "optimization.execution_accelerators.cpu_execution_accelerator.0.name": ("openvino", "other"),
                    "instance_group.0.kind": ("KIND_CPU",),
                },
            }
        },
    ),
    "flags of perf_analyzer": Example(
        f"""{HEAD}
client_protocol: grpc
perf_analyzer_flags: {{percentile: 90}}
profile_models:
  m:
    perf_analyzer_flags:
      shape:
        - x:4
        - INPUT:1:16,4
      input-data: data.json
      measurement-interval: 4000
      protocol: HTTP
      concurrency-range: 1:32:2
      batch-size: 2
      shared-memory: system
      output-shared-memory-size: 2048
""",
        options={
            "measurement-interval": "4000ms",
            "protocol": "http",
            "shared-memory": "system",
            "output-shared-memory-size": "2048B",
        },
        sections={
            "request": {"batch_size": 2, "input_data": Path("data.json"), "shapes": {"x": "4", "INPUT:1": "16,4"}},
            "load": {"max_concurrency": 32},
        },
    ),
    "a request rate": Example(
        f"{HEAD}client_protocol: http\nprofile_models: {{m: {{parameters: {{request_rate: [50, 100]}}}}}}\n",
        options={"load": "rate", "request-distribution": "constant"},
    ),
    "a search of request rates": Example(
        f"""{ONE}
request_rate_search_enable: true
perf_analyzer_flags: {{request-distribution: poisson, input-data: zero}}
""",
        options={"load": "rate", "request-distribution": "poisson"},
        sections={"request": {"input_data": "zero"}},
    ),
    "intervals of requests": Example(
        f"{ONE}perf_analyzer_flags: {{request-intervals: intervals.txt}}\n",
        options={"load": "rate", "request-intervals": "intervals.txt"},
    ),
    "composing models": Example(
        f"""{HEAD}
run_config_search_mode: quick
export_path: /tmp/results
override_output_model_repository: true
profile_models:
  - m
ensemble_composing_models:
  tokenizer:
    model_config_parameters:
      instance_group:
        - kind: KIND_CPU
          count: [1, 2, 4, 8, 16, 32]
bls_composing_models: [n]
cpu_only_composing_models: [n]
""",
        sections={
            "space": {
                "config": {"instance_group.0.kind": ("KIND_CPU",)},
                "models": {
                    "tokenizer": {
                        "instance_group_count": (1, 2, 4, 8, 16, 32),
                        "config": {"instance_group.0.kind": ("KIND_CPU",)},
                    }
                },
            }
        },
        other_models={"bls_composing_models": ("n",)},
    ),
    "strings": Example(
        f"{ONE}perf_analyzer_flags: {{string-length: 16, bls-composing-models: 'a,b'}}\n",
        sections={"request": {"string_length": 16}},
        other_models={"bls_composing_models": ("a", "b")},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_documented_form_is_imported_as_documented(name: str, folder: Path) -> None:
    example = EXAMPLES[name]
    mapped = read(example.text, example.model)
    assert mapped.model == (example.model or "m")
    assert mapped.settings.options == example.options
    assert mapped.options(None) == {**example.options, "model-repository": "models"}
    result = profile(mapped)
    values = result.model_dump(exclude_unset=True, exclude={"model"})
    expected = {name: dict(keys) for name, keys in example.sections.items()}
    if isinstance(data := expected.get("request", {}).get("input_data"), Path):
        expected["request"]["input_data"] = folder / data
    for short, text in expected.get("sla", {}).items():
        expected["sla"][short] = float(text.removesuffix("ms"))
    assert values == expected
    assert isinstance(result.model, StoredModel)
    assert result.model.model_dump(exclude_unset=True) == {
        "repository": folder / "models",
        "name": mapped.model,
        **example.other_models,
    }
    assert_each_key_has_one_note(example, mapped)
    assert_the_printed_profile_is_the_same(example, mapped, folder)


def assert_each_key_has_one_note(example: Example, mapped: ModelAnalyzerImport) -> None:
    messages = [note.keys[0] for note in mapped.notes]
    root = {line.partition(":")[0] for line in example.text.splitlines() if re.match("[a-z_]+:", line)}
    assert root == set(messages)
    assert len({(note.keys, note.line) for note in mapped.notes}) == len(mapped.notes)
    assert all(str(note).startswith(f"ma.yaml:{note.line}: {'.'.join(note.keys)}: ") for note in mapped.notes)
    assert [note.line for note in mapped.notes] == sorted(note.line for note in mapped.notes)


def assert_the_printed_profile_is_the_same(example: Example, mapped: ModelAnalyzerImport, folder: Path) -> None:
    options = read_run_arguments(["--from-model-analyzer", "ma.yaml", *([example.model] if example.model else [])])
    for gpu in (False, True):
        text = render_imported_profile(mapped, options.options, stored(Path("models")))
        printed = parse_profile(text.encode(), folder / "m.yaml").for_hardware(gpu=gpu)
        imported = profile(mapped, gpu=gpu)
        assert printed.model == imported.model
        assert printed.model_dump(exclude={"model"}) == imported.model_dump(exclude={"model"})
    assert all(f"# {comment}" in text for comment in (f"  line {n.line}, " for n in mapped.notes if not n.is_mapped))


def test_the_task_is_that_of_the_printed_profile() -> None:
    """The command is the one in the first comments of the profile."""
    text = EXAMPLES["flags of perf_analyzer"].text.replace("        - INPUT:1:16,4\n", "")
    read(f"{text}constraints: {{perf_latency_p95: {{max: 20}}, perf_throughput: {{min: 10}}}}\n")
    values = read_run_arguments(["--from-model-analyzer", "ma.yaml", "--print-profile", "--budget", "1m"])
    assert values.parsed["print-profile"]
    printed = render_imported_profile(not_none(values.model_analyzer), values.options, stored(Path("models")))
    Path("m.yaml").write_text(printed)
    (command,) = re.findall("^#   (tune .*)", printed, re.MULTILINE)
    printed_arguments = read_run_arguments(shlex.split(command)[1:])
    imported_task = task.prepare_task(values.options, MACHINE, print)
    printed_task = task.prepare_task(printed_arguments.options, MACHINE, print)
    assert imported_task.notes
    assert replace(imported_task, notes=()) == printed_task
    assert printed_arguments.options == replace(
        values.options, model="m.yaml", model_repository=None, from_model_analyzer=None
    )
    assert [str(bound) for bound in imported_task.problem.sla] == ["p95 <= 20 ms", "throughput >= 10 infer/s"]


def test_a_preview_has_each_note_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ma.yaml").write_text(f"{ONE}export_path: out\n")
    assert main(["--from-model-analyzer", "ma.yaml", "--dry-run"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.count("export_path: ignored") == 1
    assert stderr == ""


# -- GPUs -------------------------------------------------------------------------------------------------------


def test_gpu_is_requested_if_there_is_one() -> None:
    group = "{kind: [KIND_GPU, KIND_CPU], count: 1, gpus: [0]}"
    mapped = read(f"{HEAD}profile_models: {{m: {{model_config_parameters: {{instance_group: [{group}]}}}}}}\n")
    without, with_gpu = profile(mapped).space, profile(mapped, gpu=True).space
    assert not_none(without).config == {"instance_group.0.kind": ("KIND_CPU",)}
    assert not_none(with_gpu).config == {
        "instance_group.0.kind": ("KIND_GPU", "KIND_CPU"),
        "instance_group.0.gpus.0": (0,),
    }


# -- notes ------------------------------------------------------------------------------------------------------


def test_every_key_of_model_analyzer_is_imported_or_noted() -> None:
    """The documentation of Model Analyzer names one objective more than its program, which is imported too."""
    more = {"`objectives`": {"cpu_free_ram"}}
    known = dict(line.split(": ", 1) for line in KNOWN.read_text().splitlines())
    expected = {section: set(names.split()) | more.get(section, set()) for section, names in known.items()}
    assert {section: set(SECTIONS[section]) for section in known} == expected
    assert SECTIONS.keys() - known.keys() == {"`model_config_parameters` of a model"}, "these are Triton's keys"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("triton_launch_mode: remote\n", "ma.yaml:3: triton_launch_mode: ignored: trials run on tune's own server"),
        ("weighting: 2\n", "ma.yaml:3: weighting: not supported: all models count alike in the objective; "),
        ("latency_budget:\n", "ma.yaml:3: latency_budget: ignored: nothing is given"),
        ("batch_sizes: [2, 1, 2, 4]\n", "ma.yaml:3: batch_sizes: not supported: several request sizes in one run; "),
        ("perf_analyzer_flags: {request-distribution: poisson}\n", "ignored: requests are not sent at a rate"),
        ("perf_analyzer_flags: {measurement-interval: 20000}\n", "not supported: windows other than 50 to 15000 ms"),
        ("client_protocol: http\nrequest_rate: 5\n", "client_protocol: not supported: requests at a rate"),
        ("perf_analyzer_flags: {output-shared-memory-size: 5}\n", "size: ignored: no shared memory is used"),
        (
            "request_rate: 5\nperf_analyzer_flags: {shared-memory: cuda}\n",
            "not supported: requests at a rate use system shared memory only",
        ),
        ("objectives: [gpu_utilization, perf_throughput]\n", "objectives.gpu_utilization: not supported: use "),
        ("optuna_max_trials: 5\n", "optuna_max_trials: ignored: the search mode is brute"),
        (
            "run_config_search_max_concurrency: 5\nconcurrency: 3\n",
            "ma.yaml:3: run_config_search_max_concurrency: ig",
        ),
        ("run_config_search_max_concurrency: 5\nrequest_rate: 3\n", "ignored: requests are sent at a rate"),
        ("run_config_search_max_instance_count: 2\nrun_config_search_disable: on\n", "run_config_search_disable dec"),
        ("latency_budget: 5\nconstraints: {perf_latency_p99: {max: 9}}\n", "ignored: latency_budget replaces it"),
        ("constraints: {time_to_first_token_p99: {max: 9}}\n", "p99: mapped to the bound `sla.ttft_p99`"),
        ("constraints: {inter_token_latency_max: {max: 9}}\n", "max: not supported: use one of avg, p50, p90, p95"),
        ("constraints: {output_token_throughput: {min: 9}}\n", "not supported: use perf_throughput, the requests"),
    ],
)
def test_a_note_says_how_a_key_is_imported(text: str, line: str) -> None:
    notes = [str(note) for note in read(ONE + text).notes]
    assert [note for note in notes if line in note], notes


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("instance_group: [{kind: KIND_CPU, count: 1}, {kind: KIND_GPU, count: 1}]", "several instance groups"),
        ("instance_group: [[{kind: KIND_CPU, count: 4}], [{kind: KIND_MODEL, count: 1}]]", "with each of the others"),
        ("dynamic_batching: [{preferred_batch_size: [4]}, {}]", "choices that set different fields"),
        ("optimization: {}", "an empty field"),
        ("dynamic_batching: {}", "dynamic batching, without a delay if"),
    ],
)
def test_choices_that_a_space_cannot_express_are_noted(parameters: str, words: str) -> None:
    mapped = read(f"{HEAD}profile_models: {{m: {{model_config_parameters: {{{parameters}}}}}}}\n")
    assert words in " ".join(map(str, mapped.notes))
    assert profile(mapped).space is not None


# -- the command line -------------------------------------------------------------------------------------------


def test_shared_memory_of_the_file_can_be_switched_off() -> None:
    flags = "{shared-memory: system, output-shared-memory-size: 9}"
    read(f"{HEAD}profile_models: {{m: {{perf_analyzer_flags: {flags}}}}}")
    words = ["--from-model-analyzer", "ma.yaml"]
    assert read_run_arguments(words).options.output_shared_memory_bytes == 9
    options = read_run_arguments(["--shared-memory", "none", *words]).options
    assert (options.shared_memory, options.output_shared_memory_bytes) == ("none", None)


def test_command_line_flags_override_the_file() -> None:
    read(f"""{HEAD}
latency_budget: 50
objectives: [perf_latency_p99]
profile_models: {{m: {{parameters: {{request_rate: 9, batch_sizes: 2}}}}}}
""")
    request_options = ["--from-model-analyzer", "ma.yaml"]
    rate = read_run_arguments(request_options).options
    assert (rate.load, rate.request_times, rate.objectives) == ("rate", "constant", ("latency-p99",))
    won = ["--load=concurrency", "--objective=throughput", "--sla-p95=9ms", "--request-batch-size=4"]
    options = read_run_arguments([*won, *request_options, "m"]).options
    assert (options.load, options.request_times, options.objectives) == ("concurrency", "poisson", ("throughput",))
    recorded = read_run_arguments([*request_options, "--request-intervals", "intervals.txt"]).options
    assert (recorded.load, recorded.request_times) == ("rate", "intervals.txt")
    target_task = task.prepare_task(options, MACHINE, print)
    assert [str(bound) for bound in target_task.problem.sla] == ["p95 <= 9 ms"]
    assert target_task.problem.request_batch_size == 4
    for values in (rate, options, recorded):
        assert read_run_arguments(shlex.split(command_line(values))[1:]).options == values


@pytest.mark.parametrize("target", ["docker", "remote", "local"])
def test_a_backend_of_the_users_server_is_found_by_the_other_targets(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG.replace('platform: "onnxruntime_onnx"', 'backend: "tensorrt"')
    write_model(folder / "models", "engine", config, None)
    limit = "run_config_search_max_model_batch_size: 4"
    read(f"{HEAD}profile_models: {{engine: {{model_config_parameters: {{dynamic_batching: {{}}}}}}}}\n{limit}\n")
    target_options = {"docker": ["--docker-image=triton"], "remote": ["--url=triton:8001"], "local": []}[target]
    words = ["--from-model-analyzer", "ma.yaml", "--target", target, *target_options]
    found_model = find_model(read_run_arguments(words).options, MACHINE, print, start_server=False)
    assert found_model.profile is not None
    assert not_none(found_model.profile.space).max_queue_delay_microseconds == (70,)
    assert main([*words, "--print-profile"]) == 0
    assert "max_queue_delay_microseconds: [70]" in capsys.readouterr().out
    with pytest.raises(BadInputError, match="backend 'tensorrt' is not in the embedded server"):
        find_model(read_run_arguments(words[:2]).options, MACHINE, print)


def write_chain(repository: Path, *steps: str) -> None:
    """Write the ensemble ``chain``, whose input each of the models ``steps`` gets; its output is the first one's."""
    tensors = "\n".join(line for line in CONFIG.splitlines() if line.startswith(("max_", "input", "output")))
    scheduling = " ".join(
        f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "x" }} '
        f'output_map {{ key: "y" value: "{f"y{number}" if number else "y"}" }} }}'
        for number, step in enumerate(steps)
    )
    write_model(repository, "chain", f"platform: 'ensemble'\n{tensors}\nensemble_scheduling {{ {scheduling} }}", None)


def test_choices_of_composing_models_are_those_of_the_steps(folder: Path) -> None:
    write_chain(folder / "models", "m", "n")
    mapped = read(f"""{HEAD}profile_models: chain
run_config_search_max_instance_count: 3
ensemble_composing_models:
  m: {{model_config_parameters: {{instance_group: [{{kind: KIND_CPU, count: [1, 4]}}]}}, weighting: 2}}
  n:
    model_config_parameters:
      instance_group: [{{kind: KIND_GPU, count: [1, 2]}}]
      dynamic_batching: {{max_queue_delay_microseconds: [0]}}
""")
    space, gpu_space = profile(mapped).space, profile(mapped, gpu=True).space
    assert space is not None
    assert space.instance_group_count == (1, 4), "m is the step whose batches are tuned"
    assert space.config == {"instance_group.0.kind": ("KIND_CPU",)}
    of_n = {"instance_group_count": (1, 2), "max_queue_delay_microseconds": (0,)}
    assert space.models["n"].fields() == of_n
    assert not_none(gpu_space).models["n"].fields() == {**of_n, "instance_group.0.kind": ("KIND_GPU",)}
    notes = [str(note) for note in mapped.notes if "composing_models.m.weighting" in str(note)]
    assert notes == [
        "ma.yaml:5: ensemble_composing_models.m.weighting: not supported: only the choices of a composing model are "
        "imported"
    ]


def test_a_step_without_a_batch_dimension_gets_no_batching(folder: Path) -> None:
    write_chain(folder / "models", "m", "n")
    unbatched = CONFIG.replace("max_batch_size: 8", "").partition("dynamic_batching")[0]
    (folder / "models" / "n" / "config.pbtxt").write_text(unbatched.replace("dims: 4", "dims: [ -1, 4 ]"))
    mapped = read(f"""{HEAD}profile_models: chain
ensemble_composing_models:
  n:
    model_config_parameters:
      dynamic_batching: {{max_queue_delay_microseconds: [0]}}
      instance_group: [{{count: 2}}]
""")
    space = not_none(profile(mapped).space)
    assert space.models["n"].fields() == {"instance_group_count": (2,)}


@pytest.mark.parametrize(
    "key", ["cpu_only_composing_models: [other]", "ensemble_composing_models: [{other: {cpu_only: on}}]"]
)
def test_an_error_about_a_composing_model_names_the_key_of_the_file(key: str, folder: Path) -> None:
    write_chain(folder / "models", "m", "n")
    mapped = read(f"{HEAD}profile_models: chain\n{key}\n")
    fault = profile(mapped).fault("space", "models", "other", problem="unknown")
    assert str(fault).endswith(f"ma.yaml:3: {key.partition(':')[0]}.other: unknown")


def test_values_of_config_pbtxt_are_those_of_the_tuned_step(folder: Path) -> None:
    write_chain(folder / "models", "m")
    caller = CONFIG.replace("count: 3", "count: 2").replace("max_queue_delay_microseconds: 70", "")
    (folder / "models" / "n" / "config.pbtxt").write_text(caller)
    for models in ("profile_models: chain", "profile_models: n\nbls_composing_models: [m]"):
        space = not_none(profile(read(f"{HEAD}run_config_search_disable: true\n{models}\n")).space)
        assert (space.max_batch_size, space.max_queue_delay_microseconds) == ((8,), (70,))
        assert (space.preferred_batch_size, space.instance_group_count) == (("4",), (3,))


def test_a_repository_in_another_folder_is_found(folder: Path) -> None:
    read("model_repository: /models/of/a/container\nprofile_models: m\n")
    (folder / "models").rename(folder / "moved")
    target_task = prepared("--from-model-analyzer", "ma.yaml", "--model-repository", "moved")
    assert target_task.source.repository == folder / "moved"
    assert target_task.source.name == "m"


def test_paths_begin_in_the_current_or_the_files_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(f"{ONE}perf_analyzer_flags: {{input-data: data.json}}\n")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    target_task = prepared("--from-model-analyzer", "../ma.yaml")
    assert (target_task.source.repository, target_task.input_data) == (folder / "models", folder / "data.json")
    (folder / "below" / "models").symlink_to(folder / "models")
    assert prepared("--from-model-analyzer", "../ma.yaml").source.repository == folder / "models"
    (folder / "below" / "data.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"ma.yaml:3: .*input-data: 'data.json' exists in the current folder and"):
        prepared("--from-model-analyzer", "../ma.yaml")


def test_run_is_resumed_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(ONE)
    options = read_run_arguments(["--from-model-analyzer", "ma.yaml"]).options
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    moved_options = move_options(folder, options)
    assert task.prepare_task(moved_options, MACHINE, print).source.repository == folder / "models"


def test_a_file_without_models_takes_the_one_that_is_named() -> None:
    read("latency_budget: 20\n", "n")
    target_task = prepared("--from-model-analyzer", "ma.yaml", "--model-repository", "models", "n")
    assert target_task.source.name == "n"
    assert [str(bound) for bound in target_task.problem.sla] == ["p99 <= 20 ms"]


# -- errors -----------------------------------------------------------------------------------------------------


def group(text: str) -> str:
    return f"{HEAD}profile_models:\n  m:\n    model_config_parameters:\n      {text}\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ma.yaml: empty; a configuration of Model Analyzer has a line 'profile_models:'"),
        ("- m\n", "ma.yaml:1: ['m'] is not a mapping"),
        ("model: {builder: mlp}\n", "ma.yaml:1: this is the profile of a model; tune it with `tune FILE`"),
        (f"{ONE}client_prototcol: grpc\n", "ma.yaml:3: client_prototcol: unknown key; did you mean client_protocol?"),
        (f"{ONE}model-type: LLM\n", "ma.yaml:3: model-type: unknown key; did you mean model_type?"),
        (f"{HEAD}profile_models: {{m: {{cpuonly: 1}}}}\n", "m.cpuonly: unknown key; did you mean cpu_only?"),
        (f"{ONE}perf_analyzer_flags: {{input_data: zero}}\n", "unknown key; did you mean input-data?"),
        (f"{ONE}constraints: {{perf_latency_p9: {{max: 1}}}}\n", "unknown key; did you mean perf_latency_p99?"),
        (f"{ONE}constraints: {{perf_latency_p99: {{min: 1}}}}\n", "p99.min: unknown key; known: max"),
        (f"{ONE}constraints: {{perf_latency_p99: {{max: 0}}}}\n", "p99.max: 0 is not a number above 0"),
        (f"{ONE}constraints: {{perf_latency_p99: 5}}\n", "constraints.perf_latency_p99: 5 is not a mapping"),
        (f"{ONE}constraints: {{perf_throughput: {{}}}}\n", "constraints.perf_throughput: has no min"),
        (f"{ONE}objectives: [speed]\n", "ma.yaml:3: objectives: 'speed' is not one of perf_throughput, "),
        (f"{ONE}objectives: {{perf_throughput: 0}}\n", "objectives.perf_throughput: 0 is not a number above 0"),
        (f"{ONE}latency_budget: soon\n", "ma.yaml:3: latency_budget: 'soon' is not a number above 0"),
        (f"{ONE}concurrency: 1,x\n", "ma.yaml:3: concurrency: 'x' is not a whole number from 1"),
        (f"{ONE}concurrency: []\n", "ma.yaml:3: concurrency: is empty; give at least one number"),
        (
            f"{ONE}concurrency: {{start: 4, stop: 2}}\n",
            "concurrency: start 4, stop 2: a range has 1 to 10000 numbers",
        ),
        (f"{ONE}concurrency: {{start: 1, stop: 2, step: 0}}\n", "concurrency.step: 0 is not a whole number from 1"),
        (f"{ONE}concurrency: {{start: 1}}\n", "concurrency: a range has start, stop and, if not 1, step"),
        (f"{ONE}concurrency: 1\nrequest_rate: 5\n", "ma.yaml:4: request_rate: is given together with concurrency"),
        (f"{ONE}run_config_search_mode: slow\n", "run_config_search_mode: 'slow' is not one of brute, quick, optuna"),
        (f"{ONE}run_config_search_disable: maybe\n", "'maybe' is neither true nor false"),
        (f"{ONE}run_config_search_min_model_batch_size: 256\n", "the minimum 256 is above the maximum 128"),
        (f"{ONE}run_config_search_max_instance_count: 5000\n", "1 to 5000 are too many to try"),
        (f"{ONE}client_protocol: tcp\n", "client_protocol: 'tcp' is not one of http, grpc"),
        (f"{ONE}perf_analyzer_flags: {{shape: 'x'}}\n", "shape: is not NAME:D1,D2"),
        (
            f"{ONE}perf_analyzer_flags: {{input-data: no.json}}\n",
            "input-data: 'no.json' does not exist in the current",
        ),
        (f"{ONE}perf_analyzer_flags: {{input-data: []}}\n", "input-data: is empty"),
        (f"{HEAD}profile_models: [m, n]\n", "ma.yaml: has several models; add the one to tune: m, n"),
        (HEAD, "ma.yaml: names no model; add MODEL"),
        (f"{HEAD}profile_models: [../m]\n", "ma.yaml:2: profile_models: '../m' has a separator"),
        (f"{HEAD}profile_models: [m, m]\n", "ma.yaml:2: profile_models: m is given twice"),
        (
            f"{HEAD}profile_models:\n  m: {{}}\n  m: {{}}\n",
            "ma.yaml:4: profile_models.m: set twice (first on line 3)",
        ),
        ("profile_models: m\n", "ma.yaml: model_repository: missing; give --model-repository DIR"),
        (
            "profile_models: m\nmodel_repository: /none\n",
            "ma.yaml:2: model_repository: '/none' does not exist; give another with --model-",
        ),
        (
            "profile_models: o\nmodel_repository: models\n",
            "ma.yaml:1: profile_models: 'o' is not a model of the repo",
        ),
        (
            group("max_batchsize: 4"),
            "ma.yaml:5: profile_models.m.model_config_parameters.max_batchsize: unknown key; d",
        ),
        (group("max_batch_size: many"), "max_batch_size: 'many' is not a whole number from 0"),
        (group("max_batch_size: []"), "max_batch_size: is empty"),
        (group("max_batch_size: {a: 1}"), "a mapping is not a value, nor a list of values to try"),
        (group("instance_group: {count: 1}"), "a mapping is not a list, nor a list of lists to try"),
        (group("instance_group: [{count: 0}]"), "instance_group.count: 0 is not a whole number from 1"),
        (group("instance_group: [{kind: KIND_TPU}]"), "'KIND_TPU' does not fit; it takes KIND_AUTO, "),
        (group("dynamic_batching: 5"), "5 is not a mapping, nor a list of mappings to try"),
        (group("dynamic_batching: {preferred_batch_size: 4}"), "4 is not a list, nor a list of lists to try"),
        (group("dynamic_batching: {preferred_batch_size: [x]}"), "preferred_batch_size: 'x' is not a whole number"),
        (
            group("max_batch_size: [4]\n      dynamic_batching: {preferred_batch_size: [16]}"),
            "ma.yaml:4: space: no valid configuration: max_b",
        ),
    ],
)
def test_a_fault_is_reported_on_one_line(text: str, line: str) -> None:
    Path("ma.yaml").write_text(text)
    with pytest.raises(BadInputError) as raised:
        prepared("--from-model-analyzer", "ma.yaml")
    assert line in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("ma.yaml:")


def test_a_model_in_a_list_of_lists_is_read() -> None:
    read(f"{HEAD}profile_models: [[m]]\n")
    assert prepared("--from-model-analyzer", "ma.yaml").source.name == "m"


def test_a_model_that_the_file_does_not_have_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"ma.yaml: no model 'o' in it; it has m, n$"):
        read(f"{HEAD}profile_models: [m, n]\n", "o")


def test_too_many_combinations_are_refused() -> None:
    counts = ", ".join(str(count) for count in range(1, 40))
    with pytest.raises(BadInputError, match="has more than 1000 combinations"):
        read(group(f"instance_group: [[{{count: [{counts}], gpus: [[0], [1]], host_policy: [{counts}]}}], []]"))


# -- the page ---------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_can_be_given(folder: Path) -> None:
    page = PAGE.read_text()
    (text,) = re.findall("```yaml\n# config.yaml\n(.*?)```", page, re.DOTALL)
    (folder / "config.yaml").write_text(text)
    write_model(folder / "models", "my_model", CONFIG, doubler())
    commands = [line for block in re.findall("```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command.partition(" > ")[0])
        assert words[0] == "tune"
        if "--from-model-analyzer" in words:
            values = read_run_arguments(words[1:])
            assert task.prepare_task(values.options, MACHINE, print).source.name == "my_model"
            imported = values.model_analyzer or read(ONE)
            text = render_imported_profile(imported, values.options, stored(folder / "models"))
            (folder / "my_model.yaml").write_text(text)
        else:
            assert task.prepare_task(read_run_arguments(words[1:]).options, MACHINE, print).source.name == "my_model"
