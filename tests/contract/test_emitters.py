"""The contract of emitters: the files of each format are read by the schema or program that they are for.

A new format needs a class that inherits ``EmitterContract``, with its name and a ``check`` of its files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from optimizer.cli.emit import FORMATS
from optimizer.core.errors import BadInputError
from optimizer.emit import kubernetes
from optimizer.emit.recommended import Recommendation
from tests.emitted_files import (
    IMAGE,
    RUNS,
    SAMPLE,
    by_kind,
    emitted,
    in_production,
    production_server,
    read_config,
    recommendation_of,
)
from tests.programs import write_program
from tests.run_folders import write_run

DATA = Path("tests/data")
KUBERNETES, OLDER_KUBERNETES = "1.37", "1.29"


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RUNS[request.param](tmp_path_factory.mktemp("results"))


@pytest.fixture(params=["s3://bucket/models", "mounted"])
def models(request: pytest.FixtureRequest) -> str:
    repository = request.param
    assert isinstance(repository, str)
    return repository


class EmitterContract:
    """The requirements of every format."""

    format: str

    def options(self, models: str) -> list[str]:
        """Return the options of ``tune emit`` for the model repository ``models``."""
        return in_production(models, self.format)

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        """Read ``files``, which are in ``folder``, with the schema or program that they are for."""
        raise NotImplementedError

    def test_the_files_are_valid(self, run: Path, models: str, tmp_path: Path) -> None:
        files = emitted(run, tmp_path / "out", *self.options(models))
        self.check(files, run, models, tmp_path / "out")

    def test_the_files_name_their_run(self, tmp_path: Path) -> None:
        text = "".join(emitted(SAMPLE, tmp_path, *self.options("s3://bucket/models")).values())
        assert "# dlrm, as tuned by tritune" in text
        assert "# bound: p95 <= 20 ms" in text
        assert "WARNING" not in text

    def test_an_undecided_recommendation_needs_force(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run, out = write_run(tmp_path, is_confirmed=False), tmp_path / "out"
        words = self.options("s3://bucket/models")
        with pytest.raises(BadInputError, match="the verdict is UNDECIDED: ") as caught:
            emitted(run, out, *words)
        step = f"test it on fresh servers: `tune verify {run} --budget 3m`; --force emits it nevertheless"
        assert str(caught.value).endswith(step)
        assert not out.exists()
        assert "# WARNING: the verdict is UNDECIDED" in "".join(emitted(run, out, *words, "--force").values())
        assert "the verdict is UNDECIDED: " in capsys.readouterr().err


class TestPbtxt(EmitterContract):
    format = "pbtxt"

    def options(self, models: str) -> list[str]:
        return []

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        configs = recommendation_of(run).configs
        names = ["config.pbtxt"] if len(configs) == 1 else [f"{name}/config.pbtxt" for name in configs]
        assert {name: read_config(files[name]) for name in files} == dict(zip(names, configs.values(), strict=True))


class TestPerDevice(EmitterContract):
    format = "per-device"

    def options(self, models: str) -> list[str]:
        return ["--format", self.format, "--device", "here"]

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        configs = recommendation_of(run).configs
        assert {name: read_config(text) for name, text in files.items()} == {
            f"{name}/configs/here.pbtxt": config for name, config in configs.items()
        }


def check_kubernetes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, version, strict=True)


class TestKubernetes(EmitterContract):
    format = "kubernetes"

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        (text,) = files.values()
        documents = list(yaml.safe_load_all(text))
        kinds = [document["kind"] for document in documents]
        mounted = ["ConfigMap"] if models == "mounted" else []
        assert kinds == [*mounted, "Deployment", "Service", "HorizontalPodAutoscaler"]
        for document in documents:
            check_kubernetes(document, KUBERNETES)

    def test_manifests_satisfy_an_older_schema(self, tmp_path: Path) -> None:
        manifests = kubernetes.manifests(production_server(RUNS["gpu"](tmp_path)))
        assert manifests
        for document in manifests:
            check_kubernetes(document, OLDER_KUBERNETES)

    def test_unknown_fields_fail_the_schema(self, tmp_path: Path) -> None:
        """Shows that the schemas are strict, so that the tests above can fail."""
        broken = kubernetes.deployment(production_server(write_run(tmp_path)))
        broken["spec"]["template"]["spec"]["containers"][0]["startupProb"] = {}
        with pytest.raises(jsonschema.ValidationError):
            check_kubernetes(broken, KUBERNETES)


def strict(schema: Any) -> Any:
    """Return ``schema`` with unknown fields forbidden, as ``kubectl --validate=strict`` does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


class TestKServe(EmitterContract):
    format = "kserve"

    def test_the_files_are_valid(self, run: Path, models: str, tmp_path: Path) -> None:
        """Several replicas of a stateful model are refused: Knative sends the steps of a sequence to any of them."""
        if not recommendation_of(run).is_stateful:
            super().test_the_files_are_valid(run, models, tmp_path)
            return
        with pytest.raises(BadInputError, match=r"^--format kserve: doubler is stateful, .* \(--max-replicas 1\)"):
            emitted(run, tmp_path / "refused", *self.options(models))
        files = emitted(run, tmp_path / "out", *self.options(models), "--max-replicas", "1")
        self.check(files, run, models, tmp_path / "out")

    @staticmethod
    @cache
    def validator() -> jsonschema.Draft202012Validator:
        schema = strict(json.loads((DATA / "kserve-inferenceservice.json").read_text()))
        schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
        return jsonschema.Draft202012Validator(schema)

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        (text,) = files.values()
        document = yaml.safe_load(text)
        self.validator().validate(document)
        assert (document["apiVersion"], document["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
        document["spec"]["predictor"]["scaleMetrics"] = "rps"
        assert not self.validator().is_valid(document)


class TestCompose(EmitterContract):
    format = "compose"

    @staticmethod
    @cache
    def validator() -> jsonschema.Draft202012Validator:
        return jsonschema.Draft202012Validator(json.loads((DATA / "compose-spec.json").read_text()))

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        document = yaml.safe_load(files["compose.yaml"])
        self.validator().validate(document)
        recommendation = recommendation_of(run)
        services = list(document["services"].values())
        assert len(services) == recommendation.server_processes
        ports = [port for each in services for port in each["ports"]]
        assert len({port.rpartition(":")[0] for port in ports}) == len(ports), "no port of the machine is taken twice"
        for service in services:
            self.check_configs(service, document, files, recommendation, models)
        services[0]["healthchecks"] = {}
        assert not self.validator().is_valid(document)

    @staticmethod
    def check_configs(
        service: dict[str, Any],
        document: dict[str, Any],
        files: dict[str, str],
        recommendation: Recommendation,
        models: str,
    ) -> None:
        """Check that each config is a file: Compose cannot copy a content below the read-only repository."""
        if models == "mounted":
            assert service["volumes"][0]["source"] == "/srv/my $$models", "Compose does not expand the dollar sign"
            for config in service["configs"]:
                path = document["configs"][config["source"]]["file"].replace("$$", "$").removeprefix("./")
                name = config["target"].replace("$$", "$").split("/")[2]
                assert read_config(files[path]) == recommendation.configs[name]
        else:
            assert set(files) == {"compose.yaml"}


def rendered(chart: Path, values: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Return the objects that Helm renders; by the program if installed, otherwise by its library."""
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


class TestHelmValues(EmitterContract):
    format = "helm-values"

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        """Check that Helm renders the objects of the format kubernetes."""
        assert set(files) == {"values.yaml", *kubernetes.chart()}
        manifests = emitted(run, folder.with_name("kubernetes"), *in_production(models, "kubernetes"))
        expected = by_kind(yaml.safe_load_all(manifests["kubernetes.yaml"]))
        objects = by_kind(rendered(folder / "chart", yaml.safe_load(files["values.yaml"]), "release"))
        assert objects == expected

    @pytest.mark.parametrize("values", [{}, {"image": IMAGE}, {"image": IMAGE, "args": ["a", "b"], "replica": 2}])
    def test_unknown_values_are_refused(self, values: dict[str, Any]) -> None:
        schema = json.loads((kubernetes.CHART / "values.schema.json").read_text())
        defaults = yaml.safe_load((kubernetes.CHART / "values.yaml").read_text())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(defaults | values, schema)

    def test_a_variable_may_come_from_a_secret(self, tmp_path: Path) -> None:
        """The header of the values says so about a variable whose value is not stored."""
        secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
        values = kubernetes.values(production_server(write_run(tmp_path))) | {"env": [secret]}
        schema = json.loads((kubernetes.CHART / "values.schema.json").read_text())
        jsonschema.validate(values, schema)
        (container,) = by_kind(rendered(kubernetes.CHART, values, "release"))["Deployment"]["spec"]["template"][
            "spec"
        ]["containers"]
        assert container["env"] == [secret]

    def test_without_autoscaling_the_number_of_replicas_is_fixed(self, tmp_path: Path) -> None:
        fixed = production_server(write_run(tmp_path), min_replicas=3, max_replicas=3)
        documents = by_kind(kubernetes.manifests(fixed))
        assert documents["Deployment"]["spec"]["replicas"] == 3
        assert "HorizontalPodAutoscaler" not in documents
        assert by_kind(rendered(kubernetes.CHART, kubernetes.values(fixed), "release")) == documents


DOCKER = """\
#!/bin/sh
printf '%s\\n' "$@"
"""


class TestDocker(EmitterContract):
    format = "docker"

    def test_the_files_are_valid(self, run: Path, models: str, tmp_path: Path) -> None:
        """Several server processes are refused: a script starts one server."""
        if recommendation_of(run).server_processes == 1:
            super().test_the_files_are_valid(run, models, tmp_path)
            return
        with pytest.raises(BadInputError, match="recommends 2 server processes; use --format compose"):
            emitted(run, tmp_path / "out", *self.options(models))

    def check(self, files: dict[str, str], run: Path, models: str, folder: Path) -> None:
        """Check the arguments of ``docker``, in place of which a script prints them."""
        recommendation = recommendation_of(run)
        docker = write_program(folder.with_name("docker"), DOCKER)
        env = os.environ | {"PATH": f"{docker.parent}{os.pathsep}{os.environ['PATH']}", "HOME": "/nowhere"}
        script = folder / "run.sh"
        ended = subprocess.run([script], env=env, cwd="/", capture_output=True, text=True, check=True)
        printed = ended.stdout.splitlines()
        flags, command = printed[: printed.index(IMAGE)], printed[printed.index(IMAGE) + 1 :]
        assert flags[0] == "run"
        assert "--publish=127.0.0.1:8000:8000" in flags
        volumes = [flag for flag in flags if flag.startswith("--volume=")]
        if models == "mounted":
            mounts = [
                f"{script.parent}/{name}/config.pbtxt:/models/{name}/config.pbtxt:ro"
                for name in recommendation.configs
            ]
            assert volumes == [f"--volume={mount}" for mount in ("/srv/my $models:/models:ro", *mounts)]
            for name, config in recommendation.configs.items():
                assert read_config(files[f"{name}/config.pbtxt"]) == config
        else:
            assert volumes == []
            assert "--env=AWS_ACCESS_KEY_ID" in flags
        where = "/models" if models == "mounted" else models
        quantiles = [] if len(recommendation.configs) > 1 else ["--metrics-config=summary_latencies=true"]  # cost
        assert command == ["tritonserver", f"--model-repository={where}", *recommendation.arguments, *quantiles]
        assert (f"--gpus={recommendation.gpus}" in flags) is bool(recommendation.gpus)


def test_every_format_is_covered_by_the_contract() -> None:
    assert {cls.format for cls in EmitterContract.__subclasses__()} == set(FORMATS)
