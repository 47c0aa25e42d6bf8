"""Files that stand in for tritonserver and perf_analyzer: executable ones, and the folders of an unpacked server."""

from __future__ import annotations

from pathlib import Path

from optimizer.deploy import runtime


def write_program(path: Path, text: str) -> Path:
    """Write the script ``text``, whose first line names its interpreter, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def unpack_empty_runtime(cache: Path) -> runtime.Runtime:
    """Create an unpacked server in the cache folder ``cache``, with empty programs and no other files."""
    unpacked = runtime.Runtime(cache / f"runtime-{runtime.TRITON_VERSION}-{runtime.WHEELS[0].sha256[:12]}")
    for program in unpacked.programs:
        write_program(program, "#!/bin/sh\n")
    if unpacked.stub_packages is not None:
        write_program(unpacked.stub_packages / "numpy/__init__.py", "")
    return unpacked
