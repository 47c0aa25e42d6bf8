"""Ensembles, BLS and variants read from a repository, and the configuration of each model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource, configured_candidate, served_models
from optimizer.config.problem import ConcurrentModel
from optimizer.core.candidate import VARIANT, Candidate, FieldValue
from optimizer.core.errors import BadInputError, DeploymentError
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.machine.hardware import Hardware
from optimizer.model.default_space import MAX_DERIVED_CONFIGURATIONS, build_space, limit_choices
from optimizer.model.profile import load_profile
from optimizer.model.profile_schema import SpaceSection
from optimizer.model.repository import read_repository_model, read_source
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import candidate_document
from optimizer.study.run_record import problem_document
from optimizer.study.task import prepare_task
from tests.repositories import (
    SLEEPER_CONFIG,
    doubler,
    sleeper_program,
    stored,
    write_bls,
    write_ensemble,
    write_model,
    write_python_model,
)

CONFIG = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
LAPTOP = Hardware(gpus=(), cpu="a CPU", cpu_count=2, memory_bytes=8 << 30)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with the ensemble ``chain`` and its steps ``first`` and ``second``."""
    write_ensemble(tmp_path, milliseconds=5)
    return tmp_path


@pytest.fixture
def chain(repository: Path) -> ModelSource:
    return read_source(stored(repository), "chain")


def test_an_ensemble_brings_its_steps_and_the_largest_of_them_is_tuned(repository: Path) -> None:
    program = repository / "first" / "1" / "model.py"
    program.write_text(program.read_text() + "# longer\n" * 100)
    result = read_source(stored(repository), "chain")
    assert list(result.composing) == ["first", "second"]
    assert result.batcher == "first"
    assert result.tuned_config.max_batch_size == 8
    assert read_source(stored(repository), "chain", batcher="second").batcher == "second"
    assert int(result.facts["model_bytes"]) > program.stat().st_size


def test_python_bytecode_does_not_count_as_part_of_a_step(repository: Path) -> None:
    """Bytecode written by a server must not change which step is the largest."""
    before = read_source(stored(repository), "chain").batcher
    other_step = "first" if before == "second" else "second"
    compiled = repository / other_step / "1" / "__pycache__"
    compiled.mkdir()
    (compiled / "model.pyc").write_bytes(bytes(100_000))
    assert read_source(stored(repository), "chain").batcher == before


def test_nested_ensembles_are_loaded_after_their_steps(tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path, milliseconds=5)
    text = (folder / "config.pbtxt").read_text()
    shutil.copytree(folder, tmp_path / "outer")
    outer = text.replace('"first"', '"chain"').replace('key: "x"', 'key: "X"', 1).replace('key: "y"', 'key: "Y"', 1)
    (tmp_path / "outer" / "config.pbtxt").write_text(outer)
    result = read_source(stored(tmp_path), "outer", batcher="second")
    assert list(result.composing) == ["first", "second", "chain"]
    settings = served_models(result, Candidate(4)).settings
    assert [settings[name].max_batch_size for name in ("second", "chain", "outer")] == [4, 4, 4]


def test_version_policy_of_an_ensemble_names_one_of_its_folders(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path, milliseconds=5) / "config.pbtxt"
    text = path.read_text()
    path.write_text(text + "version_policy { specific { versions: [ 1 ] } }\n")
    assert read_source(stored(tmp_path), "chain").config.version_policy.specific.versions == [1]
    path.write_text(text + "version_policy { specific { versions: [ 2 ] } }\n")
    with pytest.raises(BadInputError, match="version_policy: there is no version 2; the model has 1"):
        read_source(stored(tmp_path), "chain")


def test_a_copy_for_a_remote_server_needs_only_the_configurations(tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path, milliseconds=5)
    with (folder / "config.pbtxt").open("a") as config:
        config.write("version_policy { specific { versions: [ 2 ] } }\n")
    for version in tmp_path.glob("*/1"):
        shutil.rmtree(version)
    read = partial(read_repository_model, tmp_path, gpu=False, is_embedded=False)
    result = read_source(read, "chain")
    assert set(result.models) == {"chain", "first", "second"}
    with pytest.raises(BadInputError, match=r"no version folder with model\.py"):
        read_source(stored(tmp_path), "chain")


def test_missing_step_of_an_ensemble_is_named(repository: Path) -> None:
    shutil.rmtree(repository / "second")
    with pytest.raises(
        BadInputError, match=r"chain consists of 'second': .*no model 'second' there; it has chain, first"
    ):
        read_source(stored(repository), "chain")


def test_a_missing_concurrent_model_is_named_with_its_option(repository: Path) -> None:
    with pytest.raises(BadInputError, match=r"^--concurrent-models gone: .*no model 'gone' there; it has chain, "):
        read_source(stored(repository), "first", concurrent=("second", "gone"))


def test_an_ensemble_next_to_its_own_step_is_refused_with_the_other_order(repository: Path) -> None:
    with pytest.raises(
        BadInputError, match=r"^--concurrent-models chain: first, the tuned model, is a step of it; tune"
    ):
        read_source(stored(repository), "first", concurrent=("chain",))
    assert read_source(stored(repository), "chain", concurrent=("first",)).concurrent == {"first": 1.0}


def test_the_size_of_concurrent_models_includes_that_of_the_tuned_one(repository: Path) -> None:
    sizes = [int(stored(repository)(name).facts["model_bytes"]) for name in ("first", "second")]
    assert read_source(stored(repository), "first", concurrent=("second",)).facts["model_bytes"] == sum(sizes)


def test_a_concurrent_model_has_one_share_of_the_load(repository: Path) -> None:
    assert read_source(stored(repository), "first", concurrent=("second=3",)).concurrent == {"second": 3.0}
    for second in ("second", "second=3"):
        with pytest.raises(BadInputError, match=rf"^--concurrent-models second=3,{second}: a model is named twice; "):
            read_source(stored(repository), "first", concurrent=("second=3", second))
    with pytest.raises(BadInputError, match=r"^--concurrent-models first=3: first is the tuned model itself"):
        read_source(stored(repository), "first", concurrent=("first=3",))


def test_the_batches_of_an_ensemble_next_to_another_are_those_of_one_of_its_own_steps(repository: Path) -> None:
    """An ensemble has no dynamic batching of its own."""
    alone = read_source(stored(repository), "chain")
    shutil.copytree(repository / alone.batcher, repository / "large")
    (repository / "large" / "1" / "weights").write_bytes(bytes(100_000))
    both = read_source(stored(repository), "chain", concurrent=("large",))
    assert both.batcher == alone.batcher
    with pytest.raises(
        BadInputError, match=r"^model\.batcher: 'large' is not a model of chain, which has first, second"
    ):
        read_source(stored(repository), "chain", concurrent=("large",), batcher="large")
    assert read_source(stored(repository), "first", concurrent=("large",)).tuned_model == "first"


def test_a_batcher_of_a_model_without_steps_is_refused(repository: Path) -> None:
    with pytest.raises(BadInputError, match=r"^model\.batcher: first calls no other model, .*; leave the key out$"):
        read_source(stored(repository), "first", batcher="second")


def test_an_ensemble_that_calls_itself_is_refused(tmp_path: Path) -> None:
    config = write_ensemble(tmp_path, milliseconds=5) / "config.pbtxt"
    config.write_text(config.read_text().replace('"second"', '"chain"'))
    with pytest.raises(BadInputError, match=r"call one another \(chain > chain\)"):
        read_source(stored(tmp_path), "chain")


def test_the_steps_of_a_request_are_named_with_their_instances(tmp_path: Path) -> None:
    write_bls(tmp_path, milliseconds=5)
    read = stored(tmp_path)
    chain, caller = read_source(read, "chain"), read_source(read, "caller", composing=["chain"])
    serving = {**caller.composing, "caller": caller.config}
    assert chain.steps(serving) == (("chain", 0), ("first", 1), ("second", 1))
    serving["first"].instance_group[0].count = 3
    serving["second"].instance_group[0].gpus.extend([0, 1])
    assert caller.steps(serving) == (("caller", 1), ("first", 3), ("second", 2))
    assert read_source(read, "first").steps(serving) == ()


def test_the_steps_of_each_model_under_load_are_those_of_its_own_requests(tmp_path: Path) -> None:
    write_bls(tmp_path, milliseconds=5)
    write_python_model(tmp_path, "other", sleeper_program(5))
    read = stored(tmp_path)
    both = read_source(read, "chain", concurrent=["other=3"])
    assert both.steps(both.models) == (("chain", 0), ("first", 1), ("second", 1))
    assert both.steps(both.models, "other") == (("other", 1),)
    reverse = read_source(read, "other", concurrent=["chain"])
    assert reverse.steps(reverse.models) == (("other", 1),)
    assert reverse.steps(reverse.models, "chain") == (("chain", 0), ("first", 1), ("second", 1))
    calling = read_source(read, "caller", composing=["chain"], concurrent=["other"])
    assert calling.steps(calling.models) == (("caller", 1), ("first", 1), ("second", 1))


def test_the_steps_are_unknown_if_a_model_serves_requests_of_two(tmp_path: Path) -> None:
    """The statistics of ``first`` are those of the requests to the ensemble and of its own ones together."""
    write_bls(tmp_path, milliseconds=5)
    for name, composing in (("chain", []), ("caller", ["first"])):
        source = read_source(stored(tmp_path), name, composing=composing, concurrent=["first"])
        assert source.steps(source.models) == source.steps(source.models, "first") == ()


def test_the_steps_of_an_ensemble_are_unknown_if_one_of_them_calls_other_models(tmp_path: Path) -> None:
    """The time of a model that is called is a part of that of the step, and no file says which step that is."""
    write_bls(tmp_path, milliseconds=5)
    config = (tmp_path / "chain" / "config.pbtxt").read_text()
    for name, step in (("outer", "caller"), ("nested", "chain")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config.replace('"first"', f'"{step}"'))
    outer = read_source(stored(tmp_path), "outer", composing=["first"])
    assert outer.steps(outer.models) == ()
    nested = read_source(stored(tmp_path), "nested")
    assert [name for name, _ in nested.steps(nested.models)] == ["nested", "first", "second"]


def test_settings_of_other_models_are_applied_to_them(chain: ModelSource) -> None:
    other_step = next(name for name in chain.composing if name != chain.batcher)
    fields = ((f"{other_step}/instance_group_count", 2), (f"{other_step}/max_queue_delay_microseconds", 100))
    served = served_models(chain, Candidate(4, True, 500, fields=fields))
    assert list(served.configs) == ["first", "second", "chain"]
    assert (served.model, served.batcher) == ("chain", chain.batcher)
    assert served.settings[other_step] == Candidate(8, True, 100, (), 2)
    assert served.settings[chain.batcher] == Candidate(4, True, 500)
    assert served.configs["chain"].max_batch_size == 4
    assert served.differences(served.configs) == []
    assert served.differences({**served.configs, other_step: chain.composing[other_step]}) == [
        f"{other_step}: dynamic_batching is off, wanted on",
        f"{other_step}: instance_count is 1, wanted 2",
    ]


def test_different_counts_of_a_step_that_is_not_tuned_are_kept(repository: Path) -> None:
    with (repository / "first" / "config.pbtxt").open("a") as config:
        config.write("instance_group { count: 3 kind: KIND_CPU }\n")
    source = read_source(stored(repository), "chain", batcher="second")
    space = build_space(SpaceSection(), source, parse_size_distribution("1"), LAPTOP)
    assert [path for path in space.fields if "/" in path] == ["first/max_queue_delay_microseconds"]
    configured = served_models(source, configured_candidate(source, space.fields))
    assert configured.configs["first"] == source.composing["first"]
    assert configured.differences(configured.configs) == []
    count = "first/instance_group_count"
    changed = served_models(source, Candidate(4, fields=((count, 2),)))
    assert [group.count for group in changed.configs["first"].instance_group] == [2, 2]
    with pytest.raises(BadInputError, match="first: the instance groups have different counts"):
        configured_candidate(source, [count])


def test_the_derived_space_of_many_steps_is_limited() -> None:
    """The search compares all configurations, and their number is exponential in the number of steps."""
    steps = {
        name: ModelConfig(name=name, backend="python", max_batch_size=64) for name in ("net", "a", "b", "c", "d")
    }
    for config in steps.values():
        config.instance_group.add(count=1)
    ensemble = ModelConfig(name="chain", platform="ensemble", max_batch_size=64)
    for name in steps:
        ensemble.ensemble_scheduling.step.add(model_name=name, model_version=-1)
    source = ModelSource(Path(), "chain", ensemble, composing=steps, batcher="net")
    gpu = Hardware(("A10",), "a CPU", 16, 64 << 30)
    space = build_space(SpaceSection(), source, parse_size_distribution("1"), gpu)
    assert MAX_DERIVED_CONFIGURATIONS / 4 < len(space) <= MAX_DERIVED_CONFIGURATIONS
    fields_of_steps = {path: choices for path, choices in space.fields.items() if "/" in path}
    assert fields_of_steps == {f"{name}/instance_group_count": (1, 2) for name in "abcd"}, "delays are left out first"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (100, {"a": (1, 2, 3, 4), "b": ("off", 0, 700)}),
        (8, {"a": (1, 2, 3), "b": ("off", 700)}),
        (4, {"a": (1, 2), "b": ("off", 700)}),
        (2, {"a": (1, 2)}),
        (0, {}),
    ],
)
def test_the_preferred_choices_are_kept(limit: int, expected: dict[str, tuple[FieldValue, ...]]) -> None:
    assert limit_choices({"a": (1, 2, 3, 4), "b": (700, "off", 0)}, limit) == expected


def test_preferred_sizes_of_another_model_are_resolved_for_its_batches(chain: ModelSource) -> None:
    other_step = next(name for name in chain.composing if name != chain.batcher)

    def preferred(policy: str, delay: str | int = 0) -> tuple[int, ...]:
        fields = (
            (f"{other_step}/max_queue_delay_microseconds", delay),
            (f"{other_step}/preferred_batch_size", policy),
        )
        return served_models(chain, Candidate(8, fields=fields)).settings[other_step].preferred_batch_sizes

    assert preferred("max/2,max") == (4, 8)
    assert preferred("max/2", "off") == ()
    with pytest.raises(DeploymentError, match=f"{other_step}: preferred_batch_size max/3 does not fit 8"):
        preferred("max/3")


def test_baseline_is_the_configuration_on_disk(chain: ModelSource) -> None:
    other_step = next(name for name in chain.composing if name != chain.batcher)
    paths = [
        f"{other_step}/{name}" for name in ("max_batch_size", "max_queue_delay_microseconds", "preferred_batch_size")
    ]
    values = configured_candidate(chain, paths)
    assert dict(values.fields) == {paths[0]: 8, paths[1]: "off", paths[2]: "none"}
    configs = served_models(chain, values).configs
    assert configs == {**chain.composing, "chain": chain.config}


def test_without_a_profile_the_instances_and_batching_of_each_step_vary(tmp_path: Path) -> None:
    write_bls(tmp_path, milliseconds=5)
    options = RunOptions("caller", model_repository=str(tmp_path), bls_composing_models=("first", "second"))
    task = prepare_task(options, LAPTOP, print)
    other_models = {path: choices for path, choices in task.problem.space.fields.items() if "/" in path}
    assert other_models == {
        f"{name}/{parameter}": choices
        for name in ("caller", "second" if task.source.batcher == "first" else "first")
        for parameter, choices in (("instance_group_count", (1, 2)), ("max_queue_delay_microseconds", ("off", 0)))
    }
    assert task.problem.space.parameter_values(task.baseline) is not None


def test_each_model_under_load_is_simulated_unless_one_is_an_ensemble(tmp_path: Path) -> None:
    write_ensemble(tmp_path / "models", milliseconds=5)
    config = tmp_path / "models" / "second" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group { count: 2 kind: KIND_CPU }\ndynamic_batching {}\n")
    options = RunOptions("first", model_repository=str(tmp_path / "models"), concurrent_models=("second=3",))
    task = prepare_task(options, LAPTOP, print)
    other = ConcurrentModel("second", 3.0, Candidate(8, dynamic_batching=True, instance_count=3))
    assert task.problem.concurrent == (other,)
    assert problem_document(task)["concurrent_candidates"] == {"second": candidate_document(other.candidate)}
    write_python_model(tmp_path / "models", "alone", sleeper_program(5))
    options = replace(options, model="alone", concurrent_models=("first", "chain"))
    assert prepare_task(options, LAPTOP, print).problem.concurrent == ()


def test_ranges_and_shapes_of_another_model_under_load_have_its_name(tmp_path: Path) -> None:
    config = SLEEPER_CONFIG.replace("FP32 dims: 4", "INT32 dims: -1")
    config = config.replace("input { ", 'input { name: "ids" data_type: TYPE_INT32 dims: 2 } input { ', 1)
    for name in ("first", "second"):
        write_python_model(tmp_path / "models", name, sleeper_program(5), config)
    options = RunOptions(
        "first",
        model_repository=str(tmp_path / "models"),
        concurrent_models=("second",),
        shapes=("x:2", "second/x:3"),
    )
    unbounded = prepare_task(options, LAPTOP, print)
    assert unbounded.unbounded == ("ids", "x")
    assert unbounded.concurrent["second"].unbounded == ("second/ids", "second/x")
    assert (unbounded.shapes, unbounded.concurrent["second"].shapes) == (("x:2",), ("x:3",))
    for names in ("second/ids,x", "second/ids,second/x"):
        bounded = prepare_task(replace(options, input_ranges=(f"{names}:0..1",)), LAPTOP, print)
        assert (bounded.unbounded, bounded.concurrent["second"].unbounded) == (("ids", "x"), ())
    assert bounded.input_data == unbounded.input_data
    with pytest.raises(BadInputError, match=r"second/z"):
        prepare_task(replace(options, input_ranges=("second/z:0..1",)), LAPTOP, print)


def test_a_model_that_is_served_alone_has_no_choices_of_others(tmp_path: Path) -> None:
    write_ensemble(tmp_path / "models", milliseconds=5)
    profile = tmp_path / "first.yaml"
    profile.write_text("model: {repository: models, name: first}\nspace: {models: {z: {max_batch_size: [2]}}}\n")
    message = r"first.yaml:2: space.models.z: no other model is served with first; leave it out$"
    with pytest.raises(BadInputError, match=message):
        prepare_task(RunOptions(str(profile)), LAPTOP, print)


def test_profile_sets_the_choices_of_each_model(tmp_path: Path) -> None:
    write_ensemble(tmp_path / "models", milliseconds=5)
    profile = tmp_path / "chain.yaml"
    profile.write_text(
        "model: {repository: models, name: chain, batcher: second}\n"
        "space: {max_batch_size: [8], models: {first: {instance_group_count: [1, 3], max_batch_size: [2, 8]}}}\n"
    )
    task = prepare_task(RunOptions(str(profile)), LAPTOP, print)
    assert task.source.batcher == "second"
    assert problem_document(task)["batcher"] == "second"
    assert task.problem.space.fields["first/instance_group_count"] == (1, 3)
    assert task.problem.space.fields["first/max_batch_size"] == (2, 8)
    profile.write_text("model: {repository: models, name: chain}\nspace:\n  models: {third: {max_batch_size: [2]}}\n")
    with pytest.raises(
        BadInputError, match=r"chain.yaml:3: space.models.third: not a model served with it, which are: "
    ):
        prepare_task(RunOptions(str(profile)), LAPTOP, print)
    profile.write_text("model: {repository: models, name: chain}\nspace:\n  models: {first: {max_batch: [2]}}\n")
    with pytest.raises(BadInputError, match=r"chain.yaml:3: space.models.first.max_batch: .*max_batch_size"):
        load_profile(profile)


def test_variants_replace_each_other(tmp_path: Path) -> None:
    for name in ("fp32", "fp16"):
        write_model(tmp_path, name, CONFIG, doubler())
    options = RunOptions("fp32", model_repository=str(tmp_path), variants=("fp16",))
    task = prepare_task(options, LAPTOP, print)
    assert task.problem.space.fields[VARIANT] == ("fp32", "fp16")
    assert dict(task.baseline.fields)[VARIANT] == "fp32"
    variant = served_models(task.source, Candidate(4, fields=((VARIANT, "fp16"),)))
    assert (variant.model, variant.batcher, list(variant.configs)) == ("fp16", "fp16", ["fp16"])
    assert variant.configs["fp16"].max_batch_size == 4


def test_variants_with_other_inputs_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "four", CONFIG, doubler())
    write_model(tmp_path, "five", CONFIG, doubler(dims=("batch", 5)))
    write_model(tmp_path, "alone", CONFIG.replace("8", "0"), doubler(dims=(4,)))
    refusals = (("five", "its inputs differ from those of four"), ("alone", "takes batches"), ("six", "no model"))
    for variant, reason in refusals:
        with pytest.raises(BadInputError, match=reason):
            read_source(stored(tmp_path), "four", variants=[variant])


def test_a_models_own_folder_in_place_of_its_repository_is_refused_with_the_repository(tmp_path: Path) -> None:
    write_model(tmp_path, "four", CONFIG, doubler())
    with pytest.raises(BadInputError) as caught:
        read_source(stored(tmp_path / "four"), "four")
    message = "is the folder of a model; give the repository, which contains that folder: "
    assert str(caught.value).startswith(f"{tmp_path / 'four'}: {message}{tmp_path}")


def test_flags_that_name_other_models_need_a_repository_and_go_before_the_profile(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"--variants x: mlp is not in a repository; put the models into one"):
        prepare_task(RunOptions("mlp", variants=("x",)), LAPTOP, print)
    for name in ("fp32", "fp16", "int8"):
        write_model(tmp_path / "models", name, CONFIG, doubler())
    profile = tmp_path / "fp32.yaml"
    profile.write_text("model: {repository: models, name: fp32, variants: [fp16]}\n")
    assert list(prepare_task(RunOptions(str(profile)), LAPTOP, print).source.variants) == ["fp32", "fp16"]
    values = RunOptions(str(profile), variants=("int8",))
    assert list(prepare_task(values, LAPTOP, print).source.variants) == ["fp32", "int8"]


def test_a_parameter_with_a_slash_in_its_name_is_no_other_model(tmp_path: Path) -> None:
    path = "parameters.session.a/b.string_value"
    config = f'{CONFIG}parameters {{ key: "session.a/b" value {{ string_value: "1" }} }}\n'
    write_model(tmp_path, "m", config, doubler())
    source = read_source(stored(tmp_path), "m")
    assert configured_candidate(source, [path]).fields == ((path, "1"),)
    changed = served_models(source, Candidate(8, fields=((path, "2"),)))
    assert changed.configs["m"].parameters["session.a/b"].string_value == "2"
