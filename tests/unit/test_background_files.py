"""The processes of pytest that run in the background take files of pure computation only, with low priority."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.background_files import LOW_PRIORITY, SERVER_PROCESSES

ROOT = Path(__file__).parents[2]
TEST = """\
import os, pathlib, time

def test_it(worker_id):
    time.sleep(0.3)
    pathlib.Path(__file__).with_suffix(".run").write_text(f"{worker_id} {os.nice(0)}")
"""


def test_a_process_in_the_background_starts_no_server(tmp_path: Path) -> None:
    files = [
        *("stack/test_a.py", "stack/test_b.py", "contract/test_c.py", "contract/test_d.py", "cli/test_e.py"),
        *("core/test_f.py", "core/test_g.py", "core/test_h.py"),
    ]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(TEST)
    options = ["-n", f"{SERVER_PROCESSES + 1}", "--dist", "loadfile", "--no-loadscope-reorder"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.background_files", *options, *files],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=True,
    )
    runs = {file: (tmp_path / file).with_suffix(".run").read_text().split() for file in files}
    background = {file for file, (worker, _) in runs.items() if worker == f"gw{SERVER_PROCESSES}"}
    assert "core/test_h.py" in background
    assert {file.partition("/")[0] for file in background} == {"core"}
    own = os.nice(0)
    for file, (_, niceness) in runs.items():
        assert int(niceness) == (min(own + LOW_PRIORITY, 19) if file in background else own)
