"""Tests of numbers, sizes, bounds, gains and configurations as text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from google.protobuf import text_format

from objectives.intervals import ConfidenceInterval, GainRatio, ObjectiveGain
from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import Candidate
from optimizer.results import configuration_text, formatting


class TestWords:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(12345.6, "12,346"), (771.4, "771"), (18.24, "18.2"), (0.5234, "0.523"), (None, "unknown")],
    )
    def test_a_number_has_three_digits_or_is_whole(self, value: float | None, text: str) -> None:
        assert formatting.number(value) == text

    def test_sizes_durations_and_exact_values_have_units_and_separators(self) -> None:
        assert [formatting.size(value) for value in (999, 1500, 8.38e9, None)] == [
            "999 bytes",
            "1.50 kB",
            "8.38 GB",
            "unknown",
        ]
        assert [formatting.clock(value) for value in (-1, 65.4, 3723)] == ["0:00", "1:05", "1:02:03"]
        assert [formatting.percent(0.846), formatting.percent(0.0453, 1)] == ["85 %", "4.5 %"]
        assert [formatting.signed_percent(value) for value in (0.18, -0.001)] == ["+18 %", "+0 %"]
        durations = [formatting.duration(value) for value in (0.2, 25, 180, 100.4, 7500)]
        assert durations == ["0 s", "25 s", "3 min", "1 min 40 s", "2 h 5 min"]
        assert [formatting.exact(value) for value in (20.0, 0.5, 4e6)] == ["20", "0.5", "4,000,000"]

    @pytest.mark.parametrize(
        ("samples", "is_mix", "text"),
        [
            (1, False, "1 sample each"),
            (1600.0, False, "1,600 samples each"),
            (10 / 3, False, "3.333 samples on average"),
            (4, True, "4 samples on average"),
        ],
    )
    def test_the_size_of_a_mix_is_an_average(self, samples: float, is_mix: bool, text: str) -> None:
        assert formatting.request_size(samples, is_mix=is_mix) == text

    def test_bounds_have_comparisons_and_units(self) -> None:
        sla = Sla.from_bounds({"throughput": 4000, "memory": 2e9, "p99": 0.5})
        assert formatting.bounds(sla) == "throughput >= 4,000 infer/s and memory <= 2.00 GB and p99 <= 0.5 ms"

    def test_batcher_settings_need_dynamic_batching(self) -> None:
        assert configuration_text.triton_lines(Candidate(8)) == [
            "max_batch_size: 8",
            "# no dynamic_batching",
            "instance_group [ { count: 1 } ]",
        ]
        eager = Candidate(8, True, fields=(("optimization.eager_batching", True),))
        assert configuration_text.triton_lines(eager) == [
            "max_batch_size: 8",
            "dynamic_batching { }",
            "instance_group [ { count: 1 } ]",
            "optimization { eager_batching: true }",
        ]

    def test_fields_are_lines_that_triton_reads(self) -> None:
        queue, policy = "dynamic_batching.default_queue_policy.", "dynamic_batching.priority_queue_policy.2."
        fields = (
            ("dynamic_batching.priority_levels", 2),
            (f"{policy}default_timeout_microseconds", 25000),
            (f"{queue}max_queue_size", 0),
            (f"{queue}timeout_action", "DELAY"),
            ("optimization.graph.level", 1),
            ("optimization.eager_batching", True),
        )
        lines = configuration_text.triton_lines(Candidate(8, True, 100, fields=fields))
        assert lines[1:] == [
            "dynamic_batching {",
            "  max_queue_delay_microseconds: 100",
            "  priority_levels: 2",
            "  default_queue_policy { timeout_action: DELAY }",
            "  priority_queue_policy { key: 2 value { default_timeout_microseconds: 25000 } }",
            "}",
            "instance_group [ { count: 1 } ]",
            "optimization { graph { level: 1 } eager_batching: true }",
        ]
        config = text_format.Parse("\n".join(lines), ModelConfig())
        assert config.dynamic_batching.priority_queue_policy[2].default_timeout_microseconds == 25000

    def test_a_string_of_a_long_change_is_not_broken(self) -> None:
        text = 'level "O3" for all of the layers'
        after = Candidate(8, fields=(("parameters.compiler_options.string_value", text),))
        (line,) = configuration_text.change_lines(Candidate(8), after)
        assert configuration_text.wrap_change(line, 50) == [
            '  + parameters { key: "compiler_options" value {',
            "  +     string_value:",
            r'  +     "level \"O3\" for all of the layers" } }',
        ]

    def test_a_queue_without_limits_is_no_change(self) -> None:
        fields = (
            ("dynamic_batching.default_queue_policy.max_queue_size", 0),
            ("dynamic_batching.default_queue_policy.timeout_action", "REJECT"),
            ("dynamic_batching.priority_queue_policy.2.default_timeout_microseconds", 0),
        )
        candidate = Candidate(8, True, fields=(*fields, ("dynamic_batching.priority_levels", 2)))
        change = configuration_text.change_lines(Candidate(8), replace(candidate, fields=fields))
        assert change == ["+ dynamic_batching { }"]
        assert configuration_text.configuration(candidate) == "batch 8 · 1 instance · delay 0 µs · priority_levels=2"

    @pytest.mark.parametrize(
        ("interval", "text"),
        [
            ((1.49, 1.77), "1.62x (1.49 to 1.77)"),
            ((0.98, 2.6), "none (1.0 to 2.6)"),
            ((1.0, 1.0), "none (1.00 to 1.00)"),
            ((1.12, 2.34), "1.6x (1.1 to 2.3)"),
        ],
    )
    def test_a_gain_has_its_interval_or_is_none(self, interval: tuple[float, float], text: str) -> None:
        ratio = GainRatio(1.62, ConfidenceInterval(*interval))
        assert formatting.gain(ObjectiveGain("throughput", 162.0, 100.0, ratio)) == text
        assert formatting.gain(None) == "not confirmed"

    @pytest.mark.parametrize(
        ("metric", "ratio", "text"),
        [
            ("latency-p95", GainRatio(4.3, ConfidenceInterval(3.8, 4.9)), "p95 4.3x lower (3.8 to 4.9)"),
            ("ttft-p95", GainRatio(0.5, ConfidenceInterval(0.4, 0.625)), "TTFT p95 2.0x higher (1.6 to 2.5)"),
            ("goodput", GainRatio(1.62, ConfidenceInterval(1.49, 1.77)), "goodput 1.62x higher (1.49 to 1.77)"),
            ("memory", GainRatio(1.1, ConfidenceInterval(0.9, 1.3)), "memory gain none (0.90 to 1.30)"),
            ("error-rate", None, "error-rate 0.00 % instead of 1.50 %"),
            ("score", None, "score 0.00 instead of 1.50"),
        ],
    )
    def test_the_gain_of_another_objective_names_it_and_its_direction(
        self, metric: str, ratio: GainRatio | None, text: str
    ) -> None:
        assert formatting.gain(ObjectiveGain(metric, 0.0, 1.5, ratio)) == text

    @pytest.mark.parametrize(
        ("value", "bounds", "text"),
        [
            (13788.0, (13410.0, 14180.0), "13,800 ± 400"),
            (15984.0, (14424.8, 17680.3), "16,000 ± 1,700"),  # two digits of an uncertainty below 3.55
            (14.658, (13.8, 16.04), "14.7 ± 1.4"),
            (0.5234, (0.519, 0.5278), "0.523 ± 0.004"),
            (9.96, (9.0, 10.3), "10.0 ± 1.0"),
            (13788.0, (13788.0, 13788.0), "13,800"),
            (5.028, (4.12, 13.3), "5.0 (4.1 to 13)"),
            (102.0, (15.0, 199.0), "100 (20 to 200)"),  # not ± 100
            (4.4, (0.8, 9.2), "4 (1 to 9)"),  # not ± 5
            (102.0, (60.0, 150.0), "100 ± 50"),
            (13788.0, (13900.0, 14200.0), "13,800 ± 400"),
            (13788.0, (13410.0, math.inf), "13,800 (at least 13,400)"),
            (13788.0, (-math.inf, math.inf), "13,800"),
            (13788.0, None, "13,800"),
            (0.0, None, "0.00"),
            (math.nan, (1.0, 2.0), "unknown"),
            (None, None, "unknown"),
        ],
    )
    def test_a_value_has_the_digits_of_its_interval(
        self, value: float | None, bounds: tuple[float, float] | None, text: str
    ) -> None:
        interval = ConfidenceInterval(*bounds) if bounds else None
        assert formatting.estimate(value, interval) == text
        assert formatting.estimate(value, interval, "ms") == (text if text == "unknown" else f"{text} ms")

    def test_both_ends_of_an_interval_have_the_same_digits(self) -> None:
        throughput = METRICS["throughput"]
        assert formatting.interval(throughput, ConfidenceInterval(14424.8, 17680.3)) == "14,400 to 17,700 infer/s"
        assert formatting.interval(throughput, ConfidenceInterval(-5.0, 17680.3)) == "0 to 18,000 infer/s"
        assert formatting.interval(throughput, ConfidenceInterval(2.7, 15.0)) == "2.7 to 15 infer/s"
        assert formatting.interval(throughput, ConfidenceInterval(14424.8, math.inf)) == "at least 14,400 infer/s"

    def test_the_change_of_a_configuration_has_no_other_lines(self) -> None:
        before, after = Candidate(8), Candidate(8, True, 100)
        added = "+ dynamic_batching { max_queue_delay_microseconds: 100 }"
        assert configuration_text.change_lines(before, after) == [added]
        assert configuration_text.change_lines(after, before) == [added.replace("+", "-", 1)]
        assert configuration_text.change_lines(after, after) == []
        assert configuration_text.change_lines(after, replace(after, instance_count=2)) == [
            "- instance_group [ { count: 1 } ]",
            "+ instance_group [ { count: 2 } ]",
        ]

    def test_the_lines_of_a_changed_field_are_together(self) -> None:
        threads = "parameters.intra_op_thread_count.string_value"
        before = Candidate(64, True, 500, (64,), 1, ((threads, 2),))
        after = Candidate(64, True, 100, (32,), 2, ((threads, 1), ("server.rate-limit", "off")))
        parameter = 'parameters { key: "intra_op_thread_count" value { string_value: '
        pairs = [
            ("  max_queue_delay_microseconds: 500", "  max_queue_delay_microseconds: 100"),
            ("  preferred_batch_size: [ 64 ]", "  preferred_batch_size: [ 32 ]"),
            ("instance_group [ { count: 1 } ]", "instance_group [ { count: 2 } ]"),
            (f'{parameter}"2" }} }}', f'{parameter}"1" }} }}'),
        ]
        lines = [line for old, new in pairs for line in (f"- {old}", f"+ {new}")]
        assert configuration_text.change_lines(before, after) == [*lines, "+ # server_options: --rate-limit=off"]
        assert configuration_text.change_lines(before, Candidate(64, True, 500, (), 1, ((threads, 2),))) == [
            "- dynamic_batching {",
            "-   max_queue_delay_microseconds: 500",
            "-   preferred_batch_size: [ 64 ]",
            "- }",
            "+ dynamic_batching { max_queue_delay_microseconds: 500 }",
        ]
