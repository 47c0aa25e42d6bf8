"""``tune replay``: valid and invalid tables, and the engine on recorded tables."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from objectives import latency_sketch
from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError
from optimizer.core.interfaces import Searcher
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import (
    NEVER,
    WINDOW_SECONDS,
    Effort,
    MethodComparison,
    ReplayResult,
    Spread,
    compare,
    document,
    recorded_problem,
    replay,
)
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import installed_methods, make_searcher
from optimizer.store.recording import DEPLOY_SECONDS, RecordedServer, Recording, read_recording
from optimizer.store.trials_reader import MAX_BYTES
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials
from tests.command_fixtures import Sandbox, Tune, called_tune, sandbox
from tests.conftest import measure_known_server

__all__ = ["called_tune", "sandbox"]

DATA = Path(__file__).parents[2] / "data"
KNOWN, FIVE_COLUMNS, AWKWARD = DATA / "known.csv", DATA / "five_columns.csv", DATA / "awkward.csv"
ENDLESS = ("tpe", "nsga2", "random", "grid")  # go on until the table is exhausted
METHODS = ("simulated", *ENDLESS)
HEADER = "max_batch_size,instance_count,concurrency,throughput_infer_per_sec,latency_p95_ms"


def write(folder: Path, header: str, *rows: str) -> Path:
    path = folder / "t.csv"
    path.write_text("".join(f"{row}\n" for row in (header, *rows)))
    return path


def replayed(
    path: Path, method: str = "grid", seed: int = 0, bound_ms: float = 20, trials: int = 999
) -> ReplayResult:
    recording = read_recording(path)
    problem = recorded_problem(recording, {"p95": bound_ms})
    return replay(recording, problem, method, seed, trials)


def compared(path: Path, seeds: int, *methods: str) -> MethodComparison:
    recording = read_recording(path)
    problem = recorded_problem(recording, {"p95": 20})
    return compare(recording, problem, methods, seeds=range(seeds), max_trials=6)


# -- reading ----------------------------------------------------------------------------------------------------


def test_a_table_with_all_columns_has_its_space_and_its_best_row() -> None:
    recording = read_recording(KNOWN)
    assert recording.space.parameters() == {
        "max_batch_size": (1, 4, 16, 64),
        "max_queue_delay_us": ("off", 0, 1000),
        "preferred_batch_sizes": ("none",),
        "instance_count": (1, 2),
    }
    assert len(recording.rows) == 56
    assert len(recording.space) == 14
    assert {recording.space.allowed_concurrencies(candidate) for candidate in recording.space.candidates()} == {
        (1, 4, 16, 64)
    }
    best = recording.best(recorded_problem(recording, {"p95": 5}))
    assert best is not None
    assert (best.candidate, best.load) == (Candidate(16, True, 0, (), 2), LoadPoint(1, 16))
    assert KNOWN.read_text().splitlines()[best.line - 1].startswith("known,16,true,0,2,16,4615.38,")


def test_a_table_of_the_five_required_columns_is_searched_to_its_best_row() -> None:
    """Without a column for dynamic batching, a table in which max_batch_size matters has it enabled."""
    recording = read_recording(FIVE_COLUMNS)
    assert recording.space.candidates() == tuple(
        Candidate(size, True, 0, (), count) for size in (1, 8, 32) for count in (1, 2)
    )
    assert replayed(FIVE_COLUMNS).regret == 0


def test_a_table_with_text_failed_and_unstable_rows_is_searched_to_its_best_row() -> None:
    """The table has an index without a name, a constant column, a text parameter, "off", failed and unstable rows."""
    recording = read_recording(AWKWARD)
    assert recording.space.parameters() == {
        "max_batch_size": (1, 8, 16, 32),
        "max_queue_delay_us": ("off", 0, 500),
        "preferred_batch_sizes": ("none", "max/2"),
        "instance_count": (1, 2),
        "allocator": ("arena", "malloc"),
    }
    problem = recorded_problem(recording, {"p95": 20, "p99": 7})
    best = recording.best(problem)
    assert best is not None
    assert best.line == 9, "line 8 has more throughput, but is unstable; line 10 failed"
    run = replay(recording, problem, "grid", 0, 999)
    assert run.regret == 0
    assert run.effort.deployments == 6, "the one that fails to deploy is one"
    big = Candidate(32, True, 500, (16,), 2, (("allocator", "arena"),))
    (failed,) = [row for (candidate, load), row in recording.answers.items() if load is None]
    assert (failed.candidate, failed.measurement.reason) == (big, "out of memory")


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (("2", "10", "1"), (2, 10, 1)),
        (("0.5", "2", "1"), (0.5, 2.0, 1.0)),
        (("true", "False", "true"), (True, False)),
        (("4", "", "8"), (4, "unset", 8)),
        (("a b", "1", "1"), ("a b", "1")),
        (("7", "7", "7.0"), None),
        (("", "", ""), None),
    ],
)
def test_other_columns_that_vary_are_parameters(
    tmp_path: Path, cells: tuple[str, ...], values: tuple[object, ...] | None
) -> None:
    rows = [f"4,{count},1,100,5,{cell}" for count, cell in enumerate(cells, 1)]
    fields = read_recording(write(tmp_path, f"{HEADER},threads", *rows)).space.fields
    assert fields == ({} if values is None else {"threads": values})


@pytest.mark.parametrize(
    ("columns", "cells", "candidate"),
    [
        ("dynamic_batching", "false", Candidate(8)),
        ("dynamic_batching", "", Candidate(8, True)),
        ("dynamic_batching,max_queue_delay_us", "true,", Candidate(8, True)),
        ("dynamic_batching,max_queue_delay_us", "true,Off", Candidate(8)),
        ("dynamic_batching,max_queue_delay_us", "False,300", Candidate(8)),
        ("max_queue_delay_us", "300.0", Candidate(8, True, 300)),
        ("max_queue_delay_us,preferred_batch_sizes", '100,"[4, 2]"', Candidate(8, True, 100, (2, 4))),
    ],
)
def test_dynamic_batching_is_read_from_each_way_to_write_it(
    tmp_path: Path, columns: str, cells: str, candidate: Candidate
) -> None:
    (row,) = read_recording(write(tmp_path, f"{HEADER},{columns}", f"8,1,1,100,5,{cells}")).rows
    assert row.candidate == candidate


def test_an_empty_delay_is_no_dynamic_batching_in_a_table_with_delays(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEADER},max_queue_delay_us", "8,1,1,100,5,0", "8,1,1,90,5,")
    assert [row.candidate for row in read_recording(path).rows] == [Candidate(8, True), Candidate(8)]


def test_configurations_that_behave_the_same_are_one(tmp_path: Path) -> None:
    """The first row counts; the table's best row is searched among all rows."""
    rows = ["4,1,1,100,5,false,0", "4,1,1,110,5,false,500", "8,1,1,90,5,false,0", "8,1,2,140,6,true,0"]
    path = write(tmp_path, f"{HEADER},dynamic_batching,max_queue_delay_us", *rows[:3])
    recording = read_recording(path)
    assert recording.space.candidates() == (Candidate(4),)
    assert replayed(path).regret == pytest.approx(1 - 100 / 110)
    assert replayed(path).recommended == recording.rows[0]


def test_of_several_deployments_of_a_configuration_the_median_counts(tmp_path: Path) -> None:
    rows = ["4,1,1,100,5,0", "4,1,2,150,9,0", "4,1,1,80,7,1", "4,1,1,90,6,2", "4,1,1,70,6,2", "4,1,2,140,9,2"]
    recording = read_recording(write(tmp_path, f"{HEADER},trial", *rows))
    assert {row.line for row in recording.rows} == {4, 7}, "80 of 100, 80 and 70; the lower of two"
    assert len(recording.space) == 1


def test_the_request_batch_size_of_the_table_is_that_of_the_problem(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path, f"{HEADER},request_batch_size", "8,1,3,100,5,4", "8,2,3,100,5,"))
    assert recorded_problem(recording, {}).request_batch_size == 4
    assert {row.load for row in recording.rows} == {LoadPoint(4, 3)}


@pytest.mark.parametrize(("first", "second", "expected"), [("4", "4", 4), ("", "4", 4), ("", "", None)])
def test_the_search_knows_the_recorded_number_of_cpus(
    first: str, second: str, expected: int | None, tmp_path: Path
) -> None:
    table = write(tmp_path, f"{HEADER},cpu_count", f"8,1,1,100,5,{first}", f"8,2,1,100,5,{second}")
    recording = read_recording(table)
    assert recorded_problem(recording, {}).cpu_count == recording.cpu_count == expected
    assert not recording.space.fields, "the column is no parameter"


def test_without_its_column_the_number_of_cpus_is_unknown() -> None:
    assert recorded_problem(read_recording(KNOWN), {}).cpu_count is None


@pytest.mark.parametrize("table", sorted(Path("benchmarks/tables").glob("*.csv")), ids=lambda table: table.stem)
def test_the_tables_of_the_benchmarks_have_the_number_of_cpus(table: Path) -> None:
    assert read_recording(table).cpu_count == 2


def test_the_batch_statistics_of_the_server_are_kept(tmp_path: Path) -> None:
    rows = ["8,1,2,100,5,1:3:900 8:90:720000,7", "8,1,4,110,6,,8"]
    recording = read_recording(write(tmp_path, f"{HEADER},batch_stats,queue_ms", *rows))
    assert [row.measurement.batch_stats for row in recording.rows] == ["1:3:900 8:90:720000", ""]
    assert [row.measurement.queue_ms for row in recording.rows] == [7, 8]


def test_a_fault_names_its_line_despite_line_ends_blanks_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f'\ufeff{HEADER},note\r\n\r\n 4 ,1,1,100,5,"a\nb"\r\n4,1,2, 150 ,x,c\r\n'.encode())
    with pytest.raises(BadInputError, match=r"t\.csv:5: latency_p95_ms: 'x' is not a number"):
        read_recording(path)


def test_each_configuration_has_its_own_recorded_loads() -> None:
    recording = read_recording(AWKWARD)
    assert [recording.space.allowed_concurrencies(candidate) for candidate in recording.space.candidates()] == [
        (1, 8),
        (1, 8),
        (8,),
        (8, 16),
        (8, 16),
        (),
    ]


# -- bad input --------------------------------------------------------------------------------------------------

# Every column outside of its range: tests/unit/store/test_trials_reader.py.
BAD = {
    "": "t.csv: is empty; a table begins with a line that names its columns",
    f"{HEADER}\n": "t.csv: has no rows below its header",
    "max_batch_size,concurrency,latency_p95_ms\n1,1,1\n": (
        "t.csv: lacks the columns instance_count, throughput_infer_per_sec; a table needs max_batch_size, "
        "instance_count, concurrency, throughput_infer_per_sec, latency_p95_ms"
    ),
    f"{HEADER[:-15]}\n1,1,1,1\n": (
        "t.csv: lacks the column latency_p95_ms; a table needs max_batch_size, "
        "instance_count, concurrency, throughput_infer_per_sec, latency_p95_ms"
    ),
    f"{HEADER},{HEADER}\n": "t.csv: has two columns 'concurrency'",
    f"{HEADER}\n1,1,1,9,5\n1,1,2,fast,5\n": (
        "t.csv:3: throughput_infer_per_sec: 'fast' is not a number from 0 to 1e+15"
    ),
    f"{HEADER}\n1,1,1,9,-5\n": "t.csv:2: latency_p95_ms: '-5' is not a number from 0 to 10000000",
    f"{HEADER}\n1,1,1,,5\n": (
        "t.csv:2: throughput_infer_per_sec: is empty, and the status is not failed; write it, or the status failed"
    ),
    f"{HEADER}\n1,1,,9,5\n": (
        "t.csv:2: concurrency: is empty, and the status is not failed; write it, or the status failed"
    ),
    f"{HEADER}\n1,,1,9,5\n": "t.csv:2: instance_count: is empty; write a whole number from 1 to 1024",
    f"{HEADER}\n1,0,1,9,5\n": "t.csv:2: instance_count: '0' is not a whole number from 1 to 1024",
    f"{HEADER},preferred_batch_sizes\n4,1,1,9,5,half\n": (
        "t.csv:2: preferred_batch_sizes: 'half' is not a list of whole numbers from 1 to 2147483647, such as 8 16"
    ),
    f"{HEADER},batch_stats\n4,1,1,9,5,4:2:50 8:0:0\n": (
        "t.csv:2: batch_stats: '4:2:50 8:0:0' is not a list of size:executions:compute_ns, such as 8:90:72000"
    ),
    f"{HEADER},batch_stats\n4,1,1,9,5,8:2:50\n": (
        "t.csv:2: batch_stats: a batch of 8 samples where max_batch_size is 4"
    ),
    f"{HEADER},batch_stats\n0,1,1,9,5,2:2:50\n": (
        "t.csv:2: batch_stats: a batch of 2 samples where max_batch_size is 0"
    ),
    f"{HEADER},batch_stats\n4,1,1,9,5,1:1:{10**14}\n": (
        f"t.csv:2: batch_stats: '1:1:{10**14}' is more than 1e+07 ms for a batch of 1 samples"
    ),
    f"{HEADER}\n1,1,1,9,5\n2,1,1,9,5\n1,1,1,8,5\n": (
        "t.csv:4: repeats line 2: the same configuration at concurrency 1; number deployments in a column trial"
    ),
    f"{HEADER},trial\n1,1,1,9,5,0\n1,1,1.0,8,5,\n": (
        "t.csv:3: repeats line 2: the same configuration at concurrency 1; number deployments in a column trial"
    ),
    f"{HEADER},status\n1,1,,,,failed\n1,1,,,,failed\n": (
        "t.csv:3: repeats line 2: the same configuration failing to deploy; number deployments in a column trial"
    ),
    f"{HEADER},request_batch_size\n8,1,1,9,5,4\n8,1,2,9,5,8\n": (
        "t.csv:3: request_batch_size 8: a table has one request_batch_size, but line 2 has 4"
    ),
    f"{HEADER},model\n8,1,1,9,5,a\n8,1,2,9,5,b\n": "t.csv:3: model b: a table has one model, but line 2 has a",
    f"{HEADER},request_batch_size\n2,1,1,9,5,4\n": "t.csv:2: max_batch_size 2 takes no requests of 4 samples",
    f"{HEADER}\n0,1,1,9,5\n4,1,1,9,5\n": (
        "t.csv: max_batch_size: 0 (no batch dimension) cannot be mixed with other sizes"
    ),
    f"{HEADER}\n1,1,1,9\n": "t.csv:2: has 4 cells where the header has 5",
    f'{HEADER}\n1,1,1,9,5\n1,1,"2,9,5\n': "t.csv:3: not a row of a CSV file (unexpected end of data)",
    f"{HEADER},cpu_count\n1,1,1,9,5,2\n1,2,1,9,5,\n1,3,1,9,5,4\n": (
        "t.csv:4: cpu_count 4: a table has one cpu_count, but line 2 has 2"
    ),
    f"{HEADER}\n{'x' * 5000},1,1,9,5\n": (
        f"t.csv:2: max_batch_size: '{'x' * 56}… is not a whole number from 0 to 2147483647"
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_reported_on_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text)
    with pytest.raises(BadInputError) as caught:
        read_recording(Path("t.csv"))
    assert str(caught.value) == BAD[text]


def test_a_file_that_is_no_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes(f"{HEADER}\n".encode() + b"\xe9,1,1,9,5\n")
    with Path("large").open("wb") as large:
        large.truncate(MAX_BYTES + 1)  # sparse
    for name, says in {
        "none.csv": "none.csv: no such file; check the path",
        "a\nb": r"a\nb: no such file; check the path",
        ".": ".: is a folder; give the table in it, such as ./trials.csv",
        "/dev/zero": "/dev/zero: is a device or a pipe; check the path",
        "latin": "latin:2: byte 0xe9 is not UTF-8 text; save the file as UTF-8",
        "large": "large: larger than 64 MiB; leave out what is not needed",
    }.items():
        with pytest.raises(BadInputError) as caught:
            read_recording(Path(name))
        assert str(caught.value) == says


def test_a_bound_needs_its_column() -> None:
    with pytest.raises(BadInputError) as caught:
        recorded_problem(read_recording(KNOWN), {"p99": 20})
    assert str(caught.value) == (
        f"{KNOWN}: --sla-p99: the table has no p99 (the column latency_p99_ms is missing or empty); bound p95, "
        "which it has, or measure a table with this bound: `tune --search grid --sla-p99 20ms MODEL`"
    )


def test_a_bound_on_another_percentile_needs_the_sketch(tmp_path: Path) -> None:
    with pytest.raises(
        BadInputError, match=r"has no p99\.9 \(the column latency_sketch is missing or empty\); bound p95, "
    ):
        recorded_problem(read_recording(KNOWN), {"p99.9": 20})
    sketch = latency_sketch.sketch_latencies(np.linspace(1, 20, 5000))
    table = tmp_path / "sketches.csv"
    header, *rows = KNOWN.read_text().splitlines()
    table.write_text("\n".join([f"{header},latency_sketch", *(f"{row},{sketch}" for row in rows), ""]))
    recording = read_recording(table)
    best = recording.best(recorded_problem(recording, {"p99.9": 20}))
    assert best is not None
    assert recording.best(recorded_problem(recording, {"p99.9": 10})) is None


# -- the engine on a table --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound_ms", [2.0, 5.0, 10.0, 20.0])
@pytest.mark.parametrize("method", ENDLESS)
def test_a_search_to_the_end_has_no_regret(method: str, bound_ms: float) -> None:
    run = replayed(KNOWN, method, bound_ms=bound_ms)
    assert run.regret == 0
    assert run.recommended is not None
    assert run.effort.deployments == 14
    assert run.until[0.01].deployments <= 14
    assert run.until[0.05].measurements <= run.until[0.01].measurements <= run.effort.measurements


def test_the_simulated_search_stops_by_itself_on_a_server_that_is_no_triton() -> None:
    """The table is a formula in which delays cost more than in a batcher, which the simulation does not model."""
    run = replayed(KNOWN, "simulated", bound_ms=2.0)
    assert run.regret <= 0.25
    assert run.recommended is not None
    assert 2 < run.effort.deployments < 14


def test_few_loads_are_measured_but_by_grid_which_takes_all() -> None:
    run = replayed(KNOWN, "random")
    assert run.effort.deployments <= run.effort.measurements <= 3 * run.effort.deployments
    whole = read_recording(KNOWN)
    assert replayed(KNOWN).effort.measurements == sum(row.load is not None for row in whole.rows)


@pytest.mark.parametrize("method", ENDLESS)
def test_a_seed_decides_everything(method: str) -> None:
    first, again = (replayed(KNOWN, method, 3, trials=5) for _ in range(2))
    assert first == again != replayed(KNOWN, method, 4, trials=5)


def test_max_trials_ends_the_search() -> None:
    """The baseline counts as a trial; under 20 ms its best concurrency is 4."""
    run = replayed(KNOWN, "random", trials=1)
    assert run.effort.deployments == 1
    assert run.recommended is not None
    assert (run.recommended.candidate, run.recommended.load) == (Candidate(1), LoadPoint(1, 4))
    assert run.regret == pytest.approx(1 - 454.545 / 6486.49)
    assert run.until == {0.05: NEVER, 0.01: NEVER}


def test_the_regret_never_rises_and_is_zero_after_all_deployments() -> None:
    """Expect the regret after the baseline, after default dynamic batching, and after 2 instances of it."""
    runs = [replayed(KNOWN, method, seed) for method in ENDLESS for seed in range(3)]
    for run in runs:
        assert len(run.regrets) == run.effort.deployments == 14
        assert run.regrets[:2] == pytest.approx((1 - 454.545 / 6486.49, 1 - 4324.32 / 6486.49))
        assert list(run.regrets) == sorted(run.regrets, reverse=True)
        result = run.until[0.01].deployments
        assert [regret <= 0.01 for regret in run.regrets] == [number >= result for number in range(1, 15)]
        assert run.regret_after(2) == run.regrets[1]
        assert run.regret_after(14) == run.regret_after(99) == run.regret == 0
    assert len({run.until[0.01].deployments for run in runs}) > 1


def test_a_function_that_makes_the_searcher_replaces_the_name_of_a_method() -> None:
    recording = read_recording(KNOWN)
    problem = recorded_problem(recording, {"p95": 20})
    made: list[int] = []

    def factory(problem: Problem, seed: int) -> Searcher:
        made.append(seed)
        return make_searcher("random", problem, seed)

    assert replay(recording, problem, factory, 3, 6) == replayed(KNOWN, "random", 3, trials=6)
    assert made == [3]


def test_the_seconds_are_those_of_the_table(tmp_path: Path) -> None:
    """Each deployment is measured once: its only load meets the bound."""
    timed = f"{HEADER},deploy_seconds,measure_seconds"
    path = write(tmp_path, timed, "4,1,1,100,5,2.0,0.5", "4,2,1,180,5,3.0,", "4,3,1,190,5,,0.25")
    recording = read_recording(path)
    assert set(recording.deploy_seconds.values()) == {2.0, 3.0}
    seconds_of_instances = {1: 2.5, 2: 3.0 + WINDOW_SECONDS, 3: DEPLOY_SECONDS + 0.25}
    run = replayed(path)
    assert run.seconds[0] == seconds_of_instances[1], "the baseline is the first deployment"
    assert run.seconds[-1] == pytest.approx(sum(seconds_of_instances.values()))
    assert {round(end - start, 6) for start, end in pairwise(run.seconds)} == {
        round(seconds_of_instances[2], 6),
        seconds_of_instances[3],
    }


def test_the_regret_is_all_until_the_bound_is_met(tmp_path: Path) -> None:
    rows = ["1,1,1,100,50", "4,1,1,200,30", "4,2,1,180,20", "4,3,1,190,25"]
    run = replayed(write(tmp_path, HEADER, *rows), bound_ms=25)
    assert run.regrets[:2] == (1, 1)
    assert set(run.regrets[2:]) <= {1 - 180 / 190, 0}
    assert run.regret == 0


class CountedServer(RecordedServer):
    """A recorded server that keeps the candidates that it deploys and the loads that it measures."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.trials())
        self.deployed: list[Candidate] = []
        self.loads: list[tuple[Candidate, LoadPoint]] = []

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        self.deployed.append(candidate)
        with super().deploy(candidate) as endpoint:
            yield endpoint

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        self.loads.append((endpoint.candidate, load))
        return super().measure(endpoint, load, seconds)


@pytest.mark.parametrize("method", ENDLESS)
def test_the_baselines_are_measured_first_whatever_the_method(method: str) -> None:
    recording = read_recording(KNOWN)
    server = CountedServer(recording)
    run = replay(recording, recorded_problem(recording, {"p95": 20}), method, 0, 5, server=server)
    deployed = server.deployed
    assert deployed[:2] == [Candidate(1), Candidate(64, True)]
    assert run.effort.deployments == len(set(deployed)) == 5
    assert len(deployed) == run.effort.deployments, "nothing is confirmed: a table repeats itself"


def test_only_recorded_loads_are_measured() -> None:
    recording = read_recording(AWKWARD)
    server = CountedServer(recording)
    for method in METHODS:
        replay(recording, recorded_problem(recording, {"p95": 20}), method, 0, 999, server=server)
    assert server.loads
    assert set(server.loads) <= set(recording.answers)


def test_a_table_without_the_baselines_is_searched(tmp_path: Path) -> None:
    header = f"{HEADER},dynamic_batching,max_queue_delay_us,preferred_batch_sizes"
    path = write(tmp_path, header, "8,2,1,100,5,true,100,4")
    assert replayed(path, "random").regret == 0


def test_nothing_that_deploys_ends_the_search_without_a_recommendation(tmp_path: Path) -> None:
    rows = [f"{size},1,,,,failed,out of memory" for size in (1, 2, 4, 8, 16, 64)]
    path = write(tmp_path, f"{HEADER},status,reason", *rows, "32,1,1,100,5,ok,")
    runs = [replayed(path, "random", seed) for seed in range(8)]
    hopeless = [run for run in runs if run.recommended is None]
    assert hopeless
    assert {(run.regret, run.effort, run.regrets) for run in hopeless} == {(1.0, Effort(3, 0), (1.0, 1.0, 1.0))}
    assert len(hopeless) < len(runs), "the third is drawn: the first two, the baselines, fail in each"


def test_the_trials_of_a_run_are_a_table(tmp_path: Path, problem: Problem, known_table: list[Trial]) -> None:
    """The trials are as ``tune run`` writes them, with confirmation, an own parameter and a failed configuration."""
    threads = "parameters.intra_op_thread_count.string_value"
    space = SearchSpace((1, 16, 64), ("off", 0, 1000), ("none", "max/2"), (1, 2), {threads: ("1", "2")})
    problem = Problem("known", space, 1, 64, (METRICS["throughput"],), Sla.from_bounds({"p95": 20}))
    candidates = space.candidates()
    broken = candidates[-1]
    server = RecordedServer(
        [
            Trial(i, c, tuple((LoadPoint(1, n), measure_known_server(c, n, 1)) for n in range(1, 65)))
            for i, c in enumerate(candidates)
            if c != broken
        ]
        + [Trial(99, broken, status="failed", reason="out of memory")]
    )
    path = tmp_path / "trials.csv"
    baseline = Candidate(1, fields=((threads, "1"),))
    searcher = make_searcher("grid", problem)
    scheduler = Scheduler(problem, searcher, Budget(600), Stopwatch(), [("baseline", baseline)])
    table = TrialsTable(path, "known", space.fields)
    trials = run_trials(scheduler, server, Measurer(server, server, table, QuietObserver()))
    assert len(trials) == len(space)
    recording = read_recording(path)
    assert set(recording.space.fields) == {threads}
    assert len(recording.space) == len(space)
    measured = sum(len(trial.measurements) for trial in trials)
    with path.open() as file:
        assert len(list(csv.reader(file))) == 1 + measured + 1
    assert len(recording.rows) == measured + 1
    run = replayed(path)
    assert run.regret == 0
    assert run.effort.deployments == len(space)


# -- output -----------------------------------------------------------------------------------------------------


def test_the_document_of_one_seed_has_a_value_for_each_key() -> None:
    result = document(compared(KNOWN, 1, "random", "grid"))
    assert list(result) == ["random", "grid"]
    for summary in result.values():
        assert list(summary) == ["regret", "deployments", "measurements", "recommended", "best_in_table"]
        assert summary["deployments"] == 6
        assert 0 <= summary["regret"] <= 1
        assert summary["best_in_table"]["throughput_infer_per_sec"] == 6486.49
        assert summary["best_in_table"]["concurrency"] == 64
        assert summary["regret"] == pytest.approx(1 - summary["recommended"]["throughput_infer_per_sec"] / 6486.49)
    json.dumps(result, allow_nan=False)


def test_the_document_of_several_seeds_has_medians_and_p90() -> None:
    comparison = compared(KNOWN, 5, "random")
    summary = document(comparison)["random"]
    regrets = sorted(run.regret for run in comparison.runs["random"])
    assert summary["regret"] == {"median": regrets[2], "p90": regrets[4]}
    assert summary["deployments"] == {"median": 6, "p90": 6}
    assert set(summary["measurements"]) == {"median", "p90"}
    assert summary["recommended"]["line"] in {
        run.recommended.line for run in comparison.runs["random"] if run.recommended
    }


def test_p90_is_the_value_that_nine_of_ten_searches_do_not_exceed() -> None:
    assert Spread.of([3]) == Spread(3, 3)
    assert Spread.of(range(1, 6)) == Spread(3, 5), "four of five are fewer than nine of ten"
    assert Spread.of(range(1, 11)) == Spread(5.5, 9)
    assert Spread.of(range(20, 0, -1)) == Spread(10.5, 18)


@pytest.fixture
def tables(sandbox: Sandbox) -> Iterator[Sandbox]:
    for table in (KNOWN, AWKWARD):
        (sandbox.working_folder / table.name).write_bytes(table.read_bytes())
    yield sandbox
    assert {path.name for path in sandbox.working_folder.iterdir()} == {KNOWN.name, AWKWARD.name}


def test_the_command_prints_a_line_for_each_method(tables: Sandbox, called_tune: Tune) -> None:
    ended = called_tune("replay", "known.csv", "--sla-p95", "20ms", "--seeds", "2", "--max-trials", "4")
    assert (ended.code, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == "known.csv: 14 configurations, 4 loads; p95 <= 20 ms; 2 seeds"
    assert all(line == line.rstrip() and len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if "median" in line] == list(installed_methods())
    assert "6,486 infer/s, p95 9.87 ms, concurrency 64" in ended.stdout
    assert "batch 64 · 2 instances · delay 0 µs" in ended.stdout


def test_unstable_rows_that_meet_the_bound_are_reported(tables: Sandbox, called_tune: Tune) -> None:
    """Only rows that are stable count, so few searches find one, and the line says so."""
    header = "max_batch_size,instance_count,concurrency,throughput_infer_per_sec,latency_p95_ms,stable\n"
    rows = [f"8,{count},{load},{100 * load},{load},false\n" for count in (1, 2) for load in (2, 4)]
    table = tables.working_folder / "unstable.csv"
    table.write_text(header + "".join(rows) + "8,2,1,100,1,true\n")
    ended = called_tune("replay", table.name, "--sla-p95", "20ms", "--search", "random")
    table.write_text(header + "".join(rows))
    refused = called_tune("replay", table.name, "--sla-p95", "20ms")
    table.unlink()
    assert ended.code == 0
    assert ended.stderr.startswith(
        "tune: note: unstable.csv: 4 of 5 rows that meet p95 <= 20 ms are not stable, and only the"
    )
    assert refused.code == 1
    assert "unstable.csv: no stable row meets p95 <= 20 ms; the closest: " in refused.stderr


def test_the_command_prints_json(tables: Sandbox, called_tune: Tune) -> None:
    ended = called_tune("replay", "--json", "--search", "random,grid", "awkward.csv")
    assert (ended.code, ended.stderr) == (0, "")
    result = json.loads(ended.stdout)
    assert list(result) == ["random", "grid"]
    assert result["grid"]["best_in_table"]["line"] == result["grid"]["recommended"]["line"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            "known.csv --sla-p95 1ms",
            1,
            "known.csv: no row meets p95 <= 1 ms; the closest: batch 1 · 2 instances · no dynamic batching: "
            "682 infer/s, p95 1.47 ms, concurrency 1 (line 6)",
        ),
        ("none.csv", 2, "table none.csv: no such file; give a CSV file such as the trials.csv of a run"),
        ("known.csv --sla-p99 1ms", 2, "known.csv: --sla-p99: the table has no p99 (the column latency_p99_ms is"),
        ("known.csv --sla-p95 20", 2, "--sla-p95 20: a unit is missing: 20ms?"),
        ("known.csv --search best", 2, "--search best: give one or more of simulated, tpe, nsga2, random"),
        ("known.csv --search tpe,tpe", 2, "--search tpe,tpe: give one or more of simulated, tpe, nsga2, random"),
        ("known.csv --search=", 2, "--search '': give one or more of simulated, tpe, nsga2, random"),
        ("known.csv --seeds 0", 2, "--seeds 0: write a whole number from 1 to 4294967295"),
        ("known.csv --max-trials none", 2, "--max-trials none: write a whole number of 1 or more"),
        ("known.csv another.csv", 2, "unrecognized arguments: another.csv; `tune replay --help` shows the options"),
        ("", 2, "the following arguments are required: TABLE.csv; `tune replay --help`"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: str, code: int, says: str, tables: Sandbox, called_tune: Tune
) -> None:
    ended = called_tune("replay", *arguments.split())
    assert (ended.code, ended.stdout) == (code, "")
    (line,) = ended.stderr_lines
    assert line.startswith(f"tune: {says}")
