"""The user's tritonserver: how it is found, whether it can run on this machine, and its options."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.errors import BadInputError, DeploymentError, EnvironmentFault, ServerFault
from optimizer.deploy.docker_container import ContainerSettings
from optimizer.deploy.docker_target import ContainerServer
from optimizer.deploy.installed_server import Installation, TritonServer, complete_config
from optimizer.deploy.local_target import LocalTarget, find_installation
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.server_log import ServerLog
from optimizer.deploy.server_process import MIN_VERSION, is_older
from optimizer.deploy.target_settings import TargetSettings, model_load_timeout_within
from optimizer.measure.server_errors import missing_module
from tests.programs import write_program

HELP = """\
Usage: tritonserver [options]
  --help
\tPrint usage

Model Repository:
  --model-repository <string>
\tPath to --this-is-no-option. It may be specified
  --model-control-mode <string>
  --rate-limit <string>
"""


def write_server(folder: Path, output: str = HELP, exit_code: int = 1) -> Path:
    """Return a script that prints ``output`` and exits with ``exit_code``, in place of ``tritonserver --help``."""
    return write_program(folder / "tritonserver", f"#!/bin/sh\ncat <<'END'\n{output}END\nexit {exit_code}\n")


def write_source(folder: Path, **config: str) -> ModelSource:
    """Return the model ``m`` with an empty version in the repository ``folder/models``."""
    (folder / "models" / "m" / "1").mkdir(parents=True)
    return ModelSource(folder / "models", "m", ModelConfig(name="m", **config))


def test_the_known_options_are_those_of_the_help(tmp_path: Path) -> None:
    installation = find_installation(str(write_server(tmp_path)), arguments=("--rate-limit=off",))
    assert installation.options == frozenset({"help", "model-repository", "model-control-mode", "rate-limit"})
    assert installation.knows("--rate-limit=off")
    assert not installation.knows("--http-restricted-api=x")
    assert installation.backends == Path("/opt/tritonserver/backends")
    with pytest.raises(
        BadInputError, match=r"--server-arg --other=1: not an option of .*/tritonserver; `tritonserver --help`"
    ):
        find_installation(str(write_server(tmp_path)), arguments=("--other=1",))


def test_the_server_on_path_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        EnvironmentFault, match="--target local: no tritonserver on PATH; name it with --tritonserver"
    ):
        find_installation()
    with pytest.raises(BadInputError, match="--tritonserver tritonserver: no such program on PATH"):
        find_installation("tritonserver")
    path = write_server(tmp_path)
    assert find_installation().tritonserver == find_installation("tritonserver").tritonserver == path


def test_the_error_of_a_server_that_was_started_for_the_inputs_names_no_removed_log(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    failing = write_server(tmp_path, HELP + "no such library\n")
    with pytest.raises(ServerFault, match="tritonserver did not start: no such library") as caught:
        complete_config(source, lambda: find_installation(str(failing)), 20.0)
    assert caught.value.log is None


def test_backends_next_to_the_server_are_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "backends").mkdir()
    (tmp_path / "others").mkdir()
    path = str(write_server(tmp_path / "bin"))
    assert find_installation(path).backends == tmp_path / "backends"
    assert find_installation(path, str(tmp_path / "others")).backends == tmp_path / "others"
    with pytest.raises(BadInputError, match="--backend-directory /nowhere: no such folder"):
        find_installation(path, "/nowhere")


def test_a_program_that_is_no_tritonserver_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=f"--tritonserver {tmp_path}/no: no such file"):
        find_installation(f"{tmp_path}/no")
    path = write_server(tmp_path)
    path.chmod(0o644)
    with pytest.raises(BadInputError, match=r"not executable; chmod \+x it"):
        find_installation(str(path))
    error = "error while loading shared libraries: libdcgm.so.3: cannot open shared object file\n"
    with pytest.raises(
        EnvironmentFault, match=r"--help ended \(exit code 127\): .*libdcgm.so.3.*; name a tritonserver"
    ):
        find_installation(str(write_server(tmp_path, error, 127)))


def test_a_program_for_another_machine_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "tritonserver"
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 183) + bytes(44))
    path.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=r"made for ARM \(aarch64\), and this machine is x86-64; name another"):
        find_installation(str(path))


def test_a_missing_backend_is_reported_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "backends" / "python").mkdir(parents=True)
    installation = Installation(tmp_path / "tritonserver", {}, tmp_path / "backends")
    source = write_source(tmp_path, platform="tensorrt_plan")
    with pytest.raises(
        EnvironmentFault, match=f"m: backend 'tensorrt' is not in {tmp_path}/backends, which has python"
    ):
        LocalTarget(source, installation, TargetSettings(tmp_path / "log"))
    (tmp_path / "models" / "m" / "1" / "libtriton_tensorrt.so").touch()  # a model may contain its backend
    LocalTarget(source, installation, TargetSettings(tmp_path / "log")).close()


def test_models_in_python_need_bash_and_backends_on_a_plain_path(tmp_path: Path) -> None:
    backends = tmp_path / "my backends"
    for backend in ("python", "onnxruntime"):
        (backends / backend).mkdir(parents=True)
        (backends / backend / f"libtriton_{backend}.so").touch()
    sources = {backend: write_source(tmp_path / backend, backend=backend) for backend in ("python", "onnxruntime")}

    def check(backend: str, **environment: str) -> None:
        installation = Installation(tmp_path / "tritonserver", environment, backends)
        LocalTarget(sources[backend], installation, TargetSettings(tmp_path / "log")).close()

    check("onnxruntime", PATH="/nowhere")
    with pytest.raises(EnvironmentFault, match=r"^bash is missing"):
        check("python", PATH="/nowhere")
    with pytest.raises(EnvironmentFault, match="my backends: Triton starts models in Python through a shell"):
        check("python")


@pytest.mark.parametrize(
    ("budget", "limit"),
    [(1.0, 5.0), (8.0, 8.0), (60.0, 60.0), (240.0, 120.0), (1200.0, 120.0), (3600.0, 360.0)],
)
def test_a_load_takes_no_longer_than_the_budget_and_then_than_a_tenth_of_it(budget: float, limit: float) -> None:
    assert model_load_timeout_within(budget) == limit


@pytest.mark.parametrize(
    ("version", "old"), [("2.29.0", True), ("1.15.0", True), ("2.30.0", False), ("2.51.0", False), ("", False)]
)
def test_only_versions_below_the_minimum_are_older(version: str, old: bool) -> None:
    assert is_older(version, MIN_VERSION) is old


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"/t/tritonserver: unrecognized option '--foo=1'\n{HELP}\tDefault is 0.\n\n", "unrecognized option"),
        (f"{HELP}\tResults in error.\n\nInvalid option value. Got abc\n\n", "Invalid option value. Got abc"),
        ("I1 first] fine\nE1 a.cc:7] no such thing\nI2 a] bye\n", "no such thing"),
    ],
)
def test_the_failure_of_a_start_is_the_error_in_the_log(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert message in ServerLog(log).startup_failure()


NO_STREAM = (
    'E1129 20:18:33.66 13733 ensemble_scheduler.cc:1468] "unable to create stream for chain: CUDA driver version"'
)
NO_HELPER = 'E1129 20:18:33.91 14018 server.cc:241] "CudaDriverHelper has not been initialized."'
UNREADABLE = "E1129 20:18:33.66 13733 repository.cc:1460] \"Poll failed for model directory 'second': too large\""


def test_errors_that_a_server_without_a_gpu_always_logs_are_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join([NO_HELPER, NO_STREAM, ""]))
    assert ServerLog(log).last_error() == ServerLog(log).unreadable_model() == ""
    log.write_text("\n".join([NO_HELPER, 'E1129 a.cc:7] "the weights are corrupt"', UNREADABLE, NO_STREAM, ""]))
    assert ServerLog(log).last_error() == "Poll failed for model directory 'second': too large"
    assert ServerLog(log).unreadable_model() == "model 'second': too large"


def test_the_reason_why_the_process_of_a_model_does_not_start_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("I1130 pb_stub.cc:2105]  Failed to preinitialize Python stub: no file at '/m/model.py'\n")
    assert ServerLog(log).last_error() == "Failed to preinitialize Python stub: no file at '/m/model.py'"


def test_the_last_output_is_that_of_a_models_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["| model | 1 |", "+---+", 'I1122 21:49:17.258071 444 model_lifecycle.cc:472] "loading: m:1"']
    log.write_text("\n".join(lines))
    assert ServerLog(log).last_output() == ""
    log.write_text("\n".join([*lines, "bash: line 1: stub: No such file", *lines, ""]))
    assert ServerLog(log).last_output() == "bash: line 1: stub: No such file"


def test_the_last_output_of_a_crashed_server_is_the_exception_above_its_stack_trace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    exception = ["terminate called after throwing an instance of 'E'", "  what():  basic_string::append"]
    crash = ["Signal (6) received.", " 0# 0x55D57748 in /opt/tritonserver", "26# 0x00007FC2 in /usr/lib/libc.so.6"]
    log.write_text("\n".join([*exception, *crash, ""]))
    assert ServerLog(log).last_output() == "what(): basic_string::append"
    log.write_text("\n".join([*crash, ""]))
    assert ServerLog(log).last_output() == ""


def test_a_server_that_does_not_start_as_one_of_several_fails_its_candidate(tmp_path: Path) -> None:
    """A failed start of a single server with the usual options ends the run."""
    backend = tmp_path / "backends" / "onnxruntime"
    backend.mkdir(parents=True)
    backend.joinpath("libtriton_onnxruntime.so").touch()
    source = write_source(tmp_path, backend="onnxruntime")
    installation = Installation(write_server(tmp_path, "error: no memory is left\n"), {}, tmp_path / "backends")
    two_processes = Candidate(8, fields=((SERVER_PROCESSES, 2),))
    with contextlib.closing(LocalTarget(source, installation, TargetSettings(tmp_path / "log"))) as target:
        message = "^tritonserver did not start as one of 2 server processes: error: no memory is left$"
        with pytest.raises(DeploymentError, match=message), target.deploy(two_processes):
            pass
        with pytest.raises(ServerFault, match=r"^tritonserver did not start: "), target.deploy(Candidate(8)):
            pass


@pytest.mark.parametrize("environment", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}])
def test_the_server_numbers_gpus_as_nvml_does_unless_the_user_chose_an_order(
    environment: dict[str, str], tmp_path: Path
) -> None:
    source = write_source(tmp_path, backend="own")
    (tmp_path / "models" / "m" / "1" / "libtriton_own.so").touch()
    server = write_program(tmp_path / "tritonserver", '#!/bin/sh\necho "the order is $CUDA_DEVICE_ORDER"; exit 1\n')
    installation = Installation(server, environment, tmp_path / "backends")
    order = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with (
        contextlib.closing(LocalTarget(source, installation, TargetSettings(tmp_path / "log"))) as target,
        pytest.raises(ServerFault, match=f"the order is {order}$"),
        target.deploy(Candidate(8)),
    ):
        pass


def test_a_missing_module_is_named_with_the_way_to_add_it(tmp_path: Path) -> None:
    message = "load failed: ModuleNotFoundError: No module named 'cv2.dnn'\n\nAt:\n  model.py(3): <module>\n"
    assert missing_module(message) == "cv2"
    assert missing_module("ImportError: libGL.so.1") == ""
    folder, settings = SimpleNamespace(path=tmp_path), TargetSettings(tmp_path / "log")
    local, embedded = (
        TritonServer(folder, Installation(Path("t"), {}, runtime=runtime), settings)  # type: ignore[arg-type]
        for runtime in (None, Runtime(tmp_path))
    )
    config = ModelConfig(name="m", backend="python")
    assert local.import_advice("cv2", config).endswith("this server: python3 -m pip install PACKAGE")
    assert embedded.import_advice("cv2", config).endswith(f"of tune: {sys.executable} -m pip install PACKAGE")
    container = ContainerServer(None, "triton:24.10", "t", None, settings)  # type: ignore[arg-type]
    assert container.import_advice("cv2", config) == (
        "build an image with the package of cv2 (FROM triton:24.10, RUN pip install PACKAGE) and give it as "
        "--docker-image"
    )
    config.parameters["EXECUTION_ENV_PATH"].string_value = "/opt/env.tar.gz"
    for server in (local, embedded, container):
        assert server.import_advice("cv2", config) == (
            "add the package with cv2 to the model's own environment '/opt/env.tar.gz'"
        )


def test_an_image_that_is_too_old_for_http_is_refused_if_http_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("tritonserver: unrecognized option '--http-restricted-api=model-repository'\n")
    settings = TargetSettings(tmp_path / "log")
    engine: Any = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: []))  # it has no containers
    server = ContainerServer(engine, "triton:23.03", "t", ContainerSettings(), settings, needs_http=True)
    with pytest.raises(BadInputError, match=r"^--protocol http: triton:23.03 is too old to keep web pages from"):
        server.start()
