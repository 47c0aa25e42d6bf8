"""The table of options, and the options of a run from values by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from optimizer.cli.run import read_run_arguments
from optimizer.core.errors import BadInputError
from optimizer.options.command_line import Parser, values_of
from optimizer.options.option import Option
from optimizer.options.option_reader import flag_advice, parse_values, run_options, written_values
from optimizer.options.run_options import SLA_METRICS, RunOptions
from optimizer.options.table import BY_NAME, GROUPS, OPTIONS


def test_each_field_has_an_option() -> None:
    assert len(BY_NAME) == len(OPTIONS)
    names = {option.field for option in OPTIONS if option.field and not option.key}
    assert sorted([*names, "model"]) == sorted(field.name for field in fields(RunOptions))
    assert [option.key for option in OPTIONS if option.field == "sla_ms"] == [*SLA_METRICS, ""]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_declaration_is_complete(option: Option) -> None:
    assert option.group in GROUPS
    text = option.help_text()
    assert text[0].isupper() or text.startswith(("local", "docker", "remote", "random"))
    assert not option.help.endswith(".")
    if option.field and option.type is not None and option.repeatable:
        assert option.value_in(RunOptions("")) == ()


def test_the_help_has_the_groups_in_their_order() -> None:
    parser = Parser("tune", "MODEL", "")
    parser.add_options(BY_NAME)
    text = parser.format_help()
    places = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)
    assert all(f"\n  {option.flags[0]}" in text for option in OPTIONS)


def test_values_of_python_and_yaml_are_options() -> None:
    values = {"sla-p95": "20ms", "seed": 7, "no-output-check": True, "shape": ["a:1", "b:2"], "out": Path("o")}
    options = run_options("-odd", {**values, "storage": None, "model-warmup": False, "variants": ("x", "y")})
    assert options == RunOptions(
        "-odd", {"p95": 20.0}, seed=7, output_check=False, shapes=("a:1", "b:2"), out="o", variants=("x", "y")
    )
    assert run_options("-odd", written_values(options)) == options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sla-p59": "20ms"}, "--sla-p59: unknown option; did you mean --sla-p"),
        ({"seed": True}, "--seed: bool is not text, a number or a list of them"),
        ({"shape": {"a": 1}}, "--shape: dict is not text, a number or a list of them"),
        ({"model-warmup": "yes"}, "--model-warmup: yes is neither true nor false"),
        ({"load": "fast"}, "--load fast: choose from concurrency, rate"),
        ({"header": "secret", "target": "remote"}, "--header ***: write NAME:VALUE"),
    ],
)
def test_an_invalid_value_names_option_and_value(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadInputError) as error:
        run_options("m", values)
    assert message in str(error.value)


def test_options_outside_a_command_are_unknown_to_it() -> None:
    with pytest.raises(BadInputError, match="--json: unknown option"):
        parse_values({"json": True}, lambda option: "python" in option.taken_by)


def test_verbose_is_no_part_of_the_task() -> None:
    quiet = read_run_arguments(["mlp"])
    assert not quiet.verbose
    for flag in ("-v", "--verbose"):
        arguments = read_run_arguments([flag, "mlp"])
        assert arguments.verbose
        assert arguments.options == quiet.options
    assert "verbose" not in written_values(quiet.options)


def test_the_parser_keeps_text() -> None:
    parser = Parser("tune", "MODEL", "")
    parser.add_options(("seed", "shape", "no-report"))
    words = ["--seed", "-1", "--shape", "a:1", "--shape=b:2", "--no-report"]
    assert values_of(parser.read(words)) == {"seed": "-1", "shape": ["a:1", "b:2"], "no-report": True}


def test_the_name_of_the_results_folder_in_another_command_is_answered_with_the_one_here() -> None:
    assert flag_advice("--results", ["--out", "--no-report"]) == "did you mean --out?"
    assert flag_advice("--out", ["--results", "--no-report"]) == "did you mean --results?"


def test_options_with_the_same_field_are_written_by_its_value() -> None:
    given = {"target": "remote", "url": "https://h:1", "ssl-https-ca-certificates-file": "c"}
    assert written_values(run_options("m", given)).items() >= given.items()
    assert run_options("m", given).tls_ca == "c"
    for values in (
        {"request-distribution": "constant"},
        {"request-distribution": "spike:4x:10%:2s"},
        {"request-intervals": "i.txt"},
        {"request-intervals": "./spike"},
        {"request-trace": "trace.CSV"},
        {"request-trace": "./ramp:1..2.csv"},
    ):
        assert written_values(run_options("m", {"load": "rate", **values})).items() >= values.items()


@pytest.mark.parametrize("words", [["-b", "8"], ["-b8"], ["--request-batch-size=8"]])
def test_the_batch_size_has_the_short_flag_of_perf_analyzer(words: list[str]) -> None:
    parser = Parser("tune", "MODEL", "")
    parser.add_options(("request-batch-size", "budget"))
    assert values_of(parser.read(words)) == {"request-batch-size": "8"}


def test_any_percentile_is_a_bound_of_the_command_line_and_of_python() -> None:
    given = {"p95": 20.0, "p99.9": 30.0, "ttft-p99.5": 200.0}
    words = ["--sla-p95", "20ms", "--sla-p99.90=30ms", "--sla", "ttft-p99.5<=0.2s", "mlp"]
    assert read_run_arguments(words).options.sla_ms == given
    bounds = {"sla-p95": "20ms", "sla": ["p99.9<=30ms", "ttft-p99.5<=200ms"]}
    options = run_options("mlp", bounds)
    assert options.sla_ms == given
    assert written_values(options).items() >= bounds.items()
    assert run_options("mlp", {"sla": "p99.0 <= 30ms"}).sla_ms == {"p99": 30.0}


def test_the_words_after_the_end_of_the_options_are_no_bounds() -> None:
    parser = Parser("tune", "MODEL", "")
    parser.add_options(("sla",))
    parser.add_argument("model")
    assert parser.read(["--sla-p99.9", "1ms", "--", "--sla-p99.9"]).model == "--sla-p99.9"
