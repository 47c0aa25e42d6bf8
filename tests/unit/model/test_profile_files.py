"""Profiles as commented YAML, and the JSON Schema of profiles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optimizer.core import yaml_lines
from optimizer.model.profile import SECTIONS, Profile, load_profile, parse_profile
from optimizer.model.profile_files import MODELINE, SCHEMA_FILE, flow, render_profile
from optimizer.model.profile_schema import ModelSpaceSection
from tests.profile_file import MODEL

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
SECTION_TYPES: tuple[type[BaseModel], ...] = (Profile, *SECTIONS.values(), ModelSpaceSection)
VALIDATOR = Draft7Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
STORED = {"model": {"repository": "models", "name": "mine"}}
COMMENTED_KEY = re.compile(r"^(\s*)# (?=\s*[a-z_]\w*:( |$))", re.MULTILINE)


def faults(text: str) -> list[str]:
    """Return the errors of a profile according to the JSON Schema."""
    tree = json.loads(json.dumps(yaml_lines.parse(text.encode(), "p.yaml", hint="").plain()))
    return [error.message for error in VALIDATOR.iter_errors(tree)]


def fields() -> Iterator[tuple[str, FieldInfo]]:
    for section in SECTION_TYPES:
        for name, field in section.model_fields.items():
            yield f"{section.__name__}.{name}", field


# -- the JSON Schema ----------------------------------------------------------------------------------------------


def test_the_schema_is_valid() -> None:
    Draft7Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_profiles_match_the_schema(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        MODEL + "sla:\nrequest:\nload:\nspace:\nscore:\ntolerance:\ngpu:\n",
        MODEL + "sla: {avg: 500us, p50: 0.01s, p99: 1 h}",
        MODEL + "request: {batch_size: 1*9|8*1, shapes: {ids: [3, 16..128], a: 7, b: 16..32}}",
        MODEL + "request: {batch_size: 4, input_data: zero, ranges: {a: [0, 1], b: 0..5}}",
        MODEL + "space: {max_queue_delay_microseconds: [off, 0], preferred_batch_size: [none, max/4, 8, [4, max]]}",
        MODEL
        + "space: {instance_group_gpus: [0, [0, 1], '0,1'], server_cpus: [3, 0-7], server: {rate-limit: [off]}}",
        MODEL + "space: {models: {first: {instance_group_count: [1], config: {optimization.graph.level: [1]}}}}",
        MODEL + "score: {data: a.npz, metric: accuracy.py:score, minimum: 0.5}\ntolerance: {relative: 1e-3}",
        MODEL + "gpu: {model: {settings: {layers: 3}}, score: {minimum: 0.5}, space: {config: {}}}",
        "model: {onnx: model.onnx}",
        "model: {repository: models, name: m, variants: [n], batcher: b}\ngpu: {model: {name: other}}",
    ],
)
def test_what_a_profile_may_have_matches_the_schema(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "sla: {p95: 20ms}",
        "model: {}",
        "model: {builder: nosuch}",
        "model: {builder: mlp, name: x}",
        "model: {repository: models}",
        MODEL + "spaec: {}",
        MODEL + "sla: {p95: 20}",
        MODEL + "sla: {p95: 20 parsecs}",
        MODEL + "load: {max_concurrency: 0}",
        MODEL + "request: {batch_size: 1.5}",
        MODEL + "space: {max_batch_size: 16}",
        MODEL + "space: {max_batch_size: []}",
        MODEL + "space: {max_queue_delay_microseconds: [1ms]}",
        MODEL + "space: {preferred_batch_size: [half]}",
        MODEL + "space: {onnxruntime: {graph_level: [3]}}",
        MODEL + "space: {models: {first: {max_batch: [2]}}}",
        MODEL + "score: {metric: accuracy}",
        MODEL + "gpu: {gpu: {}}",
        MODEL + "gpu: {load: {max_concurrency: 0}}",
    ],
)
def test_errors_do_not_match_the_schema(text: str) -> None:
    assert faults(text) != []


def test_the_schema_has_the_descriptions_and_no_docstrings() -> None:
    text = SCHEMA_FILE.read_text(encoding="utf-8")
    for name, field in fields():
        assert json.dumps(field.description, ensure_ascii=False) in text, name
    for section in SECTION_TYPES:
        assert section.__doc__
        assert section.__doc__.splitlines()[0] not in text


# -- the text -----------------------------------------------------------------------------------------------------


def test_each_key_has_a_description_and_an_example() -> None:
    for name, field in fields():
        assert field.description, name
        assert not field.description.endswith("."), name
        is_section = name.rpartition(".")[2] in {*SECTIONS, "model"}
        assert is_section or field.examples, name


def sections(profile: Profile) -> list[dict[str, Any]]:
    return [dict(profile.for_hardware(gpu=gpu)) for gpu in (False, True)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_text_of_a_profile_has_its_values(path: Path) -> None:
    profile = load_profile(path)
    text = render_profile(profile.tree(), [MODELINE], {"model": ["a remark: []"], "space": ["another: }"]})
    assert text.startswith(f"# {MODELINE}\n")
    assert sections(parse_profile(text.encode(), path)) == sections(profile)
    assert faults(text) == []
    assert max(map(len, text.splitlines())) <= 120


def test_the_text_explains_every_key(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    text = render_profile(STORED)
    lines = text.splitlines()
    types: list[type[BaseModel]] = [Profile, *(kind for name, kind in SECTIONS.items() if not name.startswith("<"))]
    for section in types:
        for name, field in section.model_fields.items():
            (place, *_) = [at for at, line in enumerate(lines) if re.match(rf"[ #]*{name}:( |$)", line)]
            above = " ".join(line.strip(" #") for line in lines[:place])  # long descriptions are wrapped
            assert field.description is not None
            assert field.description in above, name
    read = parse_profile(text.encode(), tmp_path / "p.yaml")
    assert sections(read) == sections(
        parse_profile(b"model: {repository: models, name: mine}\n", tmp_path / "p.yaml")
    )


def test_a_key_that_is_not_set_becomes_one_without_its_comment() -> None:
    text = COMMENTED_KEY.sub(r"\1", render_profile(STORED))
    assert faults(text) == []
    tree = yaml_lines.parse(text.encode(), "p.yaml", hint="").plain()
    assert isinstance(tree, dict)
    assert list(tree) == [*Profile.model_fields, "gpu"]
    for name in ("sla", "request", "load", "space", "score", "tolerance"):
        section = tree[name]
        assert isinstance(section, dict)
        assert list(section) == list(SECTIONS[name].model_fields)


def test_an_empty_mapping_stays() -> None:
    tree = {"model": {"builder": "mlp"}, "gpu": {"space": {"config": {}}}}
    assert (
        yaml_lines.parse(render_profile(tree).encode(), "p.yaml", hint="").at(("gpu", "space", "config")).plain()
        == {}
    )


@given(
    st.text(max_size=30)
    | st.sampled_from(["off", "no", "True", "null", "1e3", "16..128", "2024-01-01", "a: b", "- a", "#", "20ms"])
    | st.integers(-(2**31), 2**31)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none()
)
def test_a_value_on_one_line_is_read_as_itself(value: object) -> None:
    line = f"key: [{flow(value)}, {flow({'k': value})}]"
    assert "\n" not in line
    read = yaml_lines.parse(line.encode(), "p.yaml", hint="").plain()
    assert read == {"key": (value, {"k": value})}
