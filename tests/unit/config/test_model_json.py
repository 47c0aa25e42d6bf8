"""Tests of values of a candidate in model.json: reading, writing, and the files of a load request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.config import model_json
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource, served_models
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate, short_path
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.results.configuration_text import change_lines, configuration

TEXT = '{"model": "m", "max_num_seqs": 64, "share": 0.9, "nested": {"a": 1}}\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in ("1", "3"):
        tmp_path.joinpath(version).mkdir()
        tmp_path.joinpath(version, "model.json").write_text(TEXT.replace("64", str(64 * int(version))))
    tmp_path.joinpath("2").mkdir()
    tmp_path.joinpath("2", "model.py").write_text("")
    tmp_path.joinpath("notes").mkdir()
    tmp_path.joinpath("notes", "model.json").write_text("not a version")
    tmp_path.joinpath("3", "adapters.json").write_text("{}")
    return tmp_path


def test_values_are_those_of_the_newest_version(model: Path) -> None:
    paths = ["model_json.max_num_seqs", "model_json.absent", "model_json.nested", "server.log-info"]
    assert model_json.values(model, paths) == {"model_json.max_num_seqs": 192}


def test_a_model_whose_file_no_candidate_changes_is_not_read(model: Path) -> None:
    """A model of another backend may have any file of this name."""
    model.joinpath("3", "model.json").write_text("[1, 2]")
    source = ModelSource(model.parent, model.name, ModelConfig(name=model.name, instance_group=[{"count": 1}]))
    assert served_models(source, Candidate(0)).files == {}
    with pytest.raises(BadInputError, match="not a JSON object"):
        served_models(replace(source, varies_model_json=True), Candidate(0))


def test_a_candidate_without_keys_gets_the_original_file(model: Path) -> None:
    config = ModelConfig(name=model.name, instance_group=[{"count": 1}])
    source = ModelSource(model.parent, model.name, config, varies_model_json=True)
    assert served_models(source, Candidate(0)).files["3/model.json"].decode() == TEXT.replace("64", "192")


def test_each_version_gets_the_values_and_keeps_its_others(model: Path) -> None:
    files = model_json.files_with(model, {"max_num_seqs": 192, "added": True})
    assert list(files) == ["1/model.json", "3/model.json"]
    for text in files.values():
        assert json.loads(text) == json.loads(TEXT) | {"max_num_seqs": 192, "added": True}


def test_a_file_with_the_values_keeps_its_text(model: Path) -> None:
    files = model_json.files_with(model, {"max_num_seqs": 192})
    assert files["3/model.json"].decode() == TEXT.replace("64", "192")
    assert json.loads(model_json.files_with(model, {"share": True})["3/model.json"])["share"] is True


def test_a_load_request_sends_all_files_of_the_versions_or_none(model: Path) -> None:
    assert model_json.override_files(model, model_json.files_with(model, {})) == {}
    changed_files = model_json.files_with(model, {"max_num_seqs": 8})
    sent_files = model_json.override_files(model, changed_files)
    assert sent_files.keys() == {"1/model.json", "2/model.py", "3/model.json", "3/adapters.json"}
    assert json.loads(sent_files["3/model.json"])["max_num_seqs"] == 8


def test_line_ends_and_any_text_are_kept(model: Path) -> None:
    content = b'{\r\n"max_num_seqs": 1, "text": "\\ud800", "name": "\xc3\xa9"}\r\n'
    for version in ("1", "3"):
        model.joinpath(version, "model.json").write_bytes(content)
    unchanged = model_json.files_with(model, {"max_num_seqs": 1})
    assert unchanged["3/model.json"] == content
    assert model_json.override_files(model, unchanged) == {}
    changed = json.loads(model_json.files_with(model, {"max_num_seqs": 2})["3/model.json"])
    assert changed == {"max_num_seqs": 2, "text": "\ud800", "name": "é"}


def test_large_version_folders_are_not_sent(model: Path) -> None:
    with model.joinpath("3", "weights").open("wb") as file:
        file.truncate(model_json.MAX_OVERRIDE_BYTES + 1)
    with pytest.raises(BadInputError, match=r"have 17 MB.*at most 16 MiB: leave space.model_json out, or tune on"):
        model_json.override_files(model, model_json.files_with(model, {"max_num_seqs": 8}))


@pytest.mark.parametrize(
    ("content", "problem"),
    [("[1]", "not a JSON object"), ("{", "not JSON: "), ("[" * 100_000, "not JSON: ")],
)
def test_a_damaged_file_is_one_line(content: str, problem: str, model: Path) -> None:
    model.joinpath("3", "model.json").write_text(content)
    with pytest.raises(BadInputError, match=problem) as caught:
        model_json.values(model, ["model_json.a"])
    assert "\n" not in str(caught.value)


def test_values_without_a_file_are_refused(tmp_path: Path) -> None:
    assert model_json.files_with(tmp_path, {}) == {}
    with pytest.raises(BadInputError, match=r"no version folder has a model\.json"):
        model_json.files_with(tmp_path, {"a": 1})


@pytest.mark.parametrize("key", ["a/b", "a.b", "", "1a", "a b"])
def test_a_key_of_the_space_is_a_plain_name(key: str) -> None:
    with pytest.raises(ParameterError, match=r"not a key of model\.json"):
        SearchSpace((0,), fields={f"model_json.{key}": (1,)})


def test_a_candidate_is_shown_with_its_keys_of_model_json() -> None:
    before, after = (Candidate(0, fields=(("model_json.max_num_seqs", count),)) for count in (64, 128))
    assert short_path("model_json.max_num_seqs") == "max_num_seqs"
    assert configuration(after).endswith("max_num_seqs=128")
    assert change_lines(before, after) == [
        '- # model.json: "max_num_seqs": 64',
        '+ # model.json: "max_num_seqs": 128',
    ]
    assert after.model_json == {"max_num_seqs": 128}
    assert after.config_fields == after.proto_fields == ()
