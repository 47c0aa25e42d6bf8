"""``tune --help``, ``models``, ``doctor`` and ``setup``."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimizer import doctor, runtime
from optimizer.cli import COMMANDS
from optimizer.options import SLA_METRICS
from tests.command_fixtures import TUNE, Playground, Tune

CHECKS = (
    "tritonserver",
    "Python backend",
    "libpython",
    "perf_analyzer",
    "ONNX Runtime",
    "GPU",
    "other targets",
    "CPU",
    "ports",
    "/dev/shm",
    "disk",
)


# -- help and models --------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_help_takes_less_than_half_a_second(record_property: Callable[[str, object], None]) -> None:
    """In the median; on a busy machine more runs are made, the bound stays."""
    seconds: list[float] = []
    while len(seconds) < 9 or (statistics.median(seconds) >= 0.5 and len(seconds) < 60):
        started = time.perf_counter()
        subprocess.run([TUNE, "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    record_property("median_seconds", round(statistics.median(seconds), 3))
    assert statistics.median(seconds) < 0.5


def test_help_names_every_command_and_exit_code(tune: Tune) -> None:
    shown = tune("--help")
    assert (shown.code, shown.stderr) == (0, "")
    for word in (*COMMANDS, *(f"--sla-{name}" for name in SLA_METRICS)):
        assert word in shown.stdout
    assert "0 found, 1 none meets the SLA, 2 bad input, 3 environment, 130 interrupted" in shown.stdout
    for command in COMMANDS:
        assert tune(command, "--help").stdout.startswith("usage: tune")


def test_models_lists_what_comes_with_tune_from_any_folder(tune: Tune) -> None:
    listed = tune("models")
    assert (listed.code, listed.stderr) == (0, "")
    lines = listed.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert Path(lines[-1].strip(), "dlrm.yaml").is_file()
    (at,) = (index for index, line in enumerate(lines) if line.startswith("dlrm "))
    assert lines[at + 1].startswith("p95 <= 20 ms ")
    assert lines[at + 1].rstrip().split("  ")[-1].strip() == "input__0 FP32 [13] · input__1 INT64 [26]"
    assert lines[at + 2].strip() == "NVIDIA DeepLearningExamples, PyTorch/Recommendation/DLRM"


def test_models_lists_those_in_configs_here_and_says_what_is_faulty(tune: Tune, playground: Playground) -> None:
    configs = playground.here / "configs"
    configs.mkdir()
    (configs / "mine.yaml").write_text("description: my own\nmodel: {builder: mlp}\nsla: {p99: 5ms}\n")
    (configs / "broken.yaml").write_text("model: {builder: mlp}\nslo: {p99: 5ms}\n")
    listed = tune("models")
    assert (listed.code, listed.stderr) == (0, "")
    lines = listed.stdout.splitlines()
    at = {line.split(" ")[0]: index for index, line in enumerate(lines)}
    assert lines[at["mine"]].split() == ["mine", "my", "own"]
    assert lines[at["mine"] + 1].startswith("p99 <= 5 ms ")
    assert "configs/broken.yaml:2: slo: " in lines[at["broken"] + 1]
    assert "dlrm" in at


def test_models_as_json_names_inputs_bounds_and_faults(tune: Tune, playground: Playground) -> None:
    configs = playground.here / "configs"
    (configs / "models" / "stored").mkdir(parents=True)
    given = 'input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }'
    (configs / "models" / "stored" / "config.pbtxt").write_text(given)
    (configs / "stored.yaml").write_text("model: {repository: models, name: stored}\n")
    (configs / "broken.yaml").write_text("model: {builder: mlp}\nslo: {p99: 5ms}\n")
    listed = tune("models", "--json")
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
    """What ``tune doctor`` printed, by check: state, what was found, the mend."""
    found: dict[str, tuple[str, str, str]] = {}
    name = ""
    for line in output.splitlines()[:-1]:
        if line.startswith(" "):
            state, text, _ = found[name]
            found[name] = state, text, line.strip().removeprefix("-> ")
        else:
            name = line[6:21].strip()
            found[name] = line[:4].strip(), line[22:], ""
    return found


def test_doctor_has_a_line_for_each_check(tune: Tune) -> None:
    runtime.ensure(print)
    shown = tune("doctor")
    assert (shown.code, shown.stderr) == (0, "")
    found = findings(shown.stdout)
    assert tuple(found) == CHECKS
    for name, (state, text, mend) in found.items():
        assert state in ("ok", "warn"), name
        assert text
        assert (mend == "") is (state == "ok"), name
    assert found["tritonserver"][1].startswith(f"{runtime.TRITON_VERSION} in ")
    assert shown.stdout.splitlines()[-1] == "ready: tune --sla-p95 20ms dlrm"


def test_doctor_before_setup_names_it_and_fetches_nothing(tune: Tune, playground: Playground) -> None:
    cache = playground.root / "cache"
    shown = tune("doctor", env={"TRITUNE_CACHE": cache})
    assert shown.code == 0
    for name in ("tritonserver", "Python backend", "perf_analyzer"):
        state, _, mend = findings(shown.stdout)[name]
        assert state == "warn"
        assert mend.startswith("tune setup")
    assert not cache.exists()


def test_doctor_tells_of_a_remote_server_that_a_killed_run_left_changed(tune: Tune, playground: Playground) -> None:
    kept = playground.root / "cache" / "remote" / "triton_8001.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    state, text, mend = findings(tune("doctor", env={"TRITUNE_CACHE": playground.root / "cache"}).stdout)[
        "other targets"
    ]
    assert (state, text.rpartition("; ")[2]) == (
        "warn",
        "remote: triton_8001 may serve what a run that was killed tried",
    )
    assert mend == "the next tune --target remote with that --url puts it back first"


def test_doctor_finds_a_cache_that_cannot_be_written(tune: Tune, playground: Playground) -> None:
    (playground.here / "file").write_text("")
    shown = tune("doctor", env={"TRITUNE_CACHE": playground.here / "file" / "cache"})
    assert shown.code == 3
    state, text, mend = findings(shown.stdout)["disk"]
    assert state == "fail"
    assert str(playground.here / "file") in text
    assert "TRITUNE_CACHE" in mend
    assert shown.stdout.splitlines()[-1].startswith("1 to mend")


def test_doctor_finds_what_is_missing_of_an_unpacked_server(tune: Tune, playground: Playground) -> None:
    """As where a disk ran full, or a cleaner came by."""
    real = runtime.ensure(print)
    cache = playground.root / "cache"
    spoilt = runtime.Runtime(cache / real.root.name)
    spoilt.perf_analyzer.parent.mkdir(parents=True)
    spoilt.perf_analyzer.symlink_to(real.perf_analyzer)
    spoilt.perf_analyzer_libraries.mkdir()
    if real.stub_packages:
        (cache / real.stub_packages.name).symlink_to(real.stub_packages)
    shown = tune("doctor", env={"TRITUNE_CACHE": cache})
    assert shown.code == 3
    found = findings(shown.stdout)
    for name in ("tritonserver", "Python backend", "perf_analyzer"):
        assert found[name][0] == "fail"
        assert found[name][2]
    assert "libb64.so.0d" in found["perf_analyzer"][1]
    assert "libcudart.so.12" in found["perf_analyzer"][1]
    assert "tune setup" in found["perf_analyzer"][2]
    assert shown.stdout.splitlines()[-1].startswith("3 to mend")


def test_a_missing_libpython_is_named_with_its_mend(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert doctor.check_libpython().state == "ok"
    missing = doctor.check_libpython([tmp_path])
    assert missing.state == "fail"
    assert f"libpython{version}.so.1.0" in missing.mend
    assert f"apt-get install libpython{version}" in missing.mend
    (tmp_path / f"libpython{version}.so.1.0").touch()
    assert doctor.check_libpython([tmp_path]).found == f"in {tmp_path}"


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
def test_a_system_that_lacks_the_server_is_told_what_it_needs(
    system: str, machine: str, libc: tuple[str, str], python: tuple[int, int], named: str
) -> None:
    reason = runtime.unsupported(system, machine, libc, python)
    assert reason.startswith("the embedded server needs ")
    assert named in reason
    assert "\n" not in reason
    finding = doctor.check_server(reason)
    assert (finding.state, finding.found) == ("fail", reason)
    assert finding.mend


@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)])
@pytest.mark.parametrize("libc", ["2.35", "2.36", "2.41"])
def test_the_systems_that_have_it(python: tuple[int, int], libc: str) -> None:
    assert runtime.unsupported("Linux", "x86_64", ("glibc", libc), python) == ""


# -- setup ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the pinned wheels, fetched as a user without a network at hand would prepare it."""
    folder = tmp_path_factory.mktemp("wheels")
    numpy = runtime.NUMPY_WHEELS.get(runtime.running_python())
    pinned = [wheel.requirement for wheel in (*runtime.WHEELS, *([numpy] if numpy else []))]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), *pinned], check=True)
    yield folder
    shutil.rmtree(folder)  # 90 MB


def offline(wheels: Path, cache: Path) -> dict[str, str | Path]:
    """An environment in which pip finds packages in one folder alone."""
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels,
        "PIP_NO_CACHE_DIR": "1",
        "TRITUNE_CACHE": cache,
    }


def test_setup_from_a_folder_of_wheels_and_not_twice(tune: Tune, playground: Playground, wheels: Path) -> None:
    cache, nothing = playground.root / "cache", playground.root / "nothing"
    nothing.mkdir()
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


def test_setup_without_the_wheels(tune: Tune, playground: Playground) -> None:
    nothing, cache = playground.root / "nothing", playground.root / "cache"
    nothing.mkdir()
    done = tune("setup", env=offline(nothing, cache))
    assert done.code == 3
    (complaint,) = done.complaints
    assert complaint.startswith("tune: pip could not fetch the server: ")
    assert runtime.WHEELS[0].requirement in complaint
    assert "find-links" in complaint
    assert list(cache.iterdir()) == []


def test_setup_refuses_a_wheel_with_another_hash(tune: Tune, playground: Playground, wheels: Path) -> None:
    forged, cache = playground.root / "forged", playground.root / "cache"
    forged.mkdir()
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(forged / wheel.name, "w") as archive:
            archive.writestr("-".join(wheel.name.split("-")[:2]) + ".dist-info/METADATA", "Metadata-Version: 2.1\n")
    done = tune("setup", env=offline(forged, cache))
    assert done.code == 3
    (complaint,) = done.complaints
    assert runtime.WHEELS[0].requirement in complaint
    assert "is not the pinned one" in complaint
    assert str(forged) in complaint
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("cache", ["file/cache", "/proc/tritune"])
def test_setup_into_a_cache_that_cannot_be_written(cache: str, tune: Tune, playground: Playground) -> None:
    (playground.here / "file").write_text("")
    done = tune("setup", env={"TRITUNE_CACHE": cache})
    assert done.code == 3
    (complaint,) = done.complaints
    assert complaint.startswith("tune: cannot unpack the server into ")
    assert "TRITUNE_CACHE" in complaint
