"""``tune sweep`` without a server: what is asked for, what is measured of it, and how it is told."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.metrics import Measurement
from optimizer.arguments import ranges
from optimizer.arguments.sweep import SweepArguments, read_sweep_arguments
from optimizer.deploy.recorded import RecordedTable
from optimizer.errors import BadInputError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.measuring import Measuring
from optimizer.replay.recording import read_recording
from optimizer.report.live import QuietWatcher
from optimizer.store.run_folder import RunFolder
from optimizer.sweeping import document
from optimizer.sweeping.console import print_sweep
from optimizer.sweeping.plan import Cell, Choices, Plan, cells, configurations
from optimizer.sweeping.sweeper import Sweeper
from optimizer.sweeping.tables import SweepTables
from optimizer.trial import Candidate, LoadPoint, Trial

OWN = Candidate(8)
THREADS = "parameters.intra_op_thread_count.string_value"
STATIC, DYNAMIC = Candidate(8), Candidate(8, True)


def asked(words: str) -> SweepArguments:
    return read_sweep_arguments(words.split())


def gave(throughput: float, **more: Any) -> Measurement:
    stable = {"stable": True}
    return Measurement(
        throughput,
        latency_avg_ms=10.0,
        latency_p90_ms=11.0,
        latency_p95_ms=12.345,
        latency_p99_ms=13.0,
        client_send_ms=0.004,
        network_ms=0.2,
        queue_ms=1234.5678,
        compute_infer_ms=5.0,
        **(stable | more),
    )


# -- what is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1", (1,)),
        ("1,2, 4", (1, 2, 4)),
        ("4,1,4", (4, 1)),
        ("2:16:2", (2, 4, 6, 8, 10, 12, 14, 16)),
        ("1:3", (1, 2, 3)),
        ("1:8:3", (1, 4, 7)),
        ("1..256", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("3..20,1", (3, 6, 12, 20, 1)),
        ("7..7", (7,)),
        ("65536", (65536,)),
    ],
)
def test_lists_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert ranges.whole_numbers("--concurrency", text, 1, 65536) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "x",
        "1,,2",
        "4:2",
        "1:9:0",
        "1..",
        "0..4",
        "8..2",
        "1..8:2",
        "-1",
        "1.5",
        "65537",
        "9" * 30,
        "1:2:3:4",
    ],
)
def test_what_is_no_list_of_numbers_is_told_in_one_line(text: str) -> None:
    with pytest.raises(
        BadInputError, match=r"--concurrency .*write whole numbers from 1 to 65,536 as 1,2,4 or start:end:step"
    ):
        ranges.whole_numbers("--concurrency", text, 1, 65536)


def test_no_list_is_longer_than_anyone_waits_for() -> None:
    with pytest.raises(BadInputError, match="more than 1,000 values"):
        ranges.whole_numbers("--concurrency", "1:9999999999", 1, 10**10)


def test_rates_may_be_fractions() -> None:
    assert ranges.rates("--rates", "2.5:10:2.5,100") == (2.5, 5.0, 7.5, 10.0, 100.0)


def test_the_configurations_are_the_product_each_once() -> None:
    given = asked(
        "--max-batch-size 1,8 --max-queue-delay off,0,5ms --preferred-batch-size none,4+8 --instances 1,2 m"
    )
    found = configurations(OWN, given.asked.choices)
    static = [one for one in found if not one.dynamic_batching]
    assert len(static) == 2 * 2, "without dynamic batching neither delay nor preferred sizes are told apart"
    assert Candidate(8, True, 5000, (4, 8), 2) in found
    assert len(found) == len(set(found))


def test_what_is_not_listed_is_the_models_own() -> None:
    own = Candidate(16, True, 100, (4, 16), 3, ((THREADS, "2"),))
    assert configurations(own, Choices()) == (own,)
    assert configurations(own, Choices(max_batch_size=(8,))) == (
        replace(own, max_batch_size=8, preferred_batch_sizes=(4,)),
    )
    (one, two) = configurations(own, Choices(fields={THREADS: ("1", "2")}))
    assert (one, two) == (replace(own, fields=((THREADS, "1"),)), own)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--concurrency 1 --rates 5 m", "--concurrency and --rates are two kinds of load"),
        ("--max-queue-delay soon m", "--max-queue-delay soon: write a positive time such as 20ms"),
        ("--max-queue-delay 1h m", "longer than Triton can wait"),
        ("--preferred-batch-size many m", "is no policy"),
        ("--instances 0 m", "--instances 0: write whole numbers from 1"),
        ("--config nothing m", "--config nothing: write a path and its values"),
        ("--config no.such=1 m", "no field 'no'"),
        ("--config max_batch_size=1 m", "has its own name in the space"),
        ("--config optimization.graph.level=high m", "'high' does not fit; it takes a whole number"),
        ("--repeat 0 m", "--repeat 0: write a whole number from 1 to 100"),
        ("--sla-p95 5ms m", "--sla-… is about a search"),
        ("--search grid m", "--search is about a search"),
        ("--rates 5 --protocol http m", "--load rate sends by gRPC only"),
        ("--csv nowhere/x.csv m", "--csv nowhere/x.csv: write the name of a file in a folder that exists"),
        ("--resume nowhere", "--resume nowhere: no such folder"),
        ("--resume nowhere m", "leave m out"),
        ("--max-batchsize 4 m", "`tune sweep --help` shows the options"),
        ("--concurrency 1", "which model?"),
    ],
)
def test_bad_arguments_are_told_in_one_line(words: str, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        asked(words)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_preferred_size_without_a_batcher_is_refused() -> None:
    with pytest.raises(BadInputError, match="give --max-queue-delay 0"):
        configurations(OWN, asked("--preferred-batch-size 4 m").asked.choices)
    with pytest.raises(BadInputError, match="max/3: is no whole number for max_batch_size 8"):
        configurations(OWN, asked("--preferred-batch-size max/3 --max-queue-delay 0 m").asked.choices)


def test_what_a_run_has_too_is_as_there() -> None:
    given = asked("-b 2 --protocol http --measurement-interval 800ms --concurrency-range 2:4:2 --json --out o m")
    assert (given.options.protocol, given.options.measurement_interval_ms, given.options.out) == ("http", 800.0, "o")
    assert (given.asked.request_batch_size, given.asked.concurrency, given.as_json) == ((2,), (2, 4), True)
    assert asked("--rates 100 m").options.load == "rate"
    mixed = asked("--rates 100 -b 1*9|8 m")
    assert (mixed.asked.request_batch_size, mixed.options.request_batch_size) == ((), "1*9|8")


def test_a_sweep_is_resumed_as_it_began(tmp_path: Path) -> None:
    words = "--max-queue-delay off,0 --concurrency 1,2 mlp"
    (tmp_path / document.FILE).write_text(json.dumps({"words": words.split()}))
    resumed = asked(f"--resume {tmp_path} --json")
    assert resumed == replace(asked(words), resumed=RunFolder(tmp_path), as_json=True)


@pytest.mark.parametrize("text", ["", "[]", '{"words": [1]}', '{"words": "mlp"}', '{"words": ["--resume", "."]}'])
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / document.FILE).write_text(text)
    with pytest.raises(BadInputError, match="not the record of a sweep"):
        asked(f"--resume {tmp_path}")


# -- what is measured of it -------------------------------------------------------------------------------------


def plan(*sizes: int, repeat: int = 1) -> Plan:
    loads = tuple(LoadPoint(size, concurrency) for size in sizes or (1,) for concurrency in (1, 4))
    return Plan((STATIC, DYNAMIC, Candidate(1)), loads, repeat)


def test_every_cell_is_told_also_those_without_figures() -> None:
    trials = [
        Trial(0, STATIC, ((LoadPoint(1, 1), gave(100)), (LoadPoint(1, 4), Measurement(reason="crashed")))),
        Trial(1, DYNAMIC, status="failed", reason="no memory"),
    ]
    found = cells(plan(1, 8), trials)
    assert len(found) == 3 * 4
    reasons = [cell.measurement.reason for cell in found]
    assert reasons[:4] == ["", "crashed", "not measured", "not measured"]
    assert reasons[4:8] == ["no memory"] * 4
    assert reasons[8:] == ["not measured"] * 2 + ["max_batch_size 1 admits no requests of 8 samples"] * 2
    assert len(plan(1, 8)) == 4 + 4 + 2


def test_of_several_measurements_the_one_in_the_middle_counts() -> None:
    load = LoadPoint(1, 1)
    taken = tuple((load, one) for one in (gave(90), Measurement(reason="lost"), gave(300), gave(100)))
    (cell, *_) = cells(plan(repeat=4), [Trial(0, STATIC, taken)])
    assert (cell.measurement.throughput_infer_per_sec, cell.measured) == (100, 4)


def test_what_is_missing() -> None:
    half = Trial(0, STATIC, ((LoadPoint(1, 1), gave(1)),))
    assert plan().missing(half, 1) == [LoadPoint(1, 4)]
    assert plan().missing(half, 2) == [LoadPoint(1, 1), LoadPoint(1, 4)]
    assert plan().missing(replace(half, status="failed"), 2) == []


@pytest.mark.parametrize(("sizes", "names"), [((1,), ["trials.csv"]), ((1, 8), ["trials-b1.csv", "trials-b8.csv"])])
def test_the_tables_are_those_of_a_run(tmp_path: Path, sizes: tuple[int, ...], names: list[str]) -> None:
    wanted = plan(*sizes)
    tables = SweepTables(RunFolder(tmp_path), "m", wanted, {})
    expected = []
    for number, candidate in enumerate(wanted.configurations[:2]):
        trial = Trial(number, candidate)
        for load in wanted.loads:
            tables.append(trial, load, gave(100 * (number + 1) * load.concurrency))
            trial = replace(
                trial, measurements=(*trial.measurements, (load, gave(100 * (number + 1) * load.concurrency)))
            )
        expected.append(trial)
    failed = Trial(2, Candidate(1), status="failed", reason="no memory")
    tables.append_failure(failed)
    assert tables.read() == [*expected, failed]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name, size in zip(names, sizes, strict=True):
        recording = read_recording(tmp_path / name)
        assert recording.request_batch_size == size
        assert len([row for row in recording.rows if row.load]) == 4
    other = Plan((DYNAMIC, STATIC), wanted.loads)
    with pytest.raises(BadInputError, match="trial 0 is none of this sweep's"):
        SweepTables(RunFolder(tmp_path), "m", other, {}).read()


class Server(RecordedTable):
    """Answers every load; of ``crashes`` and ``interrupts`` each raises once."""

    def __init__(
        self, *crashes: LoadPoint, interrupts: Sequence[LoadPoint] = (), broken: Candidate | None = None
    ) -> None:
        taken = tuple((LoadPoint(1, concurrency), gave(100.0 * concurrency)) for concurrency in (1, 4))
        served = [Trial(0, candidate, taken) for candidate in (STATIC, DYNAMIC, Candidate(1)) if candidate != broken]
        failed = [Trial(0, broken, status="failed", reason="no memory")] if broken else []
        super().__init__(served + failed)
        self.deployments: list[Candidate] = []
        self._crashes, self._interrupts = list(crashes), list(interrupts)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        self.deployments.append(candidate)
        with super().deploy(candidate) as endpoint:
            yield endpoint

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        if load in self._interrupts:
            self._interrupts.remove(load)
            raise KeyboardInterrupt
        if load in self._crashes:
            self._crashes.remove(load)
            raise ServerCrashed("died")
        return super().measure(endpoint, load, seconds)


def sweep_on(server: Server, folder: Path, wanted: Plan) -> list[Cell]:
    tables = SweepTables(RunFolder(folder), "m", wanted, {})
    with contextlib.suppress(KeyboardInterrupt):
        Sweeper(wanted, server, Measuring(server, server, tables, QuietWatcher())).run()
    return cells(wanted, tables.read())


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    server = Server(LoadPoint(1, 1), broken=DYNAMIC)
    found = sweep_on(server, tmp_path, plan())
    assert [cell.measurement.reason for cell in found] == ["died", "", "no memory", "no memory", "", ""]
    assert server.deployments == [STATIC, STATIC, DYNAMIC, Candidate(1)], "after a crash on another server"


def test_each_round_goes_over_all_configurations(tmp_path: Path) -> None:
    server = Server()
    found = sweep_on(server, tmp_path, plan(repeat=2))
    assert server.deployments == [STATIC, DYNAMIC, Candidate(1)] * 2
    assert [cell.measured for cell in found] == [2] * 6


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    first = sweep_on(Server(interrupts=(LoadPoint(1, 4),)), tmp_path, plan())
    assert [cell.measured for cell in first] == [1, 0, 0, 0, 0, 0]
    again = Server()
    assert [cell.measured for cell in sweep_on(again, tmp_path, plan())] == [1] * 6
    assert sweep_on(again, tmp_path, plan())
    assert again.deployments == [STATIC, DYNAMIC, Candidate(1)], "what is complete is not deployed again"


# -- how it is told ---------------------------------------------------------------------------------------------


def shown(found: list[Cell], status: str = "done") -> list[str]:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    told = {
        "model": {"name": "mo[red]del"},
        "hardware": "a CPU",
        "notes": document.notes(found),
        "status": status,
        "results_dir": "results/m/1",
    }
    print_sweep(console, found, told)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_the_documents_columns_in_80_columns() -> None:
    trials = [
        Trial(0, STATIC, ((LoadPoint(2, 1), gave(975.048)), (LoadPoint(2, 4), gave(1000, stable=False)))),
        Trial(1, DYNAMIC, ((LoadPoint(2, 1), gave(998.1)), (LoadPoint(2, 4), gave(3187.76, other_cpu_share=0.3)))),
    ]
    lines = shown(cells(Plan((STATIC, DYNAMIC), (LoadPoint(2, 1), LoadPoint(2, 4))), trials))
    assert lines[0] == "mo[red]del on a CPU"
    start = lines.index("batch 8 · 1 instance · no dynamic batching")
    assert lines[start + 1 : start + 11] == [
        "requests of 2 samples",
        "             Throughput   Avg   p90   p95   p99",
        "Concurrency     infer/s    ms    ms    ms    ms",
        "          1         975  10.0  11.0  12.3  13.0",
        "          4      1,000*  10.0  11.0  12.3  13.0",
        "",
        "                      Network+",
        "             Client     Server     Server  Compute  Compute  Compute  Client",
        "Concurrency    Send  Send/Recv      Queue    Input    Infer   Output    Recv",
        "          1   0.004      0.200  1,234.568        –    5.000        –       –",
    ]
    side = next(i for i, line in enumerate(lines) if line.startswith("side by side"))
    assert lines[side + 3].split()[:6] == ["1,000", "1.00x", "10.0", "12.3", "12.3", "4"]
    assert lines[side + 5].split()[:2] == ["3,188", "3.19x"]
    text = " ".join(lines)
    assert "note: unstable, marked *: 1 of 4 cells" in text
    assert "disturbed: 1 of 4 cells, while other processes or machines took up to 30%" in text
    assert lines[-1] == "results  results/m/1"


def test_rows_by_request_batch_size_where_that_alone_varies() -> None:
    wanted = Plan((STATIC,), (LoadPoint(1, 1), LoadPoint(4096, 1)))
    lines = shown(cells(wanted, [Trial(0, STATIC, ((LoadPoint(1, 1), gave(402.5)),))]), "interrupted")
    assert "concurrency 1, rows by request batch size" in lines
    assert "Batch  Throughput   Avg   p90   p95   p99" in lines
    assert "batch size 4,096: max_batch_size 8 admits no requests of 4096 samples" in lines
    assert not any(line.startswith("side by side") for line in lines), "there is but one configuration"
    assert "go on    tune sweep --resume results/m/1" in lines


def test_the_csv_has_every_cell(tmp_path: Path) -> None:
    found = cells(plan(1, 8), [Trial(0, STATIC, ((LoadPoint(1, 1), gave(100)),))])
    document.write_csv(tmp_path / "cells.csv", found)
    with (tmp_path / "cells.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found) == 12
    assert (rows[0]["dynamic_batching"], rows[0]["stable"], rows[0]["queue_ms"]) == ("false", "true", "1234.5678")
    assert rows[1]["throughput_infer_per_sec"] == ""
    assert rows[-1]["reason"] == "max_batch_size 1 admits no requests of 8 samples"
