"""Every column of a trials table is held to its range by the one reader behind all commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from objectives.metrics import TIMINGS
from optimizer.core.errors import BadInputError
from optimizer.results.finished_run import read_run
from optimizer.store.recording import read_recording
from optimizer.store.trials_reader import COLUMNS, INTEGER_RANGES, NUMBER_RANGES
from optimizer.store.trials_table import TrialsTable, read_run_table
from tests.csv_tables import read_rows, write_rows

SAMPLE = Path("tests/data/dlrm/sample")
THREADS = "parameters.intra_op_thread_count.string_value"
READERS: dict[str, Callable[[Path], object]] = {
    "a run that is continued, verified or swept": lambda run: TrialsTable(
        run / "trials.csv", "dlrm", {THREADS: ("1", "2")}
    ).read(),
    "a finished run": read_run,
    "a warm start": lambda run: read_run_table(run / "trials.csv"),
    "a recorded table": lambda run: read_recording(run / "trials.csv"),
}
LARGE = "9" * 40
MILLISECONDS = (("-1", "nan", "inf", "1e8", "fast", "1_000"), "not a number from 0 to 10000000")
FIGURE = (("-5", "nan", "inf", LARGE, "fast"), "not a number from 0 to 1e+15")
SHARE = (("-0.1", "1.1", "nan"), "not a number from 0 to 1")
INT32 = (("-1", "1.5", "nan", LARGE, "2147483648", "?"), "not a whole number from 0 to 2147483647")
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "trial": INT32,
    "max_batch_size": INT32,
    "dynamic_batching": (("yes", "2"), "neither true nor false"),
    "max_queue_delay_us": INT32,
    "preferred_batch_sizes": (
        ("0", "-8", "half", "8 9999999999"),
        "not a list of whole numbers from 1 to",
    ),
    "instance_count": (("0", "-1", "999999999", "1.5"), "not a whole number from 1 to 1024"),
    "request_batch_size": (("0", "-4", "nan", "0.5", LARGE), "not a number from 1 to 2147483647"),
    "concurrency": (("0", "-7", "65537", "nan"), "not a whole number from 1 to 65536"),
    "request_rate": (("0", "-1", "nan", LARGE), "not a number from 1e-06 to 1e+15"),
    "batch_stats": (("8:3", "8:1:1000000000000000"), "not a list of size:executions:compute_ns"),
    "step_stats": (("first:1:9:9:0:0", "first:x:9:9:0:0:0"), "not a list of model:instances:requests:executions"),
    "by_priority": (
        ("1:2", "1:2:3:4:5:6:7:8"),
        "not a list of priority:served:rejected:timed_out:failed:infer_per_sec:sketch",
    ),
    "by_model": (
        ("a:1", "a:1:2:3:4:5:6:7::", ":1:2:3:4:5:6:7:8:9:0:1:::", "a:1:2:3:4:5:6:7:8:9:0:-1:::"),
        "not a list of model:requests:infer_per_sec:avg:p50:p90:p95:p99:queue:input:infer:output:over:sketch:batches",
    ),
    **dict.fromkeys(("requests", "rejected_requests", "timed_out_requests", "failed_requests"), INT32),
    **dict.fromkeys(
        (timing.over_field for timing in TIMINGS),
        (("-1", "20", "20:x", "nan:3", "20:9999999999"), "not a list of bounds in ms and counts"),
    ),
    **dict.fromkeys(
        (timing.sketch_field for timing in TIMINGS), (("x", "AAAA", "8:3"), "not a latency sketch that tune wrote")
    ),
    "response_times_ms": (("-1", "x", "nan", "1 2e7"), "not a list of at most 256 times from 0 to"),
    **dict.fromkeys(
        ("stable", "overloaded", "disturbed", "server_crashed", "lacks_gpu_memory"),
        (("maybe",), "neither true nor false"),
    ),
    **dict.fromkeys(
        ("confirmation", "confirmation_repeats"), (("0", "-1", "x"), "not a whole number from 1 to 2147483647")
    ),
    "cpu_count": (("0", "-2", "1.5", "8193", "many"), "not a whole number from 1 to 8192"),
    "deploy_seconds": FIGURE,
    "load_generator": (("wrk",), "neither empty nor perf_analyzer"),
    "forecast_latency": (("p95", "throughput", "latency-p100", "latency-p99.90"), "not a latency metric such as"),
    "status": (("lost",), "neither ok nor failed"),
    "confirmation_latency_slope": (("-5", "10.1", "nan"), "not a number from 0 to 10"),
    "score": (("nan", "inf", LARGE), "not a number from -1e+15 to 1e+15"),
    **dict.fromkeys(
        (
            "gpu_utilization",
            "other_cpu_share",
            "kv_cache_utilization",
            "late_request_share",
            "output_deviation",
            "confirmation_error",
        ),
        SHARE,
    ),
}
FREE_TEXTS = {"model", "gpu_throttling", "node", "reason", "fingerprint"}


def wrong_values(column: str) -> tuple[tuple[str, ...], str]:
    is_time = column.endswith("_ms") or column.startswith("forecast_latency_ms")
    return WRONG.get(column) or (MILLISECONDS if is_time else FIGURE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


@pytest.mark.parametrize("reader", READERS)
def test_a_value_outside_the_range_of_its_column_is_reported_on_one_line(reader: str, run: Path) -> None:
    """The readers share the check of the columns, so one of them reads all faults and the others one."""
    path = run / "trials.csv"
    rows = read_rows(path)
    columns = [column for column in COLUMNS if column not in FREE_TEXTS]
    for column in columns if reader == next(iter(READERS)) else ["instance_count"]:
        values, rule = wrong_values(column)
        for value in values:
            write_rows(path, [rows[0], rows[1] | {column: value}, rows[2]])
            with pytest.raises(BadInputError) as caught:
                READERS[reader](run)
            assert str(caught.value).startswith(f"{path}:3: {column}: '{value}' is {rule}"), (column, value)
            assert "\n" not in str(caught.value)


def test_every_column_has_a_range_or_is_a_text() -> None:
    assert set(COLUMNS) == {*INTEGER_RANGES, *NUMBER_RANGES, *WRONG, *FREE_TEXTS}


FORECAST_CELLS = {
    "forecast_throughput_infer_per_sec": "100",
    "forecast_throughput_infer_per_sec_low": "90",
    "forecast_throughput_infer_per_sec_high": "120",
    "forecast_latency_ms": "8",
    "forecast_latency_ms_low": "7",
    "forecast_latency_ms_high": "10",
    "forecast_latency": "latency-p95",
}


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        *(
            (column, "", f"{column}: is empty, and other columns of the forecast are not")
            for column in FORECAST_CELLS
        ),
        ("forecast_throughput_infer_per_sec_low", "101", "throughput_infer_per_sec: 100 is outside of its own"),
        ("forecast_throughput_infer_per_sec_high", "99", "throughput_infer_per_sec: 100 is outside of its own"),
        ("forecast_latency_ms", "10.5", "forecast_latency_ms: 10.5 is outside of its own interval"),
    ],
)
def test_a_forecast_is_complete_and_within_its_own_interval(column: str, value: str, fault: str, run: Path) -> None:
    path = run / "trials.csv"
    rows = read_rows(path)
    write_rows(path, [rows[0] | FORECAST_CELLS, rows[1] | FORECAST_CELLS | {column: value}])
    with pytest.raises(BadInputError) as caught:
        read_run(run)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert fault in str(caught.value)
