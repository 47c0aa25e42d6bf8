"""Tests of reading and writing config.pbtxt, of applying a candidate, and of comparing a served configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config import field_path
from optimizer.config.model_config import (
    apply,
    candidate_of,
    differences,
    has_fixed_shapes,
    read,
    to_override_json,
    to_text,
    with_explicit_counts,
    with_warmup,
    without_response_cache,
)
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.errors import BadInputError

THREADS = "parameters.intra_op_thread_count.string_value"
CONFIG = """
name: "dlrm"
backend: "onnxruntime"
max_batch_size: 64
input { name: "input__0" data_type: TYPE_FP32 dims: [ -1, 13 ] }
instance_group { kind: KIND_GPU count: 2 gpus: [ 0, 1 ] rate_limiter { priority: 3 } }
dynamic_batching {
  preferred_batch_size: [ 64, 32 ]
  max_queue_delay_microseconds: 100
  preserve_ordering: true
  default_queue_policy { max_queue_size: 7 default_timeout_microseconds: 5000000000 }
  priority_queue_policy { key: 2 value { timeout_action: DELAY } }
}
parameters { key: "intra_op_thread_count" value { string_value: "4" } }
"""


def config(text: str = CONFIG) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


# -- reading ------------------------------------------------------------------------------------------------


def test_a_written_config_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(to_text(config()))
    assert read(path) == config()


def test_a_parse_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text('name: "m"\nmax_batch_size: 8\nmax_bath_size: 8\n')
    with pytest.raises(BadInputError, match=r'config.pbtxt:3: .*no field named "max_bath_size"') as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "not UTF-8 text at byte 0"), (b" " * (2**20 + 1), "larger than 1 MiB")],
)
def test_text_that_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"config.pbtxt: no such file; check the path"):
        read(tmp_path / "config.pbtxt")
    with pytest.raises(BadInputError, match="is a folder; check the path"):
        read(tmp_path)


# -- candidate_of -------------------------------------------------------------------------------------------


def test_candidate_of_returns_the_settings_of_the_config() -> None:
    candidate = candidate_of(config(), [THREADS, "optimization.graph.level"])
    assert candidate == Candidate(64, True, 100, (32, 64), 2, ((THREADS, "4"),))
    assert candidate_of(config("max_batch_size: 8 dynamic_batching { }")) == Candidate(8, True)
    assert candidate_of(config("")) == Candidate(0)


def test_groups_of_different_counts_are_refused() -> None:
    text = (
        "name: 'm' instance_group { count: 1 } instance_group { count: 2 } instance_group { count: 5 passive: true }"
    )
    with pytest.raises(BadInputError, match=r"m: .* different counts \(1, 2\)"):
        candidate_of(config(text))


@pytest.mark.parametrize(
    ("text", "on_gpu", "count"),
    [
        ('backend: "onnxruntime"', False, 2),
        ('backend: "onnxruntime"', True, 1),
        ('platform: "onnxruntime_onnx" instance_group { kind: KIND_CPU }', True, 2),
        ('backend: "onnxruntime" instance_group { kind: KIND_GPU }', False, 1),
        ('backend: "onnxruntime" instance_group { count: 3 }', False, 3),
        ('backend: "python"', False, 1),
    ],
)
def test_the_count_that_triton_chooses_is_written_down(text: str, on_gpu: bool, count: int) -> None:
    filled = with_explicit_counts(config(text), gpu=on_gpu)
    assert [group.count for group in filled.instance_group] == [count]
    assert candidate_of(filled).instance_count == count


def test_ensembles_have_no_instances() -> None:
    ensemble = config('name: "e" ensemble_scheduling { step { model_name: "m" } }')
    assert with_explicit_counts(ensemble, gpu=False) == ensemble
    assert apply(Candidate(0), ensemble) == ensemble
    with pytest.raises(BadInputError, match="e: an ensemble has no instances"):
        apply(Candidate(0, instance_count=2), ensemble)
    with pytest.raises(BadInputError, match="e: has ensemble_scheduling, which excludes dynamic batching"):
        apply(Candidate(8, True), ensemble)


# -- applying -----------------------------------------------------------------------------------------------


def test_only_the_tuned_settings_change() -> None:
    base = config()
    result = apply(Candidate(128, True, 500, (64,), 3, ((THREADS, 2),)), base)
    expected = config(
        CONFIG.replace("max_batch_size: 64", "max_batch_size: 128")
        .replace("[ 64, 32 ]", "[ 64 ]")
        .replace("microseconds: 100", "microseconds: 500")
        .replace("count: 2", "count: 3")
        .replace('"4"', '"2"')
    )
    assert result == expected
    assert base == config()


def test_without_dynamic_batching_its_message_is_gone() -> None:
    fields: tuple[tuple[str, FieldValue], ...] = (("dynamic_batching.preserve_ordering", True),)
    result = apply(Candidate(64, instance_count=2, fields=fields), config())
    assert not result.HasField("dynamic_batching")


def test_plain_dynamic_batching_is_an_empty_message() -> None:
    result = apply(Candidate(8, True), config("max_batch_size: 8"))
    assert result.HasField("dynamic_batching")
    assert "dynamic_batching {\n}" in to_text(result)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "instance_group { count: 4 }"),
        ("instance_group { kind: KIND_CPU }", "instance_group { kind: KIND_CPU count: 4 }"),
        (
            "instance_group { count: 1 gpus: 0 } instance_group { count: 1 gpus: 1 }",
            "instance_group { count: 4 gpus: 0 } instance_group { count: 4 gpus: 1 }",
        ),
        (
            "instance_group { count: 1 } instance_group { count: 2 passive: true }",
            "instance_group { count: 4 } instance_group { count: 2 passive: true }",
        ),
    ],
)
def test_the_count_goes_to_every_group_that_runs_requests(text: str, expected: str) -> None:
    assert apply(Candidate(0, instance_count=4), config(text)) == config(expected)


def test_another_scheduler_excludes_dynamic_batching() -> None:
    with pytest.raises(BadInputError, match=r'm: has sequence_batching, .*; tune it "off"'):
        apply(Candidate(8, True), config('name: "m" sequence_batching { }'))
    base = config('name: "m" max_batch_size: 8 sequence_batching { }')
    assert apply(Candidate(8), base) == base


counts = st.integers(0, 4)
groups = st.builds(
    lambda count, n: f"instance_group {{ count: {count} kind: KIND_CPU }} " * n, counts, st.integers(0, 2)
)
batchings = st.one_of(
    st.just(""),
    st.builds(
        "dynamic_batching {{ preferred_batch_size: {} max_queue_delay_microseconds: {} }}".format,
        st.lists(st.integers(1, 64), max_size=4),
        st.integers(0, 2**40),
    ),
)


@given(st.integers(0, 64), groups, batchings)
def test_applying_the_candidate_of_a_config_changes_nothing(size: int, group: str, batching: str) -> None:
    base = config(f"max_batch_size: {size} {group} {batching}")
    assert apply(candidate_of(base, [THREADS]), base) == base


def test_every_candidate_of_a_space_can_be_applied_and_read_back() -> None:
    space = SearchSpace((8, 16), ("off", 0, 100), ("none", "max/2"), (1, 2), {THREADS: (1, 2)})
    for candidate in space.candidates():
        result = apply(candidate, config())
        assert space.canonical(candidate_of(result, space.fields)) == candidate
        assert differences(candidate, result) == []
        assert text_format.Parse(to_text(result), ModelConfig()) == result


# -- the override -------------------------------------------------------------------------------------------


def test_the_override_has_proto_names_and_whole_numbers() -> None:
    plain = json.loads(to_override_json(config()))
    assert plain["max_batch_size"] == 64
    assert plain["input"][0]["dims"] == [-1, 13]
    assert plain["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert plain["dynamic_batching"]["default_queue_policy"]["default_timeout_microseconds"] == 5_000_000_000
    assert plain["dynamic_batching"]["priority_queue_policy"]["2"]["timeout_action"] == "DELAY"
    assert plain["parameters"]["intra_op_thread_count"] == {"string_value": "4"}


# -- differences --------------------------------------------------------------------------------------------

EXPECTED_CANDIDATE = Candidate(64, True, 100, (32, 64), 2, ((THREADS, 4),))
TRITON_DEFAULTS = """
version_policy { latest { num_versions: 1 } }
optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }
default_model_filename: "model.onnx"
"""


def test_defaults_that_triton_adds_are_no_difference() -> None:
    serving = config(CONFIG + TRITON_DEFAULTS)
    serving.instance_group[0].name = "dlrm_0"
    assert differences(EXPECTED_CANDIDATE, serving) == []


def test_the_preferred_size_that_triton_fills_in_is_no_difference() -> None:
    serving = config("max_batch_size: 8 dynamic_batching { preferred_batch_size: 8 } instance_group { count: 1 }")
    assert differences(Candidate(8, True), serving) == []
    assert differences(Candidate(8, True, 0, (8,)), config("max_batch_size: 8 dynamic_batching { }")) == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"max_batch_size": 128}, "max_batch_size is 64, wanted 128"),
        ({"max_queue_delay_us": 0}, "max_queue_delay_microseconds is 100, wanted 0"),
        ({"preferred_batch_sizes": (8,)}, "preferred_batch_size is 32 64, wanted 8"),
        ({"preferred_batch_sizes": ()}, "preferred_batch_size is 32 64, wanted none"),
        ({"dynamic_batching": False}, "dynamic_batching is on, wanted off"),
        ({"instance_count": 3}, "instance_count is 2, wanted 3"),
        ({"fields": ((THREADS, 8),)}, f"{THREADS} is 4, wanted 8"),
        ({"fields": (("optimization.graph.level", 1),)}, "optimization.graph.level is absent, wanted 1"),
    ],
)
def test_each_difference_is_described(change: dict[str, object], difference: str) -> None:
    assert differences(replace(EXPECTED_CANDIDATE, **change), config()) == [difference]  # type: ignore[arg-type]


def test_a_field_at_its_default_may_be_absent() -> None:
    assert differences(replace(EXPECTED_CANDIDATE, fields=(("optimization.graph.level", 0),)), config()) == []


def test_a_number_of_32_bits_is_compared_as_such() -> None:
    path = "sequence_batching.direct.minimum_slot_utilization"
    serving = config(f"max_batch_size: 8 sequence_batching {{ direct {{ {path.split('.')[-1]}: 0.3 }} }}")
    assert differences(Candidate(8, fields=((path, 0.3),)), serving) == []
    assert differences(Candidate(8, fields=((path, 0.8),)), serving) == [f"{path} is 0.3, wanted 0.8"]
    assert candidate_of(serving, [path]).fields == ((path, 0.3),)


def test_the_kind_that_triton_chose_is_no_difference() -> None:
    kind, serving = "instance_group.0.kind", config("max_batch_size: 8 instance_group { count: 1 kind: KIND_CPU }")
    assert differences(Candidate(8, fields=((kind, "KIND_AUTO"),)), serving) == []
    assert differences(Candidate(8, fields=((kind, "KIND_GPU"),)), serving) == [
        f"{kind} is KIND_CPU, wanted KIND_GPU"
    ]


def test_a_group_of_another_count_is_a_difference() -> None:
    serving = config("max_batch_size: 8 instance_group { count: 1 } instance_group { count: 2 }")
    assert differences(Candidate(8), serving) == ["instance_count is 2, wanted 1"]


# -- paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "read_back"),
    [
        ("optimization.graph.level", 2, 2),
        ("optimization.graph.level", "-1", -1),
        ("optimization.graph.level", 3.0, 3),
        ("default_model_filename", "a.onnx", "a.onnx"),
        (THREADS, 8, "8"),
        ("parameters.session.some.key.string_value", True, "true"),
        ("metric_tags.a.b", "x", "x"),
        ("instance_group.0.kind", "kind_cpu", "KIND_CPU"),
        ("instance_group.0.gpus.2", 5, 5),
        ("instance_group.0.secondary_devices.0.device_id", 7, 7),
        ("dynamic_batching.default_queue_policy.timeout_action", "DELAY", "DELAY"),
        ("dynamic_batching.priority_queue_policy.3.max_queue_size", 9, 9),
        ("dynamic_batching.priority_levels", 2**64 - 1, 2**64 - 1),
        ("dynamic_batching.preserve_ordering", "false", False),
        ("sequence_batching.direct.minimum_slot_utilization", "0.5", 0.5),
        ("sequence_batching.direct.minimum_slot_utilization", 0.3, 0.3),
        ("sequence_batching.direct.minimum_slot_utilization", 1 / 3, 0.33333334),
        ("optimization.execution_accelerators.gpu_execution_accelerator.0.parameters.precision", "FP16", "FP16"),
        ("response_cache.enable", 1, True),
    ],
)
def test_any_field_can_be_set_and_read(path: str, value: FieldValue, read_back: FieldValue) -> None:
    message = config()
    field_path.set_value(message, path, value)
    assert field_path.get_value(message, path) == read_back
    assert field_path.normalize_value(ModelConfig.DESCRIPTOR, path, value) == read_back


@pytest.mark.parametrize(
    "path",
    [
        "optimization.graph.level",
        "parameters.other.string_value",
        "instance_group.1.kind",
        "dynamic_batching.priority_queue_policy.9.max_queue_size",
    ],
)
def test_an_absent_field_is_none(path: str) -> None:
    message = config()
    assert field_path.get_value(message, path) is None
    assert message == config()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimisation.graph.level", 1, "ModelConfig has no field 'optimisation'; did you mean optimization"),
        ("optimization.graph.zzz", 1, "Graph has no field 'zzz'; it has level"),
        ("optimization.graph", 1, "Graph is a message; name a field in it: level"),
        ("max_batch_size.x", 1, "max_batch_size is a plain value and has no fields"),
        ("parameters.threads", 1, r"parameters is a map; write parameters.<key>.string_value"),
        ("metric_tags", 1, r"metric_tags is a map; write metric_tags.<key>"),
        ("instance_group.kind", 1, r"instance_group is a list; write an index, such as instance_group.0"),
        ("instance_group.3.profile.0", "a", "index 3 of a list of 1; the next free one is 1"),
        ("optimization.graph.level", "x", "'x' does not fit; it takes a whole number of 32 bits"),
        ("optimization.graph.level", 1.5, "1.5 does not fit"),
        ("optimization.graph.level", True, "True does not fit"),
        ("optimization.graph.level", 2**31, "2147483648 does not fit"),
        ("sequence_batching.direct.minimum_slot_utilization", 1e39, "1e[+]39 does not fit; it takes a number"),
        ("dynamic_batching.priority_levels", -1, "-1 does not fit; .* not negative"),
        ("dynamic_batching.preserve_ordering", "maybe", "'maybe' does not fit; it takes true or false"),
        ("instance_group.0.kind", "KIND_TPU", "'KIND_TPU' does not fit; it takes KIND_AUTO, KIND_GPU"),
        ("", 1, "ModelConfig has no field ''"),
    ],
)
def test_an_unknown_field_or_a_wrong_type_is_reported_on_one_line(path: str, value: FieldValue, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        field_path.set_value(config(), path, value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("input { name: 'x' dims: [3, 4] }", True),
        ("input { name: 'x' dims: -1 }", False),
        ("input { name: 'x' dims: -1 allow_ragged_batch: true }", True),
        ("input { name: 'x' dims: 2 is_shape_tensor: true }", False),
    ],
)
def test_only_inputs_of_one_shape_in_a_batch_have_fixed_shapes(text: str, fixed: bool) -> None:
    assert has_fixed_shapes(text_format.Parse(text, ModelConfig())) is fixed


# -- accelerators, warm-up, cache -------------------------------------------------------------------------------

ACCELERATOR = "optimization.execution_accelerators.gpu_execution_accelerator.0.name"


def test_no_accelerator_is_a_choice_that_is_applied_and_read_back() -> None:
    plain = config('name: "m" max_batch_size: 4 instance_group { count: 1 }')
    without_accelerator, with_tensorrt = (
        Candidate(4, fields=((ACCELERATOR, name),)) for name in ("none", "tensorrt")
    )
    assert candidate_of(plain, [ACCELERATOR]) == without_accelerator
    accelerated = apply(with_tensorrt, plain)
    assert candidate_of(accelerated, [ACCELERATOR]) == with_tensorrt
    assert differences(with_tensorrt, accelerated) == differences(without_accelerator, plain) == []
    assert differences(without_accelerator, accelerated)
    assert differences(with_tensorrt, plain)
    assert candidate_of(apply(without_accelerator, accelerated), [ACCELERATOR]) == without_accelerator


def test_warm_up_runs_the_batch_sizes_that_the_batcher_aims_at() -> None:
    base = config(
        'name: "m" max_batch_size: 16 dynamic_batching { preferred_batch_size: [ 4, 8 ] } '
        'input { name: "x" data_type: TYPE_INT32 dims: [ -1, 3 ] } model_warmup { name: "own" batch_size: 2 }'
    )
    warm = with_warmup(base, {"x": (128, 3)})
    assert [(sample.name, sample.batch_size) for sample in warm.model_warmup] == [
        ("own", 2),
        *((f"tritune: batch of {size}", size) for size in (1, 4, 8, 16)),
    ]
    sample = warm.model_warmup[1].inputs["x"]
    assert (list(sample.dims), sample.zero_data) == ([128, 3], True)
    assert with_warmup(warm, {"x": (128, 3)}) == warm
    assert list(with_warmup(base, {}).model_warmup[1].inputs["x"].dims) == [1, 3]
    assert [sample.batch_size for sample in with_warmup(config('name: "m"'), {}).model_warmup] == [1]


def test_warm_up_samples_are_not_larger_than_the_largest_batch() -> None:
    samples = 'model_warmup { name: "one" batch_size: 1 } model_warmup { name: "all" batch_size: 8 }'
    base = config(f'name: "m" max_batch_size: 8 {samples}')
    for size, sizes in ((8, [1, 8]), (16, [1, 8]), (4, [1, 4]), (1, [1, 1]), (0, [1, 1])):
        assert [sample.batch_size for sample in apply(Candidate(size), base).model_warmup] == sizes
    assert apply(candidate_of(base), base) == base


def test_trials_have_no_response_cache() -> None:
    base = config('name: "m" max_batch_size: 4 response_cache { enable: true }')
    assert not without_response_cache(base).response_cache.enable
    assert base.response_cache.enable


def test_configurations_are_read_without_importing_grpc() -> None:
    """Commands that call no server start faster without it; tritonclient uses the same messages later."""
    code = (
        "import sys\n"
        "from optimizer.config import model_config\n"
        "import optimizer.cli.models, optimizer.cli.report, optimizer.study.task\n"
        "config = model_config.ModelConfig(name='m')\n"
        "assert not {'grpc', 'tritonclient.grpc'} & sys.modules.keys()\n"
        "from tritonclient.grpc import model_config_pb2, service_pb2\n"
        "assert type(config) is model_config_pb2.ModelConfig\n"
        "service_pb2.ModelConfigResponse(config=config)\n"
        "assert 'grpc' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
