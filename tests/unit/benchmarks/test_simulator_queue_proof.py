"""``benchmarks/simulator_queue_proof.py`` without a server: its client, its figures, its file and its comparison."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import simulator_proof
import simulator_queue_proof as proof
from simulator_queue_proof import HELD_OUT, QueueCell, Recording, cells

from objectives import batch_stats
from objectives.metrics import Measurement
from optimizer.measure.load_client.plan import SendRecord
from optimizer.simulator.scenario import MeasurementInterval, Overheads
from optimizer.simulator.simulate import simulate_many, trace
from tests.answering_server import AnsweringServer, Array
from tests.simulation import linear_times

MS = 1_000_000
ALL_CELLS = [*proof.calibration(proof.SECTIONS), *(cell for own in HELD_OUT.values() for cell in own)]


def test_refused_requests_are_no_failures_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers each third request after the warm-up with a refusal of either kind."""
    calls = itertools.count(-2)

    def model(feeds: dict[str, Array]) -> dict[str, Array]:
        number = next(calls)
        if number < 0 or number % 3 == 0:
            raise RuntimeError("[request id: <id_unknown>] Exceeds maximum queue size")
        if number % 3 == 1:
            raise RuntimeError("Request timeout expired")
        return {"y": feeds["x"]}

    monkeypatch.setattr(proof, "SECONDS", 0.3)
    (cell,) = cells(simulator_proof.batching(8, 0), constant=0.2, mix="1..3", shape_shares=(1.0, 1.0))
    server = AnsweringServer(model)
    with server.serving() as endpoint:
        seen = proof.send(endpoint, cell)
    total = len(server.request_shapes) - 2
    assert total == round(0.3 * cell.level)
    assert seen.rejected_share == pytest.approx(1 / 3, abs=0.05)
    assert seen.timed_out_share == pytest.approx(1 / 3, abs=0.05)
    assert seen.measurement.requests == round(total * (1 - seen.rejected_share - seen.timed_out_share))
    samples, shapes = cell.scenario(linear_times(1, 1, 8), Overheads()).mix()
    expected = list(zip(samples[:total].tolist(), (1 + shapes[:total]).tolist(), strict=True))
    assert sorted(server.request_shapes[2:]) == sorted(expected)  # the server's threads change their order


def test_figures_are_of_the_executed_requests() -> None:
    sent = np.arange(4) * 10 * MS
    record = SendRecord(sent, sent, sent + np.array([1, 20, 2, 30]) * MS, 60 * MS)
    seen = proof.recording(
        record, {0: "x Exceeds maximum queue size", 2: "Request timeout expired"}, np.array([1, 4])
    )
    assert (seen.rejected_share, seen.timed_out_share) == (0.25, 0.25)
    assert seen.measurement.latency_p95_ms == 30
    assert seen.measurement.requests == 2
    assert seen.measurement.throughput_infer_per_sec == pytest.approx(8 / 0.060)  # in 60 ms
    with pytest.raises(RuntimeError, match="a request failed: no memory"):
        proof.recording(record, {1: "no memory"}, np.array([1]))


def test_recordings_are_read_back_by_cell(tmp_path: Path) -> None:
    assert len({tuple(cell.key.values()) for cell in ALL_CELLS}) == len(ALL_CELLS)
    path, seen = tmp_path / "recordings.csv", {}
    for number, cell in enumerate(ALL_CELLS):
        figures = {name: float(number + 1) for name in simulator_proof.FIGURES if name != "batch_stats"}
        measurement = Measurement(**figures, batch_stats="1:2:3")  # type: ignore[arg-type]
        seen[cell] = [Recording(measurement, 0.25, number / 1000)]
        proof.append(path, 0, cell, seen[cell][0])
    assert proof.read(path, ALL_CELLS) == seen


def test_the_cells_of_each_section_have_its_feature() -> None:
    assert all(cell.mix and cell.fixed_shapes for cell in HELD_OUT["sizes"])
    assert all(not cell.fixed_shapes for cell in HELD_OUT["shapes"])
    policies = {name: [dict(cell.candidate.fields) for cell in HELD_OUT[name]] for name in ("rejects", "timeouts")}
    assert all(policy[proof.POLICY + "max_queue_size"] for policy in policies["rejects"])
    assert all(policy[proof.POLICY + "default_timeout_microseconds"] for policy in policies["timeouts"])
    assert all(cell.priorities for cell in HELD_OUT["priorities"])


def recorded(cell: QueueCell, overheads: Overheads) -> Recording:
    """Return the recording of a server whose batches take 6 ms and 1.1 ms for each sample."""
    job = cell.scenario(linear_times(6e-3, 1.1e-3, 32, 3), overheads)
    job = replace(job, missed_share=proof.MISSED_WHERE.get(cell.threads, job.missed_share))
    window = MeasurementInterval(0, 400 if cell.arrivals == "closed" else None)
    (result,), log = simulate_many([job], window=window), trace(job, window=window)
    done = ~np.isnan(log.end_s)
    by_size = {
        size: (log.end_s - log.start_s)[done & (log.samples == size)] for size in set(log.samples[done].tolist())
    }
    counted = [batch_stats.BatchStatistic(size, len(own), round(1e9 * own.sum())) for size, own in by_size.items()]
    measurement = Measurement(
        throughput_infer_per_sec=result.throughput_infer_per_s,
        latency_avg_ms=1e3 * result.latency_avg_s,
        latency_p50_ms=1e3 * result.latency_p50_s,
        latency_p95_ms=1e3 * result.latency_p95_s,
        queue_ms=1e3 * result.queue_avg_s,
        compute_input_ms=0.0,
        compute_infer_ms=7.1,
        compute_output_ms=0.0,
        mean_batch_size=result.mean_batch_size,
        batch_stats=batch_stats.to_text(counted),
        requests=result.requests,
    )
    return Recording(measurement, result.rejected_share, result.timed_out_share)


def test_each_section_of_a_simulated_server_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator_proof, "FIT_STARTS", 1)
    monkeypatch.setattr(simulator_proof, "SEEDS", 1)
    overheads = Overheads(1e-4, 1e-4, 5e-5, 0, 6e-5, 4e-5, 1e-4)
    seen = {cell: [recorded(cell, overheads)] for cell in ALL_CELLS}
    server = proof.calibrate(seen, proof.calibration(proof.SECTIONS), steps=1)
    server = simulator_proof.CalibratedServer(server.services, overheads, 1e-9, 1e-9)
    for name, wanted in HELD_OUT.items():
        compared = proof.compare(seen, server, wanted)
        assert simulator_proof.Summary.of(compared).throughput < 0.03, name
        assert simulator_proof.Summary.of(compared).p95 < 0.05, name
        assert max(abs(one.refused_error) for one in compared) < 3, name
        assert proof.table(compared).count("\n") == len(compared) + 1
    text = proof.report(seen, server, ["rejects", "shapes"], "Here.")
    assert "## Rejects: 8 cells" in text
    assert "max_queue_size=4" in text
    assert "## Sizes" not in text
    refused = {name: [seen[cell][0] for cell in HELD_OUT[name]] for name in ("rejects", "timeouts")}
    assert sum(one.rejected_share > 0.02 for one in refused["rejects"]) >= 5
    assert sum(one.timed_out_share > 0.02 for one in refused["timeouts"]) >= 5
