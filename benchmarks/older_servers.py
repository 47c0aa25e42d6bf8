"""Check whether ``--target local`` works with older tritonservers.

    python benchmarks/older_servers.py > benchmarks/older_servers.md

Earlier wheels of nvidia-pytriton on PyPI contain older servers with their Python backends. Each is fetched by hash
and unpacked into tune's cache. Then the contract suite of targets runs on it (as ``local``, and already running as
``remote``), and a short run of ``tune``, both with a Python model that sleeps for 5 ms. The first server is older
than tune supports, which tune must say in one line. The second has a stub for Python 3.8 only: it needs a
``python3.8`` on PATH and uses its standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lib.output import command, measured_on, print_head, row
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.core.files import cache_folder
from optimizer.deploy import runtime
from optimizer.deploy.local_target import find_installation
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.wheels import Wheel, install_missing
from tests.repositories import write_sleeper
from tests.user_installation import write_installation

ROOT = Path(__file__).parents[1]
SERVER = "TRITUNE_TEST_SERVER"  # read by the contract suite
WHEELS = {
    "0.1.5": "b711c175e9ccfee7aad52d57f81c74e3707194d4321da8b45d1d64a0a7cc7504",
    "0.2.0": "25702845ab2df3d43458c575bc97709924ff0877ccf239e0fcb07975cfbe11de",
    "0.3.1": "cf885f5581d3585ca2eb8c372e9d914e1ba1f6266fe8a7c057083d3e4a874a71",
    "0.4.2": "8f79e8bda28961a49d5c64474c17664e10b1bb08018b7ee7bcbd81bcff86e266",
    "0.5.5": "986ee75b8fb67bba9e3b0058bd5ff3981b17be3b88e178b0b60971d89ba42a63",
    "0.6.0": "d102ce46237bbdf094fbcc7a0f02db3bc9dd4a9f683cc2fd746d6c9b9858bdf5",
}
FOR_PYTHON_38 = "0.2.0"
NUMPY_FOR_IT = "numpy==1.24.4"
PASSED_OPTIONS = ("http-restricted-api", "grpc-address", "disable-auto-complete-config", "backend-config")
SUITES = "TestLocalTarget or TestRemoteTargetOnAnotherVersion"
SECONDS = 120.0
RUN = ("--sla-p95", "50ms", "--max-trials", "4", "--budget", "30s", "--measurement-interval", "100ms", "--json")


@dataclass(frozen=True)
class Tried:
    wheel: str
    version: str
    lacks: str
    contract: str
    run: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("# Older servers under `--target local`: latest measurement\n")
    print(f"{command()}, Python {runtime.running_python()}\n")
    columns = ("nvidia-pytriton", "Triton", "missing server options", "contract suite", "a run with a 5 ms model")
    print_head(*columns, text=len(columns))
    for wheel in WHEELS:
        tried = _tried(wheel)
        print(row(tried.wheel, tried.version or "–", tried.lacks, tried.contract, tried.run), flush=True)
    print(f"\n{measured_on()}")


def _tried(wheel: str) -> Tried:
    with tempfile.TemporaryDirectory(prefix="older-") as scratch:
        folder = Path(scratch)
        write_sleeper(folder / "models", milliseconds=5)
        program = write_installation(folder / "triton", _unpacked(wheel))
        if wheel == FOR_PYTHON_38:
            _give_python_38(program, folder / "packages")
        known = find_installation(str(program)).options or frozenset()
        lacks = ", ".join(f"`--{name}`" for name in PASSED_OPTIONS if name not in known) or "nothing"
        version, run = _run(program, folder)
        return Tried(wheel, version, lacks, _contract(program) if version else "not run", run)


def _give_python_38(program: Path, packages: Path) -> None:
    """Add the modules of Python 3.8 and numpy: the stub brings only the library of Python 3.8."""
    command = ["python3.8", "-c", "import sys; print(sys.base_prefix)"]
    home = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    fetched = ["--only-binary=:all:", "--python-version=3.8", f"--target={packages}", "--no-deps", NUMPY_FOR_IT]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *fetched], check=True, capture_output=True)
    shell, *lines = (line for line in program.read_text().splitlines() if not line.startswith("cd "))
    program.write_text("\n".join([shell, f"export PYTHONHOME={home} PYTHONPATH={packages}", *lines, ""]))


def _unpacked(version: str) -> Runtime:
    root = cache_folder() / f"older-{version}"
    members = ("pytriton/tritonserver/", "nvidia_pytriton.libs/")
    wheel = Wheel(f"nvidia-pytriton=={version}", WHEELS[version], members)
    runtime, content = Runtime(root), wheel.requirement
    texts = {"content": content, "message": f"fetching {content}"}
    install_missing((wheel,), root, _make_executable, print, needed=(runtime.tritonserver,), **texts)
    return runtime


def _make_executable(root: Path) -> None:
    for path in (Runtime(root).tritonserver, *root.rglob("triton_python_backend_stub")):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _contract(program: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SUITES]
    done = subprocess.run(
        [*command, "tests/contract/test_targets.py"],
        cwd=ROOT,
        env={**os.environ, SERVER: str(program)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    summary = re.search(r"^(?:\d+ failed, )?\d+ passed|^\d+ failed", done.stdout, re.MULTILINE)
    return summary[0] if summary else f"exit code {done.returncode}"


def _run(program: Path, folder: Path) -> tuple[str, str]:
    """Return the version in run.json (empty if the run failed early) and the outcome in words."""
    words = [*RUN, "--target", "local", "--tritonserver", str(program)]
    done = subprocess.run(
        [Path(sys.executable).with_name("tune"), *words, "--model-repository", folder / "models", "sleeper"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode not in EXIT_CODES.values():
        message = next((line for line in done.stderr.splitlines() if line.startswith("tune: ")), "tune: nothing")
        return "", f"exit code {done.returncode}: {message.removeprefix('tune: ').replace(str(folder), '…')}"
    document = json.loads(done.stdout)
    (info,) = (folder / "results").glob("*/*/run.json")
    version = json.loads(info.read_text())["versions"]["tritonserver"]
    best = document["recommended"]
    if best is None:
        return version, f"{document['trials']} configurations, none within the bound"
    figures = f"{best['throughput_infer_per_sec']:,.0f} infer/s, p95 {best['latency_p95_ms']:.1f} ms"
    return version, f"{document['trials']} configurations; best {figures}"


if __name__ == "__main__":
    main()
