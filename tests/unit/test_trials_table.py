"""trials.csv: what is written is read back, and a crash costs the torn line alone."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import Measurement
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.conftest import measurement

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


def table(path: Path) -> TrialsTable:
    return TrialsTable(path, "m", CHOICES)


def test_round_trip(tmp_path: Path) -> None:
    written = table(tmp_path / "trials.csv")
    points = (
        (LoadPoint(4, 8), replace(measurement(1234.5, 1 / 3), gpu_sm_clock_mhz=1410.0, gpu_throttling="a, b")),
        (LoadPoint(4, 9), Measurement(reason="server died")),
    )
    for load, m in points:
        written.append(Trial(0, CANDIDATE, deploy_seconds=1.25), load, m)
    written.append_failure(Trial(1, Candidate(8), status="failed", reason='a, "b"\nc', deploy_seconds=None))
    assert table(tmp_path / "trials.csv").read() == [
        Trial(0, CANDIDATE, points, deploy_seconds=1.25),
        Trial(1, Candidate(8), status="failed", reason='a, "b" c'),
    ]


@given(
    values=st.lists(st.one_of(st.none(), st.floats(0, 1e12, allow_nan=False)), min_size=5, max_size=5),
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
        ("HEADER\nm,x,64\n", ":2: not a row"),
        ("HEADER\nm,0,many,true\n", ":2: not a row"),
    ],
)
def test_another_table_is_one_clear_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trials.csv"
    path.write_text(content.replace("HEADER", ",".join(table(path).columns)))
    with pytest.raises(BadInputError, match=says) as caught:
        table(path).read()
    assert "\n" not in str(caught.value)


def test_a_disk_that_refuses_is_an_environment_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot write"):
        table(tmp_path / "no" / "trials.csv").append(Trial(0, CANDIDATE), LoadPoint(1, 1), measurement(1, 1))


SAMPLE = Path(__file__).parents[2] / "results" / "dlrm" / "sample" / "trials.csv"
THREADS = "parameters.intra_op_thread_count.string_value"


@pytest.mark.parametrize("lacking", [{"batch_stats"}, {"batch_stats", "server_memory_bytes"}])
def test_a_table_of_an_earlier_version_goes_on_in_its_own_columns(tmp_path: Path, lacking: set[str]) -> None:
    path = tmp_path / "trials.csv"
    with SAMPLE.open() as sample, path.open("w", newline="") as file:
        rows = list(csv.DictReader(sample))
        kept = [name for name in rows[0] if name not in lacking]
        writer = csv.DictWriter(file, kept, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    before = path.read_text()
    trials = TrialsTable(path, "dlrm", {THREADS: ("1", "2")})
    found = trials.read()
    measured = sum(len(trial.measurements) + len(trial.confirmations) for trial in found)
    assert measured == sum(bool(row["concurrency"]) for row in rows)
    told = Measurement(
        100.0, latency_p95_ms=5.0, batch_stats="4:10:2000", server_memory_bytes=1e6, stable=True, requests=9
    )
    added = Trial(len(found), Candidate(64, True, fields=((THREADS, "2"),)))
    trials.append(added, LoadPoint(4, 8), told)
    assert path.read_text().startswith(before)
    assert path.read_text().count(",", len(before)) == len(kept) - 1
    again = TrialsTable(path, "dlrm", {THREADS: ("1", "2")}).read()
    assert again[:-1] == found
    assert again[-1] == replace(added, measurements=((LoadPoint(4, 8), without(told, lacking)),))


def without(measurement: Measurement, unknown: set[str]) -> Measurement:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(Measurement) if field.name in unknown}
    return replace(measurement, **defaults)


def test_a_column_that_tables_always_had_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    path.write_text(",".join(name for name in table(path).columns if name != "queue_ms") + "\n")
    with pytest.raises(BadInputError, match="its columns are not those"):
        table(path).read()


def test_executions_in_another_form_are_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    table(path).append(Trial(0, CANDIDATE), LoadPoint(1, 1), replace(measurement(1, 1), batch_stats="8:3"))
    with pytest.raises(BadInputError, match=r":2: not a row of a trials table \(not a list of size:executions"):
        table(path).read()
