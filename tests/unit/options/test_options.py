"""The table of options, the options of a run from values by name, and the command that reproduces them."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.cli.run import read_run_arguments
from optimizer.core.endpoint import SharedMemoryName
from optimizer.core.errors import BadInputError
from optimizer.options.addresses import server_address
from optimizer.options.command_line import (
    Parser,
    command_line,
    command_with_larger_budget,
    search_again_command,
    values_of,
)
from optimizer.options.flag_advice import flag_advice
from optimizer.options.option import Option
from optimizer.options.option_reader import parse_values, resume_options, run_options, written_values
from optimizer.options.run_options import SEARCHERS, SLA_METRICS, RunOptions, default_search
from optimizer.options.table import GROUPS, OPTIONS, OPTIONS_BY_NAME
from optimizer.options.values import OBJECTIVES as OBJECTIVE_NAMES
from optimizer.options.values import load_shares


def test_each_field_has_an_option() -> None:
    assert len(OPTIONS_BY_NAME) == len(OPTIONS)
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
    parser.add_options(OPTIONS_BY_NAME)
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


def test_a_model_without_a_share_gets_the_load_of_the_tuned_one() -> None:
    options = run_options("m", {"concurrent-models": "ranker=3,encoder,small=0.25"})
    assert load_shares(options.concurrent_models) == {"ranker": 3.0, "encoder": 1.0, "small": 0.25}
    assert run_options("m", written_values(options)) == options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sla-p59": "20ms"}, "--sla-p59: unknown option; did you mean --sla-p"),
        ({"seed": True}, "--seed: bool is not text, a number or a list of them"),
        ({"shape": {"a": 1}}, "--shape: dict is not text, a number or a list of them"),
        ({"model-warmup": "yes"}, "--model-warmup: yes is neither true nor false"),
        ({"load": "fast"}, "--load fast: choose from concurrency, rate"),
        ({"header": "secret", "target": "remote"}, "--header ***: write NAME:VALUE"),
        (
            {"concurrent-models": "a,b=0"},
            "--concurrent-models a,b=0: b=0 is not a model with a share of the load; write NAME, or NAME=SHARE with",
        ),
        *(
            (
                {"concurrent-models": [text]},
                f"--concurrent-models {text}: {text} is not a model with a share of the load",
            )
            for text in ("b=100.5", "b=", "b=x", "=3", "b=3=4", "b=nan", "b=inf", "b=-1", "b=1e1", "b= 3")
        ),
        ({"concurrent-models": "b,"}, "--concurrent-models b,: '' is not a model with a share of the load"),
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
    assert "verbose" not in quiet.parsed
    for flag in ("-v", "--verbose"):
        arguments = read_run_arguments([flag, "mlp"])
        assert arguments.parsed["verbose"]
        assert arguments.options == quiet.options
    assert "verbose" not in written_values(quiet.options)


def test_the_parser_keeps_text() -> None:
    parser = Parser("tune", "MODEL", "")
    parser.add_options(("seed", "shape", "no-report"))
    words = ["--seed", "-1", "--shape", "a:1", "--shape=b:2", "--no-report"]
    assert values_of(parser.read(words)) == {"seed": "-1", "shape": ["a:1", "b:2"], "no-report": True}


def test_a_flag_of_other_commands_for_the_results_is_answered_with_that_of_this_command() -> None:
    assert flag_advice("--results", ["--out", "--no-report"]) == "did you mean --out?"
    assert flag_advice("--out", ["--results", "--no-report"]) == "did you mean --results?"


def test_options_with_the_same_field_are_written_by_its_value() -> None:
    remote_options = {"target": "remote", "url": "https://h:1", "ssl-https-ca-certificates-file": "c"}
    assert written_values(run_options("m", remote_options)).items() >= remote_options.items()
    assert run_options("m", remote_options).tls_ca == "c"
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
    bounds_ms = {"p95": 20.0, "p99.9": 30.0, "ttft-p99.5": 200.0}
    words = ["--sla-p95", "20ms", "--sla-p99.90=30ms", "--sla", "ttft-p99.5<=0.2s", "mlp"]
    assert read_run_arguments(words).options.sla_ms == bounds_ms
    bounds = {"sla-p95": "20ms", "sla": ["p99.9<=30ms", "ttft-p99.5<=200ms"]}
    options = run_options("mlp", bounds)
    assert options.sla_ms == bounds_ms
    assert written_values(options).items() >= bounds.items()
    assert run_options("mlp", {"sla": "p99.0 <= 30ms"}).sla_ms == {"p99": 30.0}


def test_the_words_after_the_end_of_the_options_are_no_bounds() -> None:
    parser = Parser("tune", "MODEL", "")
    parser.add_options(("sla",))
    parser.add_argument("model")
    assert parser.read(["--sla-p99.9", "1ms", "--", "--sla-p99.9"]).model == "--sla-p99.9"


# -- the command that reproduces options -----------------------------------------------------------------------------

POSITIVE = st.floats(1e-3, 1e9)


def not_dashes(text: str) -> bool:
    """Return whether ``text`` can be a value: ``--`` is refused, even in ``--out=--``."""
    return text != "--"


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).filter(not_dashes)
WITHOUT_PASSWORD = st.one_of(st.none(), st.sampled_from(["sqlite:///a b.db", "file/study", "-x.log", "--json.log"]))
PATHS = TEXTS.filter(str.strip)
OBJECTIVES = st.lists(st.sampled_from(OBJECTIVE_NAMES), min_size=1, max_size=3, unique=True).map(tuple)


PRINTABLE = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=9).filter(
    not_dashes
)
SOMETIMES = st.none() | PRINTABLE


@st.composite
def targets(draw: st.DrawFn) -> dict[str, Any]:
    """Return a target with its options."""
    target = draw(st.sampled_from(["embedded", "local", "docker", "remote"]))
    arguments = tuple(draw(st.lists(st.sampled_from(["--log-verbose=1", "--rate-limit=off", "--x"]), max_size=2)))
    if target == "local":
        return {
            "target": target,
            "tritonserver": draw(SOMETIMES),
            "backend_directory": draw(SOMETIMES),
            "server_args": arguments,
        }
    if target == "docker":
        return {
            "target": target,
            "server_args": arguments,
            "docker_image": draw(PRINTABLE),
            "docker_gpus": draw(SOMETIMES),
            "docker_mounts": tuple(draw(st.lists(PRINTABLE, max_size=2))),
            "docker_shm_size": draw(SOMETIMES),
            "docker_ulimits": tuple(draw(st.lists(PRINTABLE, max_size=2))),
            "docker_env": tuple(draw(st.lists(PRINTABLE, max_size=2))),
        }
    if target == "remote":
        url = draw(st.sampled_from([None, "triton:8001", "grpcs://10.0.0.1:1", "https://[::1]:8000/"]))
        if_encrypted = SOMETIMES if server_address(url).tls else st.none()
        certificate = draw(if_encrypted)
        return {
            "target": target,
            "url": url,
            "metrics_url": draw(st.sampled_from([None, "triton:8002"])),
            "headers": tuple(draw(st.lists(st.sampled_from(["a:$B", "X-Key:Bearer ${T}"]), max_size=2))),
            "tls_ca": draw(if_encrypted),
            "tls_cert": certificate,
            "tls_key": None if certificate is None else draw(PRINTABLE),
        }
    return {"target": target}


@st.composite
def options(draw: st.DrawFn) -> RunOptions:
    """Return any options that the command line can give."""
    objectives = draw(OBJECTIVES)
    ranks = objectives[0] == "throughput"
    load: Literal["concurrency", "rate"] = draw(st.sampled_from(["concurrency", "rate"]))
    sdk = {} if load == "rate" else {"perf_analyzer_image": draw(SOMETIMES)}
    served = sdk | draw(targets().filter(lambda target: load != "rate" or "http" not in (target.get("url") or "")))
    over_http = served["target"] == "remote" and server_address(served["url"]).protocol == "http"
    times = ["poisson", "constant", "intervals.txt"]
    protocols = ["http"] if over_http else ["grpc"] if served["target"] == "remote" else ["grpc", "http"]
    search = draw(st.sampled_from([name for name in SEARCHERS if ranks or name != "simulated"]))
    on_nodes = served["target"] in ("embedded", "local") and served.get("perf_analyzer_image") is None
    cluster = draw(st.sampled_from([None, "auto", "ray://head:10001"])) if on_nodes else None
    cpus = st.sampled_from([None] if cluster else [None, "0"])
    is_shareable = served.get("perf_analyzer_image") is None and served.get("docker_shm_size") is None
    shareable: list[SharedMemoryName] = ["none", "system"] if is_shareable else ["none"]
    return RunOptions(
        **served,
        model=draw(TEXTS.filter(bool)),
        sla_ms=draw(st.dictionaries(st.sampled_from([*SLA_METRICS, "p99.9", "ttft-p99.5", "p72"]), POSITIVE)),
        model_repository=draw(st.one_of(st.none(), PATHS)),
        concurrent_models=draw(st.sampled_from([(), ("other",), ("é a=3", "b=0.5")])),
        objectives=objectives,
        min_throughput=draw(st.sampled_from([None, "4000/s", "0.5 req/s", " 7"])),
        max_memory_bytes=draw(st.one_of(st.none(), POSITIVE)),
        max_error_percent=draw(st.sampled_from([None, 0.1, 0.001, 99.5])),
        budget_seconds=draw(st.integers(1, 10**9)) / 1000,
        max_trials=draw(st.one_of(st.none(), st.integers(1, 10**6))),
        search=search,
        warm_start=None if search == "grid" else draw(st.one_of(st.none(), PATHS)),
        seed=draw(st.integers(0, 2**32 - 1)),
        protocol="grpc" if load == "rate" else draw(st.sampled_from(protocols)),
        load=load,
        request_times=draw(st.sampled_from(times if load == "rate" else times[:1])),
        min_score=draw(st.one_of(st.none(), st.floats(-1e6, 1e6))),
        output_check=draw(st.booleans()),
        confirmation=draw(st.booleans()),
        confidence=draw(st.sampled_from([0.99, 0.8, 0.95, 0.999, 0.9999])),
        server_cpus=None if served["target"] == "remote" else draw(cpus),
        client_cpus=draw(cpus),
        cluster=cluster,
        cluster_cpus=draw(st.one_of(st.none(), st.integers(1, 8192))) if cluster else None,
        shared_memory=(shared := draw(st.sampled_from(shareable))),
        output_shared_memory_bytes=None if shared == "none" else draw(st.sampled_from([None, 1, 2e6])),
        measurement_interval_ms=draw(st.one_of(st.none(), st.floats(50, 15_000))),
        request_batch_size=draw(st.one_of(st.none(), st.integers(1, 2**31 - 1), st.sampled_from(["1*9|8", "1..4"]))),
        input_data=draw(st.sampled_from([None, "random", "zero", "a b.npz", "-folder"])),
        shapes=tuple(draw(st.lists(st.sampled_from(["x:1", "a,b:2..3|9*0.5", "-y:4, 5", "é:7"]), max_size=3))),
        input_ranges=tuple(draw(st.lists(st.sampled_from(["x:0..9", "a,b:-1.5..2", "y:1..1e3"]), max_size=2))),
        string_data=draw(st.one_of(st.none(), TEXTS)),
        string_length=draw(st.one_of(st.none(), st.integers(1, 999))),
        storage=(storage := draw(WITHOUT_PASSWORD)),
        study_name=None if storage is None or cluster else draw(st.sampled_from([None, "s1", "-a study"])),
        out=draw(PATHS),
    )


@given(options())
def test_the_reproduced_command_gives_the_same_options(original: RunOptions) -> None:
    command, *words = shlex.split(command_line(original))
    assert command == "tune"
    parsed = read_run_arguments(words)
    assert parsed.options == original
    assert parsed.resumed is None
    assert "json" not in parsed.parsed


@pytest.mark.parametrize(
    ("words", "search"),
    [
        ("", "simulated"),
        ("--objective throughput", "simulated"),
        ("--objective goodput --sla-p95 20ms", "simulated"),
        ("--objective output-throughput --sla-ttft-p95 200ms", "simulated"),
        ("--objective latency-p95", "tpe"),
        ("--objective memory", "tpe"),
        ("--objective memory,throughput", "tpe"),
        ("--objective throughput,memory", "tpe"),
        ("--objective throughput,memory --search simulated", "simulated"),
        ("--objective memory --search grid", "grid"),
        ("--search tpe", "tpe"),
    ],
)
def test_the_search_method_is_that_of_the_objectives(words: str, search: str) -> None:
    options = read_run_arguments([*words.split(), "m"]).options
    assert options.search == search
    assert read_run_arguments(shlex.split(command_line(options))[1:]).options == options
    assert ("--search" in command_line(options)) == (search != default_search(options.objectives))


@pytest.mark.parametrize("objective", ["memory", "latency-p95,throughput"])
def test_the_simulation_ranks_by_throughput_alone(objective: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_run_arguments(["--search", "simulated", "--objective", objective, "m"])
    assert str(caught.value) == (
        f"--search simulated ranks by throughput or goodput; with --objective {objective} "
        "take tpe, nsga2, random, grid or gp"
    )


def test_a_password_is_not_shown() -> None:
    shown = command_line(RunOptions("m", storage="postgresql://u:geheim@host/db"))
    assert "geheim" not in shown
    assert "postgresql://u:***@host/db" in shown


@pytest.mark.parametrize(("budget_seconds", "larger"), [(20.0, "600s"), (1800.0, "3600s")])
def test_a_command_with_a_larger_budget(budget_seconds: float, larger: str) -> None:
    options = RunOptions("dlrm", budget_seconds=budget_seconds, max_trials=2, confirmation=False)
    assert shlex.split(command_with_larger_budget(options)) == ["tune", "--budget", larger, "--seed", "0", "dlrm"]


def test_a_proposed_search_confirms_its_recommendation() -> None:
    options = RunOptions("dlrm", confirmation=False)
    assert "--no-confirmation" in command_line(options)
    assert "--no-confirmation" not in search_again_command(options)


@pytest.mark.parametrize(
    ("run_values", "resume_values", "fault"),
    [
        ({"target": "remote", "url": "h:8001"}, {"cluster": "auto"}, "--cluster: each trial starts its own server"),
        ({"target": "docker", "docker-image": "i"}, {"cluster": "auto"}, "which --target docker does not"),
        (
            {"server-cpus": "0-1"},
            {"cluster": "auto"},
            "--server-cpus: a trial on a cluster gets free CPUs",
        ),
        (
            {"client-cpus": "0-1"},
            {"cluster": "auto"},
            "--client-cpus: a trial on a cluster gets free CPUs",
        ),
    ],
)
def test_a_run_that_a_cluster_cannot_run_is_not_resumed_on_one(
    run_values: dict[str, str], resume_values: dict[str, str], fault: str
) -> None:
    with pytest.raises(BadInputError, match=fault):
        resume_options(run_options("m", run_values), resume_values)
    assert resume_options(run_options("m", {}), resume_values).cluster == "auto"
