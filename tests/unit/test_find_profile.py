"""Profiles are found by name from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.errors import BadInputError
from optimizer.profile.find import find_profile, list_profiles
from optimizer.profile.reader import load_profile

MODEL = "model: {builder: mlp}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_looked_up_in_configs_here_first(here: Path) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "mlp.yaml").write_text("description: own\n")
    assert find_profile("mlp") == Path("configs/mlp.yaml")
    assert {listed.name: listed.description for listed in list_profiles()}["mlp"] == "own"


@pytest.mark.usefixtures("here")
def test_a_name_is_found_from_any_folder() -> None:
    path = find_profile("dlrm")
    assert path.is_absolute()
    assert load_profile(path).name == "dlrm"
    assert "dlrm" in [listed.name for listed in list_profiles()]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["p.yaml", "./p.yml"])
def test_a_file_is_itself(name: str) -> None:
    Path(name).write_text(MODEL)
    assert find_profile(name) == Path(name)


def test_the_names_nearest_to_an_unknown_one(here: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        find_profile("dlrn")
    message = str(caught.value)
    assert message.startswith(f"no model 'dlrn' in {here / 'configs'} and ")
    assert message.endswith(": did you mean dlrm? `tune models` lists them")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name",
    ["", "..", "../mlp", "a/b", "a\\b", "a\nb", "\0", "x" * 5000, "\ud800", ".yaml", "no.yaml", "\0.yaml"],
)
def test_what_names_nothing_is_one_line(name: str) -> None:
    with pytest.raises(BadInputError) as caught:
        find_profile(name)
    assert str(caught.value).isprintable()


def test_a_faulty_profile_is_listed_with_its_fault(here: Path) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "bad.yaml").write_text("a: [\n")
    listed = {listed.name: listed.description for listed in list_profiles()}
    assert listed["bad"].startswith("(cannot be read: configs/bad.yaml:2:1: ")
