"""The recorder of exhaustive tables, on simulated servers: failures, resumption and output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from objectives.metrics import Measurement
from optimizer.config.search_space import Problem, SearchSpace
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.store.recording import RecordedServer, read_recording
from optimizer.store.trials_table import TrialsTable

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import record_tables

SPACE = SearchSpace((1, 4), ("off", 0), instance_count=(1, 2))
BROKEN, WOBBLY = Candidate(4, True, instance_count=2), Candidate(4, True)
LOADS = [LoadPoint(1, concurrency) for concurrency in (4, 8, 16, 32)]
PLAN = record_tables.RecordingPlan(passes=2, window_ms=280, gated=False)
TOLD = Measurement(100.0, latency_p95_ms=5.0, requests=10, batch_stats="1:10:2000", stable=True)


class Server(RecordedServer):
    """A server on which ``broken`` never deploys and the first measurement of ``wobbly`` fails."""

    made = closed = 0
    seen: set[Candidate] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(
            [Trial(i, c, tuple((load, TOLD) for load in LOADS)) for i, c in enumerate(SPACE.candidates())]
        )
        Server.made += 1

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        if candidate == BROKEN:
            raise DeploymentError("out of memory")
        yield Endpoint("m", candidate)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        if endpoint.candidate == WOBBLY and WOBBLY not in Server.seen:
            Server.seen.add(WOBBLY)
            raise MeasurementError("perf_analyzer ended with exit code 99")
        return super().measure(endpoint, load, seconds)

    def close(self) -> None:
        Server.closed += 1


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a quiet machine with ``Server`` and one table, and return the table's folder."""
    task = SimpleNamespace(problem=Problem("m", SPACE, 1, 32, cpu_count=3), source=SimpleNamespace(name="m"))
    monkeypatch.setattr(Server, "made", 0)
    monkeypatch.setattr(Server, "closed", 0)
    monkeypatch.setattr(Server, "seen", set())
    monkeypatch.setattr(record_tables, "TABLES", tmp_path)
    monkeypatch.setattr(record_tables, "prepare", lambda name: task)
    monkeypatch.setattr(record_tables, "PLANS", {"dlrm": PLAN})

    @contextlib.contextmanager
    def bench(task: object, plan: record_tables.RecordingPlan) -> Iterator[record_tables.Bench]:
        with contextlib.closing(record_tables.Bench(Server, Server())) as used:
            yield used

    monkeypatch.setattr(record_tables, "bench", bench)
    return tmp_path


def test_a_failing_trial_is_repeated_on_fresh_servers_before_it_is_skipped(stack: Path) -> None:
    used = record_tables.Bench(Server, Server())
    made = Server.made
    with pytest.raises(DeploymentError, match="out of memory"):
        record_tables.record(used, Trial(0, BROKEN), LOADS)
    assert Server.made - made == record_tables.ATTEMPTS == Server.closed


def test_a_trial_that_failed_once_is_measured_on_the_next_server(stack: Path) -> None:
    used = record_tables.Bench(Server, Server())
    made = Server.made
    assert record_tables.record(used, Trial(0, WOBBLY), LOADS) == [(load, TOLD) for load in LOADS]
    assert Server.made - made == 1 == Server.closed


def test_one_configuration_that_never_deploys_does_not_block_the_table(stack: Path) -> None:
    for number in (0, 1):
        record_tables.record_part("dlrm", number)
    made = Server.made
    for number in (0, 1):
        record_tables.record_part("dlrm", number)
    assert Server.made == made, "all is recorded, or failed"
    trials = TrialsTable(stack / "recordings" / "dlrm.csv", "m", {}).read()
    assert len(trials) == 2 * len(SPACE)
    assert [(t.candidate, t.reason) for t in trials if t.status == "failed"] == 2 * [(BROKEN, "out of memory")]
    record_tables.write_medians("dlrm")
    recording = read_recording(stack / "dlrm.csv")
    rows = recording.rows
    assert recording.cpu_count == 3
    assert [row.candidate for row in rows if row.load is None] == [BROKEN]
    assert len(rows) == 1 + len(LOADS) * (len(SPACE) - 1)
    assert {row.measurement.batch_stats for row in rows if row.load} == {"1:20:4000"}


def test_a_table_is_written_only_from_all_passes(stack: Path) -> None:
    record_tables.record_part("dlrm", 0)
    with pytest.raises(SystemExit, match="has not been recorded as often as planned"):
        record_tables.write_medians("dlrm")
    assert not (stack / "dlrm.csv").exists()


def test_a_fifth_of_the_configurations_is_repeated_on_two_servers_in_turn() -> None:
    plan = record_tables.RecordingPlan(passes=1, window_ms=560, gated=False, repeats=2)
    candidates = [Candidate(8, True, delay) for delay in range(40)]
    first, later = (plan.trials("t", part, candidates) for part in range(plan.parts))
    assert sorted(trial.number for trial in first) == list(range(40))
    assert len(later) == 16
    for one, other in zip(later[::2], later[1::2], strict=True):
        assert one.candidate == other.candidate == candidates[one.number % 40]
        assert (one.number // 40, other.number // 40) == (1, 2)


def test_the_median_of_a_cell() -> None:
    result = [
        Measurement(throughput, latency_p95_ms=p95, requests=requests, batch_stats=text)
        for throughput, p95, requests, text in [
            (90.0, 5.0, 9, "4:2:50 8:1:30"),
            (110.0, None, 11, "8:3:100"),
            (100.0, 7.0, 12, "4:1:20"),
        ]
    ]
    middle = record_tables.median(result)
    assert middle == Measurement(100.0, latency_p95_ms=6.0, requests=11, batch_stats="4:3:70 8:4:130", stable=True)
    assert record_tables.median([*result, Measurement(100.0)]).batch_stats == ""


@pytest.mark.parametrize(("words", "names"), [([], list(record_tables.PLANS)), (["wide", "mlp"], ["wide", "mlp"])])
def test_names_given_and_not_given(words: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("optimizer.deploy.runtime.ensure", lambda say: None)
    monkeypatch.setattr(record_tables, "record_part", lambda name, part: None)
    monkeypatch.setattr(record_tables, "write_medians", written.append)
    monkeypatch.setattr(sys, "argv", ["record_tables.py", *words])
    record_tables.main()
    assert written == names


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["record_tables.py", "dlrn"])
    with pytest.raises(SystemExit, match="2"):
        record_tables.main()
    assert "no table is called dlrn: give some of dlrm, mlp, wide" in capsys.readouterr().err
