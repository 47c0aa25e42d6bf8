"""Settings of ONNX Runtime and its accelerators: emitted configurations, effects, checks and the derived space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from optimizer.config import model_config, ort_settings
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource
from optimizer.config.ort_settings import check_ort_settings, unread_settings, uses_openvino, without_effect
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import CPU_ACCELERATOR, ORT_SETTING_PATHS, Candidate, short_path
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.machine.hardware import Hardware
from optimizer.model.default_space import build_space, space_keys
from optimizer.model.profile import parse_profile
from optimizer.model.profile_schema import OnnxRuntimeSection, SpaceSection
from optimizer.results.configuration_text import configuration, triton_lines

NAME, PRECISION, GRAPHS = (
    ORT_SETTING_PATHS[name] for name in ("execution_accelerator", "precision_mode", "cuda_graphs")
)
PLAIN = ModelConfig(name="m", backend="onnxruntime", max_batch_size=8)
OPENVINO_NAME, STREAMS = f"{CPU_ACCELERATOR}.name", f"{CPU_ACCELERATOR}.parameters.num_streams"


def fields_of(**choices: Any) -> dict[str, Any]:
    """Return the choices by path, as a profile gives them."""
    return OnnxRuntimeSection.model_validate({name: tuple(values) for name, values in choices.items()}).fields()


def applied(**values: Any) -> ModelConfig:
    fields = {path: choices[0] for path, choices in fields_of(**{k: (v,) for k, v in values.items()}).items()}
    return model_config.apply(Candidate(8, fields=tuple(sorted(fields.items()))), PLAIN)


# -- the emitted configuration ------------------------------------------------------------------------------------


def test_tensorrt_with_a_precision_and_cuda_graphs_is_emitted_as_the_native_backend_reads_it() -> None:
    config = applied(execution_accelerator="tensorrt", precision_mode="FP16", cuda_graphs=True)
    expected = text_format.Parse(
        """
        gpu_execution_accelerator: [ {
          name: "tensorrt"
          parameters { key: "precision_mode" value: "FP16" }
          parameters { key: "trt_cuda_graph_enable" value: "1" }
        } ]
        """,
        ModelConfig().optimization.execution_accelerators,
    )
    assert config.optimization.execution_accelerators == expected


def test_openvino_and_parameters_are_emitted_as_the_native_backend_reads_them() -> None:
    config = applied(execution_accelerator="openvino", execution_mode=1, allow_spinning=False, graph_level=1)
    (accelerator,) = config.optimization.execution_accelerators.cpu_execution_accelerator
    assert accelerator.name == "openvino"
    assert config.optimization.graph.level == 1
    assert {key: parameter.string_value for key, parameter in config.parameters.items()} == {
        "execution_mode": "1",
        "session.intra_op.allow_spinning": "0",
    }


def test_an_accelerator_that_is_off_has_no_parameters() -> None:
    chosen = Candidate(8, fields=((NAME, "none"), (PRECISION, "FP16")))
    base = model_config.apply(replace(chosen, fields=((NAME, "tensorrt"), (PRECISION, "FP32"))), PLAIN)
    config = model_config.apply(chosen, base)
    assert not config.optimization.HasField("execution_accelerators")
    assert model_config.apply(chosen, PLAIN).optimization == ModelConfig().optimization
    assert not model_config.differences(chosen, config)
    assert model_config.differences(replace(chosen, fields=((NAME, "tensorrt"), (PRECISION, "FP16"))), base)


def test_a_candidate_is_shown_with_short_names_and_valid_lines() -> None:
    spinning = ORT_SETTING_PATHS["allow_spinning"]
    chosen = Candidate(8, fields=((NAME, "tensorrt"), (PRECISION, "FP16"), (spinning, "0")))
    assert configuration(chosen).endswith("execution_accelerator=tensorrt · precision_mode=FP16 · allow_spinning=0")
    lines = "\n".join(triton_lines(chosen))
    shown = text_format.Parse(lines, ModelConfig())
    assert shown.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters == {
        "precision_mode": "FP16"
    }
    assert shown.parameters["session.intra_op.allow_spinning"].string_value == "0"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{CPU_ACCELERATOR}.name", "execution_accelerator"),
        (f"{CPU_ACCELERATOR}.parameters.num_streams", "num_streams"),
        (GRAPHS, "cuda_graphs"),
        ("optimization.cuda.graphs", "cuda_graphs"),
        ("m/optimization.graph.level", "m/graph_level"),
        ("parameters.session.intra_op.allow_spinning.string_value", "allow_spinning"),
        ("parameters.a.b.string_value", "a.b"),
    ],
)
def test_a_path_is_shown_by_its_short_name(path: str, name: str) -> None:
    assert short_path(path) == name


# -- the search space ---------------------------------------------------------------------------------------------


def test_settings_without_effect_give_no_further_configurations() -> None:
    choices = fields_of(
        execution_accelerator=["none", "tensorrt"], precision_mode=["FP32", "FP16"], cuda_graphs=[False, True]
    )
    space = SearchSpace((8,), fields=choices)
    candidates = space.candidates()
    assert len(candidates) == len(set(candidates)) == len(space) == 5
    unaccelerated = next(candidate for candidate in candidates if dict(candidate.fields)[NAME] == "none")
    assert (
        space.canonical(replace(unaccelerated, fields=((NAME, "none"), (PRECISION, "FP16"), (GRAPHS, "1"))))
        == unaccelerated
    )
    assert space.parameter_values(unaccelerated) is not None


def test_one_thread_does_not_spin_and_a_sequence_has_no_threads_between_operators() -> None:
    choices = fields_of(intra_op_thread_count=[1, 2], allow_spinning=[True, False])
    assert len(SearchSpace((8,), fields=choices)) == 3
    choices = fields_of(execution_mode=[0, 1], inter_op_thread_count=[1, 2, 4])
    assert len(SearchSpace((8,), fields=choices)) == 4
    assert without_effect({ort_settings.EXECUTION_MODE: "1", ort_settings.INTER_OP_THREADS: "2"}) == {}


def test_openvino_uses_no_threads_of_onnxruntime() -> None:
    choices = fields_of(
        execution_accelerator=["none", "openvino"], execution_mode=[0, 1], allow_spinning=[True, False]
    )
    space = SearchSpace((8,), fields=choices)
    assert len(space) == len(space.candidates()) == 5


# -- checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "on_gpu", "embedded", "problem"),
    [
        ({NAME: ("none", "tensorrt")}, False, True, "needs a GPU, and this model is served on the CPU"),
        ({PRECISION: ("FP16",)}, False, True, "needs a GPU"),
        ({PRECISION: ("FP16",)}, True, True, r"write execution_accelerator: \[tensorrt\], too"),
        ({f"{CPU_ACCELERATOR}.name": ("openvino",)}, True, True, "openvino computes on the CPU"),
        ({f"{CPU_ACCELERATOR}.parameters.num_streams": ("2",)}, False, True, r"execution_accelerator: \[openvino\]"),
        ({ort_settings.SPINNING: ("0",)}, False, False, "Triton's own onnxruntime backend does not read it"),
        ({OPENVINO_NAME: ("openvino",), STREAMS: ("2",)}, False, False, "own onnxruntime backend does not read it"),
        (
            {OPENVINO_NAME: ("openvino",), ort_settings.INTRA_OP_THREADS: ("2",)},
            False,
            False,
            "no effect with openvino",
        ),
        ({ort_settings.INTER_OP_THREADS: ("1", "2")}, False, True, r"write execution_mode: \[0, 1\], too"),
        (
            {ort_settings.INTER_OP_THREADS: ("2",), ort_settings.EXECUTION_MODE: ("0",)},
            False,
            True,
            "with execution_mode 0",
        ),
        ({NAME: ("none",), PRECISION: ("FP32", "FP16")}, True, True, "no effect without an accelerator"),
        (
            {ort_settings.SPINNING: ("0",), ort_settings.INTRA_OP_THREADS: ("1",)},
            False,
            True,
            "intra_op_thread_count 1",
        ),
        ({OPENVINO_NAME: ("openvino",), ort_settings.SPINNING: ("0",)}, False, True, "no effect with openvino"),
        ({"optimization.cuda.graphs": (True,)}, True, False, "only the tensorrt backend reads it"),
    ],
)
def test_choices_without_effect_are_refused(
    choices: dict[str, tuple[Any, ...]], on_gpu: bool, embedded: bool, problem: str
) -> None:
    with pytest.raises(ParameterError, match=problem):
        check_ort_settings(choices, PLAIN, "onnxruntime", on_gpu=on_gpu, is_embedded=embedded)


@pytest.mark.parametrize(
    ("choices", "on_gpu"),
    [
        ({NAME: ("none", "tensorrt"), PRECISION: ("FP16",)}, True),
        ({NAME: ("none", "tensorrt")}, None),
        ({NAME: ("none",)}, False),
        ({OPENVINO_NAME: ("none", "openvino")}, False),
        ({OPENVINO_NAME: ("none", "openvino"), ort_settings.SPINNING: ("1", "0")}, False),
        ({ort_settings.INTER_OP_THREADS: ("1", "2"), ort_settings.EXECUTION_MODE: ("0", "1")}, False),
    ],
)
def test_choices_with_an_effect_are_taken(choices: dict[str, tuple[Any, ...]], on_gpu: bool | None) -> None:
    check_ort_settings(choices, PLAIN, "onnxruntime", on_gpu=on_gpu, is_embedded=True)


def test_the_values_of_the_model_decide_on_what_is_no_choice() -> None:
    threads = {ort_settings.INTER_OP_THREADS: ("1", "2")}
    check_ort_settings(threads, applied(execution_mode=1), "onnxruntime", on_gpu=False, is_embedded=True)
    openvino = applied(execution_accelerator="openvino", execution_mode=1)
    for choices in (threads, {ort_settings.SPINNING: ("1", "0")}):
        with pytest.raises(ParameterError, match="no effect with openvino"):
            check_ort_settings(choices, openvino, "onnxruntime", on_gpu=False, is_embedded=True)


@pytest.mark.parametrize("backend", ["pytorch", "python"])
@pytest.mark.parametrize(
    "choices",
    [
        {ort_settings.SPINNING: ("0",)},
        {ort_settings.GRAPH_LEVEL: (0, 1)},
        {OPENVINO_NAME: ("none", "openvino")},
        {NAME: ("none", "tensorrt"), PRECISION: ("FP16",)},
    ],
)
def test_settings_of_another_backend_are_refused(choices: dict[str, tuple[Any, ...]], backend: str) -> None:
    with pytest.raises(ParameterError, match=f"only ONNX models have it, and the backend is {backend}"):
        check_ort_settings(choices, PLAIN, backend, on_gpu=None, is_embedded=True)


def test_settings_that_the_native_backend_does_not_read_are_listed() -> None:
    threads = {"intra_op_thread_count": 4}
    assert unread_settings([applied(**threads), applied(allow_spinning=True)]) == ()
    assert unread_settings([applied(allow_spinning=False)]) == ("session.intra_op.allow_spinning 0",)
    assert unread_settings([applied(allow_spinning=False, intra_op_thread_count=1)]) == ()
    openvino = applied(execution_accelerator="openvino", allow_spinning=False, **threads)
    assert unread_settings([openvino]) == ("intra_op_thread_count 4 with openvino",)
    (accelerator,) = openvino.optimization.execution_accelerators.cpu_execution_accelerator
    accelerator.parameters["num_of_threads"] = "2"
    assert unread_settings([openvino, openvino]) == ("num_of_threads 2 of openvino",)
    openvino.backend = "python"
    assert unread_settings([openvino]) == ()
    assert not uses_openvino([openvino], {})


def test_cuda_graphs_of_a_tensorrt_model_need_a_gpu() -> None:
    choices = {"optimization.cuda.graphs": (False, True)}
    check_ort_settings(choices, PLAIN, "tensorrt", on_gpu=True, is_embedded=False)
    with pytest.raises(ParameterError, match="needs a GPU"):
        check_ort_settings(choices, PLAIN, "tensorrt", on_gpu=False, is_embedded=False)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("execution_accelerator: [openvino, tensorrt]", "openvino computes on a CPU and tensorrt on a GPU; name one"),
        ("execution_accelerator: [cuda]", "'cuda' is not 'none', 'openvino' or 'tensorrt'"),
        ("precision_mode: [FP8]", "'FP8' is not 'FP32', 'FP16' or 'BF16'"),
        ("allow_spinning: [2]", "space.onnxruntime.allow_spinning: 2 is not true or false"),
    ],
)
def test_bad_choices_in_a_profile_are_named(line: str, problem: str) -> None:
    text = f"model: {{builder: mlp}}\nspace:\n  onnxruntime: {{{line}}}\n"
    with pytest.raises(BadInputError) as caught:
        parse_profile(text.encode(), Path("p.yaml"))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fault_is_reported_at_its_line() -> None:
    text = "model: {builder: mlp}\nspace:\n  onnxruntime:\n    execution_accelerator: [tensorrt]\n"
    fault = parse_profile(text.encode(), Path("p.yaml")).space_fault(ParameterError(NAME, "needs a GPU"))
    assert str(fault) == "p.yaml:4: space.onnxruntime.execution_accelerator: needs a GPU"


def test_openvino_in_the_file_and_among_the_choices_is_found() -> None:
    accelerated = applied(execution_accelerator="openvino")
    assert uses_openvino([PLAIN, accelerated], {})
    assert not uses_openvino([PLAIN, applied(execution_accelerator="tensorrt")], {NAME: ("none", "tensorrt")})
    for path in (f"{CPU_ACCELERATOR}.name", f"other/{CPU_ACCELERATOR}.name"):
        assert uses_openvino([PLAIN], {path: ("none", "openvino")})


# -- the derived space ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "embedded", "openvino", "settings"),
    [
        (2, True, False, {"intra_op_thread_count", "allow_spinning"}),
        (2, False, False, {"intra_op_thread_count"}),
        (1, True, False, {"intra_op_thread_count"}),
        (2, True, True, {"intra_op_thread_count"}),
        (2, False, True, set()),  # Triton's own backend does not pass the number on
    ],
)
def test_the_derived_space_has_what_the_machine_suggests(
    cpus: int, embedded: bool, openvino: bool, settings: set[str]
) -> None:
    source = ModelSource(Path("models"), "m", applied(execution_accelerator="openvino") if openvino else PLAIN)
    hardware = Hardware((), "a CPU", cpus, 2**33)

    def derived(section: SpaceSection) -> SearchSpace:
        return build_space(section, source, parse_size_distribution("1"), hardware, is_embedded=embedded)

    space = derived(SpaceSection())
    assert {short_path(path) for path in space.fields} == settings
    assert len(space) == len(space.candidates())
    keys = space_keys(space)
    lists = {name: tuple(value) for name, value in keys.items() if name != "onnxruntime"}
    of_backend = {name: tuple(value) for name, value in keys.get("onnxruntime", {}).items()}
    assert derived(SpaceSection.model_validate({**lists, "onnxruntime": of_backend})) == space
    assert of_backend.get("allow_spinning", (True, False)) == (True, False)


@pytest.mark.parametrize("setting", ["intra_op_thread_count", "inter_op_thread_count", "execution_mode"])
def test_threads_of_onnx_runtime_are_refused_for_another_backend(setting: str) -> None:
    section = SpaceSection.model_validate({"onnxruntime": {setting: (1,)}})
    source = ModelSource(Path("models"), "m", ModelConfig(name="m", backend="python", max_batch_size=8))
    with pytest.raises(ParameterError, match="only ONNX models have it, and the backend is python; leave it out"):
        build_space(section, source, parse_size_distribution("1"), Hardware((), "a CPU", 2, 2**33))
