"""Tests of ``tune plan`` on the sample run: text, JSON, refused options, and recordings with gaps."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from optimizer.cli.plan import build_parser, main, read_question
from optimizer.core.candidate import SETTING_COLUMNS
from optimizer.core.errors import BadInputError
from optimizer.emit.kubernetes import target_load
from optimizer.emit.production import ProductionServer, read_repository
from optimizer.emit.recommended import read_recommendation
from optimizer.plan.capacity_plan import CapacityPlan, CapacityQuestion, FleetPlan, plan_by_simulation
from optimizer.plan.plan_report import document, headline, print_plan
from optimizer.results.finished_run import read_run
from optimizer.store.run_folder import RunFolder
from optimizer.study.planned_runs import PlannedRuns
from tests.csv_tables import read_rows, write_rows, write_timestamps
from tests.run_folders import change_info, copy_run

SAMPLE = Path("tests/data/dlrm/sample").resolve()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "results" / "dlrm" / "sample"))


def planned(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def question_of(*words: str | Path) -> CapacityQuestion:
    return read_question(build_parser().read([*map(str, words)]))


def plan_of(*words: str | Path) -> tuple[dict[str, Any], str]:
    """Return the document and the text of one plan."""
    names = build_parser().read([*map(str, words)]).names
    capacity = plan_by_simulation(question_of(*words), [read_run(name) for name in names])
    text = io.StringIO()
    print_plan(Console(file=text, width=80), capacity)
    return json.loads(json.dumps(document(capacity))), text.getvalue()


@pytest.fixture(scope="module")
def day() -> tuple[dict[str, Any], str]:
    """Return the document and the text of the plan for a day, whose autoscaler takes a second to simulate."""
    words = ("--traffic", "diurnal", "--peak-factor", "2", "--rate", "20000/s", "--gpu-hour-cost", "1")
    return plan_of(SAMPLE, *words)


def found_runs(results: Path, *names: str | Path) -> list[str]:
    """Return the folders, in ``results``, of the runs with which ``names`` are planned."""
    runs = PlannedRuns(str(results), {}, pytest.fail, lambda: pytest.fail("a run begins"))
    return [str(found.folder.path.relative_to(results)) for found in runs.find([*map(str, names)])]


def test_a_folder_of_runs_is_refused_with_its_newest_run(run: Path) -> None:
    """The folder of a model outside of --results is no model to tune either."""
    for folder in (run.parent, run.parent.parent):
        for results in (run.parent.parent, run):
            with pytest.raises(BadInputError) as caught:
                main([str(folder), "--rate", "100/s", "--results", str(results)])
            assert str(caught.value) == (
                f"run {folder}: is a folder of runs; give one of them, such as the newest: {run}"
            )


def test_a_model_is_found_from_inside_the_folder_of_results(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    assert found_runs(Path(), "dlrm") == ["dlrm/sample"]


def keep_few_deployments(run: Path) -> None:
    """Remove most trials: after the 13 equal deployments of the sample, further ones save less than a replica."""
    table = run / "trials.csv"
    write_rows(table, (row for row in read_rows(table) if row["trial"] in ("0", "1", "10")))
    change_info(run, result={})  # it counts all rows


LIMITED = """\
import resource, sys
from optimizer.cli.plan import main
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
print(*(main([run, "--rate", "1000/s"]) for run in sys.argv[1:]), file=sys.stderr)
"""


def test_an_extreme_value_in_the_range_of_a_column_does_not_exhaust_the_machine(run: Path) -> None:
    """Triton's sizes reach 2147483647; a table of service times up to that batch would take gigabytes."""
    keep_few_deployments(run)
    changed_runs = []
    for columns in (("max_batch_size",), ("max_queue_delay_us",), ("max_batch_size", "request_batch_size")):
        changed_run = copy_run(run, "-".join(columns))
        rows = read_rows(changed_run / "trials.csv")
        confirmed = next(row for row in rows if row["confirmation"])
        of_trial = [row for row in rows if row["trial"] == confirmed["trial"]]
        for row in of_trial:  # all rows of a trial have its settings
            row |= {name: "2147483647" for name in columns if name in SETTING_COLUMNS}
        of_trial[0] |= dict.fromkeys(columns, "2147483647")
        write_rows(changed_run / "trials.csv", rows)
        changed_runs.append(str(changed_run))
    ended = subprocess.run([sys.executable, "-c", LIMITED, *changed_runs], capture_output=True, text=True, check=True)
    assert set(ended.stderr.splitlines()[-1].split()) <= {"0", "1", "4"}, ended.stderr


def test_a_rate_gives_replicas_with_latency_headroom_and_cost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, run, "--rate", "40000/s", "--sla-p95", "20ms", "--gpu-hour-cost", "2.5")
    (answer,) = result["answers"]
    assert (result["verdict"], answer["undecided_cause"], answer["next_command"]) == ("PASS", None, None)
    assert (
        3 <= answer["count"]["low"] <= answer["count"]["likely"] <= answer["count"]["safe"] == answer["replicas"] <= 5
    )
    assert answer["rate_infer_per_sec"] == 40_000
    assert answer["rate_requests_per_sec"] == 10_000
    assert answer["at_rate"]["meets_sla"]
    assert answer["at_rate"]["latency_ms"] < 20
    assert answer["n_plus_1_replicas"] == answer["replicas"] + 1
    assert answer["burst_replicas"] > answer["replicas"]
    latencies = [load["latency_ms"] for load in answer["headroom"]]
    assert latencies == sorted(latencies)
    assert answer["cost"]["per_hour"] == 2.5 * answer["replicas"]
    assert answer["power"] == {"watts": None, "joules_per_1000": None}
    assert answer["gpus"] is None
    assert "with a 20 ms bound on p95 one machine" in answer["capacity_sentence"]
    assert "handles 47 concurrent requests of 4 samples, 13,400 ±" in answer["capacity_sentence"]
    assert "1.776.030 recommendations/sec" in answer["published"]["quotation"]


def test_a_rate_in_requests_gives_the_same_plan_as_one_in_inferences(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_requests = planned(capsys, run, "--rate", "2000req/s")["answers"][0]
    by_inferences = planned(capsys, "dlrm", "--rate", "8000/s", "--results", run.parent.parent)["answers"][0]
    assert by_requests == by_inferences
    assert by_requests["runs"] == ["dlrm/sample"]


def test_the_name_of_a_model_may_have_a_dot(run: Path) -> None:
    results = run.parent.parent
    run.parent.rename(run.parent.with_name("resnet50"))
    with pytest.raises(BadInputError, match=r"no model 'resnet50\.v1'"):
        found_runs(results, "resnet50.v1")
    run.parent.with_name("resnet50").rename(run.parent.with_name("resnet50.v1"))
    assert found_runs(results, "resnet50.v1") == ["resnet50.v1/sample"]


def test_a_file_is_planned_with_the_run_of_its_model(run: Path) -> None:
    run.parent.rename(run.parent.with_name("resnet.v1"))
    for path in ("resnet.v1/model.onnx", "resnet.v1.onnx"):
        assert found_runs(run.parent.parent, f"models/{path}") == ["resnet.v1/sample"]


def test_a_profile_is_planned_with_its_own_run_although_others_have_its_model(run: Path, tmp_path: Path) -> None:
    profile, missing_profile = tmp_path / "own.yaml", tmp_path / "gone.yaml"
    profile.write_text("model: {builder: dlrm, settings: {}}\n")
    copy_run(run, "20261120-000000", options={"model": str(profile)})
    copy_run(run, "20261121-000000", options={"model": str(missing_profile)})
    copy_run(run, "20261122-000000", options={"model": "bert-large"})
    assert found_runs(run.parent.parent, profile) == ["dlrm/20261120-000000"]
    assert found_runs(run.parent.parent, "dlrm") == ["dlrm/20261122-000000"]


def test_the_rate_of_replicas_needs_these_replicas(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sustainable_rate = planned(capsys, run, "--gpus", "5")["answers"][0]
    assert sustainable_rate["replicas"] == 5
    assert (
        sustainable_rate["replicas"] * 10_000
        < sustainable_rate["rate_infer_per_sec"]
        < sustainable_rate["replicas"] * 13_315
    )
    paid = planned(capsys, run, "--max-cost", "12", "--gpu-hour-cost", "2.4")["answers"][0]
    assert paid["replicas"] == 5
    assert paid["rate_requests_per_sec"] == sustainable_rate["rate_requests_per_sec"]


def test_a_budget_gives_the_tightest_bound_that_its_replicas_meet(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (run, "--max-cost", "9", "--gpu-hour-cost", "3", "--rate", "20000/s")
    answer = planned(capsys, *words)["answers"][0]
    bound_ms = answer["tightest_bound_ms"]
    assert 5 < bound_ms < 20
    met, missed = (
        planned(capsys, run, "--rate", "20000/s", "--sla-p95", f"{factor * bound_ms}ms")["answers"][0]
        for factor in (1.02, 0.98)
    )
    assert met["replicas"] == answer["replicas"] == 3
    assert missed["replicas"] > 3


def test_a_day_is_planned_for_its_peak(day: tuple[dict[str, Any], str]) -> None:
    (answer,) = day[0]["answers"]
    assert answer["rate_infer_per_sec"] == 40_000
    assert answer["replicas"] in (4, 5)
    assert answer["cost"]["per_million"] == pytest.approx(answer["replicas"] / 72)
    assert max(answer["replicas_by_hour"]) == answer["replicas"]
    assert min(answer["replicas_by_hour"]) <= 2
    assert answer["cost"]["scaled_per_hour"] < answer["cost"]["per_hour"]


def test_a_minimum_above_the_default_maximum_is_the_maximum_too() -> None:
    autoscaler = question_of(SAMPLE, "--rate", "9/s", "--traffic", "diurnal", "--min-replicas", "12").autoscaler
    assert autoscaler is not None
    assert (autoscaler.min_replicas, autoscaler.max_replicas) == (12, 12)


def test_replicas_serve_the_same_peak_on_a_day_and_half_of_it_on_average() -> None:
    """The rate of a question is the mean of the day, and the bound of its answer holds at the peak."""
    day = ("--traffic", "diurnal", "--peak-factor", "2")

    def answer(*words: str) -> FleetPlan:
        question = question_of(SAMPLE, "--gpus", "3", "--gpu-hour-cost", "1", *words)
        without_test = replace(question, autoscaler=None)  # its simulation of a day takes a second
        (answer,) = plan_by_simulation(without_test, [read_run(SAMPLE)]).answers
        return answer

    steady, daily = answer(), answer(*day)
    assert daily.rate == steady.rate
    assert steady.cost is not None
    assert daily.cost is not None
    assert daily.cost.per_million == pytest.approx(2 * (steady.cost.per_million or 0))
    peak, mean = answer("--rate", "20000/s"), answer("--rate", "10000/s", *day)
    assert mean.rate == peak.rate == 20_000 / 4, "in requests of four samples"
    assert mean.simulated is not None
    assert peak.simulated is not None
    assert mean.simulated.tightest_bound_ms == peak.simulated.tightest_bound_ms


def test_further_measurements_and_forecast_errors_are_reported(run: Path) -> None:
    keep_few_deployments(run)
    plan, text = plan_of(run, "--rate", "900000/s", "--gpu-hour-cost", "2")
    (answer,) = plan["answers"]
    further, errors = answer["further_measuring"], answer["forecast_errors"]
    assert further["deployments"] > 10
    assert further["count"]["safe"] < answer["count"]["safe"]
    assert further["count"]["likely"] == answer["count"]["likely"]
    assert further["saved_per_hour"] == pytest.approx(2 * (answer["replicas"] - further["count"]["safe"]))
    assert 0 < errors["throughput"] < 0.1
    assert 0 < errors["latency"] < 0.2
    printed = " ".join(text.split())
    saved = answer["replicas"] - further["count"]["safe"]
    expected = f"{further['count']['safe']} replicas would be the expected answer at 99 % confidence"
    assert f"deployments), {expected}, {saved} fewer" in printed
    assert f"{saved} fewer, which saves {2 * saved:.2f} per hour" in printed
    plan, text = plan_of(run, "--gpus", "50")
    (rates,) = plan["answers"]
    assert rates["further_measuring"]["sustainable_rate"]["safe"] > rates["sustainable_requests_per_sec"]["safe"]
    assert "infer/s would be the expected answer at 99 % confidence" in " ".join(text.split())
    (bound,) = plan_of(run, "--gpus", "50", "--rate", "100000/s")[0]["answers"]
    assert bound["further_measuring"] is None


def test_the_emitted_autoscaler_is_tested_on_a_day(
    run: Path, day: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (run, "--traffic", "diurnal", "--peak-factor", "2", "--rate", "20000/s")
    plan, text = day
    test = plan["answers"][0]["autoscaler_test"]
    recommendation = read_recommendation(read_run(str(run), "results"))
    emitted = ProductionServer(recommendation, "image", read_repository("/models"), "dlrm")
    assert test["target"] == target_load(emitted)
    assert test["seconds"] == 24 * 3600
    assert (test["autoscaler"]["max_replicas"], test["autoscaler"]["cool_down_s"]) == (emitted.max_replicas, 300.0)
    options = ("--target-utilization", "30%", "--max-replicas", "40", "--replica-start", "90s", "--cool-down", "10m")
    careful = planned(capsys, *words, *options)["answers"][0]["autoscaler_test"]
    assert careful["start_s"] == 90.0
    assert careful["over_bound_share"] < test["over_bound_share"]
    assert careful["too_few_seconds"] < test["too_few_seconds"]
    assert re.search(r"too few replicas for [\dhmins ]+ of 24 h,", " ".join(text.split()))
    assert main([*map(str, words), "--max-replicas", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 to 2 replicas, each with" in printed
    assert "give --max-replicas here and to `tune emit`" in printed


def test_no_number_of_replicas_is_exit_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--rate", "1000/s", "--sla-p95", "1ms"]) == 1
    assert "no number of replicas meets p95 <= 1 ms safely: its latency is" in capsys.readouterr().out


@pytest.mark.parametrize("rate", [(), ("--rate", "8000/s")])
def test_a_budget_below_one_replica_is_named(
    run: Path, rate: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *rate, "--max-cost", "1", "--gpu-hour-cost", "2.5"]) == 1
    assert "dlrm: the budget is too small for one replica of" in capsys.readouterr().out


def test_replicas_that_cannot_serve_the_rate_have_no_forecast_and_no_cost_of_an_inference(run: Path) -> None:
    plan, text = plan_of(run, "--rate", "90000/s", "--max-cost", "5", "--gpu-hour-cost", "2.5")
    (answer,) = plan["answers"]
    assert (plan["found"], plan["verdict"], answer["verdict"]) == (False, "FAIL", "FAIL")
    assert (answer["replicas"], answer["tightest_bound_ms"]) == (2, None)
    assert (answer["cost"]["per_hour"], answer["cost"]["per_million"]) == (5.0, None)
    shown = " ".join(text.split())
    served = f"{4 * answer['sustainable_requests_per_sec']['safe']:,.0f} infer/s ("
    assert shown.startswith(
        "dlrm: 2 replicas cannot safely serve 90,000 infer/s (22,500 req/s of 4) within any bound, but " + served
    )
    assert "5.00 per hour, 3,650.00 per month (730 hours) power" in shown
    assert "measured throughput" not in shown
    assert "per million" not in shown
    assert re.search(r"^each +\d+ % of its capacity, 45,000 infer/s$", text, re.MULTILINE)
    assert re.search(r"^ +100 % +90,000 +– +\d+ % +100 % +no$", text, re.MULTILINE)


def test_one_replica_serves_a_rate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--rate", "8000/s", "--gpus", "1"]) == 0
    assert capsys.readouterr().out.startswith("dlrm: 1 replica serves 8,000 infer/s")


def test_fewer_gpus_than_a_replica_has_are_named(run: Path) -> None:
    question = question_of(run, "--gpus", "1")
    (answer,) = plan_by_simulation(question, [read_run(run)]).answers
    two_gpus = replace(answer.configuration, gpus=2)
    none = replace(answer, configuration=two_gpus, replicas=0, rate=0.0, sustainable_rate=None, simulated=None)
    assert headline(CapacityPlan(question, (none,)), none) == "dlrm: a replica needs 2 GPUs, more than --gpus 1"


def test_a_latency_within_the_bound_is_not_given_as_the_reason_for_missing_it(run: Path) -> None:
    question = question_of(run, "--rate", "1000/s")
    found = plan_by_simulation(question, [read_run(run)])
    unsafe = replace(found.answers[0], count=None, replicas=0, simulated=None, unloaded_latency_ms=5.0)
    assert headline(found, unsafe).endswith(
        "safely: 5.00 ms is expected without load, but the measured deployments differ too much"
    )
    assert headline(found, replace(unsafe, unloaded_latency_ms=500.0)).endswith("its latency is 500 ms without load")


def test_an_undecided_run_is_exit_4(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = run / "trials.csv"
    write_rows(table, (row for row in read_rows(table) if not row["confirmation"]))
    change_info(run, result={})  # it counts all rows
    plan, printed = plan_of(run, "--rate", "1000/s")
    (answer,) = plan["answers"]
    assert (plan["found"], plan["verdict"], answer["verdict"]) == (True, "UNDECIDED", "UNDECIDED")
    assert answer["next_command"] == f"tune verify {run} --budget 3m"
    assert f"the run is UNDECIDED: {answer['undecided_cause']}" in " ".join(printed.split())
    assert answer["next_command"] in printed
    assert planned(capsys, run, "--rate", "1000/s", "--sla-p95", "1ms", code=1)["verdict"] == "FAIL"
    cut_off = copy_run(run, "cut_off", status="interrupted")
    (answer,) = planned(capsys, cut_off, "--rate", "1000/s", code=4)["answers"]
    assert answer["next_command"] == f"tune --resume {cut_off}"
    running = copy_run(run, "running", status="running")
    with RunFolder(running).locked():
        (answer,) = planned(capsys, running, "--rate", "1000/s", code=4)["answers"]
    assert (answer["undecided_cause"], answer["next_command"]) == ("the run is still running", None)


def test_runs_on_two_kinds_of_hardware_are_shown_side_by_side(run: Path) -> None:
    gpu = copy_run(run, "gpu", hardware={"gpus": ["Tesla T4", "Tesla T4"]}, server_uses_gpus=True)
    prices = ("t=9", "Xeon=0.1", "t4=0.5")  # "t" is a part of both names, and the longest part counts
    words = ("--rate", "12000/s", *(word for price in prices for word in ("--gpu-hour-cost", price)))
    plan, printed = plan_of(run, gpu, *words)
    plain, tesla = plan["answers"]
    assert (plain["hardware"], tesla["hardware"]) == ("Intel(R) Xeon(R) Processor @ 2.50GHz, 2 CPUs", "2x Tesla T4")
    assert tesla["gpus"] == 2 * tesla["replicas"]
    assert tesla["cost"]["per_hour"] == pytest.approx(tesla["gpus"] * 0.5)
    assert plain["cost"]["per_hour"] == pytest.approx(plain["replicas"] * 0.1)
    assert "per million" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert all(line == line.rstrip() for line in printed.splitlines())
    assert "\n\n\n" not in printed
    assert not printed.endswith("\n\n")


def test_a_price_of_other_hardware_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rate", "12000/s", "--gpu-hour-cost", "Xeon=0.1", "--gpu-hour-cost", "H100=3")
    assert main([str(run), *words]) == 0
    assert capsys.readouterr().err == (
        "tune: note: --gpu-hour-cost H100: this price is not used, because the name is no part of "
        "Intel(R) Xeon(R) Processor @ 2.50GHz, 2 CPUs\n"
    )


def test_a_plan_has_neither_trailing_blanks_nor_an_empty_last_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    own_model = copy_run(run, "own", problem={"facts": {}})
    assert main([str(own_model), "--rate", "12000/s"]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[1].startswith("(3,000 req/s of 4) within"), "the headline has several lines"
    assert not any(line.startswith("published") for line in lines)
    assert lines[-1]
    assert output.endswith("\n")
    assert all(line == line.rstrip() for line in lines)


def test_gpus_that_the_server_did_not_use_are_not_planned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of the run is computed by CPUs: each of the four machines has GPUs that are not used."""
    idle = copy_run(run, "idle", hardware={"gpus": ["NVIDIA H100"] * 8})
    (answer,) = planned(capsys, idle, "--gpus", "4", "--gpu-hour-cost", "2.5")["answers"]
    assert (answer["replicas"], answer["gpus"], answer["cost"]["per_hour"]) == (4, None, 10.0)
    assert "Xeon" in answer["hardware"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"problem": {"facts": {"sha256": "another"}}},
            r"but differ in the model \(SHA-256: 67b7817a39d2, another\)",
        ),
        ({"options": {"target": "local"}}, r"but differ in the server \(target: embedded, local\)"),
        ({"options": {"protocol": "http"}}, r"but differ in the requests \(protocol: grpc, http\)"),
    ],
)
def test_runs_under_other_conditions_are_not_combined(run: Path, changes: dict[str, Any], message: str) -> None:
    other = copy_run(run, "other", **changes)
    with pytest.raises(BadInputError, match=rf"have the same hardware, {message}; give only one"):
        main([str(other), str(run), "--rate", "9/s"])


@pytest.mark.parametrize("flag", ["--sla-ttft-p95", "--sla-p99.9"])
def test_a_bound_on_a_latency_that_was_not_measured_is_named(run: Path, flag: str) -> None:
    with pytest.raises(
        BadInputError, match=f"no measurement of its trials has {flag[6:]}, which {flag[6:]} <= 50 ms"
    ):
        main([str(run), "--rate", "9/s", flag, "50ms"])


def test_a_burst_beyond_the_largest_fleet_is_no_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--replicas", "60000"]) == 0
    assert "no number up to 100,000 is enough" in " ".join(capsys.readouterr().out.split())


def test_runs_of_one_hardware_are_read_together(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_few_deployments(run)
    (alone,) = planned(capsys, run, "--rate", "900000/s")["answers"]
    again = copy_run(run, "again", written="2026-11-22T07:24:26+0000")
    (both,) = planned(capsys, run, again, "--rate", "900000/s")["answers"]
    assert both["deployments"] == 2 * alone["deployments"]
    width = {plan["deployments"]: plan["count"]["safe"] - plan["count"]["low"] for plan in (alone, both)}
    assert width[both["deployments"]] < width[alone["deployments"]]


def test_the_newest_run_is_the_one_that_was_written_last_in_any_time_zone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = copy_run(run, "earlier", written="2026-11-29T01:00:00+0000")
    looser = {"constraints": ["p95 <= 30 ms"]}
    later = copy_run(run, "later", written="2026-11-28T23:30:00-0500", problem=looser)
    assert main([str(earlier), str(later), "--rate", "12000/s"]) == 0
    assert "within p95 <= 30 ms" in " ".join(capsys.readouterr().out.split())


# -- bad options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to plan: give --rate"),
        (["--rate", "0"], "--rate 0: write a positive rate"),
        (["--rate", "40k"], "--rate 40k: write a positive rate"),
        (["--rate", "5 qps"], "--rate 5 qps: write a positive rate"),
        (["--rate", "1000000000000/s"], "check the unit"),
        (["--gpus", "0"], "--gpus 0: write a whole number"),
        (["--gpus", "2", "--max-cost", "4"], "both set the number of replicas"),
        (["--max-cost", "4"], "--gpu-hour-cost is missing"),
        (["--max-cost", "nan", "--gpu-hour-cost", "1"], "--max-cost nan: write an amount above 0"),
        (["--max-cost", "4", "--gpu-hour-cost", "H100=1"], "--max-cost needs the price of Intel"),
        (["--rate", "9/s", "--gpu-hour-cost", "free"], "--gpu-hour-cost free: write an amount"),
        (["--rate", "9/s", "--sla-p95", "20"], "--sla-p95 20: a unit is missing"),
        (["--rate", "9/s", "--peak-factor", "2"], "works only with --traffic diurnal"),
        (
            ["--rate", "9/s", "--traffic", "diurnal", "--peak-factor", "3"],
            "--peak-factor 3: write a number from 1 to 2",
        ),
        (["--rate", "9/s", "--trace", "x.csv", "--traffic", "poisson"], "both set the traffic"),
        (["--rate", "9/s", "--trace", "no.csv"], "--trace no.csv: no such file; give a CSV file of timestamps"),
        (["--rate", "9/s", "--trace", ""], "--trace '': write a path"),
        (["--rate", "9/s", "--traffic", "diurnal", "--peak-factor", ""], "--peak-factor '': write a number from 1"),
        (["--rate", "9/s", "--traffic", "diurnal", "--metric-delay", ""], "--metric-delay '': the time is missing"),
        (["--rate", "9/s", "--balancer", "magic"], "invalid choice"),
        (["--rate", "9/s", "--cool-down", "5m"], "--cool-down: works only with --traffic diurnal or --trace"),
        (["--rate", "9/s", "--traffic", "diurnal", "--metric-delay", "9"], "--metric-delay 9: a unit is missing"),
        (["--rate", "9/s", "--traffic", "diurnal", "--replica-start", "2h"], "--replica-start 2h: write at most 1h"),
        (
            ["--rate", "9/s", "--traffic", "diurnal", "--min-replicas", "4", "--max-replicas", "3"],
            "--max-replicas 3: write a whole number from 4",
        ),
        (["--rate", "9/s", "--traffic", "diurnal", "--target-utilization", "0%"], "--target-utilization 0"),
    ],
)
def test_bad_options_are_refused_in_one_line(run: Path, words: list[str], message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        main([str(run), *words])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_runs_that_no_plan_can_use_are_refused(run: Path) -> None:
    other = copy_run(run, "other", problem={"model": "bert"})
    with pytest.raises(BadInputError, match="of different models"):
        main([str(run), str(other), "--rate", "9/s"])
    with pytest.raises(BadInputError, match=r"^run '': no run\.json there.*; give a run's folder, a model or latest"):
        main(["", "--rate", "9/s"])
    with pytest.raises(BadInputError, match=r"no run\.json there"):
        main([str(run.parent / "nosuch"), "--rate", "9/s", "--results", str(run.parent.parent)])
    for name in ("a" * 5000, f"a/{'b' * 5000}"):
        with pytest.raises(BadInputError, match=r"no model|no run"):
            main([name, "--rate", "10/s"])
    (run.parent / "swept").mkdir()
    (run.parent / "swept" / "sweep.json").write_text("{}")
    with pytest.raises(BadInputError, match="swept: is a sweep, which has no recommendation; `tune sweep --resume "):
        main([str(run.parent / "swept"), "--rate", "9/s", "--results", str(run.parent.parent)])
    unbounded = copy_run(run, "unbounded", problem={"constraints": []})
    with pytest.raises(BadInputError, match="has no latency bound"):
        main([str(unbounded), "--rate", "9/s"])
    empty = copy_run(run, "empty", status="interrupted")
    (empty / "trials.csv").unlink()
    with pytest.raises(BadInputError, match="recommends no configuration; run `tune` again"):
        main([str(empty), "--rate", "9/s"])


def test_a_half_written_run_is_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = Path(shutil.copytree(run, run.parent / "torn"))
    (torn / "run.json").write_text('{"options": {')
    words = ("--rate", "8000/s", "--results", str(run.parent.parent))
    for of in (["dlrm"], [str(torn), str(run)]):
        assert main([*of, *words]) == 0
        assert "torn/run.json: not the record of a run" in capsys.readouterr().err
    with pytest.raises(BadInputError, match="not the record of a run"):
        main([str(torn), *words])


# -- recordings -------------------------------------------------------------------------------------------------


def test_a_recording_is_planned_at_its_own_rate(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(1 / 10_000, 60_000))
    trace = write_timestamps(tmp_path / "trace.csv", times)
    answer = planned(capsys, run, "--trace", trace)["answers"][0]
    assert answer["rate_requests_per_sec"] == pytest.approx(10_000, rel=0.02)
    assert answer["replicas"] in (4, 5)  # as at random, which it is
    test = answer["autoscaler_test"]
    assert test["seconds"] <= 6
    assert test["most_replicas"] >= 3


def test_the_rate_of_replicas_does_not_depend_on_that_of_a_recording(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the times between the requests of the recording count."""
    gaps = np.random.default_rng(0).exponential(1, 20_000)
    slow, fast = (
        planned(
            capsys, run, "--gpus", "5", "--trace", write_timestamps(tmp_path / f"{rate}.csv", np.cumsum(gaps / rate))
        )
        for rate in (1_000, 10_000)
    )
    assert fast["answers"][0]["rate_infer_per_sec"] > 5 * 10_000
    assert slow["answers"][0]["rate_infer_per_sec"] == pytest.approx(
        fast["answers"][0]["rate_infer_per_sec"], rel=1e-3
    )


def test_a_run_whose_recording_is_missing_names_the_file(run: Path, tmp_path: Path) -> None:
    recording = tmp_path / "gone.csv"
    recorded = copy_run(run, "recorded", options={"load": "rate", "request_times": str(recording)})
    expected = f"^{recording}: no such file; put back the recording that {recorded} was measured with$"
    with pytest.raises(BadInputError, match=expected):
        main([str(recorded), "--rate", "9/s", "--traffic", "poisson"])


def test_a_run_with_a_load_shape_needs_the_traffic(run: Path) -> None:
    """Poisson traffic at the same mean rate would need fewer replicas."""
    times = {"distribution": "spike:4x:10%:1s", "period_seconds": 1.0, "recorded_requests": 0}
    shaped = copy_run(run, "shaped", problem={"request_times": times}, options={"load": "rate"})
    with pytest.raises(BadInputError, match=r"measured with the load spike:4x:10%:1s, .* --traffic poisson$"):
        main([str(shaped), "--rate", "9/s"])


def test_a_run_with_priorities_is_planned_with_a_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(copy_run(run, "ranked", problem={"priorities": "1*20|2*80"})), "--rate", "9/s"])
    assert "all requests in one queue, whatever their priority" in capsys.readouterr().err
    main([str(run), "--rate", "9/s"])
    assert "priority" not in capsys.readouterr().err


def test_a_run_of_several_models_is_planned_with_a_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = str(copy_run(run, "several", problem={"concurrent_models": "other=0.5"}))
    main([several, "--rate", "9/s"])
    printed = capsys.readouterr()
    assert "note: the rates are those of all models together" in printed.err
    assert "measured capacity of a replica, not a simulation" in printed.out
    with pytest.raises(
        BadInputError, match="need the simulator, which does not describe several models, or a model "
    ):
        main([several, "--rate", "9/s", "--traffic", "diurnal"])


def test_a_plan_without_a_permitted_error_rate_says_that_refusals_are_not_simulated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = {"dynamic_batching.default_queue_policy.max_queue_size": 4}
    main([str(copy_run(run, "limited", problem={"queue": queue})), "--rate", "9/s"])
    assert "the plan simulates no refused requests" in capsys.readouterr().err
    with pytest.raises(BadInputError, match=r"problem\.queue"):
        main([str(copy_run(run, "wrong", problem={"queue": {"max_batch_size": 4}})), "--rate", "9/s"])


def test_a_replica_is_compared_with_the_measured_throughput(run: Path) -> None:
    plan, text = plan_of(run, "--gpus", "4")
    shown = " ".join(text.split())
    [answer] = plan["answers"]
    share = answer["rate_infer_per_sec"] / 4 / 13443.8958
    assert share < 1
    assert (
        f"each replica gets {100 * share:.0f} % of the measured throughput. The measurement kept a fixed number"
        in shown
    )
