"""The recorder of exhaustive tables: the median of a cell, and the repetitions of configurations."""

from __future__ import annotations

from lib.recordings import RecordingPlan, median
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate


def test_a_fifth_of_the_configurations_is_repeated_on_two_servers_in_turn() -> None:
    plan = RecordingPlan(passes=1, window_ms=560, gated=False, repeats=2)
    candidates = [Candidate(8, True, delay) for delay in range(40)]
    first, later = (plan.trials("t", part, candidates) for part in range(plan.parts))
    assert sorted(trial.number for trial in first) == list(range(40))
    assert len(later) == 16
    for first_repeat, second_repeat in zip(later[::2], later[1::2], strict=True):
        assert first_repeat.candidate == second_repeat.candidate == candidates[first_repeat.number % 40]
        assert (first_repeat.number // 40, second_repeat.number // 40) == (1, 2)


def test_the_median_of_a_cell_sums_the_batch_statistics() -> None:
    result = [
        Measurement(throughput, latency_p95_ms=p95, requests=requests, batch_stats=text)
        for throughput, p95, requests, text in [
            (90.0, 5.0, 9, "4:2:50 8:1:30"),
            (110.0, None, 11, "8:3:100"),
            (100.0, 7.0, 12, "4:1:20"),
        ]
    ]
    middle = median(result)
    assert middle == Measurement(100.0, latency_p95_ms=6.0, requests=11, batch_stats="4:3:70 8:4:130", stable=True)
    assert median([*result, Measurement(100.0)]).batch_stats == ""
