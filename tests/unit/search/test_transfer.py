"""Warm start from the study of another machine: read, selected, learned from, and never ranked."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives import batch_stats, model_stats
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import ConcurrentModel, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from optimizer.machine.hardware import Fingerprint
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.replay.replay import recorded_problem, replay
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.search import make_searcher
from optimizer.search.optuna_samplers import MAX_TRANSFERRED
from optimizer.search.simulation_error import Residuals, SimulationErrorModel, SourceResiduals
from optimizer.search.transfer import TransferredStudy
from optimizer.simulator.predicted_metrics import ModelErrors
from optimizer.store.recording import RecordedServer, baselines, read_recording, recorded_space
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import Scheduler
from optimizer.study.task import Task
from optimizer.study.trial_runner import run_trials
from optimizer.study.warm_start import WarmStartSource, load_warm_start, read_warm_start, select_fitting
from tests.command_fixtures import Sandbox, Tune, called_tune, sandbox
from tests.conftest import measure_known_server, measurement
from tests.csv_tables import read_rows

__all__ = ["called_tune", "sandbox"]

ERRORS = ModelErrors(throughput=0.1, tail=0.1)
TABLES = Path(__file__).parents[3] / "benchmarks" / "tables"
DATA = Path(__file__).parents[2] / "data"
THERE = Fingerprint("Other CPU", 16, (), "embedded", "2.50.0", ("onnxruntime 1.19",))
SPACE = SearchSpace((1, 4, 16, 64), ("off", 0, 1000), instance_count=(1, 2))
PROBLEM = Problem("known", SPACE, 1, 64, sla=Sla.from_bounds({"p95": 20.0}))
MARK = 900_000.0  # infer/s: nothing in the known table comes near


def trial(number: int, candidate: Candidate, throughput: float, p95_ms: float = 10.0, *, batch: int = 1) -> Trial:
    return Trial(number, candidate, ((LoadPoint(batch, 4), measurement(throughput, p95_ms)),))


def write(path: Path, trials: Sequence[Trial], model: str = "known") -> Path:
    table = TrialsTable(path, model, {})
    for trial_of_run in trials:
        for load, measured in trial_of_run.measurements:
            table.append(trial_of_run, load, measured)
    return path


# -- reading ------------------------------------------------------------------------------------------------------


def test_a_run_a_table_and_a_sweep_are_read(tmp_path: Path, known_table: list[Trial]) -> None:
    run = RunFolder(tmp_path / "known" / "1")
    run.path.mkdir(parents=True)
    write(run.trials, known_table)
    run.write_info(RunOptions("known"), {"fingerprint": THERE.to_document()})
    read = read_warm_start(str(run.path), "", 1)
    assert (read.model, read.fingerprint, list(read.trials)) == ("known", THERE, known_table)
    assert read_warm_start("known/1", str(tmp_path), 1).trials == read.trials
    assert read_warm_start(str(run.trials), "", 1) == replace(read, name=str(run.trials))
    swept = tmp_path / "swept"
    swept.mkdir()
    for size in (1, 8):
        write(swept / f"trials-b{size}.csv", [trial(0, Candidate(8), size, batch=size)])
    assert read_warm_start(str(swept), "", 8).trials[0].measurements[0][1].throughput_infer_per_sec == 8


@pytest.mark.parametrize("gpus", [(), ("A GPU",)])
@pytest.mark.parametrize("cpu_count", [None, 3])
def test_the_number_of_cpus_is_that_of_the_table_or_of_the_machine(
    tmp_path: Path, cpu_count: int | None, gpus: tuple[str, ...]
) -> None:
    run = RunFolder(tmp_path)
    run.write_info(RunOptions("known"), {"fingerprint": replace(THERE, gpus=gpus).to_document()})
    TrialsTable(run.trials, "m", {}, cpu_count=cpu_count).append(
        Trial(0, Candidate(8)), LoadPoint(1, 1), measurement(1, 1)
    )
    expected = cpu_count or (None if gpus else THERE.cpu_count)
    assert read_warm_start(str(tmp_path), "", 1).cpu_count == expected


def test_a_recorded_table_of_another_program_has_its_number_of_cpus(tmp_path: Path) -> None:
    header, *rows = (DATA / "five_columns.csv").read_text().splitlines()
    table = tmp_path / "table.csv"
    table.write_text("\n".join([f"{header},cpu_count", *(f"{row},2" for row in rows)]))
    assert read_warm_start(str(table), "", 1).cpu_count == 2


def test_a_table_of_five_columns_is_read() -> None:
    assert len(read_warm_start(str(DATA / "five_columns.csv"), "", 1).trials) > 1


def test_an_incomplete_run_is_read_up_to_its_end_and_not_changed(tmp_path: Path) -> None:
    whole = write(tmp_path / "trials.csv", [trial(n, Candidate(8, True, n), n + 1) for n in range(3)]).read_bytes()
    for cut in (1, 20, 50):
        (tmp_path / "trials.csv").write_bytes(whole[:-cut])
        (tmp_path / "run.json").write_text('{"options": {"mod')
        source = read_warm_start(str(tmp_path), "", 1)
        assert [trial_of_run.number for trial_of_run in source.trials] == [0, 1]
        assert source.fingerprint is None
        assert (tmp_path / "trials.csv").read_bytes() == whole[:-cut]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "it holds no measurements; give the folder of a run, or a table"),
        (b"", "is empty; a table begins with a line that names its columns"),
        (b"a,b\n1,2\n", "lacks the columns max_batch_size, "),
        (b"\xff\xfe\0", "is not UTF-8 text"),
    ],
)
def test_a_path_without_a_study_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "trials.csv").write_bytes(content)
    with pytest.raises(BadInputError) as refused:
        read_warm_start(str(tmp_path), "", 1)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_table_of_several_machines_is_refused(tmp_path: Path) -> None:
    for fingerprint in ("aa", "bb"):
        table = TrialsTable(tmp_path / "trials.csv", "m", {}, fingerprint)
        table.append(Trial(0, Candidate(8)), LoadPoint(1, 1), measurement(1, 1))
    with pytest.raises(BadInputError, match="has rows of 2 devices or servers; keep only those of one"):
        read_warm_start(str(tmp_path), "", 1)


def test_only_a_run_that_has_begun_continues_without_its_warm_start(tmp_path: Path) -> None:
    task = cast("Task", SimpleNamespace(problem=PROBLEM, comparisons=list))
    options, entry = RunOptions("known", warm_start=str(tmp_path / "nowhere")), RunFolder(tmp_path)
    for resumed in (None, entry):  # a batch makes the folder of an entry before its run begins
        with pytest.raises(BadInputError, match="nowhere: no such run"):
            load_warm_start(options, task, resumed)
    entry.info.write_text("{}")
    transferred, notes = load_warm_start(options, task, entry)
    assert transferred is None
    assert "nowhere: no such run" in str(notes[0])


# -- selection ----------------------------------------------------------------------------------------------------


def test_fitting_trials_are_used_and_notes_count_the_rest(problem: Problem) -> None:
    compared = (Candidate(128, fields=(("x", 1),)), Candidate(16, True))
    inside, outside = trial(0, compared[1], 5.0), trial(1, Candidate(32, True), 6.0)
    (tested,) = inside.measurements
    inside = replace(inside, confirmations=(ConfirmationWindow(1, *tested, 0.01),))
    other_size = trial(2, compared[1], 7.0, batch=2)
    source = WarmStartSource("r", (inside, outside, other_size, trial(3, compared[0], 1.0)), "other", THERE, 16)
    transferred, notes = select_fitting(source, problem, compared)
    assert [fitting_trial.number for fitting_trial in transferred.trials] == [0, 3], (
        "what is compared with may lie outside"
    )
    assert not any(fitting_trial.confirmations for fitting_trial in transferred.trials), "they are of another run"
    assert transferred.cpu_count == 16
    assert [str(note) for note in notes] == [
        "warm start: 2 configurations of r on Other CPU, 16 CPUs · embedded server 2.50.0, onnxruntime 1.19",
        "r tuned the model other: the search learns how far its trials apply here",
        "1 configuration of r was left out: not in this space",
        "1 measurement of r was left out: other request batch sizes",
    ]


def test_other_models_or_shares_of_the_load_are_refused(tmp_path: Path, problem: Problem) -> None:
    """The measurements are those of another load. A table without run.json or sweep.json has no shares."""
    run, swept, table = tmp_path / "run", tmp_path / "swept", tmp_path / "table"
    for folder in (run, swept, table):
        folder.mkdir()
        write(folder / "trials.csv", [trial(0, Candidate(16, True), 5.0)])
    RunFolder(run).write_info(RunOptions("m"), {"problem": {"concurrent_models": "second=3"}})
    (swept / "sweep.json").write_text('{"options": {}, "concurrent_models": "second=3"}')
    for folder in (run, swept):
        source = read_warm_start(str(folder), "", 1)
        assert source.shares == {"second": 3.0}
        for shares, here in (({}, ""), ({"second": 1.0}, ", second 1")):
            name = problem.model
            why = rf"^--warm-start .*: its load is {name} 1, second 3, and here it is {name} 1{here}; leave it out$"
            with pytest.raises(BadInputError, match=why):
                select_fitting(source, problem, (), shares)
        assert select_fitting(source, problem, (), {"second": 3.0})[0].trials
    assert select_fitting(read_warm_start(str(table), "", 1), problem, (), {"second": 1.0})[0].trials
    RunFolder(table).write_info(RunOptions("m"), {"problem": None})
    assert read_warm_start(str(table), "", 1).shares is None, "only the table is needed"


def test_settings_of_other_models_that_a_sweep_does_not_vary_are_as_given(problem: Problem) -> None:
    fields = {"second/instance_group_count": (1, 2)}
    problem = replace(problem, space=replace(problem.space, fields=fields))
    given = Candidate(16, fields=(("second/instance_group_count", 2),))
    source = WarmStartSource("r", (trial(0, Candidate(16, True), 5.0),))
    (fitting,) = select_fitting(source, problem, (given,))[0].trials
    assert fitting.candidate == replace(given, dynamic_batching=True)


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        ((), "it holds no measurements"),
        ((Trial(0, Candidate(16), status="failed", reason="no memory"),), "it holds no measurements"),
        ((trial(0, Candidate(32, True), 1.0),), "none of its configurations is in this space"),
        ((trial(0, Candidate(16, True), 1.0, batch=2),), "its request batch sizes differ from 1"),
    ],
)
def test_a_study_without_a_fitting_trial_is_refused_on_one_line(
    problem: Problem, trials: tuple[Trial, ...], why: str
) -> None:
    with pytest.raises(BadInputError) as refused:
        select_fitting(WarmStartSource("r", trials), problem, ())
    assert str(refused.value) == f"--warm-start r: {why}; leave it out"


def test_the_best_transferred_candidates_met_the_bounds_on_their_machine(problem: Problem) -> None:
    slow, quick, best, missed, failed, outside = (
        trial(0, Candidate(4, True), 10.0),
        trial(1, Candidate(16, True), 20.0),
        trial(2, Candidate(64, True), 30.0),
        trial(3, Candidate(64, True, 1000), 99.0, 25.0),
        Trial(4, Candidate(16, True, 1000), status="failed", reason="x"),
        trial(5, Candidate(999, True), 99.0),
    )
    best_candidates = TransferredStudy((slow, quick, best, missed, failed, outside)).best(problem)
    assert best_candidates == [best.candidate, quick.candidate, slow.candidate, missed.candidate]


# -- learning ----------------------------------------------------------------------------------------------------


def residuals(at: Sequence[float], wrong: Sequence[float]) -> Residuals:
    """Return errors of the throughput along one setting, each in its own deployment, without errors of the tail."""
    inputs = np.zeros((len(at), 9))
    inputs[:, 0] = at
    values = np.stack([np.array(wrong), np.zeros(len(at))], axis=1)
    return Residuals(inputs, values, list(range(len(at))), np.full(len(at), 0.3), np.zeros(len(at)))


def error_posterior(correction: SimulationErrorModel, at: float, expected: float = 0.0) -> tuple[float, float]:
    """Return mean and standard deviation of the throughput's error over all components of the posterior."""
    inputs = np.zeros((1, 9))
    inputs[0, 0] = at
    predictions = correction.predict(inputs, np.array([[expected, 0.0]]))
    odds = np.array(correction.probabilities)
    means = np.array([component_mean[0, 0] for component_mean, _ in predictions])
    spreads = np.array([component_spread[0, 0] for _, component_spread in predictions])
    mean = float(odds @ means)
    return mean, math.sqrt(odds @ (spreads**2 + means**2) - mean**2)


def wrong_there(at: float) -> float:
    return 0.3 * math.sin(4 * at)


FEW, MANY = (0.0, 0.5, 1.0, 1.5), np.linspace(0, 3, 25).tolist()
THERE_CORRECTION = SimulationErrorModel(residuals(MANY, [0.0] * len(MANY)), ERRORS)


def correction_after(wrong: Sequence[float]) -> SimulationErrorModel:
    """Return the correction after these errors at FEW, where ``wrong_there`` are expected."""
    expected = np.array([[wrong_there(at), 0.0] for at in FEW])
    return SimulationErrorModel(residuals(FEW, wrong), ERRORS, SourceResiduals(THERE_CORRECTION, expected))


def test_a_transfer_between_similar_machines_leaves_few_trials() -> None:
    wrong = [wrong_there(at) for at in FEW]
    alike, alone = correction_after(wrong), SimulationErrorModel(residuals(FEW, wrong), ERRORS)
    mean, deviation = error_posterior(alike, 2.7, wrong_there(2.7))
    assert mean == pytest.approx(wrong_there(2.7), abs=0.07)
    assert deviation < 0.5 * error_posterior(alone, 2.7)[1]


def test_a_transfer_between_different_machines_does_no_harm() -> None:
    wrong = [-wrong_there(at) for at in FEW]
    unlike, alone = correction_after(wrong), SimulationErrorModel(residuals(FEW, wrong), ERRORS)
    assert unlike.probabilities == [1.0]
    assert error_posterior(unlike, 2.0, wrong_there(2.0)) == error_posterior(alone, 2.0)


# -- searches -----------------------------------------------------------------------------------------------------


def slower(trials: Sequence[Trial], factor: float) -> TransferredStudy:
    """Return the same trials on a machine that is slower by ``factor`` in everything."""

    def on(measurement: Measurement) -> Measurement:
        times = {name: ms * factor for name, ms in asdict(measurement).items() if name.endswith("_ms") and ms}
        executed = batch_stats.from_text(measurement.batch_stats)
        longer = ((size, executions, round(ns * factor)) for size, executions, ns in executed)
        return replace(
            measurement,
            throughput_infer_per_sec=(measurement.throughput_infer_per_sec or 0.0) / factor,
            batch_stats=batch_stats.to_text(longer),
            **times,
        )

    return TransferredStudy(
        tuple(
            replace(trial_of_run, measurements=tuple((load, on(m)) for load, m in trial_of_run.measurements))
            for trial_of_run in trials
        )
    )


def tuned(
    problem: Problem,
    table: Sequence[Trial],
    path: Path,
    method: str,
    transferred: TransferredStudy | None,
    trials: int = 99,
) -> list[Trial]:
    """Return the trials of a run on the known table; its study and its table are stored in ``path``."""
    server = RecordedServer(list(table))
    kept = TrialsTable(path / "trials.csv", problem.model, {})
    searcher = make_searcher(method, problem, 0, str(path / "study.journal"), "s", transferred=transferred)
    measuring = Measurer(server, server, kept, QuietObserver())
    budget, compared = Budget(math.inf, trials), baselines(problem.space)
    return run_trials(Scheduler(problem, searcher, budget, Stopwatch(), compared), server, measuring)


def test_the_simulated_search_needs_fewer_deployments() -> None:
    recording = read_recording(TABLES / "wide.csv")
    problem = recorded_problem(recording, {"p95": 20.0})
    there = slower(recording.trials()[::3], 2.5)
    alone, warm = (replay(recording, problem, "simulated", 0, 30, transferred=study) for study in (None, there))
    assert warm.effort.deployments <= 0.75 * alone.effort.deployments
    assert warm.regret <= 0.01


def test_the_first_suggestion_is_the_best_transferred_candidate(problem: Problem, known_table: list[Trial]) -> None:
    transferred = slower(known_table, 2.5)
    assert make_searcher("simulated", problem, transferred=transferred).suggest() == transferred.best(problem)[0]


@pytest.mark.parametrize("method", ["tpe", "nsga2", "random"])
def test_optunas_samplers_begin_once_with_the_best_transferred_candidates(
    method: str, problem: Problem, known_table: list[Trial], tmp_path: Path
) -> None:
    transferred, storage = slower(known_table, 2.5), str(tmp_path / "study.journal")
    searcher = make_searcher(method, problem, 0, storage, "s", transferred=transferred)
    first_candidates: list[Candidate] = []
    for number in range(MAX_TRANSFERRED):
        candidate = searcher.suggest()
        assert candidate is not None
        first_candidates.append(candidate)
        searcher.observe(trial(number, candidate, 1.0))
    assert first_candidates == transferred.best(problem)[:MAX_TRANSFERRED]
    again = make_searcher(method, problem, 0, storage, "s", transferred=transferred)
    assert again.suggest() not in first_candidates
    study = optuna.load_study(study_name="s", storage=optuna_storage(storage))
    assert not [study_trial for study_trial in study.trials if study_trial.state == optuna.trial.TrialState.WAITING]


def test_transferred_failures_and_request_rates_do_no_harm(problem: Problem) -> None:
    candidates = problem.space.candidates()
    rated = Trial(0, candidates[3], ((LoadPoint(1, request_rate=100.0), measurement(100.0, 10.0)),))
    failed = Trial(1, candidates[4], status="failed", reason="no memory")
    for transferred in (TransferredStudy((rated, failed)), TransferredStudy((failed,))):
        searcher = make_searcher("simulated", problem, transferred=transferred)
        searcher.observe(trial(0, Candidate(1), 100.0))
        assert searcher.suggest() in candidates


def test_odd_figures_do_no_harm() -> None:
    extreme = replace(measurement(1e12, 1e6), batch_stats="1:9:1 16:99:9000000000", queue_ms=1e6)
    transferred, _ = select_fitting(
        WarmStartSource("r", (Trial(0, Candidate(16, True), ((LoadPoint(1, 64), extreme),)),)), PROBLEM, ()
    )
    searcher = make_searcher("simulated", PROBLEM, transferred=transferred)
    searcher.observe(Trial(0, Candidate(1), ((LoadPoint(1, 4), measure_known_server(Candidate(1), 4, 1)),)))
    assert searcher.suggest() in SPACE.candidates()


def test_a_baseline_with_larger_batches_than_the_space_and_the_source_is_learned_from() -> None:
    problem = replace(PROBLEM, space=SearchSpace((1, 4, 16), ("off", 0, 1000), instance_count=(1, 2)))

    def measured_trial(number: int, candidate: Candidate) -> Trial:
        return Trial(
            number,
            candidate,
            tuple((LoadPoint(1, load), measure_known_server(candidate, load, 1)) for load in (4, 32)),
        )

    transferred = TransferredStudy(
        tuple(measured_trial(n, candidate) for n, candidate in enumerate(problem.space.candidates()))
    )
    searcher = make_searcher("simulated", problem, transferred=transferred)
    searcher.observe(measured_trial(0, Candidate(64, True)))
    assert searcher.suggest() in problem.space.candidates()


def test_measurements_that_cannot_be_simulated_are_left_out() -> None:
    simulated_trial = trial(0, Candidate(16, True), 1.0)
    changes: list[dict[str, Any]] = [
        {"throughput_infer_per_sec": 0.0},
        {"batch_stats": "17:1:1"},
    ]
    ((load, measured),) = simulated_trial.measurements
    odd = [(load, replace(measured, **changed)) for changed in changes] + [(LoadPoint(1, 65536), measured)]
    for cell in odd:
        wrong = replace(simulated_trial, measurements=(cell,))
        with pytest.raises(BadInputError, match="it holds no measurements"):
            select_fitting(WarmStartSource("r", (wrong,)), PROBLEM, ())


@pytest.mark.parametrize(("measured_model", "fits"), [("second", True), ("third", False)])
def test_measurements_without_the_models_under_load_are_left_out(measured_model: str, fits: bool) -> None:
    """A table without run.json may be of any models."""
    problem = replace(PROBLEM, concurrent=(ConcurrentModel("second", 1.0, Candidate(8)),))
    ((load, measured),) = trial(0, Candidate(16, True), 1.0).measurements
    by_model = model_stats.to_text({"first": measured, measured_model: measured})
    tried = Trial(0, Candidate(16, True), ((load, replace(measured, by_model=by_model)),))
    with contextlib.nullcontext() if fits else pytest.raises(BadInputError, match="it holds no measurements"):
        assert select_fitting(WarmStartSource("r", (tried,)), problem, ())[0].trials


def optuna_storage(path: str) -> optuna.storages.BaseStorage:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))


# -- never ranked -------------------------------------------------------------------------------------------------


@st.composite
def studies(draw: st.DrawFn) -> list[tuple[int, float, float]]:
    """Generate studies of (candidate, throughput, p95) that look better than all candidates of this machine."""
    measured_candidates = st.tuples(st.integers(0, 13), st.floats(MARK, 2 * MARK), st.floats(0.001, 5))
    return draw(st.lists(measured_candidates, min_size=1, max_size=8))


def check_rankings(method: str, study: list[tuple[int, float, float]], path: Path) -> None:
    loads = (1, 2, 4, 8, 16, 32, 64)
    candidates = SPACE.candidates()
    table = [
        Trial(n, candidate, tuple((LoadPoint(1, c), measure_known_server(candidate, c, 1)) for c in loads))
        for n, candidate in enumerate(candidates)
    ]
    problem = replace(PROBLEM, space=recorded_space({candidate: set(loads) for candidate in candidates}, 1))
    transferred = TransferredStudy(tuple(trial(n, candidates[i], *figures) for n, (i, *figures) in enumerate(study)))
    trials = tuned(problem, table, path, method, transferred, trials=4)
    (_, baseline), (_, plain) = baselines(problem.space)
    outcome = assess(trials, problem, baseline, plain)
    assert outcome.trials == len(trials) <= 4
    shown = [*outcome.front.points, *filter(None, (outcome.recommended, outcome.closest, outcome.baseline.point))]
    assert shown
    assert all(point.throughput_infer_per_sec < MARK for point in shown)
    rows = read_rows(path / "trials.csv")
    assert len(rows) == outcome.measurements
    assert all(float(row["throughput_infer_per_sec"]) < MARK for row in rows)
    kept = optuna.load_study(study_name="s", storage=optuna_storage(str(path / "study.journal")))
    assert max(value for study_trial in kept.trials for value in study_trial.values or ()) < MARK
    points = [point for study_trial in kept.trials for point in study_trial.user_attrs.get("points", ())]
    assert max(point["throughput_infer_per_sec"] for point in points) < MARK


@settings(max_examples=10)
@given(study=studies())
def test_tpe_ranks_and_counts_no_transferred_measurement(
    study: list[tuple[int, float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_rankings("tpe", study, tmp_path_factory.mktemp("run"))


def test_the_simulated_search_ranks_and_counts_no_transferred_measurement(tmp_path: Path) -> None:
    check_rankings("simulated", [(n, (1 + n / 10) * MARK, 1.0) for n in range(8)], tmp_path)


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_shows_the_search_with_and_without_the_warm_start(sandbox: Sandbox, called_tune: Tune) -> None:
    for name in ("here.csv", "there.csv"):
        (sandbox.working_folder / name).write_bytes((DATA / "known.csv").read_bytes())
    arguments = ("replay", "--sla-p95", "20ms", "--search", "tpe", "--max-trials", "5", "here.csv")
    ended = called_tune(*arguments, "--json", "--warm-start", "there.csv")
    assert (ended.code, ended.stderr_lines) == (0, ["tune: note: warm start: 14 configurations of there.csv"])
    document = json.loads(ended.stdout)
    assert set(document) == {"tpe", "tpe warm"}
    assert document["tpe warm"]["regret"] == 0
    for name in ("here.csv", "there.csv"):
        (sandbox.working_folder / name).unlink()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "replay --warm-start nothing known.csv",
            "tune: --warm-start nothing: no such run; give its folder",
        ),
        ("replay --warm-start known.csv --search grid known.csv", "tune: --warm-start: --search grid measures every"),
        ("run --warm-start known.csv --search grid mlp", "tune: --warm-start: --search grid measures every"),
    ],
)
def test_an_unusable_warm_start_is_refused_in_one_line(
    arguments: str, says: str, sandbox: Sandbox, called_tune: Tune
) -> None:
    (sandbox.working_folder / "known.csv").write_bytes((DATA / "known.csv").read_bytes())
    ended = called_tune(*arguments.split())
    assert ended.code == 2
    (line,) = ended.stderr_lines
    assert line.startswith(says)
