"""Profiles are found by name from any folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optimizer.cli.models import list_models
from optimizer.core.errors import BadInputError
from optimizer.core.files import shipped_folder
from optimizer.model.profile import load_profile
from optimizer.model.profile_lookup import find_profile, list_profiles
from tests.profile_file import MODEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_current_configs_folder_is_searched_first(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "mlp.yaml").write_text("description: own\n")
    assert find_profile("mlp") == Path("configs/mlp.yaml")
    assert list_profiles()["mlp"] == Path("configs/mlp.yaml")


@pytest.mark.usefixtures("folder")
def test_a_name_is_found_from_any_folder() -> None:
    path = find_profile("dlrm")
    assert path.is_absolute()
    assert load_profile(path).name == "dlrm"
    assert "dlrm" in list_profiles()


def test_an_error_names_each_folder_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shipped_folder("configs").parent)
    with pytest.raises(BadInputError, match=rf"^no model 'dlrn' in {shipped_folder('configs').absolute()}: "):
        find_profile("dlrn")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["p.yaml", "./p.yml"])
def test_a_file_is_itself(name: str) -> None:
    Path(name).write_text(MODEL)
    assert find_profile(name) == Path(name)


def test_unknown_name_suggests_similar_names(folder: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        find_profile("dlrn")
    message = str(caught.value)
    assert message.startswith(f"no model 'dlrn' in {folder / 'configs'} and ")
    assert message.endswith(": did you mean dlrm? `tune models` lists them")


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("model.onxn", "did you mean model.onnx?"),
        ("./model.onx", "did you mean model.onnx?"),
        ("repository/my_modl", "did you mean repository/my_model?"),
        ("shop.yml", "did you mean shop.yaml?"),
        ("mlp.onnxx", "`tune models` lists them"),
        ("nowhere/model.onxn", "give a .yaml or .onnx file"),
    ],
)
def test_a_mistyped_path_suggests_the_model_with_the_most_similar_name(
    folder: Path, argument: str, hint: str
) -> None:
    (folder / "repository" / "my_model").mkdir(parents=True)
    for name in ("model.onnx", "model.json", "shop.yaml", "repository/my_model/config.pbtxt"):
        (folder / name).touch()
    with pytest.raises(BadInputError, match=re.escape(hint)):
        find_profile(argument)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "name",
    ["", "..", "../mlp", "a/b", "a\\b", "a\nb", "\0", "x" * 5000, "\ud800", ".yaml", "no.yaml", "\0.yaml"],
)
def test_invalid_names_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(BadInputError) as caught:
        find_profile(name)
    assert str(caught.value).isprintable()


def test_a_faulty_profile_is_listed_with_its_fault(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "bad.yaml").write_text("a: [\n")
    models = {model.name: model for model in list_models()}
    assert models["bad"].fault.startswith("configs/bad.yaml:2:1: ")
