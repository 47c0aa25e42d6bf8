"""Every error in a profile is one line with file, line, key and fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimizer.core.errors import BadInputError
from optimizer.core.yaml_lines import MAX_BYTES
from optimizer.model.profile import Profile, load_profile, parse_profile
from tests.profile_file import MODEL, load

FAULTS = [
    # the file
    ("", "p.yaml: empty; a profile starts with a line 'model:'"),
    ("# nothing\n", "p.yaml: empty; a profile starts with a line 'model:'"),
    ("dlrm\n", "p.yaml:1: 'dlrm' is not a profile; it starts with a line 'model:'"),
    ("\n- model\n", "p.yaml:1: ['model'] is not a profile; it starts with a line 'model:'"),
    ("{}", "p.yaml:1: model: missing"),
    (b"model: \xff\n", "p.yaml:1: byte 0xff is not UTF-8 text; save the file as UTF-8"),
    (MODEL + "sla: \x07\n", "p.yaml:2:6: YAML does not allow this character"),
    (b"#" * (MAX_BYTES + 1), "p.yaml: larger than 1 MiB; a profile is a page of YAML"),
    # YAML syntax
    (
        "model: {builder: mlp\nsla: x",
        "p.yaml:2:4: while parsing a flow mapping, expected ',' or '}', but got ':'",
    ),
    (
        MODEL + "space:\n  instance_group_count: [1]\n   max_batch_size: 4",
        "p.yaml:4:4: while parsing a block mapping, expected <block end>, but found '<block mapping start>'; "
        "check the indentation and the quotation marks",
    ),
    (
        MODEL + "sla:\n  p95: 5ms\n   p99: 9ms",
        "p.yaml:4:7: mapping values are not allowed here; check the indentation and the quotation marks",
    ),
    (
        MODEL + "name: a: b",
        "p.yaml:2:8: mapping values are not allowed here; check the indentation and the quotation marks",
    ),
    (MODEL + "\tsla: x", "p.yaml:2:1: YAML allows no tab here; write spaces"),
    (
        "profile_models: [m]\nlatency_budget: 20\n",
        "p.yaml:1: this is a configuration of Model Analyzer; give it with --from-model-analyzer FILE",
    ),
    (
        MODEL + "---\n" + MODEL,
        "p.yaml:2:1: expected a single document in the stream, but found another document",
    ),
    ("a: &x [1]\nb: *x", "p.yaml:1:4: anchors and aliases are not supported; write the value out"),
    ("a: *x", "p.yaml:1:4: anchors and aliases are not supported; write the value out"),
    ("[" * 100, "p.yaml:1:25: nested deeper than 24 levels"),
    (MODEL + "space: {max_batch_size: [" + "1," * 20_000 + "]}", "p.yaml:2:20008: more than 10000 values"),
    (
        "model: !!python/object:os.system {}",
        "p.yaml:1: model: the tag python/object:os.system is not supported; leave it out",
    ),
    ("model: !mine x", "p.yaml:1: model: the tag !mine is not supported; leave it out"),
    (
        "load: {max_concurrency: !!int x}",
        "p.yaml:1: load.max_concurrency: 'x' is not a value of the type int",
    ),
    (
        f"load: {{max_concurrency: {'9' * 5000}}}",
        f"p.yaml:1: load.max_concurrency: '{'9' * 40}' is not a value of the type int",
    ),
    ('a:\n "\\U00110000"', "p.yaml:2: an escape sequence does not encode a character"),
    ("[a, b]: c", "p.yaml:1: a key must be one word or a quoted text"),
    (
        MODEL + "load:\n  max_concurrency: 1\n  max_concurrency: 2",
        "p.yaml:4: load.max_concurrency: set twice (first on line 3)",
    ),
    # keys
    (MODEL + "spaec: {}", "p.yaml:2: spaec: unknown key; did you mean space?"),
    (
        MODEL + "zzz: 1",
        "p.yaml:2: zzz: unknown key; known: model, description, "
        "sla, request, tokens, load, space, score, tolerance, gpu",
    ),
    (
        MODEL + "space:\n  instance_count: [1]",
        "p.yaml:3: space.instance_count: unknown key; did you mean instance_group_count?",
    ),
    (MODEL + "sla: {p095: 1ms}", "p.yaml:2: sla.p095: unknown key; did you mean p95?"),
    (
        MODEL + '"a\\nb": 1',
        "p.yaml:2: a\\nb: unknown key; known: model, description, "
        "sla, request, tokens, load, space, score, tolerance, gpu",
    ),
    (
        MODEL + "<<: {}",
        "p.yaml:2: the merge key << is not supported; write its keys out",
    ),
    # keys of another section
    (
        MODEL + "max_batch_size: [8]",
        "p.yaml:2: max_batch_size: unknown key at this level; max_batch_size belongs in the section space",
    ),
    (MODEL + "p95: 20ms", "p.yaml:2: p95: unknown key at this level; p95 belongs in the section sla"),
    (
        MODEL + "space:\n  batch_size: [8]",
        "p.yaml:3: space.batch_size: unknown key at this level; did you mean max_batch_size? batch_size belongs in "
        "the section request",
    ),
    (
        MODEL + "space: {graph_level: [1]}",
        "p.yaml:2: space.graph_level: unknown key at this level; graph_level belongs in the section "
        "space.onnxruntime",
    ),
    (
        MODEL + "load: {sla: {p95: 1ms}}",
        "p.yaml:2: load.sla: unknown key at this level; sla belongs at the top level",
    ),
    (
        "model: {builder: mlp, layers: 2}",
        "p.yaml:1: model.layers: unknown key at this level; layers belongs in the section model.settings",
    ),
    (
        MODEL + "gpu: {batch_size: 8}",
        "p.yaml:2: gpu.batch_size: unknown key at this level; batch_size belongs in the section gpu.request",
    ),
    # the model
    (
        "model: mlp",
        "p.yaml:1: model: 'mlp' is not a mapping of keys to values, such as {repository: ./models, name: my_model}",
    ),
    ("model:\n", "p.yaml:1: model: null is not a mapping; leave the key out or fill it"),
    ("model: {}", "p.yaml:1: model: give either builder (and settings), or onnx, or repository and name"),
    (
        "model: {builder: mlp, name: x}",
        "p.yaml:1: model: give either builder (and settings), or onnx, or repository and name",
    ),
    ("model: {name: mine}", "p.yaml:1: model.repository: missing"),
    ("model: {repository: models}", "p.yaml:1: model.name: missing"),
    ("model: {builder: mpl}", "p.yaml:1: model.builder: 'mpl' is no builder; did you mean mlp?"),
    ("model: {builder: [mlp]}", "p.yaml:1: model.builder: ['mlp'] is not text; write it in quotes"),
    ("model: {builder: mlp, setings: {}}", "p.yaml:1: model.setings: unknown key; did you mean settings?"),
    (
        "model:\n  builder: mlp\n  settings:\n    layer: 1",
        "p.yaml:4: model.settings.layer: unknown key; did you mean layers?",
    ),
    (
        "model: {builder: mlp, settings: {layers: -1}}",
        "p.yaml:1: model.settings.layers: -1 is not at least 0",
    ),
    (
        "model: {builder: mlp, settings: {hidden_width: 1000000000}}",
        "p.yaml:1: model.settings.hidden_width: 1000000000 is not at most 65536",
    ),
    (
        "model: {builder: mlp, settings: {hidden_width: 65536}}",
        "p.yaml:1: model.settings: 4,299,816,968 parameters are more than 134,217,728; write smaller sizes",
    ),
    (
        "model:\n  builder: mlp\n  settings: {input_width: 65536, samples: 1000}",
        "p.yaml:3: model.settings: 65,536,000 values of requests are more than 16,777,216; write fewer samples",
    ),
    (
        "model: {builder: bert, settings: {samples: 1000001}}",
        "p.yaml:1: model.settings.samples: 1000001 is not at most 1000000",
    ),
    (
        "model: {builder: mlp, settings: {layers: [1]}}",
        "p.yaml:1: model.settings.layers: [1] is not a single value (text, number, true or false)",
    ),
    (
        "model: {builder: dlrm, settings: {precision: fp8}}",
        "p.yaml:1: model.settings.precision: 'fp8' is not 'fp32' or 'fp16'",
    ),
    (
        "model: {repository: models, name: ../mine}",
        "p.yaml:1: model.name: '../mine' has a separator; write the name alone, without folders",
    ),
    (
        "model: {repository: models, name: ..}",
        "p.yaml:1: model.name: '..' must not begin with a dot or have '..' in it",
    ),
    (
        "model: {repository: models, name: .git}",
        "p.yaml:1: model.name: '.git' must not begin with a dot or have '..' in it",
    ),
    (
        'model: {repository: models, name: "a\\0b"}',
        "p.yaml:1: model.name: 'a\\x00b' has control characters",
    ),
    ("model: {repository: models, name: 308}", "p.yaml:1: model.name: 308 is not text; write it in quotes"),
    (
        "model: {repository: models, name: mien}",
        "p.yaml:1: model.name: 'mien' is not a model of the repository; did you mean mine?",
    ),
    (
        "model: {repository: .., name: x}",
        "p.yaml:1: model.repository: '..' leads out of its folder; give a path inside it",
    ),
    (
        "model: {repository: /etc, name: x}",
        "p.yaml:1: model.repository: '/etc' must be a relative path, with / between its parts",
    ),
    (
        "model: {repository: link, name: x}",
        "p.yaml:1: model.repository: 'link' leads out of its folder; give a path inside it",
    ),
    (
        "model: {repository: models, name: away}",
        "p.yaml:1: model.name: 'away' leads out of its folder; give a path inside it",
    ),
    ("model: {repository: loop, name: x}", "p.yaml:1: model.repository: 'loop' cannot be followed"),
    (
        "model: {repository: nothing, name: x}",
        "p.yaml:1: model.repository: 'nothing' does not exist in {here}",
    ),
    ("model: {repository: data.json, name: x}", "p.yaml:1: model.repository: 'data.json' is not a folder"),
    # prompts and outputs
    (
        MODEL + "tokens: {prompt: 0, output: 32, prompt_input: a, output_input: b}",
        "p.yaml:2: tokens.prompt: 0: write lengths from 1 to 1,000,000 tokens, the lower one first",
    ),
    (
        MODEL + "tokens: {prompt: 9..3, output: 32, prompt_input: a, output_input: b}",
        "p.yaml:2: tokens.prompt: '9..3': write lengths from 1 to 1,000,000 tokens, the lower one first",
    ),
    (
        MODEL + "tokens: {prompt: 1.5, output: 32, prompt_input: a, output_input: b}",
        "p.yaml:2: tokens.prompt: 1.5 is not a length; write a number such as 128, a range 32..256, "
        "lognormal:128:0.5, or a file with one number a line",
    ),
    (
        MODEL + "tokens: {prompt: none.txt, output: 32, prompt_input: a, output_input: b}",
        "p.yaml:2: tokens.prompt: 'none.txt' does not exist in {here}",
    ),
    (
        MODEL + "tokens: {prompt: 60..70, output: 30, prompt_input: a, output_input: b, maximum: 99}",
        "p.yaml:2: tokens: prompts of up to 70 tokens and outputs of up to 30 are 100 tokens, and the model has at "
        "most 99; shorten one of them",
    ),
    (
        MODEL + "tokens: {prompt: 5, output: 6, prompt_input: a, output_input: b, output_text: '{}'}",
        "p.yaml:2: tokens: output_text has no {tokens}, which stands for the number of tokens",
    ),
    (MODEL + "tokens: {prompt: 5}", "p.yaml:2: tokens: output is missing; generated prompts need it"),
    (
        MODEL + "tokens: {prompt: 5, output: 6, prompt_input: a}",
        "p.yaml:2: tokens: output_input is missing; generated prompts need it",
    ),
    (
        MODEL + "request: {input_data: data.json}\ntokens: {prompt: 5, output: 6, prompt_input: a, output_input: b}",
        "p.yaml:3: tokens: request.input_data has prompts of its own; leave out prompt and output, or the input data",
    ),
    # SLA and score
    (MODEL + "sla: {p95: 20}", "p.yaml:2: sla.p95: 20: a unit is missing: 20ms?"),
    (
        MODEL + "sla: {p95: -20ms}",
        "p.yaml:2: sla.p95: '-20ms': a time is never negative; write a positive time such as 20ms, 0.02s or 500us",
    ),
    (MODEL + "sla: {p95: .nan}", "p.yaml:2: sla.p95: '.nan' is not a value of the type float"),
    (
        MODEL + "sla: {p95: [20ms]}",
        "p.yaml:2: sla.p95: ['20ms'] is not a time; write one such as 20ms, 0.02s or 500us",
    ),
    (MODEL + "sla: 20ms", "p.yaml:2: sla: '20ms' is not a mapping of keys to values, such as {p95: 20ms}"),
    # request and load
    (MODEL + "load: {max_concurrency: 65537}", "p.yaml:2: load.max_concurrency: 65537 is not at most 65536"),
    (MODEL + "request: {batch_size: 0}", "p.yaml:2: request.batch_size: 0 is not at least 1"),
    (
        MODEL + 'request: {batch_size: "16"}',
        "p.yaml:2: request.batch_size: '16' is not a whole number; write 16 without quotes",
    ),
    (MODEL + "request: {batch_size: 1.5}", "p.yaml:2: request.batch_size: 1.5 is not a whole number"),
    (MODEL + "request: {batch_size: true}", "p.yaml:2: request.batch_size: true is not a whole number"),
    (
        MODEL + "request: {batch_size: 4294967296}",
        "p.yaml:2: request.batch_size: 4294967296 is not at most 2147483647",
    ),
    (MODEL + "request: {input_data: 1}", "p.yaml:2: request.input_data: 1 is not the path of a file"),
    (
        MODEL + "request: {input_data: ../secret}",
        "p.yaml:2: request.input_data: '../secret' leads out of its folder; give a path inside it",
    ),
    (
        MODEL + "request: {input_data: '" + "x" * 300 + "'}",
        "p.yaml:2: request.input_data: '" + "x" * 58 + "… cannot be followed",
    ),
    (
        MODEL + "request: {shapes: {ids: 16..x}}",
        "p.yaml:2: request.shapes.ids: '16..x': write sizes such as 128, 16..128 or 16*3|128*1",
    ),
    (
        MODEL + "request: {shapes: {ids: []}}",
        "p.yaml:2: request.shapes.ids: is empty; give at least one value",
    ),
    (
        MODEL + "request: {shapes: {ids: [-1]}}",
        "p.yaml:2: request.shapes.ids: [-1]: write sizes such as 128, 16..128 or 16*3|128*1",
    ),
    (
        MODEL + "request: {ranges: {ids: [9, 0]}}",
        "p.yaml:2: request.ranges.ids: [9, 0]: the lower bound is above the upper one; write LOW..HIGH, such as "
        "0..30521",
    ),
    (MODEL + "request: {string_data: 3}", "p.yaml:2: request.string_data: 3 is not text; write it in quotes"),
    (MODEL + "load: {max_concurrency: 0}", "p.yaml:2: load.max_concurrency: 0 is not at least 1"),
    (MODEL + "description: 3", "p.yaml:2: description: 3 is not text; write it in quotes"),
    # the space
    (
        MODEL + "space:\n  instance_group_count:\n  - 1\n  - 0",
        "p.yaml:5: space.instance_group_count: 0 is not at least 1",
    ),
    (  # a path with a colon, which must not be taken for the end of the parameter's name
        MODEL + 'space:\n  config:\n    "parameters.a: b.strin": [1]',
        "p.yaml:4: space.config.parameters.a: b.strin: parameters is a map; write parameters.<key>.string_value",
    ),
    (MODEL + "space: {max_batch_size: 16}", "p.yaml:2: space.max_batch_size: 16 is not a list; write [16]"),
    (
        MODEL + "space: {max_batch_size: []}",
        "p.yaml:2: space.max_batch_size: is empty; give at least one value",
    ),
    (
        MODEL + "space: {max_batch_size: [0, 8]}",
        "p.yaml:2: space.max_batch_size: 0 (no batch dimension) cannot be mixed with other sizes",
    ),
    (
        MODEL + "space: {max_queue_delay_microseconds: [-1]}",
        "p.yaml:2: space.max_queue_delay_microseconds: -1 is neither a number of µs from 0 on "
        "nor off (no dynamic batching)",
    ),
    (
        MODEL + "space: {max_queue_delay_microseconds: [1ms]}",
        "p.yaml:2: space.max_queue_delay_microseconds: '1ms' is neither a number of µs from 0 on "
        "nor off (no dynamic batching)",
    ),
    *(
        (
            MODEL + f"space: {{config: {{{path}: [1]}}}}",
            f"p.yaml:2: space.config.{path}: write space.{key} in a profile, or --{option} of `tune sweep`, in place "
            "of it",
        )
        for path, key, option in (
            ("instance_group", "instance_group_count", "instance-count"),
            ("instance_group.count", "instance_group_count", "instance-count"),
            ("instance_group_count", "instance_group_count", "instance-count"),
            ("instance_group.0.count", "instance_group_count", "instance-count"),
            ("dynamic_batching.preferred_batch_size", "preferred_batch_size", "preferred-batch-size"),
            ("dynamic_batching.preferred_batch_size.0", "preferred_batch_size", "preferred-batch-size"),
        )
    ),
    (
        MODEL + "space: {max_queue_size: [4], config: {dynamic_batching.default_queue_policy.max_queue_size: [8]}}",
        "p.yaml:2: space.config.dynamic_batching.default_queue_policy.max_queue_size: space.max_queue_size sets this "
        "field too; keep one of them",
    ),
    (
        MODEL + "space: {onnxruntime: {intra_op_thread_count: [1]}, config: "
        "{parameters.intra_op_thread_count.string_value: ['8']}}",
        "p.yaml:2: space.config.parameters.intra_op_thread_count.string_value: space.onnxruntime."
        "intra_op_thread_count sets this field too; keep one of them",
    ),
    (
        MODEL + "space: {server: {ratelimit: [off]}}",
        "p.yaml:2: space.server.ratelimit: 'ratelimit': tritonserver has no option --ratelimit; did you mean "
        "rate-limit?",
    ),
    (
        MODEL + "space: {config: {dynamic_batching.preserve_ordering: [on]}}",
        "p.yaml:2: space.config.dynamic_batching.preserve_ordering: 'on' does not fit; it takes true or false",
    ),
    (
        MODEL + "space: {onnxruntime: {allow_spinning: [yes]}}",
        "p.yaml:2: space.onnxruntime.allow_spinning: 'yes' is not true or false",
    ),
    (
        MODEL + "space: {preferred_batch_size: [half]}",
        "p.yaml:2: space.preferred_batch_size: 'half' is not a choice; write none, max, max/2, a "
        "size, or a list of those such as [max/2, max]",
    ),
    (
        MODEL + "space:\n  config:\n    a.b: []",
        "p.yaml:4: space.config.a.b: is empty; give at least one value",
    ),
    (
        MODEL + "space:\n  config:\n    optimisation.graph.level: [1]",
        "p.yaml:4: space.config.optimisation.graph.level: ModelConfig has no field 'optimisation'; "
        "did you mean optimization?",
    ),
    (
        MODEL + "space:\n  max_batch_size: [8]\n  config:\n    max_batch_size: [8]",
        "p.yaml:5: space.config.max_batch_size: write space.max_batch_size in a profile, or --max-batch-size of "
        "`tune sweep`, in place of it",
    ),
    (
        MODEL + "space: {config: {a: [[1]]}}",
        "p.yaml:2: space.config.a: [1] is not a single value (text, number, true or false)",
    ),
    (
        MODEL + "request:\n  batch_size: 16\nspace: {max_batch_size: [4, 8]}",
        "p.yaml:3: request.batch_size: 16 is larger than every space.max_batch_size; write at most 8",
    ),
    (
        MODEL
        + "request: {batch_size: 4}\nspace:\n  max_batch_size: [8]\n"
        + "  max_queue_delay_microseconds: [0]\n  preferred_batch_size: [max/8]",
        "p.yaml:3: space: no valid configuration: max_batch_size 8, preferred sizes max/8, "
        "request batch size 4",
    ),
    # with a GPU
    (MODEL + "gpu: 1", "p.yaml:2: gpu: 1 is not a mapping; leave the key out or fill it"),
    (
        MODEL + "gpu:\n  request:\n    batch_size: 0",
        "p.yaml:4: gpu.request.batch_size: 0 is not at least 1",
    ),
    (
        MODEL + "gpu: {zzz: 1}",
        "p.yaml:2: gpu.zzz: unknown key; known: model, description, "
        "sla, request, tokens, load, space, score, tolerance",
    ),
    (MODEL + "gpu:\n  reqest: {}", "p.yaml:3: gpu.reqest: unknown key; did you mean request?"),
    (
        MODEL + "gpu: {gpu: {}}",
        "p.yaml:2: gpu.gpu: unknown key; known: model, description, "
        "sla, request, tokens, load, space, score, tolerance",
    ),
    (
        MODEL + "gpu:\n  model:\n    settings: {layers: x}",
        "p.yaml:4: gpu.model.settings.layers: 'x' is not a whole number",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), FAULTS, ids=[line[:60] for _, line in FAULTS])
def test_fault_is_one_line_with_its_location_and_fix(folder: Path, text: str | bytes, line: str) -> None:
    (folder / "link").symlink_to(folder.parent)
    (folder / "models" / "away").symlink_to(folder.parent)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(BadInputError) as caught:
        load(text)
    assert str(caught.value) == line.replace("{here}", str(folder))
    assert caught.value.exit_code == 2


@pytest.mark.usefixtures("folder")
def test_each_fault_has_its_own_line_once() -> None:
    with pytest.raises(BadInputError) as caught:
        load(MODEL + "load: {max_concurrency: 0}\nsla: {p95: 1}\ngpu: {request: {batch_size: 0}}")
    assert str(caught.value).splitlines() == [
        "p.yaml:3: sla.p95: 1: a unit is missing: 1ms?",
        "p.yaml:2: load.max_concurrency: 0 is not at least 1",
        "p.yaml:4: gpu.request.batch_size: 0 is not at least 1",
    ]


@pytest.mark.usefixtures("folder")
def test_many_faults_are_bounded() -> None:
    with pytest.raises(BadInputError) as caught:
        load(MODEL + "".join(f"key{n}: 1\n" for n in range(50)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "p.yaml: and 40 more"


@pytest.mark.parametrize("name", ["no.yaml", "folder.yaml", "pipe.yaml", "secret.yaml"])
def test_unreadable_profile_is_named(folder: Path, name: str) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    (folder / "secret.yaml").symlink_to("secret.yaml")
    faults = r"(no such file|is a (folder|device or a pipe)|cannot be read: .*)"
    with pytest.raises(BadInputError, match=rf"^{name}: {faults}; check the path$"):
        load_profile(Path(name))


WORDS = st.sampled_from(
    ["model", "builder", "mlp", "settings", "layers", "repository", "name", "description", "sla", "p95",
     "20ms", "request", "batch_size", "input_data", "shapes", "load", "max_concurrency", "space",
     "max_batch_size", "max_queue_delay_microseconds", "off", "preferred_batch_size", "max/2",
     "instance_group_count", "config", "gpu"]
)  # fmt: skip
VALUES = st.recursive(
    WORDS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_profile_or_bad_input(data: bytes) -> None:
    try:
        profile = parse_profile(data, Path("/nowhere/p.yaml"))
    except BadInputError as error:
        for line in str(error).split("\n"):
            assert line.startswith("/nowhere/p.yaml"), line
            assert line.isprintable(), line
    else:
        assert isinstance(profile.for_hardware(gpu=True), Profile)


@FUZZ
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_give_a_profile_or_bad_input(data: bytes) -> None:
    assert_profile_or_bad_input(data)


@FUZZ
@given(st.text(alphabet="model:{}[],-&*!<>|%@`'\"\\#?~ \n\t0x1.:e_Uu", max_size=80))
def test_any_marks_of_yaml_give_a_profile_or_bad_input(text: str) -> None:
    assert_profile_or_bad_input(text.encode())


@FUZZ
@given(st.dictionaries(WORDS, VALUES, max_size=5), st.booleans())
def test_any_values_give_a_profile_or_bad_input(values: dict[str, Any], with_model: bool) -> None:
    values = {**values, **({"model": {"builder": "mlp"}} if with_model else {})}
    assert_profile_or_bad_input(yaml.safe_dump(values, allow_unicode=True).encode("utf-8", "surrogatepass"))
