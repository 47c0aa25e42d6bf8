"""``tune --help``, ``models``, ``doctor`` and ``setup``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from onnx import TensorProto

from optimizer.cli import doctor
from optimizer.cli.commands import COMMANDS, overview
from optimizer.core.files import cache_folder
from optimizer.deploy import perf_analyzer_release, runtime
from tests.command_fixtures import RUN_SECONDS, Sandbox, Tune
from tests.repositories import doubler, serialized
from tests.storage_fixtures import SmallDisk, small_disk

__all__ = ["small_disk"]

CHECKS = (
    "tritonserver",
    "Python backend",
    "libpython",
    "bash",
    "address space",
    "threads",
    "perf_analyzer",
    "ONNX Runtime",
    "GPU",
    "other targets",
    "CPU",
    "other runs",
    "ports",
    "/dev/shm",
    "temporary files",
    "disk",
    "documentation",
)


SLOW_TO_IMPORT = {
    *("google", "grpc", "jinja2", "matplotlib", "numba", "numpy", "onnx", "onnxruntime", "optuna", "pandas"),
    *("psutil", "pydantic", "ray", "rich", "scipy", "sqlalchemy", "tokenizers", "torch", "tritonclient"),
}
NEEDED_BY_A_RUN = {"matplotlib", "numba", "optuna", "pandas", "scipy", "sqlalchemy"}


# -- help and models --------------------------------------------------------------------------------------------


def test_help_and_wrong_flags_import_no_slow_package() -> None:
    """One process runs all of them, because a package that one imports stays imported."""
    pages = ["--help", "run --help", "run --help-all"]
    wrong = ["--slap95 20ms dlrm", "--sla-p95 20 dlrm", "dlrm mlp"]
    wrong += [f"{command} --frob" for command in ("verify", "replay", "report", "explain", "emit", "serve")]
    shown, errors, modules = imported_by(*(line.split() for line in (*pages, *wrong)))
    assert overview() in shown
    assert shown.count("\nusage: tune run ") == 2
    assert len(errors) == len(wrong)
    assert SLOW_TO_IMPORT & modules == set()


def test_the_version_imports_nothing_of_a_run() -> None:
    shown, _, modules = imported_by(["--version"])
    assert shown.startswith("tritune ")
    assert {"yaml", "optimizer.cli.run", "optimizer.options", *SLOW_TO_IMPORT} & modules == set()


def test_a_model_is_checked_before_the_packages_of_a_run_are_imported(tmp_path: Path) -> None:
    """They take longer than the check, and the user waits for its answer."""
    model = doubler()
    weights = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="../weights.bin")
    (tmp_path / "m.onnx").write_bytes(serialized(model))
    _, errors, modules = imported_by(["--sla-p95", "20ms", str(tmp_path / "m.onnx")])
    assert "outside the folder of the model" in errors[-1]
    assert NEEDED_BY_A_RUN & modules == set()


def imported_by(*commands: Sequence[str]) -> tuple[str, list[str], set[str]]:
    """Return the output of these commands in one process, their lines of error, and the modules it has imported."""
    code = (
        "import contextlib, json, sys\n"
        "from optimizer.cli.start import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['tune', *words]\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *errors, modules = done.stderr.splitlines()
    return done.stdout, errors, set(modules.split())


def test_each_command_has_a_help(tune: Tune, called_tune: Tune) -> None:
    shown = tune("--help")
    assert (shown.code, shown.stdout, shown.stderr) == (0, overview(), "")
    for command in COMMANDS:
        lines = called_tune(command, "--help").stdout.splitlines()
        assert lines[0].startswith(f"usage: tune {command} ")
        assert max(lines, key=len)[80:] == "", command  # a terminal of 80 columns would break the line


def test_models_lists_the_built_in_models_from_any_folder(tune: Tune) -> None:
    listed = tune("models")
    assert (listed.code, listed.stderr) == (0, "")
    lines = listed.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert Path(lines[-1].strip(), "dlrm.yaml").is_file()
    (at,) = (index for index, line in enumerate(lines) if line.startswith("dlrm "))
    assert lines[at + 1].startswith("p95 <= 20 ms ")
    assert lines[at + 1].rstrip().split("  ")[-1].strip() == "input__0 FP32 [13] · input__1 INT64 [26]"
    assert lines[at + 2].strip() == "NVIDIA DeepLearningExamples, PyTorch/Recommendation/DLRM"


def test_models_lists_profiles_in_configs_with_their_errors(called_tune: Tune, sandbox: Sandbox) -> None:
    configs = sandbox.working_folder / "configs"
    configs.mkdir()
    (configs / "mine.yaml").write_text("description: my own\nmodel: {builder: mlp}\nsla: {p99: 5ms}\n")
    (configs / "broken.yaml").write_text("model: {builder: mlp}\nslo: {p99: 5ms}\n")
    listed = called_tune("models")
    assert (listed.code, listed.stderr) == (0, "")
    lines = listed.stdout.splitlines()
    at = {line.split(" ")[0]: index for index, line in enumerate(lines)}
    assert lines[at["mine"]].split() == ["mine", "my", "own"]
    assert lines[at["mine"] + 1].startswith("p99 <= 5 ms ")
    assert "configs/broken.yaml:2: slo: " in lines[at["broken"] + 1]
    assert "dlrm" in at


def test_models_json_has_inputs_sla_and_errors(called_tune: Tune, sandbox: Sandbox) -> None:
    configs = sandbox.working_folder / "configs"
    (configs / "models" / "stored").mkdir(parents=True)
    config = 'input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }'
    (configs / "models" / "stored" / "config.pbtxt").write_text(config)
    (configs / "stored.yaml").write_text("model: {repository: models, name: stored}\n")
    (configs / "broken.yaml").write_text("model: {builder: mlp}\nslo: {p99: 5ms}\n")
    listed = called_tune("models", "--json")
    assert (listed.code, listed.stderr) == (0, "")
    models = {model["name"]: model for model in json.loads(listed.stdout)}
    assert models["stored"]["inputs"] == [{"name": "TEXT", "datatype": "STRING", "dims": [-1]}]
    assert models["stored"]["sla"] == []
    assert models["resnext101-32x4d"]["inputs"] == [{"name": "input__0", "datatype": "FP32", "dims": [3, 224, 224]}]
    assert models["dlrm"]["sla"] == ["p95 <= 20 ms"]
    assert "broken.yaml:2: slo: " in models["broken"]["fault"]
    assert {"bert", "bert-384", "bert-large", "bert-large-128", "minilm", "minilm-16", "minilm-128"} < models.keys()
    assert {model["profile"] for model in models.values() if "fault" in model} == {str(configs / "broken.yaml")}


# -- doctor -----------------------------------------------------------------------------------------------------


def findings(output: str) -> dict[str, tuple[str, str, str]]:
    """Return the findings of ``tune doctor`` by name: state, detail, fix."""
    checks: dict[str, tuple[str, str, str]] = {}
    name = ""
    for line in output.splitlines()[:-1]:
        if line.startswith(" "):
            state, text, _ = checks[name]
            more = line.strip()
            is_fix = more.startswith("-> ")
            checks[name] = (state, text, more.removeprefix("-> ")) if is_fix else (state, f"{text} {more}", "")
        else:
            name = line[6:21].strip()
            checks[name] = line[:4].strip(), line[22:], ""
    return checks


def test_doctor_prints_a_line_for_each_check(tune: Tune) -> None:
    runtime.ensure(print)
    shown = tune("doctor")
    assert (shown.code, shown.stderr) == (0, "")
    checks = findings(shown.stdout)
    assert tuple(checks) == CHECKS
    for name, (state, text, fix) in checks.items():
        assert state in ("ok", "warn"), name
        assert text
        assert (fix == "") is (state == "ok"), name
    assert checks["tritonserver"][1].startswith(f"{runtime.TRITON_VERSION} in ")
    assert shown.stdout.splitlines()[-1] == "ready: tune --sla-p95 20ms dlrm"


def test_doctor_checks_what_starts_the_process_of_a_model(called_tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash is found in the system's folders even if PATH is empty, as by the server."""
    runtime.ensure(print)
    assert findings(called_tune("doctor", env={"PATH": ""}).stdout)["bash"][0] == "ok"
    monkeypatch.setattr(os, "defpath", "/nowhere")
    shown = called_tune("doctor", env={"PATH": "/nowhere"})
    assert shown.code == 3
    assert findings(shown.stdout)["bash"] == (
        "fail",
        "bash is missing, with which Triton starts the process of a model",
        "apt-get install bash",
    )
    ended = called_tune("--sla-p95", "20ms", "mlp", env={"PATH": "/nowhere"})
    assert (ended.code, ended.stderr_lines[-1].partition(",")[0]) == (3, "tune: bash is missing")


def test_a_small_address_space_is_reported(sandbox: Sandbox) -> None:
    runtime.ensure(print)
    problem = "the address space is limited to 3.0 GiB, and the server needs 4 GiB"
    limited = ("sh", "-c", f'ulimit -v {3 << 20}; exec "$@"', "sh")
    check = sandbox.start("doctor", under=limited)
    stdout, _ = check.communicate(timeout=RUN_SECONDS)
    assert check.returncode == 3
    assert findings(stdout)["address space"] == ("fail", problem, "ulimit -v unlimited")
    run = sandbox.start("--sla-p95", "20ms", "mlp", under=limited)
    _, stderr = run.communicate(timeout=RUN_SECONDS)
    assert (run.returncode, stderr) == (3, f"tune: {problem}; ulimit -v unlimited\n")


def test_a_limit_on_processes_and_threads_is_reported(sandbox: Sandbox) -> None:
    """If too few threads can start, gRPC waits for them forever. The limit does not apply to root."""
    runtime.ensure(print)
    keep = "=-all,+dac_override"  # the right to read the files of these tests
    limited = ("setpriv", "--reuid", "54321", f"--inh-caps{keep}", f"--ambient-caps{keep}", "prlimit")
    if subprocess.run([*limited, "--nproc=15", "true"], check=False).returncode:
        pytest.skip("this machine permits no user without other processes")
    check = sandbox.start("doctor", under=(*limited, "--nproc=15"))
    stdout, _ = check.communicate(timeout=RUN_SECONDS)
    state, detail, fix = findings(stdout)["threads"]
    problem = r"only \d+ more processes and threads can be started, and a run needs at least"
    assert (check.returncode, state) == (3, "fail")
    assert re.fullmatch(f"{problem} 100", detail)
    for target, needed in (("--target=embedded", "100"), ("--target=remote", "32")):
        run = sandbox.start("--sla-p95", "20ms", target, "mlp", under=(*limited, "--nproc=15"))
        _, stderr = run.communicate(timeout=RUN_SECONDS)
        assert run.returncode == 3
        assert re.fullmatch(f"tune: {problem} {needed}; {re.escape(fix)}\n", stderr), stderr
    without = sandbox.start("--sla-p95", "20ms", "mlp", under=(*limited, "--nproc=1"))
    _, stderr = without.communicate(timeout=RUN_SECONDS)
    assert without.returncode == 3  # with several CPUs, OpenBLAS raises an interrupt after its own lines
    none_free = "tune: no more processes and threads can be started"
    assert re.fullmatch(
        rf"{none_free}(, and a run needs at least 100)?; {re.escape(fix)}", stderr.splitlines()[-1]
    ), stderr


def test_a_folder_that_programs_cannot_run_in_is_reported(sandbox: Sandbox) -> None:
    """A namespace of mounts has a folder for temporary files with noexec, as on many hardened machines."""
    runtime.ensure(print)
    mount = 'mount -t tmpfs -o noexec tritune "$TMPDIR" && exec "$@"'
    namespace = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    variables = {**os.environ, "TMPDIR": str(sandbox.temporary)}
    if subprocess.run([*namespace, "true"], env=variables, check=False).returncode:
        pytest.skip("this machine permits no namespace of mounts")
    problem = f"{sandbox.temporary} is mounted with noexec, and the server runs programs in it"
    check = sandbox.start("doctor", under=namespace)
    stdout, _ = check.communicate(timeout=RUN_SECONDS)
    assert check.returncode == 3
    assert findings(stdout)["temporary files"] == ("fail", problem, "set TMPDIR to another folder")
    run = sandbox.start("--sla-p95", "20ms", "mlp", under=namespace)
    _, stderr = run.communicate(timeout=RUN_SECONDS)
    assert (run.returncode, stderr) == (3, f"tune: {problem}; set TMPDIR to another folder\n")


def test_doctor_reports_that_no_folder_for_temporary_files_can_be_written(sandbox: Sandbox) -> None:
    """A namespace of mounts makes all of them read-only; a full disk has the same effect."""
    folders = f"/tmp /var/tmp {sandbox.root}"
    mounts = (
        f'for at in {folders}; do mount --bind $at $at && mount -o remount,bind,ro $at || exit 1; done; exec "$@"'
    )
    namespace = ("unshare", "--map-root-user", "--mount", "sh", "-c", mounts, "sh")
    if subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("this machine permits no namespace of mounts")
    check = sandbox.start("doctor", under=namespace)
    stdout, stderr = check.communicate(timeout=RUN_SECONDS)
    assert (check.returncode, stderr) == (3, "")
    problem = (
        "fail",
        "no folder for temporary files can be written",
        "free space in /tmp, or set TMPDIR to a folder that can be written",
    )
    assert findings(stdout)["temporary files"] == problem


def test_doctor_before_setup_suggests_setup_and_downloads_nothing(called_tune: Tune, sandbox: Sandbox) -> None:
    cache = sandbox.root / "cache"
    shown = called_tune("doctor", env={"TRITUNE_CACHE": cache})
    assert shown.code == 0
    for name in ("tritonserver", "Python backend", "perf_analyzer"):
        state, _, fix = findings(shown.stdout)[name]
        assert state == "warn"
        assert fix.startswith("tune setup")
    assert not cache.exists()


def test_doctor_warns_of_a_remote_server_whose_configuration_was_not_restored(
    called_tune: Tune, sandbox: Sandbox
) -> None:
    kept = sandbox.root / "cache" / "remote" / "triton_8001.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"address": "triton:8001"}')
    kept.with_name("damaged.json").touch()
    state, text, fix = findings(called_tune("doctor", env={"TRITUNE_CACHE": sandbox.root / "cache"}).stdout)[
        "other targets"
    ]
    assert (state, text.rpartition("; ")[2]) == (
        "warn",
        "remote: damaged.json, triton:8001 may serve a configuration that an earlier run tried",
    )
    assert fix == "tune --target remote with that --url restores the server first"


@pytest.mark.parametrize(
    ("name", "reason"), [("file/cache", "Not a directory"), ("x" * 300 + "/cache", "File name too long")]
)
def test_doctor_reports_an_unusable_cache(name: str, reason: str, called_tune: Tune, sandbox: Sandbox) -> None:
    (sandbox.working_folder / "file").write_text("")
    shown = called_tune("doctor", env={"TRITUNE_CACHE": sandbox.working_folder / name})
    assert shown.code == 3
    state, text, fix = findings(shown.stdout)["disk"]
    assert state == "fail"
    assert text.endswith(f"cannot be used: {reason}")
    assert "TRITUNE_CACHE" in fix
    assert shown.stdout.splitlines()[-1].startswith("1 to fix")


def test_doctor_reports_missing_files_of_an_unpacked_server(called_tune: Tune, sandbox: Sandbox) -> None:
    """Files are missing or incomplete, for example because of a fault of the disk."""
    real = runtime.ensure(print)
    cache = sandbox.root / "cache"
    spoilt = runtime.Runtime(cache / real.root.name)
    spoilt.tritonserver.parent.mkdir(parents=True)
    spoilt.tritonserver.touch()
    spoilt.pinned_perf_analyzer.parent.mkdir(parents=True)
    spoilt.pinned_perf_analyzer.symlink_to(real.pinned_perf_analyzer)
    spoilt.perf_analyzer_libraries.mkdir()
    if real.stub_packages:
        (cache / real.stub_packages.name).symlink_to(real.stub_packages)
    shown = called_tune("doctor", env={"TRITUNE_CACHE": cache})
    assert shown.code == 3
    checks = findings(shown.stdout)
    for name in ("tritonserver", "Python backend", "perf_analyzer"):
        assert checks[name][0] == "fail"
        assert checks[name][2]
    assert "libb64.so.0d" in checks["perf_analyzer"][1]
    assert "libcudart.so.12" in checks["perf_analyzer"][1]
    assert "tune setup" in checks["perf_analyzer"][2]
    assert shown.stdout.splitlines()[-1].startswith("3 to fix")
    spoilt.tritonserver.unlink()
    state, _, fix = findings(called_tune("doctor", env={"TRITUNE_CACHE": cache}).stdout)["tritonserver"]
    assert (state, fix) == ("warn", "tune setup (a run does it too)"), "without its program it is unpacked again"


def test_doctor_reports_a_missing_libpython_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert doctor.check_libpython().state == "ok"
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))  # the unpacked server may have the library
    missing = doctor.check_libpython([tmp_path])
    assert missing.state == "fail"
    assert f"libpython{version}.so.1.0" in missing.fix
    assert f"apt-get install libpython{version}" in missing.fix
    (tmp_path / f"libpython{version}.so.1.0").touch()
    assert doctor.check_libpython([tmp_path]).detail == f"in {tmp_path}"


@pytest.mark.parametrize(
    ("system", "machine", "libc", "python", "named"),
    [
        ("Darwin", "arm64", ("", ""), (3, 11), "Darwin on arm64"),
        ("Linux", "aarch64", ("glibc", "2.36"), (3, 11), "Linux on aarch64"),
        ("Windows", "AMD64", ("", ""), (3, 11), "Windows on AMD64"),
        ("Linux", "x86_64", ("glibc", "2.34"), (3, 11), "this is glibc 2.34"),
        ("Linux", "x86_64", ("", ""), (3, 11), "another C library"),
        ("Linux", "x86_64", ("glibc", "2.36"), (3, 14), "this is 3.14"),
    ],
)
def test_an_unsupported_system_is_told_the_requirements(
    system: str, machine: str, libc: tuple[str, str], python: tuple[int, int], named: str
) -> None:
    reason = runtime.unsupported(system, machine, libc, python)
    assert reason.startswith("the embedded server needs ")
    assert named in reason
    assert "\n" not in reason
    finding = doctor.check_server(reason)
    assert (finding.state, finding.detail) == ("fail", reason)
    assert finding.fix


@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)])
@pytest.mark.parametrize("libc", ["2.35", "2.36", "2.41"])
def test_supported_systems_are_accepted(python: tuple[int, int], libc: str) -> None:
    assert runtime.unsupported("Linux", "x86_64", ("glibc", libc), python) == ""


# -- setup ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with the pinned wheels, as users prepare it for a machine without a network."""
    folder = tmp_path_factory.mktemp("wheels")
    numpy = runtime.NUMPY_WHEELS.get(runtime.running_python())
    newer = [] if perf_analyzer_release.glibc_problem() else [perf_analyzer_release.NEWER_WHEEL]
    pinned = [wheel.requirement for wheel in (*runtime.WHEELS, *newer, *([numpy] if numpy else []))]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), *pinned], check=True)
    yield folder
    shutil.rmtree(folder)  # 90 MB


def offline(wheels: Path, cache: Path) -> dict[str, str | Path]:
    """Return an environment in which pip finds packages in one folder only."""
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels,
        "PIP_NO_CACHE_DIR": "1",
        "TRITUNE_CACHE": cache,
    }


def test_setup_installs_from_a_folder_of_wheels_and_only_once(tune: Tune, sandbox: Sandbox, wheels: Path) -> None:
    cache, nothing = sandbox.root / "cache", sandbox.root / "nothing"
    nothing.mkdir()
    cache.mkdir()
    compiled = cache_folder() / "compiled"
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "compiled").symlink_to(compiled)  # of all tests: to compile takes half a minute of CPU time
    done = tune("setup", env=offline(wheels, cache))
    assert (done.code, done.stderr) == (0, "")
    root = Path(done.stdout.splitlines()[-1].removeprefix("ready: "))
    assert root.parent == cache
    assert not list(cache.glob(".*"))  # no scratch folder stays
    again = tune("setup", env=offline(nothing, cache))
    assert (again.code, again.stdout, again.stderr) == (0, f"ready: {root}\n", "")  # nor is anything compiled again
    examined = findings(tune("doctor", env={"TRITUNE_CACHE": cache}).stdout)
    for name in ("tritonserver", "Python backend", "perf_analyzer"):
        assert examined[name][0] == "ok", examined[name]
    assert str(root) in examined["tritonserver"][1]
    shutil.rmtree(cache)  # 300 MB


def test_setup_without_wheels_names_the_missing_wheel(called_tune: Tune, sandbox: Sandbox) -> None:
    nothing, cache = sandbox.root / "nothing", sandbox.root / "cache"
    nothing.mkdir()
    done = called_tune("setup", env=offline(nothing, cache))
    assert done.code == 3
    (complaint,) = done.stderr_lines
    assert complaint.startswith("tune: pip could not fetch the server: ")
    assert runtime.WHEELS[0].requirement in complaint
    assert "find-links" in complaint
    assert list(cache.iterdir()) == []
    index = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    unreachable = called_tune("setup", env={**offline(nothing, cache), **index})
    assert "because the connection to the index failed (Connection refused); check" in unreachable.stderr


def test_setup_names_a_disk_without_space_for_the_download(
    small_disk: SmallDisk, sandbox: Sandbox, wheels: Path
) -> None:
    cache = small_disk.mount / "cache"
    process = sandbox.start("setup", env=offline(wheels, cache), under=small_disk.command_prefix)
    stderr = process.communicate(timeout=RUN_SECONDS)[1]
    assert (process.returncode, stderr.splitlines()[-1]) == (
        3,
        f"tune: cannot download into {cache}: No space left on device; "
        "free space there, or set TRITUNE_CACHE to another folder",
    )
    assert not list(small_disk.path.glob("cache/.setup-*"))


def test_setup_refuses_a_wheel_with_another_hash(called_tune: Tune, sandbox: Sandbox, wheels: Path) -> None:
    forged, cache = sandbox.root / "forged", sandbox.root / "cache"
    forged.mkdir()
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(forged / wheel.name, "w") as archive:
            archive.writestr("-".join(wheel.name.split("-")[:2]) + ".dist-info/METADATA", "Metadata-Version: 2.1\n")
    done = called_tune("setup", env=offline(forged, cache))
    assert done.code == 3
    (complaint,) = done.stderr_lines
    assert runtime.WHEELS[0].requirement in complaint
    assert "is not the pinned wheel" in complaint
    assert str(forged) in complaint
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("cache", ["file/cache", "/proc/tritune"])
def test_setup_reports_an_unwritable_cache(cache: str, called_tune: Tune, sandbox: Sandbox) -> None:
    (sandbox.working_folder / "file").write_text("")
    done = called_tune("setup", env={"TRITUNE_CACHE": cache})
    assert done.code == 3
    (complaint,) = done.stderr_lines
    assert complaint.startswith("tune: cannot unpack into ")
    assert "TRITUNE_CACHE" in complaint
