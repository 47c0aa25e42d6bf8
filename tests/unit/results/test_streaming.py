"""The summary, the report and the documents of a run whose model streams its responses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.metrics import METRICS
from objectives.sla import Sla
from objectives.verdict import estimand
from optimizer.cli import compare, emit
from optimizer.config.problem import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint
from optimizer.results import data_frames, formatting, result_document, summary
from optimizer.results.finished_run import read_run
from optimizer.results.recommendation import front_metrics
from optimizer.results.report import server_plots, tables, writer
from optimizer.results.report.figure_style import report_style
from optimizer.study.batch.batch_runner import describe_entry
from optimizer.study.batch.record import EntryRecord
from optimizer.study.sweep_output import print_sweep
from optimizer.study.sweep_plan import SweepCell
from tests import example_outcomes, streaming_run
from tests.run_folders import change_info, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return streaming_run.write_run(tmp_path_factory.mktemp("streaming"))


def printed(**more: Any) -> str:
    return example_outcomes.printed_outcome(
        streaming_run.outcome(), streaming_run.problem(), baseline=streaming_run.BASELINE, **more
    )


@pytest.mark.parametrize(
    ("metric", "short", "label"),
    [
        ("latency-p95", "p95", "p95 latency"),
        ("ttft-p95", "TTFT p95", "TTFT p95"),
        ("itl-avg", "inter-token avg", "inter-token avg"),
    ],
)
def test_times_have_names_for_people(metric: str, short: str, label: str) -> None:
    assert formatting.short_metric(metric) == short
    assert formatting.latency_label(metric) == label


def test_the_answer_has_the_output_tokens_and_each_bounded_time() -> None:
    answer = summary.answer(streaming_run.outcome(), streaming_run.problem())
    assert re.fullmatch(
        r"tinygpt: PASS at [\d.]+ ± [\d.]+ infer/s, [\d.]+ ± [\d.]+ tokens/s, TTFT p95 [\d.]+ ± [\d.]+ ms, "
        r"inter-token p95 [\d.]+ ± [\d.]+ ms \(SLA: TTFT p95 <= 200 ms and inter-token p95 <= 30 ms\)",
        answer,
    )


def test_the_comparisons_have_a_row_for_each_metric_and_fit_80_columns() -> None:
    lines = printed().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("configuration"))
    assert [line[:19].strip() for line in lines[first : first + 7]] == [
        *("configuration", "infer/s", "tokens/s", "TTFT p95 ms", "inter-token p95 ms", "load", "gain")
    ]
    assert max(map(len, lines)) <= 80


def test_the_verbose_output_has_all_times_and_the_estimand() -> None:
    text = printed(verbose=True)
    for label in ("output  ", "TTFT  ", "inter-token  "):
        assert f"\n{label}" in text
    assert "Pareto front: throughput against TTFT p95" in text
    assert "whose time to first response is over its bound and of those" in " ".join(text.split())


def test_the_estimand_names_the_bounded_time() -> None:
    assert estimand(Sla.from_bounds({"p95": 20.0}), 0.0) == estimand(Sla(), 0.0)
    for metric, subject in {"ttft-p95": "time to first response", "itl-p99": "mean inter-token latency"}.items():
        assert f"requests whose {subject} is over its bound on" in estimand(Sla.from_bounds({metric: 20.0}), 0.0)


def test_the_cause_of_an_undecided_run_names_the_time() -> None:
    outcome = streaming_run.outcome()
    assert outcome.confirmed is not None
    share = replace(outcome.confirmed.judged.slow_share, low=0.04, high=0.06)
    judged = replace(outcome.confirmed.judged, verdict=type(outcome.verdict).UNDECIDED, slow_share=share)
    again = tuple(
        replace(entry, judged=judged) if entry is outcome.confirmed else entry for entry in outcome.confirmed_loads
    )
    cause = summary.undecided_cause(replace(outcome, confirmed_loads=again))
    assert "4.0 to 6.0 % of the requests have a time to first response above 200 ms" in cause


def test_the_front_is_that_of_the_goals() -> None:
    by_requests, by_tokens = streaming_run.outcome(), streaming_run.outcome(objective="output-throughput")
    assert [metric.name for metric in by_requests.front.metrics] == ["throughput", "ttft-p95"]
    assert [metric.name for metric in by_tokens.front.metrics] == ["output-throughput", "ttft-p95"]
    values = [METRICS["ttft-p95"].value(point.measurement) or 0.0 for point in by_tokens.front.points]
    assert values == sorted(values, reverse=True)
    assert [metric.name for metric in example_outcomes.outcome().front.metrics] == ["throughput", "latency-p95"]
    in_time = replace(example_outcomes.problem(), objectives=(METRICS["goodput"],))
    assert [metric.name for metric in front_metrics(in_time)] == ["goodput", "latency-p95"]


def test_the_page_has_the_times_over_the_load_and_the_timeline(folder: Path, tmp_path: Path) -> None:
    writer.write([read_run(folder)], ["html", "markdown", "csv", "svg"], tmp_path)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for title in (
        "Throughput against TTFT p95",
        "Times of a streamed request against load",
        "Timeline of one request",
    ):
        assert f">{title}</h2>" in page
    assert "simulation of the dynamic batcher" not in page
    assert "| configuration | load | infer/s | tokens/s | p95 ms | TTFT p50 ms | TTFT p95 ms |" in text
    assert {"response-times.svg", "timeline.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_the_timeline_is_that_of_the_median_window_on_fresh_servers(folder: Path) -> None:
    run = read_run(folder)
    assert run.outcome is not None
    shown = tables.timeline(run)
    assert shown is not None
    point, times_ms = shown
    assert point is run.outcome.recommended
    texts = {window.measurement.response_times_ms for trial in run.trials for window in trial.confirmations}
    assert " ".join(f"{ms:.3f}".rstrip("0").rstrip(".") for ms in times_ms) in texts
    with report_style():
        drawn = server_plots.timeline(run)
    assert drawn is not None
    assert len(drawn.labels["responses"]) == len(times_ms) == len(drawn.labels["gaps"]) + 1


def test_models_that_do_not_stream_have_no_such_plots(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert server_plots.response_times(run) is None
    assert server_plots.timeline(run) is None
    assert tables.streaming(run).rows == []


def test_documents_and_frames_have_the_streamed_metrics(folder: Path) -> None:
    run = read_run(folder)
    assert run.outcome is not None
    document = result_document.document(run.outcome, wall_seconds=1.0, results_dir="x")
    json.dumps(document, allow_nan=False)
    recommended, confirmation = document["recommended"], document["confirmation"]
    assert isinstance(recommended, dict)
    assert isinstance(confirmation, dict)
    assert recommended["output_tokens_per_sec"] > recommended["throughput_infer_per_sec"]
    assert recommended["ttft_p95_ms"] < recommended["latency_p95_ms"]
    assert set(confirmation["streaming"]) == {"output-throughput", "itl-p95"}
    assert confirmation["estimand"] == estimand(run.problem.sla, 0.0)
    frame = data_frames.measurements([run])
    assert frame["ttft_p95_ms"].notna().all()
    assert str(frame["response_times_ms"].dtype) == "string"
    assert not any("ttft" in name for name in result_document.entry(example_outcomes.outcome().points[0]))


def test_a_finished_run_has_the_kind_of_its_model(tmp_path: Path) -> None:
    folder = streaming_run.write_run(tmp_path)
    problem = read_run(folder).problem
    assert problem.kind is ModelKind.STREAMING
    assert problem.space.is_streaming
    assert not problem.is_simulated
    assert problem.tokens is not None
    assert problem.tokens.prompt.fixed == 64
    output = problem.tokens.output
    assert (output.smallest, output.mean, output.largest) == (16, 39.5, 63)
    change_info(folder, "problem", kind="dreaming")
    with pytest.raises(BadInputError, match="kind 'dreaming' is not one of batched, streaming, stateful"):
        read_run(folder)


def test_a_batch_has_the_interval_of_the_output_tokens(tmp_path: Path) -> None:
    run = read_run(streaming_run.write_run(tmp_path, "output-throughput"))
    entry = describe_entry(EntryRecord("tinygpt", "", "", "", "x"), run)
    assert entry.recommended is not None
    assert entry.recommended.metric == "output-throughput"
    assert entry.recommended.low is not None
    assert entry.recommended.high is not None
    assert entry.recommended.low < entry.recommended.value < entry.recommended.high


def test_a_sweep_shows_tokens_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {load: streaming_run.measurement(streaming_run.BEST, load) for load in (1, 8)}
    cells = [
        SweepCell(
            0, streaming_run.BEST, LoadPoint(1, load), replace(measurement, queue_ms=0.5, compute_infer_ms=3.5), 1
        )
        for load, measurement in measured.items()
    ]
    facts = {"model": {"name": "tinygpt"}, "hardware": "2 CPUs", "notes": [], "status": "done", "results_dir": "x"}
    print_sweep(Console(width=80), cells, facts)
    text = capsys.readouterr().out
    assert re.search(r"Concurrency +tokens/s +p50 ms +p95 ms +p99 ms +p50 ms +p95 ms +p99 ms", text)
    assert "…" not in text
    assert "Compute" not in text, "the stages end before the responses"


def test_an_autoscaler_counts_the_requests_of_a_model_that_streams(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--format", "kubernetes", "--image", "i:1", "--model-repository", "pvc://models"]
    assert emit.main([str(folder), *words]) == 0
    text = capsys.readouterr().out
    assert "nv_inference_request_success" in text
    assert "nv_inference_request_duration_us" not in text
    target = re.search(r'averageValue: "(\d+)m"', text)
    run = read_run(folder)
    assert run.outcome is not None
    assert run.outcome.recommended is not None
    assert target is not None
    served = run.outcome.recommended.throughput_infer_per_sec
    assert int(target[1]) == pytest.approx(700 * served, abs=1)
    assert emit.main([str(folder)]) == 0
    assert re.search(r"model_transaction_policy \{\s+decoupled: true", capsys.readouterr().out)


def test_a_comparison_has_the_output_and_each_bounded_time(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(folder), str(streaming_run.write_run(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\noutput +[\d.]+ ± [\d.]+ tokens/s ", text)
    assert re.search(r"\nother bounds +inter-token p95 [\d.]+ ± [\d.]+ ms", text)


def test_the_example_of_the_page_is_the_output() -> None:
    page = Path("docs/reading-results.md").read_text()
    example = page.partition("## A model that streams")[2].partition("```text\n")[2].partition("```")[0]
    assert example
    assert [block for block in example.split("\n\n") if block not in printed()] == []
