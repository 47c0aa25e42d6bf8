"""trials.csv: rows are read back as they were written, and a crash loses only an incomplete line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import model_stats
from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import Forecast, Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.trial import CROSS_CHECK_GENERATOR, ConfirmationWindow, FreshServer, LoadPoint, Trial
from optimizer.store.trials_table import TrialsTable, read_run_table
from tests.conftest import measurement
from tests.csv_tables import read_rows, write_rows

CHOICES = {
    "parameters.intra_op_thread_count.string_value": ("1", "2"),
    "optimization.graph.level": (0, 1, -1),
}
CANDIDATE = Candidate(
    max_batch_size=64,
    dynamic_batching=True,
    max_queue_delay_us=500,
    preferred_batch_sizes=(16, 32),
    instance_count=2,
    fields=(("optimization.graph.level", -1), ("parameters.intra_op_thread_count.string_value", "2")),
)

FORECAST = Forecast(110.0, 95.5, 130.25, 5.5, 4.0, 7.125, "latency-p95")


def table(path: Path) -> TrialsTable:
    return TrialsTable(path, "m", CHOICES)


def test_measurements_and_failures_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = table(tmp_path / "trials.csv")
    points = (
        (
            LoadPoint(4, 8),
            replace(measurement(1234.5, 1 / 3), gpu_sm_clock_mhz=1410.0, gpu_throttling="a, b", node="host-1"),
        ),
        (LoadPoint(4, 9), Measurement(reason="server died")),
    )
    for load, m in points:
        written.append(Trial(0, CANDIDATE, deploy_seconds=1.25), load, m)
    written.append_failure(Trial(1, Candidate(8), status="failed", reason='a, "b"\nc', deploy_seconds=None))
    beyond = Trial(2, Candidate(16), status="failed", reason="refused", lacks_gpu_memory=True)
    written.append_failure(beyond)
    assert table(tmp_path / "trials.csv").read() == [
        Trial(0, CANDIDATE, points, deploy_seconds=1.25),
        Trial(1, Candidate(8), status="failed", reason='a, "b" c'),
        beyond,
    ]


@given(
    values=st.lists(st.one_of(st.none(), st.floats(0, 1e7, allow_nan=False)), min_size=5, max_size=5),
    stable=st.booleans(),
)
def test_every_float_survives(
    tmp_path_factory: pytest.TempPathFactory, values: list[float | None], stable: bool
) -> None:
    path = tmp_path_factory.mktemp("t") / "trials.csv"
    throughput, p50, p95, queue, memory = values
    m = Measurement(
        throughput, latency_p50_ms=p50, latency_p95_ms=p95, queue_ms=queue, server_memory_bytes=memory, stable=stable
    )
    table(path).append(Trial(3, Candidate(8)), LoadPoint(1, 1), m)
    assert table(path).read() == [Trial(3, Candidate(8), ((LoadPoint(1, 1), m),))]


def test_a_trial_that_was_deployed_again_has_the_time_of_its_last_deployment(tmp_path: Path) -> None:
    written, lost = table(tmp_path / "trials.csv"), Measurement(reason="server died")
    for seconds in (1.25, 2.5):
        written.append(Trial(0, CANDIDATE, deploy_seconds=seconds), LoadPoint(4, 8), lost)
    (read,) = table(tmp_path / "trials.csv").read()
    assert read.deploy_seconds == 2.5
    written.append_failure(Trial(0, CANDIDATE, status="failed", reason="died", deploy_seconds=3.75))
    (read,) = table(tmp_path / "trials.csv").read()
    assert (read.status, read.deploy_seconds) == ("failed", 3.75)


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    for concurrency in (1, 2):
        table(path).append(Trial(0, CANDIDATE), LoadPoint(1, concurrency), measurement(1, 1))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) - len(lines[-1]) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        (trial,) = table(path).read()
        assert [load.concurrency for load, _ in trial.measurements] == [1]
        assert path.read_bytes() == b"".join(lines[:-1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b\n1,2\n", "its columns are not those"),
        ("HEADER,old\n", r"its columns are not those of this run's parameters \(unknown old\): continue it with"),
        ("HEADER\nm,0,64\n", ":2: has 3 cells where the header has"),
    ],
)
def test_an_unsuitable_table_is_refused_on_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trials.csv"
    path.write_text(content.replace("HEADER", ",".join(table(path).columns)))
    with pytest.raises(BadInputError, match=says) as caught:
        table(path).read()
    assert "\n" not in str(caught.value)


def test_a_request_that_no_batch_can_hold_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trials.csv"
    table(file).append(Trial(0, CANDIDATE), LoadPoint(65, 8), measurement(1.0, 1.0))
    with pytest.raises(BadInputError, match=r"trials\.csv:2: request_batch_size: 65 is above the max_batch_size 64"):
        table(file).read()


def test_a_disk_that_refuses_is_an_environment_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot write"):
        table(tmp_path / "no" / "trials.csv").append(Trial(0, CANDIDATE), LoadPoint(1, 1), measurement(1, 1))


SAMPLE = Path(__file__).parents[3] / "results" / "dlrm" / "sample" / "trials.csv"
THREADS = "parameters.intra_op_thread_count.string_value"


@pytest.mark.parametrize("lacking", [{"batch_stats"}, {"queue_ms", "server_memory_bytes"}])
def test_a_table_without_some_measurements_is_continued_in_its_own_columns(tmp_path: Path, lacking: set[str]) -> None:
    path = tmp_path / "trials.csv"
    rows = read_rows(SAMPLE)
    kept = [name for name in rows[0] if name not in lacking]
    write_rows(path, ({name: row[name] for name in kept} for row in rows))
    before = path.read_text()
    trials = TrialsTable(path, "dlrm", {THREADS: ("1", "2")})
    recorded = trials.read()
    measured = sum(len(t.measurements) + len(t.confirmations) + len(t.cross_checks) for t in recorded)
    assert measured == sum(bool(row["concurrency"]) for row in rows)
    result = Measurement(
        100.0, latency_p95_ms=5.0, batch_stats="4:10:2000", server_memory_bytes=1e6, stable=True, requests=9
    )
    added = Trial(len(recorded), Candidate(64, True, fields=((THREADS, "2"),)))
    trials.append(added, LoadPoint(4, 8), result)
    assert path.read_text().startswith(before)
    assert path.read_text().count(",", len(before)) == len(kept) - 1
    again = TrialsTable(path, "dlrm", {THREADS: ("1", "2")}).read()
    assert again[:-1] == recorded
    assert again[-1] == replace(added, measurements=((LoadPoint(4, 8), without(result, lacking)),))


def without(measurement: Measurement, unknown: set[str]) -> Measurement:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(Measurement) if field.name in unknown}
    return replace(measurement, **defaults)


@pytest.mark.parametrize(
    "column",
    ["concurrency", "confirmation", "load_generator", "throughput_infer_per_sec", "optimization.graph.level"],
)
def test_a_column_that_a_trial_cannot_do_without_must_be_there(column: str, tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    path.write_text(",".join(name for name in table(path).columns if name != column) + "\n")
    with pytest.raises(BadInputError, match=rf"its columns are not those of this run's parameters \(no {column}\): "):
        table(path).read()


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"throughput_infer_per_sec": ""}, "throughput_infer_per_sec: is empty, and the status is not failed"),
        ({"trial": "0"}, "trial: 0 has another configuration on line 2; restore the number"),
        ({"by_model": ""}, "by_model: lacks values of second, which got load at the same time; restore the row"),
        ({"by_model": None}, "by_model: lacks values of second, which got load at the same time; restore the row"),
        ({"by_model": "m:1"}, "by_model: 'm:1' is not a list of model:requests:"),
    ],
)
def test_an_edited_row_is_refused_with_its_line(tmp_path: Path, cells: dict[str, str | None], said: str) -> None:
    path = tmp_path / "trials.csv"
    written = TrialsTable(path, "m", {}, concurrent_models=["second"])
    values = {name: Measurement(50.0, requests=5) for name in ("m", "second")}
    measured = replace(measurement(100.0, 5.0), by_model=model_stats.to_text(values))
    for trial, batch_size in enumerate((8, 16)):
        written.append(Trial(trial, Candidate(batch_size)), LoadPoint(1, 4), measured, FreshServer(trial + 1))
    assert len(written.read()) == 2
    first, second = read_rows(path)
    removed = [name for name, text in cells.items() if text is None]
    rows = ({name: text for name, text in row.items() if name not in removed} for row in (first, second | cells))
    write_rows(path, rows)
    line = 2 if removed else 3
    with pytest.raises(BadInputError) as caught:
        TrialsTable(path, "m", {}, concurrent_models=["second"]).read()
    assert str(caught.value).startswith(f"{path}:{line}: {said}")
    assert str(caught.value).isprintable()


def test_counts_and_sketches_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    latencies_ms = np.linspace(1.0, 40.0, 500)
    window = replace(
        measurement(1, 1),
        requests_over_ms=count_over(latencies_ms, [20.0, 10.5]),
        latency_sketch=sketch_latencies(latencies_ms),
    )
    table(path).append(Trial(0, CANDIDATE), LoadPoint(1, 1), window, FreshServer(1))
    (trial,) = table(path).read()
    assert trial.confirmations[0].measurement == window


def test_forecasts_are_read_back(tmp_path: Path) -> None:
    path, trial = tmp_path / "trials.csv", Trial(0, CANDIDATE)
    first, second = measurement(100, 5), replace(measurement(120, 6), forecast=FORECAST)
    for measured in (first, second):
        table(path).append(trial, LoadPoint(1, 1), measured)
    (read,) = table(path).read()
    assert [measured for _, measured in read.measurements] == [first, second]


def test_a_table_without_forecasts_is_continued_in_its_own_columns(tmp_path: Path) -> None:
    path, load = tmp_path / "trials.csv", LoadPoint(1, 1)
    older = table(path)
    older.columns = tuple(name for name in older.columns if not name.startswith("forecast_"))
    older.append(Trial(0, CANDIDATE), load, measurement(100, 5))
    continued = table(path)
    (read,) = continued.read()
    continued.append(read, load, replace(measurement(120, 6), forecast=FORECAST))
    assert continued.read() == [replace(read, measurements=(*read.measurements, (load, measurement(120, 6))))]


def test_cross_checks_are_kept_apart_from_windows_and_searched_loads(tmp_path: Path) -> None:
    path, load = tmp_path / "trials.csv", LoadPoint(1, 1)
    written, trial = table(path), Trial(0, CANDIDATE)
    written.append(trial, load, measurement(1, 1))
    written.append(trial, load, measurement(2, 2), FreshServer(1, 0.01))
    written.append(trial, load, measurement(3, 3), FreshServer(1, 0.01, CROSS_CHECK_GENERATOR))
    (read,) = table(path).read()
    assert read.measurements == ((load, measurement(1, 1)),)
    assert read.confirmations == (ConfirmationWindow(1, load, measurement(2, 2), 0.01),)
    assert read.cross_checks == (ConfirmationWindow(1, load, measurement(3, 3), 0.01),)


def test_a_repeated_server_has_a_number_of_its_own(tmp_path: Path) -> None:
    """A server that is lost twice in one session stays lost; a later session repeats all lost ones at the end."""
    path, load, lost = tmp_path / "trials.csv", LoadPoint(1, 1), Measurement(reason="server died")
    written, first, second = table(path), Trial(0, CANDIDATE), Trial(1, CANDIDATE)
    written.append(first, load, measurement(1, 1), FreshServer(1, 0.01))
    for number in (2, 3, 3):
        written.append(first, load, lost, FreshServer(number, 0.01))
    written.append(second, load, measurement(2, 2), FreshServer(4))
    assert [window.server for window in table(path).read()[0].confirmations] == [1, 2, 3]
    for measured in (lost, measurement(3, 3), measurement(4, 4)):
        written.append(first, load, measured, FreshServer(5, 0.01, repeats=2))
    written.append(first, load, measurement(5, 5), FreshServer(6, 0.01))
    read, other = table(path).read()
    assert [window.server for window in read.confirmations] == [1, 5, 5, 6]
    assert [window.server for window in other.confirmations] == [4]


@pytest.mark.parametrize("number", ["", "2", "1"])
def test_a_server_repeats_an_earlier_one(number: str, tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    table(path).append(Trial(0, CANDIDATE), LoadPoint(1, 1), measurement(1, 1), FreshServer(7777, repeats=2))
    path.write_text(path.read_text().replace(",7777,", f",{number},"))
    with pytest.raises(BadInputError, match=":2: confirmation_repeats: 2 is not below confirmation"):
        table(path).read()


def test_a_cross_check_names_its_server(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    fresh = FreshServer(7777, load_generator=CROSS_CHECK_GENERATOR)
    table(path).append(Trial(0, CANDIDATE), LoadPoint(1, 1), measurement(1, 1), fresh)
    path.write_text(path.read_text().replace(",7777,", ",,"))
    with pytest.raises(BadInputError, match=":2: confirmation: is empty, and load_generator is not"):
        table(path).read()


def test_a_continued_table_keeps_its_number_of_cpus(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    for count, concurrency in ((16, 1), (2, 2)):
        table = TrialsTable(path, "m", {}, cpu_count=count)
        table.read()
        table.append(Trial(0, Candidate(8)), LoadPoint(1, concurrency), measurement(100, 1))
    read = read_run_table(path)
    assert read is not None
    assert (read.cpu_count, len(read.trials[0].measurements)) == (16, 2)
