"""Tests for ``tune sweep`` without a server: arguments, measurements and output."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.metrics import Measurement
from objectives.model_stats import to_text
from optimizer.cli.sweep import SweepArguments, read_sweep_arguments
from optimizer.config.queue_policy import ALLOW_TIMEOUT_OVERRIDE, TIMEOUT_ACTION, TIMEOUT_US
from optimizer.core.candidate import INSTANCE_GPUS, Candidate, FieldValue
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, DeploymentError, ServerCrashed
from optimizer.core.interfaces import ProgressObserver
from optimizer.core.notes import ServedOnCpu
from optimizer.core.signature import sign
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.measurer import Measurer
from optimizer.options.option_reader import external_values
from optimizer.options.values import parse_rates, parse_whole_numbers
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.recording import RecordedServer, read_recording
from optimizer.store.run_folder import SWEEP_FILE, RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study import sweep_output
from optimizer.study.sweep_output import SweepProgress, print_sweep
from optimizer.study.sweep_plan import SweepCell, SweepChoices, SweepPlan, configurations, sweep_cells
from optimizer.study.sweeper import Sweeper, SweepTables
from tests.csv_tables import read_rows
from tests.repositories import doubler, write_model

OWN = Candidate(8)
THREADS = "parameters.intra_op_thread_count.string_value"
STATIC, DYNAMIC = Candidate(8), Candidate(8, True)


def parse(words: str) -> SweepArguments:
    return read_sweep_arguments(words.split())


def measurement(throughput: float, **more: Any) -> Measurement:
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


# -- arguments ------------------------------------------------------------------------------------------


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
def test_lists_steps_and_powers_are_read_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_whole_numbers(text, 1, 65536) == numbers


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
def test_bad_lists_of_numbers_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"write whole numbers from 1 to 65,536 as 1,2,4 or start:end:step"):
        parse_whole_numbers(text, 1, 65536)


def test_lists_have_at_most_1000_values() -> None:
    with pytest.raises(ValueError, match="more than 1,000 values"):
        parse_whole_numbers("1:9999999999", 1, 10**10)


def test_rates_may_be_fractions() -> None:
    assert parse_rates("2.5:10:2.5,100") == (2.5, 5.0, 7.5, 10.0, 100.0)


def test_configurations_are_the_product_without_duplicates() -> None:
    arguments = parse(
        "--max-batch-size 1,8 --max-queue-delay off,0,5ms --preferred-batch-size none,4+8 --instance-count 1,2 m"
    )
    candidates, left_out = configurations(OWN, arguments.request.choices)
    assert left_out is None
    static = [candidate for candidate in candidates if not candidate.dynamic_batching]
    assert len(static) == 2 * 2, "without dynamic batching, delay and preferred sizes have no effect"
    assert Candidate(8, True, 5000, (4, 8), 2) in candidates
    assert len(candidates) == len(set(candidates))


def test_unlisted_settings_are_the_models_own() -> None:
    model_candidate = Candidate(16, True, 100, (4, 16), 3, ((THREADS, "2"),))
    assert configurations(model_candidate, SweepChoices())[0] == (model_candidate,)
    assert configurations(model_candidate, SweepChoices(max_batch_size=(8,)))[0] == (
        replace(model_candidate, max_batch_size=8, preferred_batch_sizes=(4,)),
    )
    (one_thread, two_threads), _ = configurations(model_candidate, SweepChoices(fields={THREADS: ("1", "2")}))
    assert (one_thread, two_threads) == (replace(model_candidate, fields=((THREADS, "1"),)), model_candidate)


def test_combinations_without_effect_are_measured_once() -> None:
    """The action has no effect without a timeout. The permission of requests has none next to a limit."""
    fields: dict[str, tuple[FieldValue, ...]] = {
        TIMEOUT_US: ("0", "9000"),
        TIMEOUT_ACTION: ("REJECT", "DELAY"),
        ALLOW_TIMEOUT_OVERRIDE: ("false", "true"),
    }
    candidates, left_out = configurations(Candidate(8, True), SweepChoices(fields=fields))
    chosen = [dict(candidate.fields) for candidate in candidates]
    assert [tuple(fields_of_candidate[path] for path in fields) for fields_of_candidate in chosen] == [
        ("0", "REJECT", "false"),
        ("0", "REJECT", "true"),
        ("9000", "REJECT", "false"),
        ("9000", "DELAY", "false"),
    ]
    assert str(left_out) == (
        "left out 4 combinations that would repeat others, because these have no effect: "
        "allow_timeout_override with default_timeout_microseconds, as no request has a timeout, "
        "timeout_action with default_timeout_microseconds 0"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--concurrency 1 --request-rate 5 m", "--concurrency and --request-rate are two kinds of load"),
        (
            "--max-queue-delay soon m",
            "--max-queue-delay soon: this is not a number with a unit of time; write a positive time such as 20ms",
        ),
        ("--max-queue-delay 1h m", "--max-queue-delay 1h: write at most 2147s (2147483647 µs), Triton's maximum"),
        ("--preferred-batch-size many m", "are not batch sizes"),
        ("--instance-count 0 m", "--instance-count 0: write whole numbers from 1"),
        ("--config nothing m", "--config nothing: write the path of a field and its values"),
        ("--config no.such=1 m", "no field 'no'"),
        (
            "--config model_json.max_num_seqs=64,128 m",
            "--config model_json.max_num_seqs: `tune sweep` does not change model.json; list the values as space.",
        ),
        ("--config max_batch_size=1 m", "--config max_batch_size: write space.max_batch_size"),
        ("--config optimization.graph.level=high m", "'high' does not fit; it takes a whole number"),
        ("--repeat 0 m", "--repeat 0: write a whole number from 1 to 100"),
        ("--sla-p95 5ms m", "--sla-p95: `tune sweep` measures only the listed cells"),
        ("--search grid m", "--search: `tune sweep` measures only the listed cells"),
        (
            "--request-distribution poisson m",
            "--request-distribution: works only with --request-rate; give",
        ),
        ("--request-rate 5 --protocol http m", "--protocol http: requests at a rate are sent over gRPC only"),
        ("--request-rate 5 --perf-analyzer-image i m", "--perf-analyzer-image i: perf_analyzer does not send"),
        ("--csv nowhere/x.csv m", "--csv nowhere/x.csv: write the name of a file in a folder that exists"),
        ("--resume nowhere", "--resume nowhere: no sweep.json there"),
        ("--resume=", "--resume '': write a path"),
        ("--resume nowhere m", "leave m out"),
        ("--max-batchsize 4 m", "`tune sweep --help` shows the options"),
        ("--concurrency 1", "MODEL is missing"),
        ("--concurrency= m", "--concurrency '': write whole numbers"),
        ("--repeat= m", "--repeat '': write a whole number from 1 to 100"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(words: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_preferred_sizes_need_dynamic_batching() -> None:
    with pytest.raises(BadInputError, match="add --max-queue-delay 0"):
        configurations(OWN, parse("--preferred-batch-size 4 m").request.choices)
    with pytest.raises(BadInputError, match="max/3 is not an integer for max_batch_size 8"):
        configurations(OWN, parse("--preferred-batch-size max/3 --max-queue-delay 0 m").request.choices)


def test_options_of_a_run_are_accepted() -> None:
    arguments = parse("-b 2 --protocol http --measurement-interval 800ms --concurrency-range 2:4:2 --json --out o m")
    assert (arguments.options.protocol, arguments.options.measurement_interval_ms, arguments.options.out) == (
        "http",
        800.0,
        "o",
    )
    assert (arguments.request.request_batch_size, arguments.request.concurrency, arguments.as_json) == (
        (2,),
        (2, 4),
        True,
    )
    assert parse("--request-rate 100 m").options.load == "rate"
    mixed = parse("--request-rate 100 -b 1*9|8 m")
    assert (mixed.request.request_batch_size, mixed.options.request_batch_size) == ((), "1*9|8")


def test_the_loads_are_those_of_the_sweep_and_not_of_model_analyzers_file(tmp_path: Path) -> None:
    """The file has rates, and a sweep without --request-rate measures numbers of requests in flight."""
    file = tmp_path / "config.yaml"
    write_model(tmp_path / "models", "m", "", doubler())
    file.write_text(
        f"model_repository: {tmp_path}/models\nprofile_models: {{m: {{parameters: {{request_rate: [100, 200]}}}}}}\n"
    )
    for words, load in (("", "concurrency"), ("--concurrency 1,2", "concurrency"), ("--request-rate 50", "rate")):
        assert parse(f"--from-model-analyzer {file} {words}").options.load == load


def test_sets_of_gpus_are_written_as_the_server_reports_them() -> None:
    """A configuration that the server reports with other GPUs is refused."""
    choices = parse("--config instance_group_gpus=0,1,0+1,1+0 m").request.choices
    assert choices.fields == {INSTANCE_GPUS: ("0", "1", "0,1")}
    instances = [candidate.instances for candidate in configurations(OWN, choices)[0]]
    assert instances == [1, 1, 2]


def test_a_sweep_is_resumed_with_its_options(tmp_path: Path) -> None:
    words = f"--max-queue-delay off,0 --concurrency 1,2 --config {THREADS}=1,2 -b 2 --protocol http mlp"
    began = parse(words)
    (tmp_path / SWEEP_FILE).write_text(json.dumps({"options": began.request.given}))
    assert parse(f"--resume {tmp_path} --json") == replace(began, resumed=RunFolder(tmp_path), as_json=True)
    assert parse(began.request.command.removeprefix("tune sweep ")) == began


def test_a_resumed_sweep_takes_a_header_if_its_server_does(tmp_path: Path) -> None:
    for target in ("--target remote --url h:1", "--target local"):
        began = parse(f"{target} mlp")
        record = {"options": began.request.given, "signature": sign(external_values(began.options))}
        (tmp_path / SWEEP_FILE).write_text(json.dumps(record))
        if began.options.target == "remote":
            resumed = parse(f"--resume {tmp_path} --header a:b")
            assert resumed.options == replace(began.options, headers=("a:b",))
            assert resumed.request.given == {**began.request.given, "header": ["a:***"]}
        else:
            with pytest.raises(BadInputError, match="not with the --target local of before; remove --header"):
                parse(f"--resume {tmp_path} --header a:b")


def test_a_sweep_to_resume_is_named_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    began = parse("mlp")
    folders = [Path("results", "net", name) for name in ("20261101-000000", "20261102-000000")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / SWEEP_FILE).write_text(json.dumps({"options": began.request.given}))
    Path("net").mkdir()  # a folder of the model is no sweep
    names = {str(folders[0]): 0, "net/20261101-000000": 0, "net": 1, "latest": 1}
    for name, index in names.items():
        assert parse(f"--resume {name}") == replace(began, resumed=RunFolder(folders[index]))
    with pytest.raises(BadInputError, match=r"--resume net/20261103-000000: no sweep\.json there nor in"):
        parse("--resume net/20261103-000000")


def test_repeated_paths_of_config_are_joined() -> None:
    words = f"--config {THREADS}=1 --config server_processes=1 --config {THREADS}=2,1 --config server_processes=2 m"
    assert parse(words).request.choices.fields == {THREADS: ("1", "2"), "server_processes": (1, 2)}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"options": ["m"]}', '{"options": {"model": 1}}', '{"options": {"repeat": ["1"]}}']
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SWEEP_FILE).write_text(text)
    with pytest.raises(BadInputError, match=r"/sweep\.json: not the record of a sweep"):
        parse(f"--resume {tmp_path}")


# -- measurements -------------------------------------------------------------------------------------


def make_table(file: Path) -> TrialsTable:
    return TrialsTable(file, "m", {})


def plan(*sizes: int, repeat: int = 1) -> SweepPlan:
    loads = tuple(LoadPoint(size, concurrency) for size in sizes or (1,) for concurrency in (1, 4))
    return SweepPlan((STATIC, DYNAMIC, Candidate(1)), loads, repeat)


def test_cells_without_measurements_have_a_reason() -> None:
    trials = [
        Trial(0, STATIC, ((LoadPoint(1, 1), measurement(100)), (LoadPoint(1, 4), Measurement(reason="crashed")))),
        Trial(1, DYNAMIC, status="failed", reason="no memory"),
    ]
    cells = sweep_cells(plan(1, 8), trials)
    assert len(cells) == 3 * 4
    reasons = [cell.measurement.reason for cell in cells]
    assert reasons[:4] == ["", "crashed", "not measured", "not measured"]
    assert reasons[4:8] == ["no memory"] * 4
    assert reasons[8:] == ["not measured"] * 2 + ["max_batch_size 1 admits no requests of 8 samples"] * 2
    assert len(plan(1, 8)) == 4 + 4 + 2


def test_the_median_of_several_measurements_counts() -> None:
    load = LoadPoint(1, 1)
    values = (measurement(90), Measurement(reason="lost"), measurement(300), measurement(100))
    taken = tuple((load, value) for value in values)
    (cell, *_) = sweep_cells(plan(repeat=4), [Trial(0, STATIC, taken)])
    assert (cell.measurement.throughput_infer_per_sec, cell.measured) == (100, 4)


def test_loads_without_enough_measurements_are_missing() -> None:
    half = Trial(0, STATIC, ((LoadPoint(1, 1), measurement(1)),))
    assert plan().missing(half, 1) == [LoadPoint(1, 4)]
    assert plan().missing(half, 2) == [LoadPoint(1, 1), LoadPoint(1, 4)]
    assert plan().missing(replace(half, status="failed"), 2) == []


@pytest.mark.parametrize(("sizes", "names"), [((1,), ["trials.csv"]), ((1, 8), ["trials-b1.csv", "trials-b8.csv"])])
def test_tables_are_readable_as_tables_of_a_run(tmp_path: Path, sizes: tuple[int, ...], names: list[str]) -> None:
    sweep_plan = plan(*sizes)
    tables = SweepTables(RunFolder(tmp_path), sweep_plan, make_table)
    expected = []
    for number, candidate in enumerate(sweep_plan.configurations[:2]):
        trial = Trial(number, candidate)
        for load in sweep_plan.loads:
            tables.append(trial, load, measurement(100 * (number + 1) * load.concurrency))
            trial = replace(
                trial, measurements=(*trial.measurements, (load, measurement(100 * (number + 1) * load.concurrency)))
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
    other = SweepPlan((DYNAMIC, STATIC), sweep_plan.loads)
    with pytest.raises(BadInputError, match="trial 0 belongs to another sweep"):
        SweepTables(RunFolder(tmp_path), other, make_table).read()


class Server(RecordedServer):
    """A server that serves every load; each of ``crashes`` and ``interrupts`` raises once.

    Each of ``warm_up_crashes`` raises once in the warm-up. The deployments with a number in ``slow``, from 1, fail.
    """

    def __init__(
        self,
        *crashes: LoadPoint,
        interrupts: Sequence[LoadPoint] = (),
        broken: Candidate | None = None,
        warm_up_crashes: Sequence[LoadPoint] = (),
        slow: Sequence[int] = (),
    ) -> None:
        taken = tuple((LoadPoint(1, concurrency), measurement(100.0 * concurrency)) for concurrency in (1, 4, 16))
        served = [Trial(0, candidate, taken) for candidate in (STATIC, DYNAMIC, Candidate(1)) if candidate != broken]
        failed = [Trial(0, broken, status="failed", reason="no memory")] if broken else []
        super().__init__(served + failed)
        self.deployments: list[Candidate] = []
        self._crashes, self._interrupts = list(crashes), list(interrupts)
        self._warm_up_crashes, self._slow = list(warm_up_crashes), slow

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        self.deployments.append(candidate)
        if len(self.deployments) in self._slow:
            raise DeploymentError("loading took longer than 120 s")
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

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        if load in self._warm_up_crashes:
            self._warm_up_crashes.remove(load)
            raise ServerCrashed("died in the warm-up")


def sweep_on(
    server: Server, folder: Path, sweep_plan: SweepPlan, observer: ProgressObserver | None = None
) -> list[SweepCell]:
    tables = SweepTables(RunFolder(folder), sweep_plan, make_table)
    sweeper = Sweeper(sweep_plan, server, Measurer(server, server, tables, observer or QuietObserver()), {})
    with contextlib.suppress(KeyboardInterrupt):
        sweeper.run()
    return sweep_cells(sweep_plan, tables.read(), sweeper.failures)


class ServerOnCpu(Server):
    """A server that puts the instances of DYNAMIC on the CPU although there is a GPU."""

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with super().deploy(candidate) as endpoint:
            yield replace(endpoint, fell_back_to_cpu=candidate == DYNAMIC)


def test_a_note_says_that_the_cpu_served_in_place_of_the_gpu(tmp_path: Path) -> None:
    for broken, notes in ((None, (ServedOnCpu("server_sees_no_gpu"),)), (DYNAMIC, ())):
        server = ServerOnCpu(broken=broken)
        folder = RunFolder(tmp_path / str(broken))
        folder.path.mkdir()
        measurer = Measurer(server, server, SweepTables(folder, plan(), make_table), QuietObserver())
        Sweeper(plan(), server, measurer, {}).run()
        assert measurer.notes == notes


def test_failures_are_rows_and_the_sweep_continues(tmp_path: Path) -> None:
    server = Server(LoadPoint(1, 1), broken=DYNAMIC)
    cells = sweep_on(server, tmp_path, plan())
    assert [cell.measurement.reason for cell in cells] == ["died", "", "no memory", "no memory", "", ""]
    assert server.deployments == [STATIC, STATIC, DYNAMIC, Candidate(1)], "after a crash on another server"


def test_the_heading_of_a_configuration_precedes_its_failure(tmp_path: Path) -> None:
    lines: list[str] = []
    sweep_plan = plan()
    sweep_on(Server(broken=DYNAMIC), tmp_path, sweep_plan, SweepProgress(lines.append, sweep_plan))
    assert [line.split("  ")[0] or line.strip().split(":")[0] for line in lines] == [
        *("1/3", "1 of 6", "2 of 6"),
        *("2/3", "failed"),
        *("3/3", "3 of 6", "4 of 6"),
    ]


def test_a_later_failed_deployment_keeps_the_measured_cells(tmp_path: Path) -> None:
    """The second round fails to deploy the first configuration, and the third round measures it again."""
    server = Server(slow=[4])
    cells = sweep_on(server, tmp_path, plan(repeat=3))
    assert server.deployments == [STATIC, DYNAMIC, Candidate(1)] * 3
    assert [cell.measured for cell in cells] == [2, 2, 3, 3, 3, 3]
    (tmp_path / "again").mkdir()
    cells = sweep_on(Server(slow=[4, 7]), tmp_path / "again", plan(repeat=3))
    assert [cell.measurement.throughput_infer_per_sec for cell in cells] == [100, 400] * 3
    assert [cell.measured for cell in cells] == [1, 1, 3, 3, 3, 3]
    recording = read_recording(tmp_path / "again" / "trials.csv")
    assert [row.measurement.throughput_infer_per_sec for row in recording.rows] == [100, 400] * 3
    resumed = Server()
    assert [cell.measured for cell in sweep_on(resumed, tmp_path / "again", plan(repeat=3))] == [3] * 6
    assert resumed.deployments == [STATIC] * 2, "once for each round that failed"


def test_a_crash_in_a_later_warm_up_keeps_the_measured_cells(tmp_path: Path) -> None:
    loads = tuple(LoadPoint(1, concurrency) for concurrency in (1, 4, 16))
    sweep_plan = SweepPlan((STATIC,), loads)
    cells = sweep_on(Server(loads[1], warm_up_crashes=[loads[2]]), tmp_path, sweep_plan)
    assert [cell.measurement.reason for cell in cells] == ["", "died", "died in the warm-up"]
    assert [cell.measurement.throughput_infer_per_sec for cell in cells] == [100, None, None]
    resumed = sweep_on(Server(), tmp_path, sweep_plan)
    assert [cell.measurement.throughput_infer_per_sec for cell in resumed] == [100, None, 1600]


def test_each_round_measures_all_configurations(tmp_path: Path) -> None:
    server = Server()
    cells = sweep_on(server, tmp_path, plan(repeat=2))
    assert server.deployments == [STATIC, DYNAMIC, Candidate(1)] * 2
    assert [cell.measured for cell in cells] == [2] * 6


def test_a_resumed_sweep_measures_what_is_missing(tmp_path: Path) -> None:
    first = sweep_on(Server(interrupts=(LoadPoint(1, 4),)), tmp_path, plan())
    assert [cell.measured for cell in first] == [1, 0, 0, 0, 0, 0]
    again = Server()
    assert [cell.measured for cell in sweep_on(again, tmp_path, plan())] == [1] * 6
    assert sweep_on(again, tmp_path, plan())
    assert again.deployments == [STATIC, DYNAMIC, Candidate(1)], "complete configurations are not deployed again"


# -- output ---------------------------------------------------------------------------------------------


def printed(cells: list[SweepCell], status: str = "done") -> list[str]:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    document = {
        "model": {"name": "mo[red]del"},
        "hardware": "a CPU",
        "notes": sweep_output.notes_on_cells(cells),
        "status": status,
        "results_dir": "results/m/1",
    }
    print_sweep(console, cells, document)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    return lines


def test_the_tables_fit_80_columns() -> None:
    trials = [
        Trial(
            0, STATIC, ((LoadPoint(2, 1), measurement(975.048)), (LoadPoint(2, 4), measurement(1000, stable=False)))
        ),
        Trial(
            1,
            DYNAMIC,
            ((LoadPoint(2, 1), measurement(998.1)), (LoadPoint(2, 4), measurement(3187.76, other_cpu_share=0.3))),
        ),
    ]
    lines = printed(sweep_cells(SweepPlan((STATIC, DYNAMIC), (LoadPoint(2, 1), LoadPoint(2, 4))), trials))
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
    side = next(i for i, line in enumerate(lines) if line.startswith("comparison:"))
    assert lines[side + 3].split()[:6] == ["1,000", "1.00x", "10.0", "12.3", "12.3", "4"]
    assert lines[side + 5].split()[:2] == ["3,188", "3.19x"]
    text = " ".join(lines)
    assert "note: 1 of 4 measurements are unstable (marked *): their windows" in text
    assert "1 of 4 measurements were disturbed: other processes or machines took up to 30 %" in text
    assert lines[-1] == "results  results/m/1"


def test_rows_are_request_batch_sizes_if_only_these_vary() -> None:
    sweep_plan = SweepPlan((STATIC,), (LoadPoint(1, 1), LoadPoint(4096, 1)))
    lines = printed(
        sweep_cells(sweep_plan, [Trial(0, STATIC, ((LoadPoint(1, 1), measurement(402.5)),))]), "interrupted"
    )
    assert "concurrency 1, rows by request batch size" in lines
    assert "Batch  Throughput   Avg   p90   p95   p99" in lines
    assert "batch size 4,096: max_batch_size 8 admits no requests of 4096 samples" in lines
    assert not any(line.startswith("comparison:") for line in lines), "there is only one configuration"
    assert "resume   tune sweep --resume results/m/1" in lines


def test_the_csv_has_every_cell(tmp_path: Path) -> None:
    cells = sweep_cells(plan(1, 8), [Trial(0, STATIC, ((LoadPoint(1, 1), measurement(100)),))])
    sweep_output.write_csv(tmp_path / "cells.csv", cells)
    rows = read_rows(tmp_path / "cells.csv")
    assert len(rows) == len(cells) == 12
    assert (rows[0]["dynamic_batching"], rows[0]["stable"], rows[0]["queue_ms"]) == ("false", "true", "1234.5678")
    assert rows[1]["throughput_infer_per_sec"] == ""
    assert rows[-1]["reason"] == "max_batch_size 1 admits no requests of 8 samples"


def test_the_csv_has_the_values_of_each_model_as_trials_csv_has_them(tmp_path: Path) -> None:
    by_model, by_priority = to_text({"a": measurement(100), "b": measurement(40)}), "1:3:0:1:0:30.0:"
    measured = replace(measurement(140), by_model=by_model, by_priority=by_priority)
    cell = SweepCell(0, STATIC, LoadPoint(1, 4), measured, 1)
    sweep_output.write_csv(tmp_path / "cells.csv", [cell])
    (row,) = read_rows(tmp_path / "cells.csv")
    assert (row["by_model"], row["by_priority"]) == (by_model, by_priority)
    assert not {"models", "priorities"} & row.keys()
    assert [values["model"] for values in sweep_output.entry(cell)["models"]] == ["a", "b"]


@pytest.mark.parametrize("gpu_power_watts", [None, 50.0])
def test_the_csv_is_read_as_a_recorded_table(gpu_power_watts: float | None, tmp_path: Path) -> None:
    """A cell without a measurement is a failure, and counts and derived values are no parameters."""
    taken = [
        (load, replace(measurement(100 * number), gpu_power_watts=gpu_power_watts))
        for number, load in enumerate((LoadPoint(1, 1), LoadPoint(1, 4), LoadPoint(1, 4)), 1)
    ]
    cells = sweep_cells(plan(repeat=2), [Trial(0, STATIC, tuple(taken)), Trial(1, DYNAMIC, (taken[0],))])
    sweep_output.write_csv(tmp_path / "cells.csv", cells)
    recording = read_recording(tmp_path / "cells.csv")
    assert [row.candidate for row in recording.rows] == [cell.candidate for cell in cells]
    assert [row.load for row in recording.rows] == [cell.load for cell in cells]
    assert [row.measurement.reason for row in recording.rows] == ["", "", "", *["not measured"] * 3]


def test_the_csv_has_one_kind_of_load(tmp_path: Path) -> None:
    loads = (LoadPoint(1, 4), LoadPoint(1, request_rate=150.5))
    cells = sweep_cells(SweepPlan((STATIC,), loads), [])
    sweep_output.write_csv(tmp_path / "cells.csv", cells)
    written = [(row["concurrency"], row["request_rate"]) for row in read_rows(tmp_path / "cells.csv")]
    assert written == [("4", ""), ("", "150.5")]
