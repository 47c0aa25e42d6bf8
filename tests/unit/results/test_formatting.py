"""Tests of numbers, sizes, bounds, gains and configurations as text."""

from __future__ import annotations

import pytest

from objectives.sla import Sla
from objectives.verdict import ConfidenceInterval, ThroughputRatio
from optimizer.core.trial import Candidate
from optimizer.results import formatting


class TestWords:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(12345.6, "12,346"), (771.4, "771"), (18.24, "18.2"), (0.5234, "0.523"), (None, "unknown")],
    )
    def test_number(self, value: float | None, text: str) -> None:
        assert formatting.number(value) == text

    def test_size_clock_and_exact(self) -> None:
        assert [formatting.size(value) for value in (999, 1500, 8.38e9, None)] == [
            "999 bytes",
            "1.50 kB",
            "8.38 GB",
            "unknown",
        ]
        assert [formatting.clock(value) for value in (-1, 65.4, 3723)] == ["0:00", "1:05", "1:02:03"]
        assert [formatting.exact(value) for value in (20.0, 0.5, 4e6)] == ["20", "0.5", "4,000,000"]

    def test_bounds(self) -> None:
        sla = Sla.from_bounds({"throughput": 4000, "memory": 2e9, "p99": 0.5})
        assert formatting.bounds(sla) == "throughput >= 4,000 infer/s and memory <= 2.00 GB and p99 <= 0.5 ms"

    def test_batcher_settings_need_dynamic_batching(self) -> None:
        assert formatting.triton_lines(Candidate(8)) == [
            "max_batch_size: 8",
            "# no dynamic_batching",
            "instance_group [ { count: 1 } ]",
        ]
        eager = Candidate(8, True, fields=(("optimization.eager_batching", True),))
        assert formatting.triton_lines(eager) == [
            "max_batch_size: 8",
            "dynamic_batching { }",
            "instance_group [ { count: 1 } ]",
            "optimization.eager_batching: true",
        ]

    @pytest.mark.parametrize(
        ("interval", "text"),
        [
            ((1.49, 1.77), "1.62x (1.49 to 1.77)"),
            ((0.98, 2.6), "no measurable gain"),
            ((1.0, 1.0), "no measurable gain"),
        ],
    )
    def test_gain(self, interval: tuple[float, float], text: str) -> None:
        assert formatting.gain(ThroughputRatio(1.62, ConfidenceInterval(*interval))) == text
        assert formatting.gain(None) == "not confirmed"
