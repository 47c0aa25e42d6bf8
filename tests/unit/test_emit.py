"""What goes to production is what their own schemas and programs take: Kubernetes', KServe's, Compose's, Helm's, a
shell's."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.arguments.emit import FORMATS
from optimizer.commands import emit
from optimizer.emitting import helm, kubernetes
from optimizer.emitting.serving import Serving, name_of, read_repository
from optimizer.emitting.winner import Winner, read_winner
from optimizer.emitting.yaml_text import to_yaml
from optimizer.errors import BadInputError
from optimizer.machine import cpus
from optimizer.options import RunOptions
from optimizer.store.finished import read_run
from tests.run_folders import CLOSED, HARDWARE, MEASURED, OPEN, config_text, write_run

SAMPLE = Path("results/dlrm/sample")
DATA = Path("tests/data")
IMAGE = "example/triton:24.10-py3"
KUBERNETES, OLDER_KUBERNETES = "1.37", "1.29"
GPUS = HARDWARE | {"gpus": ["NVIDIA H100 80GB HBM3"] * 2}
HOSTILE = "1e3"  # a number for YAML 1.2, a text for 1.1
RATE_LIMIT = "server.rate-limit"

Runs = Mapping[str, Callable[[Path], Path]]
RUNS: Runs = {
    "cpu": write_run,
    "gpu": functools.partial(
        write_run, configs={"doubler": config_text("doubler", "KIND_GPU")}, hardware=GPUS, load=OPEN
    ),
    "several models": functools.partial(
        write_run, configs={name: config_text(name) for name in ("doubler", "Doubler", "yes", "a 'b\" $HOME")}
    ),
    "server options": functools.partial(
        write_run,
        options=RunOptions("doubler", target="local", server_args=("--cache-config=local,size=$((1+1))",)),
        fields={RATE_LIMIT: ["off", "execution_count"]},
    ),
    "hostile name": functools.partial(write_run, model=HOSTILE),
    "no memory": functools.partial(write_run, measured=replace(MEASURED, server_memory_bytes=None)),
    "another machine": functools.partial(
        write_run, options=RunOptions("doubler", target="remote", url="triton:8001")
    ),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RUNS[request.param](tmp_path_factory.mktemp("results"))


@pytest.fixture(params=["s3://bucket/models", "mounted"])
def models(request: pytest.FixtureRequest) -> str:
    found = request.param
    assert isinstance(found, str)
    return found


def emitted(run: Path, folder: Path, *words: str) -> dict[str, str]:
    """The files by path."""
    assert emit.main([str(run), *words, "--output", str(folder)]) == 0
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def in_production(models: str, format_name: str) -> list[str]:
    mounted = "/srv/my $models" if format_name in ("docker", "compose") else "pvc://claim/some/path"
    where = mounted if models == "mounted" else models
    return ["--format", format_name, "--image", IMAGE, "--model-repository", where]


def winner_of(run: Path) -> Winner:
    return read_winner(read_run(run))


def serving(winner: Winner, where: str = "pvc://claim/some/path", **more: Any) -> Serving:
    return Serving(IMAGE, read_repository(where), name_of(winner.model), **more)


# -- each format by its own schema -----------------------------------------------------------------------------


def check_kubernetes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, version, strict=True)


def test_kubernetes_takes_its_manifests(run: Path, models: str, tmp_path: Path) -> None:
    (text,) = emitted(run, tmp_path, *in_production(models, "kubernetes")).values()
    documents = list(yaml.safe_load_all(text))
    kinds = [document["kind"] for document in documents]
    mounted = ["ConfigMap"] if models == "mounted" else []
    assert kinds == [*mounted, "Deployment", "Service", "HorizontalPodAutoscaler"]
    for document in documents:
        check_kubernetes(document, KUBERNETES)


def test_an_older_kubernetes_takes_them_too(tmp_path: Path) -> None:
    winner = winner_of(RUNS["gpu"](tmp_path))
    for document in kubernetes.manifests(winner, serving(winner)):
        check_kubernetes(document, OLDER_KUBERNETES)


def test_what_kubernetes_does_not_know_is_found(tmp_path: Path) -> None:
    """The schemas are strict: the test above can fail."""
    winner = winner_of(write_run(tmp_path))
    broken = kubernetes.deployment(winner, serving(winner))
    broken["spec"]["template"]["spec"]["containers"][0]["startupProb"] = {}
    with pytest.raises(jsonschema.ValidationError):
        check_kubernetes(broken, KUBERNETES)


def strict(schema: Any) -> Any:
    """A field that the schema does not have is an error, as ``kubectl --validate=strict`` has it."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


@pytest.fixture(scope="module")
def kserve() -> jsonschema.Draft202012Validator:
    schema = strict(json.loads((DATA / "kserve-inferenceservice.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    return jsonschema.Draft202012Validator(schema)


def test_kserve_takes_its_service(
    run: Path, models: str, kserve: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    (text,) = emitted(run, tmp_path, *in_production(models, "kserve")).values()
    document = yaml.safe_load(text)
    kserve.validate(document)
    document["spec"]["predictor"]["scaleMetrics"] = "rps"
    assert not kserve.is_valid(document)


@pytest.fixture(scope="module")
def compose() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((DATA / "compose-spec.json").read_text()))


def test_compose_takes_its_file(
    run: Path, models: str, compose: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    (text,) = emitted(run, tmp_path, *in_production(models, "compose")).values()
    document = yaml.safe_load(text)
    compose.validate(document)
    ((_, service),) = document["services"].items()
    if models == "mounted":
        assert service["volumes"][0]["source"] == "/srv/my $$models", "a dollar is no variable of Compose's"
        for config in service["configs"]:
            content = document["configs"][config["source"]]["content"].replace("$$", "$")
            name = config["target"].replace("$$", "$").split("/")[2]
            assert read_config(content) == winner_of(run).configs[name]
    service["healthchecks"] = {}
    assert not compose.is_valid(document)


def rendered(chart: Path, values: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """By Helm: the program where there is one, else its library."""
    if program := shutil.which("helm"):
        command = [program, "template", name, str(chart), "--values", "-"]
        ended = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
        texts = [ended.stdout]
    else:
        library = pytest.importorskip("helm_python")
        with library.Chart.load(str(chart)) as loaded:
            loaded.validate_schema(values)
            texts = list(loaded.render(values, name=name).values())
    for text in texts:
        yield from (document for document in yaml.safe_load_all(text) if document)


def by_kind(documents: Any) -> dict[str, Any]:
    return {document["kind"]: document for document in documents}


def test_helm_renders_what_kubernetes_is(run: Path, models: str, tmp_path: Path) -> None:
    files = emitted(run, tmp_path, *in_production(models, "helm-values"))
    assert set(files) == {"values.yaml", *helm.chart()}
    manifests = emitted(run, tmp_path / "as kubernetes", *in_production(models, "kubernetes"))
    expected = by_kind(yaml.safe_load_all(manifests["kubernetes.yaml"]))
    found = by_kind(rendered(tmp_path / "chart", yaml.safe_load(files["values.yaml"]), "release"))
    assert found == expected


@pytest.mark.parametrize("values", [{}, {"image": IMAGE}, {"image": IMAGE, "args": ["a", "b"], "replica": 2}])
def test_values_that_the_chart_does_not_know_are_refused(values: dict[str, Any]) -> None:
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(defaults | values, schema)


def test_without_autoscaling_the_number_of_replicas_is_fixed(tmp_path: Path) -> None:
    winner = winner_of(write_run(tmp_path))
    fixed = serving(winner, min_replicas=3, max_replicas=3)
    documents = by_kind(kubernetes.manifests(winner, fixed))
    assert documents["Deployment"]["spec"]["replicas"] == 3
    assert "HorizontalPodAutoscaler" not in documents
    assert by_kind(rendered(helm.CHART, helm.values(winner, fixed), "release")) == documents


DOCKER = """\
#!/bin/sh
printf '%s\\n' "$@"
"""


def test_a_shell_gives_docker_its_words(run: Path, models: str, tmp_path: Path) -> None:
    """Whatever names are like; ``docker`` is a program here that says what it was given."""
    winner = winner_of(run)
    files = emitted(run, tmp_path / "out", *in_production(models, "docker"))
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": "/nowhere"}
    script = tmp_path / "out" / "run.sh"
    ended = subprocess.run([script], env=env, cwd="/", capture_output=True, text=True, check=True)
    given = ended.stdout.splitlines()
    flags, command = given[: given.index(IMAGE)], given[given.index(IMAGE) + 1 :]
    assert flags[0] == "run"
    assert "--publish=127.0.0.1:8000:8000" in flags
    volumes = [flag for flag in flags if flag.startswith("--volume=")]
    if models == "mounted":
        mounts = [f"{script.parent}/{name}/config.pbtxt:/models/{name}/config.pbtxt:ro" for name in winner.configs]
        assert volumes == [f"--volume={mount}" for mount in ("/srv/my $models:/models:ro", *mounts)]
        for name, config in winner.configs.items():
            assert read_config(files[f"{name}/config.pbtxt"]) == config
    else:
        assert volumes == []
        assert "--env=AWS_ACCESS_KEY_ID" in flags
    where = "/models" if models == "mounted" else models
    assert command == ["tritonserver", f"--model-repository={where}", *winner.arguments]
    assert (f"--gpus={winner.gpus}" in flags) is bool(winner.gpus)


# -- what is in them -------------------------------------------------------------------------------------------


def read_config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def container(run: Path, **more: Any) -> dict[str, Any]:
    winner = winner_of(run)
    pod = kubernetes.deployment(winner, serving(winner, **more))["spec"]["template"]["spec"]
    found: dict[str, Any] = pod["containers"][0]
    return found


def test_limits_are_what_was_measured(tmp_path: Path) -> None:
    """A billion bytes with half as much again, in steps of 64 MiB; the CPUs that the server had to itself."""
    apart = cpus.place(cpus.Topology(tuple(frozenset({n}) for n in range(8)), (frozenset(range(8)),)), None)
    run = write_run(tmp_path, notes=["a note", apart.note])
    limits = {"cpu": str(len(apart.server)), "memory": "1472Mi"}
    assert container(run)["resources"] == {"requests": limits, "limits": limits}
    assert len(apart.server) < 8


@pytest.mark.parametrize(
    ("options", "kind", "notes", "gpus"),
    [
        (RunOptions(""), "KIND_GPU", [], 2),
        (RunOptions(""), "KIND_CPU", [], 0),
        (RunOptions(""), "KIND_AUTO", ["a GPU is there but onnxruntime-gpu is not installed: served on the CPU"], 0),
        (RunOptions("", target="docker", docker_image=IMAGE, docker_gpus="1"), "KIND_AUTO", [], 1),
        (RunOptions("", target="docker", docker_image=IMAGE, docker_gpus="all"), "KIND_AUTO", [], 2),
        (RunOptions("", target="docker", docker_image=IMAGE), "KIND_AUTO", [], 0),
        (RunOptions("", target="remote", url="triton:8001"), "KIND_GPU", [], 0),
    ],
)
def test_as_many_gpus_as_served(options: RunOptions, kind: str, notes: list[str], gpus: int, tmp_path: Path) -> None:
    configs = {"doubler": config_text("doubler", kind)}
    run = write_run(tmp_path, configs=configs, options=options, hardware=GPUS, notes=notes)
    assert winner_of(run).gpus == gpus
    assert container(run)["resources"].get("limits", {}).get("nvidia.com/gpu") == (str(gpus) if gpus else None)


def test_a_start_may_take_ten_times_what_loading_took(tmp_path: Path) -> None:
    probe = container(write_run(tmp_path))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 10 * 45


@pytest.mark.parametrize(
    ("load", "series", "metric", "target", "factor"),
    [
        (CLOSED, "nv_inference_request_duration_us", "triton_doubler_requests_in_flight", "14", " / 1e6"),
        (OPEN, "nv_inference_request_success", "triton_doubler_requests_per_second", "105", ""),
    ],
)
def test_replicas_follow_the_measured_load(
    load: Any, series: str, metric: str, target: str, factor: str, tmp_path: Path
) -> None:
    """70 % of 20 requests in flight, or of 150.5 a second."""
    run = write_run(tmp_path, load=load)
    (text,) = emitted(run, tmp_path / "out", *in_production("mounted", "kubernetes")).values()
    scaler = by_kind(yaml.safe_load_all(text))["HorizontalPodAutoscaler"]
    (asked,) = scaler["spec"]["metrics"]
    assert asked["pods"] == {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": target}}
    comment = re.findall(r"^#  (.*)$", text.partition("apiVersion")[0], re.MULTILINE)
    (rule,) = yaml.safe_load("\n".join(comment))
    assert rule["name"]["as"] == metric
    assert rule["seriesQuery"].startswith(f'{series}{{namespace!="",pod!="",model="doubler"}}')
    assert rule["metricsQuery"].endswith(f'model="doubler"}}[1m])){factor}')


def test_kserve_gets_the_measured_load_and_knative_takes_the_share(tmp_path: Path) -> None:
    words = [*in_production("s3://b/m", "kserve"), "--target-utilization", "60%"]
    for load, expected in ((CLOSED, ("concurrency", 20, 20)), (OPEN, ("rps", 150, None))):
        run = write_run(tmp_path / str(load.concurrency), load=load)
        (text,) = emitted(run, run / "out", *words).values()
        document = yaml.safe_load(text)
        predictor = document["spec"]["predictor"]
        assert tuple(map(predictor.get, ("scaleMetric", "scaleTarget", "containerConcurrency"))) == expected
        assert list(document["metadata"]["annotations"].values()) == ["60"]


def test_cpu_time_instead_of_requests(tmp_path: Path) -> None:
    winner = winner_of(write_run(tmp_path))
    scaler = kubernetes.autoscaler(winner, serving(winner, autoscaled_by="cpu"))
    assert scaler["spec"]["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 70}


def test_every_file_says_where_it_comes_from(tmp_path: Path) -> None:
    header = [line for line in emitted(SAMPLE, tmp_path)["config.pbtxt"].splitlines() if line.startswith("#")]
    assert re.match(r"# dlrm, as tuned by tritune .*: run dlrm/sample, written 2026-11-21", header[0])
    assert "13,315 infer/s, p95 18.5 ms, concurrency 47 (4 samples a request), memory 643 MB" in header[1]
    assert header[2] == "# bound: p95 <= 20 ms"
    assert header[3].startswith("# verdict: PASS at 99% confidence")
    assert header[4] == "# on: Intel(R) Xeon(R) Processor @ 2.50GHz, 2 cores, Triton 2.51.0"
    assert not any("WARNING" in line for line in header)


def test_what_is_not_confirmed_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    for words in ([], in_production("s3://b/m", "kubernetes")):
        assert emit.main([str(run), *words]) == 0
        shown = capsys.readouterr()
        assert "# WARNING: not within the bound for certain" in shown.out
        assert "UNDECIDED" in shown.err


def test_the_configuration_goes_out_as_it_stands(run: Path, tmp_path: Path) -> None:
    winner = winner_of(run)
    files = emitted(run, tmp_path)
    names = ["config.pbtxt"] if len(winner.configs) == 1 else [f"{name}/config.pbtxt" for name in winner.configs]
    assert {name: read_config(files[name]) for name in files} == dict(
        zip(names, winner.configs.values(), strict=True)
    )


def test_one_configuration_for_each_device(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), RUNS["gpu"](tmp_path / "b")]
    words = [str(runs[1]), "--format", "per-device"]
    files = emitted(runs[0], tmp_path / "out", *words)
    paths = ["doubler/configs/some-cpu.pbtxt", "doubler/configs/nvidia-h100-80gb-hbm3.pbtxt"]
    assert sorted(files) == sorted(paths)
    for path, run in zip(paths, runs, strict=True):
        assert read_config(files[path]) == winner_of(run).configs["doubler"]
        assert f"--model-config-name={Path(path).stem} " in files[path]
    named = emitted(runs[0], tmp_path / "named", *words, "--device", "cpu", "--device", "h100")
    assert sorted(named) == ["doubler/configs/cpu.pbtxt", "doubler/configs/h100.pbtxt"]


def test_a_model_runs_its_batches_before_it_is_ready(tmp_path: Path) -> None:
    files = emitted(write_run(tmp_path / "a"), tmp_path / "out", "--warm-up")
    warmed = read_config(files["config.pbtxt"]).model_warmup
    assert [sample.batch_size for sample in warmed] == [1, 4, 8]
    open_dims = {"doubler": config_text("doubler", dims="-1")}
    told = RunOptions("doubler", shapes=("x:16..128",))
    files = emitted(write_run(tmp_path / "b", configs=open_dims, options=told), tmp_path / "b_out", "--warm-up")
    assert list(read_config(files["config.pbtxt"]).model_warmup[0].inputs["x"].dims) == [128]
    with pytest.raises(BadInputError, match="how large x of doubler is"):
        emit.main([str(write_run(tmp_path / "c", configs=open_dims)), "--warm-up"])


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["yes", "NO", "on", "1e3", "0o7", "0x1F", "1_000", "1:30", "~", "", "a: b", "é", "- x"]
)
def test_every_reader_takes_a_text_for_one(text: str) -> None:
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
def test_a_service_has_a_name_that_kubernetes_takes(model: str, name: str) -> None:
    assert name_of(model) == name


def test_models_that_are_spelled_alike_keep_their_own_configurations(tmp_path: Path) -> None:
    winner = winner_of(RUNS["several models"](tmp_path))
    keys = kubernetes.config_keys(winner)
    assert len(set(keys.values())) == len(winner.configs)
    data = kubernetes.config_map(winner, serving(winner))["data"]
    assert {name: read_config(data[key]) for name, key in keys.items()} == winner.configs


# -- bad input -------------------------------------------------------------------------------------------------


def refused(*words: str | Path) -> str:
    with pytest.raises(BadInputError) as caught:
        emit.main([str(word) for word in words])
    told = str(caught.value)
    assert "\n" not in told
    assert caught.value.exit_code == 2
    return told


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_has_not_ended(status: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, status=status)
    assert f"`tune --resume {run}` goes on with it" in refused(run)


def test_a_run_without_a_recommendation(tmp_path: Path) -> None:
    slow = replace(MEASURED, latency_p95_ms=40.0)
    assert "no configuration met p95 <= 20 ms" in refused(write_run(tmp_path, status="none", measured=slow))


def test_a_run_without_its_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    shutil.rmtree(run / "best")
    assert "has no configuration of doubler" in refused(run)
    (run / "best").mkdir()
    (run / "best" / "config.pbtxt").write_text("max_batch_size: many")
    assert "config.pbtxt:1: not a model configuration" in refused(run)


@pytest.mark.parametrize("changed", ["max_batch_size: 8", "count: 2", "preferred_batch_size: 4"])
def test_a_configuration_that_was_not_measured(changed: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, configs={"doubler": config_text("doubler").replace(changed, changed[:-1] + "1")})
    assert "is not what the run's measurements recommend" in refused(run)


def test_a_record_that_was_cut_short(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    info = json.loads((run / "run.json").read_text())
    del info["hardware"]["cpu"]
    (run / "run.json").write_text(json.dumps(info))
    assert "not the record of a run (no 'cpu')" in refused(run)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--format", "nomad"], "invalid choice"),
        (["--format", "docker"], "which image? give --image, one of NVIDIA's with Triton 2.51.0"),
        (["--format", "docker", "--image", "a b"], "--image a b"),
        (["--format", "docker", "--image", IMAGE], "where are the models? give --model-repository"),
        (["--format", "kserve"], "where are the models?"),
        ([*in_production("ftp://x/y", "docker")], "write s3://BUCKET/PATH"),
        ([*in_production("pvc://claim", "docker")], "docker cannot read models from there"),
        ([*in_production("./models", "kubernetes")], "kubernetes cannot read models from there"),
        ([*in_production("as://a/b", "kserve")], "kserve cannot read models from there"),
        ([*in_production("pvc://Claim", "kubernetes")], "write pvc://CLAIM"),
        ([*in_production("pvc://claim/../x", "kubernetes")], "write pvc://CLAIM"),
        ([*in_production("a:b", "docker")], "cannot mount a folder with a colon"),
        (
            [*in_production("s3://b/m", "kubernetes"), "--name", "Not_A_Name"],
            "--name Not_A_Name: write small",
        ),
        ([*in_production("s3://b/m", "kubernetes"), "--max-replicas", "0"], "--max-replicas 0: write a whole number"),
        ([*in_production("s3://b/m", "kubernetes"), "--target-utilization", "0%"], "--target-utilization 0"),
        ([*in_production("s3://b/m", "docker"), "--max-replicas", "3"], "--format docker has no place for it"),
        (["--device", "a b", "--format", "per-device"], "--device a b: write letters"),
        (["--device", "a", "--device", "b", "--format", "per-device"], "--device: give one for each run"),
        ([*in_production("/srv/models", "docker")], "makes 2 files here: give --output DIR"),
    ],
)
def test_options_that_make_no_sense(words: list[str], told: str) -> None:
    assert told in refused(SAMPLE, *words)


def test_runs_that_do_not_go_together(tmp_path: Path) -> None:
    assert "--format pbtxt is of one run" in refused(SAMPLE, SAMPLE)
    assert "both would be dlrm/configs/" in refused(SAMPLE, SAMPLE, "--format", "per-device")
    remote = RUNS["another machine"](tmp_path)
    assert "name it with --device" in refused(remote, "--format", "per-device")
    assert "is not known; leave it out" in refused(
        remote, *in_production("s3://b/m", "kubernetes"), "--autoscale-on", "cpu"
    )


def test_a_model_that_docker_cannot_mount(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a:b")
    assert "a:b: docker cannot mount a name with a colon" in refused(run, *in_production("mounted", "docker"))
    assert emitted(run, tmp_path / "bucket", *in_production("s3://b/m", "docker")).keys() == {"run.sh"}


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text("mine")
    assert "is there already" in refused(SAMPLE, "--output", tmp_path)
    assert (tmp_path / "config.pbtxt").read_text() == "mine"
    assert "dlrm" in emitted(SAMPLE, tmp_path, "--force")["config.pbtxt"]
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(SAMPLE, "--output", tmp_path / "file")


def test_each_command_of_the_page_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^\$ tune emit (.*)$", Path("docs/emit.md").read_text(), re.MULTILINE)
    assert {name for line in commands for name in re.findall(r"--format (\S+)", line)} == {*FORMATS} - {"pbtxt"}
    for line in commands:
        words = shlex.split(line)
        capsys.readouterr()
        if "--output" in words:
            folder = tmp_path / words.pop()
            assert emitted(Path(words[0]), folder, *words[1:-1]) != {}
        else:
            assert emit.main(words) == 0
            assert capsys.readouterr().out.startswith("# dlrm, as tuned by tritune")
