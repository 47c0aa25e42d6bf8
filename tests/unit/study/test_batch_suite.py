"""The entries of a suite, and faults with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.errors import BadInputError
from optimizer.study.batch.suite import read_suite

SUITE = """\
name: nightly
budget: 20m
defaults:
  sla: {p95: 20ms}
  options: {seed: 3, max-trials: 12}
entries:
  - model: [dlrm, mlp]
  - model: bert-mini
    sla: [{p95: 50ms}, {avg: 10ms, p99: 0.1s}]
    target: [embedded, {target: remote, url: "localhost:8001"}]
    options: {max-trials: null, load: rate, shape: ["a:1", "b:2"], variants: [x, y], model-warmup: true}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "suite.yaml"
    path.write_text(text)
    return path


def test_every_combination_is_an_entry(tmp_path: Path) -> None:
    suite = read_suite(write(tmp_path, SUITE))
    assert (suite.name, suite.budget_seconds) == ("nightly", 1200.0)
    assert [entry.label for entry in suite.entries] == [
        "dlrm · p95 <= 20 ms",
        "mlp · p95 <= 20 ms",
        "bert-mini · p95 <= 50 ms",
        "bert-mini · p95 <= 50 ms · remote localhost:8001",
        "bert-mini · avg <= 10 ms and p99 <= 100 ms",
        "bert-mini · avg <= 10 ms and p99 <= 100 ms · remote localhost:8001",
    ]


def test_options_are_those_of_a_run(tmp_path: Path) -> None:
    first, *_, last = read_suite(write(tmp_path, SUITE)).entries
    assert first.command == "tune --sla-p95 20ms --max-trials 12 --seed 3 dlrm"
    options = last.options
    assert (options.seed, options.max_trials, options.load) == (3, None, "rate")
    assert (options.shapes, options.variants, options.model_warmup) == (("a:1", "b:2"), ("x", "y"), True)
    assert (options.target, options.url, options.sla_ms) == ("remote", "localhost:8001", {"avg": 10.0, "p99": 100.0})


def test_paths_start_from_the_suite(tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    text = "entries: [{model: ./models/m}, {model: m, options: {model-repository: models}}, {model: own.yaml}]"
    models = [
        (entry.options.model, entry.options.model_repository) for entry in read_suite(write(tmp_path, text)).entries
    ]
    assert models == [
        (str(tmp_path / "models" / "m"), None),
        ("m", str(tmp_path / "models")),
        (str(tmp_path / "own.yaml"), None),
    ]


def test_folders_for_the_container_start_from_the_suite(tmp_path: Path) -> None:
    target = "{target: docker, docker-image: i, docker-mount: './weights:/weights'}"
    (entry,) = read_suite(write(tmp_path, f"entries: [{{model: m, target: {target}}}]")).entries
    assert entry.options.docker_mounts == (f"{tmp_path}/weights:/weights",)


def test_a_warm_start_may_be_the_name_of_a_run(tmp_path: Path) -> None:
    for number in (1, 2):
        run = tmp_path / "results" / "dlrm" / f"2026112{number}-072139"
        run.mkdir(parents=True)
        (run / "run.json").write_text("{}")
    (tmp_path / "table.csv").touch()
    for name, path in (
        ("dlrm", "results/dlrm/20261122-072139"),
        ("latest", "results/dlrm/20261122-072139"),
        ("dlrm/20261121-072139", "results/dlrm/20261121-072139"),
        ("table.csv", "table.csv"),
    ):
        (entry,) = read_suite(write(tmp_path, f"entries: [{{model: mlp, options: {{warm-start: {name}}}}}]")).entries
        assert entry.options.warm_start == str(tmp_path / path)


def test_without_a_budget_each_has_that_of_a_run(tmp_path: Path) -> None:
    suite = read_suite(write(tmp_path, "entries: [{model: a}, {model: b}]"))
    assert (suite.name, suite.budget_seconds) == ("suite", 360.0)


def test_a_name_tells_two_apart(tmp_path: Path) -> None:
    text = "entries: [{model: a}, {model: a, name: a at a rate, options: {load: rate}}]"
    assert [entry.label for entry in read_suite(write(tmp_path, text)).entries] == ["a", "a at a rate"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile_models: [m]", r"suite.yaml:1: this is a configuration of Model Analyzer; .*`tune --from-model"),
        ("", "suite.yaml: empty; a suite has a line 'entries:'"),
        ("5", "suite.yaml:1: 5 is not a suite"),
        ("models: [a]", "suite.yaml:1: entries: missing"),
        ("entries: []", "suite.yaml:1: entries: is empty"),
        ("entries:\n  - modle: a", "suite.yaml:2: entries.modle: unknown key; did you mean model?"),
        ("entries:\n  - {model: a, sla: {p_42: 1ms}}", "suite.yaml:2: entries.sla.p_42: unknown key"),
        ("entries:\n  - model: a\n    sla: {p95: 5}", "suite.yaml:3: entries.sla.p95: 5: a unit is missing: 5ms?"),
        ("budget: 5\nentries: [{model: a}]", "suite.yaml:1: budget: 5: a unit is missing: 5m?"),
        ("name: ../up\nentries: [{model: a}]", "suite.yaml:1: name: '../up' has a separator"),
        (
            "entries:\n  - model: a\n    options: {max-trials: x}",
            "suite.yaml:3: entries.options.max-trials: --max-tri",
        ),
        ("defaults:\n  options: {seed: -1}\nentries: [{model: a}]", "suite.yaml:2: defaults.options.seed: --seed -1"),
        (
            "entries:\n  - {model: a, options: {budget: 5m}}",
            "suite.yaml:2: entries.options: 'budget' is not an opt",
        ),
        ("entries:\n  - {model: a, options: {help: true}}", "suite.yaml:2: entries.options: 'help' is not an opt"),
        ("entries: [{model: a, options: {seed: {a: 1}}}]", "entries.options: seed: a mapping is neither a value nor"),
        ("entries: [{model: a, target: moon}]", "suite.yaml:1: entries.*--target moon: choose from embedded, local"),
        (
            "entries: [{model: a, target: docker}]",
            "suite.yaml:1: entries.*--target docker: --docker-image is",
        ),
        (
            "entries:\n  - {model: a}\n  - {model: a}",
            "suite.yaml:3: entries: a is in the suite already; give this entry a na",
        ),
        ("entries: [{model: 5}]", "suite.yaml:1: entries.model: 5 is not text"),
    ],
)
def test_a_fault_names_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        read_suite(write(tmp_path, text))
    assert str(tmp_path) in str(caught.value)


def test_the_suite_of_the_page_is_one_with_and_without_the_entry_in_comments(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "batch.md").read_text()
    text = page.partition("```yaml\n")[2].partition("```")[0]
    for content, targets in ((text, [""] * 5), (text.replace("\n#", "\n "), ["", "", "", "", "", "", "docker"])):
        suite = read_suite(write(tmp_path, content))
        assert suite.budget_seconds == 1200
        assert [entry.target.partition(" ")[0] for entry in suite.entries] == targets
        assert len({entry.label for entry in suite.entries}) == len(targets)


def test_no_value_passes_for_a_flag(tmp_path: Path) -> None:
    text = 'entries: [{model: "--help", options: {string-data: "--json"}}]'
    (entry,) = read_suite(write(tmp_path, text)).entries
    assert (entry.options.model, entry.options.string_data) == ("--help", "--json")
