"""Tests of the content of emitted files and of bad input; the contract of each format is in tests/contract."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format

from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from optimizer.cli import emit
from optimizer.cli.emit import FORMATS
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import SERVER_CPUS, SERVER_PROCESSES
from optimizer.core.errors import BadInputError
from optimizer.core.files import write_json
from optimizer.core.trial import ConfirmationWindow, FreshServer, LoadPoint, Trial
from optimizer.emit import kubernetes
from optimizer.emit.pbtxt import with_warm_up
from optimizer.emit.production import header, name_of, read_repository, to_yaml
from optimizer.options.command_line import command_with_larger_budget
from optimizer.options.run_options import RunOptions
from optimizer.results import verification
from optimizer.results.finished_run import candidate_document, read_run
from optimizer.results.verification import verification_candidates
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from tests import streaming_run
from tests.conftest import measurement, not_none
from tests.emitted_files import (
    GPUS,
    IMAGE,
    RUNS,
    SAMPLE,
    by_kind,
    emitted,
    in_production,
    production_file,
    production_server,
    read_config,
    recommendation_of,
)
from tests.run_folders import CANDIDATE, CLOSED, MEASURED, OPEN, change_info, config_text, write_run
from tests.storage_fixtures import file_size_limit


def container(run: Path, **more: Any) -> dict[str, Any]:
    pod = kubernetes.deployment(production_server(run, **more))["spec"]["template"]["spec"]
    container: dict[str, Any] = pod["containers"][0]
    return container


@pytest.mark.parametrize(("server_cpus", "cpu"), [(6, "6"), (2.0, "2"), (1.5, "1.5")], ids=["share", "quota", "part"])
def test_limits_are_the_resources_of_the_measured_server(server_cpus: float, cpu: str, tmp_path: Path) -> None:
    """1e9 bytes times 1.5, in steps of 64 MiB; CPUs of the server on a host with 8, not those of the host."""
    run = write_run(tmp_path, server_cpus=server_cpus)
    limits = {"cpu": cpu, "memory": "1472Mi"}
    assert container(run)["resources"] == {"requests": limits, "limits": limits}
    compose = production_file(run, tmp_path / "compose", "compose")
    assert yaml.safe_load(compose)["services"]["doubler"]["deploy"]["resources"]["limits"]["cpus"] == float(cpu)
    script = production_file(run, tmp_path / "docker", "docker")
    assert f"--cpus={cpu} " in script


@pytest.mark.parametrize(
    ("measured_bytes", "memory", "shared"),
    [(600e6, "896", "896"), (1e9, "1472", "1024"), (None, None, "1024")],
)
def test_shared_memory_is_a_part_of_the_memory(
    measured_bytes: float | None, memory: str | None, shared: str, tmp_path: Path
) -> None:
    """A memory-backed emptyDir, and the /dev/shm of a container, count against the memory limit."""
    run = write_run(tmp_path, measured=replace(MEASURED, server_memory_bytes=measured_bytes))

    def text(name: str) -> str:
        files = emitted(run, tmp_path / name, *in_production("s3://b/m", name))
        return next(content for path, content in files.items() if not path.startswith("chart/"))

    pod = by_kind(yaml.safe_load_all(text("kubernetes")))["Deployment"]["spec"]["template"]["spec"]
    values = yaml.safe_load(text("helm-values"))
    predictor = yaml.safe_load(text("kserve"))["spec"]["predictor"]
    service = yaml.safe_load(text("compose"))["services"]["doubler"]
    sizes = {
        "kubernetes": (pod["containers"][0]["resources"], pod["volumes"][0]["emptyDir"]["sizeLimit"]),
        "helm-values": (values["resources"], values["sharedMemory"]),
        "kserve": (predictor["model"]["resources"], predictor["volumes"][0]["emptyDir"]["sizeLimit"]),
    }
    for name, (resources, size) in sizes.items():
        assert resources["limits"].get("memory") == (memory and f"{memory}Mi"), name
        assert size == f"{shared}Mi", name
    assert service["deploy"]["resources"]["limits"].get("memory") == (memory and f"{memory}m")
    assert service["shm_size"] == f"{shared}m"
    script = text("docker")
    assert ("# memory: not measured, so no limit is set" in script) is (memory is None)
    words = script.split()
    assert (f"--memory={memory}m" in words) == (memory is not None)
    assert f"--shm-size={shared}m" in words


def test_a_quota_limits_cpus_that_the_candidate_chose(tmp_path: Path) -> None:
    for server_cpus, cpu in ((2.0, "2"), (8.0, "4")):
        run = write_run(tmp_path / cpu, fields={SERVER_CPUS: ["0-3"]}, server_cpus=server_cpus)
        assert container(run)["resources"]["limits"]["cpu"] == cpu


@pytest.mark.parametrize(
    ("options", "kind", "uses_gpus", "gpus"),
    [
        (RunOptions(""), "KIND_GPU", True, 2),
        (RunOptions(""), "KIND_CPU", True, 0),
        (RunOptions(""), "KIND_AUTO", False, 0),
        (RunOptions("", target="docker", docker_image=IMAGE, docker_gpus="1"), "KIND_AUTO", True, 1),
        (RunOptions("", target="docker", docker_image=IMAGE, docker_gpus="all"), "KIND_AUTO", True, 2),
        (RunOptions("", target="docker", docker_image=IMAGE, docker_gpus="all"), "KIND_CPU", False, 0),
        (RunOptions("", target="docker", docker_image=IMAGE), "KIND_AUTO", True, 0),
        (RunOptions("", target="remote", url="triton:8001"), "KIND_GPU", None, 0),
    ],
)
def test_gpus_are_those_of_the_server(
    options: RunOptions, kind: str, uses_gpus: bool, gpus: int, tmp_path: Path
) -> None:
    configs = {"doubler": config_text("doubler", kind)}
    run = write_run(tmp_path, configs=configs, options=options, hardware=GPUS, server_uses_gpus=uses_gpus)
    assert recommendation_of(run).gpus == gpus
    assert container(run)["resources"].get("limits", {}).get("nvidia.com/gpu") == (str(gpus) if gpus else None)


def test_a_start_may_take_ten_times_the_load_time(tmp_path: Path) -> None:
    probe = container(write_run(tmp_path))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 10 * 45


@pytest.mark.parametrize(
    ("load", "series", "metric", "target", "factor"),
    [
        (CLOSED, "nv_inference_request_duration_us", "triton_doubler_requests_in_flight", "14", " / 1e6"),
        (OPEN, "nv_inference_request_success", "triton_doubler_requests_per_second", "105350m", ""),
    ],
)
def test_replicas_follow_the_measured_load(
    load: Any, series: str, metric: str, target: str, factor: str, tmp_path: Path
) -> None:
    """The target is 70 % of 20 requests in flight, or of 150.5 requests per second."""
    run = write_run(tmp_path, load=load)
    text = production_file(run, tmp_path / "out", "kubernetes", models="mounted")
    scaler = by_kind(yaml.safe_load_all(text))["HorizontalPodAutoscaler"]
    (rule,) = scaler["spec"]["metrics"]
    assert rule["pods"] == {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": target}}
    comment = re.findall(r"^#  (.*)$", text.partition("apiVersion")[0], re.MULTILINE)
    (rule,) = yaml.safe_load("\n".join(comment))
    assert rule["name"]["as"] == metric
    assert rule["seriesQuery"].startswith(f'{series}{{namespace!="",pod!="",model="doubler"}}')
    assert rule["metricsQuery"].endswith(f'model="doubler"}}[1m])){factor}')


@pytest.mark.parametrize(
    ("load", "target", "words"),
    [
        (LoadPoint(2, request_rate=0.5), "350m", "0.35 requests per second, 70 % of the measured 0.5;"),
        (LoadPoint(2, request_rate=1.3), "910m", "0.91 requests per second, 70 % of the measured 1.3;"),
        (LoadPoint(2, concurrency=1), "700m", "0.7 requests in flight, 70 % of the measured 1;"),
        (LoadPoint(2, concurrency=2), "1400m", "1.4 requests in flight, 70 % of the measured 2;"),
    ],
)
def test_the_target_of_a_small_load_is_below_it(load: LoadPoint, target: str, words: str, tmp_path: Path) -> None:
    (text,) = emitted(
        write_run(tmp_path, load=load), tmp_path / "out", *in_production("s3://b/m", "kubernetes")
    ).values()
    assert f"# replicas: scaled to keep each at {words}\n" in text
    (rule,) = by_kind(yaml.safe_load_all(text))["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert rule["pods"]["target"]["averageValue"] == target


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (
            LoadPoint(2, request_rate=0.5),
            "70 % of 1, the smallest scaleTarget and above the measured 0.5 requests",
        ),
        (LoadPoint(2, request_rate=1.0), "70 % of the measured 1 request per second"),
    ],
)
def test_kserve_notes_that_its_smallest_target_is_above_the_load(load: LoadPoint, words: str, tmp_path: Path) -> None:
    text = production_file(write_run(tmp_path, load=load), tmp_path / "out", "kserve")
    assert yaml.safe_load(text)["spec"]["predictor"]["scaleTarget"] == 1
    assert f"scaled to keep each at {words}" in text


@pytest.mark.parametrize(("name", "affinity"), [("stateful", "ClientIP"), ("cpu", None)])
def test_the_steps_of_a_sequence_reach_the_same_replica(name: str, affinity: str | None, tmp_path: Path) -> None:
    run = RUNS[name](tmp_path)
    for form in ("docker", "compose", "kubernetes", "helm-values", "kserve"):
        words = [*in_production("s3://b/m", form), *(("--max-replicas", "1") if form == "kserve" else ())]
        text = "".join(emitted(run, tmp_path / form, *words).values())
        assert ("# WARNING: all steps of a sequence must reach the same server" in text) is (affinity is not None)
    text = (tmp_path / "kubernetes" / "kubernetes.yaml").read_text()
    assert by_kind(yaml.safe_load_all(text))["Service"]["spec"].get("sessionAffinity") == affinity
    assert ("a replica that is removed ends its sequences" in text) is (affinity is not None)


def test_kserve_gets_the_measured_load_and_the_utilization(tmp_path: Path) -> None:
    words = [*in_production("s3://b/m", "kserve"), "--target-utilization", "60%"]
    for load, expected in ((CLOSED, ("concurrency", 20, 20)), (OPEN, ("rps", 150, None))):
        run = write_run(tmp_path / str(load.concurrency), load=load)
        (text,) = emitted(run, run / "out", *words).values()
        document = yaml.safe_load(text)
        predictor = document["spec"]["predictor"]
        assert tuple(map(predictor.get, ("scaleMetric", "scaleTarget", "containerConcurrency"))) == expected
        assert document["metadata"]["annotations"]["autoscaling.knative.dev/target-utilization-percentage"] == "60"


def checksums(run: Path, out: Path) -> set[str]:
    """Return the checksums in the pods of both kinds of repository, and in the InferenceService."""
    checksums_of_pods: list[str] = []
    for models, form in (("mounted", "kubernetes"), ("s3://b/m", "kubernetes"), ("s3://b/m", "kserve")):
        text = production_file(run, out / f"{form}-{len(checksums_of_pods)}", form, models=models)
        objects = by_kind(yaml.safe_load_all(text))
        holder = objects["InferenceService"] if form == "kserve" else objects["Deployment"]["spec"]["template"]
        checksums_of_pods.append(holder["metadata"]["annotations"]["checksum/config"])
    return set(checksums_of_pods)


def test_pods_start_again_only_for_another_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (before,) = checksums(run, tmp_path / "before")
    (copied,) = checksums(Path(shutil.copytree(run, tmp_path / "copied")), tmp_path / "after")
    assert copied == before, "the comments name another run, and Triton does not read them"
    changed = write_run(tmp_path / "b", configs={"doubler": config_text("doubler", dims="5")})
    assert checksums(changed, tmp_path / "changed").isdisjoint({before})


def test_a_container_that_stops_may_complete_its_requests(tmp_path: Path) -> None:
    """Triton waits 30 s for requests in flight, and Docker kills a container after 10 s by default."""
    run = write_run(tmp_path)
    script = emitted(run, tmp_path / "docker", *in_production("s3://b/m", "docker"))["run.sh"]
    assert "--stop-timeout=60 " in script
    text = production_file(run, tmp_path / "compose", "compose")
    (service,) = yaml.safe_load(text)["services"].values()
    assert service["stop_grace_period"] == "60s"


def test_the_image_of_the_runtime_is_named_where_none_is_given(tmp_path: Path) -> None:
    words = ["--format", "kserve", "--model-repository", "s3://b/m"]
    (text,) = emitted(write_run(tmp_path), tmp_path / "out", *words).values()
    assert re.search(r"# image: that of KServe's runtime, unless .* it needs the measured Triton", text)


def test_replicas_can_follow_cpu_time(tmp_path: Path) -> None:
    scaler = kubernetes.autoscaler(production_server(write_run(tmp_path), autoscaled_by="cpu"))
    assert scaler["spec"]["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 70}


def test_every_file_names_its_run(tmp_path: Path) -> None:
    header = [line for line in emitted(SAMPLE, tmp_path)["config.pbtxt"].splitlines() if line.startswith("#")]
    assert re.match(r"# dlrm, as tuned by tritune .*: run dlrm/sample, written 2026-11-21", header[0])
    assert "13,444 infer/s, p95 18.5 ms, concurrency 47 (4 samples a request), memory 643 MB" in header[1]
    assert header[2] == "# gain over the current configuration: 2.86x (2.62 to 3.11)"
    assert header[3] == "# bound: p95 <= 20 ms"
    assert header[4].startswith("# verdict: PASS: the SLA is met at 99 % confidence")
    assert header[5] == "# on: Intel(R) Xeon(R) Processor @ 2.50GHz, 2 CPUs, Triton 2.51.0"
    assert not any("WARNING" in line for line in header)


@pytest.mark.parametrize(
    ("size", "words", "status"),
    [
        (2.0, (), "affordable"),  # 500 requests/s
        (1.0, (), "costly"),  # 1,000 requests/s
        (2.0, ("--metrics-config=summary_latencies=false",), "chosen by the user"),
    ],
)
def test_the_bounded_quantiles_are_exported_unless_they_reduce_the_throughput(
    size: float, words: tuple[str, ...], status: str, tmp_path: Path
) -> None:
    options = RunOptions("doubler", target="local", server_args=words)
    run = write_run(tmp_path, options=options, load=LoadPoint(size, concurrency=20))
    served = yaml.safe_load(
        emitted(run, tmp_path / "kserve", *in_production("s3://b/m", "kserve"))["inferenceservice.yaml"]
    )
    arguments = served["spec"]["predictor"]["model"].get("args", [])
    assert ("--metrics-config=summary_latencies=true" in arguments) is (status == "affordable")
    text = emitted(run, tmp_path / "out", *in_production("mounted", "docker"))["run.sh"]
    about = [line for line in text.splitlines() if line.startswith("# metrics: ")]
    exported = text.endswith("  --metrics-config=summary_latencies=true\n")
    assert exported is (status == "affordable")
    assert len(about) == (status != "chosen by the user")
    assert all(("# metrics: without " in line) is (status == "costly") for line in about)


def test_the_quantiles_of_a_model_that_streams_are_not_exported(tmp_path: Path) -> None:
    """Triton's duration of a request ends before its last response."""
    run = streaming_run.write_run(tmp_path)
    assert recommendation_of(run).quantiles == ()
    text = config_text("doubler") + "model_transaction_policy { decoupled: true }\n"
    run = write_run(tmp_path / "bounded", configs={"doubler": text})
    assert recommendation_of(run).sla.latency_levels == (0.95,)
    assert recommendation_of(run).quantiles == ()


@pytest.mark.parametrize(("uses_gpus", "shown"), [(True, "NVIDIA H100 80GB HBM3 · "), (False, "")])
def test_the_hardware_is_that_of_the_server(uses_gpus: bool, shown: str, tmp_path: Path) -> None:
    configs = {"doubler": config_text("doubler", "KIND_AUTO")}
    hardware = GPUS | {"gpus": ["NVIDIA H100 80GB HBM3"]}
    run = write_run(tmp_path, configs=configs, hardware=hardware, server_uses_gpus=uses_gpus)
    (text,) = emitted(run, tmp_path / "out").values()
    assert f"\n# on: {shown}{GPUS['cpu']}, {GPUS['cpu_count']} CPUs, Triton " in text


@pytest.mark.parametrize(("target", "is_noted"), [("embedded", True), ("local", False)])
def test_settings_that_production_does_not_read_are_noted(target: Any, is_noted: bool, tmp_path: Path) -> None:
    parameters = 'parameters { key: "session.intra_op.allow_spinning" value { string_value: "0" } }\n'
    run = write_run(
        tmp_path, configs={"doubler": config_text("doubler") + parameters}, options=RunOptions("", target=target)
    )
    for words in ([], in_production("s3://b/m", "compose")):
        (text,) = emitted(run, tmp_path / f"out{len(words)}", *words).values()
        note = "# NOTE: the recommended configuration has session.intra_op.allow_spinning 0: Triton's own onnxruntime"
        assert (note in text) is is_noted


@pytest.mark.parametrize(("target", "is_noted"), [("embedded", True), ("local", False)])
@pytest.mark.parametrize("format_name", [name for name in FORMATS if name != "per-device"])
def test_files_say_that_the_embedded_server_was_measured(
    format_name: str, target: Any, is_noted: bool, tmp_path: Path
) -> None:
    run = write_run(tmp_path, options=RunOptions("", target=target))
    words = in_production("s3://b/m", format_name)[: 2 if format_name == "pbtxt" else None]
    files = emitted(run, tmp_path / "out", *words)
    noted = [path for path, text in files.items() if "# NOTE: measured on tune's embedded server; " in text]
    assert bool(noted) is is_noted
    served = f"# without Docker: `tune serve {run}` starts the measured server "
    assert [path for path, text in files.items() if served in text] == noted


def test_per_device_writes_one_configuration_for_each_device(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), RUNS["gpu"](tmp_path / "b")]
    words = [str(runs[1]), "--format", "per-device"]
    files = emitted(runs[0], tmp_path / "out", *words)
    paths = ["doubler/configs/some-cpu.pbtxt", "doubler/configs/nvidia-h100-80gb-hbm3.pbtxt"]
    assert sorted(files) == sorted(paths)
    for path, run in zip(paths, runs, strict=True):
        assert read_config(files[path]) == recommendation_of(run).configs["doubler"]
        assert f"--model-config-name={Path(path).stem} " in files[path]
    named = emitted(runs[0], tmp_path / "named", *words, "--device", "cpu", "--device", "h100")
    assert sorted(named) == ["doubler/configs/cpu.pbtxt", "doubler/configs/h100.pbtxt"]


def test_warm_up_runs_the_batches_of_the_batcher(tmp_path: Path) -> None:
    files = emitted(write_run(tmp_path / "a"), tmp_path / "out", "--model-warmup")
    warmed = read_config(files["config.pbtxt"]).model_warmup
    assert [sample.batch_size for sample in warmed] == [1, 4, 8]
    open_dims = {"doubler": config_text("doubler", dims="-1")}
    options = RunOptions("doubler", shapes=("x:16..128",))
    measured = write_run(tmp_path / "b", configs=open_dims, options=options)
    files = emitted(measured, tmp_path / "b_out", "--model-warmup")
    assert list(read_config(files["config.pbtxt"]).model_warmup[0].inputs["x"].dims) == [128]
    with pytest.raises(BadInputError, match="the size of input x of doubler"):
        emit.main([str(write_run(tmp_path / "c", configs=open_dims)), "--model-warmup"])


def test_the_shapes_of_the_run_are_not_those_of_other_models(tmp_path: Path) -> None:
    configs = {"doubler": config_text("doubler", dims="-1"), "step": config_text("step", dims="3")}
    run = write_run(tmp_path / "a", configs=configs, options=RunOptions("doubler", shapes=("x:16",)))
    files = emitted(run, tmp_path / "out", "--model-warmup")
    dims = {
        name: list(read_config(files[f"{name}/config.pbtxt"]).model_warmup[0].inputs["x"].dims) for name in configs
    }
    assert dims == {"doubler": [16], "step": [3]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sequence_batching {}", "doubler keeps the state of sequences"),
        ("model_transaction_policy { decoupled: true }", "doubler streams its responses"),
    ],
)
def test_no_warm_up_is_made_for_models_that_would_not_load_with_it(change: str, words: str, tmp_path: Path) -> None:
    config = text_format.Parse(change, ModelConfig(name="doubler"))
    recommendation = replace(recommendation_of(write_run(tmp_path)), configs={"doubler": config})
    with pytest.raises(BadInputError, match=rf"^--model-warmup: {words}"):
        with_warm_up(recommendation)


def test_folders_and_limits_of_the_measured_container_are_kept(tmp_path: Path) -> None:
    options = RunOptions(
        "doubler",
        target="docker",
        docker_image=IMAGE,
        docker_mounts=("/weights:/weights:ro", "/my $plugins:/plugins"),
        docker_ulimits=("nofile=100000", "stack=1:2"),
    )
    run = write_run(tmp_path, options=options)
    script = production_file(run, tmp_path / "docker", "docker")
    volumes = ("--volume=/weights:/weights:ro ", "'--volume=/my $plugins:/plugins' ")
    assert all(flag in script for flag in (*volumes, "--ulimit=nofile=100000:100000 "))
    assert script.count("--ulimit=stack=1:2 ") == script.count("--ulimit=stack=") == 1
    text = production_file(run, tmp_path / "compose", "compose")
    service = yaml.safe_load(text)["services"]["doubler"]
    assert service["ulimits"]["stack"] == {"soft": 1, "hard": 2}
    assert service["volumes"] == [
        {"type": "bind", "source": "/weights", "target": "/weights", "read_only": True},
        {"type": "bind", "source": "/my $$plugins", "target": "/plugins"},
    ]
    for name in ("kubernetes", "helm-values", "kserve"):
        shown = "".join(emitted(run, tmp_path / name, *in_production("s3://b/m", name)).values())
        assert "WARNING: the measured container had the folders /weights (there /weights), /plugins" in shown
        assert "limits: the measured container had nofile=100000, stack=1:2;" in shown


def test_variables_of_the_measured_container_are_kept(tmp_path: Path) -> None:
    """A value that was not stored has to come from the environment, or from a Secret."""
    run = RUNS["variables"](tmp_path)
    preload, text = "LD_PRELOAD=/plugins/a.so:/plugins/b.so", "$(HOME) $$ 'x'"
    script = production_file(run, tmp_path / "docker", "docker", models="gs://b/m")
    flags = shlex.split(script.partition("exec ")[2])
    assert [flag for flag in flags if flag.startswith("--env=")] == [
        f"--env={preload}",
        "--env=HF_TOKEN",
        f"--env=TEXT={text}",
    ]
    composed = production_file(run, tmp_path / "compose", "compose", models="gs://b/m")
    service = yaml.safe_load(composed)["services"]["doubler"]
    assert service["environment"] == [preload, "HF_TOKEN", "TEXT=$$(HOME) $$$$ 'x'"]
    expected = [
        {"name": "LD_PRELOAD", "value": "/plugins/a.so:/plugins/b.so"},
        {"name": "TEXT", "value": "$$(HOME) $$$$ 'x'"},
    ]
    for name in ("kubernetes", "helm-values", "kserve"):
        files = emitted(run, tmp_path / name, *in_production("gs://b/m", name))
        shown = files[sorted(files)[-1]]
        assert "WARNING: the measured container had the environment variables HF_TOKEN, whose values are" in shown
        assert expected in fields(list(yaml.safe_load_all(shown)), "env")


def fields(document: Any, name: str) -> list[Any]:
    """Return the values of all fields with this name in a YAML document."""
    if isinstance(document, list):
        return [value for item in document for value in fields(item, name)]
    if not isinstance(document, dict):
        return []
    own = [document[name]] if name in document else []
    return own + [value for item in document.values() for value in fields(item, name)]


def test_a_relative_folder_of_the_container_starts_from_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    began.mkdir()
    monkeypatch.chdir(began)
    options = RunOptions("doubler", target="docker", docker_image=IMAGE, docker_mounts=("./weights:/weights",))
    run = write_run(began / "results", options=options)
    for working_folder in (began, tmp_path):
        monkeypatch.chdir(working_folder)
        out = tmp_path / f"from-{working_folder.name}"
        script = production_file(run, out, "docker")
        assert f"--volume={began}/weights:/weights " in script


@pytest.mark.parametrize("format_name", ["docker", "compose"])
def test_the_file_that_is_mounted_over_must_exist(format_name: str, tmp_path: Path) -> None:
    run, models = write_run(tmp_path / "a"), tmp_path / "models"
    (models / "doubler").mkdir(parents=True)
    words = in_production(str(models), format_name)
    with pytest.raises(BadInputError, match=r"^--model-repository .*: has no doubler/config\.pbtxt, .*; create it"):
        emit.main([str(run), *words])
    (models / "doubler" / "config.pbtxt").touch()
    emitted(run, tmp_path / "out", *words)


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_up", [[], ["--model-warmup"]])
def test_a_bucket_gets_the_files_of_the_command_in_the_header(warm_up: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "results")
    text = production_file(run, tmp_path / "out", "kubernetes", *warm_up)
    copied = r"^# before: copy the config.pbtxt of doubler from `tune emit (.*)` into s3://b/m/doubler$"
    (command,) = re.findall(copied, text, re.M)
    folder, *words = shlex.split(command)
    (config,) = emitted(Path(folder), tmp_path / "copied", *words).values()
    assert bool(read_config(config).model_warmup) is bool(warm_up)


def test_a_bucket_gets_the_files_of_an_undecided_run_by_force(tmp_path: Path) -> None:
    run = write_run(tmp_path / "results", is_confirmed=False)
    text = production_file(run, tmp_path / "out", "kubernetes", "--force")
    (command,) = re.findall(r"^# before: copy .* from `tune emit (.*)` into ", text, re.M)
    folder, *words = shlex.split(command)
    assert list(emitted(Path(folder), tmp_path / "copied", *words)) == ["config.pbtxt"]


@pytest.mark.parametrize("form", [[], ["--format", "per-device", "--device", "h100"]])
def test_a_configuration_names_the_options_of_its_server(form: list[str], tmp_path: Path) -> None:
    (text,) = emitted(RUNS["server options"](tmp_path / "a"), tmp_path / "out", *form).values()
    (command,) = re.findall(r"^# used by: (.*)$", text, re.M)
    device = ["--model-config-name=h100"] if form else []
    recommendation = recommendation_of(tmp_path / "a" / "run")
    assert shlex.split(command) == ["tritonserver", *device, *recommendation.arguments]
    assert "--rate-limit=execution_count" in command


@pytest.mark.parametrize(
    "text", ["yes", "NO", "on", "1e3", "0o7", "0x1F", "1_000", "1:30", "~", "", "a: b", "é", "- x"]
)
def test_texts_are_quoted_for_every_yaml_version(text: str) -> None:
    written = to_yaml({text or "empty": text})
    assert yaml.safe_load(written) == {text or "empty": text}
    assert re.fullmatch(r'(.+): ".*"\n', written), "in quotes, whatever YAML's version"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dlrm", "dlrm"),
        ("Tiny_Model v2", "tiny-model-v2"),
        ("1e3", "model-1e3"),
        ("é", "model"),
        ("a" * 80, "a" * 50),
    ],
)
def test_service_names_are_valid_in_kubernetes(model: str, name: str) -> None:
    assert name_of(model) == name


def test_models_with_similar_names_keep_their_configurations(tmp_path: Path) -> None:
    server = production_server(RUNS["several models"](tmp_path))
    keys = kubernetes.config_keys(server.recommendation)
    assert len(set(keys.values())) == len(server.recommendation.configs)
    data = kubernetes.config_map(server)["data"]
    configs = {f"{name}/config.pbtxt": config for name, config in server.recommendation.configs.items()}
    assert {path: read_config(data[key]) for path, key in keys.items()} == configs


# -- model.json ------------------------------------------------------------------------------------------------

MODEL_JSON = {"model_json.max_num_seqs": [128]}


def test_a_changed_model_json_is_emitted_next_to_the_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path, fields=MODEL_JSON)
    files = emitted(run, tmp_path / "pbtxt")
    assert files.keys() == {"config.pbtxt", "1/model.json"}
    assert json.loads(files["1/model.json"]) == {"max_num_seqs": 128}


def test_a_changed_model_json_is_mounted_over_that_of_the_model(tmp_path: Path) -> None:
    run = write_run(tmp_path, fields=MODEL_JSON)
    mounted = "/models/doubler/1/model.json"
    files = emitted(run, tmp_path / "docker", *in_production("/srv/models", "docker"))
    assert json.loads(files["doubler/1/model.json"]) == {"max_num_seqs": 128}
    assert f"doubler/1/model.json:{mounted}:ro" in files["run.sh"]
    files = emitted(run, tmp_path / "compose", *in_production("/srv/models", "compose"))
    compose = yaml.safe_load(files["compose.yaml"])
    (name,) = [entry["source"] for entry in compose["services"]["doubler"]["configs"] if entry["target"] == mounted]
    assert compose["configs"][name] == {"file": "./doubler/1/model.json"}
    assert json.loads(files["doubler/1/model.json"]) == {"max_num_seqs": 128}
    config_map, deployed = kubernetes.manifests(production_server(run))[:2]
    mounts = deployed["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    (key,) = [mount["subPath"] for mount in mounts if mount["mountPath"] == mounted]
    assert json.loads(config_map["data"][key]) == {"max_num_seqs": 128}


def test_a_model_json_is_not_chosen_by_device(tmp_path: Path) -> None:
    run = write_run(tmp_path, fields=MODEL_JSON)
    with pytest.raises(
        BadInputError, match=r"changes doubler/1/model\.json, which tritonserver does not choose by de"
    ):
        emit.main([str(run), "--format", "per-device", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("content", ['{"max_num_seqs": 64}', None])
def test_a_model_json_that_was_not_measured_is_refused(content: str | None, tmp_path: Path) -> None:
    run = write_run(tmp_path, fields=MODEL_JSON)
    file = run / "best" / "1" / "model.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(BadInputError, match="differs from the configuration that the run measured"):
        recommendation_of(run)


# -- bad input -------------------------------------------------------------------------------------------------


def refusal(*words: str | Path) -> str:
    with pytest.raises(BadInputError) as caught:
        emit.main([str(word) for word in words])
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_has_not_ended_is_refused(status: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, status=status)
    assert f"continue it with `tune --resume {run}`" in refusal(run)


def test_a_run_that_is_still_running_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, status="running")
    with RunFolder(run).locked():
        assert "the run is still running and has no final recommendation; wait until it ends" in refusal(run)


def test_a_run_without_a_recommendation_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, status="none", measured=measurement(1000, 40.0))
    assert "no configuration met p95 <= 20 ms" in refusal(run)


def test_a_run_without_its_configuration_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    shutil.rmtree(run / "best")
    assert "the configuration of doubler was deleted" in refusal(run)
    (run / "best").mkdir()
    (run / "best" / "config.pbtxt").write_text("max_batch_size: many")
    assert "config.pbtxt:1: not a model configuration" in refusal(run)


@pytest.mark.parametrize("changed", ["max_batch_size: 8", "count: 2", "preferred_batch_size: 4"])
def test_a_configuration_that_was_not_measured_is_refused(changed: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, configs={"doubler": config_text("doubler").replace(changed, changed[:-1] + "1")})
    assert "differs from the configuration that the run measured" in refusal(run)


def test_an_incomplete_record_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    info = json.loads((run / "run.json").read_text())
    del info["hardware"]["cpu"]
    (run / "run.json").write_text(json.dumps(info))
    assert "not the record of a run (no 'cpu')" in refusal(run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "nomad"], "invalid choice"),
        (["--format", "docker"], "--image is missing; give an image of NVIDIA with Triton 2.51.0"),
        (["--format", "docker"], "or newer; --model-repository is missing; give a folder, s3://"),
        (["--format", "docker", "--image", "a b"], "--image a b"),
        (["--format", "docker", "--image", IMAGE], "--model-repository is missing; give "),
        (["--format", "kserve"], "--model-repository is missing"),
        ([*in_production("ftp://x/y", "docker")], "write s3://BUCKET/PATH"),
        ([*in_production("pvc://claim", "docker")], "docker cannot read models from there"),
        ([*in_production("./models", "kubernetes")], "kubernetes cannot read models from there"),
        ([*in_production("as://a/b", "kserve")], "kserve cannot read models from there"),
        ([*in_production("pvc://Claim", "kubernetes")], "write pvc://CLAIM"),
        ([*in_production("pvc://claim/../x", "kubernetes")], "write pvc://CLAIM"),
        ([*in_production("a:b", "docker")], "cannot mount a folder with a colon"),
        (
            [*in_production("s3://b/m", "kubernetes"), "--name", "Not_A_Name"],
            "--name Not_A_Name: write a lower-case",
        ),
        ([*in_production("s3://b/m", "kubernetes"), "--max-replicas", "0"], "--max-replicas 0: write a whole number"),
        ([*in_production("s3://b/m", "kubernetes"), "--target-utilization", "0%"], "--target-utilization 0"),
        ([*in_production("s3://b/m", "docker"), "--max-replicas", "3"], "--format docker does not use it"),
        ([*in_production("s3://b/m", "kubernetes"), "--max-replicas="], "--max-replicas '': write a whole number"),
        ([*in_production("s3://b/m", "kubernetes"), "--target-utilization="], "--target-utilization '': write a"),
        ([*in_production("s3://b/m", "kubernetes"), "--name="], "--name '': write a lower-case letter"),
        ([*in_production("s3://b/m", "kubernetes"), "--image="], "--image '': write REPOSITORY:TAG"),
        (["--name="], "--name: --format pbtxt does not use it; leave it out"),
        (["--device", "a b", "--format", "per-device"], "--device a b: write letters"),
        (["--device", "a", "--device", "b", "--format", "per-device"], "--device: give one for each of the"),
        ([*in_production("/srv/models", "docker")], "writes 2 files here: give --out DIR"),
    ],
)
def test_bad_options_are_refused(words: list[str], message: str) -> None:
    assert message in refusal(SAMPLE, *words)


def test_runs_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    assert "--format pbtxt takes one run" in refusal(SAMPLE, SAMPLE)
    assert "both would write dlrm/configs/" in refusal(SAMPLE, SAMPLE, "--format", "per-device")
    remote = RUNS["another machine"](tmp_path)
    assert "name it with --device" in refusal(remote, "--format", "per-device")
    assert "is unknown; leave it out" in refusal(
        remote, *in_production("s3://b/m", "kubernetes"), "--autoscale-on", "cpu"
    )


def test_a_model_name_with_a_colon_is_refused_for_a_mounted_folder_only(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a:b")
    assert "a:b: docker cannot mount a name with a colon" in refusal(run, *in_production("mounted", "docker"))
    assert emitted(run, tmp_path / "bucket", *in_production("s3://b/m", "docker")).keys() == {"run.sh"}


@pytest.mark.parametrize(("form", "is_mounted"), [("kubernetes", True), ("kserve", False)])
def test_the_header_says_how_a_mounted_repository_gets_the_configurations(
    form: str, is_mounted: bool, tmp_path: Path
) -> None:
    """KServe mounts no files into the repository."""
    text = production_file(write_run(tmp_path), tmp_path / "out", form, models="mounted")
    (preparation,) = re.findall(r"^# before: (.*)$", text, re.MULTILINE)
    assert ("config.pbtxt given here is mounted over the one of each model" in preparation) is is_mounted
    assert ("copy the config.pbtxt of doubler" in preparation) is not is_mounted


def test_a_pod_cannot_change_its_model_repository(tmp_path: Path) -> None:
    mounts = container(write_run(tmp_path))["volumeMounts"]
    writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    assert (len(mounts), writable) == (3, ["/dev/shm"])


def test_existing_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text("mine")
    assert "config.pbtxt exists; give another --out" in refusal(SAMPLE, "--out", tmp_path)
    assert (tmp_path / "config.pbtxt").read_text() == "mine"
    assert "dlrm" in emitted(SAMPLE, tmp_path, "--force")["config.pbtxt"]
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(SAMPLE, "--out", tmp_path / "file")


@pytest.mark.parametrize("existing", [{}, {"config.pbtxt": "old"}], ids=["no file", "a file"])
def test_a_file_that_cannot_be_written_whole_stays_as_it_was(existing: dict[str, str], tmp_path: Path) -> None:
    """The limit for the size of a file stands for a full disk."""
    for name, text in existing.items():
        (tmp_path / name).write_text(text)
    message = f"^cannot write {tmp_path / 'config.pbtxt'}: File too large; give another place with --out$"
    with file_size_limit(200), pytest.raises(BadInputError, match=message):
        emit.main([str(SAMPLE), "--force", "--out", str(tmp_path)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == existing


def test_each_command_of_the_page_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^tune emit (.*)$", Path("docs/emit.md").read_text(), re.MULTILINE)
    assert {name for line in commands for name in re.findall(r"--format (\S+)", line)} == {*FORMATS} - {"pbtxt"}
    for line in commands:
        words = shlex.split(line)
        capsys.readouterr()
        if "--out" in words:
            folder = tmp_path / words.pop()
            assert emitted(Path(words[0]), folder, *words[1:-1]) != {}
        else:
            assert emit.main(words) == 0
            assert capsys.readouterr().out.startswith("# dlrm, as tuned by tritune")


def write_run_of_processes(folder: Path, count: int) -> Path:
    return write_run(folder / str(count), fields={SERVER_PROCESSES: [count]})


def test_each_server_process_gets_its_share_of_load_and_resources(tmp_path: Path) -> None:
    """The memory is 1e9 bytes times 1.5, divided by 2, in steps of 64 MiB."""
    runs = [write_run_of_processes(tmp_path, count) for count in (1, 2)]
    limits = container(runs[1])["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("4", "768Mi")
    whole, half = map(recommendation_of, runs)
    assert half.measured_load == whole.measured_load / 2
    assert (whole.load_seconds, half.load_seconds) == (45.0, 22.5)


def test_a_model_next_to_others_is_scaled_by_its_own_load(tmp_path: Path) -> None:
    """A request rate is that of all models together, and a concurrency that of the tuned model."""
    for load, expected, of_all in ((OPEN, 150.5 / 4, 150.5), (CLOSED, 20, 80)):
        run = write_run(tmp_path / str(expected), load=load)
        change_info(run, "problem", concurrent_models="other=2.5,third=0.5")
        assert recommendation_of(run).measured_load == expected
        assert recommendation_of(run).measured_load_of_all == of_all
        assert "NOTE: several models get load, in the proportion doubler 1, other 2.5, third 0.5; the " in "\n".join(
            header(recommendation_of(run))
        )
    manifest = production_file(run, tmp_path / "kubernetes", "kubernetes")
    assert "scaled by the requests to doubler alone; they are too few if a larger part of the requests" in manifest
    service = production_file(run, tmp_path / "kserve", "kserve")
    predictor = yaml.safe_load(service)["spec"]["predictor"]
    assert (predictor["scaleTarget"], predictor["containerConcurrency"]) == (80, 80), "Knative counts all requests"


def test_each_server_process_is_a_replica_in_kubernetes(tmp_path: Path) -> None:
    run, words = write_run_of_processes(tmp_path, 2), in_production("s3://b/m", "kubernetes")
    (text,) = emitted(run, tmp_path / "kubernetes", *words, "--min-replicas", "3").values()
    assert "# server processes: 2 servers with this configuration share the device" in text
    assert "# replicas: each is one server process, and 2 of them have the resources" in text
    assert "# GPU" not in text
    scaled = by_kind(yaml.safe_load_all(text))["HorizontalPodAutoscaler"]["spec"]
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (6, 20)


def test_each_server_process_is_a_service_in_compose(tmp_path: Path) -> None:
    run = write_run_of_processes(tmp_path, 2)
    text = production_file(run, tmp_path / "compose", "compose")
    services = yaml.safe_load(text)["services"]
    assert list(services) == ["doubler-1", "doubler-2"]
    assert services["doubler-2"]["ports"][1] == "${ADDRESS:-127.0.0.1}:8011:8001"
    assert services["doubler-2"]["deploy"]["resources"]["limits"] == {"cpus": 4, "memory": "768m"}


def test_each_server_process_is_a_replica_in_kserve(tmp_path: Path) -> None:
    run = write_run_of_processes(tmp_path, 2)
    text = production_file(run, tmp_path / "kserve", "kserve")
    predictor = yaml.safe_load(text)["spec"]["predictor"]
    load = int(recommendation_of(run).measured_load)
    assert (predictor["minReplicas"], predictor["containerConcurrency"]) == (2, load)


def test_server_processes_share_gpus(tmp_path: Path) -> None:
    configs = {"doubler": config_text("doubler", "KIND_GPU")}
    run = write_run(tmp_path, fields={SERVER_PROCESSES: [2]}, configs=configs, hardware=GPUS)
    assert container(run)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    text = production_file(run, tmp_path / "k", "kubernetes")
    assert "# GPU: 2 replicas share each; configure the NVIDIA device plugin to share a GPU among 2 pods" in text


@pytest.mark.parametrize("is_complete", [False, True])
def test_the_refusal_names_the_command_that_can_still_change_the_verdict(is_complete: bool, tmp_path: Path) -> None:
    run = write_run(tmp_path, is_confirmed=False)
    change_info(run, confirmation_complete=is_complete)
    expected = (
        "make a separate test, .*: `tune verify --fresh"
        if is_complete
        else "test it on fresh servers: `tune verify .*3m`"
    )
    with pytest.raises(BadInputError, match=expected):
        emit.main([str(run)])


def test_the_refusal_of_a_run_that_measured_only_the_baseline_repeats_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, is_confirmed=False)
    change_info(run, "problem", dynamic_batching=candidate_document(replace(CANDIDATE, max_queue_delay_us=0)))
    with pytest.raises(BadInputError) as caught:
        emit.main([str(run)])
    command = command_with_larger_budget(read_run(run).options)
    assert str(caught.value).endswith(f"run again with a larger --budget: `{command}`; --force emits it nevertheless")


def test_only_a_separate_test_can_decide_after_a_crash(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    crashed = Measurement(server_crashed=True, reason="tritonserver died (SIGKILL) while measuring")
    TrialsTable(run / "trials.csv", "doubler", {}).append(
        Trial(0, CANDIDATE), CLOSED, crashed, FreshServer(LOOKS[0] + 1, 0.01)
    )
    command = f"tune verify --fresh {run}"
    with pytest.raises(BadInputError, match="died") as caught:
        emit.main([str(run)])
    assert str(caught.value).endswith(f"then make a separate test: `{command}`; --force emits it nevertheless")
    (text,) = emitted(run, tmp_path / "out", "--force").values()
    assert f"# WARNING: the verdict is UNDECIDED: run `{command}` before" in text


def test_a_damaged_shape_of_the_run_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, options=RunOptions("", shapes=("x:",)))
    with pytest.raises(
        BadInputError, match=r"/run\.json: the shape x: cannot be read: write sizes such as .*; restore"
    ):
        emit.main([str(run), "--model-warmup"])


def test_a_repository_in_the_home_of_no_user_is_a_folder() -> None:
    assert read_repository("~no-such-user/models").text == str(Path.cwd() / "~no-such-user/models")


def test_a_folder_that_cannot_exist_is_bad_input(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with pytest.raises(BadInputError, match=r"cannot write .*File name too long; give another place with --out"):
        emit.main([str(run), "--out", str(tmp_path / ("x" * 300))])


# -- an UNDECIDED run that passed a separate test -------------------------------------------------------------------


def verify_separately(run: Path, name: str, p95_ms: float, trial: int = 0) -> None:
    """Write the document of a verification of ``run`` with this p95 on each fresh server."""
    finished = read_run(run)
    outcome = not_none(finished.outcome)
    recommended = not_none(outcome.recommended)
    point = replace(recommended, trial=trial)
    window = measurement(1000.0, p95_ms)
    windows = [
        ConfirmationWindow(server, point.load, window, 0.01) for server in range(1, LOOKS[0] + 1) for _ in range(8)
    ]
    trials = [Trial(trial, point.candidate, ((point.load, window),), confirmations=tuple(windows))]
    candidates = verification_candidates(point, trials, finished.problem, is_cross_checked=False)
    verified = verification.judge_verification(trials, candidates, finished.problem)
    folder = run / verification.FOLDER / name
    folder.mkdir(parents=True)
    repetition = verification.Repetition("tune verify --fresh r", "tune verify --fresh --budget 60s r", "tune m")
    result = verification.VerificationResult(
        verified, recommended, finished.problem, finished.folder, RunFolder(folder), repetition
    )
    write_json(folder / verification.FILE, result.document())


def test_an_undecided_run_that_passed_its_newest_separate_test_is_emitted(tmp_path: Path) -> None:
    run = write_run(tmp_path, is_confirmed=False)
    verify_separately(run, "20261122-100000", 60.0)
    assert recommendation_of(run).is_undecided
    verify_separately(run, "20261122-110000", 8.0)
    recommendation = recommendation_of(run)
    assert not recommendation.is_undecided
    text = emitted(run, tmp_path / "out")["config.pbtxt"]
    (verdict,) = re.findall(r"^# verdict: (.*)$", text, re.M)
    assert verdict.startswith("UNDECIDED: ")
    assert verdict.endswith("; PASS in a separate test on 4 fresh servers (verify/20261122-110000)")
    assert "WARNING" not in text
    verify_separately(run, "20261122-120000", 60.0)
    assert recommendation_of(run).is_undecided, "one of several tests passes by chance"


def test_a_separate_test_of_another_trial_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path, is_confirmed=False)
    verify_separately(run, "20261122-100000", 8.0, trial=1)
    assert recommendation_of(run).is_undecided


def write_verification(run: Path, text: str) -> Path:
    path = run / verification.FOLDER / "20261122-100000" / verification.FILE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_a_separate_test_without_the_recommended_load_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path, is_confirmed=False)
    write_verification(run, '{"measured": [{"trial": 0}]}')
    assert recommendation_of(run).is_undecided


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measured": 3}', "[" * 100_000])
def test_a_damaged_verification_is_bad_input(text: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, is_confirmed=False)
    path = write_verification(run, text)
    with pytest.raises(BadInputError, match="not the document of a verification") as caught:
        recommendation_of(run)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
